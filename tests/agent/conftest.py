"""A real agent process over pipes, driven as the head drives it; no SSH. Nothing it started outlives a test."""

from __future__ import annotations

import glob
import io
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

import pytest

from ascendrun.node import layout, loader, procs, reap, tree_hash, wire

PY = sys.executable
HOLD = ["sh", "-c", "exec sleep 600"]
TAG = "head-job.1"
DEADLINE_S = 120.0
_Key = tuple[str, str, int]


def program(code: str) -> list[str]:
    return [PY, "-c", code]


def find_pythons() -> list[str]:
    """Every interpreter from 3.7 on that is at hand, each minor version once."""
    roots = os.environ.get("PYENV_ROOT") or os.path.expanduser("~/.pyenv")
    candidates = [sys.executable, *sorted(glob.glob(roots + "/versions/3.*/bin/python"))]
    candidates += [path for minor in range(7, 15) if (path := shutil.which("python3.%d" % minor))]
    found: dict[str, str] = {}
    for path in candidates:
        run = subprocess.run(
            [path, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], capture_output=True, text=True
        )
        version = run.stdout.strip()
        if run.returncode == 0 and version and tuple(map(int, version.split("."))) >= (3, 7):
            found.setdefault(version, path)
    return [found[version] for version in sorted(found, key=lambda text: int(text.split(".")[1]))]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "python" in metafunc.fixturenames:
        metafunc.parametrize("python", find_pythons(), ids=lambda path: path.replace("/", "_"))


class Client:
    """The head's end of one serving agent."""

    def __init__(self, node: Node, *, python: str, hostname: str | None, env: dict[str, str]) -> None:
        self.node = node
        apart = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        apart += [] if os.geteuid() == 0 else ["--map-root-user"]
        machine = [*apart, "sh", "-c", 'hostname "$0"; exec "$@"', hostname] if hostname else []
        self.process = subprocess.Popen(
            [*machine, python, "-I", "-S", str(node.agent), "serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
        )
        assert self.process.stdin and self.process.stdout and self.process.stderr
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        self.boot, self.reader = loader.Boot(), wire.FrameReader()
        self.number = 0
        self.replies: dict[int, tuple[dict[str, Any], bytes]] = {}
        self.events: list[dict[str, Any]] = []
        self.files: dict[_Key, bytearray] = {}
        self.hello = self.wait(lambda: next((e for e in self.events if e["event"] == "hello"), None))

    def pump(self, timeout_s: float) -> None:
        readable, _, _ = select.select([self.stdout], [], [], timeout_s)
        if not readable:
            return
        data = os.read(self.stdout.fileno(), 1 << 20)
        if not data:
            raise EOFError(f"the agent is gone: {self.last_words()}")
        if not self.boot.is_over:
            self.boot.feed(data)
            data = self.boot.leftover
        for header, body in self.reader.feed(data):
            self._take(header, body)

    def _take(self, header: dict[str, Any], body: bytes) -> None:
        if "re" in header:
            self.replies[header["re"]] = (header, body)
            return
        self.events.append(header)
        if header["event"] == "data":
            kept = self.files.setdefault((header["tag"], header["file"], header["generation"]), bytearray())
            assert header["offset"] == len(kept), f"a gap or a repetition in {header}"
            kept += body

    def wait(self, condition: Callable[[], Any], deadline_s: float = DEADLINE_S) -> Any:
        """The condition's first true value; fails at the deadline."""
        until = time.monotonic() + deadline_s
        while True:
            value = condition()
            if value:
                return value
            assert time.monotonic() < until, f"not within {deadline_s:g} s; story: {self.stories()}"
            self.pump(0.05)

    def post(self, op: str, body: bytes = b"", **fields: Any) -> int:
        self.number += 1
        if "tag" in fields:
            self.node.tags.add(fields["tag"])
        self.stdin.write(wire.pack(dict(fields, id=self.number, op=op), body))
        self.stdin.flush()
        return self.number

    def ask(self, op: str, body: bytes = b"", **fields: Any) -> tuple[dict[str, Any], bytes]:
        number = self.post(op, body, **fields)
        return self.wait(lambda: self.replies.pop(number, None))

    def do(self, op: str, body: bytes = b"", **fields: Any) -> dict[str, Any]:
        reply, _ = self.ask(op, body, **fields)
        assert reply["ok"], reply
        return reply

    def refused(self, op: str, body: bytes = b"", **fields: Any) -> dict[str, Any]:
        reply, _ = self.ask(op, body, **fields)
        assert not reply["ok"], reply
        error = reply["error"]
        assert error["message"]
        return error

    def stage(self, folder: Path, *, claim: str | None = None, chunk: int = 1000) -> Any:
        """Puts the folder as a tree, in small chunks; returns its name, or the error of the first refusal."""
        entries = tree_hash.list_tree(str(folder))
        sha256 = claim or tree_hash.hash_listing(entries)
        out = io.BytesIO()
        tree_hash.write_tar(str(folder), entries, out)
        data = out.getvalue()
        file = {"tree": sha256, "size_bytes": len(data)}
        have, is_done = 0, False
        while not is_done:
            more = {"sha256": ""} if have == len(data) else {"offset": have}
            reply, _ = self.ask("put_tree", data[have : have + chunk], **file, **more)
            if not reply["ok"]:
                return reply["error"]
            have, is_done = reply["have"], reply["done"]
        return sha256

    # --- a job ---

    def start(self, job: dict[str, Any], **go: Any) -> None:
        """prepare, follow, go."""
        ready = self.do("prepare", **job)
        self.do("follow", tag=job["tag"], offsets={})
        self.do("go", **{"tag": job["tag"], "master_port": ready["master_port"], "secret_env": {}, **go})

    def story(self, tag: str) -> list[dict[str, Any]]:
        found: dict[tuple[int, str], dict[str, Any]] = {}
        for key in sorted(key for key in self.files if key[:2] == (tag, "events")):
            for line in bytes(self.files[key]).split(b"\n")[:-1]:
                event = json.loads(line or b"{}")
                if event:
                    found[event["seq"], event["event"]] = event
        return list(found.values())

    def stories(self) -> dict[str, Any]:
        return {tag: [(e["event"], e.get("rank"), e.get("code")) for e in self.story(tag)] for tag in self.node.tags}

    def told(self, tag: str, event: str, **fields: Any) -> list[dict[str, Any]]:
        return [e for e in self.story(tag) if e["event"] == event and all(e.get(k) == v for k, v in fields.items())]

    def wait_told(self, tag: str, event: str, **fields: Any) -> dict[str, Any]:
        return self.wait(lambda: self.told(tag, event, **fields))[0]

    def wait_ended(self, tag: str, deadline_s: float = DEADLINE_S) -> dict[str, Any]:
        return self.wait(lambda: self.told(tag, "ended"), deadline_s)[0]

    def run(self, job: dict[str, Any], **go: Any) -> dict[str, Any]:
        self.start(job, **go)
        return self.wait_ended(job["tag"])

    def begin(self, job: dict[str, Any], **go: Any) -> None:
        """Start it, and see its first rank."""
        self.start(job, **go)
        self.wait_told(job["tag"], "rank_started", rank=0)

    def end(self, tag: str) -> dict[str, Any]:
        """Stop it now, and see its end."""
        self.do("stop", tag=tag, now=True, grace_s=None)
        return self.wait_ended(tag)

    def output(self, tag: str, rank: int = 0, stream: str = "out") -> bytes:
        name = "%s.%s" % (layout.process_name(rank), stream)
        generations = sorted(key[2] for key in self.files if key[:2] == (tag, name))
        return b"".join(bytes(self.files[(tag, name, g)]) for g in generations)

    def last_words(self) -> str:
        """What a dead agent wrote to its standard error."""
        assert self.process.stderr
        return self.process.stderr.read().decode("utf-8", "replace")

    def pids(self, tag: str) -> list[int]:
        """The attempt's processes by the agent, without the supervisor."""
        return [process["pid"] for process in self.do("processes", tag=tag)["processes"]]

    def phase(self, tag: str) -> str | None:
        found: str | None = self.do("processes", tag=tag)["phase"]
        return found

    def wait_phase(self, tag: str, phase: str) -> None:
        """Wait for that phase. The end is told before the file is written that makes the phase `ended`."""
        self.wait(lambda: self.phase(tag) == phase)

    def kill(self) -> None:
        self.process.kill()
        self.close()

    def close(self) -> int:
        """Ends the agent's input and waits for its end."""
        try:
            self.stdin.close()
        except BrokenPipeError:
            pass
        code = self.process.wait(DEADLINE_S)
        self.stdout.close()
        assert self.process.stderr
        self.process.stderr.close()
        return code


class Node:
    """One user's account on one node: its agent folder, the agents that were started, the tags that were used."""

    def __init__(self, root: Path) -> None:
        self.root = root
        pyz, sha256 = loader.pack_agent(loader.read_sources())
        root.mkdir(mode=0o700)
        self.agent = root / (f"agent-{sha256[:16]}.pyz")
        self.agent.write_bytes(pyz)
        self.tags: set[str] = set()
        self.clients: list[Client] = []

    def connect(self, *, python: str = sys.executable, hostname: str | None = None, **env: str) -> Client:
        """`hostname`: on a machine of that name, which shares this account's home and ends with the agent."""
        environ = {**os.environ, layout.ROOT_VARIABLE: str(self.root), **env}
        client = Client(self, python=python, hostname=hostname, env=environ)
        self.clients.append(client)
        return client

    def job(self, tag: str, *commands: list[str], **fields: Any) -> dict[str, Any]:
        """What `prepare` takes, for ranks that run these commands."""
        run, _ = layout.split_tag(tag)
        ranks = [
            {"rank": n, "local_rank": n, "argv": list(argv), "env": {"RANK": str(n)}} for n, argv in enumerate(commands)
        ]
        return {
            "tag": tag,
            "node_rank": 0,
            "ranks": ranks,
            "cwd": layout.work_dir(str(self.root), run),
            "setup": None,
            "trees": [],
            "link_tree": None,
            "ports": [],
            "start_s": 60,
            "max_s": None,
            "stop": {"signal": "TERM", "grace_s": 5},
            **fields,
        }

    def work(self, run: str) -> Path:
        return Path(layout.work_dir(str(self.root), run))

    def folder(self, tag: str) -> Path:
        return Path(layout.attempt_dir(str(self.root), tag))

    def identity(self, tag: str) -> dict[str, Any]:
        found = json.loads((self.folder(tag) / layout.IDENTITY).read_text())
        assert isinstance(found, dict)
        return found

    def alive(self, tag: str) -> list[int]:
        """The attempt's processes as the kernel knows them, without the supervisor."""
        return [pid for pid, _ in reap.find_marked(reap.marks_of(tag, str(self.root)))]

    def clean(self) -> list[str]:
        """Ends everything; returns what should have ended by itself."""
        left = []
        for client in self.clients:
            if client.process.returncode is None:
                client.close()
        for tag in sorted(self.tags):
            identity_file = self.folder(tag) / layout.IDENTITY
            identity = json.loads(identity_file.read_text()) if identity_file.exists() else {}
            until = time.monotonic() + DEADLINE_S
            while (self.alive(tag) or procs.is_alive(identity)) and time.monotonic() < until:
                time.sleep(0.01)
            for pid, start in reap.find_marked(reap.marks_of(tag, str(self.root))):
                left.append("{}: {}".format(tag, Path("/proc/%d/cmdline" % pid).read_bytes()))
                procs.send_signal(pid, start, 9)
            if procs.is_alive(identity):
                left.append(f"{tag}: its supervisor")
                procs.send_signal(identity["pid"], identity["start"], 9)
        shutil.rmtree(layout.local_root(str(self.root)), ignore_errors=True)
        return left


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path / "node")
    yield node
    left = node.clean()
    assert not left, f"left behind: {left}"


@pytest.fixture
def agent(node: Node) -> Client:
    return node.connect()


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A folder to stage, with names and contents of all kinds."""
    folder = tmp_path / "code a'; echo b\n$(touch pwn) ünï"
    (folder / "pkg" / "empty").mkdir(parents=True)
    (folder / "train.py").write_text("print('trained')\n")
    (folder / "pkg" / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (folder / "pkg" / "run.sh").chmod(0o755)
    (folder / "pkg" / "-rf ; \\ \n").write_bytes(b"\0\xff")
    (folder / "link").symlink_to("pkg/run.sh")
    return folder
