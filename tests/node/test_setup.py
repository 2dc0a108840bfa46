"""The node's part of setup, in a home of its own: pieces of files, the record, and what teardown leaves alone."""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
from pathlib import Path
from typing import Any

import pytest

from homelab.node.setup import record
from homelab.node.system import boot_clock
from homelab.shared.protocol import files
from homelab.shared.protocol.errors import Refusal
from homelab.shared.protocol.setup_messages import SetupRemoved
from tests.fakes import ask_node
from tests.processes import living

DATA = bytes(range(256)) * 40
SHA256 = hashlib.sha256(DATA).hexdigest()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def send(data: bytes, offset: int, sha256: str = SHA256, name: str = "wheels/a-1-py3-none-any.whl") -> int:
    return ask_node("setup-receive", {"name": name, "sha256": sha256, "size": len(DATA), "offset": offset}, io.BytesIO(data)).have


def test_a_file_goes_on_where_it_was_cut_off(home: Path) -> None:
    assert send(DATA[:1000], 0) == 1000
    assert ask_node("setup-look", {"environment": "~/env", "files": {"wheels/a-1-py3-none-any.whl": SHA256}}).partial == {
        "wheels/a-1-py3-none-any.whl": 1000
    }
    assert send(DATA[5000:], 5000) == 1000  # bytes are missing between: go on at 1000
    assert send(DATA[900:], 900) == len(DATA)
    assert (home / ".homelab/setup/wheels/a-1-py3-none-any.whl").read_bytes() == DATA and not list(
        (home / ".homelab/setup/partial").iterdir()
    )


def test_a_damaged_file_is_refused_and_begins_anew(home: Path) -> None:
    assert send(b"x" * len(DATA), 0) == 0
    assert send(DATA + b"more", 0) == 0
    assert send(DATA, 0) == len(DATA)
    place = home / ".homelab/setup/wheels/a-1-py3-none-any.whl"
    wanted = {"environment": "~/env", "files": {"wheels/a-1-py3-none-any.whl": SHA256}}
    assert ask_node("setup-look", wanted).good == ("wheels/a-1-py3-none-any.whl",)
    place.write_bytes(b"damaged")
    assert ask_node("setup-look", wanted).good == ()


@pytest.mark.parametrize("name", ["../x.whl", "wheels/../../x.whl", "wheels/.whl", "/etc/passwd", "wheels/a.txt", "uv"])
def test_a_name_that_setup_does_not_send(home: Path, name: str) -> None:
    with pytest.raises(ValueError, match="not a file of setup"):
        send(DATA, 0, name=name)


def test_what_is_no_sha256_is_no_file_name(home: Path) -> None:
    with pytest.raises(ValueError, match="not a sha256"):
        send(DATA, 0, sha256="../../x")


def test_teardown_removes_what_is_listed_and_nothing_else(home: Path) -> None:
    (home / ".homelab").mkdir()
    (home / ".homelab/mine").write_text("mine")
    record.note(record.folder())
    record.note(str(home / "deep/er/env"))
    (home / "deep/er/env/file").write_text("x")
    answer = ask_node("setup-remove", {"workdir": "~/homelab"})
    assert sorted(answer.removed) == sorted([record.folder(), str(home / "deep/er/env")]) and not answer.left
    assert sorted(path.name for path in home.rglob("*")) == [".homelab", "mine"]
    assert ask_node("setup-remove", {"workdir": "~/homelab"}) == SetupRemoved(removed=(), left=())


@pytest.mark.parametrize("path", ["{home}", "/", "{home}/homelab", "{home}/link"])
def test_teardown_keeps_home_workdir_and_links(home: Path, path: str) -> None:
    (home / "homelab").mkdir()
    (home / "elsewhere").mkdir()
    (home / "link").symlink_to("elsewhere")
    record.write({"folders": [path.format(home=home)], "parents": [], "locks": {}})
    assert ask_node("setup-remove", {"workdir": "~/homelab"}).left == (path.format(home=home),)
    assert (home / "homelab").is_dir() and (home / "elsewhere").is_dir()


def test_an_environment_of_somebody_else_is_refused(home: Path) -> None:
    (home / "env").mkdir()
    (home / "env/pyvenv.cfg").write_text("home = /usr/bin\n")
    with pytest.raises(Refusal, match="was not made by homelab setup"):
        ask_node("setup-make", {"environment": "~/env", "python": "/usr/bin/python3", "version": "3.11", "lock": "x", "is_closed": True})
    assert (home / "env/pyvenv.cfg").exists()
    state = ask_node("setup-look", {"environment": "~/env"})
    assert state.environment_exists and not state.environment_is_ours


def test_one_setup_at_a_time(home: Path) -> None:
    record.note(record.folder())
    descriptor = os.open(os.path.join(record.folder(), "lock"), os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(Refusal, match="another setup is working on this node"):
        ask_node("setup-make", {"environment": "~/env", "python": "/usr/bin/python3", "version": "3.11", "lock": "x", "is_closed": True})
    os.close(descriptor)


MAKE = {"environment": "~/env", "python": "/usr/bin/python3", "version": "3.11", "lock": "x", "is_closed": True}
ASKED = pytest.mark.parametrize(("verb", "more"), [("setup-make", MAKE), ("setup-remove", {})])
RUN = "2026-11-20-1200-demo"


@ASKED
def test_a_run_of_another_workdir_keeps_what_it_uses(home: Path, verb: str, more: dict[str, Any]) -> None:
    """Two cluster files of one account have two workdirs, and share the environment."""
    record.note(str(home / "env"))
    (home / "env/package").write_text("in use")
    with living(HOMELAB_RUN=RUN, HOMELAB_NODE="tower", HOMELAB_RUN_DIR=str(home / "other" / "runs" / RUN)):
        with pytest.raises(Refusal, match=f"run {RUN} uses what setup has made on this node: it is running") as raised:
            ask_node(verb, {**more, "workdir": "~/homelab"})
        assert raised.value.where == str(home / "other" / "runs" / RUN) and raised.value.hint.endswith(f"homelab stop {RUN}")
    assert (home / "env/package").exists()
    with living(HOMELAB_RUN=RUN, HOME=str(home / "of another practice node")):
        assert ask_node("setup-remove", {"workdir": "~/homelab"}).removed


@ASKED
def test_a_run_that_is_about_to_go_on_keeps_what_it_uses(home: Path, verb: str, more: dict[str, Any]) -> None:
    """A launch that is on its way has no folder yet; between two attempts a supervisor is heard, and nothing is alive."""
    record.note(str(home / "env"))
    claim = {"workdir": "~/homelab", "node": "tower", "run": RUN, "token": "t"}
    ask_node("claim", {**claim, "by": "a desk", "doing": "launched", "process": {}, "age_s": 0.0, "after": None})
    with pytest.raises(Refusal, match="a command is about to continue it"):
        ask_node(verb, {**more, "workdir": "~/homelab"})
    ask_node("release", claim)
    heard = {"by": "a desk", "process": {}, "has_left": False, **boot_clock.now()}
    files.write_json(str(home / "homelab" / "runs" / RUN / "supervisor.heard"), heard)
    with pytest.raises(Refusal, match="its supervisor watches it"):
        ask_node(verb, {**more, "workdir": "~/homelab"})
    assert (home / "env").is_dir()


def test_no_run_starts_while_setup_works(home: Path) -> None:
    start = {
        "workdir": "~/homelab", "node": "tower", "run": RUN, "attempt": 1, "run_json": {}, "plan_json": {}, "command": ["true"], "environment": {},
        "secrets": {}, "token": None, "program": (), "direct": False, "standby_after_s": None,
    }  # fmt: skip
    with record.held(), pytest.raises(Refusal, match="setup or teardown works on this node") as raised:
        ask_node("start", start)
    assert raised.value.kind == "busy" and list((home / "homelab").rglob("run.json")) == []
