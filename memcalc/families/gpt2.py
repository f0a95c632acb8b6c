"""GPT-2 (models/gpt2/modeling_gpt2.py)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final

from memcalc.core.dims import Dim, merge
from memcalc.core.ops.elementwise import cast, dropout, scale, softmax
from memcalc.core.ops.matmul import matmul
from memcalc.core.ops.replaceable import replaceable
from memcalc.core.ops.shape import contiguous, reshape, split, transpose, view
from memcalc.families.base.blocks import Attended, act, lm_head_loss, position_ids, sdpa_attention
from memcalc.families.base.config import Activation, Count, FamilyConfig, Layers, Probability, check_divides
from memcalc.families.base.dropouts import dropout_module
from memcalc.families.base.masks import causal_mask
from memcalc.families.base.module import Module, Run, Weight, module
from memcalc.families.base.program import Program
from memcalc.families.base.support import Family, Support

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from memcalc.core.tensor import Tensor
    from memcalc.families.base.architecture import Architecture


@dataclass(frozen=True, kw_only=True)
class GPT2Config(FamilyConfig):
    """The fields and defaults of models/gpt2/configuration_gpt2.py."""

    attribute_map: ClassVar[Mapping[str, str]] = {
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    }
    refused: ClassVar[Mapping[str, Sequence[Any]]] = {"add_cross_attention": (False, None)}

    vocab_size: Count = 50257
    n_positions: Count = 1024
    n_embd: Count = 768
    n_layer: Layers = 12
    n_head: Count = 12
    n_inner: Count | None = None
    activation_function: Activation = "gelu_new"
    resid_pdrop: Probability = 0.1
    embd_pdrop: Probability = 0.1
    attn_pdrop: Probability = 0.1
    reorder_and_upcast_attn: bool = False
    tie_word_embeddings: bool = True

    def check(self) -> None:
        super().check()
        check_divides(self, "n_embd", "n_head")


class GPT2(Program):
    """The program of GPT2LMHeadModel."""

    positional = 2
    Config: type[FamilyConfig] = GPT2Config
    blocks_take_positions = True
    """True if a block is called with the numbers of the positions, which a checkpoint keeps with its arguments."""
    embedding = "transformer.wte"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if config.reorder_and_upcast_attn:  # another eager attention, in fp32, that is not written out here
            self.attention_kinds = ("sdpa",)
        self.layers = config.n_layer
        self.vocab = Dim("vocab", config.vocab_size)
        self.hidden = Dim("hidden", config.n_embd)
        self.ffn = Dim("ffn", config.n_inner or 4 * config.n_embd)
        self.heads = Dim("heads", config.n_head)
        self.kv_heads = self.heads
        self.head_dim = Dim("head_dim", config.n_embd // config.n_head)
        self.positions = Dim("positions", config.n_positions)
        self.max_seq_len = config.n_positions
        self.positions_limit = config.n_positions

    # --- weights and buffers

    def weights(self) -> Iterator[Weight]:
        yield Weight("transformer.wte.weight", (self.vocab, self.hidden), "embedding")
        yield Weight("transformer.wpe.weight", (self.positions, self.hidden), "embedding")
        yield from self.stack("transformer.h")
        yield from norm_weights("transformer.ln_f", self.hidden)
        if not self.config.tie_word_embeddings:
            yield Weight("lm_head.weight", (self.vocab, self.hidden), "head")

    def layer_weights(self, i: int) -> Iterator[Weight]:
        qkv = Dim("3·hidden", 3 * self.hidden.size)
        yield from norm_weights("ln_1", self.hidden)
        yield from conv1d_weights("attn.c_attn", self.hidden, qkv, "attention")
        yield from conv1d_weights("attn.c_proj", self.hidden, self.hidden, "attention")
        yield from norm_weights("ln_2", self.hidden)
        yield from conv1d_weights("mlp.c_fc", self.hidden, self.ffn, "mlp")
        yield from conv1d_weights("mlp.c_proj", self.ffn, self.hidden, "mlp")

    # --- forward

    def forward(self, run: Run, ids: Tensor) -> Tensor:
        """Return GPT2LMHeadModel.forward(input_ids=ids, labels=ids).loss."""
        root = Module(run, "")
        hidden_states = self.model(root / "transformer", ids)
        run.memory.enter(run.memory.phase, None)
        return lm_head_loss(root / self.head_name, partial(self.head, root), hidden_states, ids)

    @module
    def model(self, m: Module, ids: Tensor) -> Tensor:
        run = m.run
        inputs_embeds = (m / "wte").embedding(ids)
        positions = position_ids(run)
        position_embeds = (m / "wpe").embedding(positions)
        run.memory.scope = m.path
        hidden_states = inputs_embeds + position_embeds
        mask = causal_mask(run)
        hidden_states = dropout_module(hidden_states, self.config.embd_pdrop)
        held = positions if self.blocks_take_positions else None
        for i in range(self.layers):
            run.memory.enter(run.memory.phase, i)
            hidden_states = self.call_layer(Module(run, f"{m.path}.h.*", i), hidden_states, mask, held)
        run.memory.enter(run.memory.phase, None)
        hidden_states = (m / "ln_f").layer_norm(hidden_states)
        return view(hidden_states, *hidden_states.shape)

    @module
    def layer(self, m: Module, hidden_states: Tensor, mask: Tensor | None, positions: Tensor | None) -> Tensor:
        residual = hidden_states
        hidden_states = (m / "ln_1").layer_norm(hidden_states)
        attn_output, _weights = self.attention(m / "attn", hidden_states, mask)
        hidden_states = attn_output + residual
        residual = hidden_states
        hidden_states = (m / "ln_2").layer_norm(hidden_states)
        feed_forward_hidden_states = self.mlp(m / "mlp", hidden_states)
        return residual + feed_forward_hidden_states

    @module
    def attention(self, m: Module, hidden_states: Tensor, mask: Tensor | None) -> Attended:
        batch, seq, hidden = hidden_states.shape
        query_states, key_states, value_states = split((m / "c_attn").conv1d(hidden_states), hidden, hidden, hidden)
        key_states = transpose(view(key_states, batch, seq, self.heads, self.head_dim), 1, 2)
        value_states = transpose(view(value_states, batch, seq, self.heads, self.head_dim), 1, 2)
        query_states = transpose(view(query_states, batch, seq, self.heads, self.head_dim), 1, 2)
        key_states, value_states = m.cached(key_states, value_states)
        attn_output, attn_weights = self.attend(m, query_states, key_states, value_states, mask)
        attn_output = contiguous(reshape(attn_output, batch, seq, merge(self.heads, self.head_dim)))
        attn_output = (m / "c_proj").conv1d(attn_output)
        attn_output = dropout_module(attn_output, self.config.resid_pdrop)
        return attn_output, attn_weights

    def attend(self, m: Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Attended:
        if m.run.attention == "eager":
            return eager_attention(q, k, v, mask, p=self.config.attn_pdrop)
        return sdpa_attention(q, k, v, mask)

    @module
    def mlp(self, m: Module, hidden_states: Tensor) -> Tensor:
        hidden_states = (m / "c_fc").conv1d(hidden_states)
        hidden_states = act(hidden_states, self.config.activation_function)
        hidden_states = (m / "c_proj").conv1d(hidden_states)
        return dropout_module(hidden_states, self.config.resid_pdrop)


@replaceable
def eager_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, p: float) -> Attended:
    """Return GPT-2's own eager_attention_forward: softmax in the scores' dtype, and a transposed view as output."""
    attn_weights = scale(matmul(q, transpose(k, 2, 3), "attention scores"), "mul")
    if mask is not None:
        attn_weights = attn_weights + mask
    attn_weights = cast(softmax(attn_weights), v.dtype)
    attn_weights = dropout(attn_weights, p)
    attn_output = matmul(attn_weights, v, "attention output")
    attn_output = transpose(attn_output, 1, 2)
    return attn_output, attn_weights


def norm_weights(name: str, dim: Dim) -> Iterator[Weight]:
    """Yield the parameters of an nn.LayerNorm."""
    yield Weight(f"{name}.weight", (dim,), "norm")
    yield Weight(f"{name}.bias", (dim,), "norm")


def conv1d_weights(name: str, fan_in: Dim, fan_out: Dim, component: str) -> Iterator[Weight]:
    """Yield the parameters of transformers' Conv1D, a linear layer whose weight is transposed."""
    yield Weight(f"{name}.weight", (fan_in, fan_out), component)
    yield Weight(f"{name}.bias", (fan_out,), component)


def _architecture(config: Any) -> Architecture:
    """Return the dims and options that Megatron's GPTModel is built from."""
    from memcalc.families.base.architecture import Architecture

    return Architecture(
        layers=config.n_layer,
        hidden=config.n_embd,
        heads=config.n_head,
        kv_heads=config.n_head,
        head_dim=config.n_embd // config.n_head,
        ffn=config.n_inner or 4 * config.n_embd,
        vocab=config.vocab_size,
        gated=False,
        rms_norm=False,
        qkv_bias=True,
        linear_bias=True,
        qk_norm=False,
        positions=config.n_positions,
        tied=config.tie_word_embeddings,
        hidden_dropout=config.resid_pdrop,
        attention_dropout=config.attn_pdrop,
    )


FAMILY: Final = Family(
    "gpt2",
    GPT2,
    Support(
        tensor_parallel={},
        conv1d=True,
        chunked_loss=True,
        megatron_kernels=True,
        activation_field="activation_function",
        megatron_activations=("gelu", "gelu_fast", "gelu_new", "gelu_pytorch_tanh"),
        architecture=_architecture,
        megatron_deepspeed=True,
    ),
)
