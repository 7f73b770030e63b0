"""What a Slurm tells of itself, for doctor: text of scontrol, sinfo and the names of its commands. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ascendrun.core.allocations import EngineFacts
from ascendrun.core.engines import time_limit_s

COMMANDS = ("sbatch", "squeue", "scancel", "srun")
CONFIG_ARGV = ("scontrol", "show", "config")
NODES_ARGV = ("sinfo", "--noheader", "--states=idle,mixed", "--format=%P|%D|%G|%l|%L")
"""Partition, with * the default, nodes, devices of each, MaxTime and DefaultTime of the partition: a line for each
group of nodes that are equal in them."""


def read_facts(config: str, nodes: str, options: Mapping[str, Any]) -> EngineFacts:
    """Return the facts. `options`: of the engine, as in the settings."""
    values = dict(re.findall(r"^(\w+) *= (.*)$", config, re.MULTILINE))
    groups = [row.split("|") for row in nodes.splitlines() if row.count("|") == 4]
    partition = options.get("partition")
    groups = [row for row in groups if (row[0].rstrip("*") == partition if partition else row[0].endswith("*"))]
    kill_wait = re.match(r"\d+", values.get("KillWait", ""))
    tracking = values.get("ProctrackType")
    longest_s, default_s = (time_limit_s({"time": groups[0][column]}) if groups else None for column in (3, 4))
    return EngineFacts(
        tracking=tracking,
        is_tracking_exact=None if tracking is None else tracking == "proctrack/cgroup",
        kill_wait_s=None if kill_wait is None else float(kill_wait[0]),
        devices=tuple(sorted({_count(row[2], options.get("gres", "npu")) for row in groups})),
        device_name=options.get("gres", "npu"),
        nodes=sum(int(row[1]) for row in groups),
        limit_s=time_limit_s(options) or default_s or longest_s,
        longest_s=longest_s,
    )


def _count(gres: str, name: str) -> int:
    """Return how many devices of a name "npu" or "npu:910b" a node has, as in "npu:910b:8(S:0-1),lic:2"."""
    found = re.findall(rf"(?:^|,){re.escape(name)}(?::[^:,()]+)?:(\d+)(?=[(,]|$)", gres)
    return sum(int(count) for count in found)
