"""Small worlds of simulated Ascend nodes: the tools' own texts, asked in this process, read as doctor reads them."""

import time
from dataclasses import replace

from ascendrun.core.hosts import Host
from ascendrun.core.jobfile.spec import parse_stages
from ascendrun.core.jobs.plan import Folders, make_plan
from ascendrun.core.reports import NodeReport, Route
from ascendrun.health.checks import run_checks
from ascendrun.health.survey.check_context import CheckContext
from ascendrun.health.survey.facts import NodeFacts, PythonFacts
from ascendrun.health.survey.probes import CARD_VIEWS, DRIVER_NODES, PORT_ITEMS, read_npu, read_results
from ascendrun.sim.ascend import tree
from ascendrun.sim.ascend.scenario import PlannedFault, Scenario, make_faults, make_node
from ascendrun.sim.ascend.tool import hccn as hccn_tool
from ascendrun.sim.ascend.tool import main as npu_smi
from ascendrun.sim.ascend.tool.live import Scene, readings
from ascendrun.sim.ascend.tool.model import Faults

HOME = "/usr/local/Ascend/ascend-toolkit/latest"
MODULES = {"torch": "2.4.0", "torch-npu": "2.4.0"}
PYTHON = PythonFacts(setup="fine", executable="/opt/py/bin/python", version="3.10.13", modules=MODULES)
ENVIRON = {"ASCEND_HOME_PATH": HOME, "LD_LIBRARY_PATH": f"{HOME}/lib64:/usr/lib"}
RESERVED = {"port_ranges": ((32768, 60999), ((60000, 60031),))}


def scene_of(scenario, rows=()):
    node = make_node(scenario, now_s=time.time())
    faults = Faults(make_faults(scenario, now_s=time.time()), time.time() + 1)
    return Scene(node, faults, readings(node, faults, rows), is_complete=scenario.is_complete, is_privileged=True)


def section(label, text, code=0):
    return f"@@ {label}\n{text}\n@@= {code}\n"


def ran(out, **more):
    return {
        "code": 0,
        "signal": None,
        "timed_out": False,
        "truncated": False,
        "wall_s": 0.1,
        "out": out,
        "err": "",
        "setup": "fine",
        **more,
    }


def smi(scene, *words):
    answer = npu_smi.respond([str(word) for word in words], scene)
    return answer.text, answer.code


def hccn(scene, device, item, *more):
    answer = hccn_tool.respond(["-i", str(device), f"-{item}", *more, "-g"], scene)
    return answer.text, answer.code


def owners_text(owners):
    return "".join(f"{pid}\t{user}\t{tag or ''}\t{command}\n" for pid, (user, command, tag) in owners.items())


def raw_answers(scenario, *, owners=None, shell=True, pings=(), rows=()):
    """The raw answers of a node of this scenario, as its agent would send them."""
    scene = scene_of(scenario, rows)
    devices = [chip.logic_id for chip in scene.node.chips]
    npu_ids = dict.fromkeys(chip.npu_id for chip in scene.node.chips)
    cards = "".join(
        section(f"{view} {npu_id}", *smi(scene, "info", "-t", view, "-i", npu_id))
        for npu_id in npu_ids
        for view in CARD_VIEWS
    )
    ports = ""
    for item in PORT_ITEMS:
        for device in devices:
            text, code = hccn(scene, device, item)
            ports += section(f"{item} {device}", text, code)
            if item == "ip" and "ipaddr:" not in text:
                ports += section(f"ip6 {device}", *hccn(scene, device, "ip", "-inet6"))
    answers = {
        "npu-smi": ran(section("info", *smi(scene, "info")) + section("owners", owners_text(owners or {}))),
        "npu-devices": {
            "stats": {
                f"/dev/{name}": {"readable": True, "writable": True, "mode": 0o660}
                for name in (*DRIVER_NODES, *(f"davinci{device}" for device in devices))
            }
        },
        "npu-cards": ran(cards),
        "hccn": ran(ports),
        "ascend-files": ran(files_text(scenario, scene)),
        "cann": ran(shell_text(scenario) if shell else ""),
    }
    if pings:
        answers["hccn-pings"] = ran(
            "".join(
                section(f"ping {device} {address}", *hccn_ping(scene, device, address)) for device, address in pings
            )
        )
    return answers


def hccn_ping(scene, device, address):
    answer = hccn_tool.respond(["-i", str(device), "-ping", "-g", "address", address, "pkt", "3"], scene)
    return answer.text, answer.code


def files_text(scenario, scene):
    labels = {
        "driver/version.info": "driver",
        "firmware/version.info": "firmware",
        "etc/ascend_install.info": "install",
        "_toolkit_install.info": "cann",
        "_nnae_install.info": "cann",
    }
    told = section("hccn /etc/hccn.conf", tree.hccn_conf(scene.node))
    for path, text in tree.version_files(scenario, seen_as="").items():
        label = next((label for end, label in labels.items() if path.endswith(end)), None)
        if label is not None:
            told += section(f"{label} /{path}", text)
        elif path.endswith("set_env.sh"):
            told += section(f"set_env /{path}", "")
    return told


def shell_text(scenario):
    if scenario.cann is None:
        return ""
    told = section(f"home {HOME}", "")
    for path, text in tree.version_files(scenario, seen_as="").items():
        if path.endswith("_toolkit_install.info"):
            told += section(f"cann /{path}", text)
        elif path.endswith("version.cfg"):
            told += section(f"components /{path}", text)
    return told


def node(host, scenario=None, *faults, raw=None, number=None, **more):
    """Facts of a node. `faults`: (name, card, value) of the scenario. `raw`: answers that replace its own by name."""
    number = int(host[1:]) if number is None else number
    scenario = replace(scenario or Scenario(), number=number, faults=tuple(PlannedFault(*fault) for fault in faults))
    asked = {name: more.pop(name) for name in ("owners", "shell", "pings", "rows") if name in more}
    answers = {**raw_answers(scenario, **asked), **(raw or {})}
    values = {
        "python": PYTHON,
        "environ": ENVIRON,
        "arch": "aarch64",
        "user": "me",
        "uid": 1000,
        "routes": {"n1": Route("eth0", f"10.0.0.{number}"), "n2": Route("eth0", f"10.0.0.{number}")},
        **more,
    }
    return NodeFacts(host, npu=read_npu(read_results(answers)), **values)


def world(*nodes, family="npu", job="", per_node=None):
    facts = {one.host: one for one in nodes}
    text = f"name: j\ncommand: [python3, train.py]\ndevices: {{type: npu{per_node_text(per_node)}}}\n{job}"
    spec = parse_stages(text, "job.yaml", programs={})[0].spec if per_node is not None else None
    return CheckContext(
        facts=facts, device_type=family, job=spec, plan=plan_of(spec, facts) if spec is not None else None
    )


def per_node_text(per_node):
    return "" if per_node is None else f", {per_node}" if isinstance(per_node, str) else f", per_node: {per_node}"


def plan_of(spec, facts):
    hosts = [Host(name) for name in facts]
    reports = {
        name: NodeReport(
            name,
            "/root/.ascendrun",
            name,
            f"b-{name}",
            None,
            "root",
            "python3",
            "3.10",
            "5.10",
            "aarch64",
            192,
            1 << 40,
            1 << 40,
            0.0,
            one.routes or {},
        )
        for name, one in facts.items()
    }
    folders = {name: Folders("/w", "/c", "/a", "/t") for name in facts}
    return make_plan(spec, hosts, reports, job="j-1", attempt=1, run_id="h-j-1.1", folders=folders, trees=())


def findings(one, **more):
    return {(finding.code, finding.severity.value, finding.hosts) for finding in run_checks(one, **more)}


def the(one, code, **more):
    """The only finding of the code."""
    found = run_checks(one, **more)
    (named,) = [finding for finding in found if finding.code == code] or [found]
    return named


def codes(one, **more):
    return {finding.code for finding in run_checks(one, **more)}
