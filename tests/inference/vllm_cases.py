"""Layers and settings for vLLM's planning of the KV cache, and the same as specs of ours."""

from __future__ import annotations

from typing import Any

from memcalc.inference.serving.blocks import Spec, Workload

Case = dict[str, Any]
Layer = tuple[str, dict[str, Any]]
SIZES = {"bfloat16": 2, "float32": 4, "float8_e4m3fn": 1, "float16": 2}


def full(heads: int, width: int, dtype: str = "bfloat16", block: int = 16, v_width: int | None = None) -> Layer:
    more = {} if v_width is None else {"head_size_v": v_width}
    return "FullAttentionSpec", {"block_size": block, "num_kv_heads": heads, "head_size": width, "dtype": dtype, **more}


def sliding(heads: int, width: int, window: int, dtype: str = "bfloat16", block: int = 16) -> Layer:
    return "SlidingWindowSpec", {
        "block_size": block, "num_kv_heads": heads, "head_size": width, "dtype": dtype, "sliding_window": window,
    }  # fmt: skip


def chunked(heads: int, width: int, chunk: int, block: int = 16) -> Layer:
    return "ChunkedLocalAttentionSpec", {
        "block_size": block, "num_kv_heads": heads, "head_size": width, "dtype": "bfloat16", "attention_chunk_size": chunk,
    }  # fmt: skip


def latent(width: int, dtype: str = "bfloat16", block: int = 64) -> Layer:
    return "MLAAttentionSpec", {"block_size": block, "num_kv_heads": 1, "head_size": width, "dtype": dtype}


def mamba(shapes: list[list[int]], dtypes: list[str], block: int, padded: int | None = None) -> Layer:
    return "MambaSpec", {"block_size": block, "shapes": shapes, "dtypes": dtypes, "page_size_padded": padded}


def cross(heads: int, width: int, block: int = 16) -> Layer:
    return "CrossAttentionSpec", {"block_size": block, "num_kv_heads": heads, "head_size": width, "dtype": "bfloat16"}


def case(
    name: str, layers: list[Layer], length: int = 8192, in_flight: int = 16384, available: int = 10 * 2**30, **more: Any
) -> Case:
    given: Case = {"layout": "LBNHC", "mamba_cache_mode": "none", **more}
    return {
        "name": name,
        "layers": layers,
        "max_model_len": length,
        "in_flight": in_flight,
        "available": available,
        **given,
    }


def pattern(n: int, every: int, one: Layer, others: Layer) -> list[Layer]:
    """`n` layers, of which every `every`th is `one`."""
    return [one if i % every == every - 1 else others for i in range(n)]


_ATTENTION = 672 * 2 * 2 * 256 * 2
CASES: list[Case] = [
    case("llama", [full(8, 128)] * 32, 131072),
    case("llama fp8", [full(8, 128, "float8_e4m3fn")] * 32, 4097),
    case("different widths", [full(8, 128, v_width=64)] * 3 + [full(4, 64)] * 5, 1000),
    case("latent", [latent(576)] * 61, 163840, 16384, 33 * 2**30 + 5),
    case("sliding alone", [sliding(8, 128, 4096)] * 32, 32768, 2 * 8192),
    case("short sequences", [sliding(8, 128, 4096)] * 32, 100, 2 * 8192),
    case("a window that ends with a block", [sliding(8, 128, 25)] * 4, 32768, 1000),
    case("gpt-oss", pattern(24, 2, full(8, 64), sliding(8, 64, 128)), 131072),
    case("gemma3", pattern(26, 6, full(1, 256), sliding(1, 256, 512)), 32768),
    case("one window more than the other", [full(8, 64)] * 12 + [sliding(8, 64, 128)] * 13, 4096),
    case("20 and 30", [full(8, 64)] * 20 + [sliding(8, 64, 128)] * 30, 4096),
    case("20 and 29", [full(8, 64)] * 20 + [sliding(8, 64, 128)] * 29, 4096),
    case("10 and 25", [full(8, 64)] * 10 + [sliding(8, 64, 128)] * 25, 4096),
    case("two windows", [full(8, 64)] * 4 + [sliding(8, 64, 128)] * 4 + [sliding(8, 64, 1024)] * 8, 4096, 2048),
    case("llama 4", pattern(48, 4, full(8, 128), chunked(8, 128, 8192)), 1_000_000),
    case("chunks alone", [chunked(8, 128, 8192)] * 6, 100_000, 4096),
    case("pages that divide", pattern(24, 4, full(8, 128), sliding(4, 128, 1024)), 65536),
    case("pages that do not", pattern(24, 4, full(8, 128), sliding(3, 128, 1024)), 65536),
    case("latents and windows", [latent(576, block=16)] * 4 + [sliding(9, 64, 512)] * 4, 65536),
    case("mamba", [mamba([[3, 1536], [1536, 16]], ["bfloat16", "bfloat16"], 8192)] * 24, 8192),
    case("hybrid", pattern(48, 4, full(2, 256, block=672),
         mamba([[3, 8192], [32, 128, 128]], ["bfloat16", "bfloat16"], 262144, _ATTENTION)), 262144),
    case("hybrid that keeps states", pattern(48, 4, full(2, 256, block=672),
         mamba([[3, 8192], [32, 128, 128]], ["bfloat16", "bfloat16"], 672, _ATTENTION)), 262144, mamba_cache_mode="align"),
    case("whisper", [full(20, 64)] * 4 + [cross(20, 64)] * 4, 448, encoder=1500),
]  # fmt: skip

_KINDS = {
    "FullAttentionSpec": "full", "SlidingWindowSpec": "sliding", "ChunkedLocalAttentionSpec": "chunked",
    "MLAAttentionSpec": "latent", "MambaSpec": "mamba", "CrossAttentionSpec": "cross",
}  # fmt: skip


def ours(layer: Layer) -> Spec:
    """The same layer as a spec of ours."""
    name, given = layer
    kind: Any = _KINDS[name]
    if kind == "mamba":
        state = sum(
            _product(shape) * SIZES[dtype] for shape, dtype in zip(given["shapes"], given["dtypes"], strict=True)
        )
        return Spec(kind, given["block_size"], state=state, padded=given["page_size_padded"] or 0)
    width = given["head_size"] + (0 if kind == "latent" else given.get("head_size_v", given["head_size"]))
    shape = (given["num_kv_heads"], given["head_size"], width)
    token = given["num_kv_heads"] * width * SIZES[given["dtype"]]
    window = given.get("sliding_window", given.get("attention_chunk_size", 0))
    return Spec(kind, given["block_size"], token, window, shape=shape)


def work(of: Case) -> Workload:
    states = 2 if of["mamba_cache_mode"] == "align" else 1
    return Workload(of["max_model_len"], of["in_flight"], states, of.get("encoder", 0))


def _product(sizes: list[int]) -> int:
    out = 1
    for size in sizes:
        out *= size
    return out
