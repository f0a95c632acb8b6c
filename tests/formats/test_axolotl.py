"""axolotl's files. What is expected is what its sources at 067b021 do (utils/schemas, utils/config, loaders, core/builders)."""

from __future__ import annotations

from typing import Any

import pytest
from any_values import ANY
from hypothesis import given, settings
from hypothesis import strategies as st
from records import examples

from memcalc.errors import InputError
from memcalc.formats import axolotl
from memcalc.formats.found import ACCUMULATION, Found
from memcalc.formats.trainer_adapters import BY_NAME
from memcalc.formats.training_args import read
from memcalc.inputs.options import check_options

FILE: dict[str, Any] = {
    "base_model": "NousResearch/Meta-Llama-3-8B",
    "datasets": [{"path": "some/data", "type": "alpaca"}],
    "sequence_len": 4096,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "optimizer": "adamw_bnb_8bit",
    "bf16": "auto",
    "tf32": False,
    "gradient_checkpointing": True,
    "attn_implementation": "flash_attention_2",
    "weight_decay": 0.0,
    "deepspeed": None,
    "fsdp": None,
    "fsdp_config": None,
}
LORA: dict[str, Any] = {"adapter": "lora", "lora_r": 16, "lora_alpha": 32, "lora_target_linear": True}


def values(found: Found) -> dict[str, Any]:
    return {option: value.value for option, value in found.options.items()}


def of(**content: Any) -> dict[str, Any]:
    return values(read("ax.yml", FILE | content))


def notes(**content: Any) -> str:
    return " ".join(read("ax.yml", FILE | content).notes)


def refusal(**content: Any) -> str:
    with pytest.raises(InputError) as caught:
        read("ax.yml", FILE | content)
    assert "\n" not in str(caught.value) and str(caught.value).startswith("--training-args ax.yml: ")
    return str(caught.value)


def test_full_fine_tuning() -> None:
    found = read("ax.yml", FILE)
    got = values(found)
    assert found.model is not None and found.model.value == "NousResearch/Meta-Llama-3-8B" and not found.files
    assert (got["micro_batch_size"], got[ACCUMULATION], got["seq_len"], got["recompute"]) == (2, 4, 4096, "full")
    assert (got["optimizer"], got["precision"], got["task"]) == ("adamw-8bit", "bf16", "pretrain")
    assert got["clip_grad_norm"] is True and not found.options["clip_grad_norm"].is_given
    assert "engine" not in got and got["attention"] == "flash"


def test_defaults_where_the_file_says_nothing() -> None:
    found = read("ax.yml", {"base_model": "gpt2"})
    got = values(found)
    assert (got["micro_batch_size"], got[ACCUMULATION], got["seq_len"], got["recompute"]) == (1, 1, 512, "none")
    assert (got["optimizer"], got["optimizer_implementation"], got["precision"]) == ("adamw", "fused", "bf16")
    assert not any(value.is_given for value in found.options.values())
    assert "fp32" in " ".join(found.notes)  # norms and embeddings, without flash attention


def test_a_batch_does_not_give_accumulation() -> None:
    """As in AxolotlInputConfig, whose default of 1 normalize_config finds before it divides."""
    assert of(gradient_accumulation_steps=None, batch_size=8)[ACCUMULATION] == 1
    assert "batch_size 8" in notes(gradient_accumulation_steps=None, batch_size=8)
    assert "batch_size" not in notes(gradient_accumulation_steps=None, batch_size=2)
    assert "without gradient_accumulation_steps" in refusal(gradient_accumulation_steps=4, batch_size=8)


def test_precision() -> None:
    assert of(bf16=True)["precision"] == "bf16"
    assert of(bf16="full")["precision"] == "bf16"
    assert of(bf16=False, bfloat16=True)["precision"] == "bf16"
    assert of(bf16=False, float16=True)["precision"] == "fp16"
    assert of(bf16="auto", fp16=True)["precision"] == "fp16"  # fp16 switches auto off
    assert of(bf16=False, fp16=None)["precision"] == "fp32"
    assert (of(**LORA)["precision"], of(**LORA)["base_dtype"]) == ("bf16-autocast", "bf16")
    assert of(**LORA, peft_autocast_adapter_dtype=False)["adapter_dtype"] == "bf16"
    assert of(deepspeed="zero2.json")["precision"] == "bf16-mixed"
    assert of(fp8=True)["precision"] == "fp8-mixed"


def test_adapters() -> None:
    got = of(**LORA, lora_dropout=0.05, peft_use_dora=True, lora_modules_to_save=["embed_tokens"])
    assert (got["lora_rank"], got["lora_targets"], got["lora_dropout"]) == (16, BY_NAME, 0.05)
    assert got["dora"] is True and got["modules_to_save"] == "embed_tokens"
    named = of(adapter="lora", lora_r=8, lora_target_modules=["q_proj", "v_proj"])
    assert named["lora_targets"] == "q_proj,v_proj"
    pattern = r"model.language_model.layers.[\d]+.(mlp|self_attn).(up|q)_proj"
    assert of(adapter="lora", lora_r=8, lora_target_modules=pattern)["lora_targets"] == "up_proj,q_proj"
    assert "patterns" in refusal(adapter="lora", lora_r=8, lora_target_modules=r".*\.0\.q_proj")
    assert "lora_r" in refusal(adapter="lora")
    assert "lora_mlp_kernel" in notes(**LORA)
    assert "lora_mlp_kernel" not in notes(**LORA, lora_mlp_kernel=False)


def test_quantised_bases() -> None:
    got = of(**LORA | {"adapter": "qlora"}, load_in_4bit=True)
    assert (got["quantize"], got["double_quant"], got["quantize_compute_dtype"]) == ("nf4", True, "bf16")
    assert "prepare_kbit_training" not in got  # norms and embeddings are cast back to 16 bits
    assert (
        of(**LORA | {"adapter": "qlora"}, load_in_4bit=True, bnb_config_kwargs={"bnb_4bit_use_double_quant": False})[
            "double_quant"
        ]
        is False
    )
    assert of(**LORA, load_in_8bit=True)["quantize"] == "int8"
    eight = {"load_in_8bit": True, "gradient_checkpointing": True}
    assert "re-enter" in notes(**LORA, **eight)
    assert "re-enter" not in notes(**LORA, **eight, gradient_checkpointing_kwargs={"use_reentrant": False})
    assert "re-enter" not in notes(**LORA, **eight | {"gradient_checkpointing": False})
    assert "quantize" not in of(**LORA, load_in_8bit=False, load_in_4bit=False)
    assert "adapter" in refusal(load_in_4bit=True)
    assert "true with adapter qlora" in refusal(**LORA | {"adapter": "qlora"})


def test_fsdp() -> None:
    old = read("ax.yml", FILE | {"fsdp": ["full_shard", "auto_wrap"], "fsdp_config": {"fsdp_offload_params": True}})
    got = values(old)
    assert (got["engine"], got["zero"], got["offload_params"], got["precision"]) == ("fsdp1", 3, "cpu", "bf16-mixed")
    new = read(
        "ax.yml",
        FILE | {"fsdp_version": 2, "fsdp_config": {"reshard_after_forward": False, "activation_checkpointing": True}},
    )
    assert values(new)["zero"] == 2 and values(new)["recompute"] == "full" and "FSDP 1" not in " ".join(new.notes)
    numbered = of(fsdp=["auto_wrap"], fsdp_config={"fsdp_sharding_strategy": 2})
    assert numbered["zero"] == 2


def test_degrees() -> None:
    got = of(
        fsdp_version=2,
        fsdp_config={"reshard_after_forward": True},
        dp_shard_size=4,
        dp_replicate_size=2,
        tensor_parallel_size=2,
    )
    assert (got["gpus"], got["shard_group"], got["tp"]) == (16, 4, 2)
    assert of(sequence_parallel_degree=4)["cp"] == 4
    assert "ring-flash-attn" in notes(context_parallel_size=2)


def test_tasks() -> None:
    assert of(rl="dpo")["task"] == "dpo" and of(rl="ipo")["task"] == "dpo" and of(rl="kto")["task"] == "kto"
    assert of(rl="dpo", precompute_ref_log_probs=True)["precompute_reference"] is True
    assert of(rl="orpo")["precompute_reference"] is True and "reference" in notes(rl="orpo")
    assert of(rl="grpo")["task"] == "grpo"
    assert "reward" in refusal(reward_model=True)


def test_attention() -> None:
    assert of(attn_implementation=None, flash_attention=True)["attention"] == "flash"
    assert of(attn_implementation="flash_attention_2")["attention"] == "flash"
    assert of(attn_implementation=None, xformers_attention=True, flash_attention=True)["attention"] == "sdpa"
    assert of(attn_implementation=None, eager_attention=True)["attention"] == "eager"
    assert of(attn_implementation="eager")["attention"] == "eager"
    assert "flex" in notes(attn_implementation="flex_attention")
    assert of(attn_implementation="kernels-community/flash-attn3")["attention"] == "sdpa"
    assert "attn_implementation" in refusal(attn_implementation="quick")


def test_kernels() -> None:
    plugins = ["axolotl.integrations.liger.LigerPlugin"]
    got = of(
        plugins=plugins,
        liger_rope=True,
        liger_rms_norm=True,
        liger_glu_activation=True,
        liger_fused_linear_cross_entropy=True,
    )
    assert (got["kernels"], got["liger"], got["cross_entropy"]) == ("fused", "rope+rms_norm+swiglu", "fused")
    loss = of(liger_fused_linear_cross_entropy=True)
    assert (loss["kernels"], loss["cross_entropy"]) == ("hf", "fused") and "liger" not in loss
    assert of(liger_rms_norm=True)["cross_entropy"] == "eager"
    cut = ["axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"]
    assert of(plugins=cut)["cross_entropy"] == "chunked" and "Cut Cross Entropy" in notes(plugins=cut)
    assert "cross_entropy" not in of(plugins=cut, cut_cross_entropy=False)
    assert "kernels" not in of(rl="dpo", liger_rms_norm=True)


def test_recomputation() -> None:
    assert of(gradient_checkpointing=False)["recompute"] == "none"
    assert of(gradient_checkpointing="offload")["recompute"] == "full"
    for switch in ({"gradient_checkpointing": "offload"}, {"activation_offloading": True}):
        assert of(**switch)["offload_activations"] == "cpu"
        for other in (LORA, {"rl": "dpo"}, {"deepspeed": "zero2.json"}):
            assert "offload_activations" not in of(**switch, **other)
            assert f"{next(iter(switch))} " in notes(**switch, **other)
    assert "offload_activations" not in of(activation_offloading="legacy")
    assert "activation_offloading 'legacy'" in notes(activation_offloading="legacy")
    assert "unsloth" in notes(gradient_checkpointing="unsloth")


def test_frozen_weights() -> None:
    assert of(unfrozen_parameters=["^lm_head.weight$", "norm"])["freeze"] == "all-but:^lm_head.weight$+norm"
    assert of(unfrozen_parameters=["layers.4[4-9]+.mlp"])["freeze"] == "all-but:layers.4[4-9][4-9]*.mlp"
    for pattern in ("(a|b)+x", "(.*)*x", ".*.*.*.*x", "a,b"):
        assert "repeated groups" in refusal(unfrozen_parameters=[pattern])


def test_keys_that_axolotl_does_not_know_are_dropped_but_not_misspelt_ones() -> None:
    assert of(my_own_key=3) == of()
    assert "did you mean context_parallel_size" in refusal(context_parapllel_size=2)
    assert "did you mean sample_packing" in refusal(sample_pakcing=True)


def test_deepspeed() -> None:
    found = read("ax.yml", FILE | {"deepspeed": "deepspeed_configs/zero3.json"})
    assert found.files["deepspeed"].value == "deepspeed_configs/zero3.json"
    assert not found.options["optimizer"].is_given and not found.options["precision"].is_given


_NOTED = getattr(axolotl, "_NOTED")  # noqa: B009
_MATTER = getattr(axolotl, "_MATTER")  # noqa: B009
_REFUSED = getattr(axolotl, "_REFUSED")  # noqa: B009


@pytest.mark.parametrize("key", sorted(_NOTED))
def test_keys_that_are_not_modelled_are_noted(key: str) -> None:
    assert f"ax.yml: {key} " in notes(**{key: True})
    assert f"ax.yml: {key} " not in notes(**{key: False})


@pytest.mark.parametrize("key", sorted(_REFUSED))
def test_keys_without_an_honest_assumption_are_refused(key: str) -> None:
    assert key in refusal(**{key: [1]})


_KEYS = st.sampled_from([*_MATTER, *_NOTED, "rl", "bf16", "plugins", "fsdp", "bnb_config_kwargs"])


@settings(max_examples=examples(300))
@given(st.dictionaries(_KEYS, ANY, max_size=5))
def test_any_values_give_options_or_one_line(content: dict[str, Any]) -> None:
    try:
        got = values(read("ax.yml", FILE | content))
    except InputError as error:
        assert "\n" not in str(error)
    else:
        got.pop(ACCUMULATION)
        check_options(got)
