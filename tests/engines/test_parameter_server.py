"""Parameter servers: the textbook's formulas (Li et al., OSDI 2014), and a worker that is plain PyTorch without an optimizer."""

from __future__ import annotations

from typing import Any

import pytest

import memcalc
from memcalc.engines.parameter_server import traffic_of_a_server

WORKERS: dict[str, Any] = {"engine": "parameter-server", "gpus": 8, "seq_len": 64}


@pytest.mark.parametrize("servers", [1, 3, 8])
@pytest.mark.parametrize(("precision", "itemsize"), [("bf16-mixed", 2), ("fp32", 4)])
def test_all_traffic_is_at_the_servers(servers: int, precision: str, itemsize: int) -> None:
    report = memcalc.estimate("gpt2", servers=servers, precision=precision, **WORKERS)
    parameters = report.model.num_parameters
    (push,) = report.collectives
    assert push.payload == push.wire == itemsize * parameters
    traffic = traffic_of_a_server(report.model, report.setup)
    assert traffic == (8 * itemsize * -(-parameters // servers),) * 2
    assert sum(traffic) >= 2 * 8 * push.wire / servers


@pytest.mark.parametrize(("precision", "each"), [("bf16-mixed", 2 + 4 + 8 + 2), ("fp32", 4 + 8 + 4)])
def test_the_busiest_server_holds_the_states_of_its_range(precision: str, each: int) -> None:
    report = memcalc.estimate("gpt2", servers=3, precision=precision, **WORKERS)
    elements = -(-report.model.num_parameters // 3)
    assert sum(item.nbytes for item in report.host) == each * elements
    assert report.to_dict()["memory"]["host"]["paged"] == each * elements


@pytest.mark.parametrize("precision", ["bf16-mixed", "fp32", "bf16"])
def test_a_worker_has_no_states_and_otherwise_what_one_gpu_has(precision: str) -> None:
    worker = memcalc.estimate("gpt2", precision=precision, **WORKERS)
    alone = memcalc.estimate("gpt2", precision=precision, seq_len=64)
    assert worker.total("optimizer_states") == 0
    states = alone.total("optimizer_states")
    for phase in ("forward", "backward"):
        assert alone.phases[phase] - worker.phases[phase] == states
    assert worker.phases["step"] == worker.total("parameters") + worker.total("gradients") + worker.total("buffers")


def test_the_time_of_a_step_is_not_known() -> None:
    assert memcalc.estimate("gpt2", gpu="a100-80gb", **WORKERS).to_dict()["time"] is None


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"zero": 1}, "--zero 1: engine parameter-server shards nothing"),
        ({"clip_grad_norm": True}, "--clip-grad-norm on: with engine parameter-server"),
        ({"lora_rank": 4}, "--lora-rank 4: with engine parameter-server"),
        ({"optimizer": "adafactor"}, "--optimizer adafactor: over ranges of parameters"),
        ({"servers": 0}, "--servers 0: allowed: a whole number"),
        ({"servers": 10**6, "model": "tiny"}, "--servers 1000000: has a server without parameters"),
        ({"engine": "ddp", "servers": 2}, "--servers 2: is an option of parameter servers"),
        ({"tp": 2}, "--tp 2: with engine parameter-server is not modelled"),
        ({"offload_optimizer": "cpu"}, "--offload-optimizer cpu: with engine parameter-server"),
    ],
)
def test_what_is_refused(options: dict[str, Any], line: str) -> None:
    tiny = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 50, "n_positions": 64}
    given = {"model": "gpt2", **WORKERS, **options}
    model = given.pop("model")
    with pytest.raises(memcalc.InputError) as error:
        memcalc.estimate(tiny if model == "tiny" else model, **given)
    assert str(error.value).startswith(line) and "\n" not in str(error.value)
