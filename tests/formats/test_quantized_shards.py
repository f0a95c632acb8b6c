"""Files with load_in_4bit over FSDP and ZeRO-3: what they mean together, what is refused, and what is written back."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

import memcalc
from memcalc.estimation.emitted import written
from memcalc.formats.axolotl import read_axolotl
from memcalc.formats.llama_factory import read_llama_factory
from memcalc.formats.section import Section

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 96, "intermediate_size": 200, "num_hidden_layers": 3, "vocab_size": 700,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 24,
}  # fmt: skip
FSDP: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "mixed_precision": "bf16", "num_machines": 1,
    "num_processes": 4, "fsdp_config": {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
}  # fmt: skip
TRL: dict[str, Any] = {
    "load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16", "dtype": "bfloat16", "use_peft": True, "lora_r": 8, "bf16": True,
    "max_length": 64, "per_device_train_batch_size": 2,
}  # fmt: skip
PLAIN: dict[str, Any] = {name: value for name, value in TRL.items() if name != "max_length"}
"""A script's own file: peft's adapters stay fp32."""


def setup(accelerate: dict[str, Any], args: dict[str, Any], **options: Any) -> Any:
    return memcalc.estimate(LLAMA, accelerate=accelerate, training_args=args, **options).setup


def test_trl_casts_adapters_so_that_nothing_is_fp32() -> None:
    got = setup(FSDP, TRL)
    assert (got.engine, got.gpus, got.quantize, got.quantize_storage) == ("fsdp2", 4, "nf4", "bf16")
    assert (got.precision, got.adapter_dtype, got.grad_dtype) == ("bf16", "bf16", "bf16")


def test_without_the_key_codes_are_whole() -> None:
    got = memcalc.estimate(LLAMA, accelerate=FSDP, training_args={k: v for k, v in TRL.items() if "storage" not in k})
    assert got.setup.quantize_storage == "uint8"
    assert any("accelerate leaves them out of FSDP's units" in note for note in got.to_dict()["notes"])


def test_what_is_frozen_keeps_its_dtype() -> None:
    got = setup(FSDP, TRL | {"dtype": "float32"})
    assert (got.precision, got.base_dtype, got.adapter_dtype, got.quantize_storage) == (
        "bf16-mixed",
        "fp32",
        "fp32",
        "bf16",
    )
    assert got.grad_dtype == "bf16"  # accelerate's policy reduces in what it gathers in
    in_trainer = PLAIN | {"fsdp": "full_shard", "fsdp_config": {"version": 2}, "lora_rank": None}
    got = memcalc.estimate(LLAMA, training_args=in_trainer, gpus=4).setup
    assert (got.engine, got.quantize_storage) == ("fsdp2", "bf16")


def test_options_win() -> None:
    got = setup(FSDP, TRL, quantize_storage="uint8")
    assert got.quantize_storage == "uint8"
    got = setup(FSDP, TRL, quantize="fp4")  # drops what goes with the file's own
    assert (got.quantize, got.double_quant, got.quantize_storage) == ("fp4", False, "bf16")
    got = setup(FSDP, TRL, engine="ddp", precision="bf16", gpus=4)
    assert (got.engine, got.quantize_storage) == ("ddp", "bf16")


def test_codes_that_fsdp1_does_not_flatten() -> None:
    first = FSDP | {"fsdp_config": {"fsdp_version": 1}}
    notes = memcalc.estimate(LLAMA, accelerate=first, training_args=TRL).to_dict()["notes"]
    assert any("FSDP1, estimated as FSDP2" in note for note in notes)
    for args, word in (
        ({k: v for k, v in TRL.items() if "storage" not in k}, "bnb_4bit_quant_storage"),
        ({k: v for k, v in TRL.items() if "4bit" not in k} | {"load_in_8bit": True}, "load_in_8bit"),
    ):
        with pytest.raises(memcalc.InputError, match="Cannot flatten integer dtype tensors") as error:
            setup(first, args)
        assert word in str(error.value) and "\n" not in str(error.value)


def test_fsdp1_flattens_no_integers() -> None:
    """torch's own words."""
    bnb = pytest.importorskip("bitsandbytes")
    import torch
    from fsdp2_oracle import ranks
    from torch.distributed.fsdp import FullyShardedDataParallel

    layer = bnb.nn.Linear4bit(64, 64, bias=False, compute_dtype=torch.bfloat16)
    layer.weight = bnb.nn.Params4bit(torch.randn(64, 64), requires_grad=False, **layer.weight.__dict__)
    layer.weight._quantize(torch.device("cpu"))
    with ranks(2), pytest.raises(ValueError, match="Cannot flatten integer dtype tensors"):
        FullyShardedDataParallel(torch.nn.Sequential(layer), use_orig_params=True, device_id=torch.device("cpu"))


@pytest.mark.parametrize("word", ["int8", "float64", "bf16", 4])
def test_storage_that_is_not_modelled(word: Any) -> None:
    with pytest.raises(memcalc.InputError, match="bnb_4bit_quant_storage"):
        setup(FSDP, TRL | {"bnb_4bit_quant_storage": word})


def test_tools_that_set_it_themselves() -> None:
    axolotl: dict[str, Any] = {"adapter": "qlora", "load_in_4bit": True, "lora_r": 8, "lora_target_modules": ["q_proj"]}
    found = read_axolotl(Section("--training-args", "a.yaml", axolotl)).options
    assert (found["quantize_storage"].value, found["quantize_storage"].is_given) == ("bf16", False)
    own = axolotl | {"bnb_config_kwargs": {"bnb_4bit_quant_storage": "float32"}}
    assert read_axolotl(Section("--training-args", "a.yaml", own)).options["quantize_storage"].value == "fp32"
    factory: dict[str, Any] = {"finetuning_type": "lora", "quantization_bit": 4, "fp16": True}
    found = read_llama_factory(Section("--training-args", "a.yaml", factory)).options
    assert found["quantize_storage"].value == "fp16"


def test_llama_factory_over_fsdp() -> None:
    args: dict[str, Any] = {
        "stage": "sft",
        "finetuning_type": "lora",
        "quantization_bit": 4,
        "bf16": True,
        "cutoff_len": 64,
    }
    got = setup(FSDP, args)
    assert (got.precision, got.adapter_dtype, got.base_dtype, got.quantize_storage) == (
        "bf16-mixed",
        "fp32",
        None,
        "bf16",
    )


def test_zero_3() -> None:
    zero = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 2}
    got = memcalc.estimate(LLAMA, deepspeed=zero, training_args=TRL, gpus=4).setup
    assert (got.zero, got.quantize, got.quantize_storage, got.precision) == (3, "nf4", "bf16", "bf16-mixed")


@pytest.mark.parametrize(
    "options",
    [
        {"engine": "fsdp2"},
        {"engine": "fsdp2", "quantize_storage": "uint8", "double_quant": True},
        {"engine": "fsdp2", "base_dtype": "fp32"},
        {"engine": "ddp", "precision": "bf16", "quantize_storage": "fp32"},
    ],
)
def test_what_is_written_is_read(options: dict[str, Any]) -> None:
    given = {
        "gpus": 4,
        "quantize": "nf4",
        "lora_rank": 8,
        "micro_batch_size": 2,
        "seq_len": 64,
        "precision": "bf16-mixed",
    }
    report = memcalc.estimate(LLAMA, **given | options)
    out = written("training-args", report.setup, report.model.whole)
    content = yaml.safe_load(out.text)
    assert content.get("bnb_4bit_quant_storage") == {
        "uint8": None, "fp32": "float32", "bf16": "bfloat16",
    }[report.setup.quantize_storage]  # fmt: skip
    rest = {"gpus": 4, "seq_len": 64} | {name: getattr(report.setup, name) for name in out.unsaid}
    again = memcalc.estimate(LLAMA, training_args=content, **rest)
    assert again.setup == report.setup
