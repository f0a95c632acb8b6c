"""Products in fp8: what a run holds and keeps, against Megatron-LM's records and counted by hand."""

from __future__ import annotations

from typing import Any

import pytest

import memcalc
from memcalc import InputError

WEEKLY = (
    "--num-layers 12 --hidden-size 512 --num-attention-heads 8 --micro-batch-size 2 --global-batch-size 128 --seq-length 1024 "
    "--max-position-embeddings 1024 --clip-grad 1.0 --transformer-impl transformer_engine --tensor-model-parallel-size 4 "
    "--context-parallel-size 2 --sequence-parallel --no-gradient-accumulation-fusion --use-distributed-optimizer --bf16 "
    "--normalization RMSNorm --vocab-size 50257"
)
NATIVE = f"{WEEKLY} --fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather"
LATENT = (
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 4 "
    "--expert-model-parallel-size 4 --expert-tensor-parallel-size 1 --use-distributed-optimizer --attention-backend unfused "
    "--sequence-parallel --disable-bias-linear --micro-batch-size 4 --global-batch-size 32 --cross-entropy-loss-fusion "
    "--cross-entropy-fusion-impl native --seq-length 4096 --num-layers 16 --hidden-size 1024 --ffn-hidden-size 4096 "
    "--num-attention-heads 32 --kv-channels 128 --max-position-embeddings 4096 --position-embedding-type rope "
    "--make-vocab-size-divisible-by 3232 --normalization RMSNorm --swiglu --untie-embeddings-and-output-weights "
    "--multi-latent-attention --mtp-num-layers 1 --attention-dropout 0.0 --hidden-dropout 0.0 --clip-grad 1.0 --qk-layernorm "
    "--num-experts 32 --moe-layer-freq ([0]*1+[1]*15) --moe-ffn-hidden-size 1024 --moe-shared-expert-intermediate-size 1024 "
    "--moe-router-topk 4 --moe-token-dispatcher-type alltoall --moe-grouped-gemm --moe-router-group-topk 2 "
    "--moe-router-num-groups 4 --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-permute-fusion "
    "--q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --bf16 "
    "--vocab-size 50257"
)


def held(report: memcalc.Report) -> int:
    """Bytes between steps, with cuBLAS's workspaces."""
    rows = [*report.items, *report.overheads]
    left_out = ("reserved", "device"), "not split"
    return sum(
        row.nbytes
        for row in rows
        if row.life == "always" and row.component not in left_out[0] and left_out[1] not in row.name
    )


@pytest.mark.parametrize(
    ("gpu", "between", "peak"),
    [("h100-80gb", 300_733_952, 425_122_816), ("gb200", 291_295_744, 432_909_312)],
    ids=("h100", "gb200"),
)
def test_the_record_of_weights_in_fp8_alone(gpu: str, between: int, peak: int) -> None:
    """gpt/gpt3_weekly_mcore_tp4_cp2_current_scaling_native_fp8_tp_sp_cp_tp_overlap of NVIDIA/Megatron-LM's functional tests at
    d98e8a64: `mem-allocated-bytes` and the largest `mem-max-allocated-bytes`. On Hopper each weight has a transposed copy."""
    report = memcalc.estimate(megatron_args=NATIVE, gpus=8, gpu=gpu, cublas_workspace_config=":4096:8")
    assert held(report) == pytest.approx(between, rel=0.005)
    assert report.allocated == pytest.approx(peak, rel=0.03)


def test_the_records_of_a_run_with_and_without_fp8() -> None:
    """moe/gpt3_mcore_te_tp2_pp2_ep4_etp1_mtp_resume_torch_dist_fp8 and …_memory_speed differ in fp8 alone: between steps their
    records differ by each weight's rows and columns in fp8."""
    setup: dict[str, Any] = {"gpus": 8, "gpu": "h100-80gb", "pp_rank": 1}
    plain = memcalc.estimate(megatron_args=LATENT, **setup)
    eight = memcalc.estimate(megatron_args=f"{LATENT} --fp8-format hybrid --fp8-recipe tensorwise", **setup)
    assert held(eight) - held(plain) == pytest.approx(7_321_331_200 - 6_632_029_696, rel=0.01)
    assert eight.allocated == pytest.approx(57_578_217_472, rel=0.03)


# --- by hand

DENSE: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 8, "vocab_size": 1024, "max_position_embeddings": 1024,
}  # fmt: skip
SETUP: dict[str, Any] = {"engine": "megatron", "seq_len": 1024, "micro_batch_size": 2}
TOKENS, HIDDEN, FFN, LAYERS = 2 * 1024, 512, 1536, 3
LINEAR = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * FFN


def of(component: str, report: memcalc.Report) -> int:
    return sum(row.nbytes for row in report.items if row.component == component)


@pytest.mark.parametrize(
    ("recipe", "kept"),
    [
        ("tensorwise", 1.0),
        ("blockwise", 1 + 4 / 128),
        ("mxfp8", 1 + 1 / 32),
    ],
)
def test_what_a_layer_keeps(recipe: str, kept: float) -> None:
    """Of the inputs of linear_qkv, linear_fc1 and linear_fc2 in 8 bits with scales, not 16. The input of linear_proj is
    the output of attention, which attention keeps."""
    plain, eight = (memcalc.estimate(DENSE, **SETUP, fp8_recipe=one) for one in (None, recipe))
    saved = of("saved_activations", plain) - of("saved_activations", eight)
    assert saved == LAYERS * TOKENS * (2 * HIDDEN + FFN) * (2 - kept)


def test_the_delayed_recipe_keeps_one_input_more() -> None:
    delayed, tensorwise = (memcalc.estimate(DENSE, **SETUP, fp8_recipe=one) for one in ("delayed", "tensorwise"))
    more = of("saved_activations", delayed) - of("saved_activations", tensorwise)
    assert more == LAYERS * TOKENS * HIDDEN


@pytest.mark.parametrize(
    ("recipe", "gpu", "bytes_each"),
    [
        ("tensorwise", "h100-80gb", 2),
        ("delayed", "h100-80gb", 2),
        ("tensorwise", "b200", 1),
        ("tensorwise", "rtx5090", 2),
        ("mxfp8", "b200", 2 + 2 / 32),
    ],
)
def test_weights_beside_those_of_16_bits(recipe: str, gpu: str, bytes_each: float) -> None:
    plain, eight = (
        memcalc.estimate(DENSE, **SETUP, gpu=gpu, fp8_recipe=one, attention="sdpa") for one in (None, recipe)
    )
    assert of("buffers", eight) - of("buffers", plain) == LAYERS * LINEAR * bytes_each


def test_gathered_in_fp8() -> None:
    """A rank's buffer has one byte for each weight of these layers, and the gather sends it."""
    more = {**SETUP, "gpus": 4, "zero": 1, "fp8_recipe": "tensorwise"}
    kept, gathered = (memcalc.estimate(DENSE, **more, fp8_param_gather=on) for on in (False, True))
    assert of("parameters", kept) - of("parameters", gathered) == LAYERS * LINEAR
    assert of("buffers", kept) - of("buffers", gathered) == LAYERS * LINEAR
    sent = {c.dtype: c.payload for c in gathered.collectives if c.collective == "all_gather" and c.axis == "dp"}
    assert sent["fp8"] == LAYERS * LINEAR
    assert of("optimizer_states", kept) == of("optimizer_states", gathered)


def test_shards_of_a_sequence_are_gathered_in_fp8() -> None:
    more = {**SETUP, "gpus": 2, "tp": 2}
    plain, eight = (memcalc.estimate(DENSE, **more, fp8_recipe=one) for one in (None, "tensorwise"))
    inputs = [
        {
            c.name: c.payload
            for c in report.collectives
            if c.name.startswith("input of") and "output_layer" not in c.name
        }
        for report in (plain, eight)
    ]
    assert inputs[0] and {name: payload // 2 for name, payload in inputs[0].items()} == inputs[1]


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"engine": "fsdp2", "gpus": 8, "zero": 3}, "--fp8-recipe tensorwise: with engine fsdp2 is not modelled"),
        ({"precision": "fp16-mixed"}, "--fp8-recipe tensorwise: with precision fp16-mixed"),
        ({"attention": "eager"}, "--fp8-recipe tensorwise: Megatron's own layers"),
        ({"lora_rank": 8}, "--lora-rank 8: with --fp8-recipe"),
        ({"freeze": "embeddings"}, "--freeze embeddings: with --fp8-recipe"),
        ({"optimizer": "muon"}, "--optimizer muon: with --fp8-recipe"),
        ({"offload_modules": "core_attn"}, "--offload-modules core_attn: with --fp8-recipe"),
        ({"fp8_param_gather": True}, "--fp8-param-gather on: is not modelled by this version; allowed: with --zero 1"),
        ({"fp8_recipe": None, "fp8_param_gather": True}, "--fp8-param-gather on: gathers weights in fp8"),
        (
            {"gpu": "a100-80gb"},
            "--fp8-recipe tensorwise: Transformer Engine needs compute capability 8.9, and a100-80gb has 8.0",
        ),
        (
            {"gpu": "h100-80gb", "fp8_recipe": "mxfp8"},
            "--fp8-recipe mxfp8: Transformer Engine needs compute capability 10.0",
        ),
        ({"gpu": "mi300x"}, "--fp8-recipe tensorwise: Transformer Engine needs"),
        (
            {"fp8_recipe": "delayed", "recompute": "selective", "recompute_modules": "mlp,moe_act"},
            "--recompute-modules mlp,moe_act: with --fp8-recipe delayed Megatron refuses",
        ),
        ({"fp8_recipe": "int8"}, "--fp8-recipe int8: "),
        (
            {"seq_len": 100, "micro_batch_size": 1},
            "--seq-len 100: with --fp8-recipe tensorwise a rank's tokens, 100, have to be",
        ),
        (
            {"tp": 2, "gpus": 2, "seq_len": 192, "micro_batch_size": 1, "fp8_recipe": "blockwise"},
            "--seq-len 192: with --fp8-recipe blockwise a rank's tokens, 96, have to be a multiple of 128; allowed: 256",
        ),
    ],
)
def test_what_is_refused(more: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError) as error:
        memcalc.estimate(
            "mixtral-8x7b" if "recompute_modules" in more else DENSE, **{**SETUP, "fp8_recipe": "tensorwise", **more}
        )
    assert str(error.value).startswith(named)
    assert "\n" not in str(error.value)


def test_dims_that_products_in_fp8_do_not_take() -> None:
    narrow = {**DENSE, "intermediate_size": 1544}
    with pytest.raises(InputError) as error:
        memcalc.estimate(narrow, **SETUP, fp8_recipe="tensorwise")
    why = "products in fp8 need multiples of 8 and 16, and a rank's decoder.layers.*.mlp.linear_fc2.weight"
    assert str(error.value).startswith(f"--fp8-recipe tensorwise: {why}")


def test_another_use_of_fp8_in_a_file_is_counted_in_bf16() -> None:
    report = memcalc.estimate(megatron_args=f"{WEEKLY} --fp8-format hybrid --fp8-multi-head-attention", gpus=8)
    assert report.setup.fp8_recipe is None
    assert any("low precision is not modelled" in note for note in report.to_dict()["notes"])
