"""What a report says of adapters."""

from __future__ import annotations

from validate.test_fake import LLAMA

import memcalc
from memcalc.report.advice import advice
from memcalc.report.notes import notes


def test_adapters_of_the_bases_dtype_are_proposed() -> None:
    report = memcalc.estimate("llama-7b", lora_rank=16, lora_targets="all-linear", precision="bf16", micro_batch_size=4)
    assert any("--adapter-dtype bf16" in one.flags for one in advice(report))
    less = memcalc.estimate(LLAMA, lora_rank=4, precision="bf16", adapter_dtype="bf16")
    assert not any("adapter" in one.flags for one in advice(less))


def test_notes_say_what_fp32_adapters_keep() -> None:
    (note,) = notes(memcalc.estimate(LLAMA, lora_rank=4, precision="bf16"))
    assert "more than full fine-tuning keeps (--adapter-dtype bf16 keeps none)" in note
    (note,) = notes(memcalc.estimate(LLAMA, lora_rank=4, engine="deepspeed", zero=2, gpus=2))
    assert "deepspeed casts all weights to bf16" in note
    assert notes(memcalc.estimate(LLAMA, lora_rank=4, precision="bf16", adapter_dtype="bf16")) == []
    assert notes(memcalc.estimate(LLAMA, precision="bf16")) == []
