"""A trace in Slurm: what is submitted, and what is read from the record of Slurm's ended jobs."""

import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(CHECKOUT))
from benchmarks import slurm_trace as bench  # noqa: E402  (the checkout's root is on no path in pytest's import mode)
from benchmarks.fair_share import Work  # noqa: E402  # as above

SPEED = 864.0
"""The first job may start a day of Slurm's clock after the start of the run."""
WORK = [Work("j-00000", "u1", 0.0, 16, 600.0, 900.0), Work("j-00001", "u2", 60.0, 4, 300.0, 3600.0)]
ENDED = (
    "JobId={id} UserId=u1(60001) GroupId=root(0) Name={name} JobState={state} Partition=all TimeLimit=15 "
    "StartTime=2026-01-02T{start} EndTime=2026-01-02T{end} NodeList=h[00-01] NodeCnt=2 ProcCnt=16 WorkDir=/ "
    "SubmitTime={submit} EligibleTime=2026-01-02T00:00:00 DerivedExitCode=0:0 ExitCode=0:0 \n"
)


def ended(number: int, start: str, end: str, state: str = "COMPLETED", submit: str = "2026-01-01T01:00:00") -> str:
    return ENDED.format(id=number + 1, name=WORK[number].name, state=state, start=start, end=end, submit=submit)


def test_slurm_gets_the_jobs_with_the_limits_and_times_of_the_trace(tmp_path: Path) -> None:
    bench.prepare(tmp_path, Path("/run/trace"), WORK, "fifo", SPEED)
    first, second = (tmp_path / "submit").read_text().splitlines()
    assert "--uid=u1 --job-name=j-00000 --nodes=2 --ntasks-per-node=8 --priority=1000000 --time=15" in first
    assert first.endswith("--begin=2026-01-02T00:00:00 --chdir=/ --output=/dev/null /run/trace/job 0.694")
    assert "--nodes=1 --ntasks-per-node=4 --priority=999999 --time=60 --begin=2026-01-02T00:01:00" in second


def test_starts_and_ends_count_from_the_first_submission() -> None:
    text = ended(1, "00:05:00", "00:11:00") + ended(0, "00:00:30", "00:12:00")
    assert bench.read_ended(text, WORK, SPEED) == {"j-00000": (30.0, 720.0), "j-00001": (300.0, 660.0)}


@pytest.mark.parametrize("fault", [{"state": "NODE_FAIL"}, {"submit": "2026-01-02T00:00:10"}])
def test_a_run_with_a_failed_or_late_job_is_not_a_result(fault: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="expected COMPLETED"):
        bench.read_ended(ended(0, "00:00:30", "00:12:00", **fault), WORK[:1], SPEED)
