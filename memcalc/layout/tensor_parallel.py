"""Tensor parallelism as transformers does it (`tp_plan="auto"`; distributed/tensor_parallel.py): the model's own
modules over DTensors, with the collectives that these send.

A plan says how each linear layer and the table of embeddings is split. A rank runs the same program over its part of
the heads, the feed-forward width and the vocabulary. Each column-parallel layer makes its input a DTensor of its own,
so each reduces its own input gradient: three times for q, k and v, where Megatron's one layer does it once. The
optimizer sees parameters on two meshes, split ones and whole ones.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from memcalc.core.autograd import Node, no_kernel
from memcalc.core.dims import Dim, merge, numel
from memcalc.core.dtypes import boolean
from memcalc.core.ops.elementwise import like, recording
from memcalc.core.ops.embedding import embedding
from memcalc.core.ops.matmul import linear
from memcalc.core.ops.shape import contiguous
from memcalc.core.tensor import Memory, Sent, Tensor, new_tensor, same_sizes
from memcalc.layout.expert_parallel import DispatchedExperts, expert_path
from memcalc.layout.split_experts import SplitExperts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from memcalc.core.autograd import Leaf
    from memcalc.core.dims import Shape
    from memcalc.core.dtypes import DType
    from memcalc.families.base.module import Input, Weight
    from memcalc.families.base.plans import Plan, Style
    from memcalc.families.base.program import Program
    from memcalc.layout.collectives import Kind

_WHOLE: Final = (None, "replicated_with_grad_allreduce", "moe_tp_experts", "mla_kv_a_proj")
"""The styles of parameters that stay whole."""


class TensorParallel(NamedTuple):
    """The tensor-parallel group of a run, its plan, and the vocabulary before the split."""

    ranks: int
    plan: Plan
    vocab: Dim
    widths: Mapping[str, Dim] = MappingProxyType({})
    """The output width before the split of each linear layer whose output is gathered."""

    def linear(self, path: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Run the nn.Linear at `path`, split as the plan says. Its inputs and outputs are plain tensors."""
        style = self.plan.get(path)
        if style in _WHOLE:
            return linear(x, weight, bias)
        name = path.split("*.")[-1]
        if style == "rowwise":
            return self._summed(part_of_sum(x, weight, bias), name)
        if style == "rowwise_split_input":
            # The module's frame holds the columns until the sum is there.
            columns = self._own_columns(x, weight.shape[1], name)
            return self._summed(part_of_sum(columns, weight, bias), name)
        out = linear(self._replicated(x, name), weight, bias)
        return self._gathered(out, name, self.widths[path]) if style == "colwise_gather_output" else out

    def embedding(self, table: Tensor, ids: Tensor) -> Tensor:
        """Run the nn.Embedding of a table that is split over the vocabulary (EmbeddingParallel, _MaskPartial)."""
        name = table.name.removesuffix(".weight")
        if name not in self.plan:
            return embedding(table, ids)
        node = self._lookup_node(table, ids)
        partial = self._looked_up(table, ids)
        self.send(table.memory, "all_reduce", f"output of {name}", partial.shape, partial.dtype)
        out = like(partial, f"{name}, summed")
        out.node = node
        return out

    def _lookup_node(self, table: Tensor, ids: Tensor) -> Node | None:
        if not recording(table):
            return None
        node = Node(table.memory, _embedding_backward, (table,), (ids,), table.name.removesuffix(".weight"))
        node.metadata[0] = ((self.vocab, table.shape[1]), table.dtype)  # a DTensor has the shape of the whole
        return node

    def _looked_up(self, table: Tensor, ids: Tensor) -> Tensor:
        below, above = like(ids, "ids below the shard", boolean), like(ids, "ids above the shard", boolean)
        _outside = like(ids, "ids outside the shard", boolean)
        del below, above
        copied = like(ids, "ids, copied")
        _masked = like(ids, "ids within the shard")
        del copied
        return new_tensor(table.memory, (*ids.shape, table.shape[1]), table.dtype, "embeddings of the shard")

    def gradient_hook(self, weight: Weight) -> Callable[[Tensor], None] | None:
        """Return the function that is called with a weight's gradient when it is ready; None for most weights. The
        gradient of a norm within the heads covers one rank's heads, so it is reduced."""
        if self.style(weight.name) != "replicated_with_grad_allreduce":
            return None
        name = f"gradient of {weight.name.split('*.')[-1]}"
        return lambda grad: self.send(grad.memory, "all_reduce", name, grad.shape, grad.dtype)

    def is_split(self, name: str) -> bool:
        """Tell whether a parameter is a DTensor over the group: its rank's part or (the bias of a sum) all of it."""
        return self.style(name) not in _WHOLE

    def style(self, parameter: str) -> Style | None:
        """Return a parameter's style: its own or its module's (_get_parameter_plan)."""
        return self.plan.get(parameter) or self.plan.get(_module(parameter))

    def gradient_summed(self, x: Tensor, name: str) -> Tensor:
        """Return a tensor that is whole on every rank and used in parts. Backward sums its gradient in place
        (_AllReduceBackward)."""
        if not recording(x):
            return x
        return same(x, Node(x.memory, _sum_in_place, (x,), (), (self, name)))

    def of_experts(self, partial: Tensor, name: str) -> Tensor:
        """Return the sum over the ranks of the outputs of their parts of the experts, in place (_AllReduceForward)."""
        self.send(partial.memory, "all_reduce", f"output of {name}", partial.shape, partial.dtype)
        return same(partial, Node(partial.memory, _pass, (partial,))) if recording(partial) else partial

    def whole(self, shard: Dim) -> Dim:
        """Return the sequence length, given the length `shard` of a tensor between two layers: the same length."""
        return shard

    def between_layers(self, whole: Dim) -> Dim:
        """Return the length of a tensor between two layers for a sequence: all of it."""
        return whole

    def given_positions(self, whole: Dim) -> Input | None:
        """Return the positions of a sequence if the caller has to give them; None otherwise."""
        return None

    def entered(self, path: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments of the module at `path`."""
        return args

    def own_part(self, leaf: Leaf, grad: Tensor) -> Tensor:
        """Return this rank's part of a gradient of the whole table (FSDPParam._get_grad_inner_tensor)."""
        if numel(grad.shape)[0] == numel(leaf.shape)[0]:
            return grad
        return new_tensor(grad.memory, leaf.shape, grad.dtype, leaf.scope, component="gradients")

    def send(self, memory: Memory, kind: Kind, name: str, shape: Shape, dtype: DType, layer: int | None = None) -> None:
        """Record a collective over the group. `shape` is that of its payload; `layer` is the running one unless it is
        given."""
        of = memory.layer if layer is None else layer
        memory.sent.append(Sent("tp", kind, name, memory.phase, of, shape, dtype))

    def _replicated(self, x: Tensor, name: str) -> Tensor:
        """Compute `DTensor.from_local(x, Replicate())`. Backward sums the gradient over the ranks."""
        if not recording(x):
            return x
        return same(x, Node(x.memory, _sum_input_gradient, (x,), (), (self, name)))

    def _summed(self, partial: Tensor, name: str) -> Tensor:
        """Redistribute from Partial to Replicate: an all-reduce out of place. Backward passes the gradient on."""
        self.send(partial.memory, "all_reduce", f"output of {name}", partial.shape, partial.dtype)
        out = like(partial, f"{name}, summed")
        if recording(partial):
            out.node = Node(partial.memory, _pass, (partial,))
        return out

    def _own_columns(self, x: Tensor, part: Dim, name: str) -> Tensor:
        """Redistribute from Replicate to Shard(-1): a copy of this rank's columns. Backward gathers the columns of the
        gradient."""
        out = new_tensor(x.memory, (*x.shape[:-1], part), x.dtype, f"{name} input, own part")
        if recording(x):
            out.node = Node(x.memory, _columns_of_gradient, (x,), (), (self, name))
        return out

    def _gathered(self, shard: Tensor, name: str, whole: Dim) -> Tensor:
        """Redistribute from Shard(-1) to Replicate. Backward copies this rank's columns of the gradient."""
        out = self.side_by_side(shard, f"output of {name}", whole)
        if recording(shard):
            out.node = Node(shard.memory, _shard_of_gradient, (shard,), (), (shard.shape, name))
        return out

    def side_by_side(self, shard: Tensor, name: str, whole: Dim) -> Tensor:
        """Gather the ranks' columns along the first dim, then put them side by side.

        If the width does not divide, each rank sends as many columns as the first one has.
        """
        *lead, width = shard.shape
        ranks = group_dim(self.ranks)
        padded = (*lead, merge(ranks, width))
        _gathered = new_tensor(shard.memory, (ranks, *shard.shape), shard.dtype, f"{name}, gathered")
        self.send(shard.memory, "all_gather", name, padded, shard.dtype)
        out = new_tensor(shard.memory, padded, shard.dtype, f"{name}, gathered and put in order")
        del _gathered
        if whole.size % self.ranks:
            return new_tensor(shard.memory, (*lead, whole), shard.dtype, f"{name}, gathered, without the padding")
        return Tensor(out.storage, (*lead, whole), out.strides, shard.dtype)


def split(program: Program, plan: Plan, ranks: int, how: type[TensorParallel] = TensorParallel) -> Program:
    """Return the program of the first of `ranks` tensor-parallel ranks, whose parts are the largest. The heads must
    divide.

    Experts that ranks share (`share_experts`) are in no plan. They take equal slices of the tokens, so the number of
    tokens must divide.
    """
    own: Any = copy.copy(program)
    if isinstance(getattr(own, "experts", None), DispatchedExperts):
        path = expert_path(program)
        plan = {name: style for name, style in plan.items() if not f"{name}.".startswith(f"{path}.")}
        own.polynomial = False
    gathered = {path for path, style in plan.items() if style == "colwise_gather_output"}
    widths = {
        path: w.shape[0] for w in program.weights() if len(w.shape) == 2 and (path := _module(w.name)) in gathered
    }
    if own.config.tie_word_embeddings:
        widths[own.unembedding] = own.vocab
    own.tensor_parallel = how(ranks, plan, own.vocab, MappingProxyType(widths))
    for name in split_dims(program, plan):
        setattr(own, name, part(getattr(own, name), ranks))
    if "moe_tp_experts" in plan.values() and expert_path(program) is not None:
        own.experts = SplitExperts(own.experts, replace(own.experts, ffn=part(own.experts.ffn, ranks)))
    if "rowwise_split_input" in plan.values() or gathered != {own.unembedding} or own.embedding not in plan:
        own.uncut, own.__class__ = program, _cutting(type(program))
    return own


@cache
def _cutting(kind: type[Program]) -> type[Program]:
    """Return the subclass of a program whose parameters are cut by the plan, where the parts of the program's dims have
    not cut them."""

    def weights(self: Any) -> Iterator[Weight]:
        outside = {one.name: one for one in self.uncut.weights() if one.layer is None}
        for weight in kind.weights(self):
            yield _cut(outside[weight.name], weight, self.tensor_parallel) if weight.layer is None else weight

    def layer_weights(self: Any, i: int) -> Iterator[Weight]:
        for one, weight in zip(self.uncut.layer_weights(i), kind.layer_weights(self, i), strict=True):
            yield _cut(one, weight, self.tensor_parallel, f"{_STACK}.")

    return type(kind.__name__, (kind,), {"weights": weights, "layer_weights": layer_weights})


_STACK: Final = "model.layers.*"
"""The prefix of the names of a layer's weights, in every plan."""


def _cut(whole: Weight, own: Weight, group: TensorParallel, path: str = "") -> Weight:
    axis = _CUT.get(group.style(path + own.name) or "")
    is_bias_of_sum = axis == -1 and len(own.shape) == 1
    if axis is None or is_bias_of_sum or not same_sizes(own.shape, whole.shape):
        return own
    shape = list(own.shape)
    shape[axis] = part(shape[axis], group.ranks)
    return own._replace(shape=tuple(shape))


_CUT: Final[Mapping[str, int]] = {
    "colwise": 0, "colwise_gather_output": 0, "embedding_rowwise": 0, "rowwise": -1, "rowwise_split_input": -1,
}  # fmt: skip
"""The dim along which a style cuts a matrix. Experts are cut by their width."""


def _module(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def split_dims(program: Program, plan: Plan) -> list[str]:
    """Return the names of the program's dims that a plan splits. Experts have a width of their own."""
    ends = {".".join(path.split(".")[-2:]) for path, style in plan.items() if style in ("colwise", "rowwise")}
    split = [name for name, witnesses in _WITNESSES.items() if ends & witnesses and hasattr(program, name)]
    return [*split, "vocab"] if {program.embedding, program.unembedding} <= plan.keys() else split


_WITNESSES: Final[Mapping[str, frozenset[str]]] = {
    "heads": frozenset({"self_attn.o_proj", "self_attn.dense"}),
    "kv_heads": frozenset({"self_attn.k_proj"}),
    "ffn": frozenset({"mlp.down_proj", "mlp.fc2", "mlp.c_proj"}),
    "shared_ffn": frozenset({"shared_experts.down_proj", "shared_expert.down_proj"}),
}
"""The linear layers that tell whether a dim is split."""


@lru_cache
def group_dim(ranks: int) -> Dim:
    """Return the dim that counts the ranks of a group."""
    return Dim("tp", ranks)


@lru_cache(maxsize=1024)
def part(dim: Dim, ranks: int) -> Dim:
    """Return the first rank's part of a dim, which is the largest (torch.chunk)."""
    name = f"⌈{dim.name}/tp⌉" if dim.size % ranks else f"{dim.name}/tp"
    return Dim(name, -(-dim.size // ranks))


def part_of_sum(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return a rank's part of a row-parallel layer's output. Every rank adds its share of the bias to it."""
    _share = None if bias is None else like(bias, "bias / tp")
    return linear(x, weight, bias)


def same(tensor: Tensor, node: Node) -> Tensor:
    """Return a view of all of a tensor, with a grad_fn of its own."""
    return Tensor(tensor.storage, tensor.shape, tensor.strides, tensor.dtype, node)


@no_kernel
def _pass(_: Node, grads: list[Tensor]) -> list[Tensor]:
    return grads


def _sum_in_place(node: Node, grads: list[Tensor]) -> list[Tensor]:
    parallel, name = node.context
    grad = contiguous(grads[0])
    parallel.send(node.memory, "all_reduce", f"gradient of {name}", grad.shape, grad.dtype)
    return [grad]


def _sum_input_gradient(node: Node, grads: list[Tensor]) -> list[Tensor]:
    parallel, name = node.context
    parallel.send(node.memory, "all_reduce", f"input gradient of {name}", grads[0].shape, grads[0].dtype)
    return [like(grads[0], f"{name} input gradient, summed")]


def _columns_of_gradient(node: Node, grads: list[Tensor]) -> list[Tensor]:
    parallel, name = node.context
    return [parallel.side_by_side(grads[0], f"input gradient of {name}", node.metadata[0][0][-1])]


@no_kernel
def _shard_of_gradient(node: Node, grads: list[Tensor]) -> list[Tensor]:
    shape, name = node.context
    return [new_tensor(node.memory, shape, grads[0].dtype, f"{name} gradient of the shard")]


def _embedding_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    """Allocate a gradient of the whole table, dense on every rank: all ids and output gradients are there
    (embedding_dense_backward)."""
    _ids = node.unpack()
    return [new_tensor(node.memory, node.metadata[0][0], grads[0].dtype, f"{node.context} weight gradient")]
