"""Adapters and frozen parts of single types, against peft's and transformers' own code."""

from __future__ import annotations

from typing import Any

import pytest
from cases import step_cases
from tuning.tuned_weights import weights_of
from validate.test_fake import T5, same

import memcalc
from memcalc.tuning.default_targets import OF_MAMBA
from memcalc.validate import run

DEBERTA = step_cases("deberta-v2")
MEGATRON_BERT: dict[str, Any] = {
    "model_type": "megatron-bert", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 72,
    "vocab_size": 90, "max_position_embeddings": 40,
}  # fmt: skip


@pytest.mark.parametrize("number", range(len(DEBERTA)))
def test_all_linear_layers_of_deberta(number: int) -> None:
    """Without `legacy` its head begins with a layer that transformers calls the output embeddings."""
    peft = pytest.importorskip("peft")
    import torch

    from memcalc.tracing.modules import configuration, on_meta, quiet

    fields = dict(DEBERTA[number].fields)
    with quiet(), torch.device("meta"):
        model = on_meta(configuration("deberta-v2", {k: v for k, v in fields.items() if k != "model_type"}))
        own: Any = peft.get_peft_model(model, peft.LoraConfig(r=3, target_modules="all-linear")).get_base_model()
    theirs = [(name, list(p.shape), p.requires_grad) for name, p in own.named_parameters()]
    assert weights_of(memcalc.load_model(fields), lora_rank=3, lora_targets="all-linear") == theirs


@pytest.mark.parametrize("number", [0, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "options",
    [{"precision": "bf16"}, pytest.param({"engine": "deepspeed", "zero": 2, "gpus": 2}, marks=pytest.mark.slow)],
)
def test_a_step_of_deberta(number: int, options: dict[str, Any]) -> None:
    pytest.importorskip("peft")
    if "engine" in options:
        pytest.importorskip("deepspeed")
    case = DEBERTA[number]
    workload = {"micro_batch_size": case.batch, "seq_len": case.seq}
    same(run.validate(dict(case.fields), lora_rank=3, lora_targets="all-linear", **workload, **options))


@pytest.mark.parametrize(
    "options", [{"recompute": "full"}, pytest.param({"recompute": "op"}, marks=pytest.mark.slow)], ids=["full", "op"]
)
def test_a_frame_holds_what_no_graph_does(options: dict[str, Any]) -> None:
    """MegatronBertModel makes the token types itself: they live until its forward ends, also where the table of types is frozen
    and saves no indices."""
    same(run.validate(MEGATRON_BERT, freeze="embeddings", precision="bf16", micro_batch_size=2, seq_len=16, **options))


@pytest.mark.slow
def test_each_stack_looks_up_in_its_own_table() -> None:
    """Of BART without tied weights: a leaf, and its gradient, of each stack are left behind. Nobody uses the shared table."""
    (_, case, *_) = step_cases("bart")
    assert case.fields["tie_word_embeddings"] is False
    same(run.validate(dict(case.fields), freeze="embeddings", recompute="full", precision="bf16", seq_len=case.seq))


@pytest.mark.parametrize("family", ["biogpt", pytest.param("falcon", marks=pytest.mark.slow)])
def test_a_given_mask_takes_the_place_of_a_mask_of_ones(family: str) -> None:
    """BioGptModel makes a mask of ones if it is given none, and FalconModel one for its alibi."""
    case = next(case for case in step_cases(family) if family == "biogpt" or case.fields.get("alibi"))
    padded = {"padded": True, "recompute": "full", "precision": "bf16"}
    same(run.validate(dict(case.fields), freeze="embeddings", micro_batch_size=2, seq_len=case.seq, **padded))


@pytest.mark.parametrize("family", sorted(OF_MAMBA))
def test_peft_itself_refuses_all_layers_of_mamba(family: str) -> None:
    fields = dict(step_cases(family)[0].fields)
    with pytest.raises(
        memcalc.InputError, match=f"all-linear: peft refuses out_proj of a {family}, .*allowed: names such"
    ):
        memcalc.estimate(fields, lora_rank=3, lora_targets="all-linear", seq_len=16)
    peft = pytest.importorskip("peft")
    import torch

    from memcalc.tracing.modules import configuration, on_meta, quiet

    with quiet(), torch.device("meta"), pytest.raises(ValueError, match="out_proj"):
        model = on_meta(configuration(family, {k: v for k, v in fields.items() if k != "model_type"}))
        peft.get_peft_model(model, peft.LoraConfig(r=3, target_modules="all-linear"))


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"lora_rank": 4}, marks=pytest.mark.slow)], ids=["all", "adapters"]
)
def test_an_mlp_of_t5_asks_for_its_last_layers_dtype(options: dict[str, Any]) -> None:
    """So ZeRO-3 waits for that layer's weight first, and the first layer's is the last of those that were gathered ahead."""
    pytest.importorskip("deepspeed")
    if options:
        pytest.importorskip("peft")
    zero_3 = {
        "engine": "deepspeed",
        "zero": 3,
        "gpus": 4,
        "param_persistence_threshold": 100,
        "precision": "bf16-mixed",
    }
    model = T5 | {"num_layers": 1, "num_decoder_layers": 1, "d_ff": 88, "vocab_size": 60}
    same(run.validate(model, micro_batch_size=2, seq_len=32, **zero_3, **options))


@pytest.mark.parametrize(
    "options",
    [{"freeze": "embeddings"}, pytest.param({"lora_rank": 4, "lora_targets": "q_proj"}, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("model_type", ["olmo2", pytest.param("flex_olmo", marks=pytest.mark.slow)])
def test_autocast_keeps_the_copy_of_embeddings_that_are_a_leaf(model_type: str, options: dict[str, Any]) -> None:
    """The first product of these layers takes the output of the embeddings itself. It is a leaf that requires a gradient, so
    autocast casts it once (cached_cast), and has the copy until it ends."""
    case = step_cases(model_type)[0]
    workload = {"micro_batch_size": case.batch, "seq_len": case.seq, "recompute": "full", "precision": "bf16-autocast"}
    same(run.validate(dict(case.fields), **workload, **options))
