"""What files ask for by a general name, and what the model or the engine makes of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

import memcalc
from memcalc.errors import InputError

SMALL: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
EXPERTS = SMALL | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
ARGS: dict[str, Any] = {"per_device_train_batch_size": 1, "bf16": True}


def report_of(model: Any = SMALL, /, **options: Any) -> memcalc.Report:
    return memcalc.estimate(model, **{"seq_len": 16, **options})


def notes(report: memcalc.Report) -> str:
    return "\n".join(report.to_dict()["notes"])


# --- optimizers


def deepspeed(*, offload: bool = False, optimizer: str | None = None, **keys: Any) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": 2}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    own = {} if optimizer is None else {"optimizer": {"type": optimizer}}
    return {"zero_optimization": zero, "bf16": {"enabled": True}, **own, **keys}


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_hf", "adafactor", "paged_adamw_8bit"])
@pytest.mark.parametrize("offload", [False, True])
def test_a_deepspeed_file_with_an_optimizer_has_its_implementation(optim: str, offload: bool) -> None:
    """The Trainer then makes a DummyOptim, and DeepSpeed its own fused kernel."""
    both = {"training_args": {**ARGS, "optim": optim}, "deepspeed": deepspeed(offload=offload, optimizer="AdamW")}
    setup = report_of(gpus=2, **both).setup
    assert (setup.optimizer, setup.optimizer_implementation) == ("adamw", "fused")


@pytest.mark.parametrize(
    ("optim", "optimizer"),
    [("adamw_torch", "adamw"), ("adamw_hf", "adamw"), ("paged_adamw_32bit", "adam"), ("adafactor", "adam")],
)
def test_accelerate_puts_another_optimizer_on_the_host(optim: str, optimizer: str) -> None:
    report = report_of(gpus=2, training_args={**ARGS, "optim": optim}, deepspeed=deepspeed(offload=True))
    assert (report.setup.optimizer, report.setup.optimizer_implementation) == (optimizer, "fused")
    assert ("accelerate puts DeepSpeed's own Adam" in notes(report)) == (optimizer == "adam")


def test_what_accelerate_makes_of_an_optimizer() -> None:
    """The class is decided without looking at the states: Adam of the host for all but a few."""
    deepspeed_utils = pytest.importorskip("accelerate.utils.deepspeed")
    ops = pytest.importorskip("deepspeed.ops.adam")
    import torch

    made: list[tuple[str, bool]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "DeepSpeedCPUAdam", lambda groups, **how: made.append(("adam", how["adamw_mode"])))
        weight = [torch.nn.Parameter(torch.zeros(2))]
        for optimizer in (torch.optim.AdamW(weight), torch.optim.Adam(weight), torch.optim.SGD(weight)):
            deepspeed_utils.map_pytorch_optim_to_deepspeed(optimizer)
    assert made == [("adam", True), ("adam", False), ("adam", False)]


def test_a_given_optimizer_is_not_replaced() -> None:
    with pytest.raises(InputError, match="--offload-optimizer cpu: with optimizer lion"):
        report_of(gpus=2, training_args=ARGS, deepspeed=deepspeed(offload=True), optimizer="lion")


def test_an_optimizer_that_is_not_forced_is_noted() -> None:
    content = deepspeed(offload=True, zero_force_ds_cpu_optimizer=False)
    assert "zero_force_ds_cpu_optimizer false" in notes(report_of(gpus=2, deepspeed=content))


def test_signs_that_another_library_sends_are_noted() -> None:
    own = {"type": "OneBitAdam", "params": {"comm_backend_name": "mpi"}}
    report = report_of(gpus=2, deepspeed={"optimizer": own, "fp16": {"enabled": True}})
    assert "comm_backend_name mpi: signs are counted as sent by NCCL" in notes(report)


def test_a_loss_without_logits_beside_tensor_parallelism() -> None:
    """As of axolotl's example of FSDP 2 with tensor parallelism and Cut Cross Entropy."""
    content = {
        "base_model": "x", "sequence_len": 16, "bf16": True, "optimizer": "adamw_torch_fused", "fsdp_version": 2,
        "fsdp_config": {"reshard_after_forward": True}, "tensor_parallel_size": 2, "dp_shard_size": 2, "max_grad_norm": 0,
        "plugins": ["axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"],
    }  # fmt: skip
    report = report_of(training_args=content, gpus=4)
    assert (report.setup.tp, report.setup.cross_entropy) == (2, "eager")
    assert "plugins: is not modelled with tensor parallelism over FSDP 2" in notes(report)


def test_clipping_by_norms_of_two_meshes_is_left_out() -> None:
    """accelerate 1.15 combines them (_clip_grad_norm_dtensor_aware), where torch's own clip_grad_norm_ stops."""
    content = {
        "base_model": "x", "sequence_len": 16, "bf16": True, "optimizer": "adamw_torch_fused", "fsdp_version": 2,
        "fsdp_config": {"reshard_after_forward": True}, "tensor_parallel_size": 2, "dp_shard_size": 2,
    }  # fmt: skip
    report = report_of(training_args=content, gpus=4)
    assert (report.setup.tp, report.setup.clip_grad_norm) == (2, False)
    assert "max_grad_norm, its default: clipping by norms of two meshes" in notes(report)
    with pytest.raises(InputError, match="--clip-grad-norm on"):
        report_of(training_args=content, gpus=4, clip_grad_norm=True)
    off = report_of(training_args=content | {"max_grad_norm": 0}, gpus=4)
    assert off.setup == report.setup and "clipping" not in notes(off)


# --- kernels


def test_attention_that_is_not_modelled_for_the_type() -> None:
    gemma = SMALL | {"model_type": "gemma2", "head_dim": 16}
    report = report_of(gemma, training_args={**ARGS, "attn_implementation": "flash_attention_2"})
    assert report.setup.attention == "eager"
    assert "keeps whole matrices of scores" in notes(report) and "counted as torch's own fused" not in notes(report)
    with pytest.raises(InputError, match="--attention sdpa"):  # an option is not replaced
        report_of(gemma, training_args=ARGS, attention="sdpa")


def test_liger_that_leaves_the_type_as_it_is() -> None:
    content = {**ARGS, "dtype": "bfloat16", "use_liger_kernel": True}
    report = report_of({"model_type": "gpt2", "n_layer": 2}, training_args=content)
    assert (report.setup.kernels, report.setup.cross_entropy) == ("hf", "eager")
    assert "Liger-Kernel leaves gpt2 as it is" in notes(report)


def test_a_loss_that_the_type_does_not_have() -> None:
    content = {
        "base_model": "x",
        "sequence_len": 16,
        "bf16": True,
        "plugins": ["cut_cross_entropy.CutCrossEntropyPlugin"],
    }
    report = report_of({"model_type": "gpt2", "n_layer": 2}, training_args=content)
    assert report.setup.cross_entropy in ("eager", "chunked")
    assert ("is not modelled for a gpt2" in notes(report)) == (report.setup.cross_entropy == "eager")


# --- adapters


@pytest.mark.parametrize(
    "content",
    [
        {"base_model": "x", "sequence_len": 16, "adapter": "lora", "lora_r": 4, "lora_target_linear": True},
        {"stage": "sft", "finetuning_type": "lora", "per_device_train_batch_size": 1, "bf16": True},
    ],
    ids=["axolotl", "LLaMA-Factory"],
)
def test_tools_that_hand_peft_names_adapt_no_fused_experts(content: dict[str, Any]) -> None:
    assert report_of(EXPERTS, training_args=content).setup.lora_targets == "q_proj,k_proj,v_proj,o_proj"
    assert report_of(SMALL, training_args=content).setup.lora_targets == "all-linear"


def test_the_linear_layers_that_axolotl_names() -> None:
    """It names modules of the class nn.Linear, and a router is none."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**{**EXPERTS, "model_type": "mixtral"}))
    linear = {name.split(".")[-1] for name, one in model.named_modules() if isinstance(one, torch.nn.Linear)}
    assert linear - {"lm_head"} == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_a_rank_without_a_switch_is_an_adapter() -> None:
    """A script's own file says no more than the rank."""
    report = report_of(training_args={**ARGS, "lora_rank": 64})
    assert (report.setup.lora_rank, report.setup.lora_targets) == (64, "all-linear")
    assert "no key says whether adapters train" in notes(report) and "--quantize nf4" in notes(report)
    assert report_of(training_args={**ARGS, "lora_rank": 64, "use_peft": False}).setup.lora_rank == 0
    assert report_of(training_args={**ARGS, "lora_r": 64, "max_seq_length": 16, "packing": False}).setup.lora_rank == 0


# --- keys


def test_keys_of_a_script_are_noted() -> None:
    report = report_of(
        training_args={**ARGS, "spectrum_config_path": "x.yaml", "warmup_ratio": 0.1, "logging_dir": "x"}
    )
    assert "--training-args: spectrum_config_path: not of TrainingArguments or TRL" in notes(report)
    many = report_of(training_args={**ARGS, **{f"own_{i}": i for i in range(9)}})
    assert "own_5 and 3 more: not of" in notes(many)


def test_keys_that_axolotl_drops_are_noted() -> None:
    content = {"base_model": "x", "sequence_len": 16, "full_finetune": True, "micro_batch_size": 1}
    assert "full_finetune: not of axolotl, which drops it" in notes(report_of(training_args=content))


def test_llama_factory_refuses_other_keys() -> None:
    content = {"stage": "sft", "finetuning_type": "full", "per_device_train_batch_size": 1, "my_key": 1}
    with pytest.raises(InputError, match="my_key: unknown key"):
        report_of(training_args=content)


@pytest.mark.parametrize(
    ("content", "is_noted"),
    [
        ({"per_device_train_batch_size": 1}, True),
        (ARGS, False),
        ({**ARGS, "bf16": False, "dtype": "bfloat16", "use_peft": True, "lora_r": 4}, True),
        ({**ARGS, "dtype": "bfloat16", "use_peft": True, "lora_r": 4}, False),
        ({"base_model": "x", "sequence_len": 16, "bf16": True}, False),
        ({"base_model": "x", "sequence_len": 16, "bf16": False}, True),
    ],
)
def test_tf32_is_noted_where_products_are_of_fp32(content: dict[str, Any], is_noted: bool) -> None:
    assert ("timed without TF32" in notes(report_of(training_args={**content, "tf32": True}))) == is_noted
    assert "TF32" not in notes(report_of(training_args={**content, "tf32": False}))


# --- torchtitan

TITAN: dict[str, Any] = {"model": {"name": "llama3", "flavor": "32B"}, "activation_checkpoint": {"mode": "selective"}}


def test_a_flavor_of_a_fork_with_another_model() -> None:
    with pytest.raises(InputError, match=r"model\.flavor '32B': .* or --model in its place"):
        memcalc.estimate(torchtitan=TITAN)
    report = report_of(torchtitan=TITAN)
    assert (report.setup.recompute, report.setup.recompute_layers) == ("full", 1)  # every second one of two
    assert "(--model) is estimated in its place" in notes(report)
    other = report_of(torchtitan={**TITAN, "model": {"name": "llama3", "flavor": "8B"}})
    assert other.setup.recompute_layers == 1  # of the model that is estimated, not of the flavor's
    with pytest.raises(InputError, match="makes images"):
        report_of(torchtitan={"model": {"name": "flux"}})


def test_gpus_that_replace_the_degrees_are_noted() -> None:
    content = {"model": {"flavor": "debugmodel"}, "parallelism": {"data_parallel_shard_degree": 8}}
    assert "the degrees make 8 GPUs; --gpus 4 replaces them" in notes(report_of(torchtitan=content, gpus=4))
    for gpus in (None, 8):
        assert "replaces them" not in notes(report_of(torchtitan=content, gpus=gpus))


def test_replicas_that_do_not_divide_are_refused_by_the_option() -> None:
    content = {"model": {"flavor": "debugmodel"}, "parallelism": {"data_parallel_replicate_degree": 3}}
    content["parallelism"]["data_parallel_shard_degree"] = -1  # type: ignore[assignment]
    with pytest.raises(InputError, match=r"^--gpus 8: .*degree 3 does not divide; allowed: a multiple of 3"):
        report_of(torchtitan=content, gpus=8)


def test_selective_recomputation_with_expert_parallelism() -> None:
    content = {
        "model": {"name": "deepseek_v3", "flavor": "debugmodel"},
        "parallelism": {"expert_parallel_degree": 4, "data_parallel_shard_degree": 4},
        "activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"},
    }
    report = memcalc.estimate(torchtitan=content, seq_len=16)
    assert report.setup.recompute == "none"
    assert "no recomputation is counted, which keeps more" in notes(report)


# --- DeepSpeed's AutoTP, and sections of older versions


def test_auto_tp() -> None:
    content = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}, "tensor_parallel": {"autotp_size": 2}}
    report = report_of(gpus=4, deepspeed=content)
    assert (report.setup.tp, report.setup.autotp, report.setup.dp) == (2, True, 2)
    assert report.setup.clip_grad_norm is False and "clipping is not modelled with AutoTP" in notes(report)
    text = memcalc.emit("deepspeed", SMALL, gpus=4, engine="deepspeed", zero=1, tp=2, autotp=True, seq_len=16).text
    assert json.loads(text)["tensor_parallel"] == {"autotp_size": 2}
    assert report_of(gpus=4, deepspeed=json.loads(text)).setup == report.setup


@pytest.mark.parametrize("key", ["progressive_layer_drop", "quantize_training", "compression_training"])
def test_sections_that_deepspeed_has_no_more(key: str) -> None:
    """DeepSpeed 0.19 refuses them (runtime/config.py)."""
    assert f"{key}" in notes(report_of(deepspeed={key: {"enabled": True}}))
    assert "refuses the key" in notes(report_of(deepspeed={key: {"enabled": True}}))
    if key != "compression_training":
        assert key not in notes(report_of(deepspeed={key: {"enabled": False}}))


def test_the_flash_attention_package_of_ulysses() -> None:
    section = {"parallelism_config_sp_size": 2, "parallelism_config_sp_backend": "deepspeed"}
    section |= {"parallelism_config_sp_attn_implementation": "flash_attention_2"}
    content = {
        "distributed_type": "DEEPSPEED", "num_processes": 4, "mixed_precision": "bf16", "deepspeed_config": {"zero_stage": 2},
        "parallelism_config": section,
    }  # fmt: skip
    report = report_of(accelerate=content)
    assert (report.setup.cp, report.setup.attention) == (2, "flash")
    assert "counted as sdpa" not in notes(report)


# --- what is counted in the place of another value


@pytest.mark.parametrize(
    ("kind", "more", "precision"),
    [
        ("MULTI_GPU", {}, "bf16-autocast"),
        ("FSDP", {"fsdp_config": {"fsdp_version": 2}}, "bf16-mixed"),
    ],
)
def test_fp8_is_counted_as_bf16(kind: str, more: dict[str, Any], precision: str) -> None:
    content = {"distributed_type": kind, "num_processes": 2, "mixed_precision": "fp8", **more}
    report = report_of(accelerate=content)
    assert report.setup.precision == precision
    assert "bf16 is counted: about the same memory, more time" in notes(report)


@pytest.mark.parametrize("version", [1, 2])
def test_states_of_8_bits_over_shards_are_counted_whole(version: int) -> None:
    content = {"base_model": "x", "sequence_len": 16, "bf16": True, "optimizer": "adamw_8bit", "fsdp_version": version}
    content["fsdp_config"] = {"offload_params": False}
    report = report_of(gpus=2, training_args=content)
    assert report.setup.optimizer == "adamw" and "take four times as much" in notes(report)
    with pytest.raises(InputError, match="--optimizer adamw-8bit: "):
        report_of(gpus=2, training_args=content, optimizer="adamw-8bit")


def test_a_quantised_base_of_fp16_under_trl() -> None:
    qlora = {**ARGS, "bf16": False, "fp16": True, "torch_dtype": "float16", "load_in_4bit": True, "use_peft": True}
    report = report_of(training_args={**qlora, "lora_r": 4, "packing": False, "dataset_text_field": "text"})
    assert (report.setup.task, report.setup.base_dtype, report.setup.adapter_dtype) == ("sft", "bf16", "bf16")
    assert "counted as bf16, too" in notes(report) and "counted in fp32" not in notes(report)


def test_experts_of_axolotl_without_fsdp_are_refused_by_their_key() -> None:
    content = {"base_model": "x", "sequence_len": 16, "bf16": True, "expert_parallel_size": 2}
    with pytest.raises(InputError, match=r"^--ep 2: .*expert_parallel_size"):
        report_of(EXPERTS, gpus=2, training_args=content)


def test_a_loss_that_shared_sequences_do_not_have() -> None:
    content = {"base_model": "x", "sequence_len": 16, "bf16": True, "fsdp_version": 2, "context_parallel_size": 2}
    content |= {"fsdp_config": {"offload_params": False}, "plugins": ["cut_cross_entropy.CutCrossEntropyPlugin"]}
    report = report_of(gpus=2, training_args=content)
    assert (report.setup.cp, report.setup.cross_entropy) == (2, "eager")
    assert "is not modelled with shared sequences" in notes(report)


def test_a_file_that_is_not_there_is_named_without_another_option() -> None:
    with pytest.raises(
        InputError, match=r"fsdp_config own\.json: no such file; allowed: a path from the working directory$"
    ):
        report_of(gpus=2, training_args={**ARGS, "fsdp": "full_shard", "fsdp_config": "own.json"})


def test_axolotl_adds_all_linear_layers_to_the_named_ones() -> None:
    """loaders/adapter.py joins both lists; peft then moves names of experts to their parameters."""
    content = {"base_model": "x", "sequence_len": 16, "bf16": True, "adapter": "lora", "lora_r": 4}
    content |= {"lora_target_linear": True, "lora_target_modules": ["w1", "w2", "w3"]}
    assert report_of(EXPERTS, training_args=content).setup.lora_targets == "q_proj,k_proj,v_proj,o_proj,w1,w2,w3"
    content["lora_target_modules"] = ["q_proj"]
    assert report_of(SMALL, training_args=content).setup.lora_targets == "all-linear"
