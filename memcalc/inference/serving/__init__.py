"""What serving engines reserve on a GPU, and how many sequences they hold at once, by their own rules."""
