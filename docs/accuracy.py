"""docs/accuracy.md: what others have measured, and every family with how it compares to transformers' own code.

The numbers are those that the tests enforce: names and shapes of parameters in tests/families/test_weights.py, bytes in
tests/families/test_oracle_equality.py, both from tests/families/cases. So the page needs no run, and cannot be better than
the tests.
"""

from __future__ import annotations

import statistics
import sys
import textwrap
from pathlib import Path

import apart
import evidence
import measured
import step_times

import memcalc
from memcalc.families import FAMILIES
from memcalc.inputs.model import from_config
from memcalc.validate.versions import ESTIMATED

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from cases import AUTO_CLASSES, Case, parameter_cases, step_cases
from megatron_functional_tests import WHY, functional_tests
from published_runs import OLDER_RUNS, PUBLISHED_RUNS, RESERVED_RUNS, TORCHTITANS_OWN

TITLE = """# Accuracy

Written by `docs/generate.py`. The first sections compare estimates with runs that others have measured on GPUs. The last one
compares every family with transformers' own code. [How each number is checked](checked.md) says what is compared in the tests.

## Measured on GPUs by others, in short

"""

HEAD = """## Compared with transformers' own code

The tests hold every line of this section against transformers {transformers} and torch {torch}. They compare every family's
program with transformers' own module of the same configuration:

- **parameters**: names, order and shapes of `named_parameters()` and `named_buffers()` on the meta device, for the default
  configuration and for the odd ones in `tests/families/cases`;
- **saved**: the bytes that autograd keeps between forward and backward;
- **forward**, **backward**: the highest bytes alive in that phase above what was alive before the step. The step is the
  second one, after an optimizer step, under fake tensors.

Each case runs with every attention that transformers offers for the family, without and with recomputation. A 0 is a
difference of zero bytes in all runs of that case.

### {count} families

Of the {mapped} model types of transformers' causal language models, {analytic} have a program here ({others} more are
encoders, encoder-decoders or others). {broken} types cannot be built by transformers from their own default configuration.
The rest is traced: the real module runs under fake tensors, which needs torch and transformers.
"""


def difference(case: Case, quantity: str) -> str:
    """The largest difference of a case's runs, in bytes and relative to the trace."""
    pairs = [run[quantity] for run in case.differs.values() if quantity in run]
    if not pairs:
        return "0"
    ours, theirs = max(pairs, key=lambda pair: abs(pair[0] - pair[1]) / pair[1])
    return f"{ours - theirs:+,} B ({100 * (ours - theirs) / theirs:+.3f} %)"


def shape(case: Case) -> str:
    return f"{case.name}, {case.batch} × {case.seq}"


def line(case: Case, first: bool) -> str:
    fields = parameter_cases(case.model_type)
    family = f"`{case.model_type}`" if first else ""
    parameters = f"{from_config(fields[0], '').num_parameters:,}, and {len(fields) - 1} odd" if first else ""
    quantities = [difference(case, quantity) for quantity in ("saved", "forward", "backward")]
    return f"| {family} | {parameters} | {shape(case)} | {' | '.join(quantities)} | {case.why} |"


def page() -> str:
    """The text of docs/accuracy.md."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    mapped = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    causal = set(FAMILIES) - set(AUTO_CLASSES)
    lines = [
        *TITLE.splitlines(),
        *evidence.table().splitlines(),
        "",
        *evidence.trainer_section(),
        *published(),
        "",
        *step_times.section(),
        "",
        *measured.section(),
        HEAD.format(
            **ESTIMATED,
            count=len(FAMILIES),
            mapped=len(mapped),
            analytic=len(causal & mapped),
            others=len(FAMILIES) - len(causal & mapped),
            broken=len(mapped) - 173,
        ),
        "| family | parameters of the default, exact | case | saved | forward | backward | why not 0 |",
        "|---|---|---|---|---|---|---|",
    ]
    for family in FAMILIES:
        lines += [line(case, i == 0) for i, case in enumerate(step_cases(family))]
    return "\n".join(lines) + "\n"


def published() -> list[str]:
    """Runs that others have measured, and what is estimated for them."""
    lines = [
        "## Megatron and FSDP2: published peaks",
        "",
        "Peak of the allocated memory in GiB, of the rank with most. None of them was measured for memcalc; what their sources",
        "leave open is said in tests/published_runs.py. Megatron-LM's runs on A100s were made with larger cuBLAS workspaces",
        "(CUBLAS_WORKSPACE_CONFIG) than an estimate assumes there, 48 MiB in all. SimuMax's runs with cp are estimated without",
        "the mask that a batch brings by default: it takes 16 GiB at 131 072 tokens, and they do not have it. gpt3_345m ran",
        "with expandable segments, which split every block; what an estimate adds for blocks that are not split is its error.",
        "",
        "| run | published | memcalc | error | source |",
        "|---|---|---|---|---|",
    ]
    for run in PUBLISHED_RUNS:
        ours = run.estimate().allocated / 2**30
        error = 100 * (ours / run.allocated - 1)
        lines.append(f"| {run.name} | {run.allocated:.2f} | {ours:.2f} | {error:+.2f} % | {run.source} |")
    return [*lines, *functional_test_lines(), *reserved(), *older(), "", *published_volumes()]


FUNCTIONAL_TESTS = """
### Megatron-LM's functional tests

Megatron-LM's CI keeps the largest `max_memory_allocated` of the last rank of small GPTs, with and without experts, on 8 H100 or
A100. Estimates read the arguments of each case, and CUBLAS_WORKSPACE_CONFIG of its environment
(tests/megatron_functional_tests.json; cases that load a checkpoint are left out, because loading it may need more than a step).
Of {runs} peaks the median error is {median:.2f} %, and {close} are within 1 %. The others, in MiB:

| case | GPU | recorded | memcalc | error |
|---|---|---|---|---|
"""

OF_EXPERTS = """
Which tokens an expert gets is not the same in two runs: records of one case with experts differ by up to 6 %. The largest
errors have other reasons:
"""


def functional_test_lines() -> list[str]:
    """Megatron-LM's own records: their number, and each error above 1 %."""
    runs, errors = functional_tests(), evidence.functional_test_errors()
    close, middle = sum(abs(error) <= 0.01 for error in errors), 100 * statistics.median(map(abs, errors))
    lines = FUNCTIONAL_TESTS.format(runs=len(runs), median=middle, close=close).splitlines()
    for run, error in zip(runs, errors, strict=True):
        if abs(error) > 0.01:
            recorded, ours = run.max_allocated / 2**20, run.estimate().allocated / 2**20
            lines.append(f"| {run.case} | {run.gpu} | {recorded:,.0f} | {ours:,.0f} | {100 * error:+.2f} % |")
    return [
        *lines,
        *OF_EXPERTS.splitlines(),
        "",
        *(
            line
            for name, why in WHY.items()
            for line in textwrap.wrap(f"- {name}: {why}.", 125, subsequent_indent="  ")
        ),
        *apart.lines(),
    ]


RESERVED = """
### Reserved memory

What a framework logs as its memory is often what the caching allocator has reserved. The allocated bytes are a lower bound of
it. An estimate plays all allocations and frees of the first steps, in their order and on their streams, through the
allocator's default rules ([the allocator](allocator.md)). In GiB, of the rank with most; "without" is the error of
the allocated bytes alone:

| run | published, reserved | memcalc | error | without |
|---|---|---|---|---|
"""

DERIVED = """
The first two are torchtitan's ({source}).
The estimate is of transformers' Llama. torchtitan's own, written from torch's modules and
traced under `fully_shard` (tests/torchtitan_oracle.py), has the same peak within 0.01 GiB ({peak:.2f} on 8 GPUs,
replayed {replayed:.2f}). The peak is in the loss, where both hold fp32 log-probabilities and two gradients of their size, and of
each layer both have kept the same results. What differs does not reach it: positions as complex numbers in fp32, k and v
repeated to all heads, and the last layer, which torchtitan does not reshard and which is the prefetched one of the estimate.
The model is written after a release half a year younger than the benchmark, and the FSDP2 is that of torch 2.13. The file
names no policy but "selective", which in the preset of the model (train_configs/llama3_8b.toml) is `op`.

A free block is another stream's never, so FSDP2's gathers and reduced gradients lie beside the rest; and blocks as large as the
loss has them, 7.8 GiB, do not fit into what layers have left. Which of two equal blocks is taken hangs on the order in which
the weights came to the GPU: that moves the result by 0.2 GiB. Compiled runs are not covered.

The others are Megatron's on 8 B200, where the published numbers of one run differ by up to 5 % from rank to rank. All estimates
are too low, by {mean:.1f} % in the mean. What may be missing is not modelled: a block that a collective reads is not free until
that is done on NCCL's stream, and meanwhile another one is reserved. Published is the most of eight ranks.
"""


def reserved() -> list[str]:
    """Runs of which the reserved memory is published."""
    lines = RESERVED.splitlines()
    errors: list[float] = []
    for run in (*RESERVED_RUNS, *(run for run in PUBLISHED_RUNS if run.reserved)):
        report = run.estimate()
        assert run.reserved is not None
        error, without = (100 * (size / 2**30 / run.reserved - 1) for size in (report.reserved, report.allocated))
        lines.append(
            f"| {run.name} | {run.reserved:g} | {report.reserved / 2**30:.2f} | {error:+.2f} % | {without:+.2f} % |"
        )
        errors.append(error)
    mean = -sum(errors[len(RESERVED_RUNS) :]) / (len(errors) - len(RESERVED_RUNS))
    return [*lines, *DERIVED.format(source=RESERVED_RUNS[0].source, mean=mean, **TORCHTITANS_OWN).splitlines()]


OLDER = """
### Older code

Published runs that an estimate misses because torch or transformers did otherwise then. "Of its time" is that code, written
from today's modules and played through the same allocator (tests/torchtitan_oracle.py, tests/older_transformers_oracle.py). In
GiB, of what the allocator has reserved or of the device:

| run | of | published | memcalc | error | of its time | error |
|---|---|---|---|---|---|---|
"""

WHY_OLDER = """
- **Llama-7B** is torchtitan in March 2024 (its pull request 165): 8 H100, FSDP2, 8 × 2048 tokens. Its loop held the fp32
  logits (1.95 GiB) until the next forward had made new ones, and FSDP2 put the input of a reduction on the reduction's own
  stream, where nothing else can use it; it has been on the default stream since June 2024 (pytorch's pull request 129721).
  With both, what is allocated is the published 22.73 and 49.54 GiB.
- **PowerLM-3b** is HF's SFTTrainer with transformers 4.45.2 on an A100, of tests/published_measurements.json. The loss of that
  version copied the fp32 logits but for each sequence's last (6 GiB of 8 sequences), and checkpoints were reentrant. What is
  allocated at most is the same as today; what is reserved is one such block more.
- **Mistral-7B with LoRA** is HF's SFTTrainer with transformers 4.48.1 and peft 0.13.2 on an A100, one GPU, adapters of rank 16
  on q, k, v and o in fp32 (fms-acceleration, scripts/benchmarks/refs/a100_80gb.csv). Only the loss was otherwise: it copied the
  fp32 logits once more, while forward still had those in 16 bits. With it the adapters' run is within 0.1 % of the GPU.
- **Mistral-7B with QLoRA** is the same with the base in nf4, double quantisation and `bf16=True`. Again only the loss was
  otherwise, and the Trainer gives the logits back in fp32.
- **bert-large** is HF's Trainer with transformers 4.15, torch 1.10 and CUDA 11.2 on a V100 (the page "Performance and
  scalability"). `zero_grad` kept gradients and filled them with zeros, and softmax saved its input beside its result; the
  context took 1.31 GiB, as all kernels were loaded at once. It was a classifier; estimated is the model that fills in masked
  tokens.
"""


def older() -> list[str]:
    """Runs of code that did otherwise, and what that code comes to."""
    lines = OLDER.splitlines()
    for run in OLDER_RUNS:
        ours = run.estimated / 2**30
        error, error_then = (f"{100 * (size / run.published - 1):+.1f} %" for size in (ours, run.replayed))
        numbers = f"{run.published:.2f} | {ours:.2f} | {error} | {run.replayed:.2f} | {error_then}"
        lines.append(f"| {run.name} | {run.quantity} | {numbers} |")
    return [*lines, *WHY_OLDER.splitlines()]


def published_volumes() -> list[str]:
    """Bytes of collectives that others have published."""
    options = {"param_persistence_threshold": 0, "max_live_parameters": 0, "max_reuse_distance": 0}
    report = memcalc.estimate("llama-7b", gpus=8, zero=3, **options)
    source = "AICB's workload of Llama-7B under ZeRO-3, which keeps nothing and gathers nothing ahead"
    return [
        "## Published collectives",
        "",
        "Bytes of the full tensors that one step's collectives are called on.",
        "",
        "| collective | published | memcalc | source |",
        "|---|---|---|---|",
        *(
            f"| {c.collective.replace('_', '-')}, {c.phase} | {13_476_831_232:,} | {c.payload:,} | {source} |"
            for c in report.collectives
            if c.phase != "step"
        ),
    ]
