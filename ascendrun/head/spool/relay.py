"""A large file for many hosts: this machine sends it to a few, and each of them passes on what it receives while it
arrives (node/agent/relay.py).

A host that loses its source, or gets damaged bytes, continues with another one; one that cannot relay, for want of TLS
or of a way between the nodes, is served by this machine.
"""

from __future__ import annotations

import datetime
import threading
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Callable, Optional, TypeVar

from ascendrun.core.dataclass import dataclass
from ascendrun.head.protocol.file_messages import Offer, PutTree, Take
from ascendrun.head.protocol.messages import Request
from ascendrun.head.protocol.remote import Reply
from ascendrun.head.spool.transfer import (
    BLOCK_S,
    LOST,
    Ask,
    Put,
    TransferError,
    finish_s,
    message_of,
    put,
    send_file,
    send_one,
)  # fmt: skip
from ascendrun.node.files import hash_start

T = TypeVar("T")
DIRECT, FAN_OUT = 4, 4
"""Hosts that this machine, and a host, send to at a time; with fewer than twice as many there is no relay."""
RELAY_BYTES = 4 << 20
"""A smaller file is sent sooner than its relay is arranged."""
TAKE_S, MOST_TAKE_S, TAKES_PER_S = 3.0, 30.0, 10
"""How long a host reads from another one before it replies how far it is: longer with many hosts, so that there are few
replies a second. After each the two make a new connection."""
PATIENCE, UNMET = 10, 5
"""Replies without a new byte after which a host has another source, which may wait for bytes itself; and as how many of
them a reply counts if the source accepted no connection."""
UNREACHED = 3
"""Sources that were lost before any host had a byte from another one."""

Relaying = Generator[Optional["tuple[Request[Any], bytes, float]"], "Reply[Any]", T]
"""As transfer.Steps; None: continue when there is a source."""


@dataclass
class Source:
    """Who sends a file: a host, None: this machine. `room`: for further hosts, at present."""

    host: str | None
    port: int
    room: int


class Relay:
    """One round of sending to many hosts. `addresses`: of each host, for the others."""

    def __init__(self, addresses: Mapping[str, Sequence[str]]) -> None:
        self.addresses = addresses
        self._exchanges: dict[str, Exchange] = {}
        self._lock = threading.Lock()

    def receive(
        self, host: str, path: Path, request: Put, arrived: Callable[[int], None], resume: Callable[[], None]
    ) -> Relaying[None]:
        """Bring a file of this machine to a host. `resume` continues after a None."""
        if request.size_bytes < RELAY_BYTES:
            yield from send_file(path, request, arrived)
            return
        key = request.tree if isinstance(request, PutTree) else request.path
        if key not in self._exchanges:
            self._exchanges[key] = Exchange(self, path, request)
        yield from self._exchanges[key].receive(host, arrived, resume)

    def send(
        self,
        host: str,
        slots: AbstractContextManager[object],
        ask: Ask,
        path: Path,
        request: Put,
        arrived: Callable[[int], None],
    ) -> None:
        """As transfer.send_one, from a thread for each host. `slots`: of those that are sent small files."""
        if request.size_bytes < RELAY_BYTES:
            with slots:
                send_one(ask, path, request, arrived)
            return
        has_source = threading.Event()
        steps, reply = self.receive(host, path, request, arrived, has_source.set), None
        while True:
            with self._lock:
                has_source.clear()
                try:
                    step = steps.send(reply)  # type: ignore[arg-type]  # None: begin, or continue
                except StopIteration:
                    return
            if step is None:
                has_source.wait()
                reply = None
                continue
            try:
                reply = ask(step[0], deadline_s=step[2], body=step[1])
            except TransferError:
                with self._lock:
                    steps.close()
                raise

    @property
    def take_s(self) -> float:
        """Return how long one request to take lasts."""
        return min(MOST_TAKE_S, max(TAKE_S, len(self.addresses) / TAKES_PER_S))

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
    """Which host gets one file from whom."""

    def __init__(self, relay: Relay, path: Path, request: Put) -> None:
        self._relay, self._path, self._request = relay, path, request
        self._sources = [Source(None, 0, DIRECT)]
        self._source_of: dict[str, Source] = {}
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_waking = False
        self._lost = self._passed = 0
        """Sources that were lost, and bytes that hosts had from each other."""

    @cached_property
    def _put(self) -> dict[str, Any]:
        """The request for the file with its hash; that of a tree is its name."""
        if isinstance(self._request, PutTree):
            return self._request.to_header()
        with open(self._path, "rb", buffering=0) as file:
            return replace(self._request, sha256=hash_start(file.fileno()).hexdigest()).to_header()

    def receive(self, host: str, arrived: Callable[[int], None], resume: Callable[[], None]) -> Relaying[None]:
        """Bring the file to a host."""
        have, is_done = yield from put(self._request)
        if is_done:
            return
        offer = yield from self._offer(host)
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
                    yield from send_file(self._path, self._request, arrived)
                    return
                have, is_done = yield from self._read(source, have, arrived)
            except (TransferError, GeneratorExit):
                if offer in self._sources:
                    self._sources.remove(offer)
                raise
            finally:
                source.room += 1
                self._wake()

    def _offer(self, host: str) -> Relaying[Source | None]:
        reply = yield Offer(self._put, self._relay.identity), b"", BLOCK_S
        if reply.error is not None and reply.error.code not in LOST:
            return None
        return Source(host, message_of(reply).port, FAN_OUT)

    def _read(self, source: Source, have: int, arrived: Callable[[int], None]) -> Relaying[tuple[int, bool]]:
        addresses, seconds = self._relay.addresses[source.host or ""], self._relay.take_s
        take = Take(self._put, self._relay.identity, addresses, source.port, seconds)
        deadline_s, stalls = seconds + finish_s(self._request.size_bytes), 0
        while stalls < PATIENCE and source in self._sources:
            reply = message_of((yield take, b"", deadline_s))
            if reply.done:
                return reply.have, True
            self._passed += max(0, reply.have - have)
            if reply.have == have:
                stalls += 1 if reply.is_met else UNMET
            else:
                stalls = PATIENCE if reply.have < have else 0
            have = reply.have
            arrived(have)
        if source in self._sources:
            self._sources.remove(source)
            self._lost += 1
        return have, False

    def _find(self, host: str, *, may_read: bool) -> Source | None:
        """Return the first source with room that does not get the file from `host`: this machine, if hosts cannot
        reach each other at all."""
        may_read = may_read and (self._passed > 0 or self._lost < UNREACHED)
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
