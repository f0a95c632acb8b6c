"""Adam-mini of the adam-mini package (1.1.1, adam_mini/adam_mini.py): a first moment of every weight, and one second moment
for a block of weights.

The names of parameters say what a block is: a head for queries and keys, a row for embeddings, the head, values and products,
and the whole parameter for all others. Biases have Adam's two moments. The loop's variables hold the tensors of the last
parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, Literal

from memcalc.core.dims import Dim, Shape, numel
from memcalc.core.dtypes import DType
from memcalc.core.tensor import Memory, Tensor
from memcalc.optimizers.base import Optimizer, Parameter, State, like_parameter, one_by_one, streams, temporary, then

SOURCE: Final = "adam_mini/adam_mini.py: Adam_mini.step"
Block = Literal["bias", "head", "row", "whole"]
_HEADS: Final = ("k_proj", "q_proj", "wq", "wk", "query", "key")
_ROWS: Final = (
    "embed", "embd", "wte", "lm_head", "output", "final_layer", "v_proj", "wv", "value", "feed_forward", "linear", "mlp",
    "o_proj", "wo", "attn.proj",
)  # fmt: skip
"""Parts of names: wqk_names, and embd_names, output_names, wv_names, mlp_names and attn_proj_names."""


def block_of(name: str) -> Block:
    """Return what shares a second moment in the parameter of a name."""
    name = name.lower()
    if "bias" in name:
        return "bias"
    if any(part in name for part in _HEADS):
        return "head"
    return "row" if any(part in name for part in _ROWS) else "whole"


@dataclass(frozen=True, slots=True)
class AdamMini(Optimizer):
    """Adam-mini, over weights of one rank."""

    needs_shapes: ClassVar[bool] = True
    takes_flat: ClassVar[bool] = False

    def states(self, parameters: Sequence[Parameter], dtype: DType, implementation: str) -> list[State]:
        self.check(implementation)
        states: list[State] = []
        for parameter in parameters:
            own = parameter.dtype or dtype
            states.append(like_parameter("m", parameter, own, SOURCE))
            states.append(State("v" if _is_bias(parameter) else "vmean", parameter, _blocks(parameter), own, parameter.count,
                                SOURCE))  # fmt: skip
        return states

    def step(
        self, memory: Memory, parameters: Sequence[Parameter], dtype: DType, grad_dtype: DType, implementation: str
    ) -> None:
        self.check(implementation)
        tmp_lr: Tensor | None = None
        h: Tensor | None = None
        stepsize: Tensor | None = None
        update: Tensor | None = None
        for parameter in one_by_one(memory, parameters):
            shape, own, blocks = parameter.shape, parameter.dtype or dtype, _blocks(parameter)
            kind, given = block_of(parameter.name), parameter.dtype or grad_dtype
            _kernels(memory, parameter, own, given)
            if kind == "bias":
                h = then(temporary(memory, shape, own, "v.sqrt()"), "h")
                continue
            squares = temporary(memory, shape, given, "grad * grad")
            tmp_lr = temporary(memory, blocks, given, "tmp_lr")
            del squares
            if kind == "whole":
                tmp_lr = then(tmp_lr, "tmp_lr / block_numel")
            h = then(temporary(memory, blocks, own, "vmean.sqrt()"), "h")
            stepsize = then(h, "stepsize")
            update = temporary(memory, shape, own, "update")
            then(update, "-update")
        del tmp_lr, h, stepsize, update


OPTIMIZER: Final = AdamMini("adam-mini", ("for-loop",))


def _is_bias(parameter: Parameter) -> bool:
    return block_of(parameter.name) == "bias"


def _blocks(parameter: Parameter) -> Shape:
    """Return the shape of the second moments of a parameter's blocks."""
    kind = block_of(parameter.name)
    if kind == "bias":
        return parameter.shape
    if kind == "whole":
        return ()
    if kind == "row":
        return (parameter.shape[0], _ONE)
    return (Dim("heads", numel(parameter.shape)[0] // parameter.head), _ONE)


_ONE: Final = Dim("1", 1)


def _kernels(memory: Memory, parameter: Parameter, own: DType, given: DType) -> None:
    """Note the ops of an update. Those over blocks are of a number for each."""
    of, grad, blocks = (parameter.shape, own), (parameter.shape, given), (_blocks(parameter), own)
    if _is_bias(parameter):
        streams(memory, "v.mul_", of, of)
        streams(memory, "v.addcmul_", of, grad, grad, of)
        streams(memory, "m.lerp_", of, grad, of)
        streams(memory, "v.sqrt", of, of)
        streams(memory, "h.div", of, of)
        streams(memory, "h.add_", of, of)
        streams(memory, "p.addcdiv_", of, of, of, of)
        return
    streams(memory, "grad * grad", grad, grad, grad)
    streams(memory, "mean of the squares", grad, (blocks[0], given))
    streams(memory, "vmean.mul_", blocks, blocks)
    streams(memory, "vmean.add_", blocks, blocks, blocks)
    streams(memory, "m.lerp_", of, grad, of)
    for name in ("vmean.sqrt", "h.div", "h.add_", "stepsize"):
        streams(memory, name, blocks, blocks)
    streams(memory, "m * stepsize", of, blocks, of)
    streams(memory, "update.mul_", of, of)
    streams(memory, "-update", of, of)
    streams(memory, "p.add_", of, of, of)
