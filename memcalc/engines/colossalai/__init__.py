"""Colossal-AI's tensor parallelism in one to three dimensions: what a rank holds, and what it sends."""
