# pyright: basic
"""flash-attn's cross-entropy in the place of transformers': the package's own Python, with kernels that do nothing."""

from __future__ import annotations

import contextlib
import importlib.util
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import torch
from torch.nn import functional

from memcalc.errors import InputError
from memcalc.validate.no_triton import no_triton

_FUNCTION: Final = "cross_entropy_loss"
_ANSWERS: Final = {
    "labels.data_ptr() % 16 != 0": "False",  # a block of the allocator is aligned to 512 bytes
    "torch.cuda.device(logits.device.index)": "contextlib.nullcontext()",
    'assert input.is_cuda and target.is_cuda, "Only support CUDA tensors"': "",
    "from flash_attn.ops.triton.cross_entropy import cross_entropy_loss": "",
}
"""The answers to what the package's files ask about the device. The second file gets the first one's function."""


def with_flash_loss(model: Any) -> None:
    """Set the loss function of a causal language model. Raises InputError without the package."""
    model.loss_function = partial(_causal_lm_loss, _loss_class()(inplace_backward=True))


def _causal_lm_loss(loss: Any, logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **_: Any) -> torch.Tensor:
    """Compute the loss of the next tokens, with ForCausalLMLoss's shift and without its cast."""
    labels = functional.pad(labels, (0, 1), value=-100)
    shift_labels = labels[..., 1:].contiguous()
    return loss(logits.view(-1, vocab_size), shift_labels.view(-1))


@cache
def _loss_class() -> Any:
    with no_triton():
        kernel = _executed("ops/triton/cross_entropy.py", {"contextlib": contextlib})
        return _executed("losses/cross_entropy.py", {_FUNCTION: kernel[_FUNCTION]})["CrossEntropyLoss"]


def _executed(name: str, names: dict[str, Any]) -> dict[str, Any]:
    source = (_folder() / name).read_text(encoding="utf-8")
    for question, answer in _ANSWERS.items():
        source = source.replace(question, answer)
    exec(compile(source, name, "exec"), names)
    return names


def _folder() -> Path:
    """Return the folder of the package, which is not imported: it would look for its compiled parts."""
    spec = importlib.util.find_spec("flash_attn")
    if spec is None or spec.origin is None:
        missing = ModuleNotFoundError("No module named 'flash_attn'", name="flash_attn")
        raise InputError("--cross-entropy flash: needs pip install flash-attn to be run") from missing
    return Path(spec.origin).parent
