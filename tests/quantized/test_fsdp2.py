"""A base in 4 bits over FSDP2, against torch's `fully_shard` over bitsandbytes' and peft's own modules: every number of a
step, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
from cases import step_cases
from quantized.sharded_oracle import validate
from validate.test_fake import GPT2, LLAMA, same

import memcalc
from memcalc.core.dims import Dim
from memcalc.core.dtypes import bf16, fp32
from memcalc.quantized.four_bit import FourBit

QLORA: dict[str, Any] = {
    "lora_rank": 4, "quantize": "nf4", "engine": "fsdp2", "gpus": 4, "micro_batch_size": 2, "seq_len": 32,
    "precision": "bf16-mixed",
}  # fmt: skip
BIASED = LLAMA | {"attention_bias": True}
DEEP = LLAMA | {"num_hidden_layers": 8}  # so many that paper runs fewer


def named(options: dict[str, Any]) -> str:
    return options.get("model_type") or "-".join(map(str, options.values())) or "plain"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"quantize_storage": "uint8", "double_quant": True, "lora_targets": "all-linear"},
        {"precision": "bf16", "adapter_dtype": "bf16", "gpus": 3, "recompute": "full"},
        {"prepare_kbit_training": True, "shard_group": 2, "global_batch_size": 16},
    ],
    ids=named,
)
def test_a_step(options: dict[str, Any]) -> None:
    same(validate(LLAMA, **QLORA | options))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"double_quant": True, "lora_targets": "all-linear", "recompute": "full"},
        {"zero": 2, "grad_dtype": "bf16"},
        {"precision": "fp16-mixed", "quantize": "fp4", "gpus": 7},
        {"global_batch_size": 24, "sync_each_micro_batch": True},
        {"global_batch_size": 24, "clip_grad_norm": True},
        {"precision": "fp32", "double_quant": True},
        {"precision": "bf16-autocast"},
        {"precision": "fp16", "adapter_dtype": "fp16", "quantize_compute_dtype": "fp32"},
        {"dora": True},
        {"dora": True, "lora_dropout": 0.1, "recompute": "full", "quantize_storage": "uint8"},
        {"precision": "bf16", "adapter_dtype": "bf16", "modules_to_save": "lm_head,norm"},
        {"prepare_kbit_training": True, "double_quant": True, "recompute": "full", "zero": 2},
        {"base_dtype": "fp32", "lora_dropout": 0.1, "optimizer": "lion"},
        {"padded": True, "gpus": 64},
        {"gpus": 1, "zero": 3, "prepare_kbit_training": True},
        {"gpus": 8, "shard_group": 1, "base_dtype": "fp32"},
    ],
    ids=named,
)
def test_deep_models(options: dict[str, Any]) -> None:
    same(validate(DEEP, **QLORA | options))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"base_dtype": "fp16"},
        {"precision": "bf16", "adapter_dtype": "bf16", "lora_bias": "all"},
        {"prepare_kbit_training": True},
    ],
    ids=named,
)
def test_biases(options: dict[str, Any]) -> None:
    same(validate(BIASED, **QLORA | options))


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(
    "family",
    [
        "qwen2", "mistral", "gemma2", "gpt2", "bert", "phi3", "bloom", "opt", "gpt_neox", "phi", "gemma", "qwen3", "stablelm",
        "gemma3_text", "olmo2", "starcoder2", "qwen2_moe", "glm4", "cohere", "granite", "gpt_oss",
    ],
)  # fmt: skip
def test_families(family: str, recompute: str) -> None:
    case = step_cases(family)[0]
    workload = {"micro_batch_size": case.batch, "seq_len": case.seq, "recompute": recompute}
    same(validate(case.fields, **QLORA | {"lora_targets": "all-linear", "double_quant": True} | workload))


@pytest.mark.parametrize("storage", [bf16, fp32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("shape", [(96, 200), (300, 64)])
def test_codes_in_another_dtype(shape: tuple[int, int], storage: Any) -> None:
    """Real tensors of a small weight."""
    bnb = pytest.importorskip("bitsandbytes")
    import torch

    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[storage.name]
    codes, _ = bnb.functional.quantize_4bit(torch.randn(shape), quant_type="nf4", quant_storage=dtype)
    ours = FourBit(False, bf16, bf16, storage).stored(tuple(Dim(str(n), n) for n in shape))[0]
    assert ([d.size for d in ours.shape], ours.dtype.name) == (list(codes.shape), storage.name)


def sharded(layer: Any, **policy: Any) -> Any:
    """What torch makes of a layer and a linear one of fp32 in one unit: the result of a forward and backward of two ranks."""
    import torch
    from fsdp2_oracle import ranks
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    with ranks(2):
        model = torch.nn.Sequential(layer, torch.nn.Linear(64, 64)).train()
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)), mp_policy=MixedPrecisionPolicy(**policy))
        model(torch.randn(4, 64, dtype=torch.bfloat16, requires_grad=True)).sum().backward()


def test_fsdp2_makes_int8_weights_plain_parameters() -> None:
    """Linear8bitLt looks for `CB` on its weight."""
    bnb = pytest.importorskip("bitsandbytes")
    import torch

    layer = bnb.nn.Linear8bitLt(64, 64, bias=False, has_fp16_weights=False)
    layer.weight = bnb.nn.Int8Params(torch.randn(64, 64), requires_grad=False)
    layer.weight._quantize("cpu")
    with pytest.raises(AttributeError, match="'Parameter' object has no attribute 'CB'"):
        sharded(layer, param_dtype=torch.bfloat16)


@pytest.mark.parametrize("storage", ["bfloat16", "float32"])
def test_a_policy_casts_codes_of_another_dtype(storage: str) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    import torch

    dtype = getattr(torch, storage)
    layer = bnb.nn.Linear4bit(64, 64, bias=False, compute_dtype=torch.bfloat16, quant_storage=dtype)
    layer.weight = bnb.nn.Params4bit(torch.randn(64, 64), requires_grad=False, **layer.weight.__dict__)
    layer.weight._quantize(torch.device("cpu"))
    if storage == "bfloat16":
        sharded(layer, param_dtype=torch.bfloat16)
    else:
        with pytest.raises(RuntimeError, match="is invalid for input of size"):
            sharded(layer, param_dtype=torch.bfloat16)


@pytest.mark.parametrize("storage", ["uint8", None])
def test_ranks_share_codes_of_the_weights_dtype_alone(storage: str | None) -> None:
    """Of 7B, whose dims all divide by the ranks: codes at half a byte, a scale of 4 bytes for 64 of them, a table per weight."""
    elements = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    scales = elements // 64 * 4 + 32 * 7 * 16 * 4
    others = (32_000 * 4096 * 2 + 65 * 4096) * 2
    adapters = 32 * 2 * 2 * 8 * 4096 * 4
    for ranks in (2, 8):
        report = memcalc.estimate("llama-7b", **QLORA | {"gpus": ranks, "lora_rank": 8, "quantize_storage": storage})
        codes = elements // 2 if storage == "uint8" else elements // 2 // ranks
        assert report.to_dict()["memory"]["parameters"] == codes + scales + (others + adapters) // ranks


@pytest.mark.parametrize(
    ("model", "options", "named"),
    [
        (LLAMA, {"quantize": "int8"}, "--quantize int8: with engine fsdp2: bitsandbytes' Linear8bitLt looks for weight.CB"),
        (LLAMA, {"quantize_storage": "fp32"}, "--quantize-storage fp32: FSDP2's policy casts every floating-point tensor to"),
        (
            LLAMA,
            {"quantize_storage": "fp32", "precision": "bf16", "adapter_dtype": "bf16"},
            "--quantize-storage fp32: in units with weights of bf16 is not modelled by this version; allowed: uint8, bf16",
        ),
        (LLAMA, {"quantize_storage": "int4"}, "--quantize-storage int4: allowed: uint8, fp32, bf16, fp16"),
        (LLAMA, {"adapter_dtype": "bf16"}, "--adapter-dtype bf16: with engine fsdp2 and --precision bf16-mixed what trains is"),
        (LLAMA, {"modules_to_save": "lm_head"}, "--modules-to-save lm_head: over a base of bf16 beside adapters of fp32"),
        (BIASED, {"lora_bias": "all"}, "--lora-bias all: over a base of bf16 beside adapters of fp32 with engine fsdp2"),
        (
            LLAMA,
            {"precision": "bf16", "adapter_dtype": "fp32", "prepare_kbit_training": True},
            "--adapter-dtype fp32: with engine fsdp2, whose units have one dtype",
        ),
        (LLAMA, {"engine": "fsdp1"}, "with engine fsdp1"),
        (LLAMA, {"quantize": "none", "quantize_storage": "bf16"}, "--quantize-storage bf16: is an option of quantised weights"),
        (
            LLAMA,
            {"quantize": "int8", "quantize_storage": "bf16", "engine": "ddp", "precision": "bf16"},
            "--quantize-storage bf16: is an option of 4-bit weights; allowed: with --quantize nf4, fp4",
        ),
        (
            LLAMA,
            {"engine": "deepspeed", "zero": 2, "quantize_storage": "fp16"},
            "--quantize-storage fp16: DeepSpeed casts every floating-point tensor to bf16, codes too; allowed: uint8, bf16",
        ),
        (GPT2, {"cp": 2}, "--cp 2"),
    ],
)  # fmt: skip
def test_refusals(model: dict[str, Any], options: dict[str, Any], named: str) -> None:
    with pytest.raises(memcalc.InputError) as error:
        memcalc.estimate(model, **QLORA | options)
    assert named in str(error.value)
    assert "\n" not in str(error.value)
