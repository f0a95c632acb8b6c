"""GPT-J (models/gptj/modeling_gptj.py): pairs of dims rotated, attention scores in fp32, attention and MLP side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from memcalc.core.dims import Dim, merge
from memcalc.core.dtypes import fp32, int64
from memcalc.core.ops.elementwise import cast, like, scale, softmax
from memcalc.core.ops.matmul import matmul
from memcalc.core.ops.shape import cat, contiguous, part, transpose, view
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.families.base.blocks import Attended, act, position_ids
from memcalc.families.base.config import Activation, Count, FamilyConfig, Layers, Probability, check_divides
from memcalc.families.base.dropouts import dropout_module
from memcalc.families.base.masks import causal_mask
from memcalc.families.base.module import Buffer, Module, Weight, module
from memcalc.families.base.rotary import rotate_pairs as rotate_every_two
from memcalc.families.base.support import Family, Support
from memcalc.families.gpt2 import GPT2, norm_weights
from memcalc.families.llama import linear_weights

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from memcalc.core.dtypes import DType


@dataclass(frozen=True, kw_only=True)
class GPTJConfig(FamilyConfig):
    """The fields and defaults of models/gptj/configuration_gptj.py."""

    attribute_map: ClassVar[Mapping[str, str]] = {
        "max_position_embeddings": "n_positions",
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    }

    vocab_size: Count = 50400
    n_positions: Count = 2048
    n_embd: Count = 4096
    n_layer: Layers = 28
    n_head: Count = 16
    rotary_dim: Count = 64
    n_inner: Count | None = None
    activation_function: Activation = "gelu_new"
    resid_pdrop: Probability = 0.0
    embd_pdrop: Probability = 0.0
    attn_pdrop: Probability = 0.0
    tie_word_embeddings: bool = False

    def check(self) -> None:
        super().check()
        check_divides(self, "n_embd", "n_head")
        width = self.n_embd // self.n_head
        if self.rotary_dim % 2 or self.rotary_dim > width:
            raise ValueError(f"rotary_dim {self.rotary_dim} has to be an even number up to {width}, the dims of a head")


class GPTJ(GPT2):
    """The program of GPTJForCausalLM."""

    positional = 1
    Config: type[FamilyConfig] = GPTJConfig
    attention_kinds = ("eager",)

    def __init__(self, config: Any) -> None:
        self.config = config
        self.layers = config.n_layer
        self.vocab = Dim("vocab", config.vocab_size)
        self.hidden = Dim("hidden", config.n_embd)
        self.ffn = Dim("ffn", config.n_inner or 4 * config.n_embd)
        self.heads = Dim("heads", config.n_head)
        self.kv_heads = self.heads
        self.head_dim = Dim("head_dim", config.n_embd // config.n_head)
        self.rotary_dim = Dim("rotary_dim", config.rotary_dim)
        self.positions = Dim("positions", config.n_positions)
        self.max_seq_len = config.n_positions
        self.positions_limit = config.n_positions

    # --- weights and buffers

    def weights(self) -> Iterator[Weight]:
        yield Weight("transformer.wte.weight", (self.vocab, self.hidden), "embedding")
        yield from self.stack("transformer.h")
        yield from norm_weights("transformer.ln_f", self.hidden)
        if not self.config.tie_word_embeddings:
            yield Weight("lm_head.weight", (self.vocab, self.hidden), "head")
        yield Weight("lm_head.bias", (self.vocab,), "head")

    def layer_weights(self, i: int) -> Iterator[Weight]:
        yield from norm_weights("ln_1", self.hidden)
        yield from self.attention_weights()
        yield from linear_weights("mlp.fc_in", self.hidden, self.ffn, "mlp", bias=True)
        yield from linear_weights("mlp.fc_out", self.ffn, self.hidden, "mlp", bias=True)

    def attention_weights(self) -> Iterator[Weight]:
        for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
            yield from linear_weights(f"attn.{name}", self.hidden, self.hidden, "attention", bias=False)

    def buffers(self) -> Iterator[Buffer]:
        for i in range(self.layers):
            yield Buffer(f"transformer.h.{i}.attn.embed_positions", (self.positions, self.rotary_dim))

    # --- forward

    @module
    def model(self, m: Module, ids: Tensor) -> Tensor:
        run = m.run
        inputs_embeds = (m / "wte").embedding(ids)
        positions = position_ids(run)
        mask = causal_mask(run)
        run.memory.scope = m.path
        hidden_states = inputs_embeds
        hidden_states = dropout_module(hidden_states, self.config.embd_pdrop)
        for i in range(self.layers):
            run.memory.enter(run.memory.phase, i)
            outputs = self.call_layer(Module(run, f"{m.path}.h.*", i), hidden_states, mask, positions)
            hidden_states = outputs[0]
        run.memory.enter(run.memory.phase, None)
        hidden_states = (m / "ln_f").layer_norm(hidden_states)
        return view(hidden_states, *hidden_states.shape)

    @module
    def layer(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, m: Module, hidden_states: Tensor, mask: Tensor | None, positions: Tensor
    ) -> Attended:
        residual = hidden_states
        hidden_states = (m / "ln_1").layer_norm(hidden_states)
        attn_outputs, attn_weights = self.attention(m / "attn", hidden_states, mask, positions)
        feed_forward_hidden_states = self.mlp(m / "mlp", hidden_states)
        hidden_states = attn_outputs + feed_forward_hidden_states + residual
        return hidden_states, attn_weights

    @module
    def attention(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, m: Module, hidden_states: Tensor, mask: Tensor | None, positions: Tensor
    ) -> Attended:
        query, key, value, _qkv = self.qkv(m, hidden_states)
        sincos, _positions = self.sincos(m, positions, key.dtype)
        key_rot, key_pass = self.parts(key)
        query_rot, query_pass = self.parts(query)
        key_rot = rotate_pairs(key_rot, sincos)
        query_rot = rotate_pairs(query_rot, sincos)
        key = cat((key_rot, key_pass), self.head_dim)
        query = cat((query_rot, query_pass), self.head_dim)
        key, query = transpose(key, 1, 2), transpose(query, 1, 2)
        key, value = m.cached(key, value)
        attn_output, attn_weights = self.attend(m, query, key, value, mask)
        attn_output = contiguous(transpose(attn_output, 1, 2))
        attn_output = view(attn_output, *hidden_states.shape[:-1], merge(self.heads, self.head_dim))
        attn_output = (m / "out_proj").linear(attn_output)
        attn_output = dropout_module(attn_output, self.config.resid_pdrop)
        return attn_output, attn_weights

    def qkv(self, m: Module, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return q and k (batch, seq, heads, head_dim), v (batch, heads, seq, head_dim), and a tensor that the frame keeps."""
        batch, seq, _ = hidden_states.shape
        query = (m / "q_proj").linear(hidden_states)
        key = (m / "k_proj").linear(hidden_states)
        value = (m / "v_proj").linear(hidden_states)
        query = view(query, batch, seq, self.heads, self.head_dim)
        key = view(key, batch, seq, self.heads, self.head_dim)
        value = transpose(view(value, batch, seq, self.heads, self.head_dim), 1, 2)
        return query, key, value, None

    def sincos(self, m: Module, positions: Tensor, dtype: DType) -> tuple[Tensor, object]:
        """Return the sines and cosines of the positions, looked up in each layer, and an object that the frame keeps."""
        embed_positions = like(m.buffer("embed_positions"), "repeated positions")
        shape = (*positions.shape, self.rotary_dim)
        repeated_position_ids = new_tensor(m.run.memory, shape, int64, "repeated position ids")
        sincos = new_tensor(m.run.memory, shape, embed_positions.dtype, "sines and cosines")
        return cast(sincos, dtype), (embed_positions, repeated_position_ids)

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the part of each head that is rotated, and the rest."""
        rest = Dim("head_dim-rotary_dim", self.head_dim.size - self.rotary_dim.size)
        return part(x, self.rotary_dim), part(x, rest)

    def attend(self, m: Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Attended:
        query, key = cast(q, fp32), cast(k, fp32)
        attn_weights = self.scores(query, key, mask)
        attn_weights = softmax(attn_weights)
        attn_weights = cast(attn_weights, v.dtype)
        attn_weights = dropout_module(attn_weights, self.config.attn_pdrop)
        attn_output = matmul(attn_weights, v, "attention output")
        return attn_output, attn_weights

    def scores(self, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
        attn_weights = matmul(query, transpose(key, 2, 3), "attention scores")
        attn_weights = scale(attn_weights, "div")
        return attn_weights if mask is None else attn_weights + mask

    @module
    def mlp(self, m: Module, hidden_states: Tensor) -> Tensor:
        hidden_states = (m / "fc_in").linear(hidden_states)
        hidden_states = act(hidden_states, self.config.activation_function)
        hidden_states = (m / "fc_out").linear(hidden_states)
        return dropout_module(hidden_states, self.config.resid_pdrop)


def rotate_pairs(x: Tensor, sincos: Tensor) -> Tensor:
    """Return the output of apply_rotary_pos_emb: each sine and cosine is repeated for the two dims of a pair."""
    batch, seq, width = sincos.shape
    shape = (batch, seq, Dim("1", 1), width)
    sin = new_tensor(x.memory, shape, sincos.dtype, "sin")
    cos = new_tensor(x.memory, shape, sincos.dtype, "cos")
    return (x * cos) + (rotate_every_two(x) * sin)


FAMILY: Final = Family("gptj", GPTJ, Support(tensor_parallel={}))
