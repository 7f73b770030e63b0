"""Slurm: an allocation for each job by sbatch, its hosts through srun, their supervisors started by a holder."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from typing import Any, Callable

from ascendrun.backends import held
from ascendrun.backends.slurm import facts, queue
from ascendrun.core.allocations import AllocationRequest, AllocationState, EngineError, EngineFacts, Options
from ascendrun.core.hosts import Host
from ascendrun.core.jobs.reasons import because
from ascendrun.core.settings import Settings
from ascendrun.head.ssh.child_process import ChildConnection
from ascendrun.node import hold, layout

EXPORTED = ("HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "PATH", "SLURM_CONF")
_SCRIPT = """#!/bin/sh
trap 'kill -USR1 $step' USR1
trap 'kill -TERM $step' TERM
srun --quiet --job-name=holder --overlap --ntasks-per-node=1 --cpus-per-task="${{SLURM_CPUS_ON_NODE:-1}}" \\
    --cpu-bind=none --mpi=none --kill-on-bad-exit=0 --wait=0 --chdir=/ \\
    {python} -I -S -c 'import sys; exec(sys.argv[1])' {source} slurm-$SLURM_JOB_ID {idle_s} &
step=$!
while kill -0 $step 2>/dev/null; do wait $step; done
"""


def holder_name(allocation: str) -> str:
    return f"slurm-{allocation}"


class SlurmBackend:
    """Implementation of `transport.Backend` and `allocations.Allocator`. Thread-safe."""

    def __init__(self, settings: Settings, options: object = None) -> None:
        self._env = {**os.environ, "SLURM_TIME_FORMAT": "standard"}
        self._ids: dict[str, str] = {}

    def connect(self, host: Host) -> ChildConnection:
        """Return a connection of which each command is a step of the allocation."""
        return held.connect(host, step_argv)

    def close(self) -> None:
        """Nothing is held."""

    def terminal_argv(self, host: Host, argv: Sequence[str], *, has_terminal: bool) -> list[str]:
        return step_argv(host, argv, options=["--pty"] if has_terminal else [])

    def request(self, wanted: AllocationRequest) -> None:
        with open(hold.__file__, encoding="utf-8") as file:
            source = shlex.quote(file.read())
        python = shlex.quote(wanted.options.get("python", "python3"))
        idle_s = float(self._env.get(hold.IDLE_VARIABLE, hold.IDLE_S))
        script = _SCRIPT.format(python=python, source=source, idle_s=idle_s)
        self._run(["sbatch", *queue.sbatch_options(wanted, exported=self._exported())], script)

    def poll(self, keys: Options) -> Mapping[str, AllocationState]:
        jobs = self._jobs()
        doubled = queue.doubled(jobs, keys)
        if doubled:  # a controller was killed while its sbatch ran
            self._run(["scancel", *doubled])
        states = queue.states_of(jobs, keys)
        self._ids = {**{key: id for key, id in self._ids.items() if key in keys}, **{job.key: job.id for job in jobs}}
        lost = {self._ids[key]: key for key in keys if key not in states and key in self._ids}
        return {**states, **self._ends(lost)}

    def _jobs(self) -> Sequence[queue.QueuedJob]:
        return queue.read_jobs(self._run(["squeue", "--me", "--states=all", "--json"]))

    def all_of(self, prefix: str) -> Mapping[str, AllocationState]:
        jobs = self._jobs()
        return queue.states_of(jobs, {job.key for job in jobs if job.key.startswith(prefix)})

    def _ends(self, lost: Mapping[str, str]) -> Mapping[str, AllocationState]:
        """Return how jobs ended that the queue has forgotten, by their keys; {}: the accounting does not know."""
        try:
            return queue.ends_of(self._run([*queue.SACCT, f"--jobs={','.join(lost)}"]), lost) if lost else {}
        except EngineError:  # most often there is none
            return {}

    def release(self, keys: Options) -> None:
        if keys:
            jobs = self._jobs()
            ids = [job.id for job in jobs if job.key in keys and job.is_live]
            if ids:
                self._run(["scancel", *ids])

    def prune(self, options: Mapping[str, Any], is_over: Callable[[str], bool], *, dry_run: bool) -> Sequence[str]:
        return ()  # an allocation that nothing uses ends, and leaves nothing

    def facts(self, options: Mapping[str, Any]) -> EngineFacts:
        for name in facts.COMMANDS:
            if shutil.which(name, path=self._env.get("PATH")) is None:
                raise EngineError(because("engine-no-command", command=name), is_final=True)
        return facts.read_facts(self._run(facts.CONFIG_ARGV), self._run(facts.NODES_ARGV), options)

    def _exported(self) -> str:
        return ",".join(name for name in EXPORTED if name in self._env)

    def _run(self, argv: Sequence[str], text: str = "") -> str:
        """Run a command of Slurm; return its output. Raises EngineError."""
        done = held.run_command(argv, text, env=self._env)
        if done.returncode:
            words = done.stderr.strip() or f"{argv[0]}: {done.returncode}"
            raise EngineError(because("engine-silent", why=words), is_final=queue.is_refusal(argv[0], words))
        return done.stdout


def step_argv(host: Host, command: Sequence[str], *, options: Sequence[str] = ("--unbuffered",)) -> list[str]:
    """Return the command line that runs a command on a host of an allocation.

    Unbuffered: else srun keeps every byte up to a newline. Programs take the variables of Slurm for a launch by srun,
    so the command gets none of them.
    """
    given = {name: value for name in EXPORTED if (value := os.environ.get(name)) is not None}
    given[layout.HOLDER_VARIABLE] = holder_name(host.allocation or "")
    argv = [
        "srun",
        "--quiet",
        "--job-name=link",
        *options,
        "--overlap",
        f"--jobid={host.allocation}",
        f"--nodelist={host.name}",
    ]
    argv += ["--nodes=1", "--ntasks=1", "--gres=none", "--mpi=none", "--kill-on-bad-exit=0"]
    argv += ["--chdir=/", "--export=NONE", "/usr/bin/env", "-i", *(f"{name}={value}" for name, value in given.items())]
    return [*argv, *command]
