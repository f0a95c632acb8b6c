"""Routed experts (integrations/moe.py): all experts of a layer in one tensor each, run as grouped products.

transformers picks `grouped_mm` where a model leaves it the choice. `grouped_mm` sorts the copies of tokens by expert,
so its bytes are the same however tokens are spread. No balance is assumed here.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from memcalc.core.autograd import Node
from memcalc.core.dims import Dim, divided, merge, numel
from memcalc.core.dtypes import boolean, fp32, int32
from memcalc.core.ops.elementwise import cast, like, recording, sigmoid, softmax, sum_last
from memcalc.core.ops.matmul import linear
from memcalc.core.ops.routing import add_, div_, gather, grouped_mm, index, masked_fill, sort, sum_middle, topk
from memcalc.core.ops.selection import masked_fill_
from memcalc.core.ops.shape import chunk, expand, reshape, transpose, unsqueeze, view
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.families.base.blocks import act
from memcalc.families.base.module import Buffer, Module, Weight, module

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence

    from memcalc.families.base.config import FamilyConfig

REFUSED: Final[Mapping[str, Sequence[Any]]] = {
    "experts_implementation": (None, "grouped_mm"),
}
"""Fields of every routed family that change its program, with the values that leave it as it is written here."""


TWO: Final = Dim("2", 2)


def check_experts(config: FamilyConfig, experts: str, *widths: str, per_token: str = "num_experts_per_tok") -> None:
    """Raise ValueError unless a token is sent to experts and the widths can be run."""
    chosen: int | None = getattr(config, per_token)
    count: int = getattr(config, experts)
    if chosen == 0:
        raise ValueError(f"{per_token} 0 sends no token to the {count} experts of {experts}; it has to be 1 or more")
    for name in widths:
        width: int = getattr(config, name)
        if width % 8:
            raise ValueError(
                f"{name} {width} is not divisible by 8: rows of grouped_mm have to be multiples of 16 bytes"
            )


def check_given(config: FamilyConfig, *names: str) -> None:
    """Raise ValueError if a field is missing that the type has no default for and needs."""
    for name in names:
        if getattr(config, name) is None:
            raise ValueError(f"{name} None has to be a number: this type has no default for it")


def check_groups(config: FamilyConfig, experts: str, at_least: int = 2) -> None:
    """Raise ValueError unless the field `experts` divides into `n_group` groups of `at_least` or more, with enough for
    `topk_group`."""
    count, groups, chosen = (getattr(config, name) for name in (experts, "n_group", "topk_group"))
    if count % groups or count // groups < at_least:
        raise ValueError(f"{experts} {count} are not n_group {groups} equal groups of {at_least} or more")
    if chosen > groups:
        raise ValueError(f"topk_group {chosen} is above n_group {groups}")


def balanced_rows(chosen: Tensor, experts: Dim) -> list[Dim]:
    """Return the copies of tokens of each expert that has any. Copy i goes to expert i modulo their number."""
    copies = numel(chosen.shape)[0]
    return [Dim("rows", len(range(e, copies, experts.size))) for e in range(min(experts.size, copies))]


@dataclass(frozen=True)
class Experts:
    """The experts of a layer, as `use_experts_implementation` runs them."""

    count: Dim
    per_token: Dim
    hidden: Dim
    ffn: Dim
    activation: str
    is_transposed: bool = False
    has_bias: bool = False
    is_expert_parallel: bool = False
    """True if other ranks have experts too. Rows for their experts are masked."""

    @property
    def gate_up(self) -> Dim:
        return Dim(f"2·{self.ffn.name}", 2 * self.ffn.size)

    @property
    def first(self) -> tuple[str, Dim]:
        """Return the name and width of an expert's first projection."""
        return "gate_up_proj", self.gate_up

    def weights(self, path: str) -> Iterator[Weight]:
        first, width = self.first
        for name, fan_in, fan_out in ((first, self.hidden, width), ("down_proj", self.ffn, self.hidden)):
            matrix = (fan_in, fan_out) if self.is_transposed else (fan_out, fan_in)
            yield Weight(f"{path}.{name}", (self.count, *matrix), "experts")
            if self.has_bias:
                yield Weight(f"{path}.{name}_bias", (self.count, fan_out), "experts")

    @module
    def forward(self, m: Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Run grouped_mm_experts_forward: a row for each copy of a token, sorted by expert."""
        tokens, hidden = hidden_states.shape
        copies = merge(tokens, self.per_token)
        sample_weights = reshape(top_k_weights, copies)
        expert_ids = reshape(top_k_index, copies)

        expert_ids_g, perm = sort(expert_ids)
        selected_hidden_states_g = index(hidden_states, like(perm, "token of a row"), "rows by expert")
        sample_weights_g = index(sample_weights, perm, "weights by expert")
        _histc_input = like(expert_ids_g, "histogram input", int32)  # fp32 on CPU
        _tokens_per_expert = new_tensor(perm.memory, (self.count,), int32, "tokens per expert")
        offsets = new_tensor(perm.memory, (self.count,), int32, "offsets of the experts")
        sentinel_mask = self.sentinels(expert_ids_g)

        first, _width = self.first
        selected_biases = self.biases(m, f"{first}_bias", expert_ids_g)
        if sentinel_mask is not None:
            selected_hidden_states_g = masked_fill_(selected_hidden_states_g, sentinel_mask)
        proj_out = self.linear(selected_hidden_states_g, m.weight(first), offsets, selected_biases)
        if sentinel_mask is not None:
            proj_out = masked_fill(proj_out, sentinel_mask)
        proj_out = self.apply_gate(proj_out)
        selected_biases = self.biases(m, "down_proj_bias", expert_ids_g)
        proj_out = self.linear(proj_out, m.weight("down_proj"), offsets, selected_biases)
        if sentinel_mask is not None:
            proj_out = masked_fill(proj_out, sentinel_mask)
        weighted_out = proj_out * unsqueeze(sample_weights_g, 1)

        inv_perm = like(perm, "inverse permutation")
        _arange = like(perm, "arange")
        del _arange  # an argument without a name in the real code
        weighted_out = index(weighted_out, inv_perm, "rows by token")
        final_hidden_states = sum_middle(view(weighted_out, tokens, self.per_token, hidden))
        return cast(final_hidden_states, hidden_states.dtype)

    def sentinels(self, expert_ids_g: Tensor) -> Tensor | None:
        """Return the mask of rows for other ranks' experts; None if all ranks have the same."""
        return unsqueeze(like(expert_ids_g, "rows of other ranks", boolean), 1) if self.is_expert_parallel else None

    def biases(self, m: Module, name: str, expert_ids_g: Tensor) -> Tensor | None:
        """Return the bias of each row's expert; None without biases."""
        return index(m.weight(name), expert_ids_g, "biases by row") if self.has_bias else None

    def linear(self, x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None) -> Tensor:
        """Run _grouped_linear."""
        columns = weight if self.is_transposed else transpose(weight, 1, 2)
        out = grouped_mm(cast(x, weight.dtype), columns, offsets, weight.name)
        return out if bias is None else add_(out, bias)

    def apply_gate(self, gate_up_out: Tensor) -> Tensor:
        """Run _default_apply_gate."""
        gate, up = chunk(gate_up_out, 2)
        return act(gate, self.activation) * up


class PlainExperts(Experts):
    """Experts without a gate (`has_gate=False`)."""

    @property
    def first(self) -> tuple[str, Dim]:
        return "up_proj", self.ffn

    def apply_gate(self, gate_up_out: Tensor) -> Tensor:
        return act(gate_up_out, self.activation)


@dataclass(frozen=True)
class RankExperts:
    """A layer's experts. The rank has `local_experts`: some of them, or a part of each."""

    whole: Experts
    local_experts: Experts

    @property
    def count(self) -> Dim:
        """Return the dim of all experts, as the router sees them."""
        return self.whole.count

    @property
    def per_token(self) -> Dim:
        """Return the dim of the experts that a token is sent to."""
        return self.whole.per_token

    def weights(self, path: str) -> Iterator[Weight]:
        """Yield the weights that the rank has."""
        return self.local_experts.weights(path)

    @contextmanager
    def with_local_parameters(self, m: Module) -> Generator[None]:
        """Replace parameters by their local parts within a block (_use_local_dtensor_params in
        transformers/distributed/parallel_utils.py). `to_local` of each parameter comes before the experts' forward, so
        none of their gradients is accumulated before their backward is done."""
        weights = m.run.weights
        parameters = {(w.name, m.layer): weights[w.name, m.layer] for w in self.weights(m.path)}
        weights |= {key: _to_local(parameter) for key, parameter in parameters.items()}
        try:
            yield
        finally:
            weights |= parameters


@dataclass(frozen=True)
class SoftmaxRouter:
    """A linear layer whose most probable experts are taken: MixtralTopKRouter, Qwen2MoeTopKRouter."""

    count: Dim
    per_token: Dim
    hidden: Dim
    normalised: bool
    """True if the chosen probabilities are scaled to add up to one."""
    in_fp32: bool = False
    """True if the weights of the chosen experts stay in fp32."""

    def weights(self, path: str) -> Iterator[Weight]:
        yield Weight(f"{path}.weight", (self.count, self.hidden), "router")

    @module
    def forward(self, m: Module, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the logits, and the weights and indices of the chosen experts."""
        hidden_states = reshape(hidden_states, *hidden_states.shape)
        router_logits = linear(hidden_states, m.weight())
        router_probs = softmax(cast(router_logits, fp32))
        router_top_value, router_indices = topk(router_probs, self.per_token)
        if self.normalised:
            router_top_value = div_(router_top_value, sum_last(router_top_value))
        if not self.in_fp32:
            router_top_value = cast(router_top_value, router_logits.dtype)
        m.run.collect(m.layer, router_logits)
        return router_logits, router_top_value, router_indices


@dataclass(frozen=True)
class SigmoidRouter:
    """A linear layer whose best experts are taken after a correction: MiniMaxM2TopKRouter. The block has the
    correction."""

    count: Dim
    per_token: Dim
    hidden: Dim

    def weights(self, path: str) -> Iterator[Weight]:
        yield Weight(f"{path}.weight", (self.count, self.hidden), "router")

    @module
    def forward(self, m: Module, hidden_states: Tensor, correction: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the logits, and the weights and indices of the chosen experts."""
        hidden_states = reshape(hidden_states, *hidden_states.shape)
        router_logits = linear(hidden_states, m.weight())
        routing_weights = sigmoid(cast(router_logits, fp32))
        scores_for_choice = routing_weights + correction
        _values, top_k_index = topk(scores_for_choice, self.per_token)
        top_k_weights = gather(routing_weights, top_k_index)
        top_k_weights = div_(top_k_weights, sum_last(top_k_weights))
        m.run.collect(m.layer, router_logits)
        return router_logits, top_k_weights, top_k_index


@dataclass(frozen=True)
class Groups:
    """Experts in groups. A token is sent to experts of a few groups."""

    experts: Dim
    count: Dim
    per_token: Dim

    def apart(self, scores: Tensor) -> Tensor:
        """Compute `scores.view(tokens, groups, experts of a group)`."""
        return view(scores, scores.shape[0], self.count, divided(self.experts, self.count.size))

    def choose(self, group_scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the indices of the best groups, a mask of groups and one of experts."""
        tokens = group_scores.shape[0]
        group_idx = topk(group_scores, self.per_token)[1]
        group_mask = like(group_scores, "mask of the groups")
        of_a_group = divided(self.experts, self.count.size)
        score_mask = reshape(expand(unsqueeze(group_mask, 2), tokens, self.count, of_a_group), tokens, self.experts)
        return group_idx, group_mask, score_mask


def without_other_groups(scores: Tensor, score_mask: Tensor) -> Tensor:
    """Compute `scores.masked_fill(~score_mask.bool(), number)`."""
    return masked_fill(scores, like(like(score_mask, "mask", boolean), "inverted mask"))


@dataclass(frozen=True)
class GroupedRouter:
    """A linear layer in fp32 whose best experts of the best groups are taken: DeepseekV3TopkRouter."""

    count: Dim
    per_token: Dim
    hidden: Dim
    groups: Groups
    normalised: bool

    def weights(self, path: str) -> Iterator[Weight]:
        yield Weight(f"{path}.weight", (self.count, self.hidden), "router")

    def buffers(self, path: str) -> Iterator[Buffer]:
        yield Buffer(f"{path}.e_score_correction_bias", (self.count,))

    @module
    def forward(self, m: Module, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the logits, and the weights and indices of the chosen experts."""
        hidden_states = view(hidden_states, merge(*hidden_states.shape[:-1]), self.hidden)
        router_logits = linear(cast(hidden_states, fp32), cast(m.weight(), fp32))
        scores = sigmoid(router_logits)
        scores_for_choice = scores + m.buffer("e_score_correction_bias")
        group_scores = sum_last(topk(self.groups.apart(scores_for_choice), TWO)[0])
        _chosen = self.groups.choose(view(group_scores, scores.shape[0], self.groups.count))
        scores_for_choice = without_other_groups(scores_for_choice, _chosen[2])
        topk_indices = topk(scores_for_choice, self.per_token)[1]
        topk_weights = gather(scores, topk_indices)
        if self.normalised:
            denominator = sum_last(topk_weights) + 1e-20
            topk_weights = div_(topk_weights, denominator)
        topk_weights = topk_weights * 2.5
        m.run.collect(m.layer, router_logits)
        return router_logits, topk_weights, topk_indices


def grouped_router(config: Any, experts: Dim, per_token: Dim, hidden: Dim) -> GroupedRouter:
    """Return the router of a configuration with `n_group` and `topk_group`."""
    groups = Groups(experts, Dim("groups", config.n_group), Dim("groups_per_token", config.topk_group))
    return GroupedRouter(experts, per_token, hidden, groups, normalised=bool(config.norm_topk_prob))


def _to_local(parameter: Tensor) -> Tensor:
    node = Node(parameter.memory, _pass, (parameter,)) if recording(parameter) else None
    return Tensor(parameter.storage, parameter.shape, parameter.strides, parameter.dtype, node, name=parameter.name)


def _pass(_: Node, grads: list[Tensor]) -> list[Tensor]:
    return grads
