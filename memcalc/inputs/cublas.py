"""The environment variable CUBLAS_WORKSPACE_CONFIG, by which a job chooses the size of cuBLAS's workspaces.

Source: aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize.
"""

from __future__ import annotations

import re
from typing import Final

from memcalc.units import KIB

WORKSPACE_CONFIG: Final = "pairs of KiB and a number of buffers, such as :4096:8"
"""The values that are allowed, in words."""
_PAIR: Final = re.compile(r":([0-9]{1,9}):([0-9]{1,6})", re.ASCII)


def workspace_config(text: str) -> int | None:
    """Return the bytes of one workspace, the sum over all pairs ":KiB:number"; None if the text is not such pairs alone.

    torch takes what it finds in other text, and its default where it finds nothing.
    """
    text = text.strip()
    if not text or _PAIR.sub("", text):
        return None
    return sum(int(size) * KIB * int(number) for size, number in _PAIR.findall(text))
