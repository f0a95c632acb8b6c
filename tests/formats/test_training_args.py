"""TrainingArguments and what TRL's scripts add, against transformers' own parser and TRL's own dataclasses."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from records import examples

from memcalc.errors import InputError
from memcalc.formats.found import ACCUMULATION, Found
from memcalc.formats.trainer_keys import MATTER, OTHERS
from memcalc.formats.training_args import read
from memcalc.inputs.options import check_options

PLAIN: dict[str, Any] = {"output_dir": "out"}


def values(found: Found) -> dict[str, Any]:
    return {option: value.value for option, value in found.options.items()}


def of(**content: Any) -> dict[str, Any]:
    return values(read("args.yaml", PLAIN | content))


def refusal(content: dict[str, Any]) -> str:
    with pytest.raises(InputError) as caught:
        read("args.yaml", content)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# transformers' own dataclass and parser


def test_defaults_are_those_of_the_dataclass() -> None:
    from transformers.training_args import TrainingArguments

    default = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    found = read("args.yaml", PLAIN)
    got = values(found)
    assert not any(value.is_given for value in found.options.values())
    assert got["micro_batch_size"] == default["per_device_train_batch_size"]
    assert got[ACCUMULATION] == default["gradient_accumulation_steps"]
    assert got["recompute"] == "none" and not default["activation_checkpointing"]
    assert got["clip_grad_norm"] == (default["max_grad_norm"] > 0)
    assert (got["optimizer"], got["optimizer_implementation"]) == ("adamw", "fused")
    assert default["optim"] == "adamw_torch_fused"
    assert got["precision"] == "fp32" and not default["bf16"] and not default["fp16"]
    assert "seq_len" not in got and "task" not in got and "engine" not in got


def test_every_optimizer_name_is_read_or_refused_by_name() -> None:
    from transformers.training_args import OptimizerNames

    for name in OptimizerNames:
        try:
            got = of(optim=name.value)
        except InputError as error:
            assert name.value in str(error)
            assert any(
                word in name.value for word in ("xla", "npu", "ademamix", "bnb_", "galore", "lomo", "grok", "layer")
            ) or (name.value == "rmsprop_bnb")
        else:
            check_options(
                {"optimizer": got["optimizer"], "optimizer_implementation": got.get("optimizer_implementation")}
            )
            if name.value.startswith("paged"):
                assert got["optimizer"].startswith("paged")
            assert ("8bit" in name.value) == ("8bit" in got["optimizer"]) or "4bit" in name.value


def random_content(random: random.Random) -> dict[str, Any]:
    """Return a file with keys in all spellings that the tool takes."""
    choices: dict[str, list[Any]] = {
        "per_device_train_batch_size": [1, 2, 16],
        "gradient_accumulation_steps": [1, 4, 32],
        "gradient_checkpointing": [True, False, None],
        "activation_checkpointing": [True, False],
        "optim": ["adamw_torch", "adamw_torch_fused", "adamw_bnb_8bit", "paged_adamw_32bit", "sgd", "adafactor"],
        "max_grad_norm": [0, 0.0, 1.0, 0.3],
        "bf16": [True, False],
        "use_liger_kernel": [False],
        "fsdp": ["", "full_shard auto_wrap", "shard_grad_op", "full_shard offload", ["full_shard", "auto_wrap"], True],
        "fsdp_config": [
            {"fsdp_reshard_after_forward": False},
            {"reshard_after_forward": True, "cpu_offload": True},
            {"version": 2, "activation_checkpointing": True},
            {"fsdp_version": 1},
        ],
    }
    return {key: random.choice(options) for key, options in choices.items() if random.random() < 0.6}


def test_the_parser_resolves_the_same() -> None:
    pytest.importorskip("accelerate")
    from transformers import HfArgumentParser, TrainingArguments

    parser: Any = HfArgumentParser(TrainingArguments)  # type: ignore[arg-type]
    dice = random.Random(1)
    sharded = 0
    for _ in range(150):
        content = PLAIN | random_content(dice)
        args = parser.parse_dict(content | {"use_cpu": True, "report_to": "none"})[0]
        got = values(read("args.yaml", content))
        assert got["micro_batch_size"] == args.per_device_train_batch_size
        assert got[ACCUMULATION] == args.gradient_accumulation_steps
        assert got["clip_grad_norm"] == (args.max_grad_norm > 0)
        plugin = args.fsdp_plugin_args
        recomputes = args.gradient_checkpointing or bool(plugin and plugin.get("activation_checkpointing"))
        assert got["recompute"] == ("full" if recomputes else "none")
        assert ("engine" in got) == bool(plugin)
        mixed = args.mixed_precision != "no"
        if not plugin:
            assert got["precision"] == ("bf16-autocast" if mixed else "fp32")
            continue
        sharded += 1
        assert got["precision"] == ("bf16-mixed" if mixed else "fp32")
        first = plugin["fsdp_version"] == 1
        assert got.get("use_orig_params", False) == (first and plugin["use_orig_params"])
        assert got.get("backward_prefetch") == ("none" if first else None)
        assert (got["engine"], got["zero"]) == (
            "fsdp1" if first else "fsdp2",
            2 if plugin["reshard_after_forward"] in (False, "shard_grad_op", "False") else 3,
        )
        assert got.get("offload_params") == ("cpu" if plugin.get("cpu_offload") else None)
    assert sharded > 30


# TRL's own dataclasses


def test_a_base_in_8_bits() -> None:
    eight = {"use_peft": True, "load_in_8bit": True, "dtype": "bfloat16", "bf16": True}
    got = of(**eight)
    assert got["quantize"] == "int8" and "double_quant" not in got and "quantize_compute_dtype" not in got
    again = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    assert any("re-enter" in note for note in read("args.yaml", PLAIN | eight | again).notes)
    assert not any("re-enter" in note for note in read("args.yaml", PLAIN | eight).notes)


def test_defaults_of_trl() -> None:
    pytest.importorskip("trl")
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.model_config import ModelConfig
    from trl.trainer.sft_config import SFTConfig

    for config, told in ((SFTConfig, {"packing": False}), (DPOConfig, {"precompute_ref_log_probs": False})):
        default = {field.name: field.default for field in dataclasses.fields(config)}
        got = of(**told)
        assert got["seq_len"] == default["max_length"] == 1024
        assert got["recompute"] == "full" and default["gradient_checkpointing"]
        assert got["precision"] == "bf16-autocast" and default["bf16"] is None
        assert got["micro_batch_size"] == default["per_device_train_batch_size"]
    model = {field.name: field.default for field in dataclasses.fields(ModelConfig)}
    got = of(packing=False, use_peft=True, load_in_4bit=True)
    assert got["lora_rank"] == model["lora_r"]
    assert got["lora_dropout"] == model["lora_dropout"]
    assert got["lora_targets"] == "default" and model["lora_target_modules"] is None
    assert got["quantize"] == model["bnb_4bit_quant_type"]
    assert got["double_quant"] == model["use_bnb_nested_quant"]
    assert got["quantize_compute_dtype"] == "fp32" and model["dtype"] == "float32"


def test_keys_that_only_one_trainer_has_tell_the_task() -> None:
    pytest.importorskip("trl")
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.kto_config import KTOConfig
    from trl.trainer.sft_config import SFTConfig

    from memcalc.formats.trainer_keys import DPO, KTO, ONLINE, SFT

    names = [{field.name for field in dataclasses.fields(one)} for one in (SFTConfig, DPOConfig, KTOConfig, GRPOConfig)]
    sft, dpo, kto, grpo = names
    assert not set(SFT) & (dpo | kto | grpo) - {"padding_free"}
    assert not set(DPO) & (sft | grpo)
    assert set(KTO) <= kto and not set(KTO) & (sft | dpo | grpo)
    assert not set(ONLINE) & (sft | dpo | kto)


# Files as people write them

SFT_FILE = {
    "model_name_or_path": "mistralai/Mistral-7B-v0.1",
    "torch_dtype": "bfloat16",
    "attn_implementation": "flash_attention_2",
    "dataset_mixer": {"some/data": 1.0},
    "bf16": True,
    "evaluation_strategy": "epoch",
    "gradient_accumulation_steps": 4,
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
    "learning_rate": "2e-05",
    "max_seq_length": 2048,
    "per_device_train_batch_size": 16,
}


def test_a_recipe_of_alignment_handbook() -> None:
    found = read("config_full.yaml", SFT_FILE)
    got = values(found)
    assert found.model is not None and found.model.value == "mistralai/Mistral-7B-v0.1"
    assert found.model.where == "config_full.yaml: model_name_or_path"
    assert got["task"] == "sft" and not found.options["task"].is_given
    assert (got["micro_batch_size"], got[ACCUMULATION], got["seq_len"], got["recompute"]) == (16, 4, 2048, "full")
    assert got["precision"] == "bf16" and "base_dtype" not in got
    assert got["attention"] == "flash"
    assert len(found.notes) == 1


def test_adapters_over_a_base_in_4_bits() -> None:
    content = SFT_FILE | {
        "use_peft": True, "load_in_4bit": True, "lora_r": 16, "lora_alpha": 16, "lora_dropout": 0.05,
        "lora_target_modules": ["q_proj", "k_proj"], "use_bnb_nested_quant": True, "optim": "paged_adamw_32bit",
    }  # fmt: skip
    got = values(read("config_qlora.yaml", content))
    assert (got["precision"], got["base_dtype"], got["adapter_dtype"]) == ("bf16-autocast", "bf16", "bf16")
    assert (got["quantize"], got["double_quant"], got["quantize_compute_dtype"]) == ("nf4", True, "bf16")
    assert (got["lora_rank"], got["lora_targets"]) == (16, "q_proj,k_proj")
    assert got["optimizer"] == "paged-adamw" and "optimizer_implementation" not in got


def test_a_pattern_of_modules_of_one_name() -> None:
    """ModelConfig makes a text of a list of one, which peft takes for a pattern."""
    lora = {"use_peft": True, "lora_r": 4}
    for pattern in (r"(.*\.)?q_proj", [r"(.*\.)?q_proj"]):
        assert of(**lora, lora_target_modules=pattern)["lora_targets"] == "q_proj"
    assert of(**lora, lora_target_modules=[r"(.*\.)?self_attn\.q_proj"])["lora_targets"] == "self_attn.q_proj"


def test_all_options_are_of_the_types_that_memcalc_takes() -> None:
    for content in (
        SFT_FILE,
        SFT_FILE | {"use_peft": True, "lora_target_modules": "all-linear"},
        PLAIN | {"fsdp": "full_shard"},
    ):
        got = values(read("f.yaml", content))
        got.pop(ACCUMULATION)
        check_options(got)


def test_preference_tuning() -> None:
    dpo = {"beta": 0.05, "loss_type": "sigmoid", "max_length": 1024, "max_prompt_length": 512}
    assert of(**dpo)["task"] == "dpo" and of(**dpo)["seq_len"] == 1024
    assert of(**dpo, precompute_ref_log_probs=True)["precompute_reference"] is True
    assert of(desirable_weight=1.0)["task"] == "kto"
    orpo = read("orpo.yaml", PLAIN | {"beta": 0.05, "max_prompt_length": 512})
    assert values(orpo)["task"] == "dpo" and values(orpo)["precompute_reference"] is True and orpo.notes
    assert of(num_generations=8)["task"] == "grpo"
    assert "reward models" in refusal(PLAIN | {"center_rewards_coefficient": 0.01})
    assert "seq_len" not in of(packing=True, max_length=None)


def test_precision_by_weights_and_autocast() -> None:
    def pair(**content: Any) -> tuple[Any, Any]:
        got = of(**content)
        return got["precision"], got.get("base_dtype")

    assert pair(bf16=True) == ("bf16-autocast", None)
    assert pair(fp16=True, dtype="float32") == ("fp16-autocast", None)
    assert pair(bf16=True, dtype="bfloat16") == ("bf16", None)
    assert pair(torch_dtype="torch.bfloat16") == ("bf16", None)
    assert pair(bf16=True, dtype="bfloat16", use_peft=True) == ("bf16-autocast", "bf16")
    assert pair(bf16=True, dtype="bfloat16", deepspeed="ds.json") == ("bf16-mixed", None)
    assert pair(bf16=True, dtype="bfloat16", fsdp="full_shard") == ("bf16-mixed", None)
    assert pair(dtype="bfloat16", fsdp=True) == ("bf16", None)
    assert pair(packing=False) == ("bf16-autocast", None)
    assert pair(packing=False, fp16=True) == ("fp16-autocast", None)
    assert pair(packing=False, bf16=False) == ("fp32", None)
    assert of(bf16=True, fsdp=True)["grad_dtype"] == "bf16"  # accelerate's policy reduces in that dtype too
    assert "grad_dtype" not in of(dtype="bfloat16", fsdp=True)
    assert "contradicts" in refusal(PLAIN | {"bf16": True, "fp16": True})


def test_what_deepspeed_may_say_is_no_more_than_a_default() -> None:
    found = read(
        "args.json", PLAIN | {"deepspeed": "zero3.json", "bf16": True, "optim": "adamw_torch", "max_grad_norm": 0.5}
    )
    assert found.files["deepspeed"].value == "zero3.json"
    for option in ("precision", "optimizer", "optimizer_implementation", "clip_grad_norm"):
        assert not found.options[option].is_given
    inside = read("args.json", PLAIN | {"deepspeed": '{"zero_optimization": {"stage": 2}}'})
    assert inside.files["deepspeed"].value == {"zero_optimization": {"stage": 2}}


def test_fsdp() -> None:
    assert of(fsdp="full_shard auto_wrap")["zero"] == 3
    assert of(fsdp=["shard_grad_op"], fsdp_config={"cpu_offload": True})["zero"] == 2
    hybrid = read("f.yaml", PLAIN | {"fsdp": "hybrid_shard auto_wrap"})
    assert values(hybrid)["shard_group"] == 8 and any("hybrid" in note for note in hybrid.notes)
    assert of(fsdp="no_shard")["engine"] == "ddp"
    assert "engine" not in of(fsdp="", fsdp_config={"min_num_params": 0})
    assert "engine" not in of(fsdp_config={"reshard_after_forward": True})
    assert "allowed" in refusal(PLAIN | {"fsdp": "sharded"})
    assert of(fsdp=True, fsdp_config={"version": 1})["engine"] == "fsdp1"


def test_liger() -> None:
    assert of(use_liger_kernel=True)["kernels"] == "fused"
    assert of(use_liger_kernel=True)["cross_entropy"] == "fused"
    parts = of(use_liger_kernel=True, liger_kernel_config={"rope": False, "fused_linear_cross_entropy": False})
    assert (parts["liger"], parts["cross_entropy"]) == ("rms_norm+swiglu", "eager")
    gelu = of(use_liger_kernel=True, liger_kernel_config={"rope": False, "rms_norm": True, "geglu": True})
    assert gelu["liger"] == "rms_norm+geglu"
    loss = of(use_liger_kernel=True, liger_kernel_config=dict.fromkeys(("rope", "rms_norm", "geglu"), False))
    assert (loss["kernels"], loss["cross_entropy"]) == ("hf", "fused")
    assert "kernels" not in of(packing=True, use_liger_kernel=True)  # TRL's own head


def test_old_names_and_odd_values() -> None:
    assert of(per_gpu_train_batch_size=4)["micro_batch_size"] == 4
    assert of(per_device_train_batch_size="4", bf16="true", max_grad_norm="1e0")["micro_batch_size"] == 4
    assert of(adafactor=True)["optimizer"] == "adafactor"
    assert of(optim="sgd", optim_args="momentum=0.9")["optimizer"] == "sgd-momentum"
    assert of(optim="sgd", optim_args="momentum=0.0")["optimizer"] == "sgd"
    assert of(max_grad_norm=None)["clip_grad_norm"] is False
    assert (
        of(accelerator_config={"gradient_accumulation_kwargs": {"sync_each_batch": True}})["sync_each_micro_batch"]
        is True
    )
    assert (
        of(model_init_kwargs={"torch_dtype": "bfloat16", "attn_implementation": "eager"}, bf16=True)["attention"]
        == "eager"
    )


def test_noted_keys_are_named() -> None:
    content = PLAIN | {"torch_compile": True, "ddp_bucket_cap_mb": 5, "auto_find_batch_size": True}
    notes = " ".join(read("args.yaml", content).notes)
    assert all(key in notes for key in content if key != "output_dir")
    assert not read("args.yaml", PLAIN | {"torch_compile": False, "neftune_noise_alpha": None}).notes


def test_a_section_of_a_scripts_own_file() -> None:
    content = {
        "seed": 1,
        "model": {"model_name_or_path": "gpt2"},
        "training": {"per_device_train_batch_size": 32, "optim": "adamw_torch", "bf16": False},
    }
    found = read("conf.yaml", content)
    assert found.model is not None and found.model.where == "conf.yaml: model.model_name_or_path"
    assert found.options["micro_batch_size"].where == "conf.yaml: training.per_device_train_batch_size"
    assert "only training is read" in found.notes[-1]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"gradient_acumulation_steps": 4}, "did you mean gradient_accumulation_steps?"),
        ({"per_device_train_batchsize": 4}, "did you mean per_device_train_batch_size?"),
        ({"per_device_train_batch_size": "${BATCH}"}, "per_device_train_batch_size"),
        ({"per_device_train_batch_size": 0}, "from 1"),
        ({"model_name_or_path": "{{ model }}"}, "model_name_or_path"),
        ({"model_name_or_path": "<your-model>"}, "model_name_or_path"),
        ({"optim": "adamw_torc"}, "did you mean adamw_torch"),
        ({"optim": "galore_adamw", "optim_args": "rank=64"}, "rank=128"),
        ({"optim": "grokadamw"}, "grokadamw"),
        ({"use_cpu": True}, "GPUs"),
        ({"use_peft": True, "lora_target_modules": [".*q_proj$"]}, "patterns"),
        ({"load_in_4bit": True, "load_in_8bit": True}, "contradicts"),
        ({"dtype": "int8"}, "bfloat16"),
        ({"liger_kernel_config": 1, "use_liger_kernel": True}, "a mapping"),
        ({"teacher_model_name_or_path": "gpt2"}, "teacher"),
    ],
)
def test_refusals_name_the_key_in_one_line(content: dict[str, Any], words: str) -> None:
    text = refusal(PLAIN | content)
    assert text.startswith("--training-args args.yaml: ") and words in text


def test_files_of_others_are_refused() -> None:
    assert "--accelerate" in refusal({"distributed_type": "FSDP", "bf16": True})
    assert "--deepspeed" in refusal({"zero_optimization": {"stage": 3}})
    assert "no key of TrainingArguments" in refusal({"apples": 3})
    assert "v1" in refusal({"model": "gpt2", "dist_config": {"name": "fsdp2"}, "cutoff_len": 10})
    for key in ("tuner_type", "train_type", "rlhf_type", "attn_impl"):
        assert "ms-swift" in refusal({"model": "gpt2", key: "lora", "per_device_train_batch_size": 1})


_ANY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 10**7)
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from(["auto", "${X}", "true"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["version", "rank", "fsdp_xla"]), inner, max_size=2)
    ),
    max_leaves=4,
)
_KEYS = st.sampled_from(
    [*MATTER, *OTHERS, "dtype", "beta", "loss_type", "accelerator_config", "model_init_kwargs", "train_mode", "use_dora",
     "bnb_4bit_quant_type", "precompute_ref_log_probs", "reference_free", "desirable_weight", "training", "lora_dropout"]
)  # fmt: skip


@settings(max_examples=examples(400))
@given(st.dictionaries(_KEYS, _ANY, max_size=6))
def test_any_values_give_options_or_one_line(content: dict[str, Any]) -> None:
    try:
        got = values(read("x.yaml", content))
    except InputError as error:
        assert "\n" not in str(error)
    else:
        got.pop(ACCUMULATION)
        check_options(got)
