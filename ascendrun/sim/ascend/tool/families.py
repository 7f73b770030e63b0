"""What is fixed for a kind of chip: its names, memory, power, bus addresses, and the tables it is shown in."""

from __future__ import annotations

from typing import NamedTuple


class Family(NamedTuple):
    """One kind of chip. Megabytes are 2**20 bytes; `memory_mb` of the 310 family is its only memory, shown as DDR.

    `layouts`: those that the tool may use for it, the usual one first, the wide one of newer drivers last.
    """

    name: str
    map_name: str
    layouts: tuple[str, ...]
    dies: int
    hbm_mb: int
    ddr_mb: int
    hbm_idle_mb: int
    idle_w: float
    busy_w: float
    idle_c: int
    busy_c: int
    cores: int
    mhz: int
    idle_mhz: int
    buses: tuple[str, ...]
    pci_device: int
    speed_mbit: int
    has_vector: bool = True
    has_mcu: bool = True
    product: str = "NA"


_BUSES_910A = ("61", "DB", "B2", "3E", "60", "DA", "B1", "3D")
_BUSES_910B = ("C1", "C2", "81", "82", "01", "02", "41", "42")
_BUSES_A3 = ("9D", "9F", "99", "9B", "95", "97", "91", "93", "8D", "8F", "89", "8B", "85", "87", "81", "83")
_BUSES_310P = ("01", "01", "02", "02", "81", "81", "82", "82")
_BUSES_950 = ("71", "61", "01", "11", "F1", "E1", "81", "91")
_NARROW_AND_WIDE = ("L1", "L1b", "L1c")


def _a2(name: str, hbm_mb: int, cores: int, mhz: int = 1800) -> Family:
    return Family(
        name=name, map_name=f"Ascend {name}", layouts=_NARROW_AND_WIDE, dies=1, hbm_mb=hbm_mb, ddr_mb=0,
        hbm_idle_mb=3377, idle_w=94.0, busy_w=310.0, idle_c=40, busy_c=58, cores=cores, mhz=mhz, idle_mhz=800,
        buses=_BUSES_910B, pci_device=0xD802, speed_mbit=200000, product="IT21HMDC02-B2",
    )  # fmt: skip


def _a1(name: str) -> Family:
    return Family(
        name=name, map_name=f"Ascend {name}", layouts=_NARROW_AND_WIDE, dies=1, hbm_mb=32768, ddr_mb=15137,
        hbm_idle_mb=0, idle_w=67.0, busy_w=213.0, idle_c=37, busy_c=60, cores=32, mhz=1000, idle_mhz=1000,
        buses=_BUSES_910A, pci_device=0xD801, speed_mbit=100000, has_vector=False, has_mcu=False,
    )  # fmt: skip


def _small(name: str, dies: int, memory_mb: int, buses: tuple[str, ...], product: str) -> Family:
    return Family(
        name=name, map_name=f"Ascend {name}", layouts=("L3", "L3a"), dies=dies, hbm_mb=0, ddr_mb=memory_mb,
        hbm_idle_mb=0, idle_w=12.8, busy_w=70.0, idle_c=45, busy_c=70, cores=8, mhz=1080, idle_mhz=1080,
        buses=buses, pci_device=0xD500, speed_mbit=0, has_vector=False, has_mcu=False, product=product,
    )  # fmt: skip


def _a5(name: str, hbm_mb: int) -> Family:
    return Family(
        name=name, map_name=name, layouts=("L4", "L4c"), dies=1, hbm_mb=hbm_mb, ddr_mb=0, hbm_idle_mb=4857,
        idle_w=190.0, busy_w=420.0, idle_c=46, busy_c=71, cores=32, mhz=1650, idle_mhz=800, buses=_BUSES_950,
        pci_device=0xD806, speed_mbit=400000, product="A310-50-C00MM304A1",
    )  # fmt: skip


_A3 = Family(
    name="Ascend910", map_name="Ascend910", layouts=("L2", "L2c"), dies=2, hbm_mb=65536, ddr_mb=0, hbm_idle_mb=3195,
    idle_w=178.5, busy_w=620.0, idle_c=36, busy_c=59, cores=24, mhz=1800, idle_mhz=800, buses=_BUSES_A3,
    pci_device=0xD803, speed_mbit=200000, product="IT22SFDA01",
)  # fmt: skip

# By the name that a scenario uses; the A3 is "910_93" there, since npu-smi calls it only Ascend910.
FAMILIES: dict[str, Family] = {
    "910A": _a1("910A"),
    "910ProB": _a1("910ProB"),
    "910B1": _a2("910B1", 65536, 24),
    "910B2": _a2("910B2", 65536, 24),
    "910B2C": _a2("910B2C", 65536, 24),
    "910B3": _a2("910B3", 65536, 20),
    "910B4": _a2("910B4", 32768, 20, 1650),
    "910B4-1": _a2("910B4-1", 65536, 20, 1650),
    "910_93": _A3,
    "310": _small("310", 4, 7757, (), "Atlas 300I"),
    "310P3": _small("310P3", 2, 44278, _BUSES_310P, "Atlas 300I Duo"),
    "Ascend950PR": _a5("Ascend950PR", 131072),
    "Ascend950DT": _a5("Ascend950DT", 98304),
}
