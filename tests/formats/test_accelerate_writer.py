"""accelerate's configuration file as it is written: read again it is the same setup, and accelerate's own launcher and plugins
resolve it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from drawn_setups import GPT2, LLAMA, MIXTRAL, drawn, needless, read_again, setup_of
from records import examples

from memcalc.errors import InputError
from memcalc.formats.accelerate_writer import write
from memcalc.formats.written import Written
from memcalc.inputs.model import Model
from memcalc.setup.setup import Setup

ENGINES = ("none", "ddp", "fsdp2", "deepspeed", "megatron")


def made(model: Model = LLAMA, **options: Any) -> Written:
    """A setup that memcalc takes, as it is written."""
    setup = setup_of(options, model)
    assert setup is not None
    return write(setup, model)


def written(engine: str, count: int) -> Iterator[tuple[Setup, Model, Written]]:
    """Random setups that accelerate has something like. A refusal is one line."""
    for setup, model in drawn(engine, count, (GPT2, LLAMA) if engine == "megatron" else (LLAMA, GPT2, MIXTRAL)):
        try:
            yield setup, model, write(setup, model)
        except InputError as error:
            assert str(error).startswith("--")
            assert "allowed: " in str(error)
            assert "\n" not in str(error)


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_written_is_read_as_the_same_setup(engine: str, tmp_path: Path) -> None:
    read, count = 0, examples(300)
    for setup, model, out in written(engine, 2 * count if engine == "megatron" else count):
        assert read_again("accelerate", out, setup, model, tmp_path / "acc.yaml") == setup
        assert all(why and "\n" not in why for why in out.unsaid.values())
        read += 1
    assert read > count * {"none": 0.96, "megatron": 0.13}.get(engine, 0.6)


@pytest.mark.parametrize("engine", ENGINES)
def test_no_option_is_named_without_need(engine: str, tmp_path: Path) -> None:
    for setup, model, out in written(engine, examples(60)):
        assert needless("accelerate", out, setup, model, tmp_path / "acc.yaml") == []


# accelerate's own launcher.


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("ACCELERATE_", "FSDP_", "MEGATRON_LM_", "PARALLELISM_CONFIG_")):
            monkeypatch.delenv(name)


def launched(text: str, folder: Path) -> tuple[Any, dict[str, str]]:
    """The arguments and the environment that `accelerate launch --config_file` gives to the processes."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import (
        prepare_deepspeed_cmd_env,
        prepare_multi_gpu_env,
        prepare_simple_launcher_cmd_env,
    )

    (folder / "acc.yaml").write_text(text)
    given = ["--config_file", str(folder / "acc.yaml"), "--main_process_port", "0", "train.py"]
    args, defaults, mixed_is_from_file = _validate_launch_command(launch_command_parser().parse_args(given))
    if args.use_deepspeed:
        fields = [*defaults.deepspeed_config, *(["mixed_precision"] if mixed_is_from_file else [])]
        args.deepspeed_fields_from_accelerate_config = ",".join(fields)
        return args, prepare_deepspeed_cmd_env(args)[1]
    if args.use_fsdp or args.use_megatron_lm or args.multi_gpu:
        return args, prepare_multi_gpu_env(args)
    return args, prepare_simple_launcher_cmd_env(args)[1]


def plugin_of(kind: str, environment: dict[str, str]) -> Any:
    """A plugin of accelerate's as the environment of a process makes it."""
    from accelerate import utils

    with utils.patch_environment(**environment):
        return getattr(utils, kind)()


def cases(engine: str, count: int, folder: Path) -> Iterator[tuple[Setup, Model, Any, dict[str, str]]]:
    """Random setups, and what the launcher makes of their files; it has started the right number of processes."""
    pytest.importorskip("accelerate", minversion="1.15")
    some = 0
    for setup, model, out in written(engine, count):
        args, environment = launched(out.text, folder)
        nodes = max(1, setup.gpus // setup.gpus_per_node)
        assert (args.num_processes, args.num_machines) == (setup.gpus, nodes)
        if hasattr(args, "nproc_per_node"):
            assert str(setup.gpus // nodes) == str(args.nproc_per_node)
        yield setup, model, args, environment
        some += 1
    assert some > count / 10


@pytest.mark.parametrize("engine", ["none", "ddp"])
def test_autocast_as_accelerate_has_it(engine: str, tmp_path: Path) -> None:
    for setup, _, args, environment in cases(engine, 60, tmp_path):
        assert bool(args.multi_gpu) == (engine == "ddp")
        half = environment["ACCELERATE_MIXED_PRECISION"]
        assert half == (setup.precision.split("-")[0] if setup.precision.endswith("-autocast") else "no")


def test_shards_as_accelerate_resolves_them(tmp_path: Path) -> None:
    for setup, _, args, environment in cases("fsdp2", 200, tmp_path):
        if args.use_parallelism_config:
            check_degrees(setup, args, environment)
        if not args.use_fsdp:  # slices alone
            assert setup.tp == setup.gpus
            continue
        plugin = plugin_of("FullyShardedDataParallelPlugin", environment)
        assert plugin.fsdp_version == 2
        assert plugin.reshard_after_forward == (setup.zero == 3)
        assert plugin.activation_checkpointing == (setup.recompute == "full" and setup.recompute_layers is None)
        assert plugin.auto_wrap_policy.__name__ == "transformer_auto_wrap_policy"
        half = environment["ACCELERATE_MIXED_PRECISION"]
        assert half == (setup.precision.split("-")[0] if setup.precision.endswith("-mixed") else "no")


def check_degrees(setup: Setup, args: Any, environment: dict[str, str]) -> None:
    """Compare accelerate's parallelism_config with a setup, after accelerate's own checks."""
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import DistributedType, patch_environment

    with patch_environment(**environment):
        config = ParallelismConfig()
    kind = DistributedType.FSDP if args.use_fsdp else DistributedType.MULTI_GPU
    config._validate_accelerator(
        SimpleNamespace(
            multi_device=not args.use_fsdp, num_processes=args.num_processes, is_fsdp2=args.use_fsdp,
            distributed_type=kind, is_main_process=False,
        )
    )  # fmt: skip
    assert (config.tp_size, config.cp_size) == (setup.tp, setup.cp)
    assert config.dp_shard_size * config.cp_size == setup.shard_group
    assert config.dp_replicate_size * config.dp_shard_size == setup.dp
    if setup.cp > 1:
        assert config.cp_handler.cp_comm_strategy == {"p2p": "alltoall"}.get(str(setup.cp_comm_type), "allgather")


def test_deepspeed_as_accelerate_resolves_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate", minversion="1.15")
    resolved = pytest.importorskip("deepspeed.runtime.config")
    for setup, _, args, environment in cases("deepspeed", 100, tmp_path):
        plugin = plugin_of("DeepSpeedPlugin", environment)
        plugin.set_mixed_precision(args.mixed_precision)
        shared = 1
        if args.use_parallelism_config:
            from accelerate.parallelism_config import ParallelismConfig
            from accelerate.utils import patch_environment

            with patch_environment(**environment):
                config = ParallelismConfig()
            shared, handler = config.sp_size, config.sp_handler
            assert (handler.sp_seq_length, handler.sp_seq_length_is_variable) == (setup.seq_len, False)
            assert handler.sp_attn_implementation == {"flash": "flash_attention_2"}.get(str(setup.attention), "sdpa")
        assert shared == setup.cp
        size = setup.micro_batch_size  # of the script's data loader
        plugin.deepspeed_config_process(
            must_match=False, gradient_clipping=1.0, train_micro_batch_size_per_gpu=size,
            train_batch_size=size * plugin.get_value("gradient_accumulation_steps") * setup.gpus // shared,
        )  # fmt: skip
        ranks = SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda gpus=setup.gpus // shared: gpus)
        monkeypatch.setattr(resolved, "dist", ranks)
        own = resolved.DeepSpeedConfig({key: one for key, one in plugin.deepspeed_config.items() if key[:5] != "steps"})
        assert int(own.zero_config.stage) == setup.zero
        assert own.train_batch_size == setup.global_batch_size
        assert own.gradient_accumulation_steps == setup.micro_batches
        assert own.gradient_clipping == 1  # off is not to be had
        halves = {(True, False): "fp16-mixed", (False, True): "bf16-mixed", (False, False): "fp32"}
        assert setup.precision == halves[own.float16_config.enabled, own.bfloat16_config.enabled]
        device = own.zero_config.offload_optimizer.device
        assert setup.offload_optimizer == getattr(device, "value", device)


def test_megatron_as_accelerate_resolves_it(tmp_path: Path) -> None:
    for setup, _, args, environment in cases("megatron", 300, tmp_path):
        plugin = plugin_of("MegatronLMPlugin", environment)
        plugin.set_mixed_precision(args.mixed_precision)
        plugin.set_training_args(setup.micro_batch_size, setup.dp)
        theirs = plugin.megatron_lm_default_args
        assert theirs["tensor_model_parallel_size"] == setup.tp
        assert theirs["pipeline_model_parallel_size"] == setup.pp
        assert theirs["context_parallel_size"] == setup.cp
        assert theirs["expert_model_parallel_size"] == setup.ep
        assert theirs["global_batch_size"] == setup.global_batch_size
        assert theirs["use_distributed_optimizer"] == (setup.zero == 1)
        assert theirs["sequence_parallel"] == setup.sequence_parallel
        assert (theirs["clip_grad"] > 0) == setup.clip_grad_norm
        assert theirs["recompute_granularity"] == setup.recompute
        if setup.recompute == "full":
            some = setup.recompute_layers
            assert theirs["recompute_method"] == ("uniform" if some is None else "block")
            assert theirs["recompute_num_layers"] == (some or 1)
        assert theirs["decoder_last_pipeline_num_layers"] == setup.last_stage_layers
        assert not theirs["use_rotary_position_embeddings"]
        assert theirs["hidden_dropout"] == 0.1  # as in the model's configuration
        half = "bf16" if theirs.get("bf16") else "fp16" if theirs.get("fp16") else "fp32"
        assert setup.precision.split("-")[0] == half


# Files.


def test_a_plain_file_of_shards() -> None:
    out = made(engine="fsdp2", gpus=16, precision="bf16-mixed", grad_dtype="bf16", recompute="full")
    assert out.text == (
        "compute_environment: LOCAL_MACHINE\n"
        "distributed_type: FSDP\n"
        "mixed_precision: bf16\n"
        "fsdp_config:\n"
        "  fsdp_version: 2\n"
        "  fsdp_reshard_after_forward: true\n"
        "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
        "  fsdp_activation_checkpointing: true\n"
        "num_machines: 2\n"
        "num_processes: 16\n"
    )
    assert set(out.unsaid) == {"seq_len"}
    assert "grad_dtype" in made(engine="fsdp2", gpus=16).unsaid


def test_replicas_of_shards() -> None:
    content = yaml.safe_load(made(engine="fsdp2", gpus=16, tp=2, shard_group=2).text)
    assert content["parallelism_config"] == {
        "parallelism_config_dp_replicate_size": 4,
        "parallelism_config_dp_shard_size": 2,
        "parallelism_config_tp_size": 2,
    }


def test_words_that_yaml_takes_for_switches_are_quoted() -> None:
    out = made(engine="none", precision="fp32")
    content = yaml.safe_load(out.text)
    assert (content["distributed_type"], content["mixed_precision"]) == ("NO", "no")
    assert set(out.unsaid) == {"seq_len"}


def test_a_plain_file_of_deepspeed() -> None:
    out = made(engine="deepspeed", gpus=8, zero=2, clip_grad_norm=True, global_batch_size=32, micro_batch_size=2)
    assert yaml.safe_load(out.text) == {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {"zero_stage": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0},
        "mixed_precision": "bf16",
        "num_machines": 1,
        "num_processes": 8,
    }
    assert set(out.unsaid) == {"seq_len", "micro_batch_size"}


def test_what_only_the_json_of_deepspeed_says() -> None:
    out = made(engine="deepspeed", gpus=8, zero=3, reduce_bucket_size=10**6, max_live_parameters=10**6)
    assert {"reduce_bucket_size", "max_live_parameters", "clip_grad_norm"} <= set(out.unsaid)
    assert "memcalc emit deepspeed" in out.unsaid["reduce_bucket_size"]


def test_parts_of_a_sequence_with_deepspeed() -> None:
    out = made(engine="deepspeed", gpus=8, zero=3, cp=4, seq_len=1024)
    assert yaml.safe_load(out.text)["parallelism_config"] == {
        "parallelism_config_sp_size": 4,
        "parallelism_config_sp_seq_length": 1024,
        "parallelism_config_sp_seq_length_is_variable": False,
    }
    assert "seq_len" not in out.unsaid


def test_the_scripts_part_is_unsaid() -> None:
    out = made(engine="ddp", gpus=4, global_batch_size=8, lora_rank=8, recompute="full", optimizer="adafactor")
    assert {"global_batch_size", "lora_rank", "recompute", "optimizer", "seq_len", "precision"} <= set(out.unsaid)
    assert "Accelerator(gradient_accumulation_steps" in out.unsaid["global_batch_size"]
    assert "fp32 copies" in out.unsaid["precision"]


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (LLAMA, {"engine": "ddp", "gpus": 1}, "--gpus 1: accelerate has no DDP"),
        (LLAMA, {"engine": "ddp", "gpus": 12}, "--gpus 12: accelerate starts as many processes on every node"),
        (LLAMA, {"engine": "fsdp2", "gpus": 8, "shard_group": 1}, "--shard-group 1: .*allowed: 2, 4, 8$"),
        (LLAMA, {"engine": "fsdp2", "gpus": 8, "cp": 2, "shard_group": 2}, "--shard-group 2: .*allowed: 4, 8$"),
        (
            LLAMA,
            {"engine": "fsdp2", "gpus": 8, "tp": 8},
            "--precision bf16-mixed: .*allowed: fp32, bf16, or a smaller --tp$",
        ),
        (LLAMA, {"engine": "fsdp2", "gpus": 8, "pp": 2, "global_batch_size": 8}, "--pp 2: .*emit torchtitan$"),
        (LLAMA, {"engine": "deepspeed", "gpus": 8, "tp": 2}, "--tp 2: .*emit deepspeed$"),
        (LLAMA, {"engine": "deepspeed", "gpus": 8, "pp": 2, "zero": 1}, "--pp 2: .*emit deepspeed$"),
        (LLAMA, {"engine": "megatron", "gpus": 8, "recompute": "full"}, "--engine megatron: .*emit megatron$"),
        (GPT2, {"engine": "megatron", "gpus": 8}, "--recompute none: .*emit megatron$"),
        (
            GPT2,
            {"engine": "megatron", "gpus": 8, "pp": 2, "recompute": "full", "first_stage_layers": 2},
            "--first-stage-layers 2: .*leave it out, or emit megatron$",
        ),
    ],
)
def test_what_accelerate_has_nothing_like(model: Model, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        made(model, **options)
