"""Networks of files: parameters, shapes, saved bytes and peaks equal those of the torch module of the same file."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from crossed import crossed
from layers_files import ALEXNET, LENET_5, NETWORKS, VGG_16, seq_of
from layers_oracle import flops_of, module_of, step_of

import memcalc
from memcalc.estimation.layers import layer_rows

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def estimated(network: dict[str, Any], **options: Any) -> Any:
    seq = seq_of(network)
    return memcalc.estimate(memcalc.load_layers(network), **options, **({} if seq is None else {"seq_len": seq}))


@pytest.mark.parametrize("name", NETWORKS)
def test_parameters_buffers_and_output_are_those_of_the_module(name: str) -> None:
    network = NETWORKS[name]
    model = memcalc.load_layers(network)
    module, out = module_of(network, 2, seq_of(network))
    assert [(n, shape) for n, shape, _ in model.weights()] == [
        (n, tuple(p.shape)) for n, p in module.named_parameters()
    ]
    buffers = [(b.full_name, tuple(d.size for d in b.shape)) for b in model.program.buffers()]
    assert buffers == [(n, tuple(b.shape)) for n, b in module.named_buffers()]
    program: Any = model.program
    assert tuple(seq_of(network) if d.name == "seq" else d.size for d in program.network.out) == out[1:]


@pytest.mark.parametrize(("name", "precision"), crossed([*NETWORKS], [*PRECISIONS]))
def test_a_step_allocates_what_the_module_does(name: str, precision: str) -> None:
    network = NETWORKS[name]
    report = estimated(network, precision=precision, micro_batch_size=4)
    seen = step_of(network, batch=4, seq=seq_of(network), dtype=PRECISIONS[precision])
    assert report.total("saved_activations") == seen.saved
    assert report.phases == {"forward": seen.forward, "backward": seen.backward, "step": seen.step}


@pytest.mark.parametrize("name", ["lenet-5", "alexnet", "u-net", "transformer", "both-ways", "groups"])
def test_a_step_under_autocast(name: str) -> None:
    # without batch norms, whose statistics torch's functions of sizes alone give the input's dtype, and without biases of
    # cells, whose copies the CPU's stand-in of autocast does not keep
    network = NETWORKS[name]
    report = estimated(network, precision="bf16-autocast", micro_batch_size=3)
    seen = step_of(network, batch=3, seq=seq_of(network), autocast=torch.bfloat16)
    assert report.total("saved_activations") == seen.saved
    assert report.phases == {"forward": seen.forward, "backward": seen.backward, "step": seen.step}


@pytest.mark.parametrize(
    "name", [name for name in NETWORKS if name not in ("groups", "language-model", "both-ways", "gru")]
)
def test_flops_are_those_of_torchs_counter(name: str) -> None:
    network = NETWORKS[name]
    report = estimated(network, precision="fp32", micro_batch_size=2)
    if name == "transformer":  # the counter of torch does not know the CPU's fused attention
        seen = step_of(network, batch=2, seq=seq_of(network))
        counted = {"forward": seen.flops["forward"], "total": sum(seen.flops.values())}
    else:
        counted = flops_of(network, 2, seq_of(network))
    assert report.flops["forward"] == counted["forward"]
    assert report.flops["total"] == counted["total"]


def test_flops_of_cells_and_of_groups() -> None:
    """torch's counter takes all channels for the weight's gradient of a convolution with groups; a group has its own."""
    report = estimated(NETWORKS["groups"], precision="fp32", micro_batch_size=2)
    first, second = 2 * 2 * 12 * 18 * 18 * 2 * 9, 2 * 2 * 12 * 18 * 18 * 2 * 9
    assert report.flops["forward"] == first + second + 2 * 2 * 48 * 7
    assert report.flops["backward"] == first + 2 * second + 2 * 2 * 2 * 48 * 7  # no gradient of the images
    batch, seq, hidden = 4, 7, 48
    cells = estimated(NETWORKS["language-model"], precision="fp32", micro_batch_size=batch)
    lstm = 2 * batch * seq * 4 * hidden * ((32 + hidden) + (hidden + hidden))
    assert cells.flops["forward"] == lstm + 2 * batch * seq * hidden * 500


def test_real_tensors_have_the_same_peaks() -> None:
    """The mode over fake tensors and over real ones counts the same, where the CPU has no other kernels."""
    for network in (LENET_5, NETWORKS["u-net"]):
        assert step_of(network, batch=2, real=True) == step_of(network, batch=2)


def test_published_numbers_of_parameters() -> None:
    # torchvision.models: alexnet 61,100,840, vgg16 138,357,544 (torchvision/models/alexnet.py, vgg.py: num_params)
    assert memcalc.load_layers(ALEXNET).num_parameters == 61_100_840
    assert memcalc.load_layers(VGG_16).num_parameters == 138_357_544
    # LeCun et al. 1998 connect C3 to a part of the maps of S2, and have trained pooling: 60 thousand there
    assert memcalc.load_layers(LENET_5).num_parameters == 61_706


NOTES = (
    (224, 64, 1_728), (224, 64, 36_864), (112, 64, 0), (112, 128, 73_728), (112, 128, 147_456), (56, 128, 0), (56, 256, 294_912),
    (56, 256, 589_824), (56, 256, 589_824), (28, 256, 0), (28, 512, 1_179_648), (28, 512, 2_359_296), (28, 512, 2_359_296),
    (14, 512, 0), (14, 512, 2_359_296), (14, 512, 2_359_296), (14, 512, 2_359_296), (7, 512, 0), (1, 4096, 102_760_448),
    (1, 4096, 16_777_216), (1, 1000, 4_096_000),
)  # fmt: skip
"""The side, the channels and the weights of VGG-16's layers, as the notes of Stanford's CS231n list them (Convolutional
Networks, "VGGNet in detail"); biases are left out there."""


def test_the_layers_of_vgg_are_those_of_a_courses_notes() -> None:
    """The notes end with "TOTAL memory: 24M * 4 bytes ~= 93MB / image (only forward! ~*2 for bwd)" and "TOTAL params: 138M
    parameters". The lines themselves add up to 15.2M values, 61 MB; what autograd keeps of them, and of the rest, is more."""
    report = estimated(VGG_16, precision="fp32", micro_batch_size=1)
    rows = [
        (
            row.output[-1] if len(row.output) == 3 else 1,
            row.output[0],
            row.parameters - (row.output[0] if row.parameters else 0),
        )
        for one in layer_rows(report)
        for row in [one] * one.copies
        if row.kind in ("conv2d", "maxpool2d", "linear")
    ]
    assert sorted(rows) == sorted(NOTES)
    assert round(report.model.num_parameters, -6) == 138_000_000
    values = 224 * 224 * 3 + sum(side * side * channels for side, channels, _ in NOTES)
    assert round(values, -5) == 15_200_000
    pooled = sum(side * side * channels for side, channels, weights in NOTES if not weights)
    masks = 2 * 4096
    images, logits = 224 * 224 * 3, 1000  # the caller's; the log-probabilities take the place of the logits
    # float values but those of the images, once each, as rectified in place; 8 bytes for each maximum; the mean of 7 × 7; masks
    kept = 4 * (values - images - logits) + 8 * pooled + 4 * 7 * 7 * 512 + masks + 4 * 2 * 4096 + 4 * logits + 4
    assert report.total("saved_activations") == kept


@pytest.mark.parametrize(
    "setup", [{"engine": "ddp", "gpus": 4}, {"zero": 1, "gpus": 4}, {"zero": 2, "gpus": 4}, {"zero": 3, "gpus": 4}]
)
def test_engines_hold_the_shares_of_every_network(setup: dict[str, Any]) -> None:
    for name in ("lenet-5", "resnet-blocks", "transformer", "gru"):
        alone, shared = (estimated(NETWORKS[name], precision="bf16-mixed", **s) for s in ({}, setup))
        assert shared.total("saved_activations") == alone.total("saved_activations")
        assert sum(item.at_peak for item in shared.items) == shared.peak


def test_batch_size_is_linear_in_what_is_saved() -> None:
    one, three = (estimated(NETWORKS["vgg-11"], precision="fp32", micro_batch_size=n) for n in (2, 6))
    loss = 8  # the loss' total weight, and the loss itself, have no batch
    assert abs(three.total("saved_activations") - 3 * one.total("saved_activations")) <= 3 * loss
