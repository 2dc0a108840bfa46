"""uv: for a node the wheel of its static build, which needs no C library of the node, no root and no network there; and the program for this machine.

It runs on every node, so its wheels are known by their digests: an index, or a proxy before it, that gives another file is refused by pip.
"""

from __future__ import annotations

import tempfile
import zipfile
from pathlib import Path

from homelab.controller.base.errors import HomelabError
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.features.setup import cache
from homelab.shared.protocol import files
from homelab.shared.protocol.digest import file_sha256

UV = "0.13.9"
# sha256 of the wheels of this version on PyPI, for what nodes and controllers are: again after a new version, with `pip download` and `sha256sum`.
WHEELS = {
    "2c45530751517d6c3bbc69a19473f6effe47cce047bede01ffd8af7ea7b36b25": "musllinux_1_1_x86_64",
    "5435c5ce14a56431208ca0996416d310f1598e8c2c8ba707688985a16bb82dbe": "manylinux_2_17_aarch64.manylinux2014_aarch64.musllinux_1_1_aarch64",
    "d7f459fe4fd247d830351c75686d3996ace3c6f3f728eb0e85a30b7ada0cef19": "manylinux_2_17_x86_64.manylinux2014_x86_64",
    "ecb6028d79dc96fbeafffe5c8af62a7099487ebc05a701e76714eebcffd06375": "manylinux_2_28_aarch64",
    "66c512266d633bef48384a1f53003f41f2a8e7b36fe6e7fbfd3e0fd52d96fa63": "macosx_11_0_arm64",
    "c16ed11e013557536b3e60065f1b912f6407bd6518e041b961e23ef9e6b4fbf5": "macosx_10_12_x86_64",
}


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
    if place.is_file() and file_sha256(place) in WHEELS:
        return place
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache.made_folder()) as folder:
        wanted = Path(folder, "uv.txt")
        wanted.write_text(" ".join([f"uv=={UV}", *(f"--hash=sha256:{digest}" for digest in WHEELS)]), encoding="utf-8")
        words = ["download", "-q", "--no-deps", "--only-binary", ":all:", "--require-hashes", *platform, "-d", folder, "-r", str(wanted)]
        cache.pip(words, f"uv {UV} cannot be fetched")
        wheels = list(Path(folder).glob(f"uv-{UV}-*.whl"))
        if not wheels:
            raise HomelabError(f"pip fetched no wheel of uv {UV}", where=str(cache.folder()), hint=Hint("again: {}", homelab("setup")))
        wheels[0].replace(place)
    return place
