"""Setups with reentrant checkpoints beside what `memcalc validate` measures, with transformers' checkpoints switched to
`use_reentrant=True`."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from memcalc.validate import realism, reference, run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.validate.comparison import Comparison


def _switch(model: Any, policy: object) -> None:
    assert policy is None
    model.gradient_checkpointing_enable({"use_reentrant": True})


@contextlib.contextmanager
def kernels_without_a_graph() -> Iterator[None]:
    """The CPU takes no fused kernel for a mask that wants a gradient, not even without a graph, where CUDA takes one: there it
    does not see that the mask wants one."""
    kernel = realism._SDPA

    def sdpa(query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        mask = attn_mask if attn_mask is None or torch.is_grad_enabled() else attn_mask.detach()
        return kernel(query, key, value, mask, *args, **kwargs)

    with patch.object(realism, "_SDPA", sdpa):
        yield


def validated(model: Any, **options: Any) -> Comparison:
    """The estimate of a setup and its real run, side by side."""
    with kernels_without_a_graph(), patch.object(reference, "recompute", _switch):
        return run.validate(model, backend="fake", **{"recompute": "full", "reentrant_checkpoints": True} | options)
