"""The phases of PPO before its training steps, as runs on paper: what TRL's PPOTrainer does without gradients
(trl/experimental/ppo/ppo_trainer.py, `batch_generation` and the loop behind it).

Completions are generated in parts of a rollout batch, with transformers' own `generate`, which is asked for the scores of all
steps: fp32 numbers for each word. Then the reference, the value model and the reward model run over each part. No phase is
within autocast: accelerate wraps the forward of policy and value model alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from memcalc.core.collector import without_collections
from memcalc.core.dims import ONE_DIM, Dim, plus
from memcalc.core.dtypes import boolean, fp32, int64
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.families.base.module import after_forward
from memcalc.inference.caches import DynamicCache, windows_of
from memcalc.inference.moments import LIFE, Played, highest, sizes_of
from memcalc.inference.rollout import WITHOUT_POSITIONS, Phase, begun
from memcalc.inference.steps import unlabelled
from memcalc.tasks.log_probabilities import divided_in_place, selective_log_softmax
from memcalc.tasks.ppo import SOURCE
from memcalc.tasks.ppo_blocks import Batch, last_blocks, stale_blocks
from memcalc.tasks.ppo_program import given_of, policy_of, scored, scoring_weights, with_logits
from memcalc.tasks.reference import SwitchedOff

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from memcalc.core.dtypes import DType
    from memcalc.core.rows import Row
    from memcalc.core.tensor import Memory
    from memcalc.families.base.module import Run
    from memcalc.families.base.program import Program
    from memcalc.inference.caches import Cached
    from memcalc.inputs.model import Model
    from memcalc.setup.setup import Setup

GENERATE: Final = "generate"
SCORE: Final = "score"
WITHOUT_FIRST: Final = ("qwen2", "qwen3")
"""The types whose configuration has no first token (`bos_token_id`) where it names none."""


@without_collections()
def phases(model: Model, setup: Setup, buffer_dtype: DType | None) -> tuple[Phase, ...]:
    """Return the phases of a rollout in turn. `model` has the task."""
    generate = max((_rows(run) for run in _generations(model, setup, buffer_dtype)), key=_bytes)
    score = max((_rows(run) for run in _scores(model, setup, buffer_dtype)), key=_bytes)
    return Phase(GENERATE, generate), Phase(SCORE, score)


def _rows(run: Played) -> tuple[Row, ...]:
    return tuple(row._replace(life=LIFE, source=SOURCE) for row in highest(run))


def _bytes(rows: tuple[Row, ...]) -> int:
    return sum(row.nbytes for row in rows)


# --- generation


def _generations(model: Model, setup: Setup, buffer_dtype: DType | None) -> Iterator[Played]:
    """Yield the runs that may have the peak: of the last whole part and of a shorter one behind it the prompts' forward and the
    last token's, and what joins all parts."""
    b = Batch(setup)
    shorter = b.last.size < b.chunk.size
    whole = b.chunks - shorter
    for before, rows in ((whole - 1, b.chunk), *(((whole, b.last),) if shorter else ())):
        if not rows.size or before < 0:
            continue
        generation = _Generation(model, setup, buffer_dtype, before, rows)
        yield generation.prompts()
        yield generation.last_token()
    yield _joined(model, setup, buffer_dtype)


class _Generation:
    """The generation of one part: `rows` sequences, behind `before` whole parts."""

    def __init__(self, model: Model, setup: Setup, buffer_dtype: DType | None, before: int, rows: Dim) -> None:
        self.program: Any = policy_of(model.program)
        self.vocab: Dim = self.program.vocab
        self.setup, self.buffer_dtype, self.before, self.rows = setup, buffer_dtype, before, rows
        self.sizes = sizes_of(setup)
        self.has_positions = model.model_type not in WITHOUT_POSITIONS
        self.cached: Mapping[int, Cached] = {}
        has_first = (model.fields or {}).get("bos_token_id", model.model_type not in WITHOUT_FIRST) not in (None, False)
        self.special = ("first", "padding") if has_first else ("padding",)

    def _begun(self, tokens: Dim, length: int) -> tuple[Run, list[Tensor], int]:
        """Return a run with what the trainer holds, these tensors, and the place in the log from which they count."""
        run = begun(self.program, self.setup, self.buffer_dtype, self.rows, tokens, length, replaced=True)
        memory, b = run.memory, Batch(self.setup)
        memory.autocast = None
        start = len(memory.log)
        held = _held(memory, self.setup, self.vocab)
        for _ in range(self.before):
            held.append(new_tensor(memory, (b.chunk, b.seq), int64, "queries and responses of a part"))
            held.append(new_tensor(memory, (b.chunk, b.completion, self.vocab), fp32, "scores of a part"))
        prompt = self.rows, b.prompt
        held.append(new_tensor(memory, prompt, boolean, "mask of the prompts"))
        held.append(new_tensor(memory, prompt, int64, "prompt_ids"))
        if self.has_positions:
            held.append(new_tensor(memory, prompt, int64, "position_ids of the prompt"))
        held += [new_tensor(memory, (), int64, f"{name} token") for name in self.special]
        return run, held, start

    def prompts(self) -> Played:
        """Run the forward of the prompts, and draw the first token."""
        b, cache = Batch(self.setup), DynamicCache(*windows_of(self.program))
        run, held, start = self._begun(b.prompt, b.prompt.size + 1)
        memory = run.memory
        cache.begin(run)
        _unfinished = new_tensor(memory, (self.rows,), int64, "sequences that go on")
        ids = self._ids(run, b.prompt)
        if self.has_positions:
            run.positions = held[-1 - len(self.special)]
        logits = self._logits(run, cache, ids)
        ids.clear()
        _longer = self._so_far(memory, plus(b.prompt, 1))
        _drawn(memory, self.rows, logits.shape[-1], None)
        self.cached = cache.cached
        return Played(memory, list(memory.log), start)

    def last_token(self) -> Played:
        """Run the forward of the last token but one and draw the last one, then join the scores of all tokens."""
        b = Batch(self.setup)
        steps = b.completion.size
        seen = b.prompt.size + steps - 2
        cache = DynamicCache(*windows_of(self.program), seen if steps > 1 else 0)
        so_far = Dim("tokens", b.prompt.size + steps - 1)
        run, held, start = self._begun(ONE_DIM if steps > 1 else b.prompt, so_far.size + 1)
        memory = run.memory
        scores = [new_tensor(memory, (self.rows, self.vocab), fp32, "scores of a token") for _ in range(steps - 1)]
        before = _drawn(memory, self.rows, self.vocab, None, scores=[]) if steps > 1 else None
        _input_ids = new_tensor(memory, (self.rows, so_far), int64, "input_ids so far") if steps > 1 else None
        longer = self._so_far(memory, so_far) if steps > 1 else None
        if steps > 1:
            cache.fill(run, self.cached, b.prompt.size)
        else:
            cache.begin(run)
        _unfinished = new_tensor(memory, (self.rows,), int64, "sequences that go on")
        ids = self._ids(run, run.seq)
        if self.has_positions:
            run.positions = (
                new_tensor(memory, (self.rows, ONE_DIM), int64, "position_ids")
                if steps > 1
                else held[-1 - len(self.special)]
            )
        logits = self._logits(run, cache, ids)
        longer = self._so_far(memory, plus(so_far, 1))
        last = _drawn(memory, self.rows, logits.shape[-1], before, scores=scores)
        del logits, last, before, longer, _unfinished, _input_ids
        _sequences = new_tensor(memory, (self.rows, plus(so_far, 1)), int64, "sequences")
        ids.clear()
        run.positions = None
        del held[-len(self.special) - self.has_positions :]  # the positions of the prompt, and special tokens
        _stacked = new_tensor(memory, (self.rows, b.completion, self.vocab), fp32, "scores of a part")
        _responses = new_tensor(memory, (self.rows, b.seq), int64, "queries and responses of a part")
        return Played(memory, list(memory.log), start)

    def _ids(self, run: Run, tokens: Dim) -> list[Tensor]:
        given = map(unlabelled, self.program.inputs(self.rows, tokens))
        return [new_tensor(run.memory, (self.rows, tokens), int64, one.name) for one in given]

    def _logits(self, run: Run, cache: DynamicCache, ids: list[Tensor]) -> Tensor:
        memory = run.memory
        run.cache = cache
        memory.enter("forward", None)
        logits = self.program.forward(run, *ids)
        memory.enter("sampling", None)
        memory.scope = "sampling"
        return logits

    def _so_far(self, memory: Memory, tokens: Dim) -> Tensor | None:
        """Return the positions of all tokens so far, which `generate` keeps for a model that takes them."""
        return new_tensor(memory, (self.rows, tokens), int64, "position_ids so far") if self.has_positions else None


class _Drawn:
    """The variables of the loop's last step, which it holds while the next one runs."""

    __slots__ = ("logits", "next_tokens", "probs", "scores")

    def __init__(self, logits: Tensor, scores: list[Tensor], probs: Tensor, next_tokens: Tensor) -> None:
        self.logits, self.scores, self.probs, self.next_tokens = logits, scores, probs, next_tokens


def _drawn(memory: Memory, rows: Dim, vocab: Dim, before: _Drawn | None, scores: list[Tensor] | None = None) -> _Drawn:
    """Draw the next tokens: the logits in fp32, the logits divided by the temperature, which are the scores, their softmax, and
    the exponential numbers of `torch.multinomial`. An empty list of scores stands for those that the caller has."""
    shape = (rows, vocab)
    logits = new_tensor(memory, shape, fp32, "next token logits")
    if before is not None:
        before.logits = logits
    kept = [] if scores is None else scores
    if scores is None or scores or before is not None:
        kept.append(new_tensor(memory, shape, fp32, "scores of a token"))
    probs = new_tensor(memory, shape, fp32, "probabilities")
    if before is not None:
        before.probs = probs
    _exponential = new_tensor(memory, shape, fp32, "exponential numbers")
    next_tokens = new_tensor(memory, (rows,), int64, "next tokens")
    return _Drawn(logits, kept, probs, next_tokens)


def _held(memory: Memory, setup: Setup, vocab: Dim) -> list[Tensor]:
    """Allocate what the trainer has left of the iteration before, and the prompts of this one."""
    b = Batch(setup)
    blocks = [*stale_blocks(setup, vocab, setup.compute_dtype), *last_blocks(setup)]
    left = [block for block in blocks if block[0] != "prompts' mask"]
    prompts = [(name, (b.local, b.prompt), int64) for name in ("prompts of this batch", "prompts' mask of this batch")]
    return [new_tensor(memory, shape, dtype, name) for name, shape, dtype in (*left, *prompts)]


def _joined(model: Model, setup: Setup, buffer_dtype: DType | None) -> Played:
    """Put the parts into one tensor each (`pad`): the scores of all tokens exist twice."""
    program: Any = policy_of(model.program)
    b, vocab = Batch(setup), program.vocab
    run = begun(program, setup, buffer_dtype, b.chunk, b.seq, b.seq.size, replaced=True)
    memory, start = run.memory, len(run.memory.log)
    _trainers = _held(memory, setup, vocab)
    parts = [b.chunk] * (b.chunks - 1) + [b.last]
    _responses = [new_tensor(memory, (rows, b.seq), int64, "queries and responses of a part") for rows in parts]
    _scores = [new_tensor(memory, (rows, b.completion, vocab), fp32, "scores of a part") for rows in parts]
    _all_responses = new_tensor(memory, (b.padded, b.seq), int64, "queries and responses of this batch")
    _all_scores = new_tensor(
        memory, (b.padded, b.completion, vocab), fp32, "logits of all responses' tokens of this batch"
    )
    return Played(memory, list(memory.log), start)


# --- scores


def _scores(model: Model, setup: Setup, buffer_dtype: DType | None) -> Iterator[Played]:
    """Yield the runs of the first part, which finds what the iteration before has left, of the last whole part, which finds the
    results of earlier ones, and of a shorter one behind it."""
    b = Batch(setup)
    shorter = b.last.size < b.chunk.size
    whole = b.chunks - shorter
    for before in sorted({0, whole - 1}) if whole else ():
        yield _part(model, setup, buffer_dtype, before, b.chunk)
    if shorter:
        yield _part(model, setup, buffer_dtype, whole, b.last)


def _part(model: Model, setup: Setup, buffer_dtype: DType | None, before: int, rows: Dim) -> Played:
    """Run the log-probabilities of a part, the reference, the value model and the reward model."""
    program: Any = model.program
    b, whole = Batch(setup), program.value
    run = begun(program.policy, setup, buffer_dtype, rows, b.seq, b.seq.size, replaced=False)
    memory = run.memory
    memory.autocast = None
    other = run if run.adapters is None else _other(whole, run, b.seq)
    other.add_weight(list(scoring_weights(whole))[-1])
    reference = (
        run if run.adapters is None else replace(run, adapters=SwitchedOff(run.adapters), recompute=_recomputes(setup))
    )
    start = len(memory.log)
    held = _held_while_scoring(memory, setup, program.vocab, before)
    responses = new_tensor(memory, (b.padded, b.seq), int64, "queries and responses")
    logits = new_tensor(memory, (b.padded, b.completion, program.vocab), fp32, "logits of all responses' tokens")
    query_response = Tensor(responses.storage, (rows, b.seq), responses.strides, int64)
    response = Tensor(responses.storage, (rows, b.completion), responses.strides, int64)
    of_part = Tensor(logits.storage, (rows, b.completion, program.vocab), logits.strides, fp32)
    memory.enter("forward", None)
    memory.scope = "log-probabilities"
    _logprob = selective_log_softmax(of_part, response)
    output = with_logits(program.policy if run.adapters is not None else whole, reference, given_of(query_response))
    memory.enter("forward", None)
    memory.scope = "reference log-probabilities"
    _base, ref_logits = divided_in_place(output.first, b.completion)
    _ref_logprob = selective_log_softmax(ref_logits, response)
    del output, _base, ref_logits
    memory.scope = "rewards"
    held.pop(_OF_PART[0], None)  # until now that of the iteration before
    postprocessed = new_tensor(memory, (rows, b.seq), int64, _OF_PART[1])
    held.pop(_OF_PART[1], None)  # until now that of the part before
    _length = new_tensor(memory, (rows,), int64, "lengths of responses")
    del held["lengths of responses"]
    _value = _reward(whole, other, query_response)
    _score = _reward(whole, other, postprocessed)
    return Played(memory, list(memory.log), start)


_OF_PART: Final = ("queries and responses", "queries and postprocessed responses")


def _recomputes(setup: Setup) -> bool:
    """Tell whether the policy's layers are in checkpoints, which are given no cache."""
    return setup.recompute == "full"


def _other(program: Program, run: Run, seq: Dim) -> Run:
    """Return the run of a model without adapters in the memory of another one's, with its weights and buffers."""
    own = replace(run, weights={}, buffers={}, adapters=None, own_dtypes=False)
    for weight in program.weights():
        own.add_weight(weight, wants_gradient=False)
    for buffer in after_forward(program.buffers(), seq.size):
        own.add_buffer(buffer)
    return own


def _reward(program: Program, run: Run, tokens: Tensor) -> Tensor:
    """Run `get_reward`. Returns the score of each token."""
    run.memory.enter("forward", None)
    given = given_of(tokens)
    _output, scores = scored(program, run, given, caches=False)
    run.memory.enter("forward", None)
    run.memory.scope = "rewards"
    return scores


def _held_while_scoring(memory: Memory, setup: Setup, vocab: Dim, before: int) -> dict[str, Tensor | list[Tensor]]:
    """Allocate what the trainer has left of the iteration before, the prompts of this one, and the results of earlier parts."""
    b, dtype = Batch(setup), setup.compute_dtype
    gone = ("prompts", "prompts' mask", "logits of all responses' tokens")
    of_part = (*_OF_PART, "lengths of responses", "lengths of sequences")
    held: dict[str, Tensor | list[Tensor]] = {}
    for i, (name, shape, own) in enumerate((*stale_blocks(setup, vocab, dtype), *last_blocks(setup))):
        if name not in gone and not (before and name in of_part):
            held[name if name in of_part else f"{name} {i}"] = new_tensor(memory, shape, own, name)
    for name in ("prompts of this batch", "prompts' mask of this batch"):
        held[name] = new_tensor(memory, (b.local, b.prompt), int64, name)
    if before:
        held[_OF_PART[1]] = new_tensor(memory, (b.chunk, b.seq), int64, _OF_PART[1])
        held["lengths of sequences"] = new_tensor(memory, (b.chunk,), int64, "lengths of sequences")
        held["lengths of responses"] = []
    results = (
        ("log-probabilities of a part", b.completion, fp32), ("reference log-probabilities of a part", b.completion, dtype),
        ("values of a part", b.seq, dtype),
    )  # fmt: skip
    for i in range(before):
        held[f"part {i}"] = [
            *(new_tensor(memory, (b.chunk, tokens), own, name) for name, tokens, own in results),
            new_tensor(memory, (b.chunk,), int64, "lengths of responses of a part"),
            new_tensor(memory, (b.chunk,), dtype, "scores of a part"),
        ]
    return held


__all__ = ["GENERATE", "SCORE", "phases"]
