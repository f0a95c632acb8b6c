"""A step of a model whose linear layers bitsandbytes keeps in 8 bits (`memcalc validate`'s), what transformers quantises, and
what holds a weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from memcalc.families import support_of
from memcalc.tracing.modules import configuration, on_meta, quiet
from memcalc.validate import run
from memcalc.validate.comparison import Comparison


def validate(model: Any, **options: Any) -> Comparison:
    pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    return run.validate(model, **options)


def replaced(fields: dict[str, Any]) -> list[str]:
    """The names of the modules that are quantised, by transformers' own rule (quantizer_bnb_8bit.py)."""
    import bitsandbytes  # noqa: F401  (transformers' own code uses it)
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear
    from transformers.quantizers.base import HfQuantizer

    config = configuration(fields["model_type"], {k: v for k, v in fields.items() if k != "model_type"})
    with quiet(), torch.device("meta"):
        named = support_of(fields["model_type"]).auto_class
        model: Any = on_meta(config) if named is None else getattr(transformers, named).from_config(config)
        stay = HfQuantizer.get_modules_to_not_convert(model, None, model._keep_in_fp32_modules)
        model = replace_with_bnb_linear(model, stay, transformers.BitsAndBytesConfig(load_in_8bit=True))
    return [name for name, module in model.named_modules() if type(module).__name__ == "Linear8bitLt"]


def stored(shape: tuple[int, int]) -> list[tuple[list[int], str]]:
    """The tensors that hold a weight, codes first: real ones of a small weight."""
    import bitsandbytes as bnb

    weight = bnb.nn.Int8Params(torch.randn(shape, dtype=torch.bfloat16), requires_grad=False)
    weight._quantize(torch.device("cpu"))
    assert weight.data.data_ptr() == weight.CB.data_ptr()
    return [(list(t.shape), str(t.dtype).removeprefix("torch.")) for t in (weight.data, weight.SCB)]
