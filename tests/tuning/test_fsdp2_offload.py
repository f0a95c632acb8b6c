"""Adapters over FSDP2 whose shards are on the host, quantised bases too: `memcalc validate`'s step, and what the host has."""

from __future__ import annotations

from typing import Any

import pytest
from cases import step_cases
from quantized.sharded_oracle import validate
from validate.test_fake import LLAMA, same

import memcalc
from memcalc.engines.transfers import transfers
from memcalc.errors import InputError
from memcalc.offload.host import totals

OFFLOADED: dict[str, Any] = {
    "lora_rank": 4, "engine": "fsdp2", "gpus": 4, "micro_batch_size": 2, "seq_len": 32, "precision": "bf16-mixed",
    "offload_params": "cpu",
}  # fmt: skip
QLORA: dict[str, Any] = {"quantize": "nf4"}


def named(options: dict[str, Any]) -> str:
    return "-".join(map(str, options.values())) or "plain"


@pytest.mark.parametrize(
    "options",
    [{}, QLORA, QLORA | {"double_quant": True, "recompute": "full", "precision": "bf16", "adapter_dtype": "bf16"}],
    ids=named,
)
def test_a_step(options: dict[str, Any]) -> None:
    same(validate(LLAMA, **OFFLOADED | options))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"gpus": 1},
        {"gpus": 3, "lora_targets": "all-linear", "recompute": "full"},
        {"dora": True, "lora_dropout": 0.1},
        {"modules_to_save": "lm_head"},
        {"lora_bias": "all"},
        {"precision": "bf16", "adapter_dtype": "bf16", "zero": 2},
        {"precision": "bf16-autocast"},
        {"shard_group": 2},
        {"global_batch_size": 24},
        {"global_batch_size": 24, "sync_each_micro_batch": True, "clip_grad_norm": True},
        QLORA | {"gpus": 1},
        QLORA | {"gpus": 7, "precision": "fp16-mixed", "quantize": "fp4"},
        QLORA | {"zero": 2, "double_quant": True, "lora_targets": "all-linear"},
        QLORA | {"prepare_kbit_training": True, "shard_group": 2, "global_batch_size": 16},
        QLORA | {"global_batch_size": 24, "sync_each_micro_batch": True, "clip_grad_norm": True},
        QLORA | {"dora": True, "lora_dropout": 0.1, "recompute": "full"},
        QLORA | {"base_dtype": "fp32", "padded": True},
        QLORA | {"precision": "fp32", "double_quant": True},
    ],
    ids=named,
)
def test_more_steps(options: dict[str, Any]) -> None:
    same(validate(LLAMA | {"num_hidden_layers": 8}, **OFFLOADED | options))


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("family", ["qwen2", "gemma2", "gpt2", "phi3", "gpt_neox", "opt", "qwen2_moe", "gpt_oss"])
def test_families(family: str, recompute: str) -> None:
    case = step_cases(family)[0]
    workload = {"micro_batch_size": case.batch, "seq_len": case.seq, "recompute": recompute}
    same(validate(case.fields, **OFFLOADED | QLORA | {"lora_targets": "all-linear"} | workload))


RANKS = 8
LAYERS = 32
CODES = LAYERS * (4 * 4096**2 + 3 * 4096 * 11008) // 2
IN_LAYERS, OUTSIDE = LAYERS * 2 * 4096 * 2, (32_000 * 4096 * 2 + 4096) * 2
ADAPTERS = LAYERS * 2 * 2 * 8 * 4096
"""Of 7B: the bytes of codes, of norms, of what is outside the layers; elements of adapters of rank 8 at queries and values."""


def of_7b(**options: Any) -> memcalc.Report:
    return memcalc.estimate("llama-7b", **OFFLOADED | QLORA | {"gpus": RANKS, "lora_rank": 8} | options)


def test_the_host_has_codes_and_adapters_and_the_gpu_scales() -> None:
    """One node's eight ranks together have each weight once. AdamW's states are two fp32 numbers for each that trains, and a
    count of steps for each tensor."""
    report = of_7b(zero=3)
    scales = CODES * 2 // 64 * 4 + LAYERS * 7 * 16 * 4
    assert report.to_dict()["memory"]["parameters"] == scales
    kept = {(row.kind, row.name): 0 for row in report.host}
    for row in report.host:
        kept[row.kind, row.name] += row.nbytes
    assert kept["pinned", "weights"] == CODES + IN_LAYERS + OUTSIDE + 4 * ADAPTERS
    assert kept["pinned", "gradients"] == kept["paged", "exp_avg"] == kept["paged", "exp_avg_sq"] == 4 * ADAPTERS
    assert kept["paged", "steps of the optimizer"] == 4 * LAYERS * 4 * RANKS
    assert totals(report.host).keys() >= {"pinned", "paged"}


def test_layers_come_from_the_host_twice_and_what_is_outside_once() -> None:
    report = of_7b(zero=3)
    copied = {"forward to the GPU": 0, "backward to the GPU": 0, "backward to the host": 0}
    for one in transfers(report.model, report.setup, report.rank):
        copied[f"{one.phase} {one.way}"] += one.nbytes
    layers = CODES + IN_LAYERS + 4 * ADAPTERS
    assert copied["forward to the GPU"] == (layers + OUTSIDE) // RANKS
    assert copied["backward to the GPU"] == layers // RANKS
    assert copied["backward to the host"] == 4 * ADAPTERS // RANKS


def test_codes_outside_the_units_are_refused() -> None:
    with pytest.raises(InputError, match="--quantize-storage uint8: with --offload-params"):
        of_7b(quantize_storage="uint8")
