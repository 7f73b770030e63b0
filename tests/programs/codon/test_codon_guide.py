"""finetune.py of `ascendrun init codon`: the command line of guide 004."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ascendrun.programs.codon import guide
from ascendrun.programs.codon.files import load_stored, save_model
from ascendrun.programs.codon.model import Config, make_model
from ascendrun.programs.codon.vocabulary import ORGANISMS
from ascendrun.programs.trainer import options as command_line
from ascendrun.programs.trainer.options import InvalidOptionsError
from ascendrun.query.templates import copy_template

REPO = Path(__file__).resolve().parents[3]
GUIDE = (
    "--dataset_dir dataset/training_data.jsonl --checkpoint_dir ./ckpt --checkpoint_filename finetune.ckpt "
    "--batch_size 6 --max_epochs 15 --num_workers 5 --accumulate_grad_batches 1 --num_gpus 1 --learning_rate 5e-5 "
    "--warmup_fraction 0.1 --save_every_n_steps 512 --seed 23"
)
SMALL = "--hidden_size=32 --num_hidden_layers 1 --num_attention_heads=2 --max_position_embeddings=64"


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch, tmp_path):
    monkeypatch.setenv("ASCENDRUN_DEVICE_TYPE", "cpu")
    monkeypatch.chdir(tmp_path)


def read(line):
    return guide.read(shlex.split(line), guide.read_guide())


def options_of(line):
    values, rest = read(line)
    command = guide.command_of(values, rest)
    return command_line.parse(command[command.index("ascendrun.programs.codon") + 1 :], guide.program_table())


@pytest.mark.parametrize("line", [GUIDE, GUIDE.replace(" --", "\0").replace(" ", "=").replace("\0", " --")])
def test_the_guides_line_is_a_training_of_codon_in_either_form(line):
    found = options_of(line)
    expected = {
        "mode": "pretrain", "data_path": "dataset/training_data.jsonl", "output_dir": "./ckpt", "global_batch_size": 6,
        "micro_batch_size": 6, "num_train_epochs": 15, "dataloader_num_workers": 5, "learning_rate": 5e-5,
        "warmup_ratio": 0.1, "save_steps": 512, "seed": 23,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    assert {name: value for name, value in options_of("").items() if name in expected} == {
        **expected, "output_dir": "ckpt",
    }  # fmt: skip


def test_steps_accumulate_and_published_weights_are_found(tmp_path):
    (tmp_path / "CodonTransformer-base").mkdir()
    found = options_of(f"{GUIDE} --accumulate_grad_batches=4")
    assert (found["global_batch_size"], found["mode"], found["base_model"]) == (24, "finetune", "CodonTransformer-base")
    assert options_of(f"{GUIDE} --base_model=other")["base_model"] == "other"
    found = options_of(f"{GUIDE} --debug=true")
    assert (found["num_train_epochs"], found["dataloader_num_workers"]) == (1, 0)


def test_more_devices_than_there_are_and_other_problems_are_refused_together():
    """S4-B1: the published script has no --num_gpus."""
    with pytest.raises(InvalidOptionsError) as caught:
        read("--num_gpus 4 --batch_size=0 --bogus 3 --hidden_size=x")
    names = [str(problem.name).lstrip("-") for problem in caught.value.problems]
    assert sorted(names) == ["batch_size", "bogus", "hidden_size", "num_gpus"]
    (problem,) = [each for each in caught.value.problems if each.name == "--num_gpus"]
    assert problem.message.values == {"count": 4, "present": 1, "family": "cpu"}


def test_the_weights_are_in_one_file_as_codontransformer_reads_it(tmp_path):
    config = Config(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
    model = make_model(config, seed=1)
    save_model(model, ORGANISMS, tmp_path / "final")
    guide.export(tmp_path / "final", tmp_path / "finetune.ckpt")
    saved = torch.load(tmp_path / "finetune.ckpt", weights_only=True)["state_dict"]
    assert all(name.startswith("model.") for name in saved)
    again, first = load_stored(tmp_path / "finetune.ckpt").weights, load_stored(tmp_path / "final").weights
    assert again.keys() == first.keys() and all(torch.equal(again[name], first[name]) for name in first)


@pytest.mark.thorough
def test_the_guides_line_runs_in_the_directory_of_init(tmp_path):
    copy_template("codon", tmp_path)
    (tmp_path / "dataset").mkdir()
    codons = ("A_GCC", "K_AAA", "L_CTG", "V_GTT")
    genes = [f"M_ATG {' '.join(codons[number // 4**place % 4] for place in range(4))} __TAA" for number in range(40)]
    lines = [json.dumps({"idx": number, "codons": gene, "organism": 51}) for number, gene in enumerate(genes)]
    (tmp_path / "dataset" / "training_data.jsonl").write_text("\n".join(lines) + "\n")
    env = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "finetune.py", *shlex.split(f"{GUIDE} {SMALL}")],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "ckpt" / "finetune.ckpt").is_file()
