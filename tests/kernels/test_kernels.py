"""The choice of kernels and of the loss: what goes together, what is refused, and profiles that know of it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from command import LLAMA, here

import memcalc
from memcalc.core.dims import evaluate
from memcalc.core.dtypes import bf16
from memcalc.families import FAMILIES, supporting
from memcalc.kernels import TRANSFORMERS, choose, losses, refusal
from memcalc.report.advice import advice
from memcalc.tape.profile import Choices, Profile, full_profile, profile

if TYPE_CHECKING:
    from collections.abc import Iterable

GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 300}


def setup(model: Any, **options: Any) -> dict[str, Any]:
    return memcalc.estimate(model, **options).to_dict()["setup"]


def refused(model: Any, **options: Any) -> str:
    with pytest.raises(memcalc.InputError) as error:
        memcalc.estimate(model, **options)
    line = str(error.value)
    assert line.isprintable()
    return line


# --- defaults


@pytest.mark.parametrize(
    ("kernels", "loss"), [(None, "eager"), ("hf", "eager"), ("fused", "fused"), ("megatron", "vocab-parallel")]
)
def test_the_loss_is_as_the_kernels_say(kernels: str | None, loss: str) -> None:
    resolved = setup(LLAMA, kernels=kernels)
    assert (resolved["kernels"], resolved["cross_entropy"]) == (kernels or "hf", loss)


def test_the_default_replaces_nothing() -> None:
    assert choose("llama", "hf", "eager") is TRANSFORMERS
    assert TRANSFORMERS.replaced == ()
    given = memcalc.estimate(LLAMA, kernels="hf", cross_entropy="eager").to_dict()
    assert given == memcalc.estimate(LLAMA).to_dict()


def test_a_bare_size_has_no_kernels() -> None:
    assert setup(None, params="7B")["cross_entropy"] is None


@pytest.mark.parametrize("kernels", ["hf", "fused", "megatron"])
def test_every_loss_of_every_kernels_runs(kernels: str) -> None:
    peaks: dict[str, int] = {}
    for loss in losses(kernels, "llama"):
        report = memcalc.estimate(LLAMA | {"vocab_size": 5000}, kernels=kernels, cross_entropy=loss, precision="bf16")
        assert report.setup.cross_entropy == loss
        assert sum(item.at_peak for item in report.items) == report.peak
        peaks[loss] = report.phases["forward"]
    assert len(set(peaks.values())) == len(peaks)


def test_rows_say_where_they_were_read() -> None:
    for kernels, source in (("fused", "Liger-Kernel 0.8.5"), ("megatron", "Megatron-Core 0.16.1")):
        items = memcalc.estimate(LLAMA, kernels=kernels).items
        saved = [item for item in items if item.component == "saved_activations"]
        assert saved
        assert all(source in item.source and item.basis == "modelled" for item in saved)


def test_the_table_names_them(capsys: pytest.CaptureFixture[str]) -> None:
    shown = " ".join(here(capsys, "estimate", "-m", "llama-3-8b", "--kernels", "fused").stdout.split())
    assert "fused kernels · fused cross-entropy" in shown
    assert "kernels" not in here(capsys, "estimate", "-m", "llama-3-8b").stdout.split("Memory per GPU")[0]


def test_advice_keeps_the_kernels() -> None:
    options: dict[str, Any] = {"kernels": "fused", "seq_len": 8192, "precision": "bf16", "global_batch_size": 4}
    report = memcalc.estimate("llama-3-8b", **options, micro_batch_size=4)
    changes = {change.flags: change.peak for change in advice(report)}
    assert changes["--micro-batch-size 2"] == memcalc.estimate("llama-3-8b", **options, micro_batch_size=2).peak


# --- what is refused


@pytest.mark.parametrize(
    ("model", "options", "line"),
    [
        ("gpt2", {"kernels": "fused"}, "--kernels fused: Liger-Kernel leaves gpt2 as it is"),
        ("mixtral-8x7b", {"kernels": "fused"}, "its kernels for it are not modelled; allowed: hf"),
        (LLAMA | {"hidden_act": "gelu"}, {"kernels": "fused"}, "they compute silu or swish, and the model's activation is gelu"),
        (LLAMA | {"intermediate_size": 65537}, {"kernels": "fused"}, "rows of up to 65536, intermediate_size is 65537"),
        ("gpt2", {"cross_entropy": "fused"}, "--cross-entropy fused: not with kernels hf for gpt2; allowed: eager, chunked"),
        ("gemma-2-2b", {"cross_entropy": "chunked"}, "allowed: eager, fused"),
        ("llama-7b", {"cross_entropy": "vocab-parallel"}, "allowed: eager, fused, chunked"),
        ("llama-7b", {"kernels": "fused", "recompute": "selective"}, "--recompute selective: recomputes core attention"),
        ("llama-7b", {"recompute": "selective"}, "--recompute selective: recomputes core attention"),
        ("llama-7b", {"kernels": "megatron", "cross_entropy": "eager"}, "allowed: vocab-parallel, vocab-parallel-fused, fused"),
        ("pythia-70m", {"kernels": "megatron"}, "--kernels megatron: not modelled for gpt_neox, only for llama, mistral"),
        (GPT2 | {"activation_function": "relu"}, {"kernels": "megatron"}, "the model's activation is relu; allowed: hf"),
        ("llama-7b", {"kernels": "megatron", "padded": True}, "--kernels megatron: with a padding mask is not modelled"),
        ("llama-7b", {"kernels": "fused", "precision": "bf16-autocast"}, "--kernels fused: under autocast (precision bf16-a"),
        ("gpt2", {"cross_entropy": "chunked", "precision": "fp16-autocast"}, "fp16-autocast) is not modelled by this"),
        ("llama-7b", {"kernels": "megatron", "precision": "fp32"}, "need 16-bit inputs, and precision is fp32; allowed: hf"),
        ("llama-7b", {"kernels": "megatron", "attention": "eager", "seq_len": 8192}, "--attention eager: Megatron's fused"),
        ("llama-7b", {"kernels": "megatron", "attention": "eager", "seq_len": 66}, "not 66 tokens and 32; allowed: sdpa"),
        (GPT2, {"kernels": "megatron", "attention": "eager", "seq_len": 64}, "a multiple of 8 heads"),
    ],
)  # fmt: skip
def test_refused_by_name(model: Any, options: dict[str, Any], line: str) -> None:
    assert line in refused(model, **options)


@pytest.mark.parametrize(
    ("kernels", "model_types"),
    [("fused", supporting(lambda s: s.liger)), ("megatron", supporting(lambda s: s.megatron_kernels))],
)
def test_every_model_type_has_them_or_is_refused(kernels: str, model_types: Iterable[str]) -> None:
    assert set(model_types) <= set(FAMILIES)
    for model_type in FAMILIES:
        if model_type in model_types:
            memcalc.estimate({"model_type": model_type}, kernels=kernels, seq_len=32)
        else:
            assert model_type in str(refusal(kernels, model_type, None))


def test_the_document_has_them(capsys: pytest.CaptureFixture[str]) -> None:
    ran = here(capsys, "estimate", "-m", "gpt2", "--kernels", "megatron", "--recompute", "selective", "--json")
    resolved = json.loads(ran.stdout)["setup"]
    assert (resolved["kernels"], resolved["recompute"]) == ("megatron", "selective")


# --- profiles


def peaks(of: Profile, batch: int, seq: int) -> tuple[int, ...]:
    return (
        max(evaluate(moment.poly, batch, seq) for moment in of.forward),
        max(evaluate(moment.poly, batch, seq) for moment in of.backward),
        max(evaluate(moment.poly, batch, seq) + moment.gradients for moment in of.backward),
        evaluate(of.saved.poly, batch, seq),
    )


DEEP_LLAMA = LLAMA | {"num_hidden_layers": 12}
DEEP_GPT2 = GPT2 | {"n_layer": 11}


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(
    ("config", "kernels", "loss", "attention"),
    [
        *((DEEP_LLAMA, "fused", loss, "sdpa") for loss in losses("fused", "llama")),
        *((DEEP_LLAMA, "megatron", loss, "sdpa") for loss in losses("megatron", "llama")),
        *((DEEP_GPT2, "megatron", "vocab-parallel", kind) for kind in ("sdpa", "eager")),
        (DEEP_GPT2, "hf", "chunked", "sdpa"),
    ],
)
def test_a_profile_equals_the_full_run(
    config: dict[str, Any], kernels: str, loss: str, attention: str, recompute: str
) -> None:
    if recompute == "selective" and kernels != "megatron":
        return
    program = memcalc.load_model(config).program
    chosen = choose(config["model_type"], kernels, loss, selective=recompute == "selective")
    choices = Choices(bf16, attention, recompute == "full", False, chosen)
    made, full = (kind(program, choices, 2, 64) for kind in (profile, full_profile))
    assert peaks(made, 2, 64) == peaks(full, 2, 64)


@pytest.mark.parametrize("loss", ["fused", "chunked"])
def test_a_profile_is_not_used_where_chunks_are_others(loss: str) -> None:
    """Sizes of chunks are powers of two: no polynomial in batch and seq."""
    model = memcalc.load_model(LLAMA | {"vocab_size": 1000})
    for batch, seq in ((1, 64), (1, 100), (2, 64), (3, 500), (1, 1), (4, 33)):
        options = {"cross_entropy": loss, "micro_batch_size": batch, "seq_len": seq, "precision": "bf16"}
        again, fresh = memcalc.estimate(model, **options), memcalc.estimate(LLAMA | {"vocab_size": 1000}, **options)
        assert again.phases == fresh.phases
    chunks = 2 + len(Choices._fields)  # behind the name of the key, the choices and their hooks' type
    assert len({key[chunks] for key in model.profiles if key[0] == "profile"}) > 2
