"""Frozen weights where DeepSpeed's AutoTP has cut the layers, against its own layers: what a rank keeps, allocates and sends."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import transformers
from layout import test_auto_tp as whole

import memcalc
from memcalc.engines.deepspeed.auto_tp import part_of
from memcalc.tuning.parts import full_name

FROZEN = ("embeddings,first:1", "all-but:norms", "all-but:head", "last:1,head", "mlp", "bias")


def fields(kind: str, frozen: str) -> dict[str, Any]:
    return {
        "model_type": kind,
        **whole.SMALL,
        "num_hidden_layers": 3,
        **({"attention_bias": True} if frozen == "bias" else {}),
    }


@pytest.mark.parametrize("frozen", [FROZEN[0], *(pytest.param(part, marks=pytest.mark.slow) for part in FROZEN[1:])])
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_part_is_deepspeeds(frozen: str, ranks: int) -> None:
    pytest.importorskip("deepspeed")
    config = fields("llama", frozen)
    tuned = memcalc.estimate(
        config, engine="deepspeed", gpus=ranks, tp=ranks, autotp=True, micro_batch_size=whole.BATCH, seq_len=whole.SEQ,
        attention="eager", freeze=frozen,
    ).model  # fmt: skip
    wants = {full_name(weight): tuned.program.wants_gradient(weight) for weight in tuned.program.weights()}
    make = transformers.AutoModelForCausalLM.from_config

    def made(*args: Any, **named: Any) -> Any:
        module = make(*args, **named)
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(wants[name])
        return module

    own = {name: value for name, value in config.items() if name != "model_type"}
    with (
        patch.object(whole, "SMALL", own),
        patch.object(transformers.AutoModelForCausalLM, "from_config", made),
        patch.object(memcalc, "load_model", lambda _: tuned),
    ):
        real = whole.real("llama", ranks)
        estimate = memcalc.estimate
        with patch.object(memcalc, "estimate", lambda model, **options: estimate(model, freeze=frozen, **options)):
            assert whole.mine("llama", ranks) == real


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_states_are_those_of_what_trains_of_a_ranks_part(zero: int) -> None:
    """2 + 12 bytes for a trained parameter of the part, the 12 over dp from ZeRO-1 on, and 2 for a frozen one."""
    report = memcalc.estimate(
        fields("llama", "mlp"), engine="deepspeed", gpus=8, tp=4, autotp=True, zero=zero, seq_len=16, freeze="mlp"
    )
    part = part_of(report.model, report.setup)
    trained = part.trainable_parameters
    assert 0 < trained < part.num_parameters
    memory = report.to_dict()["memory"]
    assert memory["parameters"] == 2 * part.num_parameters
    assert memory["optimizer_states"] == 12 * (trained if not zero else -(-trained // 2))
