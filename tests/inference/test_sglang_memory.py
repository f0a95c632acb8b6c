"""SGLang's rules against SGLang's own module (sglang_fractions.json, made by sglang_rules.py with sglang 0.5.23), and its cache
against a published start-up log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import memcalc
from memcalc.core.dtypes import bf16, fp8
from memcalc.inference.layers import cache_layers
from memcalc.inference.notes import notes
from memcalc.inference.serving.sglang import SWA_RATIO, Pool, chunks, fraction, pool, static
from memcalc.inputs.gpu import GPU, Quantity, load_gpu
from memcalc.units import GIB

RECORD: list[dict[str, Any]] = json.loads(Path(__file__).with_name("sglang_fractions.json").read_text())


def of_memory(mib: int) -> GPU:
    return load_gpu("h100-80gb")._replace(memory=Quantity(mib, "MiB", ""))


@pytest.mark.parametrize("of", RECORD, ids=lambda of: f"{of['mib']} {of['tp']} {of['pp']} {of['latent']}")
def test_the_fraction_is_sglangs(of: dict[str, Any]) -> None:
    gpu = of_memory(of["mib"])
    sizes = chunks(gpu, of["tp"])
    assert (sizes.prefill, sizes.decode) == (of["prefill"], of["decode"])
    assert fraction(gpu, sizes, latent=of["latent"], tp=of["tp"], pp=of["pp"]) == of["fraction"]


def cached(name: Any, available: float, **given: Any) -> Pool:
    model = memcalc.load_model(name)
    return pool(model, cache_layers(model.program), int(available), given.pop("kv_dtype", bf16), **given)


def test_the_tokens_of_a_published_log() -> None:
    """github.com/vllm-project/vllm/issues/21348: Qwen3-235B-A22B over 4 GPUs has "#tokens: 367404, K size: 8.23 GB, V size: 8.23
    GB"; the engine's GB are GiB."""
    found = cached("qwen3-235b-a22b", 10 * GIB, tp=4)
    keys = 367404 * found.bytes_per_token / 2
    assert f"{keys / GIB:.2f}" == "8.23"
    assert cached("qwen3-235b-a22b", 367404 * found.bytes_per_token, tp=4).tokens == 367404


def test_sliding_layers_with_a_pool_of_their_own() -> None:
    found = cached("gpt-oss-20b", 10 * GIB)
    layer = 8 * 128 * 2
    assert found.tokens == int(10 * GIB // (12 * layer + SWA_RATIO * 12 * layer))
    assert found.sliding_tokens == int(found.tokens * SWA_RATIO)
    assert found.sequences(100_000) == found.tokens // 100_000
    assert found.sequences(130) == min(found.tokens // 130, found.sliding_tokens // 129)


def test_sliding_layers_that_are_cached_like_all() -> None:
    assert cached("gemma-3-1b", GIB).tokens == GIB // (26 * 512 * 2)


def test_latents_and_pages() -> None:
    assert cached("deepseek-v3", GIB, tp=8, page_size=64).tokens == GIB // (61 * 576 * 2) // 64 * 64
    assert cached("deepseek-v3", GIB, kv_dtype=fp8).tokens == GIB // (61 * 576)
    found = cached("llama-7b", GIB, page_size=64)
    assert found.sequences(65) == found.tokens // 128
    assert cached("llama-7b", -3).sequences(10) == 0


def test_the_static_memory() -> None:
    gpu = of_memory(80_000)
    assert static(gpu, 0, 0.9) == pytest.approx(72_000 * 2**20, abs=1)
    for bad in (0.0, 1.0, float("nan")):
        with pytest.raises(memcalc.InputError, match="--mem-fraction-static"):
            static(gpu, 0, bad)


@pytest.mark.parametrize("name", ["bloom-560m", "mamba-130m", "falcon-7b"])
def test_what_is_refused(name: str) -> None:
    with pytest.raises(memcalc.InputError, match="--engine sglang"):
        cached(name, GIB)


@pytest.mark.parametrize("gpu", ["t4", "rtx3060", "rtx5080", "v100-16gb", "l4", "h100-80gb"])
def test_the_note_on_a_fraction_that_nobody_gave(gpu: str) -> None:
    """On small GPUs SGLang's own fraction leaves less than its parts add up to."""
    report = memcalc.infer("qwen2.5-0.5b", engine="sglang", gpu=gpu, prompt_len=2000)
    assert report.serving is not None
    told = [note for note in notes(report) if "leaves less free" in note]
    assert bool(told) == report.serving.is_tight
    assert all(note.startswith(f"SGLang's own fraction, {report.serving.share:g}, ") for note in told)
