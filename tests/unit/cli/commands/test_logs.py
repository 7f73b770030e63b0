"""logs: merging, folding, choosing; and bytes as they were."""

import http.server
import json
import random
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from ascendrun.head.spool.clocks import Reading, keep_reading
from tests.lib.story_cluster import Desk, make_job


@pytest.fixture
def story(desk: Desk) -> Desk:
    desk.cluster.view = make_job(state="SUCCEEDED", attempt=1, ended_at_s=2.0)
    for rank in range(4):
        desk.cluster.write(rank, b"start\n", at_s=100.0 + rank / 100)
        desk.cluster.write(rank, b"step of %d\n" % rank, at_s=110.0 + rank)
    desk.cluster.write(1, b"warning\n", stream="err", at_s=111.5)
    return desk


@pytest.mark.parametrize(
    ("argv", "lines"),
    [
        ([], ["[0-3] start", "[0] step of 0", "[1] step of 1", "[1] warning", "[2] step of 2", "[3] step of 3"]),
        (["--rank", "0,2-3"], ["[0,2-3] start", "[0] step of 0", "[2] step of 2", "[3] step of 3"]),
        (["--hosts", "n[2-9]"], ["[2-3] start", "[2] step of 2", "[3] step of 3"]),
        (["--tail", "2"], ["[2] step of 2", "[3] step of 3"]),
        (["--tail", "0"], []),
        (["--grep", "st.p of [13]"], ["[1] step of 1", "[3] step of 3"]),
        (["--grep", "step", "--tail", "1"], ["[3] step of 3"]),
        (["--stream", "err"], ["[1] warning"]),
        (["--stream", "err", "--no-prefix"], ["warning"]),
        (["--since", "1970-01-01T00:01:52Z"], ["[2] step of 2", "[3] step of 3"]),
        (["--until", "1970-01-01T00:01:51Z"], ["[0-3] start", "[0] step of 0", "[1] step of 1"]),
        (
            ["--since", "1970-01-01T00:01:51Z", "--until", "1970-01-01T00:01:52Z"],
            ["[1] step of 1", "[1] warning", "[2] step of 2"],
        ),
        (["--grep", "of 0", "--grep", "of 2"], ["[0] step of 0", "[2] step of 2"]),
        (["--grep", "WARN"], []),
        (["--grep", "WARN", "-i"], ["[1] warning"]),
        (["--grep", "step", "-v"], ["[0-3] start", "[1] warning"]),
        (
            ["--grep", "step|warn", "--first-per-rank"],
            ["[0] step of 0", "[1] step of 1", "[2] step of 2", "[3] step of 3"],
        ),
        (["--grep", "t", "--first-per-rank"], ["[0-3] start"]),
    ],
)
def test_lines_are_chosen(story: Desk, argv: list[str], lines: list[str]) -> None:
    result = story.say("logs", "demo", *argv)
    assert (result.code, result.out.splitlines()) == (0, lines)


@pytest.mark.parametrize(
    ("argv", "lines"),
    [
        (["--stream", "err"], [(1, "n1", "err", "1970-01-01T00:01:51.500Z", "warning")]),
        (
            ["--grep", "start", "--rank", "1,2"],
            [
                (1, "n1", "out", "1970-01-01T00:01:40.010Z", "start"),
                (2, "n2", "out", "1970-01-01T00:01:40.020Z", "start"),
            ],
        ),
        (["--tail", "1"], [(3, "n2", "out", "1970-01-01T00:01:53.000Z", "step of 3")]),
        (["--grep", "t", "--first-per-rank", "--rank", "0"], [(0, "n1", "out", "1970-01-01T00:01:40.000Z", "start")]),
    ],
)
@pytest.mark.parametrize("follow", [False, True])
def test_for_programs_each_line_of_each_rank_is_a_record(
    story: Desk, argv: list[str], lines: list[object], follow: bool
) -> None:
    if follow:
        if "--first-per-rank" in argv:
            return
        story.cluster.complete()
    result = story.say("logs", "demo", "-o", "jsonl", *argv, *["-f"][: int(follow)])
    records = [json.loads(line) for line in result.out.splitlines()]
    assert [(one["rank"], one["host"], one["stream"], one["time"], one["text"]) for one in records] == lines
    assert all(one["attempt"] == 1 and one["schema_version"] == 2 for one in records)


def test_timestamps_stand_first(story: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    out = story.say("logs", "demo", "-t", "--tail", "1").out
    assert out.startswith("1970-01-01T") and out.endswith("[3] step of 3\n")


def test_the_newest_attempt_is_shown_and_an_earlier_one_on_demand(story: Desk) -> None:
    story.cluster.view = make_job(state="SUCCEEDED", attempt=2, ended_at_s=2.0)
    story.cluster.write(0, b"again\n", at_s=200.0)
    shown = story.say("logs", "demo")
    assert shown.out == "[0] again\n" and "── attempt 2 ──" in shown.err
    assert story.say("logs", "demo", "--attempt", "1", "--rank", "0").out == "[0] start\n[0] step of 0\n"
    assert story.say("logs", "demo", "--attempt", "3").code == 4


def test_raw_writes_every_byte(desk: Desk) -> None:
    data = random.Random(1).randbytes(300_000) + b"\x1b]0;title\x07\r\n\xff"
    desk.cluster.write(2, data)
    assert desk.say("logs", "demo", "--rank", "2", "--raw").raw_out == data


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--raw", "-f"], "--raw"),
        (["-f", "--attempt", "1"], "--attempt"),
        (["--rank", "8-"], "--rank"),
        (["--grep", "("], "--grep"),
        (["--since", "yesterday"], "--since"),
        (["--hosts", "n[1-"], "--hosts"),
        (["--tail", "-1"], "--tail"),
        (["--until", "soon"], "--until"),
        (["-v"], "--grep"),
        (["-f", "--first-per-rank"], "--first-per-rank"),
        (["--files", "--raw"], "--files"),
        (["-o", "json"], "-o jsonl"),
        (["-o", "jsonl", "--raw"], "--raw"),
        (["-o", "jsonl", "-t"], "--timestamps"),
    ],
)
def test_a_wrong_choice_names_its_option(story: Desk, argv: list[str], words: str) -> None:
    result = story.say("logs", "demo", *argv)
    assert (result.code, result.out) == (2, "")
    assert words in result.err and "hint: " in result.err


@pytest.mark.parametrize(("argv", "words"), [(["--rank", "9"], "0-3"), (["--rank", "3,99", "--hosts", "x"], "n[1-2]")])
def test_ranks_and_nodes_that_the_job_does_not_have_are_an_error(desk: Desk, argv: list[str], words: str) -> None:
    for more in ([], ["--files"], ["--raw"], ["-f"]):
        result = desk.say("logs", "demo", *argv, *more)
        assert (result.code, result.out) == (4, "")
        assert words in result.err


def test_nothing_to_show_is_explained(desk: Desk) -> None:
    result = desk.say("logs", "demo")
    assert (result.code, result.out) == (0, "")
    assert "no output yet (QUEUED)" in result.err


def test_a_job_that_has_ended_without_a_word_has_no_output_yet_to_come(desk: Desk) -> None:
    desk.cluster.view = replace(desk.cluster.view, state="SUCCEEDED", attempt=1, ended_at_s=5.0)
    told = desk.say("logs", "demo").err
    assert "no output in attempt 1" in told and "ascendrun show j-0001" in told and "yet" not in told


def test_a_giant_line_is_cut_on_screen(desk: Desk) -> None:
    desk.cluster.write(0, b"x" * 10_000_000 + b"\nend\n")
    lines = desk.say("logs", "demo").out.splitlines()
    assert len(lines[0]) < 70_000 and lines[0].endswith("... (+9.5 MiB)")
    assert lines[1] == "[0] end"


@pytest.mark.slow
def test_memory_does_not_grow_with_the_logs(tmp_path: Path) -> None:

    code = """if True:
        import resource, sys
        from ascendrun.query.log_reader import StreamReader
        from ascendrun.head.spool.spool_files import find_streams
        from ascendrun.core.logs.folding import fold
        from ascendrun.core.logs.log_lines import merge
        from itertools import chain
        from pathlib import Path
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found = find_streams(Path(sys.argv[1]), 1)
        lines = merge(chain.from_iterable(StreamReader(files).batches(final=True)) for files in found)
        count = sum(1 for _ in fold(lines, window_s=0.3))
        print(count, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """
    (tmp_path / "n1").mkdir()
    for rank in range(4):
        (tmp_path / "n1" / f"rank-{rank}.out.0").write_bytes(b"z\n" * 5000)
        with open(tmp_path / "n1" / f"rank-{rank}.out.0", "ab") as log:
            log.write((b"%d" % rank * 999 + b"\n") * 10_000)
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    count, grown_kib = map(int, done.stdout.split())
    assert count > 40_000
    assert grown_kib < 25_000  # of 40 MB of logs


def test_without_a_pattern_the_first_line_of_each_rank_that_looks_like_an_error_is_shown(story: Desk) -> None:
    for rank, lines in enumerate(
        (b"0 errors so far\nerrors: 0\nValueError: x\n", b"fine\n", b"EI0006 timeout\n", b"Killed\n")
    ):
        story.cluster.write(rank, lines, at_s=120.0 - rank)
    assert story.say("logs", "demo", "--first-per-rank").out.splitlines() == [
        "[3] Killed",
        "[2] EI0006 timeout",
        "[0] ValueError: x",
    ]


def test_lines_of_hosts_whose_clocks_differ_are_in_the_order_of_the_heads_clock(story: Desk) -> None:
    story.cluster.write(2, b"earlier\n", at_s=290.0)  # on n2, whose clock is 90 s ahead
    story.cluster.write(0, b"later\n", at_s=201.0)
    keep_reading(story.cluster.spool / "n2", Reading(at_s=100.0, offset_s=90.0, error_s=0.001))
    keep_reading(story.cluster.spool / "n1", Reading(at_s=100.0, offset_s=0.0, error_s=0.001))
    out = story.say("logs", "demo", "-t", "--since", "1970-01-01T00:03:20Z").out.splitlines()
    assert [line.split(" ", 1)[1] for line in out] == ["[2] earlier", "[0] later"]
    assert ":20.000" in out[0] and ":21.000" in out[1]


def test_ranks_that_measured_about_the_same_are_one_line_and_the_odd_one_has_its_own(desk: Desk) -> None:
    for rank, loss in enumerate(("2.31", "2.33", "9.99", "2.32")):
        desk.cluster.write(rank, f"step 7 loss {loss}\n".encode(), at_s=100.0)
    assert desk.say("logs", "demo").out.splitlines() == ["[0-1,3] step 7 loss 2.32±0.01", "[2] step 7 loss 9.99"]


def test_what_is_lost_is_told(story: Desk) -> None:
    events = [
        {"event": "log_cut", "at_ns": 5, "rank": 1, "stream": "out", "generation": 0, "had": 1018},
        {"event": "log_dropped", "at_ns": 6, "rank": 3, "stream": "err", "bytes": 2000, "reason": "ENOSPC"},
        {"event": "log_cut", "at_ns": 5, "rank": 0, "stream": "out", "generation": 0, "had": 4},
        {"event": "log_"},
    ]
    for host in ("n1", "n2"):
        (story.cluster.spool / host / "events.0").write_text(
            "".join(json.dumps(one) + "\n" for one in events if (one.get("rank", 0) < 2) == (host == "n1"))
        )
    err = story.say("logs", "demo").err
    assert "rank 1 on n1: 1002 B of stdout were lost" in err
    assert "rank 3 on n2: 2.0 KiB of stderr were lost" in err and "ENOSPC" in err
    assert "rank 0" not in err and story.say("logs", "demo", "--rank", "2").err == ""


def test_the_files_of_an_attempt_are_listed_with_what_was_gathered_and_what_was_not(story: Desk) -> None:
    folder = story.cluster.spool / "n2" / "gathered"
    (folder / "plog").mkdir(parents=True)
    settings = b"[HCCL_ENV] HCCL_EXEC_TIMEOUT set by environment to [600]s\n"
    (folder / "plog" / "plog-1_2.log").write_bytes(settings + b"x" * 242)
    (folder / "index.json").write_text(
        json.dumps(
            {
                "at_ns": 1,
                "problems": [{"name": "hccn", "text": "no hccn_tool"}],
                "files": [
                    {"name": "plog", "file": "plog-1_2.log", "source": "/root/x", "bytes": 300, "of_bytes": 5000}
                ],
            }
        )
    )
    out = story.say("logs", "demo", "--files", "--hosts", "n2").out
    assert out.splitlines()[-1].split() == ["HCCL_EXEC_TIMEOUT", "600s", "environment", "n2"]
    assert "plog-1_2.log" in out and "4.9 KiB" in out and "(no hccn_tool)" in out
    assert "rank-2.out.0" in out and "rank-1" not in out and ".times" not in out
    rows = json.loads(story.say("logs", "demo", "--files", "-o", "json").out)["files"]
    assert {(row["host"], row["kind"], row["rank"]) for row in rows} >= {
        ("n1", "output", 0),
        ("n1", "errors", 1),
        ("n2", "plog", None),
        ("n2", "hccn", None),
    }


def test_while_bytes_are_missing_here_a_pattern_asks_the_nodes_and_says_who_does_not_answer(story: Desk) -> None:
    story.cluster.view = make_job(state="RUNNING", attempt=1)
    result = story.say("logs", "demo", "--grep", "step of [13]")
    assert result.out.splitlines() == ["[1] step of 1", "[3] step of 3"]
    assert "n[1-2]" in result.err and result.err.startswith("warning: n[1-2]")
    story.cluster.complete()
    assert story.say("logs", "demo", "--grep", "step of [13]").err == ""


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (b"\x00nul\n", "\\x00nul"),
        (b"\x1b[31mred\x1b[0m \x1b]0;title\x07\n", "red "),
        ("设备过热\n".encode("gbk"), "设备过热"),
        (b"torn \xe8\xae\n", "torn \\xe8\\xae"),
        (b" 10%\r 50%\r100%\n", "100%"),
        (b"no end", "no end"),
        (b"dos\r\n", "dos"),
    ],
)
def test_whatever_a_rank_writes_is_kept_as_it_is_and_shown_sanely(desk: Desk, data: bytes, shown: str) -> None:
    desk.cluster.write(0, data)
    assert desk.say("logs", "demo").out == f"[0] {shown}\n"
    assert desk.say("logs", "demo", "--raw").raw_out == data


# ---------------------------------------------------------------- notify


def test_without_targets_notify_says_how_to_get_one(desk: Desk) -> None:
    result = desk.say("notify")
    assert result.code == 0 and "docs/notices.md" in result.err
    assert desk.say("notify", "--test").code == 7


def test_a_test_shows_what_the_service_answers_and_no_credential(desk: Desk) -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            body = b'{"errcode":310000,"errmsg":"sign not match"}' if "ding" in self.path else b"ok"
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            folder = desk.folder / "config" / "ascendrun"
            folder.mkdir(parents=True)
            base = f"http://127.0.0.1:{server.server_address[1]}"
            (folder / "config.yaml").write_text(
                f"notify:\n- {{type: slack, url: '{base}/topsecret'}}\n"
                f"- {{name: ding, type: dingtalk, url: '{base}/ding?access_token=topsecret'}}\n"
            )
            fine, bad, both = (desk.say("notify", "--test", name) for name in ("slack", "ding", ""))
            unknown, shown, config = desk.say("notify", "--test", "dang"), desk.say("notify"), desk.say("config")
        finally:
            server.shutdown()
            thread.join()
    assert (fine.code, bad.code, both.code, unknown.code) == (0, 6, 6, 4)
    assert "delivered" in fine.out and "sign not match" in bad.out and "refused" in bad.out
    for result in (fine, bad, both, shown, config):
        assert "topsecret" not in result.out + result.err
    assert "127.0.0.1" in shown.out and "127.0.0.1" in config.out
