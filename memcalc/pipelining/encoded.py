"""An encoder and a decoder cut into stages. No stage has layers of both.

A stage of the encoder hands on its hidden states; the last one hands on the encoder's output. Every decoder layer reads this
output, but a stage of torch.distributed.pipelining sends to the next stage alone (PipelineStage in
torch/distributed/pipelining/stage.py; what its tracing front end would send past a stage has no backward: _PipelineStage,
`_create_grad_recv_info`). So the output goes through all stages of the decoder, beside their hidden states, and its gradient
comes back the same way: each stage adds what its own layers give.

A table that several stages use has a copy in each of them. Behind the last backward the gradients of the copies are summed,
as Megatron does it (megatron/core/distributed/finalize_model_grads.py, `_allreduce_embedding_grad`): the table of tokens, and
of a T5 the table of relative positions.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from memcalc.core.dims import merge
from memcalc.core.dtypes import int64
from memcalc.core.ops.loss import cross_entropy
from memcalc.core.ops.shape import view
from memcalc.families.base.module import Input
from memcalc.families.base.program import Program
from memcalc.megatron.schedules import Span
from memcalc.pipelining.programs import HIDDEN_STATES

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

    from memcalc.core.dims import Dim, Shape
    from memcalc.core.tensor import Tensor
    from memcalc.families.base.encoder_decoder import EncoderDecoder
    from memcalc.families.base.module import Buffer, Run, Weight

ENCODED: Final = "encoder output"
COPIES: Final = "the caller; megatron/core/distributed/finalize_model_grads.py"
"""The source of the sums of gradients over copies."""


def stages_of_encoder(encoder_layers: int, decoder_layers: int, stages: int) -> int:
    """Return the number of stages that the encoder is cut into: its part of all layers, rounded, and at least one for each
    stack."""
    most = min(stages - 1, encoder_layers)
    least = max(1, stages - decoder_layers)
    return max(least, min(most, round(stages * encoder_layers / (encoder_layers + decoder_layers))))


def layers_of_stages(
    encoder_layers: int, decoder_layers: int, stages: int, encoder_stages: int | None = None
) -> list[int]:
    """Return the number of layers of each stage, the encoder's first. Raises ValueError if a stage would have none.

    The layers of a stack are divided evenly; its first stages have one more.
    """
    if stages < 2:
        raise ValueError("an encoder and a decoder make at least 2 stages")
    of_encoder = encoder_stages or stages_of_encoder(encoder_layers, decoder_layers, stages)
    counts = [*_evenly(encoder_layers, of_encoder), *_evenly(decoder_layers, stages - of_encoder)]
    if not 0 < of_encoder < stages or min(counts) < 1:
        of = f"{encoder_layers} layers of the encoder and {decoder_layers} of the decoder"
        split = f"{stages}" if encoder_stages is None else f"{of_encoder} and {stages - of_encoder}"
        raise ValueError(f"{of} do not make {split} stages")
    return counts


def _evenly(layers: int, stages: int) -> list[int]:
    each, more = divmod(layers, stages) if stages > 0 else (0, 0)
    return [each + (i < more) for i in range(stages)]


def encoded_spans(program: EncoderDecoder, stages: int, encoder_stages: int | None = None) -> list[list[Span]]:
    """Return the one chunk of each rank. Layers are numbered from the encoder's first to the decoder's last."""
    counts = layers_of_stages(program.encoder_layers, program.decoder_layers, stages, encoder_stages)
    return [[Span(sum(counts[:i]), n, i == 0, i == stages - 1)] for i, n in enumerate(counts)]


class Copy(NamedTuple):
    """A weight that several stages have."""

    weight: Weight
    stages: int


class EncodedStage(Program):
    """The program of one stage of the encoder or of the decoder, without its `left_out` layers."""

    def __init__(self, whole: EncoderDecoder, span: Span, left_out: range = range(0)) -> None:
        super().__init__(whole.config)
        self.whole_model, self.span = whole, span
        self.layers = span.layers - len(left_out)
        self.is_decoder = span.start >= whole.encoder_layers
        self.of_stack = "decoder" if self.is_decoder else "encoder"
        self.numbered_from = span.start - (whole.encoder_layers if self.is_decoder else 0)
        depth = whole.decoder_layers if self.is_decoder else whole.encoder_layers
        self.begins_stack = self.numbered_from == 0
        """True for the first stage of a stack."""
        self.ends_stack = self.numbered_from + span.layers == depth
        own: Any = copy.copy(whole)
        own.encoder_layers, own.decoder_layers = (0, self.layers) if self.is_decoder else (self.layers, 0)
        own.layers = self.layers
        for has, methods in ((self.begins_stack, whole.ends.first), (self.ends_stack, whole.ends.last)):
            for name in methods:
                if not has:
                    setattr(own, name, _AS_IT_IS[name])
        self.stage_model: Any = own

    @property
    def receives(self) -> tuple[str, ...]:
        """Return what a micro-batch brings from the stage before."""
        if self.span.first:
            return ()
        if not self.is_decoder:
            return (HIDDEN_STATES,)
        return (ENCODED,) if self.begins_stack else (HIDDEN_STATES, ENCODED)

    @property
    def sends(self) -> tuple[str, ...]:
        """Return what a micro-batch brings to the next stage."""
        if self.span.last:
            return ()
        if self.is_decoder:
            return (HIDDEN_STATES, ENCODED)
        return (ENCODED,) if self.ends_stack else (HIDDEN_STATES,)

    def batch_of(self, batch: Dim, seq: Dim) -> tuple[Input, ...]:
        """Return what the caller gives the stage of a batch."""
        own = self.whole_model.inputs(batch, seq)[0]
        first = own._replace(name=own.name.split(" (")[0])
        tokens = {"decoder_input_ids": self.is_decoder and self.begins_stack, "labels": self.span.last}
        of_tokens = (Input(name, (batch, seq), int64) for name, has in tokens.items() if has)
        return (*((first,) if self.span.first else ()), *of_tokens)

    def handed(self, name: str, batch: Dim, seq: Dim) -> Shape:
        """Return the shape of what is handed on or received under a name."""
        encoded = self.whole_model.encoded_length
        of_encoder = encoded is not None and (name == ENCODED or not self.is_decoder)
        return batch, encoded if of_encoder and encoded is not None else seq, self.whole_model.hidden

    def without(self, left_out: range) -> EncodedStage:
        """Return the stage without some of its layers."""
        return EncodedStage(self.whole_model, self.span, left_out)

    def variant(self, i: int) -> Hashable:
        copied = i == 0 and self.whole_model.ends.copied is not None
        return self.of_stack, self.begins_stack, self.ends_stack, copied

    def wants_gradient(self, weight: Weight) -> bool:
        """Tell whether a weight trains: all but those that the model itself freezes."""
        return weight.name not in self.whole_model.frozen

    @property
    def has_frozen(self) -> bool:
        return False

    def input_wants_gradient(self, *, asks: bool) -> bool:
        return not self.span.first

    def backward_from(self, *, asks: bool) -> int | None:
        return 0

    def kinds_of_layers(self) -> list[tuple[list[Weight], list[int]]]:
        """Return the weights of each kind of layer, with the numbers of such layers."""
        alike: dict[Hashable, list[int]] = {}
        for i in range(self.layers):
            alike.setdefault(self.variant(i), []).append(i)
        by_layer: dict[int, list[Weight]] = {}
        for weight in self.stage_model.weights():
            if weight.layer is not None:
                by_layer.setdefault(weight.layer, []).append(weight)
        return [(by_layer[layers[0]], layers) for layers in alike.values()]

    def weights(self) -> Iterator[Weight]:
        own, ends = list(self.stage_model.weights()), self.whole_model.ends
        root = {weight.name: weight for weight in own if weight.layer is None}
        at_first = ends.weights_of_first[self.of_stack] if self.begins_stack else ()
        at_last = ends.weights_of_last[self.of_stack] if self.ends_stack else ()
        yield from (root[name] for name in at_first)
        yield from (weight for weight in own if weight.layer is not None)
        yield from (root[name] for name in at_last if name not in at_first)

    def buffers(self) -> Iterator[Buffer]:
        if self.span.last:
            yield from self.stage_model.buffers()

    def copies(self, stages: Sequence[EncodedStage]) -> list[Copy]:
        """Return this stage's weights that other `stages` have copies of."""
        ends = self.whole_model.ends
        root = {weight.name: weight for weight in self.weights() if weight.layer is None}
        has = Counter(weight.name for stage in stages for weight in stage.weights() if weight.layer is None)
        out = [Copy(weight, has[name]) for name, weight in root.items() if has[name] > 1]
        in_this_stack = sum(stage.of_stack == self.of_stack for stage in stages)
        if ends.copied is not None and in_this_stack > 1:
            out += [
                Copy(w, in_this_stack) for w in self.weights() if w.layer == 0 and w.name.endswith(f".{ends.copied}")
            ]
        return out

    def outputs(self, run: Run, given: Tensor, encoded: Tensor | None) -> tuple[Tensor, ...]:
        """Return what the stage hands on of `given` tokens or hidden states; the last stage returns the logits."""
        own = self.stage_model
        if encoded is None:
            return (_closed(run, own.encode(run, given)),)
        if self.span.last:
            return (own.decode(run, given, encoded),)
        return _closed(run, own.decoder_layers_of(run, given, encoded)), encoded

    def loss(self, run: Run, lm_logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of the logits, as the model's own forward computes it."""
        run.memory.scope = "loss"
        logits = view(lm_logits, merge(*lm_logits.shape[:-1]), lm_logits.shape[-1])
        return cross_entropy(logits, view(labels, merge(*labels.shape)))


def _closed(run: Run, hidden_states: Tensor) -> Tensor:
    run.memory.enter(run.memory.phase, None)
    return hidden_states


def _given(_: Any, hidden_states: Tensor) -> Tensor:
    return hidden_states


def _unchanged(hidden_states: Tensor) -> Tensor:
    return hidden_states


def _placed(_: Any, hidden_states: Tensor, *_positions: Tensor) -> tuple[None, Tensor]:
    return None, hidden_states


_AS_IT_IS: Final[dict[str, Any]] = {
    "convolutions": _given,
    "embed_tokens": _given,
    "final_norm": _given,
    "before_blocks": _unchanged,
    "behind_the_norm": _unchanged,
    "placed_in_encoder": _placed,
    "placed_in_decoder": _placed,
}
"""The stand-ins for methods in a stage that does not run them."""
