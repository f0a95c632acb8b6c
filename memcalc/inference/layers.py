"""The tensors that each layer of a model keeps of the tokens that it has seen: keys and values, latents, recurrent states.

Keys and values have the shapes in which the family's forward hands them to the cache; states are those that the family names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from memcalc.core.dims import Dim
from memcalc.core.dtypes import bf16
from memcalc.errors import InputError
from memcalc.inference.caches import DynamicCache, windows_of
from memcalc.inference.steps import Workload, prefill

if TYPE_CHECKING:
    from memcalc.core.dtypes import DType
    from memcalc.families.base.program import Program

Kind = Literal["full", "sliding", "chunked", "latent", "recurrent", "cross"]


class State(NamedTuple):
    """A tensor of fixed size that a layer keeps for each sequence: a convolution's last inputs, a recurrence's state."""

    name: str
    shape: tuple[int, ...]
    """The sizes without the batch."""
    dtype: DType | None
    """The dtype; None: that of the model's computation."""


class CacheLayer(NamedTuple):
    """The tensors that one layer keeps. A layer with attention and a state-space mixer has both, in one entry. A decoder's
    layer that also attends to an encoder has two entries with the same number."""

    layer: int
    """The number of the layer. Layers that keep nothing have no entry."""
    kind: Kind
    """The kind of what is kept. "full": keys and values of all tokens; "sliding": of the last `window`; "chunked": as
    sliding, with a mask of chunks (Llama 4); "latent": one latent of each token for all heads (multi-head latent
    attention); "recurrent": `states` alone; "cross": keys and values of the encoder's tokens."""
    kv_heads: int = 0
    """The heads of keys and values; 1 for a latent."""
    k_width: int = 0
    """The elements of one head's key; of a latent: its rank."""
    v_width: int = 0
    """The elements of one head's value; of a latent: the shared rotary part of the keys."""
    window: int | None = None
    """The tokens that a "sliding" or "chunked" layer attends to, the token itself included."""
    states: tuple[State, ...] = ()

    @property
    def elements_per_token(self) -> int:
        """Return the elements that one token adds in one sequence."""
        return self.kv_heads * (self.k_width + self.v_width)


def cache_layers(program: Program) -> tuple[CacheLayer, ...]:
    """Return what each layer of a model's program keeps, in the order of the layers."""
    if not program.one_stack:
        return _behind_encoder(program)
    windows, full = windows_of(program)
    work = Workload(bf16, program.attention_kinds[0], Dim("batch", 1), 2)
    kept = prefill(program, work, DynamicCache(windows, full)).cached
    windowed: Kind = "chunked" if getattr(program.config, "attention_chunk_size", None) else "sliding"
    out: list[CacheLayer] = []
    for i in range(program.layers):
        states = tuple(State(s.name, tuple(dim.size for dim in s.shape), s.dtype) for s in program.states(i))
        if i in kept:
            _, heads, k_width = kept[i].keys
            kind: Kind = windowed if i in windows else "latent" if program.caches_latents else "full"
            v_width = kept[i].values[2].size
            out.append(CacheLayer(i, kind, heads.size, k_width.size, v_width, windows.get(i), states))
        elif states:
            out.append(CacheLayer(i, "recurrent", states=states))
    return tuple(out)


def _behind_encoder(program: Any) -> tuple[CacheLayer, ...]:
    """Return the layers of a decoder, each with its own tokens and with the encoder's."""
    decoder = getattr(program, "decoder_cache", None)
    if decoder is None:
        raise InputError(
            "--layers: a network listed by layer does not generate, so it has no cache to size; allowed: --model"
        )
    heads, width = decoder.heads.size, decoder.head_dim.size
    kinds: tuple[Kind, ...] = ("full", "cross")
    return tuple(CacheLayer(i, kind, heads, width, width) for i in range(decoder.layers) for kind in kinds)
