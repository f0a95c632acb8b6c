"""From a setup to its report: ranks, rows, collectives, FLOPs."""
