"""TAB in real shells, answered from files alone; and an example that can be typed in the help of every command."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from homelab.cli import completion, examples
from homelab.cli.command_list import app
from scripts.practice import prepared_commands

pytestmark = pytest.mark.timeout(60)
CLUSTER = '[[nodes]]\nname = "tower"\nhost = "192.0.2.1"\n[[nodes]]\nname = "laptop"\nhost = "192.0.2.2"\n[[nodes]]\nname = "old tower"\nhost = "192.0.2.3"\n'


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with three runs, a cluster that nobody could reach, two recipes and what is none."""
    for day, state in ((20, "done"), (21, "failed"), (22, "running")):
        folder = tmp_path / "runs" / f"2026-11-{day}-1405-demo"
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(json.dumps({"created_at": float(day)}))
        (folder / "state.json").write_text(json.dumps({"state": state}))
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "a.toml").write_text('[model]\nname = "x"\n')
    (tmp_path / "mine.toml").write_text('[script]\npath = "x.py"\n')
    (tmp_path / "broken.toml").write_text("[model")
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    for name in ("HOMELAB_CLUSTER", "HOMELAB_RUNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def offered(line: str, **environment: str) -> list[str]:
    """What fish would be given: a value and a help text per line."""
    given = {"_HOMELAB_COMPLETE": "complete_fish", "_TYPER_COMPLETE_FISH_ACTION": "get-args", "_TYPER_COMPLETE_ARGS": line}
    done = prepared_commands.run([], script=program(), cwd=Path.cwd(), env={**os.environ, **given, **environment}, timeout_s=30)
    assert done.returncode == 0 and not done.stderr, done
    return [entry.split("\t")[0] for entry in done.stdout.splitlines() if entry]


def program() -> str:
    return str(Path(sys.executable).with_name("homelab"))


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("homelab status ", ["2026-11-22-1405-demo", "2026-11-21-1405-demo", "2026-11-20-1405-demo"]),
        ("homelab fetch 2026-11-21", ["2026-11-21-1405-demo"]),
        ("homelab doctor ", ["tower", "laptop", "old tower"]),
        ("homelab doctor to", ["tower"]),
        ("homelab teardown tower ", ["laptop", "old tower"]),
        ("homelab launch r.toml --nodes tower,l", ["tower,laptop"]),
        ("homelab plan ", ["mine.toml", "recipes/a.toml"]),
        ("homelab preflight rec", ["recipes/a.toml"]),
        ("homelab status --runs-dir nowhere ", []),
        ("homelab plan r.toml --cluster nowhere.toml --nodes ", []),
        ("homelab tens", ["tensorboard"]),
        ("homelab recover --strategy ", ["auto", "ddp", "fsdp", "hsdp", "pipeline", "zero2", "zero3"]),
        ("homelab recover r --strategy z", ["zero2", "zero3"]),
        ("homelab launch r.toml --supervise ", ["here", "head"]),
        ("homelab preflight --only network.re", ["network.reach"]),
        ("homelab launch r.toml --skip gpu.t", ["gpu.torch", "gpu.temperature", "gpu.throttle"]),
        ("homelab plan r.toml --like to", ["tower"]),
        ("homelab plan r.toml --launcher torch", ["torchrun-ssh"]),
        ("homelab export r.toml --to d", ["dstack"]),
        ("homelab explain fi", ["first-training", "files", "firewall", "file-lock"]),
        ("homelab explain recipe.train.learn", ["recipe.train.learning_rate"]),
        ("homelab gguf --quantise q", ["q8_0", "q4_k_m"]),
        ("homelab bench card t", ["tower"]),
        ("homelab bench card --method q", ["qlora"]),
        ("homelab bench c", ["card"]),
    ],
)
def test_what_is_offered(place: Path, line: str, values: list[str]) -> None:
    assert [value for value in offered(line) if not value.startswith("--")] == values


def test_other_places_and_damage(place: Path) -> None:
    (place / "runs").rename(place / "elsewhere")
    assert offered("homelab why --runs-dir elsewhere 2026-11-20") == ["2026-11-20-1405-demo"]
    assert offered("homelab why 2026-11-20", HOMELAB_RUNS=str(place / "elsewhere")) == ["2026-11-20-1405-demo"]
    (place / "elsewhere" / "2026-11-20-1405-demo" / "state.json").write_text("{")
    assert offered("homelab why --runs-dir elsewhere 2026-11-20") == ["2026-11-20-1405-demo"]
    for text in ("[[nodes", "nodes = 5", "nodes = [1]", "[[nodes]]\nname = 5\n"):
        (place / "cluster.toml").write_text(text)
        assert offered("homelab doctor ") == []


BASH = """
eval "$(_HOMELAB_COMPLETE=source_bash homelab)"
complete -p homelab >/dev/null || exit 9
COMP_WORDS=(homelab status 2026-11-21); COMP_CWORD=2
_homelab_completion homelab
printf '%s\\n' "${COMPREPLY[@]}"
"""
ZSH = """
autoload -Uz compinit && compinit -u -D
eval "$(_HOMELAB_COMPLETE=source_zsh homelab)"
_arguments() { print -r -- "$@" }
words=(homelab status 2026-11-21); CURRENT=3
_homelab_completion
"""
FISH = '_HOMELAB_COMPLETE=source_fish homelab | source; complete -C "homelab status 2026-11-21"'


@pytest.mark.parametrize(("shell", "script"), [("bash", BASH), ("zsh", ZSH), ("fish", FISH)])
def test_in_a_real_shell(place: Path, shell: str, script: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} on this machine")
    environment = {**os.environ, "PATH": f"{Path(program()).parent}:{os.environ['PATH']}", "HOME": str(place)}
    done = subprocess.run([shell, "-c", script], env=environment, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done
    assert "2026-11-21-1405-demo" in done.stdout and "2026-11-22" not in done.stdout


def test_it_imports_nothing_that_connects() -> None:
    program_text = "import sys; import homelab.cli.command_list, homelab.controller.run.store; print([n for n in ('paramiko', 'fabric', 'torch', 'pydantic') if n in sys.modules])"
    assert subprocess.run([sys.executable, "-c", program_text], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def commands() -> dict[str, typer.core.TyperCommand]:
    root = typer.main.get_command(app)
    found = {}
    for name, command in root.commands.items():  # type: ignore[attr-defined]
        inner = getattr(command, "commands", None)
        found |= {name: command} if inner is None else {f"{name} {word}": one for word, one in inner.items()}
    return found


def test_every_command_has_an_example_in_its_help() -> None:
    assert set(commands()) == set(examples.EXAMPLES)
    for name, command in commands().items():
        assert command.epilog == examples.epilog(name)


@pytest.mark.parametrize(("name", "line"), [(name, line) for name, lines in examples.EXAMPLES.items() for line in lines])
def test_an_example_can_be_typed(name: str, line: str) -> None:
    import shlex

    assert line.startswith(f"homelab {name}") and "[" not in line, "the help takes brackets for markup"
    words = shlex.split(line.split(" > ")[0])[1 + len(name.split()) :]
    command = commands()[name]
    command.make_context(name, words)
    for word in words:
        if word.endswith(".toml"):
            assert (Path(__file__).parents[2] / word).is_file()


def test_the_list_of_nodes_keeps_what_is_typed() -> None:
    context = type("Context", (), {"params": {"cluster": "nowhere.toml"}})()
    assert list(completion.node_list(context, "tower,")) == []
