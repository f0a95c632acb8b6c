"""Notes on what of a file or a command is not an argument of Megatron-LM."""

from __future__ import annotations

from memcalc.errors import one_line
from memcalc.formats.megatron_arguments import NODES, UNREAD
from memcalc.formats.megatron_flags import KNOWN
from memcalc.formats.megatron_section import Arguments


def unread(a: Arguments) -> list[str]:
    """Return notes on the words that belong to no option."""
    hidden, others = a.hidden, [word for word in a.unread if "$" not in word and "`" not in word]
    texts = {
        "not constant in the file, so options in it are not read": hidden,
        "belongs to no option, ignored": others,
    }
    return [
        f"{one_line(' '.join(dict.fromkeys(words[:5])))}{' …' if len(words) > 5 else ''}: {text}"
        for text, words in texts.items()
        if words
    ]


def unknown(a: Arguments) -> list[str]:
    """Return one note with the options that Megatron-LM's parser does not have."""
    known = {*("--" + name for name in KNOWN), "--" + UNREAD, "--training-script", "--" + NODES, "--nproc-per-node"}
    unknown = [key for key in a.left() if key not in known]
    if not unknown:
        return []
    more = f" and {len(unknown) - 20} more" if len(unknown) > 20 else ""
    return [f"{', '.join(unknown[:20])}{more}: not in Megatron-LM's parser, ignored"]
