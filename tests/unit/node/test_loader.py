"""The fixed line and the dialogue, from bytes alone."""

import hashlib
import io
import json
import zipfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascendrun.node import loader, wire

NEED = b"\nASCENDRUN-NEED 0123456789abcdef\n"


def test_the_line_holds_nothing_that_a_shell_reads_within_single_quotes():
    line = loader.login_command("0123456789abcdef")
    assert line.isascii() and line.isprintable() and not set(line) & set("!\\\n")
    assert line.startswith("sh -c '") and line.endswith("'") and line.count("'") == 2
    assert len(line) < 4000


@pytest.mark.parametrize("bad", ["", "0123", "0123456789ABCDEF", "0123456789abcde'", "0123456789abcdef\n"])
def test_only_the_start_of_a_hash_goes_into_the_line(bad):
    with pytest.raises(ValueError):
        loader.login_command(bad)


@given(st.binary(max_size=80).filter(lambda noise: b"\nASC" not in noise), st.integers(1, 9), st.binary(max_size=20))
def test_the_dialogue_survives_noise_and_any_cutting(noise, piece, leftover):
    data = noise + NEED + wire.MAGIC + leftover
    boot = loader.Boot()
    steps = [step for at in range(0, len(data), piece) for step in boot.feed(data[at : at + piece])]
    assert [(step.kind, step.detail) for step in steps] == [(loader.NEED_AGENT, "0123456789abcdef"), (loader.READY, "")]
    assert boot.noise == noise and boot.leftover == leftover and boot.is_over


def test_failures_are_told_with_their_reason_and_end_the_dialogue():
    boot = loader.Boot()
    assert boot.feed(b"motd\nASCENDRUN-FAILED No space left on device\n") == [
        loader.Step(loader.FAILED, "No space left on device")
    ]
    assert boot.is_over and boot.feed(NEED) == []
    boot = loader.Boot()
    assert boot.feed(b"\nASCENDRUN-NO-PYTHON\n")[0].kind == loader.NO_PYTHON


def test_a_node_that_asks_for_ever_is_a_failure():
    boot = loader.Boot()
    kinds = [step.kind for step in boot.feed(NEED * 10)]
    assert kinds == [loader.NEED_AGENT] * loader.MAX_UPLOADS + [loader.FAILED]


def test_endless_noise_is_kept_in_bounds_and_shown():
    boot = loader.Boot()
    for _ in range(200):
        boot.feed(b"x" * 10000)
    assert len(boot.all_noise()) <= loader.NOISE_BYTES and boot.all_noise().startswith(b"xxx")
    assert boot.feed(wire.MAGIC)[0].kind == loader.READY


def test_the_archive_depends_on_names_and_contents_only():
    files = {"b.py": b"2", "a.py": b"1"}
    assert loader.pack_agent(files) == loader.pack_agent(dict(sorted(files.items())))
    data, sha256 = loader.pack_agent(loader.read_sources())
    assert hashlib.sha256(data).hexdigest() == sha256
    names = zipfile.ZipFile(io.BytesIO(data)).namelist()
    assert names == sorted(names) and {"__main__.py", "ascendrun/__init__.py", "ascendrun/node/agent/serve.py"} <= set(
        names
    )
    others = set(names) - {"__main__.py", "ascendrun/__init__.py"}
    assert all(name.startswith(("ascendrun/node/", "ascendrun/facts/")) for name in others)


frames = st.lists(
    st.tuples(st.dictionaries(st.text(), st.integers() | st.text(), max_size=3), st.binary(max_size=50)), max_size=5
)


@settings(deadline=None)
@given(frames, st.integers(1, 7), st.binary(max_size=40).filter(lambda noise: b"\nASC" not in noise))
def test_frames_survive_any_cutting_behind_any_noise(frames, piece, noise):
    data = noise + wire.MAGIC + b"".join(wire.pack(header, body) for header, body in frames)
    boot, reader = loader.Boot(), wire.FrameReader()
    for at in range(0, len(data), piece):
        boot.feed(data[at : at + piece])
    rest = boot.leftover
    found = [frame for at in range(0, len(rest), piece) for frame in reader.feed(rest[at : at + piece])]
    assert found == [(json.loads(json.dumps(header)), body) for header, body in frames]
    assert boot.noise == noise
