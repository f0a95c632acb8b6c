"""ELECTRA's generator (models/electra/modeling_electra.py, ElectraForCausalLM): BERT with narrow embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from memcalc.core.ops.elementwise import activation
from memcalc.families.base.config import Count
from memcalc.families.base.module import Module, Weight, module
from memcalc.families.base.support import Family, Support
from memcalc.families.bert import Bert, BertConfig
from memcalc.families.gpt2 import norm_weights
from memcalc.families.llama import linear_weights

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from memcalc.core.tensor import Tensor


@dataclass(frozen=True, kw_only=True)
class ElectraConfig(BertConfig):
    """The fields and defaults of models/electra/configuration_electra.py."""

    embedding_size: Count = 128
    hidden_size: Count = 256
    num_attention_heads: Count = 4
    intermediate_size: Count = 1024

    @property
    def width_of_embedding(self) -> int:
        return self.embedding_size


class Electra(Bert):
    """The program of ElectraForCausalLM and ElectraForMaskedLM."""

    Config = ElectraConfig
    prefix = "Electra"
    base = "electra"

    @property
    def untrained(self) -> Collection[str]:
        return ()

    def head_weights(self) -> Iterator[Weight]:
        yield from norm_weights("generator_predictions.LayerNorm", self.embed)
        yield from linear_weights("generator_predictions.dense", self.hidden, self.embed, "head", bias=True)
        if not self.config.tie_word_embeddings:
            yield Weight("generator_lm_head.weight", (self.vocab, self.embed), "head")
        yield Weight("generator_lm_head.bias", (self.vocab,), "head")

    def head(self, root: Module, hidden_states: Tensor) -> Tensor:
        predictions = self.transform(root / "generator_predictions", hidden_states)
        tied, head = self.config.tie_word_embeddings, root / "generator_lm_head"
        weight = (root / "electra.embeddings.word_embeddings" if tied else head).weight()
        return root.run.linear("generator_lm_head", predictions, weight, head.weight("bias"))

    @module
    def transform(self, m: Module, hidden_states: Tensor) -> Tensor:
        hidden_states = (m / "dense").linear(hidden_states)
        hidden_states = activation(hidden_states, "gelu")
        return (m / "LayerNorm").layer_norm(hidden_states)


FAMILY: Final = Family("electra", Electra, Support(tensor_parallel={}))
