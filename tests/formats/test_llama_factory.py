"""LLaMA-Factory's files. What is expected is what its sources at ff6d4d1 do (hparams, model, train)."""

from __future__ import annotations

from typing import Any

import pytest
from any_values import ANY
from hypothesis import given, settings
from hypothesis import strategies as st
from records import examples

import memcalc
from memcalc.errors import InputError
from memcalc.formats import llama_factory
from memcalc.formats.found import ACCUMULATION, Found
from memcalc.formats.trainer_adapters import BY_NAME
from memcalc.formats.training_args import read
from memcalc.inputs.options import check_options

FILE: dict[str, Any] = {
    "model_name_or_path": "Qwen/Qwen2-7B",
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "lora",
    "dataset": "identity",
    "template": "qwen",
    "cutoff_len": 1024,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 8,
    "learning_rate": "1.0e-4",
    "ddp_timeout": 180000000,
    "bf16": True,
}


def values(found: Found) -> dict[str, Any]:
    return {option: value.value for option, value in found.options.items()}


def of(**content: Any) -> dict[str, Any]:
    return values(read("lf.yaml", FILE | content))


def notes(**content: Any) -> str:
    return " ".join(read("lf.yaml", FILE | content).notes)


def refusal(**content: Any) -> str:
    with pytest.raises(InputError) as caught:
        read("lf.yaml", FILE | content)
    assert "\n" not in str(caught.value) and str(caught.value).startswith("--training-args lf.yaml: ")
    return str(caught.value)


def test_lora_with_all_defaults() -> None:
    found = read("lf.yaml", FILE)
    got = values(found)
    assert found.model is not None and found.model.value == "Qwen/Qwen2-7B"
    assert (got["micro_batch_size"], got[ACCUMULATION], got["seq_len"]) == (1, 8, 1024)
    assert (got["lora_rank"], got["lora_targets"], got["lora_dropout"]) == (8, BY_NAME, 0.0)
    assert (got["precision"], got["base_dtype"]) == ("bf16-autocast", "bf16")
    assert got["recompute"] == "full" and not found.options["recompute"].is_given
    assert got["task"] == "pretrain"  # the model's own loss
    assert "adapter_dtype" not in got  # peft's and the tool's own: fp32
    assert "checkpoint's dtype" in notes()


def test_defaults_where_the_file_says_nothing() -> None:
    found = read("lf.yaml", {"model_name_or_path": "gpt2", "cutoff_len": None, "finetuning_type": "lora"})
    got = values(found)
    assert (got["micro_batch_size"], got[ACCUMULATION], got["seq_len"]) == (8, 1, 2048)
    assert not any(value.is_given for value in found.options.values())


def test_the_dtype_of_what_trains() -> None:
    def pair(**content: Any) -> tuple[Any, Any]:
        got = of(**content)
        return got["precision"], got.get("base_dtype")

    assert pair(finetuning_type="full") == ("bf16-autocast", None)  # weights that train become fp32
    assert pair(finetuning_type="full", bf16=False, pure_bf16=True) == ("bf16", None)
    assert pair(finetuning_type="full", bf16=False) == ("fp32", None)
    assert pair(finetuning_type="full", bf16=False, fp16=True) == ("fp16-autocast", None)
    assert pair(bf16=False, pure_bf16=True) == ("bf16", None)
    assert pair(finetuning_type="full", deepspeed="ds_z3.json") == ("bf16-mixed", None)
    assert pair(finetuning_type="full", fsdp="full_shard auto_wrap") == ("bf16-mixed", None)
    assert pair(fp8=True)[0] == "fp8-mixed"


def test_adapters() -> None:
    got = of(
        lora_rank=16,
        lora_target="q_proj,v_proj",
        lora_dropout=0.1,
        use_dora=True,
        additional_target="embed_tokens,lm_head",
    )
    assert (got["lora_rank"], got["lora_targets"], got["lora_dropout"], got["dora"]) == (16, "q_proj,v_proj", 0.1, True)
    assert got["modules_to_save"] == "embed_tokens,lm_head"
    assert of(lora_target="all")["lora_targets"] == BY_NAME
    assert "orthogonal" in refusal(finetuning_type="oft")


def test_quantised_bases() -> None:
    got = of(quantization_bit=4)
    assert (got["quantize"], got["double_quant"], got["quantize_compute_dtype"]) == ("nf4", True, "bf16")
    assert "prepare_kbit_training" not in got
    got = of(quantization_bit=4, quantization_type="fp4", double_quantization=False, quantization_method="bitsandbytes")
    assert (got["quantize"], got["double_quant"]) == ("fp4", False)
    assert of(quantization_bit=8)["quantize"] == "int8"
    assert "use_reentrant_gc: checkpoints that re-enter" in notes(quantization_bit=8)
    assert "re-enter" not in notes(quantization_bit=8, use_reentrant_gc=False) + notes(quantization_bit=4)
    assert "double_quant" not in of(quantization_bit=8) and "quantize_compute_dtype" not in of(quantization_bit=8)
    assert "4, 8" in refusal(quantization_bit=3)
    assert "bnb" in refusal(quantization_bit=4, quantization_method="hqq")
    assert "lora" in refusal(quantization_bit=4, finetuning_type="full")


def test_frozen_layers() -> None:
    assert of(finetuning_type="freeze")["freeze"] == "all-but:last:2"
    assert of(finetuning_type="freeze", freeze_trainable_layers=3)["freeze"] == "all-but:last:3"
    assert of(finetuning_type="freeze", freeze_trainable_layers=-4)["freeze"] == "all-but:first:4"
    extra = of(finetuning_type="freeze", freeze_trainable_layers=1, freeze_extra_modules="embed_tokens,norm")
    assert extra["freeze"] == "all-but:last:1+embed_tokens+norm"
    assert "allowed: all" in refusal(finetuning_type="freeze", freeze_trainable_modules="mlp")
    assert "above 0" in refusal(finetuning_type="freeze", freeze_trainable_layers=0)
    assert "above 0" in refusal(finetuning_type="freeze", freeze_trainable_layers=1.5)


def test_stages() -> None:
    assert of(stage="pt")["task"] == "pretrain" and "packing" in notes(stage="pt")
    assert "packing" not in notes() and "packing True" in notes(packing=True)
    assert of(stage="dpo")["task"] == "dpo" and "TRL's head" in notes(stage="dpo")
    assert of(stage="dpo")["precision"] == "bf16-autocast" and of(stage="dpo")["base_dtype"] == "bf16"
    assert of(stage="kto")["task"] == "kto"
    assert "its PPO has one model with a value head" in refusal(stage="ppo")
    assert of(stage="dpo", pref_loss="simpo")["precompute_reference"] is True
    assert "reward" in refusal(stage="rm")
    assert "second model" in refusal(stage="dpo", ref_model="gpt2")
    assert "ref_model" in notes(stage="dpo", ref_model="gpt2", finetuning_type="full")


def test_recomputation_is_on_by_itself() -> None:
    assert of(disable_gradient_checkpointing=True)["recompute"] == "none"
    assert of(disable_gradient_checkpointing=False)["recompute"] == "full"
    assert of(gradient_checkpointing=False)["recompute"] == "full"  # the Trainer's own switch adds nothing
    assert "use_unsloth_gc" in notes(use_unsloth_gc=True)


def test_kernels() -> None:
    assert of(flash_attn="disabled")["attention"] == "eager"
    assert of(flash_attn="fa2")["attention"] == "flash" and "flash_attn" not in notes(flash_attn="fa2")
    third = of(flash_attn="fa3")
    assert (third["attention"], third["flash_attention_version"]) == ("flash", 3)
    assert "attention" not in of(flash_attn="auto")
    assert of(flash_attn=True)["attention"] == "flash"  # an older version's switch
    liger = of(enable_liger_kernel=True)
    assert (liger["kernels"], liger["cross_entropy"]) == ("fused", "fused") and "liger" not in liger
    assert "kernels" not in of(enable_liger_kernel=True, stage="dpo")


def test_optimizers_with_switches_of_their_own() -> None:
    galore = of(finetuning_type="full", use_galore=True, galore_rank=128, optim="adamw_torch")
    assert galore["optimizer"] == "galore-adamw" and "optimizer_implementation" not in galore
    assert of(finetuning_type="full", use_muon=True)["optimizer"] == "muon"
    assert "128" in refusal(finetuning_type="full", use_galore=True)  # the tool's own rank is 16
    assert "within backward" in refusal(finetuning_type="full", use_galore=True, galore_rank=128, galore_layerwise=True)
    mini = of(finetuning_type="full", use_adam_mini=True)
    assert mini["optimizer"] == "adam-mini" and "optimizer_implementation" not in mini
    assert "BAdam" in refusal(use_badam=True)


def test_megatron() -> None:
    got = of(
        finetuning_type="full", tensor_model_parallel_size=4, pipeline_model_parallel_size=2, sequence_parallel=True,
        virtual_pipeline_model_parallel_size=2, recompute_granularity="full", use_distributed_optimizer=True,
    )  # fmt: skip
    assert (got["engine"], got["tp"], got["pp"], got["zero"], got["precision"]) == ("megatron", 4, 2, 1, "bf16-mixed")
    assert (got["schedule"], got["virtual_stages"], got["sequence_parallel"], got["recompute"]) == (
        "interleaved",
        2,
        True,
        "full",
    )
    assert of(finetuning_type="full", tensor_model_parallel_size=1)["recompute"] == "none"
    assert of(finetuning_type="full", tensor_model_parallel_size=2)["sequence_parallel"] is False


def test_adapters_of_megatron() -> None:
    """_create_peft_config of train/megatron_bridge/config_builder.py: all linear layers, whatever is asked for."""
    got = of(tensor_model_parallel_size=2)
    assert (got["lora_rank"], got["lora_targets"], "lora_dropout" in got) == (8, "default", False)
    got = of(tensor_model_parallel_size=2, lora_rank=16, lora_target="q_proj")
    assert (got["lora_rank"], got["lora_targets"]) == (16, "default")
    report = memcalc.estimate(
        "llama-7b", gpus=2, training_args={"finetuning_type": "lora", "tensor_model_parallel_size": 2}
    )
    assert report.setup.engine == "megatron" and report.setup.lora_rank == 8


def test_misspelt_keys() -> None:
    assert "did you mean cutoff_len" in refusal(cutof_len=3)
    assert "did you mean quantization_bit" in refusal(quantisation_bit=4)


_MATTER = getattr(llama_factory, "_MATTER")  # noqa: B009
_NOTED = getattr(llama_factory, "_NOTED")  # noqa: B009


@pytest.mark.parametrize("key", sorted(_NOTED))
def test_keys_that_are_not_modelled_are_noted(key: str) -> None:
    assert key in notes(**{key: True} if key != "pref_ftx" else {"pref_ftx": 1.0})
    assert f"{key} " not in notes(**{key: False})


_KEYS = st.sampled_from([*_MATTER, *_NOTED, "stage", "flash_attn", "fsdp", "optim", "bf16"])


@settings(max_examples=examples(300))
@given(st.dictionaries(_KEYS, ANY, max_size=5))
def test_any_values_give_options_or_one_line(content: dict[str, Any]) -> None:
    try:
        got = values(read("lf.yaml", FILE | content))
    except InputError as error:
        assert "\n" not in str(error)
    else:
        got.pop(ACCUMULATION)
        check_options(got)
