"""`homelab new` and `homelab data` as they are typed: on practice nodes, without a cluster, and with nobody to ask."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from homelab.cli import main
from homelab.controller.base.say import Say
from homelab.controller.features.preflight import plan_inputs
from homelab.controller.planning.inputs import PlanInputs
from homelab.controller.planning.types import Plan
from scripts.practice import prepared_commands
from scripts.practice.desk import Desk
from tests.cli.conftest import complaint

pytestmark = pytest.mark.timeout(300)
MODEL = os.environ.get("HOMELAB_MODEL", "")


def chats(count: int) -> str:
    rows = ({"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}!"}]} for n in range(count))
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.skipif(not MODEL, reason="HOMELAB_MODEL names no model")
def test_on_practice_nodes_the_recipe_is_written_shown_and_planned(desk: Desk) -> None:
    desk.write("mine.jsonl", chats(60))
    said = desk.homelab("new", "mine.jsonl", "--model", MODEL).stdout
    lines = said.splitlines()
    home = str(Path.home())
    assert lines[0] == f"Wrote mine.toml: {MODEL.replace(home, '~') if MODEL.startswith(home) else MODEL} learns 60 rows as adapters."
    assert lines[1] == "It fits. How long it takes is not known before it runs."  # of processors nobody knows the speed before
    assert said.count("mine.jsonl, line") == 3 and "\u25b80!" in said
    assert lines[-1].startswith("Next: homelab launch mine.toml")
    written = (desk.folder / "mine.toml").read_text()
    assert 'precision = "fp32"' in written and "seq_len = 128" in written
    assert desk.json("plan", "mine.toml", "--no-dry-run")["verdict"]["runs"] is True
    (desk.folder / "mine.toml").write_text(re.sub(r"epochs = \d+", "epochs = 4", written, count=1))
    again = desk.json("new", "mine.jsonl", "--model", MODEL)
    assert again["kept"] == ["train.epochs"] and again["verdict"]["runs"] and not again["written"]


def test_a_plan_has_its_memory_tried_unless_it_is_told_not_to(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program that tries it imports all that trains, five seconds: `tests/controller/features/preflight/test_unknown_shape.py` runs it."""
    tried: list[str] = []

    def improved(plan: Plan, inputs: PlanInputs, say: Say) -> Plan:
        tried.append(plan.run)
        return plan

    monkeypatch.setattr(plan_inputs, "tried", improved)
    monkeypatch.chdir(desk.folder)
    monkeypatch.setenv("HOMELAB_CLUSTER", str(desk.cluster))
    for options, count in ((["--no-dry-run"], 0), ([], 1)):
        main.run(["plan", "law.toml", *options])
        assert len(tried) == count


def test_without_a_cluster_and_without_a_model(quiet_desk: Desk) -> None:
    (quiet_desk.folder / "cluster.toml").unlink()
    quiet_desk.write("mine.jsonl", chats(60))

    def typed(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HOMELAB_")}
        return prepared_commands.run(arguments, cwd=quiet_desk.folder, env=environment | {"HOME": str(quiet_desk.folder)}, timeout_s=60)

    found = json.loads(typed("new", "mine.jsonl", "--yes", "--json").stdout)
    assert found["verdict"]["runs"] and "homelab init" in found["notes"][0] and found["next"] == "homelab init"
    decided = {one["key"]: one["value"] for one in found["decisions"]}
    assert decided["model.name"].startswith("Qwen/") and "train.precision" not in decided, "nobody knows the card"
    said = typed("new", "mine.jsonl").stdout
    assert said.startswith("Nothing to change in mine.toml") and said.splitlines()[-1] == "Next: homelab init"
    assert "there is no cluster.toml here" in typed("new", "mine.jsonl", "--cluster", "mine.cluster").stderr, (
        "a name that was typed is meant"
    )


def test_a_cluster_that_is_off_is_believed_and_said(quiet_desk: Desk) -> None:
    quiet_desk.write("mine.jsonl", chats(60))
    found = quiet_desk.json("new", "mine.jsonl", "--model", "Qwen/Qwen3-0.6B")
    assert [note for note in found["notes"] if "no machine answers" in note] and (quiet_desk.folder / "mine.toml").is_file()


def test_columns_with_names_of_their_own_are_named_as_the_error_says_and_stay(quiet_desk: Desk) -> None:
    (quiet_desk.folder / "cluster.toml").unlink()
    rows = "".join(f"Frage {number}?,Antwort {number}.,{number}\n" for number in range(30))
    quiet_desk.write("mine.csv", f"frage,antwort,nummer\n{rows}")

    def typed(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HOMELAB_")}
        arguments = ("new", "mine.csv", "--model", "Qwen/Qwen3-0.6B", *arguments)
        return prepared_commands.run(arguments, cwd=quiet_desk.folder, env=environment | {"HOME": str(quiet_desk.folder)}, timeout_s=60)

    fix = typed().stderr.splitlines()[-1]
    assert fix == "fix:   homelab new mine.csv --columns prompt=frage,completion=antwort" and not (quiet_desk.folder / "mine.toml").exists()
    said = typed(*fix.split()[-2:]).stdout
    written = (quiet_desk.folder / "mine.toml").read_text()
    assert "learns 30 rows" in said and "note: 30 rows are few" in said
    assert 'columns = {prompt = "frage", completion = "antwort"}  # as you asked' in written
    assert typed().stdout.startswith("Nothing to change in mine.toml"), "named once, they stay"
    edited = written.replace('{prompt = "frage", completion = "antwort"}', '{text = "frage"}', 1)
    (quiet_desk.folder / "mine.toml").write_text(edited)
    assert typed().returncode == 0 and 'columns = {text = "frage"}' in (quiet_desk.folder / "mine.toml").read_text(), "an edit of theirs"
    for wrong, why in (
        ("prompt", "these are no columns"),
        ("frage=prompt", "no row has a part that is called frage"),
        ("prompt=nix", "new mine.csv --columns prompt=COLUMN"),
    ):
        refused = typed("--columns", wrong, "-o", "other.toml")
        assert refused.returncode == 2 and why in refused.stderr and not (quiet_desk.folder / "other.toml").exists()


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        (["new", "none.jsonl"], "no such file"), (["new", "."], "folder"),
        (["new", "hub:", "--model", "a/b"], "hub:org/name"), (["new", "chats.jsonl", "--model", "./model"], "org/name"),
        (["new", "train.py"], "a data file ends in"), (["new", "chats.jsonl", "-o", "law.toml"], "has not written it"), (["data", "none.jsonl"], "no such file"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_and_nothing_is_written(arguments: list[str], seen: str, quiet_desk: Desk) -> None:
    quiet_desk.write("chats.jsonl", chats(3))
    before = sorted(quiet_desk.folder.iterdir())
    error = complaint(quiet_desk, *arguments, code=2)
    assert seen in json.dumps(error), error
    assert sorted(quiet_desk.folder.iterdir()) == before


def test_with_nobody_to_ask_the_command_is_named(quiet_desk: Desk) -> None:
    said = quiet_desk.homelab("new", code=2).stderr
    assert "error: there is no terminal to ask for the data" in said and "fix:   homelab new DATA --model org/name" in said


def test_data_shows_rows_and_counts(quiet_desk: Desk) -> None:
    quiet_desk.write("mine.jsonl", chats(7))
    said = quiet_desk.homelab("data", "mine.jsonl").stdout
    assert said.startswith("mine.jsonl: 7 rows, read as chat.") and said.splitlines()[-1] == "Next: homelab new mine.jsonl"
    if MODEL:
        file = quiet_desk.json("data", "mine.jsonl", "--model", MODEL, "--rows", "2")
        assert len(file["previews"]) == 2 and 0 < file["loss_tokens"] < file["sum_tokens"]


def test_a_model_that_nobody_knows_is_not_judged_and_what_was_meant_is_named(quiet_desk: Desk) -> None:
    quiet_desk.write("mine.jsonl", chats(60))
    said = quiet_desk.homelab("new", "mine.jsonl", "--model", "Qwen/Qwen3-4BB", "--offline", code=1).stdout
    assert "Not judged: Qwen/Qwen3-4BB" in said and '[model] name = "Qwen/Qwen3-4B" (did you mean that?)' in said
    assert said.splitlines()[-1].startswith("Next: homelab preflight mine.toml")


def test_the_last_line_names_the_machines_that_the_plan_advises(quiet_desk: Desk) -> None:
    """What `new` proposes is what `plan` recommends, to the word of the command."""
    sizes = {"tower": ("RTX 3090", 24), "laptop": ("RTX 3060", 12), "old": ("RTX 3070", 8)}
    nodes = [
        f'[[nodes]]\nname = "{name}"\nhost = "198.51.100.{number}"\ngpus = [{{ model = "{card}", vram_gb = {size} }}]\n'
        for number, (name, (card, size)) in enumerate(sizes.items(), start=1)
    ]
    quiet_desk.write("cluster.toml", "\n".join(nodes))
    quiet_desk.write("mine.jsonl", chats(60))
    lines = quiet_desk.homelab("new", "mine.jsonl", "--model", "Qwen/Qwen3-8B", "--offline").stdout.splitlines()
    assert lines[-1] == "Next: homelab launch mine.toml --nodes tower", lines
    assert any(line.startswith("It trains on tower, without laptop and old: alone it does ") for line in lines)
    found = quiet_desk.json("new", "mine.jsonl", "--offline")
    assert found["nodes"] == ["tower"] and found["left_out"] == ["laptop", "old"] and found["because_of_nodes"]
    assert quiet_desk.json("plan", "mine.toml", "--offline")["fewer"]["nodes"] == ["tower"]
    assert quiet_desk.json("plan", "mine.toml", "--offline", "--nodes", "tower")["fewer"] is None
    said = quiet_desk.homelab("plan", "mine.toml", "--offline", "--nodes", "tower").stdout
    assert said.splitlines()[-1] == "Next: homelab launch mine.toml --nodes tower"
