"""What the tests of the simulated node share: the tools asked in this process, and scenarios by hypothesis."""

import time

from hypothesis import strategies as st

from ascendrun.sim.ascend.scenario import PlannedFault, Scenario, ShownProcess, make_faults, make_node
from ascendrun.sim.ascend.tool import hccn as hccn_tool
from ascendrun.sim.ascend.tool import main as npu_smi
from ascendrun.sim.ascend.tool.live import Scene, readings
from ascendrun.sim.ascend.tool.model import FAMILIES, Faults

DRIVERS = ("22.0.4", "23.0.rc2", "23.0.5", "24.1.rc2", "25.0.rc1.1", "25.5.1", "26.0.rc1")
HEALTH = ("OK", "Warning", "Alarm", "Critical", "UNKNOWN")


def scene_of(scenario, *, rows=(), now_s=None, is_privileged=True):
    """The node at `now_s` (now), with these running processes."""
    now_s = time.time() if now_s is None else now_s
    node, faults = make_node(scenario, now_s=now_s), make_faults(scenario, now_s=now_s)
    return scene_of_node(node, faults, rows=rows, now_s=now_s, is_privileged=is_privileged)


def scene_of_node(node, faults=(), *, rows=(), now_s=None, is_privileged=True):
    faults = Faults(faults, time.time() if now_s is None else now_s)
    return Scene(node, faults, readings(node, faults, rows), is_complete=True, is_privileged=is_privileged)


def smi(scene, *arguments):
    """What `npu-smi ARGUMENTS` prints, where it succeeds."""
    answer = npu_smi.respond([str(one) for one in arguments], scene)
    assert answer.code == 0, answer.text
    return answer.text


def hccn(scene, device, item, *more):
    """What `hccn_tool -i DEVICE -ITEM -g MORE` prints."""
    return hccn_tool.respond(["-i", str(device), f"-{item}", "-g", *map(str, more)], scene).text


def fixed_reading(family):
    """A reading that the family's chip can have."""
    reading = {
        "health": st.sampled_from(HEALTH),
        "power_w": st.integers(0, 9999).map(lambda tenths: tenths / 10),
        "temperature_c": st.integers(-20, 120),
        "load_percent": st.integers(0, 100),
        "single_bit": st.integers(0, 2**20),
        "double_bit": st.integers(0, 2**10),
    }
    if family.hbm_mb:
        reading["hbm_used_mb"] = st.integers(0, family.hbm_mb)
    else:
        reading["ddr_used_mb"] = st.integers(0, family.ddr_mb)
    return st.fixed_dictionaries({}, optional=reading)


@st.composite
def scenarios(draw):
    """Any node that can be: each chip, any cards with any ids, each layout, any readings and processes."""
    chip = draw(st.sampled_from(sorted(FAMILIES)))
    family = FAMILIES[chip]
    npu_id = st.integers(0, 9) | st.sampled_from((96, 224, 32768))
    npu_ids = tuple(draw(st.lists(npu_id, min_size=1, max_size=8, unique=True)))
    devices = len(npu_ids) * family.dies
    device = st.integers(0, devices - 1)
    name = st.text("abcdefghijklmnopqrstuvwxyz_0123456789.-", min_size=1, max_size=24)
    process = st.builds(
        ShownProcess, device=device, pid=st.integers(1, 4_000_000), name=name, memory_mb=st.integers(0, 65536),
        load=st.integers(0, 100),
    )  # fmt: skip
    return Scenario(
        chip=chip,
        cards=len(npu_ids),
        npu_ids=npu_ids,
        driver=draw(st.sampled_from(DRIVERS)),
        layout=draw(st.none() | st.sampled_from(family.layouts)),
        number=draw(st.integers(0, 249)),
        has_tls=draw(st.booleans()),
        is_compatible=draw(st.booleans()),
        fixed=draw(st.dictionaries(device, fixed_reading(family), max_size=devices)),
        processes=tuple(draw(st.lists(process, max_size=6, unique_by=lambda one: (one.device, one.pid)))),
    )


def fault(name, card=None, value=None):
    return (PlannedFault(name, card, value),)
