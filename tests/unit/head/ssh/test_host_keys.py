"""Reading known_hosts as it is found in the wild, and judging the key that a host shows."""

import base64
import hashlib
import hmac
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascendrun.core.errors import HostKeyChangedError, HostKeyUnknownError
from ascendrun.head.ssh import host_keys


def make_host_key(seed: str, kind: str = "ssh-ed25519") -> host_keys.HostKey:
    blob = len(kind).to_bytes(4, "big") + kind.encode() + hashlib.sha256(seed.encode()).digest()
    return host_keys.HostKey(kind, base64.b64encode(blob).decode())


def hashed(name: str) -> str:
    salt = b"0123456789abcdefghij"
    digest = hmac.new(salt, name.encode(), hashlib.sha1).digest()
    return f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"


GOOD, EVIL = make_host_key("good"), make_host_key("evil")


def written(path: Path, *lines: str) -> host_keys.KnownHostsFile:
    path.write_text("\n".join(lines) + "\n")
    return host_keys.KnownHostsFile(str(path))


def entry(names: str, key: host_keys.HostKey = GOOD) -> str:
    return f"{names} {key.type} {key.base64} a comment"


def judged(shown: host_keys.HostKey, recorded: host_keys.Recorded) -> None:
    host_keys.verify_key(shown, recorded, host="npu01", endpoint="10.0.0.1:22")


def keys_for(file: host_keys.KnownHostsFile, *names: str) -> Sequence[host_keys.HostKey]:
    nothing = host_keys.KnownHostsFile("/nonexistent")
    return [found.key for found in host_keys.find_recorded(names, own=nothing, others=[file]).keys]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "#",
        "# npu01 ssh-ed25519 AAAA",
        "npu01",
        "npu01 ssh-ed25519",
        "npu01 ssh-ed25519 not-base64!",
        "npu01 1024 35 1234567890",
        "@unknown-marker npu01 ssh-ed25519 AAAA",
        "@revoked",
        "@cert-authority *.x",
        "npu01 ssh-rsa " + GOOD.base64,
        "\x00\x01\x02",
        "|1|broken ssh-ed25519 AAAA",
        "npu01 ssh-ed25519 " + "A" * 7,
    ],
)
def test_lines_that_no_tool_can_use_are_skipped(line: str) -> None:
    text = f"{line}\n{entry('npu02')}\n{line}"
    assert [found.names for found in host_keys.parse_known_hosts(text, "f")] == ["npu02"]


@given(st.text(), st.text())
def test_no_text_makes_the_reader_or_the_matcher_fail(text: str, name: str) -> None:
    for names in (text, *(found.names for found in host_keys.parse_known_hosts(text, "f"))):
        host_keys.names_match(names, name)


@pytest.mark.parametrize(
    "names, name, matches",
    [
        ("npu01", "npu01", True),
        ("npu01", "npu012", False),
        ("npu01,10.0.0.1", "10.0.0.1", True),
        ("npu*", "npu01", True),
        ("npu0?", "npu01", True),
        ("*,!npu01", "npu01", False),
        ("*,!npu01", "npu02", True),
        ("[npu01]:2222", "[npu01]:2222", True),
        ("[npu01]:2222", "npu01", False),
        ("[npu*]:2222", "[npu01]:2222", True),
        ("npu[01]", "npu0", False),
        ("npu[01]", "npu[01]", True),
        ("NPU0?", "npu01", True),
        ("", "npu01", False),
        ("!other", "npu01", False),
        ("NPU01", "npu01", True),
        ("!npu01", "npu02", False),
        (hashed("npu01"), "npu01", True),
        (hashed("npu01"), "npu02", False),
        (hashed("[h]:22"), "[h]:22", True),
        ("|1|bad|bad", "npu01", False),
        ("|1|a", "npu01", False),
        ("|2|YQ==|YQ==", "npu01", False),
    ],
)
def test_names_match_as_ssh_matches_them(names: str, name: str, matches: bool) -> None:
    assert host_keys.names_match(names, name) is matches


@pytest.mark.parametrize(
    "host, port, name",
    [("Npu01", 22, "npu01"), ("npu01", 2222, "[npu01]:2222"), ("::1", 22, "::1"), ("::1", 2222, "[::1]:2222")],
)
def test_a_port_other_than_22_is_part_of_the_name(host: str, port: int, name: str) -> None:
    assert host_keys.known_name(host, port) == name


def test_a_file_is_read_again_when_it_changed_and_may_come_and_go(tmp_path: Path) -> None:
    path = tmp_path / "known_hosts"
    file = host_keys.KnownHostsFile(str(path))
    assert keys_for(file, "npu01") == []
    path.write_text(entry("npu01") + "\n")
    assert keys_for(file, "npu01") == [GOOD]
    path.write_text(entry("npu01", EVIL) + "\n" + entry("npu01") + "\n")
    assert keys_for(file, "npu01") == [EVIL, GOOD]
    path.unlink()
    assert keys_for(file, "npu01") == []


def test_our_own_file_settles_a_host_that_it_names(tmp_path: Path) -> None:
    own, users = written(tmp_path / "own", entry("npu01", GOOD)), written(tmp_path / "users", entry("npu01", EVIL))
    recorded = host_keys.find_recorded(["npu01"], own=own, others=[users])
    assert [found.key for found in recorded.keys] == [GOOD] and recorded.in_own_file
    with pytest.raises(HostKeyChangedError):
        judged(EVIL, recorded)


def test_a_revocation_in_any_file_counts(tmp_path: Path) -> None:
    own, users = written(tmp_path / "own", entry("npu01")), written(tmp_path / "users", "@revoked " + entry("*"))
    with pytest.raises(HostKeyChangedError, match="revoked .*users:1"):
        judged(GOOD, host_keys.find_recorded(["npu01"], own=own, others=[users]))


def test_a_recorded_key_is_accepted(tmp_path: Path) -> None:
    own, users = host_keys.KnownHostsFile("/nonexistent"), written(tmp_path / "users", "# mine", entry(hashed("npu01")))
    judged(GOOD, host_keys.find_recorded(["npu01"], own=own, others=[users]))


def test_a_changed_key_shows_old_and_new_and_the_way_out(tmp_path: Path) -> None:
    own = written(tmp_path / "own", entry("npu01"))
    with pytest.raises(HostKeyChangedError) as caught:
        judged(EVIL, host_keys.find_recorded(["npu01"], own=own, others=[]))
    for part in (EVIL.fingerprint, GOOD.fingerprint, f"{own.path}:1", "npu01 (10.0.0.1:22)"):
        assert part in str(caught.value.message)
    assert "ascendrun trust --replace npu01" in str(caught.value.hint)


def test_an_unknown_host_is_told_how_to_be_trusted() -> None:
    with pytest.raises(HostKeyUnknownError, match=GOOD.fingerprint.replace("+", r"\+")) as caught:
        judged(GOOD, host_keys.Recorded())
    assert str(caught.value.hint) == "ascendrun trust npu01"


def test_a_host_vouched_for_by_an_authority_only_is_refused_openly(tmp_path: Path) -> None:
    users = written(tmp_path / "users", "@cert-authority " + entry("npu*"))
    with pytest.raises(HostKeyUnknownError, match="authority"):
        judged(GOOD, host_keys.find_recorded(["npu01"], own=host_keys.KnownHostsFile("/nonexistent"), others=[users]))


def test_recording_keeps_what_is_there_and_says_what_is_new(tmp_path: Path) -> None:
    file = tmp_path / "state" / "known_hosts"
    assert host_keys.record_host_keys(file, [("npu01", GOOD), ("npu02", EVIL), ("npu01", GOOD)]) == 2
    assert host_keys.record_host_keys(file, [("npu01", GOOD)]) == 0
    assert [(found.names, found.key) for found in host_keys.parse_known_hosts(file.read_text(), "f")] == [
        ("npu01", GOOD),
        ("npu02", EVIL),
    ]
    assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700


def test_replacing_drops_only_that_hosts_other_keys(tmp_path: Path) -> None:
    file = tmp_path / "known_hosts"
    file.write_text(f"# a note\n{entry('npu01', EVIL)}\n{entry('npu02', EVIL)}")
    assert host_keys.record_host_keys(file, [("npu01", GOOD)], replace=True) == 1
    assert file.read_text() == f"# a note\n{entry('npu02', EVIL)}\nnpu01 {GOOD.type} {GOOD.base64}\n"


def test_many_writers_lose_nothing(tmp_path: Path) -> None:
    file = tmp_path / "known_hosts"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: host_keys.record_host_keys(file, [(f"npu{number}", GOOD)]), range(64)))
    assert len(host_keys.parse_known_hosts(file.read_text(), "f")) == 64
    assert sorted(os.listdir(tmp_path)) == ["known_hosts", "known_hosts.lock"]


def test_a_fingerprint_reads_as_ssh_keygen_prints_it() -> None:
    key = host_keys.HostKey("ssh-ed25519", "AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl")
    assert key.fingerprint == "SHA256:+DiY3wvvV6TuJJhbpZisF/zLDA0zPMSvHdkr4UvCOqU"
    assert str(key) == f"ED25519 {key.fingerprint}"
