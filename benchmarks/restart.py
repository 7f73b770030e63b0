"""A training that loses a rank, a host or an answer, and trains again: ascendrun beside torchrun --max-restarts.

python -m benchmarks.restart [--repeat 2] [--patience 300] [--npu PYTHON] [--nvrx PYTHON] [--results FOLDER]

Two ranks on each of two hosts; a third host is free. About 12 minutes a repetition, most of them waiting. --npu: the
Python of an environment with torch_npu; as many minutes again over the simulated CANN. --nvrx: one with torch and
nvidia-resiliency-ext, whose ft_launcher takes part on CPUs, another 5 minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import yaml

from ascendrun.sim.ascend.scenario import Scenario
from ascendrun.sim.npu.build import build, find_target
from benchmarks.bed import Bed
from benchmarks.launchers import JOB, RANKS_PER_HOST, Launcher
from benchmarks.ours import Ours
from benchmarks.results import RESULTS, Row, Sheet, median, read_rows, shown, table, without_paths, write_page
from benchmarks.trial import Trial
from tests.lib.vcluster.fence import Bmc
from tests.lib.vcluster.npus import install_on

COLUMNS = ("what", "device", "event", "repeat", "known_s", "gone_s", "again_s", "lost_steps", "load", "note")
RANK_KILLED, HOST_LOST, RANK_STOPPED = "rank killed", "host without power", "rank stopped"
EVENTS = (RANK_KILLED, HOST_LOST, RANK_STOPPED)
TRAIN = Path(__file__).with_name("peers") / "train.py"
SHARED = "/shared"
HOSTS, WORLD = 2, 2 * RANKS_PER_HOST
VICTIM, VICTIM_HOST = WORLD - 1, 1
START_PATIENCE_S = 90.0
STEPS_BEFORE = 25
SPARE_S, SETTLED_S = 15, 30.0
"""The spare agent comes when the others have met; the loss of a host, when it waits."""
LIMIT_S = 120
"""Seconds without an answer that count as a hang: of the sums, and of ascendrun's `timeouts.hang_s`."""
FENCE_S = 120
"""The shortest lease: 90 s and the grace period of checkpoints."""
OURS, POWERED, TORCHRUN, NVRX = "ascendrun", "ascendrun, power", "torchrun", "ft_launcher"
MODULES = {TORCHRUN: "torch.distributed.run", NVRX: "nvidia_resiliency_ext.fault_tolerance.launcher"}
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
"""By default the ranks use the store of the rendezvous: with torch 2.13 and gloo, those of a new start find the old
addresses there, fail at once, and use up all restarts."""
_LOOK_S = 0.1
_RUNS = re.compile(r"RUNNING · [\dhms]+ · step \d+ · loss")


@dataclass(frozen=True)
class Devices:
    """What the ranks use: the `type` of a job, their Python, and the line that a shell runs before them, if any.
    `peers`: the Python of each peer that can run them."""

    type: str
    peers: Mapping[str, str]
    python: str = sys.executable
    setup: str = ""

    @property
    def env(self) -> dict[str, str]:
        return {"OMP_NUM_THREADS": "1", "TRAIN_DEVICE": self.type, "PYTHONWARNINGS": "ignore"}


def devices_of(npu_python: str | None, nvrx_python: str | None = None) -> list[Devices]:
    """CPUs, and simulated NPUs where a Python with torch_npu is given. Raises PreflightError when it is no such one."""
    cpus = Devices("cpu", {TORCHRUN: sys.executable, **({NVRX: nvrx_python} if nvrx_python else {})})
    if npu_python is None:
        return [cpus]
    setup = f"source {build(find_target(npu_python))}/set_env.sh"
    return [cpus, Devices("npu", {TORCHRUN: npu_python}, npu_python, setup)]


@dataclass(frozen=True)
class Again:
    """Seconds from the fault until the screen of whoever started it said a word about it (`known_s`), the last process
    of the old ranks had gone from all hosts that have power (`gone_s`), and a new start had done a step (`again_s`).

    None: not while we watched. `lost_steps`: steps that were done before the fault and are done again.
    """

    known_s: float | None
    gone_s: float | None
    again_s: float | None
    lost_steps: int | None


def launchers(bed: Bed, ours: Ours, devices: Devices, event: str) -> list[Launcher]:
    found = []
    for name in devices.peers:
        argv = _elastic(bed, devices, name, has_spare=event == HOST_LOST)
        found.append(Launcher(name, argv, {}, prepare=lambda: _empty(bed.shared)))
    hostfiles = {OURS: ours.hostfile(bed.cluster.hosts)}
    if event == HOST_LOST:
        hostfiles[POWERED] = bed.folder / "powered.hosts"
        lines = hostfiles[OURS].read_text().splitlines()
        hostfiles[POWERED].write_text("".join(f"{line} bmc={line.split()[0]}.bmc\n" for line in lines))
    for name, hostfile in hostfiles.items():
        argv = ours.argv("submit", str(_job(bed, devices, hostfile)))
        found.append(Launcher(name, argv, ours.environ(), prepare=lambda: _warm(bed, ours)))
    return found


class Switching(Ours):
    """Its controller can switch hosts off that have a `bmc`."""

    def __init__(self, bed: Bed) -> None:
        super().__init__(bed)
        settings = bed.folder / "ascendrun" / "config.yaml"
        settings.parent.mkdir()
        settings.write_text(yaml.safe_dump(Bmc(bed.cluster, bed.folder / "bmc").settings(60.0)))
        self._environ = {"XDG_CONFIG_HOME": str(bed.folder)}

    def environ(self) -> dict[str, str]:
        return {**super().environ(), **self._environ}


def _elastic(bed: Bed, devices: Devices, peer: str, *, has_spare: bool) -> list[str]:
    """The elastic rendezvous of torchrun, and of ft_launcher. `has_spare`: a third agent waits for the place of a lost
    host; without a lost host it takes part in each restart, and all of them were used up by one killed rank."""
    limits = {"TRAIN_LIMIT_S": str(LIMIT_S), "HCCL_EXEC_TIMEOUT": str(LIMIT_S)}
    python = devices.peers[peer]
    path = os.pathsep.join((os.path.dirname(python), "/usr/local/bin:/usr/bin:/bin"))  # ft_launcher starts `python`
    environ = {**devices.env, **limits, "PATH": path}
    words = ["env", OWN_STORE, *(f"{name}={value}" for name, value in environ.items()), python, "-m", MODULES[peer]]
    words += ["--ignore-missing-fault-tol-cfg"] if peer == NVRX else []
    words += ["--nnodes", str(HOSTS), "--nproc-per-node", str(RANKS_PER_HOST), "--max-restarts", "3"]
    words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{bed.cluster.hosts[0]}:29500", "--rdzv-id", "bench"]
    words += [str(TRAIN), SHARED]
    first, second, spare = bed.cluster.hosts
    line = shlex.join(["bash", "-c", "; ".join(filter(None, (devices.setup, f"exec {shlex.join(words)}")))])
    start = "ssh -tt -o BatchMode=yes {} {} </dev/null &"  # -tt: the ranks end with the connection
    script = [start.format(host, shlex.quote(line)) for host in (first, second)]
    if has_spare:
        script.append(f"sleep {SPARE_S}; {start.format(spare, shlex.quote(line))}")
    file = bed.folder / f"{peer}.sh"
    file.write_text("\n".join((*script, "wait")) + "\n")
    return ["sh", str(file)]


def _job(bed: Bed, devices: Devices, hostfile: Path) -> Path:
    limits = {"TRAIN_LIMIT_S": str(10 * LIMIT_S), "HCCL_EXEC_TIMEOUT": str(10 * LIMIT_S)}
    job: dict[str, object] = {
        "name": JOB,
        "command": [devices.python, str(TRAIN), SHARED],
        "env": {**devices.env, **limits},
        "nodes": HOSTS,
        "devices": {"type": devices.type, "per_node": RANKS_PER_HOST},
        "hostfile": str(hostfile),
        "timeouts": {"hang_s": LIMIT_S},
        "restart": {"max_restarts": 3, "backoff_s": [1, 2], "on_unreachable_node": "fence", "fence_after_s": FENCE_S},
    }
    if devices.setup:
        job["setup"] = devices.setup
    file = bed.folder / f"{hostfile.stem}.yaml"
    file.write_text(yaml.safe_dump(job))
    return file


def _warm(bed: Bed, ours: Ours) -> None:
    ours.run("stop", "--now", JOB)
    _empty(bed.shared)
    ours.run("exec", "-H", str(ours.hostfile(bed.cluster.hosts)), "--", "true")


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def run(repeats: int, patience_s: float, events: Sequence[str], families: Sequence[Devices], sheet: Sheet) -> None:
    with Bed(HOSTS + 1, shared=SHARED) as bed:
        ours = Switching(bed)
        for host in bed.cluster.hosts:
            install_npus(bed, host)
        for repeat in range(repeats):
            for devices in families:
                for event in events:
                    for launcher in launchers(bed, ours, devices, event)[:: 1 if repeat % 2 == 0 else -1]:
                        found = play(bed, ours, launcher, event, patience_s)
                        sheet.add(what=launcher.name, device=devices.type, event=event, repeat=repeat, **found)
                        if not bed.cluster.is_up(bed.cluster.hosts[VICTIM_HOST]):
                            bed.cluster.reboot(bed.cluster.hosts[VICTIM_HOST])
                            install_npus(bed, bed.cluster.hosts[VICTIM_HOST])
        ours.run("stop", "--now", JOB)
        ours.stop_controller()


def install_npus(bed: Bed, host: str) -> None:
    """The simulated tools, which a host's disk loses with its power."""
    install_on(bed.cluster, host, Scenario(cards=RANKS_PER_HOST, number=bed.cluster.hosts.index(host) + 1))


def play(bed: Bed, ours: Ours, launcher: Launcher, event: str, patience_s: float) -> dict[str, object]:
    """One row of the sheet, without its keys."""
    launcher.prepare()
    load = f"{os.getloadavg()[0]:.1f}"
    with Trial(bed, launcher.argv, launcher.env) as trial:
        began = trial.await_ranks(WORLD, patience_s=START_PATIENCE_S)
        trial.watch(START_PATIENCE_S, lambda: len(_steps(bed.shared)) >= STEPS_BEFORE)
        if began is None or len(_steps(bed.shared)) < STEPS_BEFORE:
            return {"load": load, "note": f"did not start: {without_paths(trial.tail())}"}
        if event == HOST_LOST:
            trial.watch(SETTLED_S, lambda: False)
        again = watch(bed, trial, event, patience_s=patience_s)
        note = without_paths(trial.tail()) if again.again_s is None else ""
        if launcher.name in (OURS, POWERED):
            ours.run("stop", "--now", JOB)
    return {**asdict(again), "load": load, "note": note}


def watch(bed: Bed, trial: Trial, event: str, *, patience_s: float) -> Again:
    """Make the event happen, and look until a new start has done a step, or the patience is over."""
    old = {process.pid for process in trial.left() if str(TRAIN) in process.argv and "RANK" in process.environ}
    shown = len(trial.text)
    since_s = _cause(bed, trial, event)
    known: list[float] = []
    gone: list[float] = []
    looked = [0.0]

    def look() -> bool:
        now_s = time.time()
        if not known and _has_news(trial.text[shown:]):
            known.append(now_s - since_s)
        if now_s - looked[0] < _LOOK_S:
            return False
        looked[0] = now_s
        if not gone and not old & {process.pid for process in trial.left()}:
            gone.append(now_s - since_s)
        is_over = trial.status() is not None or any(step["start_s"] > since_s for step in _steps(bed.shared))
        return bool(gone) and is_over

    trial.watch(patience_s, look)
    steps = _steps(bed.shared)
    new = [step for step in steps if step["start_s"] > since_s]
    done = max(int(step["step"]) for step in steps if step["start_s"] <= since_s)
    return Again(
        known[0] if known else None,
        gone[0] if gone else None,
        new[0]["at_s"] - since_s if new else None,
        done - int(new[0]["from"]) if new else None,
    )


def _cause(bed: Bed, trial: Trial, event: str) -> float:
    if event == RANK_KILLED:
        return trial.kill_rank(VICTIM)
    if event == RANK_STOPPED:
        return trial.suspend_rank(VICTIM)
    bed.cluster.crash(bed.cluster.hosts[VICTIM_HOST])
    return time.time()


def _has_news(text: str) -> bool:
    """Whether the screen shows a whole line that is neither the training's own nor ascendrun's of a running job."""
    lines = re.split(r"[\r\n]+", text)[1:-1]  # the first may be the end of a step's line
    return any(line.strip() and "iter " not in line and not _RUNS.search(line) for line in lines)


def _steps(folder: Path) -> list[dict[str, float]]:
    """What rank 0 of each start recorded; a line that is being written is left out."""
    try:
        lines = (folder / "steps.jsonl").read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def render(rows: Sequence[Row]) -> str:
    header = ["", "", "", "known, s", "old ranks gone, s", "trains again, s", "steps done twice"]
    lines = []
    for device, event, name in product(("cpu", "npu"), EVENTS, (TORCHRUN, NVRX, OURS, POWERED)):
        mine = [row for row in rows if (row["device"], row["event"], row["what"]) == (device, event, name)]
        failed = sum(not row["again_s"] for row in mine)
        label = f"{name} (**{failed} of {len(mine)} never**)" if failed else name
        cells = [shown(median(mine, column)) for column in ("known_s", "gone_s", "again_s", "lost_steps")]
        if mine:
            lines.append([device, event, label, *cells])
    return table(header, lines)


def says(patience_s: float) -> str:
    return (
        f"{HOSTS} hosts, {RANKS_PER_HOST} ranks each, a third host free; a step each 0.1 s, a checkpoint "
        "each tenth step in a folder that all hosts share, from which the script continues by itself. Medians in "
        f"seconds after the fault, seen from outside; “never”: not within {patience_s:g} s. Nothing of this ran on an "
        "NPU: *npu* is torch_npu over the simulated CANN, with HCCL; *cpu* is gloo.\n\n"
        "*rank killed*: SIGKILL to the last rank. *host without power*: of the last two ranks, without a word. *rank "
        f"stopped*: SIGSTOP to the last rank. A sum that is not answered for {LIMIT_S} s is an error under torchrun, "
        f"as HCCL's (`HCCL_EXEC_TIMEOUT`) and NCCL's limits make it; ascendrun has `hang_s: {LIMIT_S}`. torchrun: "
        f"`--max-restarts 3`, elastic rendezvous on the first host, and `{OWN_STORE}`, without which no new start of "
        "gloo's ranks came up; where a host is lost, a third agent waits on the free one. ft_launcher: that of "
        "nvidia-resiliency-ext 0.4.1, told the same; its heartbeats are calls in a script, and this one has none. "
        "ascendrun: "
        "`max_restarts: 3`, `backoff_s: [1, 2]`, and `on_unreachable_node: fence` with the shortest lease, "
        f"{FENCE_S} s: it does not start ranks again before the silent ones have ended by themselves; torchrun has no "
        f"such promise. *{POWERED}*: its hosts have a `bmc`, and an agent of the virtual hosts proves that one is off. "
        "The script reports its steps to ascendrun, by one line.\n\n"
        "*known*: the first line on the screen that is not the training's own. *steps done twice*: since the "
        "checkpoint from which the new start continues."
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--repeat", type=int, default=2, metavar="N", help="repetitions  [default: %(default)s]")
    options.add_argument("--patience", type=float, default=300.0, metavar="S", help="seconds  [default: %(default)g]")
    options.add_argument(
        "--npu",
        metavar="PYTHON",
        type=os.path.abspath,
        help="an environment with torch_npu: as well over the simulated CANN",
    )
    options.add_argument(
        "--nvrx",
        metavar="PYTHON",
        type=os.path.abspath,
        help="an environment with nvidia-resiliency-ext: its launcher too",
    )
    options.add_argument("--event", choices=EVENTS, action="append", help="only this one; may be repeated")
    options.add_argument("--name", default="restart", help="of the files of results  [default: %(default)s]")
    options.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    given = options.parse_args()
    if shutil.which("ssh") is None:
        options.error("needs ssh")
    with Sheet(given.results, given.name, COLUMNS) as sheet:
        run(given.repeat, given.patience, given.event or EVENTS, devices_of(given.npu, given.nvrx), sheet)
    write_page(
        sheet,
        title="restart: a rank, a host, an answer lost",
        says=says(given.patience),
        body=render(read_rows(sheet.path)),
        command=f"python -m benchmarks.restart --repeat {given.repeat} --patience {given.patience:g}"
        + "".join(f" --{name} PYTHON" for name in ("npu", "nvrx") if getattr(given, name)),
    )


if __name__ == "__main__":
    main()
