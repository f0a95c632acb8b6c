"""A stage of an encoder or of a decoder on paper: a stage of the decoder takes two tensors and hands two on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memcalc.core.autograd import Constant, backward
from memcalc.core.several_roots import backward_of_several
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.engines.fsdp2.pipeline_step import PaperStage, detached, taken

if TYPE_CHECKING:
    from memcalc.engines.fsdp2.stages import StageStep
    from memcalc.families.base.module import Run
    from memcalc.pipelining.encoded import EncodedStage


class EncodedPaperStage(PaperStage):
    """A stage whose inputs and outputs are tuples (_PipelineStageBase). Of a backward it takes a gradient for each output."""

    def __init__(self, program: EncodedStage, run: Run, hooks: StageStep, tokens: Tensor, hidden: Tensor) -> None:
        super().__init__(program, run, hooks, tokens, hidden)  # type: ignore[arg-type]
        self.encoded_program = program
        self.outputs_of: dict[int, tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = {}
        """The outputs and the received inputs of micro-batches (fwd_cache)."""
        self.gradients_of: dict[int, tuple[Tensor, ...]] = {}
        """The gradients of inputs (bwd_cache)."""

    def forward_one_chunk(self, i: int) -> Any:
        self.memory.enter("forward", None)
        received = tuple(self._received_of(name, wants_gradient=True) for name in self.encoded_program.receives)
        output = self._of_several(received)
        self.outputs_of[i] = (output, received)
        return output[0] if self.last else output

    def _of_several(self, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        program, given = self.encoded_program, self.hooks.before_stage_of_several(received)
        of_stack = self.tokens if program.begins_stack else given[0]
        encoded = given[-1] if program.is_decoder else None
        return self.hooks.after_forward(program.outputs(self.run, of_stack, encoded))  # type: ignore[arg-type, return-value]

    def _received_of(self, name: str, *, wants_gradient: bool) -> Tensor:
        shape = self.encoded_program.handed(name, self.run.batch, self.run.seq)
        buffer = new_tensor(self.memory, shape, self.hidden.dtype, "received", component="buffers")
        if wants_gradient:
            buffer.node = Constant(self.memory, buffer)
        return buffer

    def compute_loss(self, i: int, output: Tensor) -> None:
        if self.last:
            self.losses[i] = self.encoded_program.loss(self.run, output, self.tokens)
        self.forward_ends.append(len(self.memory.log))

    def backward_one_chunk(self, i: int) -> None:
        self.memory.enter("backward", None)
        stage_output, given = self.outputs_of.pop(i)
        if self.last:
            backward(self.losses[i], self.hooks.after_backward)
            self.losses[i] = detached(self.losses[i])
            stage_output = tuple(map(detached, stage_output))
        else:
            gradients = [self._received_of(name, wants_gradient=False) for name in self.encoded_program.sends]
            backward_of_several(stage_output, gradients, self.hooks.after_backward)
        self.memory.enter("backward", None)
        self.gradients_of[i] = tuple(gradient for one in given if (gradient := taken(one)) is not None)

    def fwd_sends(self, i: int) -> list[Tensor]:
        return [] if self.last else list(map(detached, self.outputs_of[i][0]))

    def bwd_sends(self, i: int) -> list[Tensor]:
        return list(self.gradients_of.pop(i))

    def _of_micro_batches(self) -> tuple[dict[int, Any], ...]:
        return self.outputs_of, self.gradients_of, self.losses
