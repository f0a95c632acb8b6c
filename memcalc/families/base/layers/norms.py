"""Norms: nn.BatchNorm1d, BatchNorm2d, SyncBatchNorm, LayerNorm, GroupNorm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from memcalc.core.dtypes import int64
from memcalc.core.ops.group_norm import group_norm
from memcalc.core.ops.norm import batch_norm, layer_norm
from memcalc.core.ops.sync_batch_norm import sync_batch_norm
from memcalc.families.base.config import Count
from memcalc.families.base.layers.layer import Layer, Parameter, State, number, of_rank, shown

if TYPE_CHECKING:
    from memcalc.core.dims import Shape
    from memcalc.core.tensor import Tensor
    from memcalc.families.base.module import Module

_NO_PLACE: Mapping[str, Sequence[Any]] = {"device": (None,), "dtype": (None,)}


@dataclass(frozen=True, kw_only=True)
class BatchNorm2d(Layer):
    """nn.BatchNorm2d, in training: statistics of the batch, and running ones in buffers."""

    kind: ClassVar[str] = "batchnorm2d"
    torch: ClassVar[str] = "BatchNorm2d"
    main: ClassVar[str] = "channels"
    positions: ClassVar[Sequence[str]] = ("channels", "eps", "momentum", "affine", "track_running_stats")
    aliases: ClassVar[Mapping[str, str]] = {"num_features": "channels"}
    fixed: ClassVar[Mapping[str, Sequence[Any]]] = {"affine": (True,), "track_running_stats": (True,), **_NO_PLACE}
    component: ClassVar[str] = "norms"
    saves_input: ClassVar[bool] = True
    ranks: ClassVar[tuple[int, ...]] = (3,)

    channels: Count | None = None
    eps: float = 1e-5
    momentum: float | None = 0.1

    def shape(self, x: Shape) -> Shape:
        words = {1: "channels", 2: "channels × length", 3: "channels × height × width"}
        of_rank(x, *self.ranks, what=" or ".join(words[rank] for rank in self.ranks))
        if self.channels not in (None, x[0].size):
            raise ValueError(f"channels {self.channels}: the input has {x[0].size} ({shown(x)})")
        return x

    def parameters(self, x: Shape) -> Iterator[Parameter]:
        yield Parameter("weight", x[:1])
        yield Parameter("bias", x[:1])

    def states(self, x: Shape) -> Iterator[State]:
        yield State("running_mean", x[:1])
        yield State("running_var", x[:1])
        yield State("num_batches_tracked", (), int64)

    def counted(self, x: Shape) -> str:
        return number(f"2 · {x[0].size}", [p.shape for p in self.parameters(x)])

    def run(self, m: Module, x: Tensor, out: Shape) -> Tensor:
        return batch_norm(x, m.weight(), m.weight("bias"), m.buffer("running_mean"), m.buffer("running_var"))


@dataclass(frozen=True, kw_only=True)
class BatchNorm1d(BatchNorm2d):
    """nn.BatchNorm1d."""

    kind: ClassVar[str] = "batchnorm1d"
    torch: ClassVar[str] = "BatchNorm1d"
    ranks: ClassVar[tuple[int, ...]] = (1, 2)


@dataclass(frozen=True, kw_only=True)
class SyncBatchNorm(BatchNorm2d):
    """nn.SyncBatchNorm: statistics over all ranks' batches; one rank has a plain batch norm."""

    kind: ClassVar[str] = "syncbatchnorm"
    torch: ClassVar[str] = "SyncBatchNorm"
    positions: ClassVar[Sequence[str]] = (*BatchNorm2d.positions, "process_group")
    fixed: ClassVar[Mapping[str, Sequence[Any]]] = {**BatchNorm2d.fixed, "process_group": (None,)}
    ranks: ClassVar[tuple[int, ...]] = (1, 2, 3)

    def run(self, m: Module, x: Tensor, out: Shape) -> Tensor:
        running = m.buffer("running_mean"), m.buffer("running_var")
        return sync_batch_norm(x, m.weight(), m.weight("bias"), *running, m.run.data_parallel)


@dataclass(frozen=True, kw_only=True)
class LayerNorm(Layer):
    """nn.LayerNorm over the last dim."""

    kind: ClassVar[str] = "layernorm"
    torch: ClassVar[str] = "LayerNorm"
    main: ClassVar[str] = "size"
    positions: ClassVar[Sequence[str]] = ("size", "eps", "affine", "bias")
    aliases: ClassVar[Mapping[str, str]] = {"normalized_shape": "size", "elementwise_affine": "affine"}
    fixed: ClassVar[Mapping[str, Sequence[Any]]] = _NO_PLACE
    component: ClassVar[str] = "norms"
    saves_input: ClassVar[bool] = True

    size: Count | list[Count] | None = None
    eps: float = 1e-5
    affine: bool = True
    bias: bool = True

    def shape(self, x: Shape) -> Shape:
        given = self.size[0] if isinstance(self.size, list) and len(self.size) == 1 else self.size
        if isinstance(given, list):
            raise ValueError(
                f"size {given}: norms over several dims are not modelled; allowed: the last dim's {x[-1].size}"
            )
        if given not in (None, x[-1].size):
            raise ValueError(f"size {given}: the input's last dim is {x[-1].size} ({shown(x)})")
        return x

    def parameters(self, x: Shape) -> Iterator[Parameter]:
        if self.affine:
            yield Parameter("weight", x[-1:])
            if self.bias:
                yield Parameter("bias", x[-1:])

    def counted(self, x: Shape) -> str:
        own = list(self.parameters(x))
        return number(f"{len(own)} · {x[-1].size}", [p.shape for p in own]) if own else ""

    def run(self, m: Module, x: Tensor, out: Shape) -> Tensor:
        return layer_norm(x, m.optional("weight"), m.optional("bias"))


@dataclass(frozen=True, kw_only=True)
class GroupNorm(Layer):
    """nn.GroupNorm."""

    kind: ClassVar[str] = "groupnorm"
    torch: ClassVar[str] = "GroupNorm"
    main: ClassVar[str] = "groups"
    positions: ClassVar[Sequence[str]] = ("groups", "channels", "eps", "affine")
    aliases: ClassVar[Mapping[str, str]] = {"num_groups": "groups", "num_channels": "channels"}
    fixed: ClassVar[Mapping[str, Sequence[Any]]] = _NO_PLACE
    component: ClassVar[str] = "norms"
    saves_input: ClassVar[bool] = True

    groups: Count
    channels: Count | None = None
    eps: float = 1e-5
    affine: bool = True

    def shape(self, x: Shape) -> Shape:
        if self.channels not in (None, x[0].size):
            raise ValueError(f"channels {self.channels}: the input has {x[0].size} ({shown(x)})")
        if x[0].size % self.groups:
            raise ValueError(f"groups {self.groups}: the input's {x[0].size} channels are not divisible by it")
        return x

    def parameters(self, x: Shape) -> Iterator[Parameter]:
        if self.affine:
            yield Parameter("weight", x[:1])
            yield Parameter("bias", x[:1])

    def counted(self, x: Shape) -> str:
        return number(f"2 · {x[0].size}", [p.shape for p in self.parameters(x)]) if self.affine else ""

    def run(self, m: Module, x: Tensor, out: Shape) -> Tensor:
        return group_norm(x, m.optional("weight"), m.optional("bias"), self.groups)
