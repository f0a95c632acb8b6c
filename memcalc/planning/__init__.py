"""The search for the best layout: all layouts, what they need at least, and the exact estimates of the best."""
