"""Random choices."""

from __future__ import annotations

from memcalc.inputs.model import bundled_spec
from memcalc.quiz import numbers
from memcalc.quiz.numbers import Draw, Setup


def test_models_exist() -> None:
    for names in (numbers.GPTS, numbers.LLAMAS, numbers.GROUPED, numbers.EXPERTS):
        assert all(bundled_spec(name) is not None for name in names)


def test_a_choice_is_each_of_them_some_time() -> None:
    draw = Draw("a")
    assert {draw.one_of("abc") for _ in range(100)} == set("abc")
    assert sorted(draw.shuffled(range(10))) == list(range(10))
    assert Draw("a").shuffled(range(10)) == Draw("a").shuffled(range(10))
    assert Draw("a").shuffled(range(10)) != Draw("b").shuffled(range(10))


def test_a_gpu_clearly_has_room_or_not() -> None:
    for seed in range(50):
        size = 48 * 10**9
        assert abs(numbers.gigabytes(Draw(str(seed)), size) * 10**9 - size) > size / 20


def test_a_command() -> None:
    setup = Setup(model="llama-7b", options={"gpus": 8, "micro_batch_size": 2})
    assert setup.command("zero") == "memcalc explain zero --model llama-7b --gpus 8 --micro-batch-size 2"
    assert Setup(params="7B").command("adam") == "memcalc explain adam --params 7B"
    assert Setup().command("trillion") == "memcalc explain trillion"
