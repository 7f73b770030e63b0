"""Getting in through every login shell, past whatever its start-up files print, on whatever Pythons are there."""

import os
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ascendrun.node import loader, wire
from tests.lib.vcluster.processes import await_that

SHELLS = [shell for shell in ("sh", "dash", "bash", "zsh", "fish", "csh", "tcsh") if shutil.which(shell)]
PYZ, SHA256 = loader.pack_agent(loader.read_sources())
LINE = loader.login_command(SHA256[:16])
BY_PATH = ["sh", "-c", re.sub(r" /usr/(local/)?bin/python3(?= )", "", LINE)]


class Login:
    """One login that runs the fixed line; drives the dialogue as a transport does."""

    def __init__(self, argv=("sh", "-c", LINE), *, home, path=None, **env):
        self.process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"HOME": str(home), "PATH": path or own_path(), **marks(), **env},
        )
        self.boot = loader.Boot()
        self.steps = []

    def drive(self, pyz=PYZ, piece=1 << 16):
        until = time.monotonic() + 60
        while not self.boot.is_over:
            assert time.monotonic() < until, (self.steps, self.boot.all_noise())
            if not select.select([self.process.stdout], [], [], 0.2)[0]:
                continue
            data = os.read(self.process.stdout.fileno(), piece)
            if not data:
                break
            for step in self.boot.feed(data):
                self.steps.append(step.kind)
                if step.kind == loader.NEED_AGENT:
                    assert step.detail == SHA256[:16]
                    self.process.stdin.write(loader.upload(pyz, SHA256))
                    self.process.stdin.flush()
        return self.steps

    def hello(self):
        reader = wire.FrameReader()
        frames = reader.feed(self.boot.leftover)
        while not frames:
            frames = reader.feed(os.read(self.process.stdout.fileno(), 65536))
        return frames[0][0]

    def close(self):
        self.process.stdin.close()
        code = self.process.wait(60)
        self.process.stdout.close()
        return code


def own_path():
    return os.path.dirname(sys.executable) + ":/usr/bin:/bin"


def marks():
    return {name: value for name, value in os.environ.items() if name.startswith("ASCENDRUN_TEST")}


@pytest.mark.parametrize("shell", SHELLS)
def test_first_login_brings_the_agent_and_the_second_finds_it(shell, tmp_path):
    for steps in ([loader.NEED_AGENT, loader.READY], [loader.READY]):
        login = Login([shell, "-c", LINE], home=tmp_path)
        assert login.drive() == steps
        hello = login.hello()
        assert hello["agent_sha256"] == SHA256 and hello["root"] == str(tmp_path / ".ascendrun")
        assert os.path.exists(hello["python"])
        command = Path("/proc/%d/cmdline" % hello["pid"]).read_bytes()
        assert command.endswith(b"agent-%s.pyz\0serve\0" % SHA256[:16].encode())
        assert login.close() == 0
    assert os.stat(tmp_path / ".ascendrun").st_mode & 0o777 == 0o700
    assert os.stat(tmp_path / ".ascendrun" / (f"agent-{SHA256[:16]}.pyz")).st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "noise",
    [
        "echo Welcome",
        "printf 'no newline'",
        "printf 'ASCENDRUN-NEED'; printf '\\nASCENDRUN-'",
        "head -c 100000 /dev/zero",
        "echo; echo x >&2; printf '\\377\\376'",
    ],
)
def test_noise_of_start_up_files_does_not_matter(noise, tmp_path):
    (tmp_path / ".bashrc").write_text(noise + "\n")
    login = Login(["bash", "-c", ". ~/.bashrc; " + LINE], home=tmp_path)
    assert login.drive(piece=7) == [loader.NEED_AGENT, loader.READY]
    assert login.boot.noise
    assert login.hello()["agent_sha256"] == SHA256
    assert login.close() == 0


def test_a_start_up_file_that_reads_its_input_does_not_swallow_the_agent(tmp_path):
    line = "timeout 0.3 cat >/dev/null; " + LINE
    login = Login(["bash", "-c", line], home=tmp_path)
    assert login.drive() == [loader.NEED_AGENT, loader.READY]
    assert login.close() == 0


def test_no_python_is_told_at_once_with_97(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sh").symlink_to("/bin/sh")
    login = Login(BY_PATH, home=tmp_path, path=str(tmp_path / "bin"))
    assert login.drive() == [loader.NO_PYTHON]
    assert login.close() == 97


def test_a_broken_and_an_old_python_are_passed_over(tmp_path):
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "python3").write_text("#!/bin/sh\necho broken shim >&2\nexit 127\n")
    (folder / "python3").chmod(0o755)
    old = Path(os.environ.get("PYENV_ROOT", "/none")) / "versions"
    for minor, version in (("13", "3.6.15"), ("12", "2.7.18")):
        if (old / version).exists():
            (folder / ("python3." + minor)).symlink_to(old / version / "bin" / "python")
    (folder / "python3.11").symlink_to(sys.executable)
    login = Login(BY_PATH, home=tmp_path, path=f"{folder}:/bin:/usr/bin")
    assert login.drive() == [loader.NEED_AGENT, loader.READY]
    assert login.hello()["python_version"] == ".".join(map(str, sys.version_info[:3]))
    assert login.close() == 0


@pytest.mark.parametrize("what", ["cut", "altered", "link"])
def test_whatever_is_in_the_agents_place_is_replaced_and_no_link_followed(tmp_path, what):
    if what == "altered":
        log_in(tmp_path)  # it ran before
    file, evil = tmp_path / ".ascendrun" / (f"agent-{SHA256[:16]}.pyz"), tmp_path / "evil.pyz"
    file.parent.mkdir(mode=0o700, exist_ok=True)
    evil.write_bytes(PYZ)
    if what == "link":
        file.symlink_to(evil)
    else:
        file.write_bytes(PYZ[:-100] + (bytes(100) if what == "altered" else b""))
    login = Login(home=tmp_path)
    assert login.drive() == [loader.NEED_AGENT, loader.READY]
    assert login.close() == 0
    assert not file.is_symlink() and file.read_bytes() == evil.read_bytes() == PYZ


def recorded(root):
    """The record of the interpreter, once the agent has written it behind its hello."""
    file = root / f"agent-{SHA256[:16]}.{os.uname().nodename}.python"
    await_that(lambda: file.exists() and file.read_bytes().endswith(b"\n"))
    return file


def log_in(home, **more):
    """One login that brings up an agent and ends it; its hello, once the interpreter is on record."""
    login = Login(home=home, **more)
    login.drive()
    hello = login.hello()
    recorded(home / ".ascendrun")
    assert login.close() == 0
    return hello


def test_the_interpreter_that_ran_the_agent_runs_it_again_without_a_search(tmp_path):
    first = log_in(tmp_path)
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "python3").write_text(f"#!/bin/sh\ntouch {tmp_path}/asked\nexit 9\n")
    (folder / "python3").chmod(0o755)
    for _ in range(2):
        assert log_in(tmp_path, path=f"{folder}:/usr/bin:/bin")["python"] == first["python"]
    assert not (tmp_path / "asked").exists()


def test_a_recorded_interpreter_that_has_broken_since_costs_one_login(tmp_path):
    log_in(tmp_path)
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\nexit 127\n")
    broken.chmod(0o755)
    recorded(tmp_path / ".ascendrun").write_text(f"{broken}\n")
    login = Login(home=tmp_path)
    assert login.drive() == []
    assert login.close() == 127
    assert log_in(tmp_path)["python"] != str(broken)


def test_damaged_bytes_are_refused_and_nothing_is_left(tmp_path):
    login = Login(home=tmp_path)
    assert login.drive(pyz=b"x" * len(PYZ)) == [loader.NEED_AGENT, loader.FAILED]
    assert login.close() == 96
    assert not list(tmp_path.glob(".ascendrun/*"))


def test_a_connection_that_ends_in_mid_upload_leaves_nothing(tmp_path):
    login = Login(home=tmp_path)
    await_that(lambda: login.boot.feed(os.read(login.process.stdout.fileno(), 65536)))
    login.process.stdin.write(loader.upload(PYZ, SHA256)[:5000])
    assert login.close() == 96
    assert not list(tmp_path.glob(".ascendrun/*"))


def test_a_home_with_spaces_and_quotes(tmp_path):
    home = tmp_path / 'it\'s my "home" $(id)'
    home.mkdir()
    login = Login(home=home)
    assert login.drive() == [loader.NEED_AGENT, loader.READY]
    assert login.hello()["root"] == str(home / ".ascendrun")
    assert login.close() == 0
