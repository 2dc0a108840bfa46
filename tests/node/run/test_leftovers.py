"""Secrets of a run that is over are taken from the disk when the node is seen again; those of a run that begins or lives are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from homelab.controller.run import event_log, store
from homelab.controller.run.paths import RunPaths
from homelab.node import paths
from homelab.node.probes import runs
from homelab.node.run import secret_files
from homelab.shared.protocol import files
from tests.fakes import ask_node
from tests.processes import living

pytestmark = pytest.mark.timeout(30)
RUN = "2026-01-01-0000-power-cut"


@pytest.fixture(autouse=True)
def nothing_stays_in_memory(tmp_path: Path) -> Iterator[None]:
    yield
    secret_files.remove(paths.run_dir(str(tmp_path), RUN))


def left_by(workdir: Path, *, begun: tuple[int, ...] = (1,), planned: tuple[int, ...] = (1,), node: str = "laptop", run: str = RUN) -> Path:
    """A node's folder of a run as a power cut leaves it: the attempts `planned` have come here, torchrun was started in those `begun`."""
    folder = paths.run_dir(str(workdir), run)
    files.write_json(f"{folder}/run.json", {"name": run, "created_at": 1.0})
    for number in planned:
        files.write_json(f"{folder}/attempts/{number}/plan.json", {"run": run, "attempt": number, "ranks": []})
    for number in begun:
        files.write_json(
            f"{folder}/attempts/{number}/nodes/{node}/agent.json", {"pid": 2**22 + 7, "torchrun_pid": 2**22 + 8, "started_at": 1.0}
        )
    secret_files.put(folder, {"HF_TOKEN": "hf_secret"})
    return Path(secret_files.environment_of(folder, {})["HF_TOKEN_PATH"])


def of_runs(workdir: Path) -> list[str]:
    return list(ask_node("runs", {"workdir": str(workdir), "node": "laptop"}).secrets_removed)


def of_facts(workdir: Path) -> list[str]:
    return list(runs.read({"workdir": str(workdir), "node": "laptop"})["secrets_removed"])


def of_status(workdir: Path) -> list[str]:
    said = ask_node("poll", {"workdir": str(workdir), "node": "laptop", "run": RUN}).run
    return [RUN] if said and said.secrets_removed else []


@pytest.mark.parametrize("look", [of_runs, of_facts, of_status])
def test_secrets_of_a_run_that_is_over_are_removed_by_the_next_look(tmp_path: Path, look: Callable[[Path], list[str]]) -> None:
    secrets = left_by(tmp_path)
    assert look(tmp_path) == [RUN]
    assert not secrets.exists()
    assert look(tmp_path) == [], "said once"


def test_of_a_node_that_was_called_otherwise_then_too(tmp_path: Path) -> None:
    secrets = left_by(tmp_path, node="notebook")
    assert of_runs(tmp_path) == [RUN] and not secrets.exists()


@pytest.mark.parametrize(("planned", "begun"), [((1,), ()), ((1, 2), (1,)), ((), ())])
def test_a_start_that_is_under_way_keeps_them(tmp_path: Path, planned: tuple[int, ...], begun: tuple[int, ...]) -> None:
    secrets = left_by(tmp_path, planned=planned, begun=begun)
    assert of_runs(tmp_path) == [] and of_facts(tmp_path) == [] and of_status(tmp_path) == []
    assert secrets.exists(), "its agent has not read them yet"


def test_a_run_that_lives_keeps_them(tmp_path: Path) -> None:
    secrets = left_by(tmp_path)
    with living(HOMELAB_RUN=RUN, HOMELAB_RUN_DIR=paths.run_dir(str(tmp_path), RUN)):
        assert secret_files.remove_leftovers(str(tmp_path)) == [] and secrets.exists()
    assert secret_files.remove_leftovers(str(tmp_path)) == [RUN]


@pytest.mark.parametrize("is_begun_by_link", [True, False])
def test_a_run_that_lives_keeps_them_by_whatever_name_of_its_workdir(tmp_path: Path, is_begun_by_link: bool) -> None:
    """~/homelab may be a link to a larger disk, and a person may have written either into cluster.toml."""
    link = tmp_path.parent / f"{tmp_path.name}-link"
    link.symlink_to(tmp_path)
    secrets = left_by(tmp_path)
    begun, asked = (link, tmp_path) if is_begun_by_link else (tmp_path, link)
    with living(HOMELAB_RUN=RUN, HOMELAB_RUN_DIR=paths.run_dir(str(begun), RUN)):
        assert of_runs(asked) == [] and secrets.exists()
    assert of_runs(asked) == [RUN]


def test_it_is_said_and_written_down(tmp_path: Path) -> None:
    known = RunPaths(tmp_path / RUN)
    store.write_json(known.run_json, {"name": RUN})
    assert event_log.tell_secrets_removed(
        tmp_path, {"laptop": {"secrets_removed": [RUN, "2026-01-01-0001-of-another-desk"]}, "tower": {}}
    ) == [
        f"{RUN} has finished: the token on laptop was removed: this run did not end there in the usual way",
        "2026-01-01-0001-of-another-desk has finished: the token on laptop was removed: this run did not end there in the usual way",
    ]
    assert [line["what"] for line in event_log.lines(known)] == [
        "the token on laptop was removed: this run did not end there in the usual way"
    ]
    assert [path.name for path in tmp_path.iterdir()] == [RUN], "no folder is made for a run that is not known here"
