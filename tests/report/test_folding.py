"""Words that have no place break after an operator, and nothing is lost."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console, Group
from rich.text import Text

import memcalc
from memcalc.report.folding import Folded, lines_of
from memcalc.report.table import print_report

FORMULA = "(3·ffn·hidden + 2·heads·head_dim·hidden + 2·kv_heads·head_dim·hidden)·2 B"


def shown(text: str | Text, width: int) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=width, highlight=False, no_color=True).print(Group(Folded(text)))
    return [line.rstrip() for line in file.getvalue().splitlines()]


def test_formulas_and_settings() -> None:
    assert shown("2·heads·head_dim·hidden", 18) == ["2·heads·head_dim·", "hidden"]
    assert shown("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True may", 40) == [
        "PYTORCH_CUDA_ALLOC_CONF=",
        "expandable_segments:True may",
    ]
    assert shown("a\n\n  model.layers.*.mlp", 14) == ["a", "", "  model.", "layers.*.mlp"]
    assert shown("as it is", 40) == ["as it is"]


@given(st.text("ab·=+:/.,( \n", max_size=60), st.integers(3, 40))
def test_nothing_is_lost(text: str, width: int) -> None:
    lines = shown(text, width)
    assert all(len(line) <= width for line in lines)
    assert re.sub(r"\s", "", "".join(lines)) == re.sub(r"\s", "", text)


@pytest.mark.parametrize("columns", [40, 44, 60, 80])
def test_no_word_of_a_report_is_broken_inside(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a formula or a setting: every part of it is there whole, or is longer than its place."""
    monkeypatch.setenv("COLUMNS", str(columns))
    report = memcalc.estimate("gpt2-large", micro_batch_size=3, gpu="rtx4090", gpus=8, zero=3, engine="fsdp2")
    file = io.StringIO()
    print_report(report, rows=True, per_layer=True, file=file)
    words = set(re.split(r"[\s·()+=:/,.]+", file.getvalue()))
    formulas = [item.formula for item in (*report.items, *report.overheads)]
    for formula in formulas:
        parts = {part for part in re.split(r"[\s·()+=:/,.]+", formula) if len(part) < 15}
        assert parts <= words, parts - words


def test_styles_stay() -> None:
    text = Text("a·b·c", style="bold")
    text.append("·long_word·end", "red")
    file = io.StringIO()
    Console(file=file, width=10, force_terminal=True, color_system="standard").print(Folded(text))
    assert "\x1b[1m" in file.getvalue() and "\x1b[1;31m" in file.getvalue()


# --- lines with wide characters


def lines(text: str, width: int) -> list[str]:
    return [part.plain for part in lines_of(Text(text), Console(width=width), width)]


@given(st.text(alphabet="中文字，。（）、 ab·1%(", max_size=120), st.integers(4, 30))
def test_chinese_lines_fit_and_lose_nothing(text: str, width: int) -> None:
    found = lines(text, width)
    assert all(cell_len(line) <= width for line in found)
    assert "".join("".join(found).split()) == "".join(text.split())


def test_no_line_begins_with_a_closing_mark_or_ends_with_an_opening_one() -> None:
    text = "每个参数（包括词嵌入）有主权重、一阶矩、二阶矩，共 16 字节；激活值另计。" * 4
    for width in range(12, 80):
        for line in lines(text, width):
            assert line[0] not in "，。；、）", (width, line)
            assert line[-1] not in "（", (width, line)


def test_chinese_fills_its_lines() -> None:
    found = lines("显存取决于全部参数，而计算取决于激活参数。" * 10, 40)
    assert all(cell_len(line) >= 37 for line in found[:-1])


def test_a_word_among_chinese_stays_whole() -> None:
    assert lines("环形 all-reduce 等于一次 reduce-scatter 加一次", 24) == [
        "环形 all-reduce 等于一次",
        "reduce-scatter 加一次",
    ]


def test_a_formula_among_chinese_breaks_after_an_operator() -> None:
    found = lines("公式 layers·batch·seq·hidden·heads·head_dim", 16)
    assert all(cell_len(line) <= 16 for line in found)
    assert found[1].endswith("·")


def test_the_rest_of_a_part_that_is_cut_goes_on_without_a_space() -> None:
    name = "model.layers.*.post_attention_layernorm.weight"
    for width in range(3, 50):
        parts = [part.plain for part in lines_of(Text(name), Console(width=width), width)]
        assert "".join(parts) == name
        assert max(map(len, parts)) <= width
