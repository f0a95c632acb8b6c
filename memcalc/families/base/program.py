"""The base of every family's program: weights, buffers, a stack of layers and a `forward()`."""

from __future__ import annotations

from collections import Counter
from functools import cached_property, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

from memcalc.core.dims import Dim
from memcalc.core.dtypes import fp32, int64
from memcalc.core.ops.attention import ALIGNED_QUERIES
from memcalc.core.tensor import new_tensor
from memcalc.families.base.module import Input, looks_tokens_up
from memcalc.families.base.stack import pattern_of, stacked

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence

    from memcalc.core.dims import Shape
    from memcalc.core.dtypes import DType
    from memcalc.core.tensor import Tensor
    from memcalc.families.base.batches import PackedRows, SharedSequences
    from memcalc.families.base.config import FamilyConfig
    from memcalc.families.base.module import Buffer, Module, Run, State, Weight
    from memcalc.families.base.replacing import Adapters
    from memcalc.layout.tensor_parallel import TensorParallel

GRADIENT_LEFT_BEHIND: Final = "left behind: gradient of the embeddings"


class Program:
    """One model type's training forward, on paper. A subclass sets `layers` and `max_seq_len` and defines the rest."""

    Config: type[FamilyConfig]
    attention_kinds: tuple[str, ...] = ("sdpa", "eager")
    """The attentions that transformers offers for the type, its default first."""
    recomputes: bool = True
    """True if transformers can recompute its layers in backward (`supports_gradient_checkpointing`) as written here."""
    positional: int = 1
    """The number of a layer's arguments, hidden states included, that transformers gives it by position. A reentrant checkpoint
    saves the tensors among them; arguments by keyword stay in its closure."""
    routed: tuple[int, int] = (1, 1)
    """The experts that a token is sent to, and all routed experts."""
    embedding: str = "model.embed_tokens"
    """The module that looks tokens up. If tied, its weight also computes the logits."""
    look_ups: int = 1
    """The number of look-ups of tokens in a forward."""
    unembedding: str = "lm_head"
    """The module that computes the logits."""
    layers: int
    layer: Any
    """The forward of one layer, a method."""
    max_seq_len: int | None
    positions_limit: int | None = None
    """The longest sequence that the tables have positions for; None without tables."""
    pads: bool = True
    """True if masks and positions are written out for a batch with a padding mask."""
    one_stack: bool = True
    """True if all layers are one stack, so that a number says which layer is meant."""
    layers_share: bool = False
    """True if a layer uses weights of another one."""
    layers_add_up: bool = False
    """True if all layers give a gradient to one tensor that is no weight: the second one in backward makes the sum, and later
    ones add to it."""
    has_sequence: bool = True
    """True if the batch is sequences, so that their length has a meaning."""
    autocasts: bool = True
    """True if the ops are on autocast's lists as in torch."""
    loss_dtype: DType | None = fp32
    """The dtype of the loss; None is the model's."""
    takes_losses: bool = True
    """True if a loss of `memcalc.kernels` can take the place of the model's own."""
    polynomial: bool = True
    """True if all sizes are polynomials in batch and seq. They are not where a sequence is cut into chunks of a fixed
    length."""
    polynomial_in_batch: bool = True
    """False if sizes of a forward with a cache are no polynomials in the batch."""
    tensor_parallel: TensorParallel | None = None
    """The tensor-parallel group whose rank the program is for (`memcalc.layout.tensor_parallel.split`); None without
    one."""
    expert_parallel: int = 1
    """The number of ranks that share the experts; the program is one rank's (`memcalc.layout.auto_ep.on_rank`)."""
    context_parallel: SharedSequences | None = None
    """The sharing of sequences between ranks; None without one."""
    packed_rows: PackedRows | None = None
    """The packing of sequences into rows; None: each row is a sequence."""
    noisy_embeddings: bool = False
    """True if noise is added to the output of the embeddings (NEFTune)."""
    offloads_activations: bool = False
    """True if saved tensors are moved to the host in forward (`memcalc.core.offloading`)."""
    traced_classes: frozenset[str] = frozenset()
    """Classes of transformers that `architectures` may name and that are traced, because this program is not theirs."""
    external: tuple[tuple[str, str], ...] = ()
    """Modules with another module's weights that they use (DeepSpeed's external parameters)."""
    weights_source: str = "shapes of transformers' modelling code"
    """The source of the shapes of the weights."""
    source: str = ""
    """The traced module, if this is no program on paper (`memcalc.tracing`)."""
    uncounted: str = ""
    """The part of a step's memory on a GPU whose bytes no rule gives; "" if there is none."""
    notes: tuple[str, ...] = ()
    """Notes for the reader on what is counted, one sentence each."""
    held: Mapping[int | None, frozenset[str]] = MappingProxyType({})
    """The names of the weights that the user freezes, by their layer."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def loss_in(self, computes: DType, buffers: DType) -> DType:
        """Return the dtype of the loss of a model that computes in one dtype and has floating-point buffers of
        another."""
        return self.loss_dtype or computes

    @property
    def untrained(self) -> Collection[str]:
        """Return the names of the weights that the step does not reach, or that require no gradient."""
        return ()

    @property
    def frozen(self) -> Collection[str]:
        """Return the names of the weights that require no gradient (`requires_grad=False`)."""
        return ()

    def wants_gradient(self, weight: Weight) -> bool:
        """Tell whether a weight requires a gradient (`requires_grad`)."""
        return weight.name not in self.frozen and weight.name not in self.held.get(weight.layer, ())

    def gets_gradient(self, weight: Weight) -> bool:
        """Tell whether a weight gets a gradient: it wants one, and the step reaches it."""
        return weight.name not in self.untrained and self.wants_gradient(weight)

    @property
    def has_frozen(self) -> bool:
        """Tell whether the user has frozen some weights."""
        return bool(self.held)

    @cached_property
    def idle(self) -> Mapping[tuple[str, Shape], int]:
        """Count the weights of a name and shape that get no gradient."""
        if not self.untrained and not self.has_frozen:
            return {}
        return Counter((w.name, w.shape) for w in self.weights() if not self.gets_gradient(w))

    @property
    def basis(self) -> Literal["exact", "traced"]:
        """Return the basis of the rows of the weights and of the run."""
        return "traced" if self.source else "exact"

    def weights(self) -> Iterator[Weight]:
        """Yield parameters in the order of `model.named_parameters()`, tied ones once."""
        raise NotImplementedError

    def layer_weights(self, i: int) -> Iterator[Weight]:
        """Yield the parameters of layer `i`, named from the layer."""
        raise NotImplementedError

    def buffers(self) -> Iterator[Buffer]:
        """Yield buffers in the order of `model.named_buffers()`."""
        yield from ()

    def layer_buffers(self, i: int) -> Iterator[Buffer]:
        """Yield the buffers of layer `i`, named from the layer."""
        yield from ()

    def inputs(self, batch: Dim, seq: Dim) -> Sequence[Input]:
        """Return the batch, in the order of `forward`'s arguments."""
        return (Input("input_ids (also the labels)", (batch, seq), int64),)

    def whole(self, shard: Dim) -> Dim:
        """Return the sequence length, given the length `shard` of a tensor between two layers. If ranks share
        sequences, it is the length of a rank's part."""
        if self.context_parallel is not None:
            shard = self.context_parallel.length_on_rank(shard)
        return shard if self.tensor_parallel is None else self.tensor_parallel.whole(shard)

    def length(self, shard: Dim) -> int:
        """Return the tokens of a sequence over all ranks, given the length `shard` of a tensor between two layers."""
        ranks = 1 if self.context_parallel is None else self.context_parallel.ranks
        return ranks * self.whole(shard).size

    def outgrown(self, seq_len: int) -> frozenset[int]:
        """Return the lengths of the buffers that are made for sequences shorter than `seq_len`."""
        return frozenset(length for length in self._longest if seq_len > length)

    @cached_property
    def _longest(self) -> frozenset[int]:
        return frozenset(buffer.longest for buffer in self.buffers() if buffer.longest is not None)

    def given_positions(self, whole: Dim) -> Input | None:
        """Return the positions of a sequence if the caller has to give them; None otherwise."""
        return None if self.tensor_parallel is None else self.tensor_parallel.given_positions(whole)

    def sequences(self, batch: Dim) -> Dim:
        """Return the sequences of one forward for a micro-batch."""
        return batch

    def rows(self, batch: Dim, seq: Dim) -> tuple[Dim, Dim]:
        """Return the batch and the sequence length that the model sees of `batch` rows of `seq` tokens."""
        return (batch, seq) if self.packed_rows is None else self.packed_rows.rows(batch, seq)

    def given(self, batch: Dim, whole: Dim) -> Sequence[Input]:
        """Return what the caller gives and holds."""
        if self.packed_rows is not None:
            batch, whole = self.packed_rows.rows(batch, whole)
            return (*self.inputs(batch, whole), *self.packed_rows.inputs(whole))
        if self.context_parallel is not None:
            return self.context_parallel.inputs(batch, whole)
        positions = self.given_positions(whole)
        return self.inputs(batch, whole) if positions is None else (*self.inputs(batch, whole), positions)

    def give(self, run: Run) -> list[Tensor]:
        """Allocate what the caller gives: the batch, in the order of `forward`'s arguments."""
        if self.context_parallel is not None:
            return [self.context_parallel.give(run)]
        batch_of = [run.add_input(given) for given in self.inputs(run.batch, run.seq)]
        if self.packed_rows is not None:
            run.packed = self.packed_rows.give(run)
            return batch_of
        positions = self.given_positions(run.seq)
        run.positions = None if positions is None else run.add_input(positions)
        return batch_of

    def padding(self, batch: Dim, seq: Dim) -> Input:
        """Return the collator's mask of a padded batch."""
        return Input("attention_mask", (batch, seq), int64)

    def check_step(self) -> None:
        """Raise ValueError for a model that transformers builds but cannot run."""
        self.config.check_step()

    forward: Any
    """A method that returns the loss of the model's forward, from a run and the batch."""

    def left_behind(self, run: Run) -> list[Tensor]:
        """Return the tensors that the graph of the previous step keeps as long as its loss is alive."""
        return []

    def leaves_left_behind(self, run: Run) -> list[Tensor]:
        """Return the outputs of the embeddings, and their gradients, that the graph of the previous step keeps because
        they are its leaves."""
        if not run.input_require_grads:
            return []
        out: list[Tensor] = []
        seq = run.seq if self.tensor_parallel is None else self.tensor_parallel.between_layers(run.seq)
        for weight in self.weights():
            is_leaf = weight.component == "embedding" and not self.wants_gradient(weight)
            if is_leaf and looks_tokens_up(weight.shape):
                shape, dtype = (run.batch, seq, weight.shape[1]), run.dtype
                names = ("left behind: embeddings", GRADIENT_LEFT_BEHIND)
                out += [
                    new_tensor(run.memory, shape, dtype, name)
                    for name in names
                    for _ in range(self.look_ups_of(weight))
                ]
        return out

    def look_ups_of(self, weight: Weight) -> int:
        """Return how often a forward looks tokens up in a table."""
        return self.look_ups

    def traced_step(self, run: Run) -> int:
        """Run forward and backward in the run's memory, for a module that is traced. Returns the index in the log at
        which forward ends."""
        raise NotImplementedError

    @property
    def head_name(self) -> str:
        """Return the name of the module whose weight computes the logits."""
        return self.embedding if self.config.tie_word_embeddings else self.unembedding

    def head(self, root: Module, hidden_states: Tensor) -> Tensor:
        """Return the logits. A tied head can still have a bias of its own."""
        root.run.memory.scope = self.unembedding
        weight, bias = (root / self.head_name).weight(), (root / self.unembedding).optional("bias")
        memory = root.run.memory
        offloading, memory.offloading = memory.offloading, None  # TRL's NoOpManager around the head
        out = root.run.linear(self.unembedding, hidden_states, weight, bias)
        memory.offloading = offloading
        return out

    # --- what layers keep of earlier tokens

    def cache_windows(self) -> dict[int, int]:
        """Return the windows of the layers whose cache lets go of older tokens (transformers' cache_utils.py,
        `get_layer_types_and_kwargs`)."""
        config = self.config
        sizes = {"sliding_attention": getattr(config, "sliding_window", None)}
        sizes["chunked_attention"] = chunk = getattr(config, "attention_chunk_size", None)
        kinds = getattr(config, "kinds", None) or getattr(config, "layer_types", None)
        if kinds is None:
            kinds = [
                "sliding_attention" if sizes["sliding_attention"] else "chunked_attention" if chunk else ""
            ] * self.layers
        return {i: window for i, kind in enumerate(kinds) if (window := sizes.get(kind))}

    cacheless: str | None = None
    """The reason why transformers keeps no cache for the type; None: it keeps one."""
    cache_knows_layers: bool = True
    """False if the cache is made without the configuration: masks are sized by the first layer, whatever it keeps."""
    no_static_cache: str | None = None
    """The reason why the type takes no StaticCache, a clause whose subject is the type; None: it takes one."""
    shortest_prompt: int = 1
    """The fewest tokens of a prompt that transformers can run with a cache."""
    caches_latents: bool = False
    """True if the cache has one latent for all heads, and the part of the keys that they share."""

    def states(self, i: int) -> tuple[State, ...]:
        """Return what layer `i` keeps besides keys and values."""
        return ()

    def states_of_prompt(self, i: int) -> tuple[State, ...]:
        """Return what layer `i` keeps after a prompt, before the first new token."""
        return self.states(i)

    # --- the stack of layers

    def variant(self, i: int) -> Hashable:
        """Return the variant of layer `i`. Layers of equal variants have equal weights and cost the same."""
        return None

    adapters: Adapters | None = None
    """The adapters around linear layers."""

    def pattern(self) -> tuple[int, int] | None:
        """Return (lead, period): the stack repeats every `period` layers after `lead` layers. Return None if it does
        not repeat."""
        return pattern_of([(self.variant(i), self.held.get(i), self.adapted(i)) for i in range(self.layers)])

    def adapted(self, i: int) -> Hashable:
        """Return the adapters in layer `i`."""
        return None

    def stack(self, path: str) -> Iterator[Weight]:
        """Yield the weights of all layers under `path`, layer by layer. Those of one variant are made once."""
        yield from stacked(path, [self.variant(i) for i in range(self.layers)], self.layer_weights)

    def buffer_stack(self, path: str) -> Iterator[Buffer]:
        """Yield the buffers of all layers under `path`, layer by layer."""
        for i in range(self.layers):
            for buffer in self.layer_buffers(i):
                yield buffer._replace(name=f"{path}.*.{buffer.name}", layer=i)

    def call_layer(self, m: Module, hidden_states: Tensor, *rest: Any) -> Any:
        """Call `self.layer` as a GradientCheckpointingLayer (modeling_layers.py), recomputed in backward if that is
        asked for.

        Most layers return their hidden states. Some return a tuple; the caller's frame holds all of it.
        """
        return self.call(self.layer, m, hidden_states, *rest)

    def call(self, layer: Callable[..., Any], m: Module, *args: Any) -> Any:
        """Call a layer of a model that has several kinds of layers, recomputed in backward if that is asked for."""
        run = m.run
        forward = (
            partial(run.checkpoint, layer) if run.recomputes(m.layer) else layer
        )  # without the hooks of `__call__`
        return forward(m, *args) if run.hooks is None else run.hooks.layer(forward, m, *args)

    def branch(self, batch: int, seq: int) -> Hashable:
        """Return the part of a workload that decides the program's branches. One profile holds for all workloads that
        agree in it, and in the remainder if a kernel pads queries."""
        if not self.polynomial:
            return batch, seq
        # A dim of one merges with its neighbours. A window makes a mask once the sequence is as long.
        windowed = seq >= (getattr(self.config, "sliding_window", None) or 0)
        outgrown = self.outgrown(self.length(Dim("seq", seq))) if self._longest else self._longest
        return batch == 1, seq == 1, windowed, outgrown

    @staticmethod
    def remainder(seq: int) -> int:
        """Return the remainder of a sequence length that decides how many queries the memory-efficient attention
        pads."""
        return seq % ALIGNED_QUERIES
