"""The simulation of a recorded trace: the real scheduler does not do worse than a plain EASY without hosts."""

import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(CHECKOUT))
from benchmarks import fair_share as bench  # noqa: E402  (the checkout's root is on no path in pytest's import mode)


def trace(folder: Path) -> Path:
    """Jobs of three users, of whom one submits most, in the format of the Parallel Workloads Archive."""
    lines = ["; MaxProcs: 128"]
    for number in range(60):
        user, size, real_s = (1, 2, 3, 1)[number % 4], (128, 32, 64, 16, 1)[number % 5], 300 + 700 * (number % 3)
        lines.append(f"{number} {number * 200} -1 {real_s} {size} -1 -1 {size} {2 * real_s} -1 1 {user} 1 1 1 1 -1 -1")
    path = folder / "small.swf"
    path.write_text("\n".join([*lines, "60 12000 -1 10 1 -1 -1 1 -1 -1 1 1 1 1 1 1 -1 -1"]))
    return path


def test_every_job_of_a_trace_starts_and_shares_are_kept(tmp_path: Path) -> None:
    work = bench.read_trace(trace(tmp_path), jobs=100, users=3, load=1.5)
    assert len(work) == 60, "not the one of ten seconds"
    easy, ours, fair = (bench.measure(name, work) for name in ("easy", "ascendrun", "fair share"))
    assert {easy["jobs"], ours["jobs"], fair["jobs"]} == {60}
    assert ours["utilisation"] >= 0.95 * easy["utilisation"]
    assert fair["share_error"] <= easy["share_error"]


def test_the_users_are_those_of_the_jobs_that_are_taken(tmp_path: Path) -> None:
    path = trace(tmp_path)
    late = [f"{number} {20_000 + number} -1 9000 128 -1 -1 128 -1 -1 1 9 1 1 1 1 -1 -1" for number in range(61, 90)]
    path.write_text("\n".join([path.read_text(), *late]))
    work = bench.read_trace(path, jobs=60, users=3, load=1.5)
    assert {one.user for one in work} == {"u1", "u2", "u3"}, "not the one who uses most later"
    assert len(work) == 60


def test_the_order_alone_has_no_error_where_all_is_submitted_at_once() -> None:
    work = [bench.Work(f"j-{n}", "ab"[n % 2], 0.0, 64, 6000.0 * (1 + n % 2), 9000.0) for n in range(40)]
    work.append(bench.Work("j-last", "a", 36_000.0, 8, 60.0, 900.0))
    demand = bench.demand_by_user(work)
    assert bench.order_error(work, 0.5 * sum(demand.values()), demand) < 0.02
    assert bench.share_error({"a": 60.0, "b": 40.0}, {"a": 80.0, "b": 80.0}) == 0.1


def test_a_user_is_entitled_to_an_equal_part_or_to_what_he_asks_for() -> None:
    assert bench.entitled({"a": 10.0, "b": 60.0, "c": 80.0}, 100.0) == {"a": 10.0, "b": 45.0, "c": 45.0}
