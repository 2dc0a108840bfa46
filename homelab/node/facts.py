"""What this node says of itself, in one answer. Every probe stands alone: one that cannot run leaves its field empty."""

import getpass
import json
import os
import platform
import socket
import subprocess
import sys
import time

from homelab.node import files, load, paths, ports, processes, quota

# Distribution names; versions are read from package metadata, which costs milliseconds where an import costs seconds.
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
    "numpy",
    "pyarrow",
)
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_SPEEDS_BYTES = 1 << 20  # a file of speeds has about one kilobyte
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


def collect(request):
    """The facts (types: `homelab.facts.Facts`).

    `request`: node, workdir, peers, port, model, revision, method {"kind"}, data {role: path}.
    """
    workdir = paths.expand(request["workdir"])
    total, available = load.memory()
    smi_state, cards = load.gpus()
    driver_version, driver_cuda = _driver() if smi_state == "ok" else (None, None)
    facts = {
        "node": request["node"],
        "time": time.time(),
        "hostname": socket.gethostname(),
        "user": _user(),
        "home": os.path.expanduser("~"),
        "workdir": workdir,
        "workdir_writable": _writable(workdir),
        "system": "%s %s" % (_distribution(), platform.machine()),
        "cpu_count": quota.usable_cpus(),
        "load_1min": os.getloadavg()[0],
        "memory_total_bytes": total,
        "memory_available_bytes": available,
        "python_executable": sys.executable,
        "python_version": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "torch_cuda": _torch_cuda(),
        "nvidia_smi": smi_state,
        "driver_version": driver_version,
        "driver_cuda": driver_cuda,
        "gpus": cards,
        "gpu_probe": _gpu_probe() if cards else None,
        "interfaces": ports.interfaces(),
        "own_name_addresses": ports.own_name_addresses(),
        "routes": ports.routes(request.get("peers") or []),
        "disk_free_bytes": _disk(workdir)[0],
        "disk_total_bytes": _disk(workdir)[1],
        "shm_free_bytes": _disk("/dev/shm")[0],
        "port": ports.state(int(request["port"])) if request.get("port") else None,
        "model": _model(request["model"], request.get("revision")) if request.get("model") else None,
        "speeds": _speeds(workdir, request["model"], request["method"]) if request.get("method") else None,
        "data": {role: _data(path) for role, path in (request.get("data") or {}).items()},
        "runs_alive": sorted(processes.of_runs(request["node"])),
        "power": _power(),
    }
    return facts


def _user():
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return str(os.getuid())


def _distribution():
    try:
        with open("/etc/os-release") as stream:
            for line in stream:
                if line.startswith("PRETTY_NAME="):
                    return line.split("=", 1)[1].strip().strip('"')
    except OSError:
        pass
    return platform.system()


def _writable(folder):
    try:
        os.makedirs(folder, exist_ok=True)
        probe = os.path.join(folder, ".writable.%d" % os.getpid())
        with open(probe, "w") as stream:
            stream.write("x")
        os.unlink(probe)
        return True
    except OSError:
        return False


def _disk(folder):
    while folder and not os.path.exists(folder):
        folder = os.path.dirname(folder)
    try:
        state = os.statvfs(folder)
    except OSError:
        return None, None
    return state.f_bavail * state.f_frsize, state.f_blocks * state.f_frsize


def _version(name):
    from importlib import metadata  # costs 30 ms: not for the verbs that do not need it

    try:
        return metadata.version(name)
    except Exception:
        return None  # damaged metadata reads as "not installed", which is also what pip will say


def _torch_cuda():
    """CUDA version torch was built for, read from torch/version.py without importing torch; None for CPU builds."""
    from importlib.util import find_spec

    try:
        spec = find_spec("torch")
        with open(os.path.join(os.path.dirname(spec.origin), "version.py")) as stream:
            for line in stream:
                if line.startswith("cuda"):
                    value = line.split("=", 1)[1].strip().strip("'\"")
                    return None if value == "None" else value
    except (OSError, AttributeError, ValueError, ImportError):
        return None
    return None


def _driver():
    """(driver version, newest CUDA it supports) from the header of plain `nvidia-smi`."""
    try:
        text = subprocess.run(
            ["nvidia-smi"], stdin=subprocess.DEVNULL, capture_output=True, timeout=10, text=True, errors="replace"
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None, None

    def after(label):
        return text.split(label, 1)[1].split()[0] if label in text and text.split(label, 1)[1].split() else None

    return after("Driver Version:"), after("CUDA Version:")


_PROBE = """
import json, torch
answer = {"torch": torch.__version__, "cuda_available": torch.cuda.is_available(), "arch_list": [], "devices": []}
if answer["cuda_available"]:
    answer["arch_list"] = torch.cuda.get_arch_list()
    for index in range(torch.cuda.device_count()):
        device = {"name": torch.cuda.get_device_name(index), "capability": list(torch.cuda.get_device_capability(index)),
                  "bf16": False, "matmul_ok": False, "error": None}
        try:
            with torch.cuda.device(index):
                a = torch.randn(256, 256, device="cuda")
                device["matmul_ok"] = bool(torch.allclose((a @ a).cpu(), a.cpu() @ a.cpu(), atol=1.0))
                device["bf16"] = device["capability"][0] >= 8
        except Exception as error:
            device["error"] = str(error).splitlines()[0][:300]
        answer["devices"].append(device)
print(json.dumps(answer))
"""


def _gpu_probe():
    """torch's own view of the cards: one small matmul on each (a build without kernels for the card fails here, not later)."""
    try:
        answer = subprocess.run(
            [sys.executable, "-c", _PROBE],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=90,
            text=True,
            errors="replace",
        )
        return json.loads(answer.stdout.strip().splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError):
        return None


def _model(name, revision):
    if name.startswith(("/", "~")):
        return _model_folder(os.path.expanduser(name))
    home = os.environ.get("HF_HUB_CACHE") or os.path.join(
        os.environ.get("HF_HOME") or os.path.join(os.path.expanduser("~"), ".cache", "huggingface"), "hub"
    )
    snapshots = os.path.join(home, "models--" + name.replace("/", "--"), "snapshots")
    wanted = revision
    if wanted is None or not os.path.isdir(os.path.join(snapshots, wanted)):
        try:
            with open(os.path.join(os.path.dirname(snapshots), "refs", revision or "main")) as stream:
                wanted = stream.read().strip()
        except OSError:
            return {"found": False, "path": None, "config": None, "size_bytes": None, "problem": "not in the hub cache"}
    return _model_folder(os.path.join(snapshots, wanted))


def _model_folder(folder):
    answer = {"found": False, "path": folder, "config": None, "size_bytes": None, "problem": None}
    if not os.path.isdir(folder):
        answer["problem"] = "there is no such folder" if not os.path.exists(folder) else "this is not a folder"
        return answer
    names = os.listdir(folder)
    answer["config"] = files.read_json(os.path.join(folder, "config.json"))
    if answer["config"] is None:
        answer["problem"] = "config.json is missing or broken: this is not a model folder"
    elif not any(name in names for name in _WEIGHTS):
        answer["problem"] = "no weights (%s)" % " or ".join(_WEIGHTS[:2])
    elif not any(name in names for name in _TOKENIZERS):
        answer["problem"] = "no tokenizer (%s)" % " or ".join(_TOKENIZERS)
    else:
        answer["found"] = True
    try:
        answer["size_bytes"] = sum(os.path.getsize(os.path.join(folder, name)) for name in names)
    except OSError as error:
        answer["found"], answer["problem"] = False, "a file cannot be read: %s" % error
    return answer


def _speeds(workdir, model, method):
    """What runs of this model and method have measured here (written by `homelab.worker.speeds`); a damaged file says so."""
    path = paths.speeds_file(workdir, model, method["kind"])
    answer = {"path": path, "found": os.path.lexists(path), "problem": None, "content": None}
    if not answer["found"]:
        return answer
    try:
        if os.path.getsize(path) > _SPEEDS_BYTES:
            answer["problem"] = "it is far too large for a file of speeds"
            return answer
        with open(path, encoding="utf-8") as stream:
            content = json.load(stream)
    except OSError as error:
        answer["problem"] = error.strerror or str(error)
    except (ValueError, RecursionError):
        answer["problem"] = "it is damaged: not JSON"
    else:
        if isinstance(content, dict):
            answer["content"] = content
        else:
            answer["problem"] = "it is damaged: not a JSON object"
    return answer


def _data(path):
    path = os.path.expanduser(path)
    answer = {"path": path, "found": False, "size_bytes": None, "sha256": None, "rows": None, "problem": None}
    try:
        digest, rows = files.digest_and_rows(path)
        answer.update(size_bytes=os.path.getsize(path), sha256=digest, rows=rows, found=True)
    except OSError as error:
        answer["problem"] = error.strerror
    return answer


def _power():
    root = "/sys/class/power_supply"
    try:
        names = os.listdir(root)
    except OSError:
        return None
    online = battery = False
    for name in names:
        try:
            with open(os.path.join(root, name, "type")) as stream:
                kind = stream.read().strip()
            if kind == "Battery":
                battery = True
            elif kind == "Mains":
                with open(os.path.join(root, name, "online")) as stream:
                    online = online or stream.read().strip() == "1"
        except OSError:
            continue
    return ("mains" if online else "battery") if battery else None
