"""Whole plans as files: what every process of a job gets, readable and reviewed."""

import json
from pathlib import Path

import pytest

from ascendrun.core.hosts import parse_hostfile
from ascendrun.core.jobfile.spec import parse_program_options, parse_stages, resolve_paths
from ascendrun.core.jobs.plan import Folders, Tree, make_plan
from ascendrun.core.jobs.plan_text import render_plan, render_text
from ascendrun.core.reports import NodeReport, Route

HERE = Path(__file__).parent
PROGRAMS = {
    "trajectory": parse_program_options(
        "trajectory",
        json.dumps(
            {
                "options": {
                    "lr": {"type": "float", "default": 1e-3, "help": "peak learning rate"},
                    "data": {"type": "path", "default": "", "help": "tracks"},
                    "columns": {"type": "list", "default": [], "help": "names"},
                    "split_column": {"type": "bool", "default": True, "help": "keep the split"},
                }
            }
        ),
    )
}
CODE = Tree("code", "c" * 64, 1234, 5)
OURS = Tree("programs", "d" * 64, 99, 3)

TWO_REMOTE = "npu[01-02] slots=8\n"
FOUR_REMOTE = "npu01 slots=2 addr=10.0.0.1\nnpu[02-04] slots=2 user=train port=2222\n"
TWO_LOCAL = "one slots=2 addr=local\ntwo slots=2 addr=local\n"

CASES = {
    "spawn-npu-two-nodes": (
        TWO_REMOTE,
        """
name: qwen
command: [python, train.py, --lr, 2e-5, "a b", "$(x)", 'it''s']
nodes: 2
devices: {type: npu, per_node: 2}
env: {HCCL_BUFFSIZE: 400, PYTHONPATH: /opt/lib}
setup: source /usr/local/Ascend/ascend-toolkit/set_env.sh
python: /opt/conda/bin/python
workdir: {path: .}
checkpoint: {dir: /ckpt/qwen, grace_period_s: 300, signal: USR1}
timeouts: {start_s: 60, run_s: 3600}
""",
    ),
    "spawn-npu-users-own-network": (
        TWO_REMOTE,
        """
name: tuned
command: [./train.sh]
devices: {type: npu, ids: [1, 3]}
env: {HCCL_SOCKET_IFNAME: enp1, HCCL_CONNECT_TIMEOUT: 7200, OMP_NUM_THREADS: 3, MASTER_PORT: 12345}
""",
    ),
    "spawn-cuda-one-node": (
        "gpu1 devices=2,5,7\n",
        """
name: one
command: [python3, -m, pkg.train]
devices: {type: cuda, per_node: 2}
""",
    ),
    "program-cpu-two-local-hosts": (
        TWO_LOCAL,
        """
name: quickstart
program: trajectory
args: {lr: 1e-4, data: tracks, columns: [a=b, "c="], split_column: false}
env: {PYTHONPATH: /mine}
""",
    ),
    "torchrun-npu": (
        TWO_REMOTE,
        """
name: tr
command: [python, -u, train.py, --epochs, 3]
launcher: torchrun
devices: {type: npu}
""",
    ),
    "deepspeed-npu": (
        FOUR_REMOTE,
        """
name: ds
command: [python, train.py]
launcher: deepspeed
nodes: 3
devices: {type: npu, ids: [0, 4]}
""",
    ),
    "python-one-process-a-node": (
        TWO_REMOTE,
        """
name: py
command: [python, -c, "print('x')"]
launcher: none
devices: {type: npu, per_node: 8}
""",
    ),
}


def report(host, hosts):
    local = host.is_local
    routes = (
        {}
        if local
        else {
            other.name: Route("bond0" if host.name.endswith("1") else "enp1", f"10.0.0.{host.line}")
            for other in hosts
            if other is not host
        }
    )
    return NodeReport(
        host=host.name,
        root=f"/home/t/.ascendrun-{host.name}",
        hostname=host.name,
        boot_id="b",
        machine_id=None,
        user="t",
        python="/venv/bin/python3.9",
        python_version="3.9.1",
        kernel="k",
        arch="aarch64",
        cpus=8 if local else 192,
        memory_bytes=1,
        free_bytes=1,
        clock_offset_s=0.0,
        routes=routes,
    )


def folders_of(report):
    run = f"{report.root}/runs/h1-j1"
    return Folders(
        work=f"{run}/work", checkpoints=f"{run}/checkpoints", attempt=f"{run}/attempt-2", trees=f"{report.root}/trees"
    )


def plan_of(hostfile, job):
    hosts = parse_hostfile(hostfile, "hosts")
    spec = resolve_paths(parse_stages(job, "job.yaml", programs=PROGRAMS)[0].spec, "/home/me/jobs", PROGRAMS)
    reports = {host.name: report(host, hosts) for host in hosts}
    trees = ([CODE] if spec.workdir else []) + ([OURS] if spec.program else [])
    return make_plan(
        spec,
        hosts,
        reports,
        job="j1",
        attempt=2,
        run_id="h1-j1.2",
        folders={name: folders_of(each) for name, each in reports.items()},
        trees=trees,
    )


@pytest.mark.parametrize("name", sorted(CASES))
def test_the_plan_is_the_one_on_file(name, update_golden):
    rendered = render_plan(plan_of(*CASES[name]))
    text = render_text(rendered)
    as_data, as_text = HERE / f"{name}.json", HERE / f"{name}.txt"
    if update_golden:
        as_data.write_text(json.dumps(rendered, indent=1) + "\n", encoding="utf-8")
        as_text.write_text(text, encoding="utf-8")
    assert rendered == json.loads(as_data.read_text(encoding="utf-8"))
    assert text == as_text.read_text(encoding="utf-8")


def test_every_golden_file_belongs_to_a_case():
    assert {path.stem for path in HERE.iterdir() if path.suffix in (".json", ".txt")} == set(CASES)
