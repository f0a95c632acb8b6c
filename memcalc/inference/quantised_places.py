"""The modules whose weights a method quantises, by the rule of the library that loads them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.core.dtypes import fp32
from memcalc.families.base.linear_modules import linear_modules
from memcalc.quantized.targets import NOT_MODELLED, STAY

if TYPE_CHECKING:
    from memcalc.core.dtypes import DType
    from memcalc.families.base.linear_modules import Place
    from memcalc.families.base.module import Weight
    from memcalc.inputs.model import Model

CONV1D: Final = frozenset({"gpt2", "openai-gpt", "openai_gpt"})
"""The types whose linear layers inside the stack are Conv1D."""
_KEPT_IN_FP32: Final = {"t5": ("wo",)}
"""The names of modules in `_keep_in_fp32_modules`, by model type."""


class Rule(NamedTuple):
    """A library's rule for what it quantises, besides the names that a configuration leaves out."""

    source: str
    conv1d: bool = True
    """True if Conv1D counts as a linear layer."""
    subclasses: bool = False
    """True if subclasses of nn.Linear count (isinstance, not type)."""
    outside_layers: bool = True
    """True if linear layers outside the stack of layers are quantised, such as projections of embeddings."""
    experts: bool = False
    """True if stacked experts are quantised."""
    keeps_fp32: bool = True
    """True if the modules stay that a model keeps in fp32."""
    linear_layers: bool = True
    """True if linear layers are quantised; False: stacked experts alone."""
    expert_bias: DType | None = None
    """The dtype of the experts' biases; None: the model's."""


RULES: Final = {
    "bitsandbytes": Rule("transformers integrations/bitsandbytes.py: replace_with_bnb_linear"),
    "fp8": Rule("transformers integrations/finegrained_fp8.py: replace_with_fp8_linear", conv1d=False, experts=True),
    "awq": Rule("transformers integrations/awq.py: replace_with_awq_linear", conv1d=False, subclasses=True),
    "gptq": Rule("optimum gptq/quantizer.py: convert_model", outside_layers=False, keeps_fp32=False),
    "compressed-tensors": Rule(
        "compressed-tensors quantization/lifecycle/apply.py: targets Linear",
        conv1d=False,
        subclasses=True,
        keeps_fp32=False,
    ),
    "mxfp4": Rule(
        "transformers integrations/mxfp4.py: replace_with_mxfp4_linear",
        experts=True,
        linear_layers=False,
        expert_bias=fp32,
    ),
}
"""The rules of transformers 5, by method."""


def is_modelled(model: Model) -> bool:
    """Tell whether all linear layers of a model are known."""
    return not model.program.source and model.model_type not in NOT_MODELLED


def stays(name: str, patterns: tuple[str, ...]) -> bool:
    """Tell whether a module stays as it is: a pattern is a regular expression for the beginning of its name up to a dot or
    the end, or the end of its name (quantizers/quantizers_utils.py, should_convert_module). `name` has the layer's number."""
    boundary = r"(?:(?<=\.)|(?=\.|$))"
    return any(re.match(rf"(?:{key}){boundary}", name) or name.endswith(key) for key in patterns)


def linear_places(model: Model, rule: Rule, left_out: tuple[str, ...] | None) -> frozenset[Place]:
    """Return the linear layers that are quantised. `left_out`: names that a configuration leaves out; None: the default, which
    is the output head, tied or not (get_keys_to_not_convert)."""
    if not rule.linear_layers:
        return frozenset()
    kept = _KEPT_IN_FP32.get(model.model_type, ()) if rule.keeps_fp32 else ()
    routers = () if rule.subclasses else tuple(one for one in STAY.get(model.model_type, ()) if one not in kept)
    return frozenset(
        place
        for place, call in linear_modules(model.program).items()
        if (left_out is not None or call.fan_out.name != "vocab")
        and (rule.outside_layers or place[1] is not None)
        and (rule.conv1d or place[1] is None or model.model_type not in CONV1D)
        and place[0].rpartition(".")[2] not in (*kept, *routers)
        and not stays(numbered(place), left_out or ())
    )


def experts_quantised(weight: Weight, rule: Rule, left_out: tuple[str, ...] | None) -> bool:
    """Tell whether a weight is the stack of a layer's experts that a rule quantises."""
    path = weight.name.rpartition(".")[0]
    is_stack = weight.component == "experts" and len(weight.shape) == 3
    return rule.experts and is_stack and not stays(numbered((path, weight.layer)), left_out or ())


def numbered(place: Place) -> str:
    """Return a module's name with the number of its layer."""
    path, layer = place
    return path if layer is None else path.replace("*", str(layer), 1)
