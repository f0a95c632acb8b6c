"""What other programs rely on: option names, JSON keys, defaults. Names may be added here, never changed or removed."""

from __future__ import annotations

import inspect
import json
import re
from typing import Any

import pytest
from command import LLAMA, here, program

import memcalc
from memcalc.cli.main import COMMANDS

OPTIONS = (
    "--model", "-m", "--params", "--gpus", "-g", "--gpus-per-node", "--tp", "--pp", "--cp", "--ep", "--dp", "--etp",
    "--cp-comm-type", "--pp-rank", "--tp-dims", "--tp-depth", "--autotp", "--encoder-stages", "--reward-model",
    "--packing", "--offload-activations", "--neftune-alpha", "--lengths", "--stage-layers", "--microbatch-group-size",
    "--cp-exchange-size", "--wgrad-deferral-limit", "--recompute-modules", "--offload-modules",
    "--reentrant-checkpoints", "--no-reentrant-checkpoints",
    "--zero", "--shard-group", "--sequence-parallel", "--no-sequence-parallel", "--schedule",
    "--virtual-stages", "--first-stage-layers",
    "--last-stage-layers", "--recompute-layers", "--reduce-bucket-size", "--max-live-parameters",
    "--max-reuse-distance", "--param-persistence-threshold", "--prefetch-bucket-size", "--sub-group-size", "--overlap-comm",
    "--quantize-storage", "--zero-quantized-weights", "--zero-quantized-gradients", "--zero-hpz-partition-size",
    "--nvme-optimizer-buffer-count", "--nvme-buffer-count", "--nvme-buffer-size", "--nvme-max-in-cpu", "--nvme-threads",
    "--fp8-recipe", "--fp8-param-gather",
    "--precision-aware-optimizer", "--main-params-dtype", "--exp-avg-dtype", "--exp-avg-sq-dtype",
    "--gradient-accumulation-fusion", "--attention-mask-in-dataloader", "--sync-each-micro-batch",
    "--cublas-workspace-config", "--te-workspaces", "--flash-attention-version",
    "--use-orig-params", "--backward-prefetch", "--forward-prefetch", "--servers",
    "--comm-hook", "--powersgd-rank", "--compression-phase",
    "--micro-batch-size", "-b", "--seq-len", "-s", "--global-batch-size", "--precision", "--grad-dtype", "--optimizer",
    "--optimizer-implementation", "--clip-grad-norm",
    "--recompute", "--attention", "--cross-entropy", "--padded", "--expert-imbalance",
    "--kernels", "--liger", "--engine", "--freeze", "--lora-rank", "--lora-targets", "--lora-dropout",
    "--lora-bias", "--adapter-dtype", "--dora", "--modules-to-save", "--input-require-grads",
    "--base-dtype", "--quantize", "--double-quant",
    "--quantize-compute-dtype", "--prepare-kbit-training", "--task", "--precompute-reference",
    "--completion-len", "--num-generations", "--steps-per-generation", "--num-iterations", "--beta",
    "--rollout-batch-size", "--num-mini-batches",
    "--offload-optimizer", "--offload-params", "--gpu", "--network-gbps",
    "--gemm-efficiency", "--attention-efficiency", "--memory-efficiency", "--all-ranks", "--json", "--check", "--help",
    "--deepspeed", "--accelerate", "--training-args", "--megatron-args", "--torchtitan", "--layers", "--explain-setup",
)  # fmt: skip

VALUES = {
    "--zero": "0 1 2 3",
    "--schedule": "gpipe 1f1b interleaved zero-bubble zbv dualpipev naive dapple dapple-b pipedream pipedream-2bw chimera "
    "dualpipe",
    "--precision": "fp32 bf16 fp16 bf16-mixed fp16-mixed bf16-autocast fp16-autocast fp8-mixed",
    "--grad-dtype": "fp32 bf16 fp16",
    "--optimizer": "adamw adam sgd sgd-momentum adafactor lion adamw-8bit muon adam-8bit lion-8bit paged-adamw "
    "paged-adamw-8bit paged-adam paged-adam-8bit paged-lion paged-lion-8bit apollo-adamw galore-adamw adam-mini lomo adalomo "
    "lamb onebit-adam onebit-lamb zero-one-adam",
    "--optimizer-implementation": "foreach fused for-loop",
    "--fp8-recipe": "delayed tensorwise blockwise mxfp8",
    "--recompute": "none selective op full",
    "--attention": "eager sdpa flash",
    "--cross-entropy": "eager vocab-parallel vocab-parallel-fused fused chunked flash liger",
    "--kernels": "hf fused megatron",
    "--lora-bias": "none all lora_only",
    "--offload-optimizer": "none cpu nvme",
    "--offload-params": "none cpu nvme",
    "--adapter-dtype": "fp32 bf16 fp16",
    "--base-dtype": "fp32 bf16 fp16",
    "--quantize": "none nf4 fp4 int8",
    "--quantize-compute-dtype": "fp32 bf16 fp16",
    "--quantize-storage": "uint8 fp32 bf16 fp16",
    "--task": "pretrain sft dpo kto ppo grpo",
    "--engine": "none ddp fsdp2 deepspeed megatron fsdp1 data-parallel parameter-server colossalai",
    "--tp-dims": "1 2 2.5 3",
    "--backward-prefetch": "pre post none",
    "--comm-hook": "fp16 bf16 powersgd batched-powersgd",
    "--compression-phase": "warmup compressed",
}

DEFAULTS: dict[str, Any] = {
    "gpus": 1, "gpus_per_node": 8, "dp": 1, "tp": 1, "pp": 1, "cp": 1, "ep": 1, "etp": 1, "pp_rank": 0, "zero": 0,
    "cp_comm_type": None,
    "shard_group": 1, "sequence_parallel": False, "schedule": "1f1b", "virtual_stages": 1, "first_stage_layers": None,
    "last_stage_layers": None, "recompute_layers": None, "reduce_bucket_size": None, "max_live_parameters": None,
    "max_reuse_distance": None, "param_persistence_threshold": None, "prefetch_bucket_size": None,
    "sub_group_size": None, "overlap_comm": None, "zero_quantized_weights": False, "zero_quantized_gradients": False,
    "nvme_optimizer_buffer_count": None, "nvme_buffer_count": None, "nvme_buffer_size": None, "nvme_max_in_cpu": None,
    "nvme_threads": None, "precision_aware_optimizer": False, "main_params_dtype": None, "exp_avg_dtype": None,
    "exp_avg_sq_dtype": None,
    "zero_hpz_partition_size": 1, "gradient_accumulation_fusion": None,
    "attention_mask_in_dataloader": None, "cublas_workspace_config": None, "te_workspaces": None, "micro_batch_size": 1,
    "sync_each_micro_batch": None,
    "use_orig_params": None, "backward_prefetch": None, "forward_prefetch": None, "servers": None,
    "comm_hook": None, "powersgd_rank": None, "compression_phase": None,
    "seq_len": 2048, "global_batch_size": 1, "precision": "bf16-mixed", "grad_dtype": "bf16", "optimizer": "adamw",
    "optimizer_implementation": "foreach", "clip_grad_norm": False,
    "recompute": "none", "attention": "sdpa", "cross_entropy": "eager",
    "padded": False, "expert_imbalance": 1.0, "kernels": "hf", "liger": None, "engine": "none", "freeze": None, "lora_rank": 0,
    "lora_targets": None, "lora_dropout": None, "lora_bias": None, "adapter_dtype": None,
    "dora": False, "modules_to_save": None,
    "base_dtype": None, "quantize": "none", "double_quant": False, "quantize_compute_dtype": None,
    "prepare_kbit_training": False,
    "input_require_grads": False, "task": "pretrain", "precompute_reference": None,
    "completion_len": None, "num_generations": None, "steps_per_generation": None, "num_iterations": None, "beta": None,
    "offload_optimizer": "none", "offload_params": "none",
    "gpu": None, "network_gbps": None,
    "gemm_efficiency": None, "attention_efficiency": None, "memory_efficiency": None, "tp_dims": "1", "tp_depth": None,
    "autotp": False, "packing": False, "offload_activations": "none", "neftune_alpha": None, "lengths": None,
    "quantize_storage": None,
    "encoder_stages": None, "reward_model": None,
    "stage_layers": None, "microbatch_group_size": None, "cp_exchange_size": None, "wgrad_deferral_limit": None,
    "recompute_modules": None, "offload_modules": None, "reentrant_checkpoints": False,
    "fp8_recipe": None, "fp8_param_gather": False,
    "rollout_batch_size": None, "num_mini_batches": None, "flash_attention_version": None,
}  # fmt: skip
"""Every option of a plain `memcalc estimate --model llama-7b`, as the JSON document resolves it."""

TOP = {"schema_version", "model", "setup", "memory", "communication", "fit"}
COMPUTE = {"per_step", "items", "seconds_at_peak"}
COMPUTED = {"name", "phase", "layer", "kind", "dtype", "calls", "flops", "formula", "basis", "source"}
COMPUTE_PHASES = {"forward", "backward", "recomputation"}
MODEL = {"name", "model_type", "parameters", "active_parameters", "trainable_parameters", "layers"}
MEMORY = {
    "parameters", "gradients", "optimizer_states", "saved_activations", "buffers", "phases", "peak_phase", "peak",
    "allocated", "reserved", "device", "at_peak", "rank", "items",
}  # fmt: skip
AT_PEAK = {"parameters", "gradients", "optimizer_states", "saved_activations", "buffers", "temporaries"}
ITEM = {"component", "name", "nbytes", "at_peak", "shape", "dtype", "life", "formula", "basis", "source"}
COMMUNICATION = {"per_step", "per_layer", "items"}
COLLECTIVE = {
    "axis", "collective", "name", "phase", "layer", "dtype", "group_size", "calls", "payload", "wire", "formula",
    "basis", "source",
}  # fmt: skip
FIT = {"gpu", "capacity", "fits", "headroom"}
BASES = {"exact", "modelled", "measured", "assumed", "traced"}
RANK = {"pp", "peak"}
ADDED = {
    "": {"compute", "time", "notes", "advice"},
    "communication": {"textbook", "per_layer_items"},
    "memory": {"ranks", "host", "host_items", "rollout"},
    "ranks": {
        "layers", "in_flight", "parameters", "gradients", "optimizer_states", "saved_activations", "buffers", "phases",
        "peak_phase", "device", "communication",
    },
    "per_step": {"seconds"},
    "fit": {"margin", "rank", "answer", "needs", "why"},
    "collectives": {"overlap", "link", "seconds", "seconds_formula"},
}  # fmt: skip
"""What came after the first version."""


def documents() -> list[dict[str, Any]]:
    setups: list[tuple[Any, dict[str, Any]]] = [
        (LLAMA, {}),
        (LLAMA, {"gpu": "h100-80gb"}),
        (LLAMA, {"gpus": 8}),
        (LLAMA, {"precision": "bf16-autocast"}),
        *((LLAMA, {"gpus": 8, "zero": zero, "gpu": "a100-40gb"}) for zero in (1, 2, 3)),
        ("gpt2", {"recompute": "full", "optimizer": "adafactor", "global_batch_size": 4}),
    ]
    return [
        *(memcalc.estimate(model, **options).to_dict() for model, options in setups),
        memcalc.estimate(params="7B", gpus=4, zero=2).to_dict(),
    ]


DOCUMENTS = documents()
each = pytest.mark.parametrize("document", DOCUMENTS, ids=range(len(DOCUMENTS)))


# --- the command line


def test_the_commands() -> None:
    assert {"estimate", "models", "gpus"} <= set(COMMANDS)


def test_every_option_is_in_the_help() -> None:
    ran = program("estimate", "--help-all", COLUMNS="240", TERM="dumb")
    assert ran.status == 0
    shown = set(re.findall(r"(?<![\w-])--?[a-z][a-z0-9-]*", ran.stdout))
    assert set(OPTIONS) <= shown, set(OPTIONS) - shown


def test_every_value_is_accepted_or_refused_as_a_known_one(capsys: pytest.CaptureFixture[str]) -> None:
    """A value that this version does not model is still a known one: its message does not list it as a misspelling."""
    for option, values in VALUES.items():
        for value in values.split():
            ran = here(capsys, "estimate", "--model", "gpt2", option, value, "--json")
            if ran.status == 0:
                assert json.loads(ran.stdout)["setup"][option.strip("-").replace("-", "_")] in (
                    value,
                    int(value) if value.isdigit() else None,
                )
            else:
                assert ran.status == 2
                assert f"{option} {value}" in ran.stderr
                assert f"allowed: {values.replace(' ', ', ')}\n" not in ran.stderr


@pytest.mark.parametrize(
    ("short", "long"), [("-m", "--model"), ("-g", "--gpus"), ("-b", "--micro-batch-size"), ("-s", "--seq-len")]
)
def test_short_names_mean_the_long_ones(short: str, long: str, capsys: pytest.CaptureFixture[str]) -> None:
    value = "llama-7b" if short == "-m" else "4"
    model = [] if short == "-m" else ["--model", "llama-7b"]
    left, right = (
        json.loads(here(capsys, "estimate", *model, name, value, "--json").stdout)["setup"] for name in (short, long)
    )
    assert left == right


def test_the_table_of_precisions_is_that_of_params(capsys: pytest.CaptureFixture[str]) -> None:
    for precision in VALUES["--precision"].split():
        ran = here(capsys, "estimate", "--params", "1B", "--precision", precision, "--json")
        assert ran.status == 0
        assert json.loads(ran.stdout)["setup"]["precision"] == precision


# --- defaults


def test_defaults() -> None:
    setup = memcalc.estimate("llama-7b").to_dict()["setup"]
    assert {name: setup[name] for name in DEFAULTS} == DEFAULTS


def test_the_setup_has_every_option() -> None:
    named = {option[2:].replace("-", "_") for option in OPTIONS if option.startswith("--")}
    named -= {
        "model",
        "params",
        "no_sequence_parallel",
        "no_reentrant_checkpoints",
        "json",
        "check",
        "help",
        "all_ranks",
    }
    named -= {"deepspeed", "accelerate", "training_args", "megatron_args", "torchtitan", "layers", "explain_setup"}
    assert named == set(DEFAULTS)
    for document in DOCUMENTS:
        assert named <= set(document["setup"])


@pytest.mark.parametrize(
    ("options", "resolved"),
    [
        ({"gpus": 8}, {"engine": "ddp", "dp": 8, "global_batch_size": 8, "optimizer_implementation": "foreach"}),
        ({"gpus": 8, "zero": 1}, {"engine": "deepspeed", "shard_group": 8, "optimizer_implementation": "fused"}),
        ({"gpus": 8, "zero": 3}, {"engine": "deepspeed", "shard_group": 8, "optimizer_implementation": "fused"}),
        ({"engine": "deepspeed", "zero": 3}, {"gpus": 1, "shard_group": 1, "optimizer_implementation": "fused"}),
        ({"gpus": 8, "engine": "fsdp2"}, {"zero": 3, "shard_group": 8, "optimizer_implementation": "foreach"}),
        ({"gpus": 8, "zero": 2, "micro_batch_size": 4}, {"global_batch_size": 32}),
        ({"gpus": 8, "engine": "deepspeed"}, {"engine": "deepspeed", "zero": 0}),
        ({"precision": "fp32"}, {"grad_dtype": "fp32"}),
        ({"precision": "fp16-mixed"}, {"grad_dtype": "fp16"}),
        ({"precision": "fp16-autocast"}, {"precision": "fp16-autocast", "grad_dtype": "fp32", "engine": "none"}),
    ],
)
def test_defaults_that_depend_on_others(options: dict[str, Any], resolved: dict[str, Any]) -> None:
    setup = memcalc.estimate("llama-7b", **options).to_dict()["setup"]
    assert {name: setup[name] for name in resolved} == resolved


@pytest.mark.parametrize(
    ("model", "resolved"),
    [
        ("gpt2", {"seq_len": 1024, "attention": "sdpa"}),
        ("llama-3.1-8b", {"seq_len": 2048, "attention": "sdpa"}),
        ("gemma-2-2b", {"seq_len": 2048, "attention": "eager"}),
    ],
)
def test_defaults_that_depend_on_the_model(model: str, resolved: dict[str, Any]) -> None:
    setup = memcalc.estimate(model).to_dict()["setup"]
    assert {name: setup[name] for name in resolved} == resolved


# --- Python


def test_the_public_names() -> None:
    assert {"InputError", "Model", "Report", "estimate", "load_model", "__version__"} <= set(memcalc.__all__)
    assert issubclass(memcalc.InputError, ValueError)
    assert list(inspect.signature(memcalc.estimate).parameters)[:2] == ["model", "params"]
    model = memcalc.load_model("gpt2")
    assert isinstance(model.num_parameters, int)
    assert isinstance(memcalc.estimate(model), memcalc.Report)


def test_the_error_is_the_line_that_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(memcalc.InputError) as error:
        memcalc.estimate("gpt2", zero=7)
    assert here(capsys, "estimate", "-m", "gpt2", "--zero", "7").stderr == f"memcalc: {error.value}\n"


# --- JSON


def check_keys(found: dict[str, Any], expected: set[str], where: str = "") -> None:
    assert expected <= set(found), f"{where} lacks {expected - set(found)}"
    added = set(found) - expected - ADDED.get(where, set())
    assert not added, f"{where} has {added}: put a new name under ADDED"


@each
def test_keys(document: dict[str, Any]) -> None:
    check_keys(document, TOP)
    assert document["schema_version"] == 1
    check_keys(document["model"], MODEL, "model")
    check_keys(document["memory"], MEMORY, "memory")
    check_keys(document["memory"]["phases"], {"forward", "backward", "step"}, "phases")
    check_keys(document["memory"]["at_peak"], AT_PEAK, "at_peak")
    assert "pp" in document["memory"]["rank"]
    for rank in document["memory"]["ranks"]:
        check_keys(rank, RANK, "ranks")
    for item in document["memory"]["items"]:
        check_keys(item, ITEM, "items")
    check_keys(document["communication"], COMMUNICATION, "communication")
    for total in ("per_step", "per_layer"):
        check_keys(document["communication"][total], {"payload", "wire"}, total)
    for item in document["communication"]["items"] + document["communication"].get("textbook", []):
        check_keys(item, COLLECTIVE, "collectives")
    if document["fit"] is not None:
        check_keys(document["fit"], FIT, "fit")
    if document["compute"] is not None:
        check_keys(document["compute"], COMPUTE, "compute")
        check_keys(document["compute"]["per_step"], {*COMPUTE_PHASES, "total"}, "compute per_step")
        for item in document["compute"]["items"]:
            check_keys(item, COMPUTED, "computed")


@each
def test_kinds_of_values(document: dict[str, Any]) -> None:
    memory = document["memory"]
    assert memory["peak_phase"] in memory["phases"]
    assert memory["items"]
    for item in memory["items"]:
        assert type(item["nbytes"]) is type(item["at_peak"]) is int
        assert item["component"] in {*AT_PEAK, "allocator", "reserved", "device"}
        assert item["basis"] in BASES
        assert item["name"]
        for dim, size in item["shape"]:
            assert isinstance(dim, str)
            assert type(size) is int
    for item in document["communication"]["items"]:
        assert item["axis"] in {"dp", "tp", "pp", "cp", "ep"}
        assert item["collective"] in {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "broadcast"}
        assert item["phase"] in {"forward", "backward", "step"}
        assert item["basis"] in BASES
        assert type(item["calls"]) is type(item["payload"]) is type(item["wire"]) is int


@each
def test_communication_totals_are_the_items(document: dict[str, Any]) -> None:
    communication = document["communication"]
    for unit in ("payload", "wire"):
        assert communication["per_step"][unit] == sum(item[unit] for item in communication["items"])
        assert 0 <= communication["per_layer"][unit] <= communication["per_step"][unit]


@each
def test_compute_totals_are_the_items(document: dict[str, Any]) -> None:
    compute = document["compute"]
    assert (compute is None) == (document["model"]["layers"] is None)  # a bare number of parameters
    if compute is None:
        return
    for phase in COMPUTE_PHASES:
        assert compute["per_step"][phase] == sum(i["flops"] for i in compute["items"] if i["phase"] == phase)
    assert compute["per_step"]["total"] == sum(item["flops"] for item in compute["items"])
    assert (compute["seconds_at_peak"] is None) == (document["setup"]["gpu"] is None)
    for item in compute["items"]:
        assert item["phase"] in COMPUTE_PHASES
        assert item["basis"] in BASES
        assert type(item["calls"]) is type(item["flops"]) is int


@each
def test_the_verdict_and_its_headroom_agree(document: dict[str, Any]) -> None:
    fit = document["fit"]
    assert (fit is None) == (document["setup"]["gpu"] is None)
    if fit is not None and fit["fits"] is not None:
        assert fit["headroom"] == fit["capacity"] - fit["needs"]
        assert fit["fits"] is (fit["headroom"] >= 0)
        assert fit["fits"] is (fit["answer"] in ("fits", "tight"))


@each
def test_the_document_is_plain_json(document: dict[str, Any]) -> None:
    assert json.loads(json.dumps(document, allow_nan=False)) == document
