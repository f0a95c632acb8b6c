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


def test_a_rank_above_a_layers_width_is_told() -> None:
    """peft takes any rank; a weight of 200 × 96 has no higher rank than 96."""

    def notes(rank: int, targets: str) -> list[str]:
        report = memcalc.estimate(LLAMA, lora_rank=rank, lora_targets=targets, seq_len=16)
        return [note for note in report.to_dict()["notes"] if "can learn as much" in note]

    assert notes(96, "up_proj") == []
    assert notes(97, "up_proj") == [
        "adapters: rank 97 is more than the 96 of up_proj, whose weight has no higher rank: peft takes it, but a rank of 96 "
        "there can learn as much"
    ]
    assert "the 48 of k_proj" in notes(97, "up_proj,k_proj")[0]
