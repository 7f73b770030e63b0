"""A job's directories on their way to its hosts: packed once, named by their hash, as one file each, where they are
missing.

With many hosts and a large directory this machine sends to a few hosts, and each of them passes on what it receives
while it arrives (node/agent/relay.py). A host that loses its source, or gets damaged bytes, continues with another one;
one that cannot relay, for want of TLS or of a way between the nodes, is served by this machine.
"""

from __future__ import annotations

import datetime
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Callable, Optional, TypeVar

from ascendrun.core.dataclass import dataclass
from ascendrun.core.jobs.plan import Tree
from ascendrun.core.node_messages import Failure
from ascendrun.head.protocol.file_messages import OfferTree, PutTree, TakeTree
from ascendrun.head.protocol.messages import Request
from ascendrun.head.protocol.remote import Reply
from ascendrun.head.spool.transfer import BLOCK_S, LOST, TransferError, message_of, put, send_file
from ascendrun.head.state.state_dir import tree_file
from ascendrun.text import Text

T = TypeVar("T")
DIRECT, FAN_OUT = 4, 4
"""Hosts that this machine, and a host, send to at a time; with fewer than twice as many there is no relay."""
RELAY_BYTES = 4 << 20
"""A smaller directory is sent sooner than its relay is arranged."""
STALLS = 2
"""Replies without a new byte after which a host has another source."""

Staging = Generator[Optional["tuple[Request[Any], bytes, float]"], "Reply[Any]", T]
"""As transfer.Steps; None: continue when there is a source."""


@dataclass
class Source:
    """Who sends a directory: a host, None: this machine. `room`: for further hosts, at present."""

    host: str | None
    port: int
    room: int


class Relay:
    """One round of sending to many hosts. `addresses`: of each host, for the others."""

    def __init__(self, addresses: Mapping[str, Sequence[str]]) -> None:
        self.addresses = addresses
        self._exchanges: dict[str, Exchange] = {}

    def exchange(self, tree: str) -> Exchange:
        """Return the exchange of a directory, by its hash."""
        return self._exchanges.setdefault(tree, Exchange(self))

    @cached_property
    def identity(self) -> str:
        """A private key and its certificate, PEM: hosts that have it take part in this round."""
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "ascendrun")])
        builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        builder = builder.serial_number(x509.random_serial_number())
        # The clocks of the hosts may be wrong; the key is forgotten after the round.
        builder = builder.not_valid_before(datetime.datetime(2000, 1, 1)).not_valid_after(datetime.datetime(2099, 1, 1))
        certificate = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        pem = serialization.Encoding.PEM
        private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        return (private + certificate.sign(key, hashes.SHA256()).public_bytes(pem)).decode()


class Exchange:
    """Which host gets one directory from whom."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._sources = [Source(None, 0, DIRECT)]
        self._source_of: dict[str, Source] = {}
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_waking = False

    def receive(
        self, host: str, path: Path, request: PutTree, arrived: Callable[[int], None], resume: Callable[[], None]
    ) -> Staging[None]:
        """Bring the directory to a host. `resume` continues after a None."""
        have, is_done = yield from put(request)
        if is_done:
            return
        offer = yield from self._offer(host, request)
        while not is_done:
            source = self._find(host, may_read=offer is not None)
            if source is None:
                self._waiting.append(resume)
                yield None
                continue
            source.room -= 1
            self._source_of[host] = source
            if offer is not None and offer not in self._sources:
                self._sources.append(offer)
                self._wake()
            try:
                if source.host is None:
                    yield from send_file(path, request, arrived)
                    return
                have, is_done = yield from self._read(source, request, have, arrived)
            except TransferError:
                if offer in self._sources:
                    self._sources.remove(offer)
                raise
            finally:
                source.room += 1
                self._wake()

    def _offer(self, host: str, request: PutTree) -> Staging[Source | None]:
        reply = yield OfferTree(request.tree, request.size_bytes, self._relay.identity), b"", BLOCK_S
        if reply.error is not None and reply.error.code not in LOST:
            return None
        return Source(host, message_of(reply).port, FAN_OUT)

    def _read(
        self, source: Source, request: PutTree, have: int, arrived: Callable[[int], None]
    ) -> Staging[tuple[int, bool]]:
        addresses = self._relay.addresses[source.host or ""]
        take = TakeTree(request.tree, request.size_bytes, self._relay.identity, addresses, source.port)
        stalls = 0
        while stalls < STALLS and source in self._sources:
            reply = message_of((yield take, b"", BLOCK_S))
            if reply.done:
                return reply.have, True
            stalls = STALLS if reply.have < have else stalls + 1 if reply.have == have else 0
            have = reply.have
            arrived(have)
        if source in self._sources:
            self._sources.remove(source)
        return have, False

    def _find(self, host: str, *, may_read: bool) -> Source | None:
        """Return the first source with room that does not get the directory from `host`."""
        for source in self._sources:
            if source.room > 0 and (source.host is None or (may_read and not self._is_below(source.host, host))):
                return source
        return None

    def _is_below(self, host: str | None, top: str) -> bool:
        while host is not None:
            if host == top:
                return True
            source = self._source_of.get(host)
            host = None if source is None else source.host
        return False

    def _wake(self) -> None:
        """Let hosts that wait try again, as long as one of them finds a source."""
        if self._is_waking:
            return
        self._is_waking, in_vain = True, 0
        while in_vain < len(self._waiting) and any(source.room > 0 for source in self._sources):
            before = len(self._waiting)
            self._waiting.popleft()()
            in_vain = in_vain + 1 if len(self._waiting) >= before else 0
        self._is_waking = False


class TreePush:
    """Sends a job's trees to one host, one request at a time.

    `query(request, body, then)` calls the agent; `done` is called once, with why it failed, None: they are there.
    `relay`: of this round, None: this machine sends everything.
    """

    def __init__(
        self,
        state_dir: Path,
        trees: Sequence[Tree],
        *,
        query: Callable[[Request[Any], bytes, Callable[[Reply[Any]], None]], None],
        done: Callable[[Failure | None], None],
        host: str = "",
        relay: Relay | None = None,
    ) -> None:
        self._query, self._done = query, done
        self._host, self._relay = host, relay
        self._steps = self._send_all(state_dir, trees)
        self.total_bytes = sum(tree.size_bytes for tree in trees)
        self.done_bytes = 0
        """Bytes on the node, sent now or already there."""

    def send_next(self) -> None:
        """Begin, or continue: there is a source."""
        self._go_on(partial(next, self._steps))

    def _go_on(self, run: Callable[[], tuple[Request[Any], bytes, float] | None]) -> None:
        try:
            step = run()
        except StopIteration:
            self._done(None)
        except TransferError as error:
            self._done(error.failure)
        else:
            if step is not None:
                self._query(step[0], step[1], lambda reply: self._go_on(partial(self._steps.send, reply)))

    def _send_all(self, state_dir: Path, trees: Sequence[Tree]) -> Staging[None]:
        before = 0

        def arrived(have: int) -> None:
            self.done_bytes = before + min(have, tree.size_bytes)

        for tree in trees:
            path = tree_file(state_dir, tree.sha256)
            try:
                size = path.stat().st_size if path.exists() else 0  # the node may have the tree
                request = PutTree(tree.sha256, size)
                if self._relay is None or size < RELAY_BYTES:
                    yield from send_file(path, request, arrived)
                else:
                    exchange = self._relay.exchange(tree.sha256)
                    yield from exchange.receive(self._host, path, request, arrived, self.send_next)
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
