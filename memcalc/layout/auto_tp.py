"""DeepSpeed's AutoTP in training (`tensor_parallel: {autotp_size: N}`): transformers' modules, whose linear layers it replaces.

With transformers' tp_plan at hand it follows the plan (deepspeed/module_inject/tp_plan_converter.py), but leaves the table of
embeddings whole. Each column-parallel layer sums the gradient of its own input in place; a row-parallel layer sums its output
in place; a bias is added behind it, out of place (deepspeed/module_inject/layers.py: LinearLayer, LinearAllreduce,
GatherFromTensorParallelRegion).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memcalc.core.autograd import Node, no_kernel
from memcalc.core.dims import merge
from memcalc.core.ops.elementwise import recording
from memcalc.core.ops.matmul import linear
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.layout.tensor_parallel import TensorParallel, group_dim, same, split

if TYPE_CHECKING:
    from memcalc.core.dims import Dim
    from memcalc.families.base.plans import Plan
    from memcalc.families.base.program import Program

SOURCE: Final = "deepspeed/module_inject/layers.py"
TYPES: Final = (
    "llama", "mistral", "qwen2", "qwen3", "apertus", "arcee", "cohere", "cwm", "ernie4_5", "exaone4", "gemma", "granite",
    "helium", "internlm3", "ministral", "olmo", "starcoder2",
)  # fmt: skip
"""The model types whose replaced layers have been compared with DeepSpeed's."""


class AutoTensorParallel(TensorParallel):
    """The tensor-parallel group of a run, with DeepSpeed's layers."""

    __slots__ = ()

    def linear(self, path: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Run the layer that AutoTP has put at `path`."""
        style = self.plan.get(path)
        name = path.split("*.")[-1]
        if style == "rowwise":
            output = linear(x, weight)
            self.send(x.memory, "all_reduce", f"output of {name}", output.shape, output.dtype)
            output = same(output, Node(x.memory, _passed_on, (output,))) if recording(output) else output
            return output if bias is None else output + bias
        if style not in ("colwise", "colwise_gather_output"):
            return linear(x, weight, bias)
        output = linear(self.gradient_summed(x, name), weight)
        if bias is not None:
            output = output + bias
        return output if style == "colwise" else self._joined(output, name, self.widths[path])

    def _joined(self, shard: Tensor, name: str, whole: Dim) -> Tensor:
        """Run GatherFromTensorParallelRegion: gather along the first dim, then put the columns side by side."""
        *lead, width = shard.shape
        ranks = group_dim(self.ranks)
        buffer = new_tensor(shard.memory, (ranks, *shard.shape), shard.dtype, f"output of {name}, gathered")
        self.send(shard.memory, "all_gather", f"output of {name}", (*lead, merge(ranks, width)), shard.dtype)
        out = new_tensor(shard.memory, (*lead, whole), shard.dtype, f"output of {name}, side by side")
        del buffer
        if recording(shard):
            out.node = Node(shard.memory, _own_columns_backward, (shard,), (), name)
        return out


@no_kernel
def _passed_on(_: Node, grads: list[Tensor]) -> list[Tensor]:
    return grads


def _own_columns_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    """Copy this rank's columns of the gradient."""
    return [
        new_tensor(node.memory, node.metadata[0][0], grads[0].dtype, f"{node.context}: own columns of the gradient")
    ]


def on_rank(program: Program, plan: Plan, ranks: int) -> Program:
    """Return the program of one of `ranks` ranks. Heads, widths and the vocabulary have to divide."""
    kept: Plan = {path: style for path, style in plan.items() if style != "embedding_rowwise"}
    return split(program, kept, ranks, AutoTensorParallel)
