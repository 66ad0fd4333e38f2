"""The command ``onehop``: names the commands, and hands over to the one that was asked for.

One file per command, imported when it is chosen, so that ``onehop --help`` costs nothing. Must never know what a
command does.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

__all__ = ["main"]

COMMANDS = {
    "demo": "a density of states in three ways over worker processes, and what moved",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Parameters
    ----------
    arguments : sequence of str, optional
        Those of this process by default.

    Returns
    -------
    int
        The exit code: 0, 1 for a failure, 2 for a wrong command line, 130 for Ctrl-C.
    """
    from onehop.errors import OnehopError

    listing = "\n".join(f"  {name:8} {what}" for name, what in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="onehop",
        description="Run functions in many processes: every byte moves at most once per host.",
        epilog=f"commands:\n{listing}\n\nonehop COMMAND --help tells more",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version and leave")
    parser.add_argument("command", nargs="?", choices=list(COMMANDS), metavar="COMMAND")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.version:
        from importlib.metadata import version

        print(f"onehop {version('onehop')}")
        return 0
    if chosen.command is None:
        parser.print_help()
        return 2
    command = importlib.import_module(f"onehop.cli.{chosen.command}")
    try:
        return int(command.main(chosen.rest))
    except KeyboardInterrupt:
        return 130
    except (OnehopError, OSError) as error:
        print(f"onehop {chosen.command}: {error}", file=sys.stderr)
        return 1
