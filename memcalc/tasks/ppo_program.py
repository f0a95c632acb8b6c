"""The program of PPO's training step: a family's program that trains twice, as a policy and as a value model.

PolicyAndValueWrapper (trl/experimental/ppo/ppo_trainer.py) runs the value model's backbone and its score, then the policy, and
asks both for all hidden states. Neither is told to leave its cache out, so each layer also keeps its keys and values, where
they are not recomputed. The value model is never recomputed.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from memcalc.core.dims import ONE_DIM, Dim
from memcalc.core.dtypes import boolean, fp32, int64
from memcalc.core.ops.cumulative import cumsum
from memcalc.core.ops.elementwise import cast, like, of_two, record
from memcalc.core.tensor import Autocast, new_tensor
from memcalc.families.base.blocks import lm_head_loss
from memcalc.families.base.module import Module, Weight
from memcalc.families.base.program import Program
from memcalc.tasks.ppo import VALUE

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

    from memcalc.core.autograd import Node
    from memcalc.core.dtypes import DType
    from memcalc.core.tensor import Tensor
    from memcalc.families.base.module import Buffer, Input, Run
    from memcalc.tasks.ppo import Ppo


class KeptInForward:
    """A DynamicCache that a forward fills, and nobody reads: each layer joins nothing with its keys and values, which are
    copies of those that it was given. A sliding layer keeps a view of the last ones of them, and its window as a tensor."""

    seen = 0
    is_compileable = False

    def __init__(self, program: Program, run: Run) -> None:
        self.windows = program.cache_windows()
        self.numbers = [new_tensor(run.memory, (), int64, "window as a tensor") for _ in self.windows]
        self.layers: list[tuple[Tensor, Tensor]] = []

    def update(self, m: Module, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        dtype = value_states.dtype if m.memory.layer in self.windows else key_states.dtype
        pair = _copied(key_states, key_states.dtype), _copied(value_states, dtype)
        self.layers.append(pair)
        return pair

    def keys_in_mask(self, queries: Dim, *, windowed: bool) -> Dim:
        return queries

    def length_and(self, run: Run, tokens: Dim) -> None:
        return None


def _copied(states: Tensor, dtype: DType) -> Tensor:
    """Compute `torch.cat` with an empty tensor of the keys' dtype: the wider one of both is that of the copy."""
    wider = dtype if dtype.itemsize > states.dtype.itemsize else states.dtype
    out = new_tensor(states.memory, states.shape, wider, "cat")
    return record(out, _copied_backward, (states,))


def _copied_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    return grads[:1]


class Given(NamedTuple):
    """The arguments of a model."""

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor


class Output(NamedTuple):
    """The output of a model: logits, or the last hidden states without a head; all hidden states; the cache."""

    first: Tensor
    hidden_states: list[Tensor]
    cache: KeptInForward | None


class _Collecting(Program):
    """The base of the classes of a model whose hidden states are collected (transformers' utils/output_capturing.py)."""

    def call_layer(self, m: Module, hidden_states: Tensor, *rest: Any) -> Any:
        collected = m.run.hidden_states
        if collected is not None and not collected:
            collected.append(hidden_states)
        out: Any = super().call_layer(m, hidden_states, *rest)
        if collected is not None:
            collected.append(out)
        return out


class _OfPpo(Program):
    """The base of the classes of both models that train."""

    takes_losses = False
    polynomial = False
    task: Ppo
    policy: Program
    value: Program

    def weights(self) -> Iterator[Weight]:
        yield from self.policy.weights()
        yield from (weight._replace(name=VALUE + weight.name) for weight in scoring_weights(self.value))

    def wants_gradient(self, weight: Weight) -> bool:
        return weight.name.startswith(VALUE) or self.policy.wants_gradient(weight)

    def buffers(self) -> Iterator[Buffer]:
        yield from self.policy.buffers()
        yield from (buffer._replace(name=VALUE + buffer.name) for buffer in self.value.buffers())

    def inputs(self, batch: Dim, seq: Dim) -> Sequence[Input]:
        return ()

    def given(self, batch: Dim, whole: Dim) -> Sequence[Input]:
        return ()

    def pattern(self) -> None:
        """Return None: both stacks are run at their full depth."""

    def branch(self, batch: int, seq: int) -> Hashable:
        return batch, seq

    def leaves_left_behind(self, run: Run) -> list[Tensor]:
        """Return none: a mini-batch begins without a graph, and a micro-batch in it makes those of the one before."""
        return []

    def forward(self, run: Run) -> Tensor:
        from memcalc.tasks.ppo_step import loss

        return loss(self, run)


def scoring_weights(program: Program) -> Iterator[Weight]:
    """Yield the weights of a model with a score: those without a head, and the linear layer of one output."""
    hidden: Dim = program.hidden  # type: ignore[attr-defined]
    yield from (weight for weight in program.weights() if weight.component != "head")
    yield Weight("score.weight", (ONE_DIM, hidden), "head")


def given_of(query_responses: Tensor) -> Given:
    """Compute what both models are given of tokens without padding (`forward` of the trainer)."""
    attention_mask = like(query_responses, "attention_mask", boolean)
    position_ids = of_two(
        cumsum(attention_mask, 1, int64), like(attention_mask, "attention_mask as integers", int64), "position_ids"
    )
    input_ids = of_two(query_responses, like(attention_mask, "padding", boolean), "input_ids", int64)
    return Given(input_ids, attention_mask, position_ids)


def value_run(run: Run) -> Run:
    """Return the run of the value model in the memory of both: it is not recomputed, and has no adapters."""
    weights = {(name.removeprefix(VALUE), i): w for (name, i), w in run.weights.items() if name.startswith(VALUE)}
    buffers = {name.removeprefix(VALUE): tensor for name, tensor in run.buffers.items() if name.startswith(VALUE)}
    return replace(run, weights=weights, buffers=buffers, recompute=False, adapters=None, input_require_grads=False)


def scored(program: Program, run: Run, given: Given, *, caches: bool) -> tuple[Output, Tensor]:
    """Run a model with a score. Returns its output, and the score of each token."""
    output = _called(
        program, replace(run, cache=KeptInForward(program, run) if caches else None), given, _last_hidden_states
    )
    run.memory.enter(run.memory.phase, None)
    return output, Module(run, "score").linear(output.hidden_states[-1])


def with_logits(program: Program, run: Run, given: Given) -> Output:
    """Run a policy with all its logits. Layers that are recomputed are given no cache."""
    own = None if run.recompute else KeptInForward(program, run)
    return _called(program, replace(run, cache=own), given, _all_logits)


def _called(program: Program, run: Run, given: Given, head: Callable[..., Tensor]) -> Output:
    memory = run.memory
    run.positions, run.hidden_states = given.position_ids, []
    kernels, memory.kernels = memory.kernels, {**memory.kernels, lm_head_loss: head}
    try:
        first = program.forward(run, given.input_ids)
    finally:
        memory.kernels = kernels
    return Output(first, run.hidden_states, run.cache)  # type: ignore[arg-type]


def _tied(head: Module, hidden_states: Tensor) -> None:
    """Put the output of the last norm in the place of the last layer's, as transformers does."""
    collected = head.run.hidden_states
    assert collected is not None
    collected[-1] = hidden_states


def _last_hidden_states(
    head: Module, logits: Callable[[Tensor], Tensor], hidden_states: Tensor, labels: Tensor
) -> Tensor:
    _tied(head, hidden_states)
    return hidden_states


def _all_logits(head: Module, logits: Callable[[Tensor], Tensor], hidden_states: Tensor, labels: Tensor) -> Tensor:
    _tied(head, hidden_states)
    return logits(hidden_states)


def policy_and_value(program: _OfPpo, run: Run, given: Given) -> tuple[Output, Tensor]:
    """Run the wrapper's forward, in a context of autocast whose results are cast to fp32 (accelerate's prepare_model)."""
    state = run.memory.autocast
    dtype = None if state is None else state.dtype
    with Autocast(run.memory, dtype):
        of_value, values = scored(program.value, value_run(run), given, caches=True)
        output = with_logits(program.policy, run, given)
        del of_value
    if dtype is None:
        return output, values
    first = cast(output.first, fp32, "logits in fp32")
    states = [cast(x, fp32, "hidden states in fp32") for x in output.hidden_states]
    return Output(first, states, output.cache), cast(values, fp32, "values in fp32")


@cache
def _class(of: type[Program], base: type[Program]) -> type[Program]:
    return type(f"{of.__name__}{base.__name__}", (base, of), {})


def _as(program: Program, base: type[Program]) -> Any:
    own: Any = copy.copy(program)
    own.__dict__.pop("idle", None)
    own.__class__ = _class(type(program), base)
    return own


def collecting(program: Program) -> Program:
    """Return a copy of a program that collects hidden states if its run asks for them."""
    return _as(program, _Collecting)


def policy_of(program: Any) -> Any:
    """Return the program of the policy alone, of the program of PPO's step."""
    return program.policy


def with_ppo(program: Program, whole: Program, task: Ppo) -> Program:
    """Return the program of PPO's step. `whole` is the model without adapters, from which the value model is made."""
    own = _as(program, _OfPpo)
    own.policy, own.value, own.task = collecting(program), collecting(whole), task
    return own


__all__ = [
    "Given", "Output", "collecting", "given_of", "policy_and_value", "policy_of", "scored", "scoring_weights", "with_logits",
    "with_ppo",
]  # fmt: skip
