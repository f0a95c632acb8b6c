"""DeepSpeed's JSON against DeepSpeed's own DeepSpeedConfig, and "auto" against transformers' own integration."""

from __future__ import annotations

import random
from typing import Any

import pytest

from memcalc import InputError
from memcalc.formats.deepspeed import Others, read
from memcalc.formats.found import ACCUMULATION, Found

SIZES = {
    "reduce_bucket_size": "reduce_bucket_size",
    "stage3_prefetch_bucket_size": "prefetch_bucket_size",
    "stage3_param_persistence_threshold": "param_persistence_threshold",
    "stage3_max_live_parameters": "max_live_parameters",
    "stage3_max_reuse_distance": "max_reuse_distance",
    "sub_group_size": "sub_group_size",
}
DEFAULTS = {
    "reduce_bucket_size": 5 * 10**8, "prefetch_bucket_size": 5 * 10**7, "param_persistence_threshold": 10**5,
    "max_live_parameters": 10**9, "max_reuse_distance": 10**9, "sub_group_size": 10**9,
}  # fmt: skip


def found(content: dict[str, Any], half: str | None = "bf16", hidden: int = 64) -> Found:
    return read("ds.json", content, Others(lambda where: hidden, half))


def values(content: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {name: one.value for name, one in found(content, **others).options.items()}


def chosen(chance: random.Random, **keys: tuple[Any, ...]) -> dict[str, Any]:
    """A part of the keys, each with one of its values."""
    return {key: chance.choice(those) for key, those in keys.items() if chance.random() < 0.6}


def configuration(chance: random.Random) -> dict[str, Any]:
    sizes = dict.fromkeys(SIZES, (0, 1, 7, 1000000.0, 500000000.0, 123456, "auto")) | {
        "reduce_bucket_size": (1, 5e8, 9, "auto")
    }
    zero = chosen(
        chance,
        stage=(0, 1, 2, 3, "3"),
        overlap_comm=(True, False, "auto"),
        contiguous_gradients=(True, False),
        offload_optimizer=({"device": "cpu", "pin_memory": True}, {"device": "none"}, {"device": "nvme"}, None),
        offload_param=({"device": "cpu"}, {"device": "none"}),
        **sizes,
    )
    half = chance.choice(
        [{"fp16": {"enabled": True}}, {"bf16": {"enabled": "true"}}, {"bfloat16": {"enabled": True}}, {}]
    )
    more = chosen(chance, gradient_clipping=(0, 0.0, 1, 0.3), gradient_accumulation_steps=(1, 4), steps_per_print=(5,))
    return {"train_micro_batch_size_per_gpu": chance.choice([1, 8]), "zero_optimization": zero, **half, **more}


def test_resolved_values_are_deepspeeds_own() -> None:
    config = pytest.importorskip("deepspeed.runtime.config")
    chance = random.Random(11)
    for _ in range(200):
        content = configuration(chance)
        own = config.DeepSpeedConfig(dict(content))
        zero = own.zero_config
        said = {**values(content)}
        assert said["zero"] == int(zero.stage)
        stage = said["zero"]
        for key, option in SIZES.items():
            in_use = (stage > 0) if key == "reduce_bucket_size" else stage == 3
            if content["zero_optimization"].get(key) == "auto" or not in_use:
                continue  # the Trainer fills "auto"; DeepSpeed takes its default
            least = 1 if key == "sub_group_size" else 0  # of 0 elements and of 1 each parameter is a group
            assert said.get(option, DEFAULTS[option]) == max(least, getattr(zero, key.removeprefix("stage3_")))
        for option, section in (("offload_optimizer", zero.offload_optimizer), ("offload_params", zero.offload_param)):
            device = (
                "none" if section is None or stage < (1 if option == "offload_optimizer" else 3) else section.device
            )
            device = "cpu" if device == "nvme" and stage < 3 else device  # only stage 3 has files
            assert said.get(option, "none") == getattr(device, "value", device)
        if said["zero"] == 2:
            assert said.get("overlap_comm", False) == zero.overlap_comm
        halves = {(True, False): "fp16-mixed", (False, True): "bf16-mixed", (False, False): "fp32"}
        assert said["precision"] == halves[own.float16_config.enabled, own.bfloat16_config.enabled]
        assert said["clip_grad_norm"] == (own.gradient_clipping > 0)
        assert said["micro_batch_size"] == own.train_micro_batch_size_per_gpu
        assert said.get(ACCUMULATION, 1) == own.gradient_accumulation_steps


@pytest.mark.parametrize(
    "content",
    [
        {"zero_optimization": {"stage": 4}},
        {"zero_optimization": {"stge": 2}},
        {"zero_optimization": {"stage": None, "reduce_bucket_size": 0}},
        {"zero_optimization": {"reduce_bucket_size": 1.5}},
        {"zero_optimization": {"offload_optimizer": {"device": "cpu", "pin": True}}},
        {"zero_optimization": {"offload_optimizer": {"device": "disk"}}},
        {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
        {"fp16": {"enable": True}},
        {"train_micro_batch_size_per_gpu": 0},
        {"train_micro_batch_size_per_gpu": "BATCH"},
    ],
)
def test_what_deepspeed_refuses_is_refused(content: dict[str, Any]) -> None:
    content = {"train_micro_batch_size_per_gpu": 1, **content}
    with pytest.raises(InputError, match=r"^--deepspeed ds\.json: "):
        found(content)
    config = pytest.importorskip("deepspeed.runtime.config")
    with pytest.raises((ValueError, AssertionError, TypeError)):
        config.DeepSpeedConfig(content)


AUTO = {
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto", "fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto"}},
    "zero_optimization": {
        "stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": "auto", "sub_group_size": 1e9,
    },
}  # fmt: skip


class Model:
    """As much of a model as the integration asks for."""

    def __init__(self, hidden: int) -> None:
        self.config = type("Config", (), {"hidden_size": hidden})()


@pytest.mark.parametrize("hidden", [48, 63, 4096, 12_289])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_sizes_that_are_auto_are_as_the_trainer_fills_them(hidden: int, stage: int) -> None:
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    content = AUTO | {"zero_optimization": {**AUTO["zero_optimization"], "stage": stage}}
    own = HfTrainerDeepSpeedConfig.__new__(HfTrainerDeepSpeedConfig)  # its __init__ wants accelerate
    own.config, own._stage, own.mismatches = {"zero_optimization": dict(content["zero_optimization"])}, stage, []
    own.get_value = lambda key, default=None: own.find_config_node(key)[0].get(key.split(".")[-1], default)  # type: ignore[method-assign]
    own.find_config_node = lambda key: (own.config.get(key.split(".")[0]), key.split(".")[-1])  # type: ignore[method-assign]
    own.is_zero3 = lambda: stage == 3  # type: ignore[method-assign]
    own.fill_match = lambda *_: None  # type: ignore[method-assign]
    arguments = type("Arguments", (), {"get_warmup_steps": lambda self, steps: 1})()
    own.trainer_config_finalize(arguments, Model(hidden), 10)
    filled = own.config["zero_optimization"]
    said = values(content, hidden=hidden)
    for key, option in list(SIZES.items())[: 3 if stage == 3 else 1]:
        assert said[option] == filled[key]
    assert "max_live_parameters" not in said  # "auto" that nobody fills is DeepSpeed's default


@pytest.mark.parametrize(("half", "precision"), [("bf16", "bf16-mixed"), ("fp16", "fp16-mixed"), (None, "fp32")])
def test_precision_that_is_auto_is_the_other_options(half: str | None, precision: str) -> None:
    assert values(AUTO, half=half)["precision"] == precision
    said = values(AUTO, half=half)
    assert not {"micro_batch_size", "global_batch_size", ACCUMULATION} & said.keys()
    assert said["clip_grad_norm"] is True
    assert said["optimizer"] == "adamw"


def test_old_keys() -> None:
    old = values({"zero_optimization": {"stage": 2, "cpu_offload": True}, "train_batch_size": 8})
    assert old["offload_optimizer"] == "cpu"
    assert old["global_batch_size"] == 8
    assert values({"zero_optimization": True})["zero"] == 1
    assert values({"zero_optimization": {"stage": 3, "cpu_offload_params": True}})["offload_params"] == "cpu"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"zero_optimization": {"stage": 1, "overlap_comm": True}}, "not modelled with stage 1"),
        ({"zero_optimization": {"stage": 2, "overlap_comm": True}}, "two buckets are counted"),
        ({"zero_optimization": {"stage": 3, "overlap_comm": False}}, "overlap_comm false"),
        ({"zero_optimization": {"stage": 1, "round_robin_gradients": True}}, "round_robin_gradients true"),
        ({"activation_checkpointing": {"partition_activations": True}}, "partition_activations true"),
        (
            {"zero_optimization": {"stage": 3, "stage3_use_all_reduce_for_fetch_params": True}},
            "use_all_reduce_for_fetch",
        ),
        (
            {"zero_optimization": {"stage": 3, "stage3_model_persistence_threshold": 1e5}},
            "model_persistence_threshold 100000",
        ),
        (
            {"zero_optimization": {"stage": 2, "use_multi_rank_bucket_allreduce": False}},
            "use_multi_rank_bucket_allreduce False",
        ),
        ({"communication_data_type": "fp32"}, "communication_data_type fp32"),
        ({"curriculum_learning": {"enabled": True}}, "curriculum_learning.enabled true"),
        ({"zero_optimisation": {"stage": 3}, "steps_per_print": 1}, "does not know and ignores zero_optimisation"),
    ],
)
def test_what_is_not_modelled_is_a_note(content: dict[str, Any], words: str) -> None:
    (note,) = found(content).notes
    assert words in note


def test_what_is_modelled_or_does_not_matter_is_no_note() -> None:
    content = AUTO | {"steps_per_print": 10, "wall_clock_breakdown": False, "zero_allow_untested_optimizer": True}
    content["zero_optimization"] = {**AUTO["zero_optimization"], "overlap_comm": True, "contiguous_gradients": True}
    assert found(content).notes == ()


@pytest.mark.parametrize(
    "content",
    [
        {"zero_optimization": {"stage": 3, "zero_quantized_nontrainable_weights": True}},
        {"zero_optimization": {"stage": 3, "mics_shard_size": 8}},
        {"optimizer": {"type": "MuAdam"}},
        {"optimizer": {"type": "Lamb"}, "fp16": {"enabled": True, "loss_scale": 128}},
        {"optimizer": {"params": {}}},
        {"amp": {"enabled": True}},
        {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
    ],
)
def test_what_an_estimate_would_be_wrong_without_is_refused(content: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"not modelled|allowed"):
        found(content)


@pytest.mark.parametrize(
    ("kind", "params", "optimizer"),
    [
        ("Adam", {}, "adamw"),
        ("Adam", {"adam_w_mode": False}, "adam"),
        ("AdamW", {}, "adamw"),
        ("Lion", {}, "lion"),
        ("SGD", {"momentum": 0.9}, "sgd-momentum"),
        ("SGD", {}, "sgd"),
        ("Lamb", {"max_coeff": 0.3}, "lamb"),
        ("OneBitAdam", {"freeze_step": 400, "cuda_aware": False, "comm_backend_name": "nccl"}, "onebit-adam"),
        ("OneBitLamb", {"freeze_step": 400, "factor_max": 4.0}, "onebit-lamb"),
        ("ZeroOneAdam", {"var_freeze_step": 400, "local_step_scaler": 16}, "zero-one-adam"),
    ],
)
def test_optimizers(kind: str, params: dict[str, Any], optimizer: str) -> None:
    assert values({"optimizer": {"type": kind, "params": params}})["optimizer"] == optimizer


ANY = (None, True, False, 0, 1, -1, 2.5, 10**30, "auto", "x", "", [], [1], {}, {"enabled": True}, {"device": 3}, "5e8")


def test_any_value_is_read_or_refused() -> None:
    chance = random.Random(3)
    keys = (
        "stage",
        *SIZES,
        "overlap_comm",
        "offload_optimizer",
        "cpu_offload",
        "mics_shard_size",
        "round_robin_gradients",
    )
    tops = (
        "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping", "fp16",
        "bf16", "optimizer", "amp", "tensor_parallel", "zero_optimization", "activation_checkpointing", "data_types",
        "communication_data_type", "sequence_parallel_size", "compile", "elasticity",
    )  # fmt: skip
    for _ in range(2000):
        content: dict[str, Any] = {
            "zero_optimization": {key: chance.choice(ANY) for key in keys if chance.random() < 0.2}
        }
        content |= {key: chance.choice(ANY) for key in tops if chance.random() < 0.1}
        try:
            found(content)
        except InputError as error:
            assert str(error).isprintable()
            assert len(str(error)) < 400


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        ({"type": "SGD"}, ("sgd", "foreach")),
        ({"type": "SGD", "params": {"momentum": 0.9, "fused": True}}, ("sgd-momentum", "fused")),
        ({"type": "AdamW", "params": {"torch_adam": True}}, ("adamw", "foreach")),
        ({"type": "AdamW", "params": {"torch_adam": True, "foreach": False}}, ("adamw", "for-loop")),
        ({"type": "Adam", "params": {"torch_adam": True, "adam_w_mode": False, "foreach": True}}, ("adam", "foreach")),
        ({"type": "AdamW"}, ("adamw", None)),
    ],
)
def test_implementations_of_torchs_optimizers(optimizer: dict[str, Any], expected: tuple[str, str | None]) -> None:
    said = values({"optimizer": optimizer})
    assert (said["optimizer"], said.get("optimizer_implementation")) == expected


def test_ranks_that_share_experts() -> None:
    experts = {"enabled": True, "autoep_size": 4, "use_grouped_mm": False, "comm_backend": "deepep"}
    said = found({"expert_parallel": experts})
    assert said.options["ep"].value == 4
    assert [note.split(":")[1].strip() for note in said.notes] == [
        "expert_parallel.use_grouped_mm false", "expert_parallel.comm_backend deepep"
    ]  # fmt: skip
    assert "ep" not in values({"expert_parallel": {**experts, "enabled": False}})
    with pytest.raises(InputError, match="autoep_size"):
        found({"expert_parallel": {"enabled": True, "autoep_size": 0}})


AUTO_SIZES: dict[str, dict[str, Any]] = {
    "offload_param": {
        "device": "nvme",
        "nvme_path": "/x",
        "buffer_size": "auto",
        "buffer_count": "auto",
        "pin_memory": "auto",
    },
    "offload_optimizer": {
        "device": "cpu",
        "buffer_count": "auto",
        "pin_memory": "auto",
        "fast_init": "auto",
        "ratio": "auto",
    },
}


@pytest.mark.parametrize("key", sorted(AUTO_SIZES))
def test_an_auto_that_nobody_fills_is_as_if_the_key_was_not_there(key: str) -> None:
    config = pytest.importorskip("deepspeed.runtime.zero.config")
    section = AUTO_SIZES[key]
    less = {name: value for name, value in section.items() if value != "auto"}
    zero = {"stage": 3, "zero_hpz_partition_size": "auto", "round_robin_gradients": "auto", "overlap_comm": "auto"}
    assert config.DeepSpeedZeroConfig(**zero, **{key: section}) == config.DeepSpeedZeroConfig(stage=3, **{key: less})
    ours, plain = (
        found({"zero_optimization": zero | {key: section}}),
        found({"zero_optimization": {"stage": 3, key: less}}),
    )
    assert ours.options == plain.options and ours.notes == plain.notes
