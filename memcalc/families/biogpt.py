"""BioGPT (models/biogpt/modeling_biogpt.py): OPT's layers with BERT's attention, the embedding scaled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from memcalc.core.dims import Dim
from memcalc.core.dtypes import fp32
from memcalc.core.ops.elementwise import dropout, scale
from memcalc.core.ops.shape import reshape, transpose, view
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.families.base.blocks import (
    Attended,
    act,
    own_head_loss,
    plain_eager_attention,
    position_ids,
    sdpa_attention,
)
from memcalc.families.base.config import Activation, Count, FamilyConfig, Layers, Probability, check_divides
from memcalc.families.base.masks import causal_mask, causal_mask_beside_ones, length_so_far, tokens_of
from memcalc.families.base.module import Module, Run, Weight, module
from memcalc.families.base.program import Program
from memcalc.families.base.support import Family, Support
from memcalc.families.gpt2 import norm_weights
from memcalc.families.llama import linear_weights

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_OFFSET = 2
"""BioGptLearnedPositionalEmbedding has two more rows than positions."""


@dataclass(frozen=True, kw_only=True)
class BioGptConfig(FamilyConfig):
    """The fields and defaults of models/biogpt/configuration_biogpt.py."""

    refused: ClassVar[Mapping[str, Sequence[Any]]] = {"layerdrop": (0, 0.0)}

    vocab_size: Count = 42384
    pad_token_id: int | None = 1
    hidden_size: Count = 1024
    num_hidden_layers: Layers = 24
    num_attention_heads: Count = 16
    intermediate_size: Count = 4096
    hidden_act: Activation = "gelu"
    hidden_dropout_prob: Probability = 0.1
    attention_probs_dropout_prob: Probability = 0.1
    max_position_embeddings: Count = 1024
    activation_dropout: Probability = 0.0
    scale_embedding: bool = True
    tie_word_embeddings: bool = True

    def check(self) -> None:
        super().check()
        check_divides(self, "hidden_size", "num_attention_heads")


class BioGpt(Program):
    """The program of BioGptForCausalLM."""

    Config: type[FamilyConfig] = BioGptConfig
    base = "biogpt"
    decoder = "output_projection"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.layers = config.num_hidden_layers
        self.vocab = Dim("vocab", config.vocab_size)
        self.hidden = Dim("hidden", config.hidden_size)
        self.ffn = Dim("ffn", config.intermediate_size)
        self.heads = Dim("heads", config.num_attention_heads)
        self.kv_heads = self.heads
        self.head_dim = Dim("head_dim", config.hidden_size // config.num_attention_heads)
        self.positions = Dim("positions+2", config.max_position_embeddings + _OFFSET)
        self.max_seq_len = config.max_position_embeddings
        self.positions_limit = config.max_position_embeddings
        self.activation: str = config.hidden_act
        self.p: float = config.hidden_dropout_prob

    # --- weights

    def weights(self) -> Iterator[Weight]:
        yield Weight(f"{self.base}.embed_tokens.weight", (self.vocab, self.hidden), "embedding")
        yield from self.position_weights()
        yield from self.stack(f"{self.base}.layers")
        yield from norm_weights(f"{self.base}.layer_norm", self.hidden)
        if not self.config.tie_word_embeddings:
            yield Weight(f"{self.decoder}.weight", (self.vocab, self.hidden), "head")

    def position_weights(self) -> Iterator[Weight]:
        yield Weight(f"{self.base}.embed_positions.weight", (self.positions, self.hidden), "embedding")

    def layer_weights(self, i: int) -> Iterator[Weight]:
        for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
            yield from linear_weights(f"self_attn.{name}", self.hidden, self.hidden, "attention", bias=True)
        yield from norm_weights("self_attn_layer_norm", self.hidden)
        yield from linear_weights("fc1", self.hidden, self.ffn, "mlp", bias=True)
        yield from linear_weights("fc2", self.ffn, self.hidden, "mlp", bias=True)
        yield from norm_weights("final_layer_norm", self.hidden)

    # --- forward

    def forward(self, run: Run, ids: Tensor) -> Tensor:
        """Return BioGptForCausalLM.forward(input_ids=ids, labels=ids).loss."""
        root = Module(run, "")
        hidden_states = self.model(root / self.base, ids)
        run.memory.enter(run.memory.phase, None)
        run.memory.scope = self.decoder
        tied = self.config.tie_word_embeddings
        head = root / f"{self.base}.embed_tokens" if tied else root / self.decoder
        return own_head_loss(head, head.linear, hidden_states, ids)

    @module
    def model(self, m: Module, ids: Tensor) -> Tensor:
        run = m.run
        inputs_embeds = (m / "embed_tokens").scaled_embedding(ids, lambda looked_up: scale(looked_up, "mul"))
        _mask_seq_length = length_so_far(run)
        attention_mask = run.attention_mask
        if attention_mask is None:
            attention_mask = new_tensor(run.memory, (run.batch, tokens_of(run)), fp32, "positions that count")
        mask = causal_mask(run) if run.cache is None else causal_mask_beside_ones(run, attention_mask)
        positions = position_ids(run)
        position_embeds = (m / "embed_positions").embedding(scale(positions, "add"))
        run.memory.scope = m.path
        embedded = [inputs_embeds + position_embeds]
        return self.decode(m, embedded, mask, positions)

    def decode(self, m: Module, embedded: list[Tensor], *rest: Tensor | None) -> Tensor:
        """Return the output of all layers and the last norm. `embedded` has the embeddings, which nobody else holds."""
        run = m.run
        hidden_states = dropout(embedded.pop(), self.p)
        for i in range(self.layers):
            run.memory.enter(run.memory.phase, i)
            hidden_states = self.call_layer(Module(run, f"{m.path}.layers.*", i), hidden_states, *rest)
        run.memory.enter(run.memory.phase, None)
        return (m / "layer_norm").layer_norm(hidden_states)

    @module
    def layer(self, m: Module, hidden_states: Tensor, mask: Tensor | None, *_positions: Tensor) -> Tensor:
        residual = hidden_states
        hidden_states = (m / "self_attn_layer_norm").layer_norm(hidden_states)
        hidden_states, _weights = self.attention(m / "self_attn", hidden_states, mask)
        hidden_states = dropout(hidden_states, self.p)
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = (m / "final_layer_norm").layer_norm(hidden_states)
        hidden_states = (m / "fc1").linear(hidden_states)
        hidden_states = act(hidden_states, self.activation)
        hidden_states = dropout(hidden_states, self.config.activation_dropout)
        hidden_states = (m / "fc2").linear(hidden_states)
        hidden_states = dropout(hidden_states, self.p)
        return residual + hidden_states

    @module
    def attention(self, m: Module, hidden_states: Tensor, mask: Tensor | None) -> Attended:
        query_states = self.split_heads((m / "q_proj").linear(hidden_states))
        key_states = self.split_heads((m / "k_proj").linear(hidden_states))
        value_states = self.split_heads((m / "v_proj").linear(hidden_states))
        key_states, value_states = m.cached(key_states, value_states)
        if m.run.attention == "eager":
            p = self.config.attention_probs_dropout_prob
            attn_output, attn_weights = plain_eager_attention(query_states, key_states, value_states, mask, p=p)
        else:
            attn_output, attn_weights = sdpa_attention(query_states, key_states, value_states, mask)
        attn_output = reshape(attn_output, *hidden_states.shape)
        attn_output = (m / "out_proj").linear(attn_output)
        return attn_output, attn_weights

    def split_heads(self, x: Tensor) -> Tensor:
        return transpose(view(x, *x.shape[:2], self.heads, self.head_dim), 1, 2)


FAMILY: Final = Family("biogpt", BioGpt, Support(tensor_parallel={}))
