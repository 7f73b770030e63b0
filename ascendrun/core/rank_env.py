"""Environment of each process: variables of torchrun, the device type and ascendrun."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from ascendrun.core.dataclass import dataclass
from ascendrun.text import Text

VISIBLE_DEVICES: Mapping[str, str] = {"npu": "ASCEND_RT_VISIBLE_DEVICES", "cuda": "CUDA_VISIBLE_DEVICES"}

PATH_TOKEN = "\0PATH\0"
"""Placeholder in a variable for the PATH of the node's login; NUL cannot occur in a user's value."""

FORKS_VARIABLE = "ASCENDRUN_FORKS"
"""Equal to node/layout.FORKS_VARIABLE; a test compares them."""

OWN_PREFIXES = ("TORCHELASTIC_", "ASCENDRUN_")

_FROM_SHAPE = Text("jobfile.variable-of-shape", "remove it; nodes and devices.per_node set it")
OWN_VARIABLES: Mapping[str, Text] = {
    **dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "ROLE_RANK", "ROLE_NAME"), _FROM_SHAPE),
    **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"), _FROM_SHAPE),
    "MASTER_ADDR": Text("jobfile.master-addr", "remove it; it is the address of the first host"),
}
"""Variables that the user may not set, with a hint. MASTER_PORT may be set: it is then the only candidate."""

HCCL_CONNECT_S = 1200
"""Seconds that HCCL waits for its peers' links, as Huawei recommends for training. The default, 120, is too short when
nodes load a large model at different speeds. It must stay below HCCL_EXEC_TIMEOUT (1836 unless set)."""

FLIGHT_FILE = "flight-"
"""In the attempt's directory; the rank's number is appended."""
FLIGHT_RECORDER: Mapping[str, Mapping[str, str]] = {
    "cuda": {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": f"{{folder}}/{FLIGHT_FILE}",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    },
    "npu": {
        "TORCH_HCCL_TRACE_BUFFER_SIZE": "2000",
        "TORCH_HCCL_DEBUG_INFO_TEMP_FILE": f"{{folder}}/{FLIGHT_FILE}",
        "TORCH_HCCL_DUMP_ON_TIMEOUT": "1",
    },
}
"""The last collectives of each rank, written when the watchdog sees a timeout (torch 2.13; torch_npu's documents of its
variables). The monitor of torch_npu, which ends ranks, is left as the user has it."""


@dataclass(frozen=True)
class NodeShare:
    """Common values of all processes of one node in an attempt. `signal`: a name without SIG; `env`: the user's;
    `python`: the job's interpreter, None: not set. `ranks_before`: ranks of the nodes before this node. `resume`:
    variables that name the checkpoint to continue from. `role`: of the node, None: the job has none; then `node_rank`,
    `nodes`, `world_size` and `ranks_before` are those in its role, and `roles` has the addresses of all roles, by host.
    `ranks_of_others`: ranks of the roles before. `python_path`: directory of the bundled programs, None: the job
    has a command."""

    job: str
    attempt: int
    run_id: str
    signal: str
    env: Mapping[str, str]
    node_rank: int
    nodes: int
    world_size: int
    local_world_size: int
    ranks_before: int
    interface: str
    master_address: str
    device_type: str
    device_ids: tuple[int, ...]
    threads: int
    attempt_folder: str
    checkpoint_folder: str
    python: str | None = None
    python_path: str | None = None
    resume: Mapping[str, str] = field(default_factory=dict)
    role: str | None = None
    roles: Mapping[str | None, Mapping[str, str]] = field(default_factory=dict)
    ranks_of_others: int = 0


def forks_ranks(spec: Mapping[str, Any]) -> bool:
    """Return whether the process of a node may start its ranks, by the stored job file: what it prints is of all."""
    devices = spec.get("devices") or {}
    count = devices.get("per_node") or len(devices.get("ids") or ()) or None  # None: all that the node has
    return spec.get("launcher") == "none" and count != 1 and not spec.get("roles")


def is_own_variable(name: str) -> bool:
    """Return whether ascendrun sets this variable itself, so that `env` and `env_file` may not."""
    return name in OWN_VARIABLES or name.startswith(OWN_PREFIXES)


def rank_environments(node: NodeShare) -> list[dict[str, str]]:
    """Return the variables of each rank of a node that the agent starts, in order: all that torchrun would set, except
    MASTER_PORT, which the agent adds when the port is known."""
    of_all: dict[str, object] = {
        "ROLE_NAME": node.role or "default",
        "GROUP_RANK": node.node_rank,
        "WORLD_SIZE": node.world_size,
        "LOCAL_WORLD_SIZE": node.local_world_size,
        "GROUP_WORLD_SIZE": node.nodes,
        "ROLE_WORLD_SIZE": node.world_size,
        "TORCHELASTIC_RESTART_COUNT": node.attempt - 1,
        "TORCHELASTIC_MAX_RESTARTS": node.attempt - 1,
        "TORCHELASTIC_RUN_ID": node.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    shared: dict[str, object] = {**_of_an_only_rank(node), **launcher_environment(node), **of_all}
    found: list[dict[str, str]] = []
    for local in range(node.local_world_size):
        rank = node.ranks_before + local
        own = {"RANK": rank, "LOCAL_RANK": local, "ROLE_RANK": rank}
        values = {**shared, **own, **own_files(node, node.ranks_of_others + rank)}
        found.append({name: str(values[name]) for name in (found[0] if found else sorted(values))})
    return found


def _of_an_only_rank(node: NodeShare) -> dict[str, object]:
    """Return what the only process of a node gets: it may start torchrun itself. LLaMA-Factory and ms-swift do so with
    these, MASTER_ADDR, MASTER_PORT and NODE_RANK. ms-swift does so wherever they are set, so one rank of several does
    not get them."""
    if node.local_world_size != 1:
        return {}
    found: dict[str, object] = {"NNODES": node.nodes, "NPROC_PER_NODE": len(node.device_ids)}
    if len(node.device_ids) > 1 and node.role is None:
        found[FORKS_VARIABLE] = f"{node.ranks_before} {node.world_size} {node.local_world_size}"
    return found


def launcher_environment(node: NodeShare) -> dict[str, str]:
    """Return the variables of a node's launcher, which sets those of its ranks, except `own_files`."""
    user = {name: value for name, value in node.env.items() if name != "MASTER_PORT"}
    if node.python_path is not None:
        user["PYTHONPATH"] = ":".join(part for part in (node.python_path, user.get("PYTHONPATH")) if part)
    return dict(sorted({**_defaults(node, user), **user, **_own(node)}.items()))


def own_files(node: NodeShare, rank: int) -> dict[str, str]:
    """Return the variables that name the files of one rank."""
    return {
        "ASCENDRUN_METRICS_FILE": f"{node.attempt_folder}/rank-{rank}.metrics.0",
        "TORCHELASTIC_ERROR_FILE": f"{node.attempt_folder}/rank-{rank}.error.0",
    }


def _defaults(node: NodeShare, user: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the user may override."""
    defaults = {
        "OMP_NUM_THREADS": str(node.threads),
        "PYTHONFAULTHANDLER": "1",  # prints all stacks at the end of a hung rank: node/stacks.py
        "PYTHONUNBUFFERED": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        # By default gloo and tensorpipe use the address of the hostname, often a loopback address.
        "GLOO_SOCKET_IFNAME": node.interface,
        "TP_SOCKET_IFNAME": node.interface,
    }
    if node.python is not None and node.python.startswith("/"):
        defaults["PATH"] = f"{node.python.rpartition('/')[0] or '/'}:{PATH_TOKEN}"
    if node.device_type == "npu":
        # "=": exactly this interface; without it "eth1" would also mean eth10.
        defaults["HCCL_SOCKET_IFNAME"] = f"={node.interface}"
        if "HCCL_EXEC_TIMEOUT" not in user:
            defaults["HCCL_CONNECT_TIMEOUT"] = str(HCCL_CONNECT_S)
        if ":" in node.master_address:
            defaults["HCCL_SOCKET_FAMILY"] = "AF_INET6"
    if node.device_type == "cpu":
        defaults["ACCELERATE_USE_CPU"] = "true"  # without it each rank of Accelerate on CPUs trains for itself
    if node.device_type == "cuda":
        defaults["NCCL_SOCKET_IFNAME"] = f"={node.interface}"
    for name, value in FLIGHT_RECORDER.get(node.device_type, {}).items():
        defaults[name] = value.format(folder=node.attempt_folder)
    return defaults


def _own(node: NodeShare) -> dict[str, str]:
    own = {
        "NODE_RANK": str(node.node_rank),
        "MASTER_ADDR": node.master_address,
        "ASCENDRUN_JOB_ID": node.job,
        "ASCENDRUN_ATTEMPT": str(node.attempt),
        "ASCENDRUN_RUN_ID": node.run_id,
        "ASCENDRUN_CHECKPOINT_DIR": node.checkpoint_folder,
        "ASCENDRUN_CHECKPOINT_SIGNAL": node.signal,
        "ASCENDRUN_DEVICE_TYPE": node.device_type,
        **node.resume,
    }
    if node.role is not None:
        own["ASCENDRUN_ROLE"] = node.role
        own["ASCENDRUN_ROLES"] = json.dumps({name: list(hosts.values()) for name, hosts in node.roles.items()})
    if node.device_type in VISIBLE_DEVICES:
        own[VISIBLE_DEVICES[node.device_type]] = ",".join(map(str, node.device_ids))
    return own
