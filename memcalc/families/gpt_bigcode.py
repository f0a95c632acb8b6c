"""GPT-BigCode, SantaCoder and StarCoder (models/gpt_bigcode/modeling_gpt_bigcode.py): GPT-2 with one key/value head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from memcalc.core.dims import Dim, merge
from memcalc.core.dtypes import boolean
from memcalc.core.ops.shape import contiguous, reshape, split, transpose, unsqueeze, view
from memcalc.families.base.blocks import Attended, act, attention
from memcalc.families.base.config import Activation, Count, FamilyConfig, Layers, Probability, check_divides
from memcalc.families.base.dropouts import dropout_module
from memcalc.families.base.module import Buffer, Module, Weight, module
from memcalc.families.base.support import Family, Support
from memcalc.families.gpt2 import GPT2, norm_weights
from memcalc.families.llama import linear_weights

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from memcalc.core.tensor import Tensor


@dataclass(frozen=True, kw_only=True)
class GPTBigCodeConfig(FamilyConfig):
    """The fields and defaults of models/gpt_bigcode/configuration_gpt_bigcode.py."""

    attribute_map: ClassVar[Mapping[str, str]] = {
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    }
    refused: ClassVar[Mapping[str, Sequence[Any]]] = {"add_cross_attention": (False, None)}

    vocab_size: Count = 50257
    n_positions: Count = 1024
    n_embd: Count = 768
    n_layer: Layers = 12
    n_head: Count = 12
    n_inner: Count | None = None
    activation_function: Activation = "gelu_pytorch_tanh"
    resid_pdrop: Probability = 0.1
    embd_pdrop: Probability = 0.1
    attn_pdrop: Probability = 0.1
    multi_query: bool = True
    tie_word_embeddings: bool = True

    @property
    def reorder_and_upcast_attn(self) -> bool:
        return False

    def check(self) -> None:
        super().check()
        check_divides(self, "n_embd", "n_head")


class GPTBigCode(GPT2):
    """The program of GPTBigCodeForCausalLM."""

    positional = 1
    Config = GPTBigCodeConfig
    blocks_take_positions = False

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.multi_query: bool = config.multi_query
        self.kv_heads = Dim("kv_heads", 1) if config.multi_query else self.heads

    # --- weights and buffers

    def layer_weights(self, i: int) -> Iterator[Weight]:
        kv = merge(self.kv_heads, self.head_dim)
        qkv = Dim("hidden+2·kv_heads·head_dim", self.hidden.size + 2 * kv.size)
        yield from norm_weights("ln_1", self.hidden)
        yield from linear_weights("attn.c_attn", self.hidden, qkv, "attention", bias=True)
        yield from linear_weights("attn.c_proj", self.hidden, self.hidden, "attention", bias=True)
        yield from norm_weights("ln_2", self.hidden)
        yield from linear_weights("mlp.c_fc", self.hidden, self.ffn, "mlp", bias=True)
        yield from linear_weights("mlp.c_proj", self.ffn, self.hidden, "mlp", bias=True)

    def buffers(self) -> Iterator[Buffer]:
        yield Buffer("transformer.bias", (self.positions, self.positions), boolean)

    # --- forward

    @module
    def attention(self, m: Module, hidden_states: Tensor, mask: Tensor | None) -> Attended:
        batch, seq, hidden = hidden_states.shape
        query, key, value = self.qkv(m, hidden_states)
        key, value = m.cached(key, value)
        attn_output, attn_weights = attention(m.run, query, key, value, mask, p=self.config.attn_pdrop)
        attn_output = contiguous(reshape(attn_output, batch, seq, hidden))
        attn_output = (m / "c_proj").linear(attn_output)
        attn_output = dropout_module(attn_output, self.config.resid_pdrop)
        return attn_output, attn_weights

    def qkv(self, m: Module, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, seq, hidden = hidden_states.shape
        if self.multi_query:
            qkv = unsqueeze((m / "c_attn").linear(hidden_states), 1)
            query, key, value = split(qkv, hidden, self.head_dim, self.head_dim)
            return transpose(view(query, batch, seq, self.heads, self.head_dim), 1, 2), key, value
        qkv = view(
            (m / "c_attn").linear(hidden_states), batch, seq, self.heads, Dim("3·head_dim", 3 * self.head_dim.size)
        )
        query, key, value = split(transpose(qkv, 1, 2), *[self.head_dim] * 3)
        return query, key, value

    @module
    def mlp(self, m: Module, hidden_states: Tensor) -> Tensor:
        hidden_states = (m / "c_fc").linear(hidden_states)
        hidden_states = act(hidden_states, self.config.activation_function)
        hidden_states = (m / "c_proj").linear(hidden_states)
        return dropout_module(hidden_states, self.config.resid_pdrop)


FAMILY: Final = Family("gpt_bigcode", GPTBigCode, Support(tensor_parallel={}))
