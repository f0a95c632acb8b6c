"""`memcalc explain`: how an estimate is derived, or what a rule of thumb counts and leaves out."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from memcalc.cli import options as o
from memcalc.cli.completion import values_of
from memcalc.cli.setup_options import takes_setup

EPILOG = """Examples:

memcalc explain --model llama-7b --zero 3 --gpus 8

memcalc explain zero

memcalc explain zero qwen3-8b --gpus 64

memcalc explain --list --lang zh
"""


def _topics_and_models(incomplete: str) -> list[str]:
    """Return the topics and models that begin with the typed text, for shell completion."""
    from memcalc.explanation.topics import TOPICS

    return [name for name in [*TOPICS, *values_of("--model")("")] if name.startswith(incomplete)]


@takes_setup
def explain(
    topic: Annotated[
        str | None,
        typer.Argument(
            metavar="TOPIC",
            help="A topic of --list, or a model to derive.",
            show_default=False,
            autocompletion=_topics_and_models,
        ),
    ] = None,
    name: o.Name = None,
    model: o.Model = None,
    params: o.Params = None,
    list_topics: Annotated[
        bool, typer.Option("--list", help="The topics, a line each.", rich_help_panel="Output")
    ] = False,
    lang: Annotated[
        str | None,
        typer.Option(
            "--lang",
            help="en or zh. (default: zh where LC_ALL or LANG is Chinese, else en)",
            rich_help_panel="Output",
            show_default=False,
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document.", rich_help_panel="Output")] = False,
    **setup: Any,
) -> None:
    """Explain an estimate, step by step from its rows, or a topic: its rules of thumb beside exact numbers."""
    from memcalc.cli.language import language_option
    from memcalc.errors import InputError

    language = language_option(lang)
    given = o.setup_of(setup)
    topic = None if topic is None else _meant(topic)
    model = o.model_of(name, model)
    asked = topic is not None or model is not None or params is not None
    if list_topics and (asked or given):
        raise InputError("--list: lists all topics; allowed: without a topic and a setup")
    if list_topics or not (asked or given):
        _list(language, json)
    elif topic is not None and _is_topic(topic):
        _explain_topic(topic, model, params, given, language, json)
    else:
        _derive(
            None if _names_a_model(given, topic, model) else _model(topic, model, params), params, given, language, json
        )


def _names_a_model(given: dict[str, Any], topic: str | None, model: str | None) -> bool:
    """Tell whether a file may name the model, as nothing else does."""
    from memcalc.inputs.file_options import FILES

    return topic is None and model is None and any(name in given for name in FILES)


def _meant(word: str) -> str:
    """Return the topic that a word means; the word itself if it is a topic or a model, or means nothing."""
    from memcalc.explanation.topics import topic_named

    word = word.replace("++", "-plus-plus")
    return word if _is_topic(word) or _is_model(word) else topic_named(word)


def _is_topic(name: str) -> bool:
    from memcalc.explanation.topics import TOPICS

    return name in TOPICS


def _model(name: str | None, model: str | None, params: str | None) -> str | None:
    """Return the model to derive. Raise InputError if the name is neither a topic nor a model."""
    from memcalc.errors import InputError

    if name is None:
        if model is None and params is None:
            raise InputError("explain: the setup has no model; allowed: --model, --params, or a topic of --list")
        return model
    if not _is_model(name):
        raise InputError(_unknown(name))
    return o.model_of(name, model)


def _is_model(name: str) -> bool:
    """Return True if a word is a bundled model, a path or a name on the Hub."""
    from pathlib import Path

    from memcalc.inputs.model import bundled_spec

    return bool(name) and (bundled_spec(name) is not None or "/" in name or (len(name) < 256 and Path(name).exists()))


def _unknown(name: str) -> str:
    from memcalc.errors import nearest, one_line
    from memcalc.explanation.topics import TOPICS
    from memcalc.inputs.model import model_names

    topics, models = nearest(name, TOPICS, most=3), nearest(name, model_names(), most=2, cutoff=0.7)
    close = [*topics, *(f"--model {each}" for each in models)]
    hint = f"did you mean {', '.join(close)}?" if close else "allowed: a topic of `memcalc explain --list`, or a model"
    return f"explain {one_line(name)}: no such topic or model; {hint}"


def _list(language: str, json: bool) -> None:
    from memcalc.explanation.listing import list_document, print_topics

    if json:
        _print_document(list_document(language))
    else:
        import sys

        print_topics(language, sys.stdout)


def _explain_topic(
    name: str, model: str | None, params: str | None, given: dict[str, Any], language: str, json: bool
) -> None:
    from memcalc.cli.waiting import waiting
    from memcalc.errors import InputError
    from memcalc.explanation.topic import sections_of
    from memcalc.explanation.topics import TOPICS

    if model is not None and params is not None:
        raise InputError("--model or --params: give one of them")
    topic = TOPICS[name]
    with waiting("computing the rules and the step"):
        sections = sections_of(topic, model, params, given, language)
    _show(f"{name}: {topic.summary.said(language)}", sections, language, json)


def _derive(model: str | None, params: str | None, given: dict[str, Any], language: str, json: bool) -> None:
    from memcalc.cli.waiting import waiting
    from memcalc.estimation.estimate import estimate
    from memcalc.explanation.derivation import derive
    from memcalc.report.title import setup_line

    with waiting("computing the step"):
        report = estimate(model, params=params, **given)
        sections = derive(report, language)
    _show(setup_line(report), sections, language, json)


def _show(title: str, sections: tuple[Any, ...], language: str, json: bool) -> None:
    import sys

    from memcalc.explanation.printed import document, print_sections

    if json:
        _print_document(document(title, sections, language))
    else:
        print_sections(title, sections, language, sys.stdout)


def _print_document(document: dict[str, Any]) -> None:
    import json

    print(json.dumps(document, indent=1, ensure_ascii=False))
