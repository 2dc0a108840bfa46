"""The commands that hints name: they have the options that are named, and pasted into the same shell they mean the same files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from homelab.checks import runs
from homelab.checks.evidence import Finding
from homelab.cli import common
from homelab.cli.commands import app
from homelab.cli.main import run
from tests.cli.conftest import SCRIPT

pytestmark = pytest.mark.timeout(200)
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


def test_the_options_are_those_that_the_commands_have() -> None:
    import inspect

    for command in app.registered_commands:
        assert command.callback is not None
        given = inspect.signature(command.callback).parameters
        name = command.name or ""
        assert ("cluster" in given) == (name in common._WITH_CLUSTER or name in common._WITH_RUNS), name
        assert ("runs_dir" in given) == (name in common._WITH_RUNS), name


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


def test_a_run_in_the_default_folder_that_the_environment_does_not_mean(said: Said) -> None:
    assert common.same_options(Path("cluster.toml"), Path("runs")) == " --runs-dir runs"
    assert common.same_options(Path("cluster.toml"), Path.cwd() / "elsewhere") == ""
    assert common.same_options(Path("cluster.toml")) == ""


def test_an_environment_variable_that_is_set_to_nothing_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOMELAB_RUNS", "")
    monkeypatch.setenv("HOMELAB_CLUSTER", "")
    assert common.same_options(Path("cluster.toml"), Path("runs")) == ""


def test_findings_name_the_files_too(said: Said) -> None:
    finding = Finding(
        runs.SUBJECT.checks[0].id,
        "a",
        "warn",
        "run x is alive here",
        "homelab stop x && homelab stop y",
        "homelab stop x && homelab stop y",
    )
    same = common.for_cluster([finding], Path("cluster.toml"))
    assert same == [finding], "what preflight offers finds the folder of the environment by itself"
    named = common.for_cluster([finding], Path("my cluster.toml"), Path("runs"))[0]
    assert (
        named.fix
        == named.hint
        == " && ".join(f"homelab stop --cluster 'my cluster.toml' --runs-dir runs {run}" for run in "xy")
    )


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        ("homelab preflight --only network, then once more: homelab preflight --deep", "homelab preflight{c} --only network, then once more: homelab preflight{c} --deep"),
        ("homelab trust laptop", "homelab trust{c} laptop"),
        ("homelab status r{c}{r}; to do it by hand: homelab stop r", "homelab status r{c}{r}; to do it by hand: homelab stop{c}{r} r"),
        ("let the user that homelab logs in with read it; homelab explain x", "let the user that homelab logs in with read it; homelab explain x"),
        ("python -m homelab.worker; ~/.homelab/env/bin/pip", "python -m homelab.worker; ~/.homelab/env/bin/pip"),
    ],
)  # fmt: skip
def test_each_command_gets_its_own_options_once(monkeypatch: pytest.MonkeyPatch, hint: str, expected: str) -> None:
    for name in ("HOMELAB_RUNS", "HOMELAB_CLUSTER"):
        monkeypatch.delenv(name, raising=False)
    options = {"c": " --cluster other.toml", "r": " --runs-dir x"}
    once = common.for_same_files(hint.format(**options), Path("other.toml"), Path("x"))
    assert once == expected.format(**options)
    assert common.for_same_files(once, Path("other.toml"), Path("x")) == once
