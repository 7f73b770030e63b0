"""Checks of the way to a node: reached, let in, and what its login does before a command runs."""

from __future__ import annotations

from collections.abc import Iterator

from ascendrun.core.findings import Finding, Severity
from ascendrun.health.survey.check_context import Check, World

LOGIN_SLOW_S, LOGIN_TOO_SLOW_S = 2.0, 10.0
"""A login that takes 2 s is felt in every command; of 10 s, HCCL's connect time-out already loses a good part."""

_CODES = {
    "auth-failed": "auth-failed",
    "host-key-unknown": "host-key-unknown",
    "host-key-changed": "host-key-changed",
    "preflight-failed": "no-python",
}


def check_reached(world: World) -> Iterator[Finding]:
    for host, why in world.unreached.items():
        text = why.message
        for lead in (f"{host}: ", "this node: "):
            text = text[len(lead) :] if text.startswith(lead) else text
        advice = why.hint or f"ssh {host} true"
        yield Finding(_CODES.get(why.code, "unreachable"), Severity.FAIL, (host,), {"why": text, "advice": advice})


def check_login_time(world: World) -> Iterator[Finding]:
    for host, facts in world.facts.items():
        wait_s = facts.login_s
        if wait_s is None or wait_s < LOGIN_SLOW_S:
            continue
        severity = Severity.WARN if wait_s >= LOGIN_TOO_SLOW_S else Severity.NOTE
        yield Finding("login-slow", severity, (host,), {"seconds": f"{wait_s:.0f}"})


def check_login_noise(world: World) -> Iterator[Finding]:
    for host, facts in world.facts.items():
        if facts.login_noise:
            lines = facts.login_noise.splitlines()
            yield Finding(
                "login-noise", Severity.NOTE, (host,), {"line": lines[0][:120]}, tuple(line[:200] for line in lines[:3])
            )


def check_answers(world: World) -> Iterator[Finding]:
    """What hangs on a node is a finding by itself, whatever it would have said."""
    for host, facts in world.facts.items():
        if facts.late:
            yield Finding("probe-timeout", Severity.WARN, (host,), {"probes": ", ".join(facts.late)})


CHECKS = (
    Check(
        "ssh",
        check_reached,
        "every host is reached, lets us in and runs our agent",
        ("unreachable", "auth-failed", "host-key-unknown", "host-key-changed", "no-python"),
    ),
    Check("login-time", check_login_time, "a login's startup files take no noticeable time", ("login-slow",)),
    Check(
        "login-noise", check_login_noise, "a login's startup files write nothing into the connection", ("login-noise",)
    ),
    Check("probes", check_answers, "every question is answered in time", ("probe-timeout",)),
)
