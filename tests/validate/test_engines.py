"""The module under its engine, as the backend on a GPU prepares it; here on the CPU."""

from __future__ import annotations

import pytest
import torch

import memcalc
from memcalc.tracing.modules import quiet
from memcalc.validate.checks import fields_of
from memcalc.validate.engines import mesh_of, wrapped
from memcalc.validate.fake import process_group
from memcalc.validate.reference import build, make_batch, nbytes

LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 100,
         "num_attention_heads": 4}  # fmt: skip


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_that_is_to_be_sharded_is_never_there_as_a_whole(tied: bool) -> None:
    report = memcalc.estimate(LLAMA | {"tie_word_embeddings": tied}, gpus=4, zero=3, engine="fsdp2", seq_len=8)
    setup = report.setup
    with process_group(4), quiet():
        mesh = mesh_of(setup, "cpu")
        with torch.device("meta"):
            module = build(setup, report.model, fields_of(report.model))
        with torch.device("cpu"):
            job = wrapped(setup, module, make_batch(setup, module.config), mesh, None)
        for _ in range(2):
            job.step(lambda phase: None)
        assert nbytes(job.parameters()) == report.total("parameters")
        assert nbytes(job.states()) - 4 * len(job.parameters()) == report.total("optimizer_states")


def test_ddp_over_a_fake_group_where_nothing_counts() -> None:
    report = memcalc.estimate(LLAMA, gpus=4, seq_len=8, global_batch_size=8, precision="fp32")
    with process_group(4), quiet():
        module = build(report.setup, report.model, fields_of(report.model))
        job = wrapped(report.setup, module, make_batch(report.setup, module.config), None, None)
        phases: list[str] = []
        gradients = [job.step(phases.append) for _ in range(3)]
    assert gradients == [report.total("parameters")] * 3
    assert phases[:5] == ["forward", "backward", "forward", "backward", "step"]
