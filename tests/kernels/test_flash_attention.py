"""flash-attn over rows of one length: transformers' own forward around its kernel's tensors, to the byte, and the kernel's bytes
by hand."""

from __future__ import annotations

from typing import Any

import pytest
from cases import step_cases
from validate.test_fake import LLAMA, MIXTRAL, QWEN3, same

import memcalc
from memcalc.cli.main import main
from memcalc.kernels.flash_checks import CHECKED
from memcalc.validate import as_trained

FLASH: dict[str, Any] = {"attention": "flash", "precision": "bf16"}
ENGINES: dict[str, dict[str, Any]] = {
    "ddp": {"engine": "ddp", "gpus": 2, "global_batch_size": 8},
    "fsdp2": {"engine": "fsdp2", "gpus": 4, "zero": 3, "precision": "bf16-mixed", "recompute": "full"},
    "deepspeed": {"engine": "deepspeed", "gpus": 2, "zero": 3, "precision": "bf16-mixed"},
}
MORE: dict[str, dict[str, Any]] = {
    "autocast": {"precision": "bf16-autocast"},
    "fp16": {"precision": "fp16", "recompute": "full"},
    "per op": {"recompute": "op"},
    "adapters": {"lora_rank": 4, "lora_targets": "all-linear"},
    "codes": {"lora_rank": 4, "quantize": "nf4"},
    "sft": {"task": "sft"},
    "dpo": {"task": "dpo", "lora_rank": 4},
    "kto": {"task": "kto"},
    "noise": {"neftune_alpha": 5.0},
    "activations on the host": {"offload_activations": "cpu"},
    "reentrant": {"recompute": "full", "reentrant_checkpoints": True},
    "lomo": {"optimizer": "lomo"},
    "weights on the host": ENGINES["deepspeed"] | {"offload_params": "cpu", "offload_optimizer": "cpu", "lora_rank": 4},
}


@pytest.mark.parametrize("seq_len", [32, 128])
def test_a_step(seq_len: int) -> None:
    """With heads that share keys, of a width that is aligned; 32 tokens are rounded up to 128."""
    same(as_trained.validate(LLAMA, micro_batch_size=2, seq_len=seq_len, **FLASH))


def test_heads_that_are_not_aligned() -> None:
    model = LLAMA | {"head_dim": 20}
    same(as_trained.validate(model, micro_batch_size=2, seq_len=24, recompute="full", **FLASH))


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_engines(engine: str) -> None:
    if engine == "deepspeed":
        pytest.importorskip("deepspeed")
    same(as_trained.validate(QWEN3, **FLASH | {"micro_batch_size": 2, "seq_len": 32} | ENGINES[engine]))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MORE))
def test_more(name: str) -> None:
    options = MORE[name]
    for option, package in (
        ("lora_rank", "peft"),
        ("quantize", "bitsandbytes"),
        ("zero", "deepspeed"),
        ("task", "trl"),
    ):
        if option in options:
            pytest.importorskip(package)
    if options.get("optimizer") == "lomo":
        pytest.importorskip("lomo_optim")
    if "task" in options or "offload_activations" in options:
        from tasks.grpo_oracle import import_grpo

        import_grpo()
    same(as_trained.validate(LLAMA, **FLASH | {"micro_batch_size": 2, "seq_len": 32} | options))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"precision": "bf16-autocast", "recompute": "full"}], ids=["bf16", "autocast"])
@pytest.mark.parametrize("family", CHECKED)
def test_families(family: str, options: dict[str, Any]) -> None:
    for case in step_cases(family)[:3]:
        recompute = options if memcalc.load_model(case.fields).program.recomputes else {**options, "recompute": "none"}
        workload = {"micro_batch_size": case.batch, "seq_len": case.seq}
        same(as_trained.validate(dict(case.fields), **FLASH | workload | recompute))


def test_a_layer_keeps_what_torchs_own_kernel_does_and_16_bytes_of_state() -> None:
    options: dict[str, Any] = {"micro_batch_size": 2, "seq_len": 128, "precision": "bf16"}
    flash, own = (memcalc.estimate(LLAMA, attention=attention, **options).to_dict() for attention in ("flash", "sdpa"))
    assert flash["memory"]["saved_activations"] - own["memory"]["saved_activations"] == 3 * 16


def test_a_window_needs_no_mask() -> None:
    """sdpa makes a mask, (batch, 1, seq, seq), where the sequence is longer than the window; the kernel has its own."""
    model = dict(step_cases("mistral")[0].fields) | {"sliding_window": 8}
    same(as_trained.validate(model, micro_batch_size=2, seq_len=64, **FLASH))
    names = [
        {
            item["name"]
            for item in memcalc.estimate(model, seq_len=64, precision="bf16", attention=a).to_dict()["memory"]["items"]
        }
        for a in ("sdpa", "flash")
    ]
    assert [any("mask" in name for name in own) for own in names] == [True, False]


@pytest.mark.parametrize(
    ("model", "options", "line"),
    [
        ("bert-base", {}, "--attention flash: for a bert .*allowed: sdpa, eager"),
        ("gemma-2-9b", {}, "--attention flash: for a gemma2 "),
        ("llama-7b", {"precision": "fp32"}, "--attention flash: flash-attn takes 16 bits, and precision is fp32; allowed: sdpa"),
        ("llama-7b", {"engine": "fsdp1", "gpus": 2}, "--attention flash: with engine fsdp1 .*allowed: sdpa, eager, or --engine"),
        (LLAMA | {"head_dim": 264}, {}, "--attention flash: flash-attn takes heads of up to 256, not 264; allowed: sdpa"),
        ("llama-7b", {"gpu": "t4"}, "--attention flash: flash-attn needs compute capability 8.0, and t4 has 7.5; allowed: sdpa"),
        ("llama-7b", {"packing": True, "gpu": "v100-32gb"}, "flash-attn needs compute capability 8.0, and v100-32gb has 7.0"),
        (
            "llama-7b", {"quantize": "nf4", "lora_rank": 4, "prepare_kbit_training": True},
            "--prepare-kbit-training on: flash-attn casts .*allowed: off, or --attention sdpa",
        ),
    ],
)  # fmt: skip
def test_what_is_refused(model: Any, options: dict[str, Any], line: str) -> None:
    with pytest.raises(memcalc.InputError, match=line):
        memcalc.estimate(model, **{"attention": "flash", "precision": "bf16"} | options)


def test_experts_have_it_too() -> None:
    same(as_trained.validate(MIXTRAL, micro_batch_size=1, seq_len=16, **FLASH))


def test_training_arguments_name_it(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "emit",
        "training-args",
        "qwen2.5-7b",
        "--task",
        "sft",
        "--attention",
        "flash",
        "--precision",
        "bf16-autocast",
    ]
    assert main(words) == 0
    assert "attn_implementation: flash_attention_2" in capsys.readouterr().out.splitlines()
