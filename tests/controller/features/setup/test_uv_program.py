"""uv runs on every node: pip gives only the wheels whose digests are known here. Real pip; the index is a folder."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from homelab.controller.base.errors import HomelabError
from homelab.controller.features.setup import uv_program
from homelab.shared.protocol.digest import file_sha256

NAME = f"uv-{uv_program.UV}-py3-none-any.whl"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only wheel of the index that pip is told of."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    info = f"uv-{uv_program.UV}.dist-info"
    with zipfile.ZipFile(tmp_path / NAME, "w") as archive:
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: uv\nVersion: {uv_program.UV}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
        archive.writestr("uv-0.data/scripts/uv", "#!/bin/sh\n")
    return tmp_path / NAME


def test_a_wheel_of_another_content_is_refused(wheel: Path) -> None:
    for take in (lambda: uv_program.fetch("x86_64"), uv_program.of_this_machine):
        with pytest.raises(HomelabError, match="DO NOT MATCH THE HASHES") as refused:
            take()
        assert "gives another file" in str(refused.value.hint)
    assert not list(wheel.parent.rglob("cache/**/uv-*")), "nothing of it is kept"


def test_the_known_one_is_taken_and_a_changed_cache_is_fetched_again(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uv_program, "WHEELS", {file_sha256(wheel): "any"})
    kept = uv_program.fetch("x86_64")
    assert kept.read_bytes() == wheel.read_bytes()
    assert uv_program.of_this_machine().read_text().startswith("#!/bin/sh")
    kept.write_bytes(b"changed")
    assert uv_program.fetch("x86_64").read_bytes() == wheel.read_bytes()
