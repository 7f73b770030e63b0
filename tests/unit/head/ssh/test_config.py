"""Reading ssh config files, kind and hostile; what `ssh -G` says of the same files is asked in tests/ssh."""

from __future__ import annotations

import getpass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascendrun.core.hosts import Host
from ascendrun.head.ssh.config import SshConfig, SshTarget, parse_config, parse_jump, split_arguments


def resolved(tmp_path: Path, text: str, host: Host | None = None, mode: int = 0o600) -> SshTarget:
    path = tmp_path / "config"
    path.write_text(text)
    path.chmod(mode)
    return SshConfig(path).resolve(host or Host("npu01"))


@pytest.mark.parametrize(
    "text, part",
    [
        ('Host "npu01\n  User x', "quote"),
        ("User", "config:1"),
        ("Host npu01\n  Port\n", "config:2"),
        ("\x00\x01 \x02", "config:1"),
        ("Port 99999", "99999"),
        ("Port 0", "0"),
        ("Port x", "x"),
        ("Match exec true\n  User x", "Match exec"),
        ("Match host", "Match host"),
        ("Match all\n  ProxyCommand nc %h %p", "proxycommand nc %h %p"),
        ("Host npu*\n  ProxyJump a,b", "ssh.several-jumps"),
        ("CertificateFile /k-cert.pub", "certificatefile"),
        ("GSSAPIAuthentication yes", "GSSAPIAuthentication"),
        ("PreferredAuthentications gssapi-with-mic", "preferredauthentications"),
        ("CanonicalizeHostname yes", "canonicalizehostname"),
        ("BindAddress 10.0.0.9", "bindaddress"),
        ("PKCS11Provider /lib/x.so", "pkcs11provider"),
    ],
)
def test_what_we_cannot_do_is_left_to_openssh_with_the_reason(tmp_path: Path, text: str, part: str) -> None:
    why = resolved(tmp_path, text).why_openssh
    assert why is not None and part in f"{why.key} {list(why.values.values())}"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n\n# only this\n",
        "Host other\n  ProxyCommand nc %h\nMatch originalhost other exec true\n  Port 1",
        "ProxyCommand none",
        "ProxyJump none",
        "CanonicalizeHostname no",
        "GSSAPIAuthentication no",
        "Port 22\r\n",
        "UnknownOption 1\nCompression yes\nForwardAgent yes",
        "Match !host npu01 exec false\n  User x",
    ],
)
def test_harmless_files_stay_with_paramiko(tmp_path: Path, text: str) -> None:
    assert resolved(tmp_path, text).why_openssh is None


def test_a_file_that_others_may_write_is_not_believed(tmp_path: Path) -> None:
    target = resolved(tmp_path, "User evil", mode=0o666)
    assert target.why_openssh is not None and target.why_openssh.key == "ssh.config-writable"
    assert target.user == getpass.getuser()


def test_a_given_file_that_is_missing_is_told(tmp_path: Path) -> None:
    why = SshConfig(tmp_path / "none").resolve(Host("n")).why_openssh
    assert why is not None and why.key == "ssh.config-missing"


def test_includes_that_include_each_other_end(tmp_path: Path) -> None:
    target = resolved(tmp_path, f"Include {tmp_path}/config\nUser anna")
    assert target.why_openssh is not None and target.why_openssh.key == "ssh.include-depth"


def test_the_hostfile_wins_over_the_config(tmp_path: Path) -> None:
    host = Host("npu01", addr="10.0.0.1", user="anna", port=2222)
    target = resolved(tmp_path, "Host npu01\n  HostName x\n  User y\n  Port 3", host)
    assert (target.address, target.user, target.port) == ("10.0.0.1", "anna", 2222)
    assert target.label == "npu01 (10.0.0.1:2222)"


def test_the_first_value_wins_and_keys_add_up(tmp_path: Path) -> None:
    target = resolved(
        tmp_path,
        """
Host npu01
  User first
  IdentityFile /k1
Host npu*
  User second
  Port = 2200
  IdentityFile "/a b/k2"
Host !npu01 *
  HostName never
Host *
  IdentityFile /k1
  IdentitiesOnly yes
""",
    )
    assert (target.user, target.port, target.address) == ("first", 2200, "npu01")
    assert target.identity_files == ("/k1", "/a b/k2") and target.identities_only


def test_an_include_counts_only_where_its_host_block_applies(tmp_path: Path) -> None:
    for name, user in (("a.conf", "anna"), ("b.conf", "ben")):
        (tmp_path / name).write_text(f"Host npu*\n  User {user}\n")
        (tmp_path / name).chmod(0o600)
    text = f"Host other\n  Include {tmp_path}/a.conf\nHost npu01\n  Include {tmp_path}/b*.conf\n  Port 7"
    target = resolved(tmp_path, text)
    assert (target.user, target.port, target.why_openssh) == ("ben", 7, None)


def test_final_blocks_come_after_all_others(tmp_path: Path) -> None:
    target = resolved(tmp_path, "Match final all\n  User last\n  Port 5\nHost npu01\n  User first")
    assert (target.user, target.port) == ("first", 5)


def test_tokens_and_variables_are_filled_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEYS", "/keys")
    target = resolved(
        tmp_path,
        "User anna\nHostName %h.lan\nIdentityFile ${KEYS}/%r@%n-%p-%%\nIdentityAgent none\n"
        "HostKeyAlias one\nAddressFamily inet6\nUserKnownHostsFile /a /b\nProxyJump j%%:2",
    )
    assert target.address == "npu01.lan"
    assert target.identity_files == ("/keys/anna@npu01-22-%",)
    assert target.identity_agent == "none" and target.key_alias == "one"
    assert target.known_hosts_files[:2] == ("/a", "/b")
    assert target.jump == "j%:2"


@pytest.mark.parametrize(
    "text, host",
    [
        ("bastion", Host("bastion")),
        ("anna@bastion:2222", Host("bastion", user="anna", port=2222)),
        ("ssh://anna@bastion:22/", Host("bastion", user="anna", port=22)),
        ("[::1]:22", Host("::1", port=22)),
        ("anna@corp@bastion", Host("bastion", user="anna@corp")),
        (":x", Host(":x")),
    ],
)
def test_jump_hosts_are_read_in_every_spelling(text: str, host: Host) -> None:
    assert parse_jump(text) == host


@pytest.mark.parametrize(
    "text, words",
    [
        ("a b", ("a", "b")),
        ('"a b" c', ("a b", "c")),
        ("'a b'", ("a b",)),
        (r'"a \"b\""', ('a "b"',)),
        ("a # b", ("a",)),
        ('a"b c"d', ("ab cd",)),
        (r"a\ b", ("a b",)),
        ('""', ("",)),
        ("a#b", ("a#b",)),
        (r"C:\dir", (r"C:\dir",)),
    ],
)
def test_words_are_split_as_ssh_splits_them(text: str, words: tuple) -> None:
    assert split_arguments(text, "f:1") == words


@given(st.text())
def test_any_text_is_read_or_refused_with_its_line(text: str) -> None:
    try:
        parse_config(text, "config")
    except ValueError as error:
        assert str(error).startswith("config:")


@given(st.text(alphabet="\"'\\ #ab", min_size=1, max_size=30))
def test_quotes_of_any_kind_are_read_in_linear_time_or_refused(text: str) -> None:
    try:
        split_arguments(text * 20, "f:1")
    except ValueError as error:
        assert str(error).startswith("f:1")
