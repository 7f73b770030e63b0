"""The command line that we give to `ssh`, and what its words on failure mean."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascendrun.core.errors import AuthenticationError, HostKeyChangedError, HostKeyUnknownError, UnreachableError
from ascendrun.core.hosts import Host
from ascendrun.head.ssh.config import SshTarget
from ascendrun.head.ssh.openssh import OpensshRoute, classify
from ascendrun.head.ssh.transport import Deadlines
from ascendrun.text import Text

TARGET = SshTarget(name="npu01", address="10.0.0.1", port=22, user="anna")


def argv_for(host: Host, target: SshTarget = TARGET, **more: Any) -> list[str]:
    return OpensshRoute(host, target, Deadlines(), **{"known_hosts": ["/s/known_hosts"], **more}).argv("-T")


def options(argv: list[str]) -> dict[str, str]:
    return dict(argv[at + 1].split("=", 1) for at, word in enumerate(argv) if word == "-o")


def test_nothing_can_ask_and_no_unknown_host_passes() -> None:
    chosen = options(argv_for(Host("npu01")))
    assert chosen["BatchMode"] == "yes" and chosen["StrictHostKeyChecking"] == "yes"
    assert chosen["UserKnownHostsFile"] == "/s/known_hosts" and chosen["GlobalKnownHostsFile"] == "none"
    assert chosen["ControlPath"] == "none" and chosen["PermitLocalCommand"] == "no" and chosen["ForwardAgent"] == "no"


def test_the_users_config_decides_what_the_hostfile_leaves_open() -> None:
    open_ones = {"HostName", "Port", "User", "IdentityFile", "ProxyJump", "HostKeyAlias"}
    assert not open_ones & options(argv_for(Host("n"))).keys()
    full = options(argv_for(Host("n", addr="10.0.0.1", user="anna", port=2222), alias="[10.0.0.1]:2222"))
    assert (full["HostName"], full["Port"], full["User"]) == ("10.0.0.1", "2222", "anna")
    assert full["HostKeyAlias"] == "[10.0.0.1]:2222"


def test_key_exchanges_that_the_config_names_are_left_alone() -> None:
    assert "KexAlgorithms" in options(argv_for(Host("n")))
    assert "KexAlgorithms" not in options(argv_for(Host("n"), replace(TARGET, algorithms={"kexalgorithms": "x"})))


@pytest.mark.parametrize("name", ["-oProxyCommand=evil", "a b", "$(evil)", "a;b"])
def test_a_host_name_is_never_an_option(name: str) -> None:
    assert argv_for(Host(name))[-2:] == ["--", name]


def test_a_path_with_a_space_stays_one_file() -> None:
    argv = argv_for(Host("n"), known_hosts=["/a b/k", "/c"], config=Path("/x y"))
    assert options(argv)["UserKnownHostsFile"] == '"/a b/k" /c'
    assert argv[argv.index("-F") + 1] == "/x y"


@pytest.mark.parametrize(
    "said, kind, key, hint",
    [
        ("anna@10.0.0.1: Permission denied (publickey).", AuthenticationError, "ssh.openssh-rejected", "ssh-add"),
        (
            "Received disconnect from 10.0.0.1 port 22:2: Too many authentication failures",
            AuthenticationError,
            "ssh.openssh-rejected",
            "ssh",
        ),
        (
            "No ED25519 host key is known for 10.0.0.1 and you have requested strict checking.\nHost key verification "
            "failed.",
            HostKeyUnknownError,
            "ssh.openssh-unknown",
            "ascendrun trust npu01",
        ),
        (
            "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\n"
            "The fingerprint for the ED25519 key sent by the remote "
            "host is\nSHA256:new+key/x.\nOffending ED25519 key in /s/known_hosts:7\nHost key verification failed.",
            HostKeyChangedError,
            "ssh.openssh-changed",
            "trust --replace npu01",
        ),
        (
            "@ WARNING: REVOKED HOST KEY DETECTED! @\nHost key verification failed.",
            HostKeyChangedError,
            "ssh.openssh-revoked",
            "ssh-keygen",
        ),
        (
            "ssh: Could not resolve hostname npu01: Name or service not known",
            UnreachableError,
            "ssh.openssh-line",
            "addr=",
        ),
        ("ssh: connect to host 10.0.0.1 port 22: Connection refused", UnreachableError, "ssh.openssh-line", "sshd"),
        ("ssh: connect to host 10.0.0.1 port 22: No route to host", UnreachableError, "ssh.openssh-line", "firewall"),
        ("Connection timed out during banner exchange", UnreachableError, "ssh.openssh-banner", "ssh -v npu01"),
        (
            "Unable to negotiate with 10.0.0.1 port 22: no matching key exchange method found. Their offer: x",
            UnreachableError,
            "ssh.openssh-line",
            "algorithms",
        ),
        (
            "/root/.ssh/config: line 3: Bad configuration option: foo\nterminating, 1 bad configuration options",
            UnreachableError,
            "ssh.openssh-config",
            "ssh -G npu01",
        ),
        ("Bad owner or permissions on /root/.ssh/config", UnreachableError, "ssh.openssh-config", "ssh -G npu01"),
        ("something nobody has seen", UnreachableError, "ssh.not-connected", "ssh -v npu01"),
        ("", UnreachableError, "ssh.not-connected", "ssh -v npu01"),
    ],
)
def test_what_ssh_says_becomes_our_error_with_the_way_out(
    said: str, kind: type[UnreachableError], key: str, hint: str
) -> None:
    error = classify(said, TARGET)
    assert type(error) is kind
    assert isinstance(error.message, Text) and error.message.key == key
    assert error.host == "npu01"
    assert hint in str(error.hint)


@given(st.text())
def test_no_words_of_ssh_make_the_reader_fail(said: str) -> None:
    assert isinstance(classify(said, TARGET), UnreachableError)


def test_braces_in_what_a_host_says_are_only_text() -> None:
    assert "{name} {0}" in str(classify("Permission denied {name} {0}", TARGET).message)
