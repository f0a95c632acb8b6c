"""Sizing questions with random numbers, made from the rules and reports of `memcalc.explanation`."""
