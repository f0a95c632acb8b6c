"""DBRX (models/dbrx/modeling_dbrx.py): joined and clipped q, k and v, layer norms, and a loop over experts.

Its experts run one after the other, each over the copies of tokens that were sent to it. Routing is taken to be balanced:
copy i goes to expert i modulo the number of experts, so that the first experts may have one row more than the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, cast

from memcalc.core.dims import ONE_DIM, Dim, merge, plus
from memcalc.core.dtypes import int64
from memcalc.core.ops.elementwise import dropout, like, mul_, softmax
from memcalc.core.ops.matmul import mm
from memcalc.core.ops.routing import absolute_norm, div, index, index_add_, index_two, topk
from memcalc.core.ops.selection import clamp
from memcalc.core.ops.shape import reshape, select, split, transpose, unsqueeze, view
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.errors import quoted
from memcalc.families.base.blocks import act, attention, own_head_loss, position_ids, rotary_buffers
from memcalc.families.base.config import (
    Activation,
    Count,
    DecimalProbability,
    Layers,
    Probability,
    check_divides,
)
from memcalc.families.base.experts import REFUSED, TWO, balanced_rows
from memcalc.families.base.module import Buffer, Module, Weight, module
from memcalc.families.base.router_outputs import RouterOutputs, RouterOutputsConfig
from memcalc.families.base.support import Family, Support
from memcalc.families.llama import linear_weights

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.core.tensor import Memory
    from memcalc.families.base.blocks import Attended

_INNER: Mapping[str, Sequence[str]] = {
    "attn_config": ("attn_pdrop", "clip_qkv", "kv_n_heads", "rope_theta"),
    "ffn_config": (
        "ffn_act_fn", "ffn_hidden_size", "moe_num_experts", "moe_top_k", "moe_jitter_eps", "moe_normalize_expert_weights",
    ),
}  # fmt: skip
"""The fields of each inner object of a config.json."""


@dataclass(frozen=True, kw_only=True)
class DbrxConfig(RouterOutputsConfig):
    """The fields and defaults of models/dbrx/configuration_dbrx.py, with the fields of `attn_config` and `ffn_config` beside
    the others."""

    given: ClassVar[Sequence[str]] = ()
    attribute_map: ClassVar[Mapping[str, str]] = {
        "num_attention_heads": "n_heads",
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "max_position_embeddings": "max_seq_len",
    }
    refused: ClassVar[Mapping[str, Sequence[Any]]] = {
        **REFUSED,
        "tie_word_embeddings": (False,),
        "moe_normalize_expert_weights": (1, 1.0, None),
        "rope_scaling": (None,),
    }
    tie_word_embeddings: ClassVar[bool] = False
    rope: ClassVar[Mapping[str, str]] = {"rope_type": "default"}

    d_model: Count = 2048
    n_heads: Count = 16
    n_layers: Layers = 24
    head_dim: Count | None = None
    max_seq_len: Count = 2048
    vocab_size: Count = 32000
    pad_token_id: int | None = None
    resid_pdrop: DecimalProbability = 0.0
    rope_parameters: dict[str, Any] | None = None
    attn_pdrop: Probability = 0.0
    clip_qkv: float | None = None
    kv_n_heads: Count = 1
    rope_theta: float | None = None
    ffn_act_fn: dict[Literal["name"], Activation] | None = None
    ffn_hidden_size: Count = 3584
    moe_num_experts: Count = 4
    moe_top_k: Count = 1
    moe_jitter_eps: float | None = None
    moe_normalize_expert_weights: float | None = 1.0

    @classmethod
    def renamed(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        flat = dict(config)
        if flat.get("hidden_size", flat.get("d_model")) != flat.get("d_model"):
            raise ValueError("hidden_size has to be named d_model: the experts do not see it otherwise")
        theta = flat.pop("rope_theta", 10000.0)  # read beside the one of attn_config
        if type(theta) not in (int, float) or not theta > 1:
            raise ValueError(f"field `rope_theta` is {quoted(theta)}; it should be a number above 1")
        for name, own in _INNER.items():
            inner = flat.pop(name, None)
            if inner is not None and not isinstance(inner, dict):
                raise ValueError(f"{name} {inner!r} is not an object")
            named = cast("dict[str, Any]", inner or {})
            for key in own:
                if key in flat and flat.pop(key) != named.get(key, getattr(cls, key)):
                    raise ValueError(f"{key} is a field of {name}: given beside it, it is not read")
            flat |= {key: named[key] for key in own if key in named}
        return super().renamed(flat)

    @property
    def activation(self) -> str:
        return (self.ffn_act_fn or {}).get("name", "silu")

    def check(self) -> None:
        super().check()
        check_divides(self, "d_model", "n_heads")
        check_divides(self, "n_heads", "kv_n_heads")
        if self.moe_top_k > self.moe_num_experts:
            raise ValueError(f"moe_top_k {self.moe_top_k} is above moe_num_experts {self.moe_num_experts}")
        for name in ("clip_qkv", "rope_theta"):
            if getattr(self, name) is None:
                raise ValueError(f"{name} of attn_config is missing: this type has no default for it")
        if (self.rope_theta or 0) <= 1:
            raise ValueError(f"rope_theta {self.rope_theta} is not a number above 1")
        kind = (self.rope_parameters or {}).get("rope_type", "default")
        if kind != "default":
            raise ValueError(f"rope_parameters rope_type {kind!r} is not modelled; allowed: 'default'")
        width = self.d_model // self.n_heads
        if self.head_dim not in (None, width):
            raise ValueError(f"head_dim {self.head_dim} has to be d_model/n_heads {width}")
        if width % 2:
            raise ValueError(f"{width} rotated dims of a head are not an even number")


class Dbrx(RouterOutputs):
    """The program of DbrxForCausalLM."""

    Config = DbrxConfig
    backbone = "transformer"
    balances = True
    polynomial = False
    polynomial_in_batch = False

    def __init__(self, config: Any) -> None:
        self.config = config
        self.layers = config.n_layers
        self.vocab = Dim("vocab", config.vocab_size)
        self.hidden = Dim("hidden", config.d_model)
        self.ffn = Dim("ffn", config.ffn_hidden_size)
        self.heads = Dim("heads", config.n_heads)
        self.kv_heads = Dim("kv_heads", config.kv_n_heads)
        self.head_dim = self.rotary_dim = Dim("head_dim", config.d_model // config.n_heads)
        self.rope_type = "default"
        self.max_seq_len = config.max_seq_len
        self.routed = (config.moe_top_k, config.moe_num_experts)
        self.per_token, self.experts = Dim("experts_per_token", self.routed[0]), Dim("experts", self.routed[1])
        self.q_width, self.kv_width = merge(self.heads, self.head_dim), merge(self.kv_heads, self.head_dim)
        self.qkv_width = Dim("(heads+2·kv_heads)·head_dim", self.q_width.size + 2 * self.kv_width.size)

    # --- weights

    def weights(self) -> Iterator[Weight]:
        yield Weight("transformer.wte.weight", (self.vocab, self.hidden), "embedding")
        yield from self.stack("transformer.blocks")
        yield Weight("transformer.norm_f.weight", (self.hidden,), "norm")
        yield Weight("lm_head.weight", (self.vocab, self.hidden), "head")

    def layer_weights(self, i: int) -> Iterator[Weight]:
        yield Weight("norm_attn_norm.norm_1.weight", (self.hidden,), "norm")
        yield from linear_weights("norm_attn_norm.attn.Wqkv", self.hidden, self.qkv_width, "attention", bias=False)
        yield from linear_weights("norm_attn_norm.attn.out_proj", self.q_width, self.hidden, "attention", bias=False)
        yield Weight("norm_attn_norm.norm_2.weight", (self.hidden,), "norm")
        yield from linear_weights("ffn.router.layer", self.hidden, self.experts, "router", bias=False)
        for name in ("w1", "v1", "w2"):
            yield Weight(f"ffn.experts.mlp.{name}", (merge(self.experts, self.ffn), self.hidden), "experts")

    def buffers(self) -> Iterator[Buffer]:
        yield from rotary_buffers("transformer.rotary_emb", self.rotary_dim, self.rope_type, self.max_seq_len)

    # --- forward

    def loss_of_tokens(
        self, root: Module, logits: Callable[[Tensor], Tensor], hidden_states: Tensor, ids: Tensor
    ) -> Tensor:
        return own_head_loss(root / self.head_name, logits, hidden_states, ids)

    @module
    def model(self, m: Module, ids: Tensor) -> Tensor:
        run = m.run
        inputs_embeds = (m / "wte").embedding(ids)
        positions = position_ids(run)
        mask = self.masks(run)["full_attention"]
        hidden_states = inputs_embeds
        position_embeddings = self.position_embeddings(m / "rotary_emb", positions)
        for i in range(self.layers):
            run.memory.enter(run.memory.phase, i)
            layer = Module(run, f"{m.path}.blocks.*", i)
            hidden_states = self.call_layer(layer, hidden_states, position_embeddings, mask, positions)
        run.memory.enter(run.memory.phase, None)
        return (m / "norm_f").layer_norm(hidden_states)

    @module
    def layer(
        self, m: Module, hidden_states: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None, positions: Tensor
    ) -> Tensor:
        """Return the output of DbrxBlock."""
        resid_states, hidden_states = self.norm_attn_norm(m / "norm_attn_norm", hidden_states, rotary, mask)
        hidden_states = self.mlp(m / "ffn", hidden_states)
        hidden_states = dropout(hidden_states, self.config.resid_pdrop)
        return resid_states + hidden_states

    @module
    def norm_attn_norm(
        self, m: Module, hidden_states: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        residual_states = hidden_states
        hidden_states = (m / "norm_1").layer_norm(hidden_states)
        hidden_states, _weights = self.attention(m / "attn", hidden_states, rotary, mask)
        hidden_states = dropout(hidden_states, self.config.resid_pdrop)
        hidden_states = hidden_states + residual_states
        residual_states = hidden_states
        hidden_states = (m / "norm_2").layer_norm(hidden_states)
        return residual_states, hidden_states

    @module
    def attention(
        self, m: Module, hidden_states: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None
    ) -> Attended:
        batch, seq, _ = hidden_states.shape
        qkv_states = (m / "Wqkv").linear(hidden_states)
        qkv_states = clamp(qkv_states, 2)
        q, k, v = split(qkv_states, self.q_width, self.kv_width, self.kv_width)
        q = transpose(view(q, batch, seq, self.heads, self.head_dim), 1, 2)
        k = transpose(view(k, batch, seq, self.kv_heads, self.head_dim), 1, 2)
        v = transpose(view(v, batch, seq, self.kv_heads, self.head_dim), 1, 2)
        cos, sin = rotary
        q, k = self.rotate(q, k, cos, sin)
        k, v = m.cached(k, v)
        attn_output, attn_weights = attention(m.run, q, k, v, mask, p=self.config.attn_pdrop)
        attn_output = reshape(attn_output, batch, seq, self.q_width)
        attn_output = (m / "out_proj").linear(attn_output)
        return attn_output, attn_weights

    @module
    def mlp(self, m: Module, x: Tensor) -> Tensor:
        """Return the output of DbrxFFN."""
        hidden_states, router_logits = self.router(m / "router", x)
        top_k_weights, top_k_index = self.route_tokens_to_experts(router_logits)
        return self.run_experts(m / "experts", hidden_states, top_k_index, top_k_weights)

    @module
    def router(self, m: Module, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the hidden states, which DbrxRouter's noise changes in place, and the router's logits."""
        batch, seq, hidden = hidden_states.shape
        if self.config.moe_jitter_eps is not None:
            hidden_states = mul_(hidden_states, like(hidden_states, "noise"))
        router_logits = (m / "layer").linear(view(hidden_states, merge(batch, seq), hidden))
        m.run.collect(m.layer, router_logits)
        return hidden_states, router_logits

    def route_tokens_to_experts(self, router_logits: Tensor) -> tuple[Tensor, Tensor]:
        router_logits = softmax(router_logits, router_logits.dtype)
        router_top_value, router_indices = topk(router_logits, self.per_token)
        if self.config.moe_normalize_expert_weights is not None:
            router_top_value = div(router_top_value, absolute_norm(router_top_value))
        return router_top_value, router_indices

    @module
    def run_experts(self, m: Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the output of DbrxExperts."""
        batch, seq, hidden = hidden_states.shape
        memory = hidden_states.memory
        hidden_states = reshape(hidden_states, merge(batch, seq), hidden)
        next_states = new_tensor(memory, hidden_states.shape, hidden_states.dtype, "next states")
        _expert_mask = new_tensor(memory, (*top_k_index.shape, plus(self.experts, 1)), int64, "one-hot experts")
        rows = balanced_rows(top_k_index, self.experts)
        _expert_hit = new_tensor(memory, (Dim("experts hit", len(rows)), ONE_DIM), int64, "experts hit")
        mlp = m / "mlp"
        for n in rows:
            idx, token_idx = where_chosen(memory, n)
            v1 = select(view(mlp.weight("v1"), self.experts, self.ffn, hidden), 0)
            w1 = select(view(mlp.weight("w1"), self.experts, self.ffn, hidden), 0)
            w2 = select(view(mlp.weight("w2"), self.experts, self.ffn, hidden), 0)
            states = self.expert_glu(mlp, index(hidden_states, token_idx, "rows of an expert"), w1, v1, w2)
            states = view(states, *states.shape) * index_two(unsqueeze(top_k_weights, 2), token_idx, idx)
            next_states = index_add_(next_states, token_idx, states)
        return view(next_states, batch, seq, hidden)

    @module
    def expert_glu(self, m: Module, x: Tensor, expert_w1: Tensor, expert_v1: Tensor, expert_w2: Tensor) -> Tensor:
        """Return the output of DbrxExpertGLU."""
        gate_proj = mm(x, transpose(expert_w1, 0, 1), None, "w1")
        up_proj = mm(x, transpose(expert_v1, 0, 1), None, "v1")
        gate_proj = act(gate_proj, self.config.activation)
        intermediate_states = gate_proj * up_proj
        return mm(intermediate_states, expert_w2, None, "w2")


def where_chosen(memory: Memory, rows: Dim) -> tuple[Tensor, Tensor]:
    """Return torch.where(expert_mask[expert]): two views of the tensor that nonzero returns."""
    found = new_tensor(memory, (rows, TWO), int64, "copies of an expert")
    one = Tensor(found.storage, (rows,), (TWO.size,), int64)
    return one, Tensor(found.storage, (rows,), (TWO.size,), int64)


FAMILY: Final = Family("dbrx", Dbrx, Support(ulysses=True))
