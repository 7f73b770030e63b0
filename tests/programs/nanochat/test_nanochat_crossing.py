"""How many files of the programs a steady step of base training runs through (docs/decisions/08-training-loop.md)."""

import importlib
import sys
from pathlib import Path

from ascendrun import programs
from ascendrun.programs.devices.accelerator import open_accelerator
from ascendrun.programs.nanochat.__main__ import OPTIONS, STAGES
from ascendrun.programs.trainer.data import Loader
from ascendrun.programs.trainer.options import parse, read_table
from ascendrun.programs.trainer.runtime import Runtime
from tests.programs.nanochat.test_nanochat_stages import BASE, TOKENIZER

HOME = Path(programs.__file__).parent
MOST = 12
FETCH = Loader.share.__code__


def stage(*words):
    options = parse(list(words), read_table(OPTIONS))
    module, name = STAGES[options["mode"]]
    body = getattr(importlib.import_module(f"ascendrun.programs.nanochat.{module}"), name)
    body(options, Runtime(0, 0, 1, None, open_accelerator("cpu", 0)))


def test_a_steady_step_of_base_runs_through_few_files(tmp_path, monkeypatch):
    """From one fetch of a batch to the next, on one rank, without a log line, an evaluation or a checkpoint."""
    monkeypatch.chdir(tmp_path)
    stage(*TOKENIZER, "--output_dir=tok")
    steps = []

    def called(frame, event, _):
        if event != "call":
            return
        if frame.f_code is FETCH:
            steps.append(set())
        path = Path(frame.f_code.co_filename)
        if steps and HOME in path.parents:
            steps[-1].add(path.relative_to(HOME).as_posix())

    quiet = ("--logging_steps=99", "--eval_steps=0", "--sample_steps=0", "--save_steps=0")
    sys.setprofile(called)
    try:
        stage(*BASE, *quiet, "--tokenizer_dir=tok", "--data_cache_dir=cache", "--output_dir=out")
    finally:
        sys.setprofile(None)
    steady = steps[4:9]
    assert {"nanochat/model.py", "trainer/loop.py", "trainer/optimizer.py"} <= steady[0]
    assert all(files == steady[0] for files in steady)
    assert len(steady[0]) <= MOST, sorted(steady[0])
