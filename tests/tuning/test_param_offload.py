"""Adapters under ZeRO-3 with weights or optimizer states on the host, against DeepSpeed and peft: bytes of the GPU and of the
host, copies, collectives."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
from validate.test_fake import GPT2, LLAMA, QWEN3, same

import memcalc
from memcalc.offload.host import totals
from memcalc.tuning.parts import full_name
from memcalc.validate.as_trained import validate

ZERO_3: dict[str, Any] = {"engine": "deepspeed", "zero": 3, "gpus": 2, "precision": "bf16-mixed", "lora_rank": 4}
BOTH: dict[str, Any] = {"offload_params": "cpu", "offload_optimizer": "cpu"}
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (LLAMA, {**BOTH, "param_persistence_threshold": 100}),
    (LLAMA, {"offload_optimizer": "cpu", "lora_targets": "all-linear"}),
    (QWEN3, {**BOTH, "lora_targets": "all-linear", "param_persistence_threshold": 0, "recompute": "full"}),
    (GPT2, {"offload_params": "cpu", "lora_targets": "all-linear", "param_persistence_threshold": 500}),
    (LLAMA, {**BOTH, "lora_bias": "none", "clip_grad_norm": True, "sub_group_size": 3000, "adapter_dtype": "bf16"}),
    (LLAMA, {**BOTH, "lora_targets": "all-linear", "recompute": "full", "reentrant_checkpoints": True}),
    (LLAMA, {**BOTH, "dora": True, "param_persistence_threshold": 100}),
    (QWEN3, {**BOTH, "modules_to_save": "lm_head", "gpus": 3, "param_persistence_threshold": 100}),
    (LLAMA, {"offload_params": "cpu", "reduce_bucket_size": 2000, "max_live_parameters": 20000}),
]


def named(case: object) -> str:
    values: dict[str, Any] = case  # type: ignore[assignment]
    return values.get("model_type") or "-".join(map(str, values.values()))


def on_two_places(model: dict[str, Any], report: memcalc.Report) -> Any:
    """A steady step of the first rank, as DeepSpeed runs it over peft's model."""
    import param_offload_oracle as oracle

    from memcalc.validate.tuning import tune

    setup, program, built = report.setup, report.model.program, oracle.build

    def tuned(*args: Any) -> Any:
        module = built(*args)
        if setup.recompute == "full":
            module.gradient_checkpointing_enable({"use_reentrant": setup.reentrant_checkpoints})
        return tune(module, setup, program)

    sizes = {
        "param_persistence_threshold": "stage3_param_persistence_threshold", "sub_group_size": "sub_group_size",
        "reduce_bucket_size": "reduce_bucket_size", "max_live_parameters": "stage3_max_live_parameters",
    }  # fmt: skip
    options = {name: getattr(setup, own) for own, name in sizes.items() if getattr(setup, own) is not None}
    frozen = tuple(full_name(weight) for weight in program.weights() if not program.wants_gradient(weight))
    with patch.object(oracle, "build", tuned):
        return oracle.param_offload_step(
            model, gpus=setup.gpus, optimizer=setup.offload_optimizer, params=setup.offload_params,
            clipping=1.0 if setup.clip_grad_norm else 0.0, frozen=frozen, **options,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("model", "options"),
    [*CASES[:2], *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES[2:])],
    ids=named,
)
def test_the_host_and_what_moves(model: dict[str, Any], options: dict[str, Any]) -> None:
    pytest.importorskip("peft")
    pytest.importorskip("deepspeed")
    from engines.deepspeed.offloaded_traffic import estimated_copies, estimated_payloads, payloads

    model = model | {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0} if model is GPT2 else model
    report = memcalc.estimate(model, seq_len=16, **ZERO_3 | options)
    real = on_two_places(model, report)
    tensors = [item for item in report.host if "rounded up" not in item.name]
    kept = {kind: report.setup.gpus * n for kind, n in real.host.items()}
    assert {kind: n for kind, n in totals(tensors).items() if n} == kept
    assert estimated_payloads(report) == payloads(real.sent)
    if report.setup.offload_params != "none":
        assert estimated_copies(report) == real.copied
    assert report.phases == real.phases


@pytest.mark.parametrize(
    "options",
    [
        {**BOTH, "lora_targets": "all-linear", "global_batch_size": 12},
        *(
            pytest.param(options, marks=pytest.mark.slow)
            for options in (
                {"offload_optimizer": "nvme"},
                {**BOTH, "recompute": "full", "reentrant_checkpoints": True, "global_batch_size": 8},
                {"engine": "fsdp2", "offload_params": "cpu", "recompute": "full", "reentrant_checkpoints": True},
                {"offload_optimizer": "nvme", "offload_params": "nvme", "param_persistence_threshold": 0},
                {**BOTH, "precision": "fp16-mixed", "dora": True},
                {**BOTH, "lora_bias": "all", "modules_to_save": "norm", "recompute": "full"},
            )
        ),
    ],
    ids=named,
)
def test_a_step(options: dict[str, Any]) -> None:
    pytest.importorskip("peft")
    pytest.importorskip("deepspeed")
    same(validate(LLAMA, micro_batch_size=2, seq_len=32, **ZERO_3 | options))


def test_the_host_has_the_frozen_weights_once_and_states_of_the_adapters() -> None:
    """Of Φ frozen weights 2 bytes on the host, all ranks together, and nothing of theirs in fp32."""
    zero_3 = ZERO_3 | BOTH | {"gpus": 8}
    report = memcalc.estimate("llama-7b", **zero_3)
    trained = report.model.trainable_parameters
    tensors = sum(totals([item for item in report.host if "rounded up" not in item.name]).values())
    frozen = 2 * (report.model.num_parameters - trained)
    assert frozen <= tensors <= frozen + 40 * trained + 2**30
