"""The Python that answers, and the packages beside it. Nothing is imported: metadata costs milliseconds, torch seconds."""

from __future__ import annotations

import glob
import os
import platform
import re
import sys
from typing import TYPE_CHECKING

import homelab
from homelab.node.setup import record
from homelab.node.system import programs
from homelab.shared.protocol.code import ANOTHER_PYTHON, code_digest, contents, shipped_files

if TYPE_CHECKING:
    from collections.abc import Iterable

    from homelab.shared.protocol.files import JsonObject

_METADATA = re.compile(r"([^-]+(?:-[^-]+)*?)-(\d[^-]*)(?:-py[\d.]+[^/]*)?\.(?:dist|egg)-info$")
_NEEDS = re.compile(r"Requires-Dist: ([\w-]+)\s*\(?([^;)]*)\)?\s*$")
PACKAGES = (
    "torch", "transformers", "trl", "peft", "bitsandbytes", "accelerate", "datasets", "tensorboard", "safetensors", "tokenizers",
    "unsloth", "unsloth-zoo", "numpy", "pyarrow",
)  # fmt: skip


def read(request: JsonObject) -> JsonObject:
    """Interpreter, who made its environment, versions of packages, CUDA version of torch."""
    return {
        "executable": sys.executable,
        "is_another": bool(os.environ.get(ANOTHER_PYTHON)),
        "made_by_setup": os.path.realpath(sys.prefix) in map(os.path.realpath, record.read()["folders"]),
        **_installer(),
        "version": platform.python_version(),
        "packages": versions(PACKAGES, sys.path),
        **unsloth(request.get("unsloth_python") or ""),
        "compiler": _compiler() if request.get("compiles") else None,
        "torch_cuda": _torch_cuda(),
        "nccl": _nccl(),
        "code_hash": code_hash(),
    }


def _installer() -> JsonObject:
    """What can install packages here: pip, else the path of uv. A Python of the system may forbid both (PEP 668)."""
    has_pip = any(os.path.isdir(os.path.join(folder, "pip")) for folder in sys.path if folder)
    uv = None if has_pip else programs.path_of("uv")
    if uv is None and not has_pip:  # where its installer puts it, which is not in the PATH of every login
        uv = next((path for path in map(os.path.expanduser, ("~/.local/bin/uv", "~/.cargo/bin/uv")) if os.access(path, os.X_OK)), None)
    is_system = sys.prefix == sys.base_prefix
    is_managed = is_system and os.path.exists(os.path.join(os.path.dirname(os.__file__), "EXTERNALLY-MANAGED"))
    return {"has_pip": has_pip, "uv": uv, "is_managed": is_managed}


def _compiler() -> JsonObject:
    from homelab.node.system import c_compiler  # its imports cost more than all that is asked here

    return c_compiler.read()


def versions(names: Iterable[str], folders: list[str]) -> JsonObject:
    """{name: version or None} as pip sees them, from the names of the metadata folders on the path (torch-2.13.0+cpu.dist-info).

    A folder without its METADATA is damaged and reads as "not installed", which is also what pip will say. importlib.metadata
    says the same, and its import alone would cost as much as all other probes together.
    """
    version_of = {}
    name_set = set(names)
    for folder in folders:
        try:
            entries = sorted(os.listdir(folder or "."))
        except OSError:
            continue
        for entry in entries:
            match = _METADATA.match(entry)
            name = re.sub(r"[-_.]+", "-", match.group(1)).lower() if match else ""
            if match and name in name_set and name not in version_of and _is_whole(os.path.join(folder, entry)):
                version_of[name] = match.group(2)
        for name in name_set - set(version_of):
            if os.path.exists(os.path.join(folder, name + ".egg-link")):
                version_of[name] = _slowly(name)
    return {name: version_of.get(name) for name in names}


def unsloth(interpreter: str) -> JsonObject:
    """{"unsloth": the version that is installed beside this interpreter or None, "unsloth_takes": {package: "<=5.17.0"}}.

    Nothing of it is started: an environment keeps its packages in lib/python3.x/site-packages (venv's documentation).
    """
    folder = os.path.dirname(os.path.dirname(os.path.expanduser(interpreter)))
    places = sorted(glob.glob(os.path.join(glob.escape(folder), "lib", "python3*", "site-packages"))) if interpreter else []
    version_of, takes = {}, {}
    for place in places:
        version_of = {name: version for name, version in versions(("unsloth", "unsloth-zoo"), [place]).items() if version}
        for name, version in version_of.items():
            takes.update(_newest_taken(os.path.join(place, "{}-{}.dist-info".format(name.replace("-", "_"), version), "METADATA")))
    return {"unsloth": version_of.get("unsloth"), "unsloth_takes": takes}


def _newest_taken(path: str) -> dict[str, str]:
    """The upper limits of what a package needs always: `Requires-Dist: trl<=1.15.0,>=0.18.2` (without an extra) is {"trl": "<=1.15.0"}."""
    takes = {}
    try:
        with open(path, encoding="utf-8") as stream:
            for line in stream:
                if not line.strip():  # the description begins
                    break
                match = _NEEDS.match(line)
                limit = re.search(r"<=?[\d.]+", match.group(2)) if match else None
                if match and limit and match.group(1) in PACKAGES:
                    takes[match.group(1)] = limit.group()
    except OSError:
        pass
    return takes


def _is_whole(path: str) -> bool:
    """dist-info has METADATA, egg-info PKG-INFO or is that file itself."""
    return os.path.isfile(path) or any(os.path.isfile(os.path.join(path, name)) for name in ("METADATA", "PKG-INFO"))


def _slowly(name: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(name)
    except Exception:  # noqa: BLE001 - a file of another package: not known
        return None


def _torch_folder() -> str:
    """Where torch is installed; nothing is imported. Raises ImportError, ValueError or AttributeError without a whole torch."""
    from importlib.util import find_spec

    spec = find_spec("torch")
    if spec is None or not isinstance(spec.origin, str):  # a folder that pip left behind after it removed torch has no file
        raise ImportError("torch")
    return os.path.dirname(spec.origin)


def _torch_cuda() -> str | None:
    """CUDA version torch was built for, read from torch/version.py without importing torch; None for CPU builds."""
    try:
        with open(os.path.join(_torch_folder(), "version.py")) as stream:
            for line in stream:
                if line.startswith("cuda"):
                    value = line.split("=", 1)[1].strip().strip("'\"")
                    return None if value == "None" else value
    except (OSError, AttributeError, TypeError, ValueError, ImportError):
        return None
    return None


def _nccl() -> str | None:
    """Version of the NCCL beside torch: the name of its metadata folder says it (nvidia_nccl_cu12-2.27.3.dist-info)."""
    try:
        return nccl_version(os.listdir(os.path.dirname(_torch_folder())), _torch_cuda())
    except (OSError, AttributeError, TypeError, ValueError, ImportError):
        return None


def nccl_version(names: Iterable[str], torch_cuda: str | None) -> str | None:
    """From the names of a site-packages folder; of several the one for torch's CUDA, None where that does not decide."""
    found = (re.match(r"nvidia_nccl_cu(\d+)-([\d.]+)\.dist-info$", name) for name in names)
    version_of: dict[str, str] = {match[1]: match[2] for match in found if match}
    if torch_cuda and torch_cuda.split(".")[0] in version_of:
        return version_of[torch_cuda.split(".")[0]]
    return next(iter(version_of.values())) if len(version_of) == 1 else None


def code_hash(root: str | None = None) -> str | None:
    """Digest of the files that this program runs from, as the controller made it when it shipped them; None where they cannot be read."""
    root = root or os.path.dirname(homelab.__file__)
    try:
        return code_digest(contents(root, shipped_files(root)))
    except OSError:
        return None
