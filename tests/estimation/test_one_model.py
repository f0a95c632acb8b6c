"""One `Model` for setups that differ in one option: as if each had a model of its own."""

from __future__ import annotations

from typing import Any

import pytest

import memcalc
from memcalc.inputs.options import Options

LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "vocab_size": 100,
         "num_attention_heads": 4, "num_key_value_heads": 4}  # fmt: skip
ZERO: dict[str, Any] = {"engine": "deepspeed", "zero": 2, "gpus": 8}
ZERO_3 = ZERO | {"zero": 3}
MEGATRON: dict[str, Any] = {"engine": "megatron", "gpus": 8, "precision": "bf16-mixed", "attention": "flash"}
FSDP: dict[str, Any] = {"engine": "fsdp2", "zero": 3, "gpus": 8}
FSDP1 = FSDP | {"engine": "fsdp1"}
PIPED = FSDP | {"pp": 2, "global_batch_size": 64}
IN_FILES: dict[str, Any] = ZERO_3 | {"offload_optimizer": "nvme", "offload_params": "nvme"}
AWARE: dict[str, Any] = MEGATRON | {"zero": 1, "precision_aware_optimizer": True}
HOOKED: dict[str, Any] = {"engine": "ddp", "gpus": 4, "precision": "fp32", "comm_hook": "powersgd"}
PPO: dict[str, Any] = {
    "task": "ppo",
    "precision": "bf16",
    "micro_batch_size": 2,
    "global_batch_size": 8,
    "completion_len": 8,
}
GRPO: dict[str, Any] = {"task": "grpo", "precision": "bf16", "micro_batch_size": 8, "num_iterations": 2}
ADAPTED: dict[str, Any] = {"lora_rank": 4, "precision": "bf16"}
QUANTISED: dict[str, Any] = {
    "lora_rank": 4, "quantize": "nf4", "base_dtype": "bf16", "precision": "bf16-autocast", "quantize_compute_dtype": "bf16",
}  # fmt: skip

VALUES: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    "gpus": (ZERO, (4, 16)), "gpus_per_node": (ZERO, (4,)), "tp": (FSDP, (2,)), "pp": (FSDP | {"global_batch_size": 64}, (2,)),
    "cp": (FSDP, (2,)),
    "pp_rank": (PIPED, (0, 1)), "zero": (ZERO, (0, 1, 3)), "shard_group": (FSDP, (2, 4)),
    "sequence_parallel": (FSDP | {"tp": 2}, (True,)), "schedule": (PIPED, ("gpipe",)),
    "virtual_stages": (PIPED | {"schedule": "interleaved", "virtual_stages": 3}, (2,)),
    "micro_batch_size": ({}, (2, 3)), "seq_len": ({}, (64, 96)), "global_batch_size": (ZERO, (16, 32)),
    "precision": (ZERO, ("fp32", "bf16-mixed", "fp16-mixed")), "grad_dtype": (FSDP, ("bf16",)),
    "optimizer": ({}, ("sgd", "sgd-momentum", "adafactor", "lion", "adamw-8bit", "paged-adamw-8bit")),
    "optimizer_implementation": ({}, ("fused", "for-loop")), "clip_grad_norm": ({}, (True,)), "recompute": ({}, ("full", "op")),
    "recompute_layers": ({"recompute": "full"}, (2,)), "reduce_bucket_size": (ZERO, (10_000,)),
    "max_live_parameters": (ZERO_3, (1000,)), "max_reuse_distance": (ZERO_3, (0,)),
    "param_persistence_threshold": (ZERO_3, (0, 10**6)), "prefetch_bucket_size": (ZERO_3, (0,)),
    "sub_group_size": (ZERO_3, (1000,)), "overlap_comm": (ZERO | {"zero": 2}, (True,)),
    "zero_quantized_weights": (ZERO_3 | {"param_persistence_threshold": 1000}, (True,)),
    "zero_quantized_gradients": (ZERO_3 | {"gpus_per_node": 4, "gpus": 8}, (True,)), "zero_hpz_partition_size": (ZERO_3, (2, 4)),
    "comm_hook": (HOOKED, ("fp16", "batched-powersgd")), "powersgd_rank": (HOOKED, (2, 4)),
    "compression_phase": (HOOKED, ("warmup",)),
    "sync_each_micro_batch": (FSDP | {"global_batch_size": 16}, (False,)),
    "use_orig_params": (FSDP1, (False,)), "backward_prefetch": (FSDP1, ("post", "none")), "forward_prefetch": (FSDP1, (True,)),
    "servers": ({"engine": "parameter-server", "gpus": 8}, (4,)),
    "attention": ({}, ("eager",)), "cross_entropy": ({}, ("fused", "chunked", "flash", "liger")), "padded": ({}, (True,)),
    "kernels": ({}, ("fused",)), "liger": ({"kernels": "fused"}, ("rope", "rms_norm,swiglu")),
    "engine": ({"gpus": 8}, ("ddp", "fsdp2", "deepspeed", "fsdp1")),
    "freeze": ({}, ("embeddings", "first:2")), "lora_rank": ({}, (2, 8)), "lora_targets": (ADAPTED, ("all-linear",)),
    "lora_dropout": (ADAPTED, (0.1,)), "lora_bias": (ADAPTED, ("all",)), "adapter_dtype": (ADAPTED, ("fp32",)),
    "dora": (ADAPTED, (True,)), "modules_to_save": (ADAPTED, ("lm_head",)),
    "input_require_grads": (ADAPTED | {"recompute": "full"}, (False,)), "base_dtype": (QUANTISED, ("fp16",)),
    "quantize": (QUANTISED, ("fp4",)), "double_quant": (QUANTISED, (True,)), "quantize_compute_dtype": (QUANTISED, ("fp32",)),
    "prepare_kbit_training": (QUANTISED, (True,)), "task": ({"precision": "bf16", "micro_batch_size": 2}, ("dpo", "kto")),
    "precompute_reference": ({"task": "dpo", "precision": "bf16"}, (True,)), "completion_len": (GRPO, (4, 20)),
    "num_generations": (GRPO, (4, 8)), "steps_per_generation": (GRPO, (2, 3)), "num_iterations": (GRPO, (1, 3)),
    "beta": (GRPO, (0.1,)), "reward_model": (GRPO, ("llama-7b",)), "offload_optimizer": (ZERO, ("cpu",)),
    "nvme_optimizer_buffer_count": (IN_FILES, (4, 8)), "nvme_buffer_count": (IN_FILES, (9,)),
    "nvme_buffer_size": (IN_FILES, (10**6,)), "nvme_max_in_cpu": (IN_FILES, (0,)), "nvme_threads": (IN_FILES, (2,)),
    "precision_aware_optimizer": (MEGATRON | {"zero": 1}, (True,)), "main_params_dtype": (AWARE, ("fp16",)),
    "fp8_recipe": (MEGATRON, ("delayed", "tensorwise", "blockwise", "mxfp8")),
    "fp8_param_gather": (MEGATRON | {"zero": 1, "fp8_recipe": "tensorwise"}, (True,)),
    "exp_avg_dtype": (AWARE, ("bf16", "fp8")), "exp_avg_sq_dtype": (AWARE, ("fp16",)),
    "offload_params": (ZERO_3 | {"offload_optimizer": "cpu"}, ("cpu",)),
    "gpu": ({}, ("a100-80gb", "v100-32gb")), "network_gbps": (ZERO | {"gpu": "a100-80gb"}, (100.0,)),
    "gemm_efficiency": ({"gpu": "a100-80gb"}, (0.5,)), "attention_efficiency": ({"gpu": "a100-80gb"}, (0.5,)),
    "memory_efficiency": ({"gpu": "a100-80gb"}, (0.5,)),
    "first_stage_layers": (MEGATRON | {"pp": 2}, (2,)), "last_stage_layers": (MEGATRON | {"pp": 2}, (2,)),
    "gradient_accumulation_fusion": (MEGATRON, (True, False)), "attention_mask_in_dataloader": (MEGATRON, (True, False)),
    "packing": ({"precision": "bf16"}, (True,)), "offload_activations": ({}, ("cpu",)), "neftune_alpha": ({}, (5.0,)),
    "reentrant_checkpoints": ({"recompute": "full"}, (True,)),
    "rollout_batch_size": (PPO, (2, 3)), "num_mini_batches": (PPO, (2,)),
    "wgrad_deferral_limit": (MEGATRON | {"pp": 2, "global_batch_size": 24}, (0, 2)),
    "stage_layers": (MEGATRON | {"pp": 2}, ("2,4",)),
    "offload_modules": (MEGATRON, ("core_attn", "core_attn,attn_proj")),
    "recompute_modules": (MEGATRON | {"recompute": "selective"}, ("mlp", "mlp,core_attn")),
    "microbatch_group_size": (
        MEGATRON | {"pp": 2, "schedule": "interleaved", "virtual_stages": 3, "global_batch_size": 24}, (3,),
    ),
    "lengths": ({"precision": "bf16", "packing": True}, ("8:1,16:1",)),
    "quantize_storage": (QUANTISED, ("bf16", "fp32")),
    "te_workspaces": (MEGATRON, (0, 5)), "flash_attention_version": ({"attention": "flash", "precision": "bf16"}, (3,)),
    "cublas_workspace_config": ({}, (":4096:8", ":0:0")),
}  # fmt: skip
"""Option -> a setup, and the values that are tried beside it."""
NOT_HERE = {
    "dp", "ep", "etp", "cp_comm_type", "expert_imbalance", "tp_dims", "tp_depth", "autotp", "encoder_stages", "cp_exchange_size",
}  # fmt: skip
"""dp follows from the others; experts and grids are another model's; the rest has one value here."""


def numbers(model: Any, options: dict[str, Any]) -> Any:
    report = memcalc.estimate(model, **({"seq_len": 32} | options))
    document = report.to_dict()
    return document["memory"], document["communication"]


def test_every_option_is_tried() -> None:
    assert set(Options._fields) - set(VALUES) == NOT_HERE


@pytest.mark.slow
@pytest.mark.parametrize("option", VALUES)
def test_one_model_for_setups_that_differ_in_one_option(option: str) -> None:
    base, values = VALUES[option]
    shared = memcalc.load_model(LLAMA)
    numbers(shared, base)
    for value in values:
        options = base | {option: value}
        assert numbers(shared, options) == numbers(LLAMA, options), value
    assert numbers(shared, base) == numbers(LLAMA, base)
