"""The estimated setup, run for comparison: transformers' model, torch's autograd, optimizers and engines, and what they
allocate.

`comparison.py` and `checks.py` know neither torch nor transformers; the other files import them.
"""
