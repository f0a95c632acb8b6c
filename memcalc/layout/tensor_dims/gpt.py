"""GPT-2 as Colossal-AI's model zoo builds it from parallel layers, on one rank of a grid.

Sources: titans 0.0.7, titans/model/gpt/gpt.py and titans/layer/{attention,block,embedding,head,mlp}; the training loop is
colossalai/legacy/engine/schedule/_non_pipeline_schedule.py, whose frame holds the logits until backward is over. With a
mixed precision the logits are cast to fp32 (colossalai/legacy/amp/naive_amp/naive_amp.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

from memcalc.core.dims import Dim, merge
from memcalc.core.dtypes import boolean, fp32, int64, uint8
from memcalc.core.ops.axes import permute
from memcalc.core.ops.elementwise import activation, cast, dropout, scale, softmax
from memcalc.core.ops.matmul import matmul
from memcalc.core.ops.selection import where_of_two
from memcalc.core.ops.shape import chunk, reshape, transpose, view
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.families.base.module import Module, Weight, module
from memcalc.families.base.program import Program
from memcalc.layout.tensor_dims.cube import Cube
from memcalc.layout.tensor_dims.line import Line
from memcalc.layout.tensor_dims.losses import shifted_loss
from memcalc.layout.tensor_dims.sending import own_sequences
from memcalc.layout.tensor_dims.square import Square

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    from memcalc.core.dims import Shape
    from memcalc.families.base.architecture import Architecture
    from memcalc.families.base.module import Run
    from memcalc.layout.tensor_dims.grid import Grid

SOURCE: Final = "titans 0.0.7 titans/model/gpt/gpt.py; Colossal-AI 0.5.0 colossalai/legacy/nn/layer"
ROWS_WHOLE: Final = 2048
"""The most rows of a table that every rank has (vocab_parallel_limit in colossalai_layer/embedding.py)."""
_BYTE: Final = uint8


class Layers(Protocol):
    """The layers of one rank of a grid."""

    @property
    def loss_group(self) -> str: ...

    @property
    def batch_groups(self) -> tuple[str, ...]: ...

    def vector(self, dim: Dim) -> Dim: ...

    def linear_weights(self, name: str, fan_in: Dim, fan_out: Dim, component: str) -> Iterator[Weight]: ...

    def rows_of(self, rows: Dim, width: Dim) -> Shape: ...

    def columns_of(self, rows: Dim, width: Dim) -> Shape: ...

    def heads(self, heads: Dim) -> Dim: ...

    def linear(self, m: Module, x: Tensor, *, second: bool) -> Tensor: ...

    def norm(self, m: Module, x: Tensor) -> Tensor: ...

    def words(self, m: Module, ids: Tensor) -> Tensor: ...

    def positions(self, m: Module, ids: Tensor) -> Tensor: ...

    def logits(self, m: Module, table: Tensor, x: Tensor) -> Tensor: ...


def layers_of(grid: Grid) -> Layers:
    """Return the layers of one rank of a grid."""
    return Line(grid) if grid.dims == "1" else Cube(grid) if grid.dims == "3" else Square(grid)


class GridGPT(Program):
    """The program of one rank. Its batch is the grid's whole micro-batch, of which the layers take their part."""

    attention_kinds = ("eager",)
    pads = False
    autocasts = False
    recomputes = False
    polynomial = False  # a part of a batch is no polynomial of whole numbers
    takes_losses = False
    loss_dtype = None
    embedding = "embed.word_embeddings"
    unembedding = "head.dense"
    weights_source = SOURCE

    def __init__(self, config: Any, a: Architecture, grid: Grid, *, casts_logits: bool) -> None:
        super().__init__(config)
        assert a.positions is not None
        self.a, self.grid, self.casts_logits, self.of = a, grid, casts_logits, layers_of(grid)
        self.layers = a.layers
        self.max_seq_len = self.positions_limit = a.positions
        self.vocab = Dim("vocab", padded(a.vocab, grid.vocab_unit))
        self.positions = Dim("positions", a.positions)
        self.hidden = Dim("hidden", a.hidden)
        self.ffn = Dim("ffn", a.ffn)
        self.heads = self.kv_heads = Dim("heads", a.heads)
        self.head_dim = Dim("head_dim", a.head_dim)

    def branch(self, batch: int, seq: int) -> Hashable:
        return batch, seq, self.grid, self.casts_logits

    # --- weights

    def weights(self) -> Iterator[Weight]:
        yield Weight("embed.word_embeddings.weight", self.of.rows_of(self.vocab, self.hidden), "embedding")
        table = self.of.columns_of if self.positions.size <= ROWS_WHOLE else self.of.rows_of
        yield Weight("embed.position_embeddings.weight", table(self.positions, self.hidden), "embedding")
        yield from self.stack("blocks")
        yield from self.norm_weights("norm")

    def layer_weights(self, i: int) -> Iterator[Weight]:
        qkv = Dim("3·hidden", 3 * self.hidden.size)
        yield from self.norm_weights("norm1")
        yield from self.of.linear_weights("attn.query_key_value", self.hidden, qkv, "attention")
        yield from self.of.linear_weights("attn.dense", self.hidden, self.hidden, "attention")
        yield from self.norm_weights("norm2")
        yield from self.of.linear_weights("mlp.linear_1", self.hidden, self.ffn, "mlp")
        yield from self.of.linear_weights("mlp.linear_2", self.ffn, self.hidden, "mlp")

    def norm_weights(self, name: str) -> Iterator[Weight]:
        width = self.of.vector(self.hidden)
        yield Weight(f"{name}.weight", (width,), "norm")
        yield Weight(f"{name}.bias", (width,), "norm")

    # --- forward

    def forward(self, run: Run, ids: Tensor) -> Tensor:
        """Run the model and GPTLMLoss, as the training loop does."""
        root = Module(run, "")
        ids = own_sequences(ids, self.grid.depth) if self.grid.depth > 1 else ids
        logits = self.model(root, ids)
        run.memory.enter(run.memory.phase, None)
        run.memory.scope = "loss"
        if self.casts_logits:
            logits = cast(logits, fp32, "logits in fp32")
        run.frame_tensors.append(logits)
        parts = self.grid.batch_parts // self.grid.depth
        return shifted_loss(logits, ids, parts, self.of.loss_group, self.of.batch_groups)

    @module
    def model(self, m: Module, ids: Tensor) -> Tensor:
        run = m.run
        x = self.embed(m / "embed", ids)
        for i in range(self.layers):
            run.memory.enter(run.memory.phase, i)
            x = self.call_layer(Module(run, "blocks.*", i), x)
        run.memory.enter(run.memory.phase, None)
        table = (m / "embed.word_embeddings").weight()
        return self.of.logits(m / "head.dense", table, self.of.norm(m / "norm", x))

    @module
    def embed(self, m: Module, ids: Tensor) -> Tensor:
        """Run GPTEmbedding. Its frame holds the positions of all sequences."""
        with m:
            position_ids = new_tensor(ids.memory, ids.shape, int64, "position ids")
        words = self.of.words(m / "word_embeddings", ids)
        look_up = self.of.positions if self.positions.size <= ROWS_WHOLE else self.of.words
        with m:
            x = words + look_up(m / "position_embeddings", position_ids)
            del words
            return dropout(x, getattr(self.config, "embd_pdrop", self.a.hidden_dropout))

    @module
    def layer(self, m: Module, x: Tensor) -> Tensor:
        residual = x
        x = self.of.norm(m / "norm1", x)
        x = residual + self.attention(m / "attn", x)
        residual = x
        x = self.of.norm(m / "norm2", x)
        return residual + self.mlp(m / "mlp", x)

    @module
    def attention(self, m: Module, x: Tensor) -> Tensor:
        """Run GPTSelfAttention without a fused softmax. Its frame holds the joined queries, keys and values."""
        qkv = self.of.linear(m / "query_key_value", x, second=False)
        batch, seq, _ = qkv.shape
        heads, whole = self.of.heads(self.heads), Dim("3·head_dim", 3 * self.head_dim.size)
        qkv = permute(view(qkv, batch, seq, heads, whole), 0, 2, 1, 3)
        q, k, v = chunk(qkv, 3)
        x = matmul(q, transpose(k, 2, 3), "attention scores")
        x = scale(x, "div")
        mask = _causal_mask(x)
        x = where_of_two(mask, x, new_tensor(x.memory, (), x.dtype, "masked score"))
        x = softmax(x)
        x = dropout(x, self.a.attention_dropout)
        x = matmul(x, v, "attention output")
        x = transpose(x, 1, 2)
        x = reshape(x, batch, seq, merge(heads, self.head_dim))
        x = self.of.linear(m / "dense", x, second=True)
        return dropout(x, self.a.hidden_dropout)

    @module
    def mlp(self, m: Module, x: Tensor) -> Tensor:
        intermediate = self.of.linear(m / "linear_1", x, second=False)
        intermediate = activation(intermediate, "gelu")
        output = self.of.linear(m / "linear_2", intermediate, second=True)
        return dropout(output, self.a.hidden_dropout)


def padded(vocab: int, unit: int) -> int:
    """Return the vocabulary rounded up to what ranks can share equally: Colossal-AI's `divide` refuses anything else."""
    return -(-vocab // unit) * unit


def _causal_mask(scores: Tensor) -> Tensor:
    """Return the boolean mask of one sequence, which is made in bytes."""
    shape = scores.shape[2:]
    ones = new_tensor(scores.memory, shape, _BYTE, "ones")
    lower = new_tensor(scores.memory, shape, _BYTE, "lower triangle")
    del ones
    out = new_tensor(scores.memory, shape, boolean, "causal mask")
    del lower
    return out
