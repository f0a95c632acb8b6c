"""Refusals and notes in plain words: they name what was given, and what works."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from command import LLAMA

import memcalc
from memcalc.cli.main import main
from memcalc.decisions.fit import fit
from memcalc.layout.collectives import Collective

NETWORK: dict[str, Any] = {
    "input": [3, 32, 32],
    "layers": [{"conv2d": {"out": 8, "kernel": 3, "stride": 2}}, "relu", "flatten", {"linear": 10}],
}


def refused(run: Any, *args: Any, **options: Any) -> str:
    with pytest.raises(memcalc.InputError) as found:
        run(*args, **options)
    assert "\n" not in str(found.value)
    return str(found.value)


@pytest.mark.parametrize("solve", ["layers", "params", "lora-rank"])
def test_fit_of_a_network_names_what_it_solves_for(solve: str) -> None:
    said = refused(fit, solve, memcalc.load_layers(NETWORK), gpu="24GB")
    assert said.startswith(f"--solve {solve}: ")
    assert said.endswith("; allowed: micro-batch-size, gpus")


@pytest.mark.parametrize("part", ["first:2", "last:1", "all-but:first:1"])
def test_layers_without_numbers_are_frozen_by_name(part: str) -> None:
    said = refused(memcalc.estimate, memcalc.load_layers(NETWORK), freeze=part)
    assert said == f"--freeze {part}: this model has no stack of numbered layers; allowed: modules by name, such as 0"
    assert memcalc.estimate(memcalc.load_layers(NETWORK), freeze="0").model.trainable_parameters > 0


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("stride", 0, "it should be a whole number from 1 up, or a list of such numbers"),
        ("kernel", 1.5, "it should be a whole number, or a list of such numbers"),
        ("stride", [1, "x"], "it should be a whole number, or a list of such numbers"),
        ("padding", -1, "it should be a whole number from 0 up, or a list of such numbers"),
    ],
)
def test_a_field_of_a_layer(field: str, value: Any, words: str) -> None:
    network = deepcopy(NETWORK)
    network["layers"][0]["conv2d"][field] = value
    said = refused(memcalc.load_layers, network)
    assert f"layer 1 conv2d: field `{field}` is {value!r}; {words}" in said


def test_an_input_is_given_once() -> None:
    assert memcalc.load_layers(NETWORK, input=[3, 32, 32]).num_parameters > 0
    said = refused(memcalc.load_layers, NETWORK, input=[3, 64, 64])
    assert said == "--layers: input is [3, 32, 32] in it and [3, 64, 64] beside it; give one"
    assert "loss is 'mse' in it" in refused(memcalc.load_layers, NETWORK | {"loss": "mse"}, loss="cross-entropy")


def test_a_plan_has_no_grids() -> None:
    said = refused(memcalc.plan, LLAMA, gpus=4, gpu="a100-40gb", engine="colossalai", global_batch_size=8)
    assert said.startswith("--engine colossalai: memcalc plan has no bounds")
    assert said.endswith(
        "allowed: --engine none, ddp, deepspeed, fsdp2, megatron, fsdp1, or memcalc estimate --engine colossalai"
    )


@pytest.mark.parametrize(
    ("model", "options", "allowed"),
    [
        (LLAMA, {"schedule": "naive"}, "fsdp2 with --zero 2"),
        (LLAMA, {"schedule": "zero-bubble"}, "fsdp2 with --zero 2"),
        (LLAMA, {"schedule": "gpipe"}, "megatron, fsdp2 with --zero 2"),
        (LLAMA, {"schedule": "gpipe", "zero": 2}, "fsdp2"),
        (LLAMA, {}, "megatron, deepspeed"),
        ("t5-small", {}, "fsdp2 with --zero 2"),
    ],
)
def test_engines_that_split_a_model(model: Any, options: dict[str, Any], allowed: str) -> None:
    said = refused(memcalc.estimate, model, engine="none", gpus=2, pp=2, **options)
    assert said == f"--engine none: runs on 1 GPU, not on 2; allowed: {allowed}"


@pytest.mark.parametrize("options", [{}, {"zero": 3}])
def test_a_schedule_in_halves_names_itself(options: dict[str, Any]) -> None:
    untied = LLAMA | {"num_hidden_layers": 4, "tie_word_embeddings": False}
    how = {"engine": "fsdp2", "gpus": 2, "pp": 2, "global_batch_size": 4, **options}
    said = refused(memcalc.estimate, untied, schedule="zbv", **how)
    assert said.startswith("--schedule zbv: with --zero 3, the default of fsdp2, torch takes")
    assert said.endswith("; allowed: with --zero 2")
    assert memcalc.estimate(untied, schedule="zbv", **how | {"zero": 2}).peak > 0


def test_vllm_needs_ampere_for_bf16() -> None:
    said = refused(memcalc.infer, "llama-7b", engine="vllm", gpu="v100-32gb")
    assert said.startswith("--dtype bf16: vLLM computes in bf16 from compute capability 8.0 up, and v100-32gb has 7.0")
    for allowed in ({"dtype": "fp16", "gpu": "v100-32gb"}, {"gpu": "a100-40gb"}, {"gpu": "32GB"}, {}):
        assert memcalc.infer("llama-7b", engine="vllm", **allowed).to_dict()["weights"] > 0


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("mamba-2.8b", "--kv-dtype fp8 changes nothing: a mamba keeps states, and no keys and values"),
        ("jamba-v0.1", "--kv-dtype fp8 is that of keys and values; the states of 28 layers keep their dtypes"),
    ],
)
def test_states_have_no_dtype_of_keys(model: str, words: str) -> None:
    assert words in memcalc.infer(model, kv_dtype="fp8").to_dict()["notes"]
    assert words not in memcalc.infer(model).to_dict()["notes"]


def test_a_reduce_is_a_collective_of_the_document() -> None:
    """Its wire is its payload: each rank passes it on once."""
    report = memcalc.estimate(LLAMA, engine="data-parallel", gpus=2, micro_batch_size=2)
    reduced = [c for c in report.to_dict()["communication"]["items"] if c["collective"] == "reduce"]
    assert reduced
    assert all(isinstance(c, Collective) for c in report.collectives)
    assert all(c["wire"] == c["payload"] for c in reduced)


def test_stages_of_an_encoder_are_not_run_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--gpus", "2", "--pp", "2", "--zero", "3", "--schedule", "gpipe", "-s", "8", "--backend", "cuda"]
    assert main(["validate", "t5-small", *options]) == 2
    said = capsys.readouterr().err
    assert said == (
        "memcalc: --pp 2: for a t5 on a GPU is not modelled by this version; allowed: --backend fake, or 1\n"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["estimate", "llama-7b", "--zer", "3"], "--zer: unknown option; did you mean --zero"),
        (["estimate", "llama-7b", "--zero"], "--zero: requires an argument"),
        (["estimate", "llama-7b", "--json=3"], "--json: does not take a value"),
        (["estimate", "a", "b"], "b: too many words; allowed: memcalc estimate [OPTIONS] [MODEL]; several models"),
        (["quiz", "a"], "a: too many words; allowed: memcalc quiz [OPTIONS]"),
        (
            ["infer", "gpt2", "--zero-inference", "--gpu", "t4"],
            "--zero-inference: requires an argument, and --gpu is an option",
        ),
        (
            ["estimate", "gpt2", "--recompute", "--gpus", "8"],
            "--recompute: requires an argument, and --gpus is an option",
        ),
        (
            ["estimate", "llama-7b", "-s", "4kk"],
            "--seq-len 4kk: allowed: a whole number from 1 to 100000000 (4k is 4096)",
        ),
    ],
)
def test_a_command_line_that_is_misspelt(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    shown = capsys.readouterr()
    assert not shown.out
    assert len(shown.err.splitlines()) == 1
    assert shown.err.startswith(f"memcalc: {said}")


def test_a_configuration_is_named_by_its_path(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({**LLAMA, "hidden_size": 65}), encoding="utf-8")
    assert refused(memcalc.estimate, str(file)).startswith(f"--model {file}: hidden_size 65 is not divisible by ")


def test_an_optimizer_of_whole_matrices_names_those_that_run() -> None:
    said = refused(memcalc.estimate, LLAMA, gpus=2, zero=3, optimizer="muon")
    assert said.startswith(
        "--optimizer muon: needs whole matrices, and DeepSpeed's partitions are flat; allowed: adamw, "
    )
    assert memcalc.estimate(LLAMA, gpus=2, zero=3, optimizer=said.rpartition(", ")[2]).peak > 0
