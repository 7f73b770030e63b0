"""Transfer of directories to the nodes: packed once, named by their hash, sent where they are missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable

from ascendrun.core.errors import InvalidInputError, Problem
from ascendrun.core.jobs.plan import Tree
from ascendrun.core.node_messages import Failure
from ascendrun.core.rank_env import is_own_variable
from ascendrun.head.protocol.agent_messages import HasTree, HasTreeReply, PutTree, PutTreeReply
from ascendrun.head.protocol.messages import Request
from ascendrun.head.protocol.remote import Reply
from ascendrun.head.state.state_dir import tree_file
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.core.jobfile.spec import JobSpec

CHUNK_BYTES = 1 << 20


class TreePush:
    """Sends a job's trees to one node, one request at a time: whether it is there, then its chunks.

    `query(request, body, then)` calls the agent; `done` is called once, with why it failed, None: they are there.
    """

    def __init__(
        self,
        state_dir: Path,
        trees: Sequence[Tree],
        *,
        query: Callable[[Request[Any], bytes, Callable[[Reply[Any]], None]], None],
        done: Callable[[Failure | None], None],
    ) -> None:
        self._state_dir, self._rest = state_dir, list(trees)
        self._query, self._done = query, done
        self.total_bytes = sum(tree.size_bytes for tree in trees)
        self.done_bytes = 0
        """Bytes on the node, sent now or already there."""

    def send_next(self) -> None:
        if not self._rest:
            self._done(None)
            return
        self._query(HasTree(self._rest[0].sha256), b"", self._found)

    def _found(self, reply: Reply[HasTreeReply]) -> None:
        if reply.error is not None:
            self._done(reply.error)
        elif reply.message.have:
            self.done_bytes += self._rest.pop(0).size_bytes
            self.send_next()
        else:
            self._send(0)

    def _send(self, offset: int) -> None:
        tree = self._rest[0]
        path = tree_file(self._state_dir, tree.sha256)
        try:
            total = path.stat().st_size
            with open(path, "rb") as file:
                file.seek(offset)
                chunk = file.read(CHUNK_BYTES)
        except OSError as error:
            self._done(
                Failure(
                    "tree-missing",
                    Text(
                        "staging.copy-unreadable",
                        "cannot read the packed {name} on the head node: {path}: {error}",
                        name=tree.name,
                        path=str(path),
                        error=error.strerror,
                    ),
                    Text("staging.copy-unreadable.hint", "submit the job again"),
                )
            )
            return
        request = PutTree(tree.sha256, offset, total)
        self._query(request, chunk, lambda reply: self._sent(reply, offset, offset + len(chunk), total))

    def _sent(self, reply: Reply[PutTreeReply], offset: int, end: int, total: int) -> None:
        if reply.error is not None:
            self._done(reply.error)
        elif end < total:
            self.done_bytes += end - offset
            self._send(end)
        else:
            self.done_bytes += end - offset
            self._rest.pop(0)
            self.send_next()


def push_once_per_home(
    hosts: Sequence[str], homes: Mapping[str, str], push: Callable[[str, Callable[[], None]], None]
) -> None:
    """Call `push(host, then)` for a host of each home (core/reports.shared_homes); `then` pushes to the others, which
    find the directories there."""
    waiting: dict[str, list[str]] = {}
    for host in hosts:
        waiting.setdefault(homes.get(host, host), []).append(host)

    def push_rest(rest: list[str]) -> None:
        for host in rest:
            push(host, lambda: None)

    for first, *rest in waiting.values():
        push(first, partial(push_rest, rest))


def read_secret_env(spec: JobSpec) -> dict[str, str]:
    """Read the variables of the job's `env_file` files, now and never stored. Raises InvalidInputError."""
    values: dict[str, str] = {}
    problems = []
    for file in spec.env_file:
        try:
            text = Path(file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            problems.append(
                Problem(
                    str(file),
                    None,
                    None,
                    Text("staging.env-unreadable", "cannot read the file: {error}", error=str(error)),
                )
            )
            continue
        for number, line in enumerate(text.splitlines(), start=1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            name, equals, value = line.partition("=")
            if not equals or not name.strip().isidentifier():
                problems.append(Problem(str(file), number, 1, Text("staging.env-line", "expected NAME=value")))
                continue
            if is_own_variable(name.strip()):
                problems.append(
                    Problem(
                        str(file),
                        number,
                        1,
                        Text("staging.env-reserved", "{name} is set by ascendrun", name=name.strip()),
                        Text("staging.env-reserved.hint", "remove this line"),
                    )
                )
                continue
            values[name.strip()] = value
    if problems:
        raise InvalidInputError(problems)
    return values
