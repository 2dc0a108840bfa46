"""uv for a node: the wheel of its static build. It needs no C library of the node, no root and no network there."""

from __future__ import annotations

import tempfile
from pathlib import Path

from homelab.control.setup import cache
from homelab.errors import HomelabError
from homelab.text.hint import Hint, homelab

UV = "0.13.9"


def fetch(machine: str) -> Path:
    """The wheel for x86_64 or aarch64; fetched once. Raises HomelabError."""
    place = cache.folder() / f"uv-{UV}-{machine}.whl"
    if place.is_file():
        return place
    cache.folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache.folder()) as folder:
        platform = ["--only-binary", ":all:", "--platform", f"musllinux_1_1_{machine}"]
        cache.pip(["download", "-q", "--no-deps", *platform, "-d", folder, f"uv=={UV}"], f"uv {UV} cannot be fetched")
        wheels = list(Path(folder).glob(f"uv-{UV}-*{machine}.whl"))
        if not wheels:
            raise HomelabError(f"pip fetched no wheel of uv {UV} for {machine}", where=str(cache.folder()), hint=Hint("again: {}", homelab("setup")))
        wheels[0].replace(place)
    return place
