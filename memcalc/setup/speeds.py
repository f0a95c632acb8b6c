"""The speeds of a GPU that options give: its network, and the shares of its data sheet that kernels reach."""

from __future__ import annotations

from memcalc.inputs.options import Options, refuse


def network_gbps(options: Options) -> float | None:
    """Return the given network speed, else that of NVIDIA's own node with this GPU; None if neither is known."""
    if options.gpu is None:
        if options.network_gbps is not None:
            refuse("network_gbps", options.network_gbps, "is used with the links of a GPU; allowed: with --gpu")
        return None
    if options.network_gbps is not None:
        return options.network_gbps
    from memcalc.inputs.gpu import load_gpu

    network = load_gpu(options.gpu).network
    return None if network is None else network.value


def given_share(name: str, options: Options) -> float | None:
    """Return a share of a GPU's speed by the option's name; None if it is not given. Raises InputError without a GPU."""
    value: float | None = getattr(options, name)
    if value is not None and options.gpu is None:
        refuse(name, value, "is a share of a GPU's speed; allowed: with --gpu")
    return value
