"""DeBERTa v2's fields (models/deberta_v2/configuration_deberta_v2.py), and the positions that its layers attend to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from memcalc.families.base.config import (
    Activation,
    Bounds,
    Count,
    CountOrNone,
    FamilyConfig,
    Layers,
    Probability,
    check_divides,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

CountOrNegative = Annotated[int, Bounds(le=10**7)]
"""A dim for which any number below 1 means that there is none."""


@dataclass(frozen=True, kw_only=True)
class DebertaV2Config(FamilyConfig):
    """The fields of models/deberta_v2/configuration_deberta_v2.py, and those that the modules read besides."""

    vocab_size: Count = 128100
    pad_token_id: int | None = 0
    hidden_size: Count = 1536
    embedding_size: Count | None = None
    num_hidden_layers: Layers = 24
    num_attention_heads: Count = 24
    attention_head_size: Count | None = None
    intermediate_size: Count = 6144
    hidden_act: Activation = "gelu"
    hidden_dropout_prob: Probability = 0.1
    attention_probs_dropout_prob: Probability = 0.1
    max_position_embeddings: Count = 512
    type_vocab_size: CountOrNone = 0
    relative_attention: bool = False
    max_relative_positions: CountOrNegative = -1
    position_buckets: CountOrNegative = -1
    norm_rel_ebd: str = "none"
    share_att_key: bool = False
    position_biased_input: bool = True
    pos_att_type: str | list[str] | None = None
    conv_kernel_size: CountOrNone = 0
    conv_groups: Count = 1
    conv_act: Activation = "tanh"
    legacy: bool = True
    tie_word_embeddings: bool = True

    @classmethod
    def renamed(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields under their names here. transformers takes these two as given, or computes them if they are
        left out."""
        for name in ("attention_head_size", "embedding_size"):
            if name in config and config[name] is None:
                raise ValueError(f"field `{name}` is null; it should be a number or left out")
        return super().renamed(config)

    @property
    def width_of_embedding(self) -> int:
        """Return the width of a table's rows. If it is not `hidden_size`, a projection follows."""
        return self.hidden_size if self.embedding_size is None else self.embedding_size

    @property
    def positions_attended(self) -> list[str]:
        """Return the kinds of attention to positions, such as "c2p", content to positions, and "p2c", positions to
        content."""
        if isinstance(self.pos_att_type, str):
            return [kind.strip() for kind in self.pos_att_type.lower().split("|")]
        return self.pos_att_type or []

    @property
    def attends_to_positions(self) -> bool:
        """Tell whether the loss depends on relative positions."""
        return self.relative_attention and not {"c2p", "p2c"}.isdisjoint(self.positions_attended)

    @property
    def norms_positions(self) -> bool:
        """Tell whether the encoder has a norm for the table of relative positions."""
        return "layer_norm" in [name.strip() for name in self.norm_rel_ebd.lower().split("|")]

    @property
    def relative_positions(self) -> int:
        """Return the number of distinct relative positions to either side."""
        if self.position_buckets > 0:
            return self.position_buckets
        return self.max_relative_positions if self.max_relative_positions > 0 else self.max_position_embeddings

    def check(self) -> None:
        super().check()
        check_divides(self, "hidden_size", "num_attention_heads")
        width = self.hidden_size // self.num_attention_heads
        if self.attention_head_size not in (None, width):
            raise ValueError(
                f"attention_head_size {self.attention_head_size} has to be the {width} dims that a head has"
            )
        if self.conv_kernel_size:
            check_divides(self, "hidden_size", "conv_groups")

    def check_step(self) -> None:
        super().check_step()
        if self.conv_kernel_size and not self.conv_kernel_size % 2:
            raise ValueError(f"conv_kernel_size {self.conv_kernel_size} is even, which fails in transformers' forward")
        if self.relative_attention and self.position_buckets == 1:
            raise ValueError("position_buckets 1 fails in transformers' forward; allowed: 2 or more, or -1 for none")
        if not self.legacy and self.width_of_embedding != self.hidden_size:
            raise ValueError(
                f"embedding_size {self.embedding_size} fails with legacy false; allowed: {self.hidden_size}"
            )
