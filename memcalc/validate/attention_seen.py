# pyright: basic
"""A record of the fused attention kernels of a step. torch chooses by GPU, cuDNN and settings, and kernels differ in
workspaces."""

from __future__ import annotations

from typing import Any, Final

from torch.utils._python_dispatch import TorchDispatchMode

from memcalc.validate.collectives import has_local_tensors

_BEFORE: Final = "_scaled_dot_product_"
_BEHIND: Final = "_attention"


class AttentionSeen(TorchDispatchMode):
    """A dispatch mode that records the kernels by torch's names (flash, efficient, cudnn) and changes nothing. It does
    not record the unfused one."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if has_local_tensors(types):
            return NotImplemented
        name = func._schema.name.split("::")[1]
        if name.startswith(_BEFORE) and "backward" not in name:
            self.kernels.add(name.removeprefix(_BEFORE).partition(_BEHIND)[0])
        return func(*args, **(kwargs or {}))
