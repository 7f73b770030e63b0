"""The formulas that fused operators stand for are those of the models, and the operators are called as they want it."""

import sys
import types

import pytest
import torch
from transformers import Qwen2Config
from transformers.models.qwen2 import modeling_qwen2

from ascendrun.programs.devices import attention, kernels
from ascendrun.programs.devices.accelerator import Accelerator, Precision
from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trainer.strategies import parallel
from tests.programs import recorded
from tests.programs.conftest import tiny_qwen2

CALLS = []
NPU = Accelerator("npu", torch.device("cpu"), "Ascend910B1", None)


def some(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


@pytest.fixture
def npu(monkeypatch, usual_positions):
    """A torch_npu whose operators compute their formulas, in the words of the real one's documentation."""
    module = types.ModuleType("torch_npu")

    def npu_fusion_attention(query, key, value, head_num, input_layout, scale=1.0, keep_prob=1.0, **given):
        assert head_num == query.shape[-2] and keep_prob == 1.0
        mode, ends = given.get("sparse_mode", 0), given.get("actual_seq_qlen")
        assert (mode == 0) == (given.get("atten_mask") is None) and (input_layout == "TND") == (ends is not None)
        if ends is None:
            segments = None
        else:
            segments = attention.Segments.of([end - start for start, end in zip([0, *ends], ends)])
            query, key, value = query[None], key[None], value[None]
        how = {
            0: {"causal": False},
            3: {"causal": True},
            4: {"causal": given.get("next_tockens") == 0, "window": given.get("pre_tockens", 0) + 1},
        }
        CALLS.append("attention")
        answer = attention.formula(query, key, value, scale=scale, segments=segments, **how[mode])
        return (answer if ends is None else answer[0]), None, None, None, 0, 0, 0

    module.npu_fusion_attention = npu_fusion_attention
    module.npu_rms_norm = lambda x, gamma, epsilon=1e-6: (
        CALLS.append("norm"),
        (kernels.rms_norm_formula(x, gamma, epsilon), None),
    )[1]
    module.npu_rotary_mul = lambda x, r1, r2: (CALLS.append("rotary"), kernels.rotary_formula(x, r1, r2))[1]
    module.npu_swiglu = lambda x, dim=-1: (CALLS.append("swiglu"), kernels.swiglu_formula(*x.chunk(2, dim)))[1]
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    monkeypatch.setattr(attention, "KERNELS", {})
    CALLS.clear()
    return module


def test_the_other_formulas_are_those_of_the_models_layers():
    config = Qwen2Config(hidden_size=16, intermediate_size=24, num_attention_heads=2, num_key_value_heads=1)
    norm = modeling_qwen2.Qwen2RMSNorm(16, eps=1e-5)
    norm.weight.data = some(16)
    torch.testing.assert_close(kernels.rms_norm_formula(some(2, 5, 16), norm.weight, 1e-5), norm(some(2, 5, 16)))
    mlp = modeling_qwen2.Qwen2MLP(config)
    x = some(2, 5, 16)
    torch.testing.assert_close(mlp.down_proj(kernels.swiglu_formula(mlp.gate_proj(x), mlp.up_proj(x))), mlp(x))
    query, cos, sin = some(1, 2, 5, 8), some(1, 5, 8), some(1, 5, 8)
    wanted, _ = modeling_qwen2.apply_rotary_pos_emb(query, query, cos, sin)
    torch.testing.assert_close(kernels.rotary_formula(query, cos[:, None], sin[:, None]), wanted)


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_model_with_fused_operators_says_what_it_said_before(npu, is_packed):
    ids = torch.arange(20).reshape(2, 10) % 17
    more = {"segments": attention.Segments.of_rows([[4, 6], [8]], 10)} if is_packed else {}

    usual = tiny_qwen2()(input_ids=ids, **more).logits
    everything, _ = kernels.sound_kernels(NPU, torch.float32)
    CALLS.clear()
    model = tiny_qwen2()
    said = kernels.fuse(model, kernels.operators_of(everything), device="cpu")
    assert said == ["Qwen2MLP x 2", "Qwen2RMSNorm x 5", "apply_rotary_pos_emb x 1"]
    torch.testing.assert_close(model(input_ids=ids, **more).logits, usual, rtol=1e-4, atol=1e-5)
    assert {"attention", "norm", "rotary", "swiglu"} == set(CALLS)


def test_an_operator_that_answers_wrongly_or_is_not_there_is_not_used_and_said(npu):
    assert kernels.sound_kernels(NPU, torch.float32) == (["attention", "rms_norm", "rotary", "swiglu"], [])
    npu.npu_rms_norm = lambda x, gamma, epsilon=1e-6: (x * 1.5, None)
    del npu.npu_swiglu
    assert attention.kernel_of("cpu") is attention.npu_attention
    usual = npu.npu_fusion_attention
    npu.npu_fusion_attention = lambda *given, **named: (usual(*given, **named)[0] * 1.5, None)
    sound, reasons = kernels.sound_kernels(NPU, torch.float32)
    assert sound == ["rotary"] and attention.kernel_of("cpu") is attention.torch_attention
    assert [(each.key, each.values["name"]) for each in reasons[:2]] == [
        ("program.kernel-differs", name) for name in ("attention", "rms_norm")
    ]
    assert reasons[2].startswith("swiglu: ")


def varlen_of_torch_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
    assert max_q == max_k and torch.equal(cu_seq_q, cu_seq_k)
    back, ahead = window_size
    given = {"causal": ahead == 0, "window": None if back < 0 else back + 1, "scale": scale}
    segments = attention.Segments.of(cu_seq_q.diff().tolist())
    return attention.formula(query[None], key[None], value[None], segments=segments, **given)[0]


def varlen_of_torch_2_13(query, key, value, *more, enable_gqa=False, **given):
    assert enable_gqa == (query.shape[1] != key.shape[1])
    return varlen_of_torch_2_11(query, key, value, *more, **given)


def varlen_of_torch_2_10(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False):
    raise AssertionError("its arguments do not fit")


@pytest.mark.parametrize(
    "varlen, sound",
    [(varlen_of_torch_2_11, ["attention"]), (varlen_of_torch_2_13, ["attention"]), (varlen_of_torch_2_10, [])],
)
def test_the_attention_of_a_gpu_fits_the_arguments_of_every_torch(monkeypatch, varlen, sound):
    """A torch whose function has others is no error: torch's kernel for each sample is used, and said."""
    monkeypatch.setattr(attention, "KERNELS", {})
    module = types.ModuleType("torch.nn.attention.varlen")
    module.varlen_attn = varlen
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module)
    gpu = Accelerator("cuda", torch.device("cpu"), "NVIDIA H100 80GB HBM3", None)
    found, reasons = kernels.sound_kernels(gpu, torch.bfloat16)
    assert found == sound and len(reasons) == 1 - len(sound), reasons
    assert (attention.kernel_of("cpu") is attention.cuda_attention) == bool(sound)


def test_other_devices_keep_torchs_own(npu):
    cpu = Accelerator("cpu", torch.device("cpu"), "cpu", None)
    assert kernels.sound_kernels(cpu, torch.float32) == ([], [])
    assert attention.kernel_of("cpu") is attention.torch_attention


def test_a_model_on_another_device_keeps_its_own_positions(usual_positions):
    model, ids = tiny_qwen2(), torch.arange(24).reshape(2, 12) % 17
    before = model(input_ids=ids).logits

    def not_for_a_cpu(*_):
        raise AssertionError("the operator of another device was called")

    for _ in range(2):  # a second model of that device does not take the first for what stood there
        kernels.fuse(tiny_qwen2(), kernels.Operators(rotary=not_for_a_cpu), device="npu")
    assert torch.equal(model(input_ids=ids).logits, before)
    assert modeling_qwen2.apply_rotary_pos_emb.original is usual_positions


# --- compiled layers ---


@pytest.fixture
def has_compiler():
    if not parallel.has_compiler():
        pytest.skip("no C++ compiler")


@pytest.mark.usefixtures("has_compiler")
@pytest.mark.parametrize(
    "strategy, ranks", [("ddp", 2), *(pytest.param(*case, marks=pytest.mark.thorough) for case in [("fsdp2", 2)])]
)
def test_compiled_layers_learn_the_same(tiny, strategy, ranks):
    options = {"strategy": strategy, "ranks": ranks, "dropout": 0.0, "max_steps": 6, "eval_steps": 3}
    plain = tiny(name="plain", **options).succeed()
    own = tiny(name="compiled", compile="torch", **options).succeed()
    assert "graphs: 0" in plain.text() and "graphs: 0" not in own.text()
    assert own.losses() == pytest.approx(plain.losses(), rel=1e-5)
    for name, weight in plain.final().items():
        assert own.final()[name] == pytest.approx(weight, rel=1e-4, abs=1e-6), name


@pytest.mark.thorough
@pytest.mark.usefixtures("has_compiler")
@pytest.mark.parametrize("name", ["trajectory-1", "qwen_lora-ddp-1"])
def test_programs_that_are_compiled_have_the_losses_of_before(launch, name):
    program, ranks, options = recorded.CASES[name]
    schedule = {"lr_scheduler_type": "constant"} if program == "qwen_lora" else {}
    shorter = {**options, **schedule, "max_steps": 4}
    plain, own = (
        launch(program, [*recorded.arguments(shorter), f"--compile={way}"], ranks=ranks, name=way).succeed().losses()
        for way in ("none", "torch")
    )
    assert len(own) == 4 and own == pytest.approx(plain, rel=1e-4)


@pytest.mark.parametrize(
    "way, device, strategy, reason",
    [
        ("torch", "Ascend910B1", "ddp", "set compile: torchair or"),
        ("torchair", "cpu", "none", "set compile: torch or"),
        ("torchair", "NVIDIA H100 80GB HBM3", "ddp", "does not compile for cuda"),
        ("torch", "NVIDIA H100 80GB HBM3", "zero3", "strategy: zero3, which replaces weights"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_the_reason(way, device, strategy, reason):
    import torch

    family = {"c": "cpu", "A": "npu", "N": "cuda"}[device[0]]
    here = Runtime(0, 0, 2, None, Accelerator(family, torch.device("cpu"), device, None))
    precision = Precision(torch.float32, torch.float32, False, "")
    with pytest.raises(InvalidDataError, match=reason):
        parallel.check(here, precision, strategy=strategy, shard_size=0, compile=way)


def test_a_compiler_that_is_not_installed_is_named():
    import torch

    module = torch.nn.Sequential(torch.nn.ModuleList([torch.nn.Linear(2, 2)]))
    with pytest.raises(InvalidDataError, match="torchair is not installed"):
        parallel.compile_layers(module, "torchair", family="npu")


def test_a_model_without_repeated_layers_and_a_host_without_a_compiler_are_refused(monkeypatch):
    import torch

    monkeypatch.setattr(parallel, "has_compiler", lambda: True)
    with pytest.raises(InvalidDataError, match="repeated layers"):
        parallel.compile_layers(torch.nn.Linear(2, 2), "torch", family="cpu")
    monkeypatch.undo()
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", ("/none/g++",))
    assert not parallel.has_compiler()
