"""The environment of each process: torchrun's variables, the device family's, and ascendrun's own."""

from __future__ import annotations

from typing import Mapping

VISIBLE_DEVICES: Mapping[str, str] = {"npu": "ASCEND_RT_VISIBLE_DEVICES", "cuda": "CUDA_VISIBLE_DEVICES"}

OWN_PREFIXES = ("TORCHELASTIC_", "ASCENDRUN_")

_FROM_SHAPE = "delete it; it follows from nodes and devices.per_node"
OWN_VARIABLES: Mapping[str, str] = {
    "RANK": _FROM_SHAPE, "LOCAL_RANK": _FROM_SHAPE, "GROUP_RANK": _FROM_SHAPE, "NODE_RANK": _FROM_SHAPE,
    "ROLE_RANK": _FROM_SHAPE, "ROLE_NAME": _FROM_SHAPE, "WORLD_SIZE": _FROM_SHAPE, "LOCAL_WORLD_SIZE": _FROM_SHAPE,
    "GROUP_WORLD_SIZE": _FROM_SHAPE, "ROLE_WORLD_SIZE": _FROM_SHAPE,
    "MASTER_ADDR": "delete it; it is the first host's address on the route to the others",
}
"""What the user may not set, and what to do instead. MASTER_PORT may be set: then it is the only candidate."""
