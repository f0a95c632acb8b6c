"""Notes on a report that its numbers do not tell: on the input, on unexpected optimizer states, and on an unexpected attention
kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from memcalc.core.dtypes import fp32
from memcalc.core.ops.attention import SCORES
from memcalc.kernels.attention_on_gpu import fused_kernels
from memcalc.report.grid_notes import grid_notes
from memcalc.report.input_notes import input_notes
from memcalc.report.trainer_notes import trainer_notes
from memcalc.units import show_bytes

if TYPE_CHECKING:
    from memcalc.estimation.report import Report

_NVIDIA: Final = "a100-80gb"
"""A GPU that stands for Ampere and all later ones: all take the same kernels in fp32."""


def notes(report: Report) -> list[str]:
    """Return a sentence for each note; usually none."""
    return [
        *input_notes(report),
        *grid_notes(report),
        *trainer_notes(report),
        *_of_one_gpu(report),
        *_of_states(report),
        *_of_paged_states(report),
        *_of_adapters(report),
        *_of_task(report),
        *_of_dora(report),
        *_of_decompositions(report),
        *_of_attention(report),
    ]


def _of_one_gpu(report: Report) -> list[str]:
    """Return a note that a ZeRO stage on one GPU shards nothing. With a model such a stage is refused."""
    s = report.setup
    return (
        [f"ZeRO {s.zero} on 1 GPU shards nothing: it takes as much memory as stage 0"]
        if report.states_only and s.zero and s.gpus == 1
        else []
    )


def _of_states(report: Report) -> list[str]:
    """Return a note on why DeepSpeed's ZeRO holds more optimizer states than stage 0 if the weights are fp32."""
    if report.setup.engine != "deepspeed" or not report.setup.zero or report.setup.has_master_weights:
        return []
    from memcalc.engines.deepspeed.zero_partitions import FP32_COPY

    copies = [item.nbytes for item in report.items if item.name.startswith(FP32_COPY)]
    held = show_bytes(sum(copies))
    return [
        f"DeepSpeed's ZeRO {report.setup.zero} keeps a flat fp32 copy of its partition of the weights ({held}, among the "
        "optimizer states), although the weights are fp32; stage 0 keeps none"
    ]


def _of_paged_states(report: Report) -> list[str]:
    """Return a note on where paged states are counted."""
    if not report.setup.optimizer.startswith("paged-"):
        return []
    from memcalc.optimizers.bitsandbytes import PAGED

    paged = sum(item.nbytes for item in report.items if item.life == PAGED)
    return [
        f"paged states: {show_bytes(paged)} of the optimizer states are managed memory, which torch's counters do not see; they "
        "are counted as on the GPU, where each step brings them; what it has no room for stays on the host, a slower step"
    ]


def _of_adapters(report: Report) -> list[str]:
    """Return a note on what fp32 adapters keep, or on an engine that casts them."""
    s = report.setup
    if s.adapter_dtype != "fp32" or s.precision in ("fp32", "bf16-autocast", "fp16-autocast"):
        return []
    base = s.compute_dtype.name
    if s.adapter_dtype == base:
        return []
    if s.engine in ("deepspeed", "fsdp2"):
        does = "casts all weights" if s.engine == "deepspeed" else "gathers all weights"
        return [f"adapters: {s.engine} {does} to {base}, so the adapters compute in {base} whatever peft has made"]
    return [
        "adapters: peft's own are fp32; each adapted layer keeps an fp32 copy of its input, which can be more than full "
        f"fine-tuning keeps (--adapter-dtype {base} keeps none)"
    ]


def _of_task(report: Report) -> list[str]:
    """Return a note on what is taken of a task's batch, and the peak of a reference's forward."""
    s = report.setup
    if s.task == "sft":
        return ["sft: all tokens but the first of each sequence have a label; TRL's head leaves out those without one"]
    if s.precompute_reference is None:
        return []
    padded = "" if s.padded else "; sequences of a batch that differ in length have a mask (--padded)"
    out = [f"{s.task}: all tokens but the first of each sequence count as completions{padded}"]
    peak = report.reference_peak
    if peak is not None:
        out.append(f"{s.task}: the reference's forward peaks at {show_bytes(peak)}, the policy's activations included")
    return out


def _of_decompositions(report: Report) -> list[str]:
    """Return a note on the step that GaLore's estimate is of."""
    if report.setup.optimizer != "galore-adamw":
        return []
    return [
        "galore-adamw: the step is one that decomposes the gradients, every 200th; what cuSOLVER borrows while it does is not "
        "known and not counted, and the time is that of the other steps"
    ]


def _of_dora(report: Report) -> list[str]:
    """Return a note on the copies of weights that DoRA keeps with dropout."""
    s = report.setup
    if not s.dora or not s.lora_dropout or not s.keeps_adapter_dtype or s.adapter_dtype == s.compute_dtype.name:
        return []
    return [
        f"DoRA with dropout: each adapted layer keeps an {s.adapter_dtype} copy of its weight from forward to its backward "
        "(--lora-dropout 0 keeps none)"
    ]


def _of_attention(report: Report) -> list[str]:
    setup = report.setup
    if setup.attention != "sdpa" or setup.kernels == "megatron":
        return []
    if _makes_scores(report):
        where = "torch" if setup.gpu is None else f"torch on {setup.gpu}"
        return [
            f"sdpa: {where} has no fused kernel for these inputs; its math kernel stores the attention scores of all heads"
        ]
    fused = fused_kernels(setup.gpu)
    if report.traced and fused is not None and setup.compute_dtype not in fused.flash:
        which = "for fewer key/value heads than query heads " if setup.compute_dtype in fused.efficient else ""
        lacks = f"where torch on {setup.gpu} has none ({which}in {setup.compute_dtype.name})"
        return [f"sdpa: this traced model is estimated with a fused kernel; {lacks} it stores the scores of all heads"]
    in_fp32 = setup.compute_dtype is fp32 and setup.autocast_dtype is None
    grouped = in_fp32 and _grouped(report.model.program) and fused is None
    if grouped and _makes_scores(_on_nvidia(report)):
        shown = "with an NVIDIA --gpu they are counted" if setup.gpu is None else f"not modelled for {setup.gpu}"
        why = "torch has no fused CUDA kernel for fp32 with fewer key/value heads than query heads"
        return [f"sdpa: {why}; a GPU then stores the scores of all heads ({shown})"]
    return []


def _makes_scores(report: Report) -> bool:
    return any(work.name == SCORES for profile in report.rank.profiles for work in profile.run.work)


def _on_nvidia(report: Report) -> Report:
    """Return the report on an NVIDIA GPU, whose kernels are known. It may show a fused kernel after all: for a sliding window's
    mask, or for heads that the family repeats."""
    return type(report)(report.model, report.setup._replace(gpu=_NVIDIA))


def _grouped(program: Any) -> bool:
    heads, kv_heads = getattr(program, "heads", None), getattr(program, "kv_heads", None)
    return heads is not None and kv_heads is not None and heads.size != kv_heads.size
