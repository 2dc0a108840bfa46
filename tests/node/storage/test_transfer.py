"""Bytes in and out: data files and checkpoints arrive whole or not at all, and never outside of their place."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest

from homelab.node import paths
from homelab.node.storage import transfer
from homelab.shared.protocol import files, manifest
from homelab.shared.protocol.checkpoint_messages import Checkpoints, HasFile
from homelab.shared.protocol.message import Done
from tests.fakes import ask_node

RUN = "2026-01-01-0000-transfer"
BODY = bytes(range(256)) * 5000


def request(workdir: Path, **more: Any) -> dict[str, Any]:
    return {"workdir": str(workdir), "run": RUN, **more}


def about_file(workdir: Path, **more: Any) -> dict[str, Any]:
    return {"workdir": str(workdir), **more}


def fault_of(workdir: Path, step: int) -> str | None:
    return manifest.fault(manifest.folder_of(paths.run_dir(str(workdir), RUN), step))


def checkpoint(workdir: Path, step: int, content: bytes = BODY) -> Path:
    """A whole checkpoint with its manifest."""
    folder = Path(manifest.folder_of(paths.run_dir(str(workdir), RUN), step))
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(content)
    content_json = {
        "schema": manifest.SCHEMA,
        "step": step,
        "files": {"weights": {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}},
    }
    (folder / "complete.json").write_text(json.dumps(content_json))
    return folder


def sent(workdir: Path, step: int) -> bytes:
    stream = io.BytesIO()
    ask_node("send-checkpoint", request(workdir, step=step), stream)
    return stream.getvalue()


def left_over(workdir: Path) -> list[str]:
    return [path.name for path in workdir.rglob("*") if "partial" in path.name]


@pytest.mark.parametrize("name", ["data.jsonl", "it's $(touch pwned)\n.jsonl", "../../climb.jsonl", "/etc/absolute", "ä 中"])
def test_a_data_file_arrives_whole_and_in_its_place(tmp_path: Path, name: str) -> None:
    wanted = about_file(tmp_path, sha256=hashlib.sha256(BODY).hexdigest(), name=name)
    assert not ask_node("has-file", wanted).found
    assert ask_node("receive-file", wanted, io.BytesIO(BODY)) == Done()
    place = Path(transfer.data_path(str(tmp_path), wanted))
    assert place.read_bytes() == BODY and place.parent.parent == tmp_path / "data"
    assert ask_node("has-file", wanted) == HasFile(found=True, differs=False)
    assert not left_over(tmp_path)


def test_a_data_file_that_was_edited_in_its_place_is_not_the_one_that_was_sent(tmp_path: Path) -> None:
    wanted = about_file(tmp_path, sha256=hashlib.sha256(BODY).hexdigest(), name="data.jsonl")
    assert ask_node("receive-file", wanted, io.BytesIO(BODY)) == Done()
    place = Path(transfer.data_path(str(tmp_path), wanted))
    place.write_bytes(BODY[:-1] + bytes([BODY[-1] ^ 1]))
    assert ask_node("has-file", wanted) == HasFile(found=False, differs=True)
    ask_node("receive-file", wanted, io.BytesIO(BODY))
    assert ask_node("has-file", wanted).found and place.read_bytes() == BODY


@pytest.mark.parametrize("body", [b"", BODY[:-1], BODY + b"x"])
def test_a_data_file_that_arrives_damaged_is_refused(tmp_path: Path, body: bytes) -> None:
    wanted = about_file(tmp_path, sha256=hashlib.sha256(BODY).hexdigest(), name="data")
    with pytest.raises(ValueError, match="arrived damaged"):
        ask_node("receive-file", wanted, io.BytesIO(body))
    assert not ask_node("has-file", wanted).found and not left_over(tmp_path)


@pytest.mark.parametrize("digest", ["", "../../x", "a/b", "."])
def test_a_digest_that_is_no_digest(tmp_path: Path, digest: str) -> None:
    with pytest.raises(ValueError, match="not a sha256"):
        ask_node("receive-file", about_file(tmp_path, sha256=digest, name="x"), io.BytesIO(b""))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_checkpoint_goes_from_one_node_to_another(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    checkpoint(first, 20)
    assert ask_node("receive-checkpoint", request(second, step=20), io.BytesIO(sent(first, 20))) == Done()
    place = Path(manifest.folder_of(paths.run_dir(str(second), RUN), 20))
    assert (place / "weights").read_bytes() == BODY and manifest.fault(str(place)) is None
    assert ask_node("checkpoints", request(second)) == Checkpoints(good=(20,), bad={})
    assert not left_over(second)


def test_a_whole_copy_of_other_content_is_replaced_where_the_right_one_is_named(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    checkpoint(first, 20)
    mine = checkpoint(second, 20, content=BODY[::-1])
    ask_node("receive-checkpoint", request(second, step=20), io.BytesIO(sent(first, 20)))
    assert (mine / "weights").read_bytes() == BODY[::-1], "a whole one of its own stays"
    files_of = ask_node("manifest", request(first, step=20)).files
    assert files_of == {"weights": hashlib.sha256(BODY).hexdigest()}
    ask_node("receive-checkpoint", request(second, step=20, files=files_of), io.BytesIO(sent(first, 20)))
    assert (mine / "weights").read_bytes() == BODY and (mine.parent / f".{mine.name}.corrupt/weights").read_bytes() == BODY[::-1]


def test_a_damaged_checkpoint_is_neither_sent_nor_chosen(tmp_path: Path) -> None:
    checkpoint(tmp_path, 10)
    for step, damage in ((20, b"short"), (30, bytes(len(BODY)))):
        (checkpoint(tmp_path, step) / "weights").write_bytes(damage)
    (checkpoint(tmp_path, 40) / "weights").unlink()
    (checkpoint(tmp_path, 50) / "complete.json").unlink()
    (checkpoint(tmp_path, 60) / "complete.json").write_text('{"files": 5}')
    found = ask_node("checkpoints", request(tmp_path))
    assert found.good == (10,) and set(found.bad) == {"20", "30", "40", "60"}
    assert "has changed since" in found.bad["30"] and "missing" in found.bad["40"]
    for step in (20, 30, 40, 50, 60, 70):
        with pytest.raises(ValueError, match=r"step-0000|there is no"):
            sent(tmp_path, step)
        assert fault_of(tmp_path, step)


@pytest.mark.parametrize(
    "changes",
    [{"files": {"weights": 5}}, {"files": {}}, {"files": None}, {"step": "20"}, {"step": 10}, {"schema": 2}, {"schema": None}],
    ids=["no facts", "no files", "none at all", "step as text", "of another step", "of the future", "no schema"],
)
def test_a_manifest_that_is_not_what_homelab_writes_hides_no_good_checkpoint(tmp_path: Path, changes: dict[str, Any]) -> None:
    checkpoint(tmp_path, 10)
    folder = checkpoint(tmp_path, 20)
    content_json = json.loads((folder / "complete.json").read_text()) | changes
    (folder / "complete.json").write_text(json.dumps(content_json))
    found = ask_node("checkpoints", request(tmp_path, set_aside=True))
    assert found.good == (10,) and "its manifest" in found.bad["20"]
    assert manifest.steps(paths.run_dir(str(tmp_path), RUN)) == [10]


def test_somebodys_copy_of_a_checkpoint_is_none(tmp_path: Path) -> None:
    original = checkpoint(tmp_path, 20)
    for name in ("step-9999", "step-00000020-copy", "step-0000000\u0662", "step-00000090"):
        shutil.copytree(original, original.parent / name)
    found = ask_node("checkpoints", request(tmp_path, set_aside=True))
    assert (found.good, set(found.bad)) == ((20,), {"90"})


def test_a_checkpoint_that_the_disk_does_not_give_back_or_that_cannot_be_moved_hides_no_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint(tmp_path, 10)
    bad = checkpoint(tmp_path, 20)
    (bad / "weights").unlink()
    (bad / "weights").mkdir()  # a file that cannot be read, for root too
    sizes = (bad / "weights").stat().st_size
    content_json = json.loads((bad / "complete.json").read_text())
    content_json["files"]["weights"]["bytes"] = sizes
    (bad / "complete.json").write_text(json.dumps(content_json))

    def refuse(folder: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", folder)

    monkeypatch.setattr(manifest, "set_aside", refuse)
    found = ask_node("checkpoints", request(tmp_path, set_aside=True))
    assert found.good == (10,) and "cannot be read" in found.bad["20"]


def test_damaged_ones_are_set_aside_where_a_whole_one_is_left(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        checkpoint(tmp_path, step)
    root = checkpoint(tmp_path, 40).parent
    for step in (30, 40):
        (root / f"step-{step:08d}" / "weights").write_bytes(bytes(len(BODY)))
    assert set(ask_node("checkpoints", request(tmp_path)).bad) == {"30", "40"}, "by itself the question changes nothing"
    found = ask_node("checkpoints", request(tmp_path, set_aside=True))
    assert found.good == (20,) and set(found.bad) == {"30", "40"}
    assert sorted(path.name for path in root.iterdir()) == [".step-00000040.corrupt", "step-00000010", "step-00000020"]
    assert manifest.steps(str(root.parent)) == [10, 20], "and no longer counts as the newest"


def test_where_none_is_whole_all_stay_where_they_are(tmp_path: Path) -> None:
    for step in (10, 20):
        (checkpoint(tmp_path, step) / "weights").write_bytes(b"bad")
    assert ask_node("checkpoints", request(tmp_path, set_aside=True)).good == ()
    assert ask_node("checkpoints", request(tmp_path)).bad.keys() == {"10", "20"}


@pytest.mark.parametrize("cut", [0, 100, 5000, -20_000])
def test_a_checkpoint_that_is_cut_on_the_way_is_refused(tmp_path: Path, cut: int) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    checkpoint(first, 20)
    with pytest.raises((ValueError, OSError, tarfile.TarError)):
        ask_node("receive-checkpoint", request(second, step=20), io.BytesIO(sent(first, 20)[:cut]))
    assert ask_node("checkpoints", request(second)).good == () and not left_over(second)


def test_a_checkpoint_with_one_wrong_byte_is_refused(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    checkpoint(first, 20)
    archive = bytearray(sent(first, 20))
    archive[archive.index(BODY[:256]) + 100] ^= 1
    with pytest.raises(ValueError, match="arrived damaged: weights has changed since"):
        ask_node("receive-checkpoint", request(second, step=20), io.BytesIO(bytes(archive)))
    assert ask_node("checkpoints", request(second)).good == () and not left_over(second)


def test_a_bad_copy_is_replaced_and_a_bad_archive_replaces_nothing(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    checkpoint(first, 20)
    (checkpoint(second, 20) / "weights").write_bytes(b"bad")
    ask_node("receive-checkpoint", request(second, step=20), io.BytesIO(sent(first, 20)))
    assert fault_of(second, 20) is None
    with pytest.raises((ValueError, OSError, tarfile.TarError)):
        ask_node("receive-checkpoint", request(second, step=20), io.BytesIO(b"no archive at all"))
    assert fault_of(second, 20) is None, "the good one stays"
    root = Path(manifest.folder_of(paths.run_dir(str(second), RUN), 20)).parent
    assert (root / ".step-00000020.corrupt" / "weights").read_bytes() == b"bad", "the bad one is kept as evidence"


@pytest.mark.parametrize("name", ["../escaped", "/tmp/escaped-homelab-test", "folder/file", ".", ".."])
def test_an_archive_that_wants_out_of_its_folder(tmp_path: Path, name: str) -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w|") as archive:
        entry = tarfile.TarInfo(name)
        entry.size = 1
        archive.addfile(entry, io.BytesIO(b"x"))
    with pytest.raises(ValueError, match="unexpected entry"):
        ask_node("receive-checkpoint", request(tmp_path, step=20), io.BytesIO(stream.getvalue()))
    assert not list(tmp_path.rglob("escaped")) and not Path("/tmp/escaped-homelab-test").exists() and not left_over(tmp_path)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE])
def test_an_archive_with_something_else_than_files(tmp_path: Path, kind: bytes) -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w|") as archive:
        entry = tarfile.TarInfo("weights")
        entry.type, entry.linkname = kind, "/etc/passwd"
        archive.addfile(entry)
    with pytest.raises(ValueError, match="unexpected entry"):
        ask_node("receive-checkpoint", request(tmp_path, step=20), io.BytesIO(stream.getvalue()))


def test_a_disk_that_fills_while_a_file_arrives(tmp_path: Path) -> None:
    class Full(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            if self.tell():
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().read(100)

    wanted = about_file(tmp_path, sha256=hashlib.sha256(BODY).hexdigest(), name="data")
    with pytest.raises(OSError, match="No space left"):
        ask_node("receive-file", wanted, Full(BODY))
    assert not left_over(tmp_path) and not ask_node("has-file", wanted).found


def test_writing_is_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "state.json"
    files.write_json(str(file), {"a": 1})

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        files.write_json(str(file), {"a": 2})
    assert files.read_json(str(file)) == {"a": 1} and [path.name for path in tmp_path.iterdir()] == ["state.json"]
