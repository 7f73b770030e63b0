"""Operators, optimizer, scaler, memory and names of the real torch_npu, as the trainer uses them."""

import json

import pytest

from ascendrun.ascend.signatures import scan


@pytest.fixture
def check(launch):
    """check(name, *arguments, **env): what that function of checks.py gave, on one rank."""

    def ask(name, *arguments, **env):
        run = launch("check", [name, *arguments], name=name, env=env).succeed()
        return json.loads((run.folder / "answer-0.json").read_text())

    return ask


def test_fused_operators_and_their_gradients_are_the_formulas(check):
    assert check("fused") == pytest.approx(dict.fromkeys(["rms_norm", "rotary", "swiglu"], 0.0), abs=1e-5)


@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-5), ("float16", 2e-2), ("bfloat16", 2e-2)])
def test_attention_calls_the_operator_in_the_layout_and_mode_of_each_use(check, dtype, most):
    found = check("attention_cases", dtype)
    assert max(off for off, *_ in found.values()) <= most
    ends = [7, 30, 40, 80, 81, 82, 112, 120]
    for name, (_, calls, (causal, window, packed, _)) in found.items():
        wanted = {"input_layout": "TND" if packed else "BSND"}
        if packed:
            wanted.update(actual_seq_qlen=ends, actual_seq_kvlen=ends)
        if window is not None:
            wanted.update(sparse_mode=4, pre_tockens=window - 1, next_tockens=0 if causal else window - 1)
        elif causal:
            wanted.update(sparse_mode=3)
        assert calls == [wanted], name


def test_the_simulated_operator_attends_as_its_sparse_mode_is_documented(check):
    found = check("sparse_modes")
    own = [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0]]
    assert found["0"] == found["1"] == own
    assert found["2"] == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0]]
    assert found["3"] == found["BSND"] == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert found["4"] == [[0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]
    assert found["3 without mask"] == [[1] * 5] * 3
    assert found["TND"] == [[1, 1, 0, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 1, 1]]
    small, inverted, mode, ends, beyond = found["refused"]
    assert "2048 x 2048" in small and "above the diagonal" in inverted and "sparse_mode 0 to 4" in mode
    assert "actual_seq_qlen" in ends and "within the tokens" in beyond


def test_the_trainer_takes_all_fused_operators_in_every_precision(check):
    assert check("sound") == [[["attention", "rms_norm", "rotary", "swiglu"], []]] * 3


def test_a_fused_operator_computes_the_same_with_autocast_around_it(check):
    assert check("autocast") < 0.02


def test_attention_drops_by_the_seed_and_goes_back_the_way_it_came(check):
    found = check("dropped")
    assert found["same"] == 0.0 and found["other"] > 0.1
    assert found["mean"] < 0.6 and found["gradients"] < 0.01


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
