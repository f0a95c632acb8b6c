"""Every optimizer against the real one: its state tensors, and the transient peak of its step.

The real step runs over fake tensors on a fake CUDA device. So what torch keeps on the CPU (the step counters of the
for-loop and foreach implementations) is told apart from what it keeps on the GPU, and nothing needs a tolerance.
`test_real_tensors` runs the same over real tensors on the CPU.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import LiveBytes
from records import on_record
from torch._subclasses.fake_tensor import FakeTensorMode

from memcalc.core.dims import Dim, numel
from memcalc.core.dtypes import DType, bf16, fp32, uint8
from memcalc.core.tensor import Memory
from memcalc.errors import InputError
from memcalc.optimizers import OPTIMIZERS, Parameter, State, load_optimizer
from memcalc.optimizers.bitsandbytes import PAGED
from memcalc.validate.optimizers import BITSANDBYTES, apollo, galore

DTYPES = {fp32: torch.float32, bf16: torch.bfloat16, uint8: torch.uint8}
PAPER_DTYPES = {real: paper for paper, real in DTYPES.items()}
OWN_FILES = ("adam-mini", "lomo", "adalomo")
ALL = [
    (name, implementation)
    for name in OPTIMIZERS
    if name not in OWN_FILES
    for implementation in load_optimizer(name).implementations
]


def parameter(name: str, *sizes: int, count: int = 1, matrix: bool = False) -> Parameter:
    return Parameter(name, tuple(Dim(f"d{i}", size) for i, size in enumerate(sizes)), count, matrix)


LAYOUTS: dict[str, list[Parameter]] = {
    "decoder": [
        parameter("embed", 97, 64),
        parameter("layers.*.norm", 64, count=3),
        parameter("layers.*.q", 128, 64, count=3, matrix=True),
        parameter("layers.*.bias", 128, count=3),
        parameter("layers.*.k", 32, 64, count=3, matrix=True),
        parameter("layers.*.experts", 4, 48, 64, count=3),
        parameter("layers.*.down", 64, 161, count=3, matrix=True),
        parameter("norm", 64),
        parameter("head", 97, 64),
    ],
    "large last": [parameter("scale"), parameter("vector", 5000), parameter("square", 70, 70, matrix=True)],
    "large first": [parameter("square", 70, 70, matrix=True), parameter("vector", 5000), parameter("small", 3)],
    "one stack": [parameter("layers.*.w", 65, 64, count=4, matrix=True)],
    "vectors": [parameter("a", 4095), parameter("layers.*.b", 4096, count=2), parameter("c", 4097)],
    "four dims": [parameter("conv", 2, 3, 4, 5), parameter("column", 7, 1), parameter("row", 1, 7, matrix=True)],
    "past the rank": [
        parameter("layers.*.tall", 300, 200, count=2, matrix=True),
        parameter("layers.*.wide", 140, 290, count=2, matrix=True),
        parameter("square", 150, 150, matrix=True),
        parameter("layers.*.norm", 150, count=2),
    ],
    "scalars": [parameter("layers.*.scale", count=2)],
}


# --- the real optimizer


class CudaBytes(LiveBytes):
    """LiveBytes of the CUDA device alone. What leaves for the CPU by `item()` is 1.0, as fake tensors have no data."""

    def register(self, tensor: torch.Tensor) -> int:
        return super().register(tensor) if tensor.device.type == "cuda" else 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0
        if func is torch.ops.aten._fused_sgd_.default:
            return None  # one in-place kernel, for which torch 2.13 has no fake; `test_real_tensors` runs it
        return super().__torch_dispatch__(func, types, args, kwargs)


class Both:
    """torch's Muon and the AdamW that takes what Muon does not."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers
        self.state = {k: v for o in optimizers for k, v in o.state.items()}

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        self.state = {k: v for o in self.optimizers for k, v in o.state.items()}


class Kept(NamedTuple):
    """A state tensor as both sides see it."""

    name: str
    sizes: tuple[int, ...]
    dtype: str


class Measured(NamedTuple):
    states: Counter[Kept]
    state_bytes: int
    peak: int


def tensors_of(parameters: Sequence[Parameter]) -> Iterator[Parameter]:
    """The parameters of the model one by one: neighbours with the same count are a stack of layers."""
    for count, stack in groupby(parameters, lambda p: p.count):
        yield from list(stack) * count


def build(name: str, implementation: str, tensors: Sequence[torch.nn.Parameter], matrices: Sequence[bool]) -> Any:
    foreach = {"foreach": implementation == "foreach"}
    flags = {**foreach, "fused": implementation == "fused"}
    if name == "muon":
        muon = [t for t, is_matrix in zip(tensors, matrices, strict=True) if is_matrix]
        rest = [t for t, is_matrix in zip(tensors, matrices, strict=True) if not is_matrix]
        optimizers: list[torch.optim.Optimizer] = [torch.optim.Muon(muon)] if muon else []
        return Both([*optimizers, torch.optim.AdamW(rest, **flags)] if rest else optimizers)
    make: dict[str, Callable[[], Any]] = {
        "adamw": lambda: torch.optim.AdamW(tensors, **flags),
        "adam": lambda: torch.optim.Adam(tensors, **flags),
        "sgd": lambda: torch.optim.SGD(tensors, **flags),
        "sgd-momentum": lambda: torch.optim.SGD(tensors, momentum=0.9, **flags),
        "adafactor": lambda: torch.optim.Adafactor(tensors, **foreach),
        "lion": lambda: lion(tensors),
    }
    if name in BITSANDBYTES:
        return of_bitsandbytes(name, tensors)
    if name == "apollo-adamw":
        return of_apollo(tensors, matrices)
    if name == "galore-adamw":
        return of_galore(tensors, matrices)
    return make[name]()


def lion(tensors: Sequence[torch.nn.Parameter]) -> Any:
    from lion_pytorch import Lion

    return Lion(tensors)


def of_apollo(tensors: Sequence[torch.nn.Parameter], matrices: Sequence[bool], every: int = 1) -> Any:
    """It draws projections in each step, as the 200th step of the default does."""
    import apollo_torch

    chosen = [t for t, is_matrix in zip(tensors, matrices, strict=True) if is_matrix]
    return apollo(apollo_torch, tensors, chosen, every)


def of_galore(tensors: Sequence[torch.nn.Parameter], matrices: Sequence[bool], every: int = 1) -> Any:
    """It decomposes gradients in each step, as the 200th step of the default does."""
    import galore_torch

    chosen = [t for t, is_matrix in zip(tensors, matrices, strict=True) if is_matrix]
    return galore(galore_torch, tensors, chosen, every)


def of_bitsandbytes(name: str, tensors: Sequence[torch.nn.Parameter]) -> Any:
    import bitsandbytes

    return getattr(bitsandbytes.optim, BITSANDBYTES[name])(tensors)


def measure(
    name: str, implementation: str, parameters: Sequence[Parameter], dtype: DType, mode: LiveBytes, device: str
) -> Measured:
    """Two steps; the states after the first, the peak of the second over what is there before it."""
    expanded = list(tensors_of(parameters))
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    tensors: list[torch.nn.Parameter] = []
    with fake if device == "cuda" else torch.no_grad():
        for p in expanded:
            data = torch.ones([d.size for d in p.shape], dtype=DTYPES[dtype], device=device)
            tensors.append(torch.nn.Parameter(data))
            tensors[-1].grad = torch.ones_like(data)
    # Outside the fake mode: bitsandbytes computes its quantization maps here, on the CPU.
    optimizer = build(name, implementation, tensors, [p.is_matrix for p in expanded])
    for tensor in tensors:
        mode.register(tensor)
        mode.register(tensor.grad)  # type: ignore[arg-type]
    with fake if device == "cuda" else torch.no_grad(), mode:
        before = mode.now
        optimizer.step()
        gc.collect()
        state_bytes = mode.now - before
        mode.begin()
        optimizer.step()
        peak = mode.highest - before - state_bytes
        assert mode.now == before + state_bytes
    seen: set[int] = set()
    states: Counter[Kept] = Counter()
    for tensor in tensors:
        for key, value in held(optimizer.state[tensor]) if tensor in optimizer.state else ():
            if isinstance(value, torch.Tensor) and value.device.type == device and id(value) not in seen:
                seen.add(id(value))
                states[Kept(key, _whole(value), PAPER_DTYPES[value.dtype].name)] += 1
    return Measured(states, state_bytes, peak)


def _whole(value: torch.Tensor) -> tuple[int, ...]:
    """The shape of what a state keeps in memory: of a view of some rows or columns, those of all."""
    elements = value.untyped_storage().nbytes() // value.element_size()
    if elements == value.numel():
        return tuple(value.shape)
    rows, columns = value.shape
    return (elements // columns, columns) if rows < columns else (rows, elements // rows)


def held(state: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Name and value of what is kept for a parameter, within a projector too."""
    for key, value in state.items():
        inside = getattr(value, "ortho_matrix", None)
        yield (key, value) if inside is None else ("ortho_matrix", inside)


def without_seeds(patch: pytest.MonkeyPatch) -> None:
    """A generator cannot be made for a fake GPU, and a fake number is no seed."""
    from apollo_torch import random_projector

    def stable_randn(sizes: Any, seed: int, device: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(sizes, device=device, dtype=dtype)

    patch.setattr(random_projector, "stable_randn", stable_randn)
    patch.setattr(random_projector, "next_seed", lambda seed: seed)


def without_pages(patch: pytest.MonkeyPatch) -> None:
    """Managed memory is a tensor like others, which no driver moves."""
    from bitsandbytes import functional

    def get_paged(*sizes: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        made = torch.empty(sizes, dtype=dtype, device=device)
        made.is_paged = True  # type: ignore[attr-defined]
        return made

    for name, stand_in in (("get_paged", get_paged), ("fill", lambda *_: None), ("prefetch_tensor", lambda *_: None)):
        patch.setattr(functional, name, stand_in)


@on_record
def paged(name: str, parameters: Sequence[Parameter], dtype: DType) -> list[tuple[str, list[int], str]]:
    """Name, shape and dtype of the states that bitsandbytes asks managed memory for."""
    asked: list[tuple[str, list[int], str]] = []
    with pytest.MonkeyPatch.context() as patch:
        without_pages(patch)
        patch.setattr(torch.cuda, "synchronize", lambda *_: None)
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            tensors = [
                torch.nn.Parameter(torch.ones([d.size for d in p.shape], dtype=DTYPES[dtype], device="cuda"))
                for p in tensors_of(parameters)
            ]
            for tensor in tensors:
                tensor.grad = torch.ones_like(tensor)
        optimizer = of_bitsandbytes(name, tensors)
        with fake:
            optimizer.step()
        for tensor in tensors:
            for key, value in optimizer.state[tensor].items():
                if getattr(value, "is_paged", False):
                    asked.append((key, list(value.shape), PAPER_DTYPES[value.dtype].name))
    return asked


@on_record
def real(name: str, implementation: str, parameters: Sequence[Parameter], dtype: DType) -> Measured:
    """The real optimizer on the fake GPU. GaLore, which has one implementation, runs on the CPU: it takes columns of matrices,
    and Python's indexing asks a real GPU for them."""
    if name == "galore-adamw":
        return measure(name, implementation, parameters, dtype, LiveBytes(), "cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "synchronize", lambda *_: None)  # bitsandbytes waits for its kernels
        if name in BITSANDBYTES:
            without_pages(patch)
        if name == "apollo-adamw":
            without_seeds(patch)
        return measure(name, implementation, parameters, dtype, CudaBytes(), "cuda")


@on_record
def on_the_cpu(name: str, implementation: str, parameters: Sequence[Parameter], dtype: DType) -> Measured:
    """The real optimizer over real tensors."""
    return measure(name, implementation, parameters, dtype, LiveBytes(), "cpu")


# --- the one on paper


def nbytes(states: Sequence[State]) -> int:
    return sum(s.count * numel(s.shape)[0] * s.dtype.itemsize for s in states)


def on_paper(name: str, implementation: str, parameters: Sequence[Parameter], dtype: DType) -> Measured:
    optimizer = load_optimizer(name)
    states = optimizer.states(parameters, dtype, implementation)
    kept: Counter[Kept] = Counter()
    for s in states:
        kept[Kept(s.name, tuple(d.size for d in s.shape), s.dtype.name)] += s.count
    memory = Memory()
    optimizer.step(memory, parameters, dtype, dtype, implementation)
    return Measured(kept, nbytes(states), peak_of(memory))


def peak_of(memory: Memory) -> int:
    now = highest = 0
    for event in memory.log:
        row = memory.rows[event if event >= 0 else ~event]
        size = numel(row.shape)[0] * row.dtype.itemsize
        now += size if event >= 0 else -size
        highest = max(highest, now)
    assert now == 0, "a step left a temporary behind"
    return highest


# --- exact


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [fp32, bf16], ids=str)
@pytest.mark.parametrize(("name", "implementation"), ALL)
def test_states_and_peak_are_the_real_ones(name: str, implementation: str, dtype: DType, layout: str) -> None:
    expected = real(name, implementation, LAYOUTS[layout], dtype)
    assert on_paper(name, implementation, LAYOUTS[layout], dtype) == expected


@pytest.mark.parametrize("dtype", [fp32, bf16], ids=str)
@pytest.mark.parametrize(
    ("name", "implementation"), [pair for pair in ALL if pair[0] not in (*BITSANDBYTES, "apollo-adamw", "galore-adamw")]
)
def test_real_tensors(name: str, implementation: str, dtype: DType) -> None:
    """The same over real tensors on the CPU, where all step counters are seen: 4 bytes a tensor.

    The 1.0 that foreach adds to them, 4 bytes too, is gone before anything larger is allocated. bitsandbytes is left
    out: its kernel for the CPU is another one, which does allocate. APOLLO too: random numbers decide whether its limiter
    is a tensor or a number. GaLore runs nowhere else.
    """
    parameters = LAYOUTS["decoder"]
    expected = on_the_cpu(name, implementation, parameters, dtype)
    paper = on_paper(name, implementation, parameters, dtype)
    counters = expected.states.total() - paper.states.total()
    assert {kept.name for kept in expected.states - paper.states} <= {"step"}
    assert expected.state_bytes == paper.state_bytes + 4 * counters
    assert max(expected.peak, 4) == max(paper.peak, 4)


PAGED_LAYOUT = [
    parameter("small", 60),
    parameter("w", 300, 333, count=2),
    parameter("least", 250, 400),
    parameter("last", 99_999),
]
"""99900, 100000 and 99999 elements: one of them is paged."""


@pytest.mark.parametrize("name", BITSANDBYTES)
def test_what_is_paged(name: str) -> None:
    states = load_optimizer(name).states(PAGED_LAYOUT, bf16, "fused")
    ours = [
        (s.name, [d.size for d in s.shape], s.dtype.name) for s in states if s.life == PAGED for _ in range(s.count)
    ]
    assert ours == paged(name, PAGED_LAYOUT, bf16)
    assert bool(ours) is name.startswith("paged-")


def test_bitsandbytes_really_keeps_these_states() -> None:
    """On real CPU tensors too, where its step can run: sizes, the limit of 4096 elements, one pair of maps."""
    parameters = LAYOUTS["vectors"]
    expected = on_the_cpu("adamw-8bit", "fused", parameters, bf16)
    paper = on_paper("adamw-8bit", "fused", parameters, bf16)
    assert paper.states == expected.states
    assert paper.states[Kept("qmap1", (256,), "fp32")] == 1
    assert paper.states[Kept("state1", (4095,), "fp32")] == 1
    assert paper.states[Kept("absmax2", (17,), "fp32")] == 1


SIZES = st.lists(st.integers(1, 90), max_size=3)


@st.composite
def layouts(draw: st.DrawFn) -> list[Parameter]:
    """Some parameters with some counts, matrices or not."""
    out: list[Parameter] = []
    for i, (sizes, count, matrix) in enumerate(
        draw(st.lists(st.tuples(SIZES, st.integers(1, 3), st.booleans()), min_size=1, max_size=4))
    ):
        out.append(parameter(f"p{i}", *sizes, count=count, matrix=matrix and len(sizes) == 2))
    return out


@pytest.mark.parametrize("implementation", ["for-loop", "foreach"])
def test_stacks_of_equal_depth_are_no_neighbours_where_a_matrix_lies_between(implementation: str) -> None:
    """Those that Muon leaves to AdamW are stepped through one stack after the other, an encoder before the decoder."""
    layout = [parameter("a", count=2), parameter("b", 1, 1, matrix=True), parameter("c", 2, count=2)]
    assert on_paper("muon", implementation, layout, fp32) == real("muon", implementation, layout, fp32)


@pytest.mark.parametrize(("name", "implementation"), ALL)
@settings(max_examples=8, deadline=None)
@given(parameters=layouts(), dtype=st.sampled_from([fp32, bf16]))
def test_any_layout_is_exact(name: str, implementation: str, parameters: list[Parameter], dtype: DType) -> None:
    stepped = real.__wrapped__(name, implementation, parameters, dtype)  # layouts are others with another hypothesis
    assert on_paper(name, implementation, parameters, dtype) == stepped


# --- properties


@pytest.mark.parametrize(("name", "implementation"), ALL)
@settings(max_examples=50, deadline=None)
@given(parameters=layouts(), dtype=st.sampled_from([fp32, bf16]))
def test_a_count_of_n_is_n_classes(name: str, implementation: str, parameters: list[Parameter], dtype: DType) -> None:
    """Stated once more without the real optimizer, so that many counts are tried."""
    optimizer = load_optimizer(name)
    alone = [Parameter(p.name, p.shape, 1, p.is_matrix) for p in tensors_of(parameters)]
    together = on_paper(name, implementation, parameters, dtype)
    assert together == on_paper(name, implementation, alone, dtype)
    assert all(s.count >= 1 for s in optimizer.states(parameters, dtype, implementation))


@pytest.mark.parametrize(("name", "implementation"), ALL)
@settings(max_examples=50, deadline=None)
@given(sizes=st.lists(st.integers(1, 200), min_size=1, max_size=3), data=st.data())
def test_states_grow_with_the_parameter(name: str, implementation: str, sizes: list[int], data: st.DataObject) -> None:
    """Except where bitsandbytes turns to 8 bits: 4095 elements take more than 4096."""
    grown = list(sizes)
    grown[data.draw(st.integers(0, len(sizes) - 1))] += data.draw(st.integers(1, 100))
    small, large = (parameter("p", *s, matrix=len(s) == 2) for s in (sizes, grown))
    if name.endswith("-8bit") and numel(small.shape)[0] < 4096 <= numel(large.shape)[0]:
        return
    optimizer = load_optimizer(name)
    before = nbytes(optimizer.states([small], bf16, implementation))
    after = nbytes(optimizer.states([large], bf16, implementation))
    assert before <= after if name in ("sgd", "adafactor") or name.endswith("-8bit") else before < after


def test_a_wider_gradient_widens_what_is_made_from_it() -> None:
    matrix = [parameter("w", 8, 4, matrix=True)]

    def peak(name: str, implementation: str, grad_dtype: DType) -> int:
        memory = Memory()
        load_optimizer(name).step(memory, matrix, bf16, grad_dtype, implementation)
        return peak_of(memory)

    assert peak("lion", "for-loop", fp32) == 32 * (2 + 4)
    assert peak("adamw", "foreach", fp32) == peak("adamw", "foreach", bf16) == 32 * 2
    assert peak("muon", "foreach", fp32) > peak("muon", "foreach", bf16)


# --- names


def test_temporaries_are_rows_that_can_be_reported() -> None:
    memory = Memory()
    memory.scope = "outside"
    load_optimizer("adamw").step(memory, LAYOUTS["decoder"], bf16, bf16, "foreach")
    assert memory.scope == "outside"
    assert {row.component for row in memory.rows} == {"temporaries"}
    assert [row.scope for row in memory.rows] == [p.name for p in LAYOUTS["decoder"]]
    assert [d.name for d in memory.rows[1].shape] == ["layers", "d0"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_has_the_name_it_is_found_by(name: str) -> None:
    optimizer = load_optimizer(name)
    assert optimizer.name == name
    assert all(s.source for s in optimizer.states(LAYOUTS["decoder"], bf16, optimizer.implementations[0]))
    with pytest.raises(InputError, match=f"--optimizer-implementation eager: {name} has "):
        optimizer.states([], bf16, "eager")
    with pytest.raises(InputError, match=f"--optimizer-implementation eager: {name} has "):
        optimizer.step(Memory(), [], bf16, bf16, "eager")


def test_an_unknown_optimizer_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InputError) as error:
        load_optimizer("adanw\n")
    assert "\n" not in str(error.value)
    assert "did you mean adamw?" in str(error.value)
    assert all(name in str(error.value) for name in OPTIMIZERS)


def test_no_parameters_no_bytes() -> None:
    for name, implementation in ALL:
        assert on_paper(name, implementation, [], bf16) == Measured(Counter(), 0, 0)
