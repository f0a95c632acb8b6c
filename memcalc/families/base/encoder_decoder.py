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
    from memcalc.families.base.module import Run


class Decoder(NamedTuple):
    """The caches of a decoder's layers: keys and values of its own tokens, and of the encoder's."""

    layers: int
    heads: Dim
    head_dim: Dim
    encoded: int | None = None
    """The tokens that the encoder hands on; None: as many as it is given."""
    prompted: bool = False
    """True if the prompt is the decoder's; False if it is the encoder's, and the decoder begins with one token."""


class EncoderDecoder(Program):
    """A program of two stacks. `layers` counts the layers of both."""

    decodes = False
    one_stack = False
    look_ups = 2

    def __init__(self, config: Any, encoder_layers: int, decoder_layers: int) -> None:
        super().__init__(config)
        self.encoder_layers = encoder_layers
        self.decoder_layers = decoder_layers
        self.layers = encoder_layers + decoder_layers

    @property
    def decoder_cache(self) -> Decoder:
        """Return what the decoder's layers cache."""
        raise NotImplementedError

    def pattern(self) -> tuple[int, int] | None:
        """Return None: both stacks are run at their full depth."""
        return None


def shift_tokens_right(run: Run, labels: Tensor) -> Tensor:
    """Return the decoder's input: the labels behind a start token, with padding where they are ignored."""
    run.memory.scope = "decoder input"
    shifted = new_tensor(run.memory, labels.shape, int64, "decoder input ids")
    _all_but_the_last = new_tensor(run.memory, (labels.shape[0], plus(labels.shape[1], -1)), int64, "labels")
    del _all_but_the_last
    _ignored = like(shifted, "ignored", boolean)
    return shifted
