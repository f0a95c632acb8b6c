"""Phi-3.5-MoE (models/phimoe/modeling_phimoe.py): Mixtral with layer norms, biases by choice and sampled experts, always two a
token, whatever `num_experts_per_tok` says.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Final

from memcalc.core.autograd import Node
from memcalc.core.dims import ONE_DIM, Dim, divided, merge
from memcalc.core.dtypes import boolean, fp32, int64
from memcalc.core.ops.elementwise import cast, like, mul, mul_, mul_view_, of_two, recording, scale, softmax, sub
from memcalc.core.ops.routing import gather, masked_fill, scatter, topk
from memcalc.core.ops.shape import cat, reshape, unsqueeze
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.families.base.blocks import frequency_update
from memcalc.families.base.config import Activation, Count, Decimal, Layers, Probability, RotaryConfig, check_divides
from memcalc.families.base.experts import REFUSED, TWO, check_experts
from memcalc.families.base.module import Module, Weight, module
from memcalc.families.base.plans import ONLY_EXPERTS
from memcalc.families.base.router_outputs import RouterOutputsConfig
from memcalc.families.base.support import Family, Support
from memcalc.families.gpt2 import norm_weights
from memcalc.families.mixtral import Mixtral

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

Mask = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class PhimoeConfig(RouterOutputsConfig, RotaryConfig):
    """The fields and defaults of models/phimoe/configuration_phimoe.py."""

    null_head_dim: ClassVar[bool] = False
    refused: ClassVar[Mapping[str, Sequence[Any]]] = REFUSED

    vocab_size: Count = 32064
    hidden_size: Count = 4096
    intermediate_size: Count = 6400
    num_hidden_layers: Layers = 32
    num_attention_heads: Count = 32
    num_key_value_heads: Count = 8
    head_dim: Count | None = None
    hidden_act: Activation = "silu"
    max_position_embeddings: Count = 4096 * 32
    tie_word_embeddings: bool = False
    sliding_window: Count | None = None
    attention_dropout: Probability = 0.0
    num_experts_per_tok: Count = 2
    num_local_experts: Count = 16
    input_jitter_noise: Decimal = 0.0
    attention_bias: bool = False
    lm_head_bias: bool = False

    def check(self) -> None:
        super().check()
        check_divides(self, "num_attention_heads", "num_key_value_heads")
        check_experts(self, "num_local_experts", "hidden_size", "intermediate_size")
        if self.rope["rope_type"] != "default":
            for key in ("short_mscale", "long_mscale", "original_max_position_embeddings"):
                if key not in self.rope:
                    raise ValueError(f"rope_parameters of rope_type {self.rope['rope_type']!r} lack {key!r}")


class Phimoe(Mixtral):
    """The program of PhimoeForCausalLM."""

    Config = PhimoeConfig
    router_name = "router"
    chooses_again = (
        True  # SparseMixer's second choice is that of the largest of what the first one has left, also of nothing
    )

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.routed = (TWO.size, config.num_local_experts)  # whatever num_experts_per_tok says
        self.experts = replace(self.experts, per_token=Dim("experts_per_token", TWO.size))
        self.router = SparseMixer(self.experts.count, self.hidden, jitters=config.input_jitter_noise > 0)

    @property
    def chosen_experts(self) -> int:
        return self.config.num_experts_per_tok

    def weights(self) -> Iterator[Weight]:
        for weight in super().weights():
            yield weight
            if weight.name == "model.norm.weight":
                yield Weight("model.norm.bias", (self.hidden,), "norm")

    def layer_weights(self, i: int) -> Iterator[Weight]:
        yield from self.attention_weights()
        yield from self.mlp_weights()
        yield from norm_weights("input_layernorm", self.hidden)
        yield from norm_weights("post_attention_layernorm", self.hidden)

    @module
    def mlp(self, m: Module, x: Tensor) -> Tensor:
        """Return the output of PhimoeSparseMoeBlock. Noise changes its input in place, and once more in the router."""
        batch, seq, hidden = x.shape
        if self.router.jitters:
            x = mul_(x, like(x, "noise"))
        hidden_states, (_logits, routing_weights, selected_experts) = self.router.forward(m / "router", x)
        final_hidden_states = self.experts.forward(m / "experts", hidden_states, selected_experts, routing_weights)
        return reshape(final_hidden_states, batch, seq, hidden)

    def norm(self, m: Module, hidden_states: Tensor) -> Tensor:
        return m.layer_norm(hidden_states)

    def position_embeddings(self, m: Module, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output of PhimoeRotaryEmbedding, which makes its frequencies anew in each forward."""
        run = m.run
        run.memory.scope = m.path
        grad_enabled, run.memory.grad_enabled = run.memory.grad_enabled, False
        frequency_update(m, self.rope_type)
        _last = new_tensor(run.memory, (), int64, "last position")
        _seq_len = like(_last, "sequence length")
        inv_freq = new_tensor(run.memory, (divided(self.rotary_dim, 2),), fp32, "inv_freq")
        freqs = mul(cast(unsqueeze(positions, 2), fp32), inv_freq)
        emb = cat((freqs, freqs), self.rotary_dim)
        cos = scale(like(emb, "cos"), "mul", "cos")
        sin = scale(like(emb, "sin"), "mul", "sin")
        cos, sin = cast(cos, run.dtype, "cos"), cast(sin, run.dtype, "sin")
        run.memory.grad_enabled = grad_enabled
        return cos, sin


@dataclass(frozen=True)
class SparseMixer:
    """A module like PhimoeTopKRouter. It samples two experts from those close to the best, with its own gradient."""

    count: Dim
    hidden: Dim
    jitters: bool

    def weights(self, path: str) -> Iterator[Weight]:
        yield Weight(f"{path}.weight", (self.count, self.hidden), "router")

    @module
    def forward(self, m: Module, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Return the hidden states token by token, and the logits, the weights of the chosen experts and their indices."""
        batch, seq, hidden = x.shape
        tokens = merge(batch, seq)
        if self.jitters:
            x = mul_view_(x, new_tensor(x.memory, (tokens, hidden), x.dtype, "noise"))
        hidden_states = reshape(x, tokens, hidden)
        router_logits = m.linear(hidden_states)
        routing_weights, selected_experts = sparsemixer(router_logits)
        m.run.collect(m.layer, router_logits)
        return hidden_states, (router_logits, routing_weights, selected_experts)


def sparsemixer(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the multipliers and the experts. The variables have the real frame's names, which keeps all of them to its end."""
    _threshold = far_from_the_best(scores, scores)
    masked_gates = masked_fill(scores, _threshold[0])
    selected_experts = sampled(masked_gates)
    masked_gates = softmax(masked_gates)
    multiplier_o = gather(masked_gates, selected_experts)
    _best = topk(masked_gates, ONE_DIM)
    mask_for_one = midpoints(_best, masked_gates)
    multiplier = phimoe_multiplier(scores, multiplier_o, selected_experts, masked_gates, mask_for_one)

    masked_scores = scatter(scores, selected_experts)
    _threshold = far_from_the_best(scores, masked_scores)
    masked_gates_top2 = masked_fill(masked_scores, _threshold[0])
    selected_experts_top2 = sampled(masked_gates_top2)
    masked_gates_top2 = softmax(masked_gates_top2)
    multiplier_top2_o = gather(masked_gates_top2, selected_experts_top2)
    _best = topk(masked_gates_top2, ONE_DIM)
    mask_for_one_top2 = midpoints(_best, masked_gates_top2)
    multiplier_top2 = phimoe_multiplier(
        scores, multiplier_top2_o, selected_experts_top2, masked_gates_top2, mask_for_one_top2
    )
    multiplier = cat((multiplier, multiplier_top2), TWO)
    selected_experts = cat((selected_experts, selected_experts_top2), TWO)
    return multiplier, selected_experts


def far_from_the_best(scores: Tensor, of: Tensor) -> Mask:
    """Return (max - scores) / factor > 2·jitter, without a gradient. The index of the best and the factor stay in the frame."""
    memory = scores.memory
    grad_enabled, memory.grad_enabled = memory.grad_enabled, False
    threshold, max_ind = topk(of, ONE_DIM)
    factor = like(like(scores, "abs"), "clamped")
    threshold = like(like(sub(threshold, scores), "quotient"), "far from the best", boolean)
    memory.grad_enabled = grad_enabled
    return threshold, max_ind, factor


def sampled(gates: Tensor) -> Tensor:
    """Return (gates - torch.empty_like(gates).exponential_().log()).max(dim=-1)[1].unsqueeze(-1)."""
    noise = like(like(gates, "exponential"), "log")
    noisy = sub(gates, noise)
    del noise
    return topk(noisy, ONE_DIM)[1]


def midpoints(best: tuple[Tensor, Tensor], gates: Tensor) -> Tensor:
    """Return 0.3333 + 0.6667·(1 if the best expert was chosen or a coin toss says so, else 0)."""
    max_scores, max_ind = best
    chosen = like(max_ind, "is the best", boolean)
    coin = like(like(max_scores, "random"), "coin", boolean)
    mask_for_one = of_two(chosen, coin, "midpoints", boolean)
    del chosen, coin
    return cast(like(mask_for_one, "midpoints", fp32), gates.dtype)


def phimoe_multiplier(
    scores: Tensor, multiplier: Tensor, selected_experts: Tensor, masked_gates: Tensor, mask_for_one: Tensor
) -> Tensor:
    """Return the output of PhimoeMultiplier; only `scores` gets a gradient."""
    node = None
    if recording(scores):
        inputs = (scores, multiplier, selected_experts, masked_gates, mask_for_one)
        node = Node(scores.memory, _multiplier_backward, inputs, (multiplier, selected_experts, masked_gates))
    out = of_two(multiplier, mask_for_one, "multiplier")
    out.node = node
    return out


def _multiplier_backward(node: Node, grads: list[Tensor]) -> list[Tensor | None]:
    multiplier, _selected_experts, masked_gates = node.unpack()
    grad_at_output = of_two(grads[0], multiplier, "multiplier gradient")
    grad_at_scores = of_two(masked_gates, like(grad_at_output, "negated"), "scores gradient")
    return [grad_at_scores, None, None, None, None]


FAMILY: Final = Family(
    "phimoe",
    Phimoe,
    Support(tensor_parallel=ONLY_EXPERTS, context_parallel=True, ulysses=True, stages=True, halves=False),
)
