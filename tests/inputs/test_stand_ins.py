"""Hub ids while the Hub is out of reach: the bundled model of the same shape, where the name says that there is one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import check_refused, here, program

import memcalc
from memcalc.inputs.files import read_bundled, specs_folder
from memcalc.inputs.stand_ins import stand_in


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


SAME = {
    "Qwen/Qwen2.5-7B-Instruct": "qwen2.5-7b", "Qwen/Qwen2.5-72B-Instruct": "qwen2.5-72b", "Qwen/Qwen3-8B-Base": "qwen3-8b",
    "unsloth/Meta-Llama-3.1-8B-Instruct": "llama-3.1-8b", "unsloth/Llama-3.2-1B": "llama-3.2-1b",
    "NousResearch/Llama-2-7b-hf": "llama-2-7b", "NousResearch/Llama-2-13b-chat-hf": "llama-2-13b",
    "someone/mixtral-8x7b-instruct-v0.1": "mixtral-8x7b", "unsloth/gemma-2-9b-it": "gemma-2-9b",
    "01-ai/Yi-1.5-34B-Chat": "yi-1.5-34b", "mosaicml/mpt-7b-chat": "mpt-7b", "someone/gpt2-xl": "gpt2-xl",
}  # fmt: skip
OTHERS = [
    "Qwen/Qwen2.5-7B-Instruct-1M", "Qwen/Qwen2.5-7B-Instruct-AWQ", "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "Qwen/Qwen2.5-Coder-7B",
    "mistralai/Mistral-7B-Instruct-v0.2", "mistralai/Mixtral-8x22B-v0.1", "unsloth/Qwen2.5-7B-Instruct-bnb-4bit", "google/t5",
    "openai/whisper", "google-bert/bert-base-cased", "microsoft/Phi-3-mini-128k-instruct", "owner/name", "a/instruct",
]  # fmt: skip
"""Another length, quantized weights, another vocabulary, or a name that tells no size."""


@pytest.mark.parametrize("repo_id", SAME)
def test_a_model_of_the_same_shape_is_used_and_named(repo_id: str) -> None:
    model = memcalc.load_model(repo_id)
    assert model.weights() == memcalc.load_model(SAME[repo_id]).weights()
    (note,) = model.notes
    assert note.startswith(f"{repo_id}: offline mode is on")
    assert f"{SAME[repo_id]} is used" in note


@pytest.mark.parametrize("repo_id", OTHERS)
def test_what_may_have_another_shape_is_not_guessed(repo_id: str) -> None:
    assert stand_in(repo_id) is None
    with pytest.raises(memcalc.InputError, match="HF_HUB_OFFLINE"):
        memcalc.load_model(repo_id)


def test_every_id_on_the_hub_is_its_own_model_by_any_owner() -> None:
    """No two bundled models have ids that are read as the same name."""
    for path in sorted(specs_folder().glob("*.json")):
        for alias in read_bundled(path)["aliases"]:
            if "/" in alias:
                assert stand_in(f"someone/{alias.split('/')[1]}") == path, alias


def test_the_note_is_in_the_document_and_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("estimate", "Qwen/Qwen2.5-7B-Instruct")
    document = json.loads(here(capsys, *arguments, "--json").stdout)
    assert document["model"]["name"] == "qwen2.5-7b"
    assert any("qwen2.5-7b is used" in note for note in document["notes"])
    assert "qwen2.5-7b is used" in " ".join(here(capsys, *arguments).stdout.split())
    assert "qwen2.5-7b is used" in here(capsys, "models", arguments[1]).stdout


def test_a_bundled_id_has_no_note() -> None:
    assert memcalc.load_model("Qwen/Qwen2.5-7B").notes == ()


def test_where_nothing_answers(tmp_path: Path) -> None:
    nobody = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "NO_PROXY": "*"}
    ran = program("estimate", "Qwen/Qwen2.5-7B-Instruct", "--json", **nobody)
    assert ran.status == 0
    assert "http://127.0.0.1:9 cannot be reached" in " ".join(json.loads(ran.stdout)["notes"])
    check_refused(program("estimate", "owner/name", **nobody), "owner/name", "cannot be reached")


# --- suggestions


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("lama-7b", "llama-7b"),
        ("llama7b", "llama-7b"),
        ("qwen2.5-7", "qwen2.5-7b"),
        ("mixtral", "mixtral-8x7b"),
        ("gpt5", "gpt2"),
    ],
)
def test_a_slip_is_seen(name: str, meant: str) -> None:
    with pytest.raises(memcalc.InputError, match=f"did you mean .*{meant}"):
        memcalc.load_model(name)


@pytest.mark.parametrize("name", ["nosuchmodel", "loop", "model", "my-model", "test", "foo", "transformer-large-v2"])
def test_no_wild_guess(name: str) -> None:
    with pytest.raises(memcalc.InputError, match="unknown model; see `memcalc models`"):
        memcalc.load_model(name)
