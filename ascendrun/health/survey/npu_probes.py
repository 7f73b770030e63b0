"""Probes of Ascend devices, their driver and CANN."""

from __future__ import annotations

from typing import Any

from ascendrun.health.survey import npu_parsers, npu_scripts
from ascendrun.health.survey.survey_request import Item, Probe, SurveyRequest

DRIVER_NODES = ("davinci_manager", "devmm_svm", "hisi_hdc")
MOST_DEVICES = 32
CARDS_S, PORTS_S, PINGS_S = 45.0, 45.0, 30.0
LIGHT_PORT_ITEMS = ("link", "ip", "tls")
PORT_ITEMS = (*LIGHT_PORT_ITEMS, "net_health", "fec", "optical", "link_stat")
CARD_VIEWS = ("ecc", "health", "board")


def _script(script: str, *arguments: str, kind: str = "argv", **more: Any) -> Any:
    def ask(request: SurveyRequest) -> Item | None:
        return (
            {"kind": kind, "argv": ["sh", "-c", script, "ascendrun", *arguments], **more}
            if request.may_have_npus
            else None
        )

    return ask


def _ports(request: SurveyRequest) -> Item | None:
    ask = (
        _script(npu_scripts.PORTS, *PORT_ITEMS, timeout_s=PORTS_S, max_bytes=1 << 18)
        if request.is_full
        else _script(npu_scripts.PORTS, *LIGHT_PORT_ITEMS)
    )
    item: Item | None = ask(request)
    return item


def _devices(request: SurveyRequest) -> Item | None:
    names = (*DRIVER_NODES, *(f"davinci{number}" for number in range(MOST_DEVICES)))
    if not request.may_have_npus:
        return None
    return {"kind": "stat", "paths": [f"/dev/{name}" for name in names], "below": "ASCENDRUN_SIM_ROOT"}


NPU_PROBES: tuple[Probe, ...] = (
    Probe("npu-smi", _script(npu_scripts.TABLE), npu_parsers.read_table, reads_errors=True),
    Probe("npu-devices", _devices, npu_parsers.read_devices),
    Probe(
        "npu-cards",
        _script(npu_scripts.CARDS, *CARD_VIEWS, timeout_s=CARDS_S, max_bytes=1 << 18),
        npu_parsers.read_cards,
        is_full=True,
    ),
    Probe("hccn", _ports, npu_parsers.read_ports),
    Probe("ascend-files", _script(npu_scripts.FILES), npu_parsers.read_files),
    Probe("cann", _script(npu_scripts.CANN, kind="shell_argv"), npu_parsers.read_shell_cann),
    Probe("hccn-pings", lambda request: None, npu_parsers.read_pings),
)
"""hccn-pings is queried after the ports' addresses are known: pings.py."""
