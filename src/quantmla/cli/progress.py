"""Progress with time left on stderr: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from quantmla.cli.common import say, state

LINE_EVERY_S = 15.0


@contextmanager
def progress(title: str) -> Iterator[Callable[[str, int, int], None]]:
    """Show how far a long job is.

    Args: title [of the job].
    Returns: a function of (what is being done, units done, units in all).
    Source: own.
    """
    if state.quiet:
        yield lambda what, done, total: None
    elif sys.stderr.isatty():
        with _bar(title) as tell:
            yield tell
    else:
        yield _lines(title)


@contextmanager
def _bar(title: str) -> Iterator[Callable[[str, int, int], None]]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda what, done, total: bar.update(
            task, description=f"{title}: {what}", completed=done, total=total
        )


def _lines(title: str) -> Callable[[str, int, int], None]:
    started = time.monotonic()
    first: list[int] = []  # a resumed job does not start at 0
    last = [started - LINE_EVERY_S]

    def tell(what: str, done: int, total: int) -> None:
        now = time.monotonic()
        first.append(done)
        if now - last[0] < LINE_EVERY_S:
            return
        last[0] = now
        line = f"{title}: {what}, {100 * done // max(1, total)}%"
        if done > first[0]:
            left_s = (now - started) * (total - done) / (done - first[0])
            line += f", about {left_s:.0f} s left"
        say(line)

    return tell
