"""Containers of this node: the runtime's command as a pure function, the start and end of one, and its image.

`box` is the request of the head (core/jobs/plan.container_request): {image, runtime, mounts, shm_size, pull, options,
python, devices, paths, vendor}. `vendor`: what NPUs need (ascend/containers.py), only of a job with NPUs. The pids of a
container are those of the node (--pid=host): records, start times, leases and traces of processes are true inside and
outside, and `stop` needs neither the runtime nor its daemon, which only remove the container itself.
"""

from __future__ import annotations

import collections
import os
import subprocess
import threading
import time

from ascendrun.node import hold, layout
from ascendrun.node.files import make_private_dir
from ascendrun.node.op_errors import OperationError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Mapping, Sequence

    Box = Mapping[str, Any]
    Run = Callable[[list[str], float], "tuple[int | None, str, str]"]

RUN_S, ASK_S, REMOVALS = 60.0, 20.0, 3

Node = collections.namedtuple("Node", "uid gid groups user files")
"""What a command depends on: the user of the agent, and which of the files that it may mount this node has."""

MACHINE_ID = "/etc/machine-id"


def read_node(box: Box) -> Node:
    from ascendrun.node import procs

    uid = os.geteuid()
    groups = tuple(sorted(set(os.getgroups()) - {os.getegid()}))
    vendor = box.get("vendor")
    known = [MACHINE_ID, *([vendor["runtime"]["path"], *vendor["files"]] if vendor else ())]
    files = frozenset(path for path in known if os.path.exists(path))
    return Node(uid, os.getegid(), groups, str(procs.user_name(uid)), files)


def run_argv(
    box: Box, node: Node, words: Sequence[str], *, root: str, name: str, tag: str = "", detach: bool = False
) -> list[str]:
    """Return the command that runs `words` of the job's interpreter in a container. `tag`: of its attempt."""
    runtime, image = box["runtime"], box["image"]
    mounts = _mounts(box, node, root)
    env = _environment(box, node, root)
    if runtime == "apptainer":  # shares the network, pids and devices of the node, and runs as its user
        binds = [part for mount in mounts for part in ("--bind", mount)]
        values = [part for name, value in env.items() if name != "HOME" for part in ("--env", "%s=%s" % (name, value))]
        return [runtime, "exec", "--cleanenv", *binds, *values, *box["options"], image, box["python"], *words]
    argv = [runtime, "run", "--rm", "--detach" if detach else "--interactive", "--name=" + name, "--pull=never"]
    argv += ["--label=ascendrun.tag=" + tag] if tag else []
    argv += ["--network=host", "--pid=host", "--uts=host"]
    argv += ["--shm-size=" + box["shm_size"].replace("iB", "").lower()] if box.get("shm_size") else ["--ipc=host"]
    if runtime == "podman" and node.uid:
        argv.append("--userns=keep-id")
    else:
        argv.append("--user=%d:%d" % (node.uid, node.gid))
        argv += ["--group-add=%d" % group for group in node.groups]
    argv += _devices(box, node)
    argv += ["--volume=" + mount for mount in mounts]
    argv += ["--env=%s=%s" % pair for pair in env.items()]
    return [*argv, *box["options"], "--entrypoint=" + box["python"], image, *words]


def _mounts(box: Box, node: Node, root: str) -> list[str]:
    """Return what the container has of the node: under the same paths, so that records are true outside."""
    own = [root, layout.local_base(), os.path.dirname(hold.socket_path("-")), *(box.get("paths") or ())]
    found = ["%s:%s" % (path, path) for path in dict.fromkeys(own)]
    # The image's own would make this another machine: node/layout.py.
    found.append("%s:%s:ro" % (MACHINE_ID if MACHINE_ID in node.files else os.devnull, MACHINE_ID))
    if box.get("vendor") and not _by_vendor_runtime(box, node):
        found += ["%s:%s:ro" % (path, path) for path in box["vendor"]["files"] if path in node.files]
    return found + list(box["mounts"])


def _environment(box: Box, node: Node, root: str) -> dict[str, str]:
    env = {layout.ROOT_VARIABLE: root, "USER": node.user, "LOGNAME": node.user}
    if node.uid:
        env["HOME"] = "/tmp"  # the image has no home of this user
    if box.get("vendor") and _by_vendor_runtime(box, node):
        env[box["vendor"]["runtime"]["variable"]] = ",".join(map(str, box["devices"]["ids"]))
    return env


def _devices(box: Box, node: Node) -> list[str]:
    """Return the options that give the container the devices of the job, and no others: a driver may give a device to
    one container only (-8020)."""
    devices = box.get("devices") or {"type": "cpu", "ids": []}
    if devices["type"] == "cuda":
        ids = ",".join(map(str, devices["ids"]))
        if box["runtime"] == "podman":
            return ["--device=nvidia.com/gpu=%d" % number for number in devices["ids"]]
        return ['--gpus="device=%s"' % ids]
    vendor = box.get("vendor")
    if not vendor:
        return []
    if _by_vendor_runtime(box, node):
        return ["--runtime=" + vendor["runtime"]["name"]]
    names = [vendor["device"] % number for number in devices["ids"]]
    return ["--device=" + name for name in (*names, *vendor["devices"])]


def _by_vendor_runtime(box: Box, node: Node) -> bool:
    return bool(box["runtime"] == "docker" and box["vendor"]["runtime"]["path"] in node.files)


# --- one attempt ---


def container_name(root: str, tag: str) -> str:
    """Return the name of an attempt's container on this node: one machine may be several nodes."""
    return "ascendrun-%s-%s" % (tag, layout.sha256(os.fsencode(root)).hexdigest()[:8])


def start(box: Box, *, root: str, tag: str, agent: Sequence[str], log: Any, outer: str = "") -> str:
    """Start the container of an attempt; return the name of the holder in it. `outer`: that of the allocation, with
    which it ends. Raises OperationError, OSError."""
    name = container_name(root, tag)
    remove(box, root=root, tag=tag)
    make_directories(box)
    words = [*agent[1:], "contain", name, *([outer, agent[0]] if outer else [])]
    argv = run_argv(box, read_node(box), words, root=root, name=name, tag=tag, detach=True)
    if box["runtime"] == "apptainer":
        subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        return name
    code, _, err = run_command(argv, RUN_S)
    if code != 0:
        raise OperationError("start-failed", "container-failed", runtime=box["runtime"], error=last_line(err))
    return name


def remove(box: Box, *, root: str, tag: str) -> None:
    """Remove what is left of an attempt's container, and whatever still runs there; it may be gone, or never made."""
    argv = [box["runtime"], "rm", "--force", container_name(root, tag)]
    for _ in range(REMOVALS if box["runtime"] != "apptainer" else 0):
        code, _, _ = run_command(argv, ASK_S)
        if code is None or code >= 0:  # no signal has ended it
            return


def make_directories(box: Box) -> None:
    """Make what the node itself mounts: docker would make it for root."""
    for path in (layout.local_base(), os.path.dirname(hold.socket_path("-"))):
        make_private_dir(path)
    for path in box.get("paths") or ():
        os.makedirs(path, exist_ok=True)


def run_command(argv: list[str], timeout_s: float, stdin: bytes = b"") -> tuple[int | None, str, str]:
    """Return (exit code, stdout, stderr); code None: no such command, or it took too long."""
    try:
        done = subprocess.run(argv, input=stdin, capture_output=True, timeout=timeout_s, start_new_session=True)
    except FileNotFoundError as error:
        return None, "", str(error)
    except subprocess.TimeoutExpired:
        return None, "", "no reply within %d s" % timeout_s
    return done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace")


def last_line(text: str) -> str:
    """Return the line of a runtime's output that has its reason: podman and docker may end with advice."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "rror" in line), lines[-1] if lines else "")[:1000]


def enter(words: Sequence[str]) -> int:
    """Become a shell next to a rank in its container. `words`: runtime, container, interpreter, and those of the
    shell."""
    import sys

    runtime, name, python, *rest = words
    terminal = ["--tty", "--env=TERM"] if os.isatty(0) else []
    inside = [python, "-I", "-S", os.path.abspath(sys.argv[0]), "shell", *rest]
    os.execvp(runtime, [runtime, "exec", "--interactive", *terminal, name, *inside])


# --- the image, and a survey in it ---

PROBLEMS = (
    ("daemon-down", ("Cannot connect to the Docker daemon", "Is the docker daemon running")),
    ("runtime-refused", ("permission denied while trying to connect", "Permission denied: podman")),
    ("image-missing", ("No such image", "no such image", "image not known", "could not find")),
)
"""What a runtime writes, by problem."""


LAYERS = {"Pulling fs layer": False, "Already exists": True, "Pull complete": True}
"""Whether this node has a layer, by what docker prints of it. podman prints no end of a layer."""
PULLS: dict[str, dict[str, bool]] = {}
"""The layers of each image that is being fetched, by what its runtime has printed of them."""


def pull(runtime: str, image: str, timeout_s: float) -> tuple[int | None, str]:
    """Fetch an image; return (exit code, output); code None: it took too long. Raises OSError."""
    argv = [runtime, "pull", image]
    process = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    timer = threading.Timer(timeout_s, process.kill)
    end = time.monotonic() + timeout_s
    timer.start()
    layers = PULLS[image] = {}
    lines = []
    try:
        for raw in process.stdout or ():
            lines.append(raw.decode("utf-8", "replace"))
            layer, _, state = lines[-1].strip().partition(": ")
            if state in LAYERS:
                layers[layer] = LAYERS[state]
        code = process.wait()
    finally:
        timer.cancel()
        PULLS.pop(image, None)
    return (None, "no reply within %d s" % timeout_s) if time.monotonic() >= end else (code, "".join(lines))


def pulls() -> dict[str, Any]:
    """Return {pulls: {image: [layers that this node has, layers known so far]}} of those in progress."""
    return {"pulls": {image: [sum(layers.values()), len(layers)] for image, layers in PULLS.copy().items()}}


def find_image(box: Box, end: float) -> dict[str, Any]:
    """Return {id} of the image on this node, fetched as the job requests; {problem, detail}: it cannot be used. The id
    is None if the runtime has none."""
    runtime, image = box["runtime"], box["image"]
    if runtime == "apptainer":
        code, _, err = run_command([runtime, "--version"], ASK_S)
        return {"id": None} if code == 0 else problem(code, err)
    look = [runtime, "image", "inspect", "--format={{.Id}}", image]
    code, out, err = run_command(look, ASK_S)
    is_missing = code not in (0, None) and problem(code, err)["problem"] == "image-missing"
    if box["pull"] == "always" and code is not None or is_missing and box["pull"] == "missing":
        code, out = pull(runtime, image, max(1.0, end - time.monotonic()))
        if code != 0:
            found = problem(code, out)
            is_known = found["problem"] in ("daemon-down", "runtime-refused")
            return found if is_known else dict(found, problem="image-pull-failed")
        code, out, err = run_command(look, ASK_S)
    return {"id": out.strip().rpartition(":")[2]} if code == 0 else problem(code, err)


def problem(code: int | None, text: str) -> dict[str, Any]:
    """Return {problem, detail} of a runtime's failure."""
    if code is None and "No such file" in text:
        return {"problem": "runtime-missing", "detail": text}
    kinds = (kind for kind, marks in PROBLEMS if any(mark in text for mark in marks))
    return {"problem": next(kinds, "container-failed"), "detail": last_line(text)}


def survey(request: dict[str, Any], *, root: str, agent: Sequence[str], end: float) -> dict[str, Any]:
    """Survey inside the job's image: {image: find_image's, results: by item}."""
    import json

    box = request["shell"]["container"]
    image = find_image(box, end)
    if "problem" in image:
        return {"image": image, "results": {}}
    make_directories(dict(box, paths=()))
    shown = {**box, "paths": [path for path in box.get("paths") or () if os.path.isdir(path)]}
    name = "ascendrun-survey-" + os.urandom(6).hex()
    argv = run_argv(shown, read_node(box), [*agent[1:], "survey"], root=root, name=name)
    shell = {key: value for key, value in request["shell"].items() if key != "container"}
    left_s = max(1.0, end - time.monotonic())
    inside = json.dumps({"items": request["items"], "shell": shell, "timeout_s": left_s}).encode("utf-8")
    code, out, err = run_command(argv, left_s, inside)
    if code is None and box["runtime"] != "apptainer":
        run_command([box["runtime"], "rm", "--force", name], ASK_S)
    try:
        return {"image": image, "results": json.loads(out)["results"]}
    except ValueError:
        if "executable file not found" not in err:
            return {"image": {"problem": "container-failed", "detail": last_line(err)}, "results": {}}
        failed: dict[str, Any] = {"error": last_line(err), "late": False, "missing": True}
        return {"image": image, "results": {item["name"]: failed for item in request["items"]}}
