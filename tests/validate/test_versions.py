"""What is said where others ran than the versions that estimates are for."""

from __future__ import annotations

import io
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.distributed import configuration_utils

import memcalc
from memcalc.report.comparison import print_comparison
from memcalc.validate import fake, recording, run
from memcalc.validate.comparison import Comparison, Measured
from memcalc.validate.versions import ESTIMATED, others

LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 100,
         "num_attention_heads": 4}  # fmt: skip
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_key_value_heads": 4, "num_local_experts": 8}
OLDER = {"torch": "2.11.0+cu130", "transformers": "5.17.0", "gpu": "NVIDIA H200"}
NOTE = "ran with torch 2.11.0, transformers 5.17.0; estimates are for torch 2.13.0, transformers 5.23.0"


def test_they_are_those_that_the_tests_pin() -> None:
    project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]
    assert [f"{name}=={version}" for name, version in ESTIMATED.items()] == project["optional-dependencies"]["validate"]


def test_a_line_where_others_ran() -> None:
    assert others(OLDER).startswith(NOTE)
    assert others({"torch": "2.13.0+cpu", "transformers": "5.23.0"}) == others({}) == ""
    assert others({"torch": "2.13.0", "transformers": "5.17.0"}).startswith(
        "ran with torch 2.13.0, transformers 5.17.0"
    )


@pytest.mark.parametrize("environment", [OLDER, dict(ESTIMATED)])
def test_it_is_told(environment: dict[str, str]) -> None:
    report = memcalc.estimate(LLAMA, seq_len=16)
    comparison = Comparison(report, Measured(1, 1, 1, 1, 1, 1, 1, None, environment), "fake")
    text = io.StringIO()
    print_comparison(comparison, text)
    told = recording._summed_up([{"case": {"model": "gpt2"}, "outcome": "measured", **comparison.to_dict()}])
    assert [NOTE in re.sub(r"\s+", " ", text.getvalue()), NOTE in told] == [environment is OLDER] * 2


@pytest.mark.slow
def test_an_older_transformers_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows neither all degrees nor where the experts go."""

    def of_fewer(**degrees: int) -> Any:
        raise TypeError("unexpected keyword argument 'dp_replicate_size'")

    monkeypatch.setattr(configuration_utils, "DistributedConfig", of_fewer)
    assert callable(fake.measure)  # and all that it imports is there
    monkeypatch.setitem(sys.modules, "transformers.distributed.expert_parallel", None)
    monkeypatch.delattr(transformers.distributed, "expert_parallel", raising=False)
    why = f"to be run needs transformers {ESTIMATED['transformers']}, here is {transformers.__version__}; allowed: 1"
    outcomes = [
        run.outcome({"model": model, "engine": "fsdp2", "zero": 3, "gpus": 4, "seq_len": 16, axis: 2}, "fake")
        for model, axis in ((LLAMA, "tp"), (MIXTRAL, "ep"))
    ]
    assert outcomes == [{"outcome": "refused", "why": f"--{axis} 2: {why}"} for axis in ("tp", "ep")]
    assert not torch.distributed.is_initialized()
