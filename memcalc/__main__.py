"""`python -m memcalc`, and the console script."""


def entry_point() -> None:
    """Run the command line. Ctrl-C ends it from here on, before anything is imported that takes its time."""
    from memcalc.cli.streams import end_at_interrupt

    end_at_interrupt()
    from memcalc.cli.main import entry_point as run

    run()


if __name__ == "__main__":
    entry_point()
