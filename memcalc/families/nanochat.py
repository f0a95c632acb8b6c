"""nanochat (models/nanochat/modeling_nanochat.py): Llama with norms that have no weights, one more of them over the
embeddings and over each head of q and k once rotated, an MLP without a gate, capped logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from memcalc.core.dims import divided
from memcalc.core.dtypes import fp32
from memcalc.core.ops.elementwise import cast
from memcalc.core.ops.shape import cat, part, unsqueeze
from memcalc.families.base.blocks import QKV, Rotary, act, softcap
from memcalc.families.base.config import Activation, Count, Decimal, DecoderConfig, Layers
from memcalc.families.base.module import Module, Weight, module
from memcalc.families.base.plans import ATTENTION, ENDS, FC1, FC2
from memcalc.families.base.support import Family, Support
from memcalc.families.gemma import scaled_by_rms
from memcalc.families.llama import Llama, linear_weights

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.core.tensor import Tensor


@dataclass(frozen=True, kw_only=True)
class NanoChatConfig(DecoderConfig):
    """The fields and defaults of models/nanochat/configuration_nanochat.py."""

    null_head_dim: ClassVar[bool] = False

    vocab_size: Count = 50304
    pad_token_id: int | None = 1
    hidden_size: Count = 768
    intermediate_size: Count = 8192
    num_hidden_layers: Layers = 12
    num_attention_heads: Count = 6
    hidden_act: Activation = "relu2"
    max_position_embeddings: Count = 2048
    attention_bias: bool = False
    final_logit_softcapping: Decimal | None = 15.0


class NanoChat(Llama):
    """The program of NanoChatForCausalLM."""

    Config = NanoChatConfig

    def mlp_weights(self) -> Iterator[Weight]:
        yield from linear_weights("mlp.fc1", self.hidden, self.ffn, "mlp", bias=False)
        yield from linear_weights("mlp.fc2", self.ffn, self.hidden, "mlp", bias=False)

    def norm_weights(self, name: str) -> Iterator[Weight]:
        yield from ()

    def norm(self, m: Module, hidden_states: Tensor) -> Tensor:
        """Return the output of NanoChatRMSNorm."""
        with m:
            return cast(scaled_by_rms(cast(hidden_states, fp32)), hidden_states.dtype)

    def before_layers(self, m: Module, hidden_states: Tensor) -> Tensor:
        return self.norm(m / "norm", hidden_states)

    def rotated_qkv(self, m: Module, hidden_states: Tensor, rotary: Rotary) -> QKV:
        q, k, v = super().rotated_qkv(m, hidden_states, rotary)
        q = self.norm(m / "q_norm", q)
        k = self.norm(m / "k_norm", k)
        return q, k, v

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = unsqueeze(cos, 1), unsqueeze(sin, 1)
        q_embed = (q * cos) + (_rotate_half(q) * sin)
        k_embed = (k * cos) + (_rotate_half(k) * sin)
        return q_embed, k_embed

    @module
    def mlp(self, m: Module, x: Tensor) -> Tensor:
        hidden_states = (m / "fc1").linear(x)
        hidden_states = act(hidden_states, self.config.hidden_act)
        return (m / "fc2").linear(hidden_states)

    def head(self, root: Module, hidden_states: Tensor) -> Tensor:
        capped = self.config.final_logit_softcapping is not None
        return softcap(super().head(root, hidden_states)) if capped else super().head(root, hidden_states)


def _rotate_half(x: Tensor) -> Tensor:
    """Return cat((x2, -x1)): the rotation is in the other direction."""
    half = divided(x.shape[-1], 2)
    x1 = part(x, half)
    x2 = part(x, half)
    return cat((x2, -x1), x.shape[-1])


FAMILY: Final = Family(
    "nanochat",
    NanoChat,
    Support(
        tensor_parallel={**ENDS, **ATTENTION, FC1: "colwise", FC2: "rowwise"},
        sequence_parallel=True,
        context_parallel=True,
        ulysses=True,
    ),
)
