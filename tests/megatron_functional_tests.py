"""Peaks that Megatron-LM's functional tests have on record, of GPTs that train from scratch on 8 GPUs.

tests/megatron_functional_tests.json has the arguments that matter for memory of cases of tests/functional_tests/test_cases in
NVIDIA/Megatron-LM at d98e8a64 (2026-08-22), CUBLAS_WORKSPACE_CONFIG of their environment, and the largest
`mem-max-allocated-bytes` of golden_values_dev_dgx_h100.json and golden_values_dev_dgx_a100.json: the last rank's.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import memcalc

FILE = Path(__file__).with_suffix(".json")
WHY = {
    "gpt/gpt3_mcore_te_tp2_pp2_cross_entropy_loss_fusion on a100-80gb": "its record has an fp32 copy of the logits more than "
    "those of the same case on an H100 and, of another container, on an A100",
    "moe/gpt3_mcore_te_tp2_pp2_ep4_etp1_memory_speed on h100-80gb": "its record grows from 55.1 GB in the first step to 60.1 GB "
    "in the fiftieth, as tokens spread unequally over the experts",
    **dict.fromkeys(
        (
            "moe/gpt3_moe_mcore_te_tp2_pp2_ep4_etp1_fine_grained_offloading on h100-80gb",
            "moe/gpt3_moe_mcore_te_tp2_pp2_ep4_etp1_no_mtp_no_a2a_ovlp_fine_grained_offloading on h100-80gb",
        ),
        "a tensor that is moved to the host is on the GPU until its copy has ended, and is counted as gone at once: scores of "
        "unfused attention are 0.5 GB a layer",
    ),
    "gpt/gpt3_mcore_tp2_pp2_uninstall_te on a100-80gb": "with --no-masked-softmax-fusion, whose softmax in fp32 keeps 4 bytes "
    "of each score where Megatron's kernel, which is counted, keeps 2",
}
"""The reasons of errors above 5 %."""


@dataclass(frozen=True)
class FunctionalTest:
    case: str
    gpu: str
    gpus: int
    arguments: str
    cublas_workspace_config: str | None
    max_allocated: int

    @property
    def name(self) -> str:
        return f"{self.case} on {self.gpu}"

    def estimate(self) -> memcalc.Report:
        """The estimate for the last pipeline rank."""
        setup = {"megatron_args": self.arguments, "gpus": self.gpus, "gpu": self.gpu}
        last = memcalc.estimate(**setup).setup.pp - 1
        return memcalc.estimate(**setup, pp_rank=last, cublas_workspace_config=self.cublas_workspace_config)

    def error(self) -> float:
        return _error(self)


@cache
def _error(run: FunctionalTest) -> float:
    return run.estimate().allocated / run.max_allocated - 1


@cache
def functional_tests() -> tuple[FunctionalTest, ...]:
    return tuple(FunctionalTest(**row) for row in json.loads(FILE.read_text(encoding="utf-8")))
