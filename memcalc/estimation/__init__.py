"""The estimate of one setup: from its ranks to a report with rows, collectives and FLOPs."""
