"""Tensor parallelism in one, two, two and a half and three dimensions, as Colossal-AI's legacy layers do it."""
