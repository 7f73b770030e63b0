"""What a node gives after a failure: ours first, nothing from outside, bounded, and never waited for."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from ascendrun.core.rank_env import FLIGHT_RECORDER
from ascendrun.head.spool.artifact_fetch import items_for
from ascendrun.node import layout
from ascendrun.node.agent import artifacts
from ascendrun.node.agent.artifacts import ArtifactCollection
from ascendrun.node.agent.execute import Commands

TAG = "head-job.1"
START_NS = 1_763_000_000 * 10**9


class Desk:
    """A node root with one attempt, and what was sent to the head."""

    def __init__(self, root: Path, *, env: dict[str, str] | None = None) -> None:
        self.root = root
        self.home = root / "home"
        self.folder = Path(layout.attempt_dir(str(root), TAG))
        self.folder.mkdir(parents=True)
        events = [
            {"seq": 1, "at_ns": START_NS, "event": "supervising"},
            {"seq": 2, "at_ns": START_NS + 1, "event": "rank_started", "rank": 0, "pid": 4242},
        ]
        (self.folder / "events.0").write_text("".join(json.dumps(one) + "\n" for one in events))
        (self.folder / layout.PREPARED).write_text(json.dumps({"ranks": [{"rank": 0, "env": env or {}}]}))
        self.login = {b"HOME": os.fsencode(self.home), b"PATH": os.environb[b"PATH"]}
        self.sent: list[tuple[dict[str, Any], bytes]] = []

    def write(self, path: str, data: bytes, *, age_s: float = 0.0) -> Path:
        """`age_s`: how long after the attempt's start it was changed last."""
        place = self.home / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
        os.utime(place, ns=(START_NS, START_NS + int(age_s * 1e9)))
        return place

    def gather(self, *items: dict[str, Any], **more: Any) -> dict[str, Any]:
        request = {"tag": TAG, "items": [{"name": "plog", **item} for item in items], **more}
        return ArtifactCollection(
            str(self.root),
            request,
            login=self.login,
            commands=Commands(self.login, 0o022),
            send=lambda header, body: self.sent.append((header, body)),
        ).run()

    def got(self) -> dict[str, bytes]:
        files: dict[str, bytearray] = {}
        for header, body in self.sent:
            kept = files.setdefault(header["file"], bytearray())
            assert header["offset"] == len(kept)
            kept += body
        return {name: bytes(data) for name, data in files.items()}


PLOG = {
    "kind": "glob",
    "bases": ["$ASCEND_PROCESS_LOG_PATH", "~/ascend/log"],
    "since_start": True,
    "patterns": ["debug/plog/plog-*", "run/plog/plog-*"],
    "pid_regex": r"plog-(\d+)_",
}


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_plogs_of_the_attempt_are_sent_whole_those_of_our_ranks_first(desk: Desk) -> None:
    desk.write("ascend/log/run/plog/plog-7_2.log", b"another's", age_s=30)
    desk.write("ascend/log/debug/plog/plog-4242_1.log", b"x" * 200_000, age_s=10)
    desk.write("ascend/log/debug/plog/plog-9_0.log", b"of last week", age_s=-600_000)
    reply = desk.gather(PLOG)
    assert [(one["file"], one["bytes"], one["is_ours"]) for one in reply["files"]] == [
        ("debug/plog/plog-4242_1.log", 200_000, True),
        ("run/plog/plog-7_2.log", 9, False),
    ]
    assert desk.got() == {"debug/plog/plog-4242_1.log": b"x" * 200_000, "run/plog/plog-7_2.log": b"another's"}
    assert reply["problems"] == [] and reply["start_ns"] == START_NS


def test_the_ranks_own_variable_says_where_its_plogs_are(tmp_path: Path) -> None:
    desk = Desk(tmp_path, env={"ASCEND_PROCESS_LOG_PATH": str(tmp_path / "elsewhere")})
    desk.write("ascend/log/debug/plog/plog-4242_1.log", b"the default is not used")
    (tmp_path / "elsewhere" / "debug" / "plog").mkdir(parents=True)
    (tmp_path / "elsewhere" / "debug" / "plog" / "plog-4242_2.log").write_bytes(b"here")
    desk.gather(PLOG)
    assert desk.got() == {"debug/plog/plog-4242_2.log": b"here"}


def test_links_below_the_base_are_not_followed_and_pipes_not_waited_for(desk: Desk, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "plog-1_1.log").write_bytes(b"secret")
    desk.write("data/log/debug/plog/plog-1_2.log", b"mine")
    (desk.home / "ascend").mkdir()
    (desk.home / "ascend" / "log").symlink_to(desk.home / "data" / "log")  # the base itself may be a link
    (desk.home / "data/log/debug/plog/plog-1_3.log").symlink_to(tmp_path / "secret")
    (desk.home / "data/log/run").mkdir()
    (desk.home / "data/log/run/plog").symlink_to(tmp_path / "outside")
    os.mkfifo(desk.home / "data/log/debug/plog/plog-1_4.log")
    desk.gather(PLOG)
    assert desk.got() == {"debug/plog/plog-1_2.log": b"mine"}


def test_a_file_that_is_too_long_is_sent_as_its_beginning_and_its_end(desk: Desk) -> None:
    data = b"".join(b"%07d\n" % number for number in range(100_000))
    desk.write("ascend/log/debug/plog/plog-4242_1.log", data)
    (one,) = desk.gather({**PLOG, "max_bytes": 80_000})["files"]
    sent = desk.got()["debug/plog/plog-4242_1.log"]
    cut = one["cut_at"]
    assert (one["bytes"], one["of_bytes"], len(sent)) == (80_000, 800_000, 80_000)
    assert sent[:cut] == data[:cut] and sent[cut:] == data[-(80_000 - cut) :] and 0 < cut < 40_000


def test_what_finds_no_room_is_named(desk: Desk) -> None:
    for number in range(5):
        desk.write(f"ascend/log/debug/plog/plog-{number}_1.log", b"y" * 1000, age_s=number)
    reply = desk.gather({**PLOG, "max_files": 3, "max_bytes": 2000})
    assert [one["file"][-10:] for one in reply["files"]] == ["plog-4_1.log"[-10:], "plog-3_1.log"[-10:]]
    texts = " ".join(str(problem["message"]) for problem in reply["problems"])
    assert "files-skipped" in texts and "'count': 2" in texts and "size-limit" in texts and "plog-2_1.log" in texts


def test_the_first_command_that_works_is_taken(desk: Desk) -> None:
    reply = desk.gather(
        {
            "kind": "argv",
            "file": "out.txt",
            "commands": [
                ["no-such-tool-at-all"],
                ["sh", "-c", "echo denied >&2; exit 1"],
                ["printf", "fine"],
                ["printf", "unused"],
            ],
        }
    )
    assert desk.got() == {"out.txt": b"fine"} and reply["problems"] == []


def test_when_no_command_works_the_reason_of_each_is_told(desk: Desk) -> None:
    reply = desk.gather(
        {
            "kind": "argv",
            "file": "out.txt",
            "commands": [["no-such-tool-at-all"], ["sh", "-c", "echo denied >&2; exit 1"]],
        }
    )
    (problem,) = reply["problems"]
    assert "no-such-tool-at-all" in str(problem["message"]) and "denied" in str(problem["message"])


def test_a_tool_that_hangs_is_killed_and_the_others_are_not_kept_waiting(desk: Desk) -> None:
    began = time.monotonic()
    hang = {"kind": "argv", "file": "hang.txt", "commands": [["sh", "-c", "trap '' TERM; sleep 600"]], "timeout_s": 0.5}
    reply = desk.gather(hang, {"kind": "argv", "file": "fine.txt", "commands": [["echo", "fine"]]}, timeout_s=30)
    assert time.monotonic() - began < 25
    assert desk.got() == {"fine.txt": b"fine\n"}
    assert "command-timed-out" in str(reply["problems"][0]["message"])


def test_a_system_file_is_listed_not_sent(desk: Desk) -> None:
    desk.write("ascend/log/debug/plog/plog-1_1.log", b"12345")
    reply = desk.gather({**PLOG, "kind": "list", "file": "list.txt"})
    assert desk.got()["list.txt"].split()[0] == b"5" and len(reply["files"]) == 1


def test_a_question_of_an_unknown_kind_is_a_problem_of_its_own(desk: Desk) -> None:
    reply = desk.gather({"kind": "nonsense"}, {"kind": "argv", "file": "fine.txt", "commands": [["echo", "fine"]]})
    assert desk.got() == {"fine.txt": b"fine\n"}
    assert len(reply["problems"]) == 1


KERNEL = b"""[    1.000000] booted
[  100.500000] eth0: link is down
[  200.000000] python invoked oom-killer: gfp_mask=0x0
continued without a stamp
[  200.100000] Mem-Info:
[  200.200000] Out of memory: Killed process 4242 (python)
[  300.000000] quiet
[  300.100000] quiet
[  300.200000] quiet
[  400.000000] eth0: link is up
"""


def test_of_the_kernels_log_telling_lines_and_their_neighbours_since_the_start_are_kept() -> None:
    text = artifacts.excerpt(
        artifacts.since_kernel_time(KERNEL, 150.0), ["out of memory", "oom-", "link is (?:up|down)"], around=1
    )
    assert text.decode().split("\n") == [
        "[  200.000000] python invoked oom-killer: gfp_mask=0x0",
        "continued without a stamp",
        "[  200.100000] Mem-Info:",
        "[  200.200000] Out of memory: Killed process 4242 (python)",
        "[  300.000000] quiet",
        "...",
        "[  300.200000] quiet",
        "[  400.000000] eth0: link is up",
        "",
    ]


def test_kernel_lines_are_chosen_by_the_attempts_start(desk: Desk) -> None:
    now_s = time.clock_gettime(time.CLOCK_MONOTONIC)
    old_s = now_s - (time.time() - START_NS / 1e9) - 3600
    lines = f"[{max(0.0, old_s):.6f}] oom long ago\n[{now_s:.6f}] oom just now\n"
    reply = desk.gather(
        {"kind": "argv", "file": "k", "kernel_time": old_s > 0, "keep": ["oom"], "commands": [["printf", "%s", lines]]}
    )
    assert b"oom just now" in desk.got()["k"]
    assert abs(reply["boot_ns"] / 1e9 + now_s - time.time()) < 60


@pytest.mark.parametrize(
    ("bases", "environ", "path"),
    [
        (["$A/x", "~/y"], {"HOME": "/h"}, "/h/y"),
        (["$A/x", "~/y"], {"HOME": "/h", "A": "/a"}, "/a/x"),
        (["${A}/x"], {"A": "/a"}, "/a/x"),
        (["$A/x"], {"A": ""}, None),
        (["$A/x"], {"A": "relative"}, None),
        (["~other/x"], {"HOME": "/h"}, None),
    ],
)
def test_the_first_folder_whose_variables_are_set_counts(
    bases: list[str], environ: dict[str, str], path: str | None
) -> None:
    assert artifacts.expand_first(bases, environ) == path


@pytest.mark.parametrize("device_type", ["npu", "cuda"])
def test_dumps_of_the_flight_recorder_are_where_a_rank_is_told_to_write_them(tmp_path: Path, device_type: str) -> None:
    desk = Desk(tmp_path)
    folder = str(desk.folder)
    variables = [value.format(folder=folder) for value in FLIGHT_RECORDER[device_type].values()]
    [prefix] = [value for value in variables if value.startswith(folder)]
    Path(f"{prefix}3").write_bytes(b"dump")
    [item] = [item for item in items_for(device_type) if item["name"] == "flight-recorder"]
    desk.gather(item)
    assert desk.got() == {"flight-3": b"dump"}
