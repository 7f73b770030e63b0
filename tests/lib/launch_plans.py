"""Launch plans of small worlds: a job, a hostfile and reports of the nodes."""

import pytest

from ascendrun.core.errors import PreflightError
from ascendrun.core.hosts import parse_hostfile
from ascendrun.core.jobfile.model import JobSpec
from ascendrun.core.jobs.plan import Folders, make_plan
from ascendrun.core.reports import NodeReport, Route

FOLDERS = Folders(work="/r/work", checkpoints="/r/ckpt", attempt="/r/attempt-1", trees="/r/trees")


def job(**fields):
    return JobSpec.model_validate({"name": "j", "command": ("python", "train.py"), **fields})


def report(name, *, routes=None, cpus=64, python="/usr/bin/python3"):
    return NodeReport(
        host=name,
        root="/r",
        hostname=name,
        boot_id="b",
        machine_id=None,
        user="u",
        python=python,
        python_version="3.9",
        kernel="k",
        arch="x",
        cpus=cpus,
        memory_bytes=None,
        free_bytes=None,
        clock_offset_s=None,
        routes=routes or {},
    )


def meshed(hosts, source="10.0.0.{}"):
    return {
        host.name: report(
            host.name, routes={other.name: Route("eth0", source.format(index)) for other in hosts if other is not host}
        )
        for index, host in enumerate(hosts, start=1)
    }


def plan(spec, hostfile, reports=None, trees=(), resume=None, **more):
    hosts = parse_hostfile(hostfile, "h")
    reports = meshed(hosts) if reports is None else reports
    return make_plan(
        spec,
        hosts,
        reports,
        job="j1",
        attempt=1,
        run_id="h-j1.1",
        folders={host.name: FOLDERS for host in hosts},
        trees=trees,
        resume=resume,
        **more,
    )


def refusal(*args, **kwargs):
    with pytest.raises(PreflightError) as caught:
        plan(*args, **kwargs)
    return caught.value.message


def ranks_of(planned):
    return [rank for node in planned.nodes for rank in node.ranks]
