"""The linear layers that transformers lets bitsandbytes quantise.

They are the modules whose class is nn.Linear or Conv1D, without the head, tied or not (quantizers/base.py,
get_keys_to_not_convert). Fused experts, routers and subclasses of nn.Linear stay as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memcalc.families.base.linear_modules import linear_modules

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memcalc.families.base.linear_modules import Place
    from memcalc.families.base.module import LinearCall
    from memcalc.families.base.program import Program

STAY: Final[Mapping[str, tuple[str, ...]]] = {
    "t5": ("wo",),
    "falcon": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    **dict.fromkeys(("gpt_oss", "llama4_text", "phimoe"), ("router",)),
}
"""Names that stay, by model type: T5 keeps `wo` in fp32 (`_keep_in_fp32_modules`); Falcon's linear layers and these routers are
subclasses."""
OWN_CLASS: Final = {"falcon": "FalconLinear"}
"""The class of the linear layers, by model type, where that is a subclass of nn.Linear."""
NOT_MODELLED: Final = frozenset({"falcon_mamba", "hunyuan_v1_moe", "jamba", "mamba", "resnet", "zamba2"})
"""The types of which some linear layers are no calls of a forward on paper."""


def quantized_places(program: Program, model_type: str) -> dict[Place, LinearCall]:
    """Return the linear layers whose weights are quantised, with their calls."""
    stay = STAY.get(model_type, ())
    return {
        place: call
        for place, call in linear_modules(program).items()
        if call.fan_out.name != "vocab" and place[0].rpartition(".")[2] not in stay
    }
