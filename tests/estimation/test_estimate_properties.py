"""What holds for every model and setup: sums, order, independence of depth, and that nothing but InputError escapes."""

from __future__ import annotations

import copy
import math
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from records import examples

import memcalc
from memcalc.core.dims import evaluate
from memcalc.core.dtypes import bf16, fp32
from memcalc.core.rows import COMPONENTS
from memcalc.core.selective import per_op
from memcalc.kernels import TRANSFORMERS
from memcalc.tape.profile import Choices, Profile, full_profile, profile

EXAMPLES = settings(
    max_examples=examples(50), deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
STATES = ("parameters", "gradients", "optimizer_states")


@st.composite
def llamas(draw: st.DrawFn) -> dict[str, Any]:
    kv_heads = draw(st.integers(1, 2))
    heads = kv_heads * draw(st.integers(1, 3))
    return {
        "model_type": "llama",
        "hidden_size": heads * draw(st.integers(1, 20)),
        "intermediate_size": draw(st.integers(1, 200)),
        "num_hidden_layers": draw(st.integers(1, 9)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 2 * draw(st.integers(1, 16)),
        "vocab_size": draw(st.integers(1, 300)),
        "tie_word_embeddings": draw(st.booleans()),
        "attention_bias": draw(st.booleans()),
    }


@st.composite
def gpt2s(draw: st.DrawFn) -> dict[str, Any]:
    heads = draw(st.integers(1, 4))
    return {
        "model_type": "gpt2",
        "n_embd": heads * 4 * draw(st.integers(1, 8)),
        "n_layer": draw(st.integers(1, 9)),
        "n_head": heads,
        "n_positions": 64,
        "vocab_size": draw(st.integers(1, 300)),
        "resid_pdrop": draw(st.sampled_from((0.0, 0.1))),
        "attn_pdrop": draw(st.sampled_from((0.0, 0.1))),
    }


MODELS = st.one_of(llamas(), gpt2s())


def widened(config: dict[str, Any]) -> dict[str, Any]:
    """The same model with every weight a multiple of eight."""
    return {
        k: 8 * v if k in ("hidden_size", "intermediate_size", "head_dim", "n_embd") else v for k, v in config.items()
    }


WIDE_MODELS = MODELS.map(widened)
"""Models that up to eight ranks shard without padding, which on tiny weights is more than what sharding saves."""


@st.composite
def setups(draw: st.DrawFn, *, deepspeed: bool = False) -> dict[str, Any]:
    """Options that can run together, or run with DeepSpeed whatever ZeRO stage and number of GPUs takes their place."""
    gpus = draw(st.sampled_from((1, 2, 3, 4, 8)))
    micro_batch = draw(st.integers(1, 4))
    out: dict[str, Any] = {
        "gpus": gpus,
        "zero": draw(st.integers(0, 3)),
        "micro_batch_size": micro_batch,
        "seq_len": draw(st.integers(1, 48)),
        "global_batch_size": gpus * micro_batch * draw(st.integers(1, 2)),
        "precision": draw(st.sampled_from(("fp32", "bf16-mixed", "fp16-mixed"))),
        "optimizer": draw(
            st.sampled_from(("adamw", "adam", "sgd-momentum", "adafactor", "lion", "adamw-8bit", "muon"))
        ),
        "recompute": draw(st.sampled_from(("none", "full"))),
        "attention": draw(st.sampled_from(("sdpa", "eager"))),
        "padded": draw(st.booleans()),
        "gpu": draw(st.sampled_from((None, "h100-80gb", "t4"))),
    }
    if gpus == 1 and not deepspeed:
        out["zero"] = 0  # plain PyTorch shards nothing
    if gpus > 1 and out["zero"]:
        if out["optimizer"] == "muon":
            out["optimizer"] = "adamw"  # DeepSpeed's flat partitions are no matrices for muon
    elif not deepspeed and draw(st.booleans()):
        out["precision"] = draw(st.sampled_from(("bf16", "fp16", "bf16-autocast", "fp16-autocast")))
    return out


SHARDABLE = setups(deepspeed=True).filter(lambda options: options["optimizer"] != "muon")


def states(report: memcalc.Report) -> int:
    """Bytes of the model states."""
    return sum(report.total(component) for component in STATES)


def numbers(value: object) -> list[object]:
    """Every number in a document but its times and a layer's part of the communication, which can be of a fraction of a call."""
    if isinstance(value, dict):
        return [n for key, v in value.items() if key not in ("seconds", "per_layer_items") for n in numbers(v)]
    if isinstance(value, (list, tuple)):
        return [n for v in value for n in numbers(v)]
    return [value] if isinstance(value, (int, float)) else []


def check_numbers(report: memcalc.Report) -> None:
    """Sizes and counts are integers of zero or more."""
    document = report.to_dict()
    for part in ("model", "memory", "communication"):
        for number in numbers(document[part]):
            assert type(number) is int
            assert number >= 0
    assert report.peak > 0


# --- sums


@EXAMPLES
@given(config=MODELS, options=setups())
def test_totals_are_sums_of_rows(config: dict[str, Any], options: dict[str, Any]) -> None:
    report = memcalc.estimate(config, **options)
    memory = report.to_dict()["memory"]
    assert sum(item.at_peak for item in report.items) == report.peak == memory["peak"]
    assert sum(memory["at_peak"].values()) == report.peak
    for component in COMPONENTS:
        items = [item for item in memory["items"] if item["component"] == component]
        assert sum(item["at_peak"] for item in items) == memory["at_peak"][component]
        if component != "temporaries":
            assert sum(item["nbytes"] for item in items) == memory[component]
            assert memory["at_peak"][component] <= memory[component]
    assert max(report.phases.values()) == report.peak == report.phases[report.peak_phase]
    over = sum(item["nbytes"] for item in memory["items"] if item["component"] in ("allocator", "reserved", "device"))
    assert report.device == report.peak + over
    assert report.peak <= report.allocated <= report.reserved <= report.device
    assert report.reserved % 2**21 == 0
    check_numbers(report)


@EXAMPLES
@given(config=MODELS, options=setups())
def test_every_phase_is_the_sum_of_its_rows(config: dict[str, Any], options: dict[str, Any]) -> None:
    report = memcalc.estimate(config, **options)
    batch, seq = options["micro_batch_size"], options["seq_len"]
    for phase, size in report.phases.items():
        assert sum(row.bytes_at(batch, seq) for row in report.rows_at(phase)) == size


@EXAMPLES
@given(config=MODELS, options=setups())
def test_formulas_evaluate_to_the_bytes(config: dict[str, Any], options: dict[str, Any]) -> None:
    for item in memcalc.estimate(config, **options).items:
        named, _, evaluated = item.formula.partition(" = ")
        match = re.fullmatch(r"((?:\d+·)*)(\d+) B", evaluated)
        assert match is not None, item.formula
        factors = [int(n) for n in match[1].split("·") if n]
        size = math.prod(factors) * int(match[2])
        assert size == max(item.nbytes, item.at_peak), item
        assert factors == [n for _, n in item.shape], item
        assert named == "·".join([*(name for name, _ in item.shape), f"{match[2]} B"]), item


# --- order


@pytest.mark.slow
@EXAMPLES
@given(config=MODELS, options=setups(), more=st.integers(1, 5))
def test_monotone_in_batch_and_sequence(config: dict[str, Any], options: dict[str, Any], more: int) -> None:
    options = {**options, "global_batch_size": None}
    small = memcalc.estimate(config, **options)
    for name in ("micro_batch_size", "seq_len"):
        large = memcalc.estimate(config, **{**options, name: options[name] + more})
        for phase, size in small.phases.items():
            assert size <= large.phases[phase], (name, phase)
        assert small.total("saved_activations") <= large.total("saved_activations")
        assert small.device <= large.device + 2**21  # rounding is that of the peak's own blocks: a segment of play


@EXAMPLES
@given(config=WIDE_MODELS, options=SHARDABLE, gpus=st.sampled_from((2, 4, 8)))
def test_zero_stages_shard_more_and_more(config: dict[str, Any], options: dict[str, Any], gpus: int) -> None:
    options = {**options, "engine": "deepspeed", "gpus": gpus, "global_batch_size": None}
    stages = [states(memcalc.estimate(config, **{**options, "zero": zero})) for zero in (1, 2, 3)]
    assert stages == sorted(stages, reverse=True)


@EXAMPLES
@given(config=MODELS, options=setups(), zero=st.integers(1, 3))
def test_one_gpu_has_nothing_to_shard(config: dict[str, Any], options: dict[str, Any], zero: int) -> None:
    options = {**options, "gpus": 1, "global_batch_size": None}
    plain = memcalc.estimate(config, **options | {"zero": 0})
    assert plain.collectives == []
    with pytest.raises(memcalc.InputError, match=f"--zero {zero}: 1 GPU"):
        memcalc.estimate(config, **options | {"zero": zero})


@EXAMPLES
@given(config=MODELS, options=SHARDABLE, more=st.sampled_from((2, 3, 8)))
def test_more_gpus_never_raise_the_model_states(config: dict[str, Any], options: dict[str, Any], more: int) -> None:
    options = {**options, "engine": "deepspeed", "global_batch_size": None, "gpus": max(options["gpus"], 2)}
    if options["optimizer"] == "adamw-8bit":
        options["zero"] = max(options["zero"], 1)  # stage 0 is refused
    few = memcalc.estimate(config, **options)
    many = memcalc.estimate(config, **{**options, "gpus": options["gpus"] * more})
    assert states(many) <= states(few)


@EXAMPLES
@given(count=st.integers(1, 10**13), gpus=st.sampled_from((1, 2, 3, 8, 64, 1000)), zero=st.integers(0, 3))
def test_shards_of_a_bare_count_sum_to_the_whole(count: int, gpus: int, zero: int) -> None:
    report = memcalc.estimate(params=count, gpus=gpus, zero=zero, engine="deepspeed")
    share = -(-count // gpus)
    expected = {
        "parameters": 2 * (share if zero == 3 else count),
        "gradients": 2 * (share if zero >= 2 else count),
        "optimizer_states": 12 * (share if zero else count),
    }
    assert {component: report.total(component) for component in STATES} == expected


# --- padding


@EXAMPLES
@given(config=MODELS, options=setups())
def test_a_padded_batch_needs_its_mask_and_never_less_than_another(
    config: dict[str, Any], options: dict[str, Any]
) -> None:
    """Without a GPU, whose kernels pad what they save and take no mask. With one, heads share no keys: the kernel's backward
    has no gradients of each head to sum up."""
    plain, padded = (memcalc.estimate(config, **{**options, "padded": on, "gpu": None}) for on in (False, True))
    mask = 8 * options["micro_batch_size"] * options["seq_len"]
    assert [item.nbytes for item in padded.items if item.name == "attention_mask"] == [mask]
    assert padded.phases["step"] - plain.phases["step"] == mask
    assert padded.total("saved_activations") >= plain.total("saved_activations")
    tokens, heads = options["micro_batch_size"] * options["seq_len"], config.get("num_attention_heads")
    shared = 2 * 4 * tokens * heads * config["head_dim"] if heads and config["num_key_value_heads"] != heads else 0
    assert padded.peak + shared >= plain.peak + mask


# --- inputs


@pytest.mark.slow
@EXAMPLES
@given(config=MODELS, options=setups())
def test_inputs_are_not_modified_and_runs_do_not_remember(config: dict[str, Any], options: dict[str, Any]) -> None:
    before = copy.deepcopy((config, options))
    model = memcalc.load_model(config)
    first = memcalc.estimate(config, **options).to_dict()
    memcalc.estimate(model, micro_batch_size=3, seq_len=5)
    memcalc.estimate(model, recompute="full", attention="eager", gpus=4)
    assert memcalc.estimate(model, **options).to_dict() == first
    assert (config, options) == before


ANYTHING: st.SearchStrategy[Any] = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 9), st.integers(), st.floats(), st.text(max_size=8), st.binary(max_size=3),
    st.lists(st.integers(), max_size=2), st.dictionaries(st.text(max_size=3), st.integers(), max_size=1),
)  # fmt: skip
LIKELY: dict[str, st.SearchStrategy[Any]] = {
    **{
        name: st.sampled_from((1, 2, 3, 4, 8))
        for name in ("gpus", "gpus_per_node", "dp", "micro_batch_size", "seq_len")
    },
    **{name: st.sampled_from((1, 1, 1, 2)) for name in ("tp", "pp", "cp", "ep", "etp", "virtual_stages")},
    "pp_rank": st.just(0),
    "zero": st.integers(0, 3),
    "shard_group": st.sampled_from((1, 2, 8)),
    "sequence_parallel": st.booleans(),
    "schedule": st.sampled_from(("gpipe", "1f1b", "interleaved", "zero-bubble")),
    "global_batch_size": st.sampled_from((1, 8, 64)),
    "precision": st.sampled_from(("fp32", "bf16", "fp16", "bf16-mixed", "fp16-mixed", "bf16-autocast", "fp8-mixed")),
    "grad_dtype": st.sampled_from(("fp32", "bf16", "fp16")),
    "optimizer": st.sampled_from(("adamw", "adam", "sgd", "sgd-momentum", "adafactor", "lion", "adamw-8bit", "muon")),
    "optimizer_implementation": st.sampled_from(("foreach", "fused", "for-loop")),
    "recompute": st.sampled_from(("none", "selective", "op", "full")),
    "attention": st.sampled_from(("eager", "sdpa", "flash")),
    "cross_entropy": st.sampled_from(("eager", "vocab-parallel", "fused", "chunked")),
    "padded": st.booleans(),
    "expert_imbalance": st.sampled_from((1, 1.0, 1.5)),
    "kernels": st.sampled_from(("hf", "fused", "megatron")),
    "engine": st.sampled_from(("none", "ddp", "fsdp2", "deepspeed", "megatron")),
    "gpu": st.sampled_from(("h100-80gb", "t4", "nosuch", "")),
}
LIKELY_OPTIONS = st.fixed_dictionaries({}, optional=LIKELY)
ODD_OPTIONS = st.dictionaries(st.one_of(st.sampled_from(sorted(LIKELY)), st.text(max_size=8)), ANYTHING, max_size=2)
FEW_OPTIONS = st.sets(st.sampled_from(sorted(LIKELY)), max_size=4).flatmap(
    lambda names: st.fixed_dictionaries({name: LIKELY[name] for name in names})
)


@settings(max_examples=examples(300), deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    model=st.one_of(MODELS, st.none()),
    params=st.one_of(st.none(), st.none(), st.sampled_from(("7B", "1", 10**9)), ANYTHING),
    options=st.one_of(FEW_OPTIONS, LIKELY_OPTIONS),
    odd=st.one_of(st.just({}), ODD_OPTIONS),
)
def test_a_report_or_one_line(model: Any, params: Any, options: dict[str, Any], odd: dict[str, Any]) -> None:
    odd = {name: value for name, value in odd.items() if name not in ("model", "params")}
    try:
        report = memcalc.estimate(model, params=params, **{**options, **odd})
    except memcalc.InputError as error:
        line = str(error)
        assert line.isprintable()
        assert 0 < len(line) < 700
        assert line.startswith(("--", "field "))
        return
    check_numbers(report)


@pytest.mark.parametrize(
    "options", [{"params": 10**5000}, {"params": "7B", "gpus": -(10**5000)}], ids=["params", "gpus"]
)
def test_a_number_too_long_to_print_is_one_line(options: dict[str, Any]) -> None:
    """Python refuses to print an integer of more than 4300 digits: with a ValueError of its own."""
    with pytest.raises(memcalc.InputError) as error:
        memcalc.estimate(**options)
    assert str(error.value).isprintable()


# --- the profile equals the full run


GEMMA2: dict[str, Any] = {
    "model_type": "gemma2", "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "vocab_size": 50, "sliding_window": 8,
}  # fmt: skip


def peaks(of: Profile, batch: int, seq: int) -> tuple[int, ...]:
    """The peaks of forward and backward, without and with gradients, and what is saved."""
    return (
        max(evaluate(moment.poly, batch, seq) for moment in of.forward),
        max(evaluate(moment.poly, batch, seq) for moment in of.backward),
        max(evaluate(moment.poly, batch, seq) + moment.gradients for moment in of.backward),
        evaluate(of.saved.poly, batch, seq),
    )


def census(of: Profile, batch: int, seq: int) -> dict[tuple[str, str], int]:
    """Bytes by component and name of what is saved."""
    out: dict[tuple[str, str], int] = {}
    for row in of.rows(of.saved):
        out[row.component, row.name] = out.get((row.component, row.name), 0) + row.bytes_at(batch, seq)
    return out


def check_profile(config: dict[str, Any], choices: Choices, made_at: tuple[int, int], used_at: tuple[int, int]) -> None:
    program = memcalc.load_model(config).program
    made, full = profile(program, choices, *made_at), full_profile(program, choices, *used_at)
    assert peaks(made, *used_at) == peaks(full, *used_at)
    assert made.saved.poly == full.saved.poly
    assert census(made, *used_at) == census(full, *used_at)
    assert sum(census(made, *used_at).values()) == evaluate(made.saved.poly, *used_at)


CHOICES = st.one_of(
    *[
        st.builds(
            Choices,
            st.just(dtype),
            st.sampled_from(("sdpa", "eager")),
            st.booleans(),
            st.booleans(),
            st.booleans(),
            st.just(autocast),
            kernels=st.just(TRANSFORMERS),
            hooks=st.none(),
            policy=st.sampled_from((None, per_op)),
            # Given because builds() would draw them: from their types, defaults or not.
            buffer_dtype=st.none(),
            recompute_layers=st.none(),
            micro_batches=st.just(1),
        )
        for dtype, autocast in ((bf16, None), (fp32, None), (fp32, bf16))
    ]
)


@EXAMPLES
@given(
    config=MODELS, depth=st.integers(1, 12), choices=CHOICES,
    batches=st.one_of(st.just((1, 1)), st.tuples(st.integers(2, 5), st.integers(2, 5))),
    seqs=st.one_of(st.just((1, 1)), st.tuples(st.integers(2, 40), st.integers(2, 40))),
)  # fmt: skip
def test_profile_equals_the_full_run(
    config: dict[str, Any], depth: int, choices: Choices, batches: tuple[int, int], seqs: tuple[int, int]
) -> None:
    """Made at one batch and sequence, used at another that takes the same branches."""
    config = {**config, "n_layer" if config["model_type"] == "gpt2" else "num_hidden_layers": depth}
    check_profile(config, choices, (batches[0], seqs[0]), (batches[1], seqs[1]))


@pytest.mark.parametrize("depth", [1, 2, 3, 5, 6, 9, 12, 13])
@pytest.mark.parametrize(
    ("made_at", "used_at"), [((1, 1), (1, 1)), ((1, 3), (1, 7)), ((2, 8), (3, 21)), ((2, 30), (2, 8))]
)
def test_profile_of_alternating_layers(depth: int, made_at: tuple[int, int], used_at: tuple[int, int]) -> None:
    config = {**GEMMA2, "num_hidden_layers": depth}
    for recompute in (False, True):
        check_profile(config, Choices(bf16, "eager", recompute, False), made_at, used_at)


@pytest.mark.parametrize("kinds", ["ffs", "sfsf", "ssssf" * 2 + "ss", "f" * 7 + "s", "sfsssfss", "s" * 9])
def test_profile_of_any_order_of_layers(kinds: str) -> None:
    names = {"f": "full_attention", "s": "sliding_attention"}
    config = {**GEMMA2, "num_hidden_layers": len(kinds), "layer_types": [names[kind] for kind in kinds]}
    for at in ((1, 3), (2, 21)):
        check_profile(config, Choices(fp32, "eager", False, False), at, at)


@pytest.mark.parametrize(
    "name", ["gpt2", "pythia-70m", "opt-350m", "qwen3-0.6b", "phi-3-mini", "mistral-7b", "mixtral-8x7b"]
)
@pytest.mark.parametrize("recompute", [False, True])
def test_profile_of_a_bundled_model(name: str, recompute: bool) -> None:
    program = memcalc.load_model(name).program
    for dtype, autocast in ((bf16, None), (fp32, bf16)):
        choices = Choices(dtype, program.attention_kinds[0], recompute, False, autocast)
        made, full = (kind(program, choices, 2, 64) for kind in (profile, full_profile))
        for at in ((2, 64), (3, 1000)):
            assert peaks(made, *at) == peaks(full, *at)


@EXAMPLES
@given(config=MODELS, batch=st.integers(1, 4), seq=st.integers(1, 48), options=setups())
def test_a_model_reuses_its_profiles_rightly(
    config: dict[str, Any], batch: int, seq: int, options: dict[str, Any]
) -> None:
    """One model asked twice answers as two models asked once."""
    model = memcalc.load_model(config)
    options = {**options, "global_batch_size": None}
    memcalc.estimate(model, **options)
    again = memcalc.estimate(model, **{**options, "micro_batch_size": batch, "seq_len": seq})
    fresh = memcalc.estimate(config, **{**options, "micro_batch_size": batch, "seq_len": seq})
    assert again.phases == fresh.phases
    assert again.total("saved_activations") == fresh.total("saved_activations")
    assert sum(item.at_peak for item in again.items) == again.peak
