"""CodeGen (models/codegen/modeling_codegen.py): GPT-J with one projection for q, k and v, laid out in four parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from memcalc.core.dims import Dim, divided, merge
from memcalc.core.ops.elementwise import scale
from memcalc.core.ops.matmul import matmul
from memcalc.core.ops.shape import reshape, split, transpose
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.families.base.support import Family, Support
from memcalc.families.gptj import GPTJ, GPTJConfig
from memcalc.families.llama import linear_weights

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.core.dtypes import DType
    from memcalc.families.base.module import Module, Weight

_PARTS = Dim("4", 4)
"""The number of TPU cores that the projection's columns were spread over (`mp_num`)."""


@dataclass(frozen=True, kw_only=True)
class CodeGenConfig(GPTJConfig):
    """The fields and defaults of models/codegen/configuration_codegen.py."""

    def check(self) -> None:
        super().check()
        if self.n_head % _PARTS.size:
            raise ValueError(f"n_head {self.n_head} is not divisible by {_PARTS.size}")


class CodeGen(GPTJ):
    """The program of CodeGenForCausalLM."""

    Config = CodeGenConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.heads_of_part = divided(self.heads, _PARTS.size)

    def attention_weights(self) -> Iterator[Weight]:
        qkv = Dim("3·hidden", 3 * self.hidden.size)
        yield from linear_weights("attn.qkv_proj", self.hidden, qkv, "attention", bias=False)
        yield from linear_weights("attn.out_proj", self.hidden, self.hidden, "attention", bias=False)

    def qkv(self, m: Module, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        batch, seq, _ = hidden_states.shape
        qkv = (m / "qkv_proj").linear(hidden_states)
        local_dim = merge(self.heads_of_part, self.head_dim)
        qkv_split = reshape(qkv, batch, seq, _PARTS, Dim("3·hidden/4", 3 * local_dim.size))
        query, value, key = split(qkv_split, local_dim, local_dim, local_dim)
        query, key = self.split_heads(query), self.split_heads(key)
        value = transpose(self.split_heads(value), 1, 2)
        return query, key, value, qkv

    def split_heads(self, x: Tensor) -> Tensor:
        batch, seq, parts, _ = x.shape
        reshaped = reshape(x, batch, seq, parts, self.heads_of_part, self.head_dim)
        return reshape(reshaped, batch, seq, self.heads, self.head_dim)

    def sincos(self, m: Module, positions: Tensor, dtype: DType) -> tuple[Tensor, object]:
        shape = (*positions.shape, self.rotary_dim)
        return new_tensor(m.run.memory, shape, m.buffer("embed_positions").dtype, "sines and cosines"), None

    def scores(self, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
        attn_weights = matmul(query, transpose(key, 2, 3), "attention scores")
        if mask is not None:
            attn_weights = attn_weights + mask
        return scale(attn_weights, "div")


FAMILY: Final = Family("codegen", CodeGen, Support(tensor_parallel={}))
