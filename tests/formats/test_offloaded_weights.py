"""Files that offload weights: what is read, and what a written file reads back as."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from command import here

import memcalc

SMALL = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 500}


def kept(report: memcalc.Report) -> tuple[str, str, str]:
    setup = report.setup
    return setup.engine, setup.offload_params, setup.offload_optimizer


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"deepspeed": {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": True}}}},
         ("deepspeed", "cpu", "none")),
        ({"deepspeed": {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "buffer_count": 5},
                                              "offload_optimizer": {"device": "cpu"}}, "gradient_clipping": 1.0}},
         ("deepspeed", "cpu", "cpu")),
        ({"training_args": {"bf16": True, "fsdp": "full_shard auto_wrap offload", "fsdp_config": {"version": 2}}},
         ("fsdp2", "cpu", "cpu")),
        ({"accelerate": {"distributed_type": "FSDP", "mixed_precision": "bf16", "num_processes": 4, "fsdp_config": {
            "fsdp_version": 2, "fsdp_offload_params": True, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}}},
         ("fsdp2", "cpu", "cpu")),
    ],
)  # fmt: skip
def test_what_is_read(files: dict[str, Any], found: tuple[str, str, str]) -> None:
    assert kept(memcalc.estimate(SMALL, gpus=4, seq_len=16, **files)) == found


@pytest.mark.parametrize(
    ("options", "form"),
    [
        (("--engine", "deepspeed", "--zero", "3", "--offload-params", "cpu"), "deepspeed"),
        (("--engine", "deepspeed", "--zero", "3", "--offload-params", "cpu"), "accelerate"),
        (("--engine", "fsdp2", "--offload-params", "cpu"), "accelerate"),
        (("--engine", "fsdp2", "--offload-params", "cpu"), "training-args"),
    ],
)
def test_a_written_file_says_it(
    options: tuple[str, ...], form: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ran = here(capsys, "emit", form, "gpt2", "-g", "4", *options)
    assert ran.status == 0, ran.stderr
    content = json.loads(ran.stdout) if form == "deepspeed" else yaml.safe_load(ran.stdout)
    given = memcalc.estimate("gpt2", gpus=4, **{form.replace("-", "_"): content})
    optimizer = "cpu" if "fsdp2" in options else "none"
    assert kept(given) == (options[1], "cpu", optimizer)
