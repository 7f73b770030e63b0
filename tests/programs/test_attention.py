"""Attention gives the formula's answers and gradients in all its uses, and holds no scores of length x length."""

import contextlib

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ascendrun.programs.devices import attention as attentions
from ascendrun.programs.devices import kernels
from ascendrun.programs.devices.accelerator import open_accelerator
from ascendrun.programs.devices.attention import Segments, attention, formula
from tests.programs.attentioncases import CASES, answers, inputs, largest_difference
from tests.programs.conftest import tiny_qwen2

FAMILIES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
"""A CPU everywhere; a GPU where there is one."""


@contextlib.contextmanager
def device_of(family, dtype=torch.float32):
    """The device, with the kernel that a training would use there."""
    accelerator = open_accelerator(family, 0)
    sound, reasons = kernels.sound_kernels(accelerator, dtype)
    assert family == "cpu" or (sound, reasons) == (["attention"], [])
    yield accelerator.device
    attentions.KERNELS.pop(family, None)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", CASES)
def test_answers_and_gradients_are_those_of_the_formula(case, family):
    with device_of(family) as device:
        assert largest_difference(case, device) <= 1e-5


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_the_formula(dtype, family):
    with device_of(family, dtype) as device:
        assert max(largest_difference(case, device, dtype) for case in CASES) <= 2e-2


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("length", [1, 7, 39])
def test_queries_are_the_last_of_more_keys(length, window):
    tensors = inputs(2, length=length)
    given = {"causal": True, "window": window, "scale": 0.3}
    for one, other in zip(answers(attention, tensors, **given), answers(formula, tensors, **given)):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_the_formula_is_torchs():
    q, k, v = inputs(2)
    every_head = (x.transpose(1, 2) for x in (q, k.repeat_interleave(2, 2), v.repeat_interleave(2, 2)))
    wanted = functional.scaled_dot_product_attention(*every_head, is_causal=True, scale=0.3)
    torch.testing.assert_close(formula(q, k, v, scale=0.3), wanted.transpose(1, 2))


def test_windows_over_several_blocks_and_samples_of_any_length():
    chance = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 700, heads, 8, generator=chance) for heads in (2, 1, 1))
    rows = Segments.of_rows([[300, 399], [1, 255, 257, 187]], 700)
    for causal in (True, False):
        for window in (3, 256, 300, 650):
            for segments in (None, rows):
                given = {"causal": causal, "window": window, "segments": segments, "scale": 0.3}
                torch.testing.assert_close(attention(q, k, v, **given), formula(q, k, v, **given), rtol=1e-4, atol=1e-5)


def test_segments_are_the_rows_and_their_padding():
    segments = Segments.of_rows([[3, 2], [4], [5]], 5)
    assert (segments.lengths, segments.longest) == ((3, 2, 4, 1, 5), 5)
    assert segments.offsets.tolist() == [0, 3, 5, 9, 10, 15] and segments.offsets.dtype == torch.int32


def windows(size):
    return {"sliding_window": size, "use_sliding_window": size is not None, "max_window_layers": 0}


class LargestTensor(TorchDispatchMode):
    """The number of elements of the largest storage that any operation made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        answer = func(*args, **(kwargs or {}))
        made = [x.untyped_storage().nbytes() // x.element_size() for x in tree_leaves(answer) if torch.is_tensor(x)]
        self.elements = max([self.elements, *made])
        return answer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("packed", [False, True])
def test_a_step_makes_no_tensor_of_length_squared_elements(packed, window, family, dtype):
    if family == "cpu" and dtype != torch.float32:
        pytest.skip("a CPU has one kernel for all dtypes")
    length = 2048
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = attentions.mask_free(tiny_qwen2(vocab_size=64, **sizes, **windows(window)))
    ids = torch.zeros(1, length, dtype=torch.int64)
    kept, segments = torch.arange(8), Segments.of_rows([[700, 800, 500]], length)
    with device_of(family, dtype) as device:
        model, ids, kept = model.to(device=device, dtype=dtype), ids.to(device), kept.to(device)
        more = {"segments": segments.to(device)} if packed else {}
        with LargestTensor() as largest:
            model(input_ids=ids, logits_to_keep=kept, use_cache=False, **more).logits.sum().backward()
    assert length * 96 <= largest.elements < length**2 / 4


@pytest.mark.parametrize("window", [None, 5])
def test_a_transformers_model_attends_as_with_torchs_attention(window):
    ids = torch.arange(40).reshape(2, 20) % 17
    models = (tiny_qwen2(attn_implementation=how, **windows(window)) for how in (attentions.register(), "eager"))
    found, wanted = (model(input_ids=ids).logits for model in models)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_mask_is_refused_because_it_would_be_ignored():
    with pytest.raises(ValueError, match="segments"):
        attentions.of_layer(torch.nn.Identity(), *inputs(1), torch.ones(1, 1, 40, 40))
