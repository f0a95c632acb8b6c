"""The host's memory: rows of what an engine keeps there."""
