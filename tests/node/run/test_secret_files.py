"""Secrets of a run lie in memory, for one user, and are gone with the run; what a program has printed of them is covered."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from homelab.node.run import secret_files
from homelab.shared.protocol import secrecy

pytestmark = pytest.mark.timeout(30)
TOKEN = "hf_PlantedPlantedPlanted42"


@pytest.fixture
def run_folder(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "runs" / "2026-01-01-0000-secret"
    folder.mkdir(parents=True)
    yield folder
    secret_files.remove(str(folder))


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_they_lie_in_memory_and_nobody_else_may_read_them(run_folder: Path) -> None:
    secret_files.put(str(run_folder), {"HF_TOKEN": TOKEN})
    environment = secret_files.environment_of(
        str(run_folder), {"HF_TOKEN": "of the login", "HUGGING_FACE_HUB_TOKEN": "of the login, too", "A": "1"}
    )
    file = Path(environment.pop("HF_TOKEN_PATH"))
    assert environment == {"A": "1"}, "a token of the login would go before the run's"
    assert file.read_text() == TOKEN and secret_files._is_in_memory(str(file))
    assert (mode(file), mode(file.parent), mode(file.parent.parent)) == (0o600, 0o700, 0o700)
    assert str(run_folder) in secret_files.owners() and TOKEN in secret_files.words() and secret_files.has(str(run_folder))
    secret_files.remove(str(run_folder))
    assert not file.parent.exists() and not secret_files.has(str(run_folder)) and str(run_folder) not in secret_files.owners()
    assert secret_files.environment_of(str(run_folder), {"A": "1"}) == {"A": "1"}


def test_two_folders_of_one_name_are_two_runs(run_folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / run_folder.name
    other.mkdir(parents=True)
    secret_files.put(str(run_folder), {"HF_TOKEN": TOKEN})
    secret_files.put(str(other), {"HF_TOKEN": "hf_of_the_other_one"})
    secret_files.remove(str(other))
    assert secret_files.words(str(run_folder)) == secrecy.searched([TOKEN])


def test_the_hubs_library_reads_it_there(run_folder: Path) -> None:
    secret_files.put(str(run_folder), {"HF_TOKEN": TOKEN})
    environment = secret_files.environment_of(str(run_folder), os.environ)
    program = "from huggingface_hub import get_token; print(get_token())"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == TOKEN


@pytest.mark.parametrize("taken", ["a folder that others may enter", "a link", "no memory"])
def test_a_place_that_is_not_safe_is_left_alone(run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: str) -> None:
    first, last = tmp_path / "memory" / "homelab", tmp_path / "home" / ".homelab-secrets"
    last.parent.mkdir()
    first.parent.mkdir()
    if taken == "a folder that others may enter":
        first.mkdir()
        first.chmod(0o755)
    elif taken == "a link":
        first.symlink_to(tmp_path / "home")
    monkeypatch.setattr(secret_files, "_is_in_memory", lambda folder: taken != "no memory")
    monkeypatch.setattr(secret_files, "_places", lambda: [str(first), str(last)])
    before = sorted(first.parent.rglob("*"))
    secret_files.put(str(run_folder), {"HF_TOKEN": TOKEN})
    (file,) = last.rglob("HF_TOKEN")
    assert file.read_text() == TOKEN and (mode(file), mode(file.parent), mode(last)) == (0o600, 0o700, 0o700)
    assert sorted(first.parent.rglob("*")) == before
    secret_files.remove(str(run_folder))
    assert not last.exists()


def test_a_name_that_climbs_is_refused(run_folder: Path) -> None:
    with pytest.raises(ValueError, match="not a usable name"):
        secret_files.put(str(run_folder), {"../HF_TOKEN": TOKEN})


def test_a_program_borrows_one_for_a_question() -> None:
    with secret_files.lent({"HF_TOKEN": TOKEN}, {"HF_TOKEN": "of the login"}) as environment:
        assert list(environment) == ["HF_TOKEN_PATH"] and Path(environment["HF_TOKEN_PATH"]).read_text() == TOKEN
        assert TOKEN in secret_files.words()
    assert not Path(environment["HF_TOKEN_PATH"]).parent.exists()
    with secret_files.lent({}, {"A": "1"}) as environment:
        assert environment == {"A": "1"}


def test_what_was_lent_by_a_process_that_was_killed_is_removed_by_the_next_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secret_files, "_places", lambda: [str(tmp_path / "memory")])
    monkeypatch.setattr(secret_files, "_usable_place", lambda: str(tmp_path / "memory"))
    (tmp_path / "memory").mkdir(mode=0o700)
    with secret_files.lent({"HF_TOKEN": TOKEN}, {}) as environment:
        file = Path(environment["HF_TOKEN_PATH"])
        secret_files.remove_leftovers(str(tmp_path))
        assert file.exists()
        left = file.parent.rename(file.parent.with_name(file.parent.name.replace(str(os.getpid()), str(2**22 + 7))))
        secret_files.remove_leftovers(str(tmp_path), "2026-01-01-0000-secret")
        assert left.exists(), "of one run alone"
        secret_files.remove_leftovers(str(tmp_path))
        assert not left.exists()


def test_what_programs_have_printed_is_covered_and_no_byte_moves(run_folder: Path) -> None:
    log = run_folder / "attempts" / "1" / "nodes" / "a" / "out.log"
    log.parent.mkdir(parents=True)
    text = f"401 for {TOKEN}, twice {TOKEN}\nend\n"
    log.write_text(text)
    (log.parent / "empty.log").touch()
    os.mkfifo(log.parent / "pipe")
    secret_files.put(str(run_folder), {"HF_TOKEN": TOKEN})
    secret_files.remove(str(run_folder))
    assert log.read_text() == text.replace(TOKEN, "*" * len(TOKEN))


def test_who_is_killed_while_it_covers_leaves_the_rest_to_the_next(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop with a short grace kills the watcher, and covers then itself."""
    log = run_folder / "attempts" / "1" / "out.log"
    log.parent.mkdir(parents=True)
    log.write_text(f"401 for {TOKEN}\n")
    secret_files.put(str(run_folder), {"HF_TOKEN": TOKEN})

    def killed(*_: object) -> None:
        raise SystemExit

    with monkeypatch.context() as moment:
        moment.setattr(secret_files, "_cover_in", killed)
        with pytest.raises(SystemExit):
            secret_files.remove(str(run_folder))
    secret_files.remove(str(run_folder))
    assert TOKEN not in log.read_text() and not secret_files.has(str(run_folder))


def test_a_disk_on_which_nothing_can_be_covered_does_not_keep_them(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = run_folder / "attempts" / "1" / "out.log"
    log.parent.mkdir(parents=True)
    log.write_text(f"401 for {TOKEN}\n")
    secret_files.put(str(run_folder), {"HF_TOKEN": TOKEN})

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    secret_files.remove(str(run_folder))
    assert not secret_files.has(str(run_folder)) and log.read_text() == f"401 for {TOKEN}\n", "a full disk is said elsewhere"
