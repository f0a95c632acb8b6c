"""DeepSpeed's JSON as it is written: read again it is the same setup, and DeepSpeed's own DeepSpeedConfig resolves it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from drawn_setups import GPT2, LLAMA, MIXTRAL, drawn, needless, read_again, setup_of
from records import examples

from memcalc.errors import InputError
from memcalc.formats.deepspeed_writer import DEFAULT_SIZES, write
from memcalc.inputs.model import Model
from memcalc.setup.setup import Setup
from memcalc.setup.zero_sizes import ZERO_SIZES


def written(model: Model = LLAMA, **options: Any) -> dict[str, Any]:
    """The JSON of a setup."""
    setup = setup_of({"engine": "deepspeed", "gpus": 8, **options}, model)
    assert setup is not None
    return json.loads(write(setup, model).text)


def test_what_is_written_is_read_as_the_same_setup(tmp_path: Path) -> None:
    for setup, model in drawn("deepspeed", examples(300)):
        out = write(setup, model)
        assert read_again("deepspeed", out, setup, model, tmp_path / "ds.json") == setup
        assert all(why and "\n" not in why for why in out.unsaid.values())


def test_no_option_is_named_without_need(tmp_path: Path) -> None:
    for setup, model in drawn("deepspeed", examples(100)):
        assert needless("deepspeed", write(setup, model), setup, model, tmp_path / "ds.json") == []


def resolved(content: dict[str, Any], setup: Setup, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What DeepSpeed makes of a file, over as many ranks as the setup has."""
    config = pytest.importorskip("deepspeed.runtime.config")
    ranks = SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda: setup.gpus)
    monkeypatch.setattr(config, "dist", ranks)
    mpu = SimpleNamespace(get_data_parallel_world_size=lambda: setup.dp) if setup.runs_gpt_model else None
    return config.DeepSpeedConfig(content, mpu)


def test_deepspeed_resolves_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed")
    for setup, model in drawn("deepspeed", 200):
        content = json.loads(write(setup, model).text)
        own = resolved(content, setup, monkeypatch)
        zero = own.zero_config
        assert int(zero.stage) == setup.zero
        assert bool(zero.overlap_comm) == (setup.overlap_comm if setup.overlap_comm is not None else setup.zero == 3)
        for name in DEFAULT_SIZES:
            assert getattr(setup, name) in (None, getattr(zero, name))
        for place, section in (
            (setup.offload_optimizer, zero.offload_optimizer),
            (setup.offload_params, zero.offload_param),
        ):
            device = "none" if section is None else section.device
            assert place == getattr(device, "value", device)
            assert section is None or section.pin_memory
        assert own.train_batch_size == setup.global_batch_size
        assert own.train_micro_batch_size_per_gpu == setup.micro_batch_size
        assert own.gradient_accumulation_steps == setup.micro_batches
        assert (own.gradient_clipping > 0) == setup.clip_grad_norm
        halves = {(True, False): "fp16-mixed", (False, True): "bf16-mixed", (False, False): "fp32"}
        assert setup.precision == halves[own.float16_config.enabled, own.bfloat16_config.enabled]
        assert setup.grad_dtype == (own.grad_accum_dtype or setup.precision.split("-")[0])
        experts = own.expert_parallel_config
        assert setup.ep == (experts.autoep_size if experts.enabled else 1)
        assert set(content) <= known_keys()


def known_keys() -> set[str]:
    """The keys of the top that DeepSpeed reads; it says nothing of others."""
    return {
        "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping", "bf16",
        "fp16", "data_types", "optimizer", "zero_allow_untested_optimizer", "zero_optimization", "sequence_parallel_size",
        "expert_parallel",
    }  # fmt: skip


def made_by_deepspeed(content: dict[str, Any], *, on_host: bool = False) -> Any:
    """The optimizer that DeepSpeed makes from a file: its class, and what it is called with."""
    engine = pytest.importorskip("deepspeed.runtime.engine").DeepSpeedEngine
    import torch

    own = SimpleNamespace(
        optimizer_params=lambda: content["optimizer"]["params"],
        optimizer_name=lambda: pytest.importorskip("deepspeed.runtime.config").DeepSpeedConfig(content).optimizer_name,
        zero_use_cpu_optimizer=lambda: on_host,
        zenflow=False,
        bf16_optimizer_states=lambda: False,
    )
    asked: list[Any] = []

    def configuration(*given: Any, **more: Any) -> Any:
        kind, keys = engine.get_optimizer_configuration(own, *given, **more)
        asked.append((kind.__name__, keys))
        return (kind if kind.__module__.startswith("torch.") else lambda *a, **k: k), keys

    own.get_optimizer_configuration = configuration
    made = engine._configure_basic_optimizer(own, [torch.zeros(2, 2, requires_grad=True)])
    return made, asked


ONE = {"gpus": 1, "zero": 1}


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
def test_adam_is_the_one_that_deepspeed_makes(optimizer: str, implementation: str) -> None:
    content = written(**ONE, optimizer=optimizer, optimizer_implementation=implementation)
    made, asked = made_by_deepspeed(content)
    ((kind, keys),) = asked
    if implementation == "fused":
        assert (kind, keys["adam_w_mode"]) == ("FusedAdam", optimizer == "adamw")
    else:
        assert kind == {"adam": "Adam", "adamw": "AdamW"}[optimizer]
        assert made.defaults["foreach"] is (False if implementation == "for-loop" else None)
        assert not made.defaults["fused"]


def test_adam_on_the_host() -> None:
    content = written(**ONE, offload_optimizer="cpu", optimizer="adam")
    _, asked = made_by_deepspeed(content, on_host=True)
    assert asked == [("DeepSpeedCPUAdam", {"adamw_mode": False, "fp32_optimizer_states": True})]


@pytest.mark.parametrize("optimizer", ["sgd", "sgd-momentum"])
@pytest.mark.parametrize("implementation", ["foreach", "fused", "for-loop"])
def test_sgd_is_torchs(optimizer: str, implementation: str) -> None:
    sizes = {"gpus": 1, "zero": 0} if optimizer == "sgd" else ONE
    content = written(**sizes, optimizer=optimizer, optimizer_implementation=implementation)
    made, _ = made_by_deepspeed(content)
    assert type(made).__name__ == "SGD"
    assert (made.defaults["momentum"] > 0) == (optimizer == "sgd-momentum")
    foreach, fused = {"foreach": (None, None), "fused": (None, True), "for-loop": (False, None)}[implementation]
    assert (made.defaults["foreach"], made.defaults["fused"]) == (foreach, fused)
    assert content.get("zero_allow_untested_optimizer", False) == (optimizer == "sgd-momentum")


def test_optimizers_that_deepspeed_does_not_make() -> None:
    for optimizer in ("lion", "adamw-8bit", "adafactor"):
        setup = setup_of({"engine": "deepspeed", "gpus": 8, "zero": 2, "optimizer": optimizer}, LLAMA)
        assert setup is not None
        out = write(setup, LLAMA)
        assert "script" in out.unsaid["optimizer"]
        content = json.loads(out.text)
        assert content["zero_allow_untested_optimizer"] is True
        assert "optimizer" not in content


def test_the_defaults_of_sizes_are_memcalcs() -> None:
    assert {name: default for name, (_, default) in ZERO_SIZES.items()} == DEFAULT_SIZES


def test_a_plain_file() -> None:
    setup = setup_of(
        {"gpus": 16, "zero": 3, "micro_batch_size": 2, "global_batch_size": 128, "recompute": "full"}, LLAMA
    )
    assert setup is not None
    out = write(setup, LLAMA)
    assert json.loads(out.text) == {
        "train_batch_size": 128,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
        "zero_optimization": {"stage": 3},
    }
    assert set(out.unsaid) == {"gpus", "seq_len", "recompute"}
    assert out.text.endswith("}\n")


def test_sizes_that_are_not_the_defaults_are_written_by_deepspeeds_names() -> None:
    sizes = {"max_live_parameters": 10**8, "sub_group_size": 10**7, "reduce_bucket_size": 10**6}
    assert written(zero=3, **sizes)["zero_optimization"] == {
        "stage": 3, "stage3_max_live_parameters": 10**8, "sub_group_size": 10**7, "reduce_bucket_size": 10**6
    }  # fmt: skip


def test_three_sizes_say_the_gpus(tmp_path: Path) -> None:
    from memcalc.formats.merged import merged

    (tmp_path / "ds.json").write_text(json.dumps(written(zero=2, cp=2, micro_batch_size=3)))
    _, options, _ = merged(LLAMA, {"deepspeed": str(tmp_path / "ds.json")})
    assert (options["gpus"], options["cp"]) == (8, 2)


def test_experts_and_parts_of_a_sequence() -> None:
    content = written(MIXTRAL, zero=2, ep=4)
    assert content["expert_parallel"] == {"enabled": True, "autoep_size": 4}
    assert written(cp=4, zero=3)["sequence_parallel_size"] == 4


def test_stages_of_megatron_deepspeed() -> None:
    setup = setup_of({"engine": "deepspeed", "gpus": 8, "zero": 1, "tp": 2, "pp": 2}, LLAMA)
    assert setup is not None
    out = write(setup, LLAMA)
    assert json.loads(out.text)["data_types"] == {"grad_accum_dtype": "fp32"}
    assert "Megatron-DeepSpeed" in out.unsaid["tp"]
    assert "Megatron-DeepSpeed" in out.unsaid["pp"]


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("none", "emit accelerate"), ("ddp", "emit accelerate"), ("fsdp2", "emit accelerate"),
        ("megatron", "emit megatron"),
    ],
)  # fmt: skip
def test_other_engines_are_refused(engine: str, words: str) -> None:
    setup = setup_of({"engine": engine, "gpus": 1 if engine == "none" else 8}, GPT2)
    assert setup is not None
    with pytest.raises(InputError) as error:
        write(setup, GPT2)
    assert str(error.value).startswith(f"--engine {engine}: ")
    assert words in str(error.value)
    assert "\n" not in str(error.value)
