"""The recorded run: its log, periods written out at the real depth, peaks by phase, engines played over it."""
