"""Every file of `memcalc/hardware`, and finding a GPU by its name."""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

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


@pytest.mark.parametrize("name", ["h1000", "", "  ", "a\nb", "🦙", "x" * 10_000, "../hardware/t4"])
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
