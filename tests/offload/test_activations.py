"""`--offload-activations cpu` against TRL's own OffloadActivations: every number of a step, and every copy, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
from cases import step_cases
from offload.activations_oracle import validate
from validate.test_fake import LLAMA, same

import memcalc
from memcalc.core.dims import numel
from memcalc.errors import InputError
from memcalc.offload.activations import copied_bytes
from memcalc.tasks.offload_activations_checks import MOVED
from memcalc.timing.kernels import Unknown

BF16: dict[str, Any] = {"precision": "bf16"}


def step(model: dict[str, Any], **options: Any) -> None:
    compared, copies = validate(model, **options)
    same(compared)
    copied = compared.report.rank.profiles[0].run.copied
    assert sorted((numel(c.shape)[0] * c.dtype.itemsize, c.back) for c in copied) == sorted(map(tuple, copies))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        BF16,
        {"precision": "fp32"},
        {"precision": "bf16-autocast"},
        BF16 | {"recompute": "full"},
        BF16 | {"attention": "eager"},
        BF16 | {"padded": True},
        BF16 | {"seq_len": 4, "micro_batch_size": 1},
        BF16 | {"seq_len": 300},
        BF16 | {"lora_rank": 4},
        BF16 | {"lora_rank": 4, "recompute": "full"},
        BF16 | {"task": "sft"},
        BF16 | {"task": "sft", "recompute": "full", "lora_rank": 4},
        BF16 | {"engine": "ddp", "gpus": 2, "global_batch_size": 8},
    ],
    ids=str,
)
def test_a_step(options: dict[str, Any]) -> None:
    step(LLAMA, **{"micro_batch_size": 2, "seq_len": 32} | options)


@pytest.mark.slow
@pytest.mark.parametrize("family", MOVED)
def test_families(family: str) -> None:
    case = step_cases(family)[0]
    step(case.fields, micro_batch_size=case.batch, seq_len=4 * case.seq, **BF16)


def test_what_forward_holds_at_its_end() -> None:
    """A product without bias saves its weight first: the input of the last one is among the five last tensors, and held."""
    step(step_cases("olmo")[0].fields, micro_batch_size=2, seq_len=8, **BF16)


@pytest.mark.parametrize("options", [{}, {"task": "sft", "recompute": "full"}], ids=str)
def test_packed_rows(options: dict[str, Any]) -> None:
    step(LLAMA, micro_batch_size=2, seq_len=32, packing=True, **BF16 | options)


def test_rows_of_the_host_and_their_time() -> None:
    """Each moved tensor has a pinned block until backward brings it back; both ways are of the same tensors but the last ones,
    which forward still holds."""
    report = memcalc.estimate("llama-7b", offload_activations="cpu", seq_len=512, gpu="a100-80gb", **BF16)
    copied = report.rank.profiles[0].run.copied
    there, back = (copied_bytes(copied, back=way) for way in (False, True))
    pinned = [item.nbytes for item in report.host if item.name.startswith("activations: ")]
    assert sum(pinned) == there > back > 0
    assert report.time.seconds and not isinstance(report.time, Unknown)
    rows = {item.name: item for item in report.time.items if "host" in item.name}
    assert rows["activations to the host"].seconds == pytest.approx(there / 32e9)
    assert rows["activations back from the host"].seconds == pytest.approx(back / 32e9)
    kept = memcalc.estimate("llama-7b", seq_len=512, **BF16)
    assert report.total("saved_activations") < kept.total("saved_activations")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"engine": "deepspeed", "zero": 2, "gpus": 2}, "--offload-activations cpu: with engine deepspeed"),
        ({"task": "dpo"}, "--offload-activations cpu: with --task dpo"),
        ({"kernels": "fused"}, "--kernels fused: with --offload-activations cpu"),
        ({"model": "gpt2"}, "--offload-activations cpu: for a gpt2"),
    ],
)
def test_what_is_refused(options: dict[str, Any], why: str) -> None:
    options = {"model": "llama-7b"} | options
    with pytest.raises(InputError) as refused:
        memcalc.estimate(options.pop("model"), offload_activations="cpu", **options)
    assert why in str(refused.value)
