"""Compressed communication against the numbers of the papers that propose it, to their last digit."""

from __future__ import annotations

from fractions import Fraction

import pytest

import memcalc
from memcalc.core.dtypes import fp32
from memcalc.engines.base.comm_hooks import under_hook

Shape = tuple[int, ...]


def resnet_18() -> list[Shape]:
    """The weights of ResNet-18 for CIFAR-10: a 3×3 stem, ten classes."""
    shapes: list[Shape] = [(64, 3, 3, 3), (64,), (64,)]
    width = 64
    for wide in (64, 128, 256, 512):
        for block in range(2):
            shapes += [(wide, width, 3, 3), (wide,), (wide,), (wide, wide, 3, 3), (wide,), (wide,)]
            if block == 0 and wide != width:
                shapes += [(wide, width, 1, 1), (wide,), (wide,)]
            width = wide
    return [*shapes, (10, 512), (10,)]


def lstm() -> list[Shape]:
    """The weights of the 3-layer LSTM on WikiText-2, whose decoder is its encoder."""
    layer: list[Shape] = [(2600, 650), (2600, 650), (2600,), (2600,)]
    return [(28869, 650), *layer * 3, (28869,)]


@pytest.mark.parametrize(
    ("shapes", "rank", "times"),
    [
        (resnet_18(), 1, 243),
        (resnet_18(), 2, 136),
        (resnet_18(), 4, 72),
        (lstm(), 1, 310),
        (lstm(), 2, 203),
        (lstm(), 4, 120),
    ],
    ids=["resnet-1", "resnet-2", "resnet-4", "lstm-1", "lstm-2", "lstm-4"],
)
def test_powersgd(shapes: list[Shape], rank: int, times: int) -> None:
    """Vogels et al. 2019 (arXiv 1905.13727): how many times fewer numbers a step sends, vectors uncompressed."""
    setup = memcalc.estimate("gpt2", engine="ddp", gpus=2, comm_hook="powersgd", powersgd_rank=rank, seq_len=8).setup
    bucket = under_hook(setup, fp32, shapes)
    sent = sum(each.elements for each in bucket.sent)
    assert round(bucket.whole / sent) == times
    assert sum(n for name, n in bucket.states if name != "PowerSGD's errors (error_dict)") < sent


def test_one_matrix_of_the_paper() -> None:
    """Its largest: 512·512·3·3 numbers as 512 rows and 4608 columns, 461 times fewer; 9216 KiB before."""
    setup = memcalc.estimate("gpt2", engine="ddp", gpus=2, comm_hook="powersgd", seq_len=8).setup
    bucket = under_hook(setup, fp32, [(512, 512, 3, 3)])
    assert [each.elements for each in bucket.sent] == [0, 512, 4608]
    assert (4 * bucket.whole, round(bucket.whole / (512 + 4608))) == (9216 * 1024, 461)


@pytest.mark.parametrize("optimizer", ["onebit-adam", "onebit-lamb", "zero-one-adam"])
def test_one_bit_is_a_sixteenth(optimizer: str) -> None:
    """Tang et al. 2021 (arXiv 2102.02888) and DeepSpeed's post on it: a sixteenth of 16-bit gradients after the warm-up, a
    fifth with a warm-up of 15 %. Scales and padding are on top."""
    how = {"engine": "deepspeed", "gpus": 64, "precision": "fp16-mixed", "seq_len": 8, "optimizer": optimizer}
    before, after = (
        sum(c.wire for c in memcalc.estimate("gpt2", compression_phase=phase, **how).collectives)  # type: ignore[arg-type]
        for phase in ("warmup", "compressed")
    )
    assert 16 - 0.01 < Fraction(before, after) < 16
    warmup = Fraction(15, 100)
    assert round(1 / (warmup + (1 - warmup) * Fraction(after, before))) == 5
