"""TRL's fused LM head: log-probabilities of the labels from the last hidden states, without the logits.

`add_fused_lm_head` (trl/trainer/utils.py) projects tiles of 4096 positions by 32768 words. `ChunkedLogProbFunction`
(trl/kernels/chunked_logprob.py) folds each tile into a few fp32 numbers for each position, and computes each tile again in
backward. Its Triton kernels work in place. The buffer of a tile has 32768 columns, however many words there are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.core.autograd import Node
from memcalc.core.dims import Dim, merge
from memcalc.core.dtypes import boolean, fp32, int64
from memcalc.core.ops.axes import narrow
from memcalc.core.ops.elementwise import cast, like, neg, of_two, recording
from memcalc.core.ops.masked import chosen_rows, spread
from memcalc.core.ops.routing import sum_all
from memcalc.core.ops.work import works
from memcalc.core.tensor import Tensor, new_tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from memcalc.core.dtypes import DType
    from memcalc.families.base.module import Module

POSITIONS: Final = 4096
"""The positions of a tile (TOKEN_CHUNK_SIZE)."""
WORDS: Final = 32768
"""The words of a tile (_CHUNKED_LOGPROB_CHUNK_SIZE)."""
SOURCE: Final = "TRL 1.16 trl/trainer/utils.py, add_fused_lm_head; trl/kernels/chunked_logprob.py"


def position_tiles(positions: int) -> tuple[int, ...]:
    """Return the positions of the first two tiles. All later tiles are at most as large."""
    return tuple(min(POSITIONS, positions - start) for start in range(0, positions, POSITIONS)[:2])


def shorter(seq: Dim) -> Dim:
    """Return the positions of a sequence that have a next token."""
    return Dim("(seq-1)", seq.size - 1, (seq.poly[0] - 1, *seq.poly[1:]))  # type: ignore[arg-type]


@dataclass(slots=True)
class Asked:
    """The outputs that a task asks of the head, and the outputs themselves."""

    labels: Tensor
    metrics: tuple[str, ...]
    """The outputs besides log-probabilities, of entropy, mean_logits and is_top1."""
    scored: Dim | None = None
    """The positions of a sequence that have a label; None: all but the first."""
    outputs: tuple[Tensor, ...] = ()
    """The fields of FusedCausalLMOutput, as long as the task holds it."""


class PerPosition(NamedTuple):
    """The numbers of each position that the head is asked for."""

    log_probs: Tensor
    entropy: Tensor | None
    mean_logits: Tensor | None
    is_top1: Tensor | None


def fused_lm_head(head: Module, logits: Callable[[Tensor], Tensor], hidden_states: Tensor, labels: Tensor) -> Tensor:
    """Run `_fused_forward` behind the backbone. Returns the log-probabilities, in which every position but the first counts;
    `run.asked` gets all outputs."""
    run, memory = head.run, head.memory
    asked: Asked = run.asked
    memory.scope = "loss"
    fewer = shorter(hidden_states.shape[1])
    hidden_states, labels = narrow(hidden_states, 1, fewer), narrow(asked.labels, 1, fewer)
    mask = like(labels, "positions with a label", boolean)
    each = merge(mask.shape[0], asked.scored or mask.shape[1])
    rows = each if run.labelled is None else run.labelled(run.seq)
    per_token = _log_probs(
        chosen_rows(hidden_states, mask, rows, "hidden states of the labels"),
        head.weight(),
        head.optional("bias"),
        chosen_rows(labels, mask, rows, "targets"),
        asked.metrics,
    )
    spread_out = [None if x is None else spread(x, mask, name) for name, x in zip(_NAMES, per_token, strict=True)]
    del per_token
    log_probs = spread_out[0]
    assert log_probs is not None
    loss = _mean_loss(log_probs, mask)
    asked.outputs = (loss, *[x for x in spread_out if x is not None], mask)
    return log_probs


_NAMES: Final = ("log-probabilities", "entropies", "mean logits", "first choices")


def _mean_loss(log_probs: Tensor, mask: Tensor) -> Tensor:
    """Compute `-log_probs.sum() / mask.sum().clamp(min=1)`, which a task need not use."""
    memory = log_probs.memory
    negated = neg(sum_all(log_probs))
    number = new_tensor(memory, (), int64, "number of labels")
    number = like(number, "number of labels")
    node = Node(memory, _over_number_backward, (negated,), (number,)) if recording(negated) else None
    loss = new_tensor(memory, (), fp32, "mean loss")
    loss.node = node
    return loss


def _over_number_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    (_number,) = node.unpack()
    return [like(grads[0], "mean loss gradient")]


def _log_probs(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, metrics: tuple[str, ...]
) -> PerPosition:
    """Run ChunkedLogProbFunction.forward. It saves its inputs, and two numbers of each position."""
    memory, rows = x.memory, x.shape[0]
    state = memory.autocast
    computes = x.dtype if state is None or state.dtype is None else state.dtype
    (
        running_max, sum_exp, x_sum_exp, sq_sum_exp, z_sum, max_before_target, target_logit,
    ) = [new_tensor(memory, (rows,), fp32, name) for name in _STATISTICS]  # fmt: skip
    tile = new_tensor(memory, (_tile(rows, 0), Dim("words_of_a_tile", WORDS)), computes, "logits of a tile")
    works(memory, _head(weight), (rows, x.shape[1], weight.shape[0]), computes)
    hidden_chunk = None
    for positions in _tiles(rows):
        hidden_chunk = _cast_part(x, positions, computes, "hidden states of a tile")
        for words in _word_tiles(weight.shape[0]):
            _cast_part(weight, words, computes, "weights of a tile")
            if bias is not None:
                _cast_part(bias, words, computes, "bias of a tile")
    log_z = of_two(running_max, like(sum_exp, "log"), "logsumexp")
    log_probs = of_two(target_logit, log_z, "log-probabilities")
    entropy = mean_logits = is_top1 = None
    if "entropy" in metrics:
        entropy = of_two(log_z, of_two(x_sum_exp, sum_exp, "mean logit"), "entropies")
    if "mean_logits" in metrics:
        mean_logits = like(z_sum, "mean logits")
    if "is_top1" in metrics:
        first = of_two(target_logit, running_max, "at least the largest", boolean)
        is_top1 = of_two(
            first, of_two(target_logit, max_before_target, "larger than before", boolean), "first choices", boolean
        )
        del first
    if recording(x, weight):
        numbers = log_z if entropy is None else Tensor(entropy.storage, entropy.shape, entropy.strides, fp32)
        inputs = (x, weight) if bias is None else (x, weight, bias)
        node = Node(memory, _log_probs_backward, inputs, (*inputs, targets, log_z, numbers), (computes, len(inputs)), 2)
        log_probs.node = node
        if entropy is not None:
            entropy.node, entropy.output = node, 1
    del sq_sum_exp, hidden_chunk, tile
    return PerPosition(log_probs, entropy, mean_logits, is_top1)


_STATISTICS: Final = (
    "running maximum", "sum of exponentials", "sum of weighted exponentials", "sum of squared exponentials",
    "sum of logits", "maximum before the target", "logit of the target",
)  # fmt: skip


def _log_probs_backward(node: Node, grads: list[Tensor]) -> list[Tensor | None]:
    """Run ChunkedLogProbFunction.backward: gradients are added up in fp32 and cast at the end."""
    computes, inputs = node.context
    x, weight, *rest = node.unpack()
    memory, rows = x.memory, x.shape[0]
    bias = rest[0] if inputs == 3 else None
    given = [t if node.needs(i) else None for i, t in enumerate((x, weight, bias)[:inputs])]
    sums = [None if t is None else new_tensor(memory, t.shape, fp32, f"{_of(t)}gradient in fp32") for t in given]
    tile = new_tensor(memory, (_tile(rows, 0), Dim("words_of_a_tile", WORDS)), computes, "logits of a tile")
    products = 1 + sum(node.needs(i) for i in (0, 1))
    works(memory, _head(weight), (rows, x.shape[1], weight.shape[0]), computes, products)
    hidden_chunk = w_chunk = None
    for positions in _tiles(rows):
        hidden_chunk = _cast_part(x, positions, computes, "hidden states of a tile")
        for words in _word_tiles(weight.shape[0]):
            w_chunk = _cast_part(weight, words, computes, "weights of a tile")
            if bias is not None:
                _cast_part(bias, words, computes, "bias of a tile")
                if node.needs(2):
                    new_tensor(memory, (words,), fp32, "bias gradient of a tile")
    out: list[Tensor | None] = []
    for t, total in zip(given, sums, strict=True):
        out.append(None if t is None or total is None else cast(total, t.dtype, f"{_of(t)}gradient"))
    del hidden_chunk, w_chunk, tile
    return out


def _of(t: Tensor) -> str:
    return f"{t.name} " if t.name else "hidden states "


def _head(weight: Tensor) -> str:
    return weight.name.removesuffix(".weight")


def _cast_part(t: Tensor, part: Dim, dtype: DType, name: str) -> Tensor | None:
    """Compute `t[start:end].to(dtype)`: nothing is allocated if it has that dtype."""
    return None if t.dtype is dtype else new_tensor(t.memory, (part, *t.shape[1:]), dtype, name)


def _tiles(rows: Dim) -> list[Dim]:
    """Return the positions of the first two tiles."""
    return [_tile(rows, i) for i in range(len(position_tiles(rows.size)))]


def _tile(rows: Dim, i: int) -> Dim:
    return Dim("positions_of_a_tile", position_tiles(rows.size)[i])


def _word_tiles(vocab: Dim) -> list[Dim]:
    return [Dim("words_of_a_tile", min(WORDS, vocab.size - start)) for start in range(0, vocab.size, WORDS)]
