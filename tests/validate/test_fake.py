"""`memcalc validate --backend fake`: transformers' code and torch's engines without data, beside the estimate.

Equality here says that the command measures what the estimate means. What is measured is checked against tests/oracle.py and
tests/fsdp2_oracle.py, whose trackers are other code.
"""

from __future__ import annotations

from typing import Any

import oracle
import pytest
import torch
from cases import step_cases
from fsdp2_oracle import sharded_step
from validated import measure, validate

import memcalc
from memcalc.engines.ranks import ranks
from memcalc.optimizers import load_optimizer
from memcalc.validate import run
from memcalc.validate.comparison import Comparison

MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral", "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 301,
}  # fmt: skip
LLAMA = {"model_type": "llama", "hidden_size": 96, "intermediate_size": 200, "num_hidden_layers": 3, "vocab_size": 700,
         "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 24}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128, "vocab_size": 500}
QWEN3 = {"model_type": "qwen3", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "vocab_size": 500,
         "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32, "tie_word_embeddings": True}  # fmt: skip
DEEPSEEK = {"model_type": "deepseek_v3", "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
            "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 8,
            "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
            "vocab_size": 300, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
            "v_head_dim": 16}  # fmt: skip
T5 = {"model_type": "t5", "d_model": 64, "d_kv": 12, "d_ff": 96, "num_layers": 2, "num_heads": 4, "vocab_size": 100}
BART = {"model_type": "bart", "d_model": 64, "encoder_layers": 2, "decoder_layers": 3, "encoder_ffn_dim": 96, "vocab_size": 100,
        "decoder_ffn_dim": 80, "encoder_attention_heads": 4, "decoder_attention_heads": 2,
        "max_position_embeddings": 40}  # fmt: skip
BERT = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 72,
        "vocab_size": 70, "max_position_embeddings": 40}  # fmt: skip
RECURRENT_GEMMA = {"model_type": "recurrent_gemma", "vocab_size": 60, "pad_token_id": 0, "hidden_size": 32,
                   "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 1,
                   "lru_width": 40}  # fmt: skip
RESNET = {"model_type": "resnet", "embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 2], "num_labels": 10}


GLM4_MOE = {
    "model_type": "glm4_moe", "vocab_size": 100, "hidden_size": 64, "intermediate_size": 90, "moe_intermediate_size": 40,
    "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 12, "n_routed_experts": 6,
    "num_experts_per_tok": 2, "n_shared_experts": 2, "use_qk_norm": True,
}  # fmt: skip


def same(comparison: Comparison) -> None:
    rows = comparison.memory + comparison.communication
    assert [(row.name, row.predicted) for row in rows] == [(row.name, row.measured) for row in rows]


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (LLAMA, {"precision": "bf16"}),
        (LLAMA, {"precision": "fp32", "recompute": "full", "optimizer_implementation": "fused"}),
        (LLAMA, {"precision": "bf16-mixed", "global_batch_size": 6}),
        (LLAMA, {"precision": "fp16", "attention": "eager", "optimizer": "sgd-momentum"}),
        (LLAMA, {"precision": "bf16", "recompute": "op"}),
        (GPT2, {"precision": "bf16", "padded": True}),
        (GPT2, {"precision": "fp32", "attention": "eager"}),
        (QWEN3, {"precision": "bf16-mixed", "recompute": "full"}),
        (DEEPSEEK, {"precision": "bf16"}),
        (GLM4_MOE, {"precision": "fp32", "optimizer_implementation": "for-loop"}),
        (LLAMA, {"precision": "bf16-autocast", "recompute": "full"}),
        (GPT2, {"precision": "fp16-autocast", "attention": "eager", "global_batch_size": 4}),
        (DEEPSEEK, {"precision": "bf16-autocast", "padded": True}),
        (T5, {"precision": "bf16-autocast"}),
        (T5, {"precision": "bf16", "attention": "eager"}),
        (T5, {"precision": "bf16", "recompute": "full"}),
        (BART, {"precision": "bf16"}),
        (BERT | {"architectures": ["BertForMaskedLM"]}, {"precision": "bf16"}),
        (
            BERT | {"tie_word_embeddings": False},
            {"precision": "bf16-mixed"},
        ),  # a bias that gets no gradient has a master
        (BERT | {"model_type": "ernie", "architectures": ["ErnieForMaskedLM"]}, {"precision": "bf16-autocast"}),
        (RECURRENT_GEMMA, {"precision": "bf16"}),
        (RECURRENT_GEMMA, {"precision": "bf16", "recompute": "full", "global_batch_size": 4}),
        (RESNET, {"precision": "fp32", "seq_len": None}),
    ],
)
def test_one_gpu(model: dict[str, Any], options: dict[str, Any]) -> None:
    """Dropout is on, as a GPU does it."""
    same(validate(model, **{"micro_batch_size": 2, "seq_len": 32} | options))


@pytest.mark.parametrize(
    "options",
    [
        {"gpus": 8, "zero": 3, "precision": "bf16"},
        {"gpus": 8, "zero": 2, "shard_group": 4, "global_batch_size": 16, "clip_grad_norm": True},
        {"gpus": 8, "zero": 2, "shard_group": 4, "global_batch_size": 16, "sync_each_micro_batch": True},
        {"gpus": 64, "zero": 3, "recompute": "full", "grad_dtype": "bf16"},
        {"gpus": 8, "zero": 3, "precision": "bf16-autocast"},
        {"gpus": 4, "zero": 3, "tp": 2},
        {"gpus": 4, "zero": 3, "tp": 2, "sequence_parallel": True},
        {"gpus": 8, "zero": 2, "tp": 2, "sequence_parallel": True, "global_batch_size": 8, "recompute": "full"},
        {
            "gpus": 6,
            "zero": 3,
            "tp": 2,
            "sequence_parallel": True,
            "cross_entropy": "vocab-parallel",
            "micro_batch_size": 2,
        },
    ],
)
def test_a_rank_of_fsdp2(options: dict[str, Any]) -> None:
    same(validate(LLAMA, engine="fsdp2", seq_len=32, **options))


def test_one_token_of_a_state_space() -> None:
    """Fake tensors' dims of one have the strides of real ones."""
    (case,) = [case for case in step_cases("granitemoehybrid") if case.seq == 1]
    same(validate(case.fields, precision="bf16", micro_batch_size=2, seq_len=1))


def test_a_rank_of_fsdp2_updates_unlike_layers_in_their_order() -> None:
    """A for-loop's variables still hold what the weight before was given."""
    options = {"engine": "fsdp2", "gpus": 4, "zero": 3, "optimizer_implementation": "for-loop", "seq_len": 3}
    same(validate(GLM4_MOE, precision="fp32", **options))


DBRX = {"model_type": "dbrx", "d_model": 48, "n_heads": 4, "n_layers": 2, "max_seq_len": 64, "vocab_size": 90,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 40, "moe_num_experts": 4, "moe_top_k": 2}}  # fmt: skip


@pytest.mark.parametrize(
    "options", [{"precision": "bf16"}, {"gpus": 4, "engine": "fsdp2", "zero": 3, "recompute": "full"}]
)
def test_experts_that_are_run_in_a_loop(options: dict[str, Any]) -> None:
    """transformers' code asks which tokens have come, which fake tensors cannot tell."""
    same(validate(DBRX, seq_len=24, **options))


@pytest.mark.parametrize(
    "options",
    [
        {"gpus": 8, "ep": 4, "zero": 3, "recompute": "full"},
        {"gpus": 8, "ep": 2, "shard_group": 4, "zero": 2, "global_batch_size": 16, "precision": "bf16"},
        {"gpus": 4, "tp": 2, "zero": 3},
        {"gpus": 8, "tp": 2, "ep": 4, "zero": 3, "recompute": "full"},
        {"gpus": 8, "tp": 2, "ep": 2, "shard_group": 2, "zero": 2, "global_batch_size": 8},
    ],
)
def test_a_rank_with_some_of_the_experts(options: dict[str, Any]) -> None:
    same(validate(MIXTRAL, seq_len=32, **options))


@pytest.mark.parametrize(
    ("options", "gradients"),
    [
        ({}, "gradients"),
        ({"engine": "fsdp2", "zero": 3}, "gradients in step"),
        ({"engine": "fsdp2", "zero": 2, "pp": 2, "global_batch_size": 4}, "gradients in step"),
        ({"engine": "deepspeed", "zero": 0}, "gradients"),
        ({"engine": "deepspeed", "zero": 1, "global_batch_size": 8}, "gradients"),
        ({"engine": "deepspeed", "zero": 2}, "gradients in step"),
        ({"engine": "deepspeed", "zero": 2, "gpus": 3, "ep": 1, "global_batch_size": 6}, "gradients in step"),
        ({"engine": "deepspeed", "zero": 3}, "gradients in step"),
        (
            {"engine": "deepspeed", "zero": 3, "param_persistence_threshold": 0, "max_live_parameters": 0},
            "gradients in step",
        ),
    ],
)
def test_components_of_engines(options: dict[str, Any], gradients: str) -> None:
    """In the order of the table."""
    comparison = validate(MIXTRAL | {"tie_word_embeddings": False}, **{"gpus": 4, "seq_len": 32} | options)
    same(comparison)
    expected = ["parameters", gradients, "optimizer_states", "saved_activations"]
    assert [row.name for row in comparison.memory][:-4] == expected
    assert all(row.measured for row in comparison.memory)


def test_weights_that_are_gathered_are_not_saved_activations() -> None:
    """The estimate's saved activations are those of one GPU, whatever the engine gathers."""
    of_one = memcalc.estimate(LLAMA, seq_len=32).total("saved_activations")
    for engine in ("fsdp2", "deepspeed"):
        options = {} if engine == "fsdp2" else {"param_persistence_threshold": 0}
        report = memcalc.estimate(LLAMA, gpus=4, zero=3, engine=engine, seq_len=32, **options)
        assert measure(report).saved_activations == of_one


def test_copies_of_tokens_that_do_not_spread_evenly() -> None:
    with pytest.raises(
        memcalc.InputError, match=r"--seq-len 33: 66 copies of .* over 8 experts; allowed: a multiple of 8"
    ):
        validate(MIXTRAL, gpus=8, ep=4, zero=3, seq_len=33)
    with pytest.raises(
        memcalc.InputError, match=r"--seq-len 36: 36 copies of a slice .1/2. of a micro-batch's tokens do not"
    ):
        validate(MIXTRAL, gpus=8, tp=2, ep=4, zero=3, seq_len=36)


@pytest.mark.parametrize(
    "options",
    [
        {"pp": 3, "pp_rank": 0, "zero": 3, "gpus": 6, "schedule": "gpipe", "global_batch_size": 4},
        {"pp": 3, "pp_rank": 1, "zero": 2, "gpus": 12, "shard_group": 2, "global_batch_size": 12},
        {"pp": 2, "pp_rank": 1, "zero": 3, "gpus": 4, "recompute": "full", "global_batch_size": 8, "precision": "bf16"},
        {"pp": 2, "zero": 3, "gpus": 2, "schedule": "interleaved", "virtual_stages": 2, "global_batch_size": 4},
        {"pp": 2, "pp_rank": 1, "zero": 3, "gpus": 8, "tp": 2, "global_batch_size": 4},
        {"pp": 2, "pp_rank": 0, "zero": 2, "gpus": 4, "tp": 2, "sequence_parallel": True, "global_batch_size": 4,
         "schedule": "interleaved", "virtual_stages": 2},
        {"pp": 2, "pp_rank": 1, "zero": 3, "gpus": 4, "tp": 2, "sequence_parallel": True, "global_batch_size": 2,
         "cross_entropy": "vocab-parallel"},
        {"pp": 2, "pp_rank": 0, "zero": 2, "gpus": 4, "schedule": "zero-bubble", "global_batch_size": 6,
         "first_stage_layers": 1, "last_stage_layers": 3},
        {"pp": 2, "cp": 2, "zero": 3, "gpus": 8, "global_batch_size": 4},
        {"pp": 2, "pp_rank": 0, "cp": 2, "tp": 2, "sequence_parallel": True, "zero": 2, "gpus": 8, "global_batch_size": 4,
         "cp_comm_type": "p2p", "schedule": "interleaved", "virtual_stages": 2},
    ],
)  # fmt: skip
def test_a_rank_of_a_pipeline(options: dict[str, Any]) -> None:
    same(validate(LLAMA | {"num_hidden_layers": 4}, engine="fsdp2", seq_len=32, micro_batch_size=1, **options))


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("model", [MIXTRAL, DEEPSEEK], ids=str)
def test_a_rank_of_a_pipeline_with_experts(model: dict[str, Any], tp: int) -> None:
    fields = model | {"num_hidden_layers": 5, "tie_word_embeddings": False}
    same(validate(fields, engine="fsdp2", zero=3, gpus=4 * tp, tp=tp, pp=2, pp_rank=0, seq_len=32, global_batch_size=4))


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16"},
        {"global_batch_size": 8},
        {"global_batch_size": 8, "sync_each_micro_batch": True},
        {"precision": "bf16-autocast"},
    ],
)
def test_a_rank_of_ddp(options: dict[str, Any]) -> None:
    same(validate(LLAMA, gpus=4, seq_len=32, **options))


LINEAR = torch.nn.functional.linear
SMALL = {"param_persistence_threshold": 1000, "max_live_parameters": 40_000, "max_reuse_distance": 15_000,
         "prefetch_bucket_size": 20_000, "reduce_bucket_size": 40_000, "sub_group_size": 50_000}  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        {"zero": 0, "precision": "fp32"},
        {"zero": 1, "gpus": 2, "precision": "fp16-mixed"},
        {"zero": 2, "gpus": 3, "global_batch_size": 6, "recompute": "full"},
        {"zero": 3},
        {"zero": 3, "gpus": 64, "micro_batch_size": 2, "global_batch_size": 256, "optimizer": "adam", **SMALL},
    ],
)
def test_a_rank_of_deepspeed(options: dict[str, Any]) -> None:
    same(validate(LLAMA, engine="deepspeed", seq_len=32, **{"gpus": 4} | options))
    assert torch.nn.functional.linear is LINEAR


@pytest.mark.parametrize("zero", [0, 2])
def test_no_gradient_overflows(zero: int) -> None:
    """A norm's 1e-12 is none in fp16; where weights are zeros, as no real ones are, the gradients would be no numbers."""
    same(validate(BERT, engine="deepspeed", gpus=4, zero=zero, precision="fp16-mixed", seq_len=16))


@pytest.mark.parametrize("gpus", [6, 11])
def test_gradients_of_a_partition(gpus: int) -> None:
    """Of its weights, once each: not of the padding behind the last ones, nor twice of a bias that gets none."""
    same(validate(BERT | {"tie_word_embeddings": gpus == 6}, engine="deepspeed", gpus=gpus, zero=2, seq_len=13))


BUCKET = {"reduce_bucket_size": 100_000}
GATHERED = {"param_persistence_threshold": 0, "max_live_parameters": 0, "max_reuse_distance": 0}


@pytest.mark.parametrize(
    "options",
    [
        {"gpus": 4, "cp": 4},
        {"gpus": 8, "cp": 2, "tp": 2, "zero": 2, "recompute": "full", "cp_comm_type": "p2p", "global_batch_size": 8},
        {"gpus": 8, "cp": 2, "tp": 2, "shard_group": 2, "sequence_parallel": True, "precision": "bf16"},
    ],
)
def test_a_rank_of_those_that_share_sequences(options: dict[str, Any]) -> None:
    same(validate(LLAMA, **{"engine": "fsdp2", "zero": 3, "seq_len": 32, "micro_batch_size": 2} | options))


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_any_rank_of_those_that_share_sequences(rank: int) -> None:
    """The others are estimated, too; the one with most is reported."""
    thirds = LLAMA | {"vocab_size": 699, "intermediate_size": 201}
    report = memcalc.estimate(thirds, engine="fsdp2", gpus=3, cp=3, zero=3, seq_len=30)
    made = report.find(next(one for one in ranks(report.model, report.setup) if one.cp == rank))
    same(Comparison(one := memcalc.Report(report.model, report.setup, made), measure(one), "fake"))


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (LLAMA, {"cp": 2, "zero": 0, "precision": "bf16-mixed"}),
        (
            LLAMA,
            {"cp": 2, "zero": 1, "recompute": "full", "precision": "fp16-mixed", **BUCKET},
        ),
        (LLAMA, {"cp": 2, "zero": 3, "precision": "fp32", **GATHERED, **BUCKET}),
        (MIXTRAL, {"ep": 2, "zero": 0, "seq_len": 13}),
        (MIXTRAL, {"gpus": 2, "ep": 2, "zero": 1, "global_batch_size": 8, "recompute": "full", **BUCKET}),
        (DEEPSEEK, {"ep": 4, "zero": 3, **GATHERED, **BUCKET}),
    ],
)
def test_a_rank_of_deepspeed_that_shares(model: dict[str, Any], options: dict[str, Any]) -> None:
    """Sequences (Ulysses) or experts (AutoEP)."""
    same(validate(model, **{"engine": "deepspeed", "gpus": 4, "seq_len": 32, "micro_batch_size": 2} | options))
    assert torch.nn.functional.linear is LINEAR


KNOWN = ("adamw", "adam", "sgd", "sgd-momentum", "adafactor", "lion", "adamw-8bit", "muon")
"""Others are in tests/optimizers/test_validated.py."""
OPTIMIZERS = [(name, how) for name in KNOWN for how in load_optimizer(name).implementations]


@pytest.mark.parametrize(("optimizer", "implementation"), OPTIMIZERS)
def test_optimizers(optimizer: str, implementation: str) -> None:
    precision = "bf16-mixed" if implementation == "foreach" else "bf16"
    options = {"optimizer": optimizer, "optimizer_implementation": implementation, "precision": precision}
    same(validate(QWEN3, seq_len=4, **options))


@pytest.mark.parametrize("optimizer", ["lion", "sgd", "sgd-momentum"])
def test_optimizers_of_shards(optimizer: str) -> None:
    same(validate(LLAMA, engine="fsdp2", gpus=4, zero=3, seq_len=4, optimizer=optimizer))


@pytest.mark.parametrize("optimizer", ["lion", "muon", "adamw-8bit"])
def test_optimizers_of_ddp(optimizer: str) -> None:
    same(validate(LLAMA, gpus=4, seq_len=4, optimizer=optimizer))


def test_it_measures_what_the_oracle_does() -> None:
    theirs = oracle.training_step(LLAMA, micro_batch_size=2, seq_len=32)
    ours = measure(memcalc.estimate(LLAMA, precision="bf16", micro_batch_size=2, seq_len=32))
    counters = 4 * len(memcalc.load_model(LLAMA).weights())
    assert ours.saved_activations == theirs.saved
    assert [ours.forward, ours.backward, ours.step] == [
        x - counters for x in (theirs.forward, theirs.backward, theirs.step)
    ]


def test_it_measures_what_the_oracle_of_fsdp2_does() -> None:
    theirs = sharded_step(LLAMA, mesh=(8,), micro_batch_size=1, seq_len=32, implementation="fused")
    report = memcalc.estimate(LLAMA, gpus=8, zero=3, engine="fsdp2", seq_len=32, optimizer_implementation="fused")
    ours = measure(report)
    assert [ours.forward, ours.backward, ours.step] == [theirs.forward, theirs.backward, theirs.step]
    assert ours.calls is not None
    assert sum(calls for calls, _ in ours.calls.values()) == len(theirs.sent)


def test_a_wrong_prediction_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    report = memcalc.estimate(LLAMA, precision="bf16", seq_len=32)
    other = memcalc.estimate(LLAMA, precision="bf16", seq_len=33)
    comparison = Comparison(report, measure(other), "fake")
    wrong = [row.name for row in comparison.memory if row.difference]
    assert wrong == ["saved_activations", "peak in forward", "peak in backward", "peak in step", "peak"]
    assert comparison.worst.name == "saved_activations"
    assert comparison.worst.error < 0


@pytest.mark.slow
def test_modes_and_patches_are_gone_afterwards() -> None:
    attend = torch.nn.functional.scaled_dot_product_attention
    enabled, logsigmoid = torch.is_autocast_enabled, torch.nn.functional.logsigmoid
    run.validate(LLAMA, precision="bf16", seq_len=8)
    run.validate(LLAMA, gpus=2, zero=3, engine="fsdp2", seq_len=8)
    run.validate(LLAMA, precision="bf16-autocast", seq_len=8)
    run.validate(LLAMA, engine="fsdp2", gpus=2, cp=2, zero=3, seq_len=8)
    with pytest.raises(NotImplementedError):  # the CPU has no such kernel of its own
        torch.ops.aten._scaled_dot_product_flash_attention(*torch.ones(3, 1, 1, 8, 8))
    assert torch.nn.functional.logsigmoid is logsigmoid
    assert torch.nn.functional.scaled_dot_product_attention is attend
    assert torch.is_autocast_enabled is enabled
    assert not torch.distributed.is_initialized()
    assert float(torch.ones(2).sum()) == 2.0
