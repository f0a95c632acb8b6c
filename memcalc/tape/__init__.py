"""The recorded run: its log, the log written out at the real depth, peaks by phase, and engines played over the run."""
