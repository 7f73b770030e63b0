"""Checks of the SSH connection: reachability, login, and effects of startup files."""

from __future__ import annotations

from collections.abc import Iterator

from ascendrun.core.findings import Finding, Severity
from ascendrun.health.survey.check_context import CheckContext, check, finding, node_check
from ascendrun.health.survey.facts import NodeFacts

LOGIN_SLOW_S, LOGIN_TOO_SLOW_S = 2.0, 10.0
"""2 s delay every command; 10 s are a large part of HCCL's connect timeout."""

_CODES = {
    "auth-failed": "auth-failed",
    "host-key-unknown": "host-key-unknown",
    "host-key-changed": "host-key-changed",
    "preflight-failed": "no-python",
}


@check(
    "ssh",
    "every host is reachable, accepts the login and runs the agent",
    "unreachable auth-failed host-key-unknown host-key-changed no-python",
)
def check_ssh(context: CheckContext) -> Iterator[Finding]:
    for host, why in context.unreached.items():
        hint = why.hint or f"ssh {host} true"
        yield finding(_CODES.get(why.code, "unreachable"), Severity.FAIL, host, why=why.message, hint=hint)


@node_check("login-time", "login startup files are fast", "login-slow")
def check_login_time(context: CheckContext, host: str, facts: NodeFacts) -> Iterator[Finding]:
    wait_s = facts.login_s
    if wait_s is None or wait_s < LOGIN_SLOW_S:
        return
    severity = Severity.WARN if wait_s >= LOGIN_TOO_SLOW_S else Severity.NOTE
    yield finding("login-slow", severity, host, seconds=round(wait_s, 1))


@node_check("login-noise", "login startup files print nothing into the connection", "login-noise")
def check_login_noise(context: CheckContext, host: str, facts: NodeFacts) -> Iterator[Finding]:
    if facts.login_noise:
        lines = facts.login_noise.splitlines()
        evidence = tuple(line[:200] for line in lines[:3])
        yield finding("login-noise", Severity.NOTE, host, evidence, line=lines[0][:120])


@node_check("probes", "every probe returns in time", "probe-timeout")
def check_probes(context: CheckContext, host: str, facts: NodeFacts) -> Iterator[Finding]:
    """Report probes that did not return in time."""
    if facts.late:
        yield finding("probe-timeout", Severity.WARN, host, probes=facts.late)
