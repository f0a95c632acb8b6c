"""`memcalc validate` of checkpoints that re-enter autograd, and of adapters of fused experts, by both of its entrances."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from validate.test_fake import LLAMA, MIXTRAL, same

import memcalc
from memcalc.cli.main import main
from memcalc.validate import as_trained

AGAIN: dict[str, Any] = {
    "recompute": "full", "reentrant_checkpoints": True, "precision": "bf16", "seq_len": 16, "micro_batch_size": 2,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"lora_rank": 4, "lora_targets": "all-linear", "adapter_dtype": "bf16", "precision": "bf16"}


def by_command(model: dict[str, Any], folder: Path, *words: str) -> int:
    path = folder / "config.json"
    path.write_text(json.dumps(model))
    return main(["validate", str(path), "--precision", "bf16", "--seq-len", "16", "-b", "2", *words])


@pytest.mark.slow
def test_reentrant_checkpoints_are_the_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    comparison = as_trained.validate(LLAMA, **AGAIN)
    same(comparison)
    plain = as_trained.validate(LLAMA, **AGAIN | {"reentrant_checkpoints": None})
    measured = {row.name: row.measured for row in comparison.memory}
    assert measured["peak"] != {row.name: row.measured for row in plain.memory}["peak"]
    assert by_command(LLAMA, tmp_path, "--recompute", "full", "--reentrant-checkpoints", "--json") == 0
    assert {row["name"]: row["measured"] for row in json.loads(capsys.readouterr().out)["memory"]} == measured


@pytest.mark.slow
@pytest.mark.parametrize("task", ["sft", "dpo", "kto"])
@pytest.mark.parametrize("options", [{}, {"lora_rank": 4}, {"engine": "deepspeed", "gpus": 2, "zero": 2}], ids=str)
def test_reentrant_checkpoints_of_a_trainer(task: str, options: dict[str, Any]) -> None:
    """A reference's forward is run without checkpoints, which are on again as before for the step behind it."""
    from tasks.grpo_oracle import import_grpo

    import_grpo()
    for package in ("peft", "deepspeed"):
        pytest.importorskip(package)
    same(
        as_trained.validate(
            LLAMA, task=task, **AGAIN | ({"precision": "bf16-mixed"} if "zero" in options else {}) | options
        )
    )


@pytest.mark.parametrize("options", [{}, {"lora_rank": 8, "lora_targets": "gate"}], ids=["experts", "router"])
def test_adapters_of_parameters_in_16_bits(options: dict[str, Any]) -> None:
    pytest.importorskip("peft")
    same(as_trained.validate(MIXTRAL, seq_len=16, **EXPERTS | options))


def test_ppo_is_refused_by_both_entrances(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(memcalc.InputError, match=r"--task ppo: in a run .*memcalc estimate takes it") as caught:
        as_trained.validate(LLAMA, task="ppo", seq_len=16, precision="bf16")
    assert by_command(LLAMA, tmp_path, "--task", "ppo") == 2
    assert str(caught.value) in " ".join(capsys.readouterr().err.split())
