"""A simulated CANN on which the real torch_npu runs on the CPU: control flow and API, never speed.

    build    compile cann/ into a toolkit directory, once; environment: what a process needs to find that toolkit;
             find_target: the Python environment that has torch_npu

`cann/` has the sources: devices, memory, streams, faults, plog; hccl* are the collectives over TCP; operators computes
aten on the host, fused the NPU's own operators; compiler and the functions without behaviour return 0.
"""
