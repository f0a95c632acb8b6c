"""Models whose whole process under DeepSpeed is recorded, and the rank that a replay is of."""

from __future__ import annotations

import memcalc
from memcalc.engines.deepspeed.zero_layout import partitions

LLAMA = {"model_type": "llama", "num_hidden_layers": 3, "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632,
         "num_attention_heads": 16, "num_key_value_heads": 8}  # fmt: skip
DEEP = LLAMA | {"num_hidden_layers": 8, "hidden_size": 512, "intermediate_size": 1408}
GPT2 = {"model_type": "gpt2", "n_layer": 3, "n_embd": 1024, "n_head": 16, "vocab_size": 50257, "n_positions": 1024,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip
MIXTRAL = {"model_type": "mixtral", "num_hidden_layers": 3, "vocab_size": 8000, "hidden_size": 512, "intermediate_size": 896,
           "num_attention_heads": 8, "num_key_value_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2}  # fmt: skip
SMALL_SETS = {"sub_group_size": 10**6, "reduce_bucket_size": 3 * 10**7, "prefetch_bucket_size": 10**7,
              "max_live_parameters": 5 * 10**7, "max_reuse_distance": 5 * 10**7}  # fmt: skip


def rank_played(report: memcalc.Report) -> int:
    """The rank whose parts of the flat buffers were replayed."""
    if report.setup.zero not in (1, 2):
        return 0
    order = report.rank.holdings.order
    assert order is not None and order.scripts is not None
    model, _, own = order.scripts.args  # type: ignore[attr-defined]
    return partitions(model, report.setup.shards).index(own)
