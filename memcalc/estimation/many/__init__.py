"""`memcalc.many`: one model and arrays of numbers, for which peaks and collectives are evaluated at once. The one place that
imports numpy."""
