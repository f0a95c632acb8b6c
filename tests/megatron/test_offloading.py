"""Fine-grained offloading of activations against Megatron-Core's own manager: bytes saved and peaks."""

from __future__ import annotations

from typing import Any

import pytest
from fine_grained_oracle import offloading_step
from gpt_on_paper import ran_on_paper
from megatron_layers_oracle import Ran

import memcalc
from memcalc.families.base.architecture import Architecture, Latent
from memcalc.families.base.module import Run
from memcalc.megatron import gpt_model
from memcalc.megatron.layout import Layout
from memcalc.megatron.offloading import Chunk, groups_to_move

MLA = Architecture(
    layers=4, hidden=64, heads=8, kv_heads=8, head_dim=8, ffn=96, vocab=128, gated=True, rms_norm=True, qkv_bias=False,
    linear_bias=False, qk_norm=False, positions=None, tied=False,
    latent=Latent(q_rank=24, kv_rank=16, nope_dim=8, rope_dim=4, v_dim=12),
)  # fmt: skip
BATCH, SEQ, LEAST = 2, 32, 1000
SETS = [
    ("attn_norm",), ("qkv_linear",), ("core_attn",), ("core_attn", "attn_proj"),
    ("attn_norm", "qkv_linear", "core_attn", "attn_proj"),
]  # fmt: skip


RECOMPUTED = [(), ("layernorm",), ("mla_up_proj", "mlp"), ("layernorm", "mla_up_proj", "mlp")]
ALONE = ("qkv_linear",), "mla_up_proj"
"""What Megatron-Core 0.16.1 fails with: the recomputation asks for what is moved before a group has said which chunk runs."""
CASES = [(o, r) for o in SETS for r in RECOMPUTED if not (o == ALONE[0] and ALONE[1] in r)]


def _marked(case: tuple[tuple[str, ...], tuple[str, ...]]) -> Any:
    few = case in (CASES[0], CASES[-1])
    return pytest.param(*case, id="-".join(map("+".join, case)), marks=() if few else pytest.mark.slow)


each = pytest.mark.parametrize(("offloaded", "recomputed"), map(_marked, CASES))


def on_paper(offloaded: tuple[str, ...], recomputed: tuple[str, ...]) -> Ran:
    layout = Layout(
        layers=MLA.layers, first=False, last=False, fuses_accumulation=False, mask_in_batch=False, recomputed=recomputed,
        offloaded=offloaded, least_offloaded=LEAST,
    )  # fmt: skip
    return ran_on_paper(MLA, layout, BATCH, SEQ)


def _wanted_at_once(model: gpt_model.GPTModel, run: Run) -> Chunk | None:
    chunk = groups_to_move(model, run)
    assert chunk is not None
    chunk.follows = True
    return chunk


@each
def test_a_chunk_whose_backward_follows(
    offloaded: tuple[str, ...], recomputed: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    (real,) = offloading_step(MLA, recomputed, offloaded, batch=BATCH, seq=SEQ, least=LEAST, many=1)
    monkeypatch.setattr(gpt_model, "groups_to_move", _wanted_at_once)
    ours = on_paper(offloaded, recomputed)
    assert (ours.saved, ours.backward) == (real.saved, real.backward)
    # on paper a layer has its attention's output until its end
    assert 0 <= ours.forward - real.forward <= BATCH * SEQ * MLA.hidden * 2


@each
def test_a_chunk_after_others(offloaded: tuple[str, ...], recomputed: tuple[str, ...]) -> None:
    real = offloading_step(MLA, recomputed, offloaded, batch=BATCH, seq=SEQ, least=LEAST, many=2)[1]
    ours = on_paper(offloaded, recomputed)
    assert (ours.saved, ours.backward) == (real.saved, real.backward)
    assert 0 <= ours.forward - real.forward <= BATCH * SEQ * MLA.hidden * 2


@pytest.mark.parametrize(
    ("model", "setup", "said"),
    [
        ("llama-7b", {"engine": "ddp"}, "--offload-modules core_attn: needs --engine megatron"),
        (
            "llama-7b",
            {"offload_modules": "attn_proj"},
            "--offload-modules attn_proj: the input of attn_proj is the output of",
        ),
        ("llama-7b", {"offload_modules": "attn"}, "--offload-modules attn: allowed: names with commas, of attn_norm, "),
        ("llama-7b", {"offload_modules": "moe_act"}, "--offload-modules moe_act: this llama has no experts"),
        (
            "llama-7b",
            {"offload_modules": "qkv_linear"},
            "--offload-modules qkv_linear: this llama has no latent attention",
        ),
        ("llama-7b", {"recompute": "full"}, "--recompute full: with --offload-modules core_attn is not modelled"),
        (
            "llama-7b",
            {"recompute": "selective"},
            "--offload-modules core_attn: with core_attn recomputed is not modelled",
        ),
        (
            "deepseek-v3",
            {
                "offload_modules": "qkv_linear",
                "recompute": "selective",
                "recompute_modules": "mla_up_proj",
                "ep": 8,
                "zero": 1,
            },
            "--offload-modules qkv_linear: Megatron-Core fails",
        ),
    ],
)
def test_refused(model: str, setup: dict[str, Any], said: str) -> None:
    given = {"model": model, "gpus": 8, "engine": "megatron", "offload_modules": "core_attn", **setup}
    with pytest.raises(memcalc.InputError) as error:
        memcalc.estimate(**given)
    assert str(error.value).startswith(said)


def test_the_hosts_bytes_and_copies_are_those_of_what_is_moved() -> None:
    """Queries, keys, values and the output of fused attention, of all layers but the last; of a stage's micro-batches in
    flight, of all layers. The output stays on the GPU, as the projection after attention has saved it too."""
    given = {"gpus": 2, "engine": "megatron", "offload_modules": "core_attn", "seq_len": 2048, "gpu": "h100-80gb"}
    each = 4 * 2048 * 4096 * 2
    one = memcalc.estimate("llama-7b", **given)
    assert sum(item.nbytes for item in one.host if "rounded up" not in item.name) == 2 * 31 * each
    without = memcalc.estimate("llama-7b", **given | {"offload_modules": None})
    assert (
        one.to_dict()["memory"]["saved_activations"]
        == without.to_dict()["memory"]["saved_activations"] - 31 * each * 3 // 4
    )
    moved = [item for item in one.to_dict()["time"]["items"] if "host" in item["name"]]
    assert [item["name"] for item in moved] == ["activations to the host", "activations back from the host"]
    first = memcalc.estimate("llama-7b", **given | {"pp": 2, "global_batch_size": 8}, pp_rank=0)
    assert sum(item.nbytes for item in first.host if "rounded up" not in item.name) == 2 * 2 * 16 * each
