"""Estimates from traces, and small models of types and classes that have no program."""

from __future__ import annotations

from typing import Any

import memcalc
from memcalc.inputs.model import Model
from memcalc.tracing.program import Traced

BLOOM = {"model_type": "bloom", "hidden_size": 64, "n_layer": 3, "n_head": 4, "vocab_size": 128,
         "hidden_dropout": 0.0, "attention_dropout": 0.0}  # fmt: skip
GPTJ = {"model_type": "gptj", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 128,
        "rotary_dim": 8, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}  # fmt: skip
MAMBA = {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "time_step_rank": 4,
         "vocab_size": 100}  # fmt: skip
DEEPSEEK_V3 = {"model_type": "deepseek_v3", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
               "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 128, "n_routed_experts": 8,
               "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 48,
               "first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
               "qk_nope_head_dim": 16, "v_head_dim": 16}  # fmt: skip
BART = {"model_type": "bart", "d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 96,
        "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 96, "max_position_embeddings": 64,
        "vocab_size": 128, "pad_token_id": 1, "eos_token_id": 2, "bos_token_id": 0, "dropout": 0.0,
        "architectures": ["BartForCausalLM"]}  # fmt: skip
T5 = {"model_type": "t5", "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "vocab_size": 128,
      "dropout_rate": 0.0, "decoder_start_token_id": 0}  # fmt: skip
ROBERTA = {"model_type": "roberta", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
           "intermediate_size": 96, "max_position_embeddings": 66, "vocab_size": 128, "hidden_dropout_prob": 0.0,
           "attention_probs_dropout_prob": 0.0, "architectures": ["RobertaForMaskedLM"]}  # fmt: skip


def traced(fields: dict[str, Any]) -> Model:
    """The model without its program, if there is one."""
    return Model(fields["model_type"], fields["model_type"], Traced("it", fields["model_type"], fields))


def parameter_rows(report: memcalc.Report) -> list[tuple[object, ...]]:
    """Names and bytes of the parameters, as they are reported."""
    return sorted((i.name, i.nbytes, i.at_peak, i.dtype) for i in report.items if i.component == "parameters")
