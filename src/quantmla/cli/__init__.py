"""The command line: `main` runs it; each module holds the verbs of one job."""

from quantmla.cli.app import main

__all__ = ["main"]
