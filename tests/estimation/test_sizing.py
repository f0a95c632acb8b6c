"""`--params`: which options a bare number of parameters depends on, and that its states alone never fit a GPU."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

import memcalc
from memcalc.estimation.sizing import DECIDES
from memcalc.inputs.options import Options, option_name

VALUES: dict[str, tuple[Any, ...]] = {
    "gpus": (1, 8, 16), "gpus_per_node": (1, 4), "dp": (1, 2, 4, 8, 16), "tp": (2, 4), "pp": (2, 4), "cp": (2, 4),
    "ep": (2,), "etp": (2,), "pp_rank": (0, 1), "cp_comm_type": ("p2p", "all_gather", "a2a"), "zero": (0, 1, 2, 3),
    "shard_group": (2, 4), "sequence_parallel": (True, False), "schedule": ("gpipe", "1f1b", "interleaved", "zero-bubble"),
    "virtual_stages": (1, 2), "first_stage_layers": (1, 2), "last_stage_layers": (1, 2), "micro_batch_size": (1, 8),
    "seq_len": (1, 4096), "global_batch_size": (16, 256), "precision": ("fp32", "bf16", "bf16-mixed", "fp16-autocast"),
    "grad_dtype": ("fp32", "bf16"), "optimizer": ("adamw", "sgd", "adamw-8bit"),
    "optimizer_implementation": ("foreach", "fused", "for-loop"), "clip_grad_norm": (True,),
    "recompute": ("none", "op", "full", "selective"), "recompute_layers": (1,), "reduce_bucket_size": (1, 10**6),
    "max_live_parameters": (0, 10**6), "max_reuse_distance": (0, 10**6), "param_persistence_threshold": (0, 10**6),
    "prefetch_bucket_size": (0, 10**6), "sub_group_size": (1, 10**6), "gradient_accumulation_fusion": (True, False),
    "attention_mask_in_dataloader": (True, False), "overlap_comm": (True, False), "te_workspaces": (0, 5),
    "flash_attention_version": (2, 3),
    "cublas_workspace_config": (":4096:8",), "attention": ("eager", "sdpa", "flash"),
    "cross_entropy": ("eager", "chunked", "fused", "flash", "liger"), "padded": (True,), "expert_imbalance": (1.0, 2.0),
    "kernels": ("hf", "fused", "megatron"), "liger": ("rope",), "engine": ("none", "ddp", "fsdp2", "deepspeed", "megatron"),
    "gpu": ("a100-40gb", "h100-80gb"), "network_gbps": (100, 400),
    "gemm_efficiency": (0.5,), "attention_efficiency": (0.3,), "memory_efficiency": (0.5,),
    "sync_each_micro_batch": (True, False), "use_orig_params": (True, False),
    "backward_prefetch": ("pre", "post", "none"), "forward_prefetch": (True, False), "servers": (1, 4),
    "freeze": ("norms",), "lora_rank": (8,), "lora_targets": ("all-linear",),
    "base_dtype": ("bf16", "fp16"), "quantize": ("nf4", "int8"), "double_quant": (True,),
    "quantize_compute_dtype": ("bf16",), "quantize_storage": ("bf16",), "prepare_kbit_training": (True,),
    "lora_dropout": (0.1,), "lora_bias": ("all",), "adapter_dtype": ("bf16",), "input_require_grads": (True, False),
    "task": ("pretrain", "dpo", "kto"), "precompute_reference": (True, False), "completion_len": (8,), "num_generations": (2,),
    "steps_per_generation": (2,), "num_iterations": (2,), "beta": (0.1,),
    "rollout_batch_size": (2,), "num_mini_batches": (2,),
    "offload_optimizer": ("none", "cpu", "nvme"), "offload_params": ("none", "cpu", "nvme"),
    "dora": (True,), "modules_to_save": ("lm_head",), "tp_dims": ("2", "3"), "tp_depth": (2,), "autotp": (True,),
    "zero_quantized_weights": (True,), "zero_quantized_gradients": (True,), "zero_hpz_partition_size": (1, 4),
    "nvme_optimizer_buffer_count": (4, 8), "nvme_buffer_count": (5, 9), "nvme_buffer_size": (10**6,),
    "nvme_max_in_cpu": (0, 10**6), "nvme_threads": (1, 2),
    "precision_aware_optimizer": (True,), "main_params_dtype": ("fp16",), "exp_avg_dtype": ("bf16",),
    "exp_avg_sq_dtype": ("fp8",),
    "comm_hook": ("fp16", "powersgd"), "powersgd_rank": (1, 4), "compression_phase": ("warmup", "compressed"),
    "packing": (True,), "offload_activations": ("none", "cpu"), "neftune_alpha": (5,), "reentrant_checkpoints": (True, False),
    "lengths": ("64:1",), "encoder_stages": (1,), "reward_model": ("llama-7b",),
    "stage_layers": ("2,3",), "microbatch_group_size": (4,), "cp_exchange_size": (2,), "wgrad_deferral_limit": (0, 2),
    "recompute_modules": ("layernorm,mlp",), "offload_modules": ("core_attn",),
    "fp8_recipe": ("tensorwise",), "fp8_param_gather": (True,),
}  # fmt: skip
LAYOUTS = [
    {"gpus": gpus, "zero": zero, "tp": tp, "pp": pp, "engine": engine, "gpu": "a100-80gb"}
    for gpus, zero, tp, pp, engine in itertools.product(
        (1, 8, 16), (0, 1, 2, 3), (1, 2), (1, 2), (None, "ddp", "fsdp2", "deepspeed", "megatron")
    )
]
CHECKED = {"dp", "ep"}
"""Options that a bare number of parameters checks and that leave its numbers as they are."""


def without(document: dict[str, Any], option: str) -> str:
    """A report's document but for the option's own line in its setup."""
    setup = {name: value for name, value in document["setup"].items() if name != option}
    return json.dumps({**document, "setup": setup})


def documents(layout: dict[str, Any], option: str) -> set[str]:
    """What the values of an option make of a layout, of those that it may have there."""
    out: set[str] = set()
    for value in (None, *VALUES[option]):
        try:
            out.add(without(memcalc.estimate(params="1B", **{**layout, option: value}).to_dict(), option))
        except memcalc.InputError:
            continue
    return out


def test_every_option_has_values_here() -> None:
    assert set(VALUES) == set(Options._fields)


@pytest.mark.parametrize("option", Options._fields)
def test_an_option_changes_something_or_is_refused_by_name(option: str) -> None:
    if option in DECIDES:
        changes = any(len(documents(layout, option)) > 1 for layout in LAYOUTS)
        assert changes != (option in CHECKED)
        return
    for value in VALUES[option]:
        with pytest.raises(memcalc.InputError, match=f"^{option_name(option)} .*--params") as error:
            memcalc.estimate(params="1B", gpus=8, **{option: value})
        assert "--model" in str(error.value)


def test_what_is_left_out_is_not_refused() -> None:
    """A None is as good as leaving an option out; so is the False of a switch that is off."""
    plain = memcalc.estimate(params="1B")
    assert memcalc.estimate(params="1B", seq_len=None, padded=False, clip_grad_norm=False).to_dict() == plain.to_dict()


def test_checked_options_are_still_checked() -> None:
    assert memcalc.estimate(params="1B", gpus=8, dp=8).setup.dp == 8
    with pytest.raises(memcalc.InputError, match=r"^--dp 4: 8 GPUs leave dp = 8"):
        memcalc.estimate(params="1B", gpus=8, dp=4)
    with pytest.raises(memcalc.InputError, match=r"^--ep 2: a number of parameters does not tell"):
        memcalc.estimate(params="1B", gpus=8, ep=2, engine="megatron")


@pytest.mark.parametrize("gpus", [1, 8, 64])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("params", ["1", "1B", "7B", "70B", "1T"])
def test_states_alone_refuse_and_never_confirm(params: str, zero: int, gpus: int) -> None:
    report = memcalc.estimate(params=params, zero=zero, gpus=gpus, engine="deepspeed", gpu="a100-80gb")
    fit = report.to_dict()["fit"]
    assert report.fits is fit["fits"]
    if fit["needs"] > fit["capacity"]:
        assert fit["fits"] is False
        assert fit["headroom"] == fit["capacity"] - fit["needs"] < 0
        assert report.peak <= fit["needs"] <= report.device
    else:
        assert fit["fits"] is None
        assert fit["headroom"] is None
