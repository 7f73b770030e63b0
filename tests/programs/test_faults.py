"""Faults of the machine and of what was given: one message with a way out, no trace of the program's own lines."""

import errno
import io

import pytest
import torch

from ascendrun.programs.devices.accelerator import NoDeviceError, open_accelerator
from ascendrun.programs.errors import InvalidDataError, in_words
from ascendrun.programs.trajectory.data import load_data
from tests.programs.conftest import TINY, options_of


class FullDisk(io.RawIOBase):
    def writable(self) -> bool:
        return True

    def write(self, piece: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", "/data/model.pt")


def test_a_full_disk_is_told_also_where_torch_hides_it():
    with pytest.raises(Exception) as caught:
        torch.save({"weights": torch.ones(1000)}, FullDisk())
    told = "/data/model.pt: No space left on device\nhint: free space there, or choose another directory"
    assert in_words(caught.value) == told
    assert in_words(ValueError("ours")) is None and in_words(KeyError("x")) is None


@pytest.mark.parametrize(
    "program, options",
    [
        ("trajectory", ["--mode=train", *TINY]),
        ("trajectory", ["--mode=pretrain", *TINY]),
        ("qwen_lora", ["--data_path=generated", "--synthetic_samples=20", "--num_train_epochs=1"]),
    ],
)
def test_an_output_that_cannot_be_written_is_told_before_a_step_is_taken(launch, tmp_path, program, options):
    (tmp_path / "file").write_text("")
    run = launch(program, [*options, f"--output_dir={tmp_path}/file/out"])
    assert run.wait() == [1]
    assert "file/out" in run.text() and "expected a directory, found a file" in run.text()
    assert "Traceback" not in run.text() and "step 1/" not in run.text()


def test_a_program_without_data_does_not_make_its_own(launch):
    with pytest.raises(InvalidDataError, match="--data_path=generated"):
        load_data(options_of("trajectory"))
    assert load_data(options_of("trajectory", "--data_path=generated"))
    run = launch("qwen_lora", ["--mode=train"])
    assert run.wait() == [1]
    assert "args.data_path is required" in run.text() and "Traceback" not in run.text()


def test_a_device_that_is_not_there_is_told_without_a_trace(start):
    run = start("--mode=train", "--device=cuda", *TINY)
    assert run.wait() == [1]
    assert "requires device cuda:0" in run.text() and "Traceback" not in run.text()
    with pytest.raises(NoDeviceError, match="torch_npu"):
        open_accelerator("npu", 0)
