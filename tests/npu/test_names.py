"""Every name of torch_npu that our source calls or speaks of is looked up on the real module."""

import json

import pytest

from ascendrun.health.survey import scripts
from tests.npu.usednames import calls_in, written_in
from tests.programs.conftest import REPO

RUNS_ON_NODES = [*sorted((REPO / "ascendrun" / "programs").rglob("*.py")), REPO / "templates" / "script" / "train.py"]
SPEAKS = [
    *RUNS_ON_NODES,
    *sorted(REPO.glob("docs/*.md")),
    REPO / "README.md",
    *sorted(REPO.glob("jobs/*.yaml")),
    *sorted((REPO / "ascendrun" / "health").rglob("*.py")),
    REPO / "ascendrun" / "ascend" / "signatures.toml",
]


@pytest.fixture
def wrong(launch, tmp_path):
    """wrong({name: calls}): those that the real module does not have, or does not take so."""

    def ask(wanted):
        listing = tmp_path / "names.json"
        listing.write_text(json.dumps([[name, sorted(calls)] for name, calls in sorted(wanted.items())]))
        run = launch("check", ["names", str(listing)]).succeed()
        return json.loads((run.folder / "answer-0.json").read_text())

    return ask


def test_every_name_that_runs_on_a_node_is_there_and_takes_what_it_is_given(wrong):
    wanted = calls_in([*(path.read_text() for path in RUNS_ON_NODES), scripts.TORCH])
    assert {
        "torch_npu.npu_fusion_attention",
        "torch_npu.npu.max_memory_allocated",
        "torch_npu.npu.get_rng_state",
        "torch_npu.npu.synchronize",
        "torch_npu.profiler.schedule",
        "torch_npu.__version__",
    } <= wanted.keys()
    assert wrong(wanted) == []


def test_every_name_that_a_text_speaks_of_is_there(wrong):
    names = written_in(SPEAKS)
    assert "torch_npu.contrib.transfer_to_npu" in names
    assert wrong({name: set() for name in names}) == []


def test_a_name_that_is_not_there_and_a_call_that_does_not_fit_are_told(wrong):
    wanted = calls_in(
        [
            "import torch_npu\ntorch_npu.npu_soup(1)\n"
            "npu = torch_npu.npu\nnpu.set_device(0, 1, 2)\nnpu.amp.GradScaler(taste=1)\n"
            "torch_npu.npu_rms_norm(x, w, spoon=1)\ntorch_npu.npu_rms_norm(x, w, epsilon=1)"
        ]
    )
    told = [line.split(":")[0] for line in wrong(wanted)]
    assert told == [
        "torch_npu.npu.amp.GradScaler",
        "torch_npu.npu.set_device",
        "torch_npu.npu_rms_norm",
        "torch_npu.npu_soup",
    ]
