"""The errors that the output of `ssh` means."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ascendrun.core.errors import AuthenticationError, HostKeyChangedError, HostKeyUnknownError, UnreachableError
from ascendrun.head.ssh.config import SshTarget
from ascendrun.text import Text

_ADDED: Mapping[str, str] = {}
"""The values come with the output of ssh."""
_OUTPUTS: Sequence[tuple[str, type[UnreachableError], Text, Text]] = (
    # output of ssh, the error, its message and hint (values are added); the first match counts
    (
        r"REVOKED HOST KEY|marked as revoked",
        HostKeyChangedError,
        Text("ssh.openssh-revoked", "{host}: the host key is revoked; not connected", **_ADDED),
        Text("ssh.host-key-revoked.hint", "generate new host keys on the host: ssh-keygen -A", **_ADDED),
    ),
    (
        r"IDENTIFICATION HAS CHANGED",
        HostKeyChangedError,
        Text(
            "ssh.openssh-changed",
            "{host}: host key {key} differs from the recorded key ({file}); not connected",
            **_ADDED,
        ),
        Text(
            "ssh.openssh-changed.hint",
            "if the host was reinstalled, compare with ssh-keygen -lf on its console, then run: ascendrun "
            "trust --replace {name}",
            **_ADDED,
        ),
    ),
    (
        r"host key is known for|Host key verification failed",
        HostKeyUnknownError,
        Text("ssh.openssh-unknown", "{host}: unknown host key; not connected ({line})", **_ADDED),
        Text("ssh.trust-name", "ascendrun trust {name}", **_ADDED),
    ),
    (
        r"Permission denied|Too many authentication failures|No more authentication methods",
        AuthenticationError,
        Text("ssh.openssh-rejected", "{host}: sshd rejected user {user} ({line})", **_ADDED),
        Text(
            "ssh.openssh-rejected.hint",
            "check the user name; add keys with a passphrase to the agent: ssh-add; details: ssh -v {name}",
            **_ADDED,
        ),
    ),
    (
        r"Could not resolve hostname",
        UnreachableError,
        Text("ssh.openssh-line", "{host}: {line}", **_ADDED),
        Text("ssh.openssh-resolve.hint", "check /etc/hosts and DNS, or set addr= in the hostfile", **_ADDED),
    ),
    (
        r"during banner exchange",
        UnreachableError,
        Text("ssh.openssh-banner", "{host}: connected, but no SSH banner ({line})", **_ADDED),
        Text(
            "ssh.openssh-banner.hint",
            "check the load of the host and which service uses the port: ssh -v {name}",
            **_ADDED,
        ),
    ),
    (
        r"Unable to negotiate|no matching",
        UnreachableError,
        Text("ssh.openssh-line", "{host}: {line}", **_ADDED),
        Text("ssh.openssh-algorithms.hint", "allow one of the algorithms of this host in ~/.ssh/config", **_ADDED),
    ),
    (
        r"Bad configuration|Bad owner|terminating, \d+ bad|keyword .* extra|[Mm]issing argument|line \d+:",
        UnreachableError,
        Text("ssh.openssh-config", "{host}: ssh rejected its configuration ({line})", **_ADDED),
        Text("ssh.openssh-config.hint", "fix the file and check it: ssh -G {name}", **_ADDED),
    ),
    (
        r"Connection refused|timed out|No route|Network is unreachable",
        UnreachableError,
        Text("ssh.openssh-line", "{host}: {line}", **_ADDED),
        Text("ssh.openssh-connect.hint", "check the host, sshd and firewalls: ssh -v {name}", **_ADDED),
    ),
)


def classify(output: str, target: SshTarget, *, kind: type[UnreachableError] | None = None) -> UnreachableError:
    """Return the error that the output of ssh means; `kind` if the caller knows it already."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    for pattern, error, message, hint in _OUTPUTS:
        line = next((line for line in lines if re.search(pattern, line)), None)
        if line is not None:
            key = re.search(r"fingerprint for the (\S+) key sent by the remote host is\s+(SHA256:\S+?)\.?\s", output)
            place = re.search(r"Offending (\S+) key in (\S+)", output)
            values = {
                "host": target.label,
                "name": target.name,
                "user": target.user,
                "line": line[:200],
                "key": " ".join(key.groups()) if key else None,
                "file": place.group(2) if place else None,
            }
            return (kind or error)(
                Text(message.key, message.english, **values), hint=Text(hint.key, hint.english, **values)
            )
    last = lines[-1][:200] if lines else None
    return (kind or UnreachableError)(
        Text("ssh.not-connected", "{host}: not connected ({error})", host=target.label, error=last),
        hint=Text("ssh.verbose", "ssh -v {host}", host=target.name),
    )


def no_login(target: SshTarget, limit_s: float) -> UnreachableError:
    return UnreachableError(
        Text(
            "ssh.openssh-timeout",
            "{host}: ssh did not log in within {limit_s:.3g} s",
            host=target.label,
            limit_s=limit_s,
        ),
        hint=Text(
            "ssh.openssh-timeout.hint",
            "check the load of the host and prompts for input: ssh -v {host}",
            host=target.name,
        ),
    )


def no_binary(error: OSError) -> UnreachableError:
    return UnreachableError(
        Text("ssh.no-binary", "cannot start ssh ({error})", error=error.strerror or str(error)),
        hint=Text("ssh.no-binary.hint", "install the OpenSSH client and add it to PATH"),
    )
