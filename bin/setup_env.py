"""Makes or completes a virtual environment of this checkout, repeatably; called by bin/setup-env.

The environment holds, beside what `venv` puts there:

    ready-GROUP      the stamp of setup.cfg and constraints.txt that the group was installed for; written last
    setup.begun      there while packages change: found at the start, the last setup was killed
    setup.lock       flock: one setup at a time; the child that installs holds it too, so it outlives a killed parent
    bootstrap.log    everything that venv and pip said

The checkout is put on the environment's path by a relative .pth, so that both can be moved together.
"""

from __future__ import annotations

import argparse
import configparser
import contextlib
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
KEPT = {"setup.lock", "setup.begun", "bootstrap.log"}
# They would send pip's packages, or the environment's Python, somewhere else.
MISLEADING = (
    "PYTHONPATH",
    "PYTHONHOME",
    "PIP_USER",
    "PIP_TARGET",
    "PIP_PREFIX",
    "PIP_ROOT",
    "PIP_DRY_RUN",
    "PIP_CONSTRAINT",
    "PIP_REQUIREMENT",
    "PIP_NO_DEPS",
    "__PYVENV_LAUNCHER__",
)
LOG_TAIL_LINES = 15

# Run in the environment after a kill: pip is there, and every package has all files that its record lists.
IS_SOUND = """
import importlib.metadata, sys
names = set()
for dist in importlib.metadata.distributions(path=[sys.argv[1]]):
    names.add((dist.metadata["Name"] or "").lower())
    if not dist.files or dist.read_text("INSTALLER") is None:
        sys.exit(f"{dist.metadata['Name']} has no complete record")
    for file in dist.files:
        path = file.locate()
        if not path.exists() or (file.size is not None and path.stat().st_size != file.size):
            sys.exit(f"{path} is missing or cut")
sys.exit(None if "pip" in names else "pip is missing")
"""


class SetupError(Exception):
    """The lines to show; the first says what failed."""


class Progress:
    """One line a step on stderr, at its start; on a terminal the seconds count while it runs."""

    def __init__(self) -> None:
        self.is_live = sys.stderr.isatty()

    def say(self, text: str) -> None:
        print(f"ascendrun: {text}", file=sys.stderr, flush=True)

    def start(self, text: str) -> None:
        self.text = f"ascendrun:   {text} ... "
        self.started_s = time.monotonic()
        print(self.text, end="" if self.is_live else "\n", file=sys.stderr, flush=True)

    def tick(self) -> None:
        if self.is_live:
            print(f"\r{self.text}{time.monotonic() - self.started_s:.0f} s", end="", file=sys.stderr, flush=True)

    def end(self, word: str) -> None:
        if self.is_live:
            print(f"\r{self.text}{time.monotonic() - self.started_s:.0f} s, {word}", file=sys.stderr, flush=True)


class Environment:
    """One virtual environment and its lock; `stamp` names what it shall be in step with."""

    def __init__(self, folder: Path, *, stamp: str, progress: Progress) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        self.stamp = stamp
        self.progress = progress
        self.lock_fd = -1

    def is_ready(self, group: str) -> bool:
        return read_line(self.folder / f"ready-{group}") == self.stamp

    def known_groups(self) -> list[str]:
        """Groups that were installed once, in step or not."""
        return sorted(path.name[len("ready-") :] for path in self.folder.glob("ready-*"))

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        self.lock_fd = os.open(self.folder / "setup.lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(self.lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.progress.say(f"another setup of {self.folder} is running; waiting for it")
                fcntl.flock(self.lock_fd, fcntl.LOCK_EX)
            except OSError as error:
                self.progress.say(f"{self.folder} cannot be locked ({error.strerror}); do not start a second setup")
            yield
        finally:
            os.close(self.lock_fd)

    def run(self, step: str, argv: Sequence[str]) -> None:
        """Runs one command into the log. Raises SetupError with the log's tail."""
        log_path = self.folder / "bootstrap.log"
        environ = {name: value for name, value in os.environ.items() if name not in MISLEADING}
        environ.update(PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_NO_INPUT="1")
        self.progress.start(step)
        with open(log_path, "ab") as log:
            log.write(f"\n$ {' '.join(argv)}\n".encode())
            log.flush()
            child = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env=environ,
                pass_fds=[self.lock_fd],
            )
            try:
                code = self.wait(child)
            except BaseException:
                child.terminate()
                child.wait()
                self.progress.end("interrupted")
                raise
        if code != 0:
            self.progress.end("failed")
            lines = [line for line in log_path.read_text(errors="replace").splitlines() if line.strip()]
            tail = lines[-LOG_TAIL_LINES:]
            raise SetupError(f"{step}: exit code {code}", *(f"  | {line}" for line in tail), f"  log: {log_path}")
        self.progress.end("done")

    def wait(self, child: subprocess.Popen[bytes]) -> int:
        while True:
            try:
                return child.wait(timeout=0.5)
            except subprocess.TimeoutExpired:
                self.progress.tick()

    def site_packages(self) -> Path | None:
        """None when the environment's Python does not run."""
        code = "import sysconfig; print(sysconfig.get_path('purelib'))"
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            return Path(subprocess.check_output([str(self.python), "-I", "-c", code], text=True).strip())
        return None

    def fault(self) -> str | None:
        """Why the environment must be made anew; None: it can be used. A killed setup is checked file by file."""
        if not (self.folder / "pyvenv.cfg").exists():
            return "is not there yet"
        begun = (self.folder / "setup.begun").exists()
        site = self.site_packages()
        if site is None or not site.is_dir():
            return "was left unfinished (without its Python)" if begun else "has lost its Python"
        if not begun:
            return None
        check = subprocess.run([str(self.python), "-I", "-c", IS_SOUND, str(site)], capture_output=True, text=True)
        return None if check.returncode == 0 else f"was left unfinished ({check.stderr.strip().splitlines()[-1]})"

    def clear(self) -> None:
        for path in self.folder.glob("ready-*"):
            path.unlink()
        for path in self.folder.iterdir():
            if path.name in KEPT:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def create(self) -> None:
        self.clear()
        base = own_interpreter()
        self.run(
            f"virtual environment with Python {sys.version.split()[0]} ({base})",
            [base, "-I", "-m", "venv", str(self.folder)],
        )

    def install(self, group: str, requirements: Sequence[str]) -> None:
        for step in steps_of(requirements):
            names = ", ".join(requirement_name(each) for each in step)
            pip = [
                str(self.python),
                "-I",
                "-m",
                "pip",
                "install",
                "--prefer-binary",
                "-c",
                str(CHECKOUT / "constraints.txt"),
            ]
            self.run(f"{group}: {names}", [*pip, *step])

    def link_checkout(self) -> None:
        """Where the environment is a link to another checkout's, that one's code stays on its path."""
        site = self.site_packages()
        assert site is not None, "the environment was just made"
        entry = Path(os.path.realpath(site)) / "_ascendrun_checkout.pth"
        owner = read_line(entry)
        if self.folder.is_symlink() and owner is not None and (entry.parent / owner / "ascendrun").is_dir():
            return
        write_atomically(entry, os.path.relpath(CHECKOUT, entry.parent))

    def link_packages(self, below: Environment) -> None:
        """Raises SetupError when there is no such environment."""
        site, packages = self.site_packages(), below.site_packages()
        assert site is not None, "the environment was just made"
        if packages is None:
            raise SetupError(
                f"{below.folder} has no Python that runs",
                f"  make it first: bin/setup-env --venv '{below.folder}' train",
            )
        path = os.path.relpath(os.path.realpath(packages), os.path.realpath(site))
        write_atomically(site / "_ascendrun_below.pth", path)


def own_interpreter() -> str:
    """The installed Python behind this process, not the environment that it may run in; a path that a
    distribution's upgrade to another minor version removes, so that the loss is seen."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def requirement_name(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]


def steps_of(requirements: Sequence[str]) -> list[list[str]]:
    """torch goes first and alone: as another package's dependency pip might choose another build of it."""
    torch = [each for each in requirements if requirement_name(each) == "torch"]
    rest = [each for each in requirements if requirement_name(each) != "torch"]
    return [step for step in (torch, rest) if step]


def read_groups() -> dict[str, list[str]]:
    """setup.cfg's requirements: "base" and the extras, in the file's order."""
    parser = configparser.ConfigParser()
    parser.read(CHECKOUT / "setup.cfg", encoding="utf-8")
    texts = {"base": parser["options"]["install_requires"], **parser["options.extras_require"]}
    return {name: [line for line in text.splitlines() if line.strip()] for name, text in texts.items()}


def read_line(path: Path) -> str | None:
    try:
        return path.read_text().rstrip("\n")
    except FileNotFoundError:
        return None


def write_atomically(path: Path, line: str) -> None:
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    beside.write_text(line + "\n")
    os.replace(beside, path)


def refuse_other_python(environment: Environment) -> None:
    """ASCENDRUN_PYTHON chooses when the environment is made; it never throws a working one away."""
    theirs = os.path.realpath(environment.python)
    if os.environ.get("ASCENDRUN_PYTHON") and theirs != own_interpreter():
        raise SetupError(
            f"{environment.folder} was made with {theirs}, ASCENDRUN_PYTHON is {own_interpreter()}",
            f"  unset ASCENDRUN_PYTHON, or make it anew: rm -r '{environment.folder}'",
        )


def describe(environment: Environment, missing: Sequence[str], fault: str | None) -> str:
    """What is about to happen, and why."""
    names = ", ".join(missing)
    if fault:
        return f"{environment.folder} {fault}; installing {names} there, and nowhere else"
    if not set(missing) & set(environment.known_groups()):
        return f"adding {names} to {environment.folder}"
    return f"setup.cfg or constraints.txt has changed; bringing {names} in {environment.folder} in step"


def bring_up(
    environment: Environment, wanted: Sequence[str], groups: dict[str, list[str]], below: Environment | None = None
) -> None:
    """Under the lock: makes the environment when it is missing or broken, installs what is not in step. What `below`
    has is seen too, and not installed again."""
    begun = environment.folder / "setup.begun"
    fault = environment.fault()
    if fault is None:
        refuse_other_python(environment)
        missing = [group for group in wanted if not environment.is_ready(group)]
    else:
        had = [*environment.known_groups(), *(read_line(begun) or "").split()]
        missing = [group for group in groups if group in wanted or group in had]
    if not missing:
        begun.unlink(missing_ok=True)
        return
    environment.progress.say(f"{describe(environment, missing, fault)} (log: bootstrap.log)")
    write_atomically(begun, " ".join(missing))
    if fault:
        environment.create()
    if below is not None:
        environment.link_packages(below)
    for group in missing:
        try:
            environment.install(group, groups[group])
        except SetupError:
            begun.unlink()  # pip ended by itself: it left no package half written
            raise
        if group == "base":
            environment.link_checkout()
        write_atomically(environment.folder / f"ready-{group}", environment.stamp)
    begun.unlink()
    environment.progress.say("ready")


def parse(argv: Sequence[str], groups: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bin/setup-env", description="Makes or completes this checkout's .venv.")
    parser.add_argument("--venv", type=Path, default=CHECKOUT / ".venv", metavar="FOLDER")
    parser.add_argument("--over", type=Path, metavar="FOLDER", help="an environment whose packages are seen too")
    parser.add_argument("--stamp", required=True, help=argparse.SUPPRESS)
    parser.add_argument("group", nargs="*", choices=[[], *groups], metavar="GROUP", help=", ".join(groups))
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a lane of bin/test is in the background and ignores it
    groups = read_groups()
    options = parse(argv, list(groups))
    wanted = ["base", *(group for group in groups if group in options.group and group != "base")]
    environment = Environment(options.venv.absolute(), stamp=options.stamp, progress=Progress())
    below = options.over and Environment(options.over.absolute(), stamp=options.stamp, progress=environment.progress)
    try:
        environment.folder.mkdir(exist_ok=True)
        with environment.locked():
            bring_up(environment, wanted, groups, below)
    except SetupError as error:
        print(*(f"ascendrun: {line}" for line in error.args), sep="\n", file=sys.stderr)
        return 3
    except OSError as error:
        print(
            f"ascendrun: cannot set up {environment.folder}: {error}\n"
            "ascendrun:   the checkout must lie in a folder that you may write to",
            file=sys.stderr,
        )
        return 3
    except KeyboardInterrupt:
        print("ascendrun: interrupted; the next start goes on from here", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
