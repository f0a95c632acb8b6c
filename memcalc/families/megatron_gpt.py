"""Megatron-LM's GPTModel by its own options (megatron/core/models/gpt/gpt_model.py), for the layers that no type of
transformers has.

transformers does not know this type, and it has no forward here: `memcalc.megatron` runs it, as it runs every type with
an `architecture`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from memcalc.core.dims import ONE_DIM, Dim, merge
from memcalc.families.base.config import Bounds, Count, FamilyConfig, Layers, Probability, check_divides
from memcalc.families.base.module import Weight
from memcalc.families.base.program import Program
from memcalc.families.base.support import Family, Support

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    from memcalc.families.base.architecture import Architecture, Experts, Latent

_LATENT: Final = ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
"""The dims that `--multi-latent-attention` needs."""


@dataclass(frozen=True, kw_only=True)
class MegatronGPTConfig(FamilyConfig):
    """Fields named after Megatron-LM's arguments (megatron/training/arguments.py)."""

    num_layers: Layers
    hidden_size: Count
    num_attention_heads: Count
    ffn_hidden_size: Count
    vocab_size: Count
    """The rows of the embedding, padding included."""
    num_query_groups: Count | None = None
    kv_channels: Count | None = None
    """The dims of a head; None for hidden_size / num_attention_heads."""
    max_position_embeddings: Count | None = None
    position_embedding_type: Literal["learned_absolute", "rope"] = "learned_absolute"
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    swiglu: bool = False
    squared_relu: bool = False
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    qk_layernorm: bool = False
    untie_embeddings_and_output_weights: bool = False
    hidden_dropout: Probability = 0.1
    attention_dropout: Probability = 0.1
    num_experts: Count | None = None
    moe_router_topk: Count | None = None
    moe_ffn_hidden_size: Count | None = None
    moe_layer_freq: list[Annotated[int, Bounds(ge=0, le=1)]] | None = None
    """1 for each layer with experts; None: all have them."""
    moe_shared_expert_intermediate_size: Count | None = None
    moe_shared_expert_gate: bool = False
    moe_router_pre_softmax: bool = False
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    moe_router_num_groups: Count | None = None
    moe_router_topk_scaling_factor: float | None = None
    multi_latent_attention: bool = False
    q_lora_rank: Count | None = None
    kv_lora_rank: Count | None = None
    qk_head_dim: Count | None = None
    qk_pos_emb_head_dim: Count | None = None
    v_head_dim: Count | None = None
    mtp_num_layers: Count | None = None
    """The layers of multi-token prediction; None: there are none."""

    @property
    def tie_word_embeddings(self) -> bool:
        return not self.untie_embeddings_and_output_weights

    @property
    def activation(self) -> str:
        return "squared_relu" if self.squared_relu else "swiglu" if self.swiglu else "gelu"

    def check(self) -> None:
        super().check()
        if self.kv_channels is None:
            check_divides(self, "hidden_size", "num_attention_heads")
        check_divides(self, "num_attention_heads", "num_query_groups")
        if self.position_embedding_type == "learned_absolute" and self.max_position_embeddings is None:
            raise ValueError("field `max_position_embeddings` is missing, and learned positions need it")
        if self.squared_relu and (self.swiglu or self.num_experts is not None):
            raise ValueError("squared_relu is modelled without swiglu and without num_experts")
        if self.num_experts is not None:
            self._check_experts(self.num_experts)
        if self.multi_latent_attention:
            self._check_latent()

    def _check_experts(self, count: int) -> None:
        missing = [name for name in ("moe_router_topk", "moe_ffn_hidden_size") if getattr(self, name) is None]
        if missing:
            raise ValueError(f"field `{missing[0]}` is missing, and num_experts {count} needs it")
        if (self.moe_router_topk or 0) > count:
            raise ValueError(f"moe_router_topk {self.moe_router_topk} is more than num_experts {count}")
        if self.moe_layer_freq is not None and len(self.moe_layer_freq) != self.num_layers:
            raise ValueError(
                f"moe_layer_freq has {len(self.moe_layer_freq)} numbers, and num_layers is {self.num_layers}"
            )
        if self.add_bias_linear:
            raise ValueError(f"num_experts {count} needs add_bias_linear false: experts with biases are not modelled")
        if self.moe_shared_expert_gate and self.moe_shared_expert_intermediate_size is None:
            raise ValueError("moe_shared_expert_gate needs a moe_shared_expert_intermediate_size")

    def _check_latent(self) -> None:
        missing = [name for name in _LATENT if getattr(self, name) is None]
        if missing:
            raise ValueError(f"field `{missing[0]}` is missing, and multi_latent_attention needs it")
        if self.add_qkv_bias or self.num_query_groups not in (None, self.num_attention_heads):
            raise ValueError("multi_latent_attention is modelled without add_qkv_bias and without num_query_groups")


def _architecture(config: Any) -> Architecture:
    """Return the dims and options that GPTModel is built from."""
    from memcalc.families.base.architecture import Architecture

    c: MegatronGPTConfig = config
    return Architecture(
        layers=c.num_layers,
        hidden=c.hidden_size,
        heads=c.num_attention_heads,
        kv_heads=c.num_query_groups or c.num_attention_heads,
        head_dim=c.kv_channels or c.hidden_size // c.num_attention_heads,
        ffn=c.ffn_hidden_size,
        vocab=c.vocab_size,
        gated=c.swiglu,
        squared_relu=c.squared_relu,
        rms_norm=c.normalization == "RMSNorm",
        qkv_bias=(c.add_qkv_bias or c.add_bias_linear) and not c.multi_latent_attention,
        linear_bias=c.add_bias_linear,
        qk_norm=c.qk_layernorm and not c.multi_latent_attention,
        positions=c.max_position_embeddings if c.position_embedding_type == "learned_absolute" else None,
        tied=not c.untie_embeddings_and_output_weights,
        hidden_dropout=c.hidden_dropout,
        attention_dropout=c.attention_dropout,
        experts=_experts(c),
        latent=_latent(c),
        mtp=c.mtp_num_layers or 0,
    )


def _experts(c: MegatronGPTConfig) -> Experts | None:
    from memcalc.families.base.architecture import Experts

    if c.num_experts is None:
        return None
    assert c.moe_router_topk is not None
    assert c.moe_ffn_hidden_size is not None
    return Experts(
        count=c.num_experts,
        per_token=c.moe_router_topk,
        ffn=c.moe_ffn_hidden_size,
        shared_ffn=c.moe_shared_expert_intermediate_size or 0,
        shared_gate=c.moe_shared_expert_gate,
        normalised=not c.moe_router_pre_softmax,
        sigmoid=c.moe_router_score_function == "sigmoid",
        grouped=c.moe_router_num_groups is not None,
        scaled=c.moe_router_topk_scaling_factor is not None,
        dense=frozenset(i for i, routed in enumerate(c.moe_layer_freq or ()) if not routed),
    )


def _latent(c: MegatronGPTConfig) -> Latent | None:
    from memcalc.families.base.architecture import Latent

    if not c.multi_latent_attention:
        return None
    assert c.kv_lora_rank is not None
    assert c.qk_head_dim is not None
    assert c.qk_pos_emb_head_dim is not None
    assert c.v_head_dim is not None
    return Latent(
        q_rank=c.q_lora_rank,
        kv_rank=c.kv_lora_rank,
        nope_dim=c.qk_head_dim,
        rope_dim=c.qk_pos_emb_head_dim,
        v_dim=c.v_head_dim,
        normed=c.qk_layernorm,
    )


class MegatronGPT(Program):
    """The parameters of the whole GPTModel, on one rank."""

    Config: type[FamilyConfig] = MegatronGPTConfig
    attention_kinds = ("sdpa", "eager", "flash", "unfused")
    pads = False
    autocasts = False
    embedding = "embedding.word_embeddings"
    unembedding = "output_layer"
    weights_source = "shapes of Megatron-Core's GPTModel"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        a = self.a = _architecture(config)
        self.layers = a.layers
        self.max_seq_len = config.max_position_embeddings
        self.positions_limit = a.positions
        self.vocab = Dim("vocab", a.vocab)
        self.hidden = Dim("hidden", a.hidden)
        self.ffn = Dim("ffn", a.ffn)
        self.heads = Dim("heads", a.heads)
        self.kv_heads = Dim("kv_heads", a.kv_heads)
        self.head_dim = Dim("head_dim", a.head_dim)
        self.routed = (1, 1) if a.experts is None else (a.experts.per_token, a.experts.count)

    def variant(self, i: int) -> Hashable:
        return self.is_routed(i)

    def is_routed(self, i: int) -> bool:
        """Tell whether layer `i` has experts."""
        return self.a.experts is not None and i not in self.a.experts.dense

    def weights(self) -> Iterator[Weight]:
        yield Weight("embedding.word_embeddings.weight", (self.vocab, self.hidden), "embedding")
        if self.a.positions is not None:
            table = (Dim("positions", self.a.positions), self.hidden)
            yield Weight("embedding.position_embeddings.weight", table, "embedding")
        yield from self.stack("decoder.layers")
        yield from self.norm_weights("decoder.final_layernorm", self.hidden)
        for i in range(self.a.mtp):
            yield from self.prediction_weights(f"mtp.layers.{i}")
        if not self.a.tied:
            yield Weight("output_layer.weight", (self.vocab, self.hidden), "head")

    def prediction_weights(self, path: str) -> Iterator[Weight]:
        """Yield the weights of a layer of multi-token prediction, which is as the decoder's last layer."""
        yield from self.norm_weights(f"{path}.enorm", self.hidden)
        yield from self.norm_weights(f"{path}.hnorm", self.hidden)
        yield Weight(f"{path}.eh_proj.weight", (self.hidden, Dim("2·hidden", 2 * self.hidden.size)), "mlp")
        for weight in self.layer_weights(self.layers - 1):
            yield weight._replace(name=f"{path}.transformer_layer.{weight.name}")
        yield from self.norm_weights(f"{path}.final_layernorm", self.hidden)

    def layer_weights(self, i: int) -> Iterator[Weight]:
        yield from self.norm_weights("input_layernorm", self.hidden)
        yield from self.attention_weights() if self.a.latent is None else self.latent_weights(self.a.latent)
        yield from self.norm_weights("pre_mlp_layernorm", self.hidden)
        if self.a.experts is not None and self.is_routed(i):
            yield from self.expert_weights(self.a.experts)
        else:
            yield from self.mlp_weights("mlp", self.ffn)

    def norm_weights(self, name: str, width: Dim) -> Iterator[Weight]:
        yield Weight(f"{name}.weight", (width,), "norm")
        if not self.a.rms_norm:
            yield Weight(f"{name}.bias", (width,), "norm")

    def attention_weights(self) -> Iterator[Weight]:
        a = self.a
        qkv = Dim("(heads+2·kv_heads)·head_dim", (a.heads + 2 * a.kv_heads) * a.head_dim)
        out = merge(self.heads, self.head_dim)
        yield from self.linear_weights("self_attention.linear_proj", out, self.hidden, "attention", bias=a.linear_bias)
        yield from self.linear_weights("self_attention.linear_qkv", self.hidden, qkv, "attention", bias=a.qkv_bias)
        if a.qk_norm:
            yield from self.norm_weights("self_attention.q_layernorm", self.head_dim)
            yield from self.norm_weights("self_attention.k_layernorm", self.head_dim)

    def latent_weights(self, latent: Latent) -> Iterator[Weight]:
        qk = Dim("(qk_nope_head_dim+qk_rope_head_dim)", latent.nope_dim + latent.rope_dim)
        kv = Dim("(qk_nope_head_dim+v_head_dim)", latent.nope_dim + latent.v_dim)
        kv_rank = Dim("kv_lora_rank", latent.kv_rank)
        compressed = Dim("(kv_lora_rank+qk_rope_head_dim)", latent.kv_rank + latent.rope_dim)
        q_width, kv_width, out = (merge(self.heads, width) for width in (qk, kv, Dim("v_head_dim", latent.v_dim)))
        fans = {"linear_proj": (out, self.hidden)}
        if latent.q_rank is None:
            fans["linear_q_proj"] = self.hidden, q_width
        else:
            q_rank = Dim("q_lora_rank", latent.q_rank)
            fans |= {"linear_q_down_proj": (self.hidden, q_rank), "linear_q_up_proj": (q_rank, q_width)}
            if latent.normed:
                yield from self.norm_weights("self_attention.q_layernorm", q_rank)
        fans |= {"linear_kv_down_proj": (self.hidden, compressed), "linear_kv_up_proj": (kv_rank, kv_width)}
        for name, (fan_in, fan_out) in fans.items():
            bias = self.a.linear_bias and name == "linear_proj"
            yield from self.linear_weights(f"self_attention.{name}", fan_in, fan_out, "attention", bias=bias)
        if latent.normed:
            yield from self.norm_weights("self_attention.kv_layernorm", kv_rank)

    def mlp_weights(self, path: str, ffn: Dim) -> Iterator[Weight]:
        fc1, bias = Dim(f"2·{ffn.name}", 2 * ffn.size) if self.a.gated else ffn, self.a.linear_bias
        yield from self.linear_weights(f"{path}.linear_fc1", self.hidden, fc1, "mlp", bias=bias)
        yield from self.linear_weights(f"{path}.linear_fc2", ffn, self.hidden, "mlp", bias=bias)

    def expert_weights(self, e: Experts) -> Iterator[Weight]:
        """Yield the weights of a routed layer. TEGroupedMLP has a weight for every expert; here they are one."""
        count, ffn = Dim("experts", e.count), Dim("expert_ffn", e.ffn)
        fc1 = Dim("2·expert_ffn", 2 * e.ffn) if self.a.gated else ffn
        yield Weight("mlp.router.weight", (count, self.hidden), "router")
        yield Weight("mlp.experts.linear_fc1.weight", (count, fc1, self.hidden), "experts")
        yield Weight("mlp.experts.linear_fc2.weight", (count, self.hidden, ffn), "experts")
        if e.shared_gate:
            yield Weight("mlp.shared_experts.gate_weight", (ONE_DIM, self.hidden), "mlp")
        if e.shared_ffn:
            yield from self.mlp_weights("mlp.shared_experts", Dim("shared_ffn", e.shared_ffn))

    @staticmethod
    def linear_weights(name: str, fan_in: Dim, fan_out: Dim, component: str, *, bias: bool) -> Iterator[Weight]:
        yield Weight(f"{name}.weight", (fan_out, fan_in), component)
        if bias:
            yield Weight(f"{name}.bias", (fan_out,), component)


FAMILY: Final = Family(
    "megatron_gpt",
    MegatronGPT,
    Support(
        only_engine="megatron",
        architecture=_architecture,
        activation_field="activation",
        megatron_activations=("swiglu", "gelu", "squared_relu"),
        only_qkv_biases=True,
    ),
)
