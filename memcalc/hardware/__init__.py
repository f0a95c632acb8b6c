"""GPUs, one file each, with their links; the time of a collective over these; and the figures measured in recorded
runs."""
