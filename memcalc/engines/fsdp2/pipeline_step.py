"""One rank's stages of torch.distributed.pipelining on paper; schedules_on_paper.py has the schedules that run them.

Variables are bound where the real code binds them, because they decide what stays alive: _PipelineStageBase in
torch/distributed/pipelining/stage.py. The caller asks for no outputs (`step(..., return_outputs=False)`), so the last
stage keeps the logits of a micro-batch only for its backward. The caller keeps its list of losses, which the step fills
anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from memcalc.core.autograd import Constant, Leaf, backward
from memcalc.core.tensor import Memory, Sent, Tensor, new_tensor
from memcalc.engines.fsdp2.stages import StageStep
from memcalc.families.base.blocks import causal_lm_loss
from memcalc.pipelining.halves import Group, stage_backward_input, stage_backward_weight

if TYPE_CHECKING:
    from memcalc.families.base.module import Run
    from memcalc.pipelining.programs import Stage


UPDATE: Final = "update"
"""The phase of a run in which the weights are updated while micro-batches are in flight. Nothing is allocated in it here."""


class PaperStage:
    """A stage (_PipelineStageBase). Its receive buffers are never freed; each micro-batch has its own."""

    def __init__(
        self, program: Stage, run: Run, hooks: StageStep, tokens: Tensor, hidden: Tensor, *, asks: bool = False
    ) -> None:
        """`asks`: the output of the embeddings requires a gradient even if their weights do not."""
        self.program, self.run, self.hooks, self.tokens = program, run, hooks, tokens
        self.memory: Memory = run.memory
        self.hidden = hidden
        self.first, self.last = program.span.first, program.span.last
        self.input_wants_gradient = program.input_wants_gradient(asks=asks)
        self.has_backward = program.backward_from(asks=asks) is not None
        self.fwd_cache: dict[int, tuple[Tensor, Tensor]] = {}
        self.bwd_cache: dict[int, Tensor | None] = {}
        self.backward_state: dict[int, tuple[Tensor, list[Group] | None, Tensor]] = {}
        self.losses: dict[int, Tensor] = {}
        """The losses of micro-batches, in the order of their forwards."""
        self.losses_left_out: Tensor | None = None
        """The losses of micro-batches that are not run on paper."""
        self._last_given: tuple[int, int] | None = None
        """The number of the block of the last forward's input, and the place in the log at which that forward ended; None if it
        takes several."""
        self.received: dict[int, Tensor] = {}
        """The inputs of micro-batches, which are never freed."""
        self.forward_ends: list[int] = []
        """The places in the log at which forwards end."""
        self.places: dict[tuple[str, int], range] = {}
        """The range of the log of a micro-batch's forward or backward."""
        self.following: PaperStage | None = None
        """The next stage, if it is on this rank: nothing is sent to it."""
        self.local_inputs: dict[int, Tensor] = {}
        """The inputs that a stage of this rank has made, until the next step's."""
        self.local_gradients: dict[int, Tensor] = {}
        """The gradients of the outputs that a stage of this rank has made, until the next step's."""
        self.sent_once: list[Sent] = []
        """The collectives of the step's one reduction, whatever the number of micro-batches."""

    def lead_to(self, following: PaperStage, micro_batches: int) -> None:
        """Make `following` the next stage on this rank. Both have the tensors of the step before."""
        self.following, h = following, self.hidden
        made = [("inputs", following.local_inputs)]
        if following.input_wants_gradient:
            made.append(("gradients", self.local_gradients))
        for i in range(micro_batches):
            for name, held in made:
                label = f"{name} of the step before"
                held[i] = new_tensor(self.memory, h.shape, h.dtype, label, component="gathered")

    def forward_one_chunk(self, i: int) -> Tensor:
        self.memory.enter("forward", None)
        given = self.tokens if self.first else self._input(i)
        output = self._submod(given)
        self.fwd_cache[i] = (output, given)
        self._last_given = given.storage.index, len(self.memory.log)
        return output

    @property
    def last_given(self) -> int | None:
        """Return the number of the block of the last forward's input; None if it is freed: no graph holds it if nothing trains
        up to there."""
        if self._last_given is None:
            return None
        block, place = self._last_given
        return None if ~block in self.memory.log[place:] else block

    def lead_on(self, i: int, output: Tensor) -> None:
        """Hand an output to the next stage if it is on this rank (set_local_fwd_input)."""
        if self.following is not None:
            self.following.local_inputs[i] = detached(output)

    def lead_back(self, stage: PaperStage, i: int) -> None:
        """Hand the gradient of an input back to `stage`, which made it (set_local_bwd_input)."""
        gradient = self.bwd_cache.pop(i)
        if gradient is not None:
            stage.local_gradients[i] = gradient

    def _input(self, i: int) -> Tensor:
        if i not in self.local_inputs:
            return self._received(wants_gradient=self.input_wants_gradient)
        given = self.local_inputs[i]
        if self.input_wants_gradient:
            given.node = Constant(self.memory, given)
        return given

    def _gradient(self, i: int) -> Tensor:
        """Return the gradient of an output."""
        return self.local_gradients[i] if self.following is not None else self._received(wants_gradient=False)

    def _submod(self, given: Tensor) -> Tensor:
        given = self.hooks.before_stage(given)
        return self.hooks.after_forward(self.program.outputs(self.run, given))

    def _received(self, *, wants_gradient: bool) -> Tensor:
        h = self.hidden
        buffer = new_tensor(self.memory, h.shape, h.dtype, "received", component="buffers")
        if wants_gradient:
            buffer.node = Constant(self.memory, buffer)
        return buffer

    def compute_loss(self, i: int, output: Tensor) -> None:
        if self.last:
            self.losses[i] = causal_lm_loss(self.run, output, self.tokens)
        self.forward_ends.append(len(self.memory.log))

    def backward_one_chunk(self, i: int) -> None:
        self.memory.enter("backward", None)
        stage_output, given = self.fwd_cache.pop(i)
        if not self.has_backward:
            self.bwd_cache[i] = None
            return
        if self.last:
            backward(self.losses[i], self.hooks.after_backward)
            self.losses[i] = detached(self.losses[i])
            stage_output = detached(stage_output)
        else:
            backward(stage_output, self.hooks.after_backward, self._gradient(i))
        self.memory.enter("backward", None)
        self.bwd_cache[i] = taken(given)

    def backward_input_one_chunk(self, i: int) -> None:
        """Run backward_one_chunk(full_backward=False). The input keeps its gradient until the next step begins."""
        self.memory.enter("backward", None)
        stage_output, given = self.fwd_cache.pop(i)
        groups = None
        if self.first:
            self.bwd_cache[i] = None
        else:
            root, gradient = stage_output, None
            if self.last:
                root = self.losses[i]
            else:
                gradient = self._gradient(i)
            assert isinstance(given.node, Constant)
            leaves = [weight.node for weight in self.run.weights.values() if isinstance(weight.node, Leaf)]
            own, groups = stage_backward_input(root, gradient, given.node, leaves, self.hooks.after_backward)
            given.node.grad = self.bwd_cache[i] = own
            stage_output = detached(root)
            if self.last:
                self.losses[i] = stage_output
            del root
        self.memory.enter("backward", None)
        self.backward_state[i] = (given, groups, stage_output)
        self.received[i] = given

    def backward_weight_one_chunk(self, i: int) -> None:
        """Run the backward of the weights. In the first stage this is the whole backward: its input wants no
        gradient."""
        self.memory.enter("backward", None)
        _given, groups, stage_output = self.backward_state.pop(i)
        if groups is None:
            backward(stage_output, self.hooks.after_backward, self._gradient(i))
        else:
            stage_backward_weight(groups)
        self.memory.enter("backward", None)

    def fwd_sends(self, i: int) -> list[Tensor]:
        return [] if self.last else [detached(self.fwd_cache[i][0])]

    def bwd_sends(self, i: int) -> list[Tensor]:
        if self.first:
            return []
        gradient = self.bwd_cache.pop(i)
        return [] if gradient is None else [gradient]

    def update_losses(self) -> None:
        """Replace the losses of the previous step, which the caller has held (_update_losses)."""
        for loss in self.losses.values():
            self.memory.relabel(loss.storage, (), "buffers", "loss", None)
        self.forget_losses()

    def forget_losses(self) -> None:
        """Let go of the losses of micro-batches that are not run on paper."""
        self.losses_left_out = None

    def exchange(self, i: int, j: int) -> None:
        """Exchange the tensors of two micro-batches."""
        for tensors in self._of_micro_batches():
            found = {other: tensors.pop(one) for one, other in ((i, j), (j, i)) if one in tensors}
            tensors.update(found)

    def drop(self, i: int) -> None:
        """Let go of the tensors of a micro-batch."""
        for tensors in self._of_micro_batches():
            tensors.pop(i, None)

    def _of_micro_batches(self) -> tuple[dict[int, Any], ...]:
        return self.fwd_cache, self.bwd_cache, self.backward_state, self.losses, self.received

    def update(self) -> None:
        """Update the weights, which takes the gradients, while micro-batches are in flight. What the update allocates is
        not here."""
        self.memory.enter(UPDATE, None)
        self.memory.enter("backward", None)
        self.hooks.gradients.clear()

    def reduce(self) -> None:
        self.memory.enter("backward", None)
        before = len(self.memory.sent)
        self.hooks.reduce_all()
        self.sent_once += self.memory.sent[before:]
        del self.memory.sent[before:]


def detached(tensor: Tensor) -> Tensor:
    return Tensor(tensor.storage, tensor.shape, tensor.strides, tensor.dtype)


def taken(given: Tensor) -> Tensor | None:
    """Return the gradient of a stage's input, and release it from the input."""
    if not isinstance(given.node, Constant):
        return None
    gradient, given.node.grad = given.node.grad, None
    return gradient
