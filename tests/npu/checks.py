"""What one rank looks at on a simulated device: checks.main(["name"]) runs it and ends the process."""

from __future__ import annotations

import inspect
import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ascendrun.programs.trainer import distributed
from ascendrun.programs.trainer.devices import accelerator, kernels


def main(argv: list[str]) -> None:
    try:
        answer = globals()[argv[0]](*argv[1:])
        Path(f"answer-{os.environ['RANK']}.json").write_text(json.dumps(answer))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def here() -> accelerator.Accelerator:
    return accelerator.open_accelerator(os.environ["ASCENDRUN_DEVICE_TYPE"], int(os.environ["LOCAL_RANK"]))


def fused() -> dict[str, float]:
    """The largest difference of answers and gradients from the formula, by operator."""
    device = here().device
    hidden = torch.ones(9, 9, dtype=torch.bool).triu(1).expand(2, 1, 9, 9).contiguous()
    row = (2, 4, 9, 8)
    cases: dict[str, Any] = {
        "attention": (
            lambda q, k, v: kernels.npu_attention(q, k, v, hidden.to(q.device), scale=0.3),
            lambda q, k, v: kernels.attention_formula(q, k, v, hidden, scale=0.3),
            row,
            (2, 2, 9, 8),
            (2, 2, 9, 8),
        ),
        "rms_norm": (
            lambda x, w: kernels.npu_rms_norm(x, w, 1e-6),
            lambda x, w: kernels.rms_norm_formula(x, w, 1e-6),
            (2, 5, 8),
            (8,),
        ),
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


def autocast() -> float:
    """How far fused attention in bfloat16, autocast on around it, is from its formula in float."""
    device = here()
    chance = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(2, 4, 9, 8, generator=chance).bfloat16() for _ in range(3))
    hidden = torch.ones(9, 9, dtype=torch.bool).triu(1).expand(2, 1, 9, 9).contiguous()
    wanted = kernels.attention_formula(query.float(), key.float(), value.float(), hidden, scale=0.3)
    at = device.device
    with device.autocast(torch.bfloat16):
        found = kernels.npu_attention(query.to(at), key.to(at), value.to(at), hidden.to(at), scale=0.3)
    return float((found.cpu().float() - wanted).abs().max())


def dropped() -> dict[str, float]:
    """Attention with dropout: {how far it is with the same seed, with another, in the mean from none; how far the
    gradients are from the slopes of the answer, relative}."""
    device = here()
    chance = torch.Generator().manual_seed(1)
    query, key, value, way, weight = (torch.randn(2, 2, 9, 8, generator=chance).to(device.device) for _ in range(5))

    def answer(q: torch.Tensor, v: torch.Tensor, *, seed: int = 1, dropout: float = 0.3) -> torch.Tensor:
        device.seed(seed)
        return kernels.npu_attention(q, key, v, None, scale=0.3, dropout=dropout)

    first = answer(query, value)
    mean = torch.stack([answer(query, value, seed=seed) for seed in range(100)]).mean(0)
    leaves = query.clone().requires_grad_(), value.clone().requires_grad_()
    (answer(*leaves) * weight).sum().backward()
    step = 1e-2
    slopes = [
        ((answer(query + step * way, value) - answer(query - step * way, value)) * weight).sum() / (2 * step),
        (first * weight).sum(),
    ]  # the answer is linear in the values
    found = [(leaves[0].grad * way).sum(), (leaves[1].grad * value).sum()]
    return {
        "same": float((answer(query, value) - first).abs().max()),
        "other": float((answer(query, value, seed=2) - first).abs().max()),
        "mean": float((mean - answer(query, value, dropout=0.0)).abs().max()),
        "gradients": max(float((one / other - 1).abs()) for one, other in zip(found, slopes)),
    }


def optimizers() -> dict[str, float]:
    """How far AdamW on the device is from AdamW on the host after some steps: fused, and for sharded parameters."""
    device = here()
    usual = trained("cpu", lambda groups: torch.optim.AdamW(groups, lr=0.01))

    def off(**how: Any) -> float:
        made = trained(
            device.device, lambda groups: accelerator.make_adamw(groups, device, lr=0.01, betas=(0.9, 0.999), **how)
        )
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


def memory() -> dict[str, Any]:
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


def classifier(folder: str) -> Any:
    """How far the probabilities of some tracks on the device are from those on the host; the class names of both."""
    from ascendrun.programs.trajectory.api import Classifier
    from ascendrun.programs.trajectory.grammars import as_texts
    from ascendrun.programs.trajectory.points.generate import generate

    texts = [words.text() for words in as_texts(generate(6, seed=9), grammar="motion", resolution=10)]
    here()
    said = [Classifier(folder, device=family).predict_batch(texts, return_probs=True) for family in ("npu", "cpu")]
    off = max(
        abs(one["probabilities"][name] - share)
        for one, other in zip(*said)
        for name, share in other["probabilities"].items()
    )
    return [off, *([each["class_name"] for each in answers] for answers in said)]


def collectives() -> dict[str, Any]:
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

    def made(count: int, act: Any) -> list[float]:
        answer = torch.zeros(count, device=at)
        act(answer)
        return [float(number) for number in answer.cpu()]

    parts = [torch.full((2,), float(i)).to(at) for i in range(world)] if rank == 0 else None
    found["gather"] = made(10 * world, lambda out: dist.all_gather_into_tensor(out, mine))
    ramp = torch.arange(20.0 * world).to(at) * (rank + 1)
    found["reduce scatter"] = made(5, lambda out: dist.reduce_scatter_tensor(out, ramp[: 5 * world]))
    found["broadcast"] = made(3, lambda out: dist.broadcast(out.fill_(rank), 1))
    total = made(3, lambda out: dist.reduce(out.fill_(rank + 1), 0))
    found["reduce"] = total if rank == 0 else None
    found["scatter"] = made(2, lambda out: dist.scatter(out, parts, 0))
    found["all to all"] = made(4 * world, lambda out: dist.all_to_all_single(out, ramp[: 4 * world]))
    shares = [1 + i for i in range(world)]
    uneven = torch.arange(float(sum(shares))).to(at) + 10 * rank
    found["all to all v"] = made(
        (1 + rank) * world, lambda out: dist.all_to_all_single(out, uneven, [1 + rank] * world, shares)
    )
    if rank == 0:
        dist.send(mine, 1)
    elif rank == 1:
        found["receive"] = made(10, lambda out: dist.recv(out, 0))
    found["ring"] = made(
        10,
        lambda out: [
            work.wait()
            for work in dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, mine, (rank + 1) % world), dist.P2POp(dist.irecv, out, (rank - 1) % world)]
            )
        ],
    )
    part = dist.new_group([0, 1])
    if rank < 2:
        found["part"] = made(1, lambda out: dist.all_reduce(out.fill_(rank + 1.0), group=part))
    objects: list[Any] = [None] * world
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


def names(path: str) -> list[str]:
    """Those of the names in this file, [dotted name, [[positional, keywords], …]], that the real module does not have,
    or does not take so."""
    wrong = []
    for name, calls in json.loads(Path(path).read_text()):
        try:
            found = look_up(name)
        except (AttributeError, ImportError):
            wrong.append(f"{name}: absent")
            continue
        wrong += [
            f"{name}: does not take {positional} and {keywords}"
            for positional, keywords in calls
            if not takes(found, positional, keywords)
        ]
    return wrong


def look_up(name: str) -> Any:
    import importlib

    import torch_npu

    found: Any = torch_npu
    at = "torch_npu"
    for part in name.split(".")[1:]:
        at = f"{at}.{part}"
        found = getattr(found, part) if hasattr(found, part) else importlib.import_module(at)
    return found


def takes(function: Any, positional: int, keywords: Sequence[str]) -> bool:
    if hasattr(function, "overloads"):  # an operator of torch.ops
        return any(
            fits_schema(getattr(function, name)._schema.arguments, positional, keywords)
            for name in function.overloads()
        )
    try:
        signature = inspect.signature(function)
    except ValueError:  # of a C extension, which has none; that it is called is shown by the other tests
        return True
    try:
        signature.bind(*range(positional), **dict.fromkeys(keywords))
    except TypeError:
        return False
    return True


def fits_schema(arguments: Sequence[Any], positional: int, keywords: Sequence[str]) -> bool:
    given = {argument.name for argument in arguments[:positional]} | set(keywords)
    needed = {argument.name for argument in arguments if not argument.has_default_value()}
    return needed <= given <= {argument.name for argument in arguments}
