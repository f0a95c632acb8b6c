"""The phases of GRPO before its training step, as runs on paper: what TRL's GRPOTrainer does without gradients
(trl/trainer/grpo_trainer.py, `_generate_single_turn` and `_generate_and_score_completions`).

Completions are generated with transformers' own `generate` (do_sample, a DynamicCache). Then the policy that has generated them,
if it is needed later, and the reference, if there is one, score them in parts of a micro-batch, with TRL's head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.core.collector import without_collections
from memcalc.core.dims import ONE_DIM, Dim, plus
from memcalc.core.dtypes import boolean, fp32, int64
from memcalc.core.ops.axes import cat_dim
from memcalc.core.ops.masked import masked_labels
from memcalc.core.rows import Row
from memcalc.core.tensor import Autocast, Memory, new_tensor
from memcalc.families.base.blocks import causal_lm_loss, lm_head_loss
from memcalc.families.base.module import Run, after_forward
from memcalc.inference.caches import DynamicCache, windows_of
from memcalc.inference.moments import Played, highest, sizes_of
from memcalc.inference.rewarding import REWARD, rewarded_rows
from memcalc.inference.steps import all_logits, last_logits, unlabelled
from memcalc.kernels import TRANSFORMERS
from memcalc.kernels.attention_on_gpu import fused_kernels, on_gpu
from memcalc.tasks.generating import keeps_old
from memcalc.tasks.program import Models, without_task
from memcalc.tasks.reference import reference_run

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from memcalc.core.dtypes import DType
    from memcalc.core.tensor import Tensor
    from memcalc.families.base.program import Program
    from memcalc.inference.caches import Cached
    from memcalc.inputs.model import Model
    from memcalc.setup.setup import Setup

GENERATE: Final = "generate"
OLD: Final = "old log-probabilities"
REFERENCE: Final = "reference log-probabilities"
WITHOUT_POSITIONS: Final = ("bloom", "mpt")
"""The types whose forward takes no position_ids, which `generate` then does not make."""


class Phase(NamedTuple):
    """A phase of a rollout at its highest moment: the blocks beside what the engine holds between steps."""

    name: str
    rows: tuple[Row, ...]

    @property
    def nbytes(self) -> int:
        return sum(row.nbytes for row in self.rows)


@without_collections()
def phases(model: Model, setup: Setup, buffer_dtype: DType | None) -> tuple[Phase, ...]:
    """Return the phases of a rollout in turn. `model` has the task; `buffer_dtype` is that of floating-point buffers, if it is
    another one than the weights'."""
    return tuple(_phases(model, setup, buffer_dtype))


def _phases(model: Model, setup: Setup, buffer_dtype: DType | None) -> Iterator[Phase]:
    yield _generate(model, setup, buffer_dtype)
    old = keeps_old(setup)
    if old:
        yield _score(model, setup, buffer_dtype, OLD, kept=0)
    if setup.beta:
        yield _score(model, setup, buffer_dtype, REFERENCE, kept=int(old))
    if setup.reward_model is not None:
        yield Phase(REWARD, rewarded_rows(setup, int(old) + bool(setup.beta)))


def _generate(model: Model, setup: Setup, buffer_dtype: DType | None) -> Phase:
    """Return the highest of the prefill, the first and the last decode step: sizes only grow after the first one."""
    own, sizes = without_task(model.program), sizes_of(setup)
    windows = windows_of(own)
    has_positions = model.model_type not in WITHOUT_POSITIONS
    first = generated(own, setup, buffer_dtype, DynamicCache(*windows), {}, has_positions=has_positions)
    runs = [first.run]
    for seen in sorted({sizes.prompt, sizes.prompt + sizes.completion - 2}):
        if seen >= sizes.prompt and sizes.completion > 1:
            cache = DynamicCache(*windows, seen)
            runs.append(generated(own, setup, buffer_dtype, cache, first.cached, has_positions=has_positions).run)
    return max((Phase(GENERATE, highest(run)) for run in runs), key=lambda phase: phase.nbytes)


class Generated(NamedTuple):
    """A forward of `generate` with what is sampled from it, and what its layers have cached."""

    run: Played
    cached: Mapping[int, Cached]


def generated(
    program: Program,
    setup: Setup,
    buffer_dtype: DType | None,
    cache: DynamicCache,
    cached: Mapping[int, Cached],
    *,
    has_positions: bool,
) -> Generated:
    """Run the forward of the prompts, or of one token behind the `cache.seen` ones before it, and choose the next tokens."""
    sizes = sizes_of(setup)
    batch = Dim("completions", sizes.together)
    tokens = ONE_DIM if cache.seen else Dim("prompt", sizes.prompt)
    so_far = Dim("tokens", cache.seen + 1 if cache.seen else sizes.prompt)
    run = begun(program, setup, buffer_dtype, batch, tokens, so_far.size + 1, replaced=True)
    memory, start = run.memory, len(run.memory.log)
    prompt = Dim("prompt", sizes.prompt)
    given = ("prompt_ids", "prompt_mask", *(("position_ids of the prompt",) if has_positions else ()))
    _given = [new_tensor(memory, (batch, prompt), int64, name) for name in given]
    _special = [new_tensor(memory, (), int64, f"{name} token") for name in ("first", "last", "padding")]
    before: Drawn | None = None
    if cache.seen:
        before = drawn(memory, batch, program.vocab, None)  # type: ignore[attr-defined]
        _input_ids = new_tensor(memory, (batch, so_far), int64, "input_ids so far")
        _longer = _positions(memory, batch, so_far, has_positions)
        cache.fill(run, cached, sizes.prompt)
        cache.fill_states(run, program, sizes.prompt)
    else:
        _longer = None
        cache.begin(run)
    _unfinished = new_tensor(memory, (batch,), int64, "sequences that go on")
    ids = [
        new_tensor(memory, (batch, tokens), int64, given.name)
        for given in map(unlabelled, program.inputs(batch, tokens))
    ]
    if has_positions:
        run.positions = new_tensor(memory, (batch, tokens), int64, "position_ids") if cache.seen else _given[-1]
    run.cache = cache
    memory.enter("forward", None)
    # accelerate wraps the forward of peft's model, and peft's generate calls the one within
    with Autocast(memory, None if run.adapters is not None else setup.autocast_dtype):
        logits = program.forward(run, *ids)
    memory.enter("sampling", None)
    memory.scope = "sampling"
    if not cache.seen:
        ids.clear()
    _longer = _positions(memory, batch, plus(so_far, 1), has_positions)
    drawn(memory, batch, logits.shape[-1], before)
    out = Played(memory, list(memory.log), start)
    return Generated(out, cache.cached)


def _positions(memory: Memory, batch: Dim, so_far: Dim, has_positions: bool) -> Tensor | None:
    """Return the positions of all tokens so far, which `generate` keeps for a model that takes them."""
    return new_tensor(memory, (batch, so_far), int64, "position_ids so far") if has_positions else None


class Drawn:
    """The variables of the loop's last step, which it holds while the next one runs."""

    __slots__ = ("next_tokens", "probs", "scores")

    def __init__(self, scores: Tensor, probs: Tensor, next_tokens: Tensor) -> None:
        self.scores, self.probs, self.next_tokens = scores, probs, next_tokens


def drawn(memory: Memory, batch: Dim, vocab: Dim, before: Drawn | None) -> Drawn:
    """Draw the next tokens: the logits in fp32, their softmax, and `torch.multinomial`, which divides it by exponential numbers
    (aten/src/ATen/native/Distributions.cpp). Each variable goes when there is a new value for it."""
    shape = (batch, vocab)
    scores = new_tensor(memory, shape, fp32, "next token logits")
    if before is not None:
        before.scores = scores
    probs = new_tensor(memory, shape, fp32, "probabilities")
    if before is not None:
        before.probs = probs
    _exponential = new_tensor(memory, shape, fp32, "exponential numbers")
    next_tokens = new_tensor(memory, (batch,), int64, "next tokens")
    return Drawn(scores, probs, next_tokens)


def _score(model: Model, setup: Setup, buffer_dtype: DType | None, name: str, kept: int) -> Phase:
    """Return the phase in which the policy or the reference scores the completions, at its highest moment. `kept` results of
    earlier phases are alive."""
    return Phase(name, highest(scored(model, setup, buffer_dtype, kept, of_reference=name == REFERENCE)))


def scored(model: Model, setup: Setup, buffer_dtype: DType | None, kept: int, *, of_reference: bool) -> Played:
    """Run `_get_per_token_logps_and_entropies` without a graph. All parts but the last one are results alone."""
    sizes, program = sizes_of(setup), model.program
    batch, micro = Dim("completions", sizes.together), Dim("batch", setup.micro_batch_size)
    prompt, completion = Dim("prompt", sizes.prompt), Dim("completion", sizes.completion)
    seq = Dim("seq", sizes.prompt + sizes.completion)
    run = begun(program, setup, buffer_dtype, micro, seq, seq.size, replaced=False)
    if of_reference:
        run.reference = reference_run(program, run)
    memory, start = run.memory, len(run.memory.log)
    _own = [new_tensor(memory, (batch, n), int64, name) for n, name in (
        (prompt, "prompt_ids"), (prompt, "prompt_mask"), (completion, "completion_ids"), (completion, "completion_mask"),
        (seq, "prompt_completion_ids"), (seq, "attention_mask"),
    )]  # fmt: skip
    _number = new_tensor(memory, (), int64, "num_items_in_batch")
    _kept = [new_tensor(memory, (batch, completion), fp32, OLD) for _ in range(kept)]
    fewer = Dim("(seq-1)", seq.size - 1)
    parts = [new_tensor(memory, (micro, fewer), fp32, "log-probabilities of a part") for _ in range(_parts(setup) - 1)]
    _outputs = (
        _of_earlier_part(memory, micro, fewer, entropy=not of_reference or run.adapters is not None) if parts else []
    )
    models = Models(program, run)  # type: ignore[arg-type]
    ids = _own[4]
    part = type(ids)(ids.storage, (micro, seq), ids.strides, ids.dtype)
    memory.enter("forward", None)
    labels = masked_labels(part, part)
    last = models.reference(part, labels) if of_reference else models.policy(part, labels, graph=False)[0]
    _logps = cat_dim((*parts, last), 1, completion)
    return Played(memory, list(memory.log), start)


def _of_earlier_part(memory: Memory, micro: Dim, fewer: Dim, *, entropy: bool) -> list[Tensor]:
    """Return what the head has returned of the part before, which its variable holds, beside the log-probabilities."""
    out = [
        new_tensor(memory, (), fp32, "mean loss"),
        new_tensor(memory, (micro, fewer), boolean, "positions with a label"),
    ]
    return [*out, new_tensor(memory, (micro, fewer), fp32, "entropies")] if entropy else out


def _parts(setup: Setup) -> int:
    return setup.steps_per_generation or 1


def begun(
    program: Program, setup: Setup, buffer_dtype: DType | None, batch: Dim, tokens: Dim, length: int, *, replaced: bool
) -> Run:
    """Return a run without autograd that holds the weights and the buffers. `replaced`: the head gives the last logits."""
    head = {lm_head_loss: last_logits, causal_lm_loss: all_logits} if replaced else {}
    kernels = on_gpu(TRANSFORMERS, fused_kernels(setup.gpu)) if setup.attention == "sdpa" else TRANSFORMERS
    memory = Memory({**dict(kernels.replaced), **head})
    memory.grad_enabled = False
    assert setup.attention is not None
    run = Run(memory, setup.compute_dtype, setup.attention, False, batch, tokens)
    run.buffer_dtype, run.adapters, run.own_dtypes = buffer_dtype, program.adapters, setup.keeps_adapter_dtype
    memory.autocast = Autocast(memory, setup.autocast_dtype) if not replaced and setup.autocast_dtype else None
    for weight in program.weights():
        run.add_weight(weight, wants_gradient=program.wants_gradient(weight))
    for buffer in after_forward(program.buffers(), length):
        run.add_buffer(buffer)
    return run
