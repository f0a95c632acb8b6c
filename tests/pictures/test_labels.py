"""Names of blocks: no block of any engine's script is without one."""

from __future__ import annotations

from typing import Any

import pytest
from pictured import LLAMA, SETUPS, pictured

import memcalc
from memcalc.core.dtypes import bf16
from memcalc.core.rows import COMPONENTS, Row
from memcalc.pictures.labels import ALLOCATOR, Label, of_rows, of_script


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16-mixed", "fp32"])
@pytest.mark.parametrize("optimizer", ["adamw", "lion", "adafactor", "muon", "sgd-momentum"])
def test_every_block_of_a_script_has_a_name(zero: int, precision: str, optimizer: str) -> None:
    options: dict[str, Any] = {
        "engine": "deepspeed",
        "gpus": 4,
        "zero": zero,
        "precision": precision,
        "optimizer": optimizer,
    }
    try:
        report = memcalc.estimate(dict(LLAMA), **options)
    except memcalc.InputError as error:
        pytest.skip(str(error))
    order = report.rank.order
    if order is None or order.scripts is None:
        pytest.skip("the order is not known")
    scripts = order.scripts()
    events = [event for script in scripts[:6] for event in script if event.nbytes is not None]
    assert events
    for event in events:
        label = of_script(event.block)
        assert label.component in COMPONENTS
        assert "{" not in label.name
    assert {label.component for label in map(of_script, scripts.stays)} <= {"buffers", "gradients"}


def test_an_unknown_block_is_no_default() -> None:
    with pytest.raises(KeyError):
        of_script("something new")


def test_a_row_of_every_layer_names_the_layer() -> None:
    rows = (
        Row("parameters", "layers.*.a", (), bf16, 2),
        Row("parameters", "layers.*.b", (), bf16, 2),
        Row("buffers", "c", (), bf16),
    )
    names = ["layers.0.a", "layers.0.b", "layers.1.a", "layers.1.b", "c"]
    assert [label.name for label in of_rows(rows, 2)] == names
    assert [label.name for label in of_rows(rows, 5)][:2] == ["layers.*.a", "layers.*.b"]


@pytest.mark.parametrize("name", SETUPS)
def test_components_are_the_reports(name: str) -> None:
    _, timeline = pictured(name)
    assert {block.component for block in timeline.blocks} <= {*COMPONENTS, ALLOCATOR}
    workspaces = [block for block in timeline.blocks if block.component == ALLOCATOR]
    assert all(block.begin == 0 for block in workspaces)


def test_a_prefetched_layer_is_named_and_not_the_running_one() -> None:
    _, timeline = pictured("fsdp2")
    gathered = [block for block in timeline.blocks if block.name == "model.layers.5: all-gather result"]
    backward = next(part for part in timeline.layers if part.phase == "backward" and part.layer == 6)
    assert any(backward.first < block.begin <= backward.last for block in gathered)


def test_a_scripts_state_is_the_optimizers() -> None:
    assert of_script(("exp_avg", 0)) == Label("optimizer_states", "exp_avg, group 0")
    assert of_script(("optimizer step", 3)).component == "temporaries"
