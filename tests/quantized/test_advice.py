"""What a report says of quantised bases."""

from __future__ import annotations

from validate.test_fake import LLAMA

import memcalc
from memcalc.report.advice import advice
from memcalc.report.notes import notes
from memcalc.report.title import title


def test_a_base_in_4_bits_is_proposed_for_adapters() -> None:
    report = memcalc.estimate("llama-3-8b", gpu="16GB", lora_rank=16, precision="bf16", recompute="full")
    (one,) = [one for one in advice(report) if "--quantize" in one.flags]
    assert one.flags == "--quantize nf4 --double-quant"
    assert "dequantises each weight when it is used · needs bitsandbytes" in one.costs
    less = memcalc.estimate(LLAMA, lora_rank=4, precision="bf16", quantize="nf4")
    assert not any("--quantize" in one.flags for one in advice(less))
    assert not any("--quantize" in one.flags for one in advice(memcalc.estimate("llama-7b", precision="bf16")))


def test_the_title_names_the_codes() -> None:
    assert "adapters of rank 4 on a base in nf4" in str(
        title(memcalc.estimate(LLAMA, lora_rank=4, precision="bf16", quantize="nf4"))
    )


def test_a_class_of_its_own_is_not_quantised() -> None:
    """transformers replaces modules whose class is nn.Linear itself (integrations/bitsandbytes.py, replace_with_bnb_linear)."""
    report = memcalc.estimate("falcon-7b", lora_rank=8, quantize="nf4", precision="bf16")
    assert any("those of this model are FalconLinear" in note for note in notes(report))
    document = report.to_dict()
    assert document["memory"]["parameters"] >= 2 * document["model"]["parameters"]
    assert any(
        "those of this model are FalconLinear" in note for note in memcalc.infer("falcon-7b", quantize="nf4").notes
    )
    assert not any("FalconLinear" in note for note in memcalc.infer("falcon-7b", quantize="awq").notes)
