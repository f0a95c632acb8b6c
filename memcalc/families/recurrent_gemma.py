"""RecurrentGemma (models/recurrent_gemma/modeling_recurrent_gemma.py): Griffin, whose layers have a gated linear recurrence,
or attention to a window, half of each head rotated.

The recurrence is a Python loop over the sequence, each of whose steps keeps the state before it for backward. A recurrent
layer keeps its last state until its next forward; one that was recomputed, with it the graph that it came from, whose
saved tensors backward never asks for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from memcalc.core.autograd import Node
from memcalc.core.dims import ONE_DIM, Dim, merge, plus
from memcalc.core.dtypes import boolean, fp32
from memcalc.core.ops.axes import assign_place, narrow, permute, select
from memcalc.core.ops.convolution import depthwise_conv1d
from memcalc.core.ops.elementwise import bounded_sqrt, cast, like, one_minus, scale, sigmoid, tanh
from memcalc.core.ops.exponential import exp, softplus
from memcalc.core.ops.matmul import biased_baddbmm
from memcalc.core.ops.scan import Block, earlier_steps
from memcalc.core.ops.shape import reshape, transpose, unsqueeze
from memcalc.core.tensor import Autocast, Tensor, new_tensor
from memcalc.families.base.blocks import Attended, act, position_ids, rotary_buffers, rotary_embedding
from memcalc.families.base.config import Activation, Count, Decimal, Layers, Probability, RotaryConfig, check_divides
from memcalc.families.base.masks import causal_mask
from memcalc.families.base.module import Buffer, Module, Run, State, Weight, module
from memcalc.families.base.rotary import apply_partial_rotary_pos_emb
from memcalc.families.base.support import Family, Support
from memcalc.families.gemma import gemma_rms_norm
from memcalc.families.llama import Llama, linear_weights

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping, Sequence

    from memcalc.families.base.replacing import Cache

BlockType = Literal["recurrent", "attention"]
CONVOLUTION: Final = "convolution"
RECURRENT: Final = "recurrent state"


@dataclass(frozen=True, kw_only=True)
class RecurrentGemmaConfig(RotaryConfig):
    """The fields and defaults of models/recurrent_gemma/configuration_recurrent_gemma.py."""

    attribute_map: ClassVar[Mapping[str, str]] = {
        "sliding_window": "attention_window_size",
        "layer_types": "layers_block_type",
    }
    computed: ClassVar[Sequence[str]] = ("layer_types", "layers_block_type")
    rotates_part: ClassVar[bool] = True
    null_head_dim: ClassVar[bool] = False

    num_hidden_layers: Layers = 26
    vocab_size: Count = 256000
    pad_token_id: int | None = 0
    hidden_size: Count = 2560
    intermediate_size: Count = 7680
    num_attention_heads: Count = 10
    num_key_value_heads: Count | None = None
    lru_width: Count | None = None
    attention_window_size: Count = 2048
    conv1d_width: Count = 4
    logits_soft_cap: Decimal = 30.0
    hidden_activation: Activation = "gelu_pytorch_tanh"
    block_types: list[BlockType] | tuple[BlockType, ...] = ("recurrent", "recurrent", "attention")
    attention_dropout: Probability = 0.0
    attention_bias: bool = False
    tie_word_embeddings: bool = True

    @property
    def default_rotary_factor(self) -> float:
        return 0.5 if self.partial_rotary_factor is None else self.partial_rotary_factor

    @property
    def blocks(self) -> list[BlockType]:
        """Return the kind of each layer: `block_types`, repeated."""
        return (list(self.block_types) * 100)[: self.num_hidden_layers]

    @property
    def width_of_recurrence(self) -> int:
        return self.lru_width or self.hidden_size

    @property
    def sliding_window(self) -> int:
        return self.attention_window_size

    @property
    def max_position_embeddings(self) -> int:
        """Return the length that the published models were trained with. Nothing limits it."""
        return 8192

    def check(self) -> None:
        super().check()
        if len(self.blocks) < self.num_hidden_layers:
            raise ValueError(
                f"block_types has {len(self.block_types)} entries, of which a hundred times make fewer than "
                f"num_hidden_layers {self.num_hidden_layers}"
            )
        if self.rope["rope_type"] != "default":
            raise ValueError(f"rope_type {self.rope['rope_type']!r} fails in transformers; allowed: 'default'")
        check_divides(self, "num_attention_heads", "num_key_value_heads")
        if self.width_of_recurrence % self.num_attention_heads:
            raise ValueError(
                f"lru_width {self.width_of_recurrence} is not divisible by num_attention_heads {self.num_attention_heads}"
            )
        if self.intermediate_size < 2:
            raise ValueError("intermediate_size 1 leaves nothing to the feed-forward block, which has half of it")


class RecurrentGemma(Llama):
    """The program of RecurrentGemmaForCausalLM."""

    positional = 3
    Config = RecurrentGemmaConfig
    final_norm = "final_norm"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.blocks: list[BlockType] = config.blocks
        self.ffn = Dim("ffn", config.intermediate_size // 2)
        self.block_width = Dim("lru_head_dim", config.width_of_recurrence // self.heads.size)
        self.lru = merge(self.heads, self.block_width)
        self.kernel = Dim("conv_kernel", config.conv1d_width)
        if self.lru.size != self.hidden.size:
            self.shortest_prompt = 2  # the empty state of the convolution has the hidden size

    def variant(self, i: int) -> Hashable:
        return self.blocks[i]

    def pattern(self) -> tuple[int, int] | None:
        """Return None: the layers do not repeat, because each has a state before the step reaches it."""
        return None

    def branch(self, batch: int, seq: int) -> Hashable:
        return super().branch(batch, seq), min(seq, 3)  # the loop's last two steps are written out

    def left_behind(self, run: Run) -> list[Tensor]:
        """Return the last states of the previous step. A layer drops its state when it makes the new one."""
        for i in range(self.layers):
            if self.blocks[i] != "recurrent":
                continue
            if run.recompute:
                self.recompute_state(run, i)
            else:
                state = new_tensor(run.memory, (run.batch, self.lru), fp32, "left behind: last state")
                run.buffers[self.state_name(i)] = state
        return []

    def recompute_state(self, run: Run, i: int) -> None:
        """Run layer `i` up to its state, as recomputation in backward does: outside autocast's contexts, with its own copies."""
        m = Module(run, "model.layers.*", i)
        autocast = run.memory.autocast
        raw_activations = new_tensor(
            run.memory, (run.batch, run.seq, self.hidden), run.dtype, "left behind: activations"
        )
        raw_activations.node = Node(run.memory, _the_layer_before, ())
        with Autocast(run.memory, autocast and autocast.dtype):
            inputs_normalized = self.norm(m / "temporal_pre_norm", raw_activations)
            self.recurrent_block(m / "temporal_block", inputs_normalized, position_ids(run))

    def cache_windows(self) -> dict[int, int]:
        window = self.config.attention_window_size
        return {i: window for i in range(self.layers) if self.blocks[i] != "recurrent"}

    def states(self, i: int) -> tuple[State, ...]:
        """Return what modules of the layer keep. The convolution's is a view of all inputs but the first."""
        if self.blocks[i] != "recurrent":
            return ()
        return State(CONVOLUTION, (self.lru, self.kernel)), State(RECURRENT, (self.lru,), fp32)

    def states_of_prompt(self, i: int) -> tuple[State, ...]:
        return tuple(
            state._replace(shape=(self.lru, plus(self.kernel, -1))) if state.name == CONVOLUTION else state
            for state in self.states(i)
        )

    def state_name(self, i: int) -> str:
        return f"model.layers.{i}.temporal_block.rg_lru.recurrent_states"

    # --- weights and buffers

    def layer_weights(self, i: int) -> Iterator[Weight]:
        yield from self.norm_weights("temporal_pre_norm")
        yield from self.recurrent_weights() if self.blocks[i] == "recurrent" else self.attention_weights()
        yield from self.norm_weights("channel_pre_norm")
        yield from linear_weights("mlp_block.gate_proj", self.hidden, self.ffn, "mlp", bias=True)
        yield from linear_weights("mlp_block.up_proj", self.hidden, self.ffn, "mlp", bias=True)
        yield from linear_weights("mlp_block.down_proj", self.ffn, self.hidden, "mlp", bias=True)

    def attention_weights(self) -> Iterator[Weight]:
        q, kv = merge(self.heads, self.head_dim), merge(self.kv_heads, self.head_dim)
        bias = self.config.attention_bias
        for name, out in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
            yield from linear_weights(f"temporal_block.{name}", self.hidden, out, "attention", bias=bias)
        yield from linear_weights("temporal_block.o_proj", q, self.hidden, "attention", bias=True)

    def recurrent_weights(self) -> Iterator[Weight]:
        path = "temporal_block"
        yield from linear_weights(f"{path}.linear_y", self.hidden, self.lru, "mixer", bias=True)
        yield from linear_weights(f"{path}.linear_x", self.hidden, self.lru, "mixer", bias=True)
        yield from linear_weights(f"{path}.linear_out", self.lru, self.hidden, "mixer", bias=True)
        yield Weight(f"{path}.conv_1d.weight", (self.lru, ONE_DIM, self.kernel), "mixer")
        yield Weight(f"{path}.conv_1d.bias", (self.lru,), "mixer")
        yield Weight(f"{path}.rg_lru.recurrent_param", (self.lru,), "mixer")
        for name in ("input_gate", "recurrent_gate"):
            yield Weight(f"{path}.rg_lru.{name}_weight", (self.heads, self.block_width, self.block_width), "mixer")
            yield Weight(f"{path}.rg_lru.{name}_bias", (self.heads, self.block_width), "mixer")

    def buffers(self) -> Iterator[Buffer]:
        yield Buffer("model.normalizer", ())
        yield from self.buffer_stack("model.layers")

    def layer_buffers(self, i: int) -> Iterator[Buffer]:
        if self.blocks[i] == "attention":
            yield from rotary_buffers("temporal_block.rotary_emb", self.rotary_dim, self.rope_type, self.max_seq_len)

    # --- forward

    def head(self, root: Module, hidden_states: Tensor) -> Tensor:
        logits = super().head(root, hidden_states)
        return scale(tanh(scale(logits, "div")), "mul")

    def norm(self, m: Module, hidden_states: Tensor) -> Tensor:
        return gemma_rms_norm(m, hidden_states)

    @module
    def model(self, m: Module, ids: Tensor) -> Tensor:
        run = m.run
        inputs_embeds = self.embed(m, ids)
        positions = position_ids(run)
        mask = causal_mask(run, self.config.attention_window_size)
        hidden_states = inputs_embeds * cast(m.buffer("normalizer"), run.dtype)
        for i in range(self.layers):
            run.memory.enter(run.memory.phase, i)
            hidden_states = self.call_layer(Module(run, f"{m.path}.layers.*", i), hidden_states, positions, mask)
        run.memory.enter(run.memory.phase, None)
        return self.norm(m / self.final_norm, hidden_states)

    @module
    def layer(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, m: Module, activations: Tensor, positions: Tensor, mask: Tensor | None
    ) -> Tensor:
        assert m.layer is not None
        raw_activations = activations
        inputs_normalized = self.norm(m / "temporal_pre_norm", raw_activations)
        if self.blocks[m.layer] == "recurrent":
            hidden_states = self.recurrent_block(m / "temporal_block", inputs_normalized, positions)
        else:
            hidden_states, _weights = self.attention(m / "temporal_block", inputs_normalized, positions, mask)
        residual = hidden_states + raw_activations
        hidden_states = self.norm(m / "channel_pre_norm", residual)
        hidden_states = self.mlp(m / "mlp_block", hidden_states)
        return hidden_states + residual

    @module
    def attention(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, m: Module, hidden_states: Tensor, positions: Tensor, mask: Tensor | None
    ) -> Attended:
        """Return the attention's output. Each layer makes its own cos and sin, and keeps them to its end."""
        query_states, key_states, value_states = self.qkv(m, hidden_states)
        with m:
            dtype = value_states.dtype
            cos, sin = rotary_embedding(m / "rotary_emb", positions, self.rotary_dim, self.rope_type, dtype=dtype)
        query_states, key_states = apply_partial_rotary_pos_emb(query_states, key_states, cos, sin)
        key_states, value_states = m.cached(key_states, value_states)
        attn_output, attn_weights = self.attend(m, query_states, key_states, value_states, mask)
        attn_output = reshape(attn_output, *hidden_states.shape[:-1], merge(self.heads, self.head_dim))
        attn_output = (m / "o_proj").linear(attn_output)
        return attn_output, attn_weights

    @module
    def mlp(self, m: Module, x: Tensor) -> Tensor:
        gate = act((m / "gate_proj").linear(x), self.config.hidden_activation)
        return (m / "down_proj").linear(gate * (m / "up_proj").linear(x))

    @module
    def recurrent_block(self, m: Module, input_states: Tensor, positions: Tensor) -> Tensor:
        """Return the output of RecurrentGemmaRecurrentBlock."""
        y_branch = (m / "linear_y").linear(input_states)
        y_branch = act(y_branch, self.config.hidden_activation)
        x_branch = (m / "linear_x").linear(input_states)
        x_branch = transpose(x_branch, 1, 2)
        m.run.buffers.pop(self.state_name(m.layer or 0), None)
        if m.run.cache is not None:
            x_branch = self.convolution_with_state(m, m.run.cache, x_branch)
        else:
            x_branch = self.convolution(m / "conv_1d", x_branch)
        x_branch = self.rg_lru(m / "rg_lru", transpose(x_branch, 1, 2), positions)
        hidden_states = x_branch * y_branch
        return (m / "linear_out").linear(hidden_states)

    @module
    def convolution(self, m: Module, x_branch: Tensor) -> Tensor:
        """Return the causal convolution of x, (batch, lru, seq)."""
        return narrow(
            depthwise_conv1d(x_branch, m.weight(), m.weight("bias"), self.kernel.size - 1), 2, x_branch.shape[2]
        )

    def convolution_with_state(self, m: Module, cache: Cache, x_branch: Tensor) -> Tensor:
        """Return the convolution of the new tokens, and keep their last inputs. A single token is joined with those before it,
        also if it is a whole prompt."""
        run, batch = m.run, x_branch.shape[0]
        before = plus(self.kernel, -1)
        if cache.state(m, CONVOLUTION) is None:
            cache.keep_state(
                m, CONVOLUTION, new_tensor(run.memory, (batch, self.hidden, before), run.dtype, CONVOLUTION)
            )
            cache.keep_state(m, RECURRENT, new_tensor(run.memory, (batch, self.lru), fp32, RECURRENT))
        if x_branch.shape[2].size > 1:
            cache.keep_state(m, CONVOLUTION, new_tensor(run.memory, (batch, self.lru, before), run.dtype, CONVOLUTION))
            return self.convolution(m / "conv_1d", x_branch)
        conv_state = new_tensor(run.memory, (batch, self.lru, self.kernel), run.dtype, "inputs of the convolution")
        products = conv_state * reshape((m / "conv_1d").weight(), self.lru, self.kernel)
        x_branch = new_tensor(run.memory, (batch, self.lru), run.dtype, "sum over the kernel")
        del products
        x_branch = unsqueeze(x_branch + (m / "conv_1d").weight("bias"), 2)
        cache.keep_state(m, CONVOLUTION, conv_state)
        return x_branch

    @module
    def rg_lru(self, m: Module, activations: Tensor, positions: Tensor) -> Tensor:
        """Return the output of RecurrentGemmaRglru."""
        batch, seq, lru = activations.shape
        reset = like(unsqueeze(positions, 2), "where to reset", boolean)
        reshape_act = permute(reshape(activations, merge(batch, seq), self.heads, self.block_width), 1, 0, 2)

        res = self.gate(m, "input_gate", reshape_act)
        input_gate = sigmoid(reshape(transpose(res, 0, 1), batch, seq, lru))
        res = self.gate(m, "recurrent_gate", reshape_act)
        recurrent_gate = sigmoid(reshape(transpose(res, 0, 1), batch, seq, lru))

        log_recurrent_gate = scale(recurrent_gate, "mul") * softplus(m.weight("recurrent_param"))
        recurrent_gate = exp(log_recurrent_gate)
        a_square = exp(scale(log_recurrent_gate, "mul"))
        gated_inputs = activations * input_gate
        multiplier = bounded_sqrt(one_minus(a_square))
        multiplier = reset + like(reset, "where not to reset") * multiplier
        normalized_x = gated_inputs * cast(multiplier, activations.dtype)
        cache = m.run.cache
        if cache is not None:
            before = cache.state(m, RECURRENT)
            hidden_states, recurrent_states = rnn_scan(normalized_x, recurrent_gate, reset, before)
            cache.keep_state(m, RECURRENT, recurrent_states)
            return hidden_states
        hidden_states, recurrent_states = rnn_scan(normalized_x, recurrent_gate, reset, None)
        m.run.buffers[self.state_name(m.layer or 0)] = recurrent_states
        return hidden_states

    def gate(self, m: Module, name: str, x: Tensor) -> Tensor:
        """Return a gate: the product of each head with its own weight."""
        return biased_baddbmm(unsqueeze(m.weight(f"{name}_bias"), 1), x, m.weight(f"{name}_weight"), name)


def _the_layer_before(node: Node, grads: list[Tensor]) -> list[Tensor]:
    raise AssertionError("nobody goes backward through what is left behind")


def rnn_scan(
    hidden_states: Tensor, recurrent_gate: Tensor, reset: Tensor, before: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return all states and the last one: RecurrentGemmaRglru._rnn_scan. hidden_states and recurrent_gate are (batch, seq,
    lru), `before` is the state before them. The caller's frame keeps the arguments."""
    _arguments = (hidden_states, recurrent_gate)
    recurrent_gate = recurrent_gate * like(reset, "where not to reset")
    memory, dtype = hidden_states.memory, hidden_states.dtype
    batch, seq, lru = hidden_states.shape
    if seq.size == 1:
        if before is None:
            return hidden_states, cast(select(hidden_states, 1), fp32)
        contextualized_states = cast(recurrent_gate, fp32) * unsqueeze(before, 1)
        cast(hidden_states, fp32)  # is added in place
        return cast(contextualized_states, dtype), select(contextualized_states, 1)
    recurrent_states = new_tensor(memory, (batch, lru), fp32, "initial state") if before is None else before
    contextualized_states = like(hidden_states, "states")
    if seq.size > 2:
        zeros, early = recurrent_states, plus(seq, -3)
        recurrent_states = new_tensor(memory, (batch, lru), fp32, "states")
        # What `.type(acc_dtype)` leaves alone is no copy. The first step multiplies zeros, which require no gradient.
        gates = recurrent_gate if recurrent_gate.dtype is fp32 else Block((early, batch, lru), fp32, "gates in fp32")
        kept = [zeros, Block((early, batch, lru), fp32, "states"), gates]
        earlier_steps([recurrent_states, contextualized_states], (recurrent_gate, hidden_states), kept)
        del zeros, gates, kept
    for _ in range(min(seq.size, 2)):
        recurrent_states = cast(select(recurrent_gate, 1), fp32) * recurrent_states
        recurrent_states = recurrent_states + cast(select(hidden_states, 1), fp32)
        contextualized_states = assign_place(contextualized_states, 1, cast(recurrent_states, dtype))
    return contextualized_states, recurrent_states


FAMILY: Final = Family("recurrent_gemma", RecurrentGemma, Support(tensor_parallel={}, layers_keep_states=True))
