"""Inputs from outside: model configurations, GPUs, options. They are checked here and leave as frozen objects."""
