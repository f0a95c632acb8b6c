"""DeepSeek-V3 (models/deepseek_v3/modeling_deepseek_v3.py): attention through compressed latents, dense layers first, then
experts in groups beside a shared one. Its layers for predicting further tokens are not built.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from memcalc.core.dims import ONE_DIM, Dim, divided, merge
from memcalc.core.ops.elementwise import sub
from memcalc.core.ops.shape import (
    cat,
    copy_into,
    every_second,
    expand,
    part,
    reshape,
    split,
    transpose,
    unsqueeze,
    view,
)
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.families.base.blocks import Attended, apply_rotary_pos_emb, rms_norm
from memcalc.families.base.config import Activation, Count, CountOrNone, Layers, Probability, RotaryConfig
from memcalc.families.base.experts import REFUSED, check_experts, check_groups
from memcalc.families.base.module import Module, Weight, module
from memcalc.families.base.plans import LATENT
from memcalc.families.base.router_outputs import RouterOutputsConfig
from memcalc.families.base.sparse import GroupedSparseLayers
from memcalc.families.base.support import Family, Preset, Support
from memcalc.families.llama import linear_weights

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from memcalc.families.base.architecture import Architecture


@dataclass(frozen=True, kw_only=True)
class LatentConfig(RouterOutputsConfig, RotaryConfig):
    """The fields of a family that computes q, k and v from compressed latents. A part of each head has no positions."""

    reads_head_dim: ClassVar[bool] = False

    num_key_value_heads: Count | None = None
    q_lora_rank: Count | None = 1536
    kv_lora_rank: Count = 512
    qk_rope_head_dim: Count = 64
    qk_nope_head_dim: Count = 128
    v_head_dim: Count = 128
    attention_bias: bool = False

    @property
    def head_dim(self) -> int:
        return self.qk_rope_head_dim

    def check(self) -> None:
        super().check()
        if self.num_key_value_heads not in (None, self.num_attention_heads):
            raise ValueError(
                f"num_key_value_heads {self.num_key_value_heads} has to be num_attention_heads "
                f"{self.num_attention_heads}: each head has keys of its own"
            )


@dataclass(frozen=True, kw_only=True)
class DeepseekV3Config(LatentConfig):
    """The fields and defaults of models/deepseek_v3/configuration_deepseek_v3.py."""

    attribute_map: ClassVar[Mapping[str, str]] = {
        "num_local_experts": "n_routed_experts",
        "num_mtp_layers": "num_nextn_predict_layers",
    }
    refused: ClassVar[Mapping[str, Sequence[Any]]] = REFUSED

    vocab_size: Count = 129280
    hidden_size: Count = 7168
    intermediate_size: Count = 18432
    moe_intermediate_size: Count = 2048
    num_hidden_layers: Layers = 61
    num_attention_heads: Count = 128
    num_key_value_heads: Count | None = 128
    n_shared_experts: CountOrNone = 1
    n_routed_experts: Count = 256
    n_group: Count = 8
    topk_group: Count = 4
    num_experts_per_tok: Count = 8
    first_k_dense_replace: int = 3
    norm_topk_prob: bool | None = True
    hidden_act: Activation = "silu"
    max_position_embeddings: Count = 4096
    tie_word_embeddings: bool = False
    rope_interleave: bool | None = True
    attention_dropout: Probability = 0.0

    def check(self) -> None:
        super().check()
        check_experts(self, "n_routed_experts", "hidden_size", "moe_intermediate_size")
        check_groups(self, "n_routed_experts")


class DeepseekV3(GroupedSparseLayers):
    """The program of DeepseekV3ForCausalLM."""

    Config = DeepseekV3Config
    caches_latents = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if config.q_lora_rank is not None:
            self.q_rank = Dim("q_lora_rank", config.q_lora_rank)
        self.kv_rank = Dim("kv_lora_rank", config.kv_lora_rank)
        self.rope_dim = Dim("qk_rope_head_dim", config.qk_rope_head_dim)
        self.nope_dim = Dim("qk_nope_head_dim", config.qk_nope_head_dim)
        self.v_dim = Dim("v_head_dim", config.v_head_dim)
        self.qk_dim = Dim("qk_head_dim", self.nope_dim.size + self.rope_dim.size)
        self.kv_dim = Dim("(qk_nope_head_dim+v_head_dim)", self.nope_dim.size + self.v_dim.size)
        self.latent_dim = Dim("(kv_lora_rank+qk_rope_head_dim)", self.kv_rank.size + self.rope_dim.size)
        if self.qk_dim.size % 8 or self.v_dim.size % 8:
            self.attention_kinds = ("eager",)
            widths = f"heads of {self.qk_dim.size} dims with values of {self.v_dim.size}"
            self.notes = (
                f"{widths}: no fused kernel takes 16-bit rows whose width is no multiple of 8, and sdpa is not modelled with "
                "them; attention is eager",
            )

    # --- weights

    def attention_weights(self) -> Iterator[Weight]:
        bias = self.config.attention_bias
        q, kv = merge(self.heads, self.qk_dim), merge(self.heads, self.kv_dim)
        if self.config.q_lora_rank is None:
            yield from linear_weights("self_attn.q_proj", self.hidden, q, "attention", bias=False)
        else:
            yield from linear_weights("self_attn.q_a_proj", self.hidden, self.q_rank, "attention", bias=bias)
            yield Weight("self_attn.q_a_layernorm.weight", (self.q_rank,), "norm")
            yield from linear_weights("self_attn.q_b_proj", self.q_rank, q, "attention", bias=False)
        yield from linear_weights("self_attn.kv_a_proj_with_mqa", self.hidden, self.latent_dim, "attention", bias=bias)
        yield Weight("self_attn.kv_a_layernorm.weight", (self.kv_rank,), "norm")
        yield from linear_weights("self_attn.kv_b_proj", self.kv_rank, kv, "attention", bias=False)
        out = merge(self.heads, self.v_dim)
        yield from linear_weights("self_attn.o_proj", out, self.hidden, "attention", bias=bias)

    # --- forward

    @module
    def attention(
        self, m: Module, hidden_states: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None
    ) -> Attended:
        batch, seq, _ = hidden_states.shape
        q_states = self.queries(m, hidden_states)
        q_states = transpose(view(q_states, batch, seq, self.heads, self.qk_dim), 1, 2)
        q_pass, q_rot = split(q_states, self.nope_dim, self.rope_dim)

        compressed_kv = self.compressed(m / "kv_a_proj_with_mqa", hidden_states)
        kv_nope, k_rot = split(compressed_kv, self.kv_rank, self.rope_dim)
        kv_nope = rms_norm(m / "kv_a_layernorm", kv_nope)
        kv_nope = view(unsqueeze(kv_nope, 1), batch, ONE_DIM, seq, self.kv_rank)
        k_rot = view(unsqueeze(k_rot, 1), batch, ONE_DIM, seq, self.rope_dim)

        q_rot, k_rot = self.rotate_parts(q_rot, k_rot, rotary)
        kv_nope, k_rot = m.cached(kv_nope, k_rot)
        query_states = cat((q_pass, q_rot), self.qk_dim)
        key_states, value_states = self.expand_kv(m, kv_nope, k_rot)
        attn_output, attn_weights = self.attend(m, query_states, key_states, value_states, mask)
        attn_output = reshape(attn_output, batch, seq, merge(self.heads, self.v_dim))
        attn_output = (m / "o_proj").linear(attn_output)
        return attn_output, attn_weights

    def compressed(self, m: Module, hidden_states: Tensor) -> Tensor:
        """Return the latents, and the part of the keys that all heads share. With split heads, its gradient is a partial sum
        (MlaKvAProjParallel)."""
        compressed_kv, group = m.linear(hidden_states), m.run.tensor_parallel
        if group is None or group.plan.get(m.path) != "mla_kv_a_proj":
            return compressed_kv
        pass_output, rope_output = split(compressed_kv, self.kv_rank, self.rope_dim)
        rope_output = group.gradient_summed(rope_output, "keys of all heads")
        return cat((pass_output, rope_output), self.latent_dim)

    def queries(self, m: Module, hidden_states: Tensor) -> Tensor:
        if self.config.q_lora_rank is None:
            return (m / "q_proj").linear(hidden_states)
        return (m / "q_b_proj").linear(rms_norm(m / "q_a_layernorm", (m / "q_a_proj").linear(hidden_states)))

    def rotate_parts(self, q_rot: Tensor, k_rot: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        cos, sin = rotary
        if self.config.rope_interleave:
            return apply_rotary_pos_emb_interleave(q_rot, k_rot, cos, sin)
        return apply_rotary_pos_emb(q_rot, k_rot, cos, sin)

    def expand_kv(self, m: Module, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of all heads, computed from the latents."""
        batch, _, seq, _ = kv_nope.shape
        kv_nope = view((m / "kv_b_proj").linear(kv_nope), batch, seq, self.heads, self.kv_dim)
        kv_nope = transpose(kv_nope, 1, 2)
        k_nope, value_states = split(kv_nope, self.nope_dim, self.v_dim)
        k_rot = expand(k_rot, batch, self.heads, seq, self.rope_dim)
        key_states = new_tensor(m.run.memory, (batch, self.heads, seq, self.qk_dim), kv_nope.dtype, "key states")
        key_states = copy_into(key_states, k_nope)
        key_states = copy_into(key_states, k_rot)
        return key_states, value_states


def apply_rotary_pos_emb_interleave(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return q and k with even and odd dims rotated as pairs. The two halves of the pairs stay apart."""
    half = divided(cos.shape[-1], 2)
    cos, sin = unsqueeze(part(cos, half), 1), unsqueeze(part(sin, half), 1)
    q1, q2 = every_second(q), every_second(q)
    k1, k2 = every_second(k), every_second(k)
    q_embed = cat([sub(q1 * cos, q2 * sin), q2 * cos + q1 * sin], q.shape[-1])
    k_embed = cat([sub(k1 * cos, k2 * sin), k2 * cos + k1 * sin], k.shape[-1])
    return q_embed, k_embed


def _architecture(config: Any) -> Architecture:
    """Return the dims and options that Megatron's GPTModel is built from."""
    from memcalc.families.base.architecture import deepseek

    return deepseek(config, sigmoid=True)


FAMILY: Final = Family(
    "deepseek_v3",
    DeepseekV3,
    Support(
        tensor_parallel=LATENT,
        context_parallel=True,
        stages=True,
        auto_ep=Preset(sigmoid=True, corrected=True, shared=True),
        architecture=_architecture,
    ),
)
