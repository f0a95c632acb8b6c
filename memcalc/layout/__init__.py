"""The parts of a model that each rank holds: tensor, sequence, context and expert parallelism, collectives, layers by
weights."""
