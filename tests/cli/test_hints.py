"""The commands that hints name: they have the options that are named, and pasted into the same shell they mean the same files."""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import homelab as package
from homelab.cli import bench, common, queue
from homelab.cli.command_list import app
from homelab.cli.main import run
from homelab.controller.base import hint
from homelab.controller.base.errors import HomelabError
from homelab.controller.base.hint import Command, Hint, chain, for_recipe, homelab, with_options
from homelab.controller.checks.evidence import Finding
from tests.cli.conftest import LAW, SCRIPT

pytestmark = pytest.mark.timeout(200)
RUNS = Path(__file__).parents[1] / "fixtures" / "older_runs" / "controller"
Said = Callable[..., tuple[str, str]]


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Said:
    """Run a command in a folder with a cluster of which no node answers; stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOMELAB_RUNS", str(tmp_path / "elsewhere"))
    monkeypatch.delenv("HOMELAB_CLUSTER", raising=False)
    for name in ("cluster.toml", "other.toml"):
        Path(name).write_text('[[nodes]]\nname = "a"\nhost = "127.0.0.1"\nport = 1\n')
    Path("script.toml").write_text(SCRIPT)
    Path("train.py").write_text("pass\n")

    def of(*arguments: str, code: int = 0) -> tuple[str, str]:
        assert run(list(arguments)) == code
        captured = capsys.readouterr()
        return captured.out, captured.err

    return of


def test_a_command_gets_the_options_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    import inspect

    for name in ("HOMELAB_RUNS", "HOMELAB_CLUSTER"):
        monkeypatch.delenv(name, raising=False)
    options = common.options_of(Path("other.toml"), Path("x"))
    ways = {command.name or "": command.callback for command in app.registered_commands} | {
        "bench": bench.command,
        "bench card": bench.card,
        "queue": queue.command,
    }
    ways |= {f"queue {name}": getattr(queue, name) for name in queue.COMMANDS}
    for name, callback in ways.items():
        assert callback is not None
        given = inspect.signature(callback).parameters
        assert ("--cluster other.toml" in options(name)) == ("cluster" in given), name
        assert ("--runs-dir x" in options(name)) == ("runs_dir" in given), name
    assert options("lab") == ""
    assert hint.homelab("bench card tower").with_options(options) == "homelab bench card --cluster other.toml tower"
    assert hint.homelab("bench", "suite.toml").with_options(options) == "homelab bench --cluster other.toml suite.toml"


def test_an_own_command_in_a_sentence_of_a_node_is_known_by_its_name() -> None:
    names = {command.name for command in app.registered_commands} - {"explain"} | {"bench", "bench card", "queue"}
    assert names | {f"queue {name}" for name in queue.COMMANDS} == set(hint._OWN_NAMES)


def test_a_folder_that_the_environment_names_is_in_no_hint(said: Said) -> None:
    out, _ = said("plan", "script.toml", "--offline")
    assert out.rstrip().endswith("Next: homelab launch script.toml")
    out, _ = said("preflight", "script.toml", code=3)
    assert "run again: homelab preflight script.toml\n" in out
    assert "--runs-dir" not in out


def test_what_was_named_by_hand_is_named_again(said: Said) -> None:
    out, _ = said("plan", "script.toml", "--offline", "--cluster", "other.toml")
    assert out.rstrip().endswith("Next: homelab launch script.toml --cluster other.toml")
    out, _ = said("preflight", "script.toml", "--cluster", "other.toml", code=3)
    assert "run again: homelab preflight script.toml --cluster other.toml\n" in out
    _, err = said("recover", "--nodes", "b", "--cluster", "other.toml", "--runs-dir", "runs", code=2)
    assert err.endswith("fix:   homelab preflight --cluster other.toml --nodes a\n"), "preflight has no --runs-dir"


def test_what_follows_names_the_files_that_were_named_by_hand(said: Said) -> None:
    shutil.copytree(RUNS, "kept")
    first, second = "2026-11-26-0158-demo", "2026-11-26-0157-alone"
    named = ("--cluster", "other.toml", "--runs-dir", "kept")
    out, _ = said("compare", first, second, *named)
    assert out.endswith(f"Next: homelab report {first} --cluster other.toml --runs-dir kept\n")
    out, _ = said("stop", first, *named, code=3)
    assert f"When it is back: homelab stop {first} --cluster other.toml --runs-dir kept\n" in out
    Path("law.toml").write_text(LAW)
    Path("suite.toml").write_text('recipe = "law.toml"\n')
    out, _ = said("bench", "suite.toml", "--dry-run", "--cluster", "other.toml")
    assert out.endswith("Next: homelab bench suite.toml --cluster other.toml\n")


def test_a_run_in_the_default_folder_that_the_environment_does_not_mean(said: Said) -> None:
    assert common.same_options(Path("cluster.toml"), Path("runs")) == " --runs-dir runs"
    assert common.same_options(Path("cluster.toml"), Path.cwd() / "elsewhere") == ""
    assert common.same_options(Path("cluster.toml")) == ""


def test_an_environment_variable_that_is_set_to_nothing_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOMELAB_RUNS", "")
    monkeypatch.setenv("HOMELAB_CLUSTER", "")
    assert common.same_options(Path("cluster.toml"), Path("runs")) == ""


def test_findings_name_the_files_too(said: Said) -> None:
    stop = chain(homelab("stop", "x"), homelab("stop", "y"))
    finding = Finding("runs.alive", "a", "warn", "run x is alive here", Hint.of_parts([stop]), stop)
    same = common.for_same_files([finding], Path("cluster.toml"))
    assert same == [finding], "what preflight offers finds the folder of the environment by itself"
    named = common.for_same_files([finding], Path("my cluster.toml"), Path("runs"))[0]
    assert named.fix == named.hint
    assert named.fix == " && ".join(f"homelab stop --cluster 'my cluster.toml' --runs-dir runs {run}" for run in "xy")


@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        (
            Hint("{}, then once more: {}", homelab("preflight --only network"), homelab("preflight --deep")),
            "homelab preflight{c} --only network, then once more: homelab preflight{c} --deep",
        ),
        (homelab("trust", "laptop"), "homelab trust{c} laptop"),
        (
            Hint("if you know why: {}", chain(Command("rm x"), homelab("trust", "laptop"))),
            "if you know why: rm x && homelab trust{c} laptop",
        ),
        (
            Hint("{}; {}", homelab("status", "r"), Hint("by hand: {}", homelab("stop", "r"))),
            "homelab status{c}{r} r; by hand: homelab stop{c}{r} r",
        ),
        (homelab("status r --cluster other.toml --runs-dir x"), "homelab status r{c}{r}"),
        (homelab("lab up", "a b"), "homelab lab up 'a b'"),
        (Hint.said("ask it: homelab status r, or homelab preflight-like"), "ask it: homelab status{c}{r} r, or homelab preflight-like"),
        (Hint.said("once more: homelab recover r --cluster other.toml --runs-dir x"), "once more: homelab recover r{c}{r}"),
        (
            Hint.said("homelab stop r, then homelab recover r --cluster other.toml --runs-dir x; homelab preflight -c"),
            "homelab stop{c}{r} r, then homelab recover r{c}{r}; homelab preflight{c} -c",
        ),
        (Hint.said("homelab trust a --cluster other.toml.old"), "homelab trust{c} a --cluster other.toml.old"),
        (
            "let the user that homelab logs in with read it; homelab explain x",
            "let the user that homelab logs in with read it; homelab explain x",
        ),
        (
            Hint.said("let the user that homelab logs in with read it; homelab explain x"),
            "let the user that homelab logs in with read it; homelab explain x",
        ),
        (Hint.said("python -m homelab.worker; ~/.homelab/env/bin/pip"), "python -m homelab.worker; ~/.homelab/env/bin/pip"),
    ],
)
def test_each_command_gets_its_own_options_once(monkeypatch: pytest.MonkeyPatch, sentence: str, expected: str) -> None:
    for name in ("HOMELAB_RUNS", "HOMELAB_CLUSTER"):
        monkeypatch.delenv(name, raising=False)
    options = common.options_of(Path("other.toml"), Path("x"))
    once = with_options(sentence, options)
    assert once == expected.format(c=" --cluster other.toml", r=" --runs-dir x")
    assert with_options(once, options) == once


def test_an_error_keeps_the_commands_of_its_hint_and_a_terminal_obeys_none_of_it() -> None:
    error = HomelabError("x", hint=Hint("see {}\x1b[2J; then {}", "a\rb", homelab("stop", "r")))
    assert (error.hint, [str(command) for command in getattr(error.hint, "commands", ())]) == (
        "see b; then homelab stop r",
        ["homelab stop r"],
    )
    assert HomelabError("x", hint=homelab("runs")).hint.commands == (homelab("runs"),)  # type: ignore[attr-defined]


# Words of a program, not of a hint: a docstring, a help text, the README of a run's folder, what `explain` prints.
NO_HINTS = ("diagnose/topics", "node/", "worker/")


def test_every_command_of_ours_in_a_hint_is_known_as_one() -> None:
    """A string that says `homelab NAME` where a hint is made loses the options that its reader needs: `homelab("NAME")` makes the command."""
    words = re.compile(rf"(?<![\w./`-])homelab (?:{'|'.join((*hint._OWN_NAMES, 'lab'))})\b")
    wrong = []
    root = Path(package.__file__).parent
    for path in sorted(root.rglob("*.py")):
        if str(path.relative_to(root)).startswith(NO_HINTS):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            wrong += [f"{path}:{text.lineno}: {text.value}" for text in hints_of(node) if words.search(str(text.value))]
    assert not wrong, "\n".join(wrong)


def hints_of(node: ast.AST) -> Iterator[ast.Constant]:
    """The string constants in what becomes a hint: `hint=...`, `hint = ...`, an argument of Problem, Hint and Rule, and what is returned as a Hint."""
    values: list[ast.AST] = []
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func).rpartition(".")[2]
        values += [keyword.value for keyword in node.keywords if keyword.arg in ("hint", "fix")]
        values += node.args[2:] if name == "Problem" else node.args if name in ("Hint", "Opening") else []
    elif isinstance(node, ast.Assign) and any("hint" in ast.unparse(target) for target in node.targets):
        values.append(node.value)
    for value in values:
        for inner in ast.walk(value):
            if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
                yield inner


def test_what_is_a_hint_already_is_not_read_as_text() -> None:
    stop = homelab("stop", "r")
    assert Hint.said(Hint("first: {}", stop)).commands == Hint.said(stop).commands == (stop,)


def test_a_chain_that_is_cleaned_stays_a_chain() -> None:
    stop = chain(homelab("stop", "a"), homelab("stop", "b"))
    cleaned = Hint("bad\x1b[0m {}", stop).cleaned(lambda text: text.replace("\x1b[0m", ""))
    assert cleaned == "bad homelab stop a && homelab stop b"
    assert cleaned.with_options(lambda name: " --here" if name == "stop" else "") == "bad homelab stop --here a && homelab stop --here b"


def test_commands_of_ours_name_the_recipe_that_was_given() -> None:
    hint_text = Hint(
        "{} shows RECIPE; {}; {}",
        homelab("plan RECIPE --why"),
        Command("cat RECIPE"),
        chain(homelab("setup --recipe RECIPE"), homelab("preflight RECIPE")),
    )
    found = for_recipe(hint_text, "my recipes/a.toml")
    assert (
        found
        == "homelab plan 'my recipes/a.toml' --why shows RECIPE; cat RECIPE; homelab setup --recipe 'my recipes/a.toml' && homelab preflight 'my recipes/a.toml'"
    )
    assert isinstance(found, Hint) and len(found.commands) == 3
    assert for_recipe("plan RECIPE", "x") == "plan RECIPE" and for_recipe(homelab("planRECIPE"), "x") == "homelab planRECIPE"
