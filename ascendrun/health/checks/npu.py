"""Checks of the devices themselves: driver, device files, number, chip, health, memory, who holds them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ascendrun.ascend.chips import chip_of
from ascendrun.ascend.faults import fault_of
from ascendrun.ascend.npu_smi import NpuChip, NpuProcess
from ascendrun.ascend.npu_smi_views import EccCounts
from ascendrun.ascend.tool_errors import ToolError
from ascendrun.core.findings import Finding, Severity
from ascendrun.health.checks.devices import ids_text, npu_nodes, planned_devices, severity_at
from ascendrun.health.survey.check_context import Check, World, compare
from ascendrun.health.survey.facts import NodeFacts
from ascendrun.health.survey.npu_facts import NpuFacts, Owner, chips_by_device
from ascendrun.health.survey.npu_probes import DRIVER_NODES
from ascendrun.text import Text

HBM_SHARE_LEAST = 0.95
"""Of the rated size; below it Huawei's own fault diagnosis calls the memory short."""
RATED = ("A1", "A2", "A3")
"""The families whose memory that diagnosis lists; the others are compared with the largest of the node."""
HELD_SHARE = 0.15
"""An idle 910B shows 5 % of its HBM in use, an idle 950 5 %."""
PAGES_WARN, PAGES_FAIL = 16, 64
"""Rows of HBM taken out of use at which the driver itself raises 80E18401 (watch) and 80E18402 (replace)."""
GRAVE_RANK = 4
"""From the class FreeRestartNPU on, a device has to be reset or replaced before it is worth a start."""
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


def check_driver(world: World) -> Iterator[Finding]:
    """Whether npu-smi says anything, and if not, why."""
    for host, facts in world.facts.items():
        table = facts.npu.table
        if world.family == "npu" and facts.npu.has_any is False:
            yield Finding("npu-none", Severity.FAIL, (host,))
        if table is None or facts.npu.has_any is False or world.family not in (None, "npu"):
            continue
        if table.hung:
            yield Finding("npu-smi-hangs", Severity.FAIL, (host,))
        elif table.info is None:
            yield Finding("npu-smi-missing", Severity.FAIL, (host,), {"devices": ids_text(facts.npu.davinci)})
        elif table.info.errors:
            yield _tool_error(host, table.info.errors)
        elif not table.info.chips:
            yield Finding("npu-smi-unreadable", Severity.FAIL, (host,), {}, _some(table.info.unparsed))
        if table.info is not None and table.info.driver_incomplete:
            yield Finding("driver-incomplete", Severity.WARN, (host,))
        elif (
            facts.npu.files is not None
            and facts.npu.files.install is not None
            and facts.npu.files.install.is_complete is False
        ):
            yield Finding("driver-incomplete", Severity.WARN, (host,), {}, ("/etc/ascend_install.info",))


def _tool_error(host: str, errors: tuple[ToolError, ...]) -> Finding:
    first = next((error for error in errors if error.kind in _ERROR_CODES), errors[0])
    return Finding(
        _ERROR_CODES.get(first.kind, "npu-smi-error"),
        Severity.FAIL,
        (host,),
        {"says": first.message, "hint": first.hint or Text("tool-error.hint", "run on this node: npu-smi info")},
        tuple(error.text for error in errors[:3]),
    )


def _some(lines: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(line.encode("ascii", "backslashreplace").decode()[:120] for line in lines[:2])


def check_device_files(world: World) -> Iterator[Finding]:
    """The driver's own files; one that the job's user may not open makes every rank fail with drvRet=87 or -8005.
    A container brings a user of its own: there it is only a warning."""
    closed_is = Severity.WARN if world.job is not None and world.job.container is not None else Severity.FAIL
    for host, facts in npu_nodes(world):
        devices = facts.npu.devices
        if devices is None or not facts.npu.has_any:
            continue
        missing = [name for name in DRIVER_NODES if name not in devices]
        if missing:
            yield Finding("device-file-missing", Severity.FAIL, (host,), {"files": _paths(missing)})
        if not facts.npu.davinci:
            yield Finding("device-file-missing", Severity.FAIL, (host,), {"files": "/dev/davinci0…"})
        closed = sorted(name for name, node in devices.items() if not node.is_open)
        if closed:
            node = devices[closed[0]]
            yield Finding(
                "device-file-closed",
                closed_is,
                (host,),
                {"files": _paths(closed), "user": _user(facts)},
                (f"/dev/{closed[0]}: mode {node.mode:04o}, uid {node.uid}, gid {node.gid}",),
            )


def _paths(names: Iterable[str]) -> str:
    paths = [f"/dev/{name}" for name in names]
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")


def _user(facts: NodeFacts) -> str:
    return facts.user or "USER"


def check_count(world: World) -> Iterator[Finding]:
    """A card that dropped off the bus is missing in the driver's list, often while its file in /dev is still there."""
    counts = {host: len(facts.npu.info.chips) for host, facts in npu_nodes(world) if facts.npu.info is not None}
    same = compare({host: str(count) for host, count in counts.items()})
    for host, count in counts.items():
        facts = world.facts[host].npu
        wanted = planned_devices(world, host)
        lost = len(facts.davinci) - count
        most = max(int(same.majority) if same is not None else 0, lost + count)
        if count >= most:
            short = wanted is not None and [one for one in wanted if one >= count]
            if short:
                yield Finding(
                    "npu-too-few",
                    Severity.FAIL,
                    (host,),
                    {"found": str(count), "ids": ids_text(short)},
                    (_listed(facts),),
                )
            continue
        yield Finding(
            "npu-missing",
            severity_at(world, host, range(count, most)),
            (host,),
            {"found": str(count), "wanted": str(most)},
            (_listed(facts), *_files_line(facts)),
        )
    for value, hosts in same.others if same is not None else ():
        if int(value) > int(same.majority if same is not None else value):
            yield Finding(
                "npu-more",
                Severity.NOTE,
                hosts,
                {"value": value, "majority": same.majority if same else ""},
                same.evidence() if same else (),
            )


def _listed(facts: NpuFacts) -> str:
    chips = facts.info.chips if facts.info is not None else ()
    return f"npu-smi info lists NPU {ids_text(chip.npu_id for chip in chips)}"


def _files_line(facts: NpuFacts) -> tuple[str, ...]:
    return (f"/dev has davinci{ids_text(facts.davinci)}",) if facts.davinci else ()


def check_chips_alike(world: World) -> Iterator[Finding]:
    names = {host: _chip_names(facts.npu) for host, facts in npu_nodes(world)}
    same = compare(names)
    for value, hosts in same.others if same else ():
        yield Finding(
            "chip-differs",
            Severity.WARN,
            hosts,
            {"value": value, "majority": same.majority if same else ""},
            same.evidence() if same else (),
        )


def _chip_names(facts: NpuFacts) -> str | None:
    names = sorted({chip.name or "?" for chip in facts.info.chips}) if facts.info is not None else []
    return " and ".join(names) or None


def check_health(world: World) -> Iterator[Finding]:
    for host, facts in npu_nodes(world):
        groups: dict[str, dict[int, NpuChip]] = {}
        for device, chip in chips_by_device(facts.npu).items():
            if chip.health in _HEALTH:
                groups.setdefault(chip.health, {})[device] = chip
        for word, chips in groups.items():
            code, worst = _HEALTH[word]
            ids = {chip.npu_id for chip in chips.values()}
            severity = severity_at(world, host, chips) if worst is Severity.FAIL else worst
            yield Finding(
                code,
                severity,
                (host,),
                {"npus": ids_text(ids), "first": str(min(ids))},
                (*(_chip_line(chip) for chip in chips.values()), *_code_lines(facts.npu, ids)),
            )
        yield from _fault_codes(world, host, facts.npu)


def _chip_line(chip: NpuChip) -> str:
    return f"NPU {chip.npu_id} {chip.name or '?'} ({chip.bus_id or 'no bus id'}): health {chip.health}"


def _codes_of(facts: NpuFacts, npu_id: int) -> tuple[str, ...]:
    found = facts.cards.health.get(npu_id, ()) if facts.cards is not None else ()
    return tuple(dict.fromkeys(code for chip in found for code in chip.error_codes or ()))


def _code_lines(facts: NpuFacts, npu_ids: Iterable[int]) -> Iterator[str]:
    for npu_id in sorted(npu_ids):
        for code in _codes_of(facts, npu_id):
            fault = fault_of(code)
            known = f": {fault.message}" if fault is not None and fault.message else ""
            class_name = f" ({fault.fault_class.name})" if fault is not None and fault.fault_class else ""
            yield f"NPU {npu_id} error code {code}{known}{class_name}"


def _fault_codes(world: World, host: str, facts: NpuFacts) -> Iterator[Finding]:
    """Codes of a device that calls itself well; those of the others are evidence above."""
    for device, chip in chips_by_device(facts).items():
        if chip.health in _HEALTH or chip.chip_id not in (None, 0):
            continue
        for code in _codes_of(facts, chip.npu_id):
            fault = fault_of(code)
            of_class = fault.fault_class if fault is not None else None
            severity = (
                severity_at(world, host, (device,))
                if of_class is not None and of_class.rank >= GRAVE_RANK
                else Severity.WARN
                if of_class is None or of_class.rank > 0
                else Severity.NOTE
            )
            yield Finding(
                "npu-fault-code",
                severity,
                (host,),
                {
                    "npu": str(chip.npu_id),
                    "code": code,
                    "says": (fault.message if fault is not None else None) or Text("fault.unknown", "unknown code"),
                    "hint": of_class.hint
                    if of_class is not None
                    else Text("fault.unknown.hint", "see Huawei's list of fault codes"),
                },
            )


def check_ecc(world: World) -> Iterator[Finding]:
    for host, facts in npu_nodes(world):
        groups: dict[tuple[str, Severity], list[tuple[int, str]]] = {}
        for npu_id, chips in (facts.npu.cards.ecc if facts.npu.cards is not None else {}).items():
            for chip in chips:
                for memory, counts in (("HBM", chip.hbm), ("DDR", chip.ddr)):
                    found = _ecc_fault(counts)
                    if found is not None:
                        groups.setdefault(found, []).append((npu_id, f"NPU {npu_id} {memory}: {_ecc_line(counts)}"))
        for (code, severity), told in groups.items():
            ids = [npu_id for npu_id, _ in told]
            if severity is Severity.FAIL:
                severity = severity_at(world, host, _devices_of(facts.npu, ids))
            yield Finding(
                code,
                severity,
                (host,),
                {"npus": ids_text(ids), "first": str(min(ids))},
                tuple(line for _, line in told),
            )


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


def _ecc_line(counts: EccCounts) -> str:
    return (
        f"{counts.double_bit or 0} double bit and {counts.single_bit or 0} single bit errors, "
        f"{(counts.double_bit_pages or 0) + (counts.single_bit_pages or 0)} pages out of use"
    )


def _devices_of(facts: NpuFacts, npu_ids: Iterable[int]) -> set[int]:
    wanted = set(npu_ids)
    return {device for device, chip in chips_by_device(facts).items() if chip.npu_id in wanted}


def check_memory_size(world: World) -> Iterator[Finding]:
    for host, facts in npu_nodes(world):
        short: dict[int, str] = {}
        chips = chips_by_device(facts.npu)
        largest = max((chip.hbm_total_mb or 0 for chip in chips.values()), default=0)
        for device, chip in chips.items():
            known = chip_of(chip.name) if chip.name else None
            rated = known.hbm_mb if known is not None and known.family in RATED else largest
            if rated and chip.hbm_total_mb is not None and chip.hbm_total_mb < HBM_SHARE_LEAST * rated:
                short[device] = f"NPU {chip.npu_id} {chip.name}: {chip.hbm_total_mb} of {rated} MB"
        if short:
            yield Finding(
                "hbm-short",
                severity_at(world, host, short),
                (host,),
                {"npus": ids_text(chips[device].npu_id for device in short)},
                tuple(short.values()),
            )


def check_memory_held(world: World) -> Iterator[Finding]:
    """Memory that no process of the table answers for: a container's, or of one that died badly."""
    for host, facts in npu_nodes(world):
        info = facts.npu.info
        if info is None or info.processes is None:
            continue
        held: dict[int, str] = {}
        for chip in chips_by_device(facts.npu).values():
            if not chip.hbm_total_mb or chip.hbm_used_mb is None:
                continue
            told = sum(one.memory_mb or 0 for one in info.processes if _is_on(one, chip))
            left = chip.hbm_used_mb - told
            if left > HELD_SHARE * chip.hbm_total_mb:
                held[chip.npu_id] = (
                    f"NPU {chip.npu_id}: {chip.hbm_used_mb} of {chip.hbm_total_mb} MB in use, "
                    f"{told} MB by processes that npu-smi lists"
                )
        if held:
            yield Finding(
                "hbm-owner-unknown",
                Severity.WARN,
                (host,),
                {"npus": ids_text(held), "first": str(min(held))},
                tuple(held.values()),
            )


def _is_on(process: NpuProcess, chip: NpuChip) -> bool:
    return process.npu_id == chip.npu_id and process.chip_id in (None, chip.chip_id)


def check_processes(world: World) -> Iterator[Finding]:
    """Whoever holds a device that the job would take; on other devices it is only worth knowing."""
    for host, facts in npu_nodes(world):
        table, info = facts.npu.table, facts.npu.info
        if table is None or info is None or info.processes is None:
            continue
        by_pid: dict[int, list[NpuProcess]] = {}
        for process in info.processes:
            by_pid.setdefault(process.pid, []).append(process)
        for pid, rows in by_pid.items():
            devices = {
                device for device, chip in chips_by_device(facts.npu).items() if any(_is_on(row, chip) for row in rows)
            }
            yield _holder(world, host, pid, rows, table.owners.get(pid), devices)


def _holder(
    world: World, host: str, pid: int, rows: list[NpuProcess], owner: Owner | None, devices: set[int]
) -> Finding:
    values = {
        "pid": str(pid),
        "npus": ids_text(row.npu_id for row in rows),
        "first": str(min(row.npu_id for row in rows)),
        "memory": f"{sum(row.memory_mb or 0 for row in rows)} MB",
        "name": rows[0].name or "?",
    }
    severity = severity_at(world, host, devices, otherwise=Severity.NOTE)
    if world.plan is None:
        severity = Severity.WARN
    if owner is None:
        return Finding("npu-ghost", severity, (host,), values, tuple(_process_line(row) for row in rows[:2]))
    command = owner.command or values["name"]
    if owner.tag is not None:
        run = owner.tag.rpartition(".")[0] or owner.tag
        severity = Severity.NOTE if world.plan is None else severity
        return Finding("npu-busy-run", severity, (host,), {**values, "user": owner.user, "run": run}, (command,))
    return Finding("npu-busy", severity, (host,), {**values, "user": owner.user, "command": command[:120]})


def _process_line(row: NpuProcess) -> str:
    return f"npu-smi info: NPU {row.npu_id}, pid {row.pid} {row.name or '?'}, {row.memory_mb} MB; no such process here"


CHECKS: tuple[Check, ...] = (
    Check(
        "npu-driver",
        check_driver,
        "npu-smi reaches the driver and says something",
        (
            "npu-none",
            "npu-smi-hangs",
            "npu-smi-missing",
            "npu-driver-unreachable",
            "npu-held-elsewhere",
            "npu-smi-error",
            "npu-smi-unreadable",
            "driver-incomplete",
        ),
    ),
    Check(
        "device-files",
        check_device_files,
        "the driver's files in /dev are there and open to the job's user",
        ("device-file-missing", "device-file-closed"),
    ),
    Check(
        "npu-count",
        check_count,
        "no NPU dropped off the bus, and the job's devices exist",
        ("npu-missing", "npu-too-few", "npu-more"),
    ),
    Check("chips-consistency", check_chips_alike, "all nodes have the same chip", ("chip-differs",)),
    Check(
        "npu-health",
        check_health,
        "every NPU calls itself well",
        (*(code for code, _ in _HEALTH.values()), "npu-fault-code"),
    ),
    Check(
        "ecc",
        check_ecc,
        "the NPUs' memory counts no errors",
        ("ecc-double", "ecc-pages-retired", "ecc-past", "ecc-single"),
        is_full=True,
    ),
    Check("hbm-size", check_memory_size, "the NPUs' memory has its rated size", ("hbm-short",)),
    Check("hbm-owner", check_memory_held, "no NPU memory is held by what cannot be seen", ("hbm-owner-unknown",)),
    Check(
        "npu-processes", check_processes, "nobody else computes on the NPUs", ("npu-busy", "npu-busy-run", "npu-ghost")
    ),
)
