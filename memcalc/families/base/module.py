"""The language of programs: modules that know their path, hold their arguments and find their weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, Self, TypeVar

from memcalc.core.autograd import Leaf, Node, no_kernel
from memcalc.core.checkpoint import checkpoint
from memcalc.core.ops.autocast import WholeConstant
from memcalc.core.ops.elementwise import like
from memcalc.core.ops.embedding import embedding
from memcalc.core.ops.matmul import conv1d, linear
from memcalc.core.ops.norm import layer_norm
from memcalc.core.tensor import Memory, Sent, Storage, Tensor, contiguous_strides, new_tensor
from memcalc.families.base.declared import Buffer, Input, LinearCall, State, Weight, after_forward

if TYPE_CHECKING:
    from collections.abc import Callable

    from memcalc.core.dims import Dim, Shape
    from memcalc.core.dtypes import DType
    from memcalc.core.noted import Noted
    from memcalc.core.selective import Policy
    from memcalc.families.base.replacing import Adapters, Cache, Hooks, Packing
    from memcalc.layout.tensor_parallel import TensorParallel

BASE: Final = "base_layer"
"""peft's name of the layer that an adapter is around."""
COPY: Final = "modules_to_save.default"
"""peft's name of the copy of a module that trains in its place."""
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(slots=True)
class Run:
    """One run of a program on paper: its memory, its weights and the choices that a `forward()` asks for."""

    memory: Memory
    dtype: DType
    attention: str
    recompute: bool
    batch: Dim
    seq: Dim
    accumulating: bool = False
    policy: Policy | None = None
    """Says which ops' results a recomputed layer keeps; None: it keeps none."""
    buffer_dtype: DType | None = None
    """The dtype of floating-point buffers, if it is not that of the run."""
    hooks: Hooks | None = None
    external: tuple[tuple[str, str], ...] = ()
    """The program's external parameters."""
    tensor_parallel: TensorParallel | None = None
    positions: Tensor | None = None
    """The position_ids, if the caller gives them."""
    packed: list[Tensor] | None = None
    """The tensors that the collator gives besides tokens and labels, if it has packed several sequences into rows."""
    labelled: Callable[[Dim], Dim] | None = None
    """Returns the tokens of a row that have a label, if these are not all but the first."""
    noisy_embeddings: bool = False
    """True if noise is added to the output of the embeddings (NEFTune)."""
    offloading: Any = None
    """The hook that has moved the saved tensors of the last micro-batch to the host (`memcalc.core.offloading`)."""
    copied: list[Any] = field(default_factory=list[Any])
    """The saved tensors that the last micro-batch has copied to the host and back (`memcalc.core.offloading.Copied`)."""
    shift_labels: Tensor | None = None
    """The labels, if the caller has shifted them."""
    logits: Tensor | None = None
    """The model's output, if the caller holds it while it computes another loss from the model's."""
    router_logits: list[tuple[int | None, Tensor]] | None = None
    """The first result of each layer's router, while these are collected (transformers' OutputRecorder)."""
    asked: Any = None
    """The wishes of a task for the head (`memcalc.tasks.fused_head`), while one of its models runs."""
    reference: Run | None = None
    """The run of the reference model, once there is one."""
    of_reference: list[range] = field(default_factory=list[range])
    """The places in the log of the reference's forwards."""
    recompute_layers: int | None = None
    """The number of layers that are recomputed, the first ones; None: all."""
    reentrant: bool = False
    """True if checkpoints re-enter autograd (`use_reentrant`)."""
    positional: int = 1
    """The number of a layer's arguments that transformers gives by position."""
    sent_once: list[Sent] = field(default_factory=list[Sent])
    """The collectives of the one reduction of several micro-batches' gradients. `memory.sent` has those of each
    micro-batch."""
    noted: Noted | None = None
    """The events that recording hooks have noted."""
    frame_tensors: list[Tensor] = field(default_factory=list[Tensor])
    """The tensors that the caller's frame holds besides the batch, from before forward until backward is over."""
    input_require_grads: bool = False
    """True if the output of the embeddings requires a gradient even if their weights do not."""
    attention_mask: Tensor | None = None
    """The collator's mask of a padded batch, int64 of (batch, seq); None if no sequence is padded."""
    adapters: Adapters | None = None
    own_dtypes: bool = False
    """True if parameters that have a dtype of their own keep it."""
    data_parallel: int = 1
    """The ranks whose batches a norm takes together (nn.SyncBatchNorm)."""
    called: dict[tuple[str, int | None], LinearCall] | None = None
    """The linear layers that have been called, while these are noted."""
    weights: dict[tuple[str, int | None], Tensor] = field(default_factory=dict[tuple[str, int | None], Tensor])
    frozen: dict[Storage, int | None] = field(default_factory=dict["Storage", "int | None"])
    """The layer of each parameter that requires no gradient, by the parameter's storage."""
    packings: dict[Storage, Packing] = field(default_factory=dict["Storage", "Packing"])
    """The quantised parameters, by their storage."""
    merged: dict[tuple[str, int | None], Callable[[], Tensor]] = field(default_factory=dict[Any, Any])
    """The parameters with their adapters' parts, while their module's forward runs."""
    scales: list[Tensor] = field(default_factory=list[Tensor])
    """The tensors that hold quantised parameters beside their codes."""
    buffers: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    cache: Cache | None = None
    """The cache of earlier tokens; None while the model trains without one."""
    hidden_states: list[Tensor] | None = None
    """The hidden states around each layer, while these are collected (`output_hidden_states`)."""
    variables: Any = None
    """The variables of the caller's frame that outlive backward and the optimizer's step."""

    def add_weight(self, weight: Weight, *, wants_gradient: bool = True) -> None:
        """Allocate a parameter and, if it requires a gradient, give it its gradient accumulator."""
        dtype = weight.dtype if self.own_dtypes and weight.dtype is not None else self.dtype
        if weight.packing is not None:
            self._add_packed(weight, weight.packing, dtype)
            return
        tensor = new_tensor(self.memory, weight.shape, dtype, weight.name, component="parameters")
        tensor.name = weight.name
        self.weights[weight.name, weight.layer] = tensor
        if not wants_gradient:
            self.frozen[tensor.storage] = weight.layer
            return
        leaf = Leaf(self.memory, weight.name, weight.shape, weight.layer, accumulating=self.accumulating)
        if self.tensor_parallel is not None:
            leaf.ready = self.tensor_parallel.gradient_hook(weight)
        tensor.node = leaf

    def _add_packed(self, weight: Weight, packing: Packing, dtype: DType) -> None:
        """Allocate what holds a quantised parameter. The program sees a weight of the original shape."""
        for stored in packing.stored(weight.shape):
            name = f"{weight.name}.{stored.name}" if stored.name else weight.name
            tensor = new_tensor(self.memory, stored.shape, stored.dtype, name, component="parameters")
            if stored.name:
                self.scales.append(tensor)
                continue
            strides = contiguous_strides(weight.shape)
            self.weights[name, weight.layer] = Tensor(tensor.storage, weight.shape, strides, dtype, name=name)
            self.frozen[tensor.storage] = weight.layer
            self.packings[tensor.storage] = packing

    def packing_of(self, weight: Tensor) -> Packing | None:
        """Return the way in which a weight is kept in fewer bits; None if it is as it is."""
        return self.packings.get(weight.storage) if self.packings else None

    def layer_of(self, weight: Tensor) -> int | None:
        """Return the layer that a parameter belongs to."""
        return weight.node.weight_layer if isinstance(weight.node, Leaf) else self.frozen.get(weight.storage)

    def recomputes(self, layer: int | None) -> bool:
        """Tell whether backward runs layer `layer` again."""
        return self.recompute and (self.recompute_layers is None or (layer or 0) < self.recompute_layers)

    def collect(self, layer: int | None, router_logits: Tensor) -> None:
        """Run the forward hook of a router."""
        if self.router_logits is not None:
            self.router_logits.append((layer, router_logits))

    def checkpoint(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run `function(*args)`, which backward recomputes as the run says."""
        if self.reentrant:
            return self._reentered(function, *args)
        return checkpoint(self.memory, function, *args, policy=self.policy)

    def _trains(self, m: Module) -> bool:
        """Tell whether a weight in a module wants a gradient."""
        within = f"{m.path}."
        return any(
            isinstance(weight.node, Leaf)
            for (name, layer), weight in self.weights.items()
            if layer == m.layer and name.startswith(within)
        )

    def _reentered(self, function: Callable[..., Any], m: Module, *args: Any) -> Any:
        from memcalc.core.reentrant import Call, reentrant_checkpoint

        call = Call(function, (m, *args), self.positional, (m.path, m.layer))
        if self.memory.grad_enabled and not call.wants_gradient and self._trains(m):
            from memcalc.inputs.options import refuse

            what = f"nothing that {m.path.replace('*', str(m.layer))} is given wants a gradient, so torch gives its weights none"
            refuse("reentrant_checkpoints", True, f"{what} and only warns; allowed: with --input-require-grads, or off")
        return reentrant_checkpoint(self.memory, call)

    def input_embeddings(self, out: Tensor) -> Tensor:
        """Return the output of the embeddings. If it is to require a gradient and has none, it becomes a leaf
        (enable_input_require_grads). Then it gets its noise."""
        if self.input_require_grads and out.node is None and self.memory.grad_enabled:
            out.node = WholeConstant(self.memory, out)
            if self.memory.visitor is not None:  # an engine's hook behind the leaf, as before any module's backward
                out = Tensor(out.storage, out.shape, out.strides, out.dtype, Node(self.memory, _pass, (out,)))
        return noisy(out) if self.noisy_embeddings else out

    def linear(self, path: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Run the nn.Linear at `path`, with its adapter if it has one."""
        layer = self.layer_of(weight) if "*" in path else None
        if self.called is not None:
            self.called[path, layer] = LinearCall(
                weight.shape[1], weight.shape[0], bias is not None, x.dtype, len(x.shape)
            )
        if self.adapters is not None and self.adapters.has(path, layer):
            m = Module(self, path, layer)
            return self.adapters.around(m, x, lambda x: self._linear(f"{path}.{BASE}", x, weight, bias))
        return self._linear(path, x, weight, bias)

    def _linear(self, path: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        packing, visitor = self.packing_of(weight), self.memory.visitor
        if packing is not None and visitor is None:
            return packing.linear(x, weight, bias)
        if visitor is not None:
            visited = visitor.enter(path, self.layer_of(weight), (weight,) if bias is None else (weight, bias))
            out = linear(x, weight, bias) if packing is None else packing.linear(x, weight, bias)
            if visited:
                visitor.leave(done=True)
            return out
        if self.tensor_parallel is None:
            return linear(x, weight, bias)
        return self.tensor_parallel.linear(path, x, weight, bias)

    def add_input(self, given: Input) -> Tensor:
        """Allocate a tensor of the batch, which the caller holds."""
        return new_tensor(self.memory, given.shape, given.dtype or self.dtype, given.name, component="buffers")

    def add_buffer(self, buffer: Buffer) -> None:
        """Allocate a buffer."""
        dtype = buffer.dtype or (None if buffer.cast else self.buffer_dtype) or self.dtype
        self.buffers[buffer.full_name] = new_tensor(self.memory, buffer.shape, dtype, buffer.name, component="buffers")


def noisy(out: Tensor) -> Tensor:
    """Return embeddings with noise (transformers/integrations/neftune.py, neftune_post_forward_hook): out of place, so the
    embeddings, the noise and their sum are alive at once."""
    return out + like(out, "noise of the embeddings")


@no_kernel
def _pass(_: Node, grads: list[Tensor]) -> list[Tensor]:
    return grads


def looks_tokens_up(table: Shape) -> bool:
    """Tell whether a table of embeddings is that of the tokens, or a rank's rows of it, by its shape."""
    return len(table) == 2 and table[0].name.strip("⌈⌉").removesuffix("/tp") == "vocab"


class Module:
    """A place in the model. `m / "self_attn"` is the child of that name."""

    __slots__ = ("entered", "layer", "path", "run")

    def __init__(self, run: Run, path: str, layer: int | None = None) -> None:
        self.run = run
        self.path = path
        self.layer = layer
        self.entered: list[tuple[str, bool]] = []
        """The outer scope, and whether a visit began, for each time that the module was entered: `forward` may call
        `forward`."""

    def __truediv__(self, name: str) -> Module:
        path = f"{self.path}.{name}" if self.path else name
        if self.run.adapters is not None and self.run.adapters.saves(path, self.layer):
            path = f"{path}.{COPY}"
        return Module(self.run, path, self.layer)

    @property
    def memory(self) -> Memory:
        return self.run.memory

    def weight(self, name: str = "weight") -> Tensor:
        """Return the parameter `name` of this module."""
        found = self.optional(name)
        if found is None:
            raise KeyError(f"{self.path}.{name}", self.layer)
        return found

    def optional(self, name: str) -> Tensor | None:
        """Return the parameter `name` of this module; None if the configuration leaves it out."""
        weights = self.run.weights
        found = weights.get((f"{self.path}.{name}", self.layer))
        if found is not None or self.run.adapters is None:
            return found
        merged = self.run.merged.get((f"{self.path}.{name}", self.layer))
        return weights.get((f"{self.path}.{BASE}.{name}", self.layer)) if merged is None else merged()

    def buffer(self, name: str) -> Tensor:
        """Return the buffer `name` of this module."""
        path = self.path if self.layer is None else self.path.replace("*", str(self.layer))
        return self.run.buffers[f"{path}.{name}"]

    def cached(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Run `past_key_values.update`: return the keys and values of all tokens that the layer attends to. Without a cache
        these are the given ones."""
        cache = self.run.cache
        return (key_states, value_states) if cache is None else cache.update(self, key_states, value_states)

    def linear(self, x: Tensor) -> Tensor:
        """Run this module as nn.Linear."""
        adapters = self.run.adapters
        return _linear(None, self, x) if adapters is None else adapters.within(self, _linear)(None, self, x)

    def conv1d(self, x: Tensor) -> Tensor:
        """Run this module as transformers' Conv1D, with its adapter if it has one."""
        run, weight = self.run, self.weight()
        if run.called is not None:
            run.called[self.path, self.layer] = LinearCall(
                weight.shape[0], weight.shape[1], True, x.dtype, len(x.shape)
            )
        if run.adapters is not None and run.adapters.has(self.path, self.layer):
            return run.adapters.around(self, x, (self / BASE)._conv1d)
        return self._conv1d(x)

    def _conv1d(self, x: Tensor) -> Tensor:
        weight, bias, visitor = self.weight(), self.weight("bias"), self.memory.visitor
        packing = self.run.packing_of(weight)
        if packing is not None:  # bitsandbytes' layer, whose weight is the transposed one
            shape = weight.shape[::-1]
            weight = Tensor(weight.storage, shape, contiguous_strides(shape), weight.dtype, name=weight.name)
        if visitor is None:
            return conv1d(x, weight, bias) if packing is None else packing.linear(x, weight, bias)
        visited = visitor.enter(self.path, self.layer)
        out = conv1d(x, weight, bias) if packing is None else packing.linear(x, weight, bias)
        if visited:
            visitor.leave(done=True)
        return out

    def embedding(self, ids: Tensor) -> Tensor:
        """Run this module as nn.Embedding."""
        parallel, table = self.run.tensor_parallel, self.weight()
        with self:
            out = embedding(table, ids) if parallel is None else parallel.embedding(table, ids)
            return self.run.input_embeddings(out) if looks_tokens_up(table.shape) else out

    def scaled_embedding(self, ids: Tensor, scaled: Callable[[Tensor], Tensor]) -> Tensor:
        """Run this module as an nn.Embedding whose forward also scales what it has looked up."""
        with self:
            return self.run.input_embeddings(scaled(embedding(self.weight(), ids)))

    def layer_norm(self, x: Tensor) -> Tensor:
        """Run this module as nn.LayerNorm."""
        with self:
            return layer_norm(x, self.optional("weight"), self.optional("bias"))

    def __enter__(self) -> Self:
        """Give this module's name to all allocations from here on."""
        memory = self.run.memory
        visited = memory.visitor is not None and memory.visitor.enter(self.path, self.layer)
        self.entered.append((memory.scope, visited))
        memory.scope = self.path
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        memory = self.run.memory
        memory.scope, visited = self.entered.pop()
        if visited and memory.visitor is not None:
            memory.visitor.leave(done=failed is None)


def _linear(_: object, m: Module, x: Tensor) -> Tensor:
    return m.run.linear(m.path, x, m.weight(), m.optional("bias"))


def module(forward: Callable[Concatenate[Any, Module, P], R]) -> Callable[Concatenate[Any, Module, P], R]:
    """Make a module of a `forward`: like torch's `__call__` it holds its arguments until it returns."""

    @wraps(forward)
    def call(self: Any, m: Module, *args: P.args, **kwargs: P.kwargs) -> R:
        memory = m.run.memory
        outer, memory.scope = memory.scope, m.path
        visitor, parallel = memory.visitor, m.run.tensor_parallel
        visited = visitor is not None and visitor.enter(m.path, m.layer)
        run = forward if m.run.adapters is None else m.run.adapters.within(m, forward)
        done = False
        try:
            if parallel is not None:
                out = run(self, m, *parallel.entered(m.path, args), **kwargs)  # type: ignore[arg-type]
            else:
                out = run(self, m, *args, **kwargs)
            done = True
            return out
        finally:
            memory.scope = outer
            if visited and visitor is not None:
                visitor.leave(done=done)

    return call


__all__ = [
    "BASE", "COPY", "Buffer", "Input", "LinearCall", "Module", "Run", "State", "Weight", "after_forward", "looks_tokens_up",
    "module", "noisy",
]  # fmt: skip
