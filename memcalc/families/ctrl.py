"""CTRL (models/ctrl/modeling_ctrl.py): sines for positions, an embedding scaled in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from memcalc.core.dims import Dim
from memcalc.core.dtypes import int64
from memcalc.core.ops.elementwise import activation, dropout, scale_
from memcalc.core.ops.shape import reshape, transpose, unsqueeze, view
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.families.base.blocks import Attended, plain_eager_attention, sdpa_attention
from memcalc.families.base.config import Count, FamilyConfig, Layers, Probability, check_divides
from memcalc.families.base.masks import causal_mask
from memcalc.families.base.module import Buffer, Module, Weight, module
from memcalc.families.base.support import Family, Support
from memcalc.families.gpt2 import GPT2, norm_weights
from memcalc.families.llama import linear_weights

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@dataclass(frozen=True, kw_only=True)
class CTRLConfig(FamilyConfig):
    """The fields and defaults of models/ctrl/configuration_ctrl.py."""

    attribute_map: ClassVar[Mapping[str, str]] = {
        "max_position_embeddings": "n_positions",
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    }

    vocab_size: Count = 246534
    n_positions: Count = 256
    n_embd: Count = 1280
    dff: Count = 8192
    n_layer: Layers = 48
    n_head: Count = 16
    resid_pdrop: Probability = 0.1
    embd_pdrop: Probability = 0.1
    tie_word_embeddings: bool = True

    def check(self) -> None:
        super().check()
        check_divides(self, "n_embd", "n_head")
        if self.n_embd % 2:
            raise ValueError(f"n_embd {self.n_embd} is not an even number: half of it are sines, half cosines")


class CTRL(GPT2):
    """The program of CTRLLMHeadModel."""

    Config = CTRLConfig
    embedding = "transformer.w"
    recomputes = False

    def __init__(self, config: Any) -> None:
        self.config = config
        self.layers = config.n_layer
        self.vocab = Dim("vocab", config.vocab_size)
        self.hidden = Dim("hidden", config.n_embd)
        self.ffn = Dim("ffn", config.dff)
        self.heads = Dim("heads", config.n_head)
        self.kv_heads = self.heads
        self.head_dim = Dim("head_dim", config.n_embd // config.n_head)
        self.positions = Dim("positions", config.n_positions)
        self.max_seq_len = config.n_positions
        self.positions_limit = config.n_positions

    # --- weights and buffers

    def weights(self) -> Iterator[Weight]:
        yield Weight("transformer.w.weight", (self.vocab, self.hidden), "embedding")
        yield from self.stack("transformer.h")
        yield from norm_weights("transformer.layernorm", self.hidden)
        if not self.config.tie_word_embeddings:
            yield Weight("lm_head.weight", (self.vocab, self.hidden), "head")
        yield Weight("lm_head.bias", (self.vocab,), "head")

    def layer_weights(self, i: int) -> Iterator[Weight]:
        for name in ("Wq", "Wk", "Wv", "dense"):
            yield from linear_weights(f"multi_head_attention.{name}", self.hidden, self.hidden, "attention", bias=True)
        yield from linear_weights("ffn.0", self.hidden, self.ffn, "mlp", bias=True)
        yield from linear_weights("ffn.2", self.ffn, self.hidden, "mlp", bias=True)
        yield from norm_weights("layernorm1", self.hidden)
        yield from norm_weights("layernorm2", self.hidden)

    def buffers(self) -> Iterator[Buffer]:
        yield Buffer("transformer.pos_encoding", (self.positions, self.hidden), cast=True)

    # --- forward

    @module
    def model(self, m: Module, ids: Tensor) -> Tensor:
        run = m.run
        inputs_embeds = (m / "w").embedding(ids)
        _position_ids = new_tensor(run.memory, (run.seq,), int64, "position ids")
        mask = causal_mask(run)
        run.memory.scope = m.path
        inputs_embeds = scale_(inputs_embeds)
        pos_embeds = unsqueeze(new_tensor(run.memory, (run.seq, self.hidden), run.dtype, "sines of the positions"), 0)
        hidden_states = inputs_embeds + pos_embeds + 0.0  # no token types
        hidden_states = dropout(hidden_states, self.config.embd_pdrop)
        for i in range(self.layers):
            run.memory.enter(run.memory.phase, i)
            hidden_states = self.call_layer(Module(run, f"{m.path}.h.*", i), hidden_states, mask)
        run.memory.enter(run.memory.phase, None)
        return (m / "layernorm").layer_norm(hidden_states)

    @module
    def layer(self, m: Module, x: Tensor, mask: Tensor | None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        p = self.config.resid_pdrop
        normed = (m / "layernorm1").layer_norm(x)
        attn_output, _weights = self.attention(m / "multi_head_attention", normed, mask)
        attn_output = dropout(attn_output, p)
        out1 = x + attn_output
        out2 = (m / "layernorm2").layer_norm(out1)
        ffn_output = self.mlp(m / "ffn", out2)
        ffn_output = dropout(ffn_output, p)
        return out1 + ffn_output

    @module
    def attention(self, m: Module, x: Tensor, mask: Tensor | None) -> Attended:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v = (self.split_heads((m / name).linear(x)) for name in ("Wq", "Wk", "Wv"))
        k, v = m.cached(k, v)
        if m.run.attention == "eager":
            attn_output, attn_weights = plain_eager_attention(q, k, v, mask, p=0.0)
        else:
            attn_output, attn_weights = sdpa_attention(q, k, v, mask)
        attn_output = reshape(attn_output, *x.shape)
        attn_output = (m / "dense").linear(attn_output)
        return attn_output, attn_weights

    def split_heads(self, x: Tensor) -> Tensor:
        return transpose(view(x, *x.shape[:2], self.heads, self.head_dim), 1, 2)

    @module
    def mlp(self, m: Module, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the output of nn.Sequential(Linear, ReLU, Linear)."""
        x = (m / "0").linear(x)
        x = activation(x, "relu")
        return (m / "2").linear(x)


FAMILY: Final = Family("ctrl", CTRL, Support(tensor_parallel={}))
