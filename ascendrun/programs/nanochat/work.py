"""The work of a training of nanochat: its decoder, and the optimizer's state that the ranks share."""

from __future__ import annotations

from dataclasses import dataclass

from ascendrun.planner.models import Shape
from ascendrun.planner.workload import Workload
from ascendrun.programs.nanochat.sizes import Sizes


@dataclass(frozen=True)
class ChatShape(Shape):
    """The decoder of this program: two matrices in the feed-forward part, value embeddings, no norms."""

    sizes: Sizes

    @property
    def layer_weights(self) -> int:
        return self.sizes.layer_matrices // self.sizes.layers

    @property
    def outside(self) -> int:
        return self.sizes.weights - self.layers * self.layer_weights


@dataclass(frozen=True)
class ChatWorkload(Workload):
    shares_state: bool = False
    has_muon = True

    def moments(self, ranks: int = 1) -> int:
        assert isinstance(self.model, ChatShape)
        return self.model.sizes.state_values(ranks if self.shares_state else 1)

    @property
    def flops_per_token(self) -> float:
        assert isinstance(self.model, ChatShape)
        return self.model.sizes.flops_per_token


def shape_of(sizes: Sizes) -> ChatShape:
    return ChatShape(
        hidden=sizes.hidden,
        inner=4 * sizes.hidden,
        layers=sizes.layers,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head=sizes.head,
        vocabulary=sizes.padded_vocabulary,
        is_tied=False,
        has_bias=False,
        positions=None,
        sizes=sizes,
    )
