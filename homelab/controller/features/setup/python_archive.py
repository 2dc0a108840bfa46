"""A Python for nodes that have none that is new enough: uv fetches a standalone build here, and verifies it; one archive of it is kept."""

from __future__ import annotations

import os
import subprocess
import tarfile
import tempfile
from pathlib import Path

from homelab.controller.base.errors import HomelabError
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.features.setup import cache, uv_program
from homelab.controller.features.setup.setup_plan import NeededFile
from homelab.shared.protocol.digest import file_sha256

NAME = "python.tar.gz"  # its place in the node's folder of setup


def fetch(machine: str, version: str) -> tuple[NeededFile, Path]:
    """The archive for x86_64 or aarch64 and "3.12"; made once. Where uv fetches from is uv's own setting (UV_PYTHON_INSTALL_MIRROR). Raises HomelabError."""
    place = cache.folder() / f"python-{version}-{machine}.tar.gz"
    if not place.is_file():
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache.made_folder()) as folder:
            partial = Path(folder, "archive")
            _pack(_install(Path(folder, "pythons"), machine, version), partial)
            partial.replace(place)
    with tarfile.open(place) as archive:
        unpacked = sum(entry.size for entry in archive)
    return NeededFile(name=NAME, sha256=file_sha256(place), size_bytes=place.stat().st_size, unpacked_bytes=unpacked), place


def _install(folder: Path, machine: str, version: str) -> Path:
    """The folder of the Python that uv has put into `folder`."""
    kind = f"cpython-{version}-linux-{machine}-gnu"
    command = [str(uv_program.of_this_machine()), "python", "install", "--no-bin", "--install-dir", str(folder), kind]
    environment = {key: value for key, value in os.environ.items() if key != "UV_PYTHON_DOWNLOADS"} | {"NO_COLOR": "1", "UV_NO_CONFIG": "1"}
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False, timeout=900
        )
        # uv names its causes from the outermost to the innermost, with addresses of hundreds of letters.
        said = " ".join(done.stderr.split()).rpartition(" cause: ")[2]
    except (OSError, subprocess.TimeoutExpired) as error:
        said = str(error)
    # Beside it lies a link that has the short version in its name.
    roots = [path for path in folder.glob(f"cpython-{version}*-linux-{machine}-gnu") if not path.is_symlink()]
    if len(roots) != 1:
        raise HomelabError(
            f"Python {version} for {machine} (about 30 MB) cannot be fetched: uv says: {said[-300:]}", where="this machine",
            hint=Hint("install Python {} on the nodes that lack it (by their package manager), then: {}", version, homelab("setup")),
        )  # fmt: skip
    return roots[0]


def _pack(root: Path, archive: Path) -> None:
    """All files, folders and links below `root`; two names of one file become two files, so that the node need not know hard links."""
    with tarfile.open(archive, "w:gz", compresslevel=6) as out:
        for path in sorted(root.rglob("*")):
            out.inodes = {}  # type: ignore[attr-defined]
            out.add(path, arcname=str(path.relative_to(root)), recursive=False)
