"""Recorded answers of a large cluster to the light questions, mostly alike, as the controller hands them on."""

import json
import random
from dataclasses import replace

from ascendrun.health.survey.probes import DRIVER_NODES, LIGHT_PORT_ITEMS, MOST_DEVICES
from ascendrun.sim.ascend.scenario import Scenario
from tests.lib.npu_worlds import HOME, MODULES, files_text, hccn, ran, scene_of, section, shell_text, smi

GIB = 1 << 30
ROOT = "/root/.ascendrun"
VARIABLES = {
    **{f"APP_SETTING_{number}": f"value of setting {number}" for number in range(40)},
    "HOME": "/root",
    "PATH": "/opt/py/bin:/usr/bin",
    "ASCEND_HOME_PATH": HOME,
    "LD_LIBRARY_PATH": f"{HOME}/lib64:/usr/lib",
}


def recorded_answers(count, *, differing=None):
    """One answer a host: npu0001, … `differing`: a Scenario by host name, for those that are not as the rest."""
    names = [f"npu{number:04d}" for number in range(1, count + 1)]
    return [
        _answer(name, number, names, (differing or {}).get(name, Scenario()))
        for number, name in enumerate(names, start=1)
    ]


def _answer(name, number, names, scenario):
    npu = json.dumps(_light_answers(replace(scenario, fixed=_readings(number, scenario.cards))))
    return recorded_answer(name, number, names, json.loads(npu.replace("29.1.1.", f"29.{number >> 8}.{number & 255}.")))


def recorded_answer(name, number, names, npu_results):
    """One host's answer: a sound machine, and what it says of its NPUs."""
    address = f"10.{number >> 8}.{number & 255}.1"
    results = {**npu_results, **_host_answers(number, address)}
    results["connection-tests"] = {"tests": [_tested(names[(number + step) % len(names)]) for step in (0, 6)]}
    report = {
        "host": name,
        "root": ROOT,
        "hostname": name,
        "boot_id": f"boot-{number}",
        "user": "root",
        "machine_id": f"machine-{number}",
        "python": "/usr/bin/python3",
        "python_version": "3.9.9",
        "kernel": "5.10.0-60.18.0.50.oe2203.aarch64",
        "arch": "aarch64",
        "cpus": 192,
        "memory_bytes": 1500 * GIB - number * 4096,
        "free_bytes": 900 * GIB - number * 4096,
        "clock_offset_s": 0.0001 * (number % 90),
        "routes": [["eth0", address, None]],
        "uid": 0,
        "is_local": False,
        "login_s": 0.2 + number % 7 / 100,
        "login_noise": "",
    }
    # through JSON: no two hosts share an object, as they would not after their way over the wire
    return json.loads(json.dumps({"ok": True, "host": name, "report": report, "results": results}))


def _readings(number, cards):
    """No two idle nodes draw the same power or are equally warm; their memory is nearly the same."""
    chance = random.Random(number)
    return {
        device: {
            "power_w": round(chance.uniform(88, 104), 1),
            "temperature_c": chance.randint(36, 46),
            "hbm_used_mb": 3370 + chance.randint(0, 12),
        }
        for device in range(cards)
    }


def _tested(peer):
    return {"peer": peer, "address": "10.0.0.9", "port": 20001, "wall_s": 0.0007}


def _light_answers(scenario):
    """What a node of the scenario says of its NPUs to the light questions."""
    scene = scene_of(scenario)
    devices = [chip.logic_id for chip in scene.node.chips]
    files = (*DRIVER_NODES, *(f"davinci{device}" for device in range(MOST_DEVICES)))
    here = {*DRIVER_NODES, *(f"davinci{device}" for device in devices)}
    ports = "".join(
        section(f"{item} {device}", *hccn(scene, device, item)) for item in LIGHT_PORT_ITEMS for device in devices
    )
    open_file = {"readable": True, "writable": True, "mode": 0o660, "uid": 0, "gid": 1000}
    return {
        "npu-smi": ran(section("info", *smi(scene, "info")) + section("owners", "")),
        "npu-devices": {"stats": {f"/dev/{file}": open_file if file in here else {"missing": True} for file in files}},
        "hccn": ran(ports),
        "ascend-files": ran(files_text(scenario, scene)),
        "cann": ran(shell_text(scenario)),
    }


def _host_answers(number, address):
    environ = {**VARIABLES, "HOSTNAME": f"npu{number:04d}", "SSH_CLIENT": f"10.0.0.1 {40000 + number} 22"}
    python = {"executable": "/opt/py/bin/python", "version": "3.10.13", "prefix": "/opt/py", "modules": MODULES}
    disk = {
        "at": "/",
        "free_bytes": 900 * GIB - number * 4096,
        "total_bytes": 1000 * GIB,
        "free_inodes": 10**8 - number,
        "total_inodes": 10**8,
    }
    shm = {**disk, "at": "/dev/shm"}
    return {
        "os": {"texts": {"/etc/os-release": 'NAME="openEuler"\nPRETTY_NAME="openEuler 22.03 (LTS-SP4)"\n'}},
        "limits": {
            "limits": {
                "NOFILE": [65536, 65536],
                "NPROC": [None, None],
                "MEMLOCK": [None, None],
                "STACK": [8 << 20, None],
                "AS": [None, None],
            }
        },
        "disk": {"disks": {ROOT: disk, "/dev/shm": shm, "/tmp": disk}},
        "write": {"folders": {ROOT: {"at": ROOT, "uid": 0, "wall_s": 0.004}}},
        "ports": {"taken": {}},
        "port-ranges": {
            "texts": {
                "/proc/sys/net/ipv4/ip_local_port_range": "32768\t60999\n",
                "/proc/sys/net/ipv4/ip_local_reserved_ports": "16666,60000-60031\n",
            }
        },
        "addresses": ran(f"1: lo    inet 127.0.0.1/8 scope host lo\n2: eth0    inet {address}/24 scope global eth0\n"),
        "mtus": {"texts": {"/sys/class/net/lo/mtu": "65536\n", "/sys/class/net/eth0/mtu": "1500\n"}},
        "sshd": ran("maxstartups 100:30:200\nmaxsessions 64\n"),
        "logind": {"texts": {}},
        "null-device": ran("character special file 1,3 666\n"),
        "linger": {"names": []},
        "python": ran(f"{json.dumps(python)}\n"),
        "environ": ran("".join(f"{key}={value}\0" for key, value in environ.items())),
    }
