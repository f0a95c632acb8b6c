"""Training arguments as they are written: read again they are the same setup, and transformers' and TRL's own parsers take
them."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from drawn_setups import GPT2, LLAMA, MIXTRAL, Stream, drawn, needless, read_again, setup_of
from records import examples

from memcalc.errors import InputError
from memcalc.formats.training_args_writer import write
from memcalc.formats.written import Written
from memcalc.inputs.model import Model, load_model
from memcalc.setup.setup import Setup

ENGINES = ("none", "ddp", "fsdp2", "deepspeed")
GEMMA2 = load_model(
    {
        "model_type": "gemma2", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "head_dim": 16,
        "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 512, "max_position_embeddings": 4096,
    }
)  # fmt: skip
TUNED: dict[str, tuple[Any, ...]] = {
    "task": ("pretrain", "sft", "dpo", "kto"),
    "lora_rank": (0, 8),
    "precision": ("fp32", "bf16", "fp16", "bf16-mixed", "bf16-autocast", "fp16-autocast"),
    "zero": (1, 2),
    "micro_batch_size": (1, 2, 3),
    "seq_len": (64, 512),
    "quantize": ("nf4", "fp4", "int8"),
    "quantize_compute_dtype": ("bf16", "fp32"),
    "quantize_storage": ("uint8", "bf16", "fp32"),
    "double_quant": (True,),
    "base_dtype": ("bf16", "fp16", "fp32"),
    "prepare_kbit_training": (True,),
    "precompute_reference": (True, False),
    "lora_targets": ("q_proj", "self_attn.q_proj,up_proj", "all-linear", "default"),
    "lora_dropout": (0.1,),
    "lora_bias": ("all",),
    "adapter_dtype": ("bf16", "fp32"),
    "dora": (True,),
    "modules_to_save": ("lm_head", "lm_head,embed_tokens"),
    "recompute": ("none", "full"),
    "recompute_layers": (2,),
    "reentrant_checkpoints": (True, False),
    "attention": ("eager", "sdpa"),
    "clip_grad_norm": (True, False),
    "kernels": ("hf", "fused"),
    "liger": ("rope", "rms_norm,geglu", "rope,swiglu"),
    "cross_entropy": ("eager", "fused", "liger", "flash", "chunked"),
    "optimizer": (
        "adam", "adam-8bit", "paged-adamw", "paged-adamw-8bit", "paged-lion", "lion", "lion-8bit", "muon", "galore-adamw",
        "apollo-adamw",
    ),
    "sync_each_micro_batch": (True, False),
    "input_require_grads": (True, False),
}  # fmt: skip
"""The options of fine-tuning and of the Trainer's own optimizers and kernels."""


def tuned(engine: str) -> Iterator[tuple[Setup, Model]]:
    """Yield random setups that memcalc takes, most of them of fine-tuning; always the same ones."""
    dice = random.Random(engine)
    while True:
        model = dice.choice((LLAMA, LLAMA, GEMMA2))
        options: dict[str, Any] = {"engine": engine, "gpus": 1 if engine == "none" else dice.choice((1, 2, 8))}
        first = [name for name in ("micro_batch_size", "task", "lora_rank", "precision", "zero") if dice.random() < 0.8]
        for name in (*first, *dice.sample(sorted({*TUNED} - {*first}), 14)):
            more = {**options, name: dice.choice(TUNED[name])}
            if setup_of(more, model) is not None:
                options = more
        steps = dice.choice((1, 3)) * options["gpus"] * options.get("micro_batch_size", 1)
        setup = setup_of({**options, "global_batch_size": steps}, model)
        assert setup is not None
        yield setup, model


TUNED_SETUPS = {engine: Stream(tuned(engine)) for engine in ENGINES}


def made(model: Model = LLAMA, **options: Any) -> Written:
    """A setup that memcalc takes, as it is written."""
    setup = setup_of(options, model)
    assert setup is not None
    return write(setup, model)


def content_of(model: Model = LLAMA, **options: Any) -> dict[str, Any]:
    return yaml.safe_load(made(model, **options).text)


def written(engine: str, count: int) -> Iterator[tuple[Setup, Model, Written]]:
    """Random setups that the Trainer has something like. A refusal is one line that names another format."""
    for setup, model in (*drawn(engine, count, (LLAMA, GPT2, MIXTRAL)), *TUNED_SETUPS[engine].first(count)):
        try:
            yield setup, model, write(setup, model)
        except InputError as error:
            assert re.fullmatch(r"--[^\n]*; allowed: [^\n]*, or emit [^\n]*", str(error))


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_written_is_read_as_the_same_setup(engine: str, tmp_path: Path) -> None:
    read, count = 0, examples(150)
    for setup, model, out in written(engine, count):
        assert read_again("training_args", out, setup, model, tmp_path / "args.yaml") == setup
        assert all(why and "\n" not in why for why in out.unsaid.values())
        read += 1
    assert read > count * 4 // 3


@pytest.mark.parametrize("engine", ENGINES)
def test_no_option_is_named_without_need(engine: str, tmp_path: Path) -> None:
    for setup, model, out in written(engine, examples(60)):
        assert needless("training_args", out, setup, model, tmp_path / "args.yaml") == []


@pytest.mark.slow
def test_the_random_setups_are_of_all_kinds() -> None:
    seen = {name: set[Any]() for name in ("task", "quantize", "kernels", "base_dtype", "precision", "optimizer")}
    for engine in ENGINES:
        for setup, _, _ in written(engine, 250):
            for name, values in seen.items():
                values.add(getattr(setup, name))
    assert seen["task"] == {"pretrain", "sft", "dpo", "kto"}
    assert seen["quantize"] == {"none", "nf4", "fp4", "int8"}
    assert seen["kernels"] == {"hf", "fused"}
    assert seen["base_dtype"] == {None, "bf16", "fp16", "fp32"}
    assert len(seen["precision"]) == 7
    assert {*TUNED["optimizer"], "adamw", "sgd", "sgd-momentum", "adafactor"} <= seen["optimizer"]


# transformers' and TRL's own parsers


STORAGE = {"uint8": None, "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def parsed(out: Written, setup: Setup) -> Any:
    """What the parser of the dataclasses that the first line names makes of a file: a namespace with all their fields.
    DeepSpeed's part is taken out: it wants a GPU at once."""
    pytest.importorskip("accelerate")
    from transformers import HfArgumentParser, TrainingArguments

    content = {key: value for key, value in yaml.safe_load(out.text).items() if key != "deepspeed"}
    kinds: list[Any] = [TrainingArguments]
    head = out.text.splitlines()[0]
    if "ModelConfig" in head:
        trl = pytest.importorskip("trl")
        kinds = [getattr(trl, f"{setup.task.upper()}Config") if setup.task != "pretrain" else TrainingArguments]
        kinds.append(trl.ModelConfig)
    assert all(kind.__name__ in head for kind in kinds)
    parser = HfArgumentParser(kinds)
    made = parser.parse_dict({**content, "use_cpu": True, "report_to": "none"})  # a key of nobody is an error
    return SimpleNamespace(**{key: value for part in made for key, value in vars(part).items()})


def some_parsed(engine: str, count: int) -> Iterator[tuple[Setup, Written, Any]]:
    for setup, _, out in written(engine, count):
        yield setup, out, parsed(out, setup)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_parser_resolves_the_same(engine: str) -> None:
    for setup, out, args in some_parsed(engine, 40):
        unsaid = out.unsaid
        assert args.per_device_train_batch_size == setup.micro_batch_size
        assert args.gradient_accumulation_steps == setup.micro_batches
        assert (args.max_grad_norm > 0) == setup.clip_grad_norm
        half, _, how = setup.precision.partition("-")
        mixes = how == ("autocast" if engine in ("none", "ddp") else "mixed")
        assert (args.bf16, args.fp16) == (mixes and half == "bf16", mixes and half == "fp16")
        plugin = args.fsdp_plugin_args or {}
        assert bool(plugin) == (engine == "fsdp2")
        if plugin:
            assert plugin["fsdp_version"] == 2
            assert plugin["reshard_after_forward"] == (setup.zero == 3)
            assert not plugin.get("cpu_offload")
        recomputes = args.activation_checkpointing, bool(plugin.get("activation_checkpointing"))
        assert sum(recomputes) == (setup.recompute == "full" and "recompute" not in unsaid)
        assert (args.ddp_find_unused_parameters is False) == (engine == "ddp")
        syncs = (args.accelerator_config.gradient_accumulation_kwargs or {}).get("sync_each_batch", False)
        assert syncs == bool(setup.sync_each_micro_batch)
        assert args.use_liger_kernel or setup.kernels == "hf"


@pytest.mark.parametrize("engine", ["none", "fsdp2", "deepspeed"])
def test_trl_resolves_the_same(engine: str) -> None:
    tasks = set[str]()
    for setup, out, args in some_parsed(engine, 60):
        if not hasattr(args, "use_peft"):
            continue
        tasks.add(setup.task)
        loads = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[args.dtype]
        half, _, how = setup.precision.partition("-")
        casts = how == "autocast" or (engine == "fsdp2" and how == "mixed")
        if engine == "fsdp2" and setup.quantize in ("nf4", "fp4") and how == "mixed":  # what is frozen stays as it is
            assert loads == (setup.base_dtype or half)
        else:
            assert loads == (setup.base_dtype if how == "autocast" and setup.base_dtype else "fp32" if casts else half)
        assert args.use_peft == (setup.lora_rank > 0)
        if args.use_peft:
            assert (args.lora_r, args.lora_dropout, args.use_dora) == (setup.lora_rank, setup.lora_dropout, setup.dora)
            saved = setup.modules_to_save.split(",") if setup.modules_to_save else None
            assert args.lora_modules_to_save == saved
        assert args.load_in_4bit == (setup.quantize in ("nf4", "fp4"))
        assert args.load_in_8bit == (setup.quantize == "int8")
        if args.load_in_4bit:
            assert (args.bnb_4bit_quant_type, args.use_bnb_nested_quant) == (setup.quantize, setup.double_quant)
            assert args.bnb_4bit_quant_storage == STORAGE[str(setup.quantize_storage)]
            assert "quantize_compute_dtype" in out.unsaid or setup.quantize_compute_dtype == loads
        assert (args.attn_implementation or "sdpa") == setup.attention or args.attn_implementation is None
        if setup.task != "pretrain":
            assert args.max_length == setup.seq_len
            assert getattr(args, "precompute_ref_log_probs", None) == setup.precompute_reference
    assert tasks >= ({"pretrain"} if engine == "fsdp2" else {"pretrain", "sft", "dpo"})


@pytest.mark.parametrize("task", ["sft", "dpo", "kto"])
def test_trls_scripts_take_the_file(task: str, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    pytest.importorskip("accelerate")
    out = made(
        engine="ddp", gpus=8, task=task, micro_batch_size=2, lora_rank=8, lora_targets="q_proj", precision="bf16",
        sync_each_micro_batch=True, recompute="full",
    )  # fmt: skip
    (tmp_path / "args.yaml").write_text(out.text)
    parser = trl.TrlParser((trl.ScriptArguments, getattr(trl, f"{task.upper()}Config"), trl.ModelConfig))
    given = ["--config", str(tmp_path / "args.yaml"), "--use_cpu", "--report_to", "none"]
    _, training, model = parser.parse_args_and_config(given)
    assert training.per_device_train_batch_size == 2
    assert training.accelerator_config.gradient_accumulation_kwargs == {"sync_each_batch": True}
    assert (model.use_peft, model.dtype, model.lora_target_modules) == (True, "bfloat16", r"(.*\.)?q_proj")


def test_deepspeeds_part_matches_the_trainers() -> None:
    """The Trainer compares what both say, and refuses what differs."""
    pytest.importorskip("accelerate")
    pytest.importorskip("deepspeed")
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    for setup, out, args in some_parsed("deepspeed", 80):
        args.world_size = setup.gpus
        config: Any = HfTrainerDeepSpeedConfig(yaml.safe_load(out.text)["deepspeed"])
        config.trainer_config_process(args)
        assert config.mismatches == []
        assert config.config.get("optimizer", {"params": {"lr": args.learning_rate}})["params"]["lr"] == (
            args.learning_rate
        )
        assert config.is_zero3() == (setup.zero == 3)


MADE: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("AdamW", {"fused": None}),
    "sgd": ("SGD", {}),
    "sgd-momentum": ("SGD", {"momentum": 0.9}),
    "adafactor": ("Adafactor", {}),
}


@pytest.mark.parametrize("optimizer", MADE)
def test_the_trainer_makes_the_optimizer(optimizer: str) -> None:
    setup = setup_of({"engine": "none", "optimizer": optimizer, "precision": "bf16-autocast"}, LLAMA)
    assert setup is not None
    args = parsed(write(setup, LLAMA), setup)
    from transformers import trainer_optimizer

    args.optim_args = args.optim_args or ""
    numbers = {"betas": (0.9, 0.999), "eps": 1e-8}
    context = trainer_optimizer.OptimizerContext(
        args, None, {"lr": 1e-3}, dict(numbers), trainer_optimizer._parse_optim_args(args.optim_args)
    )
    kind, keys = trainer_optimizer._OPTIMIZER_HANDLERS[args.optim](context)
    name, more = MADE[optimizer]
    assert kind.__name__ == name
    assert {key: keys.get(key) for key in more} == more


def test_fused_adamw_is_the_trainers_default() -> None:
    setup = setup_of({"engine": "none", "optimizer_implementation": "fused", "precision": "fp32"}, LLAMA)
    assert setup is not None
    out = write(setup, LLAMA)
    assert "optim" not in yaml.safe_load(out.text)
    assert "optimizer" not in out.unsaid
    assert parsed(out, setup).optim == "adamw_torch_fused"


@pytest.mark.parametrize("optimizer", TUNED["optimizer"])
def test_names_of_optimizers_are_transformers(optimizer: str) -> None:
    from transformers.training_args import OptimizerNames

    out = made(engine="none", optimizer=optimizer, precision="bf16-autocast")
    name = yaml.safe_load(out.text).get("optim")
    assert (name is None) == ("optimizer" in out.unsaid) == (optimizer in ("adam", "adam-8bit", "muon"))
    if name is not None:
        assert OptimizerNames(name).value.startswith(("paged", "lion", "galore", "apollo"))


def test_low_rank_optimizers_take_the_matrices_of_layers() -> None:
    from transformers.trainer_utils import check_target_module_exists

    pattern = content_of(engine="none", optimizer="galore-adamw", precision="bf16-autocast")["optim_target_modules"]
    assert check_target_module_exists(pattern, "model.layers.0.self_attn.q_proj")
    assert check_target_module_exists(pattern, "model.layers.11.mlp.down_proj")
    assert not check_target_module_exists(pattern, "lm_head")


def test_bitsandbytes_lion_is_another_one_over_16_bits() -> None:
    assert content_of(engine="none", optimizer="lion", precision="bf16-autocast")["optim"] == "lion_32bit"
    assert "optimizer" in made(engine="none", optimizer="lion", precision="bf16").unsaid


@pytest.mark.parametrize("name", ["q_proj", "self_attn.q_proj", "lm_head"])
def test_peft_finds_a_single_target(name: str) -> None:
    """ModelConfig makes a text of a list of one, and a text is a pattern for peft."""
    other = pytest.importorskip("peft.tuners.tuners_utils")
    out = content_of(engine="none", lora_rank=8, lora_targets=name)["lora_target_modules"]
    assert len(out) == 1
    config = SimpleNamespace(target_modules=out[0], exclude_modules=None)
    full = {"lm_head": "lm_head"}.get(name, "model.layers.3.self_attn.q_proj")
    assert other.check_target_module_exists(config, full)
    assert not other.check_target_module_exists(config, "model.layers.3.self_attn.sq_proj")


# Files as they are


def test_a_plain_file_has_keys_of_training_arguments_alone() -> None:
    out = made(
        gpus=8, precision="bf16-autocast", micro_batch_size=2, global_batch_size=64, recompute="full", clip_grad_norm=True
    )  # fmt: skip
    assert yaml.safe_load(out.text) == {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "bf16": True,
        "gradient_checkpointing": True,
        "optim": "adamw_torch",
        "ddp_find_unused_parameters": False,
    }
    assert set(out.unsaid) == {"gpus", "seq_len"}
    assert out.text.startswith("# TrainingArguments of transformers\n")


def test_fsdp() -> None:
    content = content_of(engine="fsdp2", gpus=8, recompute="full")
    section = {"version": 2, "reshard_after_forward": True, "activation_checkpointing": True}
    assert (content["fsdp"], content["fsdp_config"], content["bf16"]) == (True, section, True)
    assert "gradient_checkpointing" not in content
    adapted = content_of(
        engine="fsdp2", gpus=8, recompute="full", lora_rank=8
    )  # the embeddings' output wants a gradient
    assert adapted["gradient_checkpointing"] and "activation_checkpointing" not in adapted["fsdp_config"]


def test_deepspeed_is_nested() -> None:
    content = content_of(gpus=8, zero=3, clip_grad_norm=True)
    assert content["deepspeed"]["zero_optimization"] == {"stage": 3}
    assert content["deepspeed"]["optimizer"]["params"] == {"lr": "auto"}
    assert content["bf16"] and "max_grad_norm" not in content
    lion = content_of(gpus=8, zero=2, optimizer="lion")
    assert lion["optim"] == "lion_32bit" and "optimizer" not in lion["deepspeed"]


def test_qlora_as_trl_has_it() -> None:
    out = made(
        load_model("llama-2-7b"), task="sft", precision="bf16-autocast", base_dtype="bf16", lora_rank=16, quantize="nf4",
        lora_targets="all-linear", double_quant=True, recompute="full", optimizer="paged-adamw-8bit", seq_len=2048,
    )  # fmt: skip
    assert yaml.safe_load(out.text) == {
        "model_name_or_path": "meta-llama/Llama-2-7b-hf",
        "dtype": "bfloat16",
        "use_peft": True,
        "lora_r": 16,
        "lora_target_modules": ["all-linear"],
        "lora_dropout": 0.0,
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "use_bnb_nested_quant": True,
        "max_length": 2048,
        "packing": False,
        "per_device_train_batch_size": 1,
        "bf16": True,
        "gradient_checkpointing": True,
        "optim": "paged_adamw_8bit",
        "max_grad_norm": 0.0,
    }
    assert not out.unsaid
    assert out.text.startswith("# SFTConfig and ModelConfig of TRL: trl sft --config FILE\n")


def test_the_name_of_a_model_is_one_that_others_know() -> None:
    adapters = {"engine": "none", "lora_rank": 8}

    def name(model: Model) -> str | None:
        return content_of(model, **adapters).get("model_name_or_path")

    assert name(load_model("gpt3-125m")) == "gpt3-125m"  # is on no Hub
    assert name(load_model("qwen2-0.5b")) == "Qwen/Qwen2-0.5B"
    assert name(LLAMA) is None
    fields = dict(LLAMA.fields or {})
    assert name(load_model({**fields, "_name_or_path": "someone/model"})) == "someone/model"
    assert name(load_model({**fields, "_name_or_path": "Qwen/Qwen2-0.5B"})) is None  # it is not that model
    assert name(load_model({**fields, "_name_or_path": "a/b/c"})) is None


def test_liger() -> None:
    plain = {"engine": "none", "precision": "bf16"}
    assert content_of(**plain, kernels="fused")["use_liger_kernel"] is True
    assert "liger_kernel_config" not in content_of(**plain, kernels="fused")
    parts = content_of(**plain, liger="rope,rms_norm", cross_entropy="eager")["liger_kernel_config"]
    assert parts == {"rope": True, "rms_norm": True, "swiglu": False, "fused_linear_cross_entropy": False}
    loss = content_of(GEMMA2, **plain, cross_entropy="fused")["liger_kernel_config"]
    assert loss == {"rope": False, "rms_norm": False, "geglu": False}
    assert "use_liger_kernel" not in content_of(**plain, cross_entropy="chunked")


def test_what_the_trainer_does_not_do_is_named() -> None:
    assert "fp32 copies" in made(engine="none").unsaid["precision"]
    assert "autocast" in made(engine="fsdp2", gpus=8, precision="bf16-autocast").unsaid["precision"]
    assert "every n-th" in made(engine="none", precision="fp32", recompute="op").unsaid["recompute"]
    assert "engine" in made(engine="ddp", gpus=1).unsaid
    assert "loads" in made(engine="none", precision="bf16").unsaid["precision"]
    assert "precision" not in made(engine="none", precision="bf16", lora_rank=4).unsaid


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"engine": "megatron", "gpus": 8}, ("--engine megatron", "emit megatron")),
        ({"engine": "fsdp2", "gpus": 8, "tp": 2}, ("--tp 2", "torchtitan")),
        ({"engine": "fsdp2", "gpus": 8, "pp": 2, "global_batch_size": 16}, ("--pp 2", "torchtitan")),
        ({"engine": "fsdp2", "gpus": 8, "cp": 2}, ("--cp 2", "torchtitan")),
        ({"engine": "fsdp2", "gpus": 8, "shard_group": 4}, ("--shard-group 4", "torchtitan")),
        ({"engine": "deepspeed", "gpus": 8, "zero": 1, "tp": 2}, ("--tp 2", "emit deepspeed")),
        ({"engine": "deepspeed", "gpus": 8, "zero": 3, "cp": 2}, ("--cp 2", "emit accelerate")),
    ],
)
def test_refusals_are_one_line(options: dict[str, Any], words: tuple[str, str]) -> None:
    with pytest.raises(InputError) as error:
        made(**options)
    assert "\n" not in str(error.value)
    assert all(word in str(error.value) for word in words)
