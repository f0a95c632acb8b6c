"""RWKV-4 (models/rwkv/modeling_rwkv.py): a weighted average over the sequence in place of attention.

The path in plain torch, as runs without the compiled kernel that transformers loads where the packages kernels and ninja are
there: a Python loop over the sequence, each of whose steps keeps its states and what they are made of for backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final

from memcalc.core.dims import ONE_DIM, Dim, plus
from memcalc.core.dtypes import fp32
from memcalc.core.ops.axes import assign_place, pad_dim, select
from memcalc.core.ops.elementwise import cast, like, one_minus, power, scale, sigmoid, sub
from memcalc.core.ops.exponential import exp
from memcalc.core.ops.routing import div
from memcalc.core.ops.scan import Block, earlier_steps
from memcalc.core.ops.selection import larger
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.families.base.blocks import act, lm_head_loss
from memcalc.families.base.config import Count, CountOrNone, FamilyConfig, Layers
from memcalc.families.base.module import Module, Run, State, Weight, module
from memcalc.families.base.program import Program
from memcalc.families.base.support import Family, Support
from memcalc.families.gpt2 import norm_weights
from memcalc.families.llama import linear_weights

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping, Sequence


@dataclass(frozen=True, kw_only=True)
class RwkvConfig(FamilyConfig):
    """The fields and defaults of models/rwkv/configuration_rwkv.py."""

    attribute_map: ClassVar[Mapping[str, str]] = {"max_position_embeddings": "context_length"}

    vocab_size: Count = 50277
    context_length: Count = 1024
    hidden_size: Count = 4096
    num_hidden_layers: Layers = 32
    attention_hidden_size: Count | None = None
    intermediate_size: Count | None = None
    rescale_every: CountOrNone = 6
    tie_word_embeddings: bool = False

    def check(self) -> None:
        super().check()
        for name in ("num_hidden_layers", "attention_hidden_size"):
            if getattr(self, name) == 1:
                raise ValueError(f"{name} 1 fails in transformers, which divides by one less; allowed: 2 or more")


FEED_FORWARD_INPUT: Final = "feed-forward input"
ATTENTION_INPUT: Final = "attention input"
AVERAGES: Final = ("numerator of the average", "denominator of the average", "maximum of the average")


class Rwkv(Program):
    """The program of RwkvForCausalLM."""

    Config: type[FamilyConfig] = RwkvConfig
    attention_kinds = ("eager",)
    polynomial_in_batch = False
    no_static_cache = "keeps its states in a list of its own"
    embedding = "rwkv.embeddings"
    unembedding = "head"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.layers = config.num_hidden_layers
        self.max_seq_len = config.context_length
        self.vocab = Dim("vocab", config.vocab_size)
        self.hidden = Dim("hidden", config.hidden_size)
        self.inner = Dim("inner", config.attention_hidden_size or config.hidden_size)
        if self.inner.size != self.hidden.size:
            self.cacheless = (
                "with another attention_hidden_size than hidden_size fails in transformers when it keeps a state"
            )
        self.ffn = Dim("ffn", config.intermediate_size or 4 * config.hidden_size)

    def variant(self, i: int) -> Hashable:
        return i == 0

    def branch(self, batch: int, seq: int) -> Hashable:
        return super().branch(batch, seq), min(seq, 3)  # the loop's last two steps are written out

    def states(self, i: int) -> tuple[State, ...]:
        """Return what the layer keeps: the last inputs of both blocks, and the three numbers of each channel's average."""
        averages = (State(name, (self.hidden,), fp32) for name in AVERAGES)
        return State(FEED_FORWARD_INPUT, (self.hidden,)), State(ATTENTION_INPUT, (self.hidden,)), *averages

    # --- weights

    def weights(self) -> Iterator[Weight]:
        yield Weight("rwkv.embeddings.weight", (self.vocab, self.hidden), "embedding")
        yield from self.stack("rwkv.blocks")
        yield from norm_weights("rwkv.ln_out", self.hidden)
        if not self.config.tie_word_embeddings:
            yield Weight("head.weight", (self.vocab, self.hidden), "head")

    def layer_weights(self, i: int) -> Iterator[Weight]:
        for name in ("pre_ln", "ln1", "ln2")[i > 0 :]:
            yield from norm_weights(name, self.hidden)
        mix = (ONE_DIM, ONE_DIM, self.hidden)
        yield Weight("attention.time_decay", (self.inner,), "mixer")
        yield Weight("attention.time_first", (self.inner,), "mixer")
        for name in ("key", "value", "receptance"):
            yield Weight(f"attention.time_mix_{name}", mix, "mixer")
        for name in ("key", "value", "receptance"):
            yield from linear_weights(f"attention.{name}", self.hidden, self.inner, "mixer", bias=False)
        yield from linear_weights("attention.output", self.inner, self.hidden, "mixer", bias=False)
        yield Weight("feed_forward.time_mix_key", mix, "mlp")
        yield Weight("feed_forward.time_mix_receptance", mix, "mlp")
        yield from linear_weights("feed_forward.key", self.hidden, self.ffn, "mlp", bias=False)
        yield from linear_weights("feed_forward.receptance", self.hidden, self.hidden, "mlp", bias=False)
        yield from linear_weights("feed_forward.value", self.ffn, self.hidden, "mlp", bias=False)

    # --- forward

    def forward(self, run: Run, ids: Tensor) -> Tensor:
        """Return RwkvForCausalLM.forward(input_ids=ids, labels=ids).loss."""
        root = Module(run, "")
        hidden_states = self.model(root / "rwkv", ids)
        run.memory.enter(run.memory.phase, None)
        return lm_head_loss(root / self.head_name, partial(self.head, root), hidden_states, ids)

    @module
    def model(self, m: Module, ids: Tensor) -> Tensor:
        inputs_embeds = (m / "embeddings").embedding(ids)
        if m.run.cache is not None and not m.run.cache.seen:
            m.run.cache.fill_states(m.run, self, 0)
        hidden_states = inputs_embeds
        for i in range(self.layers):
            m.run.memory.enter(m.run.memory.phase, i)
            hidden_states = self.call_layer(Module(m.run, f"{m.path}.blocks.*", i), hidden_states)
            if m.run.cache is not None and self.config.rescale_every and (i + 1) % self.config.rescale_every == 0:
                hidden_states = scale(hidden_states, "div")
        m.run.memory.enter(m.run.memory.phase, None)
        return (m / "ln_out").layer_norm(hidden_states)

    @module
    def layer(self, m: Module, hidden: Tensor) -> Tensor:
        if m.layer == 0:
            hidden = (m / "pre_ln").layer_norm(hidden)
        attention = self.attention(m / "attention", (m / "ln1").layer_norm(hidden))
        hidden = hidden + attention
        feed_forward = self.feed_forward(m / "feed_forward", (m / "ln2").layer_norm(hidden))
        return hidden + feed_forward

    @module
    def attention(self, m: Module, hidden: Tensor) -> Tensor:
        receptance, key, value = self.extract_key_value(m, hidden)
        cache = m.run.cache
        state = None if cache is None else [kept(cache.state(m, name)) for name in AVERAGES]
        rwkv, _layer_state = linear_attention(m.weight("time_decay"), m.weight("time_first"), key, value, state)
        return (m / "output").linear(receptance * rwkv)

    def extract_key_value(self, m: Module, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shifted = self.shifted(m, hidden, ATTENTION_INPUT)
        key = mixed(hidden, shifted, m.weight("time_mix_key"))
        value = mixed(hidden, shifted, m.weight("time_mix_value"))
        receptance = mixed(hidden, shifted, m.weight("time_mix_receptance"))
        key = (m / "key").linear(key)
        value = (m / "value").linear(value)
        receptance = sigmoid((m / "receptance").linear(receptance))
        return receptance, key, value

    @module
    def feed_forward(self, m: Module, hidden: Tensor) -> Tensor:
        shifted = self.shifted(m, hidden, FEED_FORWARD_INPUT)
        key = mixed(hidden, shifted, m.weight("time_mix_key"))
        receptance = mixed(hidden, shifted, m.weight("time_mix_receptance"))
        key = power(act((m / "key").linear(key), "relu"), 2)
        value = (m / "value").linear(key)
        receptance = sigmoid((m / "receptance").linear(receptance))
        return receptance * value

    def shifted(self, m: Module, hidden: Tensor, name: str) -> Tensor:
        """Return the token before each one. A single one, of a sequence that goes on, has its own in the state: (batch, hidden)
        without a dim for tokens. So with several sequences the sum with (batch, 1, hidden) has batch x batch tokens."""
        cache = m.run.cache
        state = None if cache is None or hidden.shape[1].size > 1 else cache.state(m, name)
        if state is None:
            return time_shift(hidden)
        return Tensor(state.storage, (Dim("sequences", state.shape[0].size), self.hidden), state.strides, state.dtype)


def kept(state: Tensor | None) -> Tensor:
    """Return a state that the cache has from the first forward on."""
    assert state is not None
    return state


def time_shift(hidden: Tensor) -> Tensor:
    """Return nn.ZeroPad2d((0, 0, 1, -1)), a copy in which each token is replaced by the one before."""
    return pad_dim(hidden, 1, hidden.shape[1])


def mixed(hidden: Tensor, shifted: Tensor, time_mix: Tensor) -> Tensor:
    """Return hidden * time_mix + shifted * (1 - time_mix)."""
    return hidden * time_mix + shifted * one_minus(time_mix)


def linear_attention(
    time_decay: Tensor, time_first: Tensor, key: Tensor, value: Tensor, state: Sequence[Tensor] | None
) -> tuple[Tensor, list[Tensor]]:
    """Return the output of rwkv_linear_attention_cpu, and its new state. key and value are (batch, seq, inner); the caller's
    frame keeps them."""
    memory = key.memory
    batch, seq, inner = key.shape
    output = like(key, "output")
    if state is None:
        num_state, den_state = (new_tensor(memory, (batch, inner), fp32, f"initial {n}") for n in ("num", "den"))
        max_state = scale(new_tensor(memory, (batch, inner), fp32, "zeros"), "sub", "initial max")
    else:
        num_state, den_state, max_state = state
    time_decay = -exp(time_decay)
    if seq.size > 2:
        initial = [num_state, den_state, max_state]
        num_state, den_state, max_state = (
            new_tensor(memory, (batch, inner), fp32, f"{n} state") for n in ("num", "den", "max")
        )
        output = Tensor(output.storage, output.shape, output.strides, output.dtype)
        earlier_steps(
            [num_state, den_state, max_state, output],
            (time_decay, time_first, key, value),
            [*initial, *_blocks(seq, batch, inner, copies_keys=key.dtype is not fp32)],
        )
        del initial
    for _ in range(min(seq.size, 2)):
        current_key = cast(select(key, 1), fp32)
        current_value = select(value, 1)
        max_for_output = larger(max_state, current_key + time_first)
        e1 = exp(sub(max_state, max_for_output))
        e2 = exp(sub(current_key + time_first, max_for_output))
        numerator = e1 * num_state + e2 * current_value
        denominator = e1 * den_state + e2
        output = assign_place(output, 1, cast(div(numerator, denominator), output.dtype))
        max_for_state = larger(max_state + time_decay, current_key)
        e1 = exp(sub(max_state + time_decay, max_for_state))
        e2 = exp(sub(current_key, max_for_state))
        num_state = e1 * num_state + e2 * current_value
        den_state = e1 * den_state + e2
        max_state = max_for_state
    return output, [num_state, den_state, max_state]


def _blocks(seq: Dim, batch: Dim, inner: Dim, *, copies_keys: bool) -> Iterator[Block]:
    """Yield the blocks that all steps but the last two keep: the operands of both maxima, four exponentials, the two sides of
    the quotient, and the states for the next step."""
    names = [
        "key and time_first", "max and time_decay", "numerator", "denominator",
        "exponential of the old max", "exponential of the key", "decay of the states", "weight of the value",
        *(["key in fp32"] if copies_keys else []),
    ]  # fmt: skip
    for name in names:
        yield Block((plus(seq, -2), batch, inner), fp32, name)
    for name in ("num states", "den states", "max states"):
        yield Block((plus(seq, -3), batch, inner), fp32, name)


FAMILY: Final = Family("rwkv", Rwkv, Support(tensor_parallel={}))
