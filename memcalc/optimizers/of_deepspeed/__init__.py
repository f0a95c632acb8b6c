"""Optimizers that run in DeepSpeed's engine alone, which decides with them what is sent. Each module is one, its constant
OPTIMIZER; `compressed_allreduce` is a part of three."""
