"""DeepSpeed's tables of memory needs: each number and each line against DeepSpeed's own functions."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
from cases import auto_class
from command import check_refused, here
from records import on_record

from memcalc.decisions.deepspeed_lines import table_lines
from memcalc.decisions.deepspeed_table import deepspeed_tables
from memcalc.decisions.mem_needs import Counted, Nodes, zero2_needs, zero3_needs

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 500}
MODELS: list[dict[str, Any]] = [
    {"model_type": "llama", "intermediate_size": 200, "num_key_value_heads": 2, **SMALL},
    {"model_type": "qwen3", "intermediate_size": 900, "num_key_value_heads": 2, "tie_word_embeddings": True, **SMALL},
    {"model_type": "bert", "intermediate_size": 256, **SMALL},
    {"model_type": "mixtral", "intermediate_size": 256, "num_key_value_heads": 2, "num_local_experts": 4, **SMALL},
    {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100},
    {"model_type": "t5", "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 500},
]
COUNTS = [(7_615_616_512, 544_997_376), (124_439_808, 38_597_376), (999_999, 10), (1, 1)]
PLACES = [(1, 1), (8, 1), (8, 2), (4, 3), (1, 5)]


@on_record
def needs_of_3(total: int, largest: int, per_node: int, nodes: int) -> list[tuple[int, int]]:
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs as needs

    options = [(o, p, z) for o, p in ((True, True), (True, False), (False, False)) for z in (True, False)]
    return [needs(total, largest, per_node, nodes, o, p, z)[:2] for o, p, z in options]


@on_record
def needs_of_2(total: int, per_node: int, nodes: int) -> list[tuple[int, int]]:
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs as needs

    return [needs(total, per_node, nodes, offload) for offload in (True, False)]


@on_record
def printed(fields: dict[str, Any], zero: int, per_node: int, nodes: int) -> list[str]:
    """The lines of `..._all_live` for a real model. Python 3.11 and later write the enum's name where the table means "cpu "."""
    import transformers
    from deepspeed.runtime.zero import stage3, stage_1_and_2

    fields = dict(fields)
    auto = getattr(transformers, auto_class(fields))
    model = auto.from_config(transformers.AutoConfig.for_model(fields.pop("model_type"), **fields))
    module: Any = {2: stage_1_and_2, 3: stage3}[zero]
    function = getattr(module, f"estimate_zero{zero}_model_states_mem_needs_all_live")
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        function(model, per_node, nodes)
    return out.getvalue().replace("OffloadDeviceEnum.cpu", "cpu ").splitlines()


@pytest.mark.parametrize(("per_node", "nodes"), PLACES)
@pytest.mark.parametrize(("total", "largest"), COUNTS)
def test_numbers(total: int, largest: int, per_node: int, nodes: int) -> None:
    of, on = Counted(total, largest), Nodes(nodes, per_node)
    assert [(one.cpu, one.gpu) for one in zero2_needs(of, on)] == needs_of_2(total, per_node, nodes)
    assert [(one.cpu, one.gpu) for one in zero3_needs(of, on)] == needs_of_3(total, largest, per_node, nodes)


@pytest.mark.parametrize("fields", MODELS, ids=lambda fields: fields["model_type"])
def test_lines(fields: dict[str, Any]) -> None:
    for per_node, nodes in ((8, 1), (8, 2), (1, 1)):
        for table in deepspeed_tables(fields, gpus=per_node * nodes, gpus_per_node=per_node).tables:
            assert list(table_lines(table)) == printed(fields, table.zero, per_node, nodes)


def test_json_has_every_combination(capsys: pytest.CaptureFixture[str]) -> None:
    import json

    ran = here(capsys, "compare", "gpt2,llama-7b", "-g", "4,16", "--deepspeed-table", "--json")
    assert (ran.status, ran.stderr) == (0, "")
    tables = json.loads(ran.stdout)["deepspeed_tables"]
    assert len(tables) == 8
    assert {(t["nodes"], t["gpus_per_node"]) for t in tables} == {(1, 4), (2, 8)}
    assert [len(t["needs"]) for t in tables] == [2, 6] * 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("llama-7b -g 12", ("--gpus 12", "multiple of --gpus-per-node 8")),
        ("llama-7b --zero 1", ("--zero 1", "2, 3")),
        ("llama-7b -b 2", ("know no --micro-batch-size",)),
        ("llama-7b --bars", ("know no --bars",)),
        ("--params 7B", ("needs --model", "memcalc compare llama-7b --gpus 8 --deepspeed-table")),
        ("llama-7b --gpus 1,2,3,4,5,6,7,8 --gpus-per-node 8,16,32,64,128", ("tables; allowed: at most 64",)),
    ],
)
def test_what_the_tables_do_not_know(
    capsys: pytest.CaptureFixture[str], arguments: str, words: tuple[str, ...]
) -> None:
    check_refused(here(capsys, "compare", *arguments.split(), "--deepspeed-table"), *words)
