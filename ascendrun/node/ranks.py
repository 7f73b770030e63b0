"""Start of one rank: a new session, the user's environment and umask, both outputs on pipes."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess

from ascendrun.node import layout, procs
from ascendrun.node.files import to_bytes
from ascendrun.node.op_errors import OperationError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Iterable, Mapping

PORT_TOKEN = "\0MASTER_PORT\0"
"""Equal to core/jobs/plan.PORT_TOKEN; a test compares them."""

PATH_TOKEN = b"\0PATH\0"
"""Equal to core/rank_env.PATH_TOKEN; a test compares them."""

PIPE_BYTES, _SET_PIPE_SIZE = 1 << 20, 1031
OOM_POINTS = 100
"""When memory runs out, a rank is killed before its supervisor, which records that."""

# Positional parameters are emptied before the user's text runs: vendors' set_env.sh read "$@" of the sourcing shell.
# Status on the descriptor: "s" the set-up failed (also if empty), "m" no such command, "o" fine.
SETUP_SCRIPT = """
__ascendrun_fd=$1; __ascendrun_setup=$2; shift 2; __ascendrun_argv=("$@"); set --
eval "$__ascendrun_setup"
__ascendrun_status=$?
if [ "$__ascendrun_status" -ne 0 ]; then
    printf s >&"$__ascendrun_fd"; exit "$__ascendrun_status"
fi
if ! command -v -- "${__ascendrun_argv[0]}" >/dev/null 2>&1; then
    printf m >&"$__ascendrun_fd"; exit 127
fi
printf o >&"$__ascendrun_fd"
eval "exec $__ascendrun_fd>&-"
exec -- "${__ascendrun_argv[@]}"
"""


def with_setup(setup: str, status_fd: int, argv: list[bytes]) -> list[bytes]:
    """Return the command that runs the set-up, reports on the descriptor, and becomes `argv`."""
    return [b"bash", b"-c", to_bytes(SETUP_SCRIPT), b"ascendrun-setup", b"%d" % status_fd, to_bytes(setup), *argv]


def rank_environ(
    login: Mapping[bytes, bytes],
    own: Mapping[str, str],
    *,
    master_port: int | None,
    secret: Mapping[str, str],
    tag: str,
    root: str,
    hccl_base: int | None = None,
    library: str | None = None,
) -> dict[bytes, bytes]:
    """Return the rank's environment: the login's without ascendrun's, the plan's, ports, secrets, tag and node root.

    `library`: the staged directory that is last on PYTHONPATH, with ascendrun.log, callback and lightning.
    """
    env = dict(login)
    for name in layout.OURS:
        env.pop(to_bytes(name), None)
    for name, value in own.items():
        value_bytes = to_bytes(put_port(value, master_port))
        env[to_bytes(name)] = value_bytes.replace(PATH_TOKEN, login.get(b"PATH") or os.fsencode(os.defpath))
    if master_port is not None:
        env[b"MASTER_PORT"] = b"%d" % master_port
    if hccl_base is not None:
        env[b"HCCL_IF_BASE_PORT"] = b"%d" % hccl_base
    env.update((to_bytes(name), to_bytes(value)) for name, value in secret.items())
    if library is not None:
        env[b"PYTHONPATH"] = b":".join(filter(None, (env.get(b"PYTHONPATH"), os.fsencode(library))))
    env[to_bytes(layout.TAG_VARIABLE)] = to_bytes(tag)
    env[to_bytes(layout.ROOT_VARIABLE)] = os.fsencode(root)
    return env


def put_port(text: str, master_port: int | None) -> str:
    return text if master_port is None else text.replace(PORT_TOKEN, str(master_port))


def start_rank(
    argv: list[str],
    env: dict[bytes, bytes],
    *,
    cwd: str,
    setup: str | None,
    umask: int,
    enter: Callable[[], None],
    keep: Iterable[int] = (),
) -> tuple[subprocess.Popen[bytes], int | None]:
    """Start the command, through bash when there is a set-up. `enter` runs in the child before the command. `keep`:
    descriptors that it inherits. Return its process, whose outputs are pipes, and the descriptor for the report of a
    set-up, None: no set-up.

    Raises OperationError("cannot-start") with the error of the system: no such command, not executable, too long.
    """
    inner = [to_bytes(part) for part in argv]
    if setup is None:
        return _popen(inner, env, cwd=cwd, umask=umask, enter=enter, keep=tuple(keep)), None
    ours, theirs = os.pipe()
    try:
        outer = with_setup(setup, theirs, inner)
        return _popen(outer, env, cwd=cwd, umask=umask, enter=enter, keep=(theirs, *keep)), ours
    except OperationError:
        os.close(ours)
        raise
    finally:
        os.close(theirs)


def _popen(
    argv: list[bytes], env: dict[bytes, bytes], *, cwd: str, umask: int, enter: Callable[[], None], keep: Any
) -> subprocess.Popen[bytes]:
    def prepare() -> None:
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        enter()
        procs.raise_oom_score(OOM_POINTS)
        os.umask(umask)

    process = spawn(argv, env=env, cwd=cwd, stdin=subprocess.DEVNULL, preexec_fn=prepare, pass_fds=keep)
    import fcntl

    for pipe in (process.stdout, process.stderr):
        assert pipe is not None
        os.set_blocking(pipe.fileno(), False)
        with contextlib.suppress(OSError):  # a burst of output should not block the rank; the kernel may reject it
            fcntl.fcntl(pipe.fileno(), _SET_PIPE_SIZE, PIPE_BYTES)
    return process


def spawn(argv: list[bytes], *, cwd: str | None, **options: Any) -> subprocess.Popen[bytes]:
    """Start a command in a new session, with both outputs on pipes.

    Raises OperationError("cannot-start"), whose cause is the error of the system.
    """
    try:
        return subprocess.Popen(
            argv, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, bufsize=0, **options
        )
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise explain_start_failure(error, argv[0].decode("utf-8", "replace"), cwd or ".") from error


def explain_start_failure(error: Exception, command: str, cwd: str) -> OperationError:
    """Return the OperationError for an error of the system. Pure."""
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.ENOENT and getattr(error, "filename", None) in (cwd, os.fsencode(cwd)):
        return OperationError("cannot-start", "workdir-missing", path=cwd)
    keys = {
        errno.ENOENT: "no-such-command",
        errno.EACCES: "command-not-executable",
        errno.ENOEXEC: "command-wrong-format",
        errno.E2BIG: "arguments-too-long",
        errno.EAGAIN: "process-limit",
        errno.ENOMEM: "no-memory",
    }
    if number in keys:
        return OperationError("cannot-start", keys[number], path=command)
    return OperationError("cannot-start", "cannot-start", path=command, error=str(error))
