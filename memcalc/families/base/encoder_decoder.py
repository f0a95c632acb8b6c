"""The common parts of models with an encoder and a decoder: two stacks, and labels that are also the decoder's
input."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from memcalc.core.dims import Dim, plus
from memcalc.core.dtypes import boolean, int64
from memcalc.core.ops.elementwise import like
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.families.base.program import Program

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from memcalc.families.base.module import Module, Run


class Decoder(NamedTuple):
    """The caches of a decoder's layers: keys and values of its own tokens, and of the encoder's."""

    layers: int
    heads: Dim
    head_dim: Dim
    encoded: int | None = None
    """The tokens that the encoder hands on; None: as many as it is given."""
    prompted: bool = False
    """True if the prompt is the decoder's; False if it is the encoder's, and the decoder begins with one token."""


class Ends(NamedTuple):
    """The methods and weights that only the first or the last stage of a stack has."""

    first: tuple[str, ...]
    """The methods that the first stage of a stack runs."""
    last: tuple[str, ...]
    """The methods that the last stage of a stack runs."""
    weights_of_first: Mapping[str, Sequence[str]]
    """The weights of the first stage of each stack, in the order of its module's."""
    weights_of_last: Mapping[str, Sequence[str]]
    copied: str | None = None
    """The weight of a stack's first layer of which each stage's first layer has a copy."""


class EncoderDecoder(Program):
    """A program of two stacks. `layers` counts the layers of both."""

    hidden: Dim
    """The width of the encoder's output."""
    one_stack = False
    look_ups = 2

    def __init__(self, config: Any, encoder_layers: int, decoder_layers: int) -> None:
        super().__init__(config)
        self.encoder_layers = encoder_layers
        self.decoder_layers = decoder_layers
        self.layers = encoder_layers + decoder_layers

    @property
    def encoded_length(self) -> Dim | None:
        """Return the tokens of the encoder's output; None: as many as it is given."""
        return None

    @property
    def decoder_cache(self) -> Decoder:
        """Return what the decoder's layers cache."""
        raise NotImplementedError

    def encode(self, run: Run, given: Tensor) -> Tensor:
        """Run the encoder of what it is given, as `generate` does before all else."""
        raise NotImplementedError

    def decode(self, run: Run, ids: Tensor, encoded: Tensor) -> Tensor:
        """Return the logits of the decoder's tokens, given the encoder's output."""
        raise NotImplementedError

    @property
    def ends(self) -> Ends:
        """Return the methods and weights that only the first or the last stage of a stack has."""
        raise NotImplementedError

    def decoder_layers_of(self, run: Run, given: Tensor, encoded: Tensor) -> Tensor:
        """Return the decoder's hidden states, without logits."""
        raise NotImplementedError

    def pattern(self) -> tuple[int, int] | None:
        """Return None: both stacks are run at their full depth."""
        return None


def keys_and_values(
    m: Module, key_value_states: Tensor | None, project: Callable[[], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Return the keys and values that an attention's `project` computes, and with a cache those of earlier tokens too. The
    keys and values of the encoder's tokens are computed once."""
    cache = m.run.cache
    if cache is None:
        return project()
    if key_value_states is None:
        return m.cached(*project())
    kept = cache.encoded(m)
    return cache.encode(m, *project()) if kept is None else kept


def shift_tokens_right(run: Run, labels: Tensor) -> Tensor:
    """Return the decoder's input: the labels behind a start token, with padding where they are ignored."""
    run.memory.scope = "decoder input"
    shifted = new_tensor(run.memory, labels.shape, int64, "decoder input ids")
    _all_but_the_last = new_tensor(run.memory, (labels.shape[0], plus(labels.shape[1], -1)), int64, "labels")
    del _all_but_the_last
    _ignored = like(shifted, "ignored", boolean)
    return shifted
