"""From live tensors to `allocated`, `reserved` and `device`."""

from __future__ import annotations

import ast
import importlib.metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import memcalc
from memcalc.core.rows import Item
from memcalc.device.allocator import BLOCK
from memcalc.device.shown import (
    TORCH,
    TRAINER_ERROR,
    Kernels,
    allocator_items,
    device_items,
    transformer_engine_workspace,
)
from memcalc.inputs.gpu import GPU, all_gpus, load_gpu

MIB = 2**20


def item(at_peak: int, blocks: int = 1) -> Item:
    return Item("temporaries", "x", at_peak, at_peak, (), "fp32", "", "", "exact", "", blocks)


def lost(*items: Item) -> int:
    return allocator_items(items, None)[0].nbytes


@pytest.mark.parametrize(
    ("given_item", "expected"),
    [
        (item(0), 0),
        (item(1), 511),
        (item(512), 0),
        (item(513), 511),
        (item(1536), 0),
        (item(300, blocks=3), 3 * 412),  # three blocks of 100 bytes are three blocks of 512
        (item(512 * 3, blocks=3), 0),
    ],
)
def test_blocks_are_multiples_of_512(given_item: Item, expected: int) -> None:
    assert lost(given_item) == expected


@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 40)), max_size=20))
def test_rounding_is_less_than_a_block_each(sizes: list[tuple[int, int]]) -> None:
    items = [item(size * blocks, blocks) for size, blocks in sizes]
    rounded = sum(i.at_peak for i in items) + lost(*items)
    assert rounded % BLOCK == 0
    assert 0 <= lost(*items) <= (BLOCK - 1) * sum(blocks for _, blocks in sizes)


@pytest.mark.parametrize(
    ("gpu", "each", "basis"),
    [
        ("h100-80gb", 32 * MIB, "modelled"),
        *((gpu, 32 * MIB, "modelled") for gpu in ("b200", "gb200", "b300", "rtx5090", "rtx-pro-6000")),
        *((gpu, 8_519_680, "modelled") for gpu in ("a100-80gb", "l40s", "rtx4090", "t4")),
        (None, 8_519_680, "assumed"),
    ],
)
def test_workspaces_of_two_handles(gpu: str | None, each: int, basis: str) -> None:
    """CublasHandlePool.cpp: 32 MiB on Hopper and Blackwell, ":4096:2:16:8" elsewhere; two handles, one of autograd's thread."""
    workspaces = allocator_items([], None if gpu is None else load_gpu(gpu))[1]
    assert workspaces.nbytes == 2 * each
    assert workspaces.basis == basis


@pytest.mark.parametrize(("gpus", "nccl"), [(1, 0), (2, 544 * 10**6), (3, 688 * 10**6), (512, 688 * 10**6)])
def test_what_a_process_holds_outside_torch(gpus: int, nccl: int) -> None:
    context, *rest = device_items(gpus, None)
    assert context.nbytes == 426 * MIB
    assert sum(i.nbytes for i in rest) == nccl
    for held in (context, *rest):
        assert held.component == "device"
        assert held.basis == "assumed"
        assert held.source


def test_overheads_have_a_basis_and_a_source() -> None:
    for held in memcalc.estimate("gpt2", gpus=8, gpu="h100-80gb").overheads:
        assert held.at_peak == 0
        assert held.basis in ("exact", "modelled", "assumed", "measured")
        assert held.source
        assert held.formula


CUDNN = {"dropout seed", "dropout offset"}
"""What Hopper's kernel of attention keeps besides."""


def test_the_gpu_changes_nothing_but_its_own_rows() -> None:
    plain, ampere, hopper = (memcalc.estimate("gpt2", gpu=gpu) for gpu in (None, "a100-80gb", "h100-80gb"))
    assert plain.items == ampere.items
    assert {item.name.split(": ")[-1] for item in set(plain.items) ^ set(hopper.items)} <= CUDNN
    workspaces = [report.overheads[1].nbytes for report in (plain, hopper)]
    assert workspaces[1] - workspaces[0] == 2 * (32 * MIB - 8_519_680)
    assert plain.overheads[0] == hopper.overheads[0]
    assert plain.fits is None
    assert hopper.fits is True


@pytest.mark.parametrize("batch", [1, 8, 32, 128])
def test_the_margin_is_the_stated_error(batch: int) -> None:
    report = memcalc.estimate("gpt2-xl", micro_batch_size=batch, gpu="a100-40gb")
    assert report.to_dict()["fit"]["margin"] == report.margin == report.device * TRAINER_ERROR // 100


@pytest.mark.parametrize(("gpu", "capability"), [("a100-80gb", 8), ("rtx4090", 8), ("h100-80gb", 9), ("b200", 10)])
def test_transformer_engines_workspace(gpu: str, capability: int) -> None:
    """Its own function says how large it is."""
    package = importlib.metadata.distribution("transformer-engine")
    source = Path(str(package.locate_file("transformer_engine/pytorch/cpp_extensions/gemm.py"))).read_text()
    name = "get_cublas_workspace_size_bytes"
    (function,) = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == name)
    cuda = SimpleNamespace(current_device=int, get_device_properties=lambda _: SimpleNamespace(major=capability))
    names = {"torch": SimpleNamespace(cuda=cuda)}
    exec(ast.unparse(function), names)
    assert transformer_engine_workspace(load_gpu(gpu).compute_capability) == names[name]()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("kernels", "count"), [(TORCH, 0), (Kernels(transformer_engine=1), 1), (Kernels(transformer_engine=5), 5)]
)
def test_workspaces_of_transformer_engine(kernels: Kernels, count: int) -> None:
    """One, and one for each of the four streams of grouped products."""
    rows = [item for item in allocator_items([], load_gpu("h100-80gb"), kernels) if item.name.startswith("Transformer")]
    assert sum(item.nbytes for item in rows) == count * (32 * MIB + 1024)


@pytest.mark.parametrize("gpu", all_gpus(), ids=lambda gpu: gpu.name)
def test_every_gpu_has_workspaces(gpu: GPU) -> None:
    """AMD's capability is a name: gfx942."""
    (own,) = (i for i in allocator_items([], gpu, Kernels(transformer_engine=1)) if i.name.startswith("Transformer"))
    newer = gpu.compute_capability.split(".")[0] in ("9", "10", "12")
    assert own.nbytes == (32 * MIB + 1024 if newer else 4 * MIB)
