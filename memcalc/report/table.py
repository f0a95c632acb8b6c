"""The report as a person reads it: what fills the memory, which phase peaks and why, what is sent, does it fit, what helps."""

from __future__ import annotations

from itertools import zip_longest
from typing import IO, TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from memcalc.core.rows import COMPONENTS, Item
from memcalc.engines.deepspeed import stages as deepspeed
from memcalc.estimation.report import PHASES
from memcalc.hardware.cost import Unknown, step_time
from memcalc.megatron.schedules import layers_of_chunks
from memcalc.pipelining.idle import idle_share
from memcalc.pipelining.programs import divided
from memcalc.report.advice_lines import advice_lines
from memcalc.report.all_ranks import all_ranks_table
from memcalc.report.bars import bar, full_bar
from memcalc.report.collectives import Numbers, add_words
from memcalc.report.compute import compute_lines
from memcalc.report.consoles import console_for
from memcalc.report.defaults import default_lines
from memcalc.report.fitting import left_out
from memcalc.report.folding import Folded
from memcalc.report.notes import notes
from memcalc.report.per_layer import per_layer_table
from memcalc.report.rows_table import rows_table
from memcalc.report.verdict import verdict_text
from memcalc.units import show_bytes, show_count, show_seconds

if TYPE_CHECKING:
    from memcalc.estimation.report import Report
    from memcalc.setup.setup import Setup

_LABELS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_states": "optimizer states",
    "saved_activations": "saved activations",
    "buffers": "buffers",
    "temporaries": "temporaries",
}
_MOST_RANKS = 8
_NARROW = 70  # columns; below them the tables keep names and sizes only
_WIDE = 90  # columns that the communication needs, with its times; below them a collective is on two lines


def print_report(
    report: Report, *, rows: bool, file: IO[str], per_layer: bool = False, all_ranks: bool = False
) -> None:
    """Print to a terminal with colour and at its width; to anything else plain, 100 columns wide (rows 220, ranks 120) unless
    COLUMNS says otherwise."""
    console = console_for(file, 220 if rows else 120 if all_ranks else 100)
    parts: list[RenderableType] = [_title(report), *_trace_lines(report), *_memory_table(report, console.width)]
    parts += [*_phase_lines(report), *_pipeline_lines(report), *compute_lines(report)]
    if report.collectives:
        parts += ["", *_communication_table(report, console.width), *_communication_lines(report)]
    if all_ranks:
        parts += ["", *all_ranks_table(report, console.width)]
    if per_layer:
        parts += ["", *per_layer_table(report, console.width)]
    if rows:
        parts += ["", *rows_table(report, console.width)]
    verdict = verdict_text(report)
    if verdict is not None:
        parts += ["", Folded(verdict)]
    console.print(Group(*parts))  # before the search for advice, which may take longer than all else
    file.flush()
    lines = advice_lines(report)
    if lines:
        console.print(Group(*lines))


def setup_line(report: Report) -> str:
    """The title's words, for other formats."""
    return " ".join(_title(report).plain.split())


def verdict_lines(report: Report) -> list[str]:
    """The verdict's words, for other formats; none without a GPU."""
    verdict = verdict_text(report)
    return [] if verdict is None else verdict.plain.splitlines()


def _title(report: Report) -> Text:
    model, s = report.model, report.setup
    count = f"{show_count(model.num_parameters)} parameters"
    parts = [count] if model.name else []
    parts.append(f"{s.gpus} GPU{'s' if s.gpus > 1 else ''}")
    engine = s.engine if s.engine != "none" else "plain PyTorch"
    parts.append(f"{engine}, ZeRO {s.zero}" if s.zero or s.engine == "deepspeed" else engine)
    parts += _layout(report)
    parts += [s.precision, f"{s.optimizer} ({s.optimizer_implementation})"]
    if s.clip_grad_norm:
        parts.append("gradients clipped")
    if s.micro_batches > 1:
        parts.append(f"{s.micro_batches} micro-batches{_reduced(s)}")
    if s.seq_len is not None:
        if model.program.has_sequence:
            parts.append(f"micro-batch {s.micro_batch_size} × {s.seq_len} tokens{', padded' if s.padded else ''}")
            parts.append(f"{s.attention} attention")
        else:
            parts.append(f"micro-batch {s.micro_batch_size}")
        if s.recompute != "none":
            parts.append(f"recompute {s.recompute}{_first_layers(s)}")
        if s.kernels != "hf":
            parts.append(f"{s.kernels} kernels")
        if s.cross_entropy != "eager":
            parts.append(f"{s.cross_entropy} cross-entropy")
    else:
        parts.append("model states only")
    text = Text(model.name or count, style="bold")
    text.append("  " + " · ".join(parts), style="not bold")
    return text


def _reduced(s: Setup) -> str:
    """When gradients of several micro-batches are reduced, where there is a choice."""
    if s.sync_each_micro_batch is None:
        return ""
    return (
        ", gradients reduced after each" if s.sync_each_micro_batch else ", gradients reduced after the last (no_sync)"
    )


def _layout(report: Report) -> list[str]:
    """The parallel degrees, where there is more than one GPU."""
    s = report.setup
    if s.gpus == 1:
        return []
    axes = [("tp", s.tp), ("pp", s.pp), ("cp", s.cp), ("ep", s.ep)]
    shown = [(name, degree) for name, degree in axes if degree > 1] + ([("etp", s.etp)] if s.etp != s.tp else [])
    degrees = " · ".join(f"{name} {degree}" for name, degree in [*shown, ("dp", s.dp)])
    heads: Any = getattr(report.model.program, "kv_heads", None) if s.seq_len is not None else None
    each = s.tp if heads is None else heads.size
    return [
        degrees,
        *([f"shard group {s.shards}"] if s.zero and s.replicas > 1 else []),
        *(["sequence parallel"] if s.sequence_parallel else []),
        *([f"cp rank {report.rank.cp}, which has most"] if report.rank.cp is not None else []),
        *([f"{s.cp_comm_type} of keys and values"] if s.cp_comm_type not in (None, "p2p") else []),
        *([f"{s.tp // each} ranks share a key/value head"] if s.engine == "megatron" and each < s.tp else []),
    ]


def _part(setup: Setup) -> str:
    """Return what of a model a pipeline rank has one or several of."""
    return "chunk" if setup.virtual_stages > 1 else "stage"


def _first_layers(setup: Setup) -> str:
    if setup.recompute_layers is None:
        return ""
    layers = f"{setup.recompute_layers} layer{'s' if setup.recompute_layers > 1 else ''}"
    return f" of {layers}{f' a {_part(setup)}' if setup.pp > 1 else ''}"


def _pipeline_lines(report: Report) -> list[Text]:
    """The peak of every pipeline rank, and what the pipeline wastes."""
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
    if s.engine == "fsdp2":
        counts = divided(report.model.layers, *division)
        spread = f"layers of each stage: {', '.join(map(str, counts))}"
    elif s.engine == "deepspeed":
        counts = [span.layers for span in deepspeed.spans(report.model.layers, s.pp)]
        spread = f"layers of each stage: {', '.join(map(str, counts))}"
    else:
        counts = layers_of_chunks(report.model.layers, *division)
        spread = _uneven_line(counts, division[1:] != (None, None), _part(s))
    alike = ", were all stages equal" if len(set(counts)) > 1 else ""
    return [
        Text(f"pipeline ranks, by peak: {peaks}; above is rank {report.rank.number}"),
        Text(f"{s.schedule}{chunks}, {batches}: the bubble is {idle_share(s):.1%} of the ideal time{alike}"),
        *([Text(spread)] if len(set(counts)) > 1 else []),
    ]


def _uneven_line(counts: list[int], given: bool, what: str) -> str:
    """How the layers are spread, and Megatron's options that spread them so."""
    usual = max(counts[1:-1], default=max(counts))
    flags = [
        f"--account-for-{part}-in-pipeline-split"
        for part, count in (("embedding", counts[0]), ("loss", counts[-1]))
        if count != usual
    ]
    why = "" if given else f" ({', '.join(flags)})"
    others = f", {usual} in the others" if len(counts) > 2 else ""
    return f"layers: {counts[0]} in the first {what}, {counts[-1]} in the last{others}{why}"


def _trace_lines(report: Report) -> list[Text]:
    traced = [f"no program of this type: {report.traced}"] if report.traced else []
    return [Text(line) for line in (*default_lines(report), *traced, *notes(report))]


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", header_style="bold", box=None, pad_edge=False)


def _memory_table(report: Report, width: int) -> list[RenderableType]:
    """With a line of what the width leaves out."""
    table, narrow = _table("Memory per GPU"), width < _NARROW
    lines: list[tuple[list[str], str]] = []

    def add(name: str, most: int | None, at_peak: int, note: str, style: str = "", bar: str = "") -> None:
        sizes = ["" if most is None else show_bytes(most), show_bytes(at_peak)]
        lines.append(([name, *sizes, *([] if narrow else [bar, note])], style))

    for component in COMPONENTS:
        items = [i for i in report.items if i.component == component]
        at_peak = sum(i.at_peak for i in items)
        most = report.total(component) if component != "temporaries" else None
        if at_peak or most:
            shown = bar(at_peak, report.peak, full_bar(width))
            add(_LABELS[component], most, at_peak, _largest(items), "" if at_peak else "dim", shown)
    add("peak", None, report.peak, f"in {report.peak_phase}", "bold")
    blocks = "rounding to 512 B" if report.played is None else "blocks as they are split"
    add("allocated", None, report.allocated, f"+ {blocks}, cuBLAS workspaces")
    add("reserved", None, report.reserved, _reserved_note(report))
    nccl = ", NCCL" if report.setup.gpus > 1 else ""
    basis = " and ".join(sorted({item.basis for item in report.overheads if item.component == "device"}))
    add("device", None, report.device, f"+ CUDA context{nccl} ({basis})")
    table.add_column("component", no_wrap=not narrow)
    table.add_column("most", justify="right", no_wrap=True)
    table.add_column("at the peak", justify="right", no_wrap=True)
    if not narrow:
        others = [max(len(cells[i]) for cells, _ in lines) for i in (0, 1, 3)]
        room = width - sum(others) - len("at the peak") - 4 * 2  # two between columns
        table.add_column("", no_wrap=True)
        table.add_column("largest row", overflow="ellipsis", no_wrap=True, max_width=room)
    for cells, style in lines:
        table.add_row(*cells, style=style)
    return [table, *([Text(left_out(["bars", "the largest row of each component"]))] if narrow else [])]


def _reserved_note(report: Report) -> str:
    if any(item.basis == "measured" for item in report.overheads if item.component == "reserved"):
        return "+ fragmentation (measured)"
    if report.played is None:
        return "+ fragmentation (assumed)"
    return f"+ fragmentation, {report.played.steps} steps replayed"


def _largest(items: list[Item]) -> str:
    largest = max(items, key=lambda i: (i.at_peak, i.nbytes))
    return f"{show_bytes(largest.at_peak or largest.nbytes)}  {largest.name}"  # a narrow table cuts the name


def _phase_lines(report: Report) -> list[Text]:
    line = Text("\npeak by phase: ")
    for i, (phase, size) in enumerate(report.phases.items()):
        line.append(" · " if i else "")
        line.append(f"{phase} {show_bytes(size)}", style="bold" if phase == report.peak_phase else "")
    return [line, Text(f"{report.peak_phase} peaks because {_why(report)}")]


def _why(report: Report) -> str:
    """Return what the peak holds that the other phases' peaks hold less of."""
    components = ("temporaries", "gradients", "saved_activations", "buffers")
    moving = [i for i in report.items if i.at_peak and i.component in components and i.life != "always"]
    moving.sort(key=lambda i: -i.at_peak)
    named = [f"{i.name} ({show_bytes(i.at_peak)})" for i in moving[:3]]
    if not named:
        return "the model states are all there is"
    return "on top of the states it holds " + ", ".join(named)


def _communication_table(report: Report, width: int) -> list[RenderableType]:
    """With a line of what the width leaves out."""
    table, timed = _table("Communication per step and GPU"), report.gpu is not None
    numbers, left_out = Numbers(("ranks", "calls", "payload", "wire", *(["time"] if timed else []))), ""
    if width < _WIDE:
        numbers, left_out = numbers.that_fit(width)
    words_of = add_words(table, ("phase", "collective", "what"), on_one_line=width >= _WIDE)
    for name in numbers.names:
        table.add_column(name, justify="right", no_wrap=True)

    def add(words: tuple[str, str, str], counts: tuple[str, str], sizes: tuple[int, int], time: str) -> None:
        cells = [*counts, *(show_bytes(size) for size in sizes), time]
        table.add_row(*words_of(words), *cells[: len(numbers.names)], style="" if words[1] else "bold")

    both = zip_longest(report.collectives, report.costs)
    for c, cost in sorted(both, key=lambda pair: PHASES.index(pair[0].phase)):
        time = "?" if cost is None or isinstance(cost, Unknown) else show_seconds(cost.seconds)
        time = time if c.overlap == "exposed" else f"({time})"
        add((c.phase, c.collective, c.name), (str(c.group_size), str(c.calls)), (c.payload, c.wire), time)
    total = step_time(report.collectives, report.costs) if timed else None
    sizes = sum(c.payload for c in report.collectives), sum(c.wire for c in report.collectives)
    add(("all", "", ""), ("", ""), sizes, show_seconds(total.total) if total else "")
    return [table, *([Text(left_out)] if left_out else [])]


def _communication_lines(report: Report) -> list[Text]:
    payload, wire = report.per_layer()
    lines = [Text(f"per layer: payload {show_bytes(payload)}, wire {show_bytes(wire)}"), *_time_lines(report)]
    if report.textbook:
        wire = sum(c.wire for c in report.textbook)
        kinds = " + ".join(f"{c.collective} {show_bytes(c.payload)}" for c in report.textbook)
        lines.append(
            Text(f"textbook: {kinds}; wire {show_bytes(wire)} (what is printed above is what the engine does)")
        )
    return lines


def _time_lines(report: Report) -> list[Text]:
    """Return what of the communication the step waits for, at the speed of data sheets."""
    if report.gpu is None:
        return []
    unknown = [cost.missing for cost in report.costs if isinstance(cost, Unknown)]
    if unknown:
        return [Text(f"no time for some of it: {unknown[0]}")]
    time = step_time(report.collectives, report.costs)
    assert time is not None
    hides = [("forward", time.forward), ("backward", time.backward)]
    behind = " and ".join(f"{show_seconds(seconds)} behind {phase}" for phase, seconds in hides if seconds)
    hidden = f"; in brackets what can hide, {behind}" if behind else ""
    return [Text(f"time: {show_seconds(time.exposed)} exposed{hidden} (NCCL's latencies, data-sheet bandwidths)")]
