"""What a hint advises, by the mechanism of a failure: who called whom, which device, which field, which layer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from corpus import Builder

from ascendrun.health.diagnosis import Diagnosis, diagnose, render

HEAD = "Traceback (most recent call last):\n"
SITE = "/opt/env/lib/python3.11/site-packages"


def explain(err: str, *, ranks: int = 4, failed: str = "0", **job: Any) -> Diagnosis:
    """The diagnosis of a job whose failed ranks print this, while ascendrun stops the others; in English."""
    groups = [{"ranks": failed, "at": 60, "exit": 1, "err": err}]
    groups += [{"ranks": "rest", "at": 61, "exit": -15, "stopped": True}] if failed != "all" and ranks > 1 else []
    row = {"ranks": ranks, "family": "npu", "groups": groups, **job}
    return render(diagnose(Builder(row, seed="helps").evidence()), "en")


# ---------------------------------------------------------------- who called whom


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_package_that_lacks_a_name_is_of_the_versions_on_any_rank(ranks: int) -> None:
    frames = f'{HEAD}  File "{SITE}/speedlib/rope.py", line 8, in forward\n    torch_npu.npu_turn_v9(x)\n'
    found = explain(f"{frames}AttributeError: module 'torch_npu' has no attribute 'npu_turn_v9'", ranks=ranks)
    assert found.domain == "environment"
    assert found.hint.startswith("`speedlib` uses `npu_turn_v9`, which the installed `torch_npu` does not have")


def test_a_name_that_the_program_of_one_rank_misspells_is_of_the_program() -> None:
    frames = f'{HEAD}  File "/job/train.py", line 8, in main\n    torch.arrange(4)\n'
    assert explain(f"{frames}AttributeError: module 'torch' has no attribute 'arrange'").domain == "program"


def test_a_circle_of_imports_is_no_lack_of_a_package() -> None:
    frames = f'{HEAD}  File "/job/a.py", line 1, in <module>\n    import helpers\n'
    message = "AttributeError: partially initialized module 'helpers' has no attribute 'run'"
    assert explain(frames + message).why[0].key != "versions"


@pytest.mark.parametrize(
    ("frames", "caller"),
    [
        (
            f'  File "/job/roll.py", line 30, in start\n  File "{SITE}/commlib/ring.py", line 9, in check\n',
            "roll.py:30",
        ),
        (
            f'  File "{SITE}/rollkit/a.py", line 3, in go\n  File "{SITE}/commlib/ring.py", line 9, in check\n',
            "rollkit",
        ),
    ],
)
def test_what_called_the_package_that_raised_is_named_too(frames: str, caller: str) -> None:
    found = explain(f"{HEAD}{frames}    assert tensor.device == self.device\nAssertionError")
    assert f"`commlib` raised it in a call by `{caller}`: correct what is passed there" in found.hint


def test_torch_npu_raises_for_others() -> None:
    frames = f'{HEAD}  File "/job/a.py", line 3, in go\n  File "{SITE}/torch_npu/utils/guard.py", line 9, in wrap\n'
    assert "`torch_npu` raised it" not in explain(f"{frames}RuntimeError: no stream for this call").hint
