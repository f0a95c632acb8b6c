"""The title of a report, in one line: the model, the GPUs and the options that decide the bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.text import Text

from memcalc.units import show_count

if TYPE_CHECKING:
    from memcalc.estimation.report import Report
    from memcalc.setup.setup import Setup


def setup_line(report: Report) -> str:
    """Return the title as plain text, for other formats."""
    return " ".join(title(report).plain.split())


def title(report: Report) -> Text:
    name, parts = title_words(report)
    text = Text(name, style="bold")
    text.append("  " + " · ".join(parts), style="not bold")
    return text


def title_words(report: Report) -> tuple[str, list[str]]:
    """Return the model's name, or its size if it has none, and the parts of the title behind it."""
    model, s = report.model, report.setup
    count = f"{show_count(model.num_parameters)} parameters"
    parts = [count] if model.name else []
    parts.append(f"{s.gpus} GPU{'s' if s.gpus > 1 else ''}")
    engine = s.engine if s.engine != "none" else "plain PyTorch"
    parts.append(f"{engine}, ZeRO {s.zero}" if s.zero or s.engine == "deepspeed" else engine)
    parts += _layout(report)
    parts += [*_compressed(s), *_trained(s)]
    in_fp8 = "" if s.fp8_recipe is None else f" with fp8 products ({s.fp8_recipe})"
    parts += [f"{s.precision}{in_fp8}", f"{s.optimizer} ({s.optimizer_implementation})"]
    parts += _offloaded(s)
    if s.clip_grad_norm:
        parts.append("gradients clipped")
    if s.micro_batches > 1:
        parts.append(f"{s.micro_batches} micro-batches{_reduced(s)}")
    if s.seq_len is not None:
        if model.program.has_sequence:
            rows = ", padded" if s.padded else ", packed" if s.packing else ""
            parts.append(f"micro-batch {s.micro_batch_size} × {s.seq_len} tokens{rows}")
            parts.append(f"{s.attention} attention")
        else:
            parts.append(f"micro-batch {s.micro_batch_size}")
        if s.recompute != "none":
            reentrant = ", reentrant" if s.reentrant_checkpoints else ""
            parts.append(f"recompute {s.recompute}{_first_layers(s)}{_modules(s)}{reentrant}")
        if s.kernels != "hf":
            parts.append(f"{s.kernels} kernels{_parts(report)}")
        if s.cross_entropy != "eager":
            parts.append(f"{s.cross_entropy} cross-entropy")
    else:
        parts.append("model states only")
    return model.name or count, parts


def _parts(report: Report) -> str:
    """Return the parts of Liger-Kernel that are on in parentheses; "" if they all are."""
    from memcalc.kernels.liger_parts import parts_of

    on = report.setup.liger
    return "" if on is None or on == ",".join(parts_of(report.model.model_type)) else f" ({on.replace(',', ', ')})"


def _trained(s: Setup) -> list[str]:
    """Return what trains, if it is not the whole model."""
    base = "" if s.quantize == "none" else f" on a base in {s.quantize}"
    kind = "DoRA adapters" if s.dora else "adapters"
    adapters = [f"{kind} of rank {s.lora_rank}{base}"] if s.lora_rank else []
    whole = [f"trained in whole: {s.modules_to_save}"] if s.modules_to_save else []
    return [*_task(s), *adapters, *whole, *([f"frozen: {s.freeze}"] if s.freeze else [])]


def _task(s: Setup) -> list[str]:
    """Return the task, and where its reference is; [] for pretraining."""
    beside = "the adapters' base is the reference" if s.lora_rank else "with a reference model"
    if s.task == "ppo":
        return [f"ppo: policy and value model, {beside}, and a reward model"]
    if s.beta:
        return [f"{s.task}, {beside}"]
    if s.precompute_reference is None:
        return [] if s.task == "pretrain" else [s.task]
    return [f"{s.task}, {'reference precomputed' if s.precompute_reference else beside}"]


def _compressed(s: Setup) -> list[str]:
    """Return the communication hook, and the phase of a run if that is the warm-up."""
    rank = "" if s.powersgd_rank is None else f" of rank {s.powersgd_rank}"
    hook = [] if s.comm_hook is None else [f"hook {s.comm_hook}{rank}"]
    return [*hook, *(["communication not compressed yet"] if s.compression_phase == "warmup" else [])]


def _offloaded(s: Setup) -> list[str]:
    """Return what is on the host or on NVMe."""
    activations = "cpu" if s.offload_modules is not None else s.offload_activations
    kept = {"optimizer": s.offload_optimizer, "parameters": s.offload_params, "activations": activations}
    return [f"{what} on {'NVMe' if where == 'nvme' else 'the host'}" for what, where in kept.items() if where != "none"]


def _reduced(s: Setup) -> str:
    """Return words on when the gradients of several micro-batches are reduced; '' if the engine has no choice."""
    if s.sync_each_micro_batch is None:
        return ""
    return (
        ", gradients reduced after each" if s.sync_each_micro_batch else ", gradients reduced after the last (no_sync)"
    )


def _layout(report: Report) -> list[str]:
    """Return the parallel degrees and their details; [] for one GPU."""
    s = report.setup
    if s.gpus == 1:
        return []
    axes = [("tp", s.tp), ("pp", s.pp), ("cp", s.cp), ("ep", s.ep)]
    shown = [(name, degree) for name, degree in axes if degree > 1] + ([("etp", s.etp)] if s.etp != s.tp else [])
    degrees = " · ".join(f"{name} {degree}" for name, degree in [*shown, ("dp", s.dp)])
    heads: Any = getattr(report.model.program, "kv_heads", None) if s.seq_len is not None else None
    each = s.tp if heads is None else heads.size
    return [
        degrees,
        *([f"shard group {s.shards}"] if s.zero and s.replicas > 1 else []),
        *_plus_plus(s),
        *(["sequence parallel"] if s.sequence_parallel else []),
        *([f"cp rank {report.rank.cp}, which has most"] if report.rank.cp is not None else []),
        *([f"{s.cp_comm_type} of keys and values"] if s.cp_comm_type not in (None, "p2p") else []),
        *([f"{s.tp // each} ranks share a key/value head"] if s.engine == "megatron" and each < s.tp else []),
    ]


def _plus_plus(s: Setup) -> list[str]:
    """Return the parts of ZeRO++ that are on."""
    codes = [
        what for what, on in (("weights", s.zero_quantized_weights), ("gradients", s.zero_quantized_gradients)) if on
    ]
    second = s.zero_hpz_partition_size
    return [
        *([f"{' and '.join(codes)} sent as codes"] if codes else []),
        *([f"second partition over {second}"] if second > 1 else []),
    ]


def part(setup: Setup) -> str:
    """Return the word for a pipeline rank's part of the model: "chunk" with virtual stages, else "stage"."""
    return "chunk" if setup.virtual_stages > 1 else "stage"


def _modules(setup: Setup) -> str:
    return "" if setup.recompute_modules is None else f" of {setup.recompute_modules.replace(',', ', ')}"


def _first_layers(setup: Setup) -> str:
    if setup.recompute_layers is None:
        return ""
    layers = f"{setup.recompute_layers} layer{'s' if setup.recompute_layers > 1 else ''}"
    return f" of {layers}{f' a {part(setup)}' if setup.pp > 1 else ''}"
