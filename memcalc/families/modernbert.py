"""ModernBERT (models/modernbert/modeling_modernbert.py, ModernBertForMaskedLM): an encoder that rotates and mostly looks
at a window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from memcalc.core.dims import Dim, merge
from memcalc.core.dtypes import fp32, int64
from memcalc.core.ops.axes import unbind
from memcalc.core.ops.elementwise import cast, dropout
from memcalc.core.ops.shape import chunk, contiguous, reshape, rotate_half, transpose, unsqueeze, view
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.families.base.blocks import (
    Attended,
    Rotary,
    act,
    bidirectional_sdpa_attention,
    eager_attention,
    masked_lm_loss,
)
from memcalc.families.base.config import LAYER_TYPES, Activation, Count, Layers, LayerType, Probability, check_divides
from memcalc.families.base.layer_types import RotaryByKindConfig
from memcalc.families.base.masks import bidirectional_mask
from memcalc.families.base.module import Module, Run, Weight, module
from memcalc.families.base.support import Family, Support
from memcalc.families.base.variations import RotaryByKind
from memcalc.families.llama import linear_weights

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping, Sequence


@dataclass(frozen=True, kw_only=True)
class ModernBertConfig(RotaryByKindConfig):
    """The fields and defaults of models/modernbert/configuration_modernbert.py."""

    refused: ClassVar[Mapping[str, Sequence[Any]]] = {"head_dim": (None,), "sparse_prediction": (False,)}

    vocab_size: Count = 50368
    pad_token_id: int | None = 50283
    hidden_size: Count = 768
    intermediate_size: Count = 1152
    num_hidden_layers: Layers = 22
    num_attention_heads: Count = 12
    hidden_activation: Activation = "gelu"
    max_position_embeddings: Count = 8192
    norm_bias: bool = False
    attention_bias: bool = False
    attention_dropout: Probability = 0.0
    global_attn_every_n_layers: Count = 3
    local_attention: Count = 128
    embedding_dropout: Probability = 0.0
    mlp_bias: bool = False
    mlp_dropout: Probability = 0.0
    decoder_bias: bool = True
    classifier_bias: bool = False
    classifier_activation: Activation = "gelu"
    tie_word_embeddings: bool = True

    @property
    def sliding_window(self) -> int:
        """Return the number of tokens that a token sees to each side."""
        return self.local_attention // 2

    @property
    def kinds(self) -> list[LayerType]:
        """Return the kind of attention of each layer."""
        if self.layer_types is not None:
            return list(self.layer_types)
        every = self.global_attn_every_n_layers
        return ["sliding_attention" if i % every else "full_attention" for i in range(self.num_hidden_layers)]

    def rope_of(self, kind: str) -> dict[str, Any]:
        """Return the rotary parameters, as convert_rope_params_to_dict: `rope_scaling` applies to all layers."""
        rope: dict[str, Any] = {**((self.rope_parameters or {}).get(kind) or {}), **(self.rope_scaling or {})}
        rope.setdefault("rope_type", rope.get("type", "default"))
        rope.setdefault("partial_rotary_factor", 1.0)
        return rope

    def check(self) -> None:
        super().check()
        check_divides(self, "hidden_size", "num_attention_heads")
        for kind, rope in (self.rope_parameters or {}).items():
            if kind not in LAYER_TYPES or not isinstance(rope, dict):
                raise ValueError(
                    f"rope_parameters has {kind!r}; allowed: an object of each of {', '.join(LAYER_TYPES)}"
                )


class ModernBert(RotaryByKind):
    """The program of ModernBertForMaskedLM."""

    cacheless = "fills in tokens and does not generate"
    Config = ModernBertConfig

    def variant(self, i: int) -> Hashable:
        return self.kinds[i], i == 0

    # --- weights

    def weights(self) -> Iterator[Weight]:
        yield Weight("model.embeddings.tok_embeddings.weight", (self.vocab, self.hidden), "embedding")
        yield from self.norm_weights("model.embeddings.norm")
        yield from self.stack("model.layers")
        yield from self.norm_weights("model.final_norm")
        yield from linear_weights("head.dense", self.hidden, self.hidden, "head", bias=self.config.classifier_bias)
        yield from self.norm_weights("head.norm")
        if not self.config.tie_word_embeddings:
            yield Weight("decoder.weight", (self.vocab, self.hidden), "head")
        if self.config.decoder_bias:
            yield Weight("decoder.bias", (self.vocab,), "head")

    def norm_weights(self, name: str) -> Iterator[Weight]:
        yield Weight(f"{name}.weight", (self.hidden,), "norm")
        if self.config.norm_bias:
            yield Weight(f"{name}.bias", (self.hidden,), "norm")

    def layer_weights(self, i: int) -> Iterator[Weight]:
        config, qkv = self.config, Dim("3·hidden", 3 * self.hidden.size)
        if i:
            yield from self.norm_weights("attn_norm")
        yield from linear_weights("attn.Wqkv", self.hidden, qkv, "attention", bias=config.attention_bias)
        yield from linear_weights("attn.Wo", self.hidden, self.hidden, "attention", bias=config.attention_bias)
        yield from self.norm_weights("mlp_norm")
        yield from linear_weights("mlp.Wi", self.hidden, Dim("2·ffn", 2 * self.ffn.size), "mlp", bias=config.mlp_bias)
        yield from linear_weights("mlp.Wo", self.ffn, self.hidden, "mlp", bias=config.mlp_bias)

    # --- forward

    def forward(self, run: Run, ids: Tensor) -> Tensor:
        """Return ModernBertForMaskedLM.forward(input_ids=ids, labels=ids).loss."""
        root = Module(run, "")
        last_hidden_state = self.model(root / "model", ids)
        run.memory.enter(run.memory.phase, None)
        logits = self.decode(root, self.prediction_head(root / "head", last_hidden_state))
        return masked_lm_loss(run, logits, ids)

    @module
    def prediction_head(self, m: Module, hidden_states: Tensor) -> Tensor:
        return self.norm(m / "norm", act((m / "dense").linear(hidden_states), self.config.classifier_activation))

    def decode(self, root: Module, hidden_states: Tensor) -> Tensor:
        root.run.memory.scope = "decoder"
        tied = self.config.tie_word_embeddings
        weight = (root / "model.embeddings.tok_embeddings" if tied else root / "decoder").weight()
        return root.run.linear("decoder", hidden_states, weight, (root / "decoder").optional("bias"))

    @module
    def model(self, m: Module, ids: Tensor) -> Tensor:
        run = m.run
        positions = unsqueeze(new_tensor(run.memory, (run.seq,), int64, "position ids"), 0)
        hidden_states = self.embeddings(m / "embeddings", ids)
        _mask_arguments = hidden_states  # `mask_kwargs` of the real frame
        masks = self.masks(run)
        position_embeddings = self.rotary_embeddings(m / "rotary_emb", positions)
        for i, kind in enumerate(self.kinds[: self.layers]):
            run.memory.enter(run.memory.phase, i)
            layer = Module(run, f"{m.path}.layers.*", i)
            hidden_states = self.call_layer(layer, hidden_states, masks[kind], position_embeddings[kind])
        run.memory.enter(run.memory.phase, None)
        return self.norm(m / "final_norm", hidden_states)

    @module
    def embeddings(self, m: Module, ids: Tensor) -> Tensor:
        normed = self.norm(m / "norm", (m / "tok_embeddings").embedding(ids))
        return dropout(normed, self.config.embedding_dropout)

    def norm(self, m: Module, hidden_states: Tensor) -> Tensor:
        return m.layer_norm(hidden_states)

    def masks(self, run: Run) -> dict[str, Tensor | None]:
        return {
            "full_attention": bidirectional_mask(run),
            "sliding_attention": bidirectional_mask(run, self.config.sliding_window),
        }

    @module
    def layer(self, m: Module, hidden_states: Tensor, mask: Tensor | None, rotary: Rotary) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        attn_output, _weights = self.attention(m / "attn", self.attention_norm(m, hidden_states), rotary, mask)
        hidden_states = hidden_states + attn_output
        return hidden_states + self.mlp(m / "mlp", self.norm(m / "mlp_norm", hidden_states))

    def attention_norm(self, m: Module, hidden_states: Tensor) -> Tensor:
        """Return the attention's input after its norm; the first layer has no norm."""
        return self.norm(m / "attn_norm", hidden_states) if m.layer else hidden_states

    @module
    def attention(self, m: Module, hidden_states: Tensor, rotary: Rotary, mask: Tensor | None) -> Attended:
        batch, seq, _ = hidden_states.shape
        qkv = (m / "Wqkv").linear(hidden_states)
        qkv = view(qkv, batch, seq, Dim("3", 3), self.heads, self.head_dim)
        query_states, key_states, value_states = unbind(qkv, 2)
        query_states = transpose(query_states, 1, 2)
        key_states = transpose(key_states, 1, 2)
        value_states = transpose(value_states, 1, 2)
        query_states, key_states = self.rotate(query_states, key_states, *rotary)
        attn_output, attn_weights = self.attend(m, query_states, key_states, value_states, mask)
        attn_output = contiguous(reshape(attn_output, batch, seq, merge(self.heads, self.head_dim)))
        attn_output = dropout((m / "Wo").linear(attn_output), self.config.attention_dropout)
        return attn_output, attn_weights

    def attend(self, m: Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Attended:
        if m.run.attention == "eager":
            return eager_attention(q, k, v, mask, p=self.config.attention_dropout)
        return bidirectional_sdpa_attention(q, k, v, mask)

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return q and k rotated in fp32 (apply_rotary_pos_emb)."""
        dtype = q.dtype
        cos, sin = unsqueeze(cos, 1), unsqueeze(sin, 1)
        q_embed = (cast(q, fp32) * cos) + (rotate_half(cast(q, fp32)) * sin)
        k_embed = (cast(k, fp32) * cos) + (rotate_half(cast(k, fp32)) * sin)
        return cast(q_embed, dtype), cast(k_embed, dtype)

    @module
    def mlp(self, m: Module, x: Tensor) -> Tensor:
        value, gate = chunk((m / "Wi").linear(x), 2)
        return (m / "Wo").linear(dropout(act(value, self.config.hidden_activation) * gate, self.config.mlp_dropout))


FAMILY: Final = Family("modernbert", ModernBert, Support(tensor_parallel={}))
