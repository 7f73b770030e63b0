"""The option `report_to`: what rank 0 records is in each tracker, and a tracker that fails ends nothing."""

import sys
from pathlib import Path

import pytest

from ascendrun.programs.devices.accelerator import open_accelerator
from ascendrun.programs.trainer.options import InvalidOptionsError, parse, read_table
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trainer.trackers import tracking

PROGRAMS = Path(__file__).resolve().parents[2] / "ascendrun" / "programs"


def train(folder: Path, *names: str, rank: int = 0) -> Runtime:
    here = Runtime(rank, rank, 2, None, open_accelerator("cpu", 0))
    with tracking(here, "tiny", {"report_to": names, "output_dir": str(folder), "seed": 3}):
        here.record(event="start", step=0, parameters=9)
        here.record(step=1, total_steps=2, loss=4.5, note="no number")
        here.record(step=2, total_steps=2, loss=2.5)
    return here


def test_rank_0_writes_its_steps_also_where_another_tracker_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("ASCENDRUN_JOB_ID", "j-0001")
    monkeypatch.setitem(sys.modules, "mlflow", None)
    train(tmp_path, "mlflow", "tensorboard")
    read = accumulator.EventAccumulator(str(tmp_path / "tensorboard" / "j-0001")).Reload()
    assert [(event.step, event.value) for event in read.Scalars("loss")] == [(1, 4.5), (2, 2.5)]
    assert [line for line in capsys.readouterr().out.splitlines() if "mlflow" in line.lower()] != []


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    train(tmp_path, "tensorboard", rank=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("program", ["codon", "nanochat", "qwen_lora", "trajectory"])
def test_each_program_has_the_option(program: str) -> None:
    table = read_table(PROGRAMS / program / "options.json")
    needed = [f"--{option.name}=x" for option in table.options.values() if option.required]
    with pytest.raises(InvalidOptionsError) as error:
        parse([*needed, "--report_to=tensorboard,wandbb"], table)
    assert [(each.name, each.hint.values) for each in error.value.problems if each.name == "report_to"] == [
        ("report_to", {"name": "wandb"})
    ]
