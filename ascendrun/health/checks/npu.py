"""Checks of NPUs: driver, device files, number, chip, health, memory and processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ascendrun.ascend.devices import FaultClass, fault_of
from ascendrun.ascend.npu_smi import NpuChip, NpuProcess
from ascendrun.ascend.npu_smi_views import EccCounts
from ascendrun.ascend.reading import ToolError
from ascendrun.core.findings import Finding, Severity
from ascendrun.facts.chips import chip_of
from ascendrun.health.survey.check_context import (
    CheckContext,
    check,
    compare,
    finding,
    node_check,
    npu_check,
    npu_nodes,
    outliers,
    planned_devices,
    severity_at,
)
from ascendrun.health.survey.facts import NodeFacts, NpuFacts, Owner
from ascendrun.health.survey.probes import DRIVER_NODES
from ascendrun.text import Text

HBM_MIN_FRACTION = 0.95
"""Of the rated size; below it Huawei's fault diagnosis reports too little memory."""
RATED = ("A1", "A2", "A3")
"""Chip families whose memory size that diagnosis lists; others are compared with the node's largest."""
UNOWNED_FRACTION = 0.15
"""An idle 910B shows 5 % of its HBM in use, an idle 950 5 %."""
TAKEN_FRACTION = 0.05
"""Of the total: more than before an earlier start, in use by no listed process, is memory that was not released."""
PAGES_WARN, PAGES_FAIL = 16, 64
"""Retired rows of HBM at which the driver itself raises 80E18401 (watch) and 80E18402 (replace)."""
GRAVE_RANK = 4
"""From the class FreeRestartNPU on, a device must be reset or replaced before a start."""
_ERROR_CODES = {
    "driver": "npu-driver-unreachable",
    "device-held": "npu-held-elsewhere",
    "no-card": "npu-none",
    "missing-library": "npu-smi-error",
    "permission": "npu-smi-error",
}
_HEALTH = {
    "Warning": ("npu-health-warning", Severity.WARN),
    "Alarm": ("npu-health-alarm", Severity.FAIL),
    "Critical": ("npu-health-critical", Severity.FAIL),
    "UNKNOWN": ("npu-health-unknown", Severity.FAIL),
}


@node_check(
    "npu-driver",
    "npu-smi reaches the driver and lists the devices",
    "npu-none npu-smi-hangs npu-smi-missing npu-driver-unreachable npu-held-elsewhere",
    "npu-smi-error npu-smi-unreadable driver-incomplete",
)
def check_driver(context: CheckContext, host: str, facts: NodeFacts) -> Iterator[Finding]:
    """Check that npu-smi works; report the reason if not."""
    table, files = facts.npu.table, facts.npu.files
    if context.device_type == "npu" and facts.npu.has_any is False:
        yield finding("npu-none", Severity.FAIL, host)
    if table is None or facts.npu.has_any is False or context.device_type not in (None, "npu"):
        return
    if table.hung:
        yield finding("npu-smi-hangs", Severity.FAIL, host)
    elif table.info is None:
        yield finding("npu-smi-missing", Severity.FAIL, host, devices=facts.npu.davinci)
    elif table.info.errors:
        yield _tool_error(host, table.info.errors)
    elif not table.info.chips:
        yield finding("npu-smi-unreadable", Severity.FAIL, host, evidence=_some(table.info.unparsed))
    if table.info is not None and table.info.driver_incomplete:
        yield finding("driver-incomplete", Severity.WARN, host)
    elif files is not None and files.install is not None and files.install.is_complete is False:
        yield finding("driver-incomplete", Severity.WARN, host, evidence=("/etc/ascend_install.info",))


def _tool_error(host: str, errors: tuple[ToolError, ...]) -> Finding:
    first = next((error for error in errors if error.kind in _ERROR_CODES), errors[0])
    return finding(
        _ERROR_CODES.get(first.kind, "npu-smi-error"),
        Severity.FAIL,
        host,
        evidence=tuple(error.text for error in errors[:3]),
        problem=first.message,
        hint=first.hint or Text("tool-error.hint", "run on this node: npu-smi info"),
    )


def _some(lines: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(line.encode("ascii", "backslashreplace").decode()[:120] for line in lines[:2])


@npu_check(
    "device-files",
    "the driver's files in /dev exist and the user of the job may open them",
    "device-file-missing device-file-closed",
)
def check_device_files(context: CheckContext, host: str, facts: NodeFacts) -> Iterator[Finding]:
    """Check the driver's device files. Without access to one, every rank fails with drvRet=87 or -8005."""
    devices = facts.npu.devices
    if devices is None or not facts.npu.has_any:
        return
    missing = [name for name in DRIVER_NODES if name not in devices]
    if missing:
        yield finding("device-file-missing", Severity.FAIL, host, files=tuple(missing))
    if not facts.npu.davinci:
        yield finding("device-file-missing", Severity.FAIL, host, files=("davinci0",))
    closed = sorted(name for name, node in devices.items() if not node.is_open)
    if closed:
        node = devices[closed[0]]
        evidence = (f"/dev/{closed[0]}: mode {node.mode:04o}, uid {node.uid}, gid {node.gid}",)
        yield finding(
            "device-file-closed", Severity.FAIL, host, evidence, files=tuple(closed), user=facts.user or "USER"
        )


@check("npu-count", "all NPUs are on the bus, and the devices of the job exist", "npu-missing npu-too-few npu-more")
def check_count(context: CheckContext) -> Iterator[Finding]:
    """Count devices. The driver does not list a card lost from the bus, although its file in /dev may remain."""
    counts = {host: len(facts.npu.info.chips) for host, facts in npu_nodes(context) if facts.npu.info is not None}
    same = compare(counts)
    for host, count in counts.items():
        facts = context.facts[host].npu
        planned = planned_devices(context, host)
        lost = len(facts.davinci) - count
        most = max(same.majority if same is not None else 0, lost + count)
        if count >= most:
            short = planned is not None and [one for one in planned if one >= count]
            if short:
                yield finding(
                    "npu-too-few", Severity.FAIL, host, evidence=(_listed(facts),), found=count, ids=tuple(short)
                )
            continue
        files = Text("doctor.npu-files", "/dev has davinci{devices:ranks}", devices=facts.davinci)
        evidence = (_listed(facts), *([files] if facts.davinci else []))
        severity = severity_at(context, host, range(count, most))
        yield finding("npu-missing", severity, host, evidence, found=count, expected=most)
    for value, hosts in same.others if same is not None else ():
        if same is not None and value > same.majority:
            lines = same.evidence()
            yield finding("npu-more", Severity.NOTE, hosts, lines, value=value, majority=same.majority)


def _listed(facts: NpuFacts) -> Text:
    npus = tuple(chip.npu_id for chip in (facts.info.chips if facts.info is not None else ()))
    return Text("doctor.npus-listed", "npu-smi info lists NPU {npus:ranks}", npus=npus)


@check("chips-consistency", "all nodes have the same chip", "chip-differs")
def check_chips_consistency(context: CheckContext) -> Iterator[Finding]:
    names = {host: _chip_names(facts.npu) for host, facts in npu_nodes(context)}
    yield from outliers("chip-differs", Severity.WARN, names)


def _chip_names(facts: NpuFacts) -> str | None:
    names = sorted({chip.name or "?" for chip in facts.info.chips}) if facts.info is not None else []
    return ", ".join(names) or None


@npu_check("npu-health", "every NPU reports health OK", *(code for code, _ in _HEALTH.values()), "npu-fault-code")
def check_health(context: CheckContext, host: str, facts: NodeFacts) -> Iterator[Finding]:
    groups: dict[str, dict[int, NpuChip]] = {}
    for device, chip in facts.npu.chips.items():
        if chip.health in _HEALTH:
            groups.setdefault(chip.health, {})[device] = chip
    for word, chips in groups.items():
        code, worst = _HEALTH[word]
        ids = {chip.npu_id for chip in chips.values()}
        severity = severity_at(context, host, chips) if worst is Severity.FAIL else worst
        lines = [
            f"NPU {chip.npu_id} {chip.name or '?'} ({chip.bus_id or 'no bus id'}): health {chip.health}"
            for chip in chips.values()
        ]
        yield finding(code, severity, host, (*lines, *_code_lines(facts.npu, ids)), **named_npus(ids))
    yield from _fault_codes(context, host, facts.npu)


def named_npus(ids: Iterable[int]) -> dict[str, Any]:
    npus = tuple(sorted(set(ids)))
    return {"npus": npus, "first": npus[0]}


def _faults_of(facts: NpuFacts, npu_id: int) -> list[tuple[str, Text | None, FaultClass | None]]:
    """Return the codes of an NPU, each with its meaning and its class; None: unknown."""
    codes = dict.fromkeys(code for chip in facts.views.health.get(npu_id, ()) for code in chip.error_codes or ())
    faults = [(code, fault_of(code)) for code in codes]
    return [(code, fault.message if fault else None, fault.fault_class if fault else None) for code, fault in faults]


def _code_lines(facts: NpuFacts, npu_ids: Iterable[int]) -> list[Text]:
    return [
        Text(
            "doctor.npu-code",
            "NPU {npu} error code {code}: {problem} ({class_name})",
            npu=npu_id,
            code=code,
            problem=problem,
            class_name=of_class.name if of_class is not None else None,
        )
        for npu_id in sorted(npu_ids)
        for code, problem, of_class in _faults_of(facts, npu_id)
    ]


def _fault_codes(context: CheckContext, host: str, facts: NpuFacts) -> Iterator[Finding]:
    """Yield codes of devices with health OK; other devices have them as evidence of their finding."""
    for device, chip in facts.chips.items():
        if chip.health in _HEALTH or chip.chip_id not in (None, 0):
            continue
        for code, problem, of_class in _faults_of(facts, chip.npu_id):
            severity = Severity.WARN if of_class is None or of_class.rank > 0 else Severity.NOTE
            if of_class is not None and of_class.rank >= GRAVE_RANK:
                severity = severity_at(context, host, (device,))
            unknown = Text("fault.unknown.hint", "see Huawei's list of fault codes")
            values: dict[str, Any] = {
                "problem": problem or Text("fault.unknown", "unknown code"),
                "hint": unknown if of_class is None else of_class.hint,
            }
            yield finding("npu-fault-code", severity, host, npu=chip.npu_id, code=code, **values)


@npu_check(
    "ecc", "the NPUs' memory has no ECC errors", "ecc-double ecc-pages-retired ecc-past ecc-single", is_full=True
)
def check_ecc(context: CheckContext, host: str, facts: NodeFacts) -> Iterator[Finding]:
    groups: dict[tuple[str, Severity], list[tuple[int, Text]]] = {}
    for npu_id, chips in facts.npu.views.ecc.items():
        for chip in chips:
            for memory, counts in (("HBM", chip.hbm), ("DDR", chip.ddr)):
                found = _ecc_fault(counts)
                if found is not None:
                    groups.setdefault(found, []).append((npu_id, _ecc_line(npu_id, memory, counts)))
    for (code, severity), lines in groups.items():
        ids = [npu_id for npu_id, _ in lines]
        if severity is Severity.FAIL:
            severity = severity_at(context, host, [one for one, chip in facts.npu.chips.items() if chip.npu_id in ids])
        yield finding(code, severity, host, evidence=tuple(line for _, line in lines), **named_npus(ids))


def _ecc_fault(counts: EccCounts) -> tuple[str, Severity] | None:
    pages = (counts.double_bit_pages or 0) + (counts.single_bit_pages or 0)
    if pages >= PAGES_FAIL:
        return "ecc-pages-retired", Severity.FAIL
    if counts.double_bit:
        return "ecc-double", Severity.FAIL
    if pages >= PAGES_WARN:
        return "ecc-pages-retired", Severity.WARN
    if counts.double_bit_total or pages:
        return "ecc-past", Severity.WARN if counts.double_bit_total else Severity.NOTE
    return ("ecc-single", Severity.NOTE) if counts.single_bit else None


def _ecc_line(npu_id: int, memory: str, counts: EccCounts) -> Text:
    english = "NPU {npu} {memory}: {double} double bit and {single} single bit errors, {pages} pages retired"
    pages = (counts.double_bit_pages or 0) + (counts.single_bit_pages or 0)
    values = {"double": counts.double_bit or 0, "single": counts.single_bit or 0, "pages": pages}
    return Text("doctor.ecc-counts", english, npu=npu_id, memory=memory, **values)


@npu_check("hbm-size", "the NPUs' memory has its rated size", "hbm-short")
def check_memory_size(context: CheckContext, host: str, facts: NodeFacts) -> Iterator[Finding]:
    short: dict[int, Text] = {}
    chips = facts.npu.chips
    largest = max((chip.hbm_total_mb or 0 for chip in chips.values()), default=0)
    for device, chip in chips.items():
        known = chip_of(chip.name) if chip.name else None
        memory = known.memory_bytes if known is not None and known.family in RATED else None
        rated = largest if memory is None else memory >> 20
        if rated and chip.hbm_total_mb is not None and chip.hbm_total_mb < HBM_MIN_FRACTION * rated:
            short[device] = Text(
                "doctor.memory-size",
                "NPU {npu} {chip}: {found} of {rated} MB",
                npu=chip.npu_id,
                chip=chip.name,
                found=chip.hbm_total_mb,
                rated=rated,
            )
    if short:
        evidence = tuple(short.values())
        severity = severity_at(context, host, short)
        yield finding("hbm-short", severity, host, evidence, **named_npus(chips[device].npu_id for device in short))


@npu_check("hbm-owner", "all NPU memory in use belongs to listed processes", "hbm-owner-unknown hbm-not-released")
def check_memory_held(context: CheckContext, host: str, facts: NodeFacts) -> Iterator[Finding]:
    """Find memory of no listed process: used by a container, or not freed after a crash."""
    chips, idle = facts.npu.chips, context.idle_memory.get(host, {})
    held: dict[int, Text] = {}
    taken: dict[int, Text] = {}
    for device, unowned_mb in unowned_memory(facts.npu).items():
        chip = chips[device]
        used_mb, total_mb = chip.hbm_used_mb or 0, chip.hbm_total_mb or 0
        is_taken = device in idle and unowned_mb - idle[device] > TAKEN_FRACTION * total_mb
        if is_taken or unowned_mb > UNOWNED_FRACTION * total_mb:
            (taken if is_taken else held)[device] = Text(
                "doctor.memory-owner",
                "NPU {npu}: {used} of {total} MB in use, {listed} MB by processes that npu-smi lists",
                npu=chip.npu_id,
                used=used_mb,
                total=total_mb,
                listed=used_mb - unowned_mb,
            )
    if held:
        yield finding(
            "hbm-owner-unknown",
            Severity.WARN,
            host,
            tuple(held.values()),
            **named_npus(chips[one].npu_id for one in held),
        )
    if taken:
        more_mb = max(unowned_memory(facts.npu)[device] - idle[device] for device in taken)
        named = named_npus(chips[device].npu_id for device in taken)
        severity = severity_at(context, host, taken)
        yield finding("hbm-not-released", severity, host, tuple(taken.values()), **named, memory_mb=more_mb)


def unowned_memory(npu: NpuFacts, *, is_idle: bool = False) -> dict[int, int]:
    """Return, by device, the MB of its memory in use that belong to no process that npu-smi lists; {}: unknown.

    `is_idle`: only of devices without a listed process.
    """
    if npu.info is None or npu.info.processes is None:
        return {}
    return {
        device: chip.hbm_used_mb - sum(one.memory_mb or 0 for one in npu.info.processes if is_on(one, chip))
        for device, chip in npu.chips.items()
        if chip.hbm_total_mb and chip.hbm_used_mb is not None
        if not (is_idle and any(is_on(one, chip) for one in npu.info.processes))
    }


def is_on(process: NpuProcess, chip: NpuChip) -> bool:
    return process.npu_id == chip.npu_id and process.chip_id in (None, chip.chip_id)


@npu_check("npu-processes", "no other process uses the NPUs", "npu-busy npu-busy-run npu-ghost")
def check_processes(context: CheckContext, host: str, facts: NodeFacts) -> Iterator[Finding]:
    """Find processes on devices that the job would use; on other devices it is a note."""
    table, info = facts.npu.table, facts.npu.info
    if table is None or info is None or info.processes is None:
        return
    by_pid: dict[int, list[NpuProcess]] = {}
    for process in info.processes:
        by_pid.setdefault(process.pid, []).append(process)
    for pid, rows in by_pid.items():
        devices = {device for device, chip in facts.npu.chips.items() if any(is_on(row, chip) for row in rows)}
        yield _holder(context, host, pid, rows, table.owners.get(pid), devices)


def foreign_processes(npu: NpuFacts) -> Iterator[tuple[int, int, Owner | None, str | None]]:
    """Yield (pid, device, owner, name) of each process on the NPUs that belongs to no attempt; owner None: not visible
    on the node."""
    info = npu.info
    for process in (info.processes or ()) if info is not None else ():
        owner = npu.table.owners.get(process.pid) if npu.table is not None else None
        for device, chip in npu.chips.items():
            if is_on(process, chip) and (owner is None or owner.tag is None):
                yield process.pid, device, owner, process.name


def _holder(
    context: CheckContext, host: str, pid: int, rows: list[NpuProcess], owner: Owner | None, devices: set[int]
) -> Finding:
    values = {
        "pid": pid,
        **named_npus(row.npu_id for row in rows),
        "memory_mb": sum(row.memory_mb or 0 for row in rows),
        "name": rows[0].name or "?",
    }
    severity = severity_at(context, host, devices, otherwise=Severity.NOTE)
    if context.plan is None:
        severity = Severity.WARN
    if owner is None:
        return finding("npu-ghost", severity, host, evidence=tuple(_process_line(row) for row in rows[:2]), **values)
    command = owner.command or values["name"]
    if owner.tag is not None:
        run = owner.tag.rpartition(".")[0] or owner.tag
        severity = Severity.NOTE if context.plan is None else severity
        return finding("npu-busy-run", severity, host, evidence=(command,), **values, user=owner.user, run=run)
    return finding("npu-busy", severity, host, **values, user=owner.user, command=command[:120])


def _process_line(row: NpuProcess) -> Text:
    english = "npu-smi info: NPU {npu}, pid {pid} {name}, {memory_mb} MB; no such process on this node"
    values = {"npu": row.npu_id, "pid": row.pid, "name": row.name or "?", "memory_mb": row.memory_mb}
    return Text("doctor.npu-process", english, **values)
