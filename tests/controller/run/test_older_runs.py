"""Run folders of the tree before version 0.2.0, on the controller and on two nodes: every command still reads them. Older ones are refused.

`2026-11-26-0157-alone` failed (a worker of node2 was killed) and was not restarted; `2026-11-26-0158-demo` failed in the same way, was
recovered by its supervisor, and is done. Of long files some lines were left out, and all weights but those of one checkpoint.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from homelab.cli import main
from homelab.controller.base.errors import EXIT_INTERNAL, HomelabError
from homelab.controller.features.recover import examine, halt
from homelab.controller.remote import fanout
from homelab.controller.run import run_folder
from homelab.controller.run.paths import RunPaths
from homelab.node.system import utilisation
from tests import builders
from tests.fakes import FakeFleet

pytestmark = pytest.mark.timeout(120)
FIXTURES = Path(__file__).resolve().parents[2] / "fixtures" / "older_runs"
FAILED, DONE = "2026-11-26-0157-alone", "2026-11-26-0158-demo"
NODES = ("node1", "node2")
KILLED = "rank 1 on node2 was killed (signal 9)"


class Desk:
    """A controller with both runs, and the two nodes that they were on."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.runs = folder, folder / "runs"
        self.copies = {FIXTURES / "controller": self.runs, FIXTURES / "nodes": folder / "nodes"}
        for source, target in self.copies.items():
            shutil.copytree(source, target)
        self.as_copied = self.files()
        self.fleet = FakeFleet(folder / "nodes", NODES)
        (folder / "cluster.toml").write_text(
            "".join(f'[[nodes]]\nname = "{name}"\nhost = "{builders.address_of(name)}"\n' for name in NODES)
        )

    def homelab(self, *arguments: str) -> int:
        """The exit code of a command."""
        return main.run([*arguments, "--cluster", str(self.folder / "cluster.toml"), "--runs-dir", str(self.runs)])

    def files(self) -> dict[Path, tuple[int, int, int]]:
        """Everything below both folders, with what a write changes. Folders and files alike."""
        found = (path for target in self.copies.values() for path in target.rglob("*"))
        return {path: (status.st_ino, status.st_size, status.st_mtime_ns) for path in found if (status := path.lstat())}

    def restore(self) -> None:
        """As it was copied: what is new goes, and what a test or a command wrote is copied again. All else stays where it is."""
        for path, stamp in self.files().items():
            if path.is_dir() and path not in self.as_copied:
                shutil.rmtree(path)
            elif path.is_file() and self.as_copied.get(path) != stamp:
                path.unlink()
        for source, target in self.copies.items():
            for path in (path for path in self.as_copied if path.is_relative_to(target) and not path.exists()):
                original = source / path.relative_to(target)
                path.mkdir(parents=True) if original.is_dir() else shutil.copy2(original, path)
        self.as_copied = self.files()

    def switch_off(self) -> None:
        """Nobody answers any more."""
        for node in self.fleet.nodes.values():
            node.is_off = True


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    made = Desk(tmp_path)
    monkeypatch.setattr(fanout, "Fleet", lambda cluster: made.fleet)
    monkeypatch.setattr(utilisation, "cpu_percent", lambda: 12.0)  # it measures for a tenth of a second
    monkeypatch.setenv("COLUMNS", "200")
    yield made


@pytest.fixture
def said(desk: Desk, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """All that a command prints."""

    def run(*arguments: str) -> str:
        desk.homelab(*arguments)
        return "".join(capsys.readouterr())

    return run


@pytest.fixture
def document(desk: Desk, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """What a command prints with --json."""

    def run(*arguments: str) -> Any:
        desk.homelab(*arguments, "--json")
        return json.loads(capsys.readouterr().out)

    return run


def test_status_of_the_run_that_failed(document: Callable[..., Any]) -> None:
    status = document("status", FAILED)
    assert status["state"] == "failed"
    assert (status["attempt"], status["step"]) == (1, 22)
    assert status["diagnosis"]["title"].startswith(KILLED)
    assert [row["torchrun"] for row in status["nodes"]] == ["exit code 1", "exit code 1"]
    assert [row["share"] for row in status["ranks"]] == [8, 4]
    assert status["checkpoint_steps"] == [20]
    assert [row["text"].split(":")[0] for row in status["events"]][:3] == ["launched", "attempt 1 started", "failed"]


def test_status_of_the_run_that_recovered(document: Callable[..., Any]) -> None:
    status = document("status", DONE)
    assert status["state"] == "done"
    assert (status["attempt"], status["step"], status["restarts"]) == (2, 120, 1)
    assert any(row["text"].startswith(f"attempt 2 goes on after step 40: because {KILLED}") for row in status["events"])


def test_status_for_people(said: Callable[..., str]) -> None:
    text = said("status", FAILED, "--once")
    assert "failed" in text
    assert KILLED in text
    assert "step 22/120" in text


def test_status_while_no_node_answers(desk: Desk, document: Callable[..., Any]) -> None:
    desk.switch_off()
    assert document("status", DONE)["state"] == "done"
    status = document("status", FAILED)
    assert status["state"] == "failed"
    assert [row["reachable"] for row in status["nodes"]] == [False, False]


@pytest.mark.parametrize("is_off", [False, True])
def test_why_it_failed(desk: Desk, document: Callable[..., Any], said: Callable[..., str], is_off: bool) -> None:
    if is_off:  # then what was kept is shown, which has no options
        desk.switch_off()
    why = document("why", FAILED)
    assert why["diagnosis"]["first_node"] == "node2"
    assert why["diagnosis"]["first_rank"] == 1
    recover = f"homelab recover --cluster {desk.folder}/cluster.toml --runs-dir {desk.runs} {FAILED}"
    assert recover in why["diagnosis"]["hint"] and why["next"] == recover
    assert f"Next: {recover}\n" in said("why", FAILED)
    status = document("status", FAILED)
    assert recover in [entry["command"] for entry in status["next_commands"]] and recover in status["diagnosis"]["hint"]
    assert "--cluster" not in RunPaths(desk.runs / FAILED).diagnosis_json(1).read_text()


def test_why_it_had_failed_before_it_went_on(said: Callable[..., str]) -> None:
    text = said("why", DONE)
    assert f"attempt 1 of {DONE} failed; first: rank 1 on node2" in text
    assert "attempt 2 goes on after step 40" in text
    assert "the run is done now, in attempt 2, at step 120" in text


def test_what_its_ranks_printed(said: Callable[..., str]) -> None:
    assert "note: method: lora, 8192 trainable parameters" in said("logs", FAILED)
    assert "--- rank 1 on node2, stdout" in said("logs", DONE, "--attempt", "1")


def test_both_are_listed(document: Callable[..., Any]) -> None:
    assert {row["name"]: row["state"] for row in document("runs")["runs"]} == {FAILED: "failed", DONE: "done"}


def test_what_is_done_is_not_recovered(said: Callable[..., str]) -> None:
    assert "this run is done: there is nothing to recover" in said("recover", DONE)


def test_a_recovery_of_what_failed_begins_with_its_cause_and_its_checkpoint(desk: Desk) -> None:
    paths = RunPaths(desk.runs / FAILED)
    examination = examine.examine(desk.fleet, paths, lambda text: None)
    assert examination.diagnosis is not None
    assert examination.diagnosis.title.startswith(KILLED)
    point = halt.newest_checkpoint(desk.fleet, paths, list(NODES), silent={}, from_scratch="never", say=lambda text: None)
    assert (point.step, point.holders) == (20, ["node1"])
    recipe = run_folder.description_of(paths).recipe
    assert recipe is not None
    assert recipe.parallel.shares == {"node1": 8, "node2": 4}


def test_a_recovery_while_no_node_answers(desk: Desk, said: Callable[..., str]) -> None:
    desk.switch_off()
    text = said("recover", FAILED)
    assert "error: " in text
    assert "fix: " in text


def retold(desk: Desk, **changes: Any) -> None:
    """The failed run's run.json, here and on its nodes, as another version would have written it; None takes a key out."""
    for place in (desk.runs, *(desk.folder / "nodes" / node / "runs" for node in NODES)):
        file = place / FAILED / "run.json"
        content = {**json.loads(file.read_text()), **changes}
        file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


OF_A_RUN = ("status", "why", "logs", "recover", "supervise", "report", "fetch", "chat", "merge", "profile", "stop")


@pytest.mark.parametrize("command", OF_A_RUN)
def test_a_newer_run_is_refused_by_every_command(desk: Desk, said: Callable[..., str], command: str) -> None:
    retold(desk, schema=2, homelab="0.7.0")
    text = said(command, FAILED)
    assert "error: a newer homelab (0.7.0) made this run: its run.json has schema 2" in text
    assert str(desk.runs / FAILED) in text and "pip install ./homelab_trainer-0.7.0-py3-none-any.whl" in text


@pytest.mark.parametrize("command", ["status", "why", "recover"])
def test_a_run_from_before_the_promise_is_refused(desk: Desk, said: Callable[..., str], command: str) -> None:
    shutil.copy(FIXTURES.parent / "run_before_schema.json", desk.runs / FAILED / "run.json")
    text = said(command, FAILED)
    assert "error: an older homelab made this run, in a format that is no longer read: its run.json lacks moment and rows" in text
    assert "git checkout 3ac95a5c9b8d3ced77f09bedb702713bde8c0be6" in text and f"mv {desk.runs / FAILED} {desk.runs / FAILED}.old" in text


def test_a_newer_run_that_only_the_nodes_know_is_refused(desk: Desk, said: Callable[..., str]) -> None:
    retold(desk, schema=2)
    shutil.rmtree(desk.runs / FAILED)
    text = said("status", FAILED)
    assert "a newer homelab (0.1.0) made this run" in text and "where: node node1" in text
    assert not (desk.runs / FAILED / "run.json").exists()


def test_the_other_runs_are_listed_beside_a_newer_one(desk: Desk, document: Callable[..., Any]) -> None:
    retold(desk, schema=2)
    assert {row["name"]: row["state"] for row in document("runs")["runs"]} == {FAILED: "failed", DONE: "done"}


def test_a_run_without_a_number_is_read(desk: Desk, document: Callable[..., Any]) -> None:
    retold(desk, schema=None)
    assert document("status", FAILED)["state"] == "failed"


DAMAGE = {"cut": lambda content: content[: len(content) // 2], "no JSON": lambda content: b"\xff\x00 it was {"}


def changed_types(content: bytes) -> bytes:
    """The same JSON with numbers where texts were, texts where numbers were, and lists where objects were one level down."""

    def turned(value: Any, depth: int) -> Any:
        if isinstance(value, dict):
            return {key: turned(entry, depth + 1) for key, entry in value.items()} if depth < 1 else [list(value)]
        return {"was": value} if isinstance(value, list) else 7 if isinstance(value, str) else "seven"

    try:
        documents = [json.loads(content)]
    except ValueError:
        documents = [json.loads(line) for line in content.splitlines() if line.startswith(b"{")]
    return b"\n".join(json.dumps(turned(document, 0)).encode() for document in documents) + b"\n"


def files_of_the_run() -> list[str]:
    """All files of the run that failed, on the controller and on its nodes, as paths of the fixture without weights."""
    files = (file for file in FIXTURES.rglob("*") if file.is_file() and FAILED in file.parts)
    return sorted(str(file.relative_to(FIXTURES)) for file in files if file.suffix not in (".pt", ".safetensors"))


@pytest.mark.parametrize(
    ("where", "damage"),
    [
        pytest.param(where, damage, marks=() if (where, damage) == ("controller", "other types") else pytest.mark.thorough)
        for where in ("controller", "nodes") for damage in ("cut", "no JSON", "other types")
    ],
)  # fmt: skip
def test_a_damaged_file_is_never_a_traceback(desk: Desk, capsys: pytest.CaptureFixture[str], where: str, damage: str) -> None:
    spoil = DAMAGE.get(damage, changed_types)
    for name in files_of_the_run():
        if not name.startswith(where):
            continue
        place = desk.runs / name.partition("/")[2] if where == "controller" else desk.folder / name
        place.write_bytes(spoil((FIXTURES / name).read_bytes()))
        for command in (("status", FAILED, "--json"), *((("why", FAILED), ("logs", FAILED)) if damage == "cut" else ())):
            code = desk.homelab(*command)
            output = "".join(capsys.readouterr())
            assert code != EXIT_INTERNAL, (name, command, output)
            assert "internal error" not in output, (name, command, output)
        try:
            paths = RunPaths(desk.runs / FAILED)
            examine.examine(desk.fleet, paths, lambda text: None)
            halt.newest_checkpoint(desk.fleet, paths, list(NODES), silent={}, from_scratch="always", say=lambda text: None)
        except HomelabError as error:
            assert error.message and error.hint, name
        desk.restore()
