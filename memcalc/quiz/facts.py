"""The facts that a question gives: the letters of its rule, or the setup of its report."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Final

from memcalc.explanation.letters import LETTERS
from memcalc.explanation.words import Words

if TYPE_CHECKING:
    from memcalc.estimation.report import Report
    from memcalc.families.base.architecture import Architecture
    from memcalc.setup.setup import Setup

_GIVEN: Final = Words("Given: {facts}.", "已知：{facts}。")
_LETTER: Final = Words("{letter} = {number} ({words})", "{letter} = {number}（{words}）")
_SETUP: Final = Words("Setup: {facts}.", "设置：{facts}。")
_MODEL: Final = Words("{name} with {count:,} parameters", "{name}，{count:,} 个参数")
_POLICY_AND_VALUE: Final = Words(
    "{name}, as policy and value model together {count:,} parameters", "{name}，策略模型与价值模型共 {count:,} 个参数"
)
_SIZE: Final = Words("a model of {count:,} parameters", "{count:,} 个参数的模型")
_DIMS: Final = Words(
    "{layers} layers, hidden size {hidden}, {heads} attention heads of {head_dim}, {kv_heads} key-value heads, {mlp} of width "
    "{ffn}, vocabulary {vocab}",
    "{layers} 层，隐藏维度 {hidden}，{heads} 个注意力头（每头 {head_dim}），{kv_heads} 个 KV 头，{mlp}宽度 {ffn}，词表 {vocab}",
)
_GATED: Final = {True: Words("a gated MLP", "门控 MLP "), False: Words("an MLP", "MLP ")}
_TIED: Final = {
    True: Words("the output head shares the embedding's weights", "输出层与词嵌入共享权重"),
    False: Words("an output head of its own", "输出层有独立权重"),
}
_EXPERTS: Final = Words(
    "in each layer {count} experts of width {ffn}, {per_token} for a token",
    "每层 {count} 个专家（宽度 {ffn}），每个 token 用 {per_token} 个",
)
_GPUS: Final = Words("{gpus} GPUs", "{gpus} 张 GPU")
_ONE_GPU: Final = Words("1 GPU", "1 张 GPU")
_DEGREES: Final = {
    "dp": Words("data parallel {n}", "数据并行 {n}"),
    "tp": Words("tensor parallel {n}", "张量并行 {n}"),
    "pp": Words("pipeline stages {n}", "流水线阶段 {n}"),
    "cp": Words("context parallel {n}", "上下文并行 {n}"),
    "ep": Words("expert parallel {n}", "专家并行 {n}"),
}
_PLAIN: Final = Words("PyTorch with transformers' modules", "PyTorch（transformers 的模块）")
_ENGINES: Final = {
    "ddp": "torch DDP",
    "fsdp1": "FSDP1",
    "fsdp2": "FSDP2",
    "deepspeed": "DeepSpeed",
    "megatron": "Megatron",
}
_STAGE: Final = Words("{engine} with ZeRO stage {zero}", "{engine}，ZeRO 第 {zero} 阶段")
_DISTRIBUTED: Final = Words("Megatron with its distributed optimizer", "Megatron，使用分布式优化器")
_RESHARDED: Final = Words("FSDP2 (reshards after forward)", "FSDP2（前向后重新切分）")
_SEQUENCE_PARALLEL: Final = {
    True: Words("with sequence parallelism", "使用序列并行"),
    False: Words("without sequence parallelism", "不使用序列并行"),
}
_BATCH: Final = Words(
    "micro-batch {batch} × {seq} tokens, micro-batches a step: {count}",
    "微批次 {batch} × {seq} 个 token，每步 {count} 个微批次",
)
_METHOD: Final = Words("precision {precision}, optimizer {optimizer}", "精度 {precision}，优化器 {optimizer}")
_ATTENTION: Final = Words("attention {attention}", "注意力 {attention}")
_RECOMPUTE: Final = Words("recomputation {recompute}", "重计算 {recompute}")
_SCHEDULE: Final = Words("schedule {schedule}", "调度 {schedule}")
_CHUNKS: Final = Words("{chunks} model chunks a stage", "每阶段 {chunks} 个模型块")
_RANK: Final = Words("pipeline stage {number} of {stages}", "第 {number} 个流水线阶段（共 {stages} 个）")


def given(numbers: Mapping[str, int | float], language: str) -> str:
    """Return what the letters of a rule stand for, with their numbers; '' without letters."""
    if not numbers:
        return ""
    facts = (
        _LETTER.said(language, number=f"{number:,}", words=LETTERS[letter].words.said(language), letter=letter)
        for letter, number in numbers.items()
    )
    return _GIVEN.said(language, facts=_joined(facts, language))


def setup_of(report: Report, language: str) -> str:
    """Return the model's dims and every option that the bytes or FLOPs of a report depend on."""
    return _SETUP.said(language, facts=("；" if language == "zh" else "; ").join(_facts(report, language)))


def _facts(report: Report, language: str) -> Iterator[str]:
    model, setup = report.model, report.setup
    words = _SIZE if model.name in (None, "", model.model_type) else _MODEL
    if setup.task == "ppo":
        words = _POLICY_AND_VALUE
    yield words.said(language, name=model.name, count=model.num_parameters)
    architecture = _architecture(report)
    if architecture is not None:
        yield _dims(architecture, language)
    yield _joined(_layout(report, language), language)
    yield _METHOD.said(language, precision=setup.precision, optimizer=setup.optimizer)
    if not report.states_only:
        yield _joined(_work(setup, language), language)


def _architecture(report: Report) -> Architecture | None:
    if report.states_only:
        return None
    support = report.model.support
    read = None if support is None else support.architecture
    return None if read is None else read(report.model.program.config)


def _dims(of: Architecture, language: str) -> str:
    dims = {name: getattr(of, name) for name in ("layers", "hidden", "heads", "head_dim", "kv_heads", "ffn", "vocab")}
    facts = [_DIMS.said(language, mlp=_GATED[of.gated].said(language), **dims), _TIED[of.tied].said(language)]
    if of.experts is not None:
        experts = of.experts
        facts.append(_EXPERTS.said(language, count=experts.count, ffn=experts.ffn, per_token=experts.per_token))
    return _joined(facts, language)


def _layout(report: Report, language: str) -> Iterator[str]:
    setup = report.setup
    if setup.gpus == 1:
        yield _ONE_GPU.said(language)
    else:
        yield _GPUS.said(language, gpus=setup.gpus)
        for axis, words in _DEGREES.items():
            if getattr(setup, axis) > 1:
                yield words.said(language, n=getattr(setup, axis))
    yield _engine(setup, language)
    if setup.tp > 1:
        yield _SEQUENCE_PARALLEL[setup.sequence_parallel].said(language)
    if setup.pp > 1:
        yield _SCHEDULE.said(language, schedule=setup.schedule)
        if setup.virtual_stages > 1:
            yield _CHUNKS.said(language, chunks=setup.virtual_stages)
        if setup.pp_rank is not None:
            yield _RANK.said(language, number=setup.pp_rank + 1, stages=setup.pp)


def _engine(setup: Setup, language: str) -> str:
    if setup.engine == "megatron" and setup.zero:
        return _DISTRIBUTED.said(language)
    if setup.engine == "fsdp2" and setup.zero == 3:
        return _RESHARDED.said(language)
    if setup.engine == "none":
        return _PLAIN.said(language)
    engine = _ENGINES.get(setup.engine, setup.engine)
    return _STAGE.said(language, engine=engine, zero=setup.zero) if setup.engine == "deepspeed" else engine


def _work(setup: Setup, language: str) -> Iterator[str]:
    yield _BATCH.said(language, batch=setup.micro_batch_size, seq=setup.seq_len, count=setup.micro_batches)
    yield _ATTENTION.said(language, attention=setup.attention)
    if setup.recompute != "none":
        yield _RECOMPUTE.said(language, recompute=setup.recompute)


def _joined(facts: Iterable[str], language: str) -> str:
    return ("，" if language == "zh" else ", ").join(facts)
