"""Templates of frameworks: each trains on two hosts with two ranks each, and continues from its checkpoint."""

import json
import sys
from pathlib import Path
from typing import Any, Callable

import pytest
from scenes import Scene

from ascendrun.query.templates import copy_template

pytestmark = pytest.mark.thorough
SAVED = "/ckpt"
CHANGES = {
    "ddp": {"1000": "{steps}, --save_steps, 3"},
    "accelerate": {"1000": "{steps}, --save_steps, 3"},
    "deepspeed": {"1000": "{steps}, --save_steps, 3"},
    "hf-trainer": {
        "--max_steps, 1000": "--max_steps, {steps}",
        "--save_steps, 100": "--save_steps, 3",
        '--bf16, "true"': "--use_cpu, 'true'",
        "/models/Qwen2.5-0.5B": "model",
        "/data/train.txt": "train.txt",
    },
}


@pytest.fixture
def scene(scene_of: Callable[..., Scene], tmp_path: Path) -> Scene:
    saved = tmp_path / "saved"
    saved.mkdir()
    return scene_of(2, shares={str(saved): SAVED})


def submit(scene: Scene, name: str, folder: Path, steps: int) -> Any:
    """Run the template with that many steps on CPUs; return its progress as `ps` shows it."""
    text = (folder / "job.yaml").read_text()
    for old, new in CHANGES[name].items():
        assert old in text, f"{name}: no {old}"
        text = text.replace(old, new.format(steps=steps), 1)
    job_file = folder / "small.yaml"
    job_file.write_text(text)
    hostfile = folder / "here.hosts"
    hostfile.write_text(scene.cluster.hostfile(slots=2))
    changes = ("devices.type=cpu", "devices.per_node=2", "setup=null", f"python={sys.executable}")
    options = [word for change in changes for word in ("--set", change)]
    scene.ascendrun("submit", job_file, "--hostfile", hostfile, *options, timeout=600, code=0)
    (job, *_) = json.loads(scene.ascendrun("ps", "-a", "-o", "json").stdout)["jobs"]
    assert job["progress"], scene.show(job["id"])
    return job["progress"]


def make_model(folder: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(("<eos>", "the", "calm", "sea", "rises", "over", "a", "stone"))}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<eos>"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder / "model")
    config = GPT2Config(vocab_size=len(words), n_positions=32, n_embd=16, n_layer=1, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(folder / "model")
    (folder / "train.txt").write_text("the calm sea rises\nthe calm stone over a sea\n" * 200)


@pytest.mark.parametrize("name", list(CHANGES))
def test_a_template_trains_and_continues(scene: Scene, name: str) -> None:
    folder = scene.folder / name
    copy_template(name, folder)
    if name == "hf-trainer":
        make_model(folder)
    assert submit(scene, name, folder, 6)["step"] == 6
    first = submit(scene, name, folder, 9)
    assert first["step"] == 9 and first["total_steps"] == 9 and first["loss"] > 0
    assert [rank["exit_code"] for rank in scene.show("j-0002")["ranks"]] == [0] * 4
    output = b"".join(data for end in ("out", "err") for data in scene.on_head("j-0002", f"rank-0.{end}.0").values())
    assert b"step 7/9" in output or b"7/9 [" in output, output[-2000:]
    assert b"step 6/9" not in output, "it continues after the checkpoint of step 6"
