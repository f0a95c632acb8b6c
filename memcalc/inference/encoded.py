"""Prefill and decode of a decoder behind an encoder (generation/utils.py, `_prepare_encoder_decoder_kwargs_for_generation`).

The encoder runs once, without a cache. Its output stays until the end. The first forward of the decoder keeps the encoder's
keys and values in every layer; later ones compute only those of the new token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.core.collector import without_collections
from memcalc.core.dims import ONE_DIM, Dim
from memcalc.core.dtypes import int64
from memcalc.families.base.module import Input
from memcalc.inference.caches import DynamicCache
from memcalc.inference.steps import Step, Workload, begun, sampled, unlabelled

if TYPE_CHECKING:
    from memcalc.families.base.encoder_decoder import EncoderDecoder
    from memcalc.families.base.module import Run


def decoder_prompt(program: EncoderDecoder, work: Workload) -> int:
    """Return the tokens that the decoder begins with."""
    return work.prompt if program.decoder_cache.prompted else 1


@without_collections()
def prefill(program: EncoderDecoder, work: Workload) -> Step:
    """Run the encoder, and the decoder's first tokens."""
    tokens, cache = Dim("prompt", decoder_prompt(program, work)), DynamicCache({}, None)
    run = begun(program, work, Dim("prompt", work.prompt), work.prompt)
    given = run.add_input(unlabelled(program.inputs(work.batch, run.seq)[0]))
    run.memory.enter("forward", None)
    encoded = program.encode(run, given)
    out = _decoded(program, run, tokens if tokens.size > 1 else ONE_DIM, cache, encoded)
    del encoded, given
    return out


@without_collections()
def decode(program: EncoderDecoder, work: Workload, seen: int, first: Step) -> Step:
    """Run the decoder for one new token of each sequence, after the `seen` tokens before it."""
    own, cross = DynamicCache({}, None, seen), DynamicCache({}, None, encoded_tokens(program, work))
    run = begun(program, work, ONE_DIM, work.prompt)
    given = run.add_input(unlabelled(program.inputs(work.batch, Dim("prompt", work.prompt))[0]))
    own.fill(run, first.cached, decoder_prompt(program, work))
    cross.fill(run, first.crossed, cross.seen)
    own.cross = cross.layers
    hidden = program.hidden
    encoded = run.add_input(Input("the encoder's output", (work.batch, Dim("encoded", cross.seen), hidden)))
    run.memory.enter("forward", None)
    out = _decoded(program, run, ONE_DIM, own, encoded)
    del encoded, given
    return out


def encoded_tokens(program: EncoderDecoder, work: Workload) -> int:
    """Return the tokens of the encoder's output."""
    return program.decoder_cache.encoded or work.prompt


def _decoded(program: EncoderDecoder, run: Run, tokens: Dim, cache: DynamicCache, encoded: object) -> Step:
    ids = run.add_input(Input("decoder_input_ids", (run.batch, tokens), int64))
    run.seq, run.cache = tokens, cache
    logits = program.decode(run, ids, encoded)  # type: ignore[arg-type]
    out = sampled(run, logits, cache)
    del logits, ids
    return out
