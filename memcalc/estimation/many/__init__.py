"""`memcalc.many`: peaks and collectives of one model for arrays of numbers at once. Only this package imports numpy."""
