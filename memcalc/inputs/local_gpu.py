"""The GPU of this machine, as nvidia-smi tells it."""

from __future__ import annotations

import subprocess
from functools import cache
from typing import Final

from memcalc.errors import InputError, one_line
from memcalc.inputs.gpu import named_gpu

_QUERY: Final = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
_SECONDS: Final = 30
_INSTEAD: Final = "name one of `memcalc gpus`, or its memory (--gpu 80GB)"


@cache  # a search for advice checks the options many times
def local_gpu() -> str:
    """Return the name that `memcalc gpus` has for the GPUs of this machine. Where the list has no such GPU, return the
    memory of one, as "24564MiB". InputError without nvidia-smi, without a GPU, and with GPUs of several kinds."""
    found = dict.fromkeys(line.strip() for line in _answer().splitlines() if line.strip())
    if not found:
        raise InputError(f"--gpu auto: nvidia-smi lists no GPU; {_INSTEAD}")
    if len(found) > 1:
        kinds = ", ".join(line.rpartition(",")[0] for line in found)
        raise InputError(f"--gpu auto: there are GPUs of several kinds ({one_line(kinds)}); {_INSTEAD}")
    name, _, mebibytes = next(iter(found)).rpartition(",")
    try:
        return named_gpu(name).name
    except InputError:
        return _by_memory(name, mebibytes.strip())


def _answer() -> str:
    try:
        ran = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        why = error.strerror if isinstance(error, OSError) else f"no answer in {_SECONDS} s"
        raise InputError(f"--gpu auto: nvidia-smi cannot be run ({one_line(why)}); {_INSTEAD}") from None
    if ran.returncode:
        raise InputError(f"--gpu auto: nvidia-smi failed ({one_line(ran.stdout or ran.stderr)}); {_INSTEAD}")
    return ran.stdout


def _by_memory(name: str, mebibytes: str) -> str:
    """Return the memory of a GPU that is not in the list, as `--gpu` takes it."""
    if not mebibytes.isdecimal() or not mebibytes.isascii():
        raise InputError(f"--gpu auto: nvidia-smi does not tell the memory of {one_line(name)}; {_INSTEAD}")
    return f"{mebibytes}MiB"
