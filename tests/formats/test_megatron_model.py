"""The models of Megatron-LM's arguments: their parameters are those of Megatron-Core's own GPTModel."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import pytest

from memcalc import InputError, estimate, load_model
from memcalc.formats.megatron import arguments_of, read
from memcalc.formats.megatron_vocabulary import padded

LLAMA = "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope"
SIZES = "--num-layers 4 --hidden-size 128 --num-attention-heads 8 --max-position-embeddings 256 --seq-length 128"
LATENT = (
    "--multi-latent-attention --qk-layernorm --kv-lora-rank 32 --qk-head-dim 16 --v-head-dim 16 --qk-pos-emb-head-dim 8"
)
EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 64 --moe-grouped-gemm --moe-permute-fusion --moe-token-dispatcher-type alltoall"
SCALED = "--moe-router-topk-scaling-factor 2.5"
GROUPS = "--moe-router-num-groups 2 --moe-router-group-topk 1"
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"


def model_of(text: str) -> dict[str, Any]:
    model = read(*arguments_of(text)).model
    assert model is not None
    return model.value


def notes_of(text: str) -> str:
    return "\n".join(read(*arguments_of(text)).notes)


def parameters(text: str) -> int:
    return load_model(model_of(text)).num_parameters


# --- the oracle


def real_parameters(text: str) -> int:
    """Count the parameters of the GPTModel that the arguments mean, with fields named as the arguments."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("megatron.core")
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
    from megatron_oracle import one_rank
    from torch._subclasses.fake_tensor import FakeTensorMode

    class Core(torch.nn.Module):
        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__()

    given = dict(arguments_of(text)[1])
    numbers = {name: int(value) for name, value in given.items() if isinstance(value, str) and value.isdigit()}
    latent, count = bool(given.get("multi_latent_attention")), numbers.get("num_experts")
    names = (
        "num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "kv_channels", "q_lora_rank",
        "kv_lora_rank", "qk_head_dim", "v_head_dim", "qk_pos_emb_head_dim", "moe_ffn_hidden_size", "moe_router_topk",
        "moe_shared_expert_intermediate_size",
    )  # fmt: skip
    fields: dict[str, Any] = {name: numbers[name] for name in names if name in numbers}
    freq = given.get("moe_layer_freq", 1)
    fields |= {
        "num_query_groups": numbers.get("num_query_groups", 1) if given.get("group_query_attention") else None,
        "num_moe_experts": count,
        "moe_layer_freq": eval(freq) if isinstance(freq, str) else freq,  # of this file
        "moe_shared_expert_gate": bool(given.get("moe_shared_expert_gate")),
        "moe_router_pre_softmax": bool(given.get("moe_router_pre_softmax")),
        "normalization": given.get("normalization", "LayerNorm"),
        "gated_linear_unit": bool(given.get("swiglu")),
        "activation_func": torch.nn.functional.silu if given.get("swiglu") else torch.nn.functional.gelu,
        "add_bias_linear": not given.get("disable_bias_linear"),
        "add_qkv_bias": bool(given.get("add_qkv_bias")) or not given.get("disable_bias_linear"),
        "qk_layernorm": bool(given.get("qk_layernorm")),
        **({"multi_latent_attention": True, "rope_type": "rope"} if latent else {}),
    }  # fmt: skip
    if given.get("swiglu") and "ffn_hidden_size" not in fields:
        fields["ffn_hidden_size"] = int((4 * fields["hidden_size"] * 2 / 3) / 64) * 64
    tokens = {"NullTokenizer": numbers.get("vocab_size", 0) + 1}.get(given.get("tokenizer_type", ""), 50257)
    rows = numbers.get("padded_vocab_size") or padded(tokens, numbers.get("make_vocab_size_divisible_by", 128))
    with (
        one_rank(1),
        mock.patch.object(LocalSpecProvider, "core_attention", lambda _self: Core),
        mock.patch.object(multi_latent_attention, "HAVE_TE", False),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        config = (MLATransformerConfig if latent else TransformerConfig)(
            **fields, use_cpu_initialization=True, perform_initialization=False, bias_activation_fusion=False,
            gradient_accumulation_fusion=False, apply_rope_fusion=False, masked_softmax_fusion=False,
            persist_layer_norm=False,
        )  # fmt: skip
        if count:
            spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=config.normalization)
        else:
            spec = get_gpt_layer_local_spec(
                None, False, config.qk_layernorm, latent, normalization=config.normalization
            )
        model = GPTModel(
            config, spec, rows, numbers["max_position_embeddings"],
            share_embeddings_and_output_weights=not given.get("untie_embeddings_and_output_weights"),
            position_embedding_type=given.get("position_embedding_type", "learned_absolute"),
        )  # fmt: skip
        return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("model_type", "more"),
    [
        ("gpt2", ""),
        ("gpt2", "--untie-embeddings-and-output-weights --ffn-hidden-size 320 --padded-vocab-size 1024"),
        ("llama", LLAMA),
        ("llama", f"{LLAMA} --untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2"),
        ("llama", f"{LLAMA} --group-query-attention --tokenizer-type NullTokenizer --vocab-size 1000"),
        ("mistral", f"{LLAMA} --kv-channels 32 --make-vocab-size-divisible-by 256"),
        ("qwen2", f"{LLAMA} --add-qkv-bias --ffn-hidden-size 192"),
        ("qwen3", f"{LLAMA} --qk-layernorm --kv-channels 32"),
        ("mixtral", f"{LLAMA} {EXPERTS} --group-query-attention --num-query-groups 4"),
        ("qwen2_moe", f"{LLAMA} {EXPERTS} --moe-shared-expert-intermediate-size 96 --moe-shared-expert-gate"),
        ("qwen2_moe", f"{LLAMA} {EXPERTS} --add-qkv-bias --moe-router-pre-softmax --moe-layer-freq ([0]*1+[1]*3) "
         "--moe-shared-expert-intermediate-size 96 --moe-shared-expert-gate"),
        ("qwen3_moe", f"{LLAMA} {EXPERTS} --qk-layernorm --moe-layer-freq 2"),
        ("deepseek_v2", f"{LLAMA} {LATENT} {EXPERTS} {SCALED} --moe-router-pre-softmax --q-lora-rank 48 "
         "--moe-layer-freq ([0]*2+[1]*2)"),
        ("deepseek_v2", f"{LLAMA} {LATENT} --q-lora-rank 48"),
        ("deepseek_v3", f"{LLAMA} {LATENT} {EXPERTS} {SCALED} {GROUPS} --q-lora-rank 48 "
         "--moe-router-score-function sigmoid --moe-shared-expert-intermediate-size 128"),
        ("megatron_gpt", "--swiglu"),
        ("megatron_gpt", "--normalization RMSNorm --ffn-hidden-size 320 --untie-embeddings-and-output-weights"),
        ("megatron_gpt", "--disable-bias-linear --position-embedding-type rope"),
        ("megatron_gpt", "--disable-bias-linear --add-qkv-bias --qk-layernorm"),
        ("megatron_gpt", "--qk-layernorm --group-query-attention --num-query-groups 2 --kv-channels 32"),
        ("megatron_gpt", f"{LLAMA.replace('--disable-bias-linear ', '')} --padded-vocab-size 1024"),
        ("megatron_gpt", f"{LLAMA.replace('RMSNorm', 'LayerNorm')} --qk-layernorm"),
        ("megatron_gpt", f"{LLAMA.replace('rope', 'learned_absolute')} --group-query-attention --num-query-groups 4"),
        ("megatron_gpt", f"{LLAMA} --qk-layernorm --add-qkv-bias"),
        ("megatron_gpt", f"{LLAMA} {EXPERTS}  --moe-router-score-function sigmoid --moe-layer-freq 2"),
        ("megatron_gpt", f"{LLAMA} {EXPERTS} --qk-layernorm --moe-shared-expert-intermediate-size 64"),
        ("megatron_gpt", f"{LLAMA} {EXPERTS} --moe-layer-freq ([0]*1+[1]*3)"),
        ("megatron_gpt", f"{LLAMA} {EXPERTS} --qk-layernorm --moe-shared-expert-intermediate-size 96 "
         "--moe-shared-expert-gate"),
        ("megatron_gpt", f"--disable-bias-linear {EXPERTS} --moe-shared-expert-intermediate-size 96"),
        ("megatron_gpt", f"{LATENT.replace('--qk-layernorm ', '')} --q-lora-rank 48"),
        ("megatron_gpt", f"{LATENT} --disable-bias-linear --q-lora-rank 48"),
        ("megatron_gpt", f"{LLAMA} {LATENT.replace('--qk-layernorm ', '')} --q-lora-rank 48"),
        ("megatron_gpt", f"{LLAMA} {LATENT} {EXPERTS} --q-lora-rank 48 --moe-layer-freq ([1]*2+[0]*2) "
         "--moe-shared-expert-intermediate-size 65"),
    ],
)  # fmt: skip
def test_parameters_equal_those_of_gpt_model(model_type: str, more: str) -> None:
    text = f"{SIZES} --bf16 {NO_DROPOUT} {more}"
    assert model_of(text)["model_type"] == model_type
    assert parameters(text) == real_parameters(text)


def random_arguments(choice: random.Random) -> str:
    heads, width = choice.choice((4, 8)), choice.choice((16, 32))
    text = f"--num-layers {choice.randint(2, 5)} --hidden-size {heads * width} --num-attention-heads {heads}"
    text += " --max-position-embeddings 128 --bf16"
    for one in (
        "--untie-embeddings-and-output-weights", "--ffn-hidden-size 192", "--padded-vocab-size 2048", "--swiglu",
        "--normalization RMSNorm", "--position-embedding-type rope", "--kv-channels 64", "--qk-layernorm", "--add-qkv-bias",
        "--group-query-attention --num-query-groups 2", NO_DROPOUT,
    ):  # fmt: skip
        text += choice.choice(("", f" {one}"))
    if choice.random() < 0.5:
        return text
    text += " --disable-bias-linear"
    if choice.random() < 0.6:
        text += f" {EXPERTS} --moe-layer-freq {choice.choice((1, 2, 3))}"
        text += choice.choice(("", " --moe-shared-expert-intermediate-size 64"))
    return text


@pytest.mark.parametrize("seed", range(24))
def test_parameters_of_random_arguments(seed: int) -> None:
    text = random_arguments(random.Random(seed))
    assert parameters(text) == real_parameters(text)


# --- what each type has


def test_the_fields_of_each_type() -> None:
    assert model_of(SIZES) == {
        "model_type": "gpt2", "n_layer": 4, "n_embd": 128, "n_head": 8, "n_inner": 512, "n_positions": 256,
        "vocab_size": 50304, "activation_function": "gelu_new", "resid_pdrop": 0.1, "embd_pdrop": 0.1,
        "attn_pdrop": 0.1, "tie_word_embeddings": True,
    }  # fmt: skip
    assert model_of(f"{SIZES} {LLAMA} {NO_DROPOUT} --ffn-hidden-size 320") == {
        "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 128, "num_attention_heads": 8,
        "num_key_value_heads": 8, "head_dim": 16, "intermediate_size": 320, "vocab_size": 50304,
        "max_position_embeddings": 256, "tie_word_embeddings": True, "hidden_act": "silu",
    }  # fmt: skip
    mixtral = model_of(f"{SIZES} {LLAMA} {NO_DROPOUT} {EXPERTS} --moe-router-topk 1")
    assert (mixtral["num_local_experts"], mixtral["num_experts_per_tok"], mixtral["intermediate_size"]) == (4, 1, 64)
    latent = model_of(f"{SIZES} {LLAMA} {NO_DROPOUT} {LATENT} {EXPERTS} --moe-router-score-function sigmoid {GROUPS} {SCALED}"
                      " --moe-layer-freq ([0]*1+[1]*3)")  # fmt: skip
    assert (latent["n_group"], latent["topk_group"], latent["first_k_dense_replace"]) == (2, 1, 1)
    assert latent["q_lora_rank"] is None
    own = model_of(f"{SIZES} --swiglu --qk-layernorm")
    assert own == {
        "model_type": "megatron_gpt", "num_layers": 4, "hidden_size": 128, "num_attention_heads": 8, "num_query_groups": 8,
        "kv_channels": 16, "ffn_hidden_size": 320, "vocab_size": 50304, "max_position_embeddings": 256,
        "position_embedding_type": "learned_absolute", "normalization": "LayerNorm", "swiglu": True,
        "add_bias_linear": True, "add_qkv_bias": False, "qk_layernorm": True, "untie_embeddings_and_output_weights": False,
        "hidden_dropout": 0.1, "attention_dropout": 0.1,
    }  # fmt: skip


def test_names_of_parsed_arguments_are_read_too() -> None:
    parsed = {
        "num_layers": 4, "hidden_size": 128, "num_attention_heads": 8, "max_position_embeddings": 256, "swiglu": True,
        "normalization": "RMSNorm", "add_bias_linear": False, "position_embedding_type": "rope", "num_experts": None,
        "group_query_attention": False, "num_query_groups": 1, "untie_embeddings_and_output_weights": False,
        "hidden_dropout": 0.0, "attention_dropout": 0.0,
    }  # fmt: skip
    found = read("", parsed).model
    assert found is not None
    assert found.value == {**model_of(f"{SIZES} {LLAMA} {NO_DROPOUT}"), "intermediate_size": 320}


def test_no_arguments_of_a_model() -> None:
    assert read(*arguments_of("--tensor-model-parallel-size 2 --bf16")).model is None
    assert read(*arguments_of(f"{SIZES} --swiglu"), with_model=False).model is None


def test_the_model_is_estimated_as_megatron_runs_it() -> None:
    found = read(
        *arguments_of(f"{SIZES} {LLAMA} {NO_DROPOUT} --bf16 --micro-batch-size 1 --tensor-model-parallel-size 2")
    )
    assert found.model is not None
    report = estimate(load_model(found.model.value), gpus=2, **{name: v.value for name, v in found.options.items()})
    setup = report.to_dict()["setup"]
    assert (setup["engine"], setup["kernels"], setup["tp"], setup["sequence_parallel"]) == (
        "megatron",
        "megatron",
        2,
        False,
    )
    assert found.notes == ()


# --- vocabularies


@pytest.mark.parametrize(
    ("more", "rows", "note"),
    [
        ("", 50304, ""),
        ("--tensor-model-parallel-size 8", 51200, ""),
        ("--tokenizer-type GPT2BPETokenizer --vocab-size 7", 50304, ""),
        ("--tokenizer-type NullTokenizer --vocab-size 131071", 131072, ""),
        ("--tokenizer-type NullTokenizer --vocab-size 131072", 131200, "counted with 131073 tokens"),
        ("--vocab-file vocab.json --merge-file merges.txt", 50304, ""),
        ("--vocab-file vocab.json $DATA_ARGS", 50304, ""),
        ("--tokenizer-type TikTokenizer", 131072, ""),
        ("--tokenizer-type TikTokenizer --vocab-size 200000", 200064, ""),
        ("--tokenizer-type Llama2Tokenizer", 32000, "Llama 2's 32000"),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model x --vocab-size 128256", 128256, ""),
        ("--padded-vocab-size 99968 --tokenizer-type HuggingFaceTokenizer", 99968, ""),
        ("--make-vocab-size-divisible-by 1", 50257, "counted with 50304"),
        ("--vocab-size 1000 --no-pad-vocab-size", 1000, "counted with 1024"),
    ],
)
def test_vocabularies(more: str, rows: int, note: str) -> None:
    assert model_of(f"{SIZES} {more}")["vocab_size"] == rows
    assert note in notes_of(f"{SIZES} {LLAMA} {NO_DROPOUT} {more}")
    if not note:
        assert "token" not in notes_of(f"{SIZES} {LLAMA} {NO_DROPOUT} {more}")


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model x", "--tokenizer-type HuggingFaceTokenizer"),
        ("--tokenizer-model x", "--tokenizer-model x"),
        ("--patch-tokenizer-type Qwen2Tokenizer", "--patch-tokenizer-type Qwen2Tokenizer"),
        ("--tokenizer-type NullTokenizer", "--tokenizer-type NullTokenizer"),
        ("--tokenizer-type BertWordPieceLowerCase", "BertWordPieceLowerCase"),
        ("--vocab-file bert/vocab.txt", "--vocab-file bert/vocab.txt: is without --merge-file, as for BERT or T5"),
        ("$DATA_ARGS", "--tokenizer-type: is missing, and $DATA_ARGS may have it"),
    ],
)
def test_a_vocabulary_that_is_not_known_is_refused(more: str, named: str) -> None:
    with pytest.raises(InputError) as error:
        read(*arguments_of(f"{SIZES} --bf16 {more}"))
    assert named in str(error.value)


# --- refusals


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (LLAMA.replace("rope", "mrope"), "--position-embedding-type 'mrope'"),
        (LLAMA.replace("rope", "alibi"), "--position-embedding-type 'alibi'"),
        (f"{LLAMA} --squared-relu", "--squared-relu: Megatron refuses it beside --swiglu"),
        ("--squared-relu --num-experts 4", "--squared-relu: experts with it are not modelled"),
        ("--quick-geglu", "--quick-geglu"),
        ("--num-experts 4", "--num-experts 4"),
        (f"{LLAMA} --hybrid-layer-pattern M-M*", "--hybrid-layer-pattern M-M*"),
        (f"{LLAMA} --attention-output-gate", "--attention-output-gate"),
        (f"{LLAMA} --softmax-type learnable", "--softmax-type learnable"),
        (f"{LLAMA} --spec a.b c", "--spec a.b c"),
        (f"{LLAMA} {EXPERTS} --moe-layer-freq ([0]*1+[1]*4)", "--moe-layer-freq"),
        (f"{LLAMA} {EXPERTS} --moe-layer-freq __import__('os')[0]", "--moe-layer-freq"),
        (f"{LLAMA} {EXPERTS} --moe-router-topk 5", "--moe-router-topk 5"),
        (f"{LLAMA} {LATENT} --add-qkv-bias", "--add-qkv-bias"),
        (f"{LLAMA} --num-query-groups 3 --group-query-attention", "--num-query-groups"),
        ("--decoder-num-layers 4", "--decoder-num-layers 4"),
        ("--decoder-seq-length 128", "--decoder-seq-length 128"),
        ("--vocab-extra-ids 100", "--vocab-extra-ids 100"),
        ("--bert-no-binary-head", "--bert-no-binary-head: BERT"),
        ("--img-h 336 --img-w 336", "--img-h 336: models with images"),
        ("--prompts Hello", "--prompts Hello: nothing is trained; allowed: memcalc infer"),
        ("--hidden-dropout 1", "--hidden-dropout '1'"),
        ("--vision-model-type clip", "--vision-model-type clip"),
    ],
)  # fmt: skip
def test_a_model_that_no_type_has_is_refused_by_name(more: str, named: str) -> None:
    with pytest.raises(InputError) as error:
        read(*arguments_of(f"{SIZES} {more}"))
    assert str(error.value).startswith("--megatron-args: ")
    assert named in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (SIZES.replace("--num-layers 4", ""), "--num-layers: is missing"),
        (SIZES.replace("--hidden-size 128", ""), "--hidden-size: is missing"),
        (SIZES.replace("--num-attention-heads 8", "--use-checkpoint-args"), "--use-checkpoint-args"),
        (SIZES.replace("--max-position-embeddings 256", ""), "--max-position-embeddings: is missing"),
        (SIZES.replace("--num-layers 4", "--num-layers $LAYERS"), "--num-layers '$LAYERS'"),
        (SIZES.replace("--num-layers 4", "--num-layers 4.5"), "--num-layers '4.5'"),
        (SIZES.replace("--num-attention-heads 8", "--num-attention-heads 7"), "--num-attention-heads '7'"),
    ],
)
def test_sizes_that_are_missing_or_wrong(text: str, named: str) -> None:
    with pytest.raises(InputError) as error:
        read("run.sh", arguments_of(text)[1])
    assert str(error.value).startswith("--megatron-args run.sh: ")
    assert named in str(error.value)


def test_a_script_of_another_model_is_refused() -> None:
    with pytest.raises(InputError, match="pretrain_bert"):
        read(*arguments_of(f"torchrun --nproc-per-node 8 pretrain_bert.py {SIZES}"))


# --- dropout


def test_dropout_is_the_models() -> None:
    gpt2 = model_of(f"{SIZES} --hidden-dropout 0.2 --attention-dropout 0")
    assert (gpt2["resid_pdrop"], gpt2["embd_pdrop"], gpt2["attn_pdrop"]) == (0.2, 0.2, 0)
    own = model_of(f"{SIZES} {LLAMA} --bf16")
    assert (own["model_type"], own["hidden_dropout"], own["attention_dropout"]) == ("megatron_gpt", 0.1, 0.1)
    of_attention = f"{SIZES} {LLAMA} --bf16 --hidden-dropout 0"
    assert model_of(of_attention)["model_type"] == "llama"  # a fused kernel keeps no mask
    assert model_of(f"{of_attention} --attention-backend unfused")["model_type"] == "megatron_gpt"
    assert "dropout" not in notes_of(f"{SIZES} {LLAMA} --bf16")


def test_dropout_is_noted_with_deepspeed() -> None:
    """Megatron-DeepSpeed's GPTModel is modelled for types of transformers."""
    text = f"{SIZES} {LLAMA} --bf16 --deepspeed --no-pipeline-parallel"
    assert model_of(text)["model_type"] == "llama"
    assert "--hidden-dropout 0.1, its default: dropout masks" in notes_of(text)
    assert "--attention-dropout" not in notes_of(text)


def test_other_engines_refuse_what_transformers_does_not_have() -> None:
    model = load_model(model_of(f"{SIZES} --swiglu"))
    assert estimate(model, seq_len=128).setup.engine == "megatron"
    for options in ({"engine": "none"}, {"engine": "fsdp2", "gpus": 2, "zero": 3}, {"engine": "ddp", "gpus": 2}):
        with pytest.raises(InputError, match=rf"--engine {options['engine']}: .*GPTModel; allowed: megatron"):
            estimate(model, seq_len=128, **options)
    with pytest.raises(InputError, match=r"--task sft: .*allowed: pretrain"):
        estimate(model, seq_len=128, task="sft")
