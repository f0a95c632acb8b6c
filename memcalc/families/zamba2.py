"""Zamba 2 (models/zamba2/modeling_zamba2.py): layers of Mamba 2, in front of some of which a transformer block stands that
all of these share, or that each shares with every second one, and so on.

A shared block's weights are the parameters of the first layer that uses it; low-rank adapters tell its users apart. As Mamba
2, the path in plain torch, as runs without the packages mamba_ssm and causal_conv1d.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, cast

from memcalc.core.dims import Dim, merge
from memcalc.core.ops.axes import chunk_dim
from memcalc.core.ops.shape import cat, clone, transpose, view
from memcalc.families.base.blocks import QKV, Rotary, act, position_ids
from memcalc.families.base.config import Activation, Count, Layers, Probability, RotaryConfig, Several
from memcalc.families.base.layer_types import LEGACY_LAYER_TYPES
from memcalc.families.base.masks import recurrent_mask
from memcalc.families.base.module import Buffer, Module, State, Weight, module
from memcalc.families.base.support import Family, Support
from memcalc.families.llama import Llama, linear_weights
from memcalc.families.mamba2 import StateSpace, check_groups

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping

    from memcalc.core.tensor import Tensor

Block = Literal["linear_attention", "hybrid"]

_DEFAULT_HYBRIDS = (6, 12, 18, 24, 30, 36, 42, 47, 51)
_DEFAULT_BLOCKS: list[Block] = ["hybrid" if i in _DEFAULT_HYBRIDS else "linear_attention" for i in range(54)]


@dataclass(frozen=True, kw_only=True)
class Zamba2Config(RotaryConfig):
    """The fields and defaults of models/zamba2/configuration_zamba2.py. `use_conv_bias` is ignored: the convolution has a
    bias."""

    attribute_map: ClassVar[Mapping[str, str]] = {"layer_types": "layers_block_type", "head_dim": "attention_head_dim"}

    vocab_size: Count = 32000
    pad_token_id: int | None = 0
    max_position_embeddings: Count = 4096
    hidden_size: Count = 2560
    num_hidden_layers: Layers = 54
    layers_block_type: list[Block] | None = None
    hybrid_layer_ids: list[int] | None = None
    mamba_d_state: Several = 64
    mamba_d_conv: Count = 4
    mamba_expand: Count = 2
    mamba_ngroups: Count = 1
    mamba_headdim: Count | None = None
    n_mamba_heads: Count = 8
    chunk_size: Count = 256
    add_bias_linear: bool = False
    intermediate_size: Count | None = None
    hidden_act: Activation = "gelu"
    num_attention_heads: Count = 32
    num_key_value_heads: Count | None = None
    attention_hidden_size: Count | None = None
    attention_head_dim: Count | None = None
    attention_dropout: Probability = 0.0
    num_mem_blocks: Count = 1
    use_shared_attention_adapter: bool = False
    adapter_rank: Count = 128
    use_mem_rope: bool = False
    use_long_context: bool = False
    tie_word_embeddings: bool = True

    @classmethod
    def renamed(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        named = super().renamed(config)
        for name in ("hybrid_layer_ids", "mamba_headdim", "attention_hidden_size", "attention_head_dim"):
            if name in named and named[name] is None:
                raise ValueError(f"field `{name}` is null; it should be left out")
        kinds = named.get("layers_block_type")
        if isinstance(kinds, list):
            named["layers_block_type"] = [LEGACY_LAYER_TYPES.get(str(k), k) for k in cast("list[Any]", kinds)]
        return named

    @property
    def layer_types(self) -> list[Block]:
        """Return the kind of each layer."""
        return list(_DEFAULT_BLOCKS if self.layers_block_type is None else self.layers_block_type)

    @property
    def hybrids(self) -> list[int]:
        """Return the layers that have a shared block before them."""
        return [i for i, kind in enumerate(self.layer_types) if kind == "hybrid"]

    @property
    def width_of_head(self) -> int:
        return 2 * self.hidden_size // self.num_attention_heads

    @property
    def inner(self) -> int:
        """Return the number of channels of a mixer."""
        return self.mamba_expand * self.hidden_size

    def check(self) -> None:
        super().check()
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layers_block_type has {len(self.layer_types)} entries, num_hidden_layers is {self.num_hidden_layers}"
            )
        self.check_derived("hybrid_layer_ids", self.hybrids)
        self.check_derived("mamba_headdim", self.inner // self.n_mamba_heads)
        self.check_derived("attention_hidden_size", 2 * self.hidden_size)
        self.check_derived("attention_head_dim", self.width_of_head)
        if self.inner % self.n_mamba_heads:
            raise ValueError(f"n_mamba_heads {self.n_mamba_heads} does not divide the {self.inner} channels")
        check_groups(self.n_mamba_heads, self.mamba_ngroups, self.inner)
        if self.hybrids:
            self.check_attention()
        if not self.tie_word_embeddings and len(self.hybrids) > self.num_mem_blocks:
            raise ValueError(
                f"tie_word_embeddings false also unties the shared blocks of {len(self.hybrids)} hybrid layers, most of whose "
                f"adapters then idle, which is not modelled; allowed: true, or num_mem_blocks {len(self.hybrids)} or more"
            )

    def check_derived(self, name: str, value: object) -> None:
        """Check fields that transformers computes from others: a given value must equal the computed one."""
        given = getattr(self, name)
        if given is not None and given != value:
            raise ValueError(f"{name} {given} has to be {value}, as the other fields make it, or left out")

    def check_attention(self) -> None:
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads or self.num_attention_heads
        if not self.width_of_head:
            raise ValueError(
                f"num_attention_heads {heads} leaves nothing of 2 * hidden_size {self.hidden_size} to a head"
            )
        if heads % kv_heads:
            raise ValueError(f"num_attention_heads {heads} is not divisible by num_key_value_heads {kv_heads}")
        if self.use_shared_attention_adapter and kv_heads * self.width_of_head != 2 * self.hidden_size:
            raise ValueError(
                f"use_shared_attention_adapter true needs keys and values of 2 * hidden_size {self.hidden_size}; "
                f"num_key_value_heads {kv_heads} make {kv_heads * self.width_of_head}"
            )
        if self.use_mem_rope and self.width_of_head % 2:
            raise ValueError(f"use_mem_rope true needs heads of an even number of dims, not {self.width_of_head}")


class Zamba2(Llama):
    """The program of Zamba2ForCausalLM."""

    positional = 4
    Config = Zamba2Config
    polynomial = False
    final_norm = "final_layernorm"
    layers_share = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.blocks: list[Block] = config.layer_types
        self.hybrids: list[int] = config.hybrids
        self.head_dim = Dim("head_dim", config.width_of_head)
        self.rotary_dim = self.head_dim
        self.ffn = Dim("ffn", config.intermediate_size or 4 * config.hidden_size)
        self.gate_and_up = Dim("2·ffn", 2 * self.ffn.size)
        self.twice_hidden = Dim("2·hidden", 2 * config.hidden_size)
        self.rank = Dim("adapter_rank", config.adapter_rank)
        if config.use_long_context:
            self.max_seq_len = 16384
        self.mixer = StateSpace(
            hidden=self.hidden, heads=config.n_mamba_heads, head_dim=config.inner // config.n_mamba_heads,
            groups=config.mamba_ngroups, state=config.mamba_d_state, kernel=config.mamba_d_conv, chunk=config.chunk_size,
            bias=config.add_bias_linear, conv_bias=True, activation="silu",
        )  # fmt: skip

    def variant(self, i: int) -> Hashable:
        return self.hybrids.index(i) if self.blocks[i] == "hybrid" else None

    def states(self, i: int) -> tuple[State, ...]:
        return self.mixer.states()

    def owner(self, hybrid: int) -> int:
        """Return the layer that owns the parameters of the shared block of hybrid layer `hybrid`."""
        blocks: int = self.config.num_mem_blocks
        return self.hybrids[hybrid % blocks]

    # --- weights and buffers

    def layer_weights(self, i: int) -> Iterator[Weight]:
        if self.blocks[i] != "hybrid":
            yield from self.mamba_weights("")
            return
        yield from linear_weights("linear", self.hidden, self.hidden, "attention", bias=False)
        yield from self.mamba_weights("mamba_decoder.")
        users = [k for k in range(len(self.hybrids)) if self.owner(k) == i]
        if users:
            yield from self.shared_weights("shared_transformer", users)

    def mamba_weights(self, prefix: str) -> Iterator[Weight]:
        yield from self.mixer.weights(f"{prefix}mamba")
        yield from self.norm_weights(f"{prefix}input_layernorm")

    def shared_weights(self, path: str, users: list[int]) -> Iterator[Weight]:
        """Yield the parameters of a shared block, with the adapters of all hybrid layers that use it."""
        q, kv = merge(self.heads, self.head_dim), merge(self.kv_heads, self.head_dim)
        wide, bias = self.twice_hidden, self.config.add_bias_linear
        for name, out in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
            yield from linear_weights(f"{path}.self_attn.{name}", wide, out, "attention", bias=False)
        yield from linear_weights(f"{path}.self_attn.o_proj", q, self.hidden, "attention", bias=False)
        if self.config.use_shared_attention_adapter:
            for name in ("q", "k", "v"):
                adapters = f"{path}.self_attn.linear_{name}_adapter_list"
                yield from self.adapter_weights(adapters, users, wide, wide, "attention")
        yield from linear_weights(f"{path}.feed_forward.gate_up_proj", self.hidden, self.gate_and_up, "mlp", bias=bias)
        yield from linear_weights(f"{path}.feed_forward.down_proj", self.ffn, self.hidden, "mlp", bias=bias)
        adapters = f"{path}.feed_forward.gate_up_proj_adapter_list"
        yield from self.adapter_weights(adapters, users, self.hidden, self.gate_and_up, "mlp")
        yield Weight(f"{path}.input_layernorm.weight", (wide,), "norm")
        yield Weight(f"{path}.pre_ff_layernorm.weight", (self.hidden,), "norm")

    def adapter_weights(
        self, path: str, users: list[int], fan_in: Dim, fan_out: Dim, component: str
    ) -> Iterator[Weight]:
        for k in users:
            yield from linear_weights(f"{path}.{k}.0", fan_in, self.rank, component, bias=False)
            yield from linear_weights(f"{path}.{k}.1", self.rank, fan_out, component, bias=False)

    def buffers(self) -> Iterator[Buffer]:
        if self.config.use_mem_rope:
            yield from super().buffers()

    # --- forward

    @module
    def model(self, m: Module, ids: Tensor) -> Tensor:
        run = m.run
        inputs_embeds = self.embed(m, ids)
        hidden_states = inputs_embeds
        original_hidden_states = clone(inputs_embeds)
        positions = position_ids(run)
        mask = self.masks(run)["full_attention"]
        padding = recurrent_mask(run)
        rotary = self.position_embeddings(m / "rotary_emb", positions) if self.config.use_mem_rope else None
        for i in range(self.layers):
            run.memory.enter(run.memory.phase, i)
            layer = Module(run, f"{m.path}.layers.*", i)
            hidden_states = self.call_layer(
                layer, hidden_states, original_hidden_states, padding, mask, rotary, positions
            )
        run.memory.enter(run.memory.phase, None)
        return self.norm(m / self.final_norm, hidden_states)

    @module
    def layer(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, m: Module, hidden_states: Tensor, original_hidden_states: Tensor, padding: Tensor | None,
        mask: Tensor | None, rotary: Rotary | None, positions: Tensor,
    ) -> Tensor:  # fmt: skip
        assert m.layer is not None
        if self.blocks[m.layer] != "hybrid":
            return self.mamba_layer(m, hidden_states, padding)
        hybrid = self.hybrids.index(m.layer)
        shared = Module(m.run, f"{m.path}.shared_transformer", self.owner(hybrid))
        transformer_hidden_states = self.shared_transformer(
            shared, hidden_states, original_hidden_states, mask, rotary, hybrid
        )
        transformer_hidden_states = (m / "linear").linear(transformer_hidden_states)
        mamba_decoder = partial(self.mamba_layer, transformer_hidden_states=transformer_hidden_states)
        if m.run.recomputes(m.layer):  # a layer of its own within this one
            return m.run.checkpoint(mamba_decoder, m / "mamba_decoder", hidden_states, padding)
        return mamba_decoder(m / "mamba_decoder", hidden_states, padding)

    @module
    def mamba_layer(
        self,
        m: Module,
        hidden_states: Tensor,
        padding: Tensor | None,
        transformer_hidden_states: Tensor | None = None,
    ) -> Tensor:
        """Return the output of Zamba2MambaDecoderLayer."""
        residual = hidden_states
        if transformer_hidden_states is not None:
            hidden_states = hidden_states + transformer_hidden_states
        hidden_states = self.norm(m / "input_layernorm", hidden_states)
        hidden_states = self.mixer.forward(m / "mamba", hidden_states, padding)
        return residual + hidden_states

    @module
    def shared_transformer(
        self, m: Module, hidden_states: Tensor, original_hidden_states: Tensor, mask: Tensor | None,
        rotary: Rotary | None, hybrid: int,
    ) -> Tensor:  # fmt: skip
        """Return the output of Zamba2AttentionDecoderLayer for hybrid layer `hybrid`."""
        hidden_states = cat((hidden_states, original_hidden_states), self.twice_hidden)
        hidden_states = self.norm(m / "input_layernorm", hidden_states)
        hidden_states, _weights = self.attention(m / "self_attn", hidden_states, (rotary, hybrid), mask)  # pyright: ignore[reportArgumentType]
        hidden_states = self.norm(m / "pre_ff_layernorm", hidden_states)
        return self.feed_forward(m / "feed_forward", hidden_states, hybrid)

    def rotated_qkv(self, m: Module, hidden_states: Tensor, rotary: Any) -> QKV:
        position_embeddings, hybrid = rotary
        batch, seq, _ = hidden_states.shape
        projected: list[Tensor] = []
        for name in ("q", "k", "v"):
            projected.append((m / f"{name}_proj").linear(hidden_states))
        if self.config.use_shared_attention_adapter:
            for k, name in enumerate(("q", "k", "v")):
                projected[k] = projected[k] + adapted(m / f"linear_{name}_adapter_list.{hybrid}", hidden_states)
        q, k, v = (
            transpose(view(x, batch, seq, heads, self.head_dim), 1, 2)
            for x, heads in zip(projected, (self.heads, self.kv_heads, self.kv_heads), strict=True)
        )
        del projected
        if position_embeddings is not None:
            q, k = self.rotate(q, k, *position_embeddings)
        return q, k, v

    @module
    def feed_forward(self, m: Module, hidden_state: Tensor, hybrid: int) -> Tensor:
        """Return the output of Zamba2MLP."""
        gate_up_state = (m / "gate_up_proj").linear(hidden_state)
        gate_up_state = gate_up_state + adapted(m / f"gate_up_proj_adapter_list.{hybrid}", hidden_state)
        gate, up = chunk_dim(gate_up_state, 2, 2)
        del gate_up_state
        hidden_state = act(gate, self.config.hidden_act) * up
        return (m / "down_proj").linear(hidden_state)


def adapted(m: Module, x: Tensor) -> Tensor:
    """Return the output of a low-rank adapter, an nn.Sequential of two linear layers."""
    return (m / "1").linear((m / "0").linear(x))


FAMILY: Final = Family("zamba2", Zamba2, Support(tensor_parallel={}))
