"""The time of a kernel: by hand from a GPU's numbers, and what must hold of every one."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from traces import DEEPSEEK_V3, T5, traced

import memcalc
from memcalc.estimation.compute import Computed, Moved, moved
from memcalc.hardware.speed import speed_of
from memcalc.inputs.gpu import load_gpu
from memcalc.timing.items import Timed
from memcalc.timing.kernels import Rates, Unknown, products, streams

H100 = Rates(load_gpu("h100-80gb"), speed_of("h100-80gb")._replace(attention_efficiency=None), "flash-attn 2")
E, B, WAIT = H100.speed.gemm_efficiency.value, H100.speed.memory_efficiency.value, 4e-6
RATE, BANDWIDTH = 989.5e12, 3.35e12  # NVIDIA H100 datasheet, SXM


def product(m: int, k: int, n: int, calls: int = 1, kind: str = "matmul", dtype: str = "bf16", **more: Any) -> Computed:
    return Computed(
        "it", "forward", None, kind, dtype, calls, calls * 2 * m * k * n, "", "modelled", "", (m, k, n), **more
    )


def seconds(*computed: Computed, rates: Rates = H100) -> float:
    timed = products(computed, rates)
    assert not isinstance(timed, Unknown)
    return sum(one.seconds for one in timed)


def test_a_large_product_takes_its_flops() -> None:
    assert seconds(product(8192, 8192, 8192)) == pytest.approx(WAIT + 2 * 8192**3 / (E * RATE), rel=1e-12)


def test_a_thin_product_takes_its_bytes() -> None:
    """A row of 8192 elements times a square matrix: the matrix is read."""
    nbytes = 2 * (8192 + 8192 * 8192 + 8192)
    (timed,) = products([product(1, 8192, 8192)], H100)  # type: ignore[misc]
    assert isinstance(timed, Timed)
    assert timed.seconds == pytest.approx(WAIT + nbytes / (B * BANDWIDTH), rel=1e-12)
    assert timed.bound == "bandwidth"


def test_a_convolution_reads_its_image_once() -> None:
    """Of 64 channels by 3 × 3 kernels into 256 channels of 56 × 56 places, in 32 images; and of a kernel for each channel."""

    def convolution(*sizes: int) -> Timed:
        n = 2 * math.prod(sizes)
        one = Computed("it", "forward", None, "convolution", "bf16", 1, n, "", "modelled", "", sizes)
        (timed,) = products([one], H100)  # type: ignore[misc]
        assert isinstance(timed, Timed)
        return timed

    flops = 2 * 32 * 256 * 56 * 56 * 64 * 9
    assert convolution(32, 256, 56, 56, 64, 3, 3).seconds == pytest.approx(WAIT + flops / (E * RATE), rel=1e-12)
    nbytes = 2 * (4 * 1000 * (512 + 512) + 512 * 4)
    of_each_channel = convolution(4, 512, 1000, 1, 4)
    assert of_each_channel.bound == "bandwidth"
    assert of_each_channel.seconds == pytest.approx(WAIT + nbytes / (B * BANDWIDTH), rel=1e-12)


def test_calls_wait_each() -> None:
    one, ten = seconds(product(512, 512, 512)), seconds(product(512, 512, 512, calls=10))
    assert ten == pytest.approx(10 * one, rel=1e-12)


def test_fp32_has_its_own_rate() -> None:
    """67 TFLOP/s: torch does not take TF32 by default."""
    assert seconds(product(8192, 8192, 8192, dtype="fp32")) == pytest.approx(
        WAIT + 2 * 8192**3 / (E * 67e12), rel=1e-12
    )


def test_experts_read_their_own_matrices_and_fill_whole_tiles() -> None:
    """64 experts of 32 rows each: 128 rows are computed for each, and 64 matrices read."""
    rows, k, n, experts = 64 * 32, 4096, 1024, 64
    nbytes = 2 * (rows * k + experts * k * n + rows * n)
    one = product(rows, k, n, kind="grouped matmul", groups=experts)
    assert seconds(one) == pytest.approx(
        WAIT + max(4 * 2 * rows * k * n / (E * RATE), nbytes / (B * BANDWIDTH)), rel=1e-12
    )


def test_attention_takes_its_curve() -> None:
    """4096 keys, heads of 128: 294 TFLOP/s of flash-attn 2 on an H100, half of the square counted (the package's README)."""
    flops = 2 * 2 * 32 * 4096 * 4096 * 128
    sizes = 1, 32, 4096, 4096, 128
    one = Computed("it", "forward", None, "attention", "bf16", 1, flops, "", "modelled", "", sizes, is_causal=True)
    assert seconds(one) == pytest.approx(flops / 2 / 294e12, rel=1e-3)


def test_a_given_share_of_attention_wins() -> None:
    given_ = H100._replace(speed=H100.speed.given(None, 0.5, None))
    one = Computed(
        "it", "forward", None, "attention", "bf16", 1, 10**15, "", "modelled", "", (1, 1, 64, 64, 64), is_causal=True
    )
    assert seconds(one, rates=given_) == pytest.approx(0.5e15 / (0.5 * RATE), rel=1e-12)


@pytest.mark.parametrize(("gpu", "dtype", "rate"), [("h100-80gb", "fp32", 67e12), ("t4", "fp16", 65e12)])
def test_attention_that_no_curve_has_takes_its_own_rate(gpu: str, dtype: str, rate: float) -> None:
    """flash-attn takes no fp32, and a T4 has no bf16."""
    speed = speed_of(gpu)
    flops = 2 * 2 * 32 * 4096 * 4096 * 128
    one = Computed(
        "it",
        "forward",
        None,
        "attention",
        dtype,
        1,
        flops,
        "",
        "modelled",
        "",
        (1, 32, 4096, 4096, 128),
        is_causal=True,
    )
    plain = Rates(load_gpu(gpu), speed, "flash-attn 2")
    assert seconds(one, rates=plain) == pytest.approx(flops / (speed.gemm_efficiency.value * rate), rel=0.01)
    given_ = plain._replace(speed=speed.given(None, 0.5, None))
    assert seconds(one, rates=given_) == pytest.approx(flops / 2 / (0.5 * rate), rel=1e-12)


def test_a_given_share_is_no_measurement() -> None:
    given_ = H100._replace(speed=H100.speed.given(0.5, 0.5, None))
    attention = Computed(
        "it", "forward", None, "attention", "bf16", 1, 10**15, "", "modelled", "", (1, 1, 64, 64, 64), is_causal=True
    )
    timed = products([product(8192, 8192, 8192), attention], given_)
    assert [(one.basis, one.source) for one in timed if isinstance(one, Timed)] == [("given", "as given")] * 2
    (stream,) = streams([Moved("it", "backward", 3, 10**9)], given_)  # type: ignore[misc]
    assert isinstance(stream, Timed)
    assert stream.basis == "measured"


def test_what_is_not_known_is_no_zero() -> None:
    t4 = Rates(load_gpu("t4"), speed_of("t4"), "flash-attn 2")
    found = products([product(8, 8, 8)], t4)
    assert isinstance(found, Unknown)
    assert found.missing == "t4 has no known rate for bf16"


def test_a_stream_takes_its_bytes() -> None:
    (timed,) = streams([Moved("it", "backward", 3, 10**9)], H100)  # type: ignore[misc]
    assert isinstance(timed, Timed)
    assert timed.seconds == pytest.approx(3 * 2e-6 + 1e9 / (B * BANDWIDTH), rel=1e-12)


@given(st.integers(1, 10**5), st.integers(1, 10**4), st.integers(1, 10**4))
def test_more_rows_never_take_less(m: int, k: int, n: int) -> None:
    assert seconds(product(m + 1, k, n)) >= seconds(product(m, k, n))


# --- the bytes of the kernels: those of transformers' own modules, op by op


def sums(report: memcalc.Report) -> dict[str, tuple[int, int]]:
    """Bytes and kernels of each phase."""
    found: dict[str, tuple[int, int]] = {}
    for one in moved(report.rank.profiles, report.setup, report.rank.on_paper):
        nbytes, calls = found.get(one.phase, (0, 0))
        found[one.phase] = nbytes + one.nbytes, calls + one.calls
    return found


LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 512,
}  # fmt: skip
OPTIONS: dict[str, Any] = {"precision": "bf16", "micro_batch_size": 2}


@pytest.mark.live
def test_backward_of_llama_runs_the_kernels_of_the_real_one() -> None:
    """Their number and their bytes, exactly; forward lacks what wants no gradient, as the angles of the positions."""
    ours, theirs = (
        sums(memcalc.estimate(model, **OPTIONS, seq_len=64, attention="sdpa")) for model in (LLAMA, traced(LLAMA))
    )
    assert ours["backward"] == theirs["backward"]
    assert ours["forward"][0] == pytest.approx(theirs["forward"][0], rel=0.01)


@pytest.mark.live
@pytest.mark.parametrize(("fields", "seq"), [(T5, 16), (DEEPSEEK_V3, 64)], ids=["t5", "deepseek_v3"])
def test_other_families_are_near(fields: dict[str, Any], seq: int) -> None:
    """Within 10 %: kernels of small masks and tables are not counted in forward, and an op of several kernels that makes no
    block in between counts as one."""
    ours, theirs = (
        sums(memcalc.estimate(model, **OPTIONS, seq_len=seq, attention="eager")) for model in (fields, traced(fields))
    )
    for phase in ("forward", "backward"):
        assert ours[phase][0] == pytest.approx(theirs[phase][0], rel=0.1), phase


@pytest.mark.live
def test_recomputation_runs_forward_again() -> None:
    full = sums(memcalc.estimate(traced(LLAMA), **OPTIONS, seq_len=64, recompute="full", attention="sdpa"))
    ours = sums(memcalc.estimate(LLAMA, **OPTIONS, seq_len=64, recompute="full", attention="sdpa"))
    assert ours["recomputation"][0] == pytest.approx(full["recomputation"][0], rel=0.05)
    assert ours["backward"] == full["backward"]


def test_a_mask_makes_every_score() -> None:
    """A causal kernel leaves out half of the square; with a mask of padding, and in an encoder, none is left out."""
    names = ("model.layers.*.self_attn",)
    causal, padded = (
        sum(
            one.seconds
            for one in products(memcalc.estimate("llama-7b", gpu="h100-80gb", padded=padded).computed, H100)  # type: ignore[union-attr]
            if isinstance(one, Timed) and one.name in names
        )
        for padded in (False, True)
    )
    assert padded == pytest.approx(2 * causal, rel=1e-12)
    assert not any(one.is_causal for one in memcalc.estimate("bert-base").computed)


@pytest.mark.parametrize("how", ["p2p", "all_gather", "a2a"])
@pytest.mark.parametrize("cp", [2, 4, 8])
def test_ranks_that_share_a_sequence_share_its_attention(how: str, cp: int) -> None:
    """Each computes 1/cp of the scores at or below the diagonal, whichever way the keys take, with heads as wide as before."""
    options: dict[str, Any] = {"engine": "megatron", "seq_len": 8192, "gpu": "h100-80gb", "global_batch_size": 1}

    def flops(**more: Any) -> float:
        of = [one for one in memcalc.estimate("llama-7b", **options, **more).computed if one.kind == "attention"]
        assert {one.sizes[-1] for one in of} == {128}
        return sum(one.flops / 2 if one.is_causal else one.flops for one in of)

    assert flops(gpus=cp, cp=cp, cp_comm_type=how) == pytest.approx(flops() / cp, rel=1e-12)


@pytest.mark.parametrize("cp", [2, 4])
def test_torchs_ring_shares_it_too(cp: int) -> None:
    """But for the rank's memory it is the last rank that is reported: all have equal parts."""
    options: dict[str, Any] = {"engine": "fsdp2", "zero": 3, "seq_len": 8192, "gpu": "h100-80gb"}

    def flops(**more: Any) -> float:
        of = [one for one in memcalc.estimate("llama-7b", **options, **more).computed if one.kind == "attention"]
        return sum(one.flops / 2 if one.is_causal else one.flops for one in of)

    assert flops(gpus=2 * cp, cp=cp) == pytest.approx(flops(gpus=2) / cp, rel=1e-12)
