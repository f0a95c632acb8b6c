"""One stage's step of DeepSpeed's PipelineEngine on paper (deepspeed/runtime/pipe/engine.py).

Variables are bound where the real code binds them, because they decide what stays alive. One tensor goes from stage to
stage, the hidden states. Under tensor parallelism it is sent in parts (`pipe_partitioned`, `grad_partitioned`, on by
default), each with a few numbers that describe it. The receiver gathers the parts. The sender gathers its own output
again when the gradient comes (PartitionedTensor in runtime/utils.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from memcalc.core.autograd import Constant, backward
from memcalc.core.dims import Dim, Shape, formula, numel
from memcalc.core.dtypes import DType, boolean, fp32, int64
from memcalc.core.ops.elementwise import cast
from memcalc.core.ops.shape import clone
from memcalc.core.tensor import Sent, Tensor, new_tensor

if TYPE_CHECKING:
    from memcalc.engines.deepspeed.stages import Instruction
    from memcalc.families.base.module import Run
    from memcalc.megatron.legacy import LegacyGPTModel

PARTS: Final = ("received hidden states", "output of the stage", "gradient of the output")
"""The names of the tensors gathered from parts that go from stage to stage."""


class Pipe(NamedTuple):
    """A stage, and how its engine keeps gradients."""

    stage: int
    stages: int
    buffers: int
    tensor_parallel: int
    accumulates_in: DType
    """The dtype in which BF16_Optimizer adds up gradients after every backward."""

    @property
    def first(self) -> bool:
        return self.stage == 0

    @property
    def last(self) -> bool:
        return self.stage == self.stages - 1


def part_of(shape: Shape, ranks: int) -> Shape:
    """Return the shape of one rank's part of a tensor that is cut flat (partition_uniform). If parts differ, the first
    ones are larger."""
    size, poly = numel(shape)
    if ranks == 1:
        return shape
    if size % ranks or any(c % ranks for c in poly):
        return (Dim(f"⌈{formula(shape)}/tp⌉", -(-size // ranks)),)
    return (Dim(f"{formula(shape)}/tp", size // ranks, tuple(c // ranks for c in poly)),)  # type: ignore[arg-type]


def meta_of(ranks: int) -> Shape:
    """Return the shape of PartitionedTensor.to_meta: the rank's number, the number of ranks, the sizes, and where every
    part begins."""
    return (Dim("numbers of the parts", 1 + 3 + 2 + ranks + 1),)


class _Batch(NamedTuple):
    """The tensors that the data loader's function makes for one micro-batch (get_batch_pipe in pretrain_gpt.py)."""

    tokens: Tensor
    positions: Tensor
    mask: Tensor
    labels: Tensor
    loss_mask: Tensor


class PaperEngine:
    """The PipelineEngine of one stage."""

    def __init__(self, program: LegacyGPTModel, run: Run, pipe: Pipe) -> None:
        self.program, self.run, self.pipe = program, run, pipe
        self.memory = run.memory
        self.hidden: Shape = (run.batch, run.seq, program.hidden)
        self.inputs: list[Any] = [None] * pipe.buffers
        self.labels: list[Any] = [None] * pipe.buffers
        self.outputs: list[Any] = [None] * pipe.buffers
        self.output_tensors: list[Any] = [None] * pipe.buffers
        self.grad_layer = self._new(part_of(self.hidden, pipe.tensor_parallel), run.dtype, "received", "buffers")
        self.loss: Tensor | None = None
        self.forward_ends: list[int] = []
        """The places in the log at which forwards end."""
        self.largest = max((w for w in run.weights.values()), key=lambda w: numel(w.shape)[0])

    def _new(self, shape: Shape, dtype: DType, name: str, component: str = "activation") -> Tensor:
        return new_tensor(self.memory, shape, dtype, name, component=component)

    def leave_last_step(self, micro_batches: int) -> None:
        """Fill the buffers with what the previous step has left: nothing frees the batches, and the last stage's
        logits."""
        for buffer in range(min(micro_batches, self.pipe.buffers)):
            if self.pipe.first or self.pipe.last:
                self.load(buffer)
            if self.pipe.last:
                shape = (self.run.batch, self.run.seq, self.program.vocab)
                self.outputs[buffer] = self._new(shape, fp32, "logits in fp32")
        if self.pipe.last:
            self.loss = self._loss_of_last_step()

    def _loss_of_last_step(self) -> Tensor:
        """Return the previous step's loss. Its graph has run, and still refers to the stage's input and to the input's
        gradient."""
        given = self._new(self.hidden, self.run.dtype, "received hidden states")
        loss = self._new((), fp32, "loss", "buffers")
        loss.node = leaf = Constant(self.memory, given)
        leaf.grad = self._new(self.hidden, self.run.dtype, "gradient of the received hidden states")
        return loss

    def execute(self, instructions: Iterable[Instruction]) -> None:
        """Run _exec_schedule. Instructions that only send allocate nothing."""
        do = {
            "load": self.load,
            "forward": self.forward,
            "backward": self.backward,
            "receive activation": self.receive_activation,
            "send gradient": self.send_gradient,
        }
        for kind, buffer in instructions:
            if kind in do:
                self.memory.enter("backward" if kind in ("backward", "send gradient") else "forward", None)
                do[kind](buffer)

    def load(self, buffer: int) -> None:
        """Run _exec_load_micro_batch. The first stage copies its part of a batch, the last keeps labels as they are."""
        batch = self._next_batch()
        if self.pipe.first:
            self.inputs[buffer] = (clone(batch.tokens), clone(batch.positions), clone(batch.mask))
        if self.pipe.last:
            self.labels[buffer] = (batch.labels, batch.loss_mask)

    def _next_batch(self) -> _Batch:
        tokens = (self.run.batch, self.run.seq)
        mask = (self.run.seq, self.run.seq)
        return _Batch(
            self._new(tokens, int64, "tokens"),
            self._new(tokens, int64, "position ids"),
            self._new(mask, boolean, "attention mask"),
            self._new(tokens, int64, "labels"),
            self._new(tokens, fp32, "loss mask"),
        )

    def receive_activation(self, buffer: int) -> None:
        """Run _exec_recv_activations: copy the receive buffer."""
        received = clone(self.grad_layer)
        if self.pipe.tensor_parallel > 1:
            meta = self._new(meta_of(self.pipe.tensor_parallel), int64, "numbers of the parts")
            self.inputs[buffer] = (meta, received)
        else:
            received.node = Constant(self.memory, received)
            self.inputs[buffer] = received

    def forward(self, buffer: int) -> None:
        """Run _exec_forward_pass."""
        given = self._given(buffer)
        outputs = self.program.stage(self.run, *given[:2])
        if self.pipe.last:
            outputs = self.program.logits(self.run, outputs)
            outputs = cast(outputs, fp32, "logits in fp32")
            self.outputs[buffer] = outputs
            labels, loss_mask = self.labels[buffer]
            tp = self.program.layout.group(self.run.seq)
            self.loss = self.program.loss_of(self.run, tp, outputs, outputs, labels, loss_mask)
            self.memory.relabel(self.loss.storage, (), "buffers", "loss", None)
        elif self.pipe.tensor_parallel > 1:
            part = self._new(part_of(self.hidden, self.pipe.tensor_parallel), self.run.dtype, "part of the output")
            meta = self._new(meta_of(self.pipe.tensor_parallel), int64, "numbers of the parts")
            self.output_tensors[buffer] = self._emptied(outputs)
            self.outputs[buffer] = (meta, part)
        else:
            self.outputs[buffer] = outputs
        self.forward_ends.append(len(self.memory.log))

    def _given(self, buffer: int) -> tuple[Tensor, ...]:
        inputs = self.inputs[buffer]
        if self.pipe.first:
            return tuple(clone(t) for t in inputs)
        if self.pipe.tensor_parallel == 1:
            return (clone(inputs),)
        meta, part = (clone(t) for t in inputs)
        del inputs
        whole = self._full(PARTS[0])
        whole.node = Constant(self.memory, whole)
        del meta, part
        self.inputs[buffer] = whole
        return (whole,)

    def _full(self, name: str) -> Tensor:
        """Run PartitionedTensor.full: gather the parts into a flat buffer, and return a copy of it."""
        send(self.memory, "all_gather", name, self.hidden, self.run.dtype)
        flat = self._new(self.hidden, self.run.dtype, "gathered parts")
        whole = self._new(self.hidden, self.run.dtype, name)
        del flat
        return whole

    def _emptied(self, output: Tensor) -> Tensor:
        """Free the output's data; its place in the graph stays."""
        one = self._new((), fp32, "an output without its data")
        return Tensor(one.storage, output.shape, output.strides, output.dtype, output.node, output.output)

    def backward(self, buffer: int) -> None:
        """Run _exec_backward_pass."""
        if self.pipe.last:
            assert self.loss is not None
            backward(self.loss)
            self._accumulate()
            return
        outputs, grad_tensors = self.outputs[buffer], self.grad_layer
        if self.pipe.tensor_parallel > 1:
            outputs = self.output_tensors[buffer]
            data = self._full(PARTS[1])
            outputs = Tensor(data.storage, outputs.shape, outputs.strides, outputs.dtype, outputs.node, outputs.output)
            self.output_tensors[buffer] = outputs
            del data
            grad_tensors = self._full(PARTS[2])
        backward(outputs, None, grad_tensors)
        self.memory.enter("backward", None)
        self._accumulate()
        self.output_tensors[buffer] = self.outputs[buffer] = None

    def _accumulate(self) -> None:
        """Run BF16_Optimizer.update_hp_grads: each gradient is cast, one by one. The largest stands for all."""
        self.memory.enter("backward", None)
        if self.pipe.accumulates_in is not self.run.dtype:
            _cast = self._new(self.largest.shape, self.pipe.accumulates_in, "a gradient to be added up")

    def send_gradient(self, buffer: int) -> None:
        """Run _exec_send_grads."""
        if self.pipe.tensor_parallel > 1:
            _part = self._new(part_of(self.hidden, self.pipe.tensor_parallel), self.run.dtype, "part of the gradient")
        self.inputs[buffer] = None


def send(memory: Any, kind: str, name: str, shape: Shape, dtype: DType) -> None:
    """Record a collective over the slices of a stage."""
    memory.sent.append(Sent("tp", kind, name, memory.phase, None, shape, dtype))
