"""Remedies: changes of a setup that lower the memory of a GPU, and how strong each can be.

Remedies are listed from cheap to expensive: other kernels that compute the same, smaller buffers, shards, more micro-batches,
recomputation, slices of tensors, sequences and layers, then more GPUs, and last another training. `memcalc.setup` refuses
what an engine or a model does not support, so these checks are not repeated here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from memcalc.inputs.gpu import load_gpu
from memcalc.kernels import losses
from memcalc.optimizers import load_optimizer

if TYPE_CHECKING:
    from memcalc.estimation.report import Report
    from memcalc.setup.setup import Setup

Rung = Mapping[str, Any]
"""The options that a change sets, with their values."""

SAME: Final = 0
"""The tier of remedies that keep the GPUs and the training."""
MORE_GPUS: Final = 1
OTHER_TRAINING: Final = 2
"""The tier of another optimizer or precision: a last resort, as the training may have another result."""


class Remedy(NamedTuple):
    """One kind of change. A list of changes has at most one remedy of a kind."""

    kind: str
    """The name of what the remedy changes, such as "micro-batch"."""
    ladder: tuple[Rung, ...]
    """The forms of the change, from the weakest to the strongest."""
    tier: int = SAME
    of_activations: bool = False
    """True if the remedy does not lower the peak of the optimizer's step."""
    saves_less: bool = False
    """True if the remedy saves less than an earlier remedy of its kind."""
    mixed: bool = False
    """True if the remedy can need more memory than it saves. `Search` leaves such a remedy out of the lean setup."""
    usual: int = -1
    """The index of the rung to propose if there is no GPU to fit."""


def remedies(report: Report) -> list[Remedy]:
    """Return every change that may lower the peak of a setup, from cheap to expensive."""
    s = report.setup
    if s.seq_len is None:
        return [*_shards(report), *_more_gpus(s), *_training(s)]
    same = [
        *_kernels(report),
        *_adapters(s),
        *_buffers(report),
        *_shards(report),
        *_micro_batches(s),
        *_recomputation(report),
    ]
    return [*same, *_slices(report), *_more_gpus(s), *_training(s)]


def _kernels(report: Report) -> list[Remedy]:
    s = report.setup
    out = (
        [Remedy("attention", ({"attention": "sdpa"},), of_activations=True)]
        if s.attention not in ("sdpa", "flash")
        else []
    )
    if _logits(report) * 100 > report.peak:
        out += [Remedy("loss", ({"cross_entropy": loss},), of_activations=True) for loss in _lighter_loss(report)]
    if s.kernels == "hf":
        out.append(Remedy("kernels", ({"kernels": "fused"},), of_activations=True))
    least = "fused" if "fused" in load_optimizer(s.optimizer).implementations else "for-loop"
    if s.optimizer_implementation not in ("fused", least):
        out.append(Remedy("implementation", ({"optimizer_implementation": least},)))
    if s.gradient_accumulation_fusion is False:
        out.append(Remedy("fusion", ({"gradient_accumulation_fusion": True},)))
    return out


def _adapters(s: Setup) -> list[Remedy]:
    """Return adapters of the base's dtype instead of fp32 ones, which keep an fp32 copy of each of their inputs."""
    base = s.compute_dtype.name
    if not s.keeps_adapter_dtype or s.adapter_dtype == base or s.lora_bias != "none":
        return []
    return [Remedy("adapter dtype", ({"adapter_dtype": base},))]


def _lighter_loss(report: Report) -> list[str]:
    """Return the first loss that needs no copy of all logits, as a list; [] if the setup has such a loss or none is
    supported."""
    s = report.setup
    if s.engine == "fsdp2" and s.tp > 1:
        return ["vocab-parallel"] if s.cross_entropy == "eager" else []
    if s.cross_entropy not in ("eager", "vocab-parallel"):
        return []
    allowed = losses(s.kernels, report.model.model_type)
    return [loss for loss in ("chunked", "fused") if loss in allowed][:1]


def _logits(report: Report) -> int:
    """Return the bytes of a micro-batch's logits in fp32; 0 for a model without a vocabulary."""
    vocab: Any = getattr(report.model.program, "vocab", None)
    return 0 if vocab is None else 4 * report.setup.micro_batch_size * report.setup.tokens_per_part * vocab.size


_BUCKET: Final = 50_000_000
_LIVE: Final = 100_000_000


def _buffers(report: Report) -> list[Remedy]:
    """Return the changes of buffers: whole gradients between micro-batches, the mask of a batch, DeepSpeed's buckets (in
    elements)."""
    s = report.setup
    out: list[Remedy] = []
    if s.keeps_whole_gradients and s.engine == "fsdp2":
        out.append(Remedy("sync", ({"sync_each_micro_batch": True},)))
    if s.attention_mask_in_dataloader:
        out.append(Remedy("mask", ({"attention_mask_in_dataloader": False},)))
    if (s.reduce_bucket_size or 0) > _BUCKET and _matters(report, 2 * (s.reduce_bucket_size or 0)):
        out.append(Remedy("reduce bucket", ({"reduce_bucket_size": _BUCKET},)))
    if (s.max_live_parameters or 0) > _LIVE and _matters(report, 2 * (s.max_live_parameters or 0)):
        out.append(Remedy("live parameters", ({"max_live_parameters": _LIVE},), of_activations=True))
    if s.zero_hpz_partition_size > 1:
        out.append(Remedy("second partition", ({"zero_hpz_partition_size": 1},)))
    return out


def _matters(report: Report, nbytes: int) -> bool:
    """Return True if a buffer of `nbytes` bytes is worth a line: more than a fiftieth of the peak."""
    return nbytes * 50 > report.peak


def _micro_batches(s: Setup) -> list[Remedy]:
    """Return the change to smaller and more micro-batches, with the same sequences per step."""
    share = s.global_batch_size // s.dp
    smaller = [n for n in range(s.micro_batch_size - 1, 0, -1) if share % n == 0]
    ladder = tuple({"micro_batch_size": n} for n in smaller)
    if not ladder:
        return []
    halved = next((i for i, n in enumerate(smaller) if 2 * n <= s.micro_batch_size), -1)
    return [Remedy("micro-batch", ladder, of_activations=True, usual=halved)]


_PARTS: Final = 8
"""The number of parts of a stack whose recomputation is tried: each number of layers is a run of its own."""


def _recomputation(report: Report) -> list[Remedy]:
    s = report.setup
    layers = max(1, report.model.layers // (s.pp * s.virtual_stages))  # ends of a pipeline may have none
    step = -(-layers // _PARTS)
    if s.recompute == "full":
        more = tuple({"recompute_layers": n} for n in range((s.recompute_layers or layers) + step, layers, step))
        more = (*more, {"recompute_layers": layers}) if s.recompute_layers not in (None, layers) else ()
        return [Remedy("recompute", more, of_activations=True)] if more else []
    whole: Rung = (
        {"recompute": "full"} if s.recompute_modules is None else {"recompute": "full", "recompute_modules": None}
    )
    parts = [{**whole, "recompute_layers": n} for n in range(step, layers, step)] if s.recompute == "none" else []
    out = [Remedy("recompute", (*parts, whole), of_activations=True)]
    if s.recompute == "none":
        cheaper = ("selective", "op")
        out += [Remedy("recompute", ({"recompute": one},), of_activations=True, saves_less=True) for one in cheaper]
    return out


def _shards(report: Report) -> list[Remedy]:
    """Return the changes of sharding: ZeRO's and FSDP2's stages, and larger shard groups."""
    s = report.setup
    if s.engine == "ddp":
        stages = tuple({"engine": "deepspeed", "zero": stage} for stage in (1, 2, 3))
        units = tuple({"engine": "fsdp2", "zero": stage} for stage in (2, 3))
        return [Remedy("shards", stages), Remedy("shards", units)]
    highest = {"megatron": 1, "deepspeed": 3 if s.pp == 1 else 1, "fsdp2": 3}.get(s.engine, 0)
    out: list[Remedy] = []
    if s.zero < highest and s.gpus > 1:
        out.append(Remedy("shards", tuple({"zero": stage} for stage in range(s.zero + 1, highest + 1))))
    if s.engine == "deepspeed":
        out += [
            Remedy("shards", ({"zero": stage},), mixed=True) for stage in range(1, s.zero) if _may_save(report, stage)
        ]
    ranks = s.dp * s.cp
    if s.zero and s.shard_group < ranks:
        groups = tuple({"shard_group": n} for n in range(s.shard_group + 1, ranks + 1) if ranks % n == 0)
        out.append(Remedy("shard group", groups))
    return out


def _may_save(report: Report, stage: int) -> bool:
    """Return True if a lower ZeRO stage may need less: a small model's shards can save less than the buffers of the stage
    need."""
    whole = 2 * report.model.num_parameters // (report.setup.tp * report.setup.pp)
    return sum(item.at_peak for item in report.items if item.component == "buffers") > whole // 2 * (
        report.setup.zero - stage
    )


_WIDEST: Final = 64
_FEWEST_TOKENS: Final = 2048
"""The tokens of a sequence that each rank keeps at least if context parallelism is tried: it is made for long sequences."""


def _slices(report: Report) -> list[Remedy]:
    """Return the changes of parallelism: tensors, sequences, layers and experts that ranks share."""
    s = report.setup
    if s.gpus == 1:
        return []
    out: list[Remedy] = []
    if report.model.active_parameters != report.model.num_parameters:
        out.append(Remedy("ep", _degrees("ep", s.ep, _WIDEST), mixed=True, usual=0))
    longest = (s.seq_len or 0) // _FEWEST_TOKENS
    out.append(Remedy("cp", _degrees("cp", s.cp, min(_WIDEST, longest)), mixed=True, usual=0))
    if s.tp > 1 and not s.sequence_parallel:
        out.append(Remedy("sequence parallel", ({"sequence_parallel": True},), of_activations=True))
    if s.pp > 1 and s.schedule in ("gpipe", "interleaved"):
        out.append(Remedy("schedule", ({"schedule": "1f1b", "virtual_stages": 1},), of_activations=True))
    if s.engine != "deepspeed" or max(s.tp, s.pp) > 1:  # otherwise slices need another code base, Megatron-DeepSpeed
        slices = _degrees("tp", s.tp, s.gpus_per_node)
        if s.engine != "megatron" and not s.sequence_parallel:  # Megatron has it by default
            out.append(Remedy("tp", tuple({**rung, "sequence_parallel": True} for rung in slices), mixed=True, usual=0))
        out += [
            Remedy("tp", slices, mixed=True, usual=0),
            Remedy("pp", _degrees("pp", s.pp, _WIDEST), mixed=True, usual=0),
        ]
    return [remedy for remedy in out if remedy.ladder]


def _degrees(name: str, now: int, most: int) -> tuple[Rung, ...]:
    """Return the degrees two, four, eight ... times `now`, up to `most`."""
    return tuple({name: now << i} for i in range(1, 20) if now << i <= most)


_DOUBLINGS: Final = 5


def _more_gpus(s: Setup) -> list[Remedy]:
    if s.engine != "none":
        return [Remedy("gpus", tuple({"gpus": s.gpus << i} for i in range(1, _DOUBLINGS + 1)), MORE_GPUS, usual=0)]
    counts = [1 << i for i in range(1, _DOUBLINGS + 1)]
    return [
        Remedy("gpus", tuple({"gpus": n, "engine": engine, "zero": 3} for n in counts), MORE_GPUS, usual=2)
        for engine in ("deepspeed", "fsdp2")
    ]


_OPTIMIZERS: Final = ("adamw-8bit", "lion", "adafactor")
"""The optimizers with fewer states than AdamW. sgd-momentum has as many as lion, and sgd alone does not train transformers."""
_LIGHTER: Final[Mapping[str, tuple[str, ...]]] = {
    "fp32": ("bf16-mixed", "fp16-mixed"),
    "bf16-autocast": ("bf16-mixed", "bf16"),
    "fp16-autocast": ("fp16-mixed",),
    "bf16-mixed": ("bf16",),
}


def _runs_bf16(s: Setup) -> bool:
    """Return True if the GPU multiplies matrices in bf16: NVIDIA's do so from compute capability 8.0 on. An unknown GPU counts
    as one that does."""
    if s.gpu is None:
        return True
    major = load_gpu(s.gpu).compute_capability.split(".")[0]
    return not major.isdigit() or int(major) >= 8


def _training(s: Setup) -> list[Remedy]:
    lighter = [
        Remedy("precision", ({"precision": to},), OTHER_TRAINING)
        for to in _LIGHTER.get(s.precision, ())
        if to.startswith("fp16") or _runs_bf16(s)
    ]
    others = [
        Remedy("optimizer", ({"optimizer": name},), OTHER_TRAINING)
        for name in _OPTIMIZERS
        if name != s.optimizer and not s.optimizer.startswith("sgd")
    ]
    grads = [Remedy("gradients", ({"grad_dtype": "bf16"},), OTHER_TRAINING)] if s.grad_dtype == "fp32" else []
    return [*_quantized(s), *lighter, *grads, *others]


def _quantized(s: Setup) -> list[Remedy]:
    """Return a base in 4 bits for adapters over one that is not quantised."""
    if not s.lora_rank or s.quantize != "none":
        return []
    return [Remedy("quantize", ({"quantize": "nf4", "double_quant": True},), OTHER_TRAINING)]
