"""Runs of a model on paper: the kernels that one has besides its program and sizes, and its results, each made once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from memcalc.families.base.program import Program
from memcalc.kernels import Kernels, choose
from memcalc.kernels.attention_on_gpu import fused_kernels, on_gpu

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

    from memcalc.inputs.model import Model
    from memcalc.setup.setup import Setup


def kernels_of(model: Model, setup: Setup, cross_entropy: str) -> Kernels:
    """Return the kernels that stand in for a model's own functions in a setup."""
    if setup.splits_layers:
        from memcalc.engines.parts import kernels_of_part

        own = kernels_of_part(model, setup)
        if own is not None:
            return own
    if model.task is not None:
        from memcalc.tasks.kernels import KERNELS

        kernels = KERNELS
    else:
        selective = setup.recompute == "selective"
        kernels = choose(model.model_type, setup.kernels, cross_entropy, selective=selective, liger_parts=setup.liger)
    if setup.attention == "sdpa" and setup.kernels != "megatron":
        kernels = on_gpu(kernels, fused_kernels(setup.gpu))
    if setup.packing:
        return _over_packed_rows(kernels, setup)
    if setup.has_flash_attn:
        kernels = _with_flash_attn(kernels, setup)
    if setup.cp == 1:
        return kernels
    from memcalc.kernels.ulysses import over_ranks

    return over_ranks(kernels, setup.cp)


def _over_packed_rows(kernels: Kernels, setup: Setup) -> Kernels:
    from memcalc.tasks.fine_tuned import longest_of, packing_of

    if setup.flash_attention_version == 3:
        from memcalc.kernels import flash_attention_3

        return flash_attention_3.over_packed_rows(kernels, flash_attention_3.Rows(packing_of(setup), longest_of(setup)))
    from memcalc.kernels.packed_attention import over_packed_rows

    return over_packed_rows(kernels, setup.attention or "flash", packing_of(setup))


def _with_flash_attn(kernels: Kernels, setup: Setup) -> Kernels:
    if setup.padded:
        from memcalc.kernels.unpadded_attention import without_padding

        return without_padding(kernels, setup.flash_attention_version or 2)
    if setup.flash_attention_version == 3:
        from memcalc.kernels.flash_attention_3 import with_flash_attention_3

        return with_flash_attention_3(kernels)
    from memcalc.kernels.flash_attention import rounds_tokens, with_flash_attention

    return with_flash_attention(kernels, pads=rounds_tokens(setup.seq_len))


class _OfARun(Protocol):
    """A result of a run on paper."""

    @property
    def pads_queries(self) -> bool: ...


_T = TypeVar("_T", bound=_OfARun)


def made_once(profiles: dict[Any, Any], key: tuple[Hashable, ...], seq: int, make: Callable[[], _T]) -> _T:
    """Return the result under a key of `profiles`. It is made once for all sequence lengths that the run treats alike."""
    found: dict[int | None, _T] | None = profiles.get(key)
    if found is None:
        found = profiles[key] = {}
    if None in found:
        return found[None]
    remainder = Program.remainder(seq)
    if remainder not in found:
        new = make()
        found[remainder if new.pads_queries else None] = new
        return new
    return found[remainder]


_MOST_EVENTS: Final = 10_000_000
"""The events of the logs that are kept, some 50 bytes each."""


def forget_old(profiles: dict[Any, Any], used: Mapping[tuple[Hashable, ...], int]) -> None:
    """Forget the long runs that were used longest ago, if all that are kept have too many events together. `used`: the keys
    that have just been used, with the events of their runs."""
    kept: dict[tuple[Hashable, ...], int] = profiles.setdefault("long runs", {})
    for key, events in used.items():
        kept.pop(key, None)
        kept[key] = events
    while sum(kept.values()) > _MOST_EVENTS and len(kept) > len(used):
        oldest = next(iter(kept))
        del kept[oldest]
        profiles.pop(oldest, None)
