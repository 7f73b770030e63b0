"""Collection of artifacts that may explain an attempt's end: files and output of tools. Bounded.

A request is {tag, items, timeout_s, max_bytes}. Every item has a `name` (a directory at the head) and a `kind`:

    glob  {bases, patterns, max_bytes, max_files, since_start, pid_regex}
          Files below the first of `bases` whose variables are all set ("$ASCEND_PROCESS_LOG_PATH", "~/ascend/log") in
          a rank's environment. `since_start`: only those changed since the attempt started; `pid_regex`: its group is
          the pid in a file's name, those of the attempt's ranks come first.
    list  the same, but sizes and times instead of contents, as one text `file`
    argv  {file, commands, max_bytes, keep, around, kernel_time}
          Output of the first of `commands` that works, as `file`. `keep`: only lines in which one of these is found,
          with `around` lines about each. `kernel_time`: lines start with [seconds since boot]; older lines are omitted.

Found files are sent as events {"event": "gathered", tag, name, file, offset} with bytes; the reply ends it:
{"files": [{name, file, source, bytes, of_bytes, cut_at, mtime_ns, is_ours}], "problems": [{name, text}],
"start_ns", "boot_ns", "at_ns"}. `boot_ns`: the wall clock at which the kernel's own clock started.
"""

from __future__ import annotations

import collections
import fnmatch
import os
import re
import stat
import threading
import time
from functools import partial

from ascendrun.node import layout
from ascendrun.node.agent.execute import work_off
from ascendrun.node.files import read_json, to_bytes
from ascendrun.node.op_errors import OperationError, message
from ascendrun.node.records import read_events

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, Iterator, Mapping

    from ascendrun.node.agent.execute import Commands
    from ascendrun.node.op_errors import Message

    Item = Dict[str, Any]
    Send = Callable[[Dict[str, Any], bytes], None]

AT_ONCE = 4
COLLECT_S = 60.0
ITEM_S = 30.0
MAX_BYTES = 64 << 20
ITEM_BYTES = 8 << 20
ITEM_FILES = 64
CHUNK_BYTES = 1 << 16
SLACK_NS = 5 * 10**9
OURS_SLACK_NS = 300 * 10**9
"""A home may be on a server whose clock differs; a file with a rank's pid in its name is very likely the rank's."""
MARGIN_S = 0.5

Found = collections.namedtuple("Found", "path name size mtime_ns is_ours")
"""A file that was found. `name`: its path below the base, as at the head."""


class AttemptFacts:
    """Facts of the attempt on this node: start time, pids of its ranks, and their environments."""

    def __init__(self, folder: str, login: Mapping[bytes, bytes]) -> None:
        events = read_events(layout.streams_dir(folder))
        self.folder = folder
        self.start_ns = min([int(event["at_ns"]) for event in events if "at_ns" in event] or [0])
        self.pids = {int(event["pid"]) for event in events if event.get("event") == "rank_started"}
        base = {os.fsdecode(name): os.fsdecode(value) for name, value in login.items()}
        base["ASCENDRUN_ATTEMPT_DIR"] = folder
        prepared = read_json(os.path.join(folder, layout.PREPARED)) or {}
        base = dict(base, **(prepared.get("launcher") or {}).get("env", {}))
        self.environs = [dict(base, **rank.get("env", {})) for rank in prepared.get("ranks", [])] or [base]


class ArtifactCollection:
    """One reply. Its threads send what they find; after the end nothing more is sent, even if a thread still hangs."""

    def __init__(
        self, root: str, request: dict[str, Any], *, login: Mapping[bytes, bytes], commands: Commands, send: Send
    ) -> None:
        self._tag = str(request["tag"])
        self._login = login
        self._commands = commands
        self._send_event = send
        self._facts = AttemptFacts(layout.attempt_dir(root, self._tag), login)
        self._end = time.monotonic() + float(request.get("timeout_s") or COLLECT_S)
        self._items: list[Item] = list(request["items"])
        self._room = min(int(request.get("max_bytes") or MAX_BYTES), MAX_BYTES)
        self._lock = threading.Lock()
        self._files: list[dict[str, Any]] = []
        self._problems: list[dict[str, Any]] = []
        self._is_over = False

    def run(self) -> dict[str, Any]:
        jobs = [partial(self._collect, item) for item in self._items]
        found = work_off(jobs, at_once=AT_ONCE, end=self._end + MARGIN_S)
        late = dict.fromkeys(str(item["name"]) for item, is_done in zip(self._items, found) if not is_done)
        with self._lock:
            self._is_over = True
            return {
                "files": list(self._files),
                "problems": self._problems + [{"name": name, "message": message("timed-out")} for name in late],
                "start_ns": self._facts.start_ns,
                "boot_ns": boot_ns(),
                "at_ns": time.time_ns(),
            }

    def _collect(self, item: Item) -> bool:
        deadline = min(self._end, time.monotonic() + float(item.get("timeout_s") or ITEM_S))
        try:
            {"glob": self._glob, "list": self._list, "argv": self._argv}[item["kind"]](item, deadline)
        except OperationError as refusal:
            self._note(item, refusal.message)
        except Exception as error:  # an unavailable item must not affect the others; the head keeps the error
            self._note(item, message("error", error=f"{type(error).__name__}: {error}"))
        return True

    def _note(self, item: Item, what: Message) -> None:
        with self._lock:
            self._problems.append({"name": str(item["name"]), "message": what})

    # --- files ---

    def _glob(self, item: Item, deadline: float) -> None:
        room = [int(item.get("max_bytes") or ITEM_BYTES)]
        found = self._find(item, deadline)
        most = int(item.get("max_files") or ITEM_FILES)
        if len(found) > most:
            self._note(item, message("files-skipped", count=len(found) - most))
        for one in found[:most]:
            if time.monotonic() > deadline:
                self._note(item, message("no-time-left", path=one.path))
                return
            if room[0] <= 0 or self._room <= 0:
                self._note(item, message("size-limit", path=one.path))
                return
            try:
                room[0] -= self._send_file(item, one, room[0])
            except OSError as error:
                self._note(item, message("file-error", path=one.path, error=error.strerror))

    def _list(self, item: Item, deadline: float) -> None:
        lines = [
            time.strftime(f"{one.size:12d}  %Y-%m-%dT%H:%M:%SZ  ", time.gmtime(one.mtime_ns // 10**9)) + one.path
            for one in self._find(item, deadline)
        ]
        if lines:
            self._send_text(
                item,
                "\n".join(lines[:MOST_LOOKED_AT]).encode("utf-8", "surrogateescape") + b"\n",
                source=" ".join(item["patterns"]),
            )

    def _find(self, item: Item, deadline: float) -> list[Found]:
        """Return the matches that are really below their base: the ranks' first, then the newest."""
        start_ns = self._facts.start_ns if item.get("since_start") else 0
        found: dict[str, Found] = {}
        bases = sorted({base for base in (expand_first(item["bases"], env) for env in self._facts.environs) if base})
        for number, base in enumerate(bases):
            prefix = "" if number == 0 else "base-%d/" % (number + 1)
            for path, facts in walk(base, item["patterns"], deadline):
                pid = re.search(item["pid_regex"], os.path.basename(path)) if item.get("pid_regex") else None
                is_ours = int(pid.group(1)) in self._facts.pids if pid else None
                if facts.st_mtime_ns >= start_ns - (OURS_SLACK_NS if is_ours else SLACK_NS):
                    name = prefix + os.path.relpath(path, os.path.realpath(base))
                    found[path] = Found(path, name, facts.st_size, facts.st_mtime_ns, is_ours)
        return sorted(found.values(), key=lambda one: (one.is_ours is not True, -one.mtime_ns, one.path))

    def _send_file(self, item: Item, one: Found, room: int) -> int:
        """Send a file and return the number of bytes sent. Raises OSError."""
        fd = os.open(one.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            facts = os.fstat(fd)
            if not stat.S_ISREG(facts.st_mode):
                return 0
            parts, left_out = choose_parts(facts.st_size, min(room, self._room))
            sent = 0
            cut_at = None
            for start, count in parts:
                if start > sent:
                    cut_at = sent
                at = sent
                while sent - at < count:
                    chunk = os.pread(fd, min(CHUNK_BYTES, count - sent + at), start + sent - at)
                    if not chunk:
                        break  # truncated meanwhile
                    self._send(item, one.name, sent, chunk)
                    sent += len(chunk)
        finally:
            os.close(fd)
        self._add_file(
            item,
            one.name,
            source=one.path,
            sent=sent,
            of_bytes=sent + left_out,
            cut_at=cut_at,
            mtime_ns=one.mtime_ns,
            is_ours=one.is_ours,
        )
        return sent

    # --- commands ---

    def _argv(self, item: Item, deadline: float) -> None:
        limit = int(item.get("max_bytes") or ITEM_BYTES)
        problems = []
        for argv in item["commands"]:
            try:
                done = self._commands.carry_out(
                    [to_bytes(part) for part in argv],
                    self._login,
                    b"",
                    limit=limit,
                    timeout_s=max(0.1, deadline - time.monotonic()),
                )
            except OperationError as refusal:
                problems.append(refusal.message)
                continue
            if done.timed_out:
                problems.append(message("command-timed-out", command=argv[0]))
            elif done.code != 0:
                output = done.err.decode("utf-8", "replace").strip().split("\n")[-1]
                problems.append(message("command-failed", command=argv[0], status=done.code, output=output or None))
            if done.code == 0 or (done.out and argv is item["commands"][-1]):
                text = done.out
                if item.get("kernel_time"):
                    text = since_kernel_time(text, (self._facts.start_ns - SLACK_NS - boot_ns()) / 1e9)
                if item.get("keep"):
                    text = excerpt(text, item["keep"], around=int(item.get("around") or 0))
                self._send_text(item, text, source=" ".join(map(str, argv[:2])), is_cut=done.truncated)
                if done.code == 0:
                    return
        self._note(item, problems[0] if len(problems) == 1 else message("several", problems=problems))

    # --- output ---

    def _send_text(self, item: Item, text: bytes, *, source: str, is_cut: bool = False) -> None:
        text = text[: max(0, min(len(text), self._room))]
        for offset in range(0, len(text), CHUNK_BYTES):
            self._send(item, item["file"], offset, text[offset : offset + CHUNK_BYTES])
        self._add_file(
            item,
            item["file"],
            source=source,
            sent=len(text),
            of_bytes=None if is_cut else len(text),
            cut_at=len(text) if is_cut else None,
            mtime_ns=None,
            is_ours=None,
        )

    def _send(self, item: Item, file: str, offset: int, chunk: bytes) -> None:
        with self._lock:
            if self._is_over:
                raise OSError(0, "the answer has gone without it")
            self._room -= len(chunk)
        self._send_event(
            {"event": "gathered", "tag": self._tag, "name": item["name"], "file": file, "offset": offset}, chunk
        )

    def _add_file(self, item: Item, file: str, *, sent: int, **facts: Any) -> None:
        with self._lock:
            self._files.append(dict(facts, name=item["name"], file=file, bytes=sent))


def boot_ns() -> int:
    """Return the wall clock time of 0 on the kernel's own clock."""
    return time.time_ns() - int(time.clock_gettime(time.CLOCK_MONOTONIC) * 1e9)


HEAD_BYTES = 256 << 10
"""Bytes kept from the start of a file over the limit: settings are there; the rest is its end."""
MOST_LOOKED_AT = 20000
_VARIABLE = re.compile(r"\$(\w+|\{\w+\})")
_KERNEL_STAMP = re.compile(rb"^(?:<\d+>)?\[\s*(\d+\.\d+)\]")


def expand_first(bases: list[str], environ: Mapping[str, str]) -> str | None:
    """Return the first base whose variables are all set and not empty, absolute; None: not found."""
    for base in bases:
        names = [name.strip("{}") for name in _VARIABLE.findall(base)] + (["HOME"] if base.startswith("~") else [])
        if not all(environ.get(name) for name in names):
            continue
        if base.startswith("~/"):
            base = environ["HOME"] + base[1:]
        path = _VARIABLE.sub(lambda match: environ[match.group(1).strip("{}")], base)
        if os.path.isabs(path):
            return path
    return None


def walk(base: str, patterns: list[str], deadline: float) -> Iterator[tuple[str, os.stat_result]]:
    """Yield regular files that match one of `patterns` ("debug/plog/plog-*.log") and are below `base`: links below it
    are not followed, `base` itself may be a link."""
    looked_at = 0
    seen: set[str] = set()
    for pattern in patterns:
        folders = [os.path.realpath(base)]
        *parents, last = pattern.split("/")
        for part in parents:
            folders = [
                entry.path
                for folder in folders
                for entry in _entries(folder)
                if fnmatch.fnmatchcase(entry.name, part) and entry.is_dir(follow_symlinks=False)
            ]
        for folder in folders:
            for entry in _entries(folder):
                looked_at += 1
                if looked_at > MOST_LOOKED_AT or time.monotonic() > deadline:
                    return
                if not fnmatch.fnmatchcase(entry.name, last) or entry.path in seen:
                    continue
                try:
                    facts = entry.stat(follow_symlinks=False)
                except OSError:
                    continue
                if stat.S_ISREG(facts.st_mode):
                    seen.add(entry.path)
                    yield entry.path, facts


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def choose_parts(size: int, room: int) -> tuple[list[tuple[int, int]], int]:
    """Return the (start, count) of the parts of a file to send within `room` bytes, and the number of omitted bytes.

    The complete file if it fits, else its start and, mostly, its end.
    """
    if size <= room:
        return [(0, size)], 0
    head = min(HEAD_BYTES, room // 4)
    return [(0, head), (size - (room - head), room - head)], size - room


def excerpt(text: bytes, patterns: list[str], *, around: int) -> bytes:
    """Return the lines that match one of the patterns, with `around` lines about each; `...` for omitted lines."""
    search = re.compile("|".join(f"(?:{pattern})" for pattern in patterns).encode("utf-8"), re.IGNORECASE).search
    lines = text.split(b"\n")
    if lines and not lines[-1]:
        lines.pop()
    wanted = sorted(
        {
            near
            for at, line in enumerate(lines)
            if search(line)
            for near in range(max(0, at - around), min(len(lines), at + around + 1))
        }
    )
    out: list[bytes] = []
    for before, at in zip([-1] + wanted, wanted):
        if at != before + 1 and out:
            out.append(b"...")
        out.append(lines[at])
    return b"".join(line + b"\n" for line in out)


def since_kernel_time(text: bytes, since_s: float) -> bytes:
    """Remove lines from before `since_s`, by the kernel's clock; a line without a stamp is treated as its neighbour."""
    kept = []
    passes = False
    for line in text.split(b"\n"):
        match = _KERNEL_STAMP.match(line)
        if match:
            passes = float(match.group(1)) >= since_s
        if passes:
            kept.append(line)
    return b"\n".join(kept)
