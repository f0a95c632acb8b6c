"""GPUs, one file each, with their links, the time of a collective over them, and what recorded runs have measured."""
