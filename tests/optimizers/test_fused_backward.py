"""LOMO and AdaLomo of the lomo-optim package themselves: states, and the bytes of each phase of a step whose backward updates
the weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import memcalc

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 500, "head_dim": 16,
}  # fmt: skip
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (LLAMA, {"precision": "bf16"}),
    (LLAMA, {"precision": "fp32"}),
    ({**LLAMA, "vocab_size": 4000, "num_hidden_layers": 2}, {"precision": "bf16", "seq_len": 48}),
    ({**LLAMA, "vocab_size": 4000, "tie_word_embeddings": True}, {"precision": "bf16", "recompute": "full"}),
    ({**LLAMA, "intermediate_size": 2000}, {"precision": "bf16-autocast", "micro_batch_size": 2}),
    ({**LLAMA, "model_type": "qwen2"}, {"precision": "bf16", "recompute": "full"}),
    ({**LLAMA, "model_type": "stablelm", "num_key_value_heads": 4}, {"precision": "bf16"}),
    ({**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}, {"precision": "fp32"}),
]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "bf16-autocast": torch.float32}


@pytest.mark.parametrize("optimizer", ["lomo", "adalomo"])
@pytest.mark.parametrize(
    ("config", "how"), [*CASES[:2], *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES[2:])], ids=str
)
def test_bytes_of_every_phase(config: dict[str, Any], how: dict[str, Any], optimizer: str) -> None:
    package = pytest.importorskip("lomo_optim")
    if optimizer == "adalomo" and config["model_type"] == "mixtral":
        pytest.skip("AdaLomo fails for experts of three dims")
    from lomo_oracle import fused_step

    report = memcalc.estimate(config, optimizer=optimizer, **{"seq_len": 16, **how})
    sizes = {"seq_len": how.get("seq_len", 16), "micro_batch_size": how.get("micro_batch_size", 1)}
    real = fused_step(
        package, config, optimizer=optimizer, dtype=DTYPES[how["precision"]], recompute="recompute" in how,
        autocast=torch.bfloat16 if "autocast" in how["precision"] else None, **sizes,
    )  # fmt: skip
    assert report.total("optimizer_states") == real.states
    assert report.phases == {"forward": real.forward, "backward": real.backward, "step": real.step}


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (LLAMA, {}, "--optimizer lomo: updates the weights themselves and keeps no fp32 copy"),
        (LLAMA, {"precision": "fp16"}, "--optimizer lomo: runs backward twice"),
        (LLAMA, {"precision": "bf16", "gpus": 2}, "--optimizer lomo: with engine ddp"),
        (LLAMA, {"precision": "bf16", "gpus": 2, "zero": 3}, "--optimizer lomo: "),
        (LLAMA, {"precision": "bf16", "global_batch_size": 4}, "--global-batch-size 4: lomo updates in the backward"),
        (LLAMA, {"precision": "bf16", "freeze": "embeddings"}, "--optimizer lomo: with --freeze embeddings"),
        ("gpt2", {"precision": "bf16"}, "--optimizer lomo: for a gpt2, with Conv1D"),
        (LLAMA, {"precision": "bf16", "task": "dpo"}, "--optimizer lomo: with --task dpo"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_what_is_refused(config: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(memcalc.InputError, match=f"^{message}"):
        memcalc.estimate(config, optimizer="lomo", seq_len=16, **options)


def test_experts_of_three_dims_have_no_moments() -> None:
    with pytest.raises(memcalc.InputError, match=r"^--optimizer adalomo: has moments of matrices and vectors alone"):
        memcalc.estimate("mixtral-8x7b", optimizer="adalomo", precision="bf16")


def test_what_it_saves() -> None:
    """Gradients are never all there, so a step of a llama-7b needs less than its weights and gradients."""
    plain, fused = (
        memcalc.estimate("llama-7b", optimizer=name, precision="bf16", recompute="full") for name in ("sgd", "lomo")
    )
    assert fused.peak < plain.peak - plain.total("gradients") // 2
    assert plain.total("gradients") == plain.total("parameters")


def test_the_trainers_names() -> None:
    for name in ("lomo", "adalomo"):
        report = memcalc.estimate(LLAMA, seq_len=16, training_args={"optim": name, "bf16": True})
        assert (report.setup.optimizer, report.setup.precision) == (name, "bf16-autocast")


@pytest.mark.parametrize("optimizer", ["lomo", "adalomo", "adam-mini"])
def test_the_time_of_its_kernels(optimizer: str) -> None:
    """Read and written once: LOMO in bf16 the gradient (2 + 4), the weight (2 + 4, 4 + 2), and p.add_ (12) for each weight."""
    report = memcalc.estimate("llama-7b", optimizer=optimizer, precision="bf16", recompute="full", gpu="h100-80gb")
    time = report.to_dict()["time"]
    assert time["breakdown"]["optimizer"] > 0
    if optimizer == "lomo":
        (item,) = (one for one in time["items"] if one["name"].startswith("lomo"))
        assert f"{30 * report.model.num_parameters} B" in item["formula"]
