"""The way into the `homelab` command, and the one place where errors become text and exit codes.

Nothing heavy is imported before `main` is running: a Ctrl-C in the half second that typer needs is no traceback either.
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys

from homelab import errors


def main() -> None:
    """Run, and leave with the exit code of `homelab.errors`. No traceback reaches a user for a user's mistake."""
    try:
        code = run(sys.argv[1:])
        # What is left is the interpreter's own end: nothing there is worth a traceback.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        code = errors.EXIT_INTERRUPTED
    if code == errors.EXIT_INTERRUPTED:  # typer makes this code of a Ctrl-C by itself, and says nothing
        sys.stderr.write("interrupted\n")
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """The exit code for these arguments. Raises KeyboardInterrupt, and nothing else."""
    for stream in (sys.stdout, sys.stderr):
        # File names may hold bytes, and models may say letters, that this terminal's encoding does not know.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")

    import typer
    from typer.exceptions import TyperException

    from homelab.cli.commands import app

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
    except typer.Abort:
        raise KeyboardInterrupt from None
    except BrokenPipeError:
        # `homelab logs | head`: the reader left; Python would complain again while flushing at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return errors.EXIT_DONE
    except Exception as error:  # the last line of defence: our own mistake, kept whole for a report
        import tempfile
        import traceback

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
