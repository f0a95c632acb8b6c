"""torchrun's command line of a setup: its own parser starts as many processes, and what is unsaid makes the setup."""

from __future__ import annotations

import shlex
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from records import examples

import memcalc
from memcalc.errors import InputError
from memcalc.formats.torchrun_writer import write
from memcalc.inputs.model import Model
from memcalc.inputs.options import check_options
from memcalc.registry import ENGINES
from memcalc.setup.resolved import resolve
from memcalc.setup.setup import Setup

EXAMPLES = settings(max_examples=examples(60), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def of(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


OPTIONS = {
    "gpus_per_node": of(8, 4),
    "tp": of(1, 2),
    "pp": of(1, 2),
    "cp": of(1, 2),
    "ep": of(1, 2),
    "zero": of(0, 1, 2, 3),
    "shard_group": of(None, 2),
    "sequence_parallel": of(None, True, False),
    "schedule": of("1f1b", "gpipe"),
    "pp_rank": of(None, 0, 1),
    "micro_batch_size": of(1, 2),
    "global_batch_size": of(None, 64),
    "seq_len": of(None, 512),
    "precision": of("bf16-mixed", "fp32", "bf16", "bf16-autocast"),
    "grad_dtype": of(None, "bf16"),
    "optimizer": of("adamw", "sgd", "lion"),
    "optimizer_implementation": of(None, "fused"),
    "clip_grad_norm": st.booleans(),
    "recompute": of("none", "selective", "op", "full"),
    "recompute_layers": of(None, 2),
    "reduce_bucket_size": of(None, 10**6),
    "gradient_accumulation_fusion": of(None, False),
    "sync_each_micro_batch": of(None, True),
    "attention": of(None, "eager", "sdpa", "flash"),
    "cross_entropy": of(None, "eager", "chunked", "vocab-parallel"),
    "padded": st.booleans(),
    "kernels": of(None, "fused"),
    "freeze": of(None, "embeddings"),
    "lora_rank": of(0, 8),
    "quantize": of("none", "nf4"),
    "task": of("pretrain", "sft", "dpo"),
    "offload_optimizer": of("none", "cpu"),
    "gpu": of(None, "h100-80gb"),
    "gemm_efficiency": of(None, 0.5),
}


@cache
def model_of(name: str) -> Model:
    return memcalc.load_model(name)


def resolved(model: Model, options: dict[str, Any]) -> Setup:
    return resolve(check_options(options), model)


@st.composite
def setups(draw: st.DrawFn) -> tuple[Model, Setup]:
    """A setup that memcalc takes, with each option that goes with those before it."""
    model = model_of(draw(of("llama-3-8b", "qwen3-30b-a3b", "gpt2")))
    options: dict[str, Any] = {"engine": draw(of(None, *ENGINES)), "gpus": draw(of(1, 2, 8, 64))}
    setup = None
    for option in draw(st.permutations(["gpus_per_node", *OPTIONS])):
        tried = {**options, option: draw(OPTIONS[option])}
        try:
            setup, options = resolved(model, tried), tried
        except InputError:
            options = tried if setup is None and option == "zero" else options
    if setup is None:
        reject()
    return model, setup


def parsed(text: str) -> Any:
    run = pytest.importorskip("torch.distributed.run")
    command = shlex.split(text, comments=True)
    assert command[0] == "torchrun"
    assert all(line.startswith(("#", "torchrun ")) for line in text.splitlines())
    arguments = run.get_args_parser().parse_args(command[1:])
    least, most = run.parse_min_max_nnodes(arguments.nnodes)
    assert (least, arguments.training_script, arguments.training_script_args) == (most, "train.py", [])
    return least, run.determine_local_world_size(arguments.nproc_per_node)


@EXAMPLES
@given(setups())
def test_torchrun_starts_as_many_processes(case: tuple[Model, Setup]) -> None:
    model, setup = case
    written = write(setup, model)
    nodes, processes = parsed(written.text)
    assert nodes * processes == setup.gpus
    options = {"gpus": nodes * processes} | ({"gpus_per_node": processes} if nodes > 1 else {})
    assert not options.keys() & written.unsaid.keys()
    assert resolved(model, {**options, **{name: getattr(setup, name) for name in written.unsaid}}) == setup


@pytest.mark.parametrize(
    ("options", "command"),
    [
        ({}, "torchrun --nnodes=1 --nproc-per-node=1 train.py\n"),
        ({"gpus": 8}, "torchrun --nnodes=1 --nproc-per-node=8 train.py\n"),
        (
            {"gpus": 32},
            "# On each of the 4 nodes, with --node-rank (0 to 3) and the --master-addr of node 0.\n"
            "torchrun --nnodes=4 --nproc-per-node=8 train.py\n",
        ),
        ({"gpus": 32, "gpus_per_node": 72}, "torchrun --nnodes=1 --nproc-per-node=32 train.py\n"),
    ],
)
def test_commands(options: dict[str, Any], command: str) -> None:
    model = model_of("llama-3-8b")
    assert write(resolved(model, options), model).text == command


def test_nodes_that_are_not_full_are_refused() -> None:
    model = model_of("llama-3-8b")
    with pytest.raises(InputError, match=r"--gpus 12: torchrun starts as many processes on every node, of 8 GPUs"):
        write(resolved(model, {"gpus": 12}), model)


def test_what_follows_from_other_options_is_not_unsaid() -> None:
    model = model_of("llama-3-8b")
    unsaid = write(resolved(model, {"gpus": 16, "tp": 2, "engine": "megatron"}), model).unsaid
    assert {"tp", "engine", "seq_len"} <= unsaid.keys()
    assert not {"dp", "shard_group", "etp", "global_batch_size", "sequence_parallel", "kernels"} & unsaid.keys()
    assert unsaid["tp"] == "the script decides it"
