"""Notes on a report that its numbers do not tell: on the input, on unexpected optimizer states, and on an unexpected attention
kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from memcalc.core.dtypes import fp16, fp32
from memcalc.core.ops.attention import SCORES
from memcalc.estimation.report import ROLLOUT
from memcalc.kernels.attention_on_gpu import fused_kernels
from memcalc.pipelining.schedules import NAMES, flushes, schedule_of, updates_of
from memcalc.registry import OF_DEEPSPEED
from memcalc.report.grid_notes import grid_notes
from memcalc.report.input_notes import input_notes
from memcalc.report.trainer_notes import trainer_notes
from memcalc.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from memcalc.estimation.report import Report
    from memcalc.offload.transfers import Transfer

_NVIDIA: Final = "a100-80gb"
"""A GPU that stands for Ampere and all later ones: all take the same kernels in fp32."""


def notes(report: Report) -> list[str]:
    """Return a sentence for each note; usually none."""
    return [
        *input_notes(report),
        *grid_notes(report),
        *trainer_notes(report),
        *_of_one_gpu(report),
        *_of_schedule(report),
        *_of_states(report),
        *_of_paged_states(report),
        *_of_adapters(report),
        *_of_task(report),
        *_of_older_engines(report),
        *_of_dora(report),
        *_of_int8(report),
        *_of_shards(report),
        *_of_padding(report),
        *_of_base(report),
        *_of_fp8(report),
        *_of_decompositions(report),
        *_of_attention(report),
        *_of_codes(report),
        *_of_compression(report),
        *_of_copies(report),
        *_of_files(report),
    ]


def _of_one_gpu(report: Report) -> list[str]:
    """Return a note that a ZeRO stage on one GPU shards nothing. With a model such a stage is refused."""
    s = report.setup
    return (
        [f"ZeRO {s.zero} on 1 GPU shards nothing: it takes as much memory as stage 0"]
        if report.states_only and s.zero and s.gpus == 1
        else []
    )


def _of_codes(report: Report) -> list[str]:
    """Return notes on ZeRO++'s codes: where they are not used, what the kernel makes of bf16, and that its time is left out."""
    s = report.setup
    out: list[str] = []
    if s.zero_quantized_gradients and s.gpus <= s.gpus_per_node:
        out.append("zero_quantized_gradients: on one node DeepSpeed reduce-scatters gradients as without it")
    elif s.zero_quantized_gradients and s.compute_dtype is not fp16:
        out.append(
            "zero_quantized_gradients: DeepSpeed's kernel reads gradients as fp16 whatever they are (csrc/quantization), so "
            "bf16 ones get wrong values; bytes and calls are as shown; it is made for --precision fp16-mixed"
        )
    if report.gpu is not None and (s.zero_quantized_weights or s.zero_quantized_gradients):
        out.append("the time of ZeRO++'s quantising kernels is not modelled and not in the time of a step")
    return out


def _of_copies(report: Report) -> list[str]:
    """Return notes on what a rank copies between GPU and host, if the host has the weights, and on the time of that."""
    if report.setup.offload_params == "none":
        return []
    from memcalc.engines.transfers import transfers
    from memcalc.offload.transfers import by_way

    moved = by_way(transfers(report.model, report.setup, report.rank))
    said = " and ".join(f"{show_bytes(n)} {way}" for way, n in moved.items())
    least = ""
    if report.gpu is not None:
        from memcalc.timing.host_link import link_rate
        from memcalc.timing.kernels import Unknown

        rate = link_rate(report.gpu)
        seconds = None if isinstance(rate, Unknown) else sum(moved.values()) / rate
        least = (
            f": {rate.missing}"
            if isinstance(rate, Unknown)
            else f": at least {show_seconds(seconds or 0.0)} by the data sheet"
        )
    return [f"host link: each rank copies {said} in a step{least}"]


def _of_files(report: Report) -> list[str]:
    """Return notes on what a step reads from files and writes to them, and on buffers that are larger than what they hold."""
    s = report.setup
    if "nvme" not in (s.offload_optimizer, s.offload_params):
        return []
    from memcalc.engines.transfers import in_files
    from memcalc.offload.transfers import OF_FILES, by_way

    moved = by_way(in_files(report.model, s, report.rank), OF_FILES)
    ranks = min(s.gpus, s.gpus_per_node)
    read, written = (show_bytes(n) for n in moved.values())
    both = show_bytes(ranks * sum(moved.values()))
    of_node = f", {both} of a node" if ranks > 1 else ""
    out = [
        f"NVMe: each rank reads {read} and writes {written} in a step{of_node}; its time is not known without its bandwidth"
    ]
    if s.offload_params == "nvme" and not any(one.phase != "step" for one in _read(report)):
        out.append(
            f"NVMe: no weight is read: a rank's parts fit the {s.nvme_max_in_cpu} elements that stay on the host"
        )
    return out


def _read(report: Report) -> list[Transfer]:
    from memcalc.engines.transfers import in_files

    found = in_files(report.model, report.setup, report.rank)
    return [one for one in found if one.name.startswith("weights") and one.way == "from NVMe"]


def _of_schedule(report: Report) -> list[str]:
    """Return a note on where a pipeline's order comes from, and what it has more than others, if torch does not have it."""
    s = report.setup
    if s.pp == 1 or s.schedule not in NAMES or s.schedule in ("zbv", "dualpipev"):
        return []
    schedule = schedule_of(s.schedule)
    out = [f"{s.schedule}: torch has no such schedule; its stages run the order of {schedule.source}"]
    if schedule.placement == "both ways":
        out.append(
            f"{s.schedule}: every stage is on two ranks, with weights, gradients and states; each has half of the batch"
        )
    if updates_of(s.schedule, s.micro_batches) > 1:
        out.append(
            f"{s.schedule}: weights are updated after every micro-batch; a step stands for {s.micro_batches} updates"
        )
    if not flushes(s.schedule):
        out.append(
            f"{s.schedule}: older versions of weights are {s.compute_dtype.name} shards, gathered for their backwards"
        )
    return out


def _of_older_engines(report: Report) -> list[str]:
    """Return whose numbers these are, and what passes through the place that all wait for."""
    s = report.setup
    if s.engine == "data-parallel":
        return [
            "data-parallel: the memory is the first GPU's, which has the states, all logits and all sums; others need less"
        ]
    if s.engine != "parameter-server":
        return []
    from memcalc.engines.parameter_server import traffic_of_a_server

    received, sent = (show_bytes(n) for n in traffic_of_a_server(report.model, s))
    of = "the server" if s.servers == 1 else f"the busiest of {s.servers} servers"
    return [f"parameter-server: {of} receives {received} and sends {sent} a step; the rows of the host are its own"]


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
    if s.task == "ppo":
        from memcalc.report.ppo_notes import notes_of_ppo

        return notes_of_ppo(report)
    if report.rollout is not None:
        return _of_rollout(report)
    if s.precompute_reference is None:
        return []
    padded = "" if s.padded else "; sequences of a batch that differ in length have a mask (--padded)"
    out = [f"{s.task}: all tokens but the first of each sequence count as completions{padded}"]
    peak = report.reference_peak
    if peak is not None:
        out.append(f"{s.task}: the reference's forward peaks at {show_bytes(peak)}, the policy's activations included")
    return out


def _of_compression(report: Report) -> list[str]:
    """Return the notes on compressed communication."""
    if report.setup.comm_hook is None and not (
        report.setup.optimizer in OF_DEEPSPEED.known and report.setup.engine == "deepspeed"
    ):
        return []
    from memcalc.report.compression_notes import compression_notes

    return compression_notes(report)


def _of_rewards(reward_model: str | None) -> str:
    """Return a clause on what scores completions."""
    if reward_model is None:
        return "rewards come from functions; --reward-model counts a model in their place"
    return f"the reward model {reward_model} is on every GPU as a whole, and scores all completions in one forward"


def _of_rollout(report: Report) -> list[str]:
    """Return notes on the phases before a step that trains on generated text."""
    from memcalc.report.idle_notes import idle_in_rollout

    s, rollout = report.setup, report.rollout
    assert rollout is not None and s.completion_len is not None and s.seq_len is not None
    together = s.micro_batch_size * (s.steps_per_generation or 1)
    shown = ", ".join(f"{name} {show_bytes(size)}" for name, size in rollout.peaks.items())
    out = [
        f"{s.task}: {together} completions of {s.completion_len} tokens are generated together behind prompts of "
        f"{s.seq_len - s.completion_len} tokens of one length, by transformers (use_vllm=False); before a step: {shown}",
        f"{s.task}: {_of_rewards(s.reward_model)}; time, FLOPs and communication are those of the training step",
        idle_in_rollout(report),
    ]
    if report.peak_phase == ROLLOUT:
        out.append(f"{s.task}: the highest phase is {rollout.highest.name}, and not the training step")
        out.append(f"{s.task}: its allocations are not played through the allocator, whose reserve is assumed")
    if s.dp * together % (s.num_generations or 1):
        out.append(
            f"{s.task}: TRL wants {s.num_generations} completions of each prompt, and refuses {s.dp * together} of all ranks; "
            f"with --micro-batch-size {s.num_generations} it runs"
        )
    return out


def _of_shards(report: Report) -> list[str]:
    """Return notes on what of a base in 4 bits is not sharded, or not for long."""
    s = report.setup
    if s.quantize_storage is None or s.zero < 2 or s.engine not in ("fsdp2", "deepspeed"):
        return []
    if all(weight.packing is None for weight in report.model.weight_classes):
        return []
    from memcalc.report.shards_notes import shards_notes

    return shards_notes(report)


def _of_padding(report: Report) -> list[str]:
    """Return a note on FSDP2's padding, for shards of the whole model in its own dtypes."""
    s = report.setup
    if s.engine != "fsdp2" or report.states_only or s.shards == 1 or s.tp * s.ep > 1 or s.quantize != "none":
        return []
    from memcalc.report.padding_notes import padding_notes

    return padding_notes(report)


def _of_base(report: Report) -> list[str]:
    """Return notes on a frozen base under adapters."""
    if not report.setup.lora_rank or report.setup.engine == "megatron":
        return []
    from memcalc.report.base_notes import base_notes

    return base_notes(report)


def _of_fp8(report: Report) -> list[str]:
    """Return a note on the time of products in fp8."""
    if report.setup.fp8_recipe is None or report.gpu is None:
        return []
    return ["fp8: the time is that of products; casts to fp8 are not timed, so a step takes longer"]


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


def _of_int8(report: Report) -> list[str]:
    """Return notes on outliers, which the data decide, and on what the loss keeps alive."""
    if report.setup.quantize != "int8":
        return []
    from memcalc.quantized.left_behind import LEFT_BEHIND

    kept = show_bytes(sum(row.nbytes for row in report.rows_at("forward") if row.name.startswith(LEFT_BEHIND)))
    loop = f'a loop that drops the loss before the next forward, as transformers\' Trainer does, has no rows "{LEFT_BEHIND}"'
    again = "; checkpoints free them only if they re-enter" if report.setup.recompute == "full" else ""
    return [
        "int8: no column of an input is taken to have an outlier (a value of llm_int8_threshold, 6, or more); each one that has "
        "is kept once more, tokens · the bytes of an element",
        f"int8: the graph keeps the inputs of quantised layers ({kept}) as long as the loss is alive{again}; {loop}",
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
