"""The phase in which a reward model scores the completions (trl/trainer/grpo_trainer.py, `_calculate_rewards`): one forward of
all of them, prompt and completion, in inference mode. transformers makes a cache in it, as `use_cache` is on in a
configuration, and nobody reads it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memcalc.core.dims import ONE_DIM, Dim
from memcalc.core.dtypes import boolean, fp32, int32, int64
from memcalc.core.ops.elementwise import dropout, like, of_two
from memcalc.core.tensor import Memory, new_tensor
from memcalc.families.base.blocks import causal_lm_loss, lm_head_loss, own_head_loss
from memcalc.families.base.module import Module, Run, after_forward
from memcalc.inference.caches import DynamicCache, windows_of
from memcalc.inference.moments import LIFE, Played, highest, sizes_of
from memcalc.inference.steps import in_eval_mode, unlabelled
from memcalc.kernels import TRANSFORMERS
from memcalc.kernels.attention_on_gpu import fused_kernels, on_gpu
from memcalc.tasks.reward_model import SOURCE, dtype_of, reward_model, weights_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from memcalc.core.rows import Row
    from memcalc.core.tensor import Tensor
    from memcalc.setup.setup import Setup

REWARD: Final = "rewards"


def rewarded_rows(setup: Setup, kept: int) -> tuple[Row, ...]:
    """Return the rows of the highest moment. `kept`: the log-probabilities of earlier phases that are alive."""
    return tuple(row._replace(life=LIFE, source=SOURCE) for row in highest(rewarded(setup, kept)))


def rewarded(setup: Setup, kept: int) -> Played:
    """Run the forward of the reward model."""
    assert setup.reward_model is not None and setup.attention is not None
    sizes, model = sizes_of(setup), reward_model(setup.reward_model)
    batch, seq = Dim("completions", sizes.together), Dim("seq", sizes.prompt + sizes.completion)
    attention = setup.attention if setup.attention in model.program.attention_kinds else "eager"
    kernels = on_gpu(TRANSFORMERS, fused_kernels(setup.gpu)) if attention == "sdpa" else TRANSFORMERS
    head = {lm_head_loss: _scored, own_head_loss: _scored, causal_lm_loss: _not_reached, dropout: in_eval_mode}
    memory = Memory({**dict(kernels.replaced), **head})
    memory.grad_enabled = False
    run = Run(memory, dtype_of(setup, model), attention, False, batch, seq)
    for weight in weights_of(model):
        run.add_weight(weight, wants_gradient=False)
    for buffer in after_forward(model.program.buffers(), seq.size):
        run.add_buffer(buffer)
    start = len(memory.log)
    prompt, completion = Dim("prompt", sizes.prompt), Dim("completion", sizes.completion)
    _own = [new_tensor(memory, (batch, n), int64, name) for n, name in (
        (prompt, "prompt_ids"), (prompt, "prompt_mask"), (completion, "completion_ids"), (completion, "completion_mask"),
        (seq, "prompt_completion_ids"), (seq, "attention_mask"),
    )]  # fmt: skip
    _number = new_tensor(memory, (), int64, "num_items_in_batch")
    _kept = [new_tensor(memory, (batch, completion), fp32, "log-probabilities") for _ in range(kept)]
    _rewards = new_tensor(memory, (batch, ONE_DIM), fp32, "rewards")
    ids = [
        new_tensor(memory, (batch, seq), int64, given.name)
        for given in map(unlabelled, model.program.inputs(batch, seq))
    ]
    _mask = new_tensor(memory, (batch, seq), int64, "attention_mask of the reward model")
    run.cache = DynamicCache(*windows_of(model.program))
    run.cache.begin(run)
    memory.enter("forward", None)
    model.program.forward(run, *ids)
    return Played(memory, list(memory.log), start)


def _scored(head: Module, logits: Callable[[Tensor], Tensor], hidden_states: Tensor, labels: Tensor) -> Tensor:
    """Return the score of each sequence's last token (GenericForSequenceClassification.forward)."""
    run = head.run
    run.memory.scope = "score"
    scores = Module(run, "score").linear(hidden_states)
    _non_pad_mask = _as_int32(like(labels, "no padding", boolean))
    _token_indices = new_tensor(run.memory, (run.seq,), int32, "positions")
    _product = of_two(_token_indices, _non_pad_mask, "positions of tokens", int32)
    _last = new_tensor(run.memory, (run.batch,), int64, "last tokens")
    del _product
    _sequences = new_tensor(run.memory, (run.batch,), int64, "sequences")
    return new_tensor(run.memory, (run.batch, ONE_DIM), scores.dtype, "scores of the last tokens")


def _as_int32(mask: Tensor) -> Tensor:
    return like(mask, "no padding", int32)


def _not_reached(run: Run, logits: Tensor, labels: Tensor) -> Tensor:
    raise AssertionError("a reward model has no language-model head")
