"""The report of `memcalc.infer`: rows and totals, ranks, what fits, and refusals."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from cases import step_cases
from command import environment

import memcalc
from memcalc.device.shown import device_items
from memcalc.inference.heights import On, highest
from memcalc.inference.parallel import Stage

KEYS = {
    "weights", "kv_cache", "kv_bytes_per_token", "state_cache", "prefill_peak", "decode_peak", "total", "fit", "max_sequences",
    "time",
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("llama-7b", {"batch_size": 3, "gpu": "a100-80gb"}),
        ("gemma-3-1b", {"prompt_len": 1000, "new_tokens": 1}),
        ("deepseek-v2-lite", {"tp": 4, "ep": 8, "kv_dtype": "fp8"}),
        ("llama-2-70b", {"tp": 8, "pp": 2, "gpu": "h100-80gb"}),
        ("jamba-v0.1", {"new_tokens": 0}),
        ("t5-small", {}),
        ("gpt2", {"dtype": "fp32", "cache": "static"}),
    ],
)
def test_rows_add_up_to_totals(model: str, options: dict[str, Any]) -> None:
    document = memcalc.infer(model, **options).to_dict()
    assert document.keys() >= KEYS | {"schema_version", "model", "setup", "items", "notes"}
    known = "gpu" in options and document["total"] is not None
    assert {document["time"][name] is not None for name in ("prefill_seconds", "tokens_per_second")} == {known}
    items = document["items"]
    for component in ("weights", "kv_cache", "state_cache"):
        assert sum(item["nbytes"] for item in items if item["component"] == component) == document[component]
    assert sum(item["at_peak"] for item in items) == (
        document["total"] or sum(document[c] for c in ("weights", "kv_cache", "state_cache"))
    )
    if document["total"] is not None:
        assert document["total"] == max(document["prefill_peak"], document["decode_peak"] or 0)
    if document["fit"] is not None:
        device = sum(item["nbytes"] for item in items if item["component"] == "device")
        assert document["fit"]["needs"] == document["total"] + device
        assert document["fit"]["headroom"] == document["fit"]["capacity"] - document["fit"]["needs"]


def test_the_textbook_of_llama() -> None:
    """2 · layers · heads · head_dim · 2 B a token, and each token of prompt and answer is in the cache."""
    report = memcalc.infer("llama-7b", batch_size=4, prompt_len=100, new_tokens=28)
    assert report.kv_bytes_per_token() == 2 * 32 * 32 * 128 * 2
    assert report.kv_cache == 4 * 128 * report.kv_bytes_per_token()
    assert report.weights == 2 * memcalc.load_model("llama-7b").num_parameters
    assert memcalc.infer("llama-7b", dtype="fp32").weights == 2 * report.weights
    assert report.rule_of_thumb == report.weights * 12 // 10


def test_keys_and_values_in_fp8_are_half_as_large() -> None:
    whole, half = (memcalc.infer("llama-3-8b", kv_dtype=name) for name in ("auto", "fp8"))
    assert whole.kv_cache == 2 * half.kv_cache
    assert whole.kv_bytes_per_token() == 2 * half.kv_bytes_per_token()
    assert whole.weights == half.weights


def test_heads_are_cut_and_repeated_where_they_are_fewer_than_ranks() -> None:
    """llama-2-70b has 8 key/value heads of 128 in 80 layers."""
    token = 2 * 80 * 8 * 128 * 2
    for tp in (1, 2, 4, 8):
        report = memcalc.infer("llama-2-70b", tp=tp)
        assert report.kv_bytes_per_token() == token // tp
        assert report.kv_bytes_per_token_all_gpus == token
    many = memcalc.infer("llama-2-70b", tp=16)
    assert many.kv_bytes_per_token() == token // 8
    assert many.kv_bytes_per_token_all_gpus == 2 * token


def test_a_latent_is_whole_on_every_rank() -> None:
    assert [memcalc.infer("deepseek-v3", tp=tp).kv_bytes_per_token() for tp in (1, 8)] == [61 * 576 * 2] * 2


def test_weights_of_ranks() -> None:
    model = memcalc.load_model("llama-2-7b")
    norms = sum(w.shape[0].size for w in model.program.weights() if w.component == "norm")
    rest = model.num_parameters - norms
    assert memcalc.infer(model, tp=4).weights == 2 * (rest // 4 + norms)
    stages = memcalc.infer(model, pp=4)
    ends = 2 * 32000 * 4096 * 2 + 4096 * 2
    assert sum(stages.weights_of(stage) for stage in stages.run.stages) == 2 * model.num_parameters
    assert (
        max(stages.weights_of(stage) for stage in stages.run.stages)
        == (2 * model.num_parameters - ends) // 4 + 32000 * 4096 * 2 + 8192
    )
    assert stages.kv_bytes_per_token_all_gpus == memcalc.infer(model).kv_bytes_per_token()


def test_experts_of_ranks() -> None:
    """Ranks that share experts are the tensor-parallel ones, so eight of each have an eighth of the experts."""
    model = memcalc.load_model("mixtral-8x7b")
    experts = sum(
        2 * w.shape[0].size * w.shape[1].size * w.shape[2].size
        for w in model.program.weights()
        if w.component == "experts"
    )

    def of_experts(**ranks: int) -> int:
        report = memcalc.infer(model, **ranks)
        return sum(row.nbytes for part, row in report.weight_rows(report.stage) if part == "experts")

    assert of_experts() == experts
    assert of_experts(tp=8) == of_experts(ep=8) == of_experts(tp=8, ep=8) == of_experts(tp=8, ep=4) == experts // 8
    assert of_experts(tp=2, ep=4) == experts // 4


@pytest.mark.parametrize(
    "model_type", ["llama", "deepseek_v3", "mixtral", "jamba", "falcon", "gemma3_text", "recurrent_gemma"]
)
def test_a_run_answers_for_other_batches(model_type: str) -> None:
    fields = dict(step_cases(model_type)[0].fields)
    two, seven = (memcalc.infer(fields, batch_size=n, prompt_len=9, new_tokens=3) for n in (2, 7))
    for ours, theirs in zip((two.run.prefill, *two.run.decodes), (seven.run.prefill, *seven.run.decodes), strict=True):
        on, other = (On(step, Stage(range(100), True, True)) for step in (ours, theirs))
        assert highest(on, two.scale(7).nbytes).nbytes == highest(other, seven.scale().nbytes).nbytes


def test_the_most_sequences_fit_and_one_more_does_not() -> None:
    most = memcalc.infer("llama-7b", prompt_len=512, new_tokens=64, gpu="a100-40gb").max_sequences
    assert most is not None
    assert most > 1
    fits, over = (
        memcalc.infer("llama-7b", prompt_len=512, new_tokens=64, gpu="a100-40gb", batch_size=most + i) for i in (0, 1)
    )
    assert (fits.fits, over.fits) == (True, False)
    assert fits.max_sequences == over.max_sequences == most
    assert memcalc.infer("llama-2-70b", gpu="a100-40gb").max_sequences == 0
    context = sum(item.nbytes for item in device_items(1, fits.gpu))
    assert fits.needs() > fits.total + context  # type: ignore[operator]


def test_the_longest_step_is_the_last_or_the_one_behind_the_prompt() -> None:
    """A sliding layer lets go of the prompt with the first new token, so the first step can be the highest."""
    report = memcalc.infer("gemma-3-1b", prompt_len=4096, new_tokens=4)
    size = report.scale().nbytes
    first, last = (highest(On(step, report.stage), size).nbytes for step in report.run.decodes)
    assert first > last
    assert report.decode_peak == report.weights + first


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        ("bert-base", {}, ("--model bert-base", "does not generate")),
        ("resnet-50", {}, ("resnet", "does not generate")),
        ("llama-7b", {"tp": 3}, ("--tp 3", "32 attention heads")),
        ("llama-7b", {"pp": 5}, ("--pp 5", "32 layers")),
        ("llama-7b", {"ep": 2}, ("--ep 2", "no routed experts")),
        ("mixtral-8x7b", {"ep": 3}, ("--ep 3", "8 experts")),
        ("mixtral-8x7b", {"ep": 4, "tp": 3}, ("--tp 3",)),
        ("falcon-7b", {"tp": 2}, ("--tp 2", "falcon")),
        ("llama-7b", {"batch_size": 0}, ("--batch-size 0", "1 to")),
        ("llama-7b", {"batch_size": True}, ("--batch-size True", "whole number")),
        ("llama-7b", {"prompt_len": "long"}, ("--prompt-len 'long'", "whole number")),
        ("llama-7b", {"new_tokens": -1}, ("--new-tokens -1", "0 to")),
        ("llama-7b", {"dtype": "fp7"}, ("--dtype 'fp7'", "bf16")),
        ("llama-7b", {"kv_dtype": "fp7"}, ("--kv-dtype 'fp7'", "fp8")),
        ("llama-7b", {"gpu": "no-such"}, ("no-such",)),
        ("llama-7b", {"batchsize": 2}, ("--batchsize", "--batch")),
        ("gpt2", {"prompt_len": 2000}, ("--prompt-len 2000", "1024 positions")),
        ("gemma-2-2b", {"attention": "sdpa"}, ("--attention sdpa", "eager")),
        (None, {}, ("--model",)),
    ],
)
def test_refusals_in_one_line(model: str | None, options: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(memcalc.InputError) as refused:
        memcalc.infer(model, **options)
    text = str(refused.value)
    assert "\n" not in text
    for word in words:
        assert word in text or word == "--batch"


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import memcalc, sys; memcalc.infer('llama-7b').to_dict(); "
        "print({'torch', 'transformers', 'numpy', 'rich'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment())
    assert done.stdout.strip() == "set()"
