"""A step as a serving engine's attention runs it: without a tensor that has a number for each pair of tokens.

vLLM and SGLang compute attention over their pages in kernels of the FlashAttention kind, whatever transformers has for the
family; these take windows, slopes and soft caps as arguments, and write neither scores nor masks.

Sources: vllm 0.33 v1/attention/backends; sglang 0.5.23 srt/layers/attention.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memcalc.inference.heights import KV, STATE, WEIGHTS

if TYPE_CHECKING:
    from memcalc.core.tensor import StorageRow
    from memcalc.inference.steps import Step

_TOKENS: Final = ("prompt", "(prompt+1)")
"""The names of a prefill's tokens; gpt-oss joins a sink to them."""


def without_scores(step: Step) -> Step:
    """Return the step without scores of attention and masks: neither their rows nor their moments."""
    dropped = {i for i, row in enumerate(step.rows) if is_of_pairs(row)}
    kept = [(event if event >= 0 else ~event) not in dropped for event in step.log]
    before = [0]
    for one in kept:
        before.append(before[-1] + one)
    log = [event for event, one in zip(step.log, kept, strict=True) if one]
    return step._replace(log=log, segments=[(before[at], phase, layer) for at, phase, layer in step.segments])


def is_of_pairs(row: StorageRow) -> bool:
    """Tell whether a tensor has a number for each pair of tokens: two of the prompt's, or the new token and those before it."""
    if row.component in (KV, STATE, WEIGHTS):
        return False
    names = [dim.name for dim in row.shape]
    if sum(name in _TOKENS for name in names) > 1:
        return True
    return len(names) > 1 and "cached" in names[-1] and names[-2] == "1"
