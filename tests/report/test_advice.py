"""Every proposal, followed, gives what it promises; with a GPU it is what makes the setup fit."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from advised import parsed
from command import here

import memcalc
from memcalc.estimation import report as reports
from memcalc.report.advice import Proposal, advice
from memcalc.report.advice_lines import advice_lines
from memcalc.report.consoles import console_for
from memcalc.report.remedies import remedies
from memcalc.units import show_bytes

A100: dict[str, Any] = {"gpu": "a100-80gb"}
MOST_ESTIMATES = 60


def promised(model: Any, options: dict[str, Any], proposals: list[Proposal]) -> None:
    """Each proposal's flags, added to the options, give its numbers and its verdict."""
    for one in proposals:
        after = memcalc.estimate(model, **options | parsed(one.flags))
        assert (after.peak, after.fits) == (one.peak, one.fits), one.flags
        if one.device is not None:
            assert (after.device, after.headroom) == (one.device, one.headroom), one.flags


# --- what makes it fit


@pytest.mark.parametrize(
    ("model", "options", "among"),
    [
        pytest.param("llama-3-8b", {"gpus": 8, "zero": 2, "seq_len": 8192}, "--kernels fused", id="ZeRO 2"),
        pytest.param("llama-3-8b", {"gpus": 8, "zero": 1, "micro_batch_size": 4}, "--recompute", id="ZeRO 1"),
        pytest.param("llama-3-8b", {"gpus": 8}, "--engine fsdp2 --zero", id="DDP"),
        pytest.param("llama-3-8b", {"gpus": 8, "precision": "bf16-autocast"}, "--engine fsdp2 --zero", id="Trainer"),
        pytest.param("llama-2-70b", {"gpus": 64, "tp": 8, "pp": 2, "seq_len": 4096}, "--zero 1", id="Megatron"),
        pytest.param("llama-3-8b", {}, "--gpus", id="one GPU"),
    ],
)  # fmt: skip
def test_what_makes_it_fit(model: str, options: dict[str, Any], among: str) -> None:
    report = memcalc.estimate(model, **options, **A100)
    assert report.fits is False
    proposals = advice(report)
    assert 1 <= len(proposals) <= 3
    assert all(one.fits for one in proposals)
    assert any(among in one.flags for one in proposals), [one.flags for one in proposals]
    promised(model, options | A100, proposals)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["deepspeed", "fsdp2"])
def test_a_loss_of_a_long_sequence_is_chunked(engine: str) -> None:
    """32 768 tokens of a vocabulary of 152 064 have logits of 18.6 GiB in fp32."""
    options = {"gpus": 8, "zero": 3, "engine": engine, "seq_len": 32768, "recompute": "full"}
    report = memcalc.estimate("qwen2.5-7b", **options, **A100)
    assert report.fits is False
    proposals = advice(report)
    assert proposals[0].flags == "--cross-entropy chunked"
    assert proposals[0].fits
    promised("qwen2.5-7b", options | A100, proposals)


@pytest.mark.slow
def test_what_does_not_suffice_alone_is_combined() -> None:
    """70 B on eight GPUs: 16 of them with recomputation instead of more without, or other training on eight."""
    options = {"gpus": 8, "zero": 3, "engine": "fsdp2", **A100}
    proposals = advice(memcalc.estimate("llama-2-70b", **options))
    gpus = [parsed(one.flags).get("gpus", 8) for one in proposals]
    assert gpus[0] == 16
    assert "--recompute" in proposals[0].flags
    assert all(one.fits for one in proposals)
    promised("llama-2-70b", options, proposals)
    (other,) = (one for one in proposals if "gpus" not in parsed(one.flags))
    assert other is proposals[-1]
    assert "changes the training: bf16 instead of bf16-mixed" in other.costs


def test_recomputed_layers_are_as_few_as_fit() -> None:
    """Of the 40 layers of a stage by fives, an eighth of them; fewer need segments that are given back, at best."""
    options = {"gpus": 64, "tp": 8, "pp": 2, "seq_len": 4096, **A100}
    proposals = advice(memcalc.estimate("llama-2-70b", **options))
    (one,) = (parsed(one.flags) for one in proposals if "--recompute-layers" in one.flags)
    less = one | {"recompute_layers": one["recompute_layers"] - 5}
    verdict = memcalc.estimate("llama-2-70b", **options | less).verdict
    assert verdict is not None and verdict.answer != "fits"


def test_a_change_that_shuts_out_one_that_saves_more_gives_way() -> None:
    """FSDP2 refuses the fused implementation of sgd: it is not for that that a DDP job stays without shards."""
    options: dict[str, Any] = {"gpus": 8, "engine": "ddp", "optimizer": "sgd", "seq_len": 8192, "gpu": "a100-40gb"}
    proposals = advice(memcalc.estimate("mistral-7b", **options))
    assert all(one.fits for one in proposals)
    assert all("--engine fsdp2" in one.flags and "--precision" not in one.flags for one in proposals)
    promised("mistral-7b", options, proposals)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("llama-3.1-405b", {"gpus": 8, "engine": "megatron", "tp": 8, "gpu": "a100-40gb"}),
        ("mixtral-8x7b", {"gpus": 2, "engine": "fsdp2", "seq_len": 8192, "optimizer": "sgd-momentum", **A100}),
    ],
    ids=str,
)
def test_slices_go_with_more_gpus(model: str, options: dict[str, Any]) -> None:
    """Neither more GPUs nor slices alone suffice."""
    proposals = advice(memcalc.estimate(model, **options))
    assert all(one.fits for one in proposals)
    assert any("gpus" in parsed(one.flags) and {"tp", "pp", "ep"} & parsed(one.flags).keys() for one in proposals)
    promised(model, options, proposals)


def test_stages_that_wait_are_a_cost() -> None:
    options: dict[str, Any] = {"gpus": 8, "engine": "megatron", "tp": 8, "gpu": "a100-40gb"}
    (one,) = advice(memcalc.estimate("llama-3.1-405b", **options))
    flags = parsed(one.flags)
    idle = (flags["pp"] - 1) / 1  # of one micro-batch (Narayanan et al. 2021)
    assert f"a pipeline bubble of {idle:.0%} of the ideal time" in one.costs


def test_where_nothing_lowers_the_peak_that_is_said() -> None:
    options: dict[str, Any] = {"gpus": 512, "engine": "fsdp2", "recompute": "full", "kernels": "fused",
                               "seq_len": 131072, "gpu": "t4", "optimizer": "lion", "precision": "bf16"}  # fmt: skip
    report = memcalc.estimate("llama-3-70b", **options)
    assert report.fits is False
    file = io.StringIO()
    console_for(file, 200).print(*advice_lines(report), sep="\n")
    assert "no change that was tried" in file.getvalue()


def test_nothing_helps() -> None:
    """The one proposal is the closest, and the last line says what is missing then."""
    options: dict[str, Any] = {"gpus": 2, "gpu": "t4", "seq_len": 4096}
    model = {"model_type": "llama", "hidden_size": 16384, "intermediate_size": 65536, "num_hidden_layers": 4,
             "num_attention_heads": 128, "vocab_size": 1000000}  # fmt: skip
    proposals = advice(memcalc.estimate(model, **options))
    (one,) = proposals
    assert one.fits is False
    assert one.headroom is not None and one.headroom < 0
    promised(model, options, proposals)
    file = io.StringIO()
    console_for(file, 200).print(*advice_lines(memcalc.estimate(model, **options)), sep="\n")
    assert file.getvalue().rstrip().splitlines()[-1].strip() == f"still {show_bytes(-one.headroom)} too much"


def test_a_bare_number_of_parameters() -> None:
    """Its states can be too much; what it needs besides is not known."""
    options = {"gpus": 8, "zero": 2, **A100}
    report = memcalc.estimate(params="70B", **options)
    assert report.fits is False
    proposals = advice(report)
    assert proposals
    for one in proposals:
        after = memcalc.estimate(params="70B", **options | parsed(one.flags))
        assert (after.peak, after.device, after.fits) == (one.peak, one.device, one.fits)
        assert after.fits is not False


def test_what_fits_with_room_needs_no_advice() -> None:
    assert advice(memcalc.estimate("llama-7b", gpus=8, zero=3, **A100)) == []


def test_the_printed_command_can_be_followed(capsys: pytest.CaptureFixture[str]) -> None:
    """The flags come after the others on the command line, and win."""
    command = ("estimate", "-m", "llama-3-8b", "--gpus", "8", "--gpu", "a100-80gb", "--json")
    for one in advice(memcalc.estimate("llama-3-8b", gpus=8, gpu="a100-80gb")):
        document = json.loads(here(capsys, *command, *one.flags.split()).stdout)
        assert (document["memory"]["device"], document["fit"]["fits"]) == (one.device, one.fits)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("llama-3-8b", {"gpus": 8}),
        ("llama-3-8b", {"gpus": 4, "zero": 3, "engine": "fsdp2", "gpu": "rtx4090"}),
        ("gpt2-xl", {"gpu": "t4", "micro_batch_size": 8}),
    ],
    ids=str,
)
def test_a_search_is_short(model: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    report = memcalc.estimate(model, **A100 | options)
    made: list[Any] = []
    ranks = reports.ranks
    monkeypatch.setattr(reports, "ranks", lambda model, setup, **how: made.append(setup) or ranks(model, setup, **how))
    assert advice(report)
    assert len(made) == len(set(made)) <= MOST_ESTIMATES


@pytest.mark.parametrize(("seq_len", "widest"), [(2048, None), (4096, 2), (16384, 8), (1 << 20, 64)])
def test_a_sequence_is_shared_where_it_is_long(seq_len: int, widest: int | None) -> None:
    """Each rank keeps 2048 tokens at least: slices of a short sequence are no one's choice."""
    report = memcalc.estimate("llama-3-8b", gpus=64, engine="fsdp2", seq_len=seq_len)
    ladders = [remedy.ladder for remedy in remedies(report) if remedy.kind == "cp"]
    assert [ladder[-1]["cp"] for ladder in ladders] == ([] if widest is None else [widest])


# --- without a GPU to fit


def test_the_mask_of_long_sequences_is_named() -> None:
    """131 072 tokens have a mask of 16 GiB."""
    options = {"gpus": 64, "tp": 8, "cp": 8, "zero": 1, "seq_len": 131072}
    (change,) = (one for one in advice(memcalc.estimate("llama-3-8b", **options)) if "mask" in one.flags)
    assert change.flags == "--no-attention-mask-in-dataloader"
    assert change.peak == memcalc.estimate("llama-3-8b", **options, attention_mask_in_dataloader=False).peak


def test_a_loss_is_named_without_a_gpu() -> None:
    options = {"gpus": 8, "zero": 3, "engine": "fsdp2", "seq_len": 32768, "recompute": "full"}
    assert advice(memcalc.estimate("qwen2.5-7b", **options))[0].flags == "--cross-entropy chunked"


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("llama-7b", {"gpus": 64, "engine": "fsdp2", "zero": 2, "shard_group": 8}),
        ("llama-7b", {"gpus": 8, "engine": "fsdp2", "zero": 3, "grad_dtype": "bf16"}),
        ("llama-7b", {"gpus": 8, "engine": "fsdp2", "zero": 2, "pp": 4, "global_batch_size": 32, "micro_batch_size": 2}),
        ("llama-7b", {"gpus": 8, "zero": 1, "engine": "deepspeed", "attention": "eager", "micro_batch_size": 2}),
        ("llama-7b", {"gpus": 8, "tp": 2, "micro_batch_size": 2}),
        ("mixtral-8x7b", {"gpus": 16, "tp": 2, "ep": 4, "pp": 2, "etp": 1, "zero": 1, "global_batch_size": 16}),
    ],
    ids=str,
)  # fmt: skip
def test_a_change_leaves_what_it_promises(model: str, options: dict[str, Any]) -> None:
    changes = advice(memcalc.estimate(model, **options))
    assert changes
    assert all(change.fits is None for change in changes)
    promised(model, options, changes)


def test_gradients_of_accumulation_can_be_reduced_with_each_micro_batch() -> None:
    report = memcalc.estimate("llama-2-7b", gpus=4, engine="fsdp2", zero=3, seq_len=512, global_batch_size=16)
    best = next(one for one in advice(report) if "--sync" in one.flags)
    sync = memcalc.estimate(report.model, **{**report.setup._asdict(), "sync_each_micro_batch": True})
    assert (best.flags, best.peak) == ("--sync-each-micro-batch", sync.peak)


def test_chunks_without_layers_have_advice_too() -> None:
    """The first and the last chunk of an interleaved pipeline may be the embedding and the head alone."""
    model = {"model_type": "gpt2", "n_layer": 6, "n_embd": 64, "n_head": 4, "vocab_size": 128, "n_positions": 64}
    piped = {"engine": "megatron", "gpus": 8, "pp": 4, "schedule": "interleaved", "virtual_stages": 2}
    report = memcalc.estimate(model, **piped, gpu="1GB", global_batch_size=32, seq_len=64)
    assert isinstance(report.to_dict()["advice"], list)
