"""What is written in every format is read as the same setup, for options that few setups have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from drawn_setups import GPT2, LLAMA, read_again, setup_of

import memcalc
from memcalc.estimation.emitted import written
from memcalc.inputs.model import Model

FORMATS = {
    "deepspeed": ("deepspeed", "ds.json"),
    "accelerate": ("accelerate", "accelerate.yaml"),
    "training-args": ("training_args", "args.yaml"),
    "megatron": ("megatron_args", "args.sh"),
}
PACKED: dict[str, Any] = {"packing": True, "seq_len": 64, "precision": "bf16"}
ADAPTED: dict[str, Any] = {"lora_rank": 4, "precision": "bf16"}
QUANTISED: dict[str, Any] = {
    "lora_rank": 4, "quantize": "nf4", "base_dtype": "bf16", "precision": "fp16-autocast", "quantize_compute_dtype": "bf16",
}  # fmt: skip
GRPO: dict[str, Any] = {"task": "grpo", "precision": "bf16", "seq_len": 64}


@pytest.mark.parametrize(
    ("format", "model", "options"),
    [
        *(("accelerate", LLAMA, {**PACKED, "attention": kind}) for kind in ("flash", "sdpa")),
        *(("training-args", LLAMA, {**PACKED, "attention": kind}) for kind in ("flash", "sdpa")),
        *(("training-args", LLAMA, {**PACKED, **ADAPTED, "attention": kind}) for kind in ("flash", "sdpa")),
        *(("training-args", LLAMA, {**PACKED, "task": "sft", "attention": kind}) for kind in ("flash", "sdpa")),
        ("training-args", LLAMA, {**PACKED, **ADAPTED, "lengths": "8:1,16:1"}),
        (
            "deepspeed",
            LLAMA,
            {**PACKED, "engine": "deepspeed", "gpus": 2, "precision": "bf16-mixed", "attention": "sdpa"},
        ),
        *(("accelerate", GPT2, {**QUANTISED, "task": task}) for task in ("sft", "dpo")),
        *(("training-args", GPT2, {**QUANTISED, "task": task}) for task in ("sft", "dpo")),
        ("accelerate", LLAMA, {**GRPO, "micro_batch_size": 5}),
        ("accelerate", LLAMA, {**GRPO, "micro_batch_size": 8, "num_generations": 4}),
        ("training-args", LLAMA, {**GRPO, "micro_batch_size": 8}),
        ("training-args", LLAMA, {**PACKED, **ADAPTED, "packing": False, "global_batch_size": 10**10}),
        *(
            ("megatron", LLAMA, {"engine": "megatron", "gpus": 4, "tp": 2, "te_workspaces": count, "seq_len": 64})
            for count in (1, 4, 5, 8)
        ),
    ],
)
def test_what_is_written_is_read_as_the_same_setup(
    format: str, model: Model, options: dict[str, Any], tmp_path: Path
) -> None:
    setup = setup_of(options, model)
    assert setup is not None
    option, name = FORMATS[format]
    assert read_again(option, written(format, setup, model), setup, model, tmp_path / name) == setup


def test_flash_attention_of_rows_that_the_script_packs_is_named() -> None:
    setup = setup_of({**PACKED, **ADAPTED, "attention": "flash"}, LLAMA)
    assert setup is not None
    out = written("training-args", setup, LLAMA)
    assert "attn_implementation: flash_attention_2" in out.text
    assert "packing" in out.unsaid and "attention" not in out.unsaid


@pytest.mark.parametrize(
    ("format", "model", "options", "named"),
    [
        ("training-args", LLAMA, {**GRPO, "micro_batch_size": 5}, "--num-generations 8: TRL refuses"),
        (
            "accelerate",
            GPT2,
            {
                "engine": "megatron", "gpus": 8, "zero": 1, "shard_group": 4, "precision": "bf16-mixed",
                "recompute": "selective", "seq_len": 64,
            },
            "--shard-group 4: accelerate does not hand on instances",
        ),
    ],
)  # fmt: skip
def test_what_the_tool_would_not_do_is_refused(format: str, model: Model, options: dict[str, Any], named: str) -> None:
    setup = setup_of(options, model)
    assert setup is not None
    with pytest.raises(memcalc.InputError, match=named):
        written(format, setup, model)


def test_overlap_with_tensor_parallelism_is_written() -> None:
    setup = setup_of({"engine": "megatron", "gpus": 4, "tp": 2, "te_workspaces": 4, "seq_len": 64}, LLAMA)
    assert setup is not None
    out = written("megatron", setup, LLAMA)
    assert "--tp-comm-overlap" in out.text.split()
    assert "te_workspaces" not in out.unsaid
