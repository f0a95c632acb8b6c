"""Mamba 2 (models/mamba2/modeling_mamba2.py): state spaces as products within and between chunks of a sequence.

The path in plain torch, as runs without the packages mamba_ssm and causal_conv1d. The sequence is padded to whole chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final, Literal

from memcalc.core.dims import ONE_DIM, Dim, merge
from memcalc.core.dtypes import boolean, fp32
from memcalc.core.ops.axes import cat_dim, narrow, pad_dim, permute, repeat_interleave, select
from memcalc.core.ops.contraction import einsum
from memcalc.core.ops.cumulative import cumsum
from memcalc.core.ops.elementwise import cast, like, mean, power, rsqrt, sub
from memcalc.core.ops.exponential import exp, softplus
from memcalc.core.ops.matmul import bmm
from memcalc.core.ops.routing import masked_fill
from memcalc.core.ops.selection import clamp
from memcalc.core.ops.shape import contiguous, expand, reshape, split, transpose, unsqueeze, view
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.families.base.blocks import act, apply_mask_to_padding_states
from memcalc.families.base.config import Activation, Count, FamilyConfig, Layers, Several
from memcalc.families.base.masks import recurrent_mask
from memcalc.families.base.module import Module, Run, State, Weight, module
from memcalc.families.base.support import Family, Support
from memcalc.families.llama import linear_weights
from memcalc.families.mamba import RECURRENT, Mamba, cached_conv1d

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@dataclass(frozen=True, kw_only=True)
class Mamba2Config(FamilyConfig):
    """The fields and defaults of models/mamba2/configuration_mamba2.py."""

    computed: ClassVar[Sequence[str]] = ("layer_types",)

    num_heads: Count = 128
    head_dim: Count = 64
    vocab_size: Count = 32768
    hidden_size: Count = 4096
    state_size: Several = 128
    num_hidden_layers: Layers = 64
    expand: Count = 2
    conv_kernel: Count = 4
    n_groups: Count = 8
    use_bias: bool = False
    use_conv_bias: bool = True
    hidden_act: Activation = "silu"
    residual_in_fp32: bool = True
    time_step_rank: Count | Literal["auto"] = "auto"
    chunk_size: Several = 256
    tie_word_embeddings: bool = False

    def check(self) -> None:
        super().check()
        inner = self.hidden_size * self.expand
        if inner != self.num_heads * self.head_dim:
            raise ValueError(
                f"hidden_size {self.hidden_size} * expand {self.expand} is not num_heads {self.num_heads} * "
                f"head_dim {self.head_dim}"
            )
        check_groups(self.num_heads, self.n_groups, inner)


def check_groups(heads: int, groups: int, inner: int) -> None:
    """Raise ValueError if the groups do not divide heads and channels evenly."""
    if heads % groups or inner % groups:
        raise ValueError(f"n_groups {groups} does not divide the {heads} heads and {inner} channels")


class StateSpace:
    """A module like Mamba2Mixer, made from its sizes. It takes the place of attention in this family and in hybrids."""

    def __init__(self, *, hidden: Dim, heads: int, head_dim: int, groups: int, state: int, kernel: int, chunk: int,
                 bias: bool, conv_bias: bool, activation: str) -> None:  # fmt: skip
        self.hidden = hidden
        self.heads, self.head_dim = Dim("ssm_heads", heads), Dim("ssm_head_dim", head_dim)
        self.groups, self.state = Dim("ssm_groups", groups), Dim("state", state)
        self.inner = merge(self.heads, self.head_dim)
        self.group_states = merge(self.groups, self.state)
        self.conv_dim = Dim("inner+2·groups·state", self.inner.size + 2 * self.group_states.size)
        self.kernel = Dim("conv_kernel", kernel)
        self.chunk = Dim("chunk", chunk)
        self.bias, self.conv_bias, self.activation = bias, conv_bias, activation

    @property
    def projection(self) -> Dim:
        return Dim("inner+conv+heads", self.inner.size + self.conv_dim.size + self.heads.size)

    def weights(self, path: str) -> Iterator[Weight]:
        yield Weight(f"{path}.dt_bias", (self.heads,), "mixer")
        yield Weight(f"{path}.A_log", (self.heads,), "mixer")
        yield Weight(f"{path}.D", (self.heads,), "mixer")
        yield Weight(f"{path}.conv1d.weight", (self.conv_dim, ONE_DIM, self.kernel), "mixer")
        if self.conv_bias:
            yield Weight(f"{path}.conv1d.bias", (self.conv_dim,), "mixer")
        yield from linear_weights(f"{path}.in_proj", self.hidden, self.projection, "mixer", bias=self.bias)
        yield from self.norm_weights(path)
        yield from linear_weights(f"{path}.out_proj", self.inner, self.hidden, "mixer", bias=self.bias)

    def norm_weights(self, path: str) -> Iterator[Weight]:
        yield Weight(f"{path}.norm.weight", (self.inner,), "norm")

    def states(self) -> tuple[State, ...]:
        """Return what the mixer keeps from token to token."""
        return (
            State("convolution", (self.conv_dim, self.kernel)),
            State(RECURRENT, (self.heads, self.head_dim, self.state), fp32),
        )

    @module
    def forward(self, m: Module, hidden_states: Tensor, mask: Tensor | None) -> Tensor:
        batch, seq, _ = hidden_states.shape
        hidden_states = apply_mask_to_padding_states(hidden_states, mask)
        hidden_states, projected_states = self.project(m, hidden_states)
        a = -exp(cast(m.weight("A_log"), fp32))
        gate, hidden_states_b_c, dt = split(projected_states, self.inner, self.conv_dim, self.heads)
        hidden_states_b_c = transpose(hidden_states_b_c, 1, 2)
        cache = m.run.cache
        state = None if cache is None else cache.state(m, RECURRENT)
        hidden_states_b_c = cached_conv1d(m, m / "conv1d", hidden_states_b_c, self.activation)
        hidden_states_b_c = apply_mask_to_padding_states(transpose(hidden_states_b_c, 1, 2), mask)
        hidden_states, b, c = split(hidden_states_b_c, self.inner, self.group_states, self.group_states)
        _scan_result: object = None
        if state is not None:
            scan_output = self.step(m, state, hidden_states, dt, a, b, c, gate)
        else:
            arguments = (
                view(hidden_states, batch, seq, self.heads, self.head_dim),
                dt,
                a,
                view(b, batch, seq, self.groups, self.state),
                view(c, batch, seq, self.groups, self.state),
                self.chunk,
                m.weight("D"),
                m.weight("dt_bias"),
            )
            if cache is None:
                _scan_result = scan_output = chunk_scan(*arguments)[0]
            else:
                _scan_result = scan_output, final_state = chunk_scan(*arguments)
                cache.update_state(m, RECURRENT, final_state)
            del arguments
            scan_output = reshape(scan_output, batch, seq, self.inner)
        scan_output = self.norm(m / "norm", scan_output, gate)
        return (m / "out_proj").linear(cast(scan_output, m.run.dtype))

    def step(
        self, m: Module, state: Tensor, hidden_states: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, gate: Tensor
    ) -> Tensor:
        """Return the output of the recurrent form for one token, (batch, 1, inner)."""
        batch = hidden_states.shape[0]
        scan_output = selective_state_update(
            state,
            view(hidden_states, batch, self.heads, self.head_dim),
            expand(transpose(dt, 1, 2), batch, self.heads, self.head_dim),
            expand(unsqueeze(unsqueeze(a, 1), 2), self.heads, self.head_dim, self.state),
            view(b, batch, self.groups, self.state),
            view(c, batch, self.groups, self.state),
            expand(unsqueeze(m.weight("D"), 1), self.heads, self.head_dim),
            expand(unsqueeze(m.weight("dt_bias"), 1), self.heads, self.head_dim),
            self.gate_of_step(gate),
        )
        return view(scan_output, batch, ONE_DIM, self.inner)

    def gate_of_step(self, gate: Tensor) -> Tensor | None:
        """Return the gate that the step applies itself; None if the norm behind it does."""
        return None

    def project(self, m: Module, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of the projection, and its output."""
        return hidden_states, (m / "in_proj").linear(hidden_states)

    @module
    def norm(self, m: Module, hidden_states: Tensor, gate: Tensor) -> Tensor:
        """Return the output of MambaRMSNormGated."""
        input_dtype = hidden_states.dtype
        hidden_states = cast(hidden_states, fp32)
        hidden_states = hidden_states * act(cast(gate, fp32), "silu")
        of_a_group = Dim("inner/groups", self.inner.size // self.groups.size)
        hidden_states_group = view(hidden_states, *hidden_states.shape[:-1], self.groups, of_a_group)
        variance = mean(power(hidden_states_group, 2))
        hidden_states_group = hidden_states_group * rsqrt(variance + 1e-6)
        hidden_states = view(hidden_states_group, *hidden_states.shape)
        return m.weight() * cast(hidden_states, input_dtype)


class Mamba2(Mamba):
    """The program of Mamba2ForCausalLM."""

    Config = Mamba2Config
    polynomial = False

    def make_mixer(self) -> StateSpace:
        config = self.config
        return StateSpace(
            hidden=self.hidden, heads=config.num_heads, head_dim=config.head_dim, groups=config.n_groups,
            state=config.state_size, kernel=config.conv_kernel, chunk=config.chunk_size, bias=config.use_bias,
            conv_bias=config.use_conv_bias, activation=config.hidden_act,
        )  # fmt: skip

    def mask(self, run: Run) -> Tensor | None:
        return recurrent_mask(run)


def selective_state_update(
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    dt_bias: Tensor,
    z: Tensor | None,
) -> Tensor:
    """Return the output of mamba2_selective_state_update for one token, (batch, heads, head_dim). hidden_states, dt and z are
    (batch, heads, head_dim), a is (heads, head_dim, state), b and c are (batch, groups, state), d and dt_bias (heads,
    head_dim). The caller's frame keeps the arguments."""
    _arguments = (dt, b, c)
    batch, heads, head_dim = hidden_states.shape
    dt = dt + cast(dt_bias, dt.dtype)
    dt = softplus(dt)
    dt = unsqueeze(dt, 3)
    d_a = exp(cast(dt, fp32) * cast(a, fp32))
    b = reshape(of_each_head(b, heads), batch, heads, ONE_DIM, b.shape[2])
    d_b = dt * b
    d_b_x = d_b * unsqueeze(hidden_states, 3)
    ssm_states = state * d_a + d_b_x
    c = reshape(of_each_head(c, heads), batch, heads, c.shape[2])
    ssm_states = cast(ssm_states, c.dtype)
    flat = merge(batch, heads)
    out = bmm(view(ssm_states, flat, head_dim, c.shape[2]), view(c, flat, c.shape[2], ONE_DIM), "scan output")
    out = view(out, batch, heads, head_dim)
    out = cast(out + hidden_states * d, out.dtype)
    if z is not None:
        out = out * act(z, "silu")
    return cast(out, hidden_states.dtype)


def of_each_head(x: Tensor, heads: Dim) -> Tensor:
    """Return (batch, groups, state) repeated for the heads of each group, (batch, groups, heads/groups, state), contiguous."""
    batch, groups, width = x.shape
    return contiguous(expand(unsqueeze(x, 2), batch, groups, Dim("heads/groups", heads.size // groups.size), width))


def chunk_scan(
    hidden_states: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, chunk: Dim, d: Tensor, dt_bias: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the output of mamba2_chunk_scan, and the last state. hidden_states is (batch, seq, heads, head_dim), dt (batch,
    seq, heads), a (heads), b and c (batch, seq, groups, state). The caller's frame keeps the arguments."""
    _arguments = (hidden_states, b, c)
    batch, seq, heads, head_dim = hidden_states.shape
    chunks = Dim("chunks", -(-seq.size // chunk.size))
    padded = merge(chunks, chunk)
    dt = dt + cast(dt_bias, dt.dtype)
    dt = softplus(dt)
    dt = clamp(dt, 2)
    hidden_states = cast(hidden_states, fp32)
    b = repeat_interleave(cast(b, fp32), 2, heads)
    c = repeat_interleave(cast(c, fp32), 2, heads)
    d_residual = unsqueeze(d, 1) * pad_dim(hidden_states, 1, padded)
    hidden_states = hidden_states * cast(unsqueeze(dt, 3), fp32)
    a = cast(a, hidden_states.dtype) * cast(dt, fp32)
    hidden_states, a, b, c = [into_chunks(t, chunks, chunk) for t in (hidden_states, a, b, c)]
    a = permute(a, 0, 3, 1, 2)
    a_cumsum = cumsum(a, 3)

    # 1. the output within each chunk
    decay = exp(segment_sum(a))
    g = einsum("bclhn,bcshn->bclsh", c, b)
    m = g * permute(decay, 0, 2, 3, 4, 1)
    y_diag = einsum("bclsh,bcshp->bclhp", m, hidden_states)

    # 2. the state within each chunk
    decay_states = exp(sub(narrow(a_cumsum, 3, ONE_DIM), a_cumsum))
    b_decay = b * unsqueeze(permute(decay_states, 0, 2, 3, 1), 4)
    states = einsum("bclhn,bclhp->bchpn", b_decay, hidden_states)

    # 3. the recurrence between chunks
    previous_states = like(narrow(states, 1, ONE_DIM), "initial state")
    one_more = Dim("chunks+1", chunks.size + 1)
    states = cat_dim((previous_states, states), 1, one_more)
    decay_chunk = transpose(exp(segment_sum(pad_dim(select(a_cumsum, 3), 2, one_more))), 1, 3)
    new_states = einsum("bzch,bzhpn->bchpn", decay_chunk, states)
    states, final_state = narrow(new_states, 1, chunks), select(new_states, 1)

    # 4. from states to outputs
    state_decay_out = exp(a_cumsum)
    c_times_states = einsum("bclhn,bchpn->bclhp", c, states)
    y_off = c_times_states * unsqueeze(permute(state_decay_out, 0, 2, 3, 1), 4)
    output = contiguous(y_diag + y_off)
    output = reshape(output, batch, padded, heads, head_dim)
    output = output + d_residual
    if padded.size > seq.size:
        output = narrow(output, 1, seq)
    return output, final_state


def into_chunks(x: Tensor, chunks: Dim, chunk: Dim) -> Tensor:
    """Return a tensor (batch, seq, ...) as (batch, chunks, chunk, ...): reshape_into_chunks."""
    x = pad_dim(x, 1, merge(chunks, chunk))
    return reshape(x, x.shape[0], chunks, chunk, *x.shape[2:])


def segment_sum(x: Tensor) -> Tensor:
    """Return the sums over all segments of a tensor (..., n), as (..., n, n). Backward keeps its two masks."""
    length = x.shape[-1]
    x = expand(unsqueeze(x, len(x.shape)), *x.shape, length)
    mask = triangle(x, length)
    x = masked_fill(x, like(mask, "inverted mask"))
    tensor_segsum = cumsum(x, len(x.shape) - 2)
    mask = triangle(x, length)
    return masked_fill(tensor_segsum, like(mask, "inverted mask"))


def triangle(x: Tensor, length: Dim) -> Tensor:
    """Return torch.tril(torch.ones(length, length, dtype=torch.bool))."""
    return like(new_tensor(x.memory, (length, length), boolean, "ones"), "lower triangle")


FAMILY: Final = Family("mamba2", Mamba2, Support(tensor_parallel={}))
