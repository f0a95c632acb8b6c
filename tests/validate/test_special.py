"""`memcalc validate --backend fake` with what the plain reference step has not, and what of it is refused.

The rows of each kind are compared at length where the kind is tested (tests/quantized, tests/tuning, tests/offload, …). Here
each runs once, as the command runs it.
"""

from __future__ import annotations

from typing import Any

import pytest
from validate.test_fake import BART, LLAMA, MIXTRAL, T5, same

import memcalc
from memcalc.validate.run import outcome, validate
from memcalc.validate.special import is_special
from memcalc.validate.suites import model_of, options_of, read_suite

HALF: dict[str, Any] = {"precision": "bf16"}
LORA: dict[str, Any] = {"lora_rank": 4}
QLORA: dict[str, Any] = LORA | {"quantize": "nf4"}
FSDP2: dict[str, Any] = {"engine": "fsdp2", "gpus": 4}
ZERO_3: dict[str, Any] = {"engine": "deepspeed", "gpus": 2, "zero": 3}
PIPELINE: dict[str, Any] = {"engine": "fsdp2", "gpus": 2, "pp": 2, "zero": 2, "global_batch_size": 8}
MEGATRON: dict[str, Any] = {"engine": "megatron", "gpus": 2, "zero": 1}
NEEDS: dict[str, tuple[str, ...]] = {
    "lora_rank": ("peft",), "quantize": ("bitsandbytes",), "task": ("trl",), "packing": ("trl",), "zero": (),
    "offload_activations": ("trl",), "optimizer": ("adam_mini", "lomo_optim"),
}  # fmt: skip
EACH: dict[str, dict[str, Any]] = {
    "codes over fsdp2": QLORA | FSDP2,
    "packed rows": HALF | {"packing": True, "lengths": "16:1"},
    "adapters behind the split": LORA | FSDP2 | {"tp": 2},
    "weights on the host": FSDP2 | {"offload_params": "cpu"},
}
MORE: dict[str, dict[str, Any]] = {
    "codes in bytes": QLORA | FSDP2 | {"quantize_storage": "uint8", "double_quant": True, "lora_targets": "all-linear"},
    "codes in another dtype": QLORA | HALF | {"quantize_storage": "bf16", "engine": "ddp", "gpus": 2},
    "codes over zero 3": QLORA | ZERO_3,
    "8 bits": LORA | HALF | {"quantize": "int8"},
    "8 bits of a policy": LORA | HALF | {"quantize": "int8", "task": "dpo"},
    "4 bits of a policy": QLORA | HALF | {"task": "kto"},
    "adam-mini": HALF | {"optimizer": "adam-mini"},
    "adam-mini over masters": {"optimizer": "adam-mini", "precision": "bf16-mixed", "global_batch_size": 6},
    "lomo": HALF | {"optimizer": "lomo", "recompute": "full"},
    "adalomo": HALF | {"optimizer": "adalomo"},
    "packed rows of sft": HALF | {"packing": True, "task": "sft"},
    "packed rows with a mask": {"packing": True, "attention": "sdpa"},
    "packed rows under fsdp2": FSDP2 | {"packing": True},
    "noise": HALF | {"neftune_alpha": 5.0},
    "noise under zero 3": ZERO_3 | {"neftune_alpha": 5.0},
    "noise over codes in shards": QLORA | FSDP2 | {"neftune_alpha": 5.0, "packing": True},
    "grpo": HALF | {"task": "grpo", "completion_len": 16, "num_generations": 2, "beta": 0.1},
    "activations on the host": HALF | {"offload_activations": "cpu"},
    "activations of sft on the host": HALF | LORA | {"offload_activations": "cpu", "task": "sft", "packing": True},
    "frozen behind sequence parallelism": FSDP2 | {"tp": 2, "sequence_parallel": True, "freeze": "embeddings,first:1"},
    "adapters in stages": PIPELINE | LORA,
    "frozen stages": PIPELINE | {"freeze": "embeddings,first:2", "pp_rank": 1},
    "weights on the host, accumulated": FSDP2 | {"offload_params": "cpu", "global_batch_size": 24, "clip_grad_norm": True},
    "weights on the host of zero 3": ZERO_3 | {"offload_params": "cpu", "offload_optimizer": "cpu"},
    "states of zero 3 on the host": ZERO_3 | {"offload_optimizer": "cpu"},
    "states in files": ZERO_3 | {"offload_optimizer": "nvme", "nvme_optimizer_buffer_count": 5},
    "weights in files": ZERO_3 | {"offload_params": "nvme", "offload_optimizer": "nvme", "nvme_threads": 2},
    "a V": PIPELINE | {"schedule": "zbv"},
    "a V of both directions": PIPELINE | {"schedule": "dualpipev", "pp_rank": 1},
    "an order of a paper": PIPELINE | {"schedule": "dapple"},
}  # fmt: skip


def run(options: dict[str, Any]) -> None:
    for name, packages in NEEDS.items():
        if name in options:
            for package in packages:
                pytest.importorskip(package)
    if options.get("engine") == "deepspeed":
        pytest.importorskip("deepspeed")
    if "task" in options or "packing" in options or "offload_activations" in options:
        from tasks.grpo_oracle import import_grpo

        import_grpo()
    same(validate(LLAMA | {"num_hidden_layers": 4}, **{"micro_batch_size": 2, "seq_len": 32} | options))


@pytest.mark.parametrize("name", [*EACH, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_every_row_is_what_the_real_step_has(name: str) -> None:
    run((EACH | MORE)[name])


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("model", [T5, BART], ids=["t5", "bart"])
def test_stages_of_an_encoder_and_a_decoder(model: dict[str, Any], rank: int) -> None:
    """With their dropouts, which stages have at the ends of a stack alone."""
    same(validate(model, micro_batch_size=2, seq_len=16, **PIPELINE | {"pp_rank": rank}))


@pytest.mark.parametrize(
    ("model", "options", "line"),
    [
        (LLAMA, {"backend": "cuda", **QLORA, **FSDP2}, "--quantize nf4: on a GPU .*allowed: --backend fake"),
        (LLAMA, {"backend": "cuda", "neftune_alpha": 5.0}, r"--neftune-alpha 5\.0: on a GPU .*allowed: --backend fake"),
        (LLAMA, {"packing": True, "lengths": "8:1,24:1"}, "--lengths 8:1,24:1: .*allowed: one length that divides 32"),
        (LLAMA, {"packing": True, "lengths": "12:1"}, "--lengths 12:1: .*allowed: one length that divides 32"),
        (LLAMA, {"gpus": 2, "comm_hook": "powersgd"}, "--comm-hook powersgd: is not run by validate"),
        (LLAMA, PIPELINE | {"schedule": "chimera"}, "--schedule chimera: is not run .*allowed: gpipe, 1f1b"),
        (LLAMA, MEGATRON | {"precision_aware_optimizer": True}, "--engine megatron: .*allowed: none"),
        (T5, PIPELINE | {"backend": "cuda"}, "--pp 2: for a t5 on a GPU .*allowed: --backend fake, or 1"),
        (MIXTRAL, FSDP2 | {"ep": 2, "expert_imbalance": 1.5}, r"--expert-imbalance 1\.5: .*allowed: 1\.0"),
        (LLAMA, {"task": "grpo", "reward_model": "smollm2-135m", "completion_len": 8}, "--reward-model smollm2-135m: a run has"),
    ],
)  # fmt: skip
def test_what_is_refused(model: dict[str, Any], options: dict[str, Any], line: str) -> None:
    with pytest.raises(memcalc.InputError, match=line) as caught:
        validate(model, seq_len=32, micro_batch_size=1, **options)
    assert "\n" not in str(caught.value)


def test_a_package_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "adam_mini", None)
    with pytest.raises(memcalc.InputError, match="--optimizer adam-mini: needs pip install adam-mini to be run"):
        validate(LLAMA, optimizer="adam-mini", precision="bf16", seq_len=8)


def test_the_suite_of_fine_tuning_has_what_is_special_and_is_estimated() -> None:
    cases = read_suite("fine-tuning")
    reports = [memcalc.estimate(model_of(case), **options_of(case)) for case in cases]
    assert all(is_special(report.setup) or report.setup.task != "pretrain" for report in reports)
    assert {"deepspeed", "fsdp2", "none"} <= {report.setup.engine for report in reports}


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(read_suite("fine-tuning"))))
def test_a_case_of_the_suite_of_fine_tuning(number: int) -> None:
    case = read_suite("fine-tuning")[number]
    for package in ("peft", "bitsandbytes", "trl", "deepspeed", "adam_mini", "lomo_optim"):
        pytest.importorskip(package)
    from tasks.grpo_oracle import import_grpo

    import_grpo()
    made = outcome(case, "fake")
    assert made["outcome"] == "measured", made
    rows = [*made["memory"], *made["communication"]]
    assert [row["predicted"] for row in rows] == [row["measured"] for row in rows]
