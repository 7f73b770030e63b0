"""The errors of a connection to an agent."""

from __future__ import annotations

from ascendrun.core.errors import (
    AgentVersionError,
    AscendrunError,
    AuthenticationError,
    HostKeyChangedError,
    HostKeyUnknownError,
    InvalidInputError,
    UnreachableError,
)
from ascendrun.head.protocol.messages import OTHER_VERSION_HINT
from ascendrun.node import wire
from ascendrun.text import Text


def is_permanent(error: AscendrunError) -> bool:
    """Return whether only the operator can help: another connect does not."""
    return isinstance(error, (AuthenticationError, HostKeyUnknownError, HostKeyChangedError, AgentVersionError))


def closed(host: str) -> Text:
    return Text("agent.closed", "{host}: the connection was closed", host=host)


def other_version(host: str, agent: object) -> AgentVersionError:
    return AgentVersionError(
        Text(
            "agent.other-version",
            "{host}: the agent is of another version (protocol {agent}, the controller uses {controller})",
            host=host,
            agent=agent,
            controller=wire.PROTOCOL,
        ),
        hint=OTHER_VERSION_HINT,
    )


def on_host(host: str, reason: Text | str) -> Text:
    return Text("agent.on-host", "{host}: {reason}", host=host, reason=reason)


def invalid_data(host: str, error: ValueError | InvalidInputError) -> UnreachableError:
    """Make the error for a host that sends what no agent sends."""
    what = error.problems[0].message if isinstance(error, InvalidInputError) else str(error)
    return UnreachableError(
        Text("agent.invalid-data", "{host}: invalid data from the agent: {error}", host=host, error=what),
        hint=Text("agent.invalid-data.hint", "check that ~/.bashrc prints nothing: ssh {host} true", host=host),
    )


def internal_failure(host: str, error: Exception) -> UnreachableError:
    """Make the error for an internal error while connecting."""
    return UnreachableError(
        Text("agent.internal", "{host}: internal error: {error}", host=host, error=f"{type(error).__name__}: {error}")
    )


def agent_start_timeout(host: str, limit_s: float) -> UnreachableError:
    return UnreachableError(
        Text(
            "agent.start-timeout",
            "{host}: the agent did not start within {limit_s:g} s after login",
            host=host,
            limit_s=limit_s,
        ),
        hint=Text("agent.start-timeout.hint", "a shell startup file may be blocking; run: ssh {host} true", host=host),
    )


def no_reply(host: str, limit_s: float) -> UnreachableError:
    return UnreachableError(Text("agent.unreachable", "{host}: no reply for {limit_s:g} s", host=host, limit_s=limit_s))
