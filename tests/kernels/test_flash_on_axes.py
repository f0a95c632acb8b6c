"""flash-attn on a rank of the parallel axes: transformers' parts by their plans, pipeline stages, parts of the experts,
sequences that DeepSpeed's ranks share, and AutoTP's layers, each around the kernel's tensors, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import step_cases
from validate.test_fake import LLAMA, MIXTRAL, same

import memcalc
from memcalc.families import supporting
from memcalc.kernels.flash_checks import CHECKED
from memcalc.validate import as_trained

FSDP2: dict[str, Any] = {"engine": "fsdp2", "gpus": 2, "zero": 3, "precision": "bf16-mixed"}
ULYSSES: dict[str, Any] = {"engine": "deepspeed", "gpus": 2, "zero": 3, "precision": "bf16-mixed", "cp": 2}
WORKLOAD: dict[str, Any] = {"attention": "flash", "micro_batch_size": 2, "seq_len": 32}
AXES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tp": (LLAMA, FSDP2 | {"tp": 2}),
    "stages": (LLAMA, FSDP2 | {"pp": 2, "global_batch_size": 4}),
    "experts": (MIXTRAL, FSDP2 | {"ep": 2}),
    "sequences": (LLAMA, ULYSSES),
}
MORE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tp and sequences": (LLAMA, FSDP2 | {"tp": 2, "sequence_parallel": True}),
    "tp, dp and checkpoints": (LLAMA, FSDP2 | {"tp": 2, "gpus": 4, "recompute": "full"}),
    "tp and stages": (LLAMA, FSDP2 | {"tp": 2, "pp": 2, "gpus": 4, "global_batch_size": 4, "recompute": "full"}),
    "tp and frozen parts": (LLAMA, FSDP2 | {"tp": 2, "freeze": "embeddings", "seq_len": 128}),
    "tp and adapters": (LLAMA, FSDP2 | {"tp": 2, "lora_rank": 4}),
    "tp of unaligned heads": (LLAMA | {"head_dim": 20}, FSDP2 | {"tp": 2}),
    "AutoEP": (MIXTRAL, ULYSSES | {"cp": 1, "ep": 2, "zero": 1}),
    "more ranks than heads of keys": (
        LLAMA | {"num_attention_heads": 8, "num_key_value_heads": 2},
        ULYSSES | {"cp": 4, "gpus": 4, "seq_len": 256},
    ),
    "sequences, checkpoints": (LLAMA, ULYSSES | {"recompute": "full", "zero": 2}),
}


def run(model: dict[str, Any], options: dict[str, Any]) -> None:
    if options["engine"] == "deepspeed":
        pytest.importorskip("deepspeed")
    if "lora_rank" in options:
        pytest.importorskip("peft")
    same(as_trained.validate(model, **WORKLOAD | options))


@pytest.mark.parametrize("name", sorted(AXES))
def test_an_axis(name: str) -> None:
    run(*AXES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MORE))
def test_axes(name: str) -> None:
    run(*MORE[name])


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted({*CHECKED} & {*supporting(lambda s: s.tensor_parallel is not None)}))
def test_a_part_of_each_type(family: str) -> None:
    for case in step_cases(family)[:3]:
        workload = {"micro_batch_size": case.batch, "seq_len": case.seq}
        try:
            memcalc.estimate(dict(case.fields), **WORKLOAD | FSDP2 | workload | {"tp": 2})
        except memcalc.InputError as error:
            assert not str(error).startswith("--attention"), error  # its heads or biases are not split
            continue
        run(dict(case.fields), FSDP2 | workload | {"tp": 2})


@pytest.mark.slow
def test_auto_tp(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's layers around the kernel, which has a rank's part of the heads."""
    pytest.importorskip("deepspeed")
    from layout import test_auto_tp as auto_tp

    from memcalc.core.dims import evaluate
    from memcalc.core.dtypes import bf16
    from memcalc.kernels import TRANSFORMERS
    from memcalc.kernels.flash_attention import rounds_tokens, with_flash_attention
    from memcalc.tape.profile import Choices, profile
    from memcalc.validate.flash import kernels_of_flash_attn
    from memcalc.validate.packed import FLASH

    made = auto_tp.replaced

    def replaced(*args: Any) -> torch.nn.Module:
        model = made(*args)
        model.config._attn_implementation = FLASH
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()  # flash-attn takes 16 bits
        return model

    monkeypatch.setattr(auto_tp, "replaced", replaced)
    with kernels_of_flash_attn():
        real = auto_tp.real("llama", 2)
    batch, seq = auto_tp.BATCH, auto_tp.SEQ
    kernels = with_flash_attention(TRANSFORMERS, pads=rounds_tokens(seq))
    model = memcalc.load_model({"model_type": "llama", **auto_tp.SMALL})
    options: dict[str, Any] = {"engine": "deepspeed", "gpus": 2, "tp": 2, "autotp": True}
    report = memcalc.estimate(model, attention="flash", seq_len=seq, **options)
    part = auto_tp.part_of(model, report.setup).program
    run = profile(part, Choices(bf16, "flash", False, False, kernels=kernels), batch, seq)
    assert evaluate(run.saved.poly, batch, seq) == real["saved"]
    for moments, name in ((run.forward, "forward"), (run.backward, "backward")):
        assert max(evaluate(m.poly, batch, seq) + m.gradients for m in moments) == real[name]


def test_torchs_shared_sequences_are_sdpas() -> None:
    line = "--attention flash: torch's context parallelism replaces sdpa.*--engine deepspeed"
    with pytest.raises(memcalc.InputError, match=line):
        memcalc.estimate("llama-7b", attention="flash", engine="fsdp2", gpus=2, cp=2)
