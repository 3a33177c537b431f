"""Options that several verbs share, and the two streams: result on stdout, progress on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from quantmla.errors import QuantMLAError


@dataclass
class State:
    """What holds for the whole process: -v and -q."""

    verbose: bool = False
    quiet: bool = False


state = State()


def _set(name: str) -> Callable[[bool], bool]:
    def remember(value: bool) -> bool:
        setattr(state, name, bool(value))
        return value

    return remember


Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.")]
Verbose = Annotated[
    bool, typer.Option("-v", "--verbose", help="Show tracebacks.", callback=_set("verbose"))
]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="No progress.", callback=_set("quiet"))]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print what would be done and what it costs; do nothing.")
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of every random choice.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from what an earlier run finished.")]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        min=1,
        help="Layers calibrated at a time, each in a process of its own with its share of the "
        "cores. 1 by default; the demo takes 2 where a CPU has two cores.",
    ),
]
Out = Annotated[Path, typer.Option("--out", "-o", help="Folder to write; must be new or empty.")]


class Interrupted(QuantMLAError):
    """Ctrl-C in a verb that can go on later."""

    exit_code = 130


@contextmanager
def resumable() -> Iterator[None]:
    """Tell who presses Ctrl-C how to go on.

    Raises: Interrupted.
    Source: own.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(
            "interrupted", next_step="the same command with --resume goes on where this stopped"
        ) from None


def say(line: str) -> None:
    """Print one line of progress to stderr, unless -q.

    Args: line [text].
    Source: own.
    """
    if not state.quiet:
        print(line, file=sys.stderr, flush=True)


def emit(result: Any, as_json: bool, human: Callable[[Any], None]) -> None:
    """Print the result to stdout.

    Args: result [JSON data]; as_json; human [prints the result for a reader].
    Source: own.
    """
    if as_json:
        print(json.dumps(result, indent=2, ensure_ascii=False))
    else:
        human(result)


def print_fields(result: dict) -> None:
    """Print a flat result, one `name: value` a line.

    Args: result [JSON object].
    Source: own.
    """
    for name, value in result.items():
        if isinstance(value, dict):
            value = [f"{key} {format_cell(part)}" for key, part in value.items()]
        if isinstance(value, list):
            value = ", ".join(map(str, value)) or "none"
        print(f"{name.replace('_', ' ')}: {format_cell(value)}")


def table(title: str, columns: list[str], rows: list[list[Any]]) -> None:
    """Print a table to stdout; text columns to the left, numbers to the right.

    Args: title; columns [headers]; rows [cells, None for an empty one].
    Source: own.
    """
    from rich.console import Console
    from rich.table import Table

    grid = Table(title=title, title_justify="left", title_style="bold")
    for index, name in enumerate(columns):
        numeric = all(isinstance(row[index], int | float | None) for row in rows)
        grid.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        grid.add_row(*(format_cell(cell) for cell in row))
    # a pipe has no width of its own: give the table what it needs instead of 80 columns
    width = None if sys.stdout.isatty() else 200
    Console(width=width, highlight=False).print(grid)


def format_cell(cell: Any) -> str:
    """Write one cell: integers with thousands separators, others with what can be told apart.

    Args: cell [str, int, float or None].
    Source: own.
    """
    if cell is None:
        return ""
    if isinstance(cell, bool) or not isinstance(cell, int | float):
        return str(cell)
    if isinstance(cell, int):
        return f"{cell:,}"
    return f"{cell:.4f}" if abs(cell) < 1 else f"{cell:.3f}"
