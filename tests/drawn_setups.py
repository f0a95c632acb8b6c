"""Random setups that are written in other tools' formats, and how what was written is read again."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

from memcalc.errors import InputError
from memcalc.formats.merged import merged
from memcalc.formats.written import Written
from memcalc.inputs.model import Model, load_model
from memcalc.inputs.options import check_options
from memcalc.setup.resolved import resolve
from memcalc.setup.setup import Setup

T = TypeVar("T")
LLAMA = load_model(
    {
        "model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 8,
        "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 512, "max_position_embeddings": 4096,
    }
)  # fmt: skip
GPT2 = load_model(
    {"model_type": "gpt2", "n_embd": 128, "n_layer": 8, "n_head": 8, "vocab_size": 512, "n_positions": 1024}
)
MIXTRAL = load_model(
    {
        "model_type": "mixtral", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 8, "num_local_experts": 8, "vocab_size": 512,
        "max_position_embeddings": 4096,
    }
)  # fmt: skip
MODELS = (LLAMA, GPT2, MIXTRAL)

_ANY: dict[str, tuple[Any, ...]] = {
    "gpus": (1, 2, 4, 8, 16, 64),
    "gpus_per_node": (4, 8),
    "micro_batch_size": (1, 2, 5),
    "seq_len": (64, 512, 1024),
    "precision": ("fp32", "bf16", "fp16", "bf16-mixed", "fp16-mixed", "bf16-autocast", "fp16-autocast"),
    "grad_dtype": ("fp32", "bf16"),
    "optimizer": ("adam", "adamw", "sgd", "sgd-momentum", "lion", "adafactor", "adamw-8bit"),
    "optimizer_implementation": ("foreach", "fused", "for-loop"),
    "clip_grad_norm": (True, False),
    "recompute": ("none", "full", "op"),
    "recompute_layers": (1, 3),
    "attention": ("eager", "sdpa"),
    "cross_entropy": ("eager", "chunked", "fused"),
    "kernels": ("hf", "fused"),
    "liger": ("rope,rms_norm", "swiglu"),
    "padded": (True,),
    "expert_imbalance": (1.5,),
    "freeze": ("embeddings", "first:2"),
    "lora_rank": (8,),
    "lora_targets": ("all-linear", "q_proj,v_proj"),
    "lora_dropout": (0.0, 0.1),
    "adapter_dtype": ("fp32", "bf16"),
    "lora_bias": ("all",),
    "dora": (True,),
    "modules_to_save": ("lm_head",),
    "quantize": ("nf4", "fp4"),
    "double_quant": (True,),
    "prepare_kbit_training": (True,),
    "task": ("sft", "dpo"),
    "gpu": ("h100-80gb", "a100-40gb", "24GB"),
    "network_gbps": (100.0,),
    "gemm_efficiency": (0.5,),
    "input_require_grads": (True, False),
}
_OF_ENGINE: dict[str, dict[str, tuple[Any, ...]]] = {
    "none": {},
    "ddp": {"sync_each_micro_batch": (True, False)},
    "fsdp2": {
        "zero": (2, 3), "tp": (1, 2, 8), "cp": (1, 2, 4), "ep": (1, 2), "pp": (1, 2), "shard_group": (1, 2, 4, 8),
        "cp_comm_type": ("p2p", "all_gather"), "sequence_parallel": (True, False), "sync_each_micro_batch": (True, False),
    },
    "deepspeed": {
        "zero": (0, 1, 2, 3), "tp": (1, 2), "cp": (1, 2), "ep": (1, 2, 4), "pp": (1, 2), "pp_rank": (0, 1),
        "reduce_bucket_size": (10**6, 500_000_000), "max_live_parameters": (0, 10**8), "max_reuse_distance": (0, 7),
        "param_persistence_threshold": (0, 10**5), "prefetch_bucket_size": (0, 10**7), "sub_group_size": (1, 10**8),
        "overlap_comm": (True, False), "offload_optimizer": ("cpu",), "attention": ("flash", "sdpa"),
    },
    "megatron": {
        "zero": (0, 1), "tp": (1, 2, 4), "pp": (1, 2, 4), "cp": (1, 2), "etp": (1, 2), "pp_rank": (0, 1),
        "sequence_parallel": (True, False), "recompute": ("full", "selective"), "recompute_layers": (1, 2),
        "last_stage_layers": (2, 4), "first_stage_layers": (1, 2), "schedule": ("1f1b", "interleaved"),
        "virtual_stages": (1, 2), "cp_comm_type": ("p2p", "a2a"), "attention": ("eager", "sdpa"),
        "gradient_accumulation_fusion": (True, False), "cross_entropy": ("vocab-parallel", "fused"),
        "precision": ("fp32", "bf16-mixed", "fp16-mixed"), "optimizer": ("adam", "adamw"), "kernels": ("megatron",),
    },
}  # fmt: skip


_FIRST = ("gpus", "gpus_per_node", "zero", "tp", "pp", "cp", "ep", "precision", "recompute", "shard_group", "lora_rank")
"""The options that decide whether others are taken, each of which is often there."""


class Stream(Generic[T]):
    """The first ones of an endless sequence, as often as they are asked for, each of which is made once."""

    def __init__(self, endless: Iterator[T]) -> None:
        self._endless, self._made = endless, list[T]()

    def first(self, count: int) -> list[T]:
        self._made += islice(self._endless, max(0, count - len(self._made)))
        return self._made[:count]


_STREAMS: dict[tuple[str, tuple[int, ...]], Stream[tuple[Setup, Model]]] = {}


def drawn(engine: str, count: int, models: tuple[Model, ...] = MODELS) -> list[tuple[Setup, Model]]:
    """Setups that memcalc takes, always the same ones: options are added one after the other, if they go with those before."""
    key = engine, tuple(map(id, models))
    if key not in _STREAMS:
        _STREAMS[key] = Stream(_drawn(engine, models))
    return _STREAMS[key].first(count)


def _drawn(engine: str, models: tuple[Model, ...]) -> Iterator[tuple[Setup, Model]]:
    chance = random.Random(engine)
    allowed = {**_ANY, **_OF_ENGINE[engine]}
    while True:
        model = chance.choice(models)
        options: dict[str, Any] = {"engine": engine, "gpus": 1}
        if engine != "none":
            options["gpus"] = chance.choice(allowed["gpus"])
        names = [name for name in _FIRST[1:] if name in allowed and chance.random() < 0.5]
        rest = sorted({*allowed} - {*_FIRST})
        names += chance.sample(rest, chance.randrange(14))
        for name in names:
            more = {**options, name: chance.choice(allowed[name])}
            if setup_of(more, model) is not None:
                options = more
        setup = setup_of(options, model)
        assert setup is not None
        unit = setup.dp * setup.micro_batch_size
        yield setup_of({**options, "global_batch_size": chance.choice((1, 3, 8)) * unit}, model) or setup, model


def setup_of(options: Mapping[str, Any], model: Model) -> Setup | None:
    """The setup that options mean; None if memcalc refuses them."""
    try:
        return resolve(check_options(options), model)
    except InputError:
        return None


def read_again(option: str, written: Written, setup: Setup, model: Model, file: Path) -> Setup:
    """The setup that a written file means with the options beside it that it cannot say."""
    file.write_text(written.text)
    unsaid = {name: getattr(setup, name) for name in written.unsaid}
    found, options, _ = merged(model, {option: str(file), **unsaid})
    return resolve(check_options(options), found)


ALWAYS = ("seq_len", "gpus", "kernels", "attention", "clip_grad_norm")
"""The options that are named even if they are what memcalc takes without them: a script has to know the length and is started
by somebody, Liger's parts go with its kernels, a GPU decides Megatron's attention, another option a clipping."""


def needless(option: str, written: Written, setup: Setup, model: Model, file: Path) -> list[str]:
    """The unsaid options without which the file means the same setup too."""
    out: list[str] = []
    for name in {*written.unsaid} - {*ALWAYS}:
        less = Written(written.text, {other: why for other, why in written.unsaid.items() if other != name})
        try:
            same = read_again(option, less, setup, model, file) == setup
        except InputError:
            continue
        if same:
            out.append(name)
    return out
