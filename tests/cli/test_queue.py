"""`homelab queue` as it is typed, without a lab: what is added, shown, moved and refused. The machines are off: jobs are planned by cluster.toml."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from homelab.cli.main import run
from homelab.controller.base.say import Say
from homelab.controller.config.cluster import Cluster
from homelab.controller.config.recipe import Recipe, TrainRecipe
from homelab.controller.features.preflight import plan_inputs
from homelab.controller.features.preflight.plan_inputs import PlanSources
from homelab.controller.features.queue.queue_folder import QueueFolder
from homelab.controller.planning.inputs import PlanInputs
from homelab.controller.planning.types import Plan
from scripts.practice.desk import Desk

pytestmark = pytest.mark.timeout(300)
CARDS = '[[nodes.gpus]]\nmodel = "RTX 3090"\nvram_gb = 24\n'
RECIPE = """# mine
[model]
name = "Qwen/Qwen3-0.6B"
[data]
train = "chats.jsonl"
[method]
kind = "lora"
[train]
global_batch = 8
steps = 200
learning_rate = 1e-3  # as always
"""
Said = Callable[..., tuple[str, str]]


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Said:
    """What a command prints, on stdout and stderr, in a folder with a cluster of two machines that are off."""
    for name in ("HOMELAB_RUNS", "HOMELAB_CLUSTER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    nodes = (f'[[nodes]]\nname = "{name}"\nhost = "127.0.0.1"\nport = {port}\n{CARDS}' for port, name in enumerate(("tower", "laptop"), 1))
    Path("cluster.toml").write_text("".join(nodes))
    Path("chats.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}) + "\n"
    )
    Path("law.toml").write_text(RECIPE)

    def of(*arguments: str, code: int = 0) -> tuple[str, str]:
        found = run(list(arguments))
        captured = capsys.readouterr()
        assert found == code, captured
        return captured.out, captured.err

    return of


def jobs(said: Said) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(said("queue", "--json")[0])["jobs"]
    return found


def test_added_shown_moved_paused_and_removed(said: Said) -> None:
    out, _ = said("queue")
    assert out == "The queue is empty.\nNext: homelab queue add RECIPE\n" and not Path("runs").exists()
    out, _ = said("queue", "add", "law.toml")
    assert out.startswith("Added job 1.\n1  law.toml: It ") and "no machine answers" in out and out.endswith("Next: homelab queue run\n")
    out, _ = said(
        "queue",
        "add",
        "law.toml",
        "--set",
        "train.learning_rate=1e-4,2e-4",
        "--nodes",
        "tower",
        "--stop-at",
        "7:00",
        "--not-before",
        "23:00",
    )
    assert out.startswith("Added jobs 2 and 3.\n2  law.toml, train.learning_rate=1e-4: It ")
    out, _ = said("queue", "move", "3", "1")
    assert out == "The order is now 3, 1, 2. Next: homelab queue\n"
    assert [(one["number"], one["nodes"], one["not_before"], one["stop_at"]) for one in jobs(said)] == [
        (3, ["tower"], "23:00", "07:00"), (1, [], None, None), (2, ["tower"], "23:00", "07:00"),
    ]  # fmt: skip
    out, _ = said("queue", "pause")
    assert out.startswith("Paused: nothing more is started.") and out.endswith("Next: homelab queue resume\n")
    out, _ = said("queue")
    lines = out.splitlines()
    assert lines[0].startswith("3 jobs wait") and lines[0].endswith("The queue is paused.")
    assert lines[1].split() == ["job", "recipe", "nodes", "state", "begins", "ends"] and lines[2].split()[:3] == [
        "3",
        "law.toml",
        "learning_rate=2e-4",
    ]
    assert max(map(len, lines[1:])) <= 80 and "…" not in "".join(lines[1:5]) and lines[-1] == "Next: homelab queue resume"
    said("queue", "resume")
    out, _ = said("queue", "remove", "1", "2")
    assert out.startswith("Removed job 1, law.toml.\nRemoved job 2, law.toml.\n")
    said("queue", "add", "law.toml", "--after", "3")
    assert [(one["number"], one["after"]) for one in jobs(said)] == [(3, None), (4, "3")], "a number is not used again"


def test_the_recipe_stays_as_it_was_added(said: Said) -> None:
    said("queue", "add", "law.toml", "--set", "train.learning_rate=2e-4")
    said("queue", "add", "law.toml")
    Path("law.toml").write_text(RECIPE.replace("steps = 200", "steps = 3"))
    changed, whole = QueueFolder(Path("runs")).listing().waiting
    assert whole.text == RECIPE and changed.text == RECIPE.replace("1e-3", "0.0002") and set(whole.digests) == {"train"}
    assert whole.recipe == str(Path("law.toml").resolve())
    assert Path("runs/queue/waiting/0001.json").stat().st_mode & 0o077 == 0 and Path("runs/queue").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("arguments", "seen", "fix"),
    [
        ("queue add", "Missing argument", "--help"),
        ("queue add .", "Is a directory", "ls"),
        ("queue add low.toml", "there is no recipe here", "law.toml"),
        ("queue add law.toml --not-before 25:00", '"25:00" is no time of day', "--not-before 23:00"),
        ("queue add law.toml --stop-at 7", '"7" is no time of day', "--stop-at 23:00"),
        ("queue add law.toml --stop-at 07:00 --not-before 7:00", "no time to train", "different"),
        ("queue add law.toml --nodes tover", 'no node is called "tover". Did you mean "tower"?', "preflight"),
        ("queue add law.toml --set train.learning_rate=", "a value is empty", "behind each comma"),
        ("queue add law.toml --set train.learning_rate=1e-4,,2e-4", "a value is empty", "behind each comma"),
        ("queue add law.toml --set train.learning_rat=1", 'Did you mean "learning_rate"?', "explain recipe.train"),
        ("queue add law.toml --set learning_rate=1", "names a key", "--set train.learning_rate=1e-4,2e-4"),
        ("queue add law.toml --set train.steps=1 --set train.steps=2", "is set twice", "--set train.steps=1,2"),
        ("queue add law.toml --after 9", "no job has number 9", "homelab queue"),
        ("queue add law.toml --after nothing", 'no run is called "nothing"', "homelab runs"),
        ("queue add law.toml --skip none", "none", ""),
        ("queue remove 9", "no job has number 9", "homelab queue"),
        ("queue move 9 1", "no job has number 9", "homelab queue"),
        ("queue move x 1", "valid integer", "--help"),
        ("queue --runs-dir x pause", "--runs-dir stands before pause", "homelab queue pause --runs-dir"),
        ("queue ad", "Did you mean 'add'", "--help"),
    ],
)
def test_bad_input_is_refused_and_leaves_nothing(arguments: str, seen: str, fix: str, said: Said) -> None:
    before = sorted(Path().rglob("*"))
    _, err = said(*arguments.split(), code=2)
    assert seen in err and fix in err[err.index("fix:") :], err
    assert sorted(Path().rglob("*")) == before


def test_numbers_that_are_there_are_named(said: Said) -> None:
    said("queue", "add", "law.toml", "law.toml")
    _, err = said("queue", "remove", "1", "12", code=2)
    assert "the queue has 1, 2" in err and len(jobs(said)) == 2, "all of them, or none"
    _, err = said("queue", "move", "1", "3", code=2)
    assert "there is no place 3" in err and "homelab queue move 1 1" in err


def test_a_job_that_cannot_fit_is_refused_in_the_words_of_the_plan(said: Said) -> None:
    Path("law.toml").write_text(RECIPE.replace("Qwen3-0.6B", "Qwen3-32B").replace('"lora"', '"full"'))
    _, err = said("queue", "add", "law.toml", code=2)
    _, planned = said("plan", "law.toml", "--offline", code=2)
    assert err[err.index("error:") :] == planned[planned.index("error:") :] and "law.toml" in planned
    Path("law.toml").write_text(f"{RECIPE}seq_len = 32768\n[parallel]\nmicro_batch = 4\n")
    _, err = said("queue", "add", "law.toml", code=1)
    planned, _ = said("plan", "law.toml", "--offline", code=1)
    assert planned.splitlines()[0] in err and "lacks" in err and not Path("runs").exists(), (planned, err)


def test_a_damaged_file_is_named_and_hides_no_other(said: Said) -> None:
    said("queue", "add", "law.toml", "law.toml")
    Path("runs/queue/waiting/0001.json").write_text("{")
    out, _ = said("queue")
    assert out.startswith("1 job waits") and "0001.json is damaged; move it away: mv " in out


def test_where_no_systemd_is_a_line_for_cron_is_shown(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    out, _ = said("queue", "install")
    assert "Nothing was written" in out and "*/5 * * * * " in out and f"--runs-dir {Path('runs').resolve()}" in out


def test_jobs_of_a_sweep_that_need_the_same_memory_are_tried_once(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    gather, tried = plan_inputs.gather_for_plan, list[int]()

    def gathered(cluster: Cluster, training: Recipe, recipe: Path, *, offline: bool, say: Say) -> PlanSources:
        return replace(gather(cluster, training, recipe, offline=True, say=say), offline=False)

    def dry_run(plan: Plan, of: PlanInputs, say: Say) -> Plan:
        assert isinstance(of.recipe, TrainRecipe)
        tried.append(of.recipe.method.rank)
        return plan

    monkeypatch.setattr(plan_inputs, "gather_for_plan", gathered)
    monkeypatch.setattr(plan_inputs, "tried", dry_run)
    said("queue", "add", "law.toml", "--set", "train.learning_rate=1e-4,2e-4,4e-4", "--set", "method.rank=8,16")
    assert sorted(tried) == [8, 16]


@pytest.mark.namespaces
def test_what_would_end_a_job_in_the_night_is_said_when_it_is_added(desk: Desk) -> None:
    desk.write("night.toml", RECIPE.replace("Qwen/Qwen3-0.6B", "/models/nowhere"))
    out = desk.homelab("queue", "add", "night.toml", "--set", "train.learning_rate=1e-4,2e-4", "--skip", "python").stdout
    assert out.startswith("Added jobs 1 and 2.\n1  night.toml, train.learning_rate=1e-4: ")
    assert out.count("note: as things are, it would not begin: /models/nowhere: there is no such folder") == 2, (
        "of each node, once for both jobs"
    )
    assert f"(node node1, check model.there); to fix it: homelab setup --recipe {desk.folder}/night.toml sends it to the nodes" in out
    skipped = desk.homelab("queue", "add", "night.toml", "--skip", "python", "--skip", "model").stdout
    assert "it would not begin" not in skipped, skipped
