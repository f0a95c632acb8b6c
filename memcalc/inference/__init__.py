"""The memory of inference: weights, caches, and the peaks of prefill and decode."""
