"""The `homelab` command: the list of commands, and the one place where errors become text and exit codes."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback

import typer
from typer.exceptions import TyperException

import homelab
from homelab import errors
from homelab.cli import chat, lab, launch, logs, plan, preflight, recover, runs, status, stop, trust

app = typer.Typer(
    name="homelab", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich",
    help="One trainer out of the unequal GPUs on a home network.",
    epilog="A first look without GPU or cluster: scripts/demo. Next: homelab preflight",
)  # fmt: skip


@app.callback(invoke_without_command=True)
def root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    """One trainer out of the unequal GPUs on a home network."""
    if version:
        typer.echo(f"homelab {homelab.__version__}")
        raise typer.Exit


for command in (preflight, plan, launch, status, logs, stop, recover, runs, chat, trust):
    app.command(name=command.__name__.rsplit(".", 1)[-1])(command.command)
app.add_typer(lab.app, name="lab")


def main() -> None:
    """Run, and leave with the exit code of `homelab.errors`. No traceback reaches a user for a user's mistake."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """The exit code for these arguments."""
    as_json = "--json" in arguments
    try:
        result = app(args=arguments, standalone_mode=False)
        return result if isinstance(result, int) else errors.EXIT_DONE
    except errors.HomelabError as error:
        _show(error, as_json)
        return error.exit_code
    except TyperException as error:
        context = getattr(error, "ctx", None)
        path = context.command_path if context else "homelab"
        _show(
            errors.InputError(error.format_message(), where=f"the command line of {path}", hint=f"{path} --help"),
            as_json,
        )
        return errors.EXIT_INPUT
    except (typer.Abort, KeyboardInterrupt):
        sys.stderr.write("interrupted\n")
        return errors.EXIT_INTERRUPTED
    except BrokenPipeError:
        # `homelab logs | head`: the reader left; Python would complain again while flushing at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return errors.EXIT_DONE
    except Exception as error:  # the last line of defence: our own mistake, kept whole for a report
        with tempfile.NamedTemporaryFile(
            "w", prefix="homelab-", suffix=".txt", delete=False, encoding="utf-8"
        ) as stream:
            stream.write(traceback.format_exc())
        internal = errors.HomelabError(
            f"internal error: {type(error).__name__}: {error}",
            where=stream.name,
            hint="this is a mistake in homelab: please report it with that file",
        )
        _show(internal, as_json)
        return errors.EXIT_INTERNAL


def _show(error: errors.HomelabError, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(
            json.dumps({"error": {**error.as_dict(), "exit_code": error.exit_code}}, indent=1, ensure_ascii=False)
            + "\n"
        )
        return
    bold, red, dim, end = ("\033[1m", "\033[31m", "\033[2m", "\033[0m") if sys.stderr.isatty() else ("", "", "", "")
    sys.stderr.write(f"{red}{bold}error:{end} {error.message}\n")
    if error.where:
        sys.stderr.write(f"{dim}where:{end} {error.where}\n")
    if error.hint:
        sys.stderr.write(f"{dim}fix:{end}   {error.hint}\n")
