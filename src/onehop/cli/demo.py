"""``onehop demo``: reads the command line, shows progress, prints what `onehop.demo` found.

Must never know any physics or measure anything.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from onehop.demo import require

if TYPE_CHECKING:
    from rich.console import Console

    from onehop.demo.job import Stage


def main(arguments: Sequence[str]) -> int:
    """Run the command; 0 if all ways agreed with the serial run."""
    options = _parser().parse_args(arguments)
    require("numpy", "scipy", *(["matplotlib"] if options.plot else []))
    from rich.console import Console

    from onehop.demo import report, vogl, wannier
    from onehop.demo.job import Plan, run

    if options.hr:
        cell, source = wannier.read_hr(options.hr), str(options.hr)
    else:
        cell, source = vogl.gallium_arsenide(), "GaAs (sp3s*, Vogl et al. 1983)"
    plan = Plan(
        source=source,
        repeat=options.supercell,
        workers=options.workers,
        kpoints=options.kpoints,
        moments=options.moments,
    )
    errors = Console(stderr=True)
    with _progress(errors) as stage:
        outcome = run(cell, plan, stage)
    if options.plot:
        report.plot(outcome, options.plot)
        errors.print(f"wrote {options.plot}")
    if options.json:
        import json

        print(json.dumps(report.as_json(outcome), indent=1))
    else:
        Console().print(report.table(outcome))
    for failure in outcome.failures:
        errors.print(f"[bold red]WRONG[/]: {failure}")
    return 1 if outcome.failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="onehop demo",
        description="Density of states of a crystal: the same sum over k-points in a loop that passes the whole model "
        "with every call, in a map that captures it, and in the loop again after one matrix was changed in place; "
        "all compared with a serial run.",
    )
    parser.add_argument(
        "--hr",
        metavar="FILE",
        help="a Wannier90 seedname_hr.dat instead of the built-in GaAs",
    )
    parser.add_argument(
        "--supercell",
        type=_at_least(1),
        metavar="N",
        help="N×N×N unit cells; by default as many as make about 200 MB",
    )
    parser.add_argument(
        "--workers", type=_at_least(0), default=2, metavar="N", help="processes (default 2)"
    )
    parser.add_argument(
        "--kpoints",
        type=_grid,
        default=(3, 2, 1),
        metavar="N",
        help="grid: N for N×N×N, or AxBxC (default 3x2x1); one task per point",
    )
    parser.add_argument(
        "--moments",
        type=_at_least(2),
        default=32,
        metavar="N",
        help="Chebyshev moments of a large model: time and resolution grow with it (default 32)",
    )
    parser.add_argument(
        "--plot", type=_picture, metavar="FILE.png", help="draw the density of states"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    return parser


def _at_least(lowest: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
        if value < lowest:
            raise argparse.ArgumentTypeError(f"must be at least {lowest}, not {value}")
        return value

    return integer


def _picture(text: str) -> str:
    """Checked at the start: to find out after the work would be a pity."""
    path = Path(text)
    if path.suffix.lower() not in (".png", ".pdf", ".svg"):
        raise argparse.ArgumentTypeError(f"{text!r} must end in .png, .pdf or .svg")
    if not os.access(path.resolve().parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"no folder to write to: {str(path.resolve().parent)!r}")
    return text


def _grid(text: str) -> tuple[int, int, int]:
    counts = (
        [int(part) for part in text.split("x")] if re.fullmatch(r"\d+(x\d+x\d+)?", text) else []
    )
    if not counts or min(counts) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a number of points N nor a grid AxBxC of at least 1"
        )
    if len(counts) == 1:
        counts *= 3
    return counts[0], counts[1], counts[2]


@contextmanager
def _progress(console: Console) -> Iterator[Stage]:
    """Bars on a terminal, a line for each stage elsewhere; on stderr, so that stdout stays the result."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    if not console.is_terminal:

        def say(title: str, steps: int) -> Callable[[], None]:
            console.print(f"{title} ({steps})" if steps > 1 else title)
            return lambda: None

        yield say
        return
    columns = (
        TextColumn("{task.description:24}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bars:

        def bar(title: str, steps: int) -> Callable[[], None]:
            task = bars.add_task(title, total=steps)
            return lambda: bars.advance(task)

        yield bar
