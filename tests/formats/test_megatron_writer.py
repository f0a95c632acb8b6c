"""Megatron-LM's arguments as they are written: read again, without the model, they are the same setup and the same GPTModel."""

from __future__ import annotations

import random
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from drawn_setups import GPT2, LLAMA, MIXTRAL, Stream, drawn, setup_of

import memcalc
from memcalc.errors import InputError
from memcalc.families.base.architecture import Architecture, architecture_of
from memcalc.formats.megatron import arguments_of, read
from memcalc.formats.megatron_flags import KNOWN, SEVERAL, SINGLE, SWITCHES
from memcalc.formats.megatron_writer import write
from memcalc.formats.merged import merged
from memcalc.formats.written import Written
from memcalc.inputs.model import Model, load_model
from memcalc.inputs.options import check_options
from memcalc.megatron.layout import padded_vocab
from memcalc.setup.resolved import resolve
from memcalc.setup.setup import Setup

_SIZES = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 512, "max_position_embeddings": 4096,
}  # fmt: skip
_LATENT = {
    **_SIZES, "num_key_value_heads": 8, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_shared_experts": 1,
}  # fmt: skip
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_CONFIGS: dict[str, dict[str, Any]] = {
    "llama, 7 layers": {**_SIZES, "model_type": "llama", "num_hidden_layers": 7, "vocab_size": 50257},
    "llama, 6 layers": {**_SIZES, "model_type": "llama", "num_hidden_layers": 6, "vocab_size": 50304,
                        "tie_word_embeddings": True},
    "mistral": {**_SIZES, "model_type": "mistral", "head_dim": 32, "sliding_window": None, "vocab_size": 513},
    "gpt2": {"model_type": "gpt2", "n_embd": 128, "n_layer": 7, "n_head": 8, "vocab_size": 50257, "n_positions": 1024,
             "n_inner": 384, "resid_pdrop": 0.0, "attn_pdrop": 0.2},
    "qwen2": {**_SIZES, "model_type": "qwen2"},
    "qwen3": {**_SIZES, "model_type": "qwen3", "head_dim": 32},
    "qwen2_moe": {**_SIZES, **_EXPERTS, "model_type": "qwen2_moe", "shared_expert_intermediate_size": 96},
    "qwen3_moe": {**_SIZES, **_EXPERTS, "model_type": "qwen3_moe", "head_dim": 16, "mlp_only_layers": [0, 5]},
    "deepseek_v2": {**_LATENT, "model_type": "deepseek_v2", "first_k_dense_replace": 1, "q_lora_rank": None},
    "deepseek_v2 of groups": {**_LATENT, "model_type": "deepseek_v2", "first_k_dense_replace": 0, "q_lora_rank": 32,
                              "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    "deepseek_v3": {**_LATENT, "model_type": "deepseek_v3", "first_k_dense_replace": 3, "q_lora_rank": 32, "n_group": 4,
                    "topk_group": 2, "head_dim": 64, "routed_scaling_factor": 2.5, "hidden_size": 136, "num_attention_heads": 16,
                    "num_key_value_heads": 16},
    "megatron_gpt": {"model_type": "megatron_gpt", "num_layers": 8, "hidden_size": 128, "num_attention_heads": 8,
                     "num_query_groups": 2, "ffn_hidden_size": 320, "vocab_size": 512, "normalization": "RMSNorm",
                     "max_position_embeddings": 1024},
    "two more tokens": {"model_type": "megatron_gpt", "num_layers": 8, "hidden_size": 128, "num_attention_heads": 8,
                        "vocab_size": 512, "max_position_embeddings": 4096, "ffn_hidden_size": 320, "mtp_num_layers": 2,
                        "normalization": "RMSNorm", "position_embedding_type": "rope", "add_bias_linear": False},
    "latents without norms": {
        "model_type": "megatron_gpt", "num_layers": 8, "hidden_size": 128, "num_attention_heads": 8, "ffn_hidden_size": 320,
        "vocab_size": 512, "max_position_embeddings": 1024, "multi_latent_attention": True, "kv_lora_rank": 16,
        "qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 16,
    },
}  # fmt: skip
MODELS = {name: load_model(config) for name, config in _CONFIGS.items()}
ALL = (LLAMA, GPT2, MIXTRAL, *MODELS.values())
_MORE: dict[str, tuple[Any, ...]] = {
    "zero": (0, 1), "shard_group": (1, 2, 4, 8), "ep": (1, 2, 4), "etp": (1, 2), "cp": (1, 2, 4),
    "cp_comm_type": ("p2p", "all_gather", "a2a", "a2a+p2p"), "cp_exchange_size": (2,),
    "tp": (1, 2, 4), "pp": (1, 2, 4, 8), "virtual_stages": (2, 4),
    "schedule": ("interleaved", "1f1b"), "first_stage_layers": (1, 2, 3), "last_stage_layers": (1, 2, 3),
    "precision": ("bf16-mixed", "fp16-mixed", "fp32"), "fp8_recipe": ("delayed", "blockwise"), "fp8_param_gather": (True,),
    "grad_dtype": ("bf16", "fp16", "fp32"),
    "optimizer": ("adam", "adamw", "muon"),
    "recompute": ("full", "selective"), "recompute_layers": (1, 2, 3, 7), "sequence_parallel": (True, False),
    "attention": ("sdpa", "flash", "unfused", "eager"), "cross_entropy": ("vocab-parallel", "vocab-parallel-fused", "fused"),
    "te_workspaces": (0, 1, 4, 5, 8), "cublas_workspace_config": (":4096:8",),
    "gradient_accumulation_fusion": (False, True), "attention_mask_in_dataloader": (False, True),
    "clip_grad_norm": (True,), "gpu": ("h100-80gb", "a100-40gb"), "gpus_per_node": (4,), "seq_len": (64, 256, 1024),
    "stage_layers": ("5,3", "1,3,3,1", "2,1,1,4", "1,2,1,4"), "microbatch_group_size": (2, 3, 4, 8),
    "wgrad_deferral_limit": (0, 3),
    "recompute_modules": ("core_attn,mlp", "layernorm,moe_act", "mla_up_proj", "moe"),
    "offload_modules": ("core_attn", "core_attn,attn_proj,expert_fc1", "attn_norm,core_attn"),
    "micro_batch_size": (2, 4), "pp_rank": (0, 1), "memory_efficiency": (0.5,), "expert_imbalance": (1.5,),
}  # fmt: skip
_TOGETHER = {
    "cp_exchange_size": {"cp": 4, "cp_comm_type": "a2a+p2p"},
    "schedule": {"virtual_stages": 2},
    "virtual_stages": {"schedule": "interleaved"},
}
"""The options that memcalc takes only with another one."""


def more_setups() -> Iterator[tuple[Setup, Model]]:
    """Yield random setups with more of Megatron's options."""
    chance = random.Random(7)
    while True:
        model = chance.choice(ALL)
        gpus = chance.choice((1, 4, 8, 16, 64))
        options: dict[str, Any] = {"engine": "megatron", "gpus": gpus, "seq_len": 128, "global_batch_size": 64 * gpus}
        for name in chance.sample(sorted(_MORE), chance.randrange(4, len(_MORE))):
            more = {**options, name: chance.choice(_MORE[name])}
            if name == "schedule" and more[name] == "1f1b":
                continue
            more |= {key: value for key, value in _TOGETHER.get(name, {}).items() if key not in options}
            if setup_of(more, model) is not None:
                options = more
        setup = setup_of(options, model)
        assert setup is not None
        yield setup, model


MORE_SETUPS = Stream(more_setups())


def setups(count: int) -> list[tuple[Setup, Model]]:
    """Random setups that memcalc takes, always the same ones: those of all writers, and ones with more of Megatron's
    options."""
    no_megatron_type = ALL[:-1]  # which takes no adapters
    return [*drawn("megatron", count // 2, no_megatron_type), *MORE_SETUPS.first(count - count // 2)]


def made(model: Model = LLAMA, **options: Any) -> Written:
    """A setup that memcalc takes, as it is written."""
    setup = setup_of({"engine": "megatron", **options}, model)
    assert setup is not None
    return write(setup, model)


def flags_of(out: Written) -> dict[str, str | None]:
    """The options with their values as a shell takes them; None for a switch."""
    lines = [shlex.split(line) for line in out.text.splitlines()]
    assert all(len(line) in (1, 2) for line in lines)
    return {line[0]: line[1] if len(line) == 2 else None for line in lines}


def again(out: Written, setup: Setup, file: Path, without: str = "") -> tuple[Setup, Model]:
    """The setup and the model that the arguments mean with the options that they cannot say, but for one."""
    file.write_text(out.text)
    unsaid = {name: getattr(setup, name) for name in out.unsaid if name != without}
    found, options, _ = merged(None, {"megatron_args": str(file), **unsaid})
    model = load_model(found)
    return resolve(check_options(options), model), model


def gpt_model(model: Model, setup: Setup) -> Architecture:
    """The GPTModel without what no layer of it uses, with the rows of the embedding that Megatron pads it to."""
    a = architecture_of(model.model_type, model.program.config)
    a = replace(a, vocab=padded_vocab(a.vocab, setup.tp))
    if a.experts is not None and not a.experts.dense:
        a = replace(a, ffn=0)
    if a.latent is not None:
        a = replace(a, head_dim=0)
    if setup.attention not in ("eager", "unfused"):  # a fused kernel makes its mask again
        a = replace(a, attention_dropout=0.0)
    return a


def refusal(setup: Setup, model: Model = LLAMA) -> str:
    with pytest.raises(InputError) as caught:
        write(setup, model)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_is_written_is_read_as_the_same_setup_and_model(tmp_path: Path) -> None:
    seen: set[str] = set()
    for setup, model in setups(500):
        out = write(setup, model)
        same, same_model = again(out, setup, tmp_path / "args.txt")
        assert same == setup
        assert gpt_model(same_model, setup) == gpt_model(model, setup)
        assert all(why and "\n" not in why for why in out.unsaid.values())
        seen |= {*flags_of(out), model.model_type}
    rare = {
        "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split", "--cp-comm-type",
        "--num-virtual-stages-per-pipeline-rank", "--num-distributed-optimizer-instances", "--grad-reduce-in-bf16",
        "--accumulate-allreduce-grads-in-fp32", "--expert-tensor-parallel-size", "--recompute-num-layers", "--transformer-impl",
        "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers", "--cross-entropy-loss-fusion",
        "megatron_gpt", "deepseek_v3", "qwen3_moe",
    }  # fmt: skip
    assert rare <= seen


def test_no_option_is_named_without_need(tmp_path: Path) -> None:
    for setup, model in setups(60):
        out = write(setup, model)
        for name in {*out.unsaid} - {"gpus", "gpu"}:
            try:
                assert again(out, setup, tmp_path / "args.txt", without=name)[0] != setup, name
            except InputError:
                continue


def test_the_options_are_those_of_megatrons_parser() -> None:
    for setup, model in setups(200):
        for flag, value in flags_of(write(setup, model)).items():
            name = flag.removeprefix("--")
            assert name in KNOWN
            assert name in (SWITCHES if value is None else SINGLE | SEVERAL)


def test_what_is_modelled_is_read_without_notes() -> None:
    shown: set[str] = set()
    for setup, model in setups(200):
        shown |= {note.split(" ")[0] for note in read(*arguments_of(write(setup, model).text)).notes}
    # kernels besides local attention, experts one by one
    known = ("--transformer-impl", "--moe-grouped-gemm", "--tp-comm-overlap:")
    assert shown <= {*known}


def test_the_arguments_of_a_model() -> None:
    out = made(
        memcalc.load_model("llama-3-8b"), gpus=32, tp=4, pp=2, zero=1, global_batch_size=64, seq_len=8192, recompute="full",
        recompute_layers=8, clip_grad_norm=True,
    )  # fmt: skip
    assert out.unsaid == {"gpus": "the launcher says it: torchrun --nnodes --nproc-per-node"}
    assert (
        out.text
        == """--num-layers 32
--hidden-size 4096
--num-attention-heads 32
--group-query-attention
--num-query-groups 8
--ffn-hidden-size 14336
--normalization RMSNorm
--swiglu
--disable-bias-linear
--hidden-dropout 0.0
--attention-dropout 0.0
--position-embedding-type rope
--max-position-embeddings 8192
--tokenizer-type NullTokenizer
--vocab-size 128256
--untie-embeddings-and-output-weights
--tensor-model-parallel-size 4
--pipeline-model-parallel-size 2
--sequence-parallel
--micro-batch-size 1
--global-batch-size 64
--seq-length 8192
--use-distributed-optimizer
--clip-grad 1.0
--bf16
--recompute-granularity full
--recompute-method block
--recompute-num-layers 8
--attention-backend fused
"""
    )


def test_experts_and_latents() -> None:
    flags = flags_of(made(MODELS["deepseek_v3"], gpus=8, ep=4, tp=2, etp=1))
    expected = {
        "--multi-latent-attention": None, "--qk-layernorm": None, "--q-lora-rank": "32", "--kv-lora-rank": "16",
        "--qk-head-dim": "16", "--qk-pos-emb-head-dim": "8", "--v-head-dim": "16", "--num-experts": "8",
        "--moe-layer-freq": "[0]*3+[1]*5", "--moe-ffn-hidden-size": "64", "--moe-shared-expert-intermediate-size": "64",
        "--moe-router-topk": "2", "--moe-router-pre-softmax": None, "--moe-router-score-function": "sigmoid",
        "--moe-router-enable-expert-bias": None, "--moe-router-num-groups": "4", "--moe-router-group-topk": "2",
        "--moe-router-topk-scaling-factor": "2.5", "--expert-model-parallel-size": "4",
        "--expert-tensor-parallel-size": "1",
    }  # fmt: skip
    assert expected.items() <= flags.items()
    assert "--group-query-attention" not in flags


@pytest.mark.parametrize(
    ("vocabulary", "tp", "size"),
    [(512, 1, "511"), (513, 1, "513"), (50257, 2, "50257"), (50304, 1, "50303"), (50304, 2, "50304"), (511, 1, "511")],
)
def test_a_vocabulary_has_the_same_rows_in_every_version(vocabulary: int, tp: int, size: str) -> None:
    model = load_model({**_CONFIGS["qwen2"], "vocab_size": vocabulary})
    assert flags_of(made(model, gpus=tp, tp=tp))["--vocab-size"] == size
    rows = padded_vocab(vocabulary, tp)
    assert {padded_vocab(int(size) + extra, tp) for extra in (0, 1)} == {rows}


@pytest.mark.parametrize(
    ("layers", "options", "expected"),
    [
        (8, {}, set()),
        (7, {}, {"--account-for-loss-in-pipeline-split"}),
        (6, {}, {"--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"}),
        (7, {"last_stage_layers": 1}, {"--decoder-last-pipeline-num-layers"}),
        (8, {"stage_layers": "3,2,1,2"}, {"--pipeline-model-parallel-layout"}),
        (8, {"stage_layers": "3,2,2,1"}, {"--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"}),
        (8, {"stage_layers": "2,2,2,2"}, set()),
        (8, {"virtual_stages": 2, "schedule": "interleaved"}, {"--num-virtual-stages-per-pipeline-rank"}),
        (
            7,
            {"virtual_stages": 2, "schedule": "interleaved"},
            {"--num-virtual-stages-per-pipeline-rank", "--account-for-loss-in-pipeline-split"},
        ),
    ],
)
def test_stages(layers: int, options: dict[str, Any], expected: set[str]) -> None:
    model = load_model({**_SIZES, "model_type": "llama", "num_hidden_layers": layers})
    written = flags_of(made(model, gpus=4, pp=4, global_batch_size=4, **options))
    assert {flag for flag in written if "pipeline" in flag} - {"--pipeline-model-parallel-size"} == expected


def test_positions_are_at_least_those_of_a_sequence() -> None:
    assert flags_of(made(seq_len=8192))["--max-position-embeddings"] == "8192"
    assert flags_of(made(seq_len=64))["--max-position-embeddings"] == "4096"
    assert flags_of(made(GPT2))["--max-position-embeddings"] == "1024"


@pytest.mark.parametrize(
    ("options", "formats"),
    [
        ({"engine": "none", "gpus": 1}, "accelerate, torchtitan"),
        ({"engine": "ddp", "gpus": 2}, "accelerate, torchtitan"),
        ({"engine": "fsdp2", "gpus": 2}, "accelerate, torchtitan"),
        ({"engine": "deepspeed", "gpus": 2}, "deepspeed, accelerate"),
    ],
)
def test_other_engines_are_refused(options: dict[str, Any], formats: str) -> None:
    setup = setup_of(options, LLAMA)
    assert setup is not None
    assert refusal(setup) == (
        f"--engine {setup.engine}: is not what Megatron-LM's arguments describe; allowed: megatron, or memcalc emit {formats}"
    )


def test_what_megatron_lacks_is_refused() -> None:
    setup = setup_of({"engine": "megatron", "gpus": 2, "pp": 2, "schedule": "gpipe"}, LLAMA)
    assert setup is not None
    assert refusal(setup) == "--schedule gpipe: is no schedule of Megatron-LM's; allowed: 1f1b, interleaved"
    one = load_model({**_SIZES, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 1})
    setup = setup_of({"engine": "megatron"}, one)
    assert setup is not None
    assert "--engine megatron: Megatron refuses a softmax over the one expert" in refusal(setup, one)
