"""Values that the guides print, in the job files of this checkout and as options that the programs read."""

import pytest
import yaml

from ascendrun.core.jobs.plan import make_arguments
from ascendrun.programs.trainer.options import InvalidOptionsError
from tests.programs.conftest import REPO, options_of

JOBS = {
    "qwen32b": {
        "S3-19": ("global_batch_size", 128),
        "S3-22": ("seed", 42),
        "S3-29": ("lora_r", 64),
        "S3-30": ("lora_alpha", 128),
        "S3-31": ("lora_dropout", 0.05),
        "S3-33": ("learning_rate", 2e-5),
        "S3-34": ("num_train_epochs", 3),
        "S3-35": ("cutoff_len", 2048),
        "S3-36": ("warmup_steps", 100),
        "S3-37": ("weight_decay", 0.01),
    },
    "classifier-001": {
        "S1-01": ("devices.per_node", 8),
        "S1-13": ("micro_batch_size", 6),
        "S1-14": ("learning_rate", 1e-5),
        "S1-17": ("dataloader_num_workers", 2),
    },
}


def values_of(name):
    """What the program reads of the job: the job's own values over the defaults; `devices.…`: of the job itself."""
    job = yaml.safe_load((REPO / "jobs" / f"{name}.yaml").read_text(encoding="utf-8"))
    devices = {f"devices.{key}": value for key, value in job["devices"].items()}
    args = {name: value for name, value in job["args"].items() if (name, value) != ("micro_batch_size", "auto")}
    return {**options_of(job["program"], *make_arguments(args)), **devices}


@pytest.mark.parametrize("name", JOBS)
def test_a_job_file_has_the_values_of_its_guide(name):
    found = values_of(name)
    rows = JOBS[name].items()
    assert {row: (option, found[option]) for row, (option, _) in rows} == dict(rows)


@pytest.mark.parametrize(
    "program, given, wanted",
    [
        ("qwen_lora", ["--use_curriculum=True"], {"curriculum": "on"}),
        ("qwen_lora", ["--num_workers=4"], {"dataloader_num_workers": 4}),
        ("qwen_lora", ["--per_device_train_batch_size=2"], {"micro_batch_size": 2, "global_batch_size": 128}),
        ("codon", ["--dataset_dir=genes", "--max_epochs=15"], {"data_path": "genes", "num_train_epochs": 15}),
        ("codon", ["--num_workers=5", "--learning_rate=5e-5"], {"dataloader_num_workers": 5, "learning_rate": 5e-5}),
        ("codon", ["--warmup_fraction=0.1", "--seed=23"], {"warmup_ratio": 0.1, "seed": 23}),
        ("codon", ["--save_every_n_steps=512"], {"save_steps": 512}),
        ("codon", [], {"global_batch_size": 6, "num_train_epochs": 15, "learning_rate": 5e-5, "warmup_ratio": 0.1}),
        ("codon", [], {"save_steps": 512, "seed": 23}),
    ],
)
def test_names_of_the_guides_are_those_of_options(program, given, wanted):
    found = options_of(program, *given)
    assert {name: found[name] for name in wanted} == wanted


@pytest.mark.parametrize(
    "program, names",
    [
        ("qwen_lora", ("curriculum_seed", "master_addr", "gradient_accumulation_steps", "num_gpus")),
        ("codon", ("checkpoint_dir", "checkpoint_filename", "batch_size", "accumulate_grad_batches", "num_gpus")),
        ("trajectory", ("npu_ids", "master_addr", "master_port", "use_amp", "max_length")),
    ],
)
def test_a_name_of_the_guides_that_is_no_option_is_refused_with_what_to_set(program, names):
    with pytest.raises(InvalidOptionsError) as caught:
        options_of(program, *[f"--{name}=1" for name in names])
    found = {problem.name: (problem.message.key, problem.hint.key) for problem in caught.value.problems}
    assert found == {name: ("options.refused", f"option.{program}.{name}.refused") for name in names}
