"""Dynamic frequencies (`rope_type` dynamic) beyond the positions that a model is made for: the module makes them anew in fp32,
and keeps the length that they are for."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import oracle
import paper
import pytest
from cases import step_cases
from validated import measure

import memcalc
from memcalc.core.dtypes import bf16
from memcalc.families import FAMILIES

if TYPE_CHECKING:
    from collections.abc import Iterator

POSITIONS = 8
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0, "short_mscale": 1.0, "long_mscale": 1.0}
KINDS = {"sliding_attention": DYNAMIC, "full_attention": DYNAMIC}
"""By kind of layer, where each has its own."""
LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": POSITIONS, "rope_parameters": DYNAMIC,
}  # fmt: skip


def with_dynamic_rotation(family: str) -> Iterator[dict[str, Any]]:
    """A small model of this type, where it can have such frequencies."""
    fields = step_cases(family)[-1].fields
    fields = {name: value for name, value in fields.items() if name != "rope_scaling"}
    for rope in (DYNAMIC, KINDS):
        given = fields | {"max_position_embeddings": POSITIONS, "rope_parameters": rope}
        if family == "phimoe":
            given["rope_parameters"] = DYNAMIC | {"original_max_position_embeddings": POSITIONS}
        try:
            program = paper.program_of(given)
        except (ValueError, TypeError):
            continue
        if any(buffer.longest for buffer in program.buffers()):
            yield given
            return


MODELS = [pytest.param(fields, id=family) for family in FAMILIES for fields in with_dynamic_rotation(family)]


@pytest.mark.parametrize("fields", MODELS)
def test_a_longer_sequence_has_frequencies_of_its_own(fields: dict[str, Any]) -> None:
    workload: dict[str, Any] = {"micro_batch_size": 2, "seq_len": 2 * POSITIONS}
    on_paper = paper.paper_step(fields, dtype=bf16, attention="eager", **workload)
    real = oracle.training_step(
        deepcopy(fields), attention="eager", optimizer="sgd", real=True, balanced=True, **workload
    )
    loss = real.resident - on_paper.start
    assert loss in (2, 4)  # the step before has left one
    assert on_paper.saved == real.saved
    assert (on_paper.forward + loss, on_paper.backward + loss) == (real.forward, real.backward)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_an_estimate_knows_how_long_is_longer(dtype: str) -> None:
    """One model's estimates share what they know of it."""
    model = memcalc.load_model(LLAMA)
    for seq_len in (POSITIONS // 2, 5 * POSITIONS, POSITIONS, POSITIONS + 4 * 32, 4 * 32 + POSITIONS // 2):
        report = memcalc.estimate(model, micro_batch_size=2, seq_len=seq_len, precision=dtype, optimizer="sgd")
        measured = measure(report)
        assert report.phases == {"forward": measured.forward, "backward": measured.backward, "step": measured.step}


@pytest.mark.parametrize(
    "engine",
    [
        {"engine": "ddp"},
        {"engine": "fsdp2", "tp": 2},
        {"engine": "fsdp2", "cp": 2},
        {"engine": "deepspeed", "zero": 3},
    ],
    ids=["ddp", "tp", "cp", "deepspeed"],
)
def test_under_every_engine(engine: dict[str, Any]) -> None:
    """Ranks that share a sequence have its last positions among them."""
    report = memcalc.estimate(LLAMA, gpus=2, micro_batch_size=2, seq_len=2 * POSITIONS, **engine)
    measured = measure(report)
    assert report.phases == {"forward": measured.forward, "backward": measured.backward, "step": measured.step}
