"""Checks of driver, firmware, CANN and torch_npu: the same on all nodes, and compatible."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ascendrun.ascend.compatibility import HDK_HINT, INCOMPATIBLE, UNKNOWN, VersionFact, Versions, compare_versions
from ascendrun.core.findings import Finding, Severity
from ascendrun.health.survey.check_context import CheckContext, check, compare, differing, finding, npu_check, outliers
from ascendrun.health.survey.facts import NodeFacts
from ascendrun.text import Text

_INCOMPATIBLE: Mapping[str, tuple[str, Severity]] = {
    "torch_npu/torch": ("torch-npu-torch", Severity.FAIL),
    "torch/build": ("torch-build", Severity.FAIL),
    "torch_npu/cann": ("torch-npu-cann", Severity.WARN),
    "torch_npu/python": ("torch-npu-python", Severity.WARN),
    "driver/firmware": ("driver-firmware", Severity.WARN),
}
"""By pair: torch_npu requires a specific torch (C++ symbols) and rejects builds for other accelerators. Older CANN or
firmware may work; Huawei's own installer only warns."""
_UNPROVEN = ("torch_npu", "torch_npu/cann")
"""Pairs with a note if no source states whether they are compatible."""
_CANN_NAMES = ("libhccl", "libascendcl", "libascend_hal", "ASCEND_OPP_PATH", "set_env.sh", "cann package")


@check(
    "versions-consistency",
    "driver, firmware and CANN are the same on all nodes",
    "driver-differs firmware-differs cann-differs hccl-build-differs",
)
def check_versions_consistency(context: CheckContext) -> Iterator[Finding]:
    """HCCL compares its own version, with its build, when two ranks connect (EI0008: local_version 1.83.T10.0.B206,
    remote_version 1.83.T10.0.B207): this prevents a start. No source states that it compares driver or firmware."""
    if context.device_type not in (None, "npu"):
        return
    yield from differing(context, "driver-differs", Severity.WARN, lambda facts: facts.npu.driver_version)
    yield from differing(context, "firmware-differs", Severity.WARN, lambda facts: facts.npu.firmware_version)
    severity = Severity.FAIL if context.job is not None else Severity.WARN
    canns = {host: facts.npu.cann_version for host, facts in context.facts.items()}
    yield from outliers("cann-differs", severity, canns)
    usual = compare(canns)
    builds = {host: context.facts[host].npu.hccl_build for host in (usual.majority_hosts if usual else ())}
    yield from outliers("hccl-build-differs", severity, builds, cann=usual.majority if usual else "")


@npu_check(
    "version-compatibility",
    "driver, firmware, CANN, torch_npu, torch and Python are compatible",
    *(code for code, _ in _INCOMPATIBLE.values()),
    "versions-unproven",
)
def check_version_compatibility(context: CheckContext, host: str, facts: NodeFacts) -> Iterator[Finding]:
    facts_of_pairs = compare_versions(versions_of(facts))
    for fact in facts_of_pairs:
        if fact.outcome == INCOMPATIBLE and fact.pair in _INCOMPATIBLE:
            code, severity = _INCOMPATIBLE[fact.pair]
            yield _version_finding(code, severity, host, fact)
        elif fact.outcome == UNKNOWN and fact.pair in _UNPROVEN:
            yield _version_finding("versions-unproven", Severity.NOTE, host, fact)
    if not any(fact.outcome == INCOMPATIBLE and fact.pair == "driver/firmware" for fact in facts_of_pairs):
        yield from _boards(host, facts)


def _version_finding(code: str, severity: Severity, host: str, fact: VersionFact) -> Finding:
    evidence = (f"source: {fact.source}",) if fact.source else ()
    return finding(code, severity, host, evidence=evidence, problem=fact.message, hint=fact.hint)


def _boards(host: str, facts: NodeFacts) -> Iterator[Finding]:
    """Report the driver's compatibility check, which only root can read."""
    boards = facts.npu.views.boards
    bad = sorted(npu_id for npu_id, board in boards.items() if board.compatibility == "NOK")
    if bad:
        board = boards[bad[0]]
        problem = Text(
            "version.not-compatible",
            "npu-smi reports driver {driver} and firmware {firmware} as not compatible",
            driver=board.software_version,
            firmware=board.firmware_version,
        )
        evidence = (f"npu-smi info -t board -i {bad[0]}: Compatibility: NOK",)
        yield finding("driver-firmware", Severity.WARN, host, evidence, problem=problem, hint=HDK_HINT)


def versions_of(facts: NodeFacts) -> Versions:
    python, files = facts.python, facts.npu.files
    modules = (python.modules if python is not None else None) or {}
    torch_npu = modules.get("torch-npu")
    return Versions(
        torch_npu=torch_npu,
        torch=modules.get("torch") if torch_npu else None,
        cann=facts.npu.cann_version,
        python=python.version if python is not None else None,
        driver=files.driver if files is not None else None,
        firmware=files.firmware if files is not None else None,
        arch=facts.arch,
    )


@npu_check("cann-mixed", "the components of CANN are of one release", "cann-mixed")
def check_cann_mixed(context: CheckContext, host: str, facts: NodeFacts) -> Iterator[Finding]:
    """Find components of two CANN releases in one directory: an incomplete upgrade."""
    shell = facts.npu.shell_cann
    versions = shell.components.cann_versions if shell is not None and shell.components is not None else ()
    if len(versions) > 1 and shell is not None and shell.components is not None:
        lines = tuple(f"{one.name}: {one.cann_version}" for one in shell.components.components)
        evidence = lines[:8]
        yield finding("cann-mixed", Severity.WARN, host, evidence, versions=tuple(versions), home=shell.home or "")


@check(
    "set-env",
    "CANN is installed and set in the shell of the job",
    "cann-missing set-env-missing set-env-stale set-env-partial",
)
def check_set_env(context: CheckContext) -> Iterator[Finding]:
    """Check the shell of the job. A command other than Python may source set_env.sh itself: then it is a note."""
    if context.job is None or context.device_type != "npu":
        return
    for host, facts in context.facts.items():
        shell, files = facts.npu.shell_cann, facts.npu.files
        if shell is None or (facts.python is not None and facts.python.setup in ("failed", "no-command")):
            continue
        severity = Severity.FAIL if facts.python is not None else Severity.NOTE
        if shell.home is None and files is not None and not files.canns and not files.set_env:
            yield finding("cann-missing", severity, host)
        elif shell.home is None:
            source = files.set_env[0] if files is not None and files.set_env else "…/set_env.sh"
            yield finding("set-env-missing", severity, host, file=source)
        elif shell.is_gone:
            yield finding("set-env-stale", severity, host, home=shell.home)
        elif facts.environ is not None and not any(
            path.startswith(shell.home.rstrip("/") + "/")
            for path in facts.environ.get("LD_LIBRARY_PATH", "").split(":")
        ):
            yield finding("set-env-partial", Severity.WARN, host, home=shell.home)


@check("torch-npu", "torch_npu is installed with the job's torch and finds CANN", "torch-npu-missing torch-needs-cann")
def check_torch_npu(context: CheckContext) -> Iterator[Finding]:
    """Find torch without torch_npu, and an import that fails because CANN is missing.

    From torch 2.5 `import torch` loads torch_npu, so a missing CANN appears as an error of torch.
    """
    if context.job is None or context.device_type != "npu":
        return
    for host, facts in context.facts.items():
        modules = (facts.python.modules if facts.python is not None else None) or {}
        if modules.get("torch") and "torch-npu" in modules and modules["torch-npu"] is None:
            torch = modules["torch"] or ""
            python = (facts.python.executable if facts.python is not None else None) or "python3"
            values = {"torch": torch, "release": torch.partition("+")[0], "python": python}
            yield finding("torch-npu-missing", Severity.FAIL, host, **values)
        error = _output(facts)
        if error and modules.get("torch-npu") and any(name in error for name in _CANN_NAMES):
            step = (facts.torch.step if facts.torch is not None else None) or "import torch"
            evidence = tuple(line[:300] for line in error.splitlines()[:3])
            yield finding("torch-needs-cann", Severity.FAIL, host, evidence, step=step)


def _output(facts: NodeFacts) -> str:
    """Return the output of a failed import of torch; "": no output, or no failure."""
    error = facts.torch.error if facts.torch is not None else None
    return str(error.values.get("line", "")) if isinstance(error, Text) else error or ""
