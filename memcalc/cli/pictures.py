"""The pictures of a report: its timeline on the terminal, and files that other programs open."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from memcalc.cli.output import STDOUT
from memcalc.cli.waiting import waiting
from memcalc.errors import InputError, one_line

if TYPE_CHECKING:
    from memcalc.estimation.report import Report
    from memcalc.pictures.timeline import Timeline

Drawn = Annotated[bool, typer.Option("--timeline", help="Draw the step, block by block.", rich_help_panel="Output")]
Snapshot = Annotated[
    Path | None,
    typer.Option(
        "--snapshot",
        help="Write the step as a snapshot that PyTorch's memory_viz page opens.",
        rich_help_panel="Output",
        show_default=False,
    ),
]
Trace = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        help="Write the step as a trace for Perfetto (.json, .json.gz).",
        rich_help_panel="Output",
        show_default=False,
    ),
]
STATES_ONLY = "needs the step of a model, and --params gives a size alone; allowed: --model in the place of --params"


class Pictures(NamedTuple):
    """The pictures that are asked for."""

    timeline: bool
    snapshot: Path | None
    trace: Path | None

    @property
    def files(self) -> dict[str, Path]:
        """Return the files to write, by option. An empty word counts as a file: it is not converted to a path."""
        named = {"--snapshot": self.snapshot, "--trace": self.trace}
        return {option: file for option, file in named.items() if file is not None}

    @property
    def asked(self) -> list[str]:
        """Return the options that ask for a picture."""
        return [*(["--timeline"] if self.timeline else []), *self.files]


def check_files(files: Mapping[str, Path | None]) -> None:
    """Raise InputError if an option names no file, or two options name the same one."""
    taken: dict[Path, str] = {}
    for option, file in files.items():
        if file is None or (option == "--output" and str(file) in ("", STDOUT)):
            continue
        if str(file) in ("", STDOUT):
            raise InputError(f"{option} {one_line(file)}: expected the name of a file")
        place = _place(option, Path(file))
        if place in taken and (place.is_file() or not place.exists()):
            raise InputError(
                f"{option} {one_line(file)}: {taken[place]} writes to this file too; allowed: another name"
            )
        taken[place] = option


def _place(option: str, file: Path) -> Path:
    try:
        return file.resolve()
    except (OSError, ValueError, RuntimeError) as error:
        raise _unwritable(option, file, error) from None


def check_pictures(pictures: Pictures, *, output: Path | None, page: Path | None, states_only: bool) -> None:
    """Raise InputError if a picture has no file to go to, or needs a model that is not given."""
    check_files({"--output": output, "--html": page, **pictures.files})
    if pictures.asked and states_only:
        raise InputError(f"{pictures.asked[0]}: {STATES_ONLY}")


def recorded(pictures: Pictures, report: Report) -> Timeline | None:
    """Return the timeline that the pictures need, with all files written; None if no picture is asked for."""
    if not pictures.asked:
        return None
    from memcalc.pictures.timeline import timeline_of

    with waiting("the step, recorded"):
        timeline = timeline_of(report)
        contents = {option: _content(option, file, timeline, report) for option, file in pictures.files.items()}
    for option, content in contents.items():
        _write(option, pictures.files[option], content)
    if contents and not pictures.timeline:
        for note in timeline.notes:
            print(f"memcalc: {note}", file=sys.stderr)
    return timeline


def _content(option: str, file: Path, timeline: Timeline, report: Report) -> bytes:
    if option == "--snapshot":
        from memcalc.pictures.snapshot import snapshot_bytes

        return snapshot_bytes(timeline)
    from memcalc.pictures.trace import trace_bytes

    return trace_bytes(timeline, report, compressed=file.suffix.lower() == ".gz")


def _write(option: str, file: Path, content: bytes) -> None:
    try:
        file.write_bytes(content)
    except (OSError, ValueError) as error:
        raise _unwritable(option, file, error) from None


def _unwritable(option: str, file: Path, error: Exception) -> InputError:
    why = error.strerror if isinstance(error, OSError) and error.strerror else error
    return InputError(f"{option} {one_line(file)}: cannot be written ({one_line(why)})")


def draw(timeline: Timeline, *, kind: str, output: Path | None) -> None:
    """Print the drawing after the table. If stdout has a document for other programs, print it on stderr."""
    from memcalc.pictures.chart import print_timeline

    has_document = kind != "table" and (output is None or str(output) == STDOUT)
    print_timeline(timeline, sys.stderr if has_document else sys.stdout)
