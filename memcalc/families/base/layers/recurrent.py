"""Recurrent layers: nn.LSTM, nn.GRU and nn.RNN, as ATen runs them on a GPU without cuDNN (torch.backends.cudnn.enabled = False).

cuDNN runs all steps as one kernel. It keeps a reserve whose size only its own library can tell
(cudnnGetRNNTempSpaceSizes), so it is not counted here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from memcalc.core.ops.elementwise import activation, add_, dropout, tanh
from memcalc.core.ops.matmul import linear, mm
from memcalc.core.ops.recurrent import both_ways, gru_cell, lstm_cell, stack_first, unbind
from memcalc.core.ops.shape import transpose
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.families.base.config import Count, Layers, Probability
from memcalc.families.base.layers.layer import Layer, Parameter, dim, number, of_rank, shown

if TYPE_CHECKING:
    from memcalc.core.dims import Shape
    from memcalc.families.base.module import Module


class Cell(NamedTuple):
    """The weights of one direction of one layer."""

    weight_ih: Tensor
    weight_hh: Tensor
    bias_ih: Tensor | None
    bias_hh: Tensor | None


@dataclass(frozen=True, kw_only=True)
class Recurrent(Layer):
    """The common part of nn.LSTM, nn.GRU and nn.RNN. Only the outputs go on to the next layer."""

    main: ClassVar[str] = "hidden"
    aliases: ClassVar[Mapping[str, str]] = {
        "in": "in_", "input_size": "in_", "hidden_size": "hidden", "num_layers": "layers",
    }  # fmt: skip
    fixed: ClassVar[Mapping[str, Sequence[Any]]] = {"proj_size": (0,), "device": (None,), "dtype": (None,)}
    component: ClassVar[str] = "recurrent"
    saves_input: ClassVar[bool] = True
    gates: ClassVar[int]
    carried: ClassVar[Sequence[str]] = ("states",)

    in_: Count | None = None
    hidden: Count
    layers: Layers = 1
    bias: bool = True
    batch_first: bool = True
    dropout: Probability = 0.0
    bidirectional: bool = False

    @property
    def directions(self) -> int:
        return 2 if self.bidirectional else 1

    def shape(self, x: Shape) -> Shape:
        of_rank(x, 2, what="steps × features")
        if not self.batch_first:
            raise ValueError("batch_first false: an input has the batch as its first dim here; allowed: true")
        if self.in_ not in (None, x[1].size):
            raise ValueError(f"in {self.in_}: the input has {x[1].size} features ({shown(x)})")
        return (x[0], dim("features", self.directions * self.hidden))

    def parameters(self, x: Shape) -> Iterator[Parameter]:
        hidden, gates = dim("hidden", self.hidden), dim("gates·hidden", self.gates * self.hidden)
        before = x[1]
        for layer in range(self.layers):
            for way in ("", "_reverse")[: self.directions]:
                yield Parameter(f"weight_ih_l{layer}{way}", (gates, before))
                yield Parameter(f"weight_hh_l{layer}{way}", (gates, hidden))
                if self.bias:
                    yield Parameter(f"bias_ih_l{layer}{way}", (gates,))
                    yield Parameter(f"bias_hh_l{layer}{way}", (gates,))
            before = dim("features", self.directions * self.hidden)

    def counted(self, x: Shape) -> str:
        words: list[str] = []
        n = f"{self.gates}·" if self.gates > 1 else ""
        for before in (x[1].size, self.directions * self.hidden)[: min(self.layers, 2)]:
            bias = f" + 2·{self.hidden}" if self.bias else ""
            times = f"{self.directions}·" if self.bidirectional else ""
            words.append(f"{times}{n}({before}·{self.hidden} + {self.hidden}·{self.hidden}{bias})")
        if self.layers > 2:
            words[1] = f"{self.layers - 1}·{words[1]}"
        return number(" + ".join(words), [p.shape for p in self.parameters(x)])

    def run(self, m: Module, x: Tensor, out: Shape) -> Tensor:
        with m:
            state = (dim("layers·directions", self.layers * self.directions), x.shape[0], dim("hidden", self.hidden))
            states = [unbind(new_tensor(x.memory, state, x.dtype, f"first {name}")) for name in self.carried]
            y = transpose(x, 0, 1)
            del x
            last: list[Sequence[Tensor]] = []
            for layer in range(self.layers):
                y, ends = self.one_layer(m, layer, y, [own[layer * self.directions :] for own in states])
                last += ends
                if self.dropout and layer < self.layers - 1:
                    y = dropout(y, self.dropout)
            _last = [stack_first([end[i] for end in last], state[0]) for i in reversed(range(len(states)))]
            return transpose(y, 0, 1)

    def one_layer(
        self, m: Module, layer: int, x: Tensor, states: Sequence[Sequence[Tensor]]
    ) -> tuple[Tensor, list[Sequence[Tensor]]]:
        """Return the outputs of a layer over (steps, batch, features), and the last states of each direction."""
        steps = x.shape[0]
        inputs = unbind(x)
        forth, end = self.steps(_cell(m, layer, ""), inputs, [own[0] for own in states])
        if not self.bidirectional:
            return stack_first(forth, steps), [end]
        whole = stack_first(forth, steps)
        back, other_end = self.steps(_cell(m, layer, "_reverse"), inputs[::-1], [own[1] for own in states])
        turned = stack_first(back[::-1], steps)
        return both_ways(whole, turned, dim("features", 2 * self.hidden)), [end, other_end]

    def steps(
        self, cell: Cell, inputs: Sequence[Tensor], states: list[Tensor]
    ) -> tuple[list[Tensor], Sequence[Tensor]]:
        """Return the output of each step, and the last states."""
        out: list[Tensor] = []
        for x in inputs:
            states = self.step(cell, x, states)
            out.append(states[0])
        return out, states

    def step(self, cell: Cell, x: Tensor, states: list[Tensor]) -> list[Tensor]:
        """Return the states after a step."""
        raise NotImplementedError


def _cell(m: Module, layer: int, way: str) -> Cell:
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    weight_ih, weight_hh, bias_ih, bias_hh = (m.optional(f"{name}_l{layer}{way}") for name in names)
    assert weight_ih is not None and weight_hh is not None
    return Cell(weight_ih, weight_hh, bias_ih, bias_hh)


def _gates(cell: Cell, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the products with the input and with the state, without biases."""
    of_input = mm(x, transpose(cell.weight_ih, 0, 1), name="gates of the input")
    return of_input, mm(state, transpose(cell.weight_hh, 0, 1), name="gates of the state")


@dataclass(frozen=True, kw_only=True)
class LSTM(Recurrent):
    """nn.LSTM."""

    kind: ClassVar[str] = "lstm"
    torch: ClassVar[str] = "LSTM"
    positions: ClassVar[Sequence[str]] = (
        "in_", "hidden", "layers", "bias", "batch_first", "dropout", "bidirectional", "proj_size",
    )  # fmt: skip
    gates: ClassVar[int] = 4
    carried: ClassVar[Sequence[str]] = ("states", "cell states")

    def step(self, cell: Cell, x: Tensor, states: list[Tensor]) -> list[Tensor]:
        return list(lstm_cell(*_gates(cell, x, states[0]), states[1], cell.bias_ih, cell.bias_hh))


@dataclass(frozen=True, kw_only=True)
class GRU(Recurrent):
    """nn.GRU."""

    kind: ClassVar[str] = "gru"
    torch: ClassVar[str] = "GRU"
    positions: ClassVar[Sequence[str]] = LSTM.positions[:-1]
    gates: ClassVar[int] = 3

    def step(self, cell: Cell, x: Tensor, states: list[Tensor]) -> list[Tensor]:
        return [gru_cell(*_gates(cell, x, states[0]), states[0], cell.bias_ih, cell.bias_hh)]


@dataclass(frozen=True, kw_only=True)
class RNN(Recurrent):
    """nn.RNN, with tanh or relu."""

    kind: ClassVar[str] = "rnn"
    torch: ClassVar[str] = "RNN"
    positions: ClassVar[Sequence[str]] = (
        "in_", "hidden", "layers", "nonlinearity", "bias", "batch_first", "dropout", "bidirectional",
    )  # fmt: skip
    gates: ClassVar[int] = 1

    nonlinearity: Literal["tanh", "relu"] = "tanh"

    def step(self, cell: Cell, x: Tensor, states: list[Tensor]) -> list[Tensor]:
        total = linear(states[0], cell.weight_hh, cell.bias_hh)
        total = add_(total, linear(x, cell.weight_ih, cell.bias_ih))
        return [tanh(total) if self.nonlinearity == "tanh" else activation(total, "relu")]
