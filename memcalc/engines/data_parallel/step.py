"""DataParallel on the first GPU while a step runs: flat buffers before forward, all outputs after it, sums behind backward.

The first replica's parameters are the module's own. Its gradients wait for those of all replicas: one node of the graph
broadcast all parameters, and its backward runs when every gradient has come. Sources: torch/nn/parallel/_functions.py
(Broadcast, ReduceAddCoalesced, Gather), comm.py (reduce_add_coalesced), torch/_utils.py (_take_tensors),
torch/csrc/cuda/comm.cpp (broadcast_coalesced), torch/csrc/utils/tensor_flatten.cpp (take_tensors).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from memcalc.core.autograd import Node, no_kernel
from memcalc.core.dims import Dim, Shape, numel
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from memcalc.families.base.module import Module, Run

BUFFER: Final = 10 * MIB  # buffer_size of broadcast_coalesced and reduce_add_coalesced (comm.py)
REDUCED: Final = "reduced gradients of a buffer"
GATHERED: Final = "logits of all replicas"


class Chunk(NamedTuple):
    """Tensors that are sent together."""

    tensors: int
    elements: int


def broadcast_chunks(elements: Iterable[int], itemsize: int) -> list[Chunk]:
    """Return the chunks of a broadcast of tensors of one dtype. A chunk ends with the tensor that would fill it if it came
    again (take_tensors)."""
    out: list[Chunk] = []
    now = Chunk(0, 0)
    for one in elements:
        now = Chunk(now.tensors + 1, now.elements + one)
        if (now.elements + one) * itemsize >= BUFFER:
            out.append(now)
            now = Chunk(0, 0)
    return [*out, now] if now.tensors else out


def reduce_chunks(elements: Iterable[int], itemsize: int) -> list[Chunk]:
    """Return the chunks of a reduction of tensors of one dtype. A chunk ends before the tensor that would overfill it
    (_take_tensors)."""
    out: list[Chunk] = []
    now = Chunk(0, 0)
    for one in elements:
        if now.tensors and (now.elements + one) * itemsize > BUFFER:
            out.append(now)
            now = Chunk(0, 0)
        now = Chunk(now.tensors + 1, now.elements + one)
    return [*out, now] if now.tensors else out


class Replicas(NamedTuple):
    """The hooks of the first replica."""

    gpus: int

    def start(self, run: Run) -> Step:
        return Step(self.gpus, run)


class Step:
    """The hooks of one forward and backward."""

    def __init__(self, gpus: int, run: Run) -> None:
        self.gpus, self.run = gpus, run
        self.weights = list(run.weights.values())
        self.sizes = [numel(weight.shape)[0] for weight in self.weights]
        self.gradients: list[Tensor] = []

    # --- called by a run

    def before_forward(self) -> None:
        """Broadcast the parameters, each chunk from a flat copy, and make one node the producer of all of them."""
        for chunk in broadcast_chunks(self.sizes, self.run.dtype.itemsize):
            self._flat(chunk, "flat copy of parameters to broadcast")

        @no_kernel
        def broadcast_backward(_: Node, grads: list[Tensor]) -> list[Tensor]:
            self._reduce(grads)
            return []

        node = Node(self.run.memory, broadcast_backward, (), outputs=len(self.weights))
        for i, weight in enumerate(self.weights):
            weight.node, weight.output = node, i

    def layer(self, forward: Callable[..., Any], m: Module, *args: Any) -> Any:
        return forward(m, *args)

    def after_forward(self, loss: Tensor) -> Tensor:
        """Gather the outputs of all replicas on this GPU: the losses become a vector, whose mean is the loss."""
        memory, run = self.run.memory, self.run
        memory.scope = ""
        shape = self._logits()
        own = new_tensor(memory, shape, run.dtype, "logits")  # of the list of outputs, until forward returns
        vector = new_tensor(memory, (Dim("GPUs", self.gpus),), loss.dtype, "losses of all replicas")
        _gathered = new_tensor(memory, (Dim("GPUs", self.gpus), *shape), run.dtype, GATHERED)

        @no_kernel
        def gather_backward(_: Node, grads: list[Tensor]) -> list[Tensor]:
            return [Tensor(grads[0].storage, (), (), grads[0].dtype)]

        @no_kernel
        def mean_backward(_: Node, grads: list[Tensor]) -> list[Tensor]:
            return [new_tensor(memory, vector_shape, grads[0].dtype, "gradients of the losses")]

        vector_shape = vector.shape
        vector.node = Node(memory, gather_backward, (loss,))
        del own
        mean = new_tensor(memory, (), loss.dtype, "mean of the losses")
        mean.node = Node(memory, mean_backward, (vector,))
        return mean

    def after_backward(self) -> None: ...

    def backward_is_over(self) -> None: ...

    # --- steps of a hook

    def _logits(self) -> Shape:
        """Return the shape of a replica's logits."""
        table = next(weight for weight in reversed(self.weights) if weight.shape[0].name == "vocab")
        return (self.run.batch, self.run.seq, table.shape[0])

    def _reduce(self, grads: Sequence[Tensor]) -> None:
        """Sum the gradients of all replicas into flat results, which stay as the parameters' gradients."""
        flat: Tensor | None = None
        for chunk in reduce_chunks(self.sizes, self.run.dtype.itemsize):
            flat = self._flat(chunk, "flat copy of gradients to reduce")  # the one before goes when this one is there
            dim = Dim("elements of a buffer", chunk.elements)
            self.gradients.append(new_tensor(self.run.memory, (dim,), self.run.dtype, REDUCED, component="gradients"))
        del flat

    def _flat(self, chunk: Chunk, name: str) -> Tensor | None:
        """Copy a chunk into a flat buffer. One tensor alone is its own flat buffer (at::flatten_dense_tensors)."""
        if chunk.tensors == 1:
            return None
        dim = Dim("elements of a buffer", chunk.elements)
        return new_tensor(self.run.memory, (dim,), self.run.dtype, name, component="gathered")
