"""Mamba (models/mamba/modeling_mamba.py): selective state spaces in place of attention.

The path in plain torch, as runs without the packages mamba_ssm and causal_conv1d: a Python loop over the sequence, each
of whose steps keeps its state for backward.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from memcalc.core.dims import ONE_DIM, Dim, plus
from memcalc.core.dtypes import fp32
from memcalc.core.ops.axes import cat_dim, chunk_dim, narrow, select, squeeze
from memcalc.core.ops.convolution import depthwise_conv1d
from memcalc.core.ops.elementwise import cast
from memcalc.core.ops.exponential import exp, softplus
from memcalc.core.ops.matmul import bmm, matmul, weight_times
from memcalc.core.ops.scan import Block, Product, earlier_steps, stack_steps
from memcalc.core.ops.shape import split, transpose, unsqueeze
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.families.base.blocks import act, apply_mask_to_padding_states, own_head_loss, rms_norm
from memcalc.families.base.config import Activation, Count, FamilyConfig, Layers
from memcalc.families.base.module import Module, Run, State, Weight, module
from memcalc.families.base.program import Program
from memcalc.families.base.support import Family, Support
from memcalc.families.llama import linear_weights

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence


@dataclass(frozen=True, kw_only=True)
class MambaConfig(FamilyConfig):
    """The fields and defaults of models/mamba/configuration_mamba.py."""

    computed: ClassVar[Sequence[str]] = ("layer_types",)
    given: ClassVar[Sequence[str]] = ("intermediate_size",)

    vocab_size: Count = 50280
    hidden_size: Count = 768
    intermediate_size: Count | None = None
    state_size: Count = 16
    num_hidden_layers: Layers = 32
    expand: Count = 2
    conv_kernel: Count = 4
    use_bias: bool = False
    use_conv_bias: bool = True
    hidden_act: Activation = "silu"
    residual_in_fp32: bool = True
    time_step_rank: Count | Literal["auto"] = "auto"
    tie_word_embeddings: bool = True

    @property
    def inner(self) -> int:
        """Return the number of channels of a mixer."""
        return self.intermediate_size or self.expand * self.hidden_size


CONVOLUTION: Final = "convolution"
RECURRENT: Final = "recurrent state"
"""The name of the state of a recurrence."""


class SelectiveMixer:
    """A module like MambaMixer, made from its sizes. It takes the place of attention in this family and in hybrids."""

    def __init__(self, *, hidden: Dim, inner: int, state: int, kernel: int, rank: int | str, bias: bool, conv_bias: bool,
                 activation: str) -> None:  # fmt: skip
        self.hidden, self.inner, self.state = hidden, Dim("inner", inner), Dim("state", state)
        self.kernel = Dim("conv_kernel", kernel)
        self.rank = Dim("time_step_rank", math.ceil(hidden.size / 16) if isinstance(rank, str) else rank)
        self.bias, self.conv_bias, self.activation = bias, conv_bias, activation

    def weights(self, path: str) -> Iterator[Weight]:
        inner = self.inner
        time_step_b_c = Dim("time_step_rank+2·state", self.rank.size + 2 * self.state.size)
        yield Weight(f"{path}.A_log", (inner, self.state), "mixer")
        yield Weight(f"{path}.D", (inner,), "mixer")
        yield Weight(f"{path}.conv1d.weight", (inner, ONE_DIM, self.kernel), "mixer")
        if self.conv_bias:
            yield Weight(f"{path}.conv1d.bias", (inner,), "mixer")
        in_proj = Dim("2·inner", 2 * inner.size)
        yield from linear_weights(f"{path}.in_proj", self.hidden, in_proj, "mixer", bias=self.bias)
        yield from linear_weights(f"{path}.x_proj", inner, time_step_b_c, "mixer", bias=False)
        yield from linear_weights(f"{path}.dt_proj", self.rank, inner, "mixer", bias=True)
        yield from linear_weights(f"{path}.out_proj", inner, self.hidden, "mixer", bias=self.bias)

    def states(self) -> tuple[State, ...]:
        """Return what the mixer keeps from token to token."""
        return (
            State(CONVOLUTION, (self.inner, self.kernel)),
            State(RECURRENT, (self.inner, self.state), fp32),
        )

    used_by_itself: ClassVar[tuple[str, ...]] = (
        "conv1d.weight", "conv1d.bias", "dt_proj.weight", "dt_proj.bias", "x_proj.weight", "out_proj.weight",
        "out_proj.bias",
    )  # fmt: skip
    """The weights of inner modules that the mixer's own forward reads, some of them for the fused kernel."""

    def external(self, path: str) -> tuple[tuple[str, str], ...]:
        """Return the pairs of module and weight, as a program lists them, for the mixer at `path`."""
        return tuple((path, f"{path}.{name}") for name in self.used_by_itself)

    @module
    def forward(self, m: Module, hidden_states: Tensor, mask: Tensor | None) -> Tensor:
        hidden_states = apply_mask_to_padding_states(hidden_states, mask)
        projected_states = transpose((m / "in_proj").linear(hidden_states), 1, 2)
        a = -exp(cast(m.weight("A_log"), fp32))
        cache = m.run.cache
        if cache is None:
            self.offer_to_the_fused_kernel(m)
        hidden_states_b_c, gate = chunk_dim(projected_states, 1, 2)
        hidden_states_b_c = cached_conv1d(m, m / "conv1d", hidden_states_b_c, self.activation)
        hidden_states_b_c = apply_mask_to_padding_states(transpose(hidden_states_b_c, 1, 2), mask)
        time_step, b, c = split((m / "x_proj").linear(hidden_states_b_c), self.rank, self.state, self.state)
        time_step, b, c = self.normalise(m, time_step, b, c)
        time_step = weight_times((m / "dt_proj").weight(), transpose(time_step, 1, 2), "time step")
        time_proj_bias = cast((m / "dt_proj").weight("bias"), fp32)
        d = m.weight("D")
        state = None if cache is None else cache.state(m, RECURRENT)
        _scan_result: object = None
        if state is not None:
            x, dt, z = (select(one, 2) for one in (transpose(hidden_states_b_c, 1, 2), time_step, gate))
            scan_output = selective_state_update(state, x, dt, a, select(b, 1), select(c, 1), d, z, time_proj_bias)
            scan_output = unsqueeze(scan_output, 2)
        else:
            arguments = (transpose(hidden_states_b_c, 1, 2), time_step, a, b, c, d, gate, time_proj_bias)
            if cache is None:
                _scan_result = scan_output = selective_scan(*arguments)[0]
            else:
                _scan_result = scan_output, final_state = selective_scan(*arguments)
                cache.update_state(m, RECURRENT, final_state)
            del arguments
        return (m / "out_proj").linear(cast(transpose(scan_output, 1, 2), m.run.dtype))

    def offer_to_the_fused_kernel(self, m: Module) -> None:
        """Make the arguments of mamba_inner_fn, as transformers does before it finds that the kernel is missing."""
        _d = cast(m.weight("D"), fp32)
        _out_proj_bias = cast((m / "out_proj").weight("bias"), fp32) if self.bias else None
        _delta_bias = cast((m / "dt_proj").weight("bias"), fp32)

    def normalise(self, m: Module, time_step: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the parts of x_proj's output; related families apply norms to them."""
        return time_step, b, c


class Mamba(Program):
    """The program of MambaForCausalLM."""

    Config: type[FamilyConfig] = MambaConfig
    attention_kinds = ("eager",)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.layers = config.num_hidden_layers
        self.vocab = Dim("vocab", config.vocab_size)
        self.hidden = Dim("hidden", config.hidden_size)
        self.mixer = self.make_mixer()
        self.max_seq_len = 2048  # what its published models were trained with; nothing limits it

    def make_mixer(self) -> Any:
        return SelectiveMixer(**self.mixer_sizes())

    @property
    def external(self) -> tuple[tuple[str, str], ...]:  # type: ignore[override]
        own = isinstance(self.mixer, SelectiveMixer)
        return self.mixer.external("backbone.layers.*.mixer") if own else ()

    def mixer_sizes(self) -> dict[str, Any]:
        config = self.config
        return {
            "hidden": self.hidden, "inner": config.inner, "state": config.state_size,
            "kernel": config.conv_kernel, "rank": config.time_step_rank, "bias": config.use_bias,
            "conv_bias": config.use_conv_bias, "activation": config.hidden_act,
        }  # fmt: skip

    def states(self, i: int) -> tuple[State, ...]:
        return self.mixer.states()

    def branch(self, batch: int, seq: int) -> Hashable:
        return super().branch(batch, seq), min(seq, 3)  # the loop's last two steps are written out

    # --- weights

    def weights(self) -> Iterator[Weight]:
        yield Weight("backbone.embeddings.weight", (self.vocab, self.hidden), "embedding")
        yield from self.stack("backbone.layers")
        yield Weight("backbone.norm_f.weight", (self.hidden,), "norm")
        if not self.config.tie_word_embeddings:
            yield Weight("lm_head.weight", (self.vocab, self.hidden), "head")

    def layer_weights(self, i: int) -> Iterator[Weight]:
        yield Weight("norm.weight", (self.hidden,), "norm")
        yield from self.mixer.weights("mixer")

    # --- forward

    def forward(self, run: Run, ids: Tensor) -> Tensor:
        """Return MambaForCausalLM.forward(input_ids=ids, labels=ids).loss."""
        root = Module(run, "")
        hidden_states = self.model(root / "backbone", ids)
        run.memory.enter(run.memory.phase, None)
        run.memory.scope = "lm_head"
        tied = self.config.tie_word_embeddings
        head = root / ("backbone.embeddings" if tied else "lm_head")
        return own_head_loss(head, lambda x: cast(head.linear(cast(x, run.dtype)), fp32), hidden_states, ids)

    @module
    def model(self, m: Module, ids: Tensor) -> Tensor:
        inputs_embeds = (m / "embeddings").embedding(ids)
        hidden_states = inputs_embeds
        mask = self.mask(m.run)
        for i in range(self.layers):
            m.run.memory.enter(m.run.memory.phase, i)
            hidden_states = self.call_layer(Module(m.run, f"{m.path}.layers.*", i), hidden_states, mask)
        m.run.memory.enter(m.run.memory.phase, None)
        return self.norm(m / "norm_f", hidden_states)

    def mask(self, run: Run) -> Tensor | None:
        """Return the collator's mask, unchanged."""
        return run.attention_mask

    @module
    def norm(self, m: Module, hidden_states: Tensor) -> Tensor:
        return rms_norm(m, hidden_states)

    @module
    def layer(self, m: Module, hidden_states: Tensor, mask: Tensor | None) -> Tensor:
        residual = hidden_states
        hidden_states = self.norm(m / "norm", cast(hidden_states, m.run.dtype))
        if self.config.residual_in_fp32:
            residual = cast(residual, fp32)
        hidden_states = self.mixer.forward(m / "mixer", hidden_states, mask)
        return residual + hidden_states


def causal_conv1d(m: Module, hidden_states: Tensor, activation: str) -> Tensor:
    """Return the output of causal_conv1d_fn, (batch, channels, seq): padded on both sides, then cut to the sequence."""
    with m:
        seq, kernel = hidden_states.shape[2], m.weight().shape[2]
        weight = unsqueeze(squeeze(m.weight(), 1), 1)
        dtype = hidden_states.dtype
        out = depthwise_conv1d(cast(hidden_states, weight.dtype), weight, m.optional("bias"), kernel.size - 1)
        out = narrow(out, 2, seq)
        out = act(out, activation)
        return cast(out, dtype)


def cached_conv1d(m: Module, conv: Module, hidden_states: Tensor, activation: str) -> Tensor:
    """Return the output of a mixer's causal convolution, (batch, channels, seq). With a cache the mixer `m` keeps its last
    inputs, and a single token goes through causal_conv1d_update."""
    cache = m.run.cache
    if cache is None:
        return causal_conv1d(conv, hidden_states, activation)
    conv_state = cache.state(m, CONVOLUTION)
    if conv_state is not None:
        return causal_conv1d_update(conv, hidden_states, conv_state, activation)
    seq = hidden_states.shape[2]
    hidden_states = cache.update_conv_state(m, hidden_states, conv.weight().shape[2])
    hidden_states = causal_conv1d(conv, hidden_states, activation)
    return narrow(hidden_states, 2, seq)


def causal_conv1d_update(m: Module, hidden_states: Tensor, conv_state: Tensor, activation: str) -> Tensor:
    """Return the output of causal_conv1d_update for one token, (batch, channels, 1). The state is changed in place."""
    with m:
        weight = unsqueeze(squeeze(m.weight(), 1), 1)
        dtype, inputs = hidden_states.dtype, plus(conv_state.shape[2], 1)
        hidden_states_new = cast(cat_dim((conv_state, hidden_states), 2, inputs), weight.dtype)
        out = narrow(depthwise_conv1d(hidden_states_new, weight, m.optional("bias"), 0), 2, hidden_states.shape[2])
        out = act(out, activation)
        return cast(out, dtype)


def selective_state_update(
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    z: Tensor,
    dt_bias: Tensor,
) -> Tensor:
    """Return the output of mamba_selective_state_update for one token, (batch, channels). hidden_states, dt and z are (batch,
    channels), a is (channels, state), b and c are (batch, state)."""
    _arguments = (hidden_states, dt, b, c, z)
    dt = dt + cast(dt_bias, dt.dtype)
    dt = softplus(dt)
    d_a = exp(unsqueeze(cast(dt, fp32), 2) * a)
    d_b = unsqueeze(cast(dt, fp32), 2) * unsqueeze(cast(b, fp32), 1)
    d_b_x = d_b * unsqueeze(cast(hidden_states, fp32), 2)
    ssm_state = state * d_a + d_b_x
    out = squeeze(matmul(cast(ssm_state, c.dtype), unsqueeze(c, 2), "scan output"), 2)
    out = out + hidden_states * d
    out = out * act(z, "silu")
    return cast(out, hidden_states.dtype)


def selective_scan(
    hidden_states: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, z: Tensor, delta_bias: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the output of mamba_selective_scan, and its last state. hidden_states, dt and z are (batch, channels, seq), a is
    (channels, state), b and c are (batch, seq, state). The caller's frame keeps all of them."""
    d = cast(d, fp32)
    dt = dt + unsqueeze(cast(delta_bias, dt.dtype), 1)
    dt = softplus(dt)
    discrete_a = exp(unsqueeze(unsqueeze(a, 0), 2) * unsqueeze(dt, 3))
    discrete_b = unsqueeze(dt, 3) * cast(unsqueeze(b, 1), fp32)
    delta_b_u = discrete_b * cast(unsqueeze(hidden_states, 3), fp32)
    scan_outputs, ssm_state = scan(discrete_a, delta_b_u, c, hidden_states)
    scan_output = stack_steps(scan_outputs, 2, hidden_states.shape[2])
    scan_output = scan_output + hidden_states * unsqueeze(unsqueeze(d, 0), 2)
    scan_output = scan_output * act(z, "silu")
    return scan_output, ssm_state


def scan(discrete_a: Tensor, delta_b_u: Tensor, c: Tensor, hidden_states: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return the outputs of the loop over the sequence, and the last state. Each step keeps the previous state in fp32 and its
    own in the model's dtype."""
    memory, dtype = discrete_a.memory, hidden_states.dtype
    batch, channels, seq, width = discrete_a.shape
    state = (batch, channels, width)
    ssm_state = new_tensor(memory, state, dtype, "initial state")
    scan_outputs: list[Tensor] = []
    if seq.size > 2:
        early, initial = plus(seq, -2), ssm_state
        ssm_state = new_tensor(memory, state, fp32, "states")
        scan_outputs.append(new_tensor(memory, (batch, channels, early), dtype, "scan outputs"))
        states = Block((plus(seq, -3), *state), fp32, "states")
        # What `.to(input_dtype)` leaves alone is no copy.
        copies = ssm_state if dtype is fp32 else Block((early, *state), dtype, "states in the model's dtype")
        # A product under autocast keeps a copy of what is not in its dtype.
        factors = c if c.dtype is dtype else Block((early, batch, width), dtype, "c in the product's dtype")
        kept = [discrete_a, factors, initial, states, copies]
        product = Product((batch, channels, early, width), dtype, "scan output")
        earlier_steps([ssm_state, scan_outputs[0]], (discrete_a, delta_b_u, c), kept, product)
        del kept
        del initial, copies, factors
    for _ in range(min(seq.size, 2)):
        ssm_state = select(discrete_a, 2) * ssm_state + select(delta_b_u, 2)
        scan_output = bmm(cast(ssm_state, dtype), unsqueeze(select(c, 1), 2), "scan output")
        scan_outputs.append(select(scan_output, 2))
    return scan_outputs, ssm_state


FAMILY: Final = Family("mamba", Mamba, Support(tensor_parallel={}))
