"""The Python that answers, and the packages beside it. Nothing is imported: metadata costs milliseconds, torch seconds."""

import glob
import hashlib
import os
import platform
import re
import sys

_METADATA = re.compile(r"([^-]+(?:-[^-]+)*?)-(\d[^-]*)(?:-py[\d.]+[^/]*)?\.(?:dist|egg)-info$")
_NEEDS = re.compile(r"Requires-Dist: ([\w-]+)\s*\(?([^;)]*)\)?\s*$")
PACKAGES = (
    "torch",
    "transformers",
    "trl",
    "peft",
    "bitsandbytes",
    "accelerate",
    "datasets",
    "tensorboard",
    "safetensors",
    "tokenizers",
    "unsloth",
    "unsloth-zoo",
    "numpy",
    "pyarrow",
)


def read(request):
    """Interpreter, versions of packages, CUDA version of torch."""
    return {
        "python_executable": sys.executable,
        "python_version": platform.python_version(),
        "packages": versions(PACKAGES, sys.path),
        **unsloth(request.get("unsloth_python") or ""),
        "torch_cuda": _torch_cuda(),
        "nccl": _nccl(),
        "code_hash": code_hash(),
    }


def versions(names, folders):
    """{name: version or None} as pip sees them, from the names of the metadata folders on the path (torch-2.13.0+cpu.dist-info).

    A folder without its METADATA is damaged and reads as "not installed", which is also what pip will say. importlib.metadata
    says the same, and its import alone would cost as much as all other probes together.
    """
    found = {}
    wanted = set(names)
    for folder in folders:
        try:
            entries = sorted(os.listdir(folder or "."))
        except OSError:
            continue
        for entry in entries:
            match = _METADATA.match(entry)
            name = match and re.sub(r"[-_.]+", "-", match.group(1)).lower()
            if name in wanted and name not in found and _is_whole(os.path.join(folder, entry)):
                found[name] = match.group(2)
        for name in wanted - set(found):
            if os.path.exists(os.path.join(folder, name + ".egg-link")):
                found[name] = _slowly(name)
    return {name: found.get(name) for name in names}


def unsloth(interpreter):
    """{"unsloth": the version that is installed beside this interpreter or None, "unsloth_takes": {package: "<=5.17.0"}}.

    Nothing of it is started: an environment keeps its packages in lib/python3.x/site-packages (venv's documentation).
    """
    folder = os.path.dirname(os.path.dirname(os.path.expanduser(interpreter)))
    places = sorted(glob.glob(os.path.join(glob.escape(folder), "lib", "python3*", "site-packages"))) if interpreter else []
    found, takes = {}, {}
    for place in places:
        found = {name: version for name, version in versions(("unsloth", "unsloth-zoo"), [place]).items() if version}
        for name, version in found.items():
            takes.update(_newest_taken(os.path.join(place, "%s-%s.dist-info" % (name.replace("-", "_"), version), "METADATA")))
    return {"unsloth": found.get("unsloth"), "unsloth_takes": takes}


def _newest_taken(path):
    """The upper limits of what a package needs always: `Requires-Dist: trl<=1.15.0,>=0.18.2` (without an extra) is {"trl": "<=1.15.0"}."""
    takes = {}
    try:
        with open(path, encoding="utf-8") as stream:
            for line in stream:
                if not line.strip():  # the description begins
                    break
                match = _NEEDS.match(line)
                limit = match and re.search(r"<=?[\d.]+", match.group(2))
                if limit and match.group(1) in PACKAGES:
                    takes[match.group(1)] = limit.group()
    except OSError:
        pass
    return takes


def _is_whole(path):
    """dist-info has METADATA, egg-info PKG-INFO or is that file itself."""
    return os.path.isfile(path) or any(os.path.isfile(os.path.join(path, name)) for name in ("METADATA", "PKG-INFO"))


def _slowly(name):
    from importlib import metadata

    try:
        return metadata.version(name)
    except Exception:
        return None


def _torch_cuda():
    """CUDA version torch was built for, read from torch/version.py without importing torch; None for CPU builds."""
    from importlib.util import find_spec

    try:
        spec = find_spec("torch")  # finds the folder and imports nothing
        with open(os.path.join(os.path.dirname(spec.origin), "version.py")) as stream:
            for line in stream:
                if line.startswith("cuda"):
                    value = line.split("=", 1)[1].strip().strip("'\"")
                    return None if value == "None" else value
    except (OSError, AttributeError, TypeError, ValueError, ImportError):  # what pip leaves of a torch that it removed has no file
        return None
    return None


def _nccl():
    """Version of the NCCL beside torch: the name of its metadata folder says it (nvidia_nccl_cu12-2.27.3.dist-info)."""
    from importlib.util import find_spec

    try:
        folder = os.path.dirname(os.path.dirname(find_spec("torch").origin))
        return nccl_version(os.listdir(folder), _torch_cuda())
    except (OSError, AttributeError, TypeError, ValueError, ImportError):
        return None


def nccl_version(names, torch_cuda):
    """From the names of a site-packages folder; of several the one for torch's CUDA, None where that does not decide."""
    found = dict(
        match.groups()
        for match in (re.match(r"nvidia_nccl_cu(\d+)-([\d.]+)\.dist-info$", name) for name in names)
        if match
    )
    if torch_cuda and torch_cuda.split(".")[0] in found:
        return found[torch_cuda.split(".")[0]]
    return next(iter(found.values())) if len(found) == 1 else None


def code_hash(root=None):
    """Hash of the files that this agent runs from, as the controller made it when it shipped them: sha256 over
    "name NUL size NUL bytes" of homelab/__init__.py and the .py files of node, node/probes and worker, in the order of their names."""
    root = root or os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    files = [os.path.join(root, "__init__.py")]
    for folder in ("node", os.path.join("node", "probes"), "worker"):
        files += sorted(glob.glob(os.path.join(glob.escape(root), folder, "*.py")))
    digest = hashlib.sha256()
    for path in files:
        try:
            with open(path, "rb") as stream:
                data = stream.read()
        except OSError:
            return None  # whoever cannot read them does not know
        digest.update(
            ("homelab/%s\0%d\0" % (os.path.relpath(path, root).replace(os.sep, "/"), len(data))).encode() + data
        )
    return digest.hexdigest()[:16]
