"""What Ray calls NPUs (Ray 2.60, accelerators/npu.py), and the variable that verl and vllm-ascend require."""

from ascendrun.core.jobfile.launchers import RaySetup

# Torch chooses by rank among all NPUs of a node; without the variable Ray would show a worker its own only.
RAY_NAMES = {"npu": RaySetup(("NPU",), {"RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES": "1"})}
