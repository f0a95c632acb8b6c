"""Group sizes of GPTQ and AWQ beside the usual ones: those that gptqmodel's TorchLinear takes (SUPPORTS_GROUP_SIZE)."""

from __future__ import annotations

from typing import Any

import pytest

import memcalc

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 2, "num_attention_heads": 8,
    "vocab_size": 1000, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize("size", [16, 32, 64, 128, 256, 512, 1024])
@pytest.mark.parametrize("kind", ["gptq", "awq"])
def test_each_group_has_a_scale_and_a_zero_point(kind: str, size: int) -> None:
    """Of each weight (out, in): in/g fp16 scales and in/g 4-bit zero points for each output."""
    found, one_group = (
        memcalc.infer(LLAMA, prompt_len=8, new_tokens=1, quantize=kind, group_size=n) for n in (size, -1)
    )
    linear = [(1024, 1024)] * 4 + [(2048, 1024)] * 2 + [(1024, 2048)]
    more = sum((fan_in // size - 1) * (2 * out + out // 2) for out, fan_in in linear)
    assert found.weights - one_group.weights == 2 * more


@pytest.mark.parametrize("size", [0, 7, 48, 2048, -2])
def test_other_sizes_are_refused(size: int) -> None:
    with pytest.raises(memcalc.InputError, match=f"--group-size {size}: "):
        memcalc.infer(LLAMA, prompt_len=8, new_tokens=1, quantize="gptq", group_size=size)
