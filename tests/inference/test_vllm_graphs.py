"""vLLM's CUDA graphs: the captured sizes against vLLM's own rule (vllm_graph_sizes.json, made by vllm_graph_sizes.py with vllm
0.33), and the verdict while their bytes are not known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import memcalc
from memcalc.core.dims import Dim
from memcalc.core.dtypes import bf16
from memcalc.inference.serving.graphs import LEAST_OF_A_GRAPH, capture_sizes, vllm_graphs
from memcalc.inference.serving.sglang import chunks, fraction, reserves
from memcalc.inference.serving.vllm import Batching
from memcalc.inputs.gpu import load_gpu
from memcalc.units import GIB, MIB

RECORD: dict[str, Any] = json.loads(Path(__file__).with_name("vllm_graph_sizes.json").read_text())


@pytest.mark.parametrize("of", RECORD["sizes"], ids=lambda of: f"{of['blackwell']} {of['tokens']} {of['sequences']}")
def test_the_sizes_are_vllms(of: dict[str, Any]) -> None:
    gpu = load_gpu("b200" if of["blackwell"] else "h100-80gb")
    assert list(capture_sizes(gpu, Batching(of["tokens"], of["sequences"]))) == of["sizes"]


@pytest.mark.parametrize("of", RECORD["extrapolated"])
def test_vllm_takes_no_less_for_its_graphs(of: dict[str, Any]) -> None:
    """What vLLM extrapolates of any measurement is the first graph, and 1 MiB at least for each further one."""
    first, graphs = (of["samples"] or [0])[0], of["graphs"]
    least = first + (graphs - 1) * LEAST_OF_A_GRAPH if len(of["samples"]) > 1 else first
    assert of["bytes"] >= least


def test_the_known_bytes() -> None:
    """InputBuffers' tensors, the output of the largest decode graph, and 1 MiB for each further graph."""
    gpu = load_gpu("h100-80gb")
    found = vllm_graphs(gpu, Batching(8192, 1024), Dim("hidden", 4096), bf16, None)
    inputs = 8192 * (4 + 8 + 1) + 1025 * 4 + 2 * 1024 * 4
    assert found.known == inputs + 512 * 4096 * 2 + 50 * MIB
    assert (len(found.sizes), found.full, found.piecewise) == (51, 51, 51)
    assert vllm_graphs(gpu, Batching(8192, 1024), Dim("hidden", 4096), bf16, 0).known == inputs
    assert vllm_graphs(gpu, Batching(8192, 1024), Dim("hidden", 4096), bf16, GIB).known == inputs + GIB
    few = vllm_graphs(gpu, Batching(2048, 100), Dim("hidden", 4096), bf16, None)
    assert few.full == sum(size <= 100 for size in few.sizes) < few.piecewise == len(few.sizes)


def served(**options: Any) -> Any:
    given = {"engine": "vllm", "gpu": "a100-80gb", "prompt_len": 1000, "new_tokens": 24, **options}
    return memcalc.infer("llama-3-8b", **given)


def test_what_fits_is_open_while_the_graphs_are_not_known() -> None:
    assert served(batch_size=3).fits is None
    assert served(batch_size=3, cuda_graph_memory="0").fits is True
    assert served(batch_size=3, cuda_graph_memory="1.5GiB").fits is True
    assert served(batch_size=3, cuda_graph_memory="70GiB").fits is False
    assert served(batch_size=100_000).fits is False
    assert any("at most" in note for note in served().notes)


@pytest.mark.parametrize("batch", [1, 100, 200])
def test_the_room_for_graphs_is_where_the_verdict_turns(batch: int) -> None:
    """A batch fits with graphs of so many bytes, and no longer with a MiB more than a block."""
    room = served(batch_size=batch).serving.room_for_graphs(batch)
    for more, fits in ((0, True), (-MIB, True), (3 * MIB, False)):
        assert served(batch_size=batch, cuda_graph_memory=f"{(room + more) // MIB}MiB").fits is fits


def test_measured_graphs_come_out_of_the_cache() -> None:
    none, some = served(cuda_graph_memory="0"), served(cuda_graph_memory="2GiB")
    assert none.serving.cache - some.serving.cache == 2 * GIB
    document = some.to_dict()["serving"]["graphs"]
    assert document["bytes"] == document["at_least"] == some.serving.graphs.known
    unknown = served().to_dict()["serving"]["graphs"]
    assert unknown["bytes"] is None and unknown["at_least"] > 0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"cuda_graph_memory": "much"}, "--cuda-graph-memory 'much'"),
        ({"cuda_graph_memory": "-1GiB"}, "--cuda-graph-memory"),
        ({"cuda_graph_memory": "3"}, "with a unit"),
        ({"cuda_graph_memory": "1GiB", "engine": "sglang"}, "--cuda-graph-memory 1GiB: not an option of sglang"),
        ({"cuda_graph_memory": "1GiB", "engine": "transformers"}, "--engine vllm"),
    ],
)
def test_what_is_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(memcalc.InputError, match=named):
        served(**options)


@pytest.mark.parametrize(("name", "latent", "tp"), [("h100-80gb", False, 1), ("rtx4090", True, 8), ("t4", False, 2)])
def test_sglangs_reserve_adds_up_to_its_fraction(name: str, latent: bool, tp: int) -> None:
    gpu = load_gpu(name)
    parts = reserves(gpu, chunks(gpu, tp), latent=latent, tp=tp)
    assert all(part.nbytes > 0 for part in parts)
    left = gpu.capacity - sum(part.nbytes for part in parts)
    assert round(left / gpu.capacity, 3) == fraction(gpu, chunks(gpu, tp), latent=latent, tp=tp)


def test_less_than_sglangs_own_reserve_leaves_the_verdict_open() -> None:
    assert served(engine="sglang").fits is True
    assert served(engine="sglang", mem_fraction_static=0.5).fits is True
    tight = served(engine="sglang", mem_fraction_static=0.97)
    assert tight.fits is None
    assert any("parts of its rule" in note for note in tight.notes)
