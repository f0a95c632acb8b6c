"""Models that transformers builds, and whose forward fails there or is not modelled: refused by name, as in training."""

from __future__ import annotations

from typing import Any

import pytest

import memcalc


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"model_type": "glm4_moe"}, "21 rotated dims"),
        ({"model_type": "glm4", "head_dim": 24, "partial_rotary_factor": 0.3}, "7 rotated dims"),
        ({"model_type": "phi", "partial_rotary_factor": 0.05}, "3 rotated dims"),
        ({"model_type": "deepseek_v2"}, "num_experts_per_tok None"),
        ({"model_type": "mixtral", "num_experts_per_tok": 9}, "num_experts_per_tok 9"),
    ],
)
def test_what_has_no_forward_is_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(memcalc.InputError, match=named) as refused:
        memcalc.infer(fields, prompt_len=8, new_tokens=1)
    assert "\n" not in str(refused.value)
