import pytest

from ascendrun.ascend import compatibility, install
from ascendrun.ascend.compatibility import COMPATIBLE, INCOMPATIBLE, UNKNOWN, Versions, compare_versions
from ascendrun.ascend.install import is_within, parse_version, release_of
from ascendrun.ascend.kinds import FILES
from tests.lib.ascend_recordings import FOLDER, read

ASCENDING = [
    "6.3.RC3", "6.3.RC3.1", "7.0.0", "8.0.RC1", "8.0.RC2.alpha002", "8.0.RC2", "8.0.RC3", "8.0.0", "8.1.RC1",
    "8.3.RC1", "8.5.0", "9.1.0", "23.0.rc3", "23.0.0", "23.0.7", "24.1.rc2", "24.1.0", "25.0.rc1", "25.0.rc1.1",
]  # fmt: skip


def test_release_candidates_come_before_their_release():
    assert all(parse_version(one) < parse_version(other) for one, other in zip(ASCENDING, ASCENDING[1:]))


def test_post_releases_count_as_numbers_and_come_after_the_release():
    posts = ["2.1.0rc1", "2.1.0", "2.1.0.post3", "2.1.0.post13"]
    assert all(parse_version(one) < parse_version(other) for one, other in zip(posts, posts[1:]))


@pytest.mark.parametrize("text", ["7.0.T10", "", "xxx", "2.1.0.post8.dev2024x", "1." * 20 + "1", "9" * 5000])
def test_a_version_of_unknown_order_is_none(text):
    assert parse_version(text) is None


def test_local_parts_and_trailing_zeros_make_no_difference():
    assert parse_version("2.6.0+cpu") == parse_version("2.6") and release_of("2.1.0.post8.dev2024") == "2.1.0"


def test_an_interval_that_ends_with_a_dot_can_say_yes_but_never_no():
    assert is_within("23.0.0", "23.0.0", "23.0.0.") is True
    assert is_within("23.0.7", "23.0.0", "23.0.0.") is None


def recorded(kind, name):
    return FILES[kind](read(FOLDER / kind / f"{name}.txt"))


def test_driver_and_firmware_of_one_release_fit_and_others_do_not():
    driver, firmware = recorded("driver", "24.1.0"), recorded("firmware", "7.5.0")
    assert install.driver_takes_firmware(driver, firmware) is True
    newer = install.parse_firmware("Version=7.7.0.1.1\ncompatible_version_drv=[25.0.0,25.9.9]\n")
    assert install.driver_takes_firmware(driver, newer) is False
    assert install.driver_takes_firmware(driver, install.parse_firmware("")) is None


def test_a_mixed_install_shows_more_than_one_cann():
    assert recorded("components", "mixed").cann_versions == ("8.0.0", "8.1.RC1")


def outcomes(**versions):
    return {fact.pair: fact.outcome for fact in compare_versions(Versions(**versions))}


def test_a_set_made_for_each_other_fits():
    fits = outcomes(torch_npu="2.6.0", torch="2.6.0+cpu", cann="8.2.RC1", python="3.10.12", arch="x86_64")
    assert fits == dict.fromkeys(("torch_npu/torch", "torch_npu/cann", "torch_npu/python", "torch/build"), COMPATIBLE)


def test_another_torch_an_older_cann_and_another_python_do_not_fit():
    found = outcomes(torch_npu="2.6.0", torch="2.5.1", cann="8.1.RC1", python="3.13.0")
    assert [found[pair] for pair in ("torch_npu/torch", "torch_npu/cann", "torch_npu/python")] == [INCOMPATIBLE] * 3


def test_a_cuda_build_of_torch_does_not_fit():
    assert outcomes(torch="2.6.0+cu124")["torch/build"] == INCOMPATIBLE


@pytest.mark.parametrize(
    ("torch_npu", "cann"), [("2.6.0", "8.3.RC1"), ("2.6.0", "7.0.T10"), ("2.14.0", "9.1.0"), ("2.14.0", "8.0.0")]
)
def test_what_no_source_says_is_unknown_not_wrong(torch_npu, cann):
    assert outcomes(torch_npu=torch_npu, cann=cann)["torch_npu/cann"] == UNKNOWN


def test_a_build_of_ones_own_is_unknown_but_still_needs_its_torch():
    found = outcomes(torch_npu="2.1.0.post8.dev20241009", torch="1.11.0", cann="8.0.RC3")
    assert (found["torch_npu"], found["torch_npu/torch"], "torch_npu/cann" in found) == (UNKNOWN, INCOMPATIBLE, False)


def test_a_misfit_names_the_release_that_would_fit():
    facts = compare_versions(Versions(torch_npu="2.6.0.post3", torch="2.6.0", cann="8.2.RC1"))
    hints = [fact.hint.values for fact in facts if fact.outcome == INCOMPATIBLE]
    assert hints == [{"required": "8.3.RC1", "other": "2.6.0", "cann": "8.2.RC1"}]


def test_without_versions_there_is_no_fact():
    assert compare_versions(Versions()) == ()


def test_every_incompatible_pair_has_a_message_and_a_hint():
    for release in compatibility.releases_for():
        for torch, cann, python in (("1.0.0", "1.0.0", "2.7.1"), ("9.9.9", "99.0.0", "3.99.0")):
            facts = compare_versions(Versions(release.torch_npu, torch, cann, python))
            assert all(fact.message and fact.hint for fact in facts if fact.outcome == INCOMPATIBLE)


def test_every_release_begins_with_its_torch_and_python_lists_are_versions():
    releases = compatibility.releases_for()
    assert len(releases) > 70
    for one in releases:
        assert release_of(one.torch_npu) == one.torch
        assert all(parse_version(python) for python in (*(one.python or ()), *(one.wheels or ())))


@pytest.mark.parametrize(
    ("driver", "cann", "expected"),
    [("24.1.0", "8.5.0", True), ("25.0.RC1", "8.1.RC1", False), ("25.5.0", None, None), (None, "8.0.0", True)],
)
def test_a_feature_asks_for_a_driver_and_a_cann(driver, cann, expected):
    feature = "PYTORCH_NPU_ALLOC_CONF=page_size:1g"
    assert compatibility.too_old_for(feature, driver=driver, cann=cann) is expected
