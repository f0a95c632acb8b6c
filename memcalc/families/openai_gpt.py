"""GPT (models/openai/modeling_openai.py): norms after the blocks, a table of allowed positions in each layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from memcalc.core.dims import ONE_DIM, Dim
from memcalc.core.dtypes import int64
from memcalc.core.ops.elementwise import dropout, scale, softmax
from memcalc.core.ops.matmul import matmul
from memcalc.core.ops.shape import contiguous, first, reshape, split, transpose, view
from memcalc.families.base.blocks import act
from memcalc.families.base.config import Count, FamilyConfig, Layers, Probability, check_divides
from memcalc.families.base.module import Buffer, Module, Weight, module
from memcalc.families.base.support import Family, Support
from memcalc.families.gpt2 import GPT2, conv1d_weights, norm_weights

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from memcalc.core.tensor import Tensor


@dataclass(frozen=True, kw_only=True)
class OpenAIGPTConfig(FamilyConfig):
    """The fields and defaults of models/openai/configuration_openai.py."""

    attribute_map: ClassVar[Mapping[str, str]] = {
        "max_position_embeddings": "n_positions",
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    }

    vocab_size: Count = 40478
    n_positions: Count = 512
    n_embd: Count = 768
    n_layer: Layers = 12
    n_head: Count = 12
    afn: Literal["relu", "silu", "gelu", "swish"] = "gelu"
    resid_pdrop: Probability = 0.1
    embd_pdrop: Probability = 0.1
    attn_pdrop: Probability = 0.1
    tie_word_embeddings: bool = True

    def check(self) -> None:
        super().check()
        check_divides(self, "n_embd", "n_head")


class OpenAIGPT(GPT2):
    """The program of OpenAIGPTLMHeadModel."""

    cacheless = "generates without a cache in transformers"
    Config = OpenAIGPTConfig
    embedding = "transformer.tokens_embed"
    attention_kinds = ("eager",)
    recomputes = False

    def __init__(self, config: Any) -> None:
        self.config = config
        self.layers = config.n_layer
        self.vocab = Dim("vocab", config.vocab_size)
        self.hidden = Dim("hidden", config.n_embd)
        self.ffn = Dim("ffn", 4 * config.n_embd)
        self.heads = Dim("heads", config.n_head)
        self.kv_heads = self.heads
        self.head_dim = Dim("head_dim", config.n_embd // config.n_head)
        self.positions = Dim("positions", config.n_positions)
        self.max_seq_len = config.n_positions
        self.positions_limit = config.n_positions
        self.activation = "gelu_new" if config.afn == "gelu" else config.afn

    # --- weights and buffers

    def weights(self) -> Iterator[Weight]:
        yield Weight("transformer.tokens_embed.weight", (self.vocab, self.hidden), "embedding")
        yield Weight("transformer.positions_embed.weight", (self.positions, self.hidden), "embedding")
        yield from self.stack("transformer.h")
        if not self.config.tie_word_embeddings:
            yield Weight("lm_head.weight", (self.vocab, self.hidden), "head")

    def layer_weights(self, i: int) -> Iterator[Weight]:
        qkv = Dim("3·hidden", 3 * self.hidden.size)
        yield from conv1d_weights("attn.c_attn", self.hidden, qkv, "attention")
        yield from conv1d_weights("attn.c_proj", self.hidden, self.hidden, "attention")
        yield from norm_weights("ln_1", self.hidden)
        yield from conv1d_weights("mlp.c_fc", self.hidden, self.ffn, "mlp")
        yield from conv1d_weights("mlp.c_proj", self.ffn, self.hidden, "mlp")
        yield from norm_weights("ln_2", self.hidden)

    def buffers(self) -> Iterator[Buffer]:
        yield Buffer("transformer.position_ids", (self.positions,), int64)
        for i in range(self.layers):
            yield Buffer(f"transformer.h.{i}.attn.bias", (ONE_DIM, ONE_DIM, self.positions, self.positions))

    # --- forward

    @module
    def model(self, m: Module, ids: Tensor) -> Tensor:
        run = m.run
        positions = reshape(first(run.buffers[f"{m.path}.position_ids"], run.seq), ONE_DIM, run.seq)
        inputs_embeds = (m / "tokens_embed").embedding(ids)
        position_embeds = (m / "positions_embed").embedding(positions)
        run.memory.scope = m.path
        hidden_states = inputs_embeds + position_embeds + 0.0  # no token types
        hidden_states = dropout(hidden_states, self.config.embd_pdrop)
        for i in range(self.layers):
            run.memory.enter(run.memory.phase, i)
            hidden_states = self.call_layer(Module(run, f"{m.path}.h.*", i), hidden_states)
        run.memory.enter(run.memory.phase, None)
        return view(hidden_states, *hidden_states.shape)

    @module
    def layer(self, m: Module, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        a = self.attention(m / "attn", x)
        n = (m / "ln_1").layer_norm(x + a)
        mlp_output = self.mlp(m / "mlp", n)
        return (m / "ln_2").layer_norm(n + mlp_output)

    @module
    def attention(self, m: Module, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        batch, seq, hidden = x.shape
        x = (m / "c_attn").conv1d(x)
        query, key, value = split(x, hidden, hidden, hidden)
        query = transpose(view(query, batch, seq, self.heads, self.head_dim), 1, 2)
        key = transpose(view(key, batch, seq, self.heads, self.head_dim), 1, 2)
        value = transpose(view(value, batch, seq, self.heads, self.head_dim), 1, 2)
        attn_outputs = self.weigh(m, query, key, value)
        a = reshape(contiguous(transpose(attn_outputs, 1, 2)), batch, seq, hidden)
        a = (m / "c_proj").conv1d(a)
        return dropout(a, self.config.resid_pdrop)

    def weigh(self, m: Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seq = m.run.seq
        w = matmul(q, transpose(k, 2, 3), "attention scores")
        w = scale(w, "div")
        b = first(m.run.buffers[f"transformer.h.{m.layer}.attn.bias"], ONE_DIM, ONE_DIM, seq, seq)
        w = (w * b) + scale(scale(b, "sub"), "mul")
        w = softmax(w)
        w = dropout(w, self.config.attn_pdrop)
        return matmul(w, v, "attention output")

    @module
    def mlp(self, m: Module, hidden_states: Tensor) -> Tensor:
        h = act((m / "c_fc").conv1d(hidden_states), self.activation)
        h2 = (m / "c_proj").conv1d(h)
        return dropout(h2, self.config.resid_pdrop)


FAMILY: Final = Family(
    "openai-gpt", OpenAIGPT, Support(tensor_parallel={}, conv1d=True, meets_fp32=True, attends_in_fp32=True)
)
