"""The trainer of TRL's that a file is for. Its keys tell: each trainer's configuration has keys of its own."""

from __future__ import annotations

from typing import Final

from memcalc.formats.section import Section
from memcalc.formats.trainer_findings import Findings, is_on, texts
from memcalc.formats.trainer_keys import DPO, KTO, NO_REFERENCE, ONLINE, REWARD, SFT
from memcalc.tasks import OF_TRL
from memcalc.tasks import ONLINE as ONLINE_TASKS

_NO_REFERENCE_NOTE: Final = "a loss without a reference model is counted as DPO's without one"
_SCRIPT: Final = ("use_peft", "dataset_config", "dataset_train_split", "chat_template", "model_revision")
"""Keys of TRL's scripts. With `max_length` beside them, and nothing of another trainer, the script is SFT's."""
_OF_PPO: Final = ("rloo_k", "reward_model_path", "kl_coef", "num_sample_generations", "response_length")
"""The keys among `ONLINE` that are of PPO, and of RLOO as it was beside it."""
_PPO: Final = (
    "is a key of PPO's or RLOO's trainer, whose files are not read; allowed: nothing, with --task ppo and its options"
)
_COMPLETION: Final = 512
"""GRPOConfig's max_completion_length."""
_LOSSES: Final = (
    "sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot",
    "aot_unpaired", "aot_pair", "apo_zero", "apo_down", "discopop", "sft",
)  # fmt: skip


def read_task(found: Findings) -> bool:
    """Set the task if keys tell a trainer of TRL's. Tell whether they do. Raises InputError for reward models and PPO."""
    section = found.section
    key, task = _task(section)
    if task is None:
        return False
    if task == "reward":
        section.refuse(key, "allowed: nothing (reward models are not modelled)")
    if task == "ppo":
        section.refuse(key, _PPO)
    if task == "orpo":
        found.assume("task", key, "dpo")
        found.give("precompute_reference", key, True)
        found.notes.append(f"{section.where(key)}: {_NO_REFERENCE_NOTE}")
        return True
    found.assume("task", key, task)
    if task in ("dpo", "kto"):
        _read_reference(found)
    if task == "grpo":
        read_generation(found)
    if task == "sft" and section.raw("loss_type") == "dft":
        found.note("loss_type", "counted as nll")
    return True


def has_own_loss(found: Findings) -> bool:
    """Tell whether the trainer computes its loss with TRL's own head."""
    task = found.options.get("task")
    return task is not None and task.value in OF_TRL and task.value != "ppo"


def generates(found: Findings) -> bool:
    """Tell whether the trainer generates what it trains on."""
    task = found.options.get("task")
    return task is not None and task.value in ONLINE_TASKS


def _task(section: Section) -> tuple[str, str | None]:
    """Return the trainer and the key that tells it."""
    for keys, task in ((_OF_PPO, "ppo"), (ONLINE, "grpo"), (REWARD, "reward"), (KTO, "kto"), (NO_REFERENCE, "orpo")):
        key = next((key for key in keys if key in section), None)
        if key is not None and (task not in ("grpo", "ppo") or section.raw(key) is not False):
            return key, task
    if str(section.raw("lora_task_type") or "").upper() == "SEQ_CLS":
        return "lora_task_type", "reward"
    named = _named(section)
    preference = next((key for key in DPO if key in section), None)
    if preference is None and "beta" in section and _is_dpo_loss(section):
        preference = "beta"
    if preference is not None:
        return preference, named or "dpo"
    return _supervised(section)


def _supervised(section: Section) -> tuple[str, str | None]:
    key = next((key for key in SFT if key in section), None)
    if key == "max_seq_length" and not any(one in section for one in _SCRIPT):
        key = next((key for key in SFT if key != "max_seq_length" and key in section), None)
    if key is None and "max_length" in section.content and any(one in section for one in _SCRIPT):
        key = "max_length"
    return (key, "sft") if key is not None else ("", None)


def _named(section: Section) -> str | None:
    """Return a trainer without a reference model that the file's own name or the run's names tell, or KTO."""
    texts = [section.file, *(section.raw(key) for key in ("output_dir", "hub_model_id", "run_name", "loss_type"))]
    words = " ".join(str(text).lower() for text in texts if isinstance(text, str))
    if any(word in words for word in ("orpo", "simpo")):
        return "orpo"
    return "kto" if section.raw("loss_type") in ("kto", "apo_zero_unpaired") else None


def read_generation(found: Findings) -> None:
    """Set what GRPOConfig says of completions. The lengths of prompts are the data's, or an older max_prompt_length."""
    section = found.section
    for key in ("num_generations", "num_iterations", "steps_per_generation"):
        found.give(key, key, section.whole(key, least=2 if key == "num_generations" else 1, most=10**6))
    completion = section.whole("max_completion_length", least=1, most=10**8)
    found.give("completion_len", "max_completion_length", completion)
    prompt = section.whole("max_prompt_length", least=1, most=10**8)
    if prompt is not None:
        found.give("seq_len", "max_prompt_length", prompt + (completion or _COMPLETION))
    found.give("beta", "beta", section.number("beta", "allowed: a number from 0 up"))
    found.note_each(
        {"reward_model_name_or_path": "is not counted; with --reward-model it is, where its type is modelled"}
    )
    if is_on(section, "use_vllm"):
        found.note(
            "use_vllm", "what vLLM takes beside training is not counted; completions are taken to be transformers' own"
        )
    loss = section.raw("loss_type")
    if loss not in (None, "dapo"):
        found.note("loss_type", "counted as dapo, over the same log-probabilities")


def _is_dpo_loss(section: Section) -> bool:
    """Tell whether `loss_type` is one of DPO's, or not there."""
    return all(word in _LOSSES for word in texts(section, "loss_type", "names of losses"))


def _read_reference(found: Findings) -> None:
    section = found.section
    found.give("precompute_reference", "precompute_ref_log_probs", section.flag("precompute_ref_log_probs"))
    if is_on(section, "reference_free"):
        found.give("precompute_reference", "reference_free", True)
    if any(word not in ("sigmoid", "kto") for word in texts(section, "loss_type", "names of losses")):
        found.note("loss_type", "counted as the trainer's default loss, over the same log-probabilities")
