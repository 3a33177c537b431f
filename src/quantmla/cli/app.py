"""Assemble the verbs, and turn every exception into one readable block and an exit code."""

from __future__ import annotations

import logging
import os
import sys
import traceback

import typer

from quantmla.cli import ablation, analysis, bench, calibration, checkpoints, evaluation, showcase
from quantmla.cli.common import state
from quantmla.cli.explain import explain
from quantmla.errors import QuantMLAError

USER_ERROR = 1

app = typer.Typer(
    name="quantmla",
    help="Low-bit KV caches for multi-head latent attention: calibrate, fuse, evaluate.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 ok, 1 user error, 2 usage, 3 a gate failed. Results go to stdout, "
    "progress to stderr.",
)
app.command("inspect")(checkpoints.inspect)
app.command("convert")(checkpoints.convert)
app.command("calibrate")(calibration.calibrate)
app.command("verify")(checkpoints.verify)
app.command("analyze")(analysis.analyze)
app.command("eval")(evaluation.evaluate)
app.command("ablate")(ablation.ablate)
app.command("report")(evaluation.report)
app.command("demo")(showcase.demo)
app.command("env")(showcase.env)
app.command("explain")(explain)
app.add_typer(bench.app, name="bench", no_args_is_help=True)


def main() -> None:
    """Run the command line and exit.

    Source: own.
    """
    logging.basicConfig(
        level=logging.WARNING, stream=sys.stderr, format="%(levelname)s: %(message)s"
    )
    # Before torch is imported: a waiting thread spins only briefly. With the default, a calibration
    # layer took 5 times as long beside one busy process; without any spin, twice as long alone.
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    try:
        app()
    except QuantMLAError as error:
        _fail(f"error: {error}", error.exit_code)
    except BrokenPipeError:  # the reader of stdout has seen enough, as `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(USER_ERROR)
    except OSError as error:
        where = f"\n  where: {error.filename}" if error.filename else ""
        _fail(f"error: {error.strerror or error}{where}", USER_ERROR)
    except Exception as error:
        next_step = "run again with -v for the traceback, and report it"
        what = f"{type(error).__name__}: {error}".strip()
        _fail(
            f"error: quantmla failed in a way it should not\n  got: {what}\n  next: {next_step}", 1
        )


def _fail(message: str, code: int) -> None:
    if state.verbose:
        traceback.print_exc()
    sys.stdout.flush()
    print(message, file=sys.stderr)
    sys.exit(code)
