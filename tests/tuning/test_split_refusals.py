"""What trains on the parallel axes and is refused, beside what real code does there."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, _backward
from torch.distributed.pipelining._utils import InferenceMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from validate.test_fake import LLAMA

import memcalc
from memcalc.validate import engines, fake, reference
from memcalc.validate.tuning import tune

FSDP2: dict[str, Any] = {"engine": "fsdp2", "gpus": 8, "zero": 2, "precision": "bf16-mixed"}
LORA: dict[str, Any] = {"lora_rank": 8}
STAGES: dict[str, Any] = {"pp": 4, "global_batch_size": 16}


@pytest.mark.parametrize(
    ("model", "options", "why"),
    [
        ("llama-7b", LORA | {"tp": 2, "lora_targets": "all-linear"}, r"--lora-targets all-linear: with --tp 2, o_proj: "),
        ("llama-7b", LORA | {"tp": 2, "lora_targets": "lm_head"}, r"--lora-targets lm_head: .* whose gathered output"),
        ("olmo-2-7b", LORA | {"tp": 2, "lora_targets": "o_proj"}, r"--lora-targets o_proj: .* whose whole input"),
        ("llama-7b", LORA | {"tp": 2, "sequence_parallel": True}, r"--lora-rank 8: .*allowed: without --sequence-parallel"),
        ("llama-7b", LORA | {"tp": 2, "dora": True}, r"--dora on: .* DTensor"),
        ("llama-7b", LORA | {"tp": 2, "modules_to_save": "lm_head"}, r"--modules-to-save lm_head: .* not train"),
        ("llama-7b", STAGES | {"freeze": "embeddings,first:10", "schedule": "zero-bubble"}, r"--freeze .* as on rank 1"),
        ("llama-7b", STAGES | {"freeze": "all-but:head", "schedule": "zbv"}, r"--freeze .*split backward"),
        ("llama-7b", LORA | {"gpus": 24, "pp": 24, "schedule": "zbv", "global_batch_size": 48}, r"--pp 24 .*do not make 48"),
        ("llama-7b", STAGES | LORA | {"schedule": "pipedream"}, r"--lora-rank 8: with schedule pipedream"),
        ("llama-7b", {"engine": "deepspeed", "zero": 1, "pp": 2, "freeze": "head"}, r"--freeze head: .*--pp 2 is not modelled"),
        ("llama-7b", LORA | {"engine": "deepspeed", "zero": 1, "tp": 2, "autotp": True}, r"--lora-rank 8: .*--tp 2 is not"),
        ("mixtral-8x7b", {"engine": "deepspeed", "zero": 1, "ep": 2, "freeze": "mlp"}, r"--freeze mlp: with --ep 2 DeepSpeed"),
        ("mixtral-8x7b", {"engine": "deepspeed", "zero": 1, "ep": 2, "freeze": "head"}, r"--freeze head: .*--ep 2 is not"),
    ],
    ids=str,
)  # fmt: skip
def test_refusals(model: str, options: dict[str, Any], why: str) -> None:
    with pytest.raises(memcalc.InputError, match=why) as refused:
        memcalc.estimate(model, **FSDP2 | options)
    assert "\n" not in str(refused.value) and "; allowed: " in str(refused.value)


def test_a_split_backward_trains_no_weight_behind_an_input_without_gradient() -> None:
    layer = torch.nn.Linear(4, 4)
    for wants in (True, False):
        layer.zero_grad()
        given = torch.ones(2, 4, requires_grad=wants)
        _, groups = _backward.stage_backward_input(
            [layer(given)], [torch.ones(2, 4)], [given], iter(layer.parameters())
        )
        _backward.stage_backward_weight(iter(layer.parameters()), groups)
        assert (layer.weight.grad is not None) == wants


def test_stages_agree_that_nothing_is_sent_back_into_a_frozen_one() -> None:
    """torch's own inference of what stages exchange, for two stages of one process."""
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        modules = [torch.nn.Linear(4, 4).requires_grad_(False), torch.nn.Linear(4, 4)]
        stages = [PipelineStage(module, i, 2, torch.device("cpu")) for i, module in enumerate(modules)]
        meta: Any = (torch.ones(2, 4),)
        for stage in stages:
            stage._inference_mode = InferenceMode.DYNAMIC
            meta = stage._prepare_forward_infra(1, meta, has_backward=True)
        sent_back = stages[1]._prepare_backward_infra(1, lambda out, target: (out - target).sum(), torch.ones(2, 4))
        stages[0]._prepare_backward_infra(1, received_grad_meta=sent_back)
        (received,) = stages[1].args_recv_info[0]
        (gradient,) = stages[0].grad_recv_info[0]
        assert received.tensor_meta is not None
        assert not received.tensor_meta.requires_grad
        assert gradient.buffer is None
    finally:
        dist.destroy_process_group()


def step_of_peft(**trained: Any) -> int:
    """The bytes of the gradients in a real step of a rank of two that share the layers."""
    report = memcalc.estimate(LLAMA, engine="fsdp2", gpus=4, tp=2, zero=3, micro_batch_size=2, seq_len=32)
    defaults = {
        "lora_targets": "q_proj",
        "lora_dropout": 0.0,
        "lora_bias": "none",
        "adapter_dtype": "fp32",
        "dora": False,
    }
    setup = report.setup._replace(lora_rank=4, **{**defaults, **trained})
    split = engines.split

    def adapted_behind(of: Any, module: Any, mesh: Any) -> Any:
        made = split(of, module, mesh)
        made._device_mesh, made.config.distributed_config = mesh, engines.config_of(of)
        tune(made, setup, report.model.program)
        return made

    with patch.object(engines, "split", adapted_behind), patch.object(reference, "tune", lambda module, *_: module):
        return fake.measure(report).gradients_in_step or 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trained", "why"),
    [
        ({"lora_targets": "o_proj"}, "shape .* is invalid for input of size"),
        ({"lora_targets": "lm_head"}, "broadcast"),
        ({"dora": True}, "mixed torch.Tensor and DTensor"),
    ],
    ids=str,
)
def test_peft_fails(trained: dict[str, Any], why: str) -> None:
    pytest.importorskip("peft")
    with pytest.raises(memcalc.InputError, match=f"cannot be run without data .*{why}"):
        step_of_peft(**trained)


@pytest.mark.slow
def test_a_split_modules_copy_does_not_train() -> None:
    pytest.importorskip("peft")
    assert step_of_peft(modules_to_save="lm_head") == step_of_peft()
