"""The rows of the embedding that Megatron-LM's arguments mean: the tokenizer's vocabulary, padded.

Source: build_tokenizer of core/tokenizers/utils/build_tokenizer.py and the tokenizers beside it, Megatron-Core 0.16.1;
args_defaults of pretrain_gpt.
"""

from __future__ import annotations

from typing import Final

from memcalc.errors import one_line
from memcalc.formats.megatron_section import Arguments

_TYPE: Final = "--tokenizer-type"
_SIZE: Final = "--vocab-size"
_PADDED: Final = "--padded-vocab-size"
_WORDS: Final = "--vocab-file"
_MERGES: Final = "--merge-file"
_MULTIPLE: Final = "--make-vocab-size-divisible-by"
_GPT2: Final = 50257
_DEFAULTS: Final = {"TikTokenizer": 2**17, "Llama2Tokenizer": 32000}
"""The tokens of a type without `--vocab-size`: DEFAULT_TIKTOKEN_MAX_VOCAB, and those of Llama 2's tokenizer.model."""
_FILES: Final = {"nemotron_2_256k.model": 256000}
"""The tokens of a tokenizer's file: Nemotron's, as in transformers' configuration_nemotron.py."""
_BERT: Final = ("BertWordPieceLowerCase", "BertWordPieceCase")
_MOST: Final = 10**7


def vocabulary_of(a: Arguments, notes: list[str]) -> int:
    """Return the rows of the embedding of all tensor-parallel ranks. Raises InputError if they are not known."""
    tp = a.whole("--tensor-model-parallel-size", 1, 10**6) or 1
    multiple = a.whole(_MULTIPLE, 1, _MOST) or 128
    rows = a.whole(_PADDED, 1, _MOST)
    if rows is None:
        rows = _tokens(a, notes, multiple * tp)
        if not a.on("--no-pad-vocab-size") and not a.on("--disable-pad-vocab-size"):
            rows = padded(rows, multiple * tp)
    counted = padded(rows, 128 * tp)
    if counted != rows:
        key = _PADDED if _PADDED in a else _MULTIPLE
        notes.append(f"{a.shown(key)}: the embedding has {rows} rows; counted with {counted}, a multiple of 128 · tp")
    if counted > _MOST:
        a.refuse(_PADDED if _PADDED in a else _SIZE, f"allowed: up to {_MOST} rows")
    return rows


def padded(tokens: int, multiple: int) -> int:
    """Return the tokens rounded up to a multiple."""
    return -(-tokens // multiple) * multiple


def _tokens(a: Arguments, notes: list[str], multiple: int) -> int:
    """Return the tokens of the tokenizer."""
    kind, size = _kind(a), a.whole(_SIZE, 1, _MOST)
    if a.hidden and not {_TYPE, _SIZE, _WORDS, "--tokenizer-model"} & a.content.keys():
        a.reject(_TYPE, f"is missing, and {one_line(a.hidden[0])} may have it; allowed: with {_SIZE} or {_PADDED}")
    if kind in _BERT:
        a.refuse(_TYPE, "BERT is not modelled with Megatron; allowed: a GPT's tokenizer")
    if kind == "GPT2BPETokenizer":
        _check_gpt2(a)
        return _GPT2
    file = str(a.content.get("--tokenizer-model", "")).rpartition("/")[2]
    if size is None and kind not in _DEFAULTS and file in _FILES:
        notes.append(f"--tokenizer-model {file}: counted with its {_FILES[file]} tokens")
        return _FILES[file]
    if size is None and kind not in _DEFAULTS:
        key = next((k for k in (_TYPE, "--patch-tokenizer-type", "--tokenizer-model") if a.given(k)), _TYPE)
        a.reject(key, f"the arguments do not tell the size of its vocabulary; allowed: with {_SIZE} or {_PADDED}")
    if size is None:
        if kind == "Llama2Tokenizer":
            notes.append(f"{_TYPE} {kind}: counted with Llama 2's {_DEFAULTS[kind]} tokens")
        return _DEFAULTS[kind]
    if kind in ("NullTokenizer", "NullMultimodalTokenizer"):
        if padded(size, multiple) != padded(size + 1, multiple):
            newer = "newer versions have no token more than --vocab-size"
            notes.append(f"{_TYPE} {kind}: counted with {size + 1} tokens, as in Megatron-Core 0.16.1; {newer}")
        return size + 1
    return size


def _check_gpt2(a: Arguments) -> None:
    """Raise InputError for one file of the two that GPT-2's tokenizer needs: a list of words, as BERT and T5 have."""
    if a.given(_WORDS) and not a.given(_MERGES) and not a.hidden and _TYPE not in a:
        why = f"is without {_MERGES}, as for BERT or T5 (BertWordPieceLowerCase), which are not modelled with Megatron"
        a.reject(_WORDS, f"{why}; allowed: with {_MERGES} or {_TYPE}")


def _kind(a: Arguments) -> str:
    """Return the tokenizer's type. pretrain_gpt's default is GPT-2's, which scripts of other models do not mean."""
    kind = a.text(_TYPE)
    if kind is not None:
        return kind
    others = [key for key in a.content if "tokenizer" in key and key not in (_TYPE, "--tokenizer-metadata")]
    return "" if any(a.given(key) for key in others) or _SIZE in a else "GPT2BPETokenizer"
