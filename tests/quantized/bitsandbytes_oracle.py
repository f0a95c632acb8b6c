"""What bitsandbytes makes of a weight, and transformers of a model whose linear layers it quantises."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
import transformers
from records import on_record

from memcalc.families import support_of
from memcalc.tracing.modules import configuration, on_meta, quiet


@on_record
def replaced(fields: dict[str, Any]) -> list[str]:
    """The names of the modules that are quantised, by transformers' own rule (quantizer_bnb_4bit.py)."""
    import bitsandbytes  # noqa: F401  (transformers' own code uses it)
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear
    from transformers.quantizers.base import HfQuantizer

    kept = {name: value for name, value in deepcopy(fields).items() if name != "model_type"}
    config = configuration(fields["model_type"], kept)
    named = support_of(fields["model_type"]).auto_class
    with quiet(), torch.device("meta"):
        model: Any = on_meta(config) if named is None else getattr(transformers, named).from_config(config)
        stay = HfQuantizer.get_modules_to_not_convert(model, None, model._keep_in_fp32_modules)
        how = transformers.BitsAndBytesConfig(load_in_4bit=True)
        model = replace_with_bnb_linear(model, stay, how)
    return [name for name, module in model.named_modules() if type(module).__name__ == "Linear4bit"]


@on_record
def stored(shape: tuple[int, int], kind: str, *, nested: bool) -> list[tuple[list[int], str]]:
    """The tensors that hold a quantised weight, codes first: real ones, of a small weight."""
    import bitsandbytes as bnb

    weight = torch.randn(shape, dtype=torch.bfloat16)
    codes, state = bnb.functional.quantize_4bit(weight, compress_statistics=nested, quant_type=kind)
    held = [codes, state.absmax, state.code]
    if nested:
        held += [state.state2.absmax, state.state2.code, state.offset]
    return [(list(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for tensor in held]
