"""Removal of old data: once a day, and on request."""

from __future__ import annotations

import time
from typing import Any

from ascendrun.core.retention import DAY_S
from ascendrun.head.loop.context import ControllerContext
from ascendrun.head.protocol import control_messages as messages
from ascendrun.head.protocol.control_socket import Answer
from ascendrun.head.state.job_files import pruned_at_s

LOOK_S = 3600.0
FIRST_S = 300.0
"""Seconds after the start until old data is looked for; later every LOOK_S."""


class Upkeep:
    """Use from the controller's thread."""

    def __init__(self, context: ControllerContext) -> None:
        self._context = context
        self._due_mono = time.monotonic() + FIRST_S

    def tick(self) -> None:
        """Remove old data once a day, on this machine and on the nodes that are connected."""
        if time.monotonic() < self._due_mono:
            return
        self._due_mono = time.monotonic() + LOOK_S
        if time.time() - (pruned_at_s(self._context.state_dir) or 0.0) > DAY_S:
            self.prune(messages.Prune(), lambda reply, body, is_last: None, hosts_up_only=True)

    def prune(self, request: messages.Prune, answer: Answer, *, hosts_up_only: bool = False) -> None:
        from ascendrun.head.loop.pruning import PruneOperation

        context = self._context

        def reply(message: Any, body: bytes, is_last: bool) -> None:
            answer(message, body, is_last)
            context.operations.sweep_later()

        operation = PruneOperation(
            request,
            context.store,
            context.links,
            context.retention,
            live={runner.job.id for runner in context.jobs},
            post=context.post,
            answer=reply,
            hosts_up_only=hosts_up_only,
        )
        context.operations.run(operation)

    def remove(self, request: messages.Remove, answer: Answer) -> None:
        from ascendrun.head.loop.removal import RemoveOperation

        context, outputs = self._context, self._context.collectors.outputs
        operation = RemoveOperation(
            request,
            context.store,
            context.operations.context(answer),
            live={runner.job.id for runner in context.jobs},
            fetching=outputs.jobs_now(),
            cancel=outputs.cancel,
        )
        context.operations.run(operation)
