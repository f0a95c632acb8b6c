"""Attention masks (masking_utils.py). Most batches without padding have none: a kernel that knows `is_causal` needs no
mask."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.core.dims import ONE_DIM, Dim, plus
from memcalc.core.dtypes import boolean, fp32, int64
from memcalc.core.ops.axes import pad_dim
from memcalc.core.ops.elementwise import broadcast, cast, like, of_two
from memcalc.core.ops.replaceable import replaceable
from memcalc.core.ops.selection import where
from memcalc.core.ops.shape import expand, unsqueeze
from memcalc.core.tensor import Tensor, new_tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from memcalc.families.base.module import Run

    MaskFunction = Callable[[Tensor, Tensor, Tensor], Tensor]


@replaceable
def causal_mask(run: Run, window: int | None = None) -> Tensor | None:
    """Run create_causal_mask, or with a window create_sliding_window_causal_mask."""
    run.memory.scope = "causal mask"
    return _mask(run, _causal, _padding_mask(run)) if window is None else _window_mask(run, window)


def _window_mask(run: Run, window: int) -> Tensor | None:
    return _mask(run, _and_masks(_sliding_window_overlay, _causal), _padding_mask(run), window)


def causal_mask_of_one_sequence(run: Run, window: int | None = None) -> Tensor | None:
    """Run create_causal_mask over sdpa with the caller's positions, which do not jump. It looks for packed sequences
    first."""
    packed_sequences(run)
    return None if window is None else _window_mask(run, window)


def packed_causal_mask(run: Run, window: int | None = None) -> Tensor:
    """Run create_causal_mask with positions that jump: the sequences of a packed one are separated, whatever sdpa could
    do.

    The mask is as long as the embeddings, which with sequence parallelism are a shard.
    """
    assert run.positions is not None
    run.memory.scope = "causal mask"
    packed = packed_sequences(run)
    remapped = _of_positions(_causal, run.positions)
    seq = run.seq if run.tensor_parallel is None else run.tensor_parallel.between_layers(run.seq)
    return _broadcast_mask(run, _and_masks(_same_sequence(packed), remapped), seq, seq)


def packed_sequences(run: Run) -> Tensor:
    """Run find_packed_sequence_indices: (batch, seq), the sequence that each token belongs to."""
    assert run.positions is not None
    batch, seq, memory = run.batch, run.positions.shape[1], run.memory
    positions = expand(run.positions, batch, seq)
    memory.scope = "causal mask"
    first_dummy_value = new_tensor(memory, (batch, ONE_DIM), int64, "position before the first")
    _prepended = new_tensor(memory, (batch, plus(seq, 1)), int64, "positions")
    position_diff = like(positions, "steps between positions")
    del _prepended
    jumps = like(position_diff, "jumps", boolean)
    packed = like(jumps, "sequence of each token", int64)
    del jumps, first_dummy_value
    return packed


def decoder_mask(run: Run) -> Tensor | None:
    """Run create_causal_mask behind an encoder. The collator's mask is the encoder's; the decoder has none for its
    tokens."""
    run.memory.scope = "causal mask"
    return _mask(run, _causal, None)


def _padding_mask(run: Run) -> Tensor | None:
    """Return the collator's mask as booleans (_preprocess_mask_arguments); None without padding."""
    return None if run.attention_mask is None else cast(run.attention_mask, boolean, "padding mask")


def _mask(
    run: Run, mask_function: MaskFunction, padding_mask: Tensor | None, local_size: int | None = None
) -> Tensor | None:
    """Run eager_mask or sdpa_mask.

    Eager attention adds a mask in the model's dtype. sdpa needs a boolean mask if the batch has padding, or if the
    sequence is longer than what a token attends to.
    """
    keys = keys_of(run, windowed=local_size is not None)
    if run.attention == "eager":
        mask = _boolean_mask(run, mask_function, padding_mask, keys)
        zero = new_tensor(run.memory, (), run.dtype, "zero")
        return where(mask, zero, "additive mask")
    if padding_mask is None and (local_size is None or keys.size < local_size) and not compiles(run):
        return None
    return _boolean_mask(run, mask_function, padding_mask, keys)


def compiles(run: Run) -> bool:
    """Tell whether the forward is a decode step that can be compiled, whose masks are always made (`create_causal_mask`)."""
    return run.cache is not None and run.cache.is_compileable and run.seq.size == 1


def keys_of(run: Run, *, windowed: bool = False) -> Dim:
    """Return the tokens whose keys a mask covers: with a cache, those that it returns too."""
    return run.seq if run.cache is None else run.cache.keys_in_mask(run.seq, windowed=windowed)


def tokens_of(run: Run) -> Dim:
    """Return the tokens of a sequence so far: with a cache, those that it has seen too."""
    seen = 0 if run.cache is None else run.cache.seen
    return Dim(f"(cached+{run.seq.name})", seen + run.seq.size) if seen else run.seq


def length_so_far(run: Run) -> Tensor | None:
    """Return the number of these tokens if it is a tensor, as with a static cache."""
    return None if run.cache is None else run.cache.length_and(run, run.seq)


def recurrent_mask(run: Run) -> Tensor | None:
    """Return the mask of layers without attention (create_recurrent_attention_mask): the collator's. A single token is
    never padding."""
    return None if run.seq.size == 1 else run.attention_mask


def boolean_mask(run: Run) -> Tensor:
    """Return the causal mask of a model that always makes one (`allow_is_causal_skip=False`)."""
    run.memory.scope = "causal mask"
    return _boolean_mask(run, _causal, _padding_mask(run), keys_of(run))


def causal_mask_of_ones(run: Run) -> Tensor | None:
    """Run create_causal_mask with a mask of ones, which some decoders make themselves; sdpa drops it."""
    run.memory.scope = "causal mask"
    return causal_mask_beside_ones(run, new_tensor(run.memory, (run.batch, tokens_of(run)), fp32, "mask of ones"))


def causal_mask_beside_ones(run: Run, attention_mask: Tensor) -> Tensor | None:
    """Run create_causal_mask with a mask of ones. A static cache has more keys than there are tokens."""
    run.memory.scope = "causal mask"
    keys = keys_of(run)
    padding_mask = cast(attention_mask, boolean, "padding mask")
    if padding_mask.shape[1].size < keys.size:
        padding_mask = pad_dim(padding_mask, 1, keys)
    if run.attention != "eager":
        return _boolean_mask(run, _causal, padding_mask, keys) if compiles(run) else None
    mask = _boolean_mask(run, _causal, padding_mask, keys)
    return where(mask, new_tensor(run.memory, (), run.dtype, "zero"), "additive mask")


def bidirectional_mask(run: Run, window: int | None = None) -> Tensor | None:
    """Run create_bidirectional_mask, which makes none without padding. With a window run
    create_bidirectional_sliding_window_mask, which also makes one if the sequence is longer than the window."""
    if window is None:
        run.memory.scope = "bidirectional mask"
        return None if run.attention_mask is None else _mask(run, _bidirectional, _padding_mask(run))
    if run.attention_mask is None and run.seq.size < window:
        return None
    run.memory.scope = "mask of the window"
    mask = _boolean_mask(run, _and_masks(_bidirectional_window_overlay, _everything), _padding_mask(run), run.seq)
    return (
        where(mask, new_tensor(run.memory, (), run.dtype, "zero"), "additive mask")
        if run.attention == "eager"
        else mask
    )


def chunked_causal_mask(run: Run, chunk_size: int) -> Tensor | None:
    """Run create_chunked_causal_mask. Its left padding is counted by sequence, so the mask has a batch dim of its
    own."""
    run.memory.scope = "chunked causal mask"
    _left_padding = new_tensor(run.memory, (run.batch,), int64, "left padding")
    return _mask(run, _and_masks(_chunked_overlay, _causal), _padding_mask(run), chunk_size)


def _boolean_mask(run: Run, mask_function: MaskFunction, padding_mask: Tensor | None, keys: Dim) -> Tensor:
    """Return a mask of (batch, 1, seq, keys). The batch dim is a view unless the sequences differ."""
    if padding_mask is not None:
        mask_function = _and_masks(mask_function, _padding(padding_mask))
    return _broadcast_mask(run, mask_function, run.seq, keys)


def _broadcast_mask(run: Run, mask_function: MaskFunction, seq: Dim, keys: Dim) -> Tensor:
    """Run sdpa_mask: the mask function over all places."""
    batch_arange = _arange(run, run.batch)
    _head_arange = _arange(run, ONE_DIM)
    q_arange = like(_arange(run, seq), "query positions")  # arange + q_offset
    kv_arange = like(_arange(run, keys), "key positions")
    batch_idx = unsqueeze(unsqueeze(unsqueeze(batch_arange, 1), 2), 3)
    q_idx = unsqueeze(unsqueeze(unsqueeze(q_arange, 0), 0), 3)
    kv_idx = unsqueeze(unsqueeze(unsqueeze(kv_arange, 0), 0), 0)
    return expand(mask_function(batch_idx, q_idx, kv_idx), run.batch, ONE_DIM, seq, keys)


def _arange(run: Run, dim: Dim) -> Tensor:
    return new_tensor(run.memory, (dim,), int64, "positions")


def _and_masks(*mask_functions: MaskFunction) -> MaskFunction:
    def and_mask(batch_idx: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        result = new_tensor(q_idx.memory, (), boolean, "all positions")
        for mask in mask_functions:
            result = of_two(result, mask(batch_idx, q_idx, kv_idx), "causal mask", boolean)
        return result

    return and_mask


def _causal(batch_idx: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return of_two(kv_idx, q_idx, "causal mask", boolean)


def _bidirectional(batch_idx: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Compute `q_idx >= 0`."""
    return like(q_idx, "all positions", boolean)


def _sliding_window_overlay(batch_idx: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return of_two(kv_idx, like(q_idx, "start of the window"), "window", boolean)


def _bidirectional_window_overlay(batch_idx: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Compute `abs(q_idx - kv_idx) <= sliding_window`."""
    distance = like(of_two(q_idx, kv_idx, "distance"), "distance")
    return like(distance, "window", boolean)


def _everything(batch_idx: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Compute `q_idx >= 0`."""
    return like(q_idx, "all positions", boolean)


def _chunked_overlay(batch_idx: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Compute `(kv_idx - left_padding[batch_idx]) // chunk_size == (q_idx - left_padding[batch_idx]) // chunk_size`."""
    kv_chunk = like(of_two(kv_idx, like(batch_idx, "left padding"), "key positions"), "chunks of keys")
    q_chunk = like(of_two(q_idx, like(batch_idx, "left padding"), "query positions"), "chunks of queries")
    return of_two(kv_chunk, q_chunk, "same chunk", boolean)


def _same_sequence(packed: Tensor) -> MaskFunction:
    """Return packed_sequence_mask_function: packed[batch_idx, q_idx] == packed[batch_idx, kv_idx]."""

    def inner_mask(batch_idx: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        of_queries = _looked_up(packed, batch_idx, q_idx, "sequences of the queries")
        return of_two(
            of_queries, _looked_up(packed, batch_idx, kv_idx, "sequences of the keys"), "same sequence", boolean
        )

    return inner_mask


def _of_positions(mask_function: MaskFunction, positions: Tensor) -> MaskFunction:
    """Return the mask function over positions instead of places (remap_positions_for_packed_sequence)."""

    def inner_mask(batch_idx: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        of_queries = _looked_up(positions, batch_idx, q_idx, "positions of the queries")
        return mask_function(batch_idx, of_queries, _looked_up(positions, batch_idx, kv_idx, "positions of the keys"))

    return inner_mask


def _looked_up(table: Tensor, batch_idx: Tensor, idx: Tensor, name: str) -> Tensor:
    """Compute `table[batch_idx, idx]`."""
    return new_tensor(table.memory, broadcast(batch_idx.shape, idx.shape), table.dtype, name)


def _padding(padding_mask: Tensor) -> MaskFunction:
    """Return padding_mask_function: padding_mask[batch_idx, kv_idx]."""

    def inner_mask(batch_idx: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return new_tensor(padding_mask.memory, broadcast(batch_idx.shape, kv_idx.shape), boolean, "padding of the keys")

    return inner_mask
