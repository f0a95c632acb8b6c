"""Declarations of a program: its modules' weights and buffers, its batch, and what a layer keeps from token to token."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from memcalc.core.dtypes import fp32, int64

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from memcalc.core.dims import Dim, Shape
    from memcalc.core.dtypes import DType
    from memcalc.families.base.replacing import Packing


class Weight(NamedTuple):
    """One parameter of a model. The `name` of a layer's parameter has a `*` for the layer's number.

    `shape` is transformers' own, in named dims. `component` groups parameters in tables.
    """

    name: str
    shape: Shape
    component: str
    layer: int | None = None
    dtype: DType | None = None
    """The dtype of the parameter if it is not the model's."""
    packing: Packing | None = None
    """The way in which the parameter is kept in fewer bits; None: as it is."""

    @property
    def stored_shape(self) -> Shape:
        """Return the shape of the module's own parameter, which is that of the codes if the weight is quantised."""
        return self.shape if self.packing is None else self.packing.stored(self.shape)[0].shape


class Buffer(NamedTuple):
    """A buffer of a module. A floating-point one follows the model's dtype (`model.to(dtype)`).

    The `name` of a layer's buffer has a `*` for the layer's number. A buffer that is not `registered` is a plain
    attribute: it keeps its dtype, and `named_buffers()` does not list it.
    """

    name: str
    shape: Shape
    dtype: DType | None = None
    registered: bool = True
    layer: int | None = None
    cast: bool = False
    """True if forward replaces the buffer with a copy in the dtype of its computation."""
    longest: int | None = None
    """The longest sequence that the buffer is made for; None: any. See `after_forward`."""

    @property
    def full_name(self) -> str:
        """Return the name with the layer's number."""
        return self.name if self.layer is None else self.name.replace("*", str(self.layer))


def after_forward(buffers: Iterable[Buffer], seq_len: int) -> Iterator[Buffer]:
    """Yield what modules keep after their first forward of sequences of `seq_len` tokens.

    Frequencies for shorter sequences are made again, in fp32. The module then also keeps the length that they are made
    for (dynamic_frequency_update in transformers' modeling_rope_utils.py).
    """
    for buffer in buffers:
        if buffer.longest is None or seq_len <= buffer.longest:
            yield buffer
            continue
        yield buffer._replace(dtype=fp32)
        yield buffer._replace(name=f"{buffer.name}: max_seq_len_cached", shape=(), dtype=int64, registered=False)


class State(NamedTuple):
    """A tensor of fixed size that a layer keeps from token to token: the last inputs of a convolution, a recurrence's state."""

    name: str
    shape: Shape
    """The shape without the batch."""
    dtype: DType | None = None
    """The dtype; None: that of the model."""


class Input(NamedTuple):
    """A tensor of the batch. A floating-point one has the model's dtype."""

    name: str
    shape: Shape
    dtype: DType | None = None


class LinearCall(NamedTuple):
    """A call of an nn.Linear or a Conv1D, as a run notes it."""

    fan_in: Dim
    fan_out: Dim
    has_bias: bool
    dtype: DType
    """The dtype of the input."""
    dims: int
    """The number of the input's dims."""
