"""ZeRO++ in DeepSpeed's own ZeRO-3 against the engine: collectives with their groups, and peaks to the byte."""

from __future__ import annotations

from typing import Any

import pytest
from deepspeed_oracle import OPTIONS, PRECISIONS
from zero_plus_plus_oracle import PlusPlusStep, plus_plus_step

import memcalc

LLAMA = {"model_type": "llama", "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 3,
         "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1024, "head_dim": 16}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": 512,
        "bos_token_id": 0, "eos_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip
NOTHING_KEPT = {"param_persistence_threshold": 0, "max_live_parameters": 0, "max_reuse_distance": 0}
SOME_KEPT = {"param_persistence_threshold": 0, "max_live_parameters": 200_000, "max_reuse_distance": 150_000,
             "prefetch_bucket_size": 50_000}  # fmt: skip
SMALL_STAY = {"param_persistence_threshold": 1000, "max_live_parameters": 400_000, "max_reuse_distance": 150_000,
              "prefetch_bucket_size": 20_000, "reduce_bucket_size": 60_000, "sub_group_size": 50_000}  # fmt: skip
SIZES = {"nothing kept": NOTHING_KEPT, "some kept": SOME_KEPT, "small stay": SMALL_STAY, "defaults": {}}
QWZ = {"zero_quantized_weights": True}
QGZ = {"zero_quantized_gradients": True}
DTYPES = {"int8": "int8", "bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64", "uint8": "uint8"}


def real(config: dict[str, Any], options: dict[str, Any], **how: Any) -> PlusPlusStep:
    """A steady step of DeepSpeed."""
    return plus_plus_step(config, **{OPTIONS.get(name, name): n for name, n in options.items()}, **how)


def ours(config: dict[str, Any], options: dict[str, Any], **how: Any) -> memcalc.Report:
    """The estimate of the same setup."""
    gpus, batch = how["gpus"], how.get("micro_batch_size", 1)
    return memcalc.estimate(
        config,
        engine="deepspeed",
        zero=3,
        gpus=gpus,
        gpus_per_node=how.get("per_node", 8),
        precision=PRECISIONS[how.get("precision", "bf16")],
        micro_batch_size=batch,
        global_batch_size=gpus * batch * how.get("micro_batches", 1),
        seq_len=how.get("seq_len", 16),
        recompute="full" if how.get("recompute") else "none",
        freeze=how.get("freeze"),
        **options,
    )


def estimated(report: memcalc.Report) -> dict[tuple[str, str, int], tuple[int, int]]:
    out: dict[tuple[str, str, int], tuple[int, int]] = {}
    for c in report.collectives:
        calls, payload = out.get((c.collective, c.dtype, c.group_size), (0, 0))
        out[c.collective, c.dtype, c.group_size] = calls + c.calls, payload + c.payload
    return out


def check(config: dict[str, Any], options: dict[str, Any], **how: Any) -> None:
    report = ours(config, options, **how)
    run = real(config, options, **{name: value for name, value in how.items() if name != "freeze"})
    assert estimated(report) == {(kind, DTYPES[dtype], n): sent for (kind, dtype, n), sent in run.sent.items()}
    assert report.phases == {"forward": run.forward, "backward": run.backward, "step": run.step}


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_quantised_weights(sizes: str, precision: str) -> None:
    check(LLAMA, QWZ | SIZES[sizes], gpus=4, precision=precision)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_second_partition(sizes: str, ranks: int) -> None:
    check(LLAMA, {"zero_hpz_partition_size": ranks} | SIZES[sizes], gpus=4)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_quantised_gradients(sizes: str, precision: str) -> None:
    check(LLAMA, QGZ | SIZES[sizes], gpus=4, per_node=2, precision=precision)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_all_together(sizes: str, micro_batches: int) -> None:
    check(
        LLAMA,
        QWZ | QGZ | {"zero_hpz_partition_size": 2} | SIZES[sizes],
        gpus=8,
        per_node=2,
        micro_batches=micro_batches,
    )


@pytest.mark.parametrize(
    "options", [QWZ, {"zero_hpz_partition_size": 2}, QGZ, QWZ | QGZ | {"zero_hpz_partition_size": 4}]
)
def test_recomputed_and_tied(options: dict[str, Any]) -> None:
    check(GPT2, options | SMALL_STAY, gpus=4, per_node=2, recompute=True, micro_batch_size=2)


def test_gradients_that_codes_do_not_divide_are_reduce_scattered() -> None:
    """6 ranks: 12 divides the MLP's weights alone; the others are padded."""
    wide = LLAMA | {"intermediate_size": 384}
    for micro_batches in (1, 2):
        check(wide, QGZ | SOME_KEPT, gpus=6, per_node=3, micro_batches=micro_batches)


@pytest.mark.parametrize(
    ("freeze", "frozen"), [("embeddings", "model.embed"), ("first:2", "model.layers.0|model.layers.1")]
)
@pytest.mark.parametrize("options", [QWZ, {"zero_hpz_partition_size": 2}, QWZ | QGZ | {"zero_hpz_partition_size": 2}])
@pytest.mark.parametrize("sizes", ["some kept", "small stay"])
def test_frozen_weights_keep_their_second_partition(
    freeze: str, frozen: str, options: dict[str, Any], sizes: str
) -> None:
    check(LLAMA, options | SIZES[sizes], gpus=4, per_node=2, freeze=freeze, frozen=tuple(frozen.split("|")))


def test_on_one_node_gradients_are_reduce_scattered() -> None:
    check(LLAMA, QGZ | SOME_KEPT, gpus=4, per_node=4)
    check(LLAMA, QGZ | SOME_KEPT, gpus=4, per_node=8)


def test_the_first_step_gathers_module_by_module() -> None:
    """24 weights of a norm over 4 ranks are 6: gathers of a later step are of several, and the first one's assertion fails."""
    small = LLAMA | {
        "hidden_size": 24,
        "head_dim": 8,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "intermediate_size": 64,
    }
    with pytest.raises(
        memcalc.InputError, match="quantises multiples of 8, and a rank's part of a module's weights has 6"
    ):
        ours(small, QWZ, gpus=4)
    with pytest.raises(AssertionError, match="multiple of 8"):
        real(small, QWZ, gpus=4)
