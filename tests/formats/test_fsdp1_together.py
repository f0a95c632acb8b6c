"""Files of FSDP version 1: the engine that they become, beside other files and options."""

from __future__ import annotations

from typing import Any

import pytest
from accelerate_contents import fsdp

import memcalc
from memcalc.estimation.emitted import written

GPT2: dict[str, Any] = {"seq_len": 32}


def setup(keys: dict[str, Any], **options: Any) -> Any:
    return memcalc.estimate("gpt2", accelerate=fsdp(fsdp_version=1, **keys), **GPT2, **options)


@pytest.mark.parametrize(
    ("keys", "options"),
    [
        ({}, {"zero": 3, "use_orig_params": True, "backward_prefetch": "none", "forward_prefetch": False}),
        ({"fsdp_sharding_strategy": "SHARD_GRAD_OP"}, {"zero": 2}),
        ({"fsdp_use_orig_params": "false"}, {"use_orig_params": False}),
        ({"fsdp_backward_prefetch": "BACKWARD_PRE"}, {"backward_prefetch": "pre"}),
        ({"fsdp_backward_prefetch_policy": "x", "fsdp_backward_prefetch": 2}, {"backward_prefetch": "post"}),
        ({"fsdp_forward_prefetch": True}, {"forward_prefetch": True}),
        ({}, {"precision": "bf16-mixed", "grad_dtype": "bf16"}),
    ],
)
def test_a_file_becomes_fsdp1(keys: dict[str, Any], options: dict[str, Any]) -> None:
    report = setup(keys)
    assert report.setup.engine == "fsdp1"
    assert {name: getattr(report.setup, name) for name in options} == options
    assert not any("estimated as FSDP2" in note for note in report.to_dict()["notes"])


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"lora_rank": 8}, "with --lora-rank 8"),
        ({"freeze": "norms"}, "with --freeze norms"),
        ({"gpus": 1}, "where one GPU has all shards"),
        ({"training_args": {"per_device_train_batch_size": 1, "use_peft": True, "lora_r": 4}}, "with --lora-rank 4"),
    ],
)
def test_what_is_not_modelled_is_fsdp2_and_says_so(options: dict[str, Any], why: str) -> None:
    report = setup({}, **options)
    assert (report.setup.engine, report.setup.use_orig_params) == ("fsdp2", None)
    assert any(f"FSDP1, estimated as FSDP2 {why}." in note for note in report.to_dict()["notes"])


def test_an_option_wins_over_the_file() -> None:
    assert setup({}, engine="fsdp2").setup.engine == "fsdp2"
    assert setup({}, backward_prefetch="pre").setup.backward_prefetch == "pre"


@pytest.mark.parametrize(
    "options",
    [
        {"gpus": 8},
        {"gpus": 16, "shard_group": 8, "zero": 2},
        {
            "gpus": 4,
            "gpus_per_node": 4,
            "use_orig_params": False,
            "backward_prefetch": "none",
            "forward_prefetch": True,
        },
        {"gpus": 8, "recompute": "full", "grad_dtype": "bf16"},
    ],
)
def test_what_is_written_is_read_back(options: dict[str, Any]) -> None:
    import yaml

    report = memcalc.estimate("gpt2", engine="fsdp1", **{"grad_dtype": "bf16", **GPT2, **options})
    text = written("accelerate", report.setup, report.model).text
    again = memcalc.estimate("gpt2", accelerate=yaml.safe_load(text), **GPT2)
    assert again.setup == report.setup
