"""Serving engines: the memory that they reserve on a GPU, and the sequences that they hold at once, by their own rules."""
