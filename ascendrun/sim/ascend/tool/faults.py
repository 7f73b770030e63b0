"""The faults that can be switched on, by name: what each does, of what it is, and what its value means."""

from __future__ import annotations

from typing import NamedTuple, Sequence

from ascendrun.sim.ascend.tool.model import Fault

OF_CARD, OF_NODE = "card", "node"


class Kind(NamedTuple):
    """`default`: what the fault's value is where none is given; None where it has no value."""

    of: str
    meaning: str
    default: str | None = None
    is_number: bool = False  # plain, without a sign


KINDS: dict[str, Kind] = {
    "dropped": Kind(OF_CARD, "the card is off the bus: no list has it, asking for it is an invalid card id"),
    "driver_reset": Kind(
        OF_CARD, "the driver returns -8005 for VALUE seconds, then the card is off the bus", "5", is_number=True
    ),
    "health_warning": Kind(OF_CARD, "health Warning, with the error codes VALUE", "80E18402"),
    "health_alarm": Kind(OF_CARD, "health Alarm, with the error codes VALUE", "A4025021 8C03A000 8C084E00"),
    "health_critical": Kind(OF_CARD, "health Critical, with the error codes VALUE", "80E01801"),
    "health_unknown": Kind(OF_CARD, "health UNKNOWN: the device has not started"),
    "ecc_single": Kind(OF_CARD, "HBM single bit errors: VALUE more a second", "1", is_number=True),
    "ecc_double": Kind(
        OF_CARD, "HBM double bit errors, with a page isolated for each: VALUE more a second", "0.2", is_number=True
    ),
    "hbm_short": Kind(OF_CARD, "the HBM has only VALUE percent of its size", "90", is_number=True),
    "ghost_process": Kind(
        OF_CARD, "a process VALUE that no longer runs is listed and holds HBM", "39999", is_number=True
    ),
    "hbm_held": Kind(OF_CARD, "VALUE MB of HBM are held, by no process of the table", "29000", is_number=True),
    "throttled": Kind(OF_CARD, "hot, and at VALUE percent of its clock under load", "55", is_number=True),
    "hot": Kind(OF_CARD, "VALUE degrees", "96", is_number=True),
    "link_down": Kind(OF_CARD, "the link of its port is down"),
    "link_flaps": Kind(OF_CARD, "the link goes down for a second every VALUE seconds", "10", is_number=True),
    "net_health": Kind(OF_CARD, "net_health reports VALUE", "Receive timeout"),
    "tls_on": Kind(OF_CARD, "TLS on"),
    "tls_off": Kind(OF_CARD, "TLS off"),
    "ip_missing": Kind(OF_CARD, "the port has no address"),
    "ip_v6": Kind(OF_CARD, "the port has an IPv6 address only"),
    "hccn_conf_stale": Kind(OF_CARD, "the port has another address than in /etc/hccn.conf"),
    "unreachable": Kind(OF_CARD, "no reply to ping from the address VALUE, or from any", "any"),
    "fec_none": Kind(OF_CARD, "no forward error correction"),
    "optical_absent": Kind(OF_CARD, "no optical module"),
    "optical_dark": Kind(OF_CARD, "the optical module receives next to no light"),
    "roce_errors": Kind(OF_CARD, "RoCE retransmissions and errors: VALUE more a second", "3", is_number=True),
    "driver_missing": Kind(OF_NODE, "npu-smi cannot reach the driver: -8005"),
    "device_used": Kind(OF_NODE, "another container holds the devices: -8020"),
    "driver_incomplete": Kind(OF_NODE, "npu-smi warns that the driver may not be completely installed"),
    "firmware_mismatch": Kind(OF_NODE, "driver and firmware do not fit: Compatibility NOK"),
    "hccn_refused": Kind(OF_NODE, "hccn_tool may not read the devices"),
    "hang": Kind(OF_NODE, "the tool VALUE (npu-smi, hccn_tool, both) sleeps and ignores TERM", "both"),
    "slow": Kind(OF_NODE, "the tools respond after VALUE seconds", "5", is_number=True),
    "trickle": Kind(OF_NODE, "the tools write a byte every VALUE seconds", "0.5", is_number=True),
    "garbage": Kind(OF_NODE, "the tools write bytes that mean nothing"),
    "truncated": Kind(OF_NODE, "the tools' output ends in the middle of a line"),
}


class Faults:
    """The faults in force at one moment."""

    def __init__(self, faults: Sequence[Fault], now_s: float) -> None:
        self._active: list[Fault] = [fault for fault in faults if fault.since_s <= now_s]
        self._now_s = now_s

    def of(self, name: str, card: int | None = None) -> Fault | None:
        """The fault in force on this card (None: the node), or None."""
        for fault in self._active:
            if fault.name == name and fault.card == card:
                return fault
        return None

    def any_of(self, name: str) -> Fault | None:
        """The fault in force on any card."""
        return next((fault for fault in self._active if fault.name == name), None)

    def has(self, name: str, card: int | None = None) -> bool:
        return self.of(name, card) is not None

    def age_s(self, fault: Fault) -> float:
        return self._now_s - fault.since_s

    def number(self, name: str, card: int | None = None) -> float | None:
        """The value of the fault in force as a number; None where it is not in force."""
        fault = self.of(name, card)
        return None if fault is None else float(value_of(fault))

    def grown(self, name: str, card: int) -> int:
        """How many there are by now of what grows by the fault's value each second; at least 1 once in force."""
        fault = self.of(name, card)
        return 0 if fault is None else 1 + int(float(value_of(fault)) * self.age_s(fault))

    def is_driver_away(self) -> bool:
        """Whether the driver does not respond now: missing, or in its reset."""
        reset = self.any_of("driver_reset")
        return self.has("driver_missing") or (reset is not None and self.age_s(reset) < float(value_of(reset)))

    def is_gone(self, card: int) -> bool:
        return self.has("dropped", card) or self.has("driver_reset", card)


def value_of(fault: Fault) -> str:
    return fault.value if fault.value is not None else KINDS[fault.name].default or ""
