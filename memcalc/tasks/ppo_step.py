"""PPO's training step of a micro-batch on paper (trl/experimental/ppo/ppo_trainer.py, `train`): each variable of the trainer's
frame is bound where the trainer binds it, and lives until it is bound again or the mini-batch is over.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from memcalc.core.dtypes import boolean, fp32, int64
from memcalc.core.ops.axes import narrow, squeeze
from memcalc.core.ops.elementwise import add, cast, like, mul, neg, over, power, scale, sub
from memcalc.core.ops.exponential import exp
from memcalc.core.ops.routing import masked_fill, sum_all
from memcalc.core.ops.selection import clamp, clamp_to, larger
from memcalc.core.tensor import Autocast, Tensor, new_tensor
from memcalc.tasks.grpo import lengths
from memcalc.tasks.log_probabilities import divided_in_place, logsumexp, selective_log_softmax
from memcalc.tasks.ppo_program import Output, given_of, policy_and_value

if TYPE_CHECKING:
    from memcalc.core.dims import Dim
    from memcalc.core.dtypes import DType
    from memcalc.families.base.module import Run


def loss(program: Any, run: Run) -> Tensor:
    """Run the forward of a micro-batch. The variables stay in the run."""
    memory = run.memory
    state = memory.autocast
    completion = lengths(run.seq, min(program.task.completion_len, run.seq.size - 1))[1]
    frame = run.variables = SimpleNamespace()
    with Autocast(memory, None):
        frame.vf_loss_max = new_tensor(memory, (run.batch, completion), fp32, "losses of the mini-batch before")
        if program.task.has_previous:
            _run_the_one_before(program, run, frame, completion, state)
        out = _forward(program, run, frame, completion, state)
        frame.loss = frame.leaves = None
        return out


def _run_the_one_before(
    program: Any, run: Run, frame: SimpleNamespace, completion: Dim, state: Autocast | None
) -> None:
    """Make the variables that the micro-batch before has left: those of a forward whose graph is gone. Nothing of its work
    counts."""
    memory = run.memory
    before = len(memory.work), len(memory.streamed)
    memory.grad_enabled = False
    frame.loss = _forward(program, run, frame, completion, state)
    frame.leaves = _leaves(program, run, frame.output.hidden_states[0])
    note(frame)
    memory.grad_enabled = True
    del memory.work[before[0] :], memory.streamed[before[1] :]


def _leaves(program: Any, run: Run, first: Tensor) -> list[Tensor]:
    """Return the outputs of the embeddings, and their gradients, that the graph before keeps because they are its leaves. The
    output may be the first of the hidden states."""
    leaves: list[Tensor] = program.policy.leaves_left_behind(run)
    is_first = run.memory.rows[first.storage.index].scope == program.policy.embedding
    return [first, *leaves[1:]] if leaves and is_first else leaves


def _forward(program: Any, run: Run, frame: SimpleNamespace, completion: Dim, state: Autocast | None) -> Tensor:
    _micro_batch(run, frame, completion, values_in=run.dtype)
    run.memory.autocast = state
    frame.output, frame.vpred_temp = policy_and_value(program, run, given_of(frame.mb_query_responses))
    run.memory.autocast = None
    return _loss(run, frame, completion)


def _micro_batch(run: Run, frame: SimpleNamespace, completion: Dim, values_in: DType) -> None:
    """Choose the micro-batch's rows of the batch: copies."""
    memory, batch = run.memory, run.batch
    memory.scope = "micro-batch"
    frame.mb_advantage = new_tensor(memory, (batch, completion), fp32, "advantages")
    frame.mb_responses = new_tensor(memory, (batch, completion), int64, "responses")
    frame.mb_query_responses = new_tensor(memory, (batch, run.seq), int64, "queries and responses")
    frame.mb_logprobs = new_tensor(memory, (batch, completion), fp32, "log-probabilities")
    frame.mb_return = new_tensor(memory, (batch, completion), fp32, "returns")
    frame.mb_values = new_tensor(memory, (batch, completion), values_in, "values")


def _loss(run: Run, f: SimpleNamespace, completion: Dim) -> Tensor:
    """Compute the losses of the policy and of the value model from their outputs."""
    memory = run.memory
    memory.enter(memory.phase, None)
    memory.scope = "loss"
    base, f.logits = divided_in_place(f.output.first, completion)
    f.output = Output(base, f.output.hidden_states, f.output.cache)
    del base
    f.new_logprobs = selective_log_softmax(f.logits, f.mb_responses)
    f.new_logprobs = masked_fill(f.new_logprobs, _mask(run, completion))
    f.vpred = squeeze(narrow(f.vpred_temp, 1, completion), 2)
    f.vpred = masked_fill(f.vpred, _mask(run, completion))
    f.vpredclipped = clamp_to(f.vpred, like(f.mb_values, "lower bound"), like(f.mb_values, "upper bound"))
    f.vf_losses1 = power(sub(f.vpred, f.mb_return), 2)
    f.vf_losses2 = power(sub(f.vpredclipped, f.mb_return), 2)
    f.vf_loss_max = larger(f.vf_losses1, f.vf_losses2)
    f.vf_loss = scale(_masked_mean(f.vf_loss_max, _not(_mask(run, completion))), "mul", "loss of the value model")
    f.vf_clipfrac = _share(f.vf_losses2, _not(_mask(run, completion)))
    f.logprobs_diff = sub(f.new_logprobs, f.mb_logprobs)
    f.ratio = exp(f.logprobs_diff)
    f.pg_losses = mul(neg(f.mb_advantage), f.ratio)
    f.pg_losses2 = mul(neg(f.mb_advantage), clamp(f.ratio, 2))
    f.pg_loss_max = larger(f.pg_losses, f.pg_losses2)
    f.pg_loss = _masked_mean(f.pg_loss_max, _not(_mask(run, completion)))
    return add(f.pg_loss, scale(f.vf_loss, "mul", "loss of the value model"))


def _mask(run: Run, completion: Dim) -> Tensor:
    return new_tensor(run.memory, (run.batch, completion), boolean, "padding")


def _not(mask: Tensor) -> Tensor:
    return like(mask, "no padding")


def _masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Compute `(values * mask).sum() / mask.sum()`."""
    total = sum_all(mul(values, mask))
    return over(total, new_tensor(mask.memory, (), int64, "number of tokens"))


def _share(a: Tensor, mask: Tensor) -> Tensor:
    """Compute the share of tokens at which one loss is above the other one: a number without a gradient."""
    memory = a.memory
    above = cast(Tensor(mask.storage, a.shape, a.strides, boolean), fp32, "clipped")
    _product = like(above, "clipped tokens")
    del above
    return new_tensor(memory, (), fp32, "share of clipped tokens")


def note(f: SimpleNamespace) -> None:
    """Compute what the trainer notes after the step, without a graph, and bind its variables."""
    memory = f.logits.memory
    memory.scope = "statistics"
    logits = f.logits
    f.pg_clipfrac = _share(f.pg_losses2, like(f.pg_losses2, "no padding", boolean))
    f.prob_dist = new_tensor(memory, logits.shape, logits.dtype, "probabilities")
    f.entropy = sub(logsumexp(logits), _mean_logit(f.prob_dist, logits))
    f.approxkl = new_tensor(memory, (), fp32, "distance from the policy before")


def _mean_logit(probabilities: Tensor, logits: Tensor) -> Tensor:
    product = mul(probabilities, logits)
    return new_tensor(product.memory, product.shape[:-1], product.dtype, "mean logits")
