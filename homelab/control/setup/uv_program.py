"""uv: for a node the wheel of its static build, which needs no C library of the node, no root and no network there; and the program for this machine."""

from __future__ import annotations

import tempfile
import zipfile
from pathlib import Path

from homelab.control.setup import cache
from homelab.errors import HomelabError
from homelab.protocol import files
from homelab.text.hint import Hint, homelab

UV = "0.13.9"


def fetch(machine: str) -> Path:
    """The wheel for nodes that are x86_64 or aarch64; fetched once. Raises HomelabError."""
    return _wheel(cache.folder() / f"uv-{UV}-{machine}.whl", ["--platform", f"musllinux_1_1_{machine}"])


def of_this_machine() -> Path:
    """The program for the controller, whatever system it has. Raises HomelabError."""
    program = cache.folder() / f"uv-{UV}"
    if not program.is_file():
        with zipfile.ZipFile(_wheel(cache.folder() / f"uv-{UV}-here.whl", [])) as archive:
            name = next(name for name in archive.namelist() if name.rpartition("/")[2] in ("uv", "uv.exe"))
            files.write_atomic(program, archive.read(name), 0o700)
    return program


def _wheel(place: Path, platform: list[str]) -> Path:
    if place.is_file():
        return place
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache.made_folder()) as folder:
        cache.pip(["download", "-q", "--no-deps", "--only-binary", ":all:", *platform, "-d", folder, f"uv=={UV}"], f"uv {UV} cannot be fetched")
        wheels = list(Path(folder).glob(f"uv-{UV}-*.whl"))
        if not wheels:
            raise HomelabError(f"pip fetched no wheel of uv {UV}", where=str(cache.folder()), hint=Hint("again: {}", homelab("setup")))
        wheels[0].replace(place)
    return place
