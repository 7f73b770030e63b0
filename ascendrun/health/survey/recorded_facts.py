"""Facts of a host as they are stored at each start, to compare a failed host with the others later."""

from __future__ import annotations

from typing import Any

from ascendrun.ascend.npu_smi import NpuProcess
from ascendrun.core.logs.redaction import SECRET_NAME
from ascendrun.health.survey.facts import NodeFacts, Owner

_OF_HOST = ("kernel", "os_name", "arch", "cpus", "memory_bytes", "clock_offset_s", "limits")


def recorded_facts(facts: NodeFacts) -> dict[str, Any]:
    """Return JSON values by key; an unknown fact has no key.

    `processes`: (pid, NPU, user, command) of each process on an NPU, of other attempts too. `ports`: those of the
    job's choice that were in use. `clocks_mhz`: (now, rated), only if a required check has asked for them. Variables
    with secret names are left out.
    """
    npu, python = facts.npu, facts.python
    owners = npu.table.owners if npu.table is not None else {}
    rows = npu.info.processes if npu.info is not None else None
    values: dict[str, Any] = {
        **{name: getattr(facts, name) for name in _OF_HOST},
        "driver": npu.driver_version,
        "firmware": npu.firmware_version,
        "cann": npu.cann_version,
        "hccl_build": npu.hccl_build,
        "python": python.version if python is not None else None,
        "packages": python.modules if python is not None else None,
        "mtu": facts.mtus,
        "ports": sorted(facts.taken_ports) if facts.taken_ports is not None else None,
        "environ": {name: text for name, text in (facts.environ or {}).items() if not SECRET_NAME.search(name)},
        "processes": None if rows is None else [_process(row, owners.get(row.pid)) for row in rows],
        "temperature_c": {device: chip.temperature_c for device, chip in npu.chips.items()},
        "clocks_mhz": {
            npu_id: [(chip.aicore_now_mhz, chip.aicore_mhz) for chip in chips]
            for npu_id, chips in npu.views.common.items()
        },
    }
    return {key: value for key, value in values.items() if value not in (None, {})}


def _process(row: NpuProcess, owner: Owner | None) -> tuple[int, int, str | None, str | None]:
    return row.pid, row.npu_id, owner.user if owner else None, owner.command if owner else row.name
