"""A run written out to its real depth, and the allocator's view of whole steps."""

from __future__ import annotations

from itertools import groupby, pairwise
from typing import Any

import pytest

import memcalc
from memcalc.core.dims import numel
from memcalc.core.dtypes import bf16, fp32
from memcalc.core.rows import Row
from memcalc.device import replay
from memcalc.device.allocator import ROUNDING, Block, CachingAllocator
from memcalc.device.process import Names, Part
from memcalc.device.replay import MOST_STEPS, replayed
from memcalc.device.shown import Workspaces
from memcalc.engines import ranks
from memcalc.engines.base.script import Scripts
from memcalc.engines.fsdp2 import engine as fsdp2
from memcalc.engines.fsdp2 import pipeline as fsdp2_pipeline
from memcalc.engines.fsdp2.step import STREAMS, ExpertUnits, Sharding
from memcalc.megatron.schedules import turns
from memcalc.tape.profile import Choices, trace
from memcalc.tape.runs import NO_MIDDLE, Middle, Trace
from memcalc.tape.unrolled import NotPeriodic, unrolled

FSDP: dict[str, Any] = {"engine": "fsdp2", "gpus": 8, "zero": 3}
SHALLOW = {"model_type": "llama", "num_hidden_layers": 8, "vocab_size": 32000}
"""Stages of so few layers are run whole."""
NARROW = {"model_type": "llama", "num_hidden_layers": 400, "hidden_size": 4, "intermediate_size": 4, "num_attention_heads": 1,
          "vocab_size": 5}  # fmt: skip
"""Clipping by norm, a number of each gradient, sets its peak."""
SPARSE = {
    "model_type": "deepseek_v3", "num_hidden_layers": 8, "hidden_size": 512, "moe_intermediate_size": 128,
    "n_routed_experts": 16, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4, "vocab_size": 32000,
}  # fmt: skip
"""Three of its layers have no experts."""
DEEP = {"model_type": "llama", "num_hidden_layers": 40, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
        "vocab_size": 3200}  # fmt: skip
"""Of its stages some layers stand for others."""


# --- unrolled


def events(run: Trace) -> list[tuple[int, str, str, object]]:
    """What comes and goes, in order: the block, and what it was allocated as."""
    whole = unrolled(run)
    rows = [run.rows[i] for i in whole.rows]
    return [
        (event, row.scope, row.name, (numel(row.shape)[1], row.dtype))
        for event in whole.log
        for row in (rows[event if event >= 0 else ~event],)
    ]


def layers(run: Trace) -> list[int | None]:
    """The layer of every block."""
    whole = unrolled(run)
    return [whole.layer(run, block) for block in range(len(whole.rows))]


def parts(run: Trace) -> list[Part]:
    """The phases and layers that the run goes through."""
    whole = unrolled(run)
    return list(Names(segments=whole.segments).parts(len(whole.log)))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama-7b", {}),
        ("llama-7b", {"recompute": "full"}),
        ("llama-7b", {"precision": "bf16-autocast", "recompute": "full"}),
        ("gpt2-xl", {"precision": "fp16-autocast"}),
        ("gpt2-xl", {"gpus": 8}),
        ("gemma-2-9b", {}),
        ("deepseek-v2-lite", {}),
        ("mamba-130m", {}),
        ("bert-large", {"padded": True}),
        ("t5-large", {}),
        ("llama-7b", FSDP),
        ("llama-7b", {**FSDP, "recompute": "full"}),
        ("llama-7b", {**FSDP, "recompute": "op", "zero": 2}),
        ("llama-7b", {**FSDP, "global_batch_size": 32}),
        ("llama-7b", {**FSDP, "global_batch_size": 16, "zero": 2, "recompute": "full", "precision": "bf16"}),
        ("llama-7b", {**FSDP, "global_batch_size": 32, "sync_each_micro_batch": True}),
        ("gpt-oss-20b", FSDP),
    ],
)
def test_written_out_it_is_the_run_at_the_real_depth(name: str, options: dict[str, Any]) -> None:
    """Event by event, what is allocated and freed."""
    model = memcalc.load_model(name)
    report = memcalc.estimate(model, **options)
    (key,) = (key for key in model.profiles if key[0] == "profile")
    choices = Choices(*key[1 : 1 + len(Choices._fields)])
    whole = trace(model.program, choices, report.setup.micro_batch_size, report.setup.tokens_per_part, model.layers)
    run = report.rank.profiles[0].run
    assert events(run) == events(whole)
    assert unrolled(run).backward == unrolled(whole).backward
    assert layers(run) == layers(whole)
    assert parts(run) == parts(whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"pp_rank": 0},
        {"pp": 4, "pp_rank": 1, "zero": 2, "recompute": "full"},
        {"recompute": "op", "tp": 2},
        {"cp": 2, "cp_comm_type": "p2p", "precision": "bf16"},
        {"schedule": "gpipe", "global_batch_size": 20},
        {"schedule": "interleaved", "virtual_stages": 2, "pp_rank": 0},
        {"schedule": "zero-bubble", "zero": 2},
        {"schedule": "zero-bubble", "zero": 2, "virtual_stages": 2, "pp_rank": 0},
        {"schedule": "zero-bubble", "zero": 2, "virtual_stages": 2},
    ],
    ids=str,
)
def test_written_out_it_is_the_stage_at_its_real_depth(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is freed between two allocations may be so in another order, which changes nothing."""
    options = {**FSDP, "pp": 2, "global_batch_size": 32, **options}
    run = memcalc.estimate(DEEP, **options).rank.profiles[0].run
    monkeypatch.setattr(fsdp2_pipeline, "middle_of", no_middle)
    whole = memcalc.estimate(DEEP, **options).rank.profiles[0].run
    assert run.middle.more and not whole.middle.more
    assert in_any_order(events(run)) == in_any_order(events(whole))


def no_middle(_: object) -> Middle:
    return NO_MIDDLE


def in_any_order(log: list[tuple[int, str, str, object]]) -> list[list[tuple[int, str, str, object]]]:
    """What is allocated one by one, and what is freed between two allocations sorted."""
    runs = ((comes, list(some)) for comes, some in groupby(log, lambda event: event[0] >= 0))
    return [some if comes else sorted(some, key=lambda event: event[0]) for comes, some in runs]


def test_a_run_whose_middle_periods_differ_is_not_written_out() -> None:
    run = memcalc.estimate("llama-7b").rank.profiles[0].run
    places = [(place, layer) for place, _, layer in run.segments]
    (start, end), *_ = [(a, b) for (a, layer), (b, _) in pairwise(places) if layer in run.middle.late]
    freed = next(~e for e in run.log[start:end] if e < 0 and run.rows[~e].layer in run.middle.early)
    rows = [row._replace(name="another") if i == freed else row for i, row in enumerate(run.rows)]
    with pytest.raises(NotPeriodic):
        unrolled(run._replace(rows=rows))


# --- replay


class Counting(CachingAllocator):
    """Counts the bytes that were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[Block, int] = {}
        self.asked = self.most = 0

    def allocate(self, nbytes: int, stream: str) -> Block:
        block = super().allocate(nbytes, stream)
        self.live[block] = nbytes
        self.asked += nbytes
        self.most = max(self.most, self.asked)
        return block

    def release(self, block: Block) -> None:
        self.asked -= self.live.pop(block)
        super().release(block)


CASES: list[tuple[Any, dict[str, Any]]] = [
    ("gpt2", {}),
    ("gpt2", {"global_batch_size": 4}),
    ("gpt2", {"precision": "bf16", "optimizer": "adafactor"}),
    ("gpt2", {"optimizer": "muon", "seq_len": 64}),
    ("gpt2", {"optimizer": "sgd", "optimizer_implementation": "for-loop"}),
    ("gpt2", {"precision": "fp16-autocast", "optimizer_implementation": "fused"}),
    ("gpt2", {"precision": "bf16-autocast", "recompute": "full"}),
    ("gpt2", {"optimizer": "adamw-8bit", "recompute": "full", "seq_len": 1000, "micro_batch_size": 3}),
    (
        NARROW,
        {
            "precision": "bf16",
            "optimizer_implementation": "fused",
            "clip_grad_norm": True,
            "seq_len": 1,
            "recompute": "full",
        },
    ),
    ("gpt2-large", {"gpus": 8}),
    ("gpt2-large", {"gpus": 8, "global_batch_size": 32, "micro_batch_size": 2}),
    ("bert-base", {"padded": True}),
    ("t5-small", {}),
    ("resnet-50", {"micro_batch_size": 8}),
    ("llama-3.2-1b", {"kernels": "fused"}),
    ("llama-3.2-1b", FSDP),
    ("llama-3.2-1b", {**FSDP, "zero": 2, "shard_group": 2, "precision": "bf16-mixed", "global_batch_size": 16}),
    ("llama-3.2-1b", {**FSDP, "global_batch_size": 24, "sync_each_micro_batch": True}),
    ("llama-3.2-1b", {**FSDP, "global_batch_size": 16, "precision": "bf16", "recompute": "full"}),
    ("llama-3.2-1b", {**FSDP, "tp": 2, "sequence_parallel": True, "global_batch_size": 16}),
    ("llama-3.2-1b", {**FSDP, "recompute": "op", "padded": True, "attention": "eager"}),
    ("llama-3.2-1b", {**FSDP, "tp": 2, "recompute": "full"}),
    (
        NARROW,
        {
            **FSDP,
            "precision": "fp32",
            "optimizer_implementation": "fused",
            "clip_grad_norm": True,
            "seq_len": 1,
            "recompute": "full",
        },
    ),
    ("llama-3.2-1b", {**FSDP, "tp": 8}),
    ("llama-3.2-1b", {**FSDP, "gpus": 1, "seq_len": 33}),
    ("llama-3.2-1b", {**FSDP, "cp": 4, "recompute": "full", "micro_batch_size": 2}),
    ("llama-3.2-1b", {**FSDP, "cp": 2, "tp": 2, "cp_comm_type": "p2p", "global_batch_size": 8}),
    ("llama-3.2-1b", {**FSDP, "tp": 2, "sequence_parallel": True, "cross_entropy": "vocab-parallel"}),
    ("qwen3-30b-a3b", {**FSDP, "gpus": 16, "ep": 8, "recompute": "full", "global_batch_size": 32}),
    ("mixtral-8x7b", {**FSDP, "gpus": 8, "ep": 8, "zero": 2}),
    (SHALLOW, {**FSDP, "pp": 2, "global_batch_size": 16, "pp_rank": 0}),
    (SHALLOW, {**FSDP, "pp": 2, "schedule": "interleaved", "virtual_stages": 2, "global_batch_size": 16}),
    (SHALLOW, {**FSDP, "pp": 2, "schedule": "zero-bubble", "zero": 2, "global_batch_size": 16}),
    (SHALLOW, {**FSDP, "pp": 2, "schedule": "gpipe", "global_batch_size": 16}),
    (SHALLOW, {**FSDP, "pp": 2, "cp": 2, "cp_comm_type": "p2p", "global_batch_size": 16}),
    (DEEP, {**FSDP, "pp": 2, "global_batch_size": 96}),
    (
        DEEP,
        {**FSDP, "pp": 2, "zero": 2, "tp": 2, "schedule": "interleaved", "virtual_stages": 2, "global_batch_size": 64},
    ),
    (DEEP, {**FSDP, "pp": 2, "zero": 2, "schedule": "zero-bubble", "virtual_stages": 2, "global_batch_size": 64}),
    (SPARSE, {**FSDP, "pp": 2, "global_batch_size": 16, "pp_rank": 0}),
    ("gpt2-large", {"engine": "deepspeed", "gpus": 8, "zero": 0, "precision": "fp32"}),
    ("llama-3.2-1b", {"gpus": 8, "engine": "deepspeed", "zero": 0, "global_batch_size": 16}),
    ("llama-3.2-1b", {"gpus": 8, "engine": "deepspeed", "zero": 1, "recompute": "full", "micro_batch_size": 4}),
    ("gpt2-large", {"gpus": 6, "engine": "deepspeed", "zero": 1, "global_batch_size": 12, "precision": "fp16-mixed"}),
    ("llama-3.2-1b", {"gpus": 8, "zero": 2, "padded": True}),
    (
        "llama-3.2-1b",
        {"gpus": 64, "engine": "deepspeed", "zero": 2, "cp": 2, "recompute": "full", "global_batch_size": 64},
    ),
    ("bert-base", {"gpus": 8, "zero": 3}),
    ("mixtral-8x7b", {"gpus": 8, "engine": "deepspeed", "zero": 3, "ep": 8, "global_batch_size": 32}),
    ("whisper-small", {"gpus": 4, "engine": "deepspeed", "zero": 3}),
    ("llama-3-8b", {"gpus": 8, "tp": 2, "zero": 1, "global_batch_size": 16}),
    ("llama-3-8b", {"gpus": 8, "tp": 2, "zero": 0, "recompute": "full"}),
    ("llama-3-8b", {"gpus": 8, "pp": 4, "zero": 1, "global_batch_size": 16, "pp_rank": 1}),
    ("llama-3-8b", {"gpus": 8, "pp": 4, "virtual_stages": 2, "schedule": "interleaved", "global_batch_size": 16}),
    ("llama-3-8b", {"gpus": 8, "pp": 2, "schedule": "gpipe", "global_batch_size": 16, "grad_dtype": "bf16"}),
    ("mixtral-8x7b", {"gpus": 8, "ep": 4, "pp": 2, "zero": 1, "global_batch_size": 16}),
    ("deepseek-v2-lite", {"gpus": 8, "tp": 2, "ep": 4, "cp": 2, "zero": 1}),
]


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_a_replay_has_the_peak_of_the_estimate(name: Any, options: dict[str, Any]) -> None:
    """To the byte: all that an engine holds and a step allocates is in it. And it comes to an end."""
    report = memcalc.estimate(name, **options)
    allocator = Counting()
    run = replayed(report.rank, report.setup, allocator, Workspaces((), ()))
    assert run is not None
    assert allocator.most == report.peak
    assert run.steady
    assert run.steps <= MOST_STEPS + (report.rank.untraced is not None)
    assert report.peak <= report.allocated <= report.reserved <= report.device
    assert {item.name for item in report.overheads} >= {"blocks that are not split", "fragmentation"}
    assert all(item.nbytes >= 0 for item in report.overheads)


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_what_is_held_is_allocated_once(name: Any, options: dict[str, Any]) -> None:
    report = memcalc.estimate(name, **options)
    held, order = report.rank.holdings, report.rank.order
    assert order is not None

    def total(rows: tuple[Row, ...]) -> int:
        return sum(row.bytes_at(report.setup.micro_batch_size, report.setup.tokens_per_part) for row in rows)

    scripted = 0 if order.scripts is None else left_by(order.scripts())
    assert total((*order.flat, *order.before, *order.replacing(), *order.states)) + scripted == total(held.always)
    assert total(order.replaced) == total(order.replacing())


def left_by(scripts: Scripts) -> int:
    """Bytes that are there between two steps; small weights that ZeRO-3 keeps whole are no part of what is there always."""
    there: dict[Any, int] = {}
    for block, nbytes, _ in (*scripts.before_first_step, *scripts.closing, *scripts.first_step):
        if nbytes is None:
            there.pop(block, None)
        else:
            there[block] = nbytes
    return sum(nbytes for block, nbytes in there.items() if block[0] != "kept whole")


@pytest.mark.parametrize(
    "options",
    [
        {"pp": 4, "pp_rank": 0},
        {"pp": 4, "pp_rank": 2, "zero": 1},
        {"pp": 4, "virtual_stages": 2, "schedule": "interleaved", "pp_rank": 1},
        {"tp": 2},
    ],
)
def test_more_micro_batches_do_what_the_first_ones_did(options: dict[str, Any]) -> None:
    """A replay leaves out those in the middle: with all of them a segment or two of a pipeline may come on top."""
    report = memcalc.estimate("llama-3.2-1b", gpus=8, **options, global_batch_size=192, seq_len=256)
    rank, setup = report.rank, report.setup
    stages = setup.schedule, rank.number, setup.pp, setup.micro_batches, setup.virtual_stages
    all_of_them = rank._replace(turns=turns(*stages))
    assert len(all_of_them.turns) > 1.4 * len(rank.turns)
    few, whole = (replayed(one, setup, CachingAllocator(), Workspaces((), ())) for one in (rank, all_of_them))
    assert few is not None
    assert whole is not None
    assert few.allocated == whole.allocated
    assert 0 <= whole.reserved - few.reserved < 0.001 * few.reserved


@pytest.mark.parametrize("options", [{}, {"gpus": 8}, {**FSDP, "sync_each_micro_batch": True}])
def test_three_micro_batches_are_enough(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    report = memcalc.estimate("llama-3.2-1b", **options, global_batch_size=8 * 8, seq_len=256)
    few = replayed(report.rank, report.setup, CachingAllocator(), Workspaces((), ()))
    monkeypatch.setattr(replay, "_MOST_MICRO_BATCHES", 8)
    assert replayed(report.rank, report.setup, CachingAllocator(), Workspaces((), ())) == few


@pytest.mark.parametrize("options", [{}, {"recompute": "full", "zero": 2}, {"precision": "bf16", "tp": 2}], ids=str)
def test_three_micro_batches_are_enough_where_gradients_wait(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the peaks, and for what is reserved."""
    setup = {**FSDP, "gpus": 4, "seq_len": 256, **options}
    dp = 4 // setup.get("tp", 1)
    few = memcalc.estimate("llama-3.2-1b", **setup, global_batch_size=3 * dp)
    for module in (fsdp2, ranks):
        monkeypatch.setattr(module, "ENOUGH_MICRO_BATCHES", 6)
    whole = memcalc.estimate("llama-3.2-1b", **setup, global_batch_size=6 * dp)
    assert (few.rank.on_paper, whole.rank.on_paper) == (3, 6)
    assert few.phases == whole.phases
    assert few.played == whole.played


def test_streams_are_those_of_blocks_that_a_run_has() -> None:
    """Whether gradients are reduced in the dtype of the shards or in another."""
    names: set[str] = set()
    for reduced in (fp32, bf16):
        sharding = Sharding(8, reshards=True, sharded=fp32, reduced=reduced, accumulating=False)
        choices = Choices(bf16, "sdpa", recompute=False, accumulating=False, hooks=sharding)
        names |= {row.name for row in trace(memcalc.load_model("llama-3.2-1b").program, choices, 1, 16, 2).rows}
    experts = ExpertUnits("model.layers.*.mlp.experts", 1)
    choices = choices._replace(hooks=sharding._replace(experts=experts))
    names |= {row.name for row in trace(memcalc.load_model("mixtral-8x7b").program, choices, 1, 16, 2).rows}
    assert set(STREAMS) <= names


@pytest.mark.parametrize(
    "options",
    [
        {"gpus": 8, "zero": 0, "engine": "deepspeed", "optimizer": "lion"},
        {"gpus": 8, "zero": 1, "tp": 2, "engine": "deepspeed"},
        {**FSDP, "pp": 2, "schedule": "gpipe", "global_batch_size": 24},
    ],
    ids=str,
)
def test_where_the_order_is_not_known_the_row_says_so(options: dict[str, Any]) -> None:
    """DeepSpeed's with other optimizers or slices, and that of gpipe whose micro-batches are left out of the run."""
    report = memcalc.estimate("llama-3-8b", **options, gpu="h100-80gb")
    assert report.played is None
    (row,) = (item for item in report.overheads if item.component == "reserved")
    assert row.basis == "assumed"
    assert row.nbytes > ROUNDING


def test_gpipe_of_many_micro_batches_is_not_played() -> None:
    options = {"gpus": 2, "pp": 2, "schedule": "gpipe", "seq_len": 128}
    assert memcalc.estimate("llama-3.2-1b", **options, global_batch_size=64).played is not None
    assert memcalc.estimate("llama-3.2-1b", **options, global_batch_size=65).played is None


def test_a_size_alone_has_no_run() -> None:
    report = memcalc.estimate(params="1B", gpu="h100-80gb")
    assert report.played is None
