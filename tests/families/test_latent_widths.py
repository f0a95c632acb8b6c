"""Latent attention whose heads have widths that no fused kernel takes: eager, in training and with a cache."""

from __future__ import annotations

from typing import Any

import pytest
from cases import step_cases
from generation_oracle import generated

import memcalc
from memcalc.validate import run

WIDTHS = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 10}


def narrow(model_type: str) -> dict[str, Any]:
    return {**step_cases(model_type)[0].fields, **WIDTHS}


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type",
    ["deepseek_v3", *(pytest.param(one, marks=pytest.mark.slow) for one in ("deepseek_v2", "axk1", "glm4_moe_lite"))],
)
def test_a_cache(model_type: str) -> None:
    fields = narrow(model_type)
    real = generated(fields, 2, 9, 2, attention="eager")
    report = memcalc.infer(fields, batch_size=2, prompt_len=9, new_tokens=2)
    assert report.asked.attention == "eager"
    assert report.kv_cache == real[2].held == report.kv_bytes_per_token() * 2 * 11
    assert (report.prefill_peak, report.decode_peak) == (real[0].peak, max(real[1].peak, real[2].peak))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3"])
def test_a_step(model_type: str) -> None:
    comparison = run.validate(narrow(model_type), backend="fake", precision="bf16", micro_batch_size=2, seq_len=16)
    assert comparison.worst.error == 0


def test_sdpa_and_megatron_are_refused() -> None:
    fields = narrow("deepseek_v3")
    for call in (memcalc.infer, memcalc.estimate):
        with pytest.raises(memcalc.InputError, match=r"--attention sdpa: .*eager"):
            call(fields, attention="sdpa")
    with pytest.raises(memcalc.InputError, match=r"--engine megatron: .*heads of"):
        memcalc.estimate(fields, engine="megatron")
    notes = memcalc.estimate(fields, seq_len=16).to_dict()["notes"]
    assert any(note.startswith("heads of 12 dims with values of 10: no fused kernel") for note in notes)
    assert memcalc.load_model(fields | {"v_head_dim": 16, "qk_rope_head_dim": 8}).program.attention_kinds[0] == "sdpa"
