"""`output_router_logits` against transformers' own code: the logits that are collected, and the loss of their balance."""

from __future__ import annotations

import inspect
from copy import deepcopy
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import oracle
import paper
import pytest
import torch
from cases import Case, step_cases
from timeline import differences
from transformers import CONFIG_MAPPING

import memcalc
from memcalc.core.dtypes import DType, bf16, fp32
from memcalc.families import FAMILIES
from memcalc.tape.profile import Choices, Moment, full_profile, profile

if TYPE_CHECKING:
    from memcalc.tape.profile import Profile

DTYPES: dict[DType, torch.dtype] = {bf16: torch.bfloat16, fp32: torch.float32}


def records(model_type: str) -> bool:
    """Whether a class of the type's module lists its routers' logits among what hooks collect. To import a module only for the
    answer takes a while: one that does not name the logits lists none."""
    name = CONFIG_MAPPING[model_type].__module__.replace("configuration_", "modeling_")
    found = find_spec(name)
    if found is None or found.origin is None or "router_logits" not in Path(found.origin).read_text(encoding="utf-8"):
        return False  # None: a type that has another one's
    classes = inspect.getmembers(import_module(name), inspect.isclass)
    return any("router_logits" in (vars(cls).get("_can_record_outputs") or ()) for _, cls in classes)


ROUTED = [model_type for model_type in FAMILIES if records(model_type)]


def asked(case: Case) -> Case:
    return case._replace(fields=case.fields | {"output_router_logits": True})


def check(case: Case, *, dtype: DType = bf16, timeline: bool = False, **how: Any) -> None:
    """Bytes and FLOPs of a step, and every allocation."""
    attention = how.pop("attention", memcalc.load_model(case.fields).program.attention_kinds[0])
    workload: dict[str, Any] = {"micro_batch_size": case.batch, "seq_len": case.seq, "attention": attention}
    autocast: DType | None = how.pop("autocast", None)
    ours = paper.paper_step(case.fields, dtype=dtype, autocast=autocast, **workload, **how)
    theirs = oracle.training_step(
        deepcopy(case.fields),
        dtype=DTYPES[dtype],
        autocast=DTYPES[autocast] if autocast else None,
        optimizer="sgd",
        balanced=case.balanced,
        real=case.real or case.balanced,
        **workload,
        **how,
    )
    bytes_of = [(step.saved, step.forward - start, step.backward - start) for step, start in
                ((ours, ours.start), (theirs, theirs.resident))]  # fmt: skip
    assert bytes_of[0] == bytes_of[1]
    assert ours.flops == theirs.flops
    if timeline:
        assert [*differences(ours.made["forward"], theirs.made["forward"])] == []
        assert [*differences(ours.made["backward"], theirs.made["backward"])] == []


@pytest.mark.parametrize("model_type", ROUTED)
def test_a_step(model_type: str) -> None:
    check(asked(step_cases(model_type)[0]), recompute=True)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("dtype", "autocast"), [(bf16, None), (fp32, None), (fp32, bf16)])
def test_a_step_of_mixtral(dtype: DType, autocast: DType | None, padded: bool, recompute: bool) -> None:
    case = asked(step_cases("mixtral")[1])
    check(case, dtype=dtype, autocast=autocast, padded=padded, recompute=recompute, timeline=not padded)


WIDE: dict[str, Any] = {"vocab_size": 3, "num_local_experts": 64, "num_experts_per_tok": 5}
"""So many experts that their logits set the peaks."""


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dtype", [bf16, fp32])
def test_the_auxiliary_loss_sets_the_peak(dtype: DType, padded: bool, attention: str) -> None:
    case = asked(step_cases("mixtral")[0])
    check(case._replace(fields=case.fields | WIDE), dtype=dtype, padded=padded, attention=attention, recompute=True)


def test_per_op_recomputation_and_a_dense_layer() -> None:
    case = asked(step_cases("qwen3_moe")[0])
    assert case.fields["mlp_only_layers"]
    check(case, recompute="op")


def highest(found: Profile, batch: int, seq: int) -> list[int]:
    def at(moment: Moment) -> int:
        constant, one, two, each, each_one, each_two = moment.poly
        whole = constant + one * seq + two * seq**2 + batch * (each + each_one * seq + each_two * seq**2)
        return whole + moment.gradients

    return [max(map(at, found.forward)), max(map(at, found.backward)), at(found.saved)]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("batch", "seq"), [(2, 40), (3, 400)])
def test_a_deep_stack_is_that_of_a_run_of_fewer_layers(batch: int, seq: int, recompute: bool) -> None:
    """Backward goes through the stack twice: of the auxiliary loss first."""
    fields = {**asked(step_cases("mixtral")[0]).fields, **WIDE, "num_hidden_layers": 19}
    program, choices = memcalc.load_model(fields).program, Choices(bf16, "sdpa", recompute, False)
    found = [highest(f(program, choices, batch, seq), batch, seq) for f in (profile, full_profile)]
    assert found[0] == found[1]


def test_deep_stacks_are_replayed() -> None:
    fields = {**asked(step_cases("mixtral")[0]).fields, "num_hidden_layers": 19}
    report = memcalc.estimate(fields, seq_len=64)
    assert report.reserved > report.peak
    assert all(item["basis"] != "unknown" for item in report.to_dict()["memory"]["items"])


@pytest.mark.parametrize("fields", [{"mlp_only_layers": [0, 1, 2]}, {"decoder_sparse_step": 9}])
def test_no_layer_with_a_router_fails_in_transformers(fields: dict[str, Any]) -> None:
    case = asked(step_cases("qwen3_moe")[0])
    dense = case.fields | fields
    assert memcalc.load_model(dense).num_parameters
    with pytest.raises(memcalc.InputError, match=r"output_router_logits true fails .* no layer has a router"):
        memcalc.estimate(dense, seq_len=16)
    with pytest.raises(IndexError):
        oracle.training_step(deepcopy(dense), micro_batch_size=1, seq_len=16, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "options",
    [
        {"gpus": 4, "engine": "fsdp2", "zero": 3, "pp": 2, "global_batch_size": 4},
        {"gpus": 4, "engine": "fsdp2", "zero": 3, "cp": 2},
        {"gpus": 4, "engine": "deepspeed", "zero": 3, "cp": 2},
        {"gpus": 4, "engine": "deepspeed", "zero": 2, "ep": 2},
        {"gpus": 4, "engine": "megatron", "tp": 2},
    ],
    ids=str,
)
def test_steps_that_go_another_way_are_refused(options: dict[str, Any]) -> None:
    fields = step_cases("mixtral")[0].fields | {"num_hidden_layers": 4}
    with pytest.raises(memcalc.InputError, match=r"output_router_logits .*allowed: .* false") as caught:
        memcalc.estimate({**fields, "output_router_logits": True}, seq_len=16, **options)
    assert "\n" not in str(caught.value)
