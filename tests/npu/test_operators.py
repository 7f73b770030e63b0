"""Operators, optimizer, scaler, memory and names of the real torch_npu, as the trainer uses them."""

from __future__ import annotations

import ast
import json

import pytest

from ascendrun.ascend.signatures import scan
from tests.programs.conftest import REPO


@pytest.fixture
def check(launch):
    """check(name, *arguments, **env): what that function of checks.py gave, on one rank."""
    def ask(name, *arguments, **env):
        run = launch("check", [name, *arguments], name=name, env=env).succeed()
        return json.loads((run.folder / "answer-0.json").read_text())

    return ask


def test_fused_operators_and_their_gradients_are_the_formulas(check):
    assert check("fused") == pytest.approx(dict.fromkeys(["attention", "rms_norm", "rotary", "swiglu"], 0.0), abs=1e-5)


def test_the_trainer_takes_all_fused_operators_in_every_precision(check):
    assert check("sound") == [[["attention", "rms_norm", "rotary", "swiglu"], []]] * 3


def test_adamw_on_the_device_is_adamw_on_the_host(check):
    assert check("optimizers") == pytest.approx({"fused": 0.0, "sharded": 0.0}, abs=1e-5)


def test_the_scaler_steps_when_gradients_are_finite_and_halves_its_scale_when_not(check):
    before, after, smaller, weights = check("scaler")
    assert (after, smaller) == (before, before / 2)
    assert weights == pytest.approx([0.9] * 5)


def test_a_full_device_is_said_in_torch_npus_words_that_the_catalogue_knows_and_can_be_used_again(check):
    answer = check("memory", ASCENDRUN_SIM_NPU_MEMORY_MB="1024")
    assert answer["said"].startswith("OutOfMemoryError: NPU out of memory. Tried to allocate 1.00 GiB (NPU 0; 1024.00")
    assert [hit.signature.code for hit in scan([(1, answer["said"])])]
    assert (answer["total"], answer["again"]) == (1 << 30, 7)


def names_in(source):
    """(dotted name, keywords of a call) of everything of torch_npu that a module uses."""
    found = {}
    for node in ast.walk(ast.parse(source)):
        call = node if isinstance(node, ast.Call) else None
        name = dotted(call.func if call else node)
        if name.startswith("torch_npu."):
            found.setdefault(name, set()).update(word.arg for word in call.keywords if word.arg) if call else \
                found.setdefault(name, set())
    return found


def dotted(node):
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def test_every_name_of_torch_npu_that_programs_use_is_there_and_takes_what_it_is_given(check, tmp_path):
    wanted = {}
    for path in (REPO / "ascendrun" / "programs").rglob("*.py"):
        for name, keywords in names_in(path.read_text()).items():
            wanted.setdefault(name, set()).update(keywords)
    assert {"torch_npu.npu_fusion_attention", "torch_npu.npu_rms_norm", "torch_npu.npu"} <= set(wanted)
    # What the trainer calls through `accelerator.module`.
    source = (REPO / "ascendrun" / "programs" / "trainer" / "accelerator.py").read_text()
    own = {f"torch_npu.npu.{name.split('module.')[1]}" for name in
           (dotted(node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute))
           if "module." in name}
    assert "torch_npu.npu.max_memory_allocated" in own
    listing = [[name, sorted(wanted.get(name, ()))] for name in sorted({*wanted, *own})]
    (tmp_path / "names.json").write_text(json.dumps(listing))
    assert check("names", str(tmp_path / "names.json")) == []
