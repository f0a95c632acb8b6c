"""The lines on a pipeline: the peak of every rank, the bubble, and the layers of each stage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from rich.text import Text

from memcalc.engines.deepspeed import stages as deepspeed
from memcalc.megatron.schedules import layers_of_chunks
from memcalc.pipelining.idle import idle_share
from memcalc.pipelining.placement import stages
from memcalc.pipelining.programs import divided
from memcalc.pipelining.schedules import placement_of
from memcalc.report.title import part
from memcalc.units import show_bytes

if TYPE_CHECKING:
    from memcalc.estimation.report import Report

_MOST_RANKS: Final = 8


def pipeline_lines(report: Report) -> list[Text]:
    """Return lines with the peak of every pipeline rank (of many ranks, the main ones), the bubble, and the layers of each stage
    if the stages differ."""
    s = report.setup
    if s.pp == 1 or len(report.rank_peaks) == 1:
        return []
    shown = report.rank_peaks
    if len(shown) > _MOST_RANKS:
        least = min(shown, key=lambda rank: shown[rank])
        shown = {rank: shown[rank] for rank in sorted({0, report.rank.number, least, s.pp - 1})}
    peaks = " · ".join(f"{rank}: {show_bytes(peak)}" for rank, peak in shown.items())
    chunks = f", {s.virtual_stages} chunks a rank" if s.virtual_stages > 1 else ""
    batches = f"{s.micro_batches} micro-batch{'es' if s.micro_batches > 1 else ''}"
    division = s.pp * s.virtual_stages, s.first_stage_layers, s.last_stage_layers
    if s.engine == "fsdp2" and not report.model.program.one_stack:
        counts, spread = _of_two_stacks(report.model.program, s.pp, s.encoder_stages)
    elif s.engine == "fsdp2":
        many = stages(placement_of(s.schedule), s.pp, s.virtual_stages)
        counts = divided(report.model.layers, many, *division[1:])
        spread = f"layers of each stage: {', '.join(map(str, counts))}"
    elif s.engine == "deepspeed":
        counts = [span.layers for span in deepspeed.spans(report.model.layers, s.pp)]
        spread = f"layers of each stage: {', '.join(map(str, counts))}"
    else:
        counts = layers_of_chunks(report.model.layers, *division, s.stage_layers)
        if s.stage_layers is None:
            spread = _uneven_line(counts, division[1:] != (None, None), part(s))
        else:
            spread = f"layers of each {part(s)}: {', '.join(map(str, counts))}"
    uneven = len(set(counts)) > 1 or (s.engine == "fsdp2" and not report.model.program.one_stack)
    alike = " if all stages were equal" if uneven else ""
    return [
        Text(f"peak of pipeline rank {peaks}; the tables are of rank {report.rank.number}"),
        Text(f"{s.schedule}{chunks}, {batches}: the bubble is {idle_share(s):.1%} of the ideal time{alike}"),
        *([Text(spread)] if uneven else []),
        *([] if report.model.program.one_stack else [Text(_work_line(report))]),
    ]


def _of_two_stacks(program: Any, stages: int, given: int | None) -> tuple[list[int], str]:
    """Return the layers of each stage of an encoder and a decoder, and a line on them."""
    from memcalc.pipelining.encoded import layers_of_stages, stages_of_encoder  # of a few models alone

    counts = layers_of_stages(program.encoder_layers, program.decoder_layers, stages, given)
    of_encoder = given or stages_of_encoder(program.encoder_layers, program.decoder_layers, stages)
    own = [", ".join(map(str, part)) for part in (counts[:of_encoder], counts[of_encoder:])]
    return counts, f"layers of each stage: {own[0]} of the encoder, then {own[1]} of the decoder"


def _work_line(report: Report) -> str:
    """Return a line on the matrix products of each stage, over their mean. All stages wait for the largest."""
    products = [one.flops["total"] for one in report.each_rank()]
    mean = sum(products) / len(products)
    shares = ", ".join(f"{each / mean:.2f}" for each in products)
    slowest = products.index(max(products))
    return f"matrix products of each stage, over their mean: {shares}; the others wait for rank {slowest}"


def _uneven_line(counts: list[int], given: bool, what: str) -> str:
    """Return a line on the layers of each stage or chunk, with Megatron's options for such a split."""
    usual = max(counts[1:-1], default=max(counts))
    flags = [
        f"--account-for-{end}-in-pipeline-split"
        for end, count in (("embedding", counts[0]), ("loss", counts[-1]))
        if count != usual
    ]
    why = "" if given else f" ({', '.join(flags)})"
    others = f", {usual} in the others" if len(counts) > 2 else ""
    return f"layers: {counts[0]} in the first {what}, {counts[-1]} in the last{others}{why}"
