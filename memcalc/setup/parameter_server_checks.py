"""The option of parameter servers, and refusals of what is not modelled of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memcalc.inputs.options import NOT_YET, Options, refuse
from memcalc.optimizers import OPTIMIZERS

if TYPE_CHECKING:
    from memcalc.inputs.model import Model

_WITH: Final = "with engine parameter-server"


def servers_of(options: Options, engine: str) -> int | None:
    """Return the number of servers; None with another engine. Raises InputError if one is given there."""
    if engine == "parameter-server":
        return options.servers or 1
    if options.servers is not None:
        refuse("servers", options.servers, "is an option of parameter servers; allowed: with --engine parameter-server")
    return None


def check_parameter_server(options: Options, model: Model | None) -> None:
    """Raise InputError for stages, models and methods that parameter servers are not modelled for."""
    if model is None:
        refuse("engine", "parameter-server", f"with --params, a number of parameters alone, {NOT_YET}none, ddp")
    if model.program.source or model.program.untrained:
        refuse("engine", "parameter-server", f"for a {model.model_type} {NOT_YET}ddp")
    if options.servers is not None and options.servers > model.num_parameters:
        refuse("servers", options.servers, f"has a server without parameters; allowed: 1 to {model.num_parameters}")
    if options.lora_rank or options.freeze is not None:
        name, value = ("lora_rank", options.lora_rank) if options.lora_rank else ("freeze", options.freeze)
        refuse(name, value, f"{_WITH} {NOT_YET}with --engine none, ddp, deepspeed, fsdp2")
    if options.clip_grad_norm:
        refuse("clip_grad_norm", "on", f"{_WITH}, whose servers each know a part of the norm, {NOT_YET}off")
    if str(options.precision).endswith("-autocast"):
        refuse("precision", options.precision, f"{_WITH} {NOT_YET}fp32, bf16, fp16, bf16-mixed, fp16-mixed")
    if not OPTIMIZERS[options.optimizer].elementwise:
        allowed = ", ".join(name for name, optimizer in OPTIMIZERS.items() if optimizer.elementwise)
        refuse("optimizer", options.optimizer, f"over ranges of parameters {NOT_YET}{allowed}")
