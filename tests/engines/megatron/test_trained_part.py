"""What a rank of Megatron holds and sends if a part of the model trains, against DistributedDataParallel and the optimizers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from megatron_trained_ddp_oracle import held_for

import memcalc
from memcalc.engines.megatron.engine import buffers_of, stages
from memcalc.tasks.tasked import tasked

LLAMA: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 96, "intermediate_size": 80, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 500, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
TIED = {**LLAMA, "tie_word_embeddings": True}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "frozen layers": (LLAMA, {"gpus": 4, "freeze": "embeddings,first:2"}),
    "frozen layers, shards": (LLAMA, {"gpus": 3, "zero": 1, "freeze": "embeddings,first:2"}),
    "frozen layers, instances": (LLAMA, {"gpus": 8, "zero": 1, "shard_group": 4, "freeze": "embeddings,first:2"}),
    "only norms": (LLAMA, {"gpus": 4, "tp": 2, "zero": 1, "freeze": "all-but:norms"}),
    "only norms, no shards": (LLAMA, {"gpus": 8, "tp": 2, "cp": 2, "freeze": "all-but:norms"}),
    "one matrix": (LLAMA, {"gpus": 4, "zero": 1, "freeze": "all-but:decoder.layers.3.mlp.linear_fc2.weight"}),
    "stages": (LLAMA, {"gpus": 4, "pp": 2, "zero": 1, "freeze": "attention,embeddings"}),
    "tied": (TIED, {"gpus": 4, "pp": 2, "freeze": "attention"}),
    "tied, frozen": (TIED, {"gpus": 4, "pp": 2, "freeze": "head"}),
    "adapters": (LLAMA, {"gpus": 4, "lora_rank": 4}),
    "adapters, shards": (LLAMA, {"gpus": 4, "zero": 1, "lora_rank": 3}),
    "adapters, slices": (LLAMA, {"gpus": 4, "tp": 2, "zero": 1, "lora_rank": 8}),
    "adapters, stages": (
        LLAMA,
        {"gpus": 8, "tp": 2, "pp": 2, "lora_rank": 8, "lora_targets": "linear_qkv,linear_proj"},
    ),
    "adapters, chunks": (
        LLAMA,
        {"gpus": 4, "pp": 2, "schedule": "interleaved", "virtual_stages": 2, "global_batch_size": 8, "lora_rank": 8},
    ),
    "frozen experts": (MIXTRAL, {"gpus": 8, "ep": 2, "zero": 1, "freeze": "mlp"}),
    "frozen experts, no shards": (MIXTRAL, {"gpus": 8, "ep": 2, "freeze": "mlp"}),
    "some frozen experts": (MIXTRAL, {"gpus": 8, "ep": 2, "zero": 1, "freeze": "first:2"}),
    "adapters beside experts": (MIXTRAL, {"gpus": 8, "ep": 2, "lora_rank": 8, "lora_targets": "linear_qkv"}),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_held_and_sent(case: str) -> None:
    model, options = CASES[case]
    report = memcalc.estimate(model, engine="megatron", seq_len=16, **options)
    setup = report.setup
    stage = stages(tasked(memcalc.load_model(model), setup), setup)[report.to_dict()["memory"]["rank"]["pp"]]
    weights = [
        (tuple(dim.size for dim in w.shape), chunk.wants_gradient(w), w.component == "experts")
        for chunk in stage.chunks
        for w in chunk.weights()
    ]
    if len(stage.chunks) > 1:  # one DistributedDataParallel each, which the oracle has as one
        assert {c.group_size for c in report.collectives if c.axis == "dp"} == {setup.dp}
    held = held_for(
        weights, world_size=setup.gpus, zero=setup.zero, tensor_model_parallel_size=setup.tp,
        pipeline_model_parallel_size=setup.pp, context_parallel_size=setup.cp, expert_model_parallel_size=setup.ep,
        expert_tensor_parallel_size=setup.etp,
        num_distributed_optimizer_instances=setup.dp * setup.cp // setup.shards if setup.zero else 1,
    )  # fmt: skip
    sent = [c for c in report.collectives if c.axis == "dp" or c.payload == 4]
    assert Counter((c.collective, c.payload, c.group_size) for c in sent) == Counter(
        one for one in held.sent if one[2] > 1
    )

    buffers = buffers_of(setup, stage)
    assert held.gradients == sum(b.padded if setup.zero else b.elements for b in buffers)
    assert held.parameters == (sum(b.padded for b in buffers) if setup.zero else 0)
    rows = {
        c: sum(i.nbytes for i in report.items if i.component == c)
        for c in ("parameters", "gradients", "optimizer_states")
    }
    padding = sum(i.nbytes for i in report.items if "padding" in i.name)
    assert rows["parameters"] == 2 * sum(_size(shape) for shape, _, _ in weights)
    assert rows["gradients"] + (padding * 4 // 6 if padding else 0) == 4 * held.gradients
    if setup.zero:  # the first rank's part has no padding at the end of the buffers
        assert rows["optimizer_states"] == 12 * sum(b.padded // b.ranks for b in buffers)
    else:
        assert rows["optimizer_states"] == 12 * held.mains


def _size(shape: tuple[int, ...]) -> int:
    out = 1
    for dim in shape:
        out *= dim
    return out


def test_adapters_have_megatron_bridges_count() -> None:
    """linear_in and linear_out of each adapted layer: rank · (in + out), with joined queries, keys and "
    "values and joined gate and
    up; the slices of all ranks together."""
    model = memcalc.load_model("llama-7b")
    a = model.program.config
    hidden, ffn, rank = a.hidden_size, a.intermediate_size, 16
    each = {
        "linear_qkv": hidden + 3 * hidden, "linear_proj": 2 * hidden, "linear_fc1": hidden + 2 * ffn, "linear_fc2": ffn + hidden,
    }  # fmt: skip
    for targets in ("default", "linear_qkv", "linear_fc1, linear_fc2"):
        names = list(each) if targets == "default" else targets.split(", ")
        report = memcalc.estimate(
            model, engine="megatron", gpus=2, tp=2, lora_rank=rank, lora_targets=targets, seq_len=64
        )
        expected = a.num_hidden_layers * rank * sum(each[name] for name in names)
        assert report.to_dict()["model"]["trainable_parameters"] == expected
        assert sum(i.nbytes for i in report.items if i.component == "gradients") == expected * 4 // 2


def test_a_frozen_stack_keeps_nothing() -> None:
    options: dict[str, Any] = {"engine": "megatron", "gpus": 2, "tp": 2, "zero": 1, "seq_len": 4096}
    whole = memcalc.estimate("llama-7b", **options)
    half = memcalc.estimate("llama-7b", freeze="embeddings,first:16", **options)
    assert half.total("optimizer_states") < 0.55 * whole.total("optimizer_states")
    assert half.total("parameters") == whole.total("parameters")
    saved = [sum(i.nbytes for i in r.items if i.component == "saved_activations") for r in (whole, half)]
    assert saved[1] < 0.6 * saved[0]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            {"lora_rank": 8, "lora_targets": "q_proj"},
            "--lora-targets q_proj: q_proj is no layer of GPTModel that Megatron-Bridge's LoRA adapts "
            "(core/models/gpt: joined q, "
            "k, v; joined gate and up); allowed: default, or of linear_qkv, linear_proj, linear_fc1, linear_fc2",
        ),
        (
            {"lora_rank": 8, "lora_targets": "linear_q"},
            "--lora-targets linear_q: linear_q is a target of Megatron-Bridge's CanonicalLoRA, which with engine megatron is "
            "not modelled by this version; allowed: default, or of linear_qkv, linear_proj, linear_fc1, linear_fc2",
        ),
        (
            {"lora_rank": 6, "tp": 4},
            "--lora-rank 6: with --tp 4 Megatron-Bridge's adapters (megatron/bridge/peft) cut the rank into "
            "equal parts; allowed: "
            "a multiple of 4",
        ),
        (
            {"lora_rank": 8, "adapter_dtype": "fp32"},
            "--adapter-dtype fp32: Megatron-Bridge's adapters (megatron/bridge/peft) have the model's dtype; allowed: bf16",
        ),
        (
            {"lora_rank": 8, "dora": True},
            "--dora on: of Megatron-Bridge's adapters (megatron/bridge/peft) is not modelled by this version; allowed: off",
        ),
        (
            {"lora_rank": 8, "lora_bias": "all"},
            "--lora-bias all: is peft's; Megatron-Bridge freezes all biases; allowed: none",
        ),
        (
            {"lora_rank": 8, "modules_to_save": "lm_head"},
            "--modules-to-save lm_head: is peft's; Megatron-Bridge saves none; allowed: leave it out",
        ),
        (
            {"freeze": "embeddings", "optimizer": "muon"},
            "--optimizer muon: with --freeze and engine megatron is not modelled by this version; allowed: adamw, adam",
        ),
        (
            {"freeze": "embeddings", "recompute": "full"},
            "--recompute full: with frozen embeddings Megatron's checkpoint has no backward if its input wants no gradient "
            "(core/tensor_parallel/random.py); allowed: none, selective, or embeddings that train",
        ),
        (
            {"freeze": "embeddings,first:2", "pp": 2},
            "--freeze embeddings,first:2: stage 0 of --pp 2 has nothing to train, which is not modelled by "
            "this version; allowed: "
            "other parts",
        ),
        (
            {"freeze": "*.q_proj.weight"},
            "--freeze *.q_proj.weight: this model has no parameters in *.q_proj.weight; allowed: embeddings, head, norms, "
            "bias, attention, mlp, encoder, first:N, last:N, a pattern of parameter names "
            "(*.linear_qkv.weight), all-but:PART+PART",
        ),
        (
            {"freeze": "embeddings,head,norms,attention,mlp"},
            "--freeze embeddings,head,norms,attention,mlp: leaves nothing to train; allowed: fewer of embeddings, head, norms, "
            "bias, attention, mlp, encoder, first:N, last:N, a pattern of parameter names "
            "(*.linear_qkv.weight), all-but:PART+PART",
        ),
        (
            {"freeze": "head", "wgrad_deferral_limit": 0},
            "--wgrad-deferral-limit 0: with frozen weights is not modelled by this version; allowed: leave it out",
        ),
    ],
)
def test_refused_by_name(options: dict[str, Any], line: str) -> None:
    with pytest.raises(memcalc.InputError) as error:
        memcalc.estimate(LLAMA, **{"engine": "megatron", "gpus": 8, "seq_len": 16, **options})
    assert str(error.value) == line


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (MIXTRAL, {"lora_rank": 8}, "linear_fc1: the experts of a mixtral have such layers"),
        ("deepseek-v2-lite", {"lora_rank": 8}, "for the latent attention of a deepseek_v2"),
        ("deepseek-v2-lite", {"freeze": "mlp"}, "for the latent attention of a deepseek_v2"),
        (MIXTRAL, {"ep": 2, "freeze": "all-but:*.experts.*"}, "of a stage that trains only experts"),
        (
            {**LLAMA, "model_type": "qwen2"},
            {"freeze": "*.linear_qkv.weight"},
            "computes no gradient of linear_qkv.bias",
        ),
    ],
)
def test_refused_by_model(model: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(memcalc.InputError, match=words):
        memcalc.estimate(model, **{"engine": "megatron", "gpus": 8, "seq_len": 16, **options})


def test_the_default_engine_has_its_own_names() -> None:
    """With slices and no engine named, Megatron's weights are those that --freeze names."""
    report = memcalc.estimate(LLAMA, gpus=8, tp=2, freeze="linear_qkv", seq_len=16)
    assert report.setup.engine == "megatron"
    named = memcalc.estimate(LLAMA, engine="megatron", gpus=8, tp=2, freeze="linear_qkv", seq_len=16)
    assert named.peak == report.peak
