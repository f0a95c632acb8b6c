"""vLLM's memory against published start-up logs, and against its rules worked by hand."""

from __future__ import annotations

from math import ceil
from typing import Any

import pytest

import memcalc
from memcalc.core.dtypes import bf16, fp8, fp16
from memcalc.inference.layers import cache_layers
from memcalc.inference.quantised_methods import method_of_config
from memcalc.inference.serving.blocks import Plan
from memcalc.inference.serving.vllm import Batching, Budget, batching, planned, requested, rotary_rows, specs, workload
from memcalc.inference.weights import Method, served, weight_rows
from memcalc.inputs.gpu import load_gpu
from memcalc.units import GIB


def pool(name: Any, available: float, length: int, tp: int = 1, tokens: int = 8192, **given: Any) -> Plan:
    model = memcalc.load_model(name)
    made = specs(model, cache_layers(model.program), bf16, given.pop("kv_dtype", bf16), tp, **given)
    return planned(made, int(available), workload(model, length, Batching(tokens, 1024)))


# github.com/vllm-project/vllm/issues/10517, comment of 2024-12-02: Llama-3.1-8B on an RTX 3090
LOGGED = [(3.81, 20000, 1952, "1.56"), (2.89, 29000, 1478, "0.82")]


@pytest.mark.parametrize("gib,length,blocks,concurrency", LOGGED)
def test_the_blocks_of_a_published_log(gib: float, length: int, blocks: int, concurrency: str) -> None:
    """The log has the memory with two digits, so the blocks lie between those of its bounds."""
    low, high = (pool("llama-3.1-8b", (gib + e) * GIB, length) for e in (-0.005, 0.005))
    assert low.num_blocks <= blocks <= high.num_blocks
    logged = blocks * 16 / length
    assert f"{logged:.2f}" == concurrency
    assert low.max_concurrency <= blocks / low.blocks_per_sequence <= high.max_concurrency


def loaded(name: str, method: Method | None) -> int:
    """What vLLM has loaded before it profiles: the weights and the tables of rotary embeddings."""
    model = memcalc.load_model(name)
    return sum(row.nbytes for row in (*weight_rows(model, bf16, method), *rotary_rows(model, bf16)))


def test_the_weights_of_a_published_log() -> None:
    """ "Loading model weights took 14.9888 GB" in the same log; the engine's GB are GiB."""
    assert round(loaded("llama-3.1-8b", None) / GIB, 4) == 14.9888


def test_the_weights_of_a_published_quantised_model() -> None:
    """github.com/vllm-project/vllm/pull/12569: "Loading model weights took 67.7229 GB" for Llama-3.1-70B in w8a8, int8 with an
    fp32 scale for each output."""
    weights = {"num_bits": 8, "type": "int", "strategy": "channel"}
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": {"num_bits": 8, "type": "int", "dynamic": True},
    }
    said = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    ours = loaded("llama-3.1-70b", served(method_of_config(said, bf16))) / GIB
    assert ours == pytest.approx(67.7229, abs=1.5e-4)


def test_four_ranks_of_a_published_log() -> None:
    """github.com/vllm-project/vllm/issues/21348: Qwen3-235B-A22B on 4 GPUs, 178,880 tokens, of at most 8.11 GiB. The number of
    blocks is that of the rank with the least memory, and the log has that of one rank."""
    model = {**(memcalc.load_model("qwen3-235b-a22b").fields or {})}
    found = pool(model, 8.115 * GIB, 40960, tp=4)
    assert found.bytes_per_block == 94 * 16 * 1 * 256 * 2
    assert found.tokens(40960) * 0.98 < 178_880 < found.tokens(40960)


def test_defaults_of_a_batch() -> None:
    """engine/arg_utils.py, get_batch_defaults, for the server."""
    assert batching(load_gpu("h100-80gb")) == batching(load_gpu("h200")) == Batching(8192, 1024)
    assert batching(load_gpu("a100-80gb")) == batching(load_gpu("rtx4090")) == Batching(2048, 256)
    assert batching(load_gpu("b200")) == Batching(16384, 1024)


def test_the_budget() -> None:
    gpu = load_gpu("h100-80gb")
    assert requested(gpu, 0.92) == ceil(gpu.capacity * 0.92)
    assert Budget(1000, 400, 100, 50, 25).cache == 425
    for bad in (0.0, 1.5, -1.0, float("nan")):
        with pytest.raises(memcalc.InputError, match="--gpu-memory-utilization"):
            requested(gpu, bad)


def test_a_latent_is_whole_on_every_rank() -> None:
    one, eight = (pool("deepseek-v3", GIB, 4096, tp) for tp in (1, 8))
    assert one.bytes_per_block == eight.bytes_per_block == 61 * 64 * 576 * 2
    assert pool("deepseek-v3", GIB, 4096, kv_dtype=fp8).bytes_per_block == 61 * 64 * 576


def test_heads_are_shared_and_repeated() -> None:
    assert pool("llama-3-8b", GIB, 100, tp=4).bytes_per_block == 32 * 16 * 2 * 256 * 2
    assert pool("llama-3-8b", GIB, 100, tp=16).bytes_per_block == 32 * 16 * 1 * 256 * 2
    with pytest.raises(memcalc.InputError, match="--tp 3"):
        pool("llama-3-8b", GIB, 100, tp=3)


def test_falcon_caches_its_own_heads() -> None:
    """transformers repeats keys and values before they are cached; vLLM caches the 8 heads that there are."""
    assert pool("falcon-40b", GIB, 100).bytes_per_block == 60 * 16 * 8 * 128 * 2


def test_the_pages_of_a_hybrid_model() -> None:
    """Qwen3-Next-80B-A3B: 36 layers with states of 2 MiB and more, 12 with attention of 2 heads of 256."""
    found = pool(QWEN3_NEXT, 10 * GIB, 262144)
    state = 3 * 8192 * 2 + 32 * 128 * 128 * 2
    block = 16 * ceil(state / (16 * 2 * 512 * 2))
    assert [group.spec.block_size for group in found.groups] == [block] * 4
    assert {group.spec.page for group in found.groups} == {block * 2 * 512 * 2}
    assert found.blocks_per_sequence == ceil(262144 / block) + 3 * 2


QWEN3_NEXT: dict[str, Any] = {
    "model_type": "qwen3_next", "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 48,
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 151936, "num_experts": 512,
    "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "linear_num_value_heads": 32, "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "max_position_embeddings": 262144,
}  # fmt: skip


def test_models_without_attention() -> None:
    found = pool("mamba-130m", GIB, 5000)
    assert found.bytes_per_block == 24 * (3 * 1536 + 1536 * 16) * 2
    assert found.blocks_per_sequence == 1


@pytest.mark.parametrize("name,given,named", [
    ("t5-small", {}, "--engine vllm"), ("llama-7b", {"block_size": 20}, "--block-size 20"),
])  # fmt: skip
def test_what_is_refused(name: str, given: dict[str, Any], named: str) -> None:
    with pytest.raises(memcalc.InputError, match=named):
        specs(memcalc.load_model(name), (), fp16, fp16, **given)
