"""RoBERTa: models/roberta/modeling_roberta.py, RobertaForCausalLM, with RobertaForMaskedLM's parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from memcalc.core.dtypes import boolean, int32, int64
from memcalc.core.ops.elementwise import activation, cast, like, scale
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.families.base.config import Count
from memcalc.families.base.module import Module, Weight
from memcalc.families.base.support import Family, Support
from memcalc.families.bert import Bert, BertConfig
from memcalc.families.gpt2 import norm_weights
from memcalc.families.llama import linear_weights

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, kw_only=True)
class RobertaConfig(BertConfig):
    """The fields and defaults of models/roberta/configuration_roberta.py."""

    vocab_size: Count = 50265
    pad_token_id: int = 1

    def check(self) -> None:
        super().check()
        if not 0 <= self.pad_token_id < self.max_position_embeddings - 1:
            raise ValueError(
                f"pad_token_id {self.pad_token_id} leaves no position: they begin after it and end below "
                f"max_position_embeddings {self.max_position_embeddings}"
            )


class Roberta(Bert):
    """The program of RobertaForCausalLM and RobertaForMaskedLM.

    Positions are counted from the token ids and begin after the padding's.
    """

    Config = RobertaConfig
    prefix = "Roberta"
    base = "roberta"
    decoder = "lm_head.decoder"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.max_seq_len = config.max_position_embeddings - config.pad_token_id - 1
        self.positions_limit = self.max_seq_len

    def embedding_weights(self) -> Iterator[Weight]:
        word, position, *others = super().embedding_weights()
        yield from (word, *others, position)

    def head_weights(self) -> Iterator[Weight]:
        yield Weight("lm_head.bias", (self.vocab,), "head")
        yield from linear_weights("lm_head.dense", self.hidden, self.hidden, "head", bias=True)
        yield from norm_weights("lm_head.layer_norm", self.hidden)
        yield from self.decoder_weights()

    def head(self, root: Module, hidden_states: Tensor) -> Tensor:
        """Return the output of RobertaLMHead."""
        with root / "lm_head" as m:
            x = (m / "dense").linear(hidden_states)
            x = activation(x, "gelu")
            x = (m / "layer_norm").layer_norm(x)
            return self.decode(root, x)

    def ids_of(self, m: Module, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the position ids (create_position_ids_from_input_ids), and the token type ids gathered at them."""
        mask = cast(like(ids, "no padding", boolean), int32)
        summed = like(ids, "cumulated positions")
        incremental_indices = scale(cast(summed, int32), "add") * mask
        del summed
        positions = scale(cast(incremental_indices, int64), "add")
        return positions, new_tensor(m.run.memory, ids.shape, int64, "token type ids")


FAMILY: Final = Family("roberta", Roberta, Support(tensor_parallel={}))
