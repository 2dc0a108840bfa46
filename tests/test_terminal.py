"""No word of a node, a model or a log reaches a terminal uncleaned: one place prints (`homelab.cli.terminal`, and `CleanConsole` for tables), and cleans.

The rule is over the syntax trees of all that runs on the controller: nobody else prints. Free of it are constants, JSON in ASCII (an answer to
another program of ours: a control character in it is \\uXXXX), and a text that is rendered into memory.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
from collections.abc import Iterator
from typing import Any

import pytest
from rich.table import Table
from rich.text import Text

from homelab.cli import common, conversation, main, terminal
from homelab.cli.clean_console import CleanConsole
from homelab.controller.base import errors
from homelab.controller.features.chat.dialogue import Dialogue
from tests import limits

PRINTERS = ("cli/terminal.py", "cli/clean_console.py")
# Their words are read by the agent, torchrun or a practice node, and come here as an answer; they cannot import what is not shipped.
ON_NODES = ("node", "worker")
PERMITTED = {
    "cli/demo.py": "it shows the commands of its walk, which clean what they print",
    "lab/model.py": "a program of the lab alone: it says a path of this machine",
    "lab/node_init.py": "it runs on a practice node",
}
CALLS = frozenset({"print", "input"})
METHODS = frozenset({
    "typer.echo", "typer.secho", "typer.confirm", "typer.prompt", "click.echo", "click.secho", "click.confirm", "click.prompt", "rich.print", "rich.print_json",
    "sys.stdout.write", "sys.stderr.write", "sys.stdout.writelines", "sys.stderr.writelines", "sys.stdout.buffer.write", "sys.stderr.buffer.write", "sys.__stdout__.write",
    "sys.__stderr__.write", "os.write", "warnings.warn", "logging.warning", "logging.error", "Text.from_markup", "Text.from_ansi", "traceback.print_exc", "getpass.getpass",
})  # fmt: skip
STARTS = frozenset(
    {"subprocess.run", "subprocess.Popen", "subprocess.call", "subprocess.check_call", "os.system", "os.posix_spawn", "own_programs.start"}
)
CONSOLES = frozenset({"Console", "rich.console.Console", "console.Console", "rich.get_console", "get_console"})


def breaches(tree: ast.Module) -> Iterator[str]:
    """Calls that print by themselves, and consoles that clean nothing."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in ("typer", "click", "rich", "sys", "os"):
            for alias in node.names:
                if f"{node.module}.{alias.name}" in METHODS | {"sys.stdout", "sys.stderr"}:
                    yield f"{node.lineno}: from {node.module} import {alias.name}"
        if not isinstance(node, ast.Call):
            continue
        name = _dotted(node.func)
        keywords = {keyword.arg for keyword in node.keywords}
        if name in STARTS and not keywords >= {"stdout", "stderr"} and not keywords & {"capture_output", None}:
            yield f"{node.lineno}: {ast.unparse(node)} (it inherits the terminal)"
        elif name in CONSOLES:
            words = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if "StringIO" not in words.get("file", ""):
                yield f"{node.lineno}: {ast.unparse(node)}"
        elif name in CALLS | METHODS and not _is_harmless(node):
            yield f"{node.lineno}: {ast.unparse(node)}"


def _dotted(function: ast.expr) -> str:
    """The words of a name with its dots, "" for what is called otherwise: `ast.unparse` of each call takes seconds."""
    words = []
    while isinstance(function, ast.Attribute):
        words.insert(0, function.attr)
        function = function.value
    return ".".join((function.id, *words)) if isinstance(function, ast.Name) else ""


def _is_harmless(call: ast.Call) -> bool:
    if ast.unparse(call.func) == "os.write":
        return _is_constant(call.args[1]) or ast.unparse(call.args[0]) not in ("1", "2", "sys.stdout.fileno()", "sys.stderr.fileno()")
    texts = call.args or [ast.Constant("")]
    return all(map(_is_constant, texts)) or all("ensure_ascii" not in ast.unparse(text) and _is_json(text) for text in texts)


def _is_constant(text: ast.expr) -> bool:
    return isinstance(text, ast.Constant) or (isinstance(text, ast.IfExp) and _is_constant(text.body) and _is_constant(text.orelse))


def _is_json(text: ast.expr) -> bool:
    while isinstance(text, ast.BinOp) and isinstance(text.right, ast.Constant):
        text = text.left
    return isinstance(text, ast.Call) and ast.unparse(text.func) == "json.dumps"


def test_one_place_prints() -> None:
    found = {limits.label(path): list(breaches(tree)) for path, tree in limits.trees().items() if limits.room_of(path) not in ON_NODES}
    printers = {name for name, lines in found.items() if lines}
    assert not printers - {*PRINTERS, *PERMITTED}, (
        f"print it with homelab.cli.terminal or CleanConsole: { ({name: found[name] for name in printers - {*PRINTERS, *PERMITTED}}) }"
    )
    assert printers >= set(PERMITTED), f"exceptions that are no longer needed: {sorted(set(PERMITTED) - printers)}"


@pytest.mark.parametrize(
    "line",
    [
        "typer.echo(answer.text)", "print(answer.text)", "sys.stdout.write(piece)", "sys.stderr.write(f'{error.message}')", "Console().print(x)", "click.echo(x)",
        "rich.print(x)", "print(json.dumps(x, ensure_ascii=False))", "input(f'{name}? ')", "typer.confirm(ask)", "typer.prompt(question, default=x)", "Text.from_markup(said)",
        "from typer import echo", "from sys import stdout", "from rich import print", "rich.console.Console(stderr=True)", "os.write(1, text)", "print('a', *words)",
        "sys.stdout.write(json.dumps(x) + name)", "Console(file=sys.stderr)", "subprocess.run(['ssh', host])", "own_programs.start(command, stdout=log)",
    ],
)  # fmt: skip
def test_the_rule_is_awake(line: str) -> None:
    assert list(breaches(ast.parse(line)))


# Members of the kinds: what a terminal obeys (CSI, OSC 52 and 8, DCS, C1, single controls), what turns the order, what nobody sees.
HOSTILE = {
    "clipboard": "\x1b]52;c;cHduZWQ=\x07", "link": "\x1b]8;;http://x\x1b\\", "clear": "\x1b[2J\x1b[1;1H", "device": "\x1bP+q544e\x1b\\", "title": "\x1b]0;root@host\x07",
    "c1": "\x9b2J\x9d52;c;x\x9c\x85", "bell": "\x07\x08\x7f\x00\x0b\x0c", "return": "real\rfake", "override": "\u202eexe.\u202d\u202c", "isolate": "\u2066\u2067\u2068\u2069",
    "marks": "\u200e\u200f\u061c", "nothing": "\u200b\u200c\u2060\u2063\u2064\ufeff\u00ad\u034f\u180e", "lines": "\u2028\u2029", "fillers": "\u3164\u115f\uffa0\u2800",
    "tags": "\U000e0001\U000e0068\U000e0069\U000e007f", "selectors": "a\ufe01\ufe0f\ufe0f\ufe0e\U000e0100\U000e01ef", "joiners": "a\u200db\u200d\u200d",
}  # fmt: skip
SAFE = "ß é 日本語 עברית العربية می‌خواهم क्‍ष 👨‍👩‍👧 ❤️ 1️⃣ 👩🏽‍💻 ✔️ → █"


def _obeyed(text: str) -> list[str]:
    ranges = [
        (0, 9),
        (11, 31),
        (127, 159),
        (0x200E, 0x200F),
        (0x202A, 0x202E),
        (0x2028, 0x2029),
        (0x2060, 0x206F),
        (0xE0000, 0xE0FFF),
        (0xFE00, 0xFE0D),
    ]
    single = "\u200b\ufeff\u00ad\u034f\u061c\u180e\u3164\u115f\uffa0\u2800"
    return [hex(ord(letter)) for letter in text if letter in single or any(low <= ord(letter) <= high for low, high in ranges)]


def _console(text: str) -> None:
    console = CleanConsole()
    console.print(text)
    console.print(Text(text))
    table = Table(title=text)
    table.add_column(text)
    table.add_row(text)
    console.print(table)


def _spoken(text: str) -> None:
    """A conversation whose node says what it likes."""

    class Said:
        def answer(self, *_: Any, **__: Any) -> Iterator[str]:
            yield text
            raise _unclean(text)

    conversation._ask(Dialogue(Said(), ["trained"]), "trained", "hello", 8, title="after: ")  # type: ignore[arg-type]


def _unclean(text: str) -> errors.HomelabError:
    """An error into which words came after it was made."""
    error = errors.HomelabError("x")
    error.message, error.where, error.hint = text, text, text
    return error


def _progress(text: str) -> None:
    with common.progress() as say:
        say(text)


WAYS = {
    "echo": terminal.echo, "stderr": lambda text: terminal.echo(text, err=True), "piece": terminal.piece, "console": _console, "conversation": _spoken, "progress": _progress,
    "error": lambda text: main._show(_unclean(text), False), "json": common.print_json, "error as json": lambda text: main._show(_unclean(text), True),
    "parts": lambda text: terminal.three_parts("warning", text, text, text), "several": lambda text: _first(text),
}  # fmt: skip


def _first(text: str) -> None:
    with contextlib.suppress(errors.HomelabError):
        common.raise_first([errors.HomelabError("x"), _unclean(text)])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", HOSTILE)
def test_nothing_hostile_comes_through(way: str, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    WAYS[way](f"before {HOSTILE[kind]} after")
    said = capsys.readouterr()
    assert "after" in said.out + said.err and not _obeyed(said.out + said.err)


@pytest.mark.parametrize("way", [way for way in WAYS if "json" not in way])
def test_letters_of_all_languages_and_pictures_stay(way: str, capsys: pytest.CaptureFixture[str]) -> None:
    WAYS[way](SAFE)
    said = capsys.readouterr()
    assert SAFE in said.out + said.err


def test_brackets_and_colons_of_a_text_are_text() -> None:
    text = "[link=http://x]a[/link] [bold]b[/] :skull: [x]"
    console = CleanConsole(file=(file := io.StringIO()))
    table = Table("head")
    table.add_row(text)
    console.print(text, table)
    assert file.getvalue().count(text) == 2


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_json_document_is_read_as_it_was(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    value = {HOSTILE[kind]: [HOSTILE[kind], SAFE, "\ud800"]}
    terminal.document(value)
    said = capsys.readouterr().out
    assert json.loads(said) == value and not _obeyed(said) and "日本語" in said


def test_a_line_like_ours_within_a_message_is_no_line_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.three_parts("error", "a\nfix: sh -c evil\n\x1b[0mwhere: b", "c\nfix:   d", "e")
    assert [line.split()[0] for line in capsys.readouterr().err.splitlines() if not line.startswith(" ")] == ["error:", "where:", "fix:"]


def test_an_internal_error_is_cleaned(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise KeyError(HOSTILE["clipboard"] + HOSTILE["override"]) from ValueError("\x1b[2J")

    monkeypatch.setattr("homelab.cli.command_list.app", broken)
    monkeypatch.setattr(main, "_kept_traceback", lambda: "\x1b[2Ja traceback\u202e")
    assert main._command(["status"]) == errors.EXIT_INTERNAL
    said = capsys.readouterr().err
    assert "internal error" in said and "a traceback" in said and not _obeyed(said)
