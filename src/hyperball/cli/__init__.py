"""The command line: `hyperball COMMAND …`."""

from hyperball.cli.main import main

__all__ = ["main"]
