"""Modules that are recomputed, against Megatron-Core's own layers: bytes saved and peaks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import chain, combinations
from typing import Any

import megatron_moe_paper
import pytest
from gpt_on_paper import ran_on_paper
from recomputed_modules_oracle import recomputing_moe_layer, recomputing_step

import memcalc
from memcalc.families.base.architecture import Architecture, Experts, Latent
from memcalc.megatron.layout import Layout

LATENT = Latent(q_rank=24, kv_rank=16, nope_dim=8, rope_dim=4, v_dim=12)
MLA = Architecture(
    layers=2, hidden=64, heads=8, kv_heads=8, head_dim=8, ffn=96, vocab=128, gated=True, rms_norm=True, qkv_bias=False,
    linear_bias=False, qk_norm=False, positions=None, tied=False, latent=LATENT,
)  # fmt: skip
MODELS = {
    "mla": MLA,
    "wide-mlp": replace(MLA, ffn=512),
    "whole-queries": replace(MLA, latent=replace(LATENT, q_rank=None)),
    "dropout": replace(MLA, hidden_dropout=0.1),
}
NAMES = ("layernorm", "mla_up_proj", "mlp", "core_attn")
SETS = list(chain.from_iterable(combinations(NAMES, n) for n in range(5)))
BATCH, SEQ = 2, 32


def _marked(name: str, modules: tuple[str, ...]) -> Any:
    few = name == "mla" and len(modules) in (1, 4)
    return pytest.param(name, modules, id=f"{name}-{'+'.join(modules)}", marks=() if few else pytest.mark.slow)


@pytest.mark.parametrize(("name", "modules"), [_marked(name, modules) for name in MODELS for modules in SETS])
def test_layers_are_gpt_models(name: str, modules: tuple[str, ...]) -> None:
    a = MODELS[name]
    real = recomputing_step(a, modules, batch=BATCH, seq=SEQ)
    others = tuple(module for module in modules if module != "core_attn")
    layout = Layout(
        layers=a.layers, first=False, last=False, fuses_accumulation=False, mask_in_batch=False,
        selective="core_attn" in modules, recomputed=others,
    )  # fmt: skip
    ours = ran_on_paper(a, layout, BATCH, SEQ)

    kinds = (
        4 * a.layers if "core_attn" in modules else 0
    )  # a number for the kind of the mask, which that checkpoint saves
    assert (ours.saved, ours.backward) == (real.saved - kinds, real.backward - kinds)
    # on paper a layer has its attention's output until its end
    assert abs(ours.forward - real.forward) <= BATCH * SEQ * a.hidden * 2


MIXTRAL = Architecture(
    layers=2, hidden=64, heads=8, kv_heads=4, head_dim=16, ffn=96, vocab=300, gated=True, rms_norm=True, qkv_bias=False,
    linear_bias=False, qk_norm=False, positions=None, tied=False, experts=Experts(count=8, per_token=2, ffn=32),
)  # fmt: skip
SHARED = replace(MIXTRAL, experts=Experts(count=4, per_token=3, ffn=48, shared_ffn=32, normalised=False))
OF_EXPERTS = [(), ("moe_act",), ("moe",), ("shared_experts",), ("moe_act", "shared_experts")]


@pytest.mark.parametrize("modules", OF_EXPERTS, ids="+".join)
@pytest.mark.parametrize(("tp", "ep", "etp"), [(1, 1, 1), (1, 2, 1), (2, 2, 1)])
@pytest.mark.parametrize("a", [MIXTRAL, SHARED], ids=["mixtral", "shared"])
def test_a_layer_of_experts_is_megatrons(
    a: Architecture, tp: int, ep: int, etp: int, modules: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = a.experts
    assert experts is not None
    real = recomputing_moe_layer(a, modules, tp=tp, ep=ep, etp=etp, batch=BATCH, seq=SEQ)
    monkeypatch.setattr(megatron_moe_paper, "Layout", partial(Layout, recomputed=modules))
    ours = megatron_moe_paper.paper_layer(a, tp=tp, ep=ep, etp=etp, batch=BATCH, seq=SEQ)
    gathered = tp * BATCH * SEQ * a.hidden * 2 if tp > 1 and experts.shared_ffn else 0
    assert ours.saved == real.saved - gathered
    # rows of their own in an estimate: the dispatcher's map of tokens to experts with its weights, and some numbers of tokens
    dispatcher = BATCH * SEQ * experts.count * (2 + 1) if "moe" in modules else 0
    counted = real.backward - gathered - ours.backward - dispatcher
    assert 0 <= counted <= (8 * (experts.count * (2 + 2 * ep * etp) + 4 * ep * etp) if "moe" in modules else 0)
    assert ours.calls == real.calls


@pytest.mark.parametrize(
    ("setup", "said"),
    [
        ({"engine": "ddp", "recompute": "none"}, "--recompute-modules mlp: needs --engine megatron"),
        ({"recompute": "full"}, "--recompute-modules mlp: needs --recompute selective"),
        ({"recompute_modules": "mlp,attn"}, "--recompute-modules mlp,attn: allowed: names with commas, of core_attn, "),
        ({"recompute_modules": "moe"}, "--recompute-modules moe: this llama has no experts to recompute"),
        ({"recompute_modules": "mla_up_proj"}, "--recompute-modules mla_up_proj: this llama has no latent attention"),
    ],
)
def test_refused(setup: dict[str, Any], said: str) -> None:
    given = {"gpus": 8, "engine": "megatron", "recompute": "selective", "recompute_modules": "mlp", **setup}
    with pytest.raises(memcalc.InputError) as error:
        memcalc.estimate("llama-7b", **given)
    assert str(error.value).startswith(said)


def test_core_attention_is_the_default() -> None:
    given = {"gpus": 8, "engine": "megatron", "recompute": "selective"}
    one = memcalc.estimate("llama-7b", **given)
    same = memcalc.estimate("llama-7b", **given, recompute_modules="core_attn")
    assert same.setup == one.setup
    assert same.to_dict()["memory"] == one.to_dict()["memory"]
    both = memcalc.estimate("llama-7b", **given, recompute_modules=" mlp , core_attn")
    assert both.setup.recompute_modules == "core_attn,mlp"
    assert both.peak < one.peak
