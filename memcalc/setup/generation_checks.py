"""The options of tasks that generate what they train on (`--task grpo`): defaults as TRL's GRPOConfig has them, and refusals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from memcalc.inputs.options import NOT_YET, Options, refuse
from memcalc.setup.batches import global_batch_size_of, seq_len_of
from memcalc.tasks import GENERATIONS, ONLINE

if TYPE_CHECKING:
    from memcalc.inputs.model import Model

DEFAULTS: Final = {"grpo": 512, "ppo": 53}
"""TRL's max_completion_length and response_length."""
OPTIONS: Final = ("completion_len", "num_generations", "steps_per_generation", "num_iterations", "beta")
OF_PPO: Final = ("rollout_batch_size", "num_mini_batches")


_WITHOUT_ROLLOUT: Final = ("dbrx", "recurrent_gemma", "rwkv")
"""The types whose generation within a trainer has no test against the real one."""
_DROPOUTS: Final = (
    "activation_dropout", "attention_dropout", "attn_pdrop", "dropout", "embd_pdrop", "embed_dropout", "embedding_dropout",
    "ffn_dropout", "hidden_dropout", "resid_dropout", "resid_pdrop", "residual_dropout",
)  # fmt: skip


def with_generation(options: Options, model: Model | None, dp: int) -> Options:
    """Return the options with the defaults of a generation. Raise InputError for its options beside another task, and for
    lengths and batches that TRL refuses."""
    if options.task not in ONLINE:
        for name in OPTIONS:
            if getattr(options, name) is not None:
                task = f"--task {' or '.join(ONLINE)}"
                refuse(name, getattr(options, name), f"is an option of {task}; allowed: with {task}")
    if options.task != "ppo":
        for name in OF_PPO:
            if getattr(options, name) is not None:
                refuse(name, getattr(options, name), "is an option of --task ppo; allowed: with --task ppo")
    if model is None or options.task not in ONLINE:
        return options  # without a model it is refused by name later
    seq, completion = lengths_of(options, model)
    if options.task == "ppo":
        from memcalc.setup.ppo_checks import with_ppo

        return with_ppo(options._replace(dp=dp, seq_len=seq, completion_len=completion))
    global_batch_size = global_batch_size_of(options, dp)
    steps = options.steps_per_generation or global_batch_size // (dp * options.micro_batch_size)
    together = dp * options.micro_batch_size * steps
    given = options.num_generations
    if given is not None and together % given:
        why = f"does not divide the {together} completions that are generated together (dp · micro-batch · steps per generation)"
        refuse("num_generations", given, f"{why}; allowed: a divisor from 2 up, or --micro-batch-size {given}")
    generations = given or GENERATIONS
    return options._replace(
        dp=dp,
        seq_len=seq,
        global_batch_size=global_batch_size,
        completion_len=completion,
        num_generations=generations,
        steps_per_generation=steps,
        num_iterations=options.num_iterations or 1,
        beta=options.beta or 0.0,
    )


def lengths_of(options: Options, model: Model) -> tuple[int, int]:
    """Return the tokens of a sequence, and those of its completion."""
    seq = seq_len_of(options, model)
    completion = options.completion_len
    if completion is None:
        completion = DEFAULTS[options.task] if seq > DEFAULTS[options.task] else max(1, seq // 2)
    if completion >= seq:
        why = f"with --seq-len {seq}, the tokens of a prompt and its completion together; allowed: 1 to {seq - 1}"
        if seq < 2:
            refuse("seq_len", seq, f"--task {options.task} needs a prompt and a completion; allowed: 2 or more")
        refuse("completion_len", completion, why)
    return seq, completion


def refuse_generation(options: Options, where: str) -> None:
    """Raise InputError for a task that generates, in a question about many setups at once, whose answers leave a rollout out."""
    if options.task in ONLINE:
        refuse(
            "task", options.task, f"with {where} {NOT_YET}pretrain, sft, or memcalc estimate for one setup at a time"
        )


def check_generation(options: Options, model: Model) -> None:
    """Raise InputError for what is not modelled beside a task that generates."""
    task, program = options.task, model.whole.program
    config: Any = program.config
    if task == "ppo":  # without nn.Dropout
        from memcalc.tasks.ppo_program import policy_of

        config = policy_of(model.program).config
    if program.source or program.cacheless is not None or model.model_type in _WITHOUT_ROLLOUT or not program.one_stack:
        refuse("task", task, f"for a {model.model_type}, whose generation has no run on paper, {NOT_YET}pretrain, sft")
    for name in _DROPOUTS:
        if getattr(config, name, 0.0):
            why = f"for a {model.model_type} whose {name} is not 0, as the model generates in training mode,"
            refuse("task", task, f"{why} {NOT_YET}sft, or a configuration with {name} 0")
    if options.padded:
        refuse("padded", True, f"with --task {task} {NOT_YET}off (prompts of one length)")
    for name in ("quantize", "offload_optimizer"):
        if getattr(options, name) != "none":
            refuse(name, getattr(options, name), f"with --task {task} {NOT_YET}none")
    if options.lora_dropout:
        why = f"with --task {task}, whose model generates in training mode, {NOT_YET}0"
        refuse("lora_dropout", options.lora_dropout, why)
    for name in ("base_dtype", "modules_to_save"):
        if getattr(options, name) is not None:
            refuse(name, getattr(options, name), f"with --task {task} {NOT_YET}leave it out")
    if options.dora:
        refuse("dora", True, f"with --task {task} {NOT_YET}off")
