"""The environment of each process: torchrun's variables, the device type's, and ascendrun's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ascendrun.text import Text

VISIBLE_DEVICES: Mapping[str, str] = {"npu": "ASCEND_RT_VISIBLE_DEVICES", "cuda": "CUDA_VISIBLE_DEVICES"}

OWN_PREFIXES = ("TORCHELASTIC_", "ASCENDRUN_")

_FROM_SHAPE = Text("jobfile.variable-of-shape", "remove it; nodes and devices.per_node set it")
OWN_VARIABLES: Mapping[str, Text] = {
    "RANK": _FROM_SHAPE,
    "LOCAL_RANK": _FROM_SHAPE,
    "GROUP_RANK": _FROM_SHAPE,
    "NODE_RANK": _FROM_SHAPE,
    "ROLE_RANK": _FROM_SHAPE,
    "ROLE_NAME": _FROM_SHAPE,
    "WORLD_SIZE": _FROM_SHAPE,
    "LOCAL_WORLD_SIZE": _FROM_SHAPE,
    "GROUP_WORLD_SIZE": _FROM_SHAPE,
    "ROLE_WORLD_SIZE": _FROM_SHAPE,
    "MASTER_ADDR": Text("jobfile.master-addr", "remove it; it is the address of the first host"),
}
"""Variables that the user may not set, with a hint. MASTER_PORT may be set: then it is the only candidate."""

HCCL_CONNECT_S = 1200
"""How long HCCL waits for its peers' links. Huawei advises it for training; its own default, 120, is shorter than the
loading of a large model takes to differ between nodes. It must stay below HCCL_EXEC_TIMEOUT (1836 unless set)."""


@dataclass(frozen=True)
class NodeShare:
    """What all processes of one node have in common. `ranks_before`: ranks of the nodes before this one."""

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


@dataclass(frozen=True)
class JobShare:
    """What all processes of one attempt have in common. `signal`: a name without SIG; `env`: the user's own."""

    job: str
    attempt: int
    run_id: str
    signal: str
    env: Mapping[str, str]


def is_own_variable(name: str) -> bool:
    """Whether ascendrun sets this variable itself, so that neither `env` nor `env_file` may."""
    return name in OWN_VARIABLES or name.startswith(OWN_PREFIXES)


def rank_environment(job: JobShare, node: NodeShare, local_rank: int, *, python_path: str | None) -> dict[str, str]:
    """The variables of one rank that the agent starts: all that torchrun would set, MASTER_PORT excepted, which the
    agent adds when the port is known. `python_path`: the folder of the bundled programs, None: none is run."""
    rank = node.ranks_before + local_rank
    return _sorted(
        {
            **_common(job, node, python_path=python_path, rank=rank),
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "ROLE_RANK": str(rank),
            "ROLE_NAME": "default",
            "GROUP_RANK": str(node.node_rank),
            "WORLD_SIZE": str(node.world_size),
            "LOCAL_WORLD_SIZE": str(node.local_world_size),
            "GROUP_WORLD_SIZE": str(node.nodes),
            "ROLE_WORLD_SIZE": str(node.world_size),
            "TORCHELASTIC_RESTART_COUNT": str(job.attempt - 1),
            "TORCHELASTIC_MAX_RESTARTS": str(job.attempt - 1),
            "TORCHELASTIC_RUN_ID": job.run_id,
            "TORCHELASTIC_USE_AGENT_STORE": "False",
        }
    )


def launcher_environment(job: JobShare, node: NodeShare, *, python_path: str | None) -> dict[str, str]:
    """The variables of a node's launcher; torchrun and deepspeed give the ranks theirs."""
    return _sorted(_common(job, node, python_path=python_path, rank=node.node_rank))


def _common(job: JobShare, node: NodeShare, *, python_path: str | None, rank: int) -> dict[str, str]:
    user = {name: value for name, value in job.env.items() if name != "MASTER_PORT"}
    if python_path is not None:
        user["PYTHONPATH"] = ":".join(part for part in (python_path, user.get("PYTHONPATH")) if part)
    return {**_defaults(node, user), **user, **_own(job, node, rank)}


def _defaults(node: NodeShare, user: Mapping[str, str]) -> dict[str, str]:
    """What the user's own value replaces."""
    defaults = {
        "OMP_NUM_THREADS": str(node.threads),
        "PYTHONUNBUFFERED": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        # Left to themselves gloo and tensorpipe take the address of the hostname, often a loopback one.
        "GLOO_SOCKET_IFNAME": node.interface,
        "TP_SOCKET_IFNAME": node.interface,
    }
    if node.device_type == "npu":
        # "=": exactly this interface; without it "eth1" would also mean eth10.
        defaults["HCCL_SOCKET_IFNAME"] = f"={node.interface}"
        if "HCCL_EXEC_TIMEOUT" not in user:
            defaults["HCCL_CONNECT_TIMEOUT"] = str(HCCL_CONNECT_S)
        if ":" in node.master_address:
            defaults["HCCL_SOCKET_FAMILY"] = "AF_INET6"
    if node.device_type == "cuda":
        defaults["NCCL_SOCKET_IFNAME"] = f"={node.interface}"
    return defaults


def _own(job: JobShare, node: NodeShare, rank: int) -> dict[str, str]:
    own = {
        "NODE_RANK": str(node.node_rank),
        "MASTER_ADDR": node.master_address,
        "TORCHELASTIC_ERROR_FILE": f"{node.attempt_folder}/rank-{rank}.error.0",
        "ASCENDRUN_METRICS_FILE": f"{node.attempt_folder}/rank-{rank}.metrics.0",
        "ASCENDRUN_JOB_ID": job.job,
        "ASCENDRUN_ATTEMPT": str(job.attempt),
        "ASCENDRUN_RUN_ID": job.run_id,
        "ASCENDRUN_CHECKPOINT_DIR": node.checkpoint_folder,
        "ASCENDRUN_CHECKPOINT_SIGNAL": job.signal,
        "ASCENDRUN_DEVICE_TYPE": node.device_type,
    }
    if node.device_type in VISIBLE_DEVICES:
        own[VISIBLE_DEVICES[node.device_type]] = ",".join(str(one) for one in node.device_ids)
    return own


def _sorted(env: Mapping[str, str]) -> dict[str, str]:
    return dict(sorted(env.items()))
