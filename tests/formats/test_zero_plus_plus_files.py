"""ZeRO++ in DeepSpeed's JSON: read as DeepSpeed reads it, and written. MiCS, which it has no more."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from drawn_setups import needless, read_again

import memcalc
from memcalc.errors import InputError
from memcalc.formats.deepspeed import Others, read
from memcalc.formats.deepspeed_writer import write
from memcalc.inputs.options import check_options
from memcalc.setup.resolved import resolve

OFF = {"zero_quantized_weights": False, "zero_quantized_gradients": False, "zero_hpz_partition_size": 1}


def found(zero: dict[str, Any]) -> Any:
    content = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": zero}
    return read("ds.json", content, Others(lambda _: 64))


@pytest.mark.parametrize(
    ("ranks", "weights", "gradients"), itertools.product((None, 0, 1, 8), (None, True, False), (None, True))
)
def test_what_is_read_is_what_deepspeed_reads(ranks: int | None, weights: bool | None, gradients: bool | None) -> None:
    zero_config = pytest.importorskip("deepspeed.runtime.zero.config").DeepSpeedZeroConfig
    keys = dict(zip(OFF, (weights, gradients, ranks), strict=True))
    zero = {"stage": 3, **{key: value for key, value in keys.items() if value is not None}}
    own, said = zero_config(**zero), {name: one.value for name, one in found(zero).options.items()}
    for key, off in OFF.items():
        value = getattr(own, key)
        assert said.get(key, off) == (max(1, value) if key == "zero_hpz_partition_size" else value)


def test_lower_stages_have_no_part_of_it() -> None:
    for stage in (0, 1, 2):
        zero = {"stage": stage, "zero_hpz_partition_size": 8, "zero_quantized_weights": True}
        assert not OFF.keys() & found(zero).options.keys()


@pytest.mark.parametrize("on", [(n, w, g) for n in (1, 8) for w in (False, True) for g in (False, True)])
def test_what_is_written_is_read_again(on: tuple[int, bool, bool], tmp_path: Path) -> None:
    model = memcalc.load_model("llama-7b")
    options = dict(
        zip(("zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients"), on, strict=True)
    )
    setup = resolve(check_options({"engine": "deepspeed", "zero": 3, "gpus": 16, **options}), model)
    written = write(setup, model)
    zero = json.loads(written.text)["zero_optimization"]
    assert {key: zero.get(key, off) for key, off in OFF.items()} == options
    assert read_again("deepspeed", written, setup, model, tmp_path / "ds.json") == setup
    assert needless("deepspeed", written, setup, model, tmp_path / "ds.json") == []


def test_a_file_estimates_as_its_options() -> None:
    content = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "bf16": {"enabled": True},
        "gradient_clipping": 0, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4, "zero_quantized_weights": True},
    }  # fmt: skip
    read_from = memcalc.estimate("llama-7b", gpus=8, deepspeed=content)
    given = memcalc.estimate(
        "llama-7b", gpus=8, engine="deepspeed", zero=3, zero_hpz_partition_size=4, zero_quantized_weights=True
    )
    assert read_from.phases == given.phases
    assert read_from.collectives == given.collectives


@pytest.mark.parametrize(
    ("zero", "words"),
    [
        ({"zero_quantized_nontrainable_weights": True}, "not modelled; allowed: false"),
        ({"mics_shard_size": 8}, "has no MiCS any more"),
        ({"zero_hpz_partition_size": -1}, "allowed: a whole number"),
        ({"zero_hpz_partition_size": "x"}, "allowed: a whole number"),
        ({"zero_quantized_weights": "x"}, "allowed: true, false"),
    ],
)
def test_what_is_refused(zero: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words) as raised:
        found({"stage": 3, **zero})
    assert "\n" not in str(raised.value)
    assert next(iter(zero)) in str(raised.value)


@pytest.mark.parametrize("key", ["mics_shard_size", "mics_hierarchical_params_gather"])
def test_deepspeed_refuses_the_keys_of_mics(key: str) -> None:
    config = pytest.importorskip("deepspeed.runtime.config")
    zero = {"stage": 3, key: -1 if key == "mics_shard_size" else False}
    with pytest.raises(config.DeepSpeedConfigError, match="MiCS ZeRO-3 sharding has been removed"):
        config.DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero})
    (note,) = found(zero).notes
    assert key in note and "refuses" in note
