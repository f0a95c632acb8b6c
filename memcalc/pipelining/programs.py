"""A model cut into stages: copies of the model without the layers of the other stages, as torch.distributed.pipelining
asks of its user.

A stage runs transformers' own forward over the hidden states that it receives (`inputs_embeds`). Every stage makes
positions, cos and sin, and masks. The first stage has the embedding, the last one the last norm and the head. The kind
of a layer (dense or sparse) follows from its number in the whole model. Where transformers looks up a layer's mask by
its index in the list, a stage's `config.layer_types` holds the stage's own layers.
"""

from __future__ import annotations

import copy
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any, Final

from memcalc.families.base.module import Buffer, Module, Run, Weight
from memcalc.families.base.program import Program
from memcalc.families.llama import Llama
from memcalc.megatron.schedules import Span
from memcalc.pipelining.placement import Placement, places, stages

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

    from memcalc.core.dims import Dim
    from memcalc.core.tensor import Tensor


def divided(layers: int, stages: int, first: int | None = None, last: int | None = None) -> list[int]:
    """Return the number of layers of each stage. Raises ValueError if a stage would have none.

    All stages get equally many if the layers divide. Else the split is torchtitan's (distributed/pipeline_parallel.py,
    generate_llm_fqn_per_model_part): embedding and head count as a layer each, and the first stages have one more. If
    `first` or `last` is given, the other layers are divided evenly over the other stages, and the first of these have
    one more.
    """
    if first is not None or last is not None:
        head, tail = ([] if n is None else [n] for n in (first, last))
        others, rest = stages - len(head) - len(tail), layers - sum(head) - sum(tail)
        middle = [rest // others + (i < rest % others) for i in range(others)] if others else []
        counts = [*head, *middle, *tail]
    elif layers % stages:
        each, more = divmod(layers + 2, stages)
        counts = [each + (i < more) for i in range(stages)]
        counts[0] -= 1
        counts[-1] -= 1
    else:
        counts = [layers // stages] * stages
    if min(counts) < 1 or sum(counts) != layers:
        raise ValueError(f"{layers} layers do not make {stages} stages")
    return counts


def spans(
    layers: int,
    ranks: int,
    chunks: int = 1,
    first: int | None = None,
    last: int | None = None,
    placement: Placement = "in rounds",
) -> list[list[Span]]:
    """Return the chunks of each rank, which are the model's stages at its places."""
    many = stages(placement, ranks, chunks)
    counts = divided(layers, many, first, last)
    of_all = [Span(sum(counts[:i]), n, i == 0, i == many - 1) for i, n in enumerate(counts)]
    return [[of_all[at.stage] for at in places(placement, rank, ranks, chunks)] for rank in range(ranks)]


HIDDEN_STATES: Final = "hidden states"


class Stage(Program):
    """The program of one stage without its `left_out` layers, which are counted within the stage."""

    def __init__(self, whole: Llama, span: Span, left_out: range = range(0)) -> None:
        super().__init__(whole.config)
        own: Any = copy.copy(whole)
        numbers = [span.start + i for i in range(span.layers) if i not in left_out]
        _number_layers(own, whole, numbers)
        _number_what_trains(own, whole, numbers)
        if not span.first:
            own.embed = _as_it_is
        if not span.last:
            own.after_layers = _as_it_is
        self.stage_model: Llama = own
        self.whole_model = whole
        self.span = span
        self.layers = own.layers
        self.numbered_from = span.start

    @property
    def receives(self) -> tuple[str, ...]:
        """Return what a micro-batch brings from the stage before."""
        return () if self.span.first else (HIDDEN_STATES,)

    @property
    def sends(self) -> tuple[str, ...]:
        """Return what a micro-batch brings to the next stage."""
        return () if self.span.last else (HIDDEN_STATES,)

    def without(self, left_out: range) -> Stage:
        """Return the stage without some of its layers."""
        return Stage(self.whole_model, self.span, left_out)

    def variant(self, i: int) -> Hashable:
        own = self.stage_model
        return own.variant(i), own.layer_kind(i), own.held.get(i), own.adapted(i)

    def wants_gradient(self, weight: Weight) -> bool:
        return self.stage_model.wants_gradient(weight)

    @property
    def has_frozen(self) -> bool:
        return self.stage_model.has_frozen

    def kinds_of_layers(self) -> list[tuple[list[Weight], list[int]]]:
        """Return the weights of each kind of layer, with the numbers of such layers."""
        alike: dict[Hashable, list[int]] = {}
        for i in range(self.layers):
            alike.setdefault(self.variant(i), []).append(i)
        return [(self.weights_of(layers[0]), layers) for layers in alike.values()]

    def weights_of(self, layer: int) -> list[Weight]:
        """Return the weights of a layer of the stage, its adapters among them."""
        if not self.has_frozen:
            return list(self.stage_model.layer_weights(layer))
        return [weight for weight in self._weights if weight.layer == layer]

    def weights(self) -> Iterator[Weight]:
        return iter(self._weights)

    @cached_property
    def _weights(self) -> tuple[Weight, ...]:
        span, in_embedding = self.span, self._in_embedding
        return tuple(
            weight
            for weight in self.stage_model.weights()
            if weight.layer is not None or (span.first if in_embedding(weight.name) else span.last)
        )

    def buffers(self) -> Iterator[Buffer]:
        for buffer in self.stage_model.buffers():
            if self.span.first or not self._in_embedding(buffer.name):
                yield buffer

    def _in_embedding(self, name: str) -> bool:
        """Tell whether a weight or a buffer is of the table of tokens, or of a copy of it that trains."""
        return _in_embedding(self.stage_model, name)

    def input_wants_gradient(self, *, asks: bool) -> bool:
        """Tell whether the hidden states that the stage receives require a gradient: if a weight before them does. `asks`: the
        output of the embeddings wants one in any case."""
        if self.span.first:
            return False
        if asks or not self.has_frozen:
            return True
        return _first_trained(self.whole_model) < self.span.start

    def backward_from(self, *, asks: bool) -> int | None:
        """Return the first layer of the stage that has a backward; the number of layers if only what is behind them has one,
        and None if nothing has."""
        if not self.has_frozen or asks or self.input_wants_gradient(asks=asks):
            return 0
        trained = [weight for weight in self.weights() if self.wants_gradient(weight)]
        if any(weight.layer is None and self._in_embedding(weight.name) for weight in trained):
            return 0
        return min((self.layers if weight.layer is None else weight.layer for weight in trained), default=None)

    def outputs(self, run: Run, given: Tensor) -> Tensor:
        """Return the hidden states for `given` tokens or hidden states; the last stage returns the logits."""
        root = Module(run, "")
        hidden_states = self.stage_model.model(root / "model", given)
        run.memory.enter(run.memory.phase, None)
        return self.stage_model.head(root, hidden_states) if self.span.last else hidden_states


def _in_embedding(program: Program, name: str) -> bool:
    return name.startswith(f"{type(program).embedding}.")


@lru_cache(maxsize=16)
def _first_trained(whole: Program) -> int:
    """Return the first layer of a model with a weight that trains: -1 for the embeddings, the number of layers for what is
    behind them or nothing."""
    places = (
        (-1 if _in_embedding(whole, weight.name) else whole.layers) if weight.layer is None else weight.layer
        for weight in whole.weights()
        if whole.wants_gradient(weight)
    )
    return min(places, default=whole.layers)


_OF_A_LAYER: Final = ("variant", "layer_kind", "sparse", "layer_weights", "layer_buffers")
"""The methods of a program that take a layer's number."""


def _number_layers(own: Any, whole: Any, numbers: Sequence[int]) -> None:
    """Give a copy of `whole` the layers `numbers` only, counted from 0."""

    def of(method: Callable[[int], Any], i: int) -> Any:
        return method(numbers[i])

    own.layers = len(numbers)
    for name in _OF_A_LAYER:
        if hasattr(whole, name):
            setattr(own, name, partial(of, getattr(whole, name)))
    if hasattr(whole, "kinds"):
        own.kinds = [whole.kinds[i] for i in numbers]


def _number_what_trains(own: Any, whole: Any, numbers: Sequence[int]) -> None:
    """Give a copy of `whole` what of its layers `numbers` is frozen or adapted, counted from 0."""
    if not whole.has_frozen:
        return
    own.__dict__.pop("idle", None)  # the cached count of the whole
    of_stage: dict[int | None, int | None] = {None: None, **{number: i for i, number in enumerate(numbers)}}
    own.held = {of_stage[layer]: names for layer, names in whole.held.items() if layer in of_stage}
    if whole.adapters is not None:
        own.adapters = whole.adapters.of_layers(of_stage)


def _as_it_is(_: Module, hidden_states: Tensor) -> Tensor:
    return hidden_states


def _stage(whole: Any, span: Span) -> Stage:
    """Return a stage of a stack, or of one of the stacks of an encoder and a decoder."""
    if whole.one_stack:
        return Stage(whole, span)
    from memcalc.pipelining.encoded import EncodedStage

    return EncodedStage(whole, span)  # type: ignore[return-value]


class RankProgram(Program):
    """Everything that one rank holds: its stages, which are never run as one program."""

    def __init__(self, whole: Llama, spans: Sequence[Span]) -> None:
        super().__init__(whole.config)
        self.tensor_parallel, self.context_parallel = whole.tensor_parallel, whole.context_parallel
        self.spans = tuple(spans)
        self.one_stack = whole.one_stack
        self.stages = tuple(_stage(whole, span) for span in spans)
        self.layers = sum(span.layers for span in spans)
        self.hidden: Dim = whole.hidden
        self.whole_model = whole

    def wants_gradient(self, weight: Weight) -> bool:
        return self.whole_model.wants_gradient(weight)

    @property
    def has_frozen(self) -> bool:
        return self.whole_model.has_frozen

    def between_layers(self, whole: Dim) -> Dim:
        """Return a rank's tokens of a sequence in a tensor between two layers, and so between two stages."""
        return whole if self.tensor_parallel is None else self.tensor_parallel.between_layers(whole)

    def weights(self) -> Iterator[Weight]:
        for stage in self.stages:
            for weight in stage.weights():
                yield weight if weight.layer is None else weight._replace(layer=weight.layer + stage.numbered_from)

    def buffers(self) -> Iterator[Buffer]:
        for stage in self.stages:
            yield from stage.buffers()
