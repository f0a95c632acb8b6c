"""torch.nn.DataParallel against its own Python code: every phase's peak on the first GPU, and all that is sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import DROPOUTS, step_cases
from data_parallel_oracle import replicated_step

import memcalc

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1000, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 3010, "attention_bias": True,
}  # fmt: skip
"""Of several buffers of 10 MiB, one with a large tensor alone."""
FEW: dict[str, Any] = {"micro_batch_size": 1, "seq_len": 4}
SETUPS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "fp32": (LLAMA, {}, {}),
    "few tokens": (LLAMA, FEW, FEW),
    "bf16": (LLAMA, {"precision": "bf16"}, {"dtype": torch.bfloat16}),
    "recompute": (LLAMA, {"recompute": "full"}, {"recompute": True}),
    "8 GPUs, clipped": (LLAMA, {"gpus": 8, "clip_grad_norm": True} | FEW, {"gpus": 8, "clips": True} | FEW),
    "tied, 14 layers": (LLAMA | {"tie_word_embeddings": True, "num_hidden_layers": 14, "hidden_size": 256}, FEW, FEW),
    "2 GPUs": (LLAMA, {"gpus": 2}, {"gpus": 2}),
}


def check(config: dict[str, Any], options: dict[str, Any], real: dict[str, Any]) -> None:
    how = {"gpus": 3, "micro_batch_size": 2, "seq_len": 33} | real
    given = {name: how[name] for name in ("gpus", "micro_batch_size", "seq_len")} | {"precision": "fp32"}
    report = memcalc.estimate(dict(config), engine="data-parallel", optimizer_implementation="fused", **given | options)
    theirs = replicated_step(dict(config), **how)
    assert theirs.outputs == ["loss", "logits"]
    assert [report.phases[phase] for phase in ("forward", "backward", "step")] == [
        theirs.forward,
        theirs.backward,
        theirs.step,
    ]
    assert report.total("gradients") == theirs.gradients
    said: dict[str, tuple[int, int]] = {}
    sent: dict[str, tuple[int, int]] = {}
    for c in report.collectives:
        calls, payload = said.get(c.collective, (0, 0))
        said[c.collective] = calls + c.calls, payload + c.payload
    for kind, nbytes in theirs.sent:
        calls, payload = sent.get(kind, (0, 0))
        sent[kind] = calls + 1, payload + nbytes
    assert said == sent


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in ("2 GPUs", "tied, 14 layers"))) for name in SETUPS]
)
def test_a_step(name: str) -> None:
    check(*SETUPS[name])


OTHERS = ("gpt2", "mixtral", "qwen3", "gemma2", "mamba", "falcon", "gpt_neox", "olmo2", "deberta-v2", "opt", "rwkv")


@pytest.mark.parametrize(
    "model_type", [name if i < 2 else pytest.param(name, marks=pytest.mark.slow) for i, name in enumerate(OTHERS)]
)
def test_a_step_of_another_family(model_type: str) -> None:
    of = step_cases(model_type)[0]
    kind = memcalc.load_model(of.fields).program.attention_kinds[0]
    workload = {"micro_batch_size": of.batch, "seq_len": of.seq, "attention": kind}
    check(of.fields | dict.fromkeys(DROPOUTS, 0.0), workload, workload)


def test_the_first_gpu_gathers_all_logits() -> None:
    two, four = (
        memcalc.estimate("gpt2", engine="data-parallel", gpus=n, seq_len=512, micro_batch_size=4) for n in (2, 4)
    )
    logits = 4 * 512 * 50257 * 2
    assert two.setup.global_batch_size == 8
    more = four.phases["forward"] - two.phases["forward"]
    assert 0 <= more - 2 * logits <= 2 * (4 * 512 * 8) + 64  # and the tokens of two more replicas


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"gpus": 1}, "--engine data-parallel: runs the module alone on 1 GPU"),
        ({"gpus": 16}, "--gpus 16: one process has the GPUs of one node, 8"),
        ({"zero": 2}, "--zero 2: engine data-parallel shards nothing"),
        ({"tp": 2}, "--tp 2: with engine data-parallel is not modelled"),
        ({"shard_group": 2}, "--shard-group 2: engine data-parallel shards nothing"),
        ({"global_batch_size": 16}, "--global-batch-size 16: with engine data-parallel more than one micro-batch"),
        ({"cross_entropy": "chunked"}, "--cross-entropy chunked: with engine data-parallel"),
        ({"kernels": "fused"}, "--kernels fused: with engine data-parallel"),
        ({"lora_rank": 8}, "--lora-rank 8: with engine data-parallel"),
        ({"padded": True}, "--padded on: with engine data-parallel"),
        ({"precision": "bf16-autocast"}, "--precision bf16-autocast: with engine data-parallel"),
        ({"sync_each_micro_batch": True}, "--sync-each-micro-batch on: is an option of DDP and FSDP2"),
        ({"model": "t5-small"}, "--engine data-parallel: for a t5, whose outputs are more than a loss and logits"),
    ],
)  # fmt: skip
def test_what_is_refused(options: dict[str, Any], line: str) -> None:
    given = {"model": "gpt2", "engine": "data-parallel", "gpus": 8, **options}
    with pytest.raises(memcalc.InputError) as error:
        memcalc.estimate(given.pop("model"), **given)
    assert str(error.value).startswith(line) and "\n" not in str(error.value)
