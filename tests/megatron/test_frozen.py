"""GPTModel with frozen weights against Megatron-Core's own: what trains, bytes saved, peaks, and what is sent."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from megatron_tuned_on_paper import tuned_on_paper, whole_on_paper
from megatron_tuned_oracle import Ran, tuned_step, whole_step

from memcalc.families.base.architecture import Architecture
from memcalc.megatron.layout import padded_vocab

MIXED = Architecture(
    layers=3, hidden=64, heads=8, kv_heads=8, head_dim=8, ffn=256, vocab=128, gated=False, rms_norm=False, qkv_bias=True,
    linear_bias=True, qk_norm=True, positions=None, tied=True,
)  # fmt: skip
LLAMA = Architecture(
    layers=3, hidden=64, heads=8, kv_heads=4, head_dim=16, ffn=96, vocab=128, gated=True, rms_norm=True, qkv_bias=False,
    linear_bias=False, qk_norm=False, positions=None, tied=False,
)  # fmt: skip
FROZEN: dict[str, str] = {
    "first layers": r"layers\.[01]\.",
    "last layers": r"layers\.2\.",
    "attention": "self_attention",
    "mlp": r"\.mlp\.",
    "norms": "norm",
    "all but norms": "^(?!.*norm)",
    "biases": "bias$",
    "all but linear_proj": r"^(?!.*linear_proj\.weight)",
    "linear_fc2": r"linear_fc2\.weight",
    "linear_qkv": "linear_qkv",
}
BATCH, SEQ = 2, 32


def by(pattern: str) -> Callable[[str], bool]:
    return lambda name: re.search(pattern, name) is not None


def compared(
    a: Architecture, pattern: str, tp: int, sequence_parallel: bool, received: bool, te: bool
) -> tuple[Ran, Ran]:
    how: Any = {"tp": tp, "batch": BATCH, "seq": SEQ, "sequence_parallel": sequence_parallel, "received": received}
    return tuned_step(a, by(pattern), te=te, **how), tuned_on_paper(a, by(pattern), **how)


def check(a: Architecture, pattern: str, tp: int, sequence_parallel: bool, received: bool) -> None:
    shard = BATCH * SEQ * a.hidden * 2 // (tp if sequence_parallel else 1)
    angles = SEQ * a.head_dim * 4 if a.positions is None else 0  # which the real code caches
    first = "decoder.layers.0."
    for te in (False, True):
        real, ours = compared(a, pattern, tp, sequence_parallel, received, te)
        assert (ours.trained, ours.frozen, ours.calls) == (real.trained, real.frozen, real.calls)
        norm, qkv = (
            f"{first}{name}.weight" in ours.trained for name in ("input_layernorm", "self_attention.linear_qkv")
        )
        given = 0 if received or norm or qkv else shard  # an input that nothing saves is still its owner's
        # Megatron-Core's own norm keeps nothing if neither it nor its input wants a gradient; the fused one of Transformer
        # Engine has one backward with the layer, and saves its statistics
        more = 0 if te or received or norm or not qkv else shard // a.hidden * (2 if a.rms_norm else 4)
        assert ours.saved - angles + given - more == real.saved
        if not te:
            longer = shard + (
                2 * 2 * a.ffn if a.linear_bias else 0
            )  # as with the whole model (test_any_architecture.py)
            # without fused accumulation, a weight's gradient is made beside the whole gradient of its layer's gathered input,
            # which is gone on paper by then
            least = -shard if sequence_parallel else 0
            assert least <= ours.backward - angles + given - real.backward <= longer
        joined = BATCH * SEQ * (2 * a.heads + 2 * a.kv_heads) * a.head_dim * 2 // tp
        assert -joined - shard <= ours.forward - angles + given - real.forward <= 2 * shard


SOME = [("first layers", True), ("all but norms", False), ("attention", False)]


@pytest.mark.parametrize(("frozen", "received"), SOME)
def test_a_stage_with_frozen_weights(frozen: str, received: bool) -> None:
    check(MIXED, FROZEN[frozen], 2, True, received)


@pytest.mark.slow
@pytest.mark.parametrize("received", [True, False], ids=["later", "first"])
@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, False), (2, True), (4, True)])
@pytest.mark.parametrize("a", [MIXED, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("frozen", FROZEN)
def test_any_frozen_weights(frozen: str, a: Architecture, tp: int, sequence_parallel: bool, received: bool) -> None:
    if a is LLAMA and frozen == "biases":
        pytest.skip("it has none")
    check(a, FROZEN[frozen], tp, sequence_parallel, received)


ENDS = {
    "embedding": "^embedding",
    "embedding and head": "^embedding|^output_layer",
    "head": "^output_layer",
    "all but the last layer": r"^(?!.*layers\.2\.)",
    "all but the head": "^(?!output_layer)",
    "all but norms": "^(?!.*norm)",
}


@pytest.mark.parametrize(
    ("frozen", "tp", "sequence_parallel"),
    [
        ("embedding and head", 2, True),
        pytest.param("embedding and head", 2, False, marks=pytest.mark.slow),
        *(
            pytest.param(one, 2, sp, marks=pytest.mark.slow)
            for one in ENDS
            if one != "embedding and head"
            for sp in (False, True)
        ),
    ],
)
def test_a_whole_model_with_frozen_weights(frozen: str, tp: int, sequence_parallel: bool) -> None:
    """With embedding, head and loss: what trains, what is sent, and products."""
    how: Any = {
        "tp": tp,
        "batch": 2,
        "seq": 32,
        "sequence_parallel": sequence_parallel,
        "vocab": padded_vocab(LLAMA.vocab, tp),
    }
    real, ours = whole_step(LLAMA, by(ENDS[frozen]), **how), whole_on_paper(LLAMA, by(ENDS[frozen]), **how)
    assert ours == real
