"""The same diagnosis from the head's own files: what is in the spool is all that there is to know."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from corpus import case_files, load
from spooling import spool_case

from ascendrun.health.diagnosis import diagnose

NEEDS_MORE = frozenset(
    {  # samples, device tools, device addresses and guesses at clocks are not spooled here
        "killed_and_the_kernel_log_is_closed_but_memory_was_gone",
        "an_alarm_on_the_device_after_a_hang",
        "a_port_is_down_after_links_timed_out",
        "an_alarm_on_a_device_that_nobody_uses",
        "roce_gives_up_between_two",
        "a_network_port_of_a_device_went_down",
        "a_memory_alarm_on_a_device_and_everybody_times_out",
        "others_stumble_over_what_the_root_did_not_send",
    }
)
CASES = [path for path in case_files() if path.stem not in NEEDS_MORE]


@pytest.mark.parametrize("path", CASES[::6], ids=lambda path: path.stem)
def test_what_the_spool_holds_leads_to_the_same_diagnosis(path: Path, tmp_path: Path) -> None:
    from ascendrun.query.explain import explain_job

    case = load(path)
    expected = diagnose(case.evidence)
    job = spool_case(case, tmp_path)
    found = explain_job(tmp_path, job, now_s=case.evidence.now_s).diagnosis
    assert (found.code, found.ranks, found.hosts) == (expected.code, expected.ranks, expected.hosts), found.message
    assert found.confidence is expected.confidence, found.caveats
    for proof in found.evidence:
        if proof.file is not None and proof.offset is not None and ".error." not in proof.file:
            data = (tmp_path / "jobs" / job / "attempt-1" / proof.file).read_bytes()
            line = data[proof.offset :].decode().lstrip().partition("\n")[0]
            assert "\x1b" in line or proof.text[:40] in line, proof
