"""Progress in what trainings print: real outputs with their rows, and real outputs without any step."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from ascendrun.core.logs.progress import ProgressReader, merge_rows
from ascendrun.core.logs.progress_lines import find_lines, find_world_size

RECORDINGS = Path(__file__).parents[3] / "recordings" / "progress"
HELD_OUT = {
    "held_out.yaml": "453431b7819dac6de41096e9fb9dd0e7bc837c6292b2375906ee36e75b6bf230",
    "held_out_2.yaml": "0cc8947eb5f9cb89b7c25efa048aa58bebf362ec0cb8cdd8c6724c3b366682c0",
    "held_out_3.yaml": "d213b6cf8cbceb905628353c287002d996adcb29521c2471eedb822d31ddbc59",
}
"""Of the rows that were written down before the first pattern, and before any pattern was tried on them."""
REAL_RUNS = {"real_runs.yaml": "0ddc0b713e2c560ac890e60be9ddd2fb81a375e446df1eb3d118c853ec6c1bd7"}
"""Of whole outputs, with the steps and losses that a counter in the script counted."""
SHORT = {
    "s": "step",
    "t": "total_steps",
    "l": "loss",
    "lr": "learning_rate",
    "g": "grad_norm",
    "e": "epoch",
    "sps": "samples_per_s",
    "tps": "tokens_per_s",
}


def read_all(text: str, pattern: str | None = None) -> list[dict[str, Any]]:
    """Return the rows of an output, one for each step in succession."""
    reader = ProgressReader(pattern)
    rows = [
        row
        for _, line in find_lines(text.encode(), at_start=True, is_any=reader.reads_any_line)
        for row in reader.read(line)
    ]
    return merge_rows(rows + reader.flush())


def entries(name: str) -> list[Any]:
    rows = yaml.safe_load((RECORDINGS / name).read_text(encoding="utf-8"))
    return [pytest.param(row, id=f"{row.get('framework', 'text')}-{number}") for number, row in enumerate(rows)]


def same(found: Any, expected: Any) -> bool:
    if expected is None or found is None:
        return found is expected
    expected = float(expected)
    return (math.isnan(found) and math.isnan(expected)) or math.isclose(found, expected, rel_tol=1e-3, abs_tol=1e-12)


@pytest.mark.parametrize("entry", [entry for name in (*HELD_OUT, "steps.yaml") for entry in entries(name)])
def test_step_and_loss_are_right_on_every_line(entry: dict[str, Any]) -> None:
    found = read_all(entry["text"])
    expected = [{SHORT[key]: value for key, value in row.items()} for row in entry["rows"]]
    assert len(found) == len(expected), found
    for row, wanted in zip(found, expected):
        for key in {"step", "loss", *wanted}:
            assert same(row.get(key), wanted.get(key)), (key, row, wanted)


@pytest.mark.parametrize(("name", "sha256"), {**HELD_OUT, **REAL_RUNS}.items())
def test_what_was_set_aside_is_as_it_was_then(name: str, sha256: str) -> None:
    assert hashlib.sha256((RECORDINGS / name).read_bytes()).hexdigest() == sha256


@pytest.mark.parametrize("entry", entries("real_runs.yaml"))
def test_steps_and_losses_of_real_runs_are_those_that_were_counted(entry: dict[str, Any]) -> None:
    rows = read_all(entry["text"])
    assert rows and rows[-1]["step"] == entry["steps"]
    for row in rows:
        assert 0 < row["step"] <= entry["steps"] and row.get("total_steps") in (None, entry["total"]), row
        assert row.get("loss") is None or any(
            math.isclose(row["loss"], one, rel_tol=2e-3, abs_tol=6e-4) for one in losses_of(entry, row["step"])
        ), row


def losses_of(entry: dict[str, Any], step: int) -> list[float]:
    """Return the loss of a step, and the mean of its epoch up to it."""
    losses, length = entry["losses"], entry.get("per_epoch", 1)
    so_far = [losses[one] for one in range(step - (step - 1) % length, step + 1)]
    return [losses[step], math.fsum(so_far) / len(so_far)]


@pytest.mark.parametrize("entry", entries("real_runs.yaml"))
def test_the_end_of_a_real_run_is_read_right_without_what_is_between(entry: dict[str, Any]) -> None:
    text = entry["text"].encode()
    for cut in range(len(text) // 2, len(text), max(1, len(text) // 40)):
        reader = ProgressReader()
        for _, line in find_lines(text[: max(len(text) // 4, text.find(b"poch 1/2") + 300)], at_start=True)[:-1]:
            reader.read(line)
        reader.omit()
        for _, line in find_lines(text[cut:])[1:]:
            for row in reader.read(line):
                assert row.get("step") is None or (
                    row.get("loss") is None
                    or any(math.isclose(row["loss"], one, abs_tol=6e-4) for one in losses_of(entry, row["step"]))
                ), (cut, row)


HEADED = [f"Epoch {e}/3\n" + "".join(f"step {n}{{}} loss: {e}.{n}\n" for n in (5, 9)) for e in (1, 2, 3)]


@pytest.mark.parametrize(
    ("text", "steps", "total"),
    [
        ("".join(HEADED).format(*["/9"] * 6), [5, 9, 14, 18, 23, 27], 27),
        ("Epoch 1/2\nstep 5/20 loss: 2\nEpoch 2/2\nstep 15/20 loss: 1\nstep 20/20 loss: 1\n", [5, 15, 20], 20),
        ("".join(HEADED).format(*[""] * 6), [5, 9, None, None, None, None], None),
        # a second training in one program
        ("".join(HEADED[:1] * 2).replace("/3", "/1").format(*["/9"] * 4), [5, 9, None, None], None),
        # an evaluation with as many batches, in the middle of an epoch
        ("Epoch 1/2\nstep 4/9 loss: 2\nstep 1/9 loss: 7\nstep 8/9 loss: 7\nEpoch 2/2\nstep 1/9 loss: 1\n", [4, 10], 18),
        ("Epoch 4/5\nstep 4/9 loss: 2\n", [None], None),
        (" 4/9 ━━━━ 1s 20ms/step - loss: 2.5\nstep 4/9 loss\n", [], None),
    ],
)
def test_counters_below_the_heading_of_an_epoch(text: str, steps: list[int | None], total: int | None) -> None:
    found = read_all(text)
    assert [row.get("step") for row in found] == steps, found
    assert not found or found[-1].get("total_steps") == total


def test_each_framework_has_five_outputs() -> None:
    rows = [row for name in (*HELD_OUT, "steps.yaml") for row in yaml.safe_load((RECORDINGS / name).read_text("utf-8"))]
    counts = Counter(row["framework"] for row in rows)
    assert all(count >= 5 for count in counts.values()) and len(counts) == 11, counts


@pytest.mark.parametrize("entry", entries("no_steps.yaml"))
def test_no_step_is_read_from_output_without_any(entry: dict[str, Any]) -> None:
    assert read_all(entry["text"]) == []


def test_no_step_is_read_from_all_outputs_without_any_together() -> None:
    together = "\n".join(param.values[0]["text"] for param in entries("no_steps.yaml"))
    assert [row for row in read_all(together) if "step" in row] == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "[INFO|2026-11-23 17:01] llamafactory.hparams.parser:526 >> Process rank: 0, world size: 2, device: cpu, "
            "distributed training: True, compute dtype: torch.float32\n",
            2,
        ),
        ("Process rank: 0, device: cpu, n_gpu: 0, distributed training: False, 16-bits training: False\n", 1),
        ("Process rank: 0, device: npu:0, n_gpu: 1, distributed training: True, 16-bits training: False\n", None),
        (
            "11/23/2026 17:25:09 - INFO - __main__ - Distributed environment: DistributedType.NO\nNum processes: 1\n"
            "Process index: 0\nLocal process index: 0\nDevice: cpu\n",
            1,
        ),
        ("Distributed environment: DistributedType.MULTI_NPU  Backend: hccl\nNum processes: 16\n", 16),
        (
            f"{'-' * 100}\ndistributed_backend=gloo\nAll distributed processes registered. Starting with 4 processes\n",
            4,
        ),
        ("using world size: 8, data-parallel size: 8, tensor-model-parallel size: 1\n", None),
        ("run on hosts with world size: 2\nNum processes: 1\n", None),
    ],
)
def test_the_world_size_is_what_a_framework_first_prints_of_its_process_group(text: str, expected: int | None) -> None:
    assert find_world_size(("started\n" + text + "Num processes: 9\n").encode()) == expected


def test_the_pattern_of_a_job_is_the_only_one_that_counts() -> None:
    text = "batch 7 of 90 | value 2.5e-1 | lr 1e-4\niter 8: loss 3.1\n"
    pattern = r"batch (?P<step>\d+) of (?P<total_steps>\d+) \| value (?P<loss>\S+) \| lr (?P<learning_rate>\S+)"
    assert read_all(text, pattern) == [{"step": 7, "total_steps": 90, "loss": 0.25, "learning_rate": 1e-4}]


def bar(count: int, total: int, note: str, before: str = "") -> str:
    return f"{before}{100 * count // total}%|███       | {count}/{total} [00:04<00:17,  1.10it/s{note}]"


VERL = (
    "step:0 - val-aux/openai/gsm8k/reward/mean@1:0.565 - val-core/openai/gsm8k/acc/mean@1:0.508\n"
    "(TaskRunner pid=222265) step:34 - global_seqlen/min:419336 - global_seqlen/mean:458966.5 - actor/entropy:0.2226657"
    " - actor/ppo_kl:-8.163164312320433e-06 - actor/pg_loss:0.042396901015308686 - actor/kl_loss:0.0013280365410537343"
    " - actor/grad_norm:0.129638671875 - actor/lr:2e-06 - training/global_step:34"
    " - training/epoch:0 - critic/score/max:1.0\n"
)
TABLE = """---------------------------------------
| rollout/                |           |
|    ep_len_mean          | 200       |
| time/                   |           |
|    fps                  | 8507      |
|    iterations           | 18        |
|    total_timesteps      | 73728     |
| train/                  |           |
|    entropy_loss         | -1.25     |
|    learning_rate        | 0.001     |
|    loss                 | 0.482     |
|    value_loss           | 0.777     |
---------------------------------------
"""
RICH = "Epoch 2/2  ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━ 16/16 0:00:00 • 0:00:00 64.77it/s "


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        (RICH + "\n", [(48, None)]),
        (RICH + "v_num: 1.000\n", [(48, None)]),
        (VERL, [(34, 0.042397)]),
        (TABLE + TABLE.replace("73728", "77824"), [(73728, 0.482), (77824, 0.482)]),
        (TABLE[: TABLE.index("| train/")], [(73728, None)]),
        # minGPT: the description of a bar for each epoch, which it counts from 1
        (
            "\r".join(
                bar(n, 230, "", f"epoch {e} iter {n - 1}: train loss {e}.{n}. lr 6e-4: ")
                for e in (1, 2, 3)
                for n in (99, 230)
            ),
            [(99, 1.99), (230, 1.23), (329, 2.99), (460, 2.23), (559, 3.99), (690, 3.23)],
        ),
        # a counter that begins again in each epoch, of unknown length
        (
            "".join(f"epoch {e} step {n}: loss {e}.{n}\n" for e in (0, 1, 2) for n in (0, 200)),
            [(0, 0.0), (200, 0.2), (None, 1.0), (None, 1.2), (None, 2.0), (None, 2.2)],
        ),
        (
            "".join(f"epoch {e} step {n}/230: loss {e}.5\n" for e in (0, 1) for n in (10, 230)),
            [(10, 0.5), (230, 0.5), (240, 1.5), (460, 1.5)],
        ),
        ("".join(f"Epoch {e} | Step {e * 50} | loss 1.{e}\n" for e in (1, 2, 3)), [(50, 1.1), (100, 1.2), (150, 1.3)]),
        # a bar without a name for each epoch
        (
            "\r".join(bar(n, 230, f", loss=2.{i}") for i, n in enumerate((99, 230, 10, 99))),
            [(99, 2.0), (230, 2.1), (None, 2.2), (None, 2.3)],
        ),
    ],
)
def test_steps_are_counted_over_all_epochs_or_unknown(text: str, steps: list[tuple[int | None, float | None]]) -> None:
    found = read_all(text)
    assert [row.get("step") for row in found] == [step for step, _ in steps], found
    assert all(same(row.get("loss"), loss) for row, (_, loss) in zip(found, steps)), found
