"""Refusals of setups: combinations that cannot run, or are not modelled yet, each by name."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import TYPE_CHECKING, Any, Final

from memcalc.core.dtypes import bf16, fp32
from memcalc.families import supporting
from memcalc.families.base.routed_checks import check_routed
from memcalc.inputs.options import NOT_YET, Options, refuse
from memcalc.optimizers import EVERY_OPTIMIZER
from memcalc.setup.recompute_checks import check_gathers, check_recompute, check_recompute_layers

if TYPE_CHECKING:
    from memcalc.inputs.model import Model


_NOT_SPLIT: Final[Mapping[str, tuple[str, ...]]] = {
    "megatron": (), "fsdp2": ("etp",), "deepspeed": (), "colossalai": ("pp", "virtual_stages", "cp", "ep", "etp"),
}  # fmt: skip
"""The degrees that an engine leaves at one."""


def check_modelled(options: Options, engine: str, model: Model | None) -> None:
    """Raise InputError for degrees that must be one, missing other options, and features that the program lacks."""
    for name in _NOT_SPLIT.get(engine, ("tp", "pp", "virtual_stages", "cp", "ep", "etp")):
        degree: int | None = getattr(options, name)
        if name == "etp" and degree == options.tp:  # the default of etp, if no layer has experts
            continue
        if degree is not None and degree > 1:
            if engine == "ddp":
                _with_ddp(name, degree)
            refuse(name, degree, f"with engine {engine} {NOT_YET}1")
    if engine == "fsdp2" and options.virtual_stages > 1 and options.pp == 1:
        refuse("virtual_stages", options.virtual_stages, "needs a pipeline (--pp 2 or more); allowed: 1")
    if options.encoder_stages is not None:
        check_encoder_stages(options, engine, model)
    for name in ("first_stage_layers", "last_stage_layers"):
        if getattr(options, name) is not None and (options.pp == 1 or options.virtual_stages > 1):
            refuse(name, getattr(options, name), "needs --pp 2 or more and --virtual-stages 1; allowed: leave it out")
    if engine == "deepspeed":
        check_deepspeed(options, model)
    if options.cp_comm_type is not None and options.cp == 1:
        refuse("cp_comm_type", options.cp_comm_type, "needs context parallelism; allowed: with --cp 2 or more")
    if options.cp_exchange_size is not None and options.cp_comm_type != "a2a+p2p":
        refuse("cp_exchange_size", options.cp_exchange_size, "needs --cp-comm-type a2a+p2p; allowed: leave it out")
    if options.recompute_layers is not None:
        check_recompute_layers(options, engine, model, gpt_model=runs_gpt_model(options, engine))
    if options.pp == 1 and options.schedule != "1f1b":
        refuse("schedule", options.schedule, "needs a pipeline (--pp 2 or more); allowed: 1f1b")
    if options.sequence_parallel and options.tp == 1:
        refuse("sequence_parallel", "on", "needs --tp 2 or more; allowed: off")
    if model is None:
        return
    if options.padded and not model.program.pads:
        refuse("padded", "on", f"for a {model.model_type} " + NOT_YET + "off")
    if "autocast" in str(options.precision) and not model.program.autocasts:
        refuse(
            "precision",
            options.precision,
            f"for a {model.model_type} " + NOT_YET + "fp32, bf16, fp16, bf16-mixed, fp16-mixed",
        )
    check_routed(options, engine, model)
    check_recompute(options, model, megatron="megatron" in (options.kernels, engine) or runs_gpt_model(options, engine))


_ACCELERATE: Final = (
    "accelerate combines DDP with no other axis (ParallelismConfig refuses {0}_size with replicas alone)"
)
_WITH_DDP: Final[Mapping[str, str]] = {
    "tp": _ACCELERATE.format("tp"),
    "cp": _ACCELERATE.format("cp"),
    "ep": "transformers shares experts among FSDP's ranks, not replicas (DistributedConfig.ep_size divides fsdp_size·tp_size)",
}
"""The reason why a degree does not go with DDP."""


def _with_ddp(name: str, degree: int) -> None:
    """Refuse replicas of slices, of parts of a sequence or of stages, and name the engines to use instead of DDP."""
    others = "1, --engine fsdp2 --zero 2 or --engine megatron"
    if name == "tp":
        others = "1, --engine fsdp2 --zero 2 (replicas too with --shard-group 1) or --engine megatron"
    why = _WITH_DDP.get(name)
    refuse(name, degree, f"with engine ddp {NOT_YET}{others}" if why is None else f"{why}; allowed: {others}")


def runs_gpt_model(options: Options, engine: str) -> bool:
    """Tell whether DeepSpeed runs Megatron-DeepSpeed's GPTModel: transformers' modules have no slices and stages
    there."""
    return engine == "deepspeed" and max(options.tp, options.pp) > 1 and not options.autotp


def check_deepspeed(options: Options, model: Model | None) -> None:
    """Raise InputError for what DeepSpeed refuses, and for what is not modelled of Megatron-DeepSpeed's GPTModel."""
    if options.etp not in (None, 1, options.tp):
        why = "DeepSpeed has no separate tensor parallelism for experts (AutoEP's expert_tensor_parallel_size is 1)"
        refuse("etp", options.etp, f"{why}; allowed: {options.tp}")
    if options.virtual_stages > 1:
        refuse("virtual_stages", options.virtual_stages, "DeepSpeed's pipeline has one stage for each rank; allowed: 1")
    if model is not None and model.support.meets_fp32 and str(options.precision).endswith("-mixed"):
        why = f"DeepSpeed casts only weights, and a {model.model_type} multiplies them with results of its fp32 buffers"
        refuse("precision", options.precision, f"{why}, which torch refuses; allowed: fp32, or another --engine")
    if options.zero == 3 and model is not None:
        check_gathers(options, model)
    if options.ep > 1:
        check_auto_ep(options, model)
    if options.cp > 1:
        _check_shared(options)
    if not runs_gpt_model(options, "deepspeed"):
        return
    if options.schedule != "1f1b":
        other = "" if options.schedule in ("gpipe", "interleaved", "zero-bubble") else ", or --engine fsdp2 --zero 2"
        why = "DeepSpeed's pipeline has only this schedule (TrainSchedule)"
        refuse("schedule", options.schedule, f"{why}; allowed: 1f1b{other}")
    if options.pp > 1 and options.zero > 1:
        why = f"DeepSpeed's PipelineEngine (pp {options.pp}) refuses ZeRO-2 and ZeRO-3"
        refuse("zero", options.zero, f"{why}; allowed: 0, 1, or --pp 1 with ZeRO 2 and 3")
    for name in ("first_stage_layers", "last_stage_layers"):
        if getattr(options, name) is not None:
            refuse(name, getattr(options, name), "DeepSpeed balances its stages itself; allowed: leave it out")
    if options.sequence_parallel:
        why = "DeepSpeed does not sum the norms' gradients over tensor-parallel ranks, as Megatron's own optimizer does"
        refuse("sequence_parallel", "on", f"{why}; allowed: off, or --engine megatron")
    split = "with engine deepspeed and tp or pp above 1"
    if options.pp > 1 and options.precision != "bf16-mixed":
        refuse("precision", options.precision, f"with engine deepspeed and pp {options.pp} {NOT_YET}bf16-mixed")
    if options.precision not in ("bf16-mixed", "fp16-mixed"):
        refuse("precision", options.precision, f"{split} {NOT_YET}bf16-mixed, fp16-mixed")
    if options.optimizer not in ("adamw", "adam"):
        refuse("optimizer", options.optimizer, f"{split} {NOT_YET}adamw, adam")
    if options.pp > 1 and options.optimizer_implementation not in (None, "fused"):
        given = options.optimizer_implementation
        refuse("optimizer_implementation", given, f"with engine deepspeed and pp {options.pp} {NOT_YET}fused")
    if options.padded:
        refuse("padded", "on", f"{split} {NOT_YET}off")
    if options.recompute == "selective" and options.attention in (None, "flash"):
        why = "recomputes core attention, which Megatron-DeepSpeed skips with flash attention"
        refuse("recompute", "selective", f"{why}; allowed: none, full, or --attention eager")
    if options.pp > 1 and options.reduce_bucket_size is not None:
        why = f"BF16_Optimizer, which a pipeline (pp {options.pp}) uses, reduces all gradients in one call"
        refuse("reduce_bucket_size", options.reduce_bucket_size, f"{why}; allowed: leave it out")
    if options.kernels not in (None, "megatron"):
        refuse("kernels", options.kernels, "Megatron-DeepSpeed's GPTModel has its own kernels; allowed: megatron")
    if model is not None:
        from memcalc.megatron.checks import check_legacy_model

        check_legacy_model(options, model.name or f"this {model.model_type}", model.model_type, model.program.config)


def check_auto_ep(options: Options, model: Model | None) -> None:
    """Raise InputError for what AutoEP refuses (module_inject/auto_ep_config.py), or what is not modelled of it."""
    from memcalc.layout.auto_ep import check_experts

    given, split = options.ep, "with engine deepspeed and ep above 1"
    _check_auto_ep_alone(options)
    if options.gpus % given:
        divisors = ", ".join(str(n) for n in range(1, options.gpus + 1) if options.gpus % n == 0)
        refuse("ep", given, f"does not divide dp = {options.gpus}, whose ranks share the experts; allowed: {divisors}")
    if model is None:
        why = "a number of parameters does not tell which weights are the experts'"
        refuse("ep", given, f"{why}; allowed: 1, or --model")
    if model.support.auto_ep is None:
        known = ", ".join(supporting(lambda s: s.auto_ep is not None))
        refuse("ep", given, f"DeepSpeed's AutoEP has no preset for {model.model_type}; allowed: 1, or one of {known}")
    if options.recompute == "op":
        refuse("recompute", "op", f"{split} {NOT_YET}none, full")
    if options.kernels not in (None, "hf"):
        refuse("kernels", options.kernels, f"{split} {NOT_YET}hf")
    check_experts(given, model.name, model.program)


def _check_auto_ep_alone(options: Options) -> None:
    """Raise InputError for other axes beside AutoEP. DeepSpeed 0.19.8 (runtime/engine.py, _configure_expert_parallel)
    asks the mpu for its tensor-parallel ranks; Ulysses' mpu (runtime/sequence_parallel/parallel_state_sp.py) then names
    the ranks of a sequence."""
    auto_ep = f"DeepSpeed's AutoEP (ep {options.ep})"
    if options.tp > 1:
        why = f"{auto_ep} refuses Megatron-DeepSpeed's tensor parallelism; DeepSpeed's AutoTP, which it accepts,"
        refuse("tp", options.tp, f"{why} {NOT_YET}1")
    if options.pp > 1:
        why = f"{auto_ep} looks for transformers' experts, and Megatron-DeepSpeed's stages have none"
        refuse("pp", options.pp, f"{why}; allowed: 1")
    if options.cp > 1:
        why = "refuses tensor-parallel ranks, and Ulysses' mpu presents the ranks of a sequence as such"
        if options.zero == 3:
            why += "; with ZeRO-3 it refuses any shared sequence"
        refuse("cp", options.cp, f"{auto_ep} {why}; allowed: 1, or --ep 1")


def _check_shared(options: Options) -> None:
    """Raise InputError for options that exclude DeepSpeed's shared sequences. Megatron-DeepSpeed asserts that there is
    no tensor or pipeline parallelism beside them (megatron/core/parallel_state.py, initialize_model_parallel)."""
    for name, parallelism in (("tp", "tensor"), ("pp", "pipeline")):
        if getattr(options, name) > 1:
            why = f"Megatron-DeepSpeed ({name} {getattr(options, name)}) refuses shared sequences with {parallelism} parallelism"
            refuse("cp", options.cp, f"{why}; allowed: 1, or --{name} 1")
    if options.cp_comm_type not in (None, "a2a"):
        refuse("cp_comm_type", options.cp_comm_type, "DeepSpeed exchanges heads for tokens (Ulysses); allowed: a2a")
    if options.kernels not in (None, "hf"):
        refuse("kernels", options.kernels, f"with engine deepspeed and cp {options.cp} {NOT_YET}hf")


def check_megatron(options: Options, seq_len: int | None, dp: int, micro_batches: int, model: Model | None) -> None:
    """Raise InputError for what Megatron refuses; without a model only the checks that need none."""
    from memcalc.megatron.checks import check_model, check_step

    check_step(options, micro_batches)
    if model is not None and seq_len is not None:
        name = model.name or f"this {model.model_type}"
        check_model(options, dp, seq_len, name, model.model_type, model.program.config)
    elif options.ep > 1 or options.etp not in (None, options.tp):
        refuse(
            "ep",
            options.ep,
            "a number of parameters does not tell which weights are the experts'; allowed: 1, or --model",
        )


def _frozen_in_stages(options: Options, model: Model) -> bool:
    """Tell whether the weights without a gradient are those that an encoder or a decoder in stages freezes itself."""
    in_stages = options.pp > 1 and model.support.encoded_stages
    return in_stages and set(model.program.untrained) == set(model.program.frozen)


def check_encoder_stages(options: Options, engine: str, model: Model | None) -> None:
    """Raise InputError for a number of the encoder's stages where there are none."""
    if engine == "fsdp2" and options.pp > 1 and model is not None and model.support.encoded_stages:
        return
    staged = " or ".join(supporting(lambda s: s.encoded_stages))
    allowed = f"with --engine fsdp2, --pp 2 or more and a {staged}"
    refuse(
        "encoder_stages", options.encoder_stages, f"is for the stages of an encoder and a decoder; allowed: {allowed}"
    )


def check_pipeline(options: Options, micro_batches: int, model: Model | None) -> None:
    """Raise InputError for stages of transformers' layers that torch.distributed.pipelining refuses."""
    from memcalc.pipelining.checks import check_stages

    check_stages(options, micro_batches, model)


def check_fsdp2(options: Options, model: Model | None) -> None:
    """Raise InputError for stages, models and optimizers that `fully_shard` is not modelled for."""
    if options.zero == 0:
        refuse(
            "engine",
            "fsdp2",
            "shards weights, gradients and states; allowed: with --zero 3 (reshards after forward) or 2 (does not)",
        )
    if options.zero == 1:
        refuse(
            "zero", 1, "fsdp2 shards weights, gradients and states; allowed: 3 (reshards after forward), 2 (does not)"
        )
    if model is not None and model.program.source:
        refuse("engine", "fsdp2", f"for a {model.model_type}, which is traced, {NOT_YET}deepspeed")
    if model is not None and not model.program.one_stack and not (options.pp > 1 and model.support.encoded_stages):
        stacks = "which has more than one stack of layers"
        if options.pp > 1 and model.support.decodes_encoded:
            others = ", ".join(supporting(lambda s: s.encoded_stages))
            refuse("pp", options.pp, f"with engine fsdp2 for a {model.model_type} {NOT_YET}1 (more for {others})")
        refuse("engine", "fsdp2", f"for a {model.model_type}, {stacks}, {NOT_YET}deepspeed")
    if model is not None and model.program.layers_share:
        refuse("engine", "fsdp2", f"for a {model.model_type}, whose layers share weights, {NOT_YET}deepspeed")
    if model is not None and model.program.untrained and not _frozen_in_stages(options, model):
        refuse(
            "engine", "fsdp2", f"with weights that get no gradient, as this {model.model_type} has, {NOT_YET}deepspeed"
        )
    if model is not None and model.support.attends_in_fp32 and str(options.precision).endswith("-mixed"):
        why = f"MixedPrecisionPolicy casts no buffers, and a {model.model_type}'s attention uses fp32 ones"
        refuse("precision", options.precision, f"{why}, which torch refuses; allowed: fp32, bf16, fp16")
    if max(options.tp, options.ep) > 1:
        from memcalc.layout.expert_parallel_checks import check_expert_parallel, check_split_experts

        if model is not None and options.tp > 1:
            _check_tensor_parallel(options, model)
            if options.ep == 1:
                check_split_experts(options, model)
        if options.ep > 1:
            check_expert_parallel(options, model)
    if options.clip_grad_norm and options.tp > 1 and not options.sequence_parallel:
        why = "torch's clip_grad_norm_ cannot combine norms of two meshes, and weights that tp leaves whole are on another one"
        refuse("clip_grad_norm", "on", f"{why}; allowed: off, or with --sequence-parallel")
    if not EVERY_OPTIMIZER[options.optimizer].elementwise:
        allowed = ", ".join(name for name, optimizer in EVERY_OPTIMIZER.items() if optimizer.elementwise)
        refuse("optimizer", options.optimizer, f"over fsdp2's shards {NOT_YET}{allowed}")
    if options.optimizer.startswith("sgd") and options.optimizer_implementation == "fused":
        why = f"torch has no fused {options.optimizer} over FSDP2's shards (aten._fused_sgd_ has no sharding strategy)"
        refuse("optimizer_implementation", "fused", f"{why}; allowed: foreach, for-loop")


def _check_tensor_parallel(options: Options, model: Model) -> None:
    """Raise InputError for a model without a usable tp_plan in transformers, and for dims that do not divide."""
    support = model.support
    if support.tensor_parallel_fails is not None:
        why = f"with engine fsdp2 transformers cannot run a {model.model_type}, which {support.tensor_parallel_fails}"
        refuse("tp", options.tp, f"{why}; allowed: 1")
    plan = support.tensor_parallel
    if plan == {}:
        refuse(
            "tp",
            options.tp,
            f"with engine fsdp2: transformers' tp_plan of a {model.model_type} is empty; allowed: 1",
        )
    if plan is None:
        refuse("tp", options.tp, f"with engine fsdp2 for a {model.model_type} {NOT_YET}1")
    program: Any = model.program
    if program.config.tie_word_embeddings and program.unembedding in plan and program.embedding not in plan:
        why = (
            f"with engine fsdp2 transformers cannot run {model.name}, whose head is split and tied to a whole embedding"
        )
        refuse("tp", options.tp, f"{why}; allowed: 1")
    field = support.tensor_parallel_without
    if field is not None and getattr(program.config, field):
        refuse(
            "tp",
            options.tp,
            f"with engine fsdp2 transformers cannot run {model.name}, whose {field} is set; allowed: 1",
        )
    from memcalc.layout.expert_parallel import expert_path
    from memcalc.layout.tensor_parallel import split_dims

    split = split_dims(program, plan)
    named = {"heads": "attention heads", "kv_heads": "key/value heads"}
    sizes = {what: getattr(program, name).size for name, what in named.items() if name in split}
    for what, size in sizes.items():
        if size % options.tp:
            why = f"{model.name} has {size} {what}, and transformers' tensor parallelism does not split one"
            refuse("tp", options.tp, f"{why}; allowed: a divisor of {gcd(*sizes.values())}")
    if "moe_tp_experts" in plan.values() and options.ep == 1 and expert_path(program) is not None:
        width: int = program.experts.ffn.size
        unit = 16 // (fp32 if options.precision == "fp32" else bf16).itemsize  # check_valid_strides, GroupedMMUtils.h
        if width % (unit * options.tp):
            takes = f"grouped_mm needs parts that are multiples of {unit} (16 bytes)"
            why = f"{model.name} has experts of width {width}, and {takes}"
            refuse("tp", options.tp, f"{why}; allowed: a divisor of {gcd(width // unit, *sizes.values())}")
    values: int | None = getattr(program.config, "linear_num_value_heads", None)
    if values is not None and values < options.tp:
        why = f"with engine fsdp2 and {values} value heads of linear attention in {model.name}"
        refuse("tp", options.tp, f"{why} {NOT_YET}up to {values}")
    if options.kernels not in (None, "hf"):
        refuse("kernels", options.kernels, f"with engine fsdp2 and tp above 1 {NOT_YET}hf")
    if str(options.precision).endswith("-autocast"):
        refuse(
            "precision",
            options.precision,
            f"with engine fsdp2 and tp above 1 {NOT_YET}fp32, bf16, fp16, bf16-mixed, fp16-mixed",
        )


def check_fused_softmax(options: Options, seq_len: int, program: Any, other: str = "sdpa") -> None:
    """Refuse sizes without a fused softmax in Megatron (FusedScaleMaskSoftmax.is_kernel_available in
    megatron/core/fusions/fused_softmax.py): torch's ops in fp32 run instead."""
    blocks = 8 if seq_len <= 128 else 4
    heads = program.heads.size // options.tp
    if not 16 < seq_len <= 4096 or seq_len % 4 or options.micro_batch_size * heads % blocks:
        refuse(
            "attention",
            "eager",
            f"Megatron's fused softmax needs 17 to 4096 tokens (a multiple of 4) and a multiple of {blocks} heads in a "
            f"micro-batch, not {seq_len} tokens and {options.micro_batch_size * heads}; allowed: {other}",
        )
