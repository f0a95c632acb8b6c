"""`python -m memcalc`."""

from memcalc.cli.main import entry_point

entry_point()
