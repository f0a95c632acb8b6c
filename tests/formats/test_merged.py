"""Options and files as one setup."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import memcalc
from memcalc import InputError
from memcalc.decisions.compare import compare
from memcalc.decisions.fit import fit
from memcalc.planning.plan import plan

SMALL = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128,
}  # fmt: skip
ZERO3 = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}


def setup_of(**options: Any) -> Any:
    return memcalc.estimate(SMALL, seq_len=16, **options).setup


def test_a_file_is_the_options_that_it_says() -> None:
    said = memcalc.estimate(SMALL, seq_len=16, gpus=4, deepspeed=ZERO3)
    same = memcalc.estimate(
        SMALL, seq_len=16, gpus=4, engine="deepspeed", zero=3, micro_batch_size=2, clip_grad_norm=True,
        precision="bf16-mixed",
    )  # fmt: skip
    assert said.to_dict() == same.to_dict()


def test_options_win_over_files() -> None:
    setup = setup_of(gpus=4, deepspeed=ZERO3, zero=2, micro_batch_size=1, precision="fp32")
    assert (setup.zero, setup.micro_batch_size, setup.precision, setup.engine) == (2, 1, "fp32", "deepspeed")


def test_origins_say_where_each_value_came_from(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(ZERO3))
    report = memcalc.estimate(SMALL, gpus=4, seq_len=16, deepspeed=path, zero=2)
    assert report.files is not None
    assert report.files.origins["micro_batch_size"] == "ds.json: train_micro_batch_size_per_gpu"
    assert "zero" not in report.files.origins


def test_notes_of_files_are_notes_of_the_report() -> None:
    overlapping = {**ZERO3, "zero_optimization": {"stage": 3, "overlap_comm": False}}
    notes = memcalc.estimate(SMALL, seq_len=16, gpus=4, deepspeed=overlapping).to_dict()["notes"]
    assert any("overlap_comm false" in note for note in notes)


def batches(gpus: int | None = None, given: dict[str, int] | None = None, **sizes: int) -> tuple[int, int, int]:
    """GPUs, micro-batch and batch of a DeepSpeed configuration with these sizes."""
    names = {
        "micro": "train_micro_batch_size_per_gpu",
        "steps": "gradient_accumulation_steps",
        "batch": "train_batch_size",
    }
    content = {names[name]: size for name, size in sizes.items()}
    setup = setup_of(deepspeed=content, **({} if gpus is None else {"gpus": gpus}), **(given or {}))
    return setup.gpus, setup.micro_batch_size, setup.global_batch_size


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"micro": 2}, (4, 2, 8)),
        ({"micro": 2, "steps": 3}, (4, 2, 24)),
        ({"batch": 32, "micro": 2}, (4, 2, 32)),
        ({"batch": 32, "steps": 2}, (4, 4, 32)),
        ({"batch": 32}, (4, 8, 32)),
        ({"batch": 24, "micro": 2, "steps": 3}, (4, 2, 24)),
    ],
)
def test_two_sizes_make_the_third_as_deepspeed_does(sizes: dict[str, int], expected: tuple[int, int, int]) -> None:
    assert batches(4, **sizes) == expected
    config = pytest.importorskip("deepspeed.runtime.config").DeepSpeedConfig.__new__(
        pytest.importorskip("deepspeed.runtime.config").DeepSpeedConfig
    )
    config.train_batch_size, config.world_size = sizes.get("batch"), 4
    config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps = sizes.get("micro"), sizes.get("steps")
    config._configure_train_batch_size()
    assert (4, config.train_micro_batch_size_per_gpu, config.train_batch_size) == expected


def test_three_sizes_make_the_gpus() -> None:
    assert batches(batch=24, micro=2, steps=3) == (4, 2, 24)


def test_given_sizes_replace_those_of_the_file() -> None:
    assert batches(4, given={"micro_batch_size": 1}, batch=24, micro=2, steps=3) == (4, 1, 24)
    assert batches(4, given={"global_batch_size": 48}, batch=24, micro=2, steps=3) == (4, 2, 48)
    assert batches(2, given={"global_batch_size": 12}, micro=2, steps=3) == (2, 2, 12)


@pytest.mark.parametrize("sizes", [{"batch": 24, "micro": 2, "steps": 3}, {"batch": 30}, {"batch": 30, "steps": 2}])
def test_sizes_that_do_not_go_together_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(InputError, match="train_batch_size"):
        batches(8, **sizes)


def test_auto_needs_a_model() -> None:
    content = {"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}}
    with pytest.raises(InputError, match=r"reduce_bucket_size .*depends on the hidden size of the model; give --model"):
        memcalc.estimate(params="7B", gpus=4, deepspeed=content)
    assert setup_of(gpus=4, deepspeed=content).reduce_bucket_size == 64 * 64


SFT = {
    "dataset_text_field": "text",
    "max_length": 32,
    "per_device_train_batch_size": 2,
    "bf16": True,
    "dtype": "bfloat16",
}
LAUNCHED = {"compute_environment": "LOCAL_MACHINE", "mixed_precision": "bf16", "num_processes": 4, "num_machines": 1}
ZERO_2_FILE = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}, "gradient_clipping": "auto"}


def test_a_trainer_under_accelerate_has_the_engines_precision() -> None:
    sharded = {
        "distributed_type": "FSDP",
        "fsdp_config": {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
    }
    report = memcalc.estimate(SMALL, training_args=SFT, accelerate={**LAUNCHED, **sharded})
    setup = report.setup
    assert (setup.engine, setup.zero, setup.gpus, setup.precision, setup.grad_dtype) == (
        "fsdp2",
        3,
        4,
        "bf16-mixed",
        "bf16",
    )
    assert (setup.micro_batch_size, setup.seq_len, setup.task) == (2, 32, "pretrain")
    assert any("SFTTrainer's own head is not modelled with engine fsdp2" in note for note in report.to_dict()["notes"])
    zero = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 2}}
    setup = memcalc.estimate(SMALL, training_args=SFT, accelerate={**LAUNCHED, **zero}).setup
    assert (setup.engine, setup.zero, setup.precision, setup.task, setup.micro_batch_size) == (
        "deepspeed", 2, "bf16-mixed", "sft", 2,
    )  # fmt: skip


def test_fsdp_in_the_trainers_own_arguments() -> None:
    plain = {"per_device_train_batch_size": 2, "fsdp": True}
    mixed = setup_of(gpus=4, training_args={**plain, "bf16": True})
    assert (mixed.engine, mixed.precision, mixed.grad_dtype) == ("fsdp2", "bf16-mixed", "bf16")
    pure = setup_of(gpus=4, training_args={**plain, "dtype": "bfloat16"})  # no mixed precision: nothing is cast
    assert (pure.engine, pure.precision, pure.grad_dtype) == ("fsdp2", "bf16", "bf16")


def test_a_file_may_name_another_one(tmp_path: Path) -> None:
    """As it is seen from the working directory, or from a folder above the file."""
    (tmp_path / "configs").mkdir()
    (tmp_path / "train").mkdir()
    named, sft, launch = (
        tmp_path / "configs" / "ds.json",
        tmp_path / "train" / "sft.json",
        tmp_path / "train" / "acc.yaml",
    )
    named.write_text(json.dumps(ZERO_2_FILE))
    sft.write_text(json.dumps({**SFT, "deepspeed": "configs/ds.json"}))
    launched = {name: value for name, value in LAUNCHED.items() if name != "mixed_precision"}
    launched |= {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "configs/ds.json"}}
    launch.write_text(json.dumps(launched))
    setup = memcalc.estimate(SMALL, gpus=4, training_args=sft).setup
    assert (setup.engine, setup.zero, setup.precision) == ("deepspeed", 2, "bf16-mixed")
    setup = memcalc.estimate(SMALL, accelerate=launch, seq_len=16).setup
    assert (setup.engine, setup.zero, setup.gpus) == ("deepspeed", 2, 4)
    named.unlink()
    with pytest.raises(InputError, match=r"sft\.json: deepspeed configs/ds\.json: no such file; .*--deepspeed"):
        memcalc.estimate(SMALL, gpus=4, training_args=sft)
    given = memcalc.estimate(SMALL, gpus=4, training_args=sft, deepspeed=ZERO_2_FILE)
    assert given.setup.zero == 2


def test_the_fsdp_file_of_training_arguments_is_read(tmp_path: Path) -> None:
    (tmp_path / "fsdp.json").write_text(json.dumps({"version": 2, "reshard_after_forward": False}))
    (tmp_path / "ta.json").write_text(json.dumps({**SFT, "fsdp": "full_shard auto_wrap", "fsdp_config": "fsdp.json"}))
    setup = memcalc.estimate(SMALL, gpus=4, training_args=tmp_path / "ta.json").setup
    assert (setup.engine, setup.zero) == ("fsdp2", 2)


PLAIN = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "dtype": "float32"}
MULTI = {**LAUNCHED, "distributed_type": "MULTI_GPU"}


def plain(**more: Any) -> Any:
    return memcalc.estimate(SMALL, gpus=4, seq_len=16, training_args={**PLAIN, **more}).setup


def test_a_deepspeed_file_without_a_dtype_has_the_launchers() -> None:
    zero = {"zero_optimization": {"stage": 2}}
    assert plain(bf16=True, deepspeed=zero).precision == "bf16-mixed"
    assert plain(deepspeed=zero).precision == "fp32"
    assert setup_of(gpus=4, deepspeed={"train_micro_batch_size_per_gpu": 1, **zero}).precision == "fp32"


def test_a_switch_that_is_off_leaves_accelerates_precision() -> None:
    both = {"training_args": {**PLAIN, "bf16": False}, "accelerate": MULTI}
    assert memcalc.estimate(SMALL, seq_len=16, **both).setup.precision == "bf16-autocast"


def test_clipping_under_deepspeed() -> None:
    auto = {"gradient_clipping": "auto", "zero_optimization": {"stage": 2}}
    assert plain(max_grad_norm=0, deepspeed=auto).clip_grad_norm is False
    assert plain(deepspeed=auto).clip_grad_norm is True
    assert plain(max_grad_norm=0, deepspeed={"zero_optimization": {"stage": 2}}).clip_grad_norm is True


def test_recomputation_that_either_file_asks_for() -> None:
    sharded = {
        **LAUNCHED,
        "distributed_type": "FSDP",
        "fsdp_config": {"fsdp_version": 2, "fsdp_activation_checkpointing": True},
    }
    setup = memcalc.estimate(
        SMALL, seq_len=16, training_args={**PLAIN, "gradient_checkpointing": False}, accelerate=sharded
    ).setup
    assert setup.recompute == "full"


@pytest.mark.parametrize("key", ["train_micro_batch_size_per_gpu", "gradient_accumulation_steps"])
def test_a_deepspeed_file_has_to_match_the_trainers_defaults(key: str) -> None:
    with pytest.raises(InputError, match=f"contradicts .*{key} 3"):
        memcalc.estimate(SMALL, gpus=4, seq_len=16, training_args={"bf16": True}, deepspeed={key: 3})


def test_a_refusal_says_the_file_and_the_key() -> None:
    moved = {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}
    with pytest.raises(
        InputError, match=r"^--offload-params nvme: .*\(from --deepspeed: zero_optimization.offload_param.device\)$"
    ):
        setup_of(gpus=4, deepspeed=moved, optimizer="lion")
    with pytest.raises(InputError, match=r"^--offload-params nvme: [^(]*\(DeepSpeedCPUAdam\)$"):
        setup_of(gpus=4, zero=3, offload_params="nvme", optimizer="lion")


def test_files_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(
        InputError, match=r"train_micro_batch_size_per_gpu 1: contradicts .*per_device_train_batch_size 2"
    ):
        memcalc.estimate(SMALL, gpus=4, training_args=SFT, deepspeed={**ZERO3, "train_micro_batch_size_per_gpu": 1})
    with pytest.raises(InputError, match=r"fp16-mixed contradicts .*bf16"):
        memcalc.estimate(SMALL, gpus=4, training_args=SFT, deepspeed={"fp16": {"enabled": True}})
    mended = memcalc.estimate(SMALL, gpus=4, training_args=SFT, deepspeed=ZERO3, micro_batch_size=1)
    assert mended.setup.micro_batch_size == 1


@pytest.mark.parametrize(
    ("training_args", "words"),
    [
        ({"dtype": "float32", "use_liger_kernel": True}, "Liger's kernels are not modelled under autocast"),
    ],
)
def test_what_is_not_modelled_beside_the_rest_is_left_out_with_a_note(
    training_args: dict[str, Any], words: str
) -> None:
    plain = {"per_device_train_batch_size": 2, "bf16": True}
    report = memcalc.estimate(SMALL, seq_len=16, training_args={**plain, **training_args})
    assert any(words in note for note in report.to_dict()["notes"]), report.to_dict()["notes"]


def test_clipping_beside_trained_modules() -> None:
    lora = {"use_peft": True, "lora_r": 4, "lora_modules_to_save": ["lm_head"], "dtype": "bfloat16", "bf16": False}
    content = {"per_device_train_batch_size": 2, **lora}
    assert setup_of(training_args=content).clip_grad_norm is True
    assert setup_of(training_args=content, adapter_dtype="bf16").clip_grad_norm is True


def test_clipping_with_the_optimizer_on_the_host() -> None:
    moved = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}, "bf16": {"enabled": True}}
    report = memcalc.estimate(SMALL, gpus=4, seq_len=16, deepspeed={**moved, "gradient_clipping": 1.0})
    assert report.setup.clip_grad_norm is True


def test_a_given_option_drops_what_went_with_the_files_value() -> None:
    setup = setup_of(
        gpus=4, deepspeed={**ZERO3, "zero_optimization": {"stage": 3, "sub_group_size": 1000}}, engine="fsdp2"
    )
    assert (setup.engine, setup.zero, setup.sub_group_size) == ("fsdp2", 3, None)


STAGED = {
    "stage": 2, "overlap_comm": True, "reduce_bucket_size": 1000, "sub_group_size": 500,
    "stage3_max_live_parameters": 77, "offload_optimizer": {"device": "cpu"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (2, 1000, None, None, True, "cpu")),
        ({"zero": 0}, (0, None, None, None, None, "none")),
        ({"zero": 1}, (1, 1000, None, None, False, "cpu")),
        ({"zero": 3}, (3, 1000, 500, 77, None, "cpu")),
        ({"engine": "fsdp2"}, (3, None, None, None, None, "none")),
    ],
)
def test_a_given_stage_takes_what_the_file_says_of_that_stage(given: dict[str, Any], expected: tuple[Any, ...]) -> None:
    s = setup_of(gpus=4, deepspeed={**ZERO3, "zero_optimization": STAGED}, **given)
    found = s.zero, s.reduce_bucket_size, s.sub_group_size, s.max_live_parameters, s.overlap_comm, s.offload_optimizer
    assert found == expected


def test_the_model_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    report = memcalc.estimate(training_args={**SFT, "model_name_or_path": str(tmp_path)})
    assert report.model.num_parameters == memcalc.load_model(SMALL).num_parameters
    with pytest.raises(InputError, match=r"\(from --training-args: model_name_or_path; --model replaces it\)$"):
        memcalc.estimate(training_args={**SFT, "model_name_or_path": str(tmp_path / "none.json")})
    assert memcalc.estimate(SMALL, training_args={**SFT, "model_name_or_path": "./none"}).setup.micro_batch_size == 2


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("deepspeed", 3),
        ("deepspeed", ["a"]),
        ("deepspeed", "nowhere.json"),
        ("accelerate", "nowhere.yaml"),
        ("training_args", True),
        ("torchtitan", b"x"),
    ],
)
def test_what_is_no_file_is_refused(name: str, source: Any) -> None:
    with pytest.raises(InputError, match=f"^--{name.replace('_', '-')} "):
        setup_of(**{name: source})


def test_every_question_takes_files() -> None:
    gpus = {"gpus": 4, "seq_len": 16, "deepspeed": ZERO3}
    compared = compare(SMALL, **{**gpus, "gpus": [2, 4]})
    assert [one.report.setup.zero for one in compared.columns if one.report] == [3, 3]
    found = fit("micro-batch-size", SMALL, gpu="a100-80gb", **gpus)
    assert found.value is not None
    assert found.value > 2
    plans = plan(SMALL, gpu="a100-80gb", global_batch_size=8, micro_batch_size=1, top=1, **gpus)
    assert plans.plans[0].layout.engine == "deepspeed"


@pytest.mark.parametrize(
    ("name", "source", "words"),
    [
        ("torchtitan", ZERO3, "has no key of torchtitan's"),
        ("deepspeed", {"model": {"name": "llama3"}}, "has no key that DeepSpeed knows"),
        ("training_args", ZERO3, "expected a file of training arguments"),
        ("accelerate", ZERO3, "unknown key"),
        ("megatron_args", "--foo 3", "holds no arguments of Megatron-LM"),
    ],
)
def test_a_file_of_another_tool_is_refused(name: str, source: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        memcalc.estimate(SMALL, **{name: source})


def test_megatrons_shared_states_without_a_number_of_gpus_are_noted() -> None:
    arguments = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 --bf16"
    )
    words = "the launcher says how many GPUs share the states"
    sharded = f"{arguments} --tokenizer-type NullTokenizer --vocab-size 127 --use-distributed-optimizer"
    assert words in " ".join(memcalc.estimate(megatron_args=sharded).files.notes)
    for other in ({"gpus": 8}, {"zero": 0}):
        assert words not in " ".join(memcalc.estimate(megatron_args=sharded, **other).files.notes)
    whole = sharded.replace(" --use-distributed-optimizer", "")
    assert words not in " ".join(memcalc.estimate(megatron_args=whole).files.notes)
