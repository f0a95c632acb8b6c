"""The whole estimate against the whole step: transformers, autograd and torch's optimizers under fake tensors.

`forward`, `backward` and `step` are absolute: parameters, gradients, optimizer states, buffers, the batch and the loss
included. The optimizer's `step` counters of the for-loop and foreach implementations are CPU tensors on a GPU machine;
here everything is on the CPU, so the oracle counts them: 4 bytes a parameter tensor are taken off.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import training_step

import memcalc
from memcalc.core.dims import numel

LLAMA = {"model_type": "llama", "hidden_size": 96, "intermediate_size": 200, "num_hidden_layers": 7,
         "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 700, "head_dim": 24}  # fmt: skip
QWEN3 = {"model_type": "qwen3", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 6, "vocab_size": 500,
         "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32, "tie_word_embeddings": True}  # fmt: skip
GEMMA2 = {"model_type": "gemma2", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 9, "head_dim": 16,
          "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300, "sliding_window": 32}  # fmt: skip
MIXTRAL = {"model_type": "mixtral", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "vocab_size": 300,
           "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 6, "n_head": 4, "n_positions": 128, "vocab_size": 500,
        "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}  # fmt: skip
OPT = {"model_type": "opt", "hidden_size": 64, "ffn_dim": 160, "num_hidden_layers": 6, "num_attention_heads": 4,
       "max_position_embeddings": 64, "vocab_size": 500, "dropout": 0.0}  # fmt: skip
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
AUTOCAST = {"bf16-autocast": torch.bfloat16, "fp16-autocast": torch.float16}


def counters(config: dict[str, Any], optimizer: str, implementation: str) -> int:
    """Bytes of `step` tensors that are on the CPU in a run on a GPU."""
    if optimizer.startswith("sgd") or implementation == "fused":
        return 0
    model = memcalc.load_model(config)
    return 4 * sum(model.trained(weight) for weight in model.weight_classes)


def check(config: dict[str, Any], *, precision: str = "bf16", b: int = 2, s: int = 48, attention: str = "sdpa",
          recompute: str = "none", optimizer: str = "adamw", implementation: str = "foreach",
          micro_batches: int = 1, padded: bool = False) -> None:  # fmt: skip
    real = training_step(
        config, micro_batch_size=b, seq_len=s, attention=attention, dtype=DTYPES.get(precision, torch.float32),
        autocast=AUTOCAST.get(precision), recompute=recompute != "none" and recompute, optimizer=optimizer,
        implementation=implementation,
        # adafactor's step reads a value, which fake tensors have not; grouped_mm of fake tensors takes bf16 only
        micro_batches=micro_batches, padded=padded, real=optimizer == "adafactor" or config is MIXTRAL,
    )  # fmt: skip
    report = memcalc.estimate(
        config, precision=precision, micro_batch_size=b, seq_len=s, attention=attention, recompute=recompute,
        optimizer=optimizer, optimizer_implementation=implementation, global_batch_size=b * micro_batches, padded=padded,
    )  # fmt: skip
    extra = counters(config, optimizer, implementation)
    assert report.total("saved_activations") == real.saved
    assert report.phases["forward"] == real.forward - extra
    assert report.phases["backward"] == real.backward - extra
    assert report.phases["step"] == real.step - extra


@pytest.mark.parametrize("recompute", ["none", "op", "full"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_every_phase_of_llama(precision: str, attention: str, recompute: str) -> None:
    check(LLAMA, precision=precision, attention=attention, recompute=recompute)


@pytest.mark.parametrize(
    ("config", "attention", "b", "s"),
    [(QWEN3, "sdpa", 1, 40), (QWEN3, "eager", 3, 17), (GEMMA2, "eager", 2, 24), (GEMMA2, "eager", 2, 64),
     (GPT2, "sdpa", 2, 128), (GPT2, "eager", 1, 64)],
)  # fmt: skip
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_every_phase_of_its_relatives(config: dict[str, Any], attention: str, b: int, s: int, recompute: str) -> None:
    check(config, attention=attention, b=b, s=s, recompute=recompute)


@pytest.mark.parametrize(
    ("optimizer", "implementation"),
    [("adamw", "for-loop"), ("adamw", "fused"), ("adam", "foreach"), ("sgd", "foreach"), ("sgd", "for-loop"),
     ("sgd", "fused"), ("sgd-momentum", "foreach"), ("sgd-momentum", "fused"), ("adafactor", "for-loop"),
     ("adafactor", "foreach")],
)  # fmt: skip
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_every_phase_with_every_torch_optimizer(optimizer: str, implementation: str, precision: str) -> None:
    check(LLAMA, precision=precision, optimizer=optimizer, implementation=implementation, s=16)


AFMOE = {"model_type": "afmoe", "vocab_size": 90, "hidden_size": 48, "intermediate_size": 56, "num_hidden_layers": 4,
         "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 12, "num_experts": 6, "num_experts_per_tok": 2,
         "moe_intermediate_size": 40, "num_dense_layers": 1, "mup_enabled": True}  # fmt: skip


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
@pytest.mark.parametrize("precision", ["bf16", "bf16-autocast"])
def test_a_for_loop_meets_the_weights_of_unlike_layers_in_their_order(optimizer: str, precision: str) -> None:
    """Behind a weight's temporaries come those of the next one that has a gradient, which the router's bias has not."""
    check(AFMOE, precision=precision, optimizer=optimizer, implementation="for-loop", s=3)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_every_phase_with_gradients_of_earlier_micro_batches(recompute: str) -> None:
    check(LLAMA, micro_batches=2, recompute=recompute)
    check(QWEN3, micro_batches=3, recompute=recompute, precision="fp32")


@pytest.mark.parametrize(
    ("config", "attention", "s"),
    [(LLAMA, "sdpa", 48), (LLAMA, "eager", 17), (QWEN3, "sdpa", 33), (GEMMA2, "eager", 24), (GEMMA2, "eager", 64),
     (GPT2, "sdpa", 128), (OPT, "sdpa", 40)],
)  # fmt: skip
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_every_phase_of_a_padded_batch(config: dict[str, Any], attention: str, s: int, recompute: str) -> None:
    """Each with one micro-batch or with two."""
    how: dict[str, Any] = {} if recompute == "none" else {"micro_batches": 2, "optimizer": "sgd"}
    check(config, attention=attention, s=s, recompute=recompute, padded=True, **how)


T5 = {"model_type": "t5", "d_model": 64, "d_kv": 12, "d_ff": 96, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 4,
      "vocab_size": 100, "dropout_rate": 0.0, "decoder_start_token_id": 0}  # fmt: skip
BART = {"model_type": "bart", "d_model": 64, "encoder_layers": 2, "decoder_layers": 3, "encoder_ffn_dim": 96,
        "decoder_ffn_dim": 80, "encoder_attention_heads": 4, "decoder_attention_heads": 2, "vocab_size": 100,
        "max_position_embeddings": 40, "dropout": 0.0, "tie_word_embeddings": False}  # fmt: skip


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("config", [T5, BART], ids=["t5", "bart"])
def test_every_phase_of_an_encoder_and_a_decoder(config: dict[str, Any], attention: str, recompute: str) -> None:
    """T5's graph, recomputed, keeps a constant and its gradient until the next loss: saved activations are neither these nor
    less for those of the step before, which the next one replaces."""
    run: dict[str, Any] = {"attention": attention, "recompute": recompute, "s": 32}
    check(config, **run)
    check(config, micro_batches=2, optimizer="sgd", precision="fp32", **run)


RECURRENT_GEMMA = {"model_type": "recurrent_gemma", "vocab_size": 60, "pad_token_id": 0, "hidden_size": 32,
                   "intermediate_size": 48, "num_hidden_layers": 5, "num_attention_heads": 4, "lru_width": 40,
                   "attention_window_size": 8, "eos_token_id": 1, "bos_token_id": 1}  # fmt: skip


STATES = 4 * 2 * 40 * 4  # the last ones of four recurrent layers


@pytest.mark.parametrize(
    ("recompute", "precision", "micro_batches"),
    [("none", "bf16", 1), ("full", "bf16", 2), ("full", "bf16-autocast", 1), ("op", "bf16", 2)],
)
def test_every_phase_of_layers_that_keep_their_state(recompute: str, precision: str, micro_batches: int) -> None:
    """RecurrentGemma, recomputed, keeps the graphs of its states until its layers' next forward. They are buffers, no saved
    activations."""
    report = memcalc.estimate(RECURRENT_GEMMA, precision=precision, micro_batch_size=2, seq_len=9, recompute=recompute)
    left = sum(item.nbytes for item in report.items if item.life == "kept after backward")
    assert left == STATES if recompute == "none" else left > 10 * STATES
    check(RECURRENT_GEMMA, s=9, recompute=recompute, precision=precision, micro_batches=micro_batches)


def test_half_precision() -> None:
    check(LLAMA, precision="fp16")


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(("config", "attention"), [(LLAMA, "sdpa"), (QWEN3, "sdpa"), (GEMMA2, "eager"), (GPT2, "sdpa"),
                                                   (GPT2, "eager"), (MIXTRAL, "sdpa")])  # fmt: skip
def test_every_phase_under_autocast(config: dict[str, Any], attention: str, recompute: str) -> None:
    check(config, precision="bf16-autocast", attention=attention, recompute=recompute)


@pytest.mark.parametrize("recompute", ["none", "op", "full"])
def test_autocast_with_gradients_of_earlier_micro_batches(recompute: str) -> None:
    check(LLAMA, precision="bf16-autocast", micro_batches=2, recompute=recompute)
    check(QWEN3, precision="fp16-autocast", micro_batches=3, recompute=recompute, implementation="fused")


def test_autocast_names_the_copies_of_weights() -> None:
    """Every matrix but the embedding's has a copy from forward to backward; no other weight has."""
    model = memcalc.load_model(LLAMA)
    report = memcalc.estimate(model, precision="bf16-autocast", seq_len=16)
    copies = {i.name: i.nbytes for i in report.items if i.component == "saved_activations" and ".weight" in i.name}
    assert copies == {
        f"bf16 copy of {w.name}": 2 * numel(w.shape)[0] * model.copies(w)
        for w in model.weight_classes
        if len(w.shape) == 2 and w.name != "model.embed_tokens.weight"
    }
