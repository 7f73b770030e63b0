"""The architecture `current` for transformers. The stage export writes these classes with those of model.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from ascendrun.programs.nanochat.model import NanoChat
from ascendrun.programs.nanochat.sizes import Sizes


def attention(q: Any, k: Any, v: Any, *, causal: bool = True, window: int | None = None) -> Any:
    places = torch.arange(q.shape[1], device=q.device)
    back = places[:, None] - places[None]
    seen = (back >= 0) & (back < (window or q.shape[1]))
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True).transpose(1, 2)


class NanoChatCurrentConfig(PretrainedConfig):  # type: ignore[misc]
    model_type = "nanochat-current"


class NanoChatCurrentForCausalLM(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """Each pass reads the whole text. Padding comes after a text."""

    config_class = NanoChatCurrentConfig
    _no_split_modules = ["Block"]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = NanoChat(Sizes.of_config(config.to_dict()))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None: ...

    def prepare_inputs_for_generation(
        self, input_ids: torch.Tensor, attention_mask: Any = None, **given: Any
    ) -> dict[str, Any]:
        return {"input_ids": input_ids, "attention_mask": attention_mask}

    def forward(self, input_ids: torch.Tensor, attention_mask: Any = None, labels: Any = None, **given: Any) -> Any:
        if attention_mask is not None and not bool(attention_mask[:, 0].all()):
            raise ValueError("padding before a text is not supported; use padding_side='right'")
        logits = self.model(input_ids)
        loss = None
        if labels is not None:
            loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)
