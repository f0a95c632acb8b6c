"""Who has what: collectives, tensor, sequence, context and expert parallelism, layers by their weights."""
