"""What one rank looks at on a simulated device: checks.main(["name"]) runs it and ends the process."""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any, Dict, List, Sequence

import torch
import torch.distributed as dist

from ascendrun.programs.trainer import accelerator, distributed, kernels


def main(argv: List[str]) -> None:
    try:
        answer = globals()[argv[0]](*argv[1:])
        Path(f"answer-{os.environ['RANK']}.json").write_text(json.dumps(answer))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def here() -> accelerator.Accelerator:
    return accelerator.open_accelerator(os.environ["ASCENDRUN_FAMILY"], int(os.environ["LOCAL_RANK"]))


def fused() -> Dict[str, float]:
    """The largest difference of answers and gradients from the formula, by operator."""
    device = here().device
    hidden = torch.ones(9, 9, dtype=torch.bool).triu(1).expand(2, 1, 9, 9).contiguous()
    row = (2, 4, 9, 8)
    cases: Dict[str, Any] = {
        "attention": (lambda q, k, v: kernels.npu_attention(q, k, v, hidden.to(q.device), scale=0.3),
                      lambda q, k, v: kernels.attention_formula(q, k, v, hidden, scale=0.3),
                      row, (2, 2, 9, 8), (2, 2, 9, 8)),
        "rms_norm": (lambda x, w: kernels.npu_rms_norm(x, w, 1e-6),
                     lambda x, w: kernels.rms_norm_formula(x, w, 1e-6), (2, 5, 8), (8,)),
        "rotary": (kernels.npu_rotary, kernels.rotary_formula, row, (1, 1, 9, 8), (1, 1, 9, 8)),
        "swiglu": (kernels.npu_swiglu, kernels.swiglu_formula, (2, 9, 8), (2, 9, 8)),
    }
    return {name: worst(device, *case) for name, case in cases.items()}


def worst(device: torch.device, operator: Any, formula: Any, *shapes: Sequence[int]) -> float:
    chance = torch.Generator().manual_seed(1)
    inputs = [torch.randn(shape, generator=chance) for shape in shapes]
    on_host = [x.clone().requires_grad_() for x in inputs]
    on_device = [x.to(device).requires_grad_() for x in inputs]
    wanted, found = formula(*on_host), operator(*on_device)
    weight = torch.randn(wanted.shape, generator=chance)
    (wanted * weight).sum().backward()
    (found * weight.to(device)).sum().backward()
    pairs = [(wanted, found), *((a.grad, b.grad) for a, b in zip(on_host, on_device))]
    return max(float((one - other.cpu()).abs().max()) for one, other in pairs)


def sound() -> Any:
    return [kernels.sound_kernels(here(), dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)]


def optimizers() -> Dict[str, float]:
    """How far AdamW on the device is from AdamW on the host after some steps: fused, and for sharded parameters."""
    device = here()
    usual = trained("cpu", lambda groups: torch.optim.AdamW(groups, lr=0.01))

    def off(**how: Any) -> float:
        made = trained(device.device, lambda groups: accelerator.make_adamw(
            groups, device, lr=0.01, betas=(0.9, 0.999), **how))
        return float((made - usual).abs().max())

    return {"fused": off(is_sharded=False), "sharded": off(is_sharded=True)}


def trained(device: Any, make: Any) -> torch.Tensor:
    chance = torch.Generator().manual_seed(2)
    weight, bias = (torch.nn.Parameter(torch.randn(shape, generator=chance).to(device)) for shape in ((5, 3), (3,)))
    optimizer = make([{"params": [weight], "weight_decay": 0.1}, {"params": [bias], "weight_decay": 0.0}])
    for step in range(4):
        x = torch.arange(10.0).view(2, 5).to(device) / (step + 1)
        ((x @ weight + bias) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return weight.detach().cpu()


def scaler() -> Any:
    """The scale before, after a sound step, after an overflow."""
    device = here()
    scaler = accelerator.make_scaler(device, accelerator.choose_precision("float16", device))
    weight = torch.nn.Parameter(torch.ones(5, device=device.device))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scales = [scaler.get_scale()]
    for slope in (1.0, float("inf")):
        optimizer.zero_grad()
        scaler.scale((weight * slope).sum()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return [*scales, weight.tolist()]


def memory() -> Dict[str, Any]:
    """What is said when more is wanted than a device has, and what can be had after it."""
    device = here()
    held = [torch.empty(512 << 20, dtype=torch.uint8, device=device.device)]
    try:
        torch.empty(1 << 30, dtype=torch.uint8, device=device.device)
        said = ""
    except RuntimeError as error:
        said = f"{type(error).__name__}: {error}" if device.is_out_of_memory(error) else f"not recognised: {error}"
    held.clear()
    device.empty_cache()
    again = torch.empty(600 << 20, dtype=torch.uint8, device=device.device)
    again[-1] = 7
    return {"said": said, "total": device.memory_total_bytes(), "again": int(again[-1])}


def collectives() -> Dict[str, Any]:
    """Each collective's answer on this rank, in plain numbers."""
    device = here()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    control = distributed.join(rank, world, device.backend, 60.0)
    at, found = device.device, {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8):
        for how in ("SUM", "PRODUCT", "MAX", "MIN"):
            numbers = ((torch.arange(1003) % 7 + rank + 1) % 5 + 1).to(dtype).to(at)
            dist.all_reduce(numbers, getattr(dist.ReduceOp, how))
            found[f"{how} {dtype}"] = numbers.cpu().double().sum().item()
    mine = torch.arange(10.0).to(at) + rank

    def made(count: int, act: Any) -> List[float]:
        answer = torch.zeros(count, device=at)
        act(answer)
        return [float(number) for number in answer.cpu()]

    parts = [torch.full((2,), float(i)).to(at) for i in range(world)] if rank == 0 else None
    found["gather"] = made(10 * world, lambda out: dist.all_gather_into_tensor(out, mine))
    ramp = torch.arange(20.0 * world).to(at) * (rank + 1)
    found["reduce scatter"] = made(5, lambda out: dist.reduce_scatter_tensor(out, ramp[:5 * world]))
    found["broadcast"] = made(3, lambda out: dist.broadcast(out.fill_(rank), 1))
    total = made(3, lambda out: dist.reduce(out.fill_(rank + 1), 0))
    found["reduce"] = total if rank == 0 else None
    found["scatter"] = made(2, lambda out: dist.scatter(out, parts, 0))
    found["all to all"] = made(4 * world, lambda out: dist.all_to_all_single(out, ramp[:4 * world]))
    shares = [1 + i for i in range(world)]
    uneven = torch.arange(float(sum(shares))).to(at) + 10 * rank
    found["all to all v"] = made((1 + rank) * world,
                                 lambda out: dist.all_to_all_single(out, uneven, [1 + rank] * world, shares))
    if rank == 0:
        dist.send(mine, 1)
    elif rank == 1:
        found["receive"] = made(10, lambda out: dist.recv(out, 0))
    found["ring"] = made(10, lambda out: [work.wait() for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, mine, (rank + 1) % world), dist.P2POp(dist.irecv, out, (rank - 1) % world)])])
    part = dist.new_group([0, 1])
    if rank < 2:
        found["part"] = made(1, lambda out: dist.all_reduce(out.fill_(rank + 1.0), group=part))
    objects: List[Any] = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    dist.barrier(group=control)
    return {**found, "objects": objects}


def disagree() -> None:
    """Ranks that reduce different amounts."""
    device = here()
    rank = int(os.environ["RANK"])
    distributed.join(rank, int(os.environ["WORLD_SIZE"]), device.backend, 60.0)
    numbers = torch.ones(4 + rank, device=device.device)
    dist.all_reduce(numbers)
    numbers.sum().item()


def names(path: str) -> List[str]:
    """Those of the names in this file, [dotted name, keywords], that the real module does not have so."""
    import inspect

    import torch_npu
    wrong = []
    for name, keywords in json.loads(Path(path).read_text()):
        found: Any = torch_npu
        try:
            for part in name.split(".")[1:]:
                found = getattr(found, part)
        except AttributeError:
            wrong.append(f"{name}: absent")
            continue
        wrong += [f"{name}: takes no {keyword}" for keyword in keywords if not takes(found, keyword, inspect)]
    return wrong


def takes(function: Any, keyword: str, inspect: Any) -> bool:
    if hasattr(function, "overloads"):  # an operator of torch.ops
        return any(keyword in {argument.name for argument in getattr(function, name)._schema.arguments}
                   for name in function.overloads())
    parameters = inspect.signature(function).parameters.values()
    return any(each.name == keyword or each.kind is each.VAR_KEYWORD for each in parameters)
