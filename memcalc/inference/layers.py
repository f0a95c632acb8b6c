"""What each layer of a model keeps of the tokens that it has seen: keys and values, latents, recurrent states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from memcalc.core.dtypes import DType
    from memcalc.families.base.program import Program
    from memcalc.inputs.model import Model

Kind = Literal["full", "sliding", "chunked", "latent", "recurrent", "cross"]


class State(NamedTuple):
    """A tensor of fixed size that a layer keeps for each sequence: a convolution's last inputs, a recurrence's state."""

    name: str
    shape: tuple[int, ...]
    """The sizes without the batch."""
    dtype: DType | None
    """The dtype; None: that of the model's computation."""


class CacheLayer(NamedTuple):
    """What one layer keeps. A layer with attention and a state-space mixer has both, in one entry. A decoder's layer that
    also attends to an encoder has two entries with the same number."""

    layer: int
    """The number of the layer. Layers that keep nothing have no entry."""
    kind: Kind
    """"full": keys and values of all tokens; "sliding": of the last `window`; "chunked": sliding, with a mask of chunks (Llama 4);
    "latent": one latent for all heads of all tokens (multi-head latent attention); "recurrent": `states` alone; "cross": keys and
    values of the encoder's tokens."""
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


def cache_layers(model: Model) -> tuple[CacheLayer, ...]:
    """Return what each layer of a model keeps, in the order of the layers. Raises InputError for a model that does not
    generate."""
    raise NotImplementedError


def windows_of(program: Program) -> tuple[dict[int, int], int]:
    """Return the windows of the layers that have one, and the layer whose cache sizes the masks of full attention
    (`find_first_full_attention_index`)."""
    windows = program.cache_windows()
    attends = getattr(program, "attends", None)
    full = next((i for i in range(program.layers) if i not in windows and (attends is None or attends(i))), 0)
    return windows, full
