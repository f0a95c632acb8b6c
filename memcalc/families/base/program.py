"""What every family's program is: weights, buffers, a stack of layers and a `forward()`."""

from __future__ import annotations

from collections import Counter
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, Protocol

from memcalc.core.dims import Dim
from memcalc.core.dtypes import fp32, int64
from memcalc.core.ops.attention import ALIGNED_QUERIES
from memcalc.families.base.module import Input, Weight

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence

    from memcalc.core.dims import Shape
    from memcalc.core.dtypes import DType
    from memcalc.core.tensor import Tensor
    from memcalc.families.base.config import FamilyConfig
    from memcalc.families.base.module import Buffer, Module, Run
    from memcalc.layout.tensor_parallel import TensorParallel


class SharedSequences(Protocol):
    """How one of the ranks that share sequences is given its tokens, and makes its loss."""

    def own(self, shard: Dim) -> Dim:
        """The rank's tokens of a sequence, where a run's sizes are polynomials in `shard`."""
        ...

    def inputs(self, batch: Dim, own: Dim) -> Sequence[Input]:
        """What the caller gives a rank that has `own` tokens of each sequence."""
        ...

    @property
    def ranks(self) -> int: ...

    def give(self, run: Run) -> Tensor:
        """Allocate that: the ids. The run gets its positions and labels."""
        ...

    def loss(self, run: Run, loss: Tensor) -> Tensor:
        """What backward begins with, of the rank's own loss."""
        ...


class Program:
    """One model type's training forward, on paper. A subclass sets `layers` and `max_seq_len` and writes the rest."""

    Config: type[FamilyConfig]
    attention_kinds: tuple[str, ...] = ("sdpa", "eager")
    """What transformers offers for it, its default first."""
    recomputes: bool = True
    """Whether transformers can recompute its layers in backward (`supports_gradient_checkpointing`), as is written out."""
    routed: tuple[int, int] = (1, 1)
    """Experts that a token is sent to, and routed experts."""
    embedding: str = "model.embed_tokens"
    """The module that looks tokens up, whose weight the logits are made with where it is tied."""
    unembedding: str = "lm_head"
    """The module that makes the logits."""
    layers: int
    layer: Any
    """The forward of one layer, a method."""
    max_seq_len: int | None
    positions_limit: int | None = None
    """The longest sequence that its tables have positions for; None without tables."""
    pads: bool = True
    """Whether its masks and positions are written out for a batch with a padding mask."""
    one_stack: bool = True
    """Whether all layers are one stack, so that a number says which one is meant."""
    layers_share: bool = False
    """Whether a layer uses weights of another one."""
    has_sequence: bool = True
    """Whether its batch is sequences, so that their length means something."""
    autocasts: bool = True
    """Whether its ops are on autocast's lists as torch has them."""
    loss_dtype: DType | None = fp32
    """The dtype of the loss; None is the model's."""
    polynomial: bool = True
    """Whether all sizes are polynomials in batch and seq: not where a sequence is cut into chunks of a fixed length."""
    tensor_parallel: TensorParallel | None = None
    """Of which group it is one rank's program (`memcalc.layout.tensor_parallel.split`)."""
    expert_parallel: int = 1
    """Ranks that share the experts, of which it is one's program (`memcalc.layout.auto_ep.on_rank`)."""
    context_parallel: SharedSequences | None = None
    """How its sequences are shared, where they are."""
    traced_classes: frozenset[str] = frozenset()
    """Classes of transformers that `architectures` may name and that are traced, because this program is another one."""
    external: tuple[tuple[str, str], ...] = ()
    """Modules and weights that are another module's and used in theirs (DeepSpeed's external parameters)."""
    weights_source: str = "shapes of transformers' modelling code"
    """Where the shapes of its weights were read."""
    source: str = ""
    """What is traced, if it is not a program on paper (`memcalc.tracing`)."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def loss_in(self, computes: DType, buffers: DType) -> DType:
        """The dtype of the loss of a model that computes in one dtype and has floating-point buffers of another."""
        return self.loss_dtype or computes

    @property
    def untrained(self) -> Collection[str]:
        """Names of the weights that the step does not reach, or that want no gradient."""
        return ()

    @property
    def frozen(self) -> Collection[str]:
        """Those of them that want none (`requires_grad=False`)."""
        return ()

    @cached_property
    def idle(self) -> Mapping[tuple[str, Shape], int]:
        """How many weights of a name and shape get no gradient."""
        names = self.untrained
        return Counter((w.name, w.shape) for w in self.weights() if w.name in names) if names else {}

    @property
    def basis(self) -> Literal["exact", "traced"]:
        """Where the rows of its weights and of its run come from."""
        return "traced" if self.source else "exact"

    def weights(self) -> Iterator[Weight]:
        """Parameters in the order of `model.named_parameters()`, tied ones once."""
        raise NotImplementedError

    def layer_weights(self, i: int) -> Iterator[Weight]:
        """Parameters of layer `i`, named from there."""
        raise NotImplementedError

    def buffers(self) -> Iterator[Buffer]:
        """Buffers in the order of `model.named_buffers()`."""
        yield from ()

    def layer_buffers(self, i: int) -> Iterator[Buffer]:
        """Buffers of layer `i`, named from there."""
        yield from ()

    def inputs(self, batch: Dim, seq: Dim) -> Sequence[Input]:
        """The batch, in the order in which `forward` takes it."""
        return (Input("input_ids (also the labels)", (batch, seq), int64),)

    def whole(self, shard: Dim) -> Dim:
        """The sequence of which a tensor between two layers has `shard`; where ranks share sequences, what a rank has of it."""
        if self.context_parallel is not None:
            shard = self.context_parallel.own(shard)
        return shard if self.tensor_parallel is None else self.tensor_parallel.whole(shard)

    def length(self, shard: Dim) -> int:
        """Tokens of a sequence, those of all ranks, of which a tensor between two layers has `shard`."""
        ranks = 1 if self.context_parallel is None else self.context_parallel.ranks
        return ranks * self.whole(shard).size

    def outgrown(self, seq_len: int) -> frozenset[int]:
        """The lengths of the buffers that are made for sequences shorter than these."""
        return frozenset(length for length in self._longest if seq_len > length)

    @cached_property
    def _longest(self) -> frozenset[int]:
        return frozenset(buffer.longest for buffer in self.buffers() if buffer.longest is not None)

    def given_positions(self, whole: Dim) -> Input | None:
        """The positions of a sequence, where the caller has to give them."""
        return None if self.tensor_parallel is None else self.tensor_parallel.given_positions(whole)

    def given(self, batch: Dim, whole: Dim) -> Sequence[Input]:
        """What the caller gives and holds."""
        if self.context_parallel is not None:
            return self.context_parallel.inputs(batch, whole)
        positions = self.given_positions(whole)
        return self.inputs(batch, whole) if positions is None else (*self.inputs(batch, whole), positions)

    def give(self, run: Run) -> list[Tensor]:
        """Allocate what the caller gives: the batch, in the order in which `forward` takes it."""
        if self.context_parallel is not None:
            return [self.context_parallel.give(run)]
        batch_of = [run.add_input(given) for given in self.inputs(run.batch, run.seq)]
        positions = self.given_positions(run.seq)
        run.positions = None if positions is None else run.add_input(positions)
        return batch_of

    def padding(self, batch: Dim, seq: Dim) -> Input:
        """The collator's mask of a padded batch."""
        return Input("attention_mask", (batch, seq), int64)

    def check_step(self) -> None:
        """ValueError for what transformers builds but cannot run."""
        self.config.check_step()

    forward: Any
    """A method: the loss of the model's forward, from a run and the batch."""

    def left_behind(self, run: Run) -> list[Tensor]:
        """What the graph of the step before keeps as long as its loss is there."""
        return []

    def traced_step(self, run: Run) -> int:
        """Run forward and backward into the run's memory; where in its log forward ends. For what is not on paper."""
        raise NotImplementedError

    @property
    def head_name(self) -> str:
        """The module whose weight the logits are made with."""
        return self.embedding if self.config.tie_word_embeddings else self.unembedding

    def head(self, root: Module, hidden_states: Tensor) -> Tensor:
        """The logits. A tied head can still have a bias of its own."""
        root.run.memory.scope = self.unembedding
        weight, bias = (root / self.head_name).weight(), (root / self.unembedding).optional("bias")
        return root.run.linear(self.unembedding, hidden_states, weight, bias)

    # --- the stack of layers

    def variant(self, i: int) -> Hashable:
        """What layer `i` is: layers of equal variants have equal weights and cost the same."""
        return None

    def pattern(self) -> tuple[int, int] | None:
        """(lead, period): after how many first layers the stack repeats, and after how many more; None if it does not."""
        return pattern_of([self.variant(i) for i in range(self.layers)])

    def stack(self, path: str) -> Iterator[Weight]:
        """The weights of all layers under `path`, layer by layer; those of one variant are written out once."""
        yield from stacked(path, [self.variant(i) for i in range(self.layers)], self.layer_weights)

    def buffer_stack(self, path: str) -> Iterator[Buffer]:
        """The buffers of all layers under `path`, layer by layer."""
        for i in range(self.layers):
            for buffer in self.layer_buffers(i):
                yield buffer._replace(name=f"{path}.*.{buffer.name}", layer=i)

    def call_layer(self, m: Module, hidden_states: Tensor, *rest: Any) -> Any:
        """GradientCheckpointingLayer (modeling_layers.py): `self.layer`, recomputed in backward where that is asked for.

        Most layers return their hidden states; some return a tuple, all of which the caller's frame holds.
        """
        return self.call(self.layer, m, hidden_states, *rest)

    def call(self, layer: Callable[..., Any], m: Module, *args: Any) -> Any:
        """The same of a model that has layers of several kinds."""
        run = m.run
        forward = (
            partial(run.checkpoint, layer) if run.recomputes(m.layer) else layer
        )  # without the hooks of `__call__`
        return forward(m, *args) if run.hooks is None else run.hooks.layer(forward, m, *args)

    def branch(self, batch: int, seq: int) -> Hashable:
        """Return what of a workload decides which way the program goes: one profile holds for all that agree in it, and in the
        remainder where a kernel pads queries."""
        if not self.polynomial:
            return batch, seq
        # A dim of one merges with its neighbours; a window makes a mask once the sequence reaches it.
        windowed = seq >= (getattr(self.config, "sliding_window", None) or 0)
        outgrown = self.outgrown(self.length(Dim("seq", seq))) if self._longest else self._longest
        return batch == 1, seq == 1, windowed, outgrown

    @staticmethod
    def remainder(seq: int) -> int:
        """Return what of a sequence decides how many queries the memory-efficient attention pads."""
        return seq % ALIGNED_QUERIES


def stacked(
    path: str, variants: Sequence[Hashable], layer_weights: Callable[[int], Iterator[Weight]]
) -> Iterator[Weight]:
    """The weights of all layers under `path`, layer by layer; those of one variant are written out once."""
    written: dict[Hashable, list[Weight]] = {}
    for i, variant in enumerate(variants):
        if variant not in written:
            written[variant] = [w._replace(name=f"{path}.*.{w.name}") for w in layer_weights(i)]
        for name, shape, component, _ in written[variant]:
            yield Weight(name, shape, component, i)


def pattern_of(variants: Sequence[Hashable]) -> tuple[int, int] | None:
    """The shortest (lead, period) of a stack that has at least six periods after its lead; None if there is none."""
    return common_pattern([variants])


def common_pattern(stacks: Sequence[Sequence[Hashable]]) -> tuple[int, int] | None:
    """The shortest (lead, period) that several stacks have in common, each with at least six periods after its lead."""
    depth = min(map(len, stacks))
    found: list[tuple[int, int, int]] = []
    for period in range(1, depth // 6 + 1):
        breaks = [i for stack in stacks for i in range(len(stack) - period) if stack[i] != stack[i + period]]
        lead = max(breaks) + 1 if breaks else 0
        if lead + 6 * period <= depth:
            found.append((lead + 4 * period, lead, period))
    return min(found)[1:] if found else None
