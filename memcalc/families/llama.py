"""Llama (models/llama/modeling_llama.py)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from memcalc.core.dims import Dim, merge
from memcalc.core.ops.shape import reshape, transpose, view
from memcalc.families.base.blocks import (
    QKV,
    Attended,
    Rotary,
    apply_rotary_pos_emb,
    attention,
    gated,
    lm_head_loss,
    position_ids,
    rms_norm,
    rotary_buffers,
    rotary_embedding,
)
from memcalc.families.base.config import (
    LAYER_TYPES,
    Activation,
    Count,
    DecoderConfig,
    FamilyConfig,
    Layers,
    check_divides,
)
from memcalc.families.base.masks import causal_mask
from memcalc.families.base.module import Buffer, Module, Run, Weight, module
from memcalc.families.base.plans import LLAMA
from memcalc.families.base.program import Program
from memcalc.families.base.support import Family, Support

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.core.dtypes import DType
    from memcalc.core.tensor import Tensor
    from memcalc.families.base.architecture import Architecture


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """The fields and defaults of models/llama/configuration_llama.py."""

    vocab_size: Count = 32000
    pad_token_id: int | None = None
    hidden_size: Count = 4096
    intermediate_size: Count = 11008
    num_hidden_layers: Layers = 32
    num_attention_heads: Count = 32
    hidden_act: Activation = "silu"
    max_position_embeddings: Count = 2048
    attention_bias: bool = False
    mlp_bias: bool = False

    def check(self) -> None:
        super().check()
        check_divides(self, "hidden_size", "num_attention_heads")


class Llama(Program):
    """The program of LlamaForCausalLM. Related families override the parts that differ."""

    Config: type[FamilyConfig] = LlamaConfig
    rotary_dtype: DType | None = None
    """The dtype of cos and sin; None for the model's dtype."""
    final_norm = "norm"
    """The name of the norm after all layers."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.layers = config.num_hidden_layers
        self.vocab = Dim("vocab", config.vocab_size)
        self.hidden = Dim("hidden", config.hidden_size)
        self.ffn = Dim("ffn", config.intermediate_size)
        self.heads = Dim("heads", config.num_attention_heads)
        self.kv_heads = Dim("kv_heads", getattr(config, "num_key_value_heads", None) or self.heads.size)
        self.head_dim = Dim("head_dim", getattr(config, "head_dim", None) or config.hidden_size // self.heads.size)
        self.rotary_dim = self.head_dim
        if config.rotary_width != self.head_dim.size:
            self.rotary_dim = Dim("rotary_dim", config.rotary_width)
        self.rope_type: str = config.rope["rope_type"]
        self.max_seq_len = config.max_position_embeddings

    # --- weights and buffers

    def weights(self) -> Iterator[Weight]:
        yield Weight("model.embed_tokens.weight", (self.vocab, self.hidden), "embedding")
        yield from self.stack("model.layers")
        yield from self.norm_weights(f"model.{self.final_norm}")
        if not self.config.tie_word_embeddings:
            yield Weight("lm_head.weight", (self.vocab, self.hidden), "head")
        if getattr(self.config, "lm_head_bias", False):
            yield Weight("lm_head.bias", (self.vocab,), "head")

    def layer_weights(self, i: int) -> Iterator[Weight]:
        yield from self.attention_weights()
        yield from self.mlp_weights()
        yield from self.norm_weights("input_layernorm")
        yield from self.norm_weights("post_attention_layernorm")

    def norm_weights(self, name: str) -> Iterator[Weight]:
        """Yield the parameters of a norm over the hidden dim."""
        yield Weight(f"{name}.weight", (self.hidden,), "norm")

    def attention_weights(self) -> Iterator[Weight]:
        q, kv = merge(self.heads, self.head_dim), merge(self.kv_heads, self.head_dim)
        bias = getattr(self.config, "attention_bias", False)
        for name, out in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
            yield from linear_weights(f"self_attn.{name}", self.hidden, out, "attention", bias=bias)
        yield from linear_weights("self_attn.o_proj", q, self.hidden, "attention", bias=bias)

    def mlp_weights(self) -> Iterator[Weight]:
        bias = getattr(self.config, "mlp_bias", False)
        yield from linear_weights("mlp.gate_proj", self.hidden, self.ffn, "mlp", bias=bias)
        yield from linear_weights("mlp.up_proj", self.hidden, self.ffn, "mlp", bias=bias)
        yield from linear_weights("mlp.down_proj", self.ffn, self.hidden, "mlp", bias=bias)

    def buffers(self) -> Iterator[Buffer]:
        yield from self.frequencies()

    def frequencies(self) -> Iterator[Buffer]:
        """Yield the buffers of the rotary embedding."""
        yield from rotary_buffers(
            "model.rotary_emb", self.rotary_dim, self.rope_type, self.config.max_position_embeddings
        )

    # --- forward

    def forward(self, run: Run, ids: Tensor) -> Tensor:
        """Return LlamaForCausalLM.forward(input_ids=ids, labels=ids).loss."""
        root = Module(run, "")
        hidden_states = self.model(root / "model", ids)
        run.memory.enter(run.memory.phase, None)
        return lm_head_loss(root / self.head_name, partial(self.head, root), hidden_states, ids)

    @module
    def model(self, m: Module, ids: Tensor) -> Tensor:
        run = m.run
        inputs_embeds = self.embed(m, ids)
        positions = position_ids(run)
        masks = self.masks(run)
        hidden_states = inputs_embeds
        position_embeddings = self.rotary_embeddings(m / "rotary_emb", positions)
        hidden_states = self.before_layers(m, hidden_states)
        for i in range(self.layers):
            run.memory.enter(run.memory.phase, i)
            layer = Module(run, f"{m.path}.layers.*", i)
            kind = self.layer_kind(i)
            hidden_states = self.call_layer(layer, hidden_states, position_embeddings[kind], masks[kind], positions)
        run.memory.enter(run.memory.phase, None)
        return self.after_layers(m, hidden_states)

    def embed(self, m: Module, ids: Tensor) -> Tensor:
        return (m / "embed_tokens").embedding(ids)

    def before_layers(self, m: Module, hidden_states: Tensor) -> Tensor:
        """Return the embeddings as the first layer takes them. The model's frame keeps the ones that are passed in."""
        return hidden_states

    def after_layers(self, m: Module, hidden_states: Tensor) -> Tensor:
        """Return the output of the norm after the last layer."""
        return self.norm(m / self.final_norm, hidden_states)

    def norm(self, m: Module, hidden_states: Tensor) -> Tensor:
        return rms_norm(m, hidden_states)

    def layer_kind(self, i: int) -> str:
        """Return the key of layer `i` in `masks()` and `rotary_embeddings()`."""
        return "full_attention"

    def rotary_embeddings(self, m: Module, positions: Tensor) -> dict[str, Any]:
        """Return cos and sin by kind of layer; here one pair serves all kinds."""
        return dict.fromkeys(LAYER_TYPES, self.position_embeddings(m, positions))

    def position_embeddings(self, m: Module, positions: Tensor) -> Any:
        """Return the cos and sin that attention rotates q and k with."""
        return rotary_embedding(m, positions, self.rotary_dim, self.rope_type, dtype=self.rotary_dtype)

    def masks(self, run: Run) -> dict[str, Tensor | None]:
        return {"full_attention": causal_mask(run)}

    @module
    def layer(self, m: Module, hidden_states: Tensor, rotary: Rotary, mask: Tensor | None, positions: Tensor) -> Tensor:
        residual = hidden_states
        hidden_states = self.norm(m / "input_layernorm", hidden_states)
        hidden_states, _weights = self.attention(m / "self_attn", hidden_states, rotary, mask)
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.norm(m / "post_attention_layernorm", hidden_states)
        hidden_states = self.mlp(m / "mlp", hidden_states)
        return residual + hidden_states

    @module
    def attention(self, m: Module, hidden_states: Tensor, rotary: Rotary, mask: Tensor | None) -> Attended:
        query_states, key_states, value_states = self.rotated_qkv(m, hidden_states, rotary)
        key_states, value_states = m.cached(key_states, value_states)
        attn_output, attn_weights = self.attend(m, query_states, key_states, value_states, mask)
        attn_output = reshape(attn_output, *hidden_states.shape[:-1], merge(self.heads, self.head_dim))
        attn_output = (m / "o_proj").linear(attn_output)
        return attn_output, attn_weights

    def rotated_qkv(self, m: Module, hidden_states: Tensor, rotary: Rotary) -> QKV:
        """Return q, k and v, projected and rotated, ready for the attention itself."""
        query_states, key_states, value_states = self.qkv(m, hidden_states)
        cos, sin = rotary
        query_states, key_states = self.rotate(query_states, key_states, cos, sin)
        return query_states, key_states, value_states

    def qkv(self, m: Module, hidden_states: Tensor) -> QKV:
        batch, seq, _ = hidden_states.shape
        q = transpose(view((m / "q_proj").linear(hidden_states), batch, seq, self.heads, self.head_dim), 1, 2)
        k = transpose(view((m / "k_proj").linear(hidden_states), batch, seq, self.kv_heads, self.head_dim), 1, 2)
        v = transpose(view((m / "v_proj").linear(hidden_states), batch, seq, self.kv_heads, self.head_dim), 1, 2)
        return q, k, v

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return apply_rotary_pos_emb(q, k, cos, sin)

    def attend(self, m: Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Attended:
        return attention(m.run, q, k, v, mask, p=getattr(self.config, "attention_dropout", 0.0))

    @module
    def mlp(self, m: Module, x: Tensor) -> Tensor:
        return (m / "down_proj").linear(gated(m / "gate_proj", m / "up_proj", x, self.config.hidden_act))


def linear_weights(name: str, fan_in: Dim, fan_out: Dim, component: str, *, bias: bool) -> Iterator[Weight]:
    """Yield the parameters of an nn.Linear."""
    yield Weight(f"{name}.weight", (fan_out, fan_in), component)
    if bias:
        yield Weight(f"{name}.bias", (fan_out,), component)


def _architecture(config: Any) -> Architecture:
    """Return the dims and options that Megatron's GPTModel is built from."""
    from memcalc.families.base.architecture import llama_like

    return llama_like(config)


FAMILY: Final = Family(
    "llama",
    Llama,
    Support(
        tensor_parallel=LLAMA,
        sequence_parallel=True,
        context_parallel=True,
        ulysses=True,
        stages=True,
        chunked_loss=True,
        liger="llama",
        megatron_kernels=True,
        architecture=_architecture,
        megatron_deepspeed=True,
    ),
)
