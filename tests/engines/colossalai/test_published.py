"""The tables of Colossal-AI's documentation (docs/source/en/features/{1D,2D,2p5D,3D}_tensor_parallel.md), for one linear
layer whose input, weight and output are equally large: P ranks, grids of q·q, d·q·q and l·l·l."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

import memcalc

HIDDEN, HEADS = 96, 12
LAYER = "attn.dense"
GRIDS: tuple[tuple[str, int, int, int], ...] = (
    ("2", 4, 2, 1), ("2", 9, 3, 1), ("2", 16, 4, 1), ("2.5", 8, 2, 2), ("2.5", 18, 3, 2), ("3", 8, 2, 1),
)  # fmt: skip
"""dims, ranks, side, depth"""
grids = pytest.mark.parametrize(("dims", "ranks", "side", "depth"), GRIDS, ids=[f"{g[0]}-{g[1]}" for g in GRIDS])


def report(dims: str, ranks: int, depth: int = 1) -> Any:
    """b·s = h, so that X = b·s·h, W = h·h and Y have as many elements each."""
    n = 36 if ranks in (9, 18) else 16
    hidden = 144 if ranks in (9, 18) else HIDDEN
    model = {
        "model_type": "gpt2", "n_embd": hidden, "n_head": 12, "n_layer": 2, "n_positions": 64, "vocab_size": 3600,
        "resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0,
    }  # fmt: skip
    options: dict[str, Any] = {"tp_depth": depth} if dims == "2.5" else {}
    return memcalc.estimate(
        model, engine="colossalai", gpus=ranks, tp=ranks, tp_dims=dims, micro_batch_size=n, seq_len=hidden // n,
        precision="fp32", **options,
    )  # fmt: skip


def items(made: Any) -> list[Any]:
    """What one layer's product sends, its bias left out."""
    return [c for c in made.collectives if c.name.startswith(LAYER) and "bias" not in c.name]


def hops(made: Any) -> Fraction:
    """The bytes that a ring carries over each of its links, over those of X: a broadcast or a reduction passes n-1 links with
    all of its payload, a gather or a scatter with one of n parts."""
    hidden = made.model.program.hidden.size
    total = Fraction(0)
    for c in items(made):
        parts = c.group_size if c.collective in ("all_gather", "reduce_scatter") else 1
        total += Fraction(c.payload * (c.group_size - 1), parts)
    return total / (2 * 4 * hidden * hidden)  # of two layers, in fp32


@grids
def test_bandwidth(dims: str, ranks: int, side: int, depth: int) -> None:
    q, d = side, depth
    published = {
        "2": Fraction(6 * (q - 1), q),
        "2.5": Fraction(3 * (q - 1) * (d + 1), d * q),
        "3": Fraction(6 * (q - 1), q**3),
    }[dims]
    assert hops(report(dims, ranks, depth)) == published


def test_bandwidth_of_a_line() -> None:
    """2(P-1)/P of X: one all-reduce in forward for a layer that is cut by its inputs."""
    for ranks in (2, 4, 12):
        made = report("1", ranks)
        sent = [c for c in made.collectives if c.name == f"output of {LAYER}"]
        assert Fraction(sum(c.wire for c in sent), 2 * 4 * HIDDEN**2) == Fraction(2 * (ranks - 1), ranks)


@grids
def test_parameters(dims: str, ranks: int, side: int, depth: int) -> None:
    """1/q², 1/q² and 1/l³ of a matrix: two and a half dimensions have d copies."""
    made = report(dims, ranks, depth)
    hidden = made.model.program.hidden.size
    (weight,) = (i for i in made.items if i.component == "parameters" and i.name == f"blocks.*.{LAYER}.weight")
    assert weight.nbytes * (side**3 if dims == "3" else side**2) == 2 * 4 * hidden**2


@grids
def test_activations(dims: str, ranks: int, side: int, depth: int) -> None:
    """1/q², 1/(d·q²) and 1/l³ between two layers. On a cube a layer saves what it has gathered: 1/l² of its input."""
    made = report(dims, ranks, depth)
    hidden = made.model.program.hidden.size
    saved = {i.name: i.nbytes for i in made.items if i.component == "saved_activations"}
    whole, parts = 2 * 4 * hidden**2, {"2": side**2, "2.5": depth * side**2, "3": side**3}[dims]
    if dims == "3":
        assert saved[f"blocks.*.{LAYER}: input, gathered"] * side**2 == whole
        assert saved[f"blocks.*.{LAYER}: weight, gathered"] * side**2 == whole
        assert saved["blocks.*.norm1: less the mean"] * parts == whole
    else:
        assert saved["blocks.*.norm1: normalised"] * parts == whole


@pytest.mark.parametrize(("ranks", "q"), [(4, 2), (9, 3), (16, 4)])
def test_broadcasts_of_a_whole_layer_in_two_dimensions(ranks: int, q: int) -> None:
    """Forward broadcasts (7·b·s·h + 12·h²)/q elements per layer: the inputs of the four matrices are h, h, h and 4h wide, and
    the matrices have 3h², h², 4h² and 4h². Backward moves twice as much, as broadcasts and reductions."""
    made = report("2", ranks)
    hidden = made.model.program.hidden.size
    tokens = made.setup.micro_batch_size * (made.setup.seq_len or 0)
    of_layer = [c for c in made.collectives if c.layer is not None and c.collective in ("broadcast", "reduce")]
    elements = Fraction(7 * tokens * hidden + 12 * hidden**2, q)
    for phase, times in (("forward", 1), ("backward", 2)):
        assert sum(c.payload for c in of_layer if c.phase == phase) == 2 * 4 * times * elements
