"""DeepSpeed's AutoEP (deepspeed/module_inject/auto_ep_layer.py, AutoEPMoELayer). It replaces transformers' routed block
on a rank that has a part of the experts.

The layer is written as a GPU runs it that has torch's grouped product (`use_grouped_mm`, Hopper and newer). Triton
kernels gather rows into one padded block per expert (moe/ep_kernels.py), and SwiGLU is one kernel
(ops/triton_ops/swiglu_triton.py). Older GPUs take a grouped product of DeepSpeed's own. It saves the weight instead of
a view of it, and otherwise the same: under ZeRO-3 the gathered weight is freed there when the module is over.

Each rank sends every token to `per_token` experts. Each expert gets an equal share of all tokens, the busiest one
`imbalance` times that.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from math import ceil
from typing import TYPE_CHECKING, Any, Final

from memcalc.core.autograd import Node, no_kernel
from memcalc.core.dims import ONE_DIM, Dim, merge, plus
from memcalc.core.dtypes import boolean, fp32, int32
from memcalc.core.ops.elementwise import cast, like, recording, sigmoid, softmax, sum_last
from memcalc.core.ops.expert_rows import permuted, placed, swiglu, unpermuted
from memcalc.core.ops.routing import div, gather, grouped_mm, index, masked_fill, maximum, sort, sum_middle, topk
from memcalc.core.ops.shape import reshape, transpose, unsqueeze, view
from memcalc.core.tensor import Sent, Tensor, new_tensor
from memcalc.families import support_of
from memcalc.families.base.experts import TWO, Groups
from memcalc.families.base.module import Buffer, Module, Weight, module
from memcalc.families.base.sparse import gated_mlp_weights
from memcalc.inputs.options import refuse

if TYPE_CHECKING:
    from memcalc.families.base.program import Program
    from memcalc.families.base.support import Preset

SOURCE: Final = "deepspeed/module_inject/auto_ep_layer.py"
_ALIGNMENT: Final = 8
"""The number of rows of an expert is padded to a multiple of this (TOKEN_GROUP_ALIGN_SIZE_M)."""


@dataclass(frozen=True)
class Router:
    """The router: TokenChoiceTopKRouter (deepspeed/moe/ep_router.py)."""

    count: Dim
    per_token: Dim
    hidden: Dim
    preset: Preset
    normalised: bool
    groups: Groups | None
    by_maximum: bool
    """True if a group's score is that of its best expert; False if it is the sum of its two best."""

    @module
    def forward(self, m: Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the weights and indices of the chosen experts, and the number of rows that every expert gets."""
        scores = (m / "gate").linear(x)
        scores = sigmoid(cast(scores, fp32)) if self.preset.sigmoid else softmax(cast(scores, fp32))
        scores_for_choice = scores
        if self.preset.corrected:
            scores_for_choice = scores_for_choice + unsqueeze(m.buffer("e_score_correction_bias"), 0)
        if self.groups is not None:
            scores_for_choice = self.node_limited(self.groups, scores_for_choice)
        _values, selected_experts_indices = topk(scores_for_choice, self.per_token)
        top_scores = gather(scores, selected_experts_indices)
        if self.normalised:
            denominator = sum_last(top_scores) + 1e-20
            top_scores = div(top_scores, denominator)
        top_scores = top_scores * 1.0
        return top_scores, selected_experts_indices, self.count_tokens_per_expert(selected_experts_indices)

    def node_limited(self, groups: Groups, scores_for_choice: Tensor) -> Tensor:
        """Return the scores with all groups but the best ones masked (_get_node_limited_routing_scores)."""
        tokens = scores_for_choice.shape[0]
        scores_grouped = groups.apart(scores_for_choice)
        if self.by_maximum:
            group_scores = maximum(scores_grouped)
        else:
            top2_scores_in_group, _indices = topk(scores_grouped, TWO)
            group_scores = view(sum_last(top2_scores_in_group), tokens, groups.count)
        _values, _group_idx = topk(group_scores, groups.per_token)
        group_mask = like(group_scores, "mask of the groups", boolean)
        return view(masked_fill(scores_grouped, unsqueeze(group_mask, 2)), tokens, self.count)

    def count_tokens_per_expert(self, selected: Tensor) -> Tensor:
        counts = new_tensor(selected.memory, (self.count,), int32, "tokens per expert")
        _ones = like(selected, "ones", int32)
        return counts


@dataclass(frozen=True)
class AutoEPMoELayer:
    """The routed block on one of `ranks` ranks, each with an equal number of experts."""

    router: Router
    ffn: Dim
    ranks: int
    imbalance: float
    shared: Callable[[Module, Tensor], Tensor] | None
    """The MLP of the experts that all tokens go to."""

    @cached_property
    def local(self) -> Dim:
        """Return the dim of the experts on this rank."""
        return Dim("experts/ep", self.router.count.size // self.ranks)

    def weights(self, shared: Iterator[Weight]) -> Iterator[Weight]:
        """Yield the weights in the order of `named_parameters()`, with AutoEPMoELayer's names. `shared` are those of
        the shared experts."""
        router, ffn = self.router, self.ffn
        yield Weight("mlp.router.gate.weight", (router.count, router.hidden), "router")
        yield Weight("mlp.experts.w1", (self.local, ffn, router.hidden), "experts")
        yield Weight("mlp.experts.w2", (self.local, router.hidden, ffn), "experts")
        yield Weight("mlp.experts.w3", (self.local, ffn, router.hidden), "experts")
        if self.shared is not None:
            yield from shared
        if self.router.preset.gated:
            yield Weight("mlp.shared_experts_gate.weight", (ONE_DIM, router.hidden), "mlp")

    def buffers(self) -> Iterator[Buffer]:
        yield Buffer("mlp.tokens_per_expert", (self.router.count,), fp32)
        if self.router.preset.corrected:
            yield Buffer("mlp.router.e_score_correction_bias", (self.router.count,))

    @module
    def forward(self, m: Module, hidden_states: Tensor) -> Tensor:
        """Run AutoEPMoELayer._forward."""
        batch, seq, hidden = hidden_states.shape
        tokens, per_token = merge(batch, seq), self.router.per_token
        x = reshape(hidden_states, tokens, hidden)
        top_scores, selected_experts, counts = self.router.forward(m / "router", _given(x))

        copies = merge(tokens, per_token)
        token_indices_sorted = sort(reshape(selected_experts, copies))[1]
        _top_scores_sorted = index(reshape(top_scores, copies), token_indices_sorted, "scores by expert")
        _expert_indices_sorted = like(token_indices_sorted, "experts of the rows")
        routed_input = index(x, like(token_indices_sorted, "token of a row"), "rows by expert")

        _received_counts = self.exchange_counts(counts)
        routed_input = self.all_to_all(routed_input, "tokens to experts", self.received(copies))
        n_tokens = routed_input.shape[0]
        routed_input, perm_indices = self.permute(routed_input)
        _aligned_counts = new_tensor(x.memory, (self.local,), int32, "aligned counts")
        expert_output = self.experts(m / "experts", routed_input, n_tokens)
        expert_output = unpermuted(expert_output, perm_indices, n_tokens)
        expert_output = self.all_to_all(expert_output, "outputs of experts", copies)

        output = self.combine(expert_output, top_scores, token_indices_sorted, (tokens, per_token, hidden))
        output = reshape(output, batch, seq, hidden)
        return self.finalize(m, output, x, hidden_states)

    def received(self, copies: Dim) -> Dim:
        """Return the number of rows that come to the rank's experts, when every rank sends `copies` rows."""
        return copies if self.imbalance == 1 else _busiest(copies, self.local.size, self.imbalance)

    def exchange_counts(self, counts: Tensor) -> Tensor:
        """Exchange the ranks' counts of rows for each other's experts (_split_plan_from_expert_counts)."""
        received = like(counts, "counts received")
        memory = counts.memory
        memory.sent.append(
            Sent("ep", "all_to_all", "tokens per expert", memory.phase, memory.layer, counts.shape, int32)
        )
        return received

    def all_to_all(self, x: Tensor, name: str, rows: Dim) -> Tensor:
        """Exchange rows between the ranks (_AllToAllV); `rows` of them arrive."""
        out = new_tensor(x.memory, (rows, *x.shape[1:]), x.dtype, f"{name} exchanged")
        _send(x, name)
        if recording(x):
            out.node = Node(x.memory, _all_to_all_backward, (x,), (), name)
        return out

    def permute(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Gather rows into one block per expert (permute_by_local_expert). Returns the blocks and the permutation."""
        memory = tokens.memory
        padded = _padded(tokens.shape[0], self.local.size)
        permuted_indices = new_tensor(memory, (padded,), int32, "permutation by expert")
        _sizes = [
            new_tensor(memory, (self.local,), int32, name) for name in ("aligned counts", "offsets of the blocks")
        ]
        return permuted(tokens, permuted_indices), permuted_indices

    @module
    def experts(self, m: Module, x: Tensor, rows: Dim) -> Tensor:
        """Run GroupedExperts (deepspeed/moe/ep_experts.py, _run_experts_grouped_mm); `rows` of x are no padding."""
        offsets = new_tensor(x.memory, (self.local,), int32, "offsets of the experts")
        gate, up = (_product(x, m.weight(name), offsets, rows) for name in ("w1", "w3"))
        h = swiglu(gate, up)
        return _product(h, m.weight("w2"), offsets, rows)

    def combine(
        self, expert_output: Tensor, top_scores: Tensor, token_indices_sorted: Tensor, shape: tuple[Dim, Dim, Dim]
    ) -> Tensor:
        """Return the outputs by token, weighted by the scores after the experts and summed (combine_from_routed,
        weighted_sum)."""
        tokens, per_token, _hidden = shape
        output = like(expert_output, "outputs by token")
        output = view(placed(output, token_indices_sorted, expert_output), *shape)
        weighted = sum_middle(output * reshape(top_scores, tokens, per_token, ONE_DIM))
        return cast(weighted, expert_output.dtype)

    def finalize(self, m: Module, output: Tensor, x: Tensor, hidden_states: Tensor) -> Tensor:
        """Add the shared experts' output (_finalize_output)."""
        preset = self.router.preset
        if self.shared is not None:
            shared_expert_output = self.shared(m / "shared_experts", x if preset.gated else hidden_states)
            if preset.gated:
                shared_expert_gate = sigmoid((m / "shared_experts_gate").linear(x))
                shared_expert_output = shared_expert_gate * shared_expert_output
            output = output + reshape(shared_expert_output, *output.shape)
        if preset.returns_logits:  # nothing uses the logits
            logits = (m / "router" / "gate").linear(x)
            _logits = cast(softmax(cast(logits, fp32)), logits.dtype)
        return output


def check_experts(ranks: int, name: str, program: Any) -> None:
    """Raise InputError for experts that AutoEP refuses or fails on (validate_autoep_post_detection,
    _resolve_expert_activation)."""
    config, experts = program.config, program.experts.count.size
    if experts % ranks:
        divisors = ", ".join(str(n) for n in range(1, experts + 1) if experts % n == 0)
        refuse("ep", ranks, f"{name} has {experts} experts, which {ranks} ranks cannot share; allowed: {divisors}")
    if config.hidden_act not in ("silu", "swish"):
        why = f"AutoEP computes SwiGLU, the experts of {name} have {config.hidden_act}"
        refuse("ep", ranks, f"{why}; allowed: 1")
    groups, chosen = getattr(config, "n_group", None), getattr(config, "topk_group", None)
    if groups is not None:
        pairs = getattr(config, "topk_method", None) != "group_limited_greedy"
        if chosen is None or chosen > groups or experts % groups or (pairs and experts < 2 * groups):
            why = f"AutoEP takes {chosen} of {groups} groups of the {experts} experts that {name} has (topk_group, n_group)"
            refuse("ep", ranks, f"{why}, which do not exist, or have no two experts; allowed: 1")


def on_rank(program: Program, model_type: str, ranks: int, imbalance: float) -> Program:
    """Return the program of one of `ranks` ranks, with AutoEPMoELayer in the place of transformers' routed block."""
    own: Any = copy.copy(program)
    own.expert_parallel = ranks
    preset = support_of(model_type).auto_ep
    assert preset is not None
    shared = own.dense_mlp if preset.shared else None
    block = AutoEPMoELayer(_router(own, preset), own.experts.ffn, ranks, imbalance, shared)
    weights = partial(_weights, own, block)
    routed: Callable[[int], bool] = getattr(own, "sparse", lambda _: True)
    if hasattr(own, "sparse_mlp"):
        own.sparse_mlp, own.sparse_weights = block.forward, weights
    else:
        own.mlp, own.mlp_weights = block.forward, weights
    own.layer_buffers = partial(_buffers, block, routed)
    own.buffers = lambda: (*own.buffer_stack("model.layers"), *own.frequencies())
    own.branch = partial(_branch, program, block)
    own.polynomial = program.polynomial and imbalance == 1
    own.weights_source = SOURCE
    return own


def _weights(own: Any, block: AutoEPMoELayer) -> Iterator[Weight]:
    shared = iter(())
    if block.shared is not None:
        bias = getattr(own.config, "mlp_bias", False)
        shared = gated_mlp_weights("mlp.shared_experts", own.hidden, own.shared_ffn, bias=bias)
    return block.weights(shared)


def _buffers(block: AutoEPMoELayer, routed: Callable[[int], bool], i: int) -> Iterator[Buffer]:
    if routed(i):
        yield from block.buffers()


def _router(own: Any, preset: Preset) -> Router:
    config = own.config
    normalised = bool(config.norm_topk_prob) if preset.normalises is None else preset.normalises
    count, per_token = own.experts.count, own.experts.per_token
    groups = None
    if getattr(config, "n_group", None) is not None:  # fill_autoep_config_from_hf sets groups whatever topk_method says
        groups = Groups(count, Dim("groups", config.n_group), Dim("groups_per_token", config.topk_group))
    limited = getattr(config, "topk_method", None) == "group_limited_greedy"
    return Router(count, per_token, own.hidden, preset, normalised, groups, by_maximum=limited)


def _branch(program: Program, block: AutoEPMoELayer, batch: int, seq: int) -> Hashable:
    """Return the key of the branches: padding depends on the number of rows modulo the alignment, uneven routing on the
    number itself."""
    if block.imbalance != 1:
        return batch, seq
    return program.branch(batch, seq), batch * seq * block.router.per_token.size % _ALIGNMENT


# --- sizes


@lru_cache(maxsize=1024)
def _busiest(copies: Dim, local: int, imbalance: float) -> Dim:
    """Return the rows of the rank with the busiest expert: one of its `local` experts gets `imbalance` times its
    share."""
    return Dim("rows of the busiest rank", ceil(copies.size * (local - 1 + imbalance) / local))


def _padded(rows: Dim, experts: int) -> Dim:
    """Return the greatest total length of the experts' padded blocks."""
    return plus(rows, experts * _ALIGNMENT + -rows.size % _ALIGNMENT)


# --- ops


def _given(x: Tensor) -> Tensor:
    """Return the module's input with a node of its own under ZeRO-3 (parameter_offload.py, PostBackwardFunctionModule).

    Gradients of the input are added up after those of the module's weights are ready, and that is when the experts'
    bucket is reduced.
    """
    if x.memory.visitor is None or not recording(x):
        return x
    return Tensor(x.storage, x.shape, x.strides, x.dtype, Node(x.memory, _given_backward, (x,)))


@no_kernel
def _given_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    return grads


def _send(x: Tensor, name: str) -> None:
    memory = x.memory
    memory.sent.append(Sent("ep", "all_to_all", name, memory.phase, memory.layer, x.shape, x.dtype))


def _all_to_all_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    shape, dtype = node.metadata[0]
    _send(grads[0], f"gradient of {node.context}")
    return [new_tensor(node.memory, shape, dtype, f"gradient of {node.context} exchanged")]


def _product(x: Tensor, weight: Tensor, offsets: Tensor, rows: Dim) -> Tensor:
    return grouped_mm(x, transpose(weight, 1, 2), offsets, weight.name, rows)
