"""Megatron-LM's arguments, read by the names of the options."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, Final, NoReturn, cast

from memcalc.errors import InputError, one_line
from memcalc.formats.megatron_arguments import OPTION, UNREAD, name_of
from memcalc.formats.section import Section

_PLACEHOLDER: Final = re.compile(r"\$\{?\w|\$\(|`|\{\{|^<.*>$|^\$[@*]$")
_TURNED_OFF: Final = {
    "--add-bias-linear": "--disable-bias-linear",
    "--add-position-embedding": "--no-position-embedding",
    "--apply-rope-fusion": "--no-rope-fusion",
    "--bias-dropout-fusion": "--no-bias-dropout-fusion",
    "--bias-gelu-fusion": "--no-bias-gelu-fusion",
    "--bias-swiglu-fusion": "--no-bias-swiglu-fusion",
    "--create-attention-mask-in-dataloader": "--no-create-attention-mask-in-dataloader",
    "--gradient-accumulation-fusion": "--no-gradient-accumulation-fusion",
    "--masked-softmax-fusion": "--no-masked-softmax-fusion",
    "--overlap-p2p-comm": "--no-overlap-p2p-communication",
    "--pad-vocab-size": "--no-pad-vocab-size",
}
"""The names of parsed arguments that are true unless an option turns them off. A mapping may have either."""
_RENAMED: Final = {
    "--fp4": "--fp4-format",
    "--fp8": "--fp8-format",
    "--logit-dtype": "--output-logit-dtype",
    "--layernorm-epsilon": "--norm-epsilon",
    "--layernorm-zero-centered-gamma": "--apply-layernorm-1p",
    "--microbatch-group-size-per-vp-stage": "--microbatch-group-size-per-virtual-pipeline-stage",
    "--num-moe-experts": "--num-experts",
    "--use-custom-fsdp": "--use-megatron-fsdp",
}
"""Other names of options: of parsed arguments, and old ones."""


class Arguments(Section):
    """The arguments of one run, by the names of their options: "--num-layers"."""

    __slots__ = ()

    def __init__(self, file: str, arguments: Mapping[str, Any]) -> None:
        content: dict[str, Any] = {}
        for name, value in arguments.items():
            flag = "--" + name_of(str(name)).replace("_", "-")
            flag = _RENAMED.get(flag, flag)
            if flag in _TURNED_OFF:
                content.setdefault(_TURNED_OFF[flag], str(value).lower() in ("false", "0"))
            else:
                content[flag] = value
        super().__init__(OPTION, file, content)

    def raw(self, key: str) -> Any:
        value = super().raw(key)
        if isinstance(value, str) and _PLACEHOLDER.search(value):
            self.refuse(key, "nothing in the file replaces it; allowed: a value")
        return value

    @property
    def unread(self) -> list[str]:
        """Return the words of a command that belong to no option."""
        words: Any = self.content.get("--" + UNREAD)
        return [str(word) for word in cast("list[object]", words)] if isinstance(words, list) else []

    @property
    def hidden(self) -> list[str]:
        """Return the variables of a script that are not constant and may hold more arguments."""
        return [
            word for word in self.unread if word.startswith(("$", "`")) and word not in ("$@", "$*", "${@}", "${*}")
        ]

    def reject(self, key: str, why: str) -> NoReturn:
        """Raise InputError for an option that is given, or for one that is not but has to be."""
        place = f"{self.option} {self.file}" if self.file else self.option
        raise InputError(f"{place}: {self.shown(key)}: {why}")

    def on(self, key: str) -> bool:
        """Tell whether a switch is given."""
        return bool(self.flag(key))

    def names(self, key: str) -> tuple[str, ...]:
        """Return a list of names; () if it is not there. Several words, a list, or text with brackets and commas."""
        value = self.raw(key)
        if value is None:
            return ()
        parts = cast("list[object]", value) if isinstance(value, list) else [value]
        if not all(isinstance(part, str) for part in parts):
            self.refuse(key, "allowed: names")
        text = " ".join(cast("list[str]", parts))
        return tuple(re.sub(r"[\[\]\"',]", " ", text).split())

    def shown(self, key: str) -> str:
        """Return an option as it is given, for a note: "--moe-router-dtype fp32"."""
        value = self.content.get(key)
        if value is None or isinstance(value, bool):
            return key
        words = cast("list[object]", value) if isinstance(value, list) else [value]
        return f"{key} {one_line(' '.join(map(str, words)), 40)}"

    def given(self, key: str, without: Collection[str] = ()) -> bool:
        """Tell whether an option is given with a value that is not one of those without an effect. Nothing is checked."""
        value = self.content.get(key)
        if value is None or value is False:
            return False
        if isinstance(value, list):
            return not all(str(one).lower() in without for one in cast("list[object]", value))
        return str(value).strip().lower() not in ("false", *without)
