"""A simulated CANN on which the real torch_npu runs on the CPU: control flow and API, never speed.

    names    which functions torch_npu wants of CANN      build        compiles cann/ into a toolkit folder, once
    target   the Python environment that has torch_npu    environment  what a process needs to find that toolkit

`cann/` has the sources: devices, memory, streams, faults, plog; hccl* are the collectives over TCP; operators computes
aten on the host, fused the NPU's own operators; compiler and the names that nobody needs to do anything answer 0.
"""
