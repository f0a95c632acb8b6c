"""Granite-MoE with a shared expert (models/granitemoeshared/modeling_granitemoeshared.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

from memcalc.core.dims import Dim
from memcalc.core.ops.shape import chunk
from memcalc.families.base.blocks import act
from memcalc.families.base.config import Bounds
from memcalc.families.base.module import Module, Weight, module
from memcalc.families.base.plans import GRANITE_MOE
from memcalc.families.base.support import Family, Support
from memcalc.families.granitemoe import GraniteMoe, GraniteMoeConfig
from memcalc.families.llama import linear_weights

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.core.tensor import Tensor


@dataclass(frozen=True, kw_only=True)
class GraniteMoeSharedConfig(GraniteMoeConfig):
    """The fields and defaults of models/granitemoeshared/configuration_granitemoeshared.py."""

    shared_intermediate_size: Annotated[int, Bounds(ge=0, le=10**7)] = 0


class GraniteMoeShared(GraniteMoe):
    """The program of GraniteMoeSharedForCausalLM."""

    Config = GraniteMoeSharedConfig
    shares_always = False
    """True if there is a shared expert, even one of width 0."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.shared_ffn = Dim("shared_ffn", config.shared_intermediate_size)
        self.shared_gate_up = Dim("2·shared_ffn", 2 * config.shared_intermediate_size)

    def mlp_weights(self) -> Iterator[Weight]:
        yield from super().mlp_weights()
        if self.shared_ffn.size or self.shares_always:
            yield from linear_weights("shared_mlp.input_linear", self.hidden, self.shared_gate_up, "mlp", bias=False)
            yield from linear_weights("shared_mlp.output_linear", self.shared_ffn, self.hidden, "mlp", bias=False)

    def feed_forward(self, m: Module, x: Tensor) -> tuple[Tensor, Tensor]:
        moe_hidden_states, _ = super().feed_forward(m, x)
        if not self.shared_ffn.size:
            return moe_hidden_states, moe_hidden_states
        return moe_hidden_states + self.shared_mlp(m / "shared_mlp", x), moe_hidden_states

    @module
    def shared_mlp(self, m: Module, hidden_states: Tensor) -> Tensor:
        """Return the output of GraniteMoeSharedMLP."""
        hidden_states = (m / "input_linear").linear(hidden_states)
        chunked_hidden_states = chunk(hidden_states, 2)
        hidden_states = act(chunked_hidden_states[0], self.config.hidden_act) * chunked_hidden_states[1]
        return (m / "output_linear").linear(hidden_states)


FAMILY: Final = Family(
    "granitemoeshared", GraniteMoeShared, Support(tensor_parallel=GRANITE_MOE, context_parallel=True, ulysses=True)
)
