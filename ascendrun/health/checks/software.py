"""Checks of the software of a job: setup, interpreter, packages, torch and its devices."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from ascendrun.core.findings import Finding, Severity
from ascendrun.core.jobfile.launchers import RAY
from ascendrun.health.checks.container import lacks_glibc
from ascendrun.health.survey.check_context import CheckContext, check, differing, finding, node_check, outliers
from ascendrun.health.survey.facts import NodeFacts, TorchFacts
from ascendrun.text import Text

IMPORT_NOTE_S, IMPORT_WARN_S = 10.0, 30.0
MEETING_MODULES = ("torch", "torch-npu", "deepspeed")
"""Two versions of these in one job fail to connect or compute wrong numbers; others may only change results."""


@node_check(
    "python",
    "the setup of the job works and its interpreter starts",
    "setup-failed python-missing python-broken python-slow",
)
def check_python(context: CheckContext, host: str, facts: NodeFacts) -> Iterator[Finding]:
    python = facts.python
    if python is None or lacks_glibc(python.error):
        return
    if "python" in facts.late:
        from ascendrun.core.jobfile.model import Timeouts

        limit_s = context.job.timeouts.check_s if context.job is not None else Timeouts().check_s
        yield finding("python-slow", Severity.WARN, host, python=_job_python(context), limit_s=limit_s)
    elif python.setup == "failed":
        why = python.error or Text("doctor.setup-failed", "it failed without output")
        yield finding("setup-failed", Severity.FAIL, host, why=why)
    elif python.setup == "no-command" or python.is_missing:
        evidence = (python.error,) if python.error else ()
        yield finding("python-missing", Severity.FAIL, host, evidence, python=_job_python(context))
    elif python.error is not None:
        values = {"python": _job_python(context), "command": _shown_command(context)}
        yield finding("python-broken", Severity.FAIL, host, **values, why=python.error)


def _shown_command(context: CheckContext) -> str:
    """Return a command for a shell of the node that starts the interpreter with the variables and setup of the job."""
    command = shlex.join([_job_python(context), "-c", "print(1)"])
    if context.job is None:
        return command
    variables = [f"{name}={value}" for name, value in context.job.env.items()]
    if context.job.setup is not None:
        script = f"{context.job.setup.strip()}\n{command}".replace("\\", "\\\\").replace("'", "\\'")
        command = "bash -c $'" + script.replace("\n", "\\n") + "'"
    return " ".join([*(["env"] if variables else []), *map(shlex.quote, variables), command])


LOCK_S = 600.0
"""Seconds; a younger lock may be of a build on a node that shares the directory."""


@check("build-locks", "no stopped build of a torch extension has left its lock", "build-lock-left")
def check_build_locks(context: CheckContext) -> Iterator[Finding]:
    """torch.utils.cpp_extension waits for the lock of another process without a limit, at 0 % CPU."""
    locks = {host: facts.python.locks for host, facts in context.facts.items() if facts.python is not None}
    held = {path for found in locks.values() for path, age_s in found.items() if age_s is None}
    for host, found in locks.items():
        for path, age_s in found.items():
            if path not in held and age_s is not None and age_s > LOCK_S:
                yield finding("build-lock-left", Severity.WARN, host, path=path, age_s=round(age_s))


def _job_python(context: CheckContext) -> str:
    if context.job is None:
        return "python3"
    if context.job.python or context.job.program:
        return context.job.python or "python3"
    first = (context.job.command or ("python3",))[0]
    return first if first.rpartition("/")[2].startswith("python") else "python3"


@check("python-consistency", "the interpreter is the same on all nodes", "python-differs python-patch-differs")
def check_python_consistency(context: CheckContext) -> Iterator[Finding]:
    yield from differing(context, "python-differs", Severity.WARN, _minor)
    minors = {_minor(facts) for facts in context.facts.values()} - {None}
    if len(minors) == 1:
        yield from differing(
            context, "python-patch-differs", Severity.NOTE, lambda facts: facts.python.version if facts.python else None
        )


def _minor(facts: NodeFacts) -> str | None:
    version = facts.python.version if facts.python else None
    return ".".join(version.split(".")[:2]) if version else None


@check(
    "packages",
    "torch and related packages have the same versions on all nodes",
    "package-differs torch-missing ray-missing",
)
def check_packages(context: CheckContext) -> Iterator[Finding]:
    names = dict.fromkeys(name for facts in context.facts.values() for name in _modules(facts))
    for name in names:
        severity = Severity.WARN if name in MEETING_MODULES else Severity.NOTE
        if name == RAY and context.job is not None and context.job.launcher == RAY:
            severity = Severity.FAIL  # other versions are refused by the first node
        versions = {host: facts.python and facts.python.version_of(name) for host, facts in context.facts.items()}
        yield from outliers("package-differs", severity, versions, package=name)
    job = context.job
    required = {"torch": job is not None and job.program is not None, RAY: job is not None and job.launcher == RAY}
    for name in (name for name, is_required in required.items() if is_required):
        for host, facts in context.facts.items():
            if name in _modules(facts) and _modules(facts)[name] is None:
                python = (facts.python.executable if facts.python else None) or "python3"
                yield finding(f"{name}-missing", Severity.FAIL, host, python=python)


def _modules(facts: NodeFacts) -> Mapping[str, str | None]:
    return (facts.python.modules if facts.python else None) or {}


@check(
    "torch",
    "torch can be imported, finds its devices and has their backend",
    "torch-import torch-slow devices-missing backend-missing",
    is_full=True,
)
def check_torch(context: CheckContext) -> Iterator[Finding]:
    """Check torch, imported in a child process: with torch_npu but no CANN even `import torch` fails."""
    severity = Severity.FAIL if context.job is not None else Severity.NOTE
    for host, facts in context.facts.items():
        torch = facts.torch
        if torch is None or (facts.python is not None and facts.python.error is not None) or lacks_glibc(torch.error):
            continue
        if torch.error is not None:
            why = torch.error.splitlines()[0][:300] if isinstance(torch.error, str) else torch.error
            yield finding("torch-import", severity, host, step=torch.step or "import torch", why=why)
            continue
        if torch.import_s is not None and torch.import_s >= IMPORT_NOTE_S:
            how_bad = Severity.WARN if torch.import_s >= IMPORT_WARN_S else Severity.NOTE
            yield finding("torch-slow", how_bad, host, seconds=round(torch.import_s, 1))
        yield from _devices(context, host, torch, severity)


def _devices(context: CheckContext, host: str, torch: TorchFacts, severity: Severity) -> Iterator[Finding]:
    if context.device_type in ("npu", "cuda") and torch.devices is not None:
        expected = expected_devices(context, host)
        if torch.devices < max(1, expected):
            values: dict[str, Any] = {
                "device_type": context.device_type,
                "found": torch.devices,
                "expected": max(1, expected),
            }
            yield finding("devices-missing", severity, host, **values)
    if torch.has_backend is False:
        yield finding("backend-missing", severity, host, backend=torch.backend or "")


def expected_devices(context: CheckContext, host: str) -> int:
    """Return how many devices of the host the job uses; 0: no job, or no plan."""
    nodes = context.plan.nodes if context.plan is not None else ()
    ranks = next((node.ranks for node in nodes if node.host == host), ())
    visible = (
        dict(ranks[0].env).get("ASCEND_RT_VISIBLE_DEVICES") or dict(ranks[0].env).get("CUDA_VISIBLE_DEVICES")
        if ranks
        else None
    )
    return len(visible.split(",")) if visible else 0
