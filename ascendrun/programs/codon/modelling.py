"""A BigBird with a context for transformers. This file is written next to the weights, with the class Context."""

from __future__ import annotations

import torch
from torch import nn
from transformers import BigBirdConfig, BigBirdForMaskedLM
from transformers.modeling_outputs import MaskedLMOutput

from ascendrun.programs.codon.context import Context


class CodonConfig(BigBirdConfig):  # type: ignore[misc]
    model_type = "codon"


class CodonForMaskedLM(BigBirdForMaskedLM):  # type: ignore[misc]
    """The organism of a row is its first token type."""

    config_class = CodonConfig

    def __init__(self, config: BigBirdConfig) -> None:
        super().__init__(config)
        self.context = Context(config.type_vocab_size, config.context_residues)
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **given: object,
    ) -> MaskedLMOutput:
        organisms = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        found = super().forward(input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids, **given)
        found.logits = found.logits + self.context(input_ids, organisms[:, 0])
        if labels is not None:
            found.loss = nn.functional.cross_entropy(found.logits.flatten(0, 1), labels.flatten())
        return found
