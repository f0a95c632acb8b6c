"""Records of Megatron-LM's functional tests that are more than 5 % from the estimate, each with the reason that was found.

tests/megatron_functional_tests_apart.json has records that tests/megatron_functional_tests.json leaves out: of jobs that load a
checkpoint, of releases, and of older containers (`golden_values_lts...`). A record stays as it is while arguments, containers
and Megatron-LM change, so some are of another job than their case's arguments tell now.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import memcalc

FILE = Path(__file__).with_suffix(".json")


@dataclass(frozen=True)
class Reason:
    text: str
    arguments: str = ""
    """What the job's arguments were besides, if that is known."""
    options: tuple[tuple[str, Any], ...] = ()
    """What else of the job is known, as options of an estimate."""


REASONS = {
    "unfused": Reason(
        "The jobs ran with NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 in the container of long-term support that was "
        "replaced in November 2025. On an A100 Transformer Engine then takes no fused attention, and without a flash-attn that "
        "it accepts, the unfused one is left, as if --attention-backend were unfused. Loading a checkpoint is not the reason: "
        "jobs that load one have the same peaks in other containers",
        arguments="--attention-backend unfused",
    ),
    "older torch": Reason(
        "torch gives Blackwell two workspaces of cuBLAS of 32 MiB since February 2026. These records are of containers before "
        "that, with two of 8.125 MiB; records of the same and of like cases since May 2026 have the larger ones",
        options=(("cublas_workspace_config", ":4096:2:16:8"),),
    ),
    "older arguments": Reason(
        "The case had --cross-entropy-fusion-impl te when the record was made, and has native now",
        arguments="--cross-entropy-fusion-impl te",
    ),
    "another case": Reason(
        "The file is that of the case without _gb200, or without instances of the optimizer, to the "
        "byte, or within 1 % of it: it was copied when the case was made",
    ),
    "moments twice": Reason(
        "Second runs of jobs, which load the checkpoint of the first: 8 bytes more for each parameter "
        "of the optimizer, between steps and at the peak. Of 94 such second runs these four have them, all of January 2026; "
        "why they were not freed was not found",
    ),
    "loading": Reason(
        "The largest value is there before the job's first step, and its steps add nothing to it: what loading the "
        "checkpoint of an optimizer in two instances takes is not modelled",
    ),
    "CUDA graphs": Reason(
        "The largest value is there after the first iteration, when graphs of attention have been captured, and "
        "never grows: blocks in a captured graph are no allocations when it is replayed. They are counted as if the layers ran "
        "without graphs. That this is the whole difference is not proven",
    ),
    "tokens": Reason(
        "Two runs of one case differ: records of gpt3_moe_mcore_te_ep8_resume_torch_dist_dist_optimizer have "
        "2,817 to 3,204 MiB, and each grows by 30 to 300 MiB after its first step",
    ),
    "older record": Reason(
        "A record of November 2025 has 243 MiB more than the later ones of its case on the same GPU, from the first step on, at "
        "the same arguments. No reason was found",
    ),
    "offloading": Reason(
        "A tensor that is moved to the host is on the GPU until its copy has ended, and is counted as gone "
        "at once: scores of unfused attention are 0.5 GB a layer",
    ),
    "fused loss": Reason(
        "Megatron's own fused loss, in older containers: one fp32 copy of the logits (400 MiB) and 52 MiB more in that of "
        "development, two and 46 MiB in that of long-term support. Newer records of the same cases are within 1 %. What torch's "
        "compiler made of the loss there was not found out",
    ),
    "softmax in fp32": Reason(
        "The cases have --transformer-impl local with --no-masked-softmax-fusion, and --apply-query-key-layer-scaling, which "
        "turns the softmax to fp32. torch's softmax keeps its result, 4 bytes of each score; Megatron's kernel, which is "
        "counted, keeps 2",
    ),
}


@dataclass(frozen=True)
class RecordApart:
    case: str
    records: tuple[str, ...]
    """The names of its files after golden_values_."""
    gpu: str
    gpus: int
    arguments: str
    cublas_workspace_config: str | None
    max_allocated: int
    reason: str

    @property
    def name(self) -> str:
        return f"{self.case}, {' and '.join(self.records)}"

    def error(self) -> float:
        """The error of the estimate for the case's arguments as they are now."""
        return self._report(self.arguments, ()).allocated / self.max_allocated - 1

    def explained(self) -> float | None:
        """The error of the estimate for what the job was; None if that is not known or cannot be said."""
        reason = REASONS[self.reason]
        if self.reason == "moments twice":
            report = self._report(self.arguments, ())
            moments = sum(
                row.nbytes for row in report.items if row.component == "optimizer_states" and "exp_avg" in row.name
            )
            return (report.allocated + moments) / self.max_allocated - 1
        if self.reason == "softmax in fp32":
            report = self._report(self.arguments, ())
            kept = sum(row.nbytes for row in report.items if row.name.endswith("core_attention: softmax"))
            return (report.allocated + kept) / self.max_allocated - 1
        if not reason.arguments and not reason.options:
            return None
        return self._report(f"{self.arguments} {reason.arguments}", reason.options).allocated / self.max_allocated - 1

    def _report(self, arguments: str, options: tuple[tuple[str, Any], ...]) -> memcalc.Report:
        return _report(arguments, self.gpus, self.gpu, self.cublas_workspace_config, options)


@cache
def _report(
    arguments: str, gpus: int, gpu: str, workspaces: str | None, options: tuple[tuple[str, Any], ...]
) -> memcalc.Report:
    setup = {"megatron_args": arguments, "gpus": gpus, "gpu": gpu}
    last = memcalc.estimate(**setup).setup.pp - 1
    return memcalc.estimate(**setup, pp_rank=last, **{"cublas_workspace_config": workspaces, **dict(options)})


@cache
def records_apart() -> tuple[RecordApart, ...]:
    rows = json.loads(FILE.read_text(encoding="utf-8"))
    return tuple(RecordApart(**{**row, "records": tuple(row["records"])}) for row in rows)
