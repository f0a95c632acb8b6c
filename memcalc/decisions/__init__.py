"""Decisions: setups side by side, and the largest or smallest number that fits a GPU."""
