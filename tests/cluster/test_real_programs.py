"""Programs of others, unchanged, over two virtual hosts with two ranks each.

They and what they import are not part of this project. Two variables name them, and without them the tests are skipped:

    REAL_PYTHON    a Python with llamafactory (which has transformers, datasets, trl, accelerate) and lightning
    REAL_PROGRAMS  a directory with copies of the repositories nanoGPT, examples (PyTorch), diffusers and
                   pytorch-lightning
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import random
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, Callable

import pytest
from scenes import Scene, await_that

from ascendrun.head.spool.metrics_reader import find_progress, iter_lines

PYTHON, PROGRAMS = os.environ.get("REAL_PYTHON", ""), Path(os.environ.get("REAL_PROGRAMS", "/nonexistent"))
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON or not PROGRAMS.is_dir(), reason="REAL_PYTHON and REAL_PROGRAMS are not set"),
]
SOON_S = 10.0
WORDS = "the calm sea rises over a stone and then falls to sand under grey birds".split()
MODEL = """
import sys
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
folder, words = sys.argv[1], sys.argv[2:]
tokenizer = Tokenizer(WordLevel({word: n for n, word in enumerate(["<eos>", "<unk>", *words])}, unk_token="<unk>"))
tokenizer.pre_tokenizer = Whitespace()
made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>", pad_token="<eos>")
made.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
made.save_pretrained(folder)
sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2)
config = LlamaConfig(vocab_size=len(words) + 2, eos_token_id=0, pad_token_id=0, **sizes)
LlamaForCausalLM(config).save_pretrained(folder)
"""

IMAGES = """
import sys
from PIL import Image
for number in range(400):
    Image.new("RGB", (16, 16), (number % 256, 100, 50)).save(f"{sys.argv[1]}/{number}.png")
"""


@pytest.fixture
def scene(scene_of: Callable[..., Scene]) -> Scene:
    return scene_of(2, disk="1G")


def text_of(lines: int, words: int = 12) -> list[str]:
    luck = random.Random(1)
    return [" ".join(luck.choice(WORDS) for _ in range(words)) for _ in range(lines)]


def make_model(folder: Path) -> None:
    subprocess.run([PYTHON, "-c", MODEL, folder, *WORDS], check=True, timeout=300)


def copy(code: Path, *paths: str) -> None:
    for path in paths:
        assert (PROGRAMS / path).exists(), f"REAL_PROGRAMS has no {path}"
        shutil.copy(PROGRAMS / path, code / Path(path).name)


# ---------------------------------------------------------------- the programs


def nanogpt(code: Path) -> list[str]:
    copy(code, "nanoGPT/train.py", "nanoGPT/model.py", "nanoGPT/configurator.py")
    data = code / "data" / "letters"
    data.mkdir(parents=True)
    luck = random.Random(1)
    for name in ("train.bin", "val.bin"):
        (data / name).write_bytes(b"".join(luck.randrange(65).to_bytes(2, "little") for _ in range(20000)))
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 65}))
    sizes = "batch_size=8 block_size=32 n_layer=2 n_head=2 n_embd=64 gradient_accumulation_steps=4 max_iters=100"
    more = "dataset=letters compile=False dtype=float32 eval_interval=100 eval_iters=2 log_interval=5 backend=gloo"
    return [
        "python",
        "train.py",
        *(f"--{option}" for option in f"{sizes} {more}".replace("letters", "'letters'").split()),
    ]


def multinode(code: Path) -> list[str]:
    series = "examples/distributed/ddp-tutorial-series"
    copy(code, f"{series}/multinode.py", f"{series}/datautils.py")
    return ["python", "multinode.py", "60", "20"]


def trainer(code: Path) -> list[str]:
    make_model(code / "model")
    script = subprocess.run(
        [PYTHON, "-c", "import trl.scripts.sft as it; print(it.__file__)"], check=True, capture_output=True, text=True
    ).stdout.strip()
    shutil.copy(script.splitlines()[-1], code / "sft.py")
    (code / "texts").mkdir()
    rows = "".join(json.dumps({"text": line}) + "\n" for line in text_of(4000))
    (code / "texts" / "train.jsonl").write_text(rows)
    options = "--model_name_or_path model --dataset_name texts --output_dir out --max_steps 150 --logging_steps 5"
    return ["python", "sft.py", *options.split(), "--use_cpu", "true", "--bf16", "false", "--report_to", "none"]


def accelerate(code: Path) -> list[str]:
    copy(code, "diffusers/examples/unconditional_image_generation/train_unconditional.py")
    (code / "images").mkdir()
    subprocess.run([PYTHON, "-c", IMAGES, code / "images"], check=True, timeout=300)
    blocks = {"down_block_types": ["DownBlock2D"] * 2, "up_block_types": ["UpBlock2D"] * 2, "layers_per_block": 1}
    sizes = {
        "sample_size": 16,
        "in_channels": 3,
        "out_channels": 3,
        "block_out_channels": [32, 32],
        "norm_num_groups": 8,
    }
    (code / "unet").mkdir()
    (code / "unet" / "config.json").write_text(json.dumps({"_class_name": "UNet2DModel", **blocks, **sizes}))
    options = (
        "--train_data_dir images --resolution 16 --train_batch_size 2 --num_epochs 3 --model_config_name_or_path unet"
    )
    more = "--ddpm_num_steps 10 --ddpm_num_inference_steps 2 --save_images_epochs 100 --output_dir out"
    return ["python", "train_unconditional.py", *f"{options} {more}".split()]


def lightning(code: Path) -> list[str]:
    copy(code, "pytorch-lightning/examples/pytorch/basics/transformer.py")
    (code / "data").mkdir()
    (code / "data" / "wikitext-2.txt").write_text("\n".join(text_of(5200, 35)))
    return ["python", "transformer.py"]


@dataclasses.dataclass(frozen=True)
class Program:
    """`total`, `loss`: whether its output states them. `stops`: it is stopped when its progress was seen."""

    make: Callable[[Path], list[str]]
    launcher: str = "torchrun"
    env: tuple[str, ...] = ()
    pattern: str | None = None
    total: bool = True
    loss: bool = True
    stops: bool = False


ON_CPU = (f"PYTHONPATH: {Path(__file__).parent / 'on_cpu'}",)
UNCHANGED = {
    "nanogpt": Program(nanogpt, env=ON_CPU, total=False),
    "multinode": Program(multinode, env=ON_CPU, pattern="Epoch (?P<step>[0-9]+) . Batchsize", total=False, loss=False),
    "trainer": Program(trainer),
    "accelerate": Program(accelerate, launcher="accelerate", env=(f"PYTHONPATH: {PROGRAMS / 'diffusers' / 'src'}",)),
    "lightning": Program(
        lightning,
        env=(
            *(f"PL_TRAINER_{word}" for word in ("ACCELERATOR: cpu", "DEVICES: 2", "NUM_NODES: 2", "STRATEGY: ddp")),
            "TTY_COMPATIBLE: 1",
            "COLUMNS: 150",
        ),
        stops=True,
    ),
}


def start(
    scene: Scene, name: str, command: list[str], more: str, *, env: tuple[str, ...] = (), per_node: int = 2
) -> str:
    values = "\n".join(f"  {line}" for line in ("OMP_NUM_THREADS: 1", "HF_HUB_OFFLINE: 1", "PYTHONUNBUFFERED: 1", *env))
    return scene.start(
        scene.job(name, command=command, per_node=per_node, more=f"python: {PYTHON}\nenv:\n{values}\n{more}")
    )


def listed(scene: Scene) -> dict[str, Any]:
    (job,) = scene.ascendrun.ask("ps", "-a")["jobs"]
    return dict(job)


def lines_of(scene: Scene, job: str) -> list[dict[str, Any]]:
    done = scene.ascendrun("logs", job, "-o", "jsonl", code=0)
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("name", UNCHANGED)
def test_an_unchanged_example_shows_its_progress(scene: Scene, name: str) -> None:
    program = UNCHANGED[name]
    command = program.make(scene.folder / "code")
    more = f"launcher: {program.launcher}\n"
    more += f"progress: {{pattern: '{program.pattern}'}}\n" if program.pattern else ""
    job = start(scene, name, command, more, env=program.env)
    wanted = {"step", *(["total_steps"] if program.total else []), *(["loss"] if program.loss else [])}
    seen_s, seen = None, {}
    deadline_mono = time.monotonic() + 600.0
    while (row := listed(scene))["state"] not in ("SUCCEEDED", "FAILED", "STOPPED"):
        assert time.monotonic() < deadline_mono, row
        progress = row["progress"] or {}
        if seen_s is None and all(progress.get(key) is not None for key in wanted):
            seen_s, seen = time.time(), {**progress, "state": row["state"]}
            if program.stops:
                assert scene.ascendrun("stop", "--now", job).returncode == 0
        time.sleep(0.5)
    lines = lines_of(scene, job)
    assert row["state"] == ("STOPPED" if program.stops else "SUCCEEDED"), (row, [line["text"] for line in lines[-40:]])
    assert seen_s is not None, (row["progress"], [line["text"] for line in lines[-40:]])
    await_that(lambda: scene.is_drained(job), "every byte is here")
    files = find_progress(scene.ascendrun.state_dir / "jobs" / job / "attempt-1").values()
    rows = [line for paths in files for line in iter_lines(paths, pattern=program.pattern)]
    steps = [row for row in rows if row.at_s and row.step is not None and (row.loss is not None or not program.loss)]
    first_s = steps[0].at_s or 0.0
    print(
        f"{name}: in ps {seen_s - first_s:.1f} s after the node read its first step, as {seen}; then {row['progress']}"
    )
    assert seen_s - first_s <= SOON_S and seen["state"] == "RUNNING"
    names = {path.partition(".")[0] for path in scene.on_head(job, "rank-*")}
    assert names == {f"node{1 + rank // 2}/rank-{rank}" for rank in range(4)}


# ---------------------------------------------------------------- LLaMA-Factory


def llamafactory(code: Path) -> None:
    make_model(code / "model")
    (code / "data").mkdir()
    rows = [{"instruction": line, "input": "", "output": " ".join(WORDS)} for line in text_of(2000)]
    (code / "data" / "demo.json").write_text(json.dumps(rows))
    (code / "data" / "dataset_info.json").write_text(json.dumps({"demo": {"file_name": "demo.json"}}))
    options = {
        "model_name_or_path": "model",
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full",
        "dataset_dir": "data",
        "dataset": "demo",
        "template": "default",
        "cutoff_len": 64,
        "output_dir": "out",
        "logging_steps": 5,
        "save_strategy": "no",
        "per_device_train_batch_size": 2,
        "learning_rate": 1.0e-3,
        "max_steps": 150,
        "use_cpu": True,
        "report_to": "none",
    }
    (code / "train.yaml").write_text(json.dumps(options))


def test_llamafactory_trains_once_on_all_ranks(scene: Scene) -> None:
    llamafactory(scene.folder / "code")
    command = ["llamafactory-cli", "train", "train.yaml"]
    job = start(scene, "llamafactory", command, "launcher: none\n", env=("FORCE_TORCHRUN: 1",))
    scene.await_state(job, "SUCCEEDED", "FAILED", deadline_s=600.0)
    row, lines = listed(scene), lines_of(scene, job)
    texts = "\n".join(line["text"] for line in lines)
    assert row["state"] == "SUCCEEDED", texts[-5000:]
    assert "world size: 4" in texts or "world size 4" in texts.lower(), texts[-5000:]
    progress = row["progress"]
    assert (progress["step"], progress["total_steps"]) == (150, 150) and progress["loss"] > 0
    print("llamafactory:", progress)


def test_llamafactory_without_nnodes_is_named_as_separate_trainings(scene: Scene) -> None:
    llamafactory(scene.folder / "code")
    command = ["env", "-u", "NNODES", "llamafactory-cli", "train", "train.yaml"]
    job = start(scene, "apart", command, "launcher: none\n", env=("FORCE_TORCHRUN: 1",))
    scene.await_state(job, "SUCCEEDED", "FAILED", deadline_s=600.0)
    detail = scene.show(job)
    texts = "\n".join(line["text"] for line in lines_of(scene, job))
    assert detail["job"]["state"] == "FAILED", texts[-5000:]
    found = [event for event in detail["events"] if event["code"] == "separate-trainings"]
    assert len(found) == 1, detail["events"]
    explained = scene.ascendrun("explain", job)
    print(found[0]["values"], explained.stdout)
    assert "NNODES" in explained.stdout, explained.stdout
