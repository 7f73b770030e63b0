"""Each benchmark at its smallest, with the peers that are installed: it runs, and its page says what its rows say."""

import csv
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lib.vcluster.requirements import NotSupportedError, require_all

CHECKOUT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(CHECKOUT))
from benchmarks import doctor, files, goals, jobs, logs, ramdisk, trial  # noqa: E402  (the checkout's root is on no path in pytest's import mode)
from benchmarks import results as pages  # noqa: E402  # as above
from benchmarks.bed import Bed  # noqa: E402  # as above

DEADLINE_S = 240.0


@pytest.fixture
def needs_cluster() -> None:
    """In CI a machine that cannot carry a cluster is a failure; elsewhere the test says why it is skipped."""
    try:
        require_all()
    except NotSupportedError as refused:
        reason = f"{refused.message}; {refused.hint}"
        if os.environ.get("CI") == "true":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)


def run(benchmark: str, *arguments: str, results: Path, sheet: str = "", repeat: bool = True) -> list[dict[str, str]]:
    """The rows it wrote; a failed run fails the test with its own words. `sheet`: its name, as the benchmark by
    default."""
    once = ("--repeat", "1") if repeat else ()
    argv = [sys.executable, "-m", f"benchmarks.{benchmark}", *once, "--results", str(results), *arguments]
    done = subprocess.run(argv, cwd=CHECKOUT, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    with open(results / f"{sheet or benchmark}.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_exec_runs_on_every_host_with_every_tool_and_names_no_place_of_this_machine(
    needs_cluster: None, tmp_path: Path
) -> None:
    rows = run("exec", "--hosts", "1,2", results=tmp_path)
    failed = [row for row in rows if row["status"] != "0"]
    assert not failed
    expected = {"ascendrun, first time", "ascendrun, cold", "ascendrun, warm", "ssh, curve25519"}
    expected |= {name for name in ("pdsh",) if shutil.which(name)}
    assert expected <= {row["what"] for row in rows}
    page = (tmp_path / "exec.md").read_text(encoding="utf-8")
    assert "## 2 hosts" in page and "| ascendrun, cold |" in page
    assert str(CHECKOUT) not in page and os.uname().nodename not in page


@pytest.mark.slow
@pytest.mark.thorough
def test_jobs_sees_our_ranks_come_and_everything_go(needs_cluster: None, tmp_path: Path) -> None:
    rows = [row for row in run("jobs", "--patience", "5", results=tmp_path) if row["what"].startswith("ascendrun")]
    assert {row["event"] for row in rows} == set(jobs.EVENTS)
    assert [row for row in rows if not row["seen_s"] or row["left"] != "0" or not row["gone_s"]] == []
    assert "| ascendrun |" in (tmp_path / "jobs.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_doctor_examines_every_host_and_its_cost_is_shown(needs_cluster: None, tmp_path: Path) -> None:
    rows = run("doctor", "--hosts", "1,2", results=tmp_path)
    assert {row["what"] for row in rows} == set(doctor.ORDER) and {row["status"] for row in rows} <= {"0", "3"}
    assert "| 2 | doctor, cold |" in (tmp_path / "doctor.md").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("disk", ["", "--zram"])
def test_files_arrive_on_every_host_with_every_tool(needs_cluster: None, tmp_path: Path, disk: str) -> None:
    if disk and not ramdisk.CONTROL.exists():
        pytest.skip("Linux has no zram here")
    size = ("--hosts", "2", "--megabytes", "1", *disk.split())
    rows = run("files", *size, results=tmp_path, sheet="files-1")
    assert {row["status"] for row in rows} == {"0"} and {files.COLD, files.WARM, files.THERE} <= {
        row["what"] for row in rows
    }
    copies = {row["what"]: float(row["copies"]) for row in rows}
    assert copies.pop(files.THERE) < 0.5 and all(1.9 < sent < 3 for sent in copies.values()), (
        "every tool sends every byte"
    )


def test_the_pages_of_a_large_file_repeat_one_word_each_and_differ() -> None:
    [block] = ramdisk.pages(1)
    parts = [block[at : at + 4096] for at in range(0, len(block), 4096)]
    assert len(block) == 1 << 20 and all(part == part[:8] * 512 for part in parts)
    assert len(set(parts)) == len(parts)


@pytest.mark.slow
@pytest.mark.thorough
def test_an_hour_passes_on_a_head(tmp_path: Path) -> None:
    rows = run("hour", "--nodes", "4", "--jobs", "1", "--seconds", "12", results=tmp_path, repeat=False)
    assert [row["minute"] for row in rows] == [*map(str, range(0, 65, 5)), "after"]
    assert int(rows[-1]["deleted"]) > 0 and float(rows[-1]["store_mb"]) > 0
    assert float(rows[-1]["behind_s"]) < 300


def test_start_measures_each_command(tmp_path: Path) -> None:
    rows = run("start", results=tmp_path)
    assert {row["status"] for row in rows} == {"0"}
    assert {row["what"] for row in rows} >= {"python -c pass", "ascendrun --help", "ascendrun ps --all"}


@pytest.mark.slow
@pytest.mark.thorough
def test_two_checkouts_take_turns(needs_cluster: None, tmp_path: Path) -> None:
    rows = run("before", str(CHECKOUT), results=tmp_path)
    assert {row["status"] for row in rows} == {"0"}
    assert {row["side"] for row in rows} == {"this", "other"} and len(rows) == 10


def test_logs_are_merged_folded_and_read_at_a_rate_that_is_told(tmp_path: Path) -> None:
    with pages.Sheet(tmp_path, "logs", logs.COLUMNS) as sheet:
        logs.measure_fold(sheet, 0, 20)
        logs.measure_read(sheet, 0, 20)
    logs.write_results(sheet, "a small run")
    rows = pages.read_rows(tmp_path / "logs.csv")
    assert {row["case"] for row in rows} == set(logs.CASES) and all(float(row["value"]) > 0 for row in rows)
    assert {row["note"] for row in rows if row["what"] == "fold"} == {"20 lines shown"}
    assert "| read | numbers differ | peak MB |" in (tmp_path / "logs.md").read_text(encoding="utf-8")


def test_a_trial_sees_what_a_launcher_leaves_and_takes_it_away(needs_cluster: None) -> None:
    with Bed(1) as bed:
        leaves = [
            "ssh",
            "-o",
            "KexAlgorithms=curve25519-sha256",
            bed.cluster.hosts[0],
            "setsid -f sleep 600 </dev/null >/dev/null 2>&1; echo '[FIRST 0 1.0]'; cat",
        ]
        with trial.Trial(bed, leaves, {}) as watched:
            assert watched.await_ranks(1, patience_s=30.0) is not None, watched.tail()
            ended = watched.await_end(watched.kill_launcher(), patience_s=2.0)
            assert ended.gone_s is None and ended.left >= 1
            assert "sleep 600" in watched.describe_left()
        left = [process for process in bed.cluster.processes(bed.cluster.hosts[0]) if "sleep" in process.argv]
        assert [process for process in left if "600" in process.argv] == []


def test_goals_judge_by_the_rows_and_call_the_unmeasured_unmeasured() -> None:
    exec_rows = [
        {"hosts": "8", "what": what, "wall_s": wall_s, "head_cpu_s": "0.1", "hosts_cpu_s": "", "status": status}
        for what, wall_s, status in (
            ("ascendrun, cold", "0.7", "0"),
            ("pdsh, curve25519", "1.0", "0"),
            ("ascendrun, cold", "9.9", "6"),
        )  # one that failed counts nowhere
    ]
    job_rows = [
        {"what": "ascendrun", "event": event, "seen_s": "0.5", "gone_s": gone_s, "left": left}
        for event, gone_s, left in ((jobs.STOP, "0.4", "0"), (jobs.RANK_KILLED, "", "2"))
    ]
    text = goals.render({"exec": exec_rows, "jobs": job_rows, "start": []})
    lines = {(what, goal): (value, verdict) for what, goal, value, _, verdict in map(cells, text.splitlines()[2:])}
    assert lines["`exec true` cold, 8 hosts", "≤ 0.8 × pdsh, curve25519"] == ("0.70", "met")
    assert lines["stop to last process gone, none left", "≤ 1 s"] == ("0.40", "met")
    assert lines["rank killed to all ranks of all hosts gone", "≤ 1 s"] == ("processes left", "**not met yet**")
    assert lines["`ascendrun --help`", "≤ 100 ms"] == ("–", "not measured")


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|\n").split("|")]


def test_the_readme_tells_the_results_as_they_are() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.goals", "--check"], cwd=CHECKOUT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/ann/x/bin/python -m torch\n /tmp/a/b.py", "python -m torch b.py"),
        ("error: see '/var/tmp/x/log'; exit 3/4", "error: see 'log'; exit 3/4"),
    ],
)
def test_notes_keep_no_path_of_the_machine(text: str, shown: str) -> None:
    assert pages.without_paths(text) == shown
