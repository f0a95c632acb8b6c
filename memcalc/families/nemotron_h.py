"""Nemotron-H (models/nemotron_h/modeling_nemotron_h.py): layers of one block each, which is Mamba 2, attention without
positions, an MLP without a gate, or experts.

As Mamba 2, the path in plain torch, as runs without the packages mamba_ssm and causal_conv1d.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, cast

from memcalc.core.dims import Dim, merge
from memcalc.core.dtypes import fp32
from memcalc.core.ops import elementwise
from memcalc.core.ops.elementwise import mean, power, rsqrt
from memcalc.core.ops.shape import view
from memcalc.families.base.blocks import QKV, act, position_ids
from memcalc.families.base.config import Activation, Count, Probability, Several, check_divides
from memcalc.families.base.experts import REFUSED, PlainExperts, check_experts, check_groups, grouped_router
from memcalc.families.base.layer_types import LEGACY_LAYER_TYPES
from memcalc.families.base.masks import recurrent_mask
from memcalc.families.base.module import Buffer, Module, State, Weight, module
from memcalc.families.base.router_outputs import RouterOutputs, RouterOutputsConfig
from memcalc.families.base.support import Family, Support
from memcalc.families.llama import linear_weights
from memcalc.families.mamba2 import StateSpace
from memcalc.families.mamba2 import check_groups as check_ssm_groups

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping, Sequence

    from memcalc.core.tensor import Tensor

NO_POSITIONS: Any = None
Block = Literal["linear_attention", "full_attention", "moe", "mlp"]

_PATTERN: Mapping[str, Block] = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
_LEGACY_NAMES: Mapping[str, str] = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_chunk_size": "chunk_size",
}


@dataclass(frozen=True, kw_only=True)
class NemotronHConfig(RouterOutputsConfig):
    """The fields and defaults of models/nemotron_h/configuration_nemotron_h.py: `num_hidden_layers` is ignored, there are as
    many as blocks."""

    attribute_map: ClassVar[Mapping[str, str]] = {
        "layer_types": "layers_block_type",
        "num_local_experts": "n_routed_experts",
    }
    refused: ClassVar[Mapping[str, Sequence[Any]]] = REFUSED
    tie_word_embeddings: ClassVar[bool] = False
    """The class ties no weights, whatever its configuration says."""

    vocab_size: Count = 131072
    hidden_size: Count = 4096
    layers_block_type: list[Block] | None = None
    num_attention_heads: Count = 32
    num_key_value_heads: Count = 8
    head_dim: Count = 128
    max_position_embeddings: Count = 4096
    attention_dropout: Probability = 0.0
    attention_bias: bool = False
    intermediate_size: Count = 21504
    mlp_hidden_act: Activation = "relu2"
    mlp_bias: bool = False
    ssm_state_size: Several = 128
    mamba_num_heads: Count = 128
    mamba_head_dim: Count = 64
    mamba_hidden_act: Activation = "silu"
    n_groups: Count = 8
    conv_kernel: Count = 4
    use_conv_bias: bool = True
    chunk_size: Several = 128
    n_routed_experts: Count = 8
    moe_intermediate_size: Count = 7688
    moe_shared_expert_intermediate_size: Count = 7688
    moe_latent_size: Count | None = None
    num_experts_per_tok: Count = 2
    n_group: Count = 1
    topk_group: Count = 1
    norm_topk_prob: bool = True
    use_bias: bool = False

    @classmethod
    def renamed(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        named = super().renamed(config)
        for old, name in _LEGACY_NAMES.items():
            if old in named:
                named[name] = named.pop(old)
        for name in ("hybrid_override_pattern", "layers_block_type"):
            if named.get(name, ()) is None:
                raise ValueError(f"field `{name}` is None; it should be given or left out")
        pattern = named.pop("hybrid_override_pattern", None)
        kinds = named.get("layers_block_type")
        if kinds is None and pattern is not None:
            if not isinstance(pattern, str) or set(pattern) - set(_PATTERN):
                raise ValueError(f"hybrid_override_pattern {pattern!r} has to be made of {' '.join(_PATTERN)}")
            kinds = [_PATTERN[letter] for letter in pattern]
        if isinstance(kinds, list):
            named["layers_block_type"] = [LEGACY_LAYER_TYPES.get(str(k), k) for k in cast("list[Any]", kinds)]
        return named

    @property
    def layer_types(self) -> list[Block]:
        """Return the kind of block of each layer."""
        if self.layers_block_type is not None:
            return list(self.layers_block_type)
        return ["linear_attention", "moe", "full_attention", "mlp"]

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layer_types)

    @property
    def hidden_act(self) -> str:
        return self.mlp_hidden_act

    @property
    def rope(self) -> dict[str, Any]:
        """Return default rotary parameters, which nothing uses: the family rotates no heads."""
        return {"rope_type": "default"}

    @property
    def rotary_width(self) -> int:
        return self.head_dim

    def check(self) -> None:
        super().check()
        if not self.layer_types:
            raise ValueError("layers_block_type [] has no layers")
        check_divides(self, "num_attention_heads", "num_key_value_heads")
        if "linear_attention" in self.layer_types:
            check_ssm_groups(self.mamba_num_heads, self.n_groups, self.mamba_num_heads * self.mamba_head_dim)
        if "moe" in self.layer_types:
            width = "hidden_size" if self.moe_latent_size is None else "moe_latent_size"
            check_experts(self, "n_routed_experts", width, "moe_intermediate_size")
            check_groups(self, "n_routed_experts")


class NemotronH(RouterOutputs):
    """The program of NemotronHForCausalLM."""

    Config = NemotronHConfig
    polynomial = False
    embedding = "model.embeddings"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.blocks: list[Block] = config.layer_types
        self.mixer = StateSpace(
            hidden=self.hidden, heads=config.mamba_num_heads, head_dim=config.mamba_head_dim, groups=config.n_groups,
            state=config.ssm_state_size, kernel=config.conv_kernel, chunk=config.chunk_size, bias=config.use_bias,
            conv_bias=config.use_conv_bias, activation=config.mamba_hidden_act,
        )  # fmt: skip
        per_token, experts = (
            Dim("experts_per_token", config.num_experts_per_tok),
            Dim("experts", config.n_routed_experts),
        )
        if "moe" in self.blocks:
            self.routed = (per_token.size, experts.size)
        self.router = grouped_router(config, experts, per_token, self.hidden)
        self.latent = None if config.moe_latent_size is None else Dim("latent", config.moe_latent_size)
        expert_ffn = Dim("expert_ffn", config.moe_intermediate_size)
        self.experts = PlainExperts(experts, per_token, self.latent or self.hidden, expert_ffn, config.hidden_act)
        self.shared_ffn = Dim("shared_ffn", config.moe_shared_expert_intermediate_size)

    def variant(self, i: int) -> Hashable:
        return self.blocks[i]

    def states(self, i: int) -> tuple[State, ...]:
        return self.mixer.states() if self.blocks[i] == "linear_attention" else ()

    # --- weights and buffers

    def weights(self) -> Iterator[Weight]:
        yield Weight("model.embeddings.weight", (self.vocab, self.hidden), "embedding")
        yield from self.stack("model.layers")
        yield from self.norm_weights("model.norm_f")
        yield Weight("lm_head.weight", (self.vocab, self.hidden), "head")

    def layer_weights(self, i: int) -> Iterator[Weight]:
        yield from self.norm_weights("norm")
        block = self.blocks[i]
        if block == "linear_attention":
            yield from self.mixer.weights("mixer")
        elif block == "full_attention":
            for weight in self.attention_weights():
                if not weight.name.endswith(".bias"):  # `attention_bias` is read by nothing
                    yield weight._replace(name=weight.name.replace("self_attn", "mixer"))
        elif block == "mlp":
            yield from self.plain_mlp_weights("mixer", self.ffn)
        else:
            yield from self.expert_weights("mixer")

    def plain_mlp_weights(self, path: str, ffn: Dim) -> Iterator[Weight]:
        """Yield the parameters of an MLP without a gate, of any width."""
        bias = self.config.mlp_bias
        yield from linear_weights(f"{path}.up_proj", self.hidden, ffn, "mlp", bias=bias)
        yield from linear_weights(f"{path}.down_proj", ffn, self.hidden, "mlp", bias=bias)

    def expert_weights(self, path: str) -> Iterator[Weight]:
        yield from self.experts.weights(f"{path}.experts")
        yield from self.router.weights(f"{path}.gate")
        yield from self.plain_mlp_weights(f"{path}.shared_experts", self.shared_ffn)
        if self.latent:
            bias = self.config.mlp_bias
            yield from linear_weights(f"{path}.fc1_latent_proj", self.hidden, self.latent, "mlp", bias=bias)
            yield from linear_weights(f"{path}.fc2_latent_proj", self.latent, self.hidden, "mlp", bias=bias)

    def layer_buffers(self, i: int) -> Iterator[Buffer]:
        if self.blocks[i] == "moe":
            yield from self.router.buffers("mixer.gate")

    def buffers(self) -> Iterator[Buffer]:
        yield from self.buffer_stack("model.layers")

    # --- forward

    def head(self, root: Module, hidden_states: Tensor) -> Tensor:
        return elementwise.cast(super().head(root, hidden_states), fp32)

    @module
    def model(self, m: Module, ids: Tensor) -> Tensor:
        run = m.run
        inputs_embeds = (m / "embeddings").embedding(ids)
        hidden_states = inputs_embeds
        positions = position_ids(run)
        masks: dict[str, Tensor | None] = {**self.masks(run), "linear_attention": recurrent_mask(run)}
        for i in range(self.layers):
            run.memory.enter(run.memory.phase, i)
            mask = masks.get(self.blocks[i])
            hidden_states = self.call_layer(Module(run, f"{m.path}.layers.*", i), hidden_states, mask, positions)
        run.memory.enter(run.memory.phase, None)
        return self.norm(m / "norm_f", hidden_states)

    def norm(self, m: Module, hidden_states: Tensor) -> Tensor:
        """Return the output of NemotronHRMSNorm: the weight is cast to fp32 and the product is in fp32."""
        with m:
            input_dtype = hidden_states.dtype
            hidden_states = elementwise.cast(hidden_states, fp32)
            variance = mean(power(hidden_states, 2))
            hidden_states = hidden_states * rsqrt(variance + 1e-6)
            return elementwise.cast(elementwise.cast(m.weight(), fp32) * hidden_states, input_dtype)

    @module
    def layer(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, m: Module, hidden_states: Tensor, mask: Tensor | None, positions: Tensor
    ) -> Tensor:
        assert m.layer is not None
        block = self.blocks[m.layer]
        residual = hidden_states
        hidden_states = self.norm(m / "norm", elementwise.cast(hidden_states, (m / "norm").weight().dtype))
        if block == "linear_attention":
            hidden_states = self.mixer.forward(m / "mixer", hidden_states, mask)
        elif block == "full_attention":
            hidden_states, _weights = self.attention(m / "mixer", hidden_states, NO_POSITIONS, mask)
        elif block == "mlp":
            hidden_states = self.mlp(m / "mixer", hidden_states)
        else:
            hidden_states = self.sparse_mlp(m / "mixer", hidden_states)
        return residual + hidden_states

    def rotated_qkv(self, m: Module, hidden_states: Tensor, rotary: Any) -> QKV:
        """Return q, k and v without rotation: the family has no positions."""
        return self.qkv(m, hidden_states)

    @module
    def mlp(self, m: Module, x: Tensor) -> Tensor:
        return (m / "down_proj").linear(act((m / "up_proj").linear(x), self.config.hidden_act))

    @module
    def sparse_mlp(self, m: Module, x: Tensor) -> Tensor:
        """Return the output of NemotronHMoE. Its experts may work on narrower hidden states."""
        batch, seq, hidden = x.shape
        _logits, topk_weights, topk_indices = self.router.forward(m / "gate", x)
        hidden_states = view(x, merge(batch, seq), hidden)
        if self.latent:
            hidden_states = (m / "fc1_latent_proj").linear(hidden_states)
        hidden_states = self.experts.forward(m / "experts", hidden_states, topk_indices, topk_weights)
        if self.latent:
            hidden_states = (m / "fc2_latent_proj").linear(hidden_states)
        hidden_states = view(hidden_states, batch, seq, hidden)
        return hidden_states + self.mlp(m / "shared_experts", x)


FAMILY: Final = Family(
    "nemotron_h",
    NemotronH,
    Support(
        tensor_parallel={
            "model.embeddings": "embedding_rowwise",
            "model.layers.*.mixer.experts.up_proj": "colwise",
            "model.layers.*.mixer.experts.down_proj": "rowwise",
            "model.layers.*.mixer.experts": "moe_tp_experts",
        }
    ),
)
