"""accelerate's configuration files: FSDP, DeepSpeed, parallelism_config and Megatron-LM."""

from __future__ import annotations

from typing import Any

import pytest
from accelerate_contents import DDP, DEEPSPEED, MEGATRON, fsdp, given, megatron, parallel, refusal, values

from memcalc.formats.accelerate import read
from memcalc.formats.accelerate_megatron import DEFAULT_CP
from memcalc.formats.found import ACCUMULATION

# FSDP.


def test_version_1() -> None:
    found = read("acc.yaml", fsdp(fsdp_sharding_strategy="SHARD_GRAD_OP", fsdp_offload_params="true"))
    assert values(found) == {
        "engine": "fsdp1", "use_orig_params": True, "backward_prefetch": "none", "forward_prefetch": False,
        "gpus": 8, "gpus_per_node": 8, "precision": "bf16-mixed", "grad_dtype": "bf16", "zero": 2,
        "offload_params": "cpu", "offload_optimizer": "cpu",
    }  # fmt: skip
    assert found.notes == ()
    assert found.options["zero"].where == "acc.yaml: fsdp_config.fsdp_sharding_strategy"


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("FULL_SHARD", {"zero": 3}),
        (1, {"zero": 3}),
        ("2", {"zero": 2}),
        (4, {"zero": 3, "shard_group": 4}),
        ("hybrid_shard_zero2", {"zero": 2, "shard_group": 4}),
        (3, {"engine": "ddp", "precision": "bf16-autocast"}),
    ],
)
def test_strategies(strategy: object, options: dict[str, Any]) -> None:
    found = read("acc.yaml", {**fsdp(fsdp_sharding_strategy=strategy), "num_machines": 2})
    assert {name: found.options[name].value for name in options} == options
    assert ("zero" in found.options) == ("zero" in options)


def test_version_2() -> None:
    found = read("acc.yaml", fsdp(version="2", reshard_after_forward=False, activation_checkpointing=True))
    assert given(found)["zero"] == 2
    assert given(found)["recompute"] == "full"
    assert found.notes == ()
    default = read("acc.yaml", fsdp(fsdp_version=2))
    assert default.options["zero"][0::2] == (3, False)
    assert "recompute" not in default.options


@pytest.mark.parametrize(
    ("keys", "word"),
    [
        ({"fsdp_auto_wrap_policy": None}, "NO_WRAP"),
        ({"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 1000}, "1000"),
        ({"fsdp_transformer_layer_cls_to_wrap": "MixtralSparseMoeBlock"}, "MixtralSparseMoeBlock"),
        ({"fsdp_version": 2, "fsdp_sharding_strategy": "SHARD_GRAD_OP"}, "fsdp_sharding_strategy"),
        ({"fsdp_version": 1, "fsdp_reshard_after_forward": "SHARD_GRAD_OP"}, "fsdp_reshard_after_forward"),
        ({"fsdp_ignored_modules": ".*head"}, "fsdp_ignored_modules"),
        ({"fsdp_wrap_policy": "layers"}, "fsdp_config.fsdp_wrap_policy: not read"),
        (
            {"fsdp_version": 2, "activation_checkpointing": True, "activation_checkpointing_offload": True},
            "fsdp_activation_checkpointing_offload",
        ),
    ],
)
def test_what_fsdp_notes(keys: dict[str, Any], word: str) -> None:
    assert any(word in note for note in read("acc.yaml", fsdp(**keys)).notes)


@pytest.mark.parametrize(
    "classes", ["LlamaDecoderLayer", "GPT2Block", "Qwen3_5DecoderLayer, Qwen3_5VisionBlock", ["BertLayer"]]
)
def test_layers_are_units(classes: object) -> None:
    assert not read("", fsdp(fsdp_version=2, fsdp_transformer_layer_cls_to_wrap=classes)).notes


@pytest.mark.parametrize(
    ("keys", "word"),
    [
        ({"fsdp_version": 3}, "fsdp_version 3"),
        ({"fsdp_version": 2, "fsdp_reshard_after_forward": "FULL_SHARD"}, "fsdp_reshard_after_forward 'FULL_SHARD'"),
        ({"fsdp_sharding_strategy": "ZERO3"}, "fsdp_sharding_strategy 'ZERO3'"),
        ({"fsdp_sharding_strategy": 6}, "fsdp_sharding_strategy 6"),
        ({"fsdp_auto_wrap_policy": "LAYERS"}, "fsdp_auto_wrap_policy 'LAYERS'"),
        ({"fsdp_version": 2, "fsdp_activation_checkpointing_offload": True}, "needs fsdp_activation_checkpointing"),
        (
            {"fsdp_activation_checkpointing": True, "fsdp_activation_checkpointing_offload": True},
            "needs fsdp_version 2",
        ),
        ({"fsdp_offload_params": "maybe"}, "fsdp_offload_params 'maybe'"),
        ({"fsdp_backward_prefetch": "NEVER"}, "fsdp_backward_prefetch 'NEVER'"),
        ({"fsdp_use_orig_params": "perhaps"}, "fsdp_use_orig_params 'perhaps'"),
    ],
)
def test_what_fsdp_refuses(keys: dict[str, Any], word: str) -> None:
    assert word in refusal(fsdp(**keys))


# DeepSpeed.


def test_deepspeed_becomes_its_json() -> None:
    keys = {"zero_stage": 3, "offload_optimizer_device": "CPU", "offload_param_device": "none"}
    content = {**DEEPSPEED, "mixed_precision": "bf16", "deepspeed_config": {**keys, "gradient_clipping": 1.0}}
    found = read("acc.yaml", content)
    assert found.files["deepspeed"].where == "acc.yaml: deepspeed_config"
    assert found.files["deepspeed"].value == {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": 1.0,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "nvme_path": None},
            "offload_param": {"device": "none", "nvme_path": None},
        },
        "bf16": {"enabled": True},
    }
    assert values(found) == {"engine": "deepspeed", "gpus": 8, "gpus_per_node": 8}
    assert found.notes == ()


def test_deepspeed_without_keys_is_stage_2() -> None:
    made = read("", {**DEEPSPEED, "deepspeed_config": {}}).files["deepspeed"].value
    assert made["zero_optimization"]["stage"] == 2
    assert made["gradient_accumulation_steps"] == "auto"
    assert made["bf16"] == made["fp16"] == {"enabled": "auto"}  # as the Trainer's own switches say


def test_a_file_of_deepspeed() -> None:
    keys = {"deepspeed_config_file": "ds/zero3.json", "zero3_init_flag": True, "deepspeed_multinode_launcher": "pdsh"}
    found = read("acc.yaml", {**DEEPSPEED, "deepspeed_config": keys})
    assert found.files["deepspeed"] == ("ds/zero3.json", "acc.yaml: deepspeed_config.deepspeed_config_file", True)
    assert "precision" not in found.options
    assert found.notes == ()


@pytest.mark.parametrize(
    ("top", "keys", "word"),
    [
        ({}, {"zero_stage": 2}, "deepspeed_config.zero_stage 2: accelerate refuses it beside"),
        ({}, {"gradient_clipping": None}, "deepspeed_config.gradient_clipping None"),
        ({"mixed_precision": "bf16"}, {}, "mixed_precision 'bf16': accelerate refuses it beside"),
        ({"mixed_precision": "no"}, {}, "mixed_precision 'no'"),
        ({"fp16": True}, {}, "fp16 True"),
    ],
)
def test_what_a_file_of_deepspeed_excludes(top: dict[str, Any], keys: dict[str, Any], word: str) -> None:
    section = {"deepspeed_config_file": "zero3.json", **keys}
    assert word in refusal({**DEEPSPEED, **top, "deepspeed_config": section})


@pytest.mark.parametrize(
    ("keys", "word"),
    [
        ({"zero_stage": 4}, "zero_stage 4"),
        ({"zero_stage": "ZERO_STAGE"}, "zero_stage 'ZERO_STAGE'"),
        ({"offload_param_device": "disk"}, "offload_param_device 'disk'"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps 0"),
    ],
)
def test_what_deepspeed_refuses(keys: dict[str, Any], word: str) -> None:
    assert word in refusal({**DEEPSPEED, "deepspeed_config": keys})


def test_what_deepspeed_notes() -> None:
    keys = {
        "zero_stage": 3, "deepspeed_moe_layer_cls_names": "MixtralSparseMoeBlock", "bf16": {"enabled": True},
        "deepspeed_inclusion_filter": "worker-1:0,1",
    }  # fmt: skip
    notes = read("acc.yaml", {**DEEPSPEED, "mixed_precision": "bf16", "deepspeed_config": keys}).notes
    assert any("MixtralSparseMoeBlock" in note for note in notes)
    assert any("deepspeed_inclusion_filter" in note for note in notes)
    assert any(note.startswith("deepspeed_config.bf16: not read") for note in notes)


def test_sections_of_other_kinds() -> None:
    content = {**DEEPSPEED, "fsdp_config": {"fsdp_version": 2}, "megatron_lm_config": {"megatron_lm_tp_degree": None}}
    notes = read("", content).notes
    assert [note for note in notes if "not used" in note] == ["fsdp_config is not used: distributed_type is DEEPSPEED."]


# Parallelism.


def test_replicas_of_shards() -> None:
    content = parallel(fsdp(fsdp_version=2), dp_replicate_size=2, dp_shard_size=2, tp_size=2)
    found = read("acc.yaml", content)
    assert {name: values(found)[name] for name in ("tp", "shard_group", "zero")} == {
        "tp": 2,
        "shard_group": 2,
        "zero": 3,
    }
    assert "cp" not in found.options


def test_shared_sequences() -> None:
    found = values(read("", parallel(fsdp(fsdp_version=2), dp_replicate_size=2, dp_shard_size=2, cp_size=2)))
    assert (found["cp"], found["cp_comm_type"], found["shard_group"]) == (2, "all_gather", 4)
    found = values(read("", parallel(fsdp(fsdp_version=2), cp_size=8, cp_comm_strategy="alltoall")))
    assert (found["cp"], found["cp_comm_type"]) == (8, "p2p")


def test_shared_sequences_of_deepspeed() -> None:
    degrees = {"sp_size": 4, "sp_backend": "deepspeed", "sp_seq_length": "8192", "sp_seq_length_is_variable": False}
    content = parallel(DEEPSPEED, **degrees, sp_attn_implementation="flash_attention_2")
    found = values(read("", {**content, "mixed_precision": "bf16"}))
    expected = {"cp": 4, "cp_comm_type": "a2a", "seq_len": 8192, "attention": "flash", "engine": "deepspeed"}
    assert {name: found[name] for name in expected} == expected


def test_degrees_make_the_processes() -> None:
    content = {**parallel(fsdp(fsdp_version=2), dp_shard_size=4, tp_size=2), "num_processes": -1}
    assert values(read("", content))["gpus"] == 8


def test_slices_alone() -> None:
    found = values(read("", {**parallel(DDP, tp_size=8), "mixed_precision": "no"}))
    expected = {"engine": "fsdp2", "tp": 8, "zero": 2, "shard_group": 1}
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize("kind", [fsdp(fsdp_version=2), fsdp(), DDP, DEEPSPEED, MEGATRON])
def test_degrees_of_one_say_nothing(kind: dict[str, Any]) -> None:
    plain, ones = read("", kind), read("", parallel(kind, dp_shard_size=1, tp_size=1, cp_size=1))
    assert values(plain) == values(ones)


def test_keys_without_their_prefix_are_not_read() -> None:
    found = read("", {**DDP, "parallelism_config": {"tp_size": 8}})
    assert "tp" not in found.options
    assert any("its keys begin with parallelism_config_" in note for note in found.notes)


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (parallel(fsdp(), dp_shard_size=8), "fsdp_version None: a parallelism_config needs version 2"),
        (parallel(fsdp(fsdp_version=2), dp_replicate_size=8), "no ranks to shard over"),
        (parallel(fsdp(fsdp_version=2), tp_size=8), "no ranks to shard over"),
        (parallel(fsdp(fsdp_version=2), dp_shard_size=4), "make 4 processes"),
        (parallel(fsdp(fsdp_version=2), dp_replicate_size=4, tp_size=2), "dp_shard_size 2 or more"),
        (parallel(fsdp(fsdp_version=2), dp_shard_size=2, sp_size=4), "needs distributed_type DEEPSPEED"),
        (parallel(fsdp(fsdp_version=2), cp_size=4, sp_size=2), "excludes cp_size 4"),
        (parallel(fsdp(fsdp_version=2), cp_size=8, cp_comm_strategy="ring"), "cp_comm_strategy 'ring'"),
        (parallel(fsdp(fsdp_version=2), cp_size=8, cp_backend="deepspeed"), "cp_backend 'deepspeed'"),
        (parallel(DDP, cp_size=8), "needs distributed_type FSDP"),
        (parallel(DEEPSPEED, tp_size=8), "needs distributed_type FSDP"),
        (parallel(DEEPSPEED, sp_size=8, sp_attn_implementation="eager"), "sp_attn_implementation 'eager'"),
        (parallel({**DDP, "distributed_type": "NO"}, dp_shard_size=8), "refuses it with distributed_type NO"),
        (parallel(MEGATRON, dp_replicate_size=8), "refuses it with distributed_type MEGATRON_LM"),
        (parallel(DDP, tp_size="${TP}"), "tp_size '${TP}'"),
    ],
)
def test_what_parallelism_refuses(content: dict[str, Any], word: str) -> None:
    assert word in refusal(content)


# Megatron-LM.


def test_megatron() -> None:
    content = megatron(
        tp_degree=2, pp_degree=2, num_micro_batches=4, sequence_parallelism="true", use_distributed_optimizer=True,
        recompute_granularity="selective", context_parallel_size=1, gradient_clipping=0,
    )  # fmt: skip
    found = read("acc.yaml", content)
    assert given(found) == {
        "engine": "megatron", "gpus": 8, "gpus_per_node": 8, "precision": "bf16-mixed", "tp": 2, "pp": 2, "cp": 1,
        ACCUMULATION: 4, "sequence_parallel": True, "zero": 1, "recompute": "selective", "clip_grad_norm": False,
    }  # fmt: skip
    assert found.notes == ()


def test_what_accelerate_takes_for_megatron_by_itself() -> None:
    found = read("acc.yaml", megatron(tp_degree=2, pp_degree=2, recompute_activations=True))
    assert found.options["cp"][0::2] == (DEFAULT_CP, False)
    assert found.options["recompute"][0::2] == ("full", False)
    assert found.options["zero"][0::2] == (0, False)
    assert found.options["sequence_parallel"][0::2] == (False, False)
    assert any("--cp 1 for older versions" in note for note in found.notes)
    assert any("--recompute selective for older versions" in note for note in found.notes)


def test_a_context_that_processes_cannot_have() -> None:
    found = read("", {**megatron(tp_degree=4, pp_degree=2), "num_processes": 8})
    assert "cp" not in found.options
    assert any("1 is estimated" in note for note in found.notes)


def test_experts_and_blocks_of_megatron() -> None:
    found = read(
        "",
        megatron(
            expert_model_parallel_size=4, recompute_granularity="full", recompute_method="block",
            recompute_num_layers=3, context_parallel_size=1, optimizer_cpu_offload=True,
            decoder_last_pipeline_num_layers=2, hidden_dropout=0.1,
        ),
    )  # fmt: skip
    expected = {
        "ep": 4, "etp": 1, "recompute": "full", "recompute_layers": 3, "offload_optimizer": "cpu", "last_stage_layers": 2
    }  # fmt: skip
    assert {name: values(found)[name] for name in expected} == expected
    assert any("hidden_dropout 0.1" in note for note in found.notes)


def test_what_megatron_refuses_and_leaves() -> None:
    assert "Megatron-FSDP" in refusal(megatron(use_custom_fsdp=True))
    assert "recompute_granularity 'some'" in refusal(megatron(recompute_granularity="some"))
    notes = read("", {**MEGATRON, "megatron_lm_config": {"tp_degree": 8}}).notes
    assert any("its keys begin with megatron_lm_" in note for note in notes)
    notes = read("", megatron(num_layers_per_virtual_pipeline_stage=2)).notes
    assert any("num_layers_per_virtual_pipeline_stage: not read" in note for note in notes)
