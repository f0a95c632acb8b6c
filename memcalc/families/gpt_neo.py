"""GPT-Neo (models/gpt_neo/modeling_gpt_neo.py): scores in fp32, a table of allowed positions in each layer.

A local layer's table has a window in it; its bytes are those of a global layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from memcalc.core.dims import ONE_DIM, Dim
from memcalc.core.dtypes import boolean, fp32
from memcalc.core.ops.elementwise import cast, softmax
from memcalc.core.ops.matmul import matmul
from memcalc.core.ops.selection import where_else
from memcalc.core.ops.shape import contiguous, first, reshape, transpose, view
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.families.base.blocks import Attended, act, position_ids
from memcalc.families.base.config import Activation, Count, FamilyConfig, Layers, Probability, check_divides
from memcalc.families.base.dropouts import dropout_module
from memcalc.families.base.masks import causal_mask
from memcalc.families.base.module import Buffer, Module, Weight, module
from memcalc.families.base.support import Family, Support
from memcalc.families.gpt2 import GPT2, norm_weights
from memcalc.families.gptj import GPTJ
from memcalc.families.llama import linear_weights

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@dataclass(frozen=True, kw_only=True)
class GPTNeoConfig(FamilyConfig):
    """The fields and defaults of models/gpt_neo/configuration_gpt_neo.py."""

    attribute_map: ClassVar[Mapping[str, str]] = {"num_attention_heads": "num_heads", "num_hidden_layers": "num_layers"}

    vocab_size: Count = 50257
    max_position_embeddings: Count = 2048
    hidden_size: Count = 2048
    num_layers: Layers = 24
    attention_types: list[Any] | None = None
    num_heads: Count = 16
    intermediate_size: Count | None = None
    window_size: int = 256
    activation_function: Activation = "gelu_new"
    resid_dropout: Probability = 0.0
    embed_dropout: Probability = 0.0
    attention_dropout: Probability = 0.0
    tie_word_embeddings: bool = True

    def check(self) -> None:
        super().check()
        check_divides(self, "hidden_size", "num_heads")
        types = self.attention_types or [[["global", "local"], 12]]
        try:
            kinds = [kind for names, times in types for _ in range(times) for kind in names]
        except (TypeError, ValueError):
            raise ValueError(f"attention_types {types!r} is no list of [[names], times]") from None
        if set(kinds) - {"global", "local"}:
            raise ValueError(f"attention_types {types!r} has names that are not known; allowed: 'global', 'local'")
        if len(kinds) != self.num_layers:
            raise ValueError(f"attention_types name {len(kinds)} layers, num_layers is {self.num_layers}")


class GPTNeo(GPTJ):
    """The program of GPTNeoForCausalLM."""

    Config = GPTNeoConfig

    def __init__(self, config: Any) -> None:
        self.config = config
        self.layers = config.num_layers
        self.vocab = Dim("vocab", config.vocab_size)
        self.hidden = Dim("hidden", config.hidden_size)
        self.ffn = Dim("ffn", config.intermediate_size or 4 * config.hidden_size)
        self.heads = Dim("heads", config.num_heads)
        self.kv_heads = self.heads
        self.head_dim = Dim("head_dim", config.hidden_size // config.num_heads)
        self.positions = Dim("positions", config.max_position_embeddings)
        self.max_seq_len = config.max_position_embeddings
        self.positions_limit = config.max_position_embeddings

    # --- weights and buffers

    def weights(self) -> Iterator[Weight]:
        yield from GPT2.weights(self)

    def layer_weights(self, i: int) -> Iterator[Weight]:
        yield from norm_weights("ln_1", self.hidden)
        for name in ("k_proj", "v_proj", "q_proj"):
            yield from linear_weights(f"attn.attention.{name}", self.hidden, self.hidden, "attention", bias=False)
        yield from linear_weights("attn.attention.out_proj", self.hidden, self.hidden, "attention", bias=True)
        yield from norm_weights("ln_2", self.hidden)
        yield from linear_weights("mlp.c_fc", self.hidden, self.ffn, "mlp", bias=True)
        yield from linear_weights("mlp.c_proj", self.ffn, self.hidden, "mlp", bias=True)

    def buffers(self) -> Iterator[Buffer]:
        shape = (ONE_DIM, ONE_DIM, self.positions, self.positions)
        for i in range(self.layers):
            yield Buffer(f"transformer.h.{i}.attn.attention.bias", shape, boolean)

    # --- forward

    @module
    def model(self, m: Module, ids: Tensor) -> Tensor:
        run = m.run
        inputs_embeds = (m / "wte").embedding(ids)
        positions = position_ids(run)
        mask = causal_mask(run)
        position_embeds = (m / "wpe").embedding(positions)
        run.memory.scope = m.path
        hidden_states = inputs_embeds + position_embeds
        hidden_states = dropout_module(hidden_states, self.config.embed_dropout)
        for i in range(self.layers):
            run.memory.enter(run.memory.phase, i)
            outputs = self.call_layer(Module(run, f"{m.path}.h.*", i), hidden_states, mask)
            hidden_states = outputs[0]
        run.memory.enter(run.memory.phase, None)
        hidden_states = (m / "ln_f").layer_norm(hidden_states)
        return view(hidden_states, *hidden_states.shape)

    @module
    def layer(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, m: Module, hidden_states: Tensor, mask: Tensor | None
    ) -> Attended:
        residual = hidden_states
        hidden_states = (m / "ln_1").layer_norm(hidden_states)
        attn_output, attn_weights = self.attention(m / "attn.attention", hidden_states, mask)
        hidden_states = attn_output + residual
        residual = hidden_states
        hidden_states = (m / "ln_2").layer_norm(hidden_states)
        feed_forward_hidden_states = self.mlp(m / "mlp", hidden_states)
        hidden_states = residual + feed_forward_hidden_states
        return hidden_states, attn_weights

    @module
    def attention(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, m: Module, hidden_states: Tensor, mask: Tensor | None
    ) -> Attended:
        query, key, value, _ = self.qkv(m, hidden_states)
        query, key = transpose(query, 1, 2), transpose(key, 1, 2)
        key, value = m.cached(key, value)
        attn_output, attn_weights = self.attend(m, query, key, value, mask)
        attn_output = contiguous(transpose(attn_output, 1, 2))
        attn_output = reshape(attn_output, *hidden_states.shape)
        attn_output = (m / "out_proj").linear(attn_output)
        attn_output = dropout_module(attn_output, self.config.resid_dropout)
        return attn_output, attn_weights

    def attend(self, m: Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Attended:
        query, key = cast(q, fp32), cast(k, fp32)
        attn_weights = matmul(query, transpose(key, 2, 3), "attention scores")
        table = m.run.buffers[f"transformer.h.{m.layer}.attn.attention.bias"]
        causal_mask = first(table, ONE_DIM, ONE_DIM, q.shape[2], k.shape[2])
        _mask_value = new_tensor(m.run.memory, (), fp32, "mask value")
        attn_weights = where_else(causal_mask, attn_weights, "allowed scores")
        if mask is not None:
            attn_weights = attn_weights + mask
        attn_weights = softmax(attn_weights)
        attn_weights = cast(attn_weights, v.dtype)
        attn_weights = dropout_module(attn_weights, self.config.attention_dropout)
        attn_output = matmul(attn_weights, v, "attention output")
        return attn_output, attn_weights

    @module
    def mlp(self, m: Module, hidden_states: Tensor) -> Tensor:
        hidden_states = (m / "c_fc").linear(hidden_states)
        hidden_states = act(hidden_states, self.config.activation_function)
        hidden_states = (m / "c_proj").linear(hidden_states)
        return dropout_module(hidden_states, self.config.resid_dropout)


FAMILY: Final = Family("gpt_neo", GPTNeo, Support(tensor_parallel={}))
