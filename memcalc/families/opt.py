"""OPT (models/opt/modeling_opt.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from memcalc.core.dims import Dim, merge
from memcalc.core.dtypes import fp32, int64
from memcalc.core.ops.axes import narrow
from memcalc.core.ops.elementwise import cast, dropout, like, scale
from memcalc.core.ops.shape import contiguous, reshape, transpose, view
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.families.base.blocks import Attended, act, attention, lm_head_loss
from memcalc.families.base.config import Activation, Count, FamilyConfig, Layers, Probability, check_divides
from memcalc.families.base.masks import causal_mask, length_so_far, tokens_of
from memcalc.families.base.module import Module, Run, Weight, module
from memcalc.families.base.program import Program
from memcalc.families.base.support import Family, Support
from memcalc.families.gpt2 import norm_weights
from memcalc.families.llama import linear_weights

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_OFFSET = 2
"""OPTLearnedPositionalEmbedding has two more rows than positions."""


@dataclass(frozen=True, kw_only=True)
class OPTConfig(FamilyConfig):
    """The fields and defaults of models/opt/configuration_opt.py."""

    attribute_map: ClassVar[Mapping[str, str]] = {"_remove_final_layer_norm": "remove_final_layer_norm"}
    refused: ClassVar[Mapping[str, Sequence[Any]]] = {"layerdrop": (0, 0.0)}

    vocab_size: Count = 50272
    pad_token_id: int | None = 1
    hidden_size: Count = 768
    num_hidden_layers: Layers = 12
    ffn_dim: Count = 3072
    max_position_embeddings: Count = 2048
    do_layer_norm_before: bool = True
    remove_final_layer_norm: bool = False
    word_embed_proj_dim: Count | None = None
    dropout: Probability = 0.1
    attention_dropout: Probability = 0.0
    num_attention_heads: Count = 12
    activation_function: Activation = "relu"
    layerdrop: float = 0.0
    enable_bias: bool = True
    layer_norm_elementwise_affine: bool = True
    tie_word_embeddings: bool = True

    def check(self) -> None:
        super().check()
        check_divides(self, "hidden_size", "num_attention_heads")


class OPT(Program):
    """The program of OPTForCausalLM."""

    Config: type[FamilyConfig] = OPTConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.layers = config.num_hidden_layers
        self.vocab = Dim("vocab", config.vocab_size)
        self.hidden = Dim("hidden", config.hidden_size)
        self.projects = config.word_embed_proj_dim not in (None, config.hidden_size)
        self.embed = Dim("embed", config.word_embed_proj_dim) if self.projects else self.hidden
        self.ffn = Dim("ffn", config.ffn_dim)
        self.heads = Dim("heads", config.num_attention_heads)
        self.kv_heads = self.heads
        self.head_dim = Dim("head_dim", config.hidden_size // config.num_attention_heads)
        self.positions = Dim("positions+2", config.max_position_embeddings + _OFFSET)
        self.final_norm: bool = config.do_layer_norm_before and not config.remove_final_layer_norm
        self.max_seq_len = config.max_position_embeddings
        self.positions_limit = config.max_position_embeddings

    # --- weights and buffers

    def weights(self) -> Iterator[Weight]:
        decoder = "model.decoder"
        yield Weight(f"{decoder}.embed_tokens.weight", (self.vocab, self.embed), "embedding")
        yield Weight(f"{decoder}.embed_positions.weight", (self.positions, self.hidden), "embedding")
        if self.projects:
            yield Weight(f"{decoder}.project_out.weight", (self.embed, self.hidden), "head")
            yield Weight(f"{decoder}.project_in.weight", (self.hidden, self.embed), "embedding")
        if self.final_norm:
            yield from self.norm_weights(f"{decoder}.final_layer_norm")
        yield from self.stack(f"{decoder}.layers")
        if not self.config.tie_word_embeddings:
            yield Weight("lm_head.weight", (self.vocab, self.embed), "head")

    def layer_weights(self, i: int) -> Iterator[Weight]:
        bias = self.config.enable_bias
        for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
            yield from linear_weights(f"self_attn.{name}", self.hidden, self.hidden, "attention", bias=bias)
        yield from self.norm_weights("self_attn_layer_norm")
        yield from linear_weights("fc1", self.hidden, self.ffn, "mlp", bias=bias)
        yield from linear_weights("fc2", self.ffn, self.hidden, "mlp", bias=bias)
        yield from self.norm_weights("final_layer_norm")

    def norm_weights(self, name: str) -> Iterator[Weight]:
        if self.config.layer_norm_elementwise_affine:
            yield from norm_weights(name, self.hidden)

    # --- forward

    def forward(self, run: Run, ids: Tensor) -> Tensor:
        """Return OPTForCausalLM.forward(input_ids=ids, labels=ids).loss."""
        root = Module(run, "")
        hidden_states = self.decoder(root / "model.decoder", ids)
        run.memory.enter(run.memory.phase, None)
        run.memory.scope = "lm_head"
        head = root / ("model.decoder.embed_tokens" if self.config.tie_word_embeddings else "lm_head")
        return lm_head_loss(head, lambda x: contiguous(head.linear(x)), hidden_states, ids)

    @module
    def decoder(self, m: Module, ids: Tensor) -> Tensor:
        run = m.run
        inputs_embeds = (m / "embed_tokens").embedding(ids)
        position_attention_mask = run.attention_mask
        if position_attention_mask is None:
            _seq_length = length_so_far(run)
            position_attention_mask = new_tensor(run.memory, (run.batch, tokens_of(run)), fp32, "positions that count")
        positions = like(position_attention_mask, "cumulated positions")
        positions = cast(scale(positions * position_attention_mask, "sub"), int64)
        if run.cache is not None:
            positions = narrow(positions, 1, run.seq)
        mask = causal_mask(run)
        pos_embeds = (m / "embed_positions").embedding(scale(positions, "add"))
        run.memory.scope = m.path
        if self.projects:
            inputs_embeds = (m / "project_in").linear(inputs_embeds)
        hidden_states = inputs_embeds + pos_embeds
        for i in range(self.layers):
            run.memory.enter(run.memory.phase, i)
            layer = Module(run, f"{m.path}.layers.*", i)
            hidden_states = self.call_layer(layer, hidden_states, mask, positions)
        run.memory.enter(run.memory.phase, None)
        if self.final_norm:
            hidden_states = (m / "final_layer_norm").layer_norm(hidden_states)
        if self.projects:
            hidden_states = (m / "project_out").linear(hidden_states)
        return hidden_states

    @module
    def layer(self, m: Module, hidden_states: Tensor, mask: Tensor | None, positions: Tensor) -> Tensor:
        norm_first, p = self.config.do_layer_norm_before, self.config.dropout
        residual = hidden_states
        if norm_first:
            hidden_states = (m / "self_attn_layer_norm").layer_norm(hidden_states)
        hidden_states, _weights = self.attention(m / "self_attn", hidden_states, mask)
        hidden_states = dropout(hidden_states, p)
        hidden_states = residual + hidden_states
        if not norm_first:
            hidden_states = (m / "self_attn_layer_norm").layer_norm(hidden_states)
        shape = hidden_states.shape
        hidden_states = reshape(hidden_states, merge(*shape[:-1]), shape[-1])
        residual = hidden_states
        if norm_first:
            hidden_states = (m / "final_layer_norm").layer_norm(hidden_states)
        hidden_states = (m / "fc1").linear(hidden_states)
        hidden_states = act(hidden_states, self.config.activation_function)
        hidden_states = (m / "fc2").linear(hidden_states)
        hidden_states = dropout(hidden_states, p)
        hidden_states = view(residual + hidden_states, *shape)
        if not norm_first:
            hidden_states = (m / "final_layer_norm").layer_norm(hidden_states)
        return hidden_states

    @module
    def attention(self, m: Module, hidden_states: Tensor, mask: Tensor | None) -> Attended:
        batch, seq, hidden = hidden_states.shape
        query_states = scale((m / "q_proj").linear(hidden_states), "mul")
        query_states = transpose(view(query_states, batch, seq, self.heads, self.head_dim), 1, 2)
        key_states = (m / "k_proj").linear(hidden_states)
        value_states = (m / "v_proj").linear(hidden_states)
        key_states = transpose(view(key_states, batch, seq, self.heads, self.head_dim), 1, 2)
        value_states = transpose(view(value_states, batch, seq, self.heads, self.head_dim), 1, 2)
        key_states, value_states = m.cached(key_states, value_states)
        attn_output, attn_weights = attention(
            m.run, query_states, key_states, value_states, mask, p=self.config.attention_dropout
        )
        attn_output = contiguous(reshape(attn_output, batch, seq, hidden))
        attn_output = (m / "out_proj").linear(attn_output)
        return attn_output, attn_weights


FAMILY: Final = Family("opt", OPT, Support(tensor_parallel={}))
