"""What one rank looks at on a simulated device: checks.main(["name"]) runs it and ends the process."""

import contextlib
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

from ascendrun.programs.devices import accelerator, attention, kernels
from ascendrun.programs.trainer import distributed


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
    row = (2, 4, 9, 8)
    cases: dict[str, Any] = {
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


CALLS = ("input_layout", "sparse_mode", "pre_tockens", "next_tockens", "actual_seq_qlen", "actual_seq_kvlen")


def attention_cases(dtype: str) -> dict[str, Any]:
    """{case: (largest difference from the formula, what the operator was called with, the case)}."""
    import torch_npu
    from attentioncases import CASES, largest_difference

    device, operator, calls = here(), torch_npu.npu_fusion_attention, []

    def recorded(q: Any, k: Any, v: Any, heads: int, layout: str, **given: Any) -> Any:
        calls.append({name: value for name, value in {"input_layout": layout, **given}.items() if name in CALLS})
        return operator(q, k, v, heads, layout, **given)

    assert "attention" in kernels.sound_kernels(device, getattr(torch, dtype))[0]
    torch_npu.npu_fusion_attention = recorded
    found = {}
    for case in CASES:
        calls.clear()
        off = largest_difference(case, device.device, getattr(torch, dtype))
        found[case] = off, list(calls), CASES[case]
    return found


def sparse_modes() -> dict[str, Any]:
    """Whom each query attends to, by sparse mode, in calls with 3 queries and 5 keys; and what wrong calls say."""
    import torch_npu

    at = here().device
    mask = attention.compressed_mask(at)
    q, k, v = torch.zeros(1, 1, 3, 5), torch.zeros(1, 1, 5, 5), torch.eye(5)[None, None]

    def seen(*tensors: torch.Tensor, layout: str = "BNSD", **given: Any) -> Any:
        moved = [x.to(at) for x in tensors]
        answer = torch_npu.npu_fusion_attention(*moved, 1, layout, **{"atten_mask": mask, **given})[0]
        return (answer.cpu() > 0).int().flatten(0, -2).tolist()

    def refused(*tensors: torch.Tensor, **given: Any) -> str:
        try:
            seen(*tensors, **given)
        except RuntimeError as error:
            return str(error).splitlines()[0]
        return ""

    token_major = [x[0].transpose(0, 1) for x in (q, k, v)]
    own = torch.ones(3, 5, dtype=torch.bool).triu(2).to(at)
    ends = {"actual_seq_qlen": [1, 3, 0], "actual_seq_kvlen": [2, 5, 0]}
    return {
        "0": seen(q, k, v, atten_mask=own),
        "1": seen(q, k, v, atten_mask=own, sparse_mode=1),
        "2": seen(q, k, v, sparse_mode=2),
        "3": seen(q, k, v, sparse_mode=3),
        "4": seen(q, k, v, sparse_mode=4, pre_tockens=1, next_tockens=0),
        "3 without mask": seen(q, k, v, sparse_mode=3, atten_mask=None),
        "TND": seen(*token_major, layout="TND", sparse_mode=3, **ends),
        "BSND": seen(*(x.transpose(1, 2) for x in (q, k, v)), layout="BSND", sparse_mode=3),
        "refused": [
            refused(q, k, v, sparse_mode=3, atten_mask=own),
            refused(q, k, v, sparse_mode=2, atten_mask=~mask),
            refused(q, k, v, sparse_mode=5),
            refused(*token_major, layout="TND", sparse_mode=3),
            refused(*token_major, layout="TND", sparse_mode=3, actual_seq_qlen=[1, 3], actual_seq_kvlen=[2, 9]),
        ],
    }


def sound() -> Any:
    return [kernels.sound_kernels(here(), dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)]


def autocast() -> float:
    """How far fused attention in bfloat16, autocast on around it, is from its formula in float."""
    device = here()
    chance = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(2, 4, 9, 8, generator=chance).bfloat16() for _ in range(3))
    wanted = attention.formula(query.float(), key.float(), value.float(), scale=0.3)
    at = device.device
    with device.autocast(torch.bfloat16):
        found = attention.npu_attention(query.to(at), key.to(at), value.to(at), attention.Pattern(scale=0.3))
    return float((found.cpu().float() - wanted).abs().max())


def dropped() -> dict[str, float]:
    """Attention with dropout: {how far it is with the same seed, with another, in the mean from none; how far the
    gradients are from the slopes of the answer, relative}."""
    device = here()
    chance = torch.Generator().manual_seed(1)
    query, key, value, way, weight = (torch.randn(2, 2, 9, 8, generator=chance).to(device.device) for _ in range(5))

    def answer(q: torch.Tensor, v: torch.Tensor, *, seed: int = 1, dropout: float = 0.3) -> torch.Tensor:
        device.seed(seed)
        return attention.npu_attention(q, key, v, attention.Pattern(causal=False, scale=0.3, dropout=dropout))

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
    made = (Classifier(folder, device=family, dtype="float32") for family in ("npu", "cpu"))
    said = [each.predict_batch(texts, return_probs=True) for each in made]
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


def lightning() -> dict[str, Any]:
    """What Lightning chooses for an NPU by itself, and with the plugin."""
    import pytorch_lightning as pl
    from torch.utils.data import DataLoader

    import ascendrun.lightning as plugin

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    alone = pl.Trainer(accelerator=plugin.NPUAccelerator(), devices=1, precision="16-mixed", **quiet)
    given = pl.Trainer(**plugin.settings(precision="16"), **quiet)
    loader = DataLoader([1, 2], num_workers=1)
    given.strategy.process_dataloader(loader)
    return {
        "alone": [str(alone.strategy.root_device), alone.precision_plugin.device],
        "settings": [str(given.strategy.root_device), given.precision_plugin.device],
        "start_method": loader.multiprocessing_context.get_start_method(),
        "named": pl.Trainer(accelerator="npu", devices=1, **quiet).accelerator.is_available(),
    }


def streams() -> dict[str, int]:
    """How many CUDA streams a training under DDP asks for, with the plugin and with Lightning's own strategy."""
    import pytorch_lightning as pl
    from torch.utils.data import DataLoader

    import ascendrun.lightning as plugin

    class Line(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Linear(1, 1)

        def training_step(self, batch: Any, number: int) -> Any:
            return self.weight(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    asked: list[int] = []

    class Stream(torch.cuda.Stream):
        def __new__(cls, *given: Any, **named: Any) -> Any:
            asked.append(1)
            raise NotImplementedError("no CUDA on this machine")

    torch.cuda.Stream = Stream  # type: ignore[misc]
    own = {
        "accelerator": plugin.NPUAccelerator(),
        "devices": int(os.environ["WORLD_SIZE"]),
        "plugins": [plugin.LaunchedEnvironment(os.environ)],
        "strategy": pl.strategies.DDPStrategy(process_group_backend="hccl"),
    }
    found = {}
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_steps": 1}
    for name, chosen in (("plugin", plugin.settings(precision="32")), ("lightning", own)):
        asked.clear()
        trainer = pl.Trainer(**chosen, **quiet, enable_model_summary=False)
        with contextlib.suppress(NotImplementedError):
            trainer.fit(Line(), DataLoader(torch.ones(4, 1)))
            assert trainer.global_step == 1
        found[name] = len(asked)
    return found


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
