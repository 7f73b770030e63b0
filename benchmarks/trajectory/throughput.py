"""Real tokens a CPU second of the same training, five ways: padded to 512 as in the guides, HF Trainer with batches of
like length, this program's loop on one rank, and on two; and two runs of one rank that know nothing of each other,
side by side: the most that two ranks could reach on this machine, whose cores may share a cache or more.

    python -m benchmarks.trajectory.throughput --out benchmarks/trajectory/results/throughput.json

Every way runs in a process of its own with one thread, in turns, `--repeats` times; medians are compared. Each first
trains a few steps that do not count, for imports and buffers. CPU seconds are those of the training alone, so that a
busy machine changes them little; wall seconds are told too.

HF Trainer groups a small data set in few batches at a time (`padding` of the results), so the distance to it
shrinks as `--samples` grows: 2.0 words computed for each real one at 256 samples, 1.25 at 1024, 1.04 at 5000.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable

REPO = Path(__file__).resolve().parents[2]
WINDOW, WORDS, CLASSES, BATCH = 512, 1000, 7, 32
OPTIONS = {
    "num_train_epochs": 1,
    "random_crop_prob": 0.0,
    "token_mask_prob": 0.0,
    "dropout": 0.0,
    "load_best_model_at_end": False,
    "eval_steps": 10**6,
    "save_steps": 0,
    "logging_steps": 10**6,
    "learning_rate": 1e-4,
    "label_smoothing_factor": 0.0,
}
"""Of the program, where they are not its defaults: nothing random, evaluated or saved."""
ARMS = ("padded-to-512", "hf-trainer-grouped", "ours", "ours-two-ranks", "ours-two-runs")


def make_lengths(count: int) -> list[int]:
    """Lognormal, mean about 152, at most 512: three tenths of the guides' window."""
    import numpy as np

    drawn = np.random.default_rng(0).lognormal(mean=4.83, sigma=0.65, size=count)
    return [int(length) for length in np.clip(drawn, 10, WINDOW)]


def make_samples(count: int) -> Any:
    import numpy as np

    from ascendrun.programs.trajectory.data import Samples
    from ascendrun.programs.trajectory.tokens import SPECIAL, Encoded

    rng = np.random.default_rng(1)
    rows = [
        Encoded(rng.integers(len(SPECIAL), WORDS, length), (), int(rng.integers(0, CLASSES)))
        for length in make_lengths(count)
    ]
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *(f"w{i}" for i in range(WORDS - len(SPECIAL)))])}
    records: Any = [SimpleNamespace(ship=str(number)) for number in range(len(rows))]
    facts = {"names": [f"class{i}" for i in range(CLASSES)], "text": {}, "cleaning": {}}
    samples = Samples({"train": records}, vocabulary, facts)
    vars(samples).update(encoded={"train": rows, "val": rows[:1], "test": rows[:1]}, digest="benchmark")
    return samples


def make_sizes(arguments: argparse.Namespace) -> Any:
    from ascendrun.programs.trajectory.model import Sizes, config_of_sizes

    config = config_of_sizes(words=WORDS, hidden=arguments.hidden, layers=arguments.layers, heads=4, max_length=WINDOW)
    return Sizes(config, CLASSES, 0.0, "mean", "causal")


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def timed(work: Callable[[], None], tokens: int) -> dict[str, float]:
    began, wall = cpu_s(), time.monotonic()
    work()
    return {"tokens": tokens, "cpu_s": cpu_s() - began, "wall_s": time.monotonic() - wall}


def padded(arguments: argparse.Namespace) -> dict[str, float]:
    """What the guides do: every sample padded to the window, batches drawn at random, a mask over the padding."""
    import torch
    from torch.nn import functional

    from ascendrun.programs.trajectory.model import make_model, pad

    samples, model = make_samples(arguments.samples), make_model(make_sizes(arguments), seed=0)
    model.backbone.config._attn_implementation = "sdpa"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    rows = samples.encoded["train"]

    def work(most: int = len(rows)) -> None:
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()[:most]
        for first in range(0, len(order), BATCH):
            batch = [rows[i] for i in order[first : first + BATCH]]
            ids, lengths = pad([row.ids() for row in batch], multiple=WINDOW)
            mask = (torch.arange(WINDOW)[None, :] < lengths[:, None]).long()
            states = model.backbone(inputs_embeds=model.backbone.embed_tokens(ids), attention_mask=mask)[0]
            pooled = (states * mask[..., None]).sum(1) / lengths[:, None]
            loss = functional.cross_entropy(model.head(pooled), torch.tensor([row.label for row in batch]))
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    work(BATCH)
    return timed(work, sum(map(len, rows)))


def hf_trainer(arguments: argparse.Namespace) -> dict[str, float]:
    import torch
    from torch.nn import functional
    from transformers import Trainer, TrainingArguments

    from ascendrun.programs.trajectory.model import make_model, pad

    samples = make_samples(arguments.samples)
    reader = make_model(make_sizes(arguments), seed=0)
    reader.backbone.config._attn_implementation = "sdpa"

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.reader = reader

        def forward(self, input_ids: Any, lengths: Any, labels: Any) -> dict[str, Any]:
            mask = (torch.arange(input_ids.shape[1])[None, :] < lengths[:, None]).long()
            states = reader.backbone(inputs_embeds=reader.backbone.embed_tokens(input_ids), attention_mask=mask)[0]
            logits = reader.head((states * mask[..., None]).sum(1) / lengths[:, None])
            return {"loss": functional.cross_entropy(logits, labels), "logits": logits}

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        ids, lengths = pad([row["input_ids"] for row in rows], multiple=1)
        return {"input_ids": ids, "lengths": lengths, "labels": torch.tensor([row["labels"] for row in rows])}

    rows = [{"input_ids": row.ids(), "labels": row.label} for row in samples.encoded["train"]]
    with tempfile.TemporaryDirectory() as folder:
        grouped: dict[str, Any] = {"train_sampling_strategy": "group_by_length"}
        if "train_sampling_strategy" not in TrainingArguments.__dataclass_fields__:
            grouped = {"group_by_length": True}
        settings = TrainingArguments(
            output_dir=folder,
            num_train_epochs=1,
            per_device_train_batch_size=BATCH,
            learning_rate=1e-4,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            remove_unused_columns=False,
            logging_strategy="no",
            **grouped,
        )
        model = Model()
        Trainer(model=model, args=settings, train_dataset=rows[: 2 * BATCH], data_collator=collate).train()
        trainer = Trainer(model=model, args=settings, train_dataset=rows, data_collator=collate)
        return timed(lambda: trainer.train() and None, sum(len(row["input_ids"]) for row in rows))


def ours(arguments: argparse.Namespace) -> dict[str, float]:
    """The program's own training loop, as it is started; the rank's tokens and CPU seconds are summed over ranks."""
    from ascendrun.programs.trainer import options as option_table
    from ascendrun.programs.trainer import runtime
    from ascendrun.programs.trajectory.__main__ import OPTIONS as TABLE
    from ascendrun.programs.trajectory.model import make_model
    from ascendrun.programs.trajectory.train import make_loop

    samples, answer = make_samples(arguments.samples), {}
    options = {**option_table.parse([], option_table.read_table(TABLE)), **OPTIONS, "global_batch_size": BATCH}
    here = runtime.start(family="cpu")
    with tempfile.TemporaryDirectory() as folder:
        make_loop(
            {**options, "max_steps": 2}, samples, make_model(make_sizes(arguments), seed=0), here, Path(folder) / "warm"
        ).run()
        loop = make_loop(options, samples, make_model(make_sizes(arguments), seed=0), here, Path(folder))
        answer = timed(lambda: loop.run() and None, sum(map(len, samples.encoded["train"])))
        answer["cpu_s"] = here.sum([answer["cpu_s"]])[0]
        runtime.leave(here)
    return answer


def run_arm(arm: str, arguments: argparse.Namespace, port: int) -> dict[str, float]:
    processes = 2 if arm in ("ours-two-ranks", "ours-two-runs") else 1
    argv = [
        sys.executable,
        "-m",
        "benchmarks.trajectory.throughput",
        "--arm",
        arm,
        "--samples",
        str(arguments.samples),
        "--hidden",
        str(arguments.hidden),
        "--layers",
        str(arguments.layers),
    ]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
    running = [
        subprocess.Popen(
            argv,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPO,
            env={
                **environ,
                **(
                    {}
                    if arm != "ours-two-ranks"
                    else {
                        "RANK": str(rank),
                        "LOCAL_RANK": str(rank),
                        "WORLD_SIZE": "2",
                        "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": str(port),
                    }
                ),
            },
        )
        for rank in range(processes)
    ]
    told = [process.communicate()[0] for process in running]
    if any(process.returncode for process in running):
        raise SystemExit(f"{arm} failed: {[process.returncode for process in running]}")
    answers = [dict(json.loads(text.splitlines()[-1])) for text in told]
    if arm != "ours-two-runs":
        return answers[0]
    return {
        "tokens": sum(answer["tokens"] for answer in answers),
        "cpu_s": sum(answer["cpu_s"] for answer in answers),
        "wall_s": max(answer["wall_s"] for answer in answers),
    }


def summary(runs: dict[str, list[dict[str, float]]]) -> tuple[dict[str, Any], dict[str, float]]:
    arms = {}
    for arm, each in runs.items():
        arms[arm] = {
            "tokens_per_cpu_s": statistics.median(run["tokens"] / run["cpu_s"] for run in each),
            "tokens_per_wall_s": statistics.median(run["tokens"] / run["wall_s"] for run in each),
            "runs": each,
        }
    speed = {arm: float(told["tokens_per_cpu_s"]) for arm, told in arms.items()}  # type: ignore[arg-type]
    wall = {arm: float(told["tokens_per_wall_s"]) for arm, told in arms.items()}  # type: ignore[arg-type]
    return arms, {
        "ours / padded to 512": speed["ours"] / speed[ARMS[0]],
        "ours / HF Trainer, grouped by length": speed["ours"] / speed[ARMS[1]],
        "two ranks / one, by CPU seconds": 2 * speed["ours-two-ranks"] / speed["ours"],
        "two ranks / one, by wall clock": wall["ours-two-ranks"] / wall["ours"],
        "two runs side by side / one, by wall clock": wall["ours-two-runs"] / wall["ours"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arm", choices=ARMS)
    parser.add_argument("--samples", type=int, default=384)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.arm:
        work = {"padded-to-512": padded, "hf-trainer-grouped": hf_trainer}.get(arguments.arm, ours)
        import torch

        torch.set_num_threads(1)
        print(json.dumps(work(arguments)), flush=True)
        os._exit(0)
    runs: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    load = os.getloadavg()
    for repeat in range(arguments.repeats):
        for place, arm in enumerate(reversed(ARMS)):
            runs[arm].append(run_arm(arm, arguments, 29700 + 10 * repeat + place))
            print(arm, {name: round(value, 2) for name, value in runs[arm][-1].items()}, file=sys.stderr, flush=True)
        text = as_json(runs, arguments, load)
        if arguments.out:
            arguments.out.write_text(text + "\n", encoding="utf-8")
    print(text)


def as_json(runs: dict[str, list[dict[str, float]]], arguments: argparse.Namespace, load: tuple[float, ...]) -> str:
    import torch
    import transformers

    arms, ratios = summary(runs)
    return json.dumps(
        {
            "ratios": {name: round(value, 2) for name, value in ratios.items()},
            "arms": arms,
            "model": f"Qwen2, hidden {arguments.hidden} x {arguments.layers} layers",
            "samples": arguments.samples,
            "mean_length": statistics.mean(make_lengths(arguments.samples)),
            "batch": BATCH,
            "padding": padding_of(arguments.samples),
            "load_average": [round(each, 1) for each in (*load, *os.getloadavg())],
            "cores": os.cpu_count(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        indent=1,
    )


def padding_of(count: int) -> dict[str, float]:
    """Words that are computed for each real one, by the way of batching."""
    import torch
    from transformers.trainer_pt_utils import get_length_grouped_indices

    from ascendrun.programs.trainer.data import Buckets, deal
    from ascendrun.programs.trajectory.rules import CPU_MICRO_TOKENS

    lengths = make_lengths(count)
    grouped = get_length_grouped_indices(lengths, BATCH, generator=torch.Generator().manual_seed(0))
    plan = Buckets(lengths, batch_size=BATCH, seed=7)
    passes = [
        [number for unit in piece for number in unit]
        for step in range(plan.steps_per_epoch)
        for piece in deal(plan.units(step), 0, 1, micro_tokens=CPU_MICRO_TOKENS, length_of=plan.length_of)
    ]
    ways = {
        ARMS[0]: [[number] for number in range(count)],
        ARMS[2]: passes,
        ARMS[1]: [grouped[i : i + BATCH] for i in range(0, count, BATCH)],
    }
    widths = {
        arm: sum(len(each) * (WINDOW if arm == ARMS[0] else max(lengths[i] for i in each)) for each in batches)
        for arm, batches in ways.items()
    }
    return {arm: round(width / sum(lengths), 3) for arm, width in widths.items()}


if __name__ == "__main__":
    main()
