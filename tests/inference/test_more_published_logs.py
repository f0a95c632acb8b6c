"""More start-up logs of vLLM: a hybrid model's blocks of two kinds, and the weights of two ranks."""

from __future__ import annotations

from typing import Any

import pytest

import memcalc
from memcalc.core.dtypes import bf16, fp8
from memcalc.inference.layers import cache_layers
from memcalc.inference.serving.vllm import Batching, planned, specs, workload
from memcalc.units import GIB

QWEN_27B: dict[str, Any] = {
    "model_type": "qwen3_5_text", "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 24,
    "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 17408, "vocab_size": 248320, "linear_num_key_heads": 16,
    "linear_num_value_heads": 48, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
}  # fmt: skip


def test_blocks_of_attention_and_of_states() -> None:
    """github.com/mitchross/talos-argocd-proxmox/pull/1995: a hybrid of 27B on two GPUs with an fp8 cache of 4.99 GiB each. "GPU
    KV cache size: 302,921 tokens, Maximum concurrency for 131,072 tokens per request: 2.31x", and 1,568 tokens a block."""
    model = memcalc.load_model(QWEN_27B)
    made = specs(model, cache_layers(model.program), bf16, fp8, tp=2)
    found = planned(made, int(4.99 * GIB), workload(model, 131_072, Batching(8192, 2)))
    assert {group.spec.block_size for group in found.groups} == {1568}
    assert found.tokens(131_072) == 302_921
    assert f"{found.max_concurrency:.2f}" == "2.31"


@pytest.mark.parametrize(("tp", "logged"), [(1, "14.96"), (2, "7.48")])
def test_the_weights_of_ranks(tp: int, logged: str) -> None:
    """github.com/vllm-project/vllm/pull/10511: "model weights take 14.96GiB" for Meta-Llama-3-8B, and 7.48 GiB with -tp 2."""
    found = memcalc.infer("llama-3-8b", engine="vllm", gpu="h100-80gb", tp=tp).serving
    assert found is not None and f"{found.weights / GIB:.2f}" == logged
