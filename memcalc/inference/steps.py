"""A prefill and a decode step on paper: the family's own forward without autograd, with a cache, and the last logits.

    with torch.no_grad():
        out = model(input_ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        next_token_logits = out.logits[:, -1, :].to(copy=True, dtype=torch.float32)
        next_tokens = torch.argmax(next_token_logits, dim=-1)

as transformers' greedy search does it (generation/utils.py, `_sample`), for prompts of equal length without a padding mask.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from memcalc.core.collector import without_collections
from memcalc.core.dims import ONE_DIM, Dim
from memcalc.core.dtypes import fp32, int64
from memcalc.core.ops.axes import narrow
from memcalc.core.ops.elementwise import dropout
from memcalc.core.tensor import Memory, StorageRow, new_tensor
from memcalc.families.base.blocks import causal_lm_loss, lm_head_loss, own_head_loss
from memcalc.families.base.module import Input, Run, after_forward
from memcalc.inference.caches import Cached, DynamicCache

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from memcalc.core.dtypes import DType
    from memcalc.core.tensor import Sent, Streamed, Tensor, Work
    from memcalc.families.base.module import Module
    from memcalc.families.base.program import Program


class Step(NamedTuple):
    """The log of one step (`memcalc.core.tensor.Memory`), and what its layers have cached."""

    log: list[int]
    rows: list[StorageRow]
    segments: list[tuple[int, str, int | None]]
    """The places in the log at which another phase or layer begins."""
    cached: Mapping[int, Cached]
    work: Sequence[Work] = ()
    """The products of matrices."""
    streamed: Sequence[Streamed] = ()
    """The other kernels."""
    sent: Sequence[Sent] = ()
    """The collectives."""
    crossed: Mapping[int, Cached] = MappingProxyType({})
    """The keys and values of the encoder's tokens that a decoder's layers have cached."""


class Workload(NamedTuple):
    """A run's dtype, attention and sizes."""

    dtype: DType
    attention: str
    batch: Dim
    prompt: int


@without_collections()
def prefill(program: Program, work: Workload, cache: DynamicCache) -> Step:
    """Run the forward of the prompts, which fills the cache."""
    return _run(program, work, Dim("prompt", work.prompt), cache, {})


@without_collections()
def decode(program: Program, work: Workload, cache: DynamicCache, cached: Mapping[int, Cached]) -> Step:
    """Run the forward of one new token of each sequence, after the `cache.seen` tokens before it."""
    return _run(program, work, ONE_DIM, cache, cached)


def _run(program: Program, work: Workload, tokens: Dim, cache: DynamicCache, cached: Mapping[int, Cached]) -> Step:
    run = begun(program, work, tokens, cache.seen + tokens.size)
    if cache.seen:
        cache.fill(run, cached, work.prompt)
        cache.fill_states(run, program, work.prompt)
    else:
        cache.begin(run)
    batch_of = [run.add_input(unlabelled(given)) for given in program.inputs(work.batch, tokens)]
    run.cache = cache
    run.memory.enter("forward", None)
    logits = program.forward(run, *batch_of)
    out = sampled(run, logits, cache)
    del logits, batch_of
    return out


def unlabelled(given: Input) -> Input:
    """Return an input without the words that it is also the labels."""
    return given._replace(name=given.name.split(" (")[0])


def begun(program: Program, work: Workload, tokens: Dim, length: int) -> Run:
    """Return a run without autograd that holds the weights, and the buffers that modules keep for sequences of `length`
    tokens."""
    memory = Memory(
        {lm_head_loss: last_logits, own_head_loss: last_logits, causal_lm_loss: all_logits, dropout: in_eval_mode}
    )
    memory.grad_enabled = False
    run = Run(memory, work.dtype, work.attention, False, work.batch, tokens)
    run.tensor_parallel = program.tensor_parallel
    for weight in program.weights():
        run.add_weight(weight, wants_gradient=False)
    for buffer in after_forward(program.buffers(), length):
        run.add_buffer(buffer)
    return run


def sampled(run: Run, logits: Tensor, cache: DynamicCache) -> Step:
    """Choose the next tokens, and return the step up to here, with what the caller holds."""
    memory = run.memory
    memory.enter("sampling", None)
    memory.scope = "sampling"
    next_token_logits = new_tensor(memory, (run.batch, logits.shape[-1]), fp32, "next token logits")
    next_tokens = new_tensor(memory, (run.batch,), int64, "next tokens")
    noted = memory.work, memory.streamed, memory.sent
    out = Step(list(memory.log), memory.rows, memory.segments, cache.cached, *noted, cache.crossed)
    del next_token_logits, next_tokens
    return out


def last_logits(head: Module, logits: Callable[[Tensor], Tensor], hidden_states: Tensor, labels: Tensor) -> Tensor:
    """Return the logits of each sequence's last token (`logits_to_keep=1`)."""
    return logits(narrow(hidden_states, 1, ONE_DIM))


def in_eval_mode(x: Tensor, p: float) -> Tensor:
    """Run dropout in `model.eval()`: return x."""
    return x


def all_logits(run: Run, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the logits, which the model has computed of all tokens."""
    return logits
