"""Random numbers that make sense: models that exist, powers of two of GPUs, usual batches and sequences."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final, TypeVar

from memcalc.inputs.options import option_name
from memcalc.units import parse_count

T = TypeVar("T")

SIZES: Final = (
    "1.3B", "1.5B", "2.7B", "3B", "6.7B", "7B", "7.5B", "8B", "13B", "14B", "20B", "30B", "32B", "34B", "65B", "70B", "175B",
)  # fmt: skip
GIGABYTES: Final = (16, 24, 32, 40, 48, 80, 96, 141, 192, 288)
"""Memory of GPUs that exist, in GB as their names say."""
GPTS: Final = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "gpt3-2.7b", "gpt3-6.7b", "gpt3-175b")
SMALL_LLAMAS: Final = ("llama-7b", "llama-13b", "llama-2-7b", "llama-3-8b", "mistral-7b", "qwen2.5-7b", "qwen3-8b")
OF_32_LAYERS: Final = ("llama-7b", "llama-2-7b", "mistral-7b", "llama-3-8b")
"""Models whose layers 2, 4, 8, 16 and 32 stages share."""
LLAMAS: Final = (*SMALL_LLAMAS, "llama-30b", "llama-65b", "llama-2-70b", "llama-3-70b", "qwen2.5-14b", "qwen3-32b")
GROUPED: Final = ("llama-3-8b", "mistral-7b", "llama-2-70b", "llama-3-70b", "qwen3-8b", "qwen3-32b")
"""Models with 8 key-value heads."""
EXPERTS: Final = ("mixtral-8x7b", "mixtral-8x22b", "qwen3-30b-a3b", "qwen1.5-moe-a2.7b")


class Draw:
    """A source of random choices. One seed gives the same choices in every process and version of Python."""

    def __init__(self, seed: str) -> None:
        self._random = Random(seed)

    def one_of(self, choices: Sequence[T]) -> T:
        """Return one of the choices."""
        return choices[int(self._random.random() * len(choices))]  # random() is the part whose sequence is guaranteed

    def shuffled(self, things: Sequence[T]) -> list[T]:
        """Return the things in a random order."""
        left = list(things)
        return [left.pop(int(self._random.random() * len(left))) for _ in range(len(left))]


@dataclass(frozen=True)
class Setup:
    """The setup of a question: a model or a size alone, and options of `memcalc.estimate`."""

    model: str | None = None
    params: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def command(self, *topic: str) -> str:
        """Return the command that explains a topic in this setup, or without one the setup's estimate."""
        subject = ["--model", self.model] if self.model else ["--params", self.params] if self.params else []
        flags = [word for name, value in self.options.items() for word in (option_name(name), str(value))]
        return shlex.join(["memcalc", "explain", *topic, *subject, *flags])


Setups = Callable[[Draw], Setup]
"""Draws the setup of a question."""


def sizes(draw: Draw) -> Setup:
    """Return a size alone, on one GPU."""
    return Setup(params=draw.one_of(SIZES))


def sharded_sizes(draw: Draw) -> Setup:
    """Return a size alone on 4 to 1024 GPUs."""
    return Setup(params=draw.one_of(SIZES), options={"gpus": draw.one_of((4, 8, 16, 32, 64, 128, 256, 512, 1024))})


def sharded_models(draw: Draw) -> Setup:
    """Return a model on 4 to 256 GPUs."""
    return Setup(model=draw.one_of(LLAMAS), options={"gpus": draw.one_of((4, 8, 16, 32, 64, 128, 256))})


def plain_models(draw: Draw) -> Setup:
    """Return a decoder on one GPU with a batch and a length."""
    return Setup(model=draw.one_of(LLAMAS), options=batch_of(draw))


def gpts(draw: Draw) -> Setup:
    """Return a GPT on one GPU with a batch and a length."""
    return Setup(model=draw.one_of(GPTS), options={**batch_of(draw), "seq_len": draw.one_of((512, 1024))})


def batch_of(draw: Draw) -> dict[str, int]:
    """Return options of a micro-batch and a length."""
    return {"micro_batch_size": draw.one_of((1, 2, 4, 8)), "seq_len": draw.one_of((1024, 2048, 4096))}


def parameters(draw: Draw) -> int:
    """Return a usual number of parameters."""
    found = parse_count(draw.one_of(SIZES))
    assert found is not None
    return found


def gigabytes(draw: Draw, besides: int) -> int:
    """Return the memory of a GPU in GB that a size in bytes clearly fits or clearly does not."""
    return draw.one_of([each for each in GIGABYTES if abs(each * 10**9 - besides) > besides // 20])
