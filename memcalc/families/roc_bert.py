"""RoCBert (models/roc_bert/modeling_roc_bert.py, RoCBertForCausalLM): BERT that also embeds how a character looks and sounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from memcalc.core.dims import Dim
from memcalc.core.dtypes import int64
from memcalc.core.ops.elementwise import add_, dropout
from memcalc.core.ops.shape import cat, clone
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.families.base.config import Count
from memcalc.families.base.module import Module, Weight, module
from memcalc.families.base.support import Family, Support
from memcalc.families.bert import Bert, BertConfig
from memcalc.families.gpt2 import norm_weights
from memcalc.families.llama import linear_weights

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence


@dataclass(frozen=True, kw_only=True)
class RoCBertConfig(BertConfig):
    """The fields and defaults of models/roc_bert/configuration_roc_bert.py."""

    refused: ClassVar[Mapping[str, Sequence[Any]]] = {**BertConfig.refused, "concat_input": (True,)}

    enable_pronunciation: bool = True
    enable_shape: bool = True
    pronunciation_embed_dim: Count = 768
    pronunciation_vocab_size: Count = 910
    shape_embed_dim: Count = 512
    shape_vocab_size: Count = 24858


class RoCBert(Bert):
    """The program of RoCBertForCausalLM and RoCBertForMaskedLM."""

    Config = RoCBertConfig
    prefix = "RoCBert"
    base = "roc_bert"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.sounds = Dim("pronunciations", config.pronunciation_vocab_size)
        self.sound = Dim("pronunciation", config.pronunciation_embed_dim)
        self.looks = Dim("shapes", config.shape_vocab_size)
        self.look = Dim("shape", config.shape_embed_dim)
        self.joined = [self.hidden]
        if config.enable_shape:
            self.joined.append(Dim("hidden+shape", self.joined[-1].size + self.look.size))
        if config.enable_pronunciation:
            self.joined.append(Dim(f"{self.joined[-1].name}+pronunciation", self.joined[-1].size + self.sound.size))

    @property
    def untrained(self) -> Collection[str]:
        """Return the names of tables that exist, but are not used."""
        tables = {"shape_embed": self.config.enable_shape, "pronunciation_embed": self.config.enable_pronunciation}
        off = [f"{self.base}.embeddings.{name}.weight" for name, enabled in tables.items() if not enabled]
        return [*super().untrained, *off]

    def embedding_weights(self) -> Iterator[Weight]:
        tables = (
            ("word_embeddings", self.vocab, self.hidden),
            ("pronunciation_embed", self.sounds, self.sound),
            ("shape_embed", self.looks, self.look),
            ("position_embeddings", self.positions, self.hidden),
            ("token_type_embeddings", self.types, self.hidden),
        )
        for name, rows, width in tables:
            yield Weight(f"embeddings.{name}.weight", (rows, width), "embedding")
        yield from linear_weights("embeddings.map_inputs_layer", self.joined[-1], self.hidden, "embedding", bias=True)
        yield from norm_weights("embeddings.LayerNorm", self.hidden)

    @module
    def embeddings(self, m: Module, ids: Tensor) -> Tensor:
        positions, token_types = self.ids_of(m, ids)
        inputs_embeds = (m / "word_embeddings").embedding(ids)
        embedding_in = clone(inputs_embeds)
        enabled = {"shape_embed": self.config.enable_shape, "pronunciation_embed": self.config.enable_pronunciation}
        names = [name for name, on in enabled.items() if on]
        held: list[Tensor] = []  # variables of the real frame
        for name, width in zip(names, self.joined[1:], strict=True):
            own_ids = new_tensor(m.run.memory, ids.shape, int64, f"{name} ids")
            embedding_own = (m / name).embedding(own_ids)
            embedding_in = cat((embedding_in, embedding_own), width)
            held += [own_ids, embedding_own]
        embedding_in = (m / "map_inputs_layer").linear(embedding_in)
        token_type_embeddings = (m / "token_type_embeddings").embedding(token_types)
        embedding_in = add_(embedding_in, token_type_embeddings)
        position_embeddings = (m / "position_embeddings").embedding(positions)
        embedding_in = add_(embedding_in, position_embeddings)
        embedding_in = (m / "LayerNorm").layer_norm(embedding_in)
        return dropout(embedding_in, self.config.hidden_dropout_prob)


FAMILY: Final = Family("roc_bert", RoCBert, Support(tensor_parallel={}))
