"""The command line: one file per command. Only this package imports typer."""
