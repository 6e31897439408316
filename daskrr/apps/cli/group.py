"""How commands are run: what is wrong with a line is told before anything loads, and every failure has one message."""

import importlib
import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import click

from daskrr.apps.cli import usage
from daskrr.apps.cli.options import DEBUG, grouped
from daskrr.apps.interrupts import ENDINGS, sure_interrupts
from daskrr.errors import printable


def module(name: str) -> Any:
    """A module of the commands, which is loaded now."""
    return importlib.import_module(f"daskrr.apps.cli.{name}")


@contextmanager
def _printable_usage() -> Iterator[None]:
    """Have Click repeat what was given without what that would do to a terminal."""
    try:
        yield
    except click.ClickException as error:
        vars(error)["message"] = printable(error.message)
        raise


def run_command(place: str, command: str, options: dict[str, Any], *groups: str) -> None:
    """Run a command of a module with its options; mistakes that these show by themselves are told before it loads."""
    given = grouped(options, *groups)
    usage.fill_in_kernel(given)
    usage.check(given)
    getattr(module(place), command)(**given)


class Commands(click.Group):
    """A group that turns every failure into one message and an exit code."""

    def make_context(self, info_name: str | None, args: list[str], *others: Any, **options: Any) -> click.Context:
        """Read the options before the command; without any words, what Click raises is the help."""
        with _printable_usage() if args else nullcontext():
            return super().make_context(info_name, args, *others, **options)

    def main(self, *arguments: Any, **options: Any) -> Any:
        """Run the command line; a console that has no λ, as many of Windows, shows a question mark."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")
        return super().main(*arguments, **options)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the chosen command."""
        try:
            with sure_interrupts(), _printable_usage():
                return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            message, code = ENDINGS[type(interrupt)]
            click.echo(message, err=True)
            ctx.exit(code)
        except (click.ClickException, click.Abort, click.exceptions.Exit, BrokenPipeError):
            raise
        except Exception as error:
            if ctx.meta.get(DEBUG):
                click.echo(module("telling").trace(error), err=True)
            message, code = module("telling").failure(error)
            click.echo(f"daskrr: {message}", err=True)
            ctx.exit(code)
