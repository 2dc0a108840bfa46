"""What of a worker environment is on this node. Nothing is changed."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from typing import TYPE_CHECKING

from homelab.node.setup import pieces, record
from homelab.shared.protocol.digest import file_sha256
from homelab.shared.protocol.setup_messages import SetupState

if TYPE_CHECKING:
    from homelab.shared.protocol.setup_messages import LookRequest

_PYTHONS = ("python3.14", "python3.13", "python3.12", "python3.11", "python3")
_ASK = "import platform, sys; print(platform.python_implementation(), '%d.%d' % sys.version_info[:2], platform.python_version())"
_METADATA = re.compile(r"(.+)-([^-]+)\.dist-info")


def look(request: LookRequest) -> SetupState:
    """What is installed, and which of the files are here, read to their ends."""
    environment = os.path.expanduser(request.environment)
    made = record.read()
    there = os.path.lexists(environment) and not _is_empty(environment)
    wanted = request.files
    return SetupState(
        machine=platform.machine(),
        libc=" ".join(platform.libc_ver()).strip(),
        pythons=_pythons(environment),
        environment_exists=there,
        environment_is_ours=environment in made["folders"],
        environment_python=_version_of(os.path.join(environment, "bin", "python"))[1] if there else "",
        packages=_packages(environment),
        lock=made["locks"].get(environment, "") if there else "",
        good=tuple(sorted(name for name, sha256 in wanted.items() if _is_good(pieces.place(name), sha256))),
        partial={name: size for name, sha256 in wanted.items() if (size := pieces.partial_size(sha256))},
        disk_free=min(disk_free(record.folder()), disk_free(environment)),  # they may lie on two disks
        folders=tuple(made["folders"]),
    )


def _is_empty(folder: str) -> bool:
    try:
        return not os.listdir(folder)
    except OSError:
        return False


def _is_good(path: str, sha256: str) -> bool:
    try:
        return os.path.isfile(path) and file_sha256(path) == sha256
    except OSError:  # it cannot be read, and is sent again
        return False


def _pythons(environment: str) -> dict[str, str]:
    """{"3.12": path} of every CPython 3.11 or newer that is on the PATH and starts."""
    paths: dict[str, str] = {}
    for name in _PYTHONS:
        path = shutil.which(name)
        if path is None or path.startswith(environment + os.sep):
            continue
        implementation, _, short = _version_of(path)
        number = tuple(int(part) for part in short.split(".")) if short else (0, 0)
        if implementation == "CPython" and number >= (3, 11):
            paths.setdefault(short, path)
    return paths


def _version_of(python: str) -> tuple[str, str, str]:
    """(implementation, "3.12.1", "3.12"); empty texts for one that does not start (a shim of a version that is not installed)."""
    try:
        done = subprocess.run([python, "-I", "-c", _ASK], capture_output=True, text=True, timeout=20, check=False, stdin=subprocess.DEVNULL)
        implementation, short, version = done.stdout.split()
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return "", "", ""
    return implementation, version, short


def _packages(environment: str) -> dict[str, str]:
    """{name: version} of what is installed in the environment, with the names as pip writes them (PEP 503)."""
    versions = {}
    library = os.path.join(environment, "lib")
    for python in sorted(os.listdir(library)) if os.path.isdir(library) else []:
        site = os.path.join(library, python, "site-packages")
        for entry in sorted(os.listdir(site)) if os.path.isdir(site) else []:
            match = _METADATA.fullmatch(entry)
            if match and os.path.isfile(os.path.join(site, entry, "METADATA")):
                versions[re.sub(r"[-_.]+", "-", match.group(1)).lower()] = match.group(2)
    return versions


def disk_free(path: str) -> int:
    """Bytes that are free where this path is, or will be."""
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return shutil.disk_usage(path).free
