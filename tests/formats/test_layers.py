"""The notation of layers: what it says, and one line for what it does not."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from command import here
from layers_files import ALEXNET, LENET_5

import memcalc

CONV: list[Any] = [{"conv2d": {"out": 8, "kernel": 3}}, "flatten", {"linear": 10}]


def load(layers: Any, given: Any = (3, 32, 32), **more: Any) -> Any:
    return memcalc.load_layers({"input": list(given) if isinstance(given, tuple) else given, "layers": layers, **more})


def same(left: Any, right: Any) -> bool:
    return left.weights() == right.weights() and left.program.config.given.chain.entries is not None


def test_torchs_spelling_is_the_same_network() -> None:
    lines = [
        "Conv2d(3, 64, kernel_size=(11, 11), stride=(4, 4), padding=(2, 2))", "nn.ReLU(inplace=True)",
        "torch.nn.MaxPool2d(kernel_size=3, stride=2, padding=0, dilation=1, ceil_mode=False)",
        "Flatten(start_dim=1, end_dim=-1)",
        "Linear(in_features=46656, out_features=10, bias=True)",
    ]  # fmt: skip
    own = [
        {"conv2d": {"out": 64, "kernel": 11, "stride": 4, "padding": 2}}, {"relu": True},
        {"maxpool2d": {"kernel": 3, "stride": 2}},
        "flatten", {"linear": 10},
    ]  # fmt: skip
    theirs, ours = load(lines, (3, 224, 224)), load(own, (3, 224, 224))
    assert theirs.weights() == ours.weights()
    for precision in ("fp32", "bf16"):
        assert (
            memcalc.estimate(theirs, precision=precision).phases == memcalc.estimate(ours, precision=precision).phases
        )


def test_a_printed_module_is_read() -> None:
    """The text that print(nn.Sequential(...)) writes."""
    from layers_oracle import module_of

    module, _ = module_of(LENET_5)
    model = load(str(module), (1, 32, 32))
    assert [(n, s) for n, s, _ in model.weights()] == [(n, tuple(p.shape)) for n, p in module.named_parameters()]
    nested = "Sequential(\n  (0): Sequential(\n    (0): Linear(4, 8)\n    (1): ReLU()\n  )\n  (1): Linear(8, 2)\n)"
    assert [name for name, _, _ in load(nested, 4).weights()] == ["0.0.weight", "0.0.bias", "1.weight", "1.bias"]


def test_files_in_yaml_and_json_are_the_same(tmp_path: Path) -> None:
    (tmp_path / "alex.json").write_text(json.dumps(ALEXNET))
    (tmp_path / "alex.yaml").write_text(json.dumps(ALEXNET))  # JSON is YAML
    a, b = (memcalc.load_layers(tmp_path / name) for name in ("alex.json", "alex.yaml"))
    assert a.weights() == b.weights() and a.name == b.name == "alex"
    listed = memcalc.load_layers(ALEXNET["layers"], input=[3, 224, 224])
    assert listed.weights() == a.weights()
    assert memcalc.estimate(layers=str(tmp_path / "alex.json")).peak == memcalc.estimate(a).peak


REFUSED: list[tuple[Any, Any, str]] = [
    ([{"conv2d": {"out": 8, "kernel": 0}}], (3, 8, 8), "layer 1 conv2d: field `kernel"),
    ([{"conv2d": {"out": 8, "kernel": 3, "strid": 1}}], (3, 8, 8), "conv2d: strid: unknown option; did you mean stride?"),
    ([{"conv2d": {"out": 8}}], (3, 8, 8), "layer 1 conv2d: field `kernel` is missing"),
    ([{"conv2d": {"out": 8, "kernel": 9}}], (3, 8, 8), "layer 1 conv2d: kernel 9: reaches over 9 of 8 inputs"),
    ([{"conv2d": {"in": 4, "out": 8, "kernel": 3}}], (3, 8, 8), "layer 1 conv2d: in 4: the input has 3 channels"),
    ([{"conv2d": {"out": 8, "kernel": 3, "groups": 2}}], (3, 8, 8), "groups 2: the input's 3 channels"),
    ([{"conv2d": {"out": 8, "kernel": [3, 3, 3]}}], (3, 8, 8), "kernel [3, 3, 3]: allowed: a number, or a list of 2"),
    (["Conv2d(3, 8, 3, padding_mode='reflect')"], (3, 8, 8), "padding_mode 'reflect' is not modelled; allowed: zeros"),
    (["conv2x"], (3, 8, 8), "layer 1 conv2x: unknown layer; did you mean conv2d?"),
    (["Conv2x(3)"], (3, 8, 8), "layer 1 Conv2x: unknown module of torch.nn; did you mean Conv2d?"),
    (["Linear(__import__('os').system('true'), 3)"], 4, "is no number, word or tuple of whole numbers"),
    (["Linear(4, 3"], 4, "expected a line such as"),
    (["Linear(4, , 3)"], 4, "an argument is missing between commas"),
    ([{"linear": 5}, {"relu": None, "linear": 3}], 4, "layer 2: has several names (relu, linear)"),
    ([{"linear": 5}, {"linear": {"in": 6, "out": 2}}], 4, "layer 2 linear: in 6: the input has 5 features"),
    ([{"linear": True}], 4, "layer 1 linear: field `out` is True"),
    ([{"linear": 2.0}], 4, "layer 1 linear: field `out` is 2.0"),
    (["relu"], 4, "no layer has parameters"),
    ([{"linear": 4}, "tanh", {"relu": True}], 4, "overwrites what layer 2 tanh keeps for backward"),
    ([{"linear": 4}, {"residual": [{"linear": 4}, {"relu": True}]}, {"linear": 3}], 4, ""),
    ([{"linear": 4}, {"residual": [{"relu": True}, {"linear": 4}]}], 4, ""),
    ([{"linear": 4}, {"residual": [{"linear": 5}]}], 4, "layer 2 residual: the body makes 5 and the shortcut 4"),
    ([{"concat": [[], [{"linear": 5}]], "dim": 2}, {"linear": 3}], 4, "layer 1 concat: dim 2: allowed: 1 to 1"),
    ([{"repeat": 0, "layers": ["relu"]}], 4, "layer 1 repeat 0: allowed: 1 to 10000"),
    ([{"repeat": 2}], 4, "layer 1 layer None: expected a list of layers"),
    ([{"repeat": 5000, "layers": [{"repeat": 5000, "layers": [{"linear": 4}]}]}], 4, "more than 10000 layers"),
    ([{"embedding": {"vocab": 10, "size": 4}}], 4, "takes ids, and its input is numbers"),
    ([{"linear": 4}], "tokens", "takes numbers, and its input is ids"),
    ([{"lstm": {"hidden": 4, "batch_first": False}}], (5, 4), "batch_first false"),
    ([{"conv1d": {"out": 4, "kernel": 3}}], [4, "seq"], "slides over a dim of --seq-len"),
    ([{"attention": {"heads": 3}}], (5, 4), "heads 3: the input's 4 features are not divisible"),
    ([{"layernorm": {"size": [5, 4]}}], (5, 4), "norms over several dims are not modelled"),
    ([{"maxpool2d": {"kernel": 2, "padding": 2}}], (3, 8, 8), "padding 2: allowed: at most half of the kernel 2"),
    ([{"dropout": 1.5}], 4, "layer 1 dropout: field `p` is 1.5"),
    ([{"softmax": 0}, {"linear": 2}], 4, "dim 0: allowed: -1 or 1"),
    ([], 4, "layers []: expected at least one layer"),
    (5, 4, "layers 5: expected a list of layers"),
    ([7], 4, "layer 1 7: expected a layer"),
    ([["linear"]], 4, "expected a layer"),
    ([{}], 4, "expected a layer"),
    ([{"linear": 4}], (0, 3), "input [0, 3]: 0 is no size"),
    ([{"linear": 4}], (1, 2, 3, 4, 5), "input [1, 2, 3, 4, 5]: allowed"),
    ([{"linear": 4}], None, "input: missing"),
    ([{"linear": 4}], ["seq", "seq"], "`seq` twice"),
    ([{"linear": 4}], {"ids": "x"}, "input.ids 'x': allowed"),
    ([{"linear": 4}], {"idz": [3]}, "input {'idz': [3]}: allowed"),
]  # fmt: skip


@pytest.mark.parametrize(("layers", "given", "line"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_is_refused_is_one_line(layers: Any, given: Any, line: str) -> None:
    if not line:
        load(layers, given)  # in place where nothing is kept
        return
    with pytest.raises(memcalc.InputError) as refused:
        load(layers, given)
    text = str(refused.value)
    assert line in text and "\n" not in text and text.startswith("--layers: ")


def test_unknown_keys_and_losses_are_refused() -> None:
    with pytest.raises(memcalc.InputError, match="inputs: unknown key; did you mean input"):
        memcalc.load_layers({"inputs": 4, "layers": CONV})
    with pytest.raises(memcalc.InputError, match="loss 'hinge': allowed: cross-entropy, mse"):
        load([{"linear": 3}], 4, loss="hinge")
    with pytest.raises(memcalc.InputError, match="loss cross-entropy: takes classes"):
        load([{"linear": 3}], (2, 3, 4, 5))


def test_a_file_is_named_in_the_refusal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "net.yaml"
    path.write_text("input: 4\nlayers: [{linear: 0}]\n")
    done = here(capsys, "estimate", "--layers", str(path))
    assert done.status == 2 and done.stderr.startswith("memcalc: --layers net.yaml: layer 1 linear: field `out` is 0")
    assert done.stderr.count("\n") == 1
    for command in ("compare", "explain", "fit"):
        again = here(capsys, command, "--layers", str(path))
        assert again.status == 2 and "Traceback" not in again.stderr


@pytest.mark.parametrize(
    "text",
    [
        "[" * 5000, "a: &a [*a]", "input: 4\nlayers: " + "[" * 100 + "]" * 100, "\x00", "- 1\n- 2", "",
        "input: 4\nlayers: [{? [a]: 1}]",
        "input: 4\nlayers:\n" + "".join(
            f"  - &l{i} {{repeat: 9, layers: [*l{i - 1}, *l{i - 1}]}}\n" if i else "  - &l0 relu\n" for i in range(40)
        ),
        "input: 4\nlayers: [Linear(" + "9" * 5000 + ", 3)]", "input: 4\nlayers: ['Linear(" + "(" * 900 + "']",
    ],
    ids=range(10),
)  # fmt: skip
def test_hostile_files_end_soon(tmp_path: Path, text: str) -> None:
    path = tmp_path / "net.yaml"
    path.write_text(text)
    start = time.monotonic()
    with pytest.raises(memcalc.InputError) as refused:
        memcalc.load_layers(path)
    assert "\n" not in str(refused.value) and time.monotonic() - start < 5


def test_a_model_and_layers_contradict() -> None:
    for other in ({"model": "llama-7b"}, {"params": "7B"}):
        with pytest.raises(memcalc.InputError, match="--layers: is a model"):
            memcalc.estimate(layers=LENET_5, **other)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"tp": 2, "gpus": 2}, "--tp 2"), ({"pp": 2, "gpus": 2}, "--pp 2"), ({"cp": 2, "gpus": 2}, "--cp 2"),
        ({"seq_len": 5}, "--seq-len 5: the input of --layers has no `seq`"), ({"lora_rank": 4}, "--lora-rank 4"),
        ({"engine": "megatron"}, "--engine megatron"), ({"recompute": "full"}, "--recompute full"),
        ({"task": "sft"}, "--task sft"),
        ({"precision": "fp8-mixed"}, "--precision fp8-mixed"), ({"padded": True}, "--padded"),
        ({"kernels": "fused"}, "--kernels fused"),
        ({"quantize": "nf4"}, "--quantize nf4"), ({"ep": 2, "gpus": 2}, "--ep 2"),
    ],
)  # fmt: skip
def test_options_of_language_models_are_refused(options: dict[str, Any], line: str) -> None:
    with pytest.raises(memcalc.InputError) as refused:
        memcalc.estimate(layers=LENET_5, **options)
    assert str(refused.value).startswith(line) and "\n" not in str(refused.value)
