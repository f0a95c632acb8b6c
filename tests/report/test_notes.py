"""What a report says of its attention kernel, and when it says nothing."""

from __future__ import annotations

from typing import Any

import pytest

import memcalc
from memcalc.report.defaults import default_lines
from memcalc.report.notes import notes
from memcalc.report.time import time_notes

GROUPED = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 40, "num_hidden_layers": 2, "vocab_size": 70,
           "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
TRACED = GROUPED | {"model_type": "mellum", "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
FALCON = {"model_type": "falcon", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 70, "num_attention_heads": 4}


def of(config: dict[str, Any], **options: Any) -> list[str]:
    report = memcalc.estimate(dict(config), seq_len=16, **options)
    assert report.to_dict()["notes"] == [*default_lines(report), *notes(report), *time_notes(report)]
    return notes(report)


@pytest.mark.parametrize(
    ("config", "options", "words"),
    [
        (GROUPED, {"precision": "fp32"}, "with an NVIDIA --gpu they are counted"),
        (
            GROUPED | {"num_attention_heads": 8, "num_key_value_heads": 4},
            {"precision": "fp32", "engine": "deepspeed", "zero": 1, "gpus": 2, "cp": 2},
            "with an NVIDIA --gpu they are counted",
        ),
        (GROUPED, {"precision": "fp32", "gpu": "mi300x"}, "not modelled for mi300x"),
        (GROUPED, {"precision": "fp32", "gpu": "a10"}, "torch on a10 has no fused kernel"),
        (GROUPED, {"precision": "fp16", "gpu": "t4"}, "torch on t4 has no fused kernel"),
        (FALCON, {"precision": "bf16", "padded": True}, "torch has no fused kernel"),
        (
            TRACED,
            {"precision": "fp32", "gpu": "a10"},
            "torch on a10 has none (for fewer key/value heads than query heads in fp32)",
        ),
        (TRACED, {"precision": "bf16", "gpu": "t4"}, "torch on t4 has none (in bf16)"),
    ],
)
def test_a_kernel_that_is_a_surprise_is_named(config: dict[str, Any], options: dict[str, Any], words: str) -> None:
    (note,) = [note for note in of(config, **options) if note.startswith("sdpa: ")]
    assert words in note


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16"},
        {"precision": "fp32", "attention": "eager"},
        {"precision": "fp32", "attention": "eager", "gpu": "a10"},
        {"precision": "bf16-autocast", "gpu": "a10"},
        {"precision": "bf16-mixed", "engine": "megatron", "gpu": "a10"},
    ],
    ids=str,
)
def test_else_nothing_is_said(options: dict[str, Any]) -> None:
    assert of(GROUPED, **options) == []


@pytest.mark.parametrize("gpu", [None, "mi300x"])
def test_what_an_nvidia_gpu_has_a_fused_kernel_for_is_no_surprise(gpu: str | None) -> None:
    windowed = GROUPED | {"model_type": "mistral", "sliding_window": 16}  # a mask, for which k and v are repeated
    repeated = FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}
    for config in (windowed, repeated):
        assert of(config, precision="fp32", gpu=gpu) == []
    assert len(of(windowed | {"sliding_window": 17}, precision="fp32", gpu=gpu)) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"precision": "bf16", "gpu": "a10"}, {"precision": "fp32", "gpu": "mi300x"}], ids=str
)
def test_of_a_trace_nothing_is_said_where_the_kernels_are_fused_or_not_known(options: dict[str, Any]) -> None:
    assert of(TRACED, **options) == []


def test_a_bare_number_of_parameters_has_no_attention() -> None:
    assert notes(memcalc.estimate(params="7B", precision="fp32", gpu="a10")) == []


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_why_zero_has_more_states_than_stage_0_in_fp32(zero: int) -> None:
    """single_partition_of_fp32_groups, fp32_partitioned_groups_flat: clones, also where the weights are fp32 themselves."""
    options: dict[str, Any] = {"engine": "deepspeed", "gpus": 1, "gpu": "a10"}
    how = GROUPED | {"num_key_value_heads": 4}
    report, plain = (memcalc.estimate(dict(how), seq_len=16, precision="fp32", zero=z, **options) for z in (zero, 0))
    copies = [item for item in report.items if item.name == "flat fp32 copy of the weights"]
    more = report.total("optimizer_states") - plain.total("optimizer_states")
    assert sum(copy.nbytes for copy in copies) == more >= 4 * report.model.num_parameters
    (note,) = of(how, precision="fp32", zero=zero, **options)
    assert note.startswith(f"DeepSpeed's ZeRO {zero} keeps a flat fp32 copy of its partition of the weights (")
    assert "stage 0 keeps none" in note
    assert not of(how, precision="fp32", zero=0, **options)
    assert not of(how, precision="bf16-mixed", zero=zero, **options)


def test_a_stage_over_one_gpu_shards_nothing() -> None:
    (note,) = notes(memcalc.estimate(params="7B", zero=3))
    assert "shards nothing" in note
    assert notes(memcalc.estimate(params="7B", zero=3, gpus=2)) == []


def test_experts_under_adapters_have_notes() -> None:
    report = memcalc.estimate("mixtral-8x7b", lora_rank=8, lora_targets="w1,w3", quantize="nf4", precision="bf16")
    said = notes(report)
    assert any("experts that are one parameter stay as they are" in note for note in said)
    assert any("keeps a copy of its experts with their adapters added" in note for note in said)
    attention = notes(memcalc.estimate("mixtral-8x7b", lora_rank=8, lora_targets="q_proj", precision="bf16"))
    assert not any("experts" in note for note in attention)
