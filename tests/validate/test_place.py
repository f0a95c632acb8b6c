"""What nvidia-smi prints; the place without a GPU."""

from __future__ import annotations

import pytest

import memcalc
from memcalc.validate.place import of_gpu, parse_used, place

SHOWN = "GPU-1f1c5a9e-0000-1111-2222-333344445555, 4\nGPU-aa, 1024\nGPU-bb, [N/A]\n\n"


def test_bytes_of_each_gpu() -> None:
    used = parse_used(SHOWN)
    assert used == {"1f1c5a9e-0000-1111-2222-333344445555": 4 * 2**20, "aa": 2**30}
    assert of_gpu(used, "aa") == of_gpu(used, "GPU-aa") == 2**30
    assert of_gpu(used, "bb") is None
    assert parse_used("Failed to initialize NVML: Unknown Error\n") == {}


def test_there_is_no_gpu() -> None:
    with pytest.raises(memcalc.InputError, match="--backend cuda: torch sees no CUDA device; allowed: fake"):
        place()
