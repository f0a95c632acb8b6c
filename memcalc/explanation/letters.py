"""The letters of the formulas that people quote: what each stands for, and its value in a setup."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.errors import InputError
from memcalc.explanation import of_layers
from memcalc.explanation.words import Words
from memcalc.tuning.lora import COMPONENT as ADAPTERS

if TYPE_CHECKING:
    from memcalc.estimation.report import Report
    from memcalc.families.base.architecture import Architecture

_NAME: Final = re.compile(r"[A-Za-zΦ]")


class Letter(NamedTuple):
    """A letter: its meaning, and how its value is read off a report."""

    words: Words
    value: Callable[[Report], int]


def architecture_of(report: Report) -> Architecture:
    """Return the dims of a model of equal layers with attention and an MLP. Raise InputError if the model is another."""
    if report.states_only:
        raise InputError("--params: a bare number of parameters has no layers; allowed: --model")
    support = report.model.support
    if support is None or support.architecture is None:
        kind = f"{report.model.name} ({report.model.model_type})"
        raise InputError(
            f"--model {kind}: the rule is about equal layers of attention and an MLP; allowed: llama-7b, gpt2-xl, …"
        )
    return support.architecture(report.model.program.config)


def _of_model(name: str) -> Callable[[Report], int]:
    return lambda report: getattr(report.model, name)


def parameters_of(report: Report) -> int:
    """Return the model's parameters; where a value model trains too, those of the policy."""
    model = report.model
    return (model.whole if report.setup.task == "ppo" else model).num_parameters


def _of_setup(name: str) -> Callable[[Report], int]:
    return lambda report: getattr(report.setup, name) or 0


def _data_parallel(report: Report) -> int:
    """Return the GPUs that the states are sharded over; with whole states, the GPUs that have a replica each."""
    setup = report.setup
    return setup.shards if setup.zero else setup.dp * setup.cp


def _of_a_node(report: Report) -> int:
    return min(report.setup.gpus, report.setup.gpus_per_node)


def _tokens(report: Report) -> int:
    setup = report.setup
    return setup.micro_batches * setup.micro_batch_size * (setup.seq_len or 0)


def _of_architecture(name: str) -> Callable[[Report], int]:
    return lambda report: getattr(architecture_of(report), name)


def _experts_per_token(report: Report) -> int:
    experts = architecture_of(report).experts
    if experts is None:
        raise InputError(f"--model {report.model.name}: has no experts; allowed: a mixture of experts, as mixtral-8x7b")
    return experts.per_token


def _side(report: Report) -> int:
    """Return the ranks along one edge of the grid that tensor-parallel ranks form."""
    from memcalc.layout.tensor_dims.grid import grid_of

    grid = grid_of(report.setup.tp_dims, report.setup.tp, report.setup.tp_depth)
    assert grid is not None
    return grid.side


def _depth(report: Report) -> int:
    return report.setup.tp_depth or 1


def _rank(report: Report) -> int:
    if not report.setup.lora_rank:
        raise InputError("--lora-rank 0: the rule is about adapters; allowed: 1 or more")
    return report.setup.lora_rank


def _of_base(report: Report) -> int:
    _rank(report)
    return report.model.whole.num_parameters


def _adapted(report: Report) -> int:
    _rank(report)
    return sum(weight.component == ADAPTERS for weight in report.model.program.weights()) // 2


LETTERS: Final[dict[str, Letter]] = {
    "Φ": Letter(Words("parameters", "参数量"), parameters_of),
    "A": Letter(Words("parameters that a token uses", "每个 token 激活的参数量"), _of_model("active_parameters")),
    "n": Letter(Words("data-parallel GPUs", "数据并行的 GPU 数"), _data_parallel),
    "z": Letter(
        Words("GPUs that share a second partition", "共享第二份权重分片的 GPU 数"), _of_setup("zero_hpz_partition_size")
    ),
    "N": Letter(Words("GPUs", "GPU 总数"), _of_setup("gpus")),
    "g": Letter(Words("GPUs of a node", "一个节点的 GPU 数"), _of_a_node),
    "b": Letter(Words("sequences of a micro-batch", "微批次的序列数"), _of_setup("micro_batch_size")),
    "s": Letter(Words("tokens of a sequence", "序列长度"), _of_setup("seq_len")),
    "m": Letter(Words("micro-batches", "微批次数"), _of_setup("micro_batches")),
    "T": Letter(Words("tokens of a GPU in a step", "每张 GPU 每步的 token 数"), _tokens),
    "t": Letter(Words("tensor-parallel GPUs", "张量并行度"), _of_setup("tp")),
    "q": Letter(Words("ranks along an edge of the grid", "网格一条边上的 rank 数"), _side),
    "D": Letter(Words("squares of the grid", "网格的层数（深度）"), _depth),
    "p": Letter(Words("pipeline stages", "流水线阶段数"), _of_setup("pp")),
    "v": Letter(Words("model chunks of a stage", "每个阶段的模型块数"), _of_setup("virtual_stages")),
    "c": Letter(Words("context-parallel GPUs", "上下文并行度"), _of_setup("cp")),
    "e": Letter(Words("expert-parallel GPUs", "专家并行度"), _of_setup("ep")),
    "L": Letter(Words("layers", "层数"), _of_architecture("layers")),
    "h": Letter(Words("hidden size", "隐藏维度"), _of_architecture("hidden")),
    "a": Letter(Words("attention heads", "注意力头数"), _of_architecture("heads")),
    "k": Letter(Words("key-value heads", "KV 头数"), _of_architecture("kv_heads")),
    "d": Letter(Words("size of a head", "每个头的维度"), _of_architecture("head_dim")),
    "f": Letter(Words("width of the MLP", "MLP 宽度"), _of_architecture("ffn")),
    "V": Letter(Words("vocabulary", "词表大小"), _of_architecture("vocab")),
    "B": Letter(Words("parameters of the base", "底座的参数量"), _of_base),
    "M": Letter(Words("adapted matrices", "被适配的矩阵数"), _adapted),
    "r": Letter(Words("rank of the adapters", "适配器的秩"), _rank),
    "I": Letter(Words("input channels of a filter", "每个滤波器的输入通道"), of_layers.channels_in),
    "O": Letter(Words("filters", "滤波器数"), of_layers.filters),
    "Q": Letter(Words("side of the kernel", "卷积核边长"), of_layers.kernel),
    "W": Letter(Words("side of the image", "图像边长"), of_layers.height),
    "Z": Letter(Words("padding at each side", "每侧的填充"), of_layers.padding),
    "S": Letter(Words("stride", "步长"), of_layers.stride),
    "X": Letter(Words("convolutions on top of each other", "叠加的卷积数"), of_layers.convolutions),
    "C": Letter(Words("channels", "通道数"), of_layers.normed),
    "E": Letter(Words("features of a step", "每步的特征数"), of_layers.features),
    "H": Letter(Words("hidden units", "隐藏单元数"), of_layers.units),
    "K": Letter(Words("experts of a token", "每个 token 的专家数"), _experts_per_token),
}


def letters_in(formula: str) -> tuple[str, ...]:
    """Return the letters of a formula in their order, each once."""
    return tuple(dict.fromkeys(_NAME.findall(formula)))


def values(formula: str, report: Report) -> dict[str, int]:
    """Return the value of each letter of a formula in a setup. Raise InputError if the model has no such dim."""
    return {letter: LETTERS[letter].value(report) for letter in letters_in(formula)}


def meanings(letters: Iterable[str], language: str, more: Mapping[str, Words]) -> str:
    """Return the meanings of letters, of this module and of `more`: "Φ parameters, n data-parallel GPUs"."""
    known = {letter: found.words for letter, found in LETTERS.items()} | {**more}
    return ("，" if language == "zh" else ", ").join(f"{each} {known[each].said(language)}" for each in letters)
