"""Other tools' configuration files: each format is a file that reads it, and one that writes it."""
