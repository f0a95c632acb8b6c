"""The part of GPTModel that one rank has."""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

from memcalc.core.dims import Dim
from memcalc.megatron.fp8 import Recipe
from memcalc.megatron.layers import TensorParallel
from memcalc.megatron.trained import Trained

MODULES: Final = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts")
"""The modules that selective recomputation can run again (core/transformer/transformer_config.py, recompute_modules)."""


OFFLOADED: Final = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act")
"""The modules whose saved tensors can be moved to the host (offload_modules)."""


OF_EXPERTS: Final = ("mlp_norm", "expert_fc1", "moe_act")
"""Those of layers with experts alone."""
LEAST: Final = 1024 * 1024
"""The least elements of a tensor that is moved (min_offloaded_tensor_size)."""


class Layout(NamedTuple):
    """The part of the model that one rank has."""

    tensor_parallel: int = 1
    sequence_parallel: bool = False
    context_parallel: int = 1
    cp_comm_type: str | None = None
    """A name in context_parallel.ATTENTION; None if only one rank has the sequence."""
    expert_parallel: int = 1
    expert_tensor_parallel: int = 1
    expert_imbalance: float = 1.0
    layers: int = 1
    recompute_layers: int | None = None
    """The number of layers that are recomputed, the first ones, if recomputation is on; None: all."""
    routed: tuple[bool, ...] = ()
    """True for each layer that has experts; empty if no layer has."""
    first: bool = True
    """True if the stage has the embedding."""
    last: bool = True
    """True if the stage has the head and the loss."""
    ends: bool | None = None
    """True if the stage has the last layer of the decoder, which the norm at the end follows with multi-token prediction;
    None: the norm is the last stage's."""
    selective: bool = False
    """True if core attention is recomputed."""
    recomputed: tuple[str, ...] = ()
    """The other modules that are recomputed, by their names in `--recompute-modules`."""
    offloaded: tuple[str, ...] = ()
    """The modules whose saved tensors are moved to the host, by their names in `--offload-modules`."""
    least_offloaded: int = LEAST
    loss: str = "vocab-parallel"
    """The loss, by the name of its option `--cross-entropy`."""
    fuses_accumulation: bool = True
    """True if the kernels that compute gradients of weights add them to the main gradients."""
    mask_in_batch: bool = True
    """True if a batch brings an attention mask."""
    exchanging: int = 1
    """The ranks that exchange heads before a ring, with cp_comm_type a2a+p2p."""
    fp8: Recipe | None = None
    """How linear layers cast to fp8; None: they multiply in 16 bits."""
    trained: Trained | None = None
    """The part of the stage's weights that trains; None: all."""

    @property
    def has_final_norm(self) -> bool:
        """Tell whether the stage has the norm at the end of the decoder."""
        return self.last if self.ends is None else self.ends

    def tokens(self, shard: int) -> int:
        """Return the tokens of a sequence inside attention, if a tensor between two layers has `shard` of them."""
        return self.tensor_parallel * shard if self.sequence_parallel else shard

    def group(self, shard: Dim) -> TensorParallel:
        """Return the tensor-parallel group; a tensor between two layers has `shard` tokens of a sequence."""
        return _group(self, shard)


@lru_cache(maxsize=1024)
def _group(layout: Layout, shard: Dim) -> TensorParallel:
    tp, poly = layout.tensor_parallel, shard.poly
    name = "seq" if layout.context_parallel == 1 else "seq/cp"
    if not layout.sequence_parallel:
        whole = Dim(name, shard.size, poly)
        return TensorParallel(tp, False, whole, whole, layout.fuses_accumulation)
    whole = Dim(name, tp * shard.size, tuple(tp * c for c in poly))  # type: ignore[arg-type]
    return TensorParallel(tp, True, whole, Dim(f"{name}/tp", shard.size, poly), layout.fuses_accumulation)


def padded_vocab(vocab: int, tensor_parallel: int, multiple: int = 128) -> int:
    """Return the vocabulary rounded up to a multiple of `--make-vocab-size-divisible-by` times tp
    (megatron/training/tokenizer/tokenizer.py)."""
    unit = multiple * tensor_parallel
    return -(-vocab // unit) * unit


def part(name: str, size: int, ranks: int) -> Dim:
    """Return one of `ranks` equal parts of a dim."""
    assert size % ranks == 0
    return Dim(name if ranks == 1 else f"{name}/tp", size // ranks)
