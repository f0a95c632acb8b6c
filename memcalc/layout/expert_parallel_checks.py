"""Checks of a setup with transformers' expert parallelism: its demands (distributed/configuration_utils.py,
expert_parallel.py), and the limits of what is modelled. Each refusal is an InputError of one line."""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, Final

from memcalc.inputs.options import NOT_YET, refuse
from memcalc.layout.expert_parallel import expert_path, runs_dispatched

if TYPE_CHECKING:
    from memcalc.inputs.model import Model
    from memcalc.inputs.options import Options

_WITH: Final = "with engine fsdp2 and ep above 1 "


def check_expert_parallel(options: Options, model: Model | None) -> None:
    """Raise InputError for a setup that cannot share its experts. Other options are checked first, then divisibility,
    then the model."""
    if options.pp > 1:
        why = "transformers itself refuses to dispatch tokens to experts in a pipeline (distributed/configuration_utils.py)"
        refuse("ep", options.ep, f"with engine fsdp2 and pp {options.pp} {why}; allowed: 1, or --pp 1")
    if options.cp > 1:
        why = "transformers' DistributedConfig, which dispatches tokens to experts, has no ranks that share a sequence"
        refuse("ep", options.ep, f"with engine fsdp2 and cp {options.cp} {why}; allowed: 1, or --cp 1")
    ranks = _check_ranks(options, None if model is None else model.program.routed[1])
    if options.etp not in (None, 1):
        refuse("etp", options.etp, f"{_WITH}tp does not split experts; allowed: 1, or leave it out")
    if model is None:
        why = "a number of parameters does not tell which weights are the experts'"
        refuse("ep", options.ep, f"{why}; allowed: 1, or --model")
    _check_experts(options, model, ranks)
    if options.clip_grad_norm:
        why = (
            "torch's clip_grad_norm_ cannot combine norms of two meshes, and with ep above 1 experts are on another one"
        )
        refuse("clip_grad_norm", "on", f"{why}; allowed: off")
    if options.kernels not in (None, "hf"):
        refuse("kernels", options.kernels, f"{_WITH}{NOT_YET}hf")
    if options.recompute == "op":
        why = "torch's selective checkpoint cannot replay the experts' hooks"
        refuse("recompute", "op", f"{_WITH}{why}; allowed: none, full")
    if str(options.precision).endswith("-autocast"):
        refuse("precision", options.precision, f"{_WITH}{NOT_YET}fp32, bf16, fp16, bf16-mixed, fp16-mixed")


def _check_ranks(options: Options, experts: int | None) -> int:
    """Return the number of ranks that expert groups are taken from: a shard group's, tensor-parallel ranks included.
    Raises InputError if `ep` does not divide it."""
    tp, dp, group = options.tp, options.gpus // options.tp, options.shard_group
    if group and dp % group:
        divisors = ", ".join(str(n) for n in range(1, dp + 1) if dp % n == 0)
        refuse("shard_group", group, f"does not divide dp·cp = {dp}; allowed: {divisors}")
    ranks = group * tp if group else options.gpus
    allowed = f"allowed: {_multiples(tp, gcd(ranks, experts or ranks))}"
    if options.ep % tp:
        refuse(
            "ep", options.ep, f"is not a multiple of tp {tp}, which transformers' DistributedConfig needs; {allowed}"
        )
    if ranks % options.ep:
        of_tp = "" if tp == 1 else f" · tp {tp} = {ranks}"
        what = (
            f"shard group {group}{of_tp}"
            if group
            else f"gpus {options.gpus} / (tp {tp} · pp 1 · cp 1) = dp {dp}{of_tp}"
        )
        refuse("ep", options.ep, f"does not divide {what}, the ranks that experts are shared by; {allowed}")
    return ranks


def _multiples(tp: int, ranks: int) -> str:
    """Return the divisors of `ranks` that are multiples of `tp`, and 1 for no expert parallelism."""
    return ", ".join(str(n) for n in sorted({1, *range(tp, ranks + 1, tp)}) if ranks % n == 0)


def _check_experts(options: Options, model: Model, ranks: int) -> None:
    experts, name = model.program.routed[1], model.name or model.model_type
    if expert_path(model.program) is None:
        refuse("ep", options.ep, f"{name} has no routed experts; allowed: 1")
    if not runs_dispatched(model.program):
        refuse("ep", options.ep, f"transformers has no ep_plan for {model.model_type}; allowed: 1")
    if experts % options.ep:
        why = f"{name} has {experts} experts, which {options.ep} ranks cannot share evenly"
        refuse("ep", options.ep, f"{why}; allowed: {_multiples(options.tp, gcd(experts, ranks))}")


def check_token_slices(options: Options, seq_len: int) -> None:
    """Raise InputError if the tokens of a micro-batch cannot be cut into equal slices, one for each rank of a
    tensor-parallel group."""
    tokens = options.micro_batch_size * seq_len
    if tokens % options.tp:
        batch = f"micro-batch {options.micro_batch_size} · {seq_len} = {tokens} tokens"
        why = f"with tp {options.tp} and ep {options.ep}: {batch} do not make {options.tp} equal slices; another split {NOT_YET}"
        refuse("seq_len", seq_len, f"{why}a multiple of {options.tp}")


def check_split_experts(options: Options, model: Model) -> None:
    """Raise InputError for an `etp` other than `tp`: without expert parallelism a tensor-parallel plan splits the
    experts as well."""
    if options.etp not in (None, options.tp) and expert_path(model.program) is not None:
        why = f"transformers' tp_plan splits experts over the same ranks, tp {options.tp}"
        refuse("etp", options.etp, f"with engine fsdp2 {why}; allowed: {options.tp}, or --ep")
