"""Bamba (models/bamba/modeling_bamba.py): Mamba 2 in most layers, attention in a few, half of each head rotated.

As Mamba 2, the path in plain torch, as runs without the packages mamba_ssm and causal_conv1d.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from memcalc.families.base.config import (
    Activation,
    Count,
    FamilyConfig,
    Layers,
    Probability,
    RotaryConfig,
    Several,
    check_divides,
)
from memcalc.families.base.hybrid import Hybrid
from memcalc.families.base.rotary import apply_partial_rotary_pos_emb
from memcalc.families.base.support import Family, Support
from memcalc.families.mamba2 import StateSpace, check_groups

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from memcalc.core.dims import Dim
    from memcalc.core.tensor import Tensor
    from memcalc.families.base.module import Weight


@dataclass(frozen=True, kw_only=True)
class MixerConfig(FamilyConfig):
    """The fields of a mixer of Mamba 2 in a hybrid."""

    hidden_size: Count
    mamba_n_heads: Count = 128
    mamba_d_head: Count | Literal["auto"] = "auto"
    mamba_n_groups: Count = 1
    mamba_d_state: Several = 256
    mamba_d_conv: Count = 4
    mamba_expand: Count = 2
    mamba_chunk_size: Several = 256
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False

    @property
    def inner(self) -> int:
        """Return the number of channels of a mixer."""
        return self.mamba_expand * self.hidden_size

    @property
    def mamba_head_dim(self) -> int:
        return self.inner // self.mamba_n_heads if isinstance(self.mamba_d_head, str) else self.mamba_d_head

    def check(self) -> None:
        super().check()
        if self.mamba_head_dim * self.mamba_n_heads != self.inner:
            raise ValueError(
                f"mamba_n_heads {self.mamba_n_heads} of mamba_d_head {self.mamba_head_dim} are not {self.inner} channels"
            )
        check_groups(self.mamba_n_heads, self.mamba_n_groups, self.inner)


def mixer_of(config: Any, hidden: Dim) -> StateSpace:
    """The mixer of a configuration that has the fields of MixerConfig."""
    return StateSpace(
        hidden=hidden, heads=config.mamba_n_heads, head_dim=config.mamba_head_dim, groups=config.mamba_n_groups,
        state=config.mamba_d_state, kernel=config.mamba_d_conv, chunk=config.mamba_chunk_size,
        bias=config.mamba_proj_bias, conv_bias=config.mamba_conv_bias, activation=config.hidden_act,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class BambaConfig(RotaryConfig, MixerConfig):
    """The fields and defaults of models/bamba/configuration_bamba.py."""

    computed: ClassVar[Sequence[str]] = ("layer_types", "layers_block_type")
    null_head_dim: ClassVar[bool] = False
    attribute_map: ClassVar[Mapping[str, str]] = {"layer_types": "layers_block_type"}
    refused: ClassVar[Mapping[str, Sequence[Any]]] = {"z_loss_coefficient": (0, 0.0)}
    rotates_part: ClassVar[bool] = True

    vocab_size: Count = 128000
    pad_token_id: int | None = 0
    tie_word_embeddings: bool = False
    hidden_size: Count = 4096
    intermediate_size: Count = 14336
    num_hidden_layers: Layers = 32
    num_attention_heads: Count = 32
    num_key_value_heads: Count | None = 8
    hidden_act: Activation = "silu"
    max_position_embeddings: Count = 262144
    attention_dropout: Probability = 0.0
    attn_layer_indices: list[int] | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    head_dim: Count | None = None

    @property
    def default_rotary_factor(self) -> float:
        return 0.5

    def check(self) -> None:
        super().check()
        check_divides(self, "num_attention_heads", "num_key_value_heads")


class Bamba(Hybrid):
    """The program of BambaForCausalLM."""

    Config = BambaConfig
    hands_weights_on = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.mixer = mixer_of(config, self.hidden)

    def mixes(self, i: int) -> bool:
        return i not in (self.config.attn_layer_indices or ())

    def layer_weights(self, i: int) -> Iterator[Weight]:
        weights = list(super().layer_weights(i))
        first = ("mamba.", "self_attn.")
        yield from (w for w in weights if not w.name.startswith(first))
        yield from (w for w in weights if w.name.startswith(first))

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return apply_partial_rotary_pos_emb(q, k, cos, sin)


FAMILY: Final = Family("bamba", Bamba, Support(uses_weights_within=True))
