"""The attention kernel of a GPU that is known: the choice, and whole steps with it against torch's own kernels."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import oracle
import pytest
import torch
from cases import DROPOUTS, step_cases

import memcalc
from memcalc.core.dtypes import DType, bf16, fp16, fp32
from memcalc.inputs.gpu import all_gpus
from memcalc.kernels.attention_on_gpu import Operands, fused_kernels, fused_on

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HOPPER, AMPERE, VOLTA = "h100-80gb", "a10g", "v100-32gb"
LLAMA = {"model_type": "llama", "hidden_size": 96, "intermediate_size": 40, "num_hidden_layers": 5, "vocab_size": 70,
         "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 24}  # fmt: skip


def operands(
    dtype: DType, *, kv_heads: int = 8, width: int = 64, values: int | None = None, masked: bool = False
) -> Operands:
    return Operands(dtype, 8, kv_heads, width, values or width, masked)


@pytest.mark.parametrize(
    ("capability", "given", "kernel"),
    [
        ("9.0", operands(bf16, kv_heads=2), "cudnn"),
        ("10.0", operands(fp16, masked=True), "cudnn"),
        ("10.0", operands(fp16, width=256), "flash"),  # wider than cuDNN takes there
        ("9.0", operands(bf16, width=100), "flash"),  # rows that cuDNN does not take
        ("8.0", operands(bf16, kv_heads=2), "flash"),
        ("8.0", operands(fp16), "flash"),
        ("8.0", operands(bf16, masked=True), "efficient"),
        ("8.0", operands(bf16, width=264), "efficient"),  # flash has no heads wider than 256
        ("8.0", operands(bf16, width=264, kv_heads=2), "math"),
        ("8.0", operands(bf16, width=100, masked=True), "math"),  # rows of 200 bytes
        ("8.0", operands(fp32), "efficient"),
        ("8.0", operands(fp32, width=100), "efficient"),
        ("8.0", operands(fp32, width=102), "math"),
        ("10.0", operands(fp32, kv_heads=2), "math"),
        ("9.0", operands(bf16, width=192, values=128), "cudnn"),
        ("9.0", operands(bf16, width=192, values=128, kv_heads=2), "cudnn"),
        ("9.0", operands(bf16, width=264, values=128), "efficient"),
        ("9.0", operands(bf16, width=100, values=64), "math"),  # rows that are no multiple of 8 elements, or of 16 bytes
        ("9.0", operands(fp32, width=192, values=128), "efficient"),
        ("10.0", operands(fp16, width=192, values=128), "cudnn"),  # DeepSeek's widths alone
        ("10.0", operands(fp16, width=192, values=96), "efficient"),
        ("10.3", operands(bf16, width=96, values=64), "cudnn"),
        ("8.0", operands(bf16, width=192, values=128), "efficient"),
        ("12.0", operands(bf16, width=192, values=128), "efficient"),
        ("8.9", operands(bf16, width=200), "efficient"),  # flash attention has no backward for it on Ada
        ("8.9", operands(bf16, width=200, kv_heads=1), "math"),
        ("8.9", operands(bf16, width=256, kv_heads=1), "flash"),
        ("9.0", operands(bf16, width=200, kv_heads=1), "cudnn"),
        ("12.0", operands(bf16, width=200), "efficient"),
        ("7.0", operands(fp16), "efficient"),
        ("7.5", operands(fp16, kv_heads=2), "math"),
        ("7.0", operands(fp32, width=102), "efficient"),
        ("7.0", operands(fp16, width=100), "math"),
        ("7.0", operands(bf16), "math"),
    ],
)  # fmt: skip
def test_the_choice(capability: str, given: Operands, kernel: str) -> None:
    fused = fused_on(capability)
    assert fused is not None
    assert fused.kernel(given) == kernel


def test_the_kernels_of_every_nvidia_gpu_are_known_and_of_no_other() -> None:
    for gpu in all_gpus():
        assert (fused_kernels(gpu.name) is None) == (gpu.vendor != "nvidia"), gpu.name


def check(config: dict[str, Any], gpu: str, *, precision: str, b: int, s: int, **options: Any) -> None:
    """Saved bytes, peaks and FLOPs."""
    autocast = DTYPES[precision.removesuffix("-autocast")] if precision.endswith("autocast") else None
    recompute = options.get("recompute", "none")
    real = oracle.training_step(
        deepcopy(config), micro_batch_size=b, seq_len=s, dtype=DTYPES.get(precision, torch.float32), autocast=autocast,
        optimizer="sgd", recompute=recompute != "none" and recompute, padded=options.get("padded", False),
        fused=fused_kernels(gpu),
    )  # fmt: skip
    report = memcalc.estimate(
        deepcopy(config), gpu=gpu, precision=precision, micro_batch_size=b, seq_len=s, optimizer="sgd", **options
    )
    assert report.total("saved_activations") == real.saved
    assert report.phases == {"forward": real.forward, "backward": real.backward, "step": real.step}
    assert {phase: n for phase, n in report.flops.items() if n and phase != "total"} == real.flops


@pytest.mark.parametrize("recompute", ["none", "op", "full"])
@pytest.mark.parametrize(
    ("gpu", "precision"),
    [(HOPPER, "fp32"), (HOPPER, "bf16"), (VOLTA, "fp32"), (VOLTA, "bf16"), (VOLTA, "fp16"), (VOLTA, "fp16-autocast")],
)
def test_grouped_heads(gpu: str, precision: str, recompute: str) -> None:
    check(LLAMA, gpu, precision=precision, b=2, s=40, recompute=recompute)


@pytest.mark.parametrize(("gpu", "precision"), [(AMPERE, "fp32"), (VOLTA, "bf16")])
@pytest.mark.parametrize(
    "fields",
    [
        LLAMA | {"num_key_value_heads": 1},
        {"model_type": "gpt_bigcode", "n_embd": 64, "n_head": 4, "n_layer": 5, "n_positions": 40, "vocab_size": 70},
        {"model_type": "falcon", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 5, "vocab_size": 70},
    ],
    ids=lambda fields: fields["model_type"],
)
def test_one_head_of_keys_of_one_sequence(fields: dict[str, Any], gpu: str, precision: str) -> None:
    check(fields | dict.fromkeys(DROPOUTS, 0.0), gpu, precision=precision, b=1, s=40)


@pytest.mark.parametrize("gpu", [AMPERE, VOLTA])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "model_type",
    ["gpt2", "bert", "bart", "whisper", "t5", "falcon", "gpt_bigcode", "deepseek_v3", "gemma3_text", "phi3"],
)
def test_a_family(model_type: str, precision: str, gpu: str) -> None:
    case = step_cases(model_type)[0]
    check(case.fields | dict.fromkeys(DROPOUTS, 0.0), gpu, precision=precision, b=case.batch, s=case.seq)


@pytest.mark.parametrize(("gpu", "precision"), [(AMPERE, "fp32"), (VOLTA, "bf16")])
def test_one_key_for_all_heads(gpu: str, precision: str) -> None:
    """It is copied for every head, which a view would do for a product."""
    check(LLAMA | {"num_key_value_heads": 1}, gpu, precision=precision, b=2, s=24)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("recompute", ["none", "op", "full"])
@pytest.mark.parametrize("precision", ["bf16", "bf16-autocast"])
@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3"])
def test_values_that_are_not_as_wide_as_keys_on_hopper(
    model_type: str, precision: str, recompute: str, padded: bool
) -> None:
    """cuDNN's output is laid out as the queries, so the output projection's input is a copy of it."""
    case = step_cases(model_type)[0]
    widths = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    fields = case.fields | dict.fromkeys(DROPOUTS, 0.0) | widths
    check(fields, HOPPER, precision=precision, b=2, s=24, recompute=recompute, padded=padded)


@pytest.mark.parametrize("gpu", [AMPERE, VOLTA])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_mask(precision: str, gpu: str) -> None:
    check(LLAMA, gpu, precision=precision, b=2, s=24, padded=True)


def test_without_a_gpu_or_with_fused_kernels_nothing_moves() -> None:
    def phases(**options: Any) -> dict[str, int]:
        return memcalc.estimate(deepcopy(LLAMA), micro_batch_size=2, seq_len=512, **options).phases

    assert phases(precision="bf16", gpu=AMPERE) == phases(precision="bf16")
    layers, state = LLAMA["num_hidden_layers"], 16  # of cuDNN's dropout
    assert phases(precision="bf16", gpu=HOPPER)["forward"] == phases(precision="bf16")["forward"] + layers * state
    assert phases(precision="fp32", gpu="mi300x") == phases(precision="fp32")
    scores = 2 * 6 * 512 * 512 * 4
    assert phases(precision="fp32", gpu=HOPPER)["forward"] > phases(precision="fp32")["forward"] + 4 * scores
