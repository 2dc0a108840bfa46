"""A Python for a node that has none: real uv fetches a standalone build here (of this very Python, as its archive), and unpacks on a node of its own home."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest

from homelab.controller.base.errors import HomelabError
from homelab.controller.features.setup import python_archive
from homelab.node.setup import pieces, worker_environment
from homelab.shared.protocol.digest import file_sha256
from homelab.shared.protocol.errors import Refusal

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where uv finds the only build that it is told of: an archive of this Python's program and library, without tests and packages."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    build = tmp_path / "build.tar.gz"
    unneeded = ("test", "site-packages", "__pycache__", "idlelib", "ensurepip", "config-")
    with tarfile.open(build, "w:gz", compresslevel=1) as out:
        program = Path(sys.base_prefix, "bin", f"python{VERSION}")
        out.add(program.resolve(), f"python/bin/python{VERSION}")
        keep = lambda entry: None if any(part.startswith(unneeded) for part in Path(entry.name).parts[3:]) else entry  # noqa: E731
        out.add(sysconfig.get_path("stdlib"), f"python/lib/python{VERSION}", filter=keep)
        for library in Path(sys.base_prefix, "lib").glob("libpython*"):
            out.add(library, f"python/lib/{library.name}")
    entry = {
        "name": "cpython", "arch": {"family": platform.machine(), "variant": None}, "os": "linux", "libc": "gnu", "major": sys.version_info.major,
        "minor": sys.version_info.minor, "patch": sys.version_info.micro, "prerelease": "", "url": build.as_uri(), "sha256": file_sha256(build),
        "variant": None, "build": "20260101",
    }  # fmt: skip
    listing = tmp_path / "downloads.json"
    listing.write_text(json.dumps({f"cpython-{sys.version.split()[0]}-linux-{platform.machine()}-gnu": entry}))
    monkeypatch.setenv("UV_PYTHON_DOWNLOADS_JSON_URL", str(listing))
    return build


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_it_is_fetched_once_and_starts_on_the_node(archive: Path) -> None:
    part, place = python_archive.fetch(platform.machine(), VERSION)
    assert part.sha256 == file_sha256(place) and part.unpacked_bytes > part.size_bytes
    archive.unlink()
    assert python_archive.fetch(platform.machine(), VERSION) == (part, place), "kept"
    target = Path(pieces.place(part.name))
    target.parent.mkdir(parents=True)
    target.write_bytes(place.read_bytes())
    program = worker_environment.unpack(VERSION)
    done = subprocess.run([program, "-I", "-c", "import json, sys; print(sys.prefix)"], capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()) == Path(program).parent.parent and program.startswith(str(target.parent))
    assert worker_environment.unpack(VERSION) == program
    with pytest.raises(Refusal, match="has no python"):
        worker_environment.unpack("3.99")


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_a_build_with_another_hash_is_not_taken(archive: Path) -> None:
    archive.write_bytes(archive.read_bytes()[:-1000])
    with pytest.raises(HomelabError, match="cannot be fetched: uv says: ") as caught:
        python_archive.fetch(platform.machine(), VERSION)
    assert "install Python" in str(caught.value.hint)


@pytest.mark.parametrize(("name", "link"), [("../out", ""), ("/etc/out", ""), ("bin/python3", "../../out"), ("bin/python3", "/etc/out")])
def test_an_archive_that_leads_out_of_its_folder(name: str, link: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    place = Path(pieces.place(worker_environment.ARCHIVE))
    place.parent.mkdir(parents=True)
    with tarfile.open(place, "w:gz") as out:
        entry = tarfile.TarInfo(name)
        if link:
            entry.type, entry.linkname = tarfile.SYMTYPE, link
        out.addfile(entry)
    with pytest.raises(ValueError, match="unexpected entry"):
        worker_environment.unpack("3.12")
    assert [path.name for path in place.parent.iterdir()] == [place.name], "nothing is left of it"
