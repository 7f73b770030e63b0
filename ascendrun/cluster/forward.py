"""Commands that run on another machine through ssh: on the head of a laptop, on the login node that has the store.

With a home that both machines share, a command runs in the same directory. From a laptop it runs in a mirror of the
laptop's directories on the head, ~/.ascendrun/laptops/KEY: what it reads is sent there first, and what it writes
is copied back. Relative paths so mean the same files.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import ascendrun
from ascendrun.core.errors import UnreachableError
from ascendrun.core.settings import FORWARDED_VARIABLE, Settings
from ascendrun.head.state.store_file import HEAD_FILE
from ascendrun.head.state.store_place import claim, note_head, noted_head
from ascendrun.head.survey.job_reading import read_stages
from ascendrun.node import tree_hash
from ascendrun.node.files import make_private_dir, write_json
from ascendrun.node.layout import machine_key
from ascendrun.query.packing import not_staged
from ascendrun.text import Text, language

OF_SITE = "PATH PYTHONPATH LANG LC_ALL LC_CTYPE XDG_CONFIG_HOME SLURM_CONF KUBECONFIG VIRTUAL_ENV".split()
OF_TERMINAL = ("COLORTERM", "NO_COLOR", "FORCE_COLOR", "ASCENDRUN_COLOR")
_LOST = 255
_SSH = "-o LogLevel=ERROR -o ConnectTimeout=10 -o ServerAliveInterval=5 -o ClearAllForwardings=yes".split()
_HAS = b"ascendrun-has "
_RECEIVE = """umask 077; mkdir -p -- {directory}; cd "$base" || exit
printf '\\n{has}%s\\n' "$(cat .have-{key} 2>/dev/null)"
if read -r go && [ "$go" = send ]; then
    while IFS= read -r old; do [ -d "$old" ] || rm -f -- "$old"; done 2>/dev/null <.list-{key}
    tar -xvf - >.list-{key} && chmod -R u+w . && echo {sha256} >.have-{key} || exit
fi; touch .began"""
_RUN = """cd -- {directory} || {{ echo {no_folder}; exit 3; }} >&2
command -v {program} >/dev/null || {{ echo {absent}; exit 3; }} >&2
set -- {program} {words}
found=$("$1" {module} --version); [ "$found" = {version} ] || echo {other} "$found" >&2
exec "$@\""""
_SEND = 'cd "$base" && find . -type f -cnewer .began -print0 | tar -cf - --null -T - && rm -rf -- "$base"'
_GIVE = """{program} controller uninstall >/dev/null; {program} controller stop >/dev/null
mkdir -p -- {directory} && cd -- {directory} && tar -cf - ."""


@dataclass
class Errand:
    """A command for `host`, as ssh knows it. `has_home`: it has the home of this machine, and the store. `words`: after
    the program. `reads`: files and directories of this machine, with what is omitted of each; `paths`: words that are
    paths here. `writes`: what it leaves comes back."""

    host: str
    has_home: bool
    words: Sequence[str] = ()
    reads: dict[str, Sequence[str]] = field(default_factory=dict)
    paths: Sequence[str] = ()
    writes: bool = False

    @property
    def program(self) -> str:
        return shlex.join([sys.executable, "-m", "ascendrun"]) if self.has_home else "ascendrun"

    def environment(self) -> str:
        """Return the lines of a script that set its environment, and `base`, the mirror."""
        name = f"{machine_key()}.{os.getpid()}" if self.writes else machine_key()
        base = "" if self.has_home else f'"$HOME/.ascendrun/laptops/{name}"'
        names = [*OF_TERMINAL, *(OF_SITE if self.has_home else ())]
        names += [name for name in os.environ if self.has_home and name.startswith("ASCENDRUN_")]
        values = {name: os.environ[name] for name in names if name in os.environ}
        values.update({"ASCENDRUN_LANG": language(), FORWARDED_VARIABLE: "store" if self.has_home else "head"})
        if self.has_home:
            values["PYTHONPATH"] = str(Path(ascendrun.__file__).resolve().parent.parent)
        exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in values.items())
        return f'PATH="$PATH:$HOME/.local/bin"; base={base}\n{exports}'


def files_of(job_file: Path, overrides: Sequence[str]) -> dict[str, Sequence[str]]:
    """Return what a job file reads on this machine, for `Errand.reads`. Raises InvalidInputError."""
    found: dict[str, Sequence[str]] = {os.path.abspath(job_file): ()}
    for spec in (stage.spec for stage in read_stages(job_file, overrides=overrides)):
        if spec.workdir is not None:
            found[spec.workdir.path] = (*spec.workdir.exclude, "__pycache__/")
        engine = spec.engine if isinstance(spec.engine, dict) else {}
        found.update({str(path): () for path in (spec.hostfile, engine.get("hostfile"), *spec.env_file) if path})
    return found


def run(errand: Errand) -> int:
    """Run a command there with the terminal of this process; return its exit code.

    Raises UnreachableError, InvalidInputError: a directory cannot be sent.
    """
    folders = [os.getcwd(), *map(os.path.abspath, errand.paths)]
    if not errand.has_home:
        _send(errand)
    code = _call(errand, set() if errand.has_home else set(folders))
    if errand.writes and not errand.has_home:
        _unpack(errand, _SEND, "-C", "/", *(f".{folder}" for folder in folders))
    return code


def take_over(settings: Settings) -> str | None:
    """Make this the machine that has the store, with all jobs. Return the machine that had it if that one is gone, and
    its store with it; else None.

    Raises UnreachableError: it did not send the store. Raises OSError, OperationError.
    """
    owner, state_dir = settings.owner, settings.state_dir
    gone = owner if owner is not None and _is_gone(owner) else None
    noted = noted_head() if gone is not None else {}
    part = state_dir.with_name(f"{state_dir.name}.{time.time_ns()}")
    if noted:  # this machine goes on under the name of the other: what runs on the nodes is its own
        make_private_dir(str(part))
        write_json(str(part / HEAD_FILE), noted)
    elif owner is not None and gone is None:
        make_private_dir(str(part))
        errand = Errand(owner, has_home=True)
        script = _GIVE.format(program=errand.program, directory=shlex.quote(str(state_dir)))
        _unpack(errand, script, "-C", str(part))
    if part.exists():
        if state_dir.exists():
            state_dir.rename(part.with_suffix(".old"))  # of an earlier time
        part.rename(state_dir)
    claim(state_dir, takes_over=True)
    if noted:
        note_head(state_dir, noted)
    return gone


def _call(errand: Errand, paths: set[str]) -> int:
    names = {"host": errand.host, "version": ascendrun.__version__}
    absent = Text("forward.absent", "error: {host}: ascendrun not found; install it there: docs/install.md", **names)
    other = Text("forward.version", "warning: {host} has another release than {version}:", **names)
    missing = Text("forward.no-folder", "error: {host} does not have this directory", **names)
    script = _RUN.format(
        directory=f'"$base"{shlex.quote(os.getcwd())}',
        program=errand.program,
        module="-m ascendrun" if errand.has_home else "",
        version=shlex.quote(f"ascendrun {ascendrun.__version__}"),
        words=" ".join(_word(word, paths) for word in errand.words),
        **{
            name: shlex.quote(str(text))
            for name, text in (("no_folder", missing), ("absent", absent), ("other", other))
        },
    )
    has_terminal = all(os.isatty(fd) for fd in (0, 1, 2))
    with _ssh(errand, script, "-t" if has_terminal else "-T") as process:
        while True:
            try:
                code = process.wait()
                break
            except KeyboardInterrupt:  # ^C is for what runs there
                continue
    if code == _LOST and _is_gone(errand.host):
        raise _gone(errand)
    return code if code >= 0 else 128 - code


def _word(word: str, paths: set[str]) -> str:
    """Return a word of the command line for the shell there; an absolute path leads into the mirror."""
    option, equals, value = word.rpartition("=") if word.startswith("-") else ("", "", word)
    if os.path.isabs(value) and os.path.abspath(value) in paths:
        return f'{shlex.quote(option + equals)}"$base"{shlex.quote(value)}'
    return shlex.quote(word)


def _ssh(
    errand: Errand, script: str, terminal: str = "-T", stdin: int | None = None, stdout: int | None = None
) -> subprocess.Popen[bytes]:
    """Run a script as `open_ssh`. SIGTERM and SIGHUP end it."""
    process = open_ssh(errand, script, (terminal,), stdin, stdout)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: process.terminate())
    return process


def open_ssh(
    errand: Errand,
    script: str,
    options: Sequence[str] = (),
    stdin: int | None = subprocess.DEVNULL,
    stdout: int | None = subprocess.PIPE,
) -> subprocess.Popen[bytes]:
    """Run a script on the host of an errand, in the environment of a login whatever its shell is."""
    packed = b64encode((errand.environment() + script).encode()).decode()
    command = f"""exec /bin/sh -lc 'eval "$(echo {packed} | base64 -d)"'"""
    try:
        return subprocess.Popen(["ssh", *options, *_SSH, "--", errand.host, command], stdin=stdin, stdout=stdout)
    except OSError as error:
        raise _gone(errand) from error


def _unpack(errand: Errand, script: str, *argv: str) -> None:
    """Unpack the archive that a script there prints. Raises UnreachableError."""
    with _ssh(errand, script, stdout=subprocess.PIPE) as process:  # tar tells of each folder without a file
        subprocess.run(["tar", "-xf", "-", *argv], stdin=process.stdout, stderr=subprocess.DEVNULL)
    if process.returncode:
        raise _gone(errand)


def _is_gone(host: str) -> bool:
    """Return whether nobody can log in there: the command may have exited with the code that ssh has for it."""
    argv = ["ssh", "-T", *_SSH, "-o", "BatchMode=yes", "--", host, "exit 0"]
    return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True).returncode == _LOST


def _gone(errand: Errand) -> UnreachableError:
    if not errand.has_home:
        message = Text("forward.head-gone", "head {host}: not connected", host=errand.host)
        return UnreachableError(message, hint=Text("ssh.verbose", "ssh -v {host}", host=errand.host), host=errand.host)
    return UnreachableError.of(
        "forward.store-gone",
        "{host} has the jobs of this user and cannot be reached",
        "`ascendrun controller move` continues here with a new list of jobs",
        host=errand.host,
    )


def _send(errand: Errand) -> None:
    """Make the mirror of the working directory there, with what the command reads, unless it is there.

    Raises UnreachableError, InvalidInputError.
    """
    entries = sorted({entry.path: entry for entry in _entries(errand.reads)}.values())
    roots = [tree_hash.Entry(os.fsencode(path), "d", b"", 0) for path in sorted(errand.reads)]
    key, sha256 = tree_hash.hash_listing(roots)[:16], tree_hash.hash_listing(entries)
    folder = f'"$base"{shlex.quote(os.getcwd())}'
    script = _RECEIVE.format(directory=folder, has=_HAS.decode(), key=key, sha256=sha256)
    with tempfile.TemporaryFile() as archive, _ssh(errand, script, "-T", subprocess.PIPE, subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        has = next((line for line in process.stdout if line.startswith(_HAS)), None)
        if entries and has is not None and has.split()[1:] != [sha256.encode()]:
            archive.write(b"send\n")
            tree_hash.write_tar("/", entries, archive)
            archive.seek(0)
            shutil.copyfileobj(archive, process.stdin)
        process.stdin.close()
    if process.returncode:
        raise _gone(errand)


def _entries(reads: Mapping[str, Sequence[str]]) -> list[tree_hash.Entry]:
    """Return what to send, with paths from "/". Raises InvalidInputError."""
    found: list[tree_hash.Entry] = []
    for path, exclude in reads.items():
        try:
            listed = tree_hash.list_tree(path, exclude) if os.path.isdir(path) else []
            if not os.path.isdir(path):
                seen = os.stat(path)
                listed = [tree_hash.Entry(b"", "f", b"%d" % seen.st_mtime_ns, seen.st_size)]
        except (OSError, tree_hash.InvalidTreeError) as error:
            raise not_staged(path, error) from error
        name = os.fsencode(path).strip(b"/")
        found += [entry._replace(path=os.path.join(name, entry.path).rstrip(b"/")) for entry in listed]
    return found
