"""A network that a file lists layer by layer (docs/layers.md), as nn.Sequential runs it.

transformers does not know this type. The file is read by `memcalc.families.base.layers`; the batch is one tensor and
its targets, and the loss is torch's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Self

from memcalc.core.dims import Dim, merge
from memcalc.core.dtypes import DType, int64
from memcalc.core.ops.elementwise import add
from memcalc.core.ops.loss import cross_entropy
from memcalc.core.ops.mean_squared_error import mse_loss
from memcalc.core.ops.shape import cat, reshape, view
from memcalc.families.base.config import FamilyConfig
from memcalc.families.base.layers.layer import shown
from memcalc.families.base.layers.network import Block, Concat, Network, Placed, Repeated, Residual
from memcalc.families.base.layers.norms import SyncBatchNorm
from memcalc.families.base.layers.recurrent import Recurrent
from memcalc.families.base.module import Buffer, Input, Module, Run, Weight, module
from memcalc.families.base.program import Program
from memcalc.families.base.support import Family, Support

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.core.dims import Shape
    from memcalc.core.tensor import Tensor
    from memcalc.families.base.layers.layer import Layer
    from memcalc.families.base.layers.network import Node
    from memcalc.families.base.layers.notation import Given

TORCH: Final = "torch/nn/modules"


@dataclass(frozen=True, kw_only=True)
class LayersConfig(FamilyConfig):
    """The content of a file of layers, read and checked."""

    given: Given = field(repr=False)  # type: ignore[assignment]
    tie_word_embeddings: bool = False

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Self:
        """Return the network of a file's content. Raises ValueError: the place, the value, what is allowed."""
        from memcalc.families.base.layers.notation import read_network

        return cls(given=read_network(config))

    @classmethod
    def trusted(cls, config: Mapping[str, Any]) -> Self:
        return cls.read(config)


class LayersProgram(Program):
    """The program of nn.Sequential over the layers of a file, and a loss."""

    Config: type[FamilyConfig] = LayersConfig
    attention_kinds = ("sdpa",)
    recomputes = False
    pads = False
    one_stack = False
    loss_dtype = None
    takes_losses = False
    weights_source = TORCH
    data_parallel: int = 1
    """The ranks whose batches nn.SyncBatchNorm takes together."""

    def __init__(self, config: LayersConfig) -> None:
        super().__init__(config)
        self.given_network = given = config.given
        self.loss = given.loss
        self.has_sequence = any(dim.name == "seq" for dim in given.shape)
        self.max_seq_len = None if self.has_sequence else 1
        self.network = network = Network(given.chain, given.shape, integers=given.integers)
        self.layers = max(1, network.blocks)
        placed = [one.layer for one in network.layers]
        self.polynomial = not (self.has_sequence and any(isinstance(one, Recurrent) for one in placed))
        self.notes = notes_of(placed, cudnn=given.cudnn)
        if given.cudnn and any(isinstance(one, Recurrent) for one in placed):
            self.uncounted = "the reserve of cuDNN's recurrent layers"
        self.sync_batch_norm = any(isinstance(one, SyncBatchNorm) for one in placed)
        if not network.wants_gradient:
            raise ValueError(
                "layers: no layer has parameters, so there is nothing to train; allowed: a linear or a conv2d"
            )
        if self.loss == "cross-entropy" and not 1 <= len(network.out) <= 3:
            raise ValueError(
                f"loss cross-entropy: takes classes, tokens × classes or classes × height × width, not {shown(network.out)}"
            )

    def at(self, seq: Dim) -> Network:
        """Return the network for sequences of a length."""
        given = self.given_network
        if not self.has_sequence:
            return self.network
        shape = tuple(seq if dim.name == "seq" else dim for dim in given.shape)
        return Network(given.chain, shape, integers=given.integers)

    def inputs(self, batch: Dim, seq: Dim) -> Sequence[Input]:
        given, network = self.given_network, self.at(seq)
        shape = tuple(seq if dim.name == "seq" else dim for dim in given.shape)
        return Input("input", (batch, *shape), int64 if given.integers else None), self.targets(batch, network.out)

    def targets(self, batch: Dim, out: Shape) -> Input:
        """Return the targets of the loss: of a class for each place, or as the output."""
        if self.loss == "mse":
            return Input("targets", (batch, *out))
        places = out[:-1] if len(out) < 3 else out[1:]
        return Input("targets", (batch, *places), int64)

    def pattern(self) -> tuple[int, int] | None:
        """Return None: all layers are run."""
        return None

    def weights(self) -> Iterator[Weight]:
        for one in self.network.layers:
            for parameter in one.layer.parameters(one.x):
                yield Weight(f"{one.path}.{parameter.name}", parameter.shape, one.layer.component, one.number)

    def buffers(self) -> Iterator[Buffer]:
        for one in self.network.layers:
            for state in one.layer.states(one.x):
                yield Buffer(f"{one.path}.{state.name}", state.shape, state.dtype, layer=one.number)

    @property
    def head_name(self) -> str:
        return ""

    # --- forward

    def forward(self, run: Run, given: Tensor, targets: Tensor) -> Tensor:
        """Return `loss(model(input), targets)`."""
        run.data_parallel = self.data_parallel
        out = self.sequential(Module(run, ""), given, self.at(run.seq).root)
        run.memory.scope = "loss"
        if self.loss == "mse":
            return mse_loss(out, targets)
        if len(out.shape) == 3:  # out.flatten(0, 1), targets.flatten()
            rows = merge(*out.shape[:2])
            return cross_entropy(reshape(out, rows, out.shape[2]), view(targets, merge(*targets.shape)))
        return cross_entropy(out, targets)

    @module
    def sequential(self, m: Module, x: Tensor, block: Block) -> Tensor:
        """Return nn.Sequential.forward."""
        for part in block.parts:
            x = self.called(m, x, part)
        return x

    def called(self, m: Module, x: Tensor, node: Node) -> Tensor:
        if isinstance(node, Placed):
            return self.one(Module(m.run, node.path, node.number), x, node)
        own = Module(m.run, node.path, node.number)
        if isinstance(node.entry, Residual):
            return self.residual(own, x, node)
        if isinstance(node.entry, Concat):
            return self.concat(own, x, node)
        if isinstance(node.entry, Repeated):
            return self.repeated(own, x, node)
        return self.sequential(own, x, node)

    @module
    def one(self, m: Module, x: Tensor, placed: Placed) -> Tensor:
        """Return the forward of a layer."""
        m.memory.scope = f"{placed.path} {placed.layer.kind}"
        return placed.layer.run(m, x, placed.out)

    @module
    def repeated(self, m: Module, x: Tensor, node: Block) -> Tensor:
        """Return the forward of nn.Sequential over the passes; each pass with a number is a unit of an engine."""
        for part in node.parts:
            assert isinstance(part, Block)
            own = Module(m.run, part.path, part.number)
            if node.number is None and part.number is not None:
                m.memory.enter(m.memory.phase, part.number)
                x = self.call(self.sequential, own, x, part)
            else:
                x = self.sequential(own, x, part)
        if node.number is None:
            m.memory.enter(m.memory.phase, None)
        return x

    @module
    def residual(self, m: Module, x: Tensor, node: Block) -> Tensor:
        """Return `self.body(x) + (x if self.shortcut is None else self.shortcut(x))`."""
        body = self.called(m, x, node.parts[0])
        other = x if len(node.parts) == 1 else self.called(m, x, node.parts[1])
        m.memory.scope = f"{m.path} residual"
        return add(body, other)

    @module
    def concat(self, m: Module, x: Tensor, node: Block) -> Tensor:
        """Return `torch.cat([branch(x) for branch in self.branches], dim)`."""
        assert isinstance(node.entry, Concat)
        made = [self.called(m, x, part) for part in node.parts]
        m.memory.scope = f"{m.path} concat"
        return cat(made, node.out[node.entry.dim - 1], node.entry.dim)

    def loss_in(self, computes: DType, buffers: DType) -> DType:
        return computes


def notes_of(layers: Sequence[Layer], *, cudnn: bool = True) -> tuple[str, ...]:
    """Return what a reader should know of how the layers are counted."""
    recurrent = sorted({layer.torch for layer in layers if isinstance(layer, Recurrent)})
    if not recurrent:
        return ()
    without = f"{', '.join(recurrent)}: as torch runs it without cuDNN (torch.backends.cudnn.enabled = False)"
    if not cudnn:
        return (f"{without}, a kernel for each step",)
    return (
        f"{without}, a kernel for each step; cuDNN keeps a reserve for backward instead, whose size its own library alone "
        "tells, so whether a GPU has room is open; `cudnn: false` in the file says that cuDNN is off",
    )


FAMILY: Final = Family("layers", LayersProgram, Support(tensor_parallel={}, batch="images"))
