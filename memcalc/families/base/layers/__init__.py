"""Layers of courses and papers: what torch.nn's modules are made of, their shapes, and their forward over tensors without
data."""
