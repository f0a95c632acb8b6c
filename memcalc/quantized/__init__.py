"""Weights of a frozen base in 4 bits, as bitsandbytes keeps them."""
