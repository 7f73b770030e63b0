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
from ascendrun.head.protocol.file_messages import PutTree
from ascendrun.head.protocol.messages import Request
from ascendrun.head.protocol.remote import Reply
from ascendrun.head.spool.transfer import Steps, TransferError, send_file
from ascendrun.head.state.state_dir import tree_file
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.core.jobfile.spec import JobSpec


class TreePush:
    """Sends a job's trees to one node, one request at a time.

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
        self._query, self._done = query, done
        self._steps = self._send_all(state_dir, trees)
        self.total_bytes = sum(tree.size_bytes for tree in trees)
        self.done_bytes = 0
        """Bytes on the node, sent now or already there."""

    def send_next(self, reply: Any = None) -> None:
        """Continue after a reply; None: begin."""
        try:
            request, body, _ = self._steps.send(reply)
        except StopIteration:
            self._done(None)
        except TransferError as error:
            self._done(error.failure)
        else:
            self._query(request, body, self.send_next)

    def _send_all(self, state_dir: Path, trees: Sequence[Tree]) -> Steps:
        before = 0

        def arrived(have: int) -> None:
            self.done_bytes = before + min(have, tree.size_bytes)

        for tree in trees:
            path = tree_file(state_dir, tree.sha256)
            try:
                size = path.stat().st_size if path.exists() else 0  # the node may have the tree
                request = PutTree(tree.sha256, size)
                yield from send_file(path, request, arrived)
            except OSError as error:
                what = Text(
                    "staging.copy-unreadable",
                    "cannot read the packed {name} on the head node: {path}: {error}",
                    name=tree.name,
                    path=str(path),
                    error=error.strerror,
                )
                hint = Text("staging.copy-unreadable.hint", "submit the job again")
                raise TransferError(Failure("tree-missing", what, hint)) from error
            before += tree.size_bytes
            self.done_bytes = before


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
    problems: list[Problem] = []
    for file in map(str, spec.env_file):
        try:
            lines = Path(file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            what = Text("staging.env-unreadable", "cannot read the file: {error}", error=str(error))
            problems.append(Problem(file, None, None, what))
            continue
        for number, line in enumerate(lines, start=1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            name, equals, value = line.partition("=")
            name = name.strip()
            if not equals or not name.isidentifier():
                problems.append(Problem(file, number, 1, Text("staging.env-line", "expected NAME=value")))
            elif is_own_variable(name):
                what = Text("staging.env-reserved", "{name} is set by ascendrun", name=name)
                problems.append(Problem(file, number, 1, what, Text("staging.env-reserved.hint", "remove this line")))
            else:
                values[name] = value
    if problems:
        raise InvalidInputError(problems)
    return values
