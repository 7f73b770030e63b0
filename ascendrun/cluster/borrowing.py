"""Hosts of an engine for a check or a plan: a short allocation without devices, which ends with it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Callable

from ascendrun.backends import Backends
from ascendrun.core.allocations import AllocationRequest, Allocator, EngineError, EngineFacts, Gone, Granted, Waiting
from ascendrun.core.errors import PreflightError
from ascendrun.core.hosts import Host
from ascendrun.core.jobs.reasons import Reason
from ascendrun.core.settings import Settings
from ascendrun.node.agent.checks import network_of

GRANT_S = 60.0
"""Seconds for which a check waits in the queue of an engine."""
LENGTH_S = 600.0
"""Seconds for which hosts are requested: longer than all limits of a survey."""
POLL_S = 0.5


@contextmanager
def lent_hosts(
    settings: Settings, engine: Mapping[str, Any], *, nodes: int | None
) -> Iterator[tuple[tuple[Host, ...], EngineFacts]]:
    """Yield hosts that an engine grants for the block, None: all that are free, and what the engine tells of itself.
    Raises PreflightError if it does not grant them soon."""
    backends, key = Backends(settings), f"check-{secrets.token_hex(8)}"
    allocator = backends.allocator(engine["type"])
    try:
        try:
            facts = replace(allocator.facts(engine), state_on=network_of(str(settings.state_dir)))
            length_s, nodes = LENGTH_S, nodes or max(1, facts.nodes)
            allocator.request(AllocationRequest(key, "check", engine, nodes, 0, grace_s=0.0, length_s=length_s))
            hosts = _await_hosts(allocator, key, engine)
        except EngineError as error:
            raise _not_granted(engine, error.reason) from error
        yield hosts, facts
    finally:
        with suppress(EngineError):  # then it ends by its length
            allocator.release({key: engine})
        backends.close()


def end_unused(
    settings: Settings, engine: Mapping[str, Any], is_over: Callable[[str], bool], *, dry_run: bool
) -> Sequence[str]:
    """Return what `Allocator.prune` ended in an engine. Raises PreflightError if the engine does not answer."""
    backends = Backends(settings)
    try:
        return backends.allocator(engine["type"]).prune(engine, is_over, dry_run=dry_run)
    except EngineError as error:
        raise PreflightError.of(
            "engine.not-pruned",
            "engine {engine} was not examined: {why}",
            "try again when the engine answers",
            engine=engine.get("name") or engine["type"],
            why=error.reason,
        ) from error
    finally:
        backends.close()


def _await_hosts(allocator: Allocator, key: str, engine: Mapping[str, Any]) -> tuple[Host, ...]:
    until = time.monotonic() + GRANT_S
    while True:
        state = allocator.poll({key: engine}).get(key)
        if isinstance(state, Granted):
            return state.hosts
        is_over = time.monotonic() > until or (isinstance(state, Waiting) and not state.will_start)
        if isinstance(state, Gone) or is_over:
            raise _not_granted(engine, None if state is None else state.reason)
        time.sleep(POLL_S)


def _not_granted(engine: Mapping[str, Any], why: Reason | None) -> PreflightError:
    return PreflightError.of(
        "engine.not-granted",
        "engine {engine} grants no hosts for a check: {why}",
        "ascendrun submit waits in its queue, and checks the job before a rank starts",
        engine=engine.get("name") or engine["type"],
        why=why,
    )
