"""SGLang on one GPU: the share of the memory for weights and cache, and the tokens that the cache holds (sglang 0.5.23).

    cache = fraction · (GPU − outside torch) − weights        tokens = cache / bytes of a token

The fraction (`mem_fraction_static`) is what a guess of activations and CUDA graphs leaves, by the tokens of a prefill chunk and
the sequences of the largest graph (arg_groups/memory_hook.py; mem_cache/kv_cache_configurator.py, _profile_available_bytes;
model_executor/pool_configurator.py). A cache of slots of one token each has no blocks; `page_size` tokens are one page.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.errors import InputError
from memcalc.inference.serving.vllm import kv_heads

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memcalc.core.dtypes import DType
    from memcalc.inference.layers import CacheLayer
    from memcalc.inputs.gpu import GPU
    from memcalc.inputs.model import Model

_MIB: Final = 2**20
_CONSTANT: Final = 512.0
_A_TOKEN: Final = 1.5
_A_SEQUENCE: Final = 2.0
_A_SIZE: Final = 8.0
_LATENT_GRAPHS: Final = 1.5 * 1024
_LARGE: Final = 60 * 1024
_LEAST_ON_LARGE: Final = 10 * 1024
_FEWEST_TOKENS: Final = 2048
_MOST_LATENT: Final = 8192
"""The largest number of tokens that a prefill of latents is captured for. The constants before are in MiB and tokens."""
SWA_RATIO: Final = 0.8
"""The tokens of sliding layers over those of the others (`swa_full_tokens_ratio`)."""
_TWO_POOLS: Final = frozenset({"gpt_oss", "llama4_text"})
"""The types whose sliding layers have a pool of their own (configs/model_config.py, is_hybrid_swa_model). Those of others are
cached like all layers."""
_PREFILL_SIZES: Final = (
    *range(4, 33, 4),
    *range(48, 257, 16),
    *range(288, 513, 32),
    *range(576, 1025, 64),
    *range(1280, 4097, 256),
)
_LAST_STEP: Final = 512
_NOT_SERVED: Final = frozenset(
    {
        "bart",
        "biogpt",
        "bloom",
        "codegen",
        "ctrl",
        "falcon",
        "gpt_neo",
        "gpt_neox",
        "mpt",
        "openai-gpt",
        "resnet",
        "rwkv",
        "t5",
        "xglm",
    }
)
"""Generating types that SGLang has no module of its own for (srt/models)."""


class Chunks(NamedTuple):
    """The sizes that a GPU's memory decides."""

    prefill: int
    """`chunked_prefill_size`: tokens of a forward."""
    decode: int
    """`cuda_graph_max_bs`: sequences of the largest captured decode step."""


class Pool(NamedTuple):
    """The cache on one GPU, in tokens."""

    tokens: int
    """`max_total_num_tokens`: tokens of layers with full attention, or of all layers."""
    sliding_tokens: int
    """The tokens of sliding layers with a pool of their own; 0: they have none."""
    bytes_per_token: float
    window: int
    page_size: int
    only_sliding: bool = False
    """True if no layer has full attention."""

    def nbytes(self, length: int) -> int:
        """Return the bytes that a cache needs for one sequence of `length` tokens."""
        pages = -(-length // self.page_size) * self.page_size
        if not self.window:
            return ceil(self.bytes_per_token * pages)
        held = min(length, self.window) + self.page_size
        return ceil(self.bytes_per_token * (held if self.only_sliding else max(pages, held / SWA_RATIO)))

    def sequences(self, length: int) -> int:
        """Return the sequences of `length` tokens that fit at once. A sliding layer holds the window and a page at most."""
        pages = -(-length // self.page_size) * self.page_size
        most = self.tokens // pages if self.tokens else 0
        if not self.window or not self.sliding_tokens:
            return most
        held = min(length, self.window) + self.page_size
        return self.sliding_tokens // held if not self.tokens else min(most, self.sliding_tokens // held)


def chunks(gpu: GPU, tp: int) -> Chunks:
    """Return the default sizes on a GPU."""
    mib, few = gpu.capacity / _MIB, tp < 4
    if mib < 20 * 1024:
        return Chunks(2048, 8)
    if mib < 35 * 1024:
        return Chunks(4096, 48 if few else 160)
    if mib < _LARGE:
        return Chunks(4096, 32 if few else 160)
    if mib < 160 * 1024:
        return Chunks(8192, 256 if few else 512)
    return Chunks(16384, 512)


class Reserve(NamedTuple):
    """A part of the memory that SGLang leaves free by its own rule."""

    name: str
    nbytes: int
    formula: str


def reserves(gpu: GPU, sizes: Chunks, *, latent: bool, tp: int = 1, pp: int = 1) -> tuple[Reserve, ...]:
    """Return what SGLang's rule for --mem-fraction-static leaves free, by purpose (arg_groups/memory_hook.py). These are its
    own guesses; nothing is measured."""
    tokens = max(sizes.prefill, _FEWEST_TOKENS)
    parts = [
        ("metadata and slack", _CONSTANT, "512 MiB"),
        ("activations", _A_TOKEN * tokens, f"1.5 MiB·{tokens} tokens"),
        ("parallel ranks", tp * pp / 8 * 1024, f"128 MiB·tp {tp}·pp {pp}"),
        ("CUDA graphs of decode", _A_SEQUENCE * sizes.decode, f"2 MiB·{sizes.decode} sequences"),
    ]
    if pp == 1:  # a pipeline does not capture prefill
        many = len(prefill_sizes(min(_MOST_LATENT, sizes.prefill) if latent else sizes.prefill))
        mib, formula = (_LATENT_GRAPHS, "1536 MiB with latents") if latent else (_A_SIZE * many, f"8 MiB·{many} sizes")
        parts.append(("CUDA graphs of prefill", mib, formula))
    reserved = sum(mib for _, mib, _ in parts)
    if gpu.capacity / _MIB > _LARGE and reserved < _LEAST_ON_LARGE:
        parts.append(
            ("up to the least on a GPU of more than 60 GiB", _LEAST_ON_LARGE - reserved, "10 GiB - the others")
        )
    return tuple(Reserve(name, round(mib * _MIB), formula) for name, mib, formula in parts)


def fraction(gpu: GPU, sizes: Chunks, *, latent: bool, tp: int = 1, pp: int = 1) -> float:
    """Return the default of --mem-fraction-static."""
    reserved = sum(part.nbytes for part in reserves(gpu, sizes, latent=latent, tp=tp, pp=pp)) / _MIB
    mib = gpu.capacity / _MIB
    return round((mib - reserved) / mib, 3)


def prefill_sizes(most: int) -> tuple[int, ...]:
    """Return the numbers of tokens that a prefill is captured for (cuda_graph_hook.py)."""
    sizes = (*_PREFILL_SIZES, *range(4608, most + 1, _LAST_STEP))
    return tuple(size for size in sizes if size <= most)


def static(gpu: GPU, outside: int, given: float) -> int:
    """Return the bytes for weights and cache. Raises InputError for a fraction that is none."""
    if not 0 < given < 1:
        raise InputError(f"--mem-fraction-static {given:g}: expected a number above 0 and below 1")
    free = gpu.capacity - outside
    return free - int(free * (1 - given))


def pool(
    model: Model, layers: Sequence[CacheLayer], available: int, kv_dtype: DType, tp: int = 1, page_size: int = 1
) -> Pool:
    """Return the cache that `available` bytes hold on one of `tp` ranks. Raises InputError for models that SGLang does not
    serve, or whose states are not modelled."""
    if model.model_type in _NOT_SERVED:
        raise InputError(f"--engine sglang: a {model.model_type} has no module in SGLang; allowed: transformers, vllm")
    if any(layer.states or layer.kind == "cross" for layer in layers):
        raise InputError(
            f"--engine sglang: how SGLang divides its memory between the states of a {model.model_type} and its cache is not "
            "modelled; allowed: transformers, vllm"
        )
    apart = model.model_type in _TWO_POOLS
    sliding = [one for one in layers if apart and one.kind in ("sliding", "chunked")]
    full = sum(_token(model, one, kv_dtype, tp) for one in layers if one not in sliding)
    windowed = sum(_token(model, one, kv_dtype, tp) for one in sliding)
    window = max((one.window or 0 for one in sliding), default=0)
    available = max(0, available)
    if not full:
        tokens = _whole(available // windowed, page_size) if windowed else 0
        return Pool(0, tokens, windowed, window, page_size, only_sliding=True)
    cell = full + SWA_RATIO * windowed if windowed else full
    tokens = _whole(int(available // cell), page_size)
    return Pool(tokens, _whole(int(tokens * SWA_RATIO), page_size) if windowed else 0, cell, window, page_size)


def _token(model: Model, layer: CacheLayer, kv_dtype: DType, tp: int) -> int:
    heads = 1 if layer.kind == "latent" else max(1, kv_heads(model, layer) // tp)
    return heads * (layer.k_width + layer.v_width) * kv_dtype.itemsize


def _whole(tokens: int, page_size: int) -> int:
    return tokens // page_size * page_size


def most_requests(of: Pool, length: int) -> int:
    """Return the most requests at once (kv_cache_configurator.py, resolve_max_num_reqs)."""
    tokens = of.tokens or of.sliding_tokens
    return min(max(min(int(tokens / length * 512), 4096), 2048), tokens // 2)
