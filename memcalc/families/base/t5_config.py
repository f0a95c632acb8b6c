"""T5's fields (models/t5/configuration_t5.py). A file may give three of them or leave them to the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, get_args

from memcalc.families.base.config import Activation, Count, FamilyConfig, Layers, Probability


@dataclass(frozen=True, kw_only=True)
class T5Config(FamilyConfig):
    """The fields of models/t5/configuration_t5.py. `save_pretrained` also writes those that follow from
    `feed_forward_proj` and `tie_word_embeddings`, and writes `tie_word_embeddings` itself as true."""

    attribute_map: ClassVar[Mapping[str, str]] = {
        "hidden_size": "d_model",
        "num_attention_heads": "num_heads",
        "num_hidden_layers": "num_layers",
        "head_dim": "d_kv",
    }
    refused: ClassVar[Mapping[str, Sequence[Any]]] = {"is_decoder": (False,)}
    given: ClassVar[Sequence[str]] = ("dense_act_fn",)

    vocab_size: Count = 32128
    d_model: Count = 512
    d_kv: Count = 64
    d_ff: Count = 2048
    num_layers: Layers = 6
    num_decoder_layers: Layers | None = None
    num_heads: Count = 8
    relative_attention_num_buckets: Count = 32
    relative_attention_max_distance: Count = 128
    dropout_rate: Probability = 0.1
    feed_forward_proj: str = "relu"
    is_gated_act: bool | None = None
    dense_act_fn: Activation | None = None
    scale_decoder_outputs: bool | None = None
    tie_word_embeddings: bool | None = True

    @classmethod
    def renamed(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        named = super().renamed(config)
        for name in ("is_gated_act", "scale_decoder_outputs"):
            if name in named:
                named[name] = bool(named[name])  # transformers asks `if config.is_gated_act:`
        return named

    @property
    def gated(self) -> bool:
        if self.is_gated_act is not None:
            return self.is_gated_act
        return self.feed_forward_proj.split("-")[0] == "gated"

    @property
    def activation(self) -> str:
        """Return the name of the activation. `gated-gelu` is the gated form of gelu_new."""
        if self.dense_act_fn is not None:
            return self.dense_act_fn
        return "gelu_new" if self.feed_forward_proj == "gated-gelu" else self.feed_forward_proj.split("-")[-1]

    @property
    def scales_outputs(self) -> bool:
        """Tell whether the decoder's outputs are scaled before the head."""
        return (
            self.tie_word_embeddings is not False if self.scale_decoder_outputs is None else self.scale_decoder_outputs
        )

    def check(self) -> None:
        super().check()
        *gate, _name = self.feed_forward_proj.split("-")
        if gate not in ([], ["gated"]) or self.activation not in get_args(Activation):
            raise ValueError(
                f"feed_forward_proj {self.feed_forward_proj!r} is not known; allowed: an activation, or gated- and one: "
                + ", ".join(get_args(Activation))
            )
        if self.relative_attention_num_buckets < 4:
            raise ValueError(
                f"relative_attention_num_buckets {self.relative_attention_num_buckets} leaves none for small distances; "
                "allowed: 4 or more"
            )
