"""cluster.toml and the runs are found from anywhere in a project, and from anywhere at all if the person has a cluster of their own."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from homelab.cli import common, places
from scripts.practice import prepared_commands
from scripts.practice.desk import Desk

CLUSTER = '[[nodes]]\nname = "a"\nhost = "127.0.0.1"\nport = 1\n'


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("HOMELAB_CLUSTER", "HOMELAB_RUNS", "XDG_CONFIG_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    folder = tmp_path / "home" / "project" / "deep" / "er"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    return tmp_path / "home"


def put(*folders: Path) -> None:
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cluster.toml").write_text(CLUSTER)


def test_nothing_anywhere_is_a_cluster_of_this_folder(home: Path) -> None:
    assert (places.cluster(), places.runs()) == (Path("cluster.toml"), Path("runs"))


def test_the_nearest_one_counts_and_its_runs_with_it(home: Path) -> None:
    own, above = home / ".config" / "homelab", home / "project"
    put(own)
    assert (places.cluster(), places.runs()) == (own / "cluster.toml", home / ".local/share/homelab/runs")
    put(above)
    assert (places.cluster(), places.runs()) == (above / "cluster.toml", above / "runs")
    put(Path.cwd())
    assert (places.cluster(), places.runs()) == (Path("cluster.toml"), Path("runs"))


def test_a_folder_with_runs_keeps_them(home: Path) -> None:
    put(home / ".config" / "homelab")
    Path("runs").mkdir()
    assert places.runs() == Path("runs")


def test_other_homes_are_obeyed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "etc"))
    monkeypatch.setenv("XDG_DATA_HOME", str(home / "var"))
    put(home / "etc" / "homelab")
    assert (places.cluster(), places.runs()) == (home / "etc/homelab/cluster.toml", home / "var/homelab/runs")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_a_cluster_above_that_is_somebody_elses_is_passed_over(home: Path) -> None:
    put(home / "project")
    os.chown(home / "project" / "cluster.toml", 12345, 12345)
    assert places.cluster() == Path("cluster.toml")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a link away")
def test_a_link_above_that_is_somebody_elses_is_passed_over(home: Path) -> None:
    put(home / "other")
    (home / "project" / "cluster.toml").symlink_to(home / "other" / "cluster.toml")
    assert places.cluster() == home / "project" / "cluster.toml"
    os.lchown(home / "project" / "cluster.toml", 12345, 12345)
    assert places.cluster() == Path("cluster.toml")


def test_the_next_command_finds_the_same_files_by_itself(home: Path) -> None:
    put(home / "project")
    assert common.same_options(places.cluster(), places.runs()) == ""
    assert common.same_options(Path("other.toml"), Path("there")) == " --cluster other.toml --runs-dir there"


def test_a_command_says_which_machines_it_asks(quiet_desk: Desk) -> None:
    quiet_desk.write("chats.jsonl", '{"text": "a"}\n')
    below = quiet_desk.folder / "below"
    below.mkdir()

    def typed(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HOMELAB_")}
        return prepared_commands.run(arguments, cwd=below, env=environment, timeout_s=60)

    asked = typed("plan", "../law.toml")
    assert asked.returncode == 3 and f". the machines of {quiet_desk.folder}/cluster.toml" in asked.stderr, asked.stderr
    believed = typed("plan", "../law.toml", "--offline", "--json")
    assert [node["name"] for node in json.loads(believed.stdout)["nodes"]] == ["a"], believed.stderr
