"""What cannot be traced is refused in one line, and nothing is traced before an estimate asks for it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from command import Ran, check_refused, environment, here, write_config
from traces import BART, BLOOM, GPTJ, MAMBA, ROBERTA, traced

import memcalc
from memcalc.tracing import recorder, step


def refused(fields: Any, **options: Any) -> str:
    """The line that an estimate is refused with."""
    with pytest.raises(memcalc.InputError) as error:
        memcalc.estimate(fields, **{"micro_batch_size": 1, "seq_len": 8, **options})
    line = str(error.value)
    assert line.isprintable()
    assert len(line) < 700
    return line


# --- without torch

HIDDEN = """
import sys
for name in {hidden!r}:
    sys.modules[name] = None
from memcalc.cli.main import entry_point
entry_point()
"""


def without(hidden: tuple[str, ...], *arguments: str) -> Ran:
    """Run memcalc as a program that finds none of these libraries."""
    import subprocess

    code = HIDDEN.format(hidden=hidden)
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, env=environment(), timeout=60, check=False
    )
    return Ran(done.returncode, done.stdout.decode(), done.stderr.decode())


@pytest.mark.parametrize("hidden", [("torch",), ("transformers",), ("torch", "transformers")], ids="+".join)
def test_without_torch_or_transformers(hidden: tuple[str, ...], tmp_path: Path) -> None:
    ran = without(hidden, "estimate", "--model", write_config(tmp_path, BART))
    check_refused(ran, "['BartForCausalLM']", "pip install 'memcalc-llm[validate]'")


def test_the_programs_need_neither(tmp_path: Path) -> None:
    ran = without(("torch", "transformers"), "estimate", "--model", "gpt2", "--json")
    assert (ran.status, ran.stderr) == (0, "")


def test_the_extra_is_what_the_tests_run_with() -> None:
    import tomllib

    import torch
    import transformers

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    pinned = dict(pin.split("==") for pin in extras["validate"])
    assert pinned == {"torch": torch.__version__.split("+")[0], "transformers": transformers.__version__}
    assert any(one.startswith(f"{project['name']}[validate") for one in extras["test"])


# --- types and configurations


def test_a_type_that_transformers_does_not_know() -> None:
    line = refused({"model_type": "lama"})
    assert "'lama'" in line
    assert "did you mean llama" in line


def test_a_type_without_a_language_model() -> None:
    assert "no language model" in refused({"model_type": "vit"})


def test_a_configuration_that_transformers_rejects() -> None:
    line = refused({**BART, "decoder_attention_heads": 5})
    assert "cannot build this bart: ValueError: " in line
    assert "num_heads" in line


def test_what_architectures_name_decides() -> None:
    """A class that has a program, or none, is the program; the decoder alone is traced."""
    fields = {name: value for name, value in BART.items() if name != "architectures"}
    for named in (None, [], ["BartForConditionalGeneration"], ["BartModel"], "BartForCausalLM"):
        assert memcalc.load_model({**fields, "architectures": named}).program.source == ""
    assert "BartForCausalLM" in memcalc.load_model(BART).program.source


def test_a_value_that_no_configuration_may_have() -> None:
    assert "d_model" in refused({**BART, "d_model": "wide"})


def test_remote_code_is_never_run() -> None:
    mapped = {"auto_map": {"AutoConfig": "x--y.Config", "AutoModelForCausalLM": "x--y.Model"}}
    assert memcalc.load_model({**BART, **mapped}).num_parameters == memcalc.load_model(BART).num_parameters
    assert "neither memcalc nor transformers" in refused({"model_type": "mine", **mapped})


def test_quantized_weights_of_no_known_method() -> None:
    assert "quantization_config" in refused({**BART, "quantization_config": {"bits": 4}})


# --- runs


def test_a_model_without_gradient_checkpointing() -> None:
    xlnet = {"model_type": "xlnet", "d_model": 32, "n_layer": 1, "n_head": 2, "d_inner": 32, "vocab_size": 50}
    line = refused(xlnet, recompute="full")
    assert line.startswith("--recompute full: ")
    assert line.endswith("; allowed: none")


def test_an_attention_that_the_type_does_not_have() -> None:
    line = refused(traced(BLOOM), attention="sdpa")
    assert line.startswith("--attention sdpa: ")
    assert "allowed: eager" in line


def test_a_loop_over_too_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MOST_OPS", 200)
    line = refused(traced(MAMBA))
    assert line.startswith("--seq-len")
    assert "200 operations" in line


def test_more_tokens_than_positions() -> None:
    line = refused(GPTJ, seq_len=65)
    assert "--seq-len 65" in line
    assert "1 to 64" in line
    assert memcalc.estimate(ROBERTA).setup.seq_len == 64  # of 66 positions: those up to the padding's are not used
    assert "1 to 64" in refused(ROBERTA, seq_len=65)


def test_values_that_depend_on_weights_are_not_made_up() -> None:
    blt = {"model_type": "blt", "patch_in_forward": True}
    assert "cannot be traced" in refused(blt)


# --- when


def test_loading_traces_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def traced(*_: object) -> int:
        raise AssertionError("traced")

    monkeypatch.setattr(step, "step", traced)
    model = memcalc.load_model(BART)
    assert model.num_parameters > 0
    assert here(capsys, "models", write_config(tmp_path, BART)).status == 0
    with pytest.raises(memcalc.InputError, match="traced"):
        memcalc.estimate(model)


def test_a_trace_is_made_once_for_a_workload(monkeypatch: pytest.MonkeyPatch) -> None:
    model = memcalc.load_model(BART)
    first = memcalc.estimate(model, micro_batch_size=1, seq_len=8)
    monkeypatch.setattr(step, "step", None)
    assert memcalc.estimate(model, micro_batch_size=1, seq_len=8, optimizer="sgd").phases["forward"] < first.peak
    with pytest.raises(memcalc.InputError):
        memcalc.estimate(model, micro_batch_size=1, seq_len=9)
