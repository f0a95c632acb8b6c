"""A reward model beside GRPO's policy: AutoModelForSequenceClassification with one label, as TRL's GRPOTrainer loads a
`reward_funcs` that is a model's name (trl/trainer/grpo_trainer.py). A function in its place keeps nothing on the GPU.

It is the language model without its head, and a linear layer `score` of one output (transformers' modeling_layers.py,
GenericForSequenceClassification). All of it is on every rank, in all phases: TRL moves nothing.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from memcalc.core.dims import Dim
from memcalc.core.dtypes import bf16, fp16, fp32
from memcalc.core.rows import Row
from memcalc.families.base.module import Weight, after_forward
from memcalc.inputs.options import NOT_YET, Options, refuse

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.core.dtypes import DType
    from memcalc.inputs.model import Model
    from memcalc.setup.setup import Setup

NAME: Final = "reward model: "
SOURCE: Final = "TRL 1.16 trl/trainer/grpo_trainer.py, reward_funcs"
TYPES: Final = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "phi3", "stablelm", "nemotron", "glm", "arcee",
)  # fmt: skip
"""The types whose model with a score is checked."""
_OF_CONFIG: Final = {"float32": fp32, "bfloat16": bf16, "float16": fp16}


def reward_model(name: str) -> Model:
    """Return the model that a reward model is made of."""
    from memcalc.inputs.model import load_model

    return load_model(name)


def check_reward_model(options: Options) -> None:
    """Raise InputError for a reward model beside another task, and for one that is not modelled."""
    name = options.reward_model
    if name is None:
        return
    if options.task != "grpo":
        refuse("reward_model", name, "scores what --task grpo generates; allowed: with --task grpo")
    from memcalc.errors import InputError

    try:
        model = reward_model(name)
    except InputError as error:
        raise InputError(str(error).replace("--model", "--reward-model", 1)) from None
    if model.model_type not in TYPES:
        refuse("reward_model", name, f"of a {model.model_type} {NOT_YET}{', '.join(TYPES)}")
    if options.attention not in (None, "sdpa"):
        refuse("reward_model", name, f"with --attention {options.attention} {NOT_YET}leave it out, or --attention sdpa")
    if str(options.precision).endswith("-autocast"):
        refuse("reward_model", name, f"with --precision {options.precision} {NOT_YET}leave it out, or --precision bf16")


def dtype_of(setup: Setup, model: Model) -> DType:
    """Return the dtype of a reward model's weights: the policy's where TRL's `model_init_kwargs` or DeepSpeed says it, or else
    that of the configuration. A configuration without one is taken in the policy's."""
    if setup.precision == "fp32":
        fields = model.fields or {}
        return _OF_CONFIG.get(str(fields.get("dtype") or fields.get("torch_dtype")), fp32)
    return setup.compute_dtype


def score_of(model: Model) -> Weight:
    """Return the weight of the linear layer that gives a sequence its reward."""
    return Weight("score.weight", (Dim("1", 1), model.program.hidden), "head")  # type: ignore[attr-defined]


def weights_of(model: Model) -> Iterator[Weight]:
    """Yield the weights of a reward model: those without a head, and the score's."""
    yield from (weight for weight in model.program.weights() if weight.component != "head")
    yield score_of(model)


def reward_rows(setup: Setup) -> tuple[Row, ...]:
    """Return the rows of the resident reward model: its weights and buffers."""
    assert setup.reward_model is not None
    model = reward_model(setup.reward_model)
    dtype, source = dtype_of(setup, model), SOURCE
    kinds = Counter((weight.name, weight.shape) for weight in weights_of(model))
    rows = [
        Row("parameters", NAME + name, shape, dtype, copies, "always", "exact", source)
        for (name, shape), copies in kinds.items()
    ]
    buffers = Counter(b._replace(layer=None) for b in after_forward(model.program.buffers(), setup.seq_len or 0))
    rows += [
        Row("buffers", NAME + one.name, one.shape, one.dtype or dtype, copies, "always", "exact", source)
        for one, copies in buffers.items()
    ]
    return tuple(rows)
