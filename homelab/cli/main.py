"""The way into the `homelab` command, and the one place where errors become text and exit codes.

Nothing heavy is imported before `main` is running: a Ctrl-C in the half second that typer needs is no traceback either.
"""

from __future__ import annotations

import contextlib
import os
import sys

from homelab.cli import streams, terminal
from homelab.controller.base import errors


def main() -> None:
    """Run, and leave with the exit code of `homelab.controller.base.errors`. No traceback reaches a user for a user's mistake."""
    from homelab.controller.base import secrets
    from homelab.controller.run import hub_token, signals

    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # the hub's library would name this machine's software in each request
    try:
        secrets.know({**os.environ, "HF_TOKEN": hub_token.take(os.environ)})
        streams.prepare()
        signals.count_alike()
        signals.limit_end()
        code = run(sys.argv[1:])
        # What is left is the interpreter's own end: nothing there is worth a traceback.
        signals.ignore()
    except KeyboardInterrupt:
        signals.ignore()
        code = errors.EXIT_INTERRUPTED
        # `python -m` ends itself by SIGINT, whatever code it is given, where a Ctrl-C has cut an `exec` of a text (a dataclass that is made) and no
        # other came after it (run_eval_code_obj in pythonrun.c).
        exec("")
    # typer makes this code of a Ctrl-C by itself, and says nothing
    if code == errors.EXIT_INTERRUPTED and not isinstance(code, errors.ToldExit):
        terminal.echo("interrupted", err=True)
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """The exit code for these arguments. Raises KeyboardInterrupt, and nothing else."""
    code = _command(arguments)
    _warn()
    refused = streams.refusal(sys.stdout)
    if refused is None or isinstance(refused, BrokenPipeError):  # `homelab logs | head`: the reader left
        return code
    _show_unwritable(refused)
    return code or errors.EXIT_FAILED


def _command(arguments: list[str]) -> int:
    import typer
    from typer.exceptions import TyperException

    from homelab.cli.command_list import app

    as_json = "--json" in arguments
    try:
        result = app(args=arguments, standalone_mode=False)
        return result if isinstance(result, int) else errors.EXIT_DONE
    except errors.HomelabError as error:
        _show(error, as_json)
        return error.exit_code
    except TyperException as error:
        # A name that typer exports nowhere: its own code looks at the name, too. The help has been printed.
        if type(error).__name__ == "NoArgsIsHelpError":
            return errors.EXIT_DONE
        context = getattr(error, "ctx", None)
        path = context.command_path if context else "homelab"
        _show(errors.InputError(error.format_message(), where=f"the command line of {path}", hint=f"{path} --help"), as_json)
        return errors.EXIT_INPUT
    except typer.Abort:
        raise KeyboardInterrupt from None
    except Exception as error:  # noqa: BLE001 - the last line of defence: our own mistake, kept whole for a report
        if isinstance(error, OSError) and (refused := streams.refusal(sys.stdout, "\n")):
            if not isinstance(refused, BrokenPipeError):
                _show_unwritable(refused)
            return errors.EXIT_DONE if isinstance(refused, BrokenPipeError) else errors.EXIT_FAILED
        if _is_interrupt(error):
            raise KeyboardInterrupt from None
        internal = errors.HomelabError(
            f"internal error: {type(error).__name__}: {error}",
            where=_kept_traceback(),
            hint="this is a fault of homelab: please report it with that file",
        )
        _show(internal, as_json)
        return errors.EXIT_INTERNAL


def _is_interrupt(error: Exception) -> bool:
    """Native code (pydantic, while it builds a model) makes an error of its own of a Ctrl-C. A second one inside `Condition.wait` makes one of its lock:
    that is released, and not taken again.
    """
    is_of_lock = isinstance(error, RuntimeError) and "lock" in str(error) and isinstance(error.__context__, KeyboardInterrupt)
    return is_of_lock or "KeyboardInterrupt" in str(error) or isinstance(error.__cause__, KeyboardInterrupt)


def _kept_traceback() -> str:
    """The file it is in; the traceback itself where no file can be made."""
    import tempfile
    import traceback

    from homelab.controller.base import secrets

    text = secrets.hide(traceback.format_exc())
    try:
        with tempfile.NamedTemporaryFile("w", prefix="homelab-", suffix=".txt", delete=False, encoding="utf-8") as stream:
            stream.write(text)
    except OSError:
        return text
    return stream.name


def _warn() -> None:
    """Say what could not be written down, where something was to be: the command's work was done all the same."""
    store = sys.modules.get("homelab.controller.run.store")  # not imported, nothing written
    for error in store.UNWRITTEN.values() if store else ():
        terminal.three_parts("warning", error.message, error.where, error.hint)


def _show_unwritable(refused: OSError) -> None:
    unwritable = errors.HomelabError(
        f"the output cannot be written: {refused.strerror or refused}",
        where="standard output",
        hint="write it to a disk that has room (df -h shows them), then run the command again",
    )
    _show(unwritable, as_json=False)


def _show(error: errors.HomelabError, as_json: bool) -> None:
    if as_json:
        with contextlib.suppress(OSError):  # where it cannot be said there, it is said on stderr
            terminal.document({"error": {**error.as_dict(), "exit_code": error.exit_code}})
            sys.stdout.flush()
            return
    terminal.three_parts("error", error.message, error.where, error.hint)
