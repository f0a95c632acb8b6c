"""DeepSpeed's JSON that swaps to NVMe: read, written, and read again."""

from __future__ import annotations

import json
from typing import Any

import pytest

import memcalc
from memcalc.errors import InputError
from memcalc.formats import deepspeed_writer
from memcalc.formats.deepspeed_names import FILE_SIZES

SMALL = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 500, "head_dim": 16}  # fmt: skip
BOTH = {
    "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "buffer_count": 6, "pipeline_read": True},
    "offload_param": {"device": "nvme", "nvme_path": "/nvme", "buffer_size": 1e6, "max_in_cpu": 0, "buffer_count": 9},
}


def estimated(zero: dict[str, Any], **others: Any) -> memcalc.Report:
    content = {"zero_optimization": zero, "bf16": {"enabled": True}, **others}
    return memcalc.estimate(SMALL, gpus=2, seq_len=16, deepspeed=content)


def sizes(report: memcalc.Report) -> dict[str, Any]:
    return {name: getattr(report.setup, name) for name in FILE_SIZES}


def test_what_a_file_says() -> None:
    found = estimated({"stage": 3, **BOTH}, aio={"intra_op_parallelism": 4, "block_size": 262144})
    assert (found.setup.offload_optimizer, found.setup.offload_params) == ("nvme", "nvme")
    assert list(sizes(found).values()) == [6, 9, 10**6, 0, 4]
    assert any("buffer_count below 8" in note for note in found.to_dict()["notes"])


def test_defaults_are_deepspeeds_own() -> None:
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.swap_tensor.constants import AIO_INTRA_OP_PARALLELISM_DEFAULT
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    of_optimizer, of_params = DeepSpeedZeroOffloadOptimizerConfig(), DeepSpeedZeroOffloadParamConfig()
    found = sizes(estimated({"stage": 3, **{key: {"device": "nvme"} for key in BOTH}}))
    assert found == FILE_SIZES
    assert list(found.values()) == [
        of_optimizer.buffer_count, of_params.buffer_count, of_params.buffer_size, of_params.max_in_cpu,
        AIO_INTRA_OP_PARALLELISM_DEFAULT,
    ]  # fmt: skip


@pytest.mark.parametrize("stage", [1, 2])
def test_stages_without_files_keep_all_on_the_host(stage: int) -> None:
    found = estimated({"stage": stage, "offload_optimizer": {"device": "nvme"}})
    assert found.setup.offload_optimizer == "cpu"
    assert any("no files" in note for note in found.to_dict()["notes"])


@pytest.mark.parametrize("aio", [{}, {"intra_op_parallelism": 2}])
def test_what_is_written_reads_the_same(aio: dict[str, int]) -> None:
    first = estimated({"stage": 3, **BOTH}, aio=aio)
    written = deepspeed_writer.write(first.setup, first.model)
    again = memcalc.estimate(SMALL, gpus=2, seq_len=16, deepspeed=json.loads(written.text))
    assert again.setup == first.setup


def test_an_option_that_moves_elsewhere_leaves_the_files_sizes_out() -> None:
    content = {"zero_optimization": {"stage": 3, **BOTH}, "bf16": {"enabled": True}}
    found = memcalc.estimate(SMALL, gpus=2, seq_len=16, deepspeed=content, offload_params="cpu")
    assert found.setup.nvme_buffer_size is None
    assert found.setup.nvme_optimizer_buffer_count == 6


@pytest.mark.parametrize("aio", [{"use_gds": True}, {"block_size": 2**21}, {"intra_op_parallelism": 0}])
def test_what_is_not_modelled_is_refused(aio: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=rf"^--deepspeed: aio.{next(iter(aio))} "):
        estimated({"stage": 3, **BOTH}, aio=aio)
