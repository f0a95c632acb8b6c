"""Megatron-LM's arguments that memcalc does not model: refused, or noted with what is assumed instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from memcalc.formats.megatron_arguments import SCRIPT
from memcalc.formats.megatron_section import Arguments

_NO_TYPE: Final = "no modelled type has it; allowed: leave it out"
_ENCODER: Final = "models with an encoder (T5, or of images) are not modelled with Megatron"
_IMAGES: Final = "models with images are not modelled with Megatron"
_REFUSED: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "--quick-geglu": (_NO_TYPE, ()),
    "--hybrid-layer-pattern": ("Mamba and hybrid layers are not modelled with Megatron", ()),
    "--hybrid-override-pattern": ("Mamba and hybrid layers are not modelled with Megatron", ()),
    "--is-hybrid-model": ("Mamba and hybrid layers are not modelled with Megatron", ()),
    "--experimental-attention-variant": (_NO_TYPE, ()),
    "--heterogeneous-layers-config-path": (_NO_TYPE, ()),
    "--heterogeneous-layers-config-encoded-json": (_NO_TYPE, ()),
    "--moe-latent-size": (_NO_TYPE, ()),
    "--attention-output-gate": (_NO_TYPE, ()),
    "--softmax-type": ("no modelled type has it; allowed: vanilla", ("vanilla",)),
    "--qk-l2-norm": (_NO_TYPE, ()),
    "--enable-mhc-connections": (_NO_TYPE, ()),
    "--decoder-num-layers": (_ENCODER, ()),
    "--decoder-seq-length": (_ENCODER, ()),
    "--vocab-extra-ids": (_ENCODER, ("0",)),
    "--bert-no-binary-head": ("BERT is not modelled with Megatron", ()),
    "--img-h": (_IMAGES, ()),
    "--img-w": (_IMAGES, ()),
    **dict.fromkeys(
        ("--prompts", "--prompt-file", "--num-tokens-to-generate", "--incoming-requests-per-step"),
        ("nothing is trained; allowed: memcalc infer", ()),
    ),
    "--spec": ("layers of another specification are not modelled; allowed: local", ("local",)),
    "--yaml-cfg": ("the arguments are in that file; allowed: --megatron-args FILE", ()),
    "--use-kitchen-attention": ("is not modelled; allowed: leave it out", ()),
    "--kitchen-config-file": ("is not modelled; allowed: leave it out", ()),
    "--kitchen-recipe-number": ("is not modelled; allowed: leave it out", ()),
    "--fp4-format": ("products in fp4 are not modelled; allowed: leave it out", ()),
    "--freeze-all-layers": ("nothing is trained; allowed: leave it out", ()),
    "--skip-train": ("nothing is trained; allowed: leave it out", ()),
    "--export-kd-teacher-load": ("distillation, with its teacher, is not modelled; allowed: leave it out", ()),
    "--hybrid-context-parallel": ("is not modelled; allowed: leave it out", ()),
    "--vision-pretraining": ("is not modelled with Megatron", ()),
    "--vision-model-type": (_IMAGES, ()),
    "--disable-vision-class-token": (_IMAGES, ()),
    "--retro-project-dir": ("Retro is not modelled", ()),
    "--model-parallel-size": ("is no longer valid in Megatron-LM; allowed: --tensor-model-parallel-size", ()),
    "--batch-size": ("is no longer valid in Megatron-LM; allowed: --micro-batch-size", ()),
    "--expert-tensor-parallel-num-weight-shards": ("weights sharded beyond etp are not modelled", ("1",)),
}  # fmt: skip
"""Options that change the model or its states by much, with the reason, and the values that do not."""
_OTHER_MODELS: Final = ("bert", "t5", "retro", "vlm", "vision", "ict", "biencoder", "mamba", "hybrid", "multimodal")
"""Parts of the names of training scripts whose models are no GPT."""


class _Note(NamedTuple):
    text: str
    without: tuple[str, ...] = ()
    """The values without an effect."""


_NOTED: Final[Mapping[str, _Note]] = {
    "--tp-comm-overlap": _Note(
        "its user buffers, which are not PyTorch's, are not counted (by default twelve, each of a micro-batch's hidden states), "
        "and its overlap is not timed"
    ),
    "--overlap-grad-reduce": _Note("the reduction of gradients is timed as exposed"),
    "--overlap-param-gather": _Note("the gather of weights is timed as exposed"),
    "--overlap-p2p-communication-warmup-flush": _Note("the schedule is counted without it"),
    "--delay-wgrad-compute": _Note("weight gradients are counted as computed at once"),
    "--overlap-moe-expert-parallel-comm": _Note("micro-batches are counted as run one by one"),
    "--enable-cuda-graph": _Note("the memory of CUDA graphs is not counted"),
    "--external-cuda-graph": _Note("the memory of CUDA graphs is not counted"),
    "--cuda-graph-impl": _Note("the memory of CUDA graphs is not counted", ("none",)),
    "--optimizer-cuda-graph": _Note("the memory of CUDA graphs is not counted"),
    "--use-nccl-ub": _Note("NCCL's registered buffers are not counted"),
    "--cpu-offloading-num-layers": _Note("activations are counted on the GPU", ("0",)),
    "--delta-offload-bytes-across-pp-ranks": _Note("counted as 0", ("0",)),
    "--activation-offload-fraction": _Note("counted as 1", ("1", "1.0")),
    "--fp32-residual-connection": _Note("hidden states between layers are counted in 16 bits"),
    "--apply-residual-connection-post-layernorm": _Note("residuals are counted as before the norms"),
    "--fp16-lm-cross-entropy": _Note("the loss is counted in fp32"),
    "--output-logit-dtype": _Note("logits are counted in the precision of the weights"),
    "--use-te-activation-func": _Note("activations are counted as Megatron-Core's fused ones"),
    "--use-transformer-engine-op-fuser": _Note("layers are counted without it"),
    "--openai-gelu": _Note("counted as the fused GELU"),
    "--no-bias-dropout-fusion": _Note("counted as fused"),
    "--no-rope-fusion": _Note("counted as fused"),
    "--disable-jit-fuser": _Note("counted as fused"),
    "--fused-residual-rmsnorm": _Note("norms are counted without it"),
    "--mlp-chunks-for-training": _Note("the MLP is counted as one", ("1",)),
    "--window-size": _Note("every token is counted as attending to all before it"),
    "--sft": _Note("counted as pretraining on sequences of --seq-length"),
    "--max-seqlen-per-dp-cp-rank": _Note("counted with sequences of --seq-length"),
    "--empty-unused-memory-level": _Note("the allocator's cache is counted as never emptied", ("0",)),
    "--ddp-param-name-patterns-for-fp32-local-accumulation": _Note("gradients are counted in one dtype"),
    "--ddp-reduce-scatter-with-fp32-accumulation": _Note("counted as a reduce-scatter"),
    "--use-tp-pp-dp-mapping": _Note("ranks are timed in the order tp, cp, dp, pp"),
    "--use-legacy-models": _Note("counted as Megatron-Core's GPTModel"),
    "--logits-load-dir": _Note("distillation from logits is counted as pretraining"),
    "--use-grouped-gemm-for-dense-mlp": _Note("products are counted as those of one matrix"),
    "--mla-down-proj-fusion": _Note("the projections to the latents are counted apart"),
    "--glu-linear-offset": _Note("counted as the fused SwiGLU", ("0", "0.0")),
    "--activation-func-clamp-value": _Note("counted as the fused SwiGLU"),
    "--first-last-layers-bf16": _Note("all layers have one precision"),
}
_OF_EXPERTS: Final[Mapping[str, _Note]] = {
    "--moe-token-dispatcher-type": _Note("counted as alltoall", ("alltoall",)),
    "--moe-expert-capacity-factor": _Note("no tokens are counted as dropped"),
    "--moe-pad-expert-input-to-capacity": _Note("tokens are counted without padding"),
    "--moe-expert-rank-capacity-factor": _Note("no tokens are counted as dropped"),
    "--moe-shared-expert-overlap": _Note("shared experts are counted as run before the others"),
    "--moe-apply-probs-on-input": _Note("weights of experts are counted as applied in the activation"),
    "--moe-paged-stash": _Note("activations of experts are counted as kept where they are"),
    "--moe-dispatch-fwd-dtype": _Note("tokens are counted as sent in bf16", ("bf16",)),
    "--moe-combine-bwd-dtype": _Note("tokens are counted as sent in bf16", ("bf16",)),
    "--moe-use-upcycling": _Note("counted as the model with experts"),
}
_OF_ROUTERS: Final[Mapping[str, tuple[str, ...]]] = {
    "--moe-router-dtype": (),
    "--moe-aux-loss-coeff": ("0", "0.0", "0e0"),
    "--moe-z-loss-coeff": ("0", "0.0"),
    "--moe-input-jitter-eps": ("0", "0.0"),
    "--moe-router-load-balancing-type": ("none", "aux_loss", "seq_aux_loss", "global_aux_loss"),
    "--moe-router-fusion": (),
}
"""Options of routers, which have tensors of tokens by experts, and the values that need none more."""
STATES: Final[Mapping[str, tuple[str, ...]]] = {
    "--main-params-dtype": ("fp32", "fp16"), "--exp-avg-dtype": ("fp32", "fp16", "bf16", "fp8"),
    "--exp-avg-sq-dtype": ("fp32", "fp16", "bf16", "fp8"),
}  # fmt: skip
"""The dtypes of the precision-aware optimizer's states (megatron/training/arguments.py)."""


def check_modelled(a: Arguments) -> None:
    """Raise InputError for arguments that no estimate can be honest about."""
    for key, (why, allowed) in _REFUSED.items():
        if a.given(key, allowed):
            a.reject(key, why)
    if a.choice("--transformer-impl", ("local", "transformer_engine", "inference_optimized")) == "inference_optimized":
        a.refuse("--transformer-impl", "has no backward; allowed: local, transformer_engine")
    script = str(a.content.get("--" + SCRIPT.replace("_", "-"), "")).rpartition("/")[2]
    if any(part in script.lower().removesuffix(".py").split("_") for part in _OTHER_MODELS):
        a.reject("--" + SCRIPT.replace("_", "-"), "trains a model that is no GPT, which is not modelled with Megatron")


def notes_of(a: Arguments) -> list[str]:
    """Return a sentence for each argument that matters and is not modelled."""
    tables = {**_NOTED, **(_OF_EXPERTS if a.given("--num-experts", ("0",)) else {})}
    notes = [f"{a.shown(key)}: {note.text}" for key, note in tables.items() if a.given(key, note.without)]
    return [*notes, *_fusions(a), *_experts(a), *_precision_aware(a), *_muon(a)]


def _fusions(a: Arguments) -> list[str]:
    """Return notes on kernels that are not those that are modelled."""
    notes: list[str] = []
    gated, biased = a.on("--swiglu"), not a.on("--disable-bias-linear")
    if gated and a.on("--no-bias-swiglu-fusion"):
        notes.append("--no-bias-swiglu-fusion: counted as fused")
    if not gated and biased and not a.on("--squared-relu") and a.on("--no-bias-gelu-fusion"):
        notes.append("--no-bias-gelu-fusion: counted as fused")
    if a.given("--transformer-impl", ("transformer_engine",)):
        notes.append(f"{a.shown('--transformer-impl')}: kernels besides attention are counted as Transformer Engine's")
        if a.on("--no-masked-softmax-fusion"):
            notes.append("--no-masked-softmax-fusion: counted as fused; a softmax in fp32 keeps twice as much")
    elif a.on("--deterministic-mode") and not a.given("--attention-backend", ("auto", "fused")):
        notes.append(
            "--deterministic-mode: on GPUs before Hopper Transformer Engine has no fused attention in it; flash-attn's runs "
            "there, and without that package the unfused one (--attention unfused)"
        )
    if a.on("--no-overlap-p2p-communication"):
        notes.append("--no-overlap-p2p-communication: sends between virtual stages are timed as overlapped")
    return notes


def _experts(a: Arguments) -> list[str]:
    """Return notes on a step of experts that is another one than the modelled."""
    if not a.given("--num-experts", ("0",)):
        return []
    notes: list[str] = []
    if not a.given("--moe-token-dispatcher-type"):
        notes.append("--moe-token-dispatcher-type allgather, its default: counted as alltoall")
    if not a.on("--moe-grouped-gemm"):
        notes.append("--moe-grouped-gemm is missing: experts are counted as grouped")
    if not a.on("--moe-permute-fusion"):
        notes.append("--moe-permute-fusion is missing: the permutation is counted as fused")
    routers = [a.shown(key) for key, without in _OF_ROUTERS.items() if a.given(key, without)]
    if routers:
        notes.append(f"{', '.join(routers)}: their tables of tokens by experts are not counted")
    return notes


def _muon(a: Arguments) -> list[str]:
    """Return notes on Muon's optimizer as newer versions distribute it."""
    if a.text("--optimizer") not in ("muon", "dist_muon"):
        return []
    notes: list[str] = []
    if a.given("--muon-scalar-optimizer", ("adam",)):
        notes.append(f"{a.shown('--muon-scalar-optimizer')}: counted as adam")
    if a.on("--use-distributed-optimizer") and not a.on("--no-use-layer-wise-param-layout"):
        notes.append(
            "--use-distributed-optimizer: counted as dist_muon of Megatron-Core 0.16, with whole weights by rank"
        )
    return notes


def is_precision_aware(a: Arguments) -> bool:
    """Tell whether the optimizer's states have dtypes of their own, as far as that is modelled."""
    others = ("--use-megatron-fsdp", "--optimizer-cpu-offload", "--fp8-format", "--fp8-hybrid", "--fp8-e4m3")
    return a.on("--use-precision-aware-optimizer") and not any(a.given(key) for key in others)


def _precision_aware(a: Arguments) -> list[str]:
    """Return a note on states that are counted in fp32."""
    if not a.on("--use-precision-aware-optimizer") or is_precision_aware(a):
        return []
    others = [a.shown(key) for key in STATES if a.given(key, ("fp32",))]
    return [f"{', '.join(('--use-precision-aware-optimizer', *others))}: optimizer states are counted in fp32"]
