"""Every file of `memcalc/hardware/gpus`, and finding a GPU by its name."""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

import memcalc
from memcalc.device import shown as devices
from memcalc.errors import InputError
from memcalc.inputs.files import hardware_folder
from memcalc.inputs.gpu import GPU, all_gpus, from_file, load_gpu

FILES = sorted(hardware_folder().glob("*.json"))
KEYS = {
    "full_name", "aliases", "vendor", "architecture", "compute_capability", "memory", "nominal_memory",
    "memory_bandwidth", "dense_flops_per_second", "links",
}  # fmt: skip
OPTIONAL = {"nvlink_group", "network"}
DTYPES = {"fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "int8", "fp6", "fp4"}
LINKS = {"nvlink", "pcie", "infinity_fabric"}


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_bytes())


def check_quantity(quantity: dict[str, Any], units: set[str]) -> None:
    assert set(quantity) == {"value", "unit", "source"}
    assert isinstance(quantity["value"], (int, float))
    assert not isinstance(quantity["value"], bool)
    assert math.isfinite(quantity["value"])
    assert quantity["value"] > 0
    assert quantity["unit"] in units
    assert isinstance(quantity["source"], str)
    assert len(quantity["source"].strip()) >= 5


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_file(path: Path) -> None:
    content = read(path)
    assert KEYS <= set(content) <= KEYS | OPTIONAL
    assert path.stem == path.stem.lower()
    for key in ("full_name", "vendor", "architecture", "compute_capability"):
        assert isinstance(content[key], str)
        assert content[key].strip() == content[key] != ""
    check_quantity(content["memory"], {"MiB", "GiB"})
    check_quantity(content["nominal_memory"], {"GB", "GiB"})
    check_quantity(content["memory_bandwidth"], {"GB/s", "TB/s"})
    assert content["dense_flops_per_second"]
    assert set(content["dense_flops_per_second"]) <= DTYPES
    for quantity in content["dense_flops_per_second"].values():
        check_quantity(quantity, {"GFLOP/s", "TFLOP/s", "PFLOP/s"})
    assert content["links"]
    assert set(content["links"]) <= LINKS
    for quantity in content["links"].values():
        check_quantity(quantity, {"GB/s", "TB/s"})
    if "network" in content:
        check_quantity(content["network"], {"Gbit/s"})
        assert "nvlink" in content["links"], "a node of NVIDIA's own has NVLink"
    if "nvlink_group" in content:
        check_quantity(content["nvlink_group"], {"GPUs"})
    bridged = "bridge" in content["links"].get("nvlink", {"source": ""})["source"]
    assert bridged == ("nvlink_group" in content)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_capacity_is_near_the_nominal_one(path: Path) -> None:
    """What software sees is less than what the box says, read as GB or as GiB; a slip of a unit would be more."""
    gpu = load_gpu(path.stem)
    nominal = gpu.nominal_memory.value
    assert min(abs(gpu.capacity - nominal * unit) for unit in (10**9, 2**30)) < 0.1 * nominal * 10**9
    assert gpu.capacity <= nominal * 2**30


@pytest.mark.parametrize("gpu", [gpu for gpu in all_gpus() if gpu.vendor == "nvidia"], ids=lambda gpu: gpu.name)
def test_capacity_leaves_out_what_the_driver_reserves(gpu: GPU) -> None:
    """Drivers from R510 print it in their total; a process cannot allocate it. A source says which of the two it has."""
    source = gpu.memory.source
    if "drivers before R510 leave out the memory the driver reserves" in source:
        return
    printed = re.search(r"nvidia-smi's memory\.total, (\d+) MiB, has what the driver reserves in it$", source)
    assert printed, "say what total nvidia-smi prints, and take the one without what is reserved"
    reserved = int(printed[1]) * 2**20 - gpu.capacity
    assert 200 * 2**20 < reserved < 0.05 * gpu.capacity


@pytest.mark.parametrize(
    ("printed", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-80gb"), ("NVIDIA GeForce RTX 4090", "rtx4090"), ("Tesla T4", "t4"),
        ("NVIDIA L4", "l4"), ("NVIDIA L40", "l40"), ("NVIDIA L40S", "l40s"), ("NVIDIA A10", "a10"), ("NVIDIA A10G", "a10g"),
    ],
)  # fmt: skip
def test_names_that_torch_prints(printed: str, name: str) -> None:
    """What `torch.cuda.get_device_name` returns."""
    assert load_gpu(printed).name == name


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_narrower_types_are_no_slower(path: Path) -> None:
    """Dense numbers among themselves: a sparse one put in by mistake is twice its wider neighbour's double."""
    flops = load_gpu(path.stem).dense_flops_per_second
    speed = {
        name: quantity.value * {"G": 1, "T": 10**3, "P": 10**6}[quantity.unit[0]] for name, quantity in flops.items()
    }
    order = [name for name in ("fp16", "fp8", "fp4") if name in speed]
    for wide, narrow in itertools.pairwise(order):
        assert speed[wide] <= speed[narrow]


def test_aliases_are_of_one_gpu_each() -> None:
    names = [gpu.name for gpu in all_gpus()]
    aliases = [alias.lower() for gpu in all_gpus() for alias in gpu.aliases]
    assert len(aliases) == len(set(aliases))
    assert not set(aliases) & set(names)


def test_every_alias_finds_its_gpu_in_any_case() -> None:
    for gpu in all_gpus():
        for name in (gpu.name, *gpu.aliases):
            assert load_gpu(name).name == load_gpu(name.upper()).name == load_gpu(f" {name} ").name == gpu.name


@pytest.mark.parametrize("name", ["h100-80gb", "a100-40gb", "rtx4090"])
def test_names_that_the_contract_promises(name: str) -> None:
    assert load_gpu(name).name == name


def test_h100_capacity() -> None:
    assert load_gpu("h100-80gb").capacity == 81008 * 2**20


@pytest.mark.parametrize("name", ["h1000", "", "  ", "a\nb", "🦙", "x" * 10_000, "../gpus/t4"])
def test_unknown_gpus(name: str) -> None:
    with pytest.raises(InputError, match=r"^--gpu ") as error:
        load_gpu(name)
    assert str(error.value).isprintable()
    assert "unknown GPU" in str(error.value)


@pytest.mark.parametrize("key", sorted(KEYS))
def test_a_file_that_lacks_a_key_is_not_read(key: str) -> None:
    content = {k: v for k, v in read(FILES[0]).items() if k != key}
    with pytest.raises((TypeError, KeyError)):
        from_file("x", content)


def test_a_file_with_a_key_too_many_is_not_read() -> None:
    with pytest.raises(TypeError):
        from_file("x", {**read(FILES[0]), "extra": 1})


# --- names that several have


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("a100", ["a100-40gb (40 GB)", "a100-80gb (80 GB)", "a100-80gb-pcie (80 GB)"]),
        ("H100", ["h100-80gb (80 GB)", "h100-80gb-pcie (80 GB)", "h100-94gb (94 GB)"]),
        (" v100 ", ["v100-16gb (16 GB)", "v100-32gb (32 GB)"]),
        ("rtx-50", ["rtx5070-ti (16 GB)", "rtx5080 (16 GB)", "rtx5090 (32 GB)"]),
        ("NVIDIA A100", ["a100-40gb (40 GB)", "a100-80gb-pcie (80 GB)", "a100-80gb (80 GB)"]),
    ],
)
def test_the_beginning_of_several_names_is_none_of_them(name: str, choices: list[str]) -> None:
    with pytest.raises(InputError, match=r"^--gpu .*: there are several; allowed: ") as error:
        load_gpu(name)
    line = str(error.value)
    listed = line.split("allowed: ")[1].split(" (or ")[0]
    assert sorted(listed.split(", ")) == sorted(choices)


def test_no_name_is_shown_twice_for_its_aliases() -> None:
    with pytest.raises(InputError, match="did you mean") as error:
        load_gpu("gb20")
    assert str(error.value).count("gb200") == 1


# --- a GPU by its memory


@pytest.mark.parametrize(("number", "names"), [("80", ["a100-80gb", "h100-80gb"]), ("40", ["a100-40gb", "rtx4090"])])
def test_a_number_without_a_unit(number: str, names: list[str]) -> None:
    with pytest.raises(InputError, match=rf"there are several; allowed: .* \(or with a unit: {number}GB\)$") as error:
        load_gpu(number)
    assert all(f"{name} (" in str(error.value) for name in names)
    assert "rtx5080" not in str(error.value)


@pytest.mark.parametrize("size", ["1e3GB", "8e1GB", "80,5GB", "80G", "-5GB", ".5TB", "80.12345GB", "1,000GB", "5KB"])
def test_a_memory_that_cannot_be_read(size: str) -> None:
    with pytest.raises(InputError, match=r"^--gpu .*: no memory that can be read; allowed: digits and a unit \(80GB"):
        load_gpu(size)


def test_no_name_is_read_as_a_memory() -> None:
    for gpu in all_gpus():
        for name in (gpu.name, *gpu.aliases):
            assert load_gpu(name) == gpu


@pytest.mark.parametrize(
    ("given", "name", "nbytes"),
    [
        ("80GB", "80GB", 80 * 10**9), ("80gb", "80GB", 80 * 10**9), (" 80GiB ", "80GiB", 80 * 2**30),
        ("24 gb", "24GB", 24 * 10**9),
        ("11.5GiB", "11.5GiB", 23 * 2**29), ("16384MiB", "16384MiB", 2**34), ("1TB", "1TB", 10**12),
    ],
)  # fmt: skip
def test_a_gpu_by_its_memory(given: str, name: str, nbytes: int) -> None:
    """To the byte as it is given: what is known of cards of that size is not put in."""
    gpu = load_gpu(given)
    assert (gpu.name, gpu.capacity) == (name, nbytes)
    assert not any((gpu.compute_capability, gpu.links, gpu.dense_flops_per_second, gpu.network, gpu.memory_bandwidth))


@pytest.mark.parametrize("given", ["0GB", "0.5GB", "101TB", "999999999TB"])
def test_a_memory_that_no_gpu_has(given: str) -> None:
    with pytest.raises(InputError, match="1GB to 100TB"):
        load_gpu(given)


@pytest.mark.parametrize("given", ["B80", "80GBs", "80 G B", "٨٠GB"])
def test_what_is_no_size(given: str) -> None:
    with pytest.raises(InputError, match=r"unknown GPU.*80GB"):
        load_gpu(given)


OPTIONS: dict[str, Any] = {"gpus": 8, "zero": 3, "seq_len": 512}


def test_what_is_not_known_of_it_is_not_guessed() -> None:
    """No times; a workspace that no rule makes larger; in fp32 the scores of grouped heads, as on every NVIDIA GPU."""
    report = memcalc.estimate("gpt2", **OPTIONS, gpu="80GB")
    document = report.to_dict()
    assert document["communication"]["per_step"]["seconds"] is None
    assert document["compute"]["seconds_at_peak"] is None
    assert document["fit"]["gpu"] == "80GB"
    assert document["fit"]["capacity"] == 80 * 10**9
    rows = {item["name"]: item for item in document["memory"]["items"] if item["component"] == "allocator"}
    every = [
        memcalc.estimate("gpt2", **OPTIONS, gpu=name).overheads for name in ("t4", "a100-80gb", "h100-80gb", "b200")
    ]
    largest = max(item.nbytes for items in every for item in items if item.name == "cuBLAS workspaces")
    assert rows["cuBLAS workspaces"]["nbytes"] == largest
    assert rows["cuBLAS workspaces"]["basis"] == "assumed"
    grouped = {"model": "llama-3.2-1b", "precision": "fp32", "seq_len": 512}
    assert memcalc.estimate(**grouped, gpu="80GB").peak == memcalc.estimate(**grouped, gpu="a100-80gb").peak


def test_transformer_engines_workspaces_are_the_largest_too() -> None:
    unknown, hopper = (
        devices.workspaces_of(load_gpu(name), devices.Kernels(transformer_engine=5)) for name in ("80GB", "h100-80gb")
    )
    assert unknown == hopper


def test_it_says_what_is_not_known() -> None:
    notes = " ".join(memcalc.estimate("gpt2", **OPTIONS, gpu="80GB").to_dict()["notes"])
    assert "74.51 GiB" in notes
    assert "times are not estimated" in notes
    known = " ".join(memcalc.estimate("gpt2", **OPTIONS, gpu="a100-80gb").to_dict()["notes"])
    assert "not estimated" not in known
