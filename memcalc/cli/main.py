"""The `memcalc` command. It builds only the sub-command that is called, and turns every error into one line."""

from __future__ import annotations

import gc
import io
import sys
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NoReturn

from memcalc.cli.completion import is_asked
from memcalc.cli.help import FLAG, as_help, name_off_forms, shorten
from memcalc.cli.streams import INTERRUPTED, drop, end_at_interrupt, open_closed
from memcalc.registry import Registry


def _command_of(stem: str, module: Any) -> tuple[str, Any] | None:
    """Return the name and module of a command: a module with an EPILOG and a function of its name. Return None for others."""
    return (stem.replace("_", "-"), module) if hasattr(module, "EPILOG") else None


COMMANDS: Final[Registry[Any]] = Registry(
    "memcalc.cli",
    ("estimate", "compare", "fit", "plan", "infer", "emit", "explain", "quiz", "validate", "models", "gpus"),
    _command_of,
    helpers=(
        "completion",
        "file_options",
        "group",
        "help",
        "html_page",
        "language",
        "lists",
        "main",
        "options",
        "output",
        "setup_options",
        "streams",
        "waiting",
    ),
)
"""The modules of the commands by name. Only the called command is imported."""


_HELP: Final = {"help_option_names": ["-h", "--help"]}


def build(names: Sequence[str], words: Sequence[str] | None = None):  # type: ignore[no-untyped-def]
    """Return a typer app with the named commands. With the words of a command line, a command may have only the options that
    these name."""
    import typer

    from memcalc.cli.group import group
    from memcalc.cli.setup_options import narrowed

    app = typer.Typer(
        name="memcalc",
        add_completion=len(names) > 1,
        pretty_exceptions_enable=False,
        context_settings=_HELP,
    )
    app.callback()(group)
    for name in names:
        module = COMMANDS[name]
        command = getattr(module, name.replace("-", "_"))
        command = command if words is None else narrowed(command, words)
        app.command(name, epilog=module.EPILOG, context_settings=_HELP)(command)
    return app


class _PlainCoercion:
    """The conversion of command-line words to numbers and paths.

    It replaces typer 0.29's pydantic adapters: one is built for every option, given or not, which takes longer than an
    estimate. A word that cannot be converted stays a word; `check_options` then says what is allowed.
    """

    def __init__(self, annotation: Any) -> None:
        self.annotation = annotation

    def coerce(self, value: Any, **_: Any) -> Any:
        if not isinstance(value, str) or not value or self.annotation not in (int, float, Path):
            return value
        try:
            return self.annotation(value)
        except ValueError:
            return value


def _without_adapters(command: Any) -> None:
    """Give every option of a typer command the plain coercion, if this version of typer would build adapters."""
    from typer import Context

    help_option = command.get_help_option(Context(command, **command.context_settings))
    for parameter in [*command.params, help_option]:
        if getattr(parameter, "_runtime_param", parameter) is None:
            parameter._runtime_param = _PlainCoercion(parameter.type_descriptor.annotation)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    for stream in (sys.stdout, sys.stderr):  # an encoding without the characters of bars is no reason to fail
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    if is_asked():
        _complete()
    try:
        status = _command(list(sys.argv[1:] if arguments is None else arguments) or ["--help"])
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        return _reader_gone()
    except OSError as error:
        drop(sys.stdout)
        return _fail(f"stdout: cannot be written ({error.strerror or error})")


def _command(args: list[str]) -> int:
    """Run the command that the first word names, or answer an option of `memcalc` itself. Return the exit status."""
    if args[:1] == ["--version"]:
        from memcalc import __version__

        print(f"memcalc {__version__}")
        return 0
    named = args[0] if args[0] in COMMANDS else None
    if named is None and not args[0].startswith("-"):
        return _fail(_unknown_command(args[0]))
    return _run([named] if named else list(COMMANDS), args)


def _complete() -> NoReturn:
    """Print the completions for the shell that runs this process, and end the process."""
    from typer.main import get_command

    get_command(build(list(COMMANDS)))(prog_name="memcalc")
    sys.exit(0)


def _run(names: list[str], args: list[str]) -> int:
    from typer import Abort, BadParameter, Exit
    from typer.main import get_command

    from memcalc.errors import InputError, one_line

    usage_error: Any = BadParameter.__mro__[1]  # UsageError, which typer does not export
    try:
        words = args if len(names) > 1 else [args[0], *getattr(COMMANDS[names[0]], "rewritten", list)(args[1:])]
        command: Any = get_command(build(names, None if len(names) > 1 else words[1:]))
        for each in (command, *command.commands.values()):
            _without_adapters(each)
        if {"-h", "--help", FLAG} & set(args):
            _for_help(command.commands.values(), short=FLAG not in args)
        status = command(args=as_help(words), standalone_mode=False, prog_name="memcalc")
        return status if isinstance(status, int) else 0
    except Exit as error:
        return error.exit_code
    except usage_error as error:
        return _fail(one_line(_misused(error, args), 300))
    except InputError as error:
        return _fail(str(error))
    except (Abort, KeyboardInterrupt):
        return INTERRUPTED
    except SystemExit:  # raised by typer and rich for a broken pipe
        return _reader_gone()


def _for_help(commands: Iterable[Any], *, short: bool) -> None:
    from memcalc.cli.setup_options import SETUP

    for each in commands:
        name_off_forms(each)
        if short:
            shorten(each, SETUP)


def _reader_gone() -> int:
    """Return status 0 after the reader of a pipe has closed it: nothing went wrong in this process."""
    drop(sys.stdout)
    return 0


def _misused(error: Any, words: Sequence[str]) -> str:
    """Return what the parser of the command line refuses: the option or the word, and what works."""
    message, option = error.format_message(), getattr(error, "option_name", None)
    if hasattr(error, "possibilities"):
        from memcalc.errors import nearest

        close = ", ".join(nearest(str(option), error.possibilities or ()))
        return f"{option}: unknown option; " + (f"did you mean {close}?" if close else "--help-all has all of them")
    if option is not None:  # "Option '--zero' requires an argument."
        _, _, wrong = message.rpartition("' ")
        return f"{option}: {wrong.rstrip('.')}"
    if message.startswith("Got unexpected extra argument"):
        taken = {name: one for one in error.cmd.params for name in one.opts}
        for name, value in pairwise(words):  # an option has taken the next one as its value, and left that one's over
            if value in taken and name in taken and not getattr(taken[name], "is_flag", False):
                return f"{name}: requires an argument, and {value} is an option"
        usage = " ".join(error.cmd.collect_usage_pieces(error.ctx))
        several = "; several models with commas: memcalc compare" if "MODEL" in usage else ""
        words = message.rpartition("(")[2].rstrip(")")
        return f"{words}: too many words; allowed: {error.ctx.command_path} {usage}{several}"
    return message


def _unknown_command(name: str) -> str:
    from memcalc.errors import nearest, one_line

    close = nearest(name, COMMANDS)
    hint = f"did you mean {', '.join(close)}?" if close else f"allowed: {', '.join(COMMANDS)}"
    return f"{one_line(name)}: unknown command; {hint}"


def _fail(message: str) -> int:
    try:
        print(f"memcalc: {message}", file=sys.stderr)
    except OSError:  # a full disk: the status still tells
        drop(sys.stderr)
    return 2


def entry_point() -> None:
    """Run the console script and exit with its status.

    Python's cycle collector is off: it takes a fifth of such a short process and frees nothing. The interpreter still collects
    once at its end, so `gc.freeze` excludes all objects from that.
    """
    end_at_interrupt()
    open_closed()
    gc.disable()
    status = main()
    gc.freeze()
    sys.exit(status)
