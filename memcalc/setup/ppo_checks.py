"""The options of PPO (`--task ppo`): defaults as TRL's PPOConfig has them, and refusals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memcalc.inputs.options import NOT_YET, Options, refuse
from memcalc.setup.batches import global_batch_size_of
from memcalc.tasks.ppo import EPOCHS, ROLLOUT_BATCH, TRL_OF_PPO, TYPES

if TYPE_CHECKING:
    from memcalc.inputs.model import Model

_OF_GRPO: Final = {
    "num_generations": "each prompt has one completion",
    "steps_per_generation": "all micro-batches of a step are generated together",
    "beta": "a reference model is always there",
}


def with_ppo(options: Options) -> Options:
    """Return the options with PPO's defaults. Raise InputError for GRPO's options, and for batches that TRL refuses."""
    for name, why in _OF_GRPO.items():
        if getattr(options, name) is not None:
            refuse(name, getattr(options, name), f"with --task ppo {why}; allowed: leave it out, or --task grpo")
    dp = options.dp or 1
    size = global_batch_size_of(options, dp)
    local = size // dp
    parts = options.num_mini_batches or 1
    if local % parts:
        refuse(
            "num_mini_batches", parts, f"allowed: a divisor of the {local} sequences of a rank's batch, as TRL wants"
        )
    if (local // parts) % options.micro_batch_size:
        why = f"parts of {local // parts} sequences are no whole micro-batches of {options.micro_batch_size}, which"
        refuse("num_mini_batches", parts, f"{why} {NOT_YET}a divisor of {local // options.micro_batch_size}")
    return options._replace(
        global_batch_size=size,
        num_mini_batches=parts,
        num_iterations=options.num_iterations or EPOCHS,
        rollout_batch_size=min(options.rollout_batch_size or ROLLOUT_BATCH, local),
    )


def check_ppo(options: Options, engine: str, model: Model) -> None:
    """Raise InputError for what is not modelled beside PPO."""
    whole = model.whole
    if whole.model_type not in TYPES:
        refuse("task", "ppo", f"for a {whole.model_type} {NOT_YET}{', '.join(TYPES)}")
    window = min(whole.program.cache_windows().values(), default=None)
    if window is not None and window <= (options.seq_len or 0):
        why = f"with --task ppo for a {whole.model_type} with a sliding window of {window} tokens"
        refuse("seq_len", options.seq_len, f"{why} {NOT_YET}{window - 1} or fewer")
    if (whole.fields or {}).get("use_cache") is False:
        refuse("task", "ppo", f"for a configuration whose use_cache is off {NOT_YET}one with it")
    if engine == "ddp" and options.lora_rank:
        why = f"with --task ppo on several GPUs: {TRL_OF_PPO} looks for the policy in DDP's wrapper, and fails"
        refuse("lora_rank", options.lora_rank, f"{why}; allowed: --gpus 1, or 0")
    if options.cross_entropy not in (None, "eager"):
        refuse("cross_entropy", options.cross_entropy, "PPO's loss takes the logits themselves; allowed: leave it out")
    if options.clip_grad_norm and engine != "deepspeed":  # whose engine clips by itself
        refuse("clip_grad_norm", True, f"with --task ppo: the trainer of {TRL_OF_PPO} does not clip; allowed: off")
    if options.freeze is not None:
        refuse("freeze", options.freeze, f"with --task ppo {NOT_YET}leave it out")
    if options.reward_model is not None:
        refuse(
            "reward_model", options.reward_model, f"with --task ppo {NOT_YET}leave it out: it is of the policy's size"
        )
    if str(options.precision).startswith("fp16"):
        refuse("precision", options.precision, f"with --task ppo {NOT_YET}bf16, bf16-mixed, bf16-autocast, fp32")
