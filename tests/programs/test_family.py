"""On what kind of device a training or an answer is computed when nobody says it."""

from __future__ import annotations

from ascendrun.programs.devices.accelerator import choose_family


def test_a_machine_with_npus_uses_them_though_no_launcher_tells_of_them(tmp_path):
    (tmp_path / "davinci_manager").touch()
    assert choose_family("auto", {}, tmp_path) != "npu"  # the driver alone is no device
    (tmp_path / "davinci3").touch()
    assert choose_family("auto", {}, tmp_path) == "npu"


def test_what_is_asked_for_goes_before_what_the_launcher_says_and_that_before_what_is_there(tmp_path):
    (tmp_path / "davinci0").touch()
    assert choose_family("auto", {"ASCENDRUN_DEVICE_TYPE": "cpu"}, tmp_path) == "cpu"
    assert choose_family("cuda", {"ASCENDRUN_DEVICE_TYPE": "cpu"}, tmp_path) == "cuda"
