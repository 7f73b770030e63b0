"""CUDA calls of an unchanged example run on the CPU, in ranks that torchrun starts."""

import os

if "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ:
    import torch
    import torch.distributed as dist

    def _on_cpu(value):
        is_device = type(value) in (int, str, torch.device)
        return "cpu" if is_device and (type(value) is int or "cuda" in str(value)) else value

    def _patch(kind):
        to = kind.to
        kind.to = lambda self, *values, **named: to(self, *map(_on_cpu, values), **named)

    def _gloo(init):
        return lambda backend=None, *values, **named: init("gloo", *values, **named)

    class _Parallel(torch.nn.parallel.DistributedDataParallel):
        def __init__(self, module, device_ids=None, **named):
            super().__init__(module, **named)

    _patch(torch.Tensor)
    _patch(torch.nn.Module)
    torch.Tensor.pin_memory = lambda self: self
    torch.cuda.set_device = lambda device: None
    dist.init_process_group = _gloo(dist.init_process_group)
    torch.nn.parallel.DistributedDataParallel = _Parallel
