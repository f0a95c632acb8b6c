"""Equal actions of a pipeline's micro-batches and ranks run once: what is written is what running all of them writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from crossed import crossed

import memcalc
from memcalc.engines.fsdp2 import pipeline, pipeline_step
from memcalc.engines.fsdp2.known import OutOfStep

if TYPE_CHECKING:
    from memcalc.engines.fsdp2.known import Known
    from memcalc.engines.fsdp2.staged_rank import StagedRank
    from memcalc.setup.setup import Setup
    from memcalc.tape.profile import Choices
    from memcalc.tape.runs import Trace


TINY: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 24, "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 96, "tie_word_embeddings": False,
}  # fmt: skip
MIXTRAL: dict[str, Any] = {**TINY, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
SETUPS: list[dict[str, Any]] = [
    {"schedule": "1f1b", "zero": 3},
    {"schedule": "1f1b", "zero": 2, "recompute": "full"},
    {"schedule": "1f1b", "zero": 3, "cp": 2, "attention": "sdpa"},
    {"schedule": "1f1b", "zero": 2, "freeze": "all-but:head"},  # no graph behind a stage's output
    {"schedule": "1f1b", "zero": 3, "freeze": "embeddings,first:9"},  # the graph begins within a stage
    {"schedule": "interleaved", "virtual_stages": 2, "zero": 2, "freeze": "first:13"},
    {"schedule": "interleaved", "virtual_stages": 2, "zero": 3},
    {"schedule": "interleaved", "virtual_stages": 2, "zero": 2, "recompute": "op", "precision": "bf16"},
    {
        "schedule": "interleaved",
        "virtual_stages": 2,
        "zero": 3,
        "tp": 2,
        "lora_rank": 4,
        "lora_targets": "q_proj,v_proj",
    },
]


def estimated(config: dict[str, Any], options: dict[str, Any], pp: int = 4, many: int = 8) -> memcalc.Report:
    ranks = pp * options.get("tp", 1) * options.get("cp", 1)
    return memcalc.estimate(
        config, engine="fsdp2", pp=pp, gpus=2 * ranks, global_batch_size=2 * many, seq_len=64, **options
    )


@pytest.mark.parametrize("config", [TINY, pytest.param(MIXTRAL, marks=pytest.mark.slow)], ids=["dense", "experts"])
@pytest.mark.parametrize(
    "options",
    [*SETUPS[::3], *(pytest.param(one, marks=pytest.mark.slow) for one in SETUPS if one not in SETUPS[::3])],
    ids=str,
)
def test_the_run_is_that_of_all_actions(
    config: dict[str, Any], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every entry of the log, every row and every kernel, in their order, on each rank."""
    trace_of, compared = pipeline.trace_of, list[int]()

    def both(setup: Setup, rank: StagedRank, choices: Choices, ranks: dict[Any, Any]) -> Trace:
        written, run = trace_of(setup, rank, choices, ranks), pipeline.step_of(setup, rank, choices, None)
        for name, one, other in zip(run._fields, written, run, strict=True):
            assert one == other or repr(one) == repr(other), (name, rank.number)
        compared.append(rank.number)
        return written

    monkeypatch.setattr(pipeline, "trace_of", both)
    _ = estimated(config, options).peak
    assert set(compared) == {0, 1, 2, 3}


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows with every forward of a stage that is run."""
    made: list[int] = []
    forward = pipeline_step.PaperStage.forward_one_chunk

    def counted(self: pipeline_step.PaperStage, i: int) -> Any:
        made.append(i)
        return forward(self, i)

    monkeypatch.setattr(pipeline_step.PaperStage, "forward_one_chunk", counted)
    return made


@pytest.mark.parametrize(
    ("options", "most"),
    [(SETUPS[0], 45), *(pytest.param(SETUPS[i], n, marks=pytest.mark.slow) for i, n in ((1, 40), (4, 80), (5, 70)))],
)
def test_forwards_do_not_grow_with_micro_batches_and_ranks(
    options: dict[str, Any], most: int, forwards: list[int]
) -> None:
    """A step of 24 micro-batches over 6 ranks."""
    config = TINY | {"num_hidden_layers": 6 * 2 * options.get("virtual_stages", 1)}
    _ = estimated(config, options, pp=6, many=24).peak
    assert 0 < len(forwards) <= most


def test_a_rank_whose_actions_are_known_runs_none(monkeypatch: pytest.MonkeyPatch, forwards: list[int]) -> None:
    """The ranks in the middle of a deep pipeline of chunks."""
    step_of, of_ranks = pipeline.step_of, dict[int, int]()

    def counted(setup: Setup, rank: StagedRank, choices: Choices, known: Known | None) -> Trace:
        before = len(forwards)
        out = step_of(setup, rank, choices, known)
        of_ranks[rank.number] = len(forwards) - before
        return out

    monkeypatch.setattr(pipeline, "step_of", counted)
    options = {"schedule": "interleaved", "virtual_stages": 2, "zero": 2}
    _ = estimated(TINY | {"num_hidden_layers": 32}, options, pp=8, many=16).peak
    assert set(of_ranks) == set(range(8))
    assert of_ranks[0] > 0
    assert sum(runs == 0 for runs in of_ranks.values()) >= 3


def test_an_encoder_and_a_decoder_run_all_actions() -> None:
    """Their stages take several inputs, so no action of theirs is looked for."""
    t5 = {
        "model_type": "t5", "d_model": 64, "d_kv": 16, "num_heads": 4, "num_layers": 4, "num_decoder_layers": 4, "d_ff": 128,
        "vocab_size": 96, "tie_word_embeddings": False,
    }  # fmt: skip
    report = estimated(t5, {"schedule": "1f1b", "zero": 2})
    assert report.peak > 0
    assert report.model.profiles["actions"] == {}


@pytest.mark.slow
def test_no_action_is_out_of_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the run of all actions comes on top."""
    step_of = pipeline.step_of

    def never_out(setup: Setup, rank: StagedRank, choices: Choices, known: Known | None) -> Trace:
        try:
            return step_of(setup, rank, choices, known)
        except OutOfStep:
            pytest.fail(f"rank {rank.number} of {setup.schedule}")

    monkeypatch.setattr(pipeline, "step_of", never_out)
    for options in SETUPS:
        _ = estimated(TINY, options).peak


@pytest.mark.parametrize(
    ("schedule", "recompute", "zero"), crossed(["gpipe", "1f1b", "interleaved"], ["none", "full"], [2, 3])
)
def test_ranks_that_are_left_out_are_no_fuller(schedule: str, recompute: str, zero: int) -> None:
    options = {"schedule": schedule, "recompute": recompute, "zero": zero}
    report = estimated(TINY, options | ({"virtual_stages": 2} if schedule == "interleaved" else {}), pp=6)
    fewer = memcalc.Report(report.model, report.setup, fullest=True)
    assert set(fewer.rank_peaks) < set(report.rank_peaks)
    assert (fewer.rank.number, fewer.peak, fewer.phases) == (report.rank.number, report.peak, report.phases)
