"""The `memcalc` command: builds the one sub-command that is called, and turns every error into one line."""

from __future__ import annotations

import gc
import io
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from memcalc.cli.completion import is_asked
from memcalc.cli.help import FLAG, as_help, name_off_forms, shorten
from memcalc.cli.streams import INTERRUPTED, drop, end_at_interrupt, open_closed
from memcalc.registry import Registry


def _command_of(stem: str, module: Any) -> tuple[str, Any] | None:
    """A command is a module with an EPILOG and a function of its name."""
    return (stem.replace("_", "-"), module) if hasattr(module, "EPILOG") else None


COMMANDS: Final[Registry[Any]] = Registry(
    "memcalc.cli",
    ("estimate", "explain", "validate", "models", "gpus"),
    _command_of,
    helpers=("completion", "group", "help", "main", "options", "output", "setup_options", "streams", "waiting"),
)
"""Command -> module; only the called one is imported."""


_HELP: Final = {"help_option_names": ["-h", "--help"]}


def build(names: Sequence[str]):  # type: ignore[no-untyped-def]
    """A typer app with these commands."""
    import typer

    from memcalc.cli.group import group

    app = typer.Typer(
        name="memcalc",
        add_completion=len(names) > 1,
        pretty_exceptions_enable=False,
        context_settings=_HELP,
    )
    app.callback()(group)
    for name in names:
        module = COMMANDS[name]
        app.command(name, epilog=module.EPILOG, context_settings=_HELP)(getattr(module, name.replace("-", "_")))
    return app


class _PlainCoercion:
    """What turns the words of a command line into numbers and paths.

    typer 0.29 builds a pydantic adapter for every option, given or not, which takes longer than an estimate does. A word
    that is not what the option takes stays a word: `check_options` says what is allowed.
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
    """Give every option of a typer command the plain coercion, where this version of typer would build adapters."""
    from typer import Context

    help_option = command.get_help_option(Context(command, **command.context_settings))
    for parameter in [*command.params, help_option]:
        if getattr(parameter, "_runtime_param", parameter) is None:
            parameter._runtime_param = _PlainCoercion(parameter.type_descriptor.annotation)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    for stream in (sys.stdout, sys.stderr):  # a bar that a terminal's encoding has not is no reason to fail
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
    """Run the command that is named first, or what is asked of all of them."""
    if args[:1] == ["--version"]:
        from memcalc import __version__

        print(f"memcalc {__version__}")
        return 0
    named = args[0] if args[0] in COMMANDS else None
    if named is None and not args[0].startswith("-"):
        return _fail(_unknown_command(args[0]))
    return _run([named] if named else list(COMMANDS), args)


def _complete() -> NoReturn:
    """Print what the shell that runs this process may offer, and end it."""
    from typer.main import get_command

    get_command(build(list(COMMANDS)))(prog_name="memcalc")
    sys.exit(0)


def _run(names: list[str], args: list[str]) -> int:
    from typer import Abort, BadParameter, Exit
    from typer.main import get_command

    from memcalc.errors import InputError, one_line

    usage_error: Any = BadParameter.__mro__[1]  # UsageError, which typer does not export
    try:
        command: Any = get_command(build(names))
        for each in (command, *command.commands.values()):
            _without_adapters(each)
        if {"-h", "--help", FLAG} & set(args):
            _for_help(command.commands.values(), short=FLAG not in args)
        status = command(args=as_help(args), standalone_mode=False, prog_name="memcalc")
        return status if isinstance(status, int) else 0
    except Exit as error:
        return error.exit_code
    except usage_error as error:
        return _fail(one_line(error.format_message(), 300))
    except InputError as error:
        return _fail(str(error))
    except (Abort, KeyboardInterrupt):
        return INTERRUPTED
    except SystemExit:  # what typer and rich make of a broken pipe
        return _reader_gone()


def _for_help(commands: Iterable[Any], *, short: bool) -> None:
    from memcalc.cli.setup_options import SETUP

    for each in commands:
        name_off_forms(each)
        if short:
            shorten(each, SETUP)


def _reader_gone() -> int:
    """The other end of a pipe was closed: nobody is left to tell, and nothing went wrong here."""
    drop(sys.stdout)
    return 0


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
    """The console script. Without the cycle collector, which takes a fifth of so short a process and frees nothing in it.

    The interpreter collects once more when it ends, even so; what is frozen it leaves to the operating system.
    """
    end_at_interrupt()
    open_closed()
    gc.disable()
    status = main()
    gc.freeze()
    sys.exit(status)
