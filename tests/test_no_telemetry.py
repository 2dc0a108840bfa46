"""homelab contacts nobody by itself: every host that it names and every module that can leave the cluster is listed here, with its reason."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import homelab

PACKAGE = Path(homelab.__file__).parent
FILES = [path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".toml", ".txt", ".jsonl", ".json", ".html", ".js", ".css")]
HOST = re.compile(r"\b(?:https?|wss?|ftp)://([A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+)")

HOSTS = {
    "huggingface.co": "the hub: models and data that a recipe names, and what `homelab push` uploads",
    "download.pytorch.org": "builds of torch: `homelab setup`",
    "registry.npmjs.org": "the library of llama.cpp, by its digest: `homelab gguf`",
    "github.com": "named in hints for a person, and where uv fetches a standalone Python for `homelab setup`",
    "deb.debian.org": "named in a command for a person whose Debian has no driver for its card",
    "mirrors.rpmfusion.org": "the same for Fedora",
    "ui.perfetto.dev": "named for a person who looks at a trace",
    "json-schema.org": "the name of JSON Schema's own schema",
    "www.w3.org": "the name of SVG's namespace",
}

# Who imports a library that can speak to a host outside of the cluster. The names of modules are unique enough to be found by.
CLIENTS = re.compile(
    r"^\s*(?:import|from)\s+(urllib\.request|http\.client|requests|httpx|aiohttp|smtplib|ftplib|xmlrpc|huggingface_hub|datasets|zeroconf|apprise|"
    r"wandb|trackio|mlflow|aim|swanlab|sentry_sdk|posthog|analytics|opentelemetry|statsd)\b",
    re.MULTILINE,
)
TRACKERS = ("aim", "mlflow", "swanlab", "trackio", "wandb")
ALLOWED = {
    ("download.py", "http.client"): "a node fetches the wheels of setup's lock",
    ("download.py", "urllib.request"): "a node fetches the wheels of setup's lock",
    ("llama_cpp.py", "urllib.request"): "`homelab gguf` fetches the converter and the library",
    ("wheelhouse.py", "urllib.request"): "`homelab setup` asks how large the wheels are that it fetches",
    ("hub.py", "huggingface_hub"): "`homelab push`",
    ("model_source.py", "huggingface_hub"): "`homelab setup --recipe` fetches the recipe's model",
    ("hub_config.py", "huggingface_hub"): "the config.json of a recipe's model, for a plan",
    ("hub_model.py", "huggingface_hub"): "the recipe's model, on a node",
    ("model_build.py", "huggingface_hub"): "the recipe's model, on a node, from the cache",
    ("quantised_cache.py", "huggingface_hub"): "the cache alone",
    ("row_cache.py", "huggingface_hub"): "the cache alone",
    ("hub.py", "datasets"): "the recipe's data of the hub, on a node",
    ("prepared_data.py", "datasets"): "`homelab setup --recipe` prepares the recipe's data of the hub",
    ("sources.py", "zeroconf"): "`homelab init` asks the LAN for names",
    ("notifier.py", "apprise"): "the services of [notify] in cluster.toml",
    **{("trackers.py", name): "`homelab track` and [tracking]: the tracker that is named there" for name in TRACKERS},
}


def hosts(text: str) -> set[str]:
    return {host.lower() for host in HOST.findall(text)}


def test_every_host_that_the_package_names_is_listed() -> None:
    assert len(FILES) > 500
    named = {host: path.name for path in FILES for host in hosts(path.read_text(encoding="utf-8"))}
    assert {host: file for host, file in named.items() if host not in HOSTS} == {}
    assert set(HOSTS) - set(named) == set(), "no longer named: take it off the list"


def test_every_module_that_can_leave_the_cluster_is_listed() -> None:
    found = {(path.name, client) for path in FILES if path.suffix == ".py" for client in CLIENTS.findall(path.read_text(encoding="utf-8"))}
    assert found - set(ALLOWED) == set(), "a new way out of the cluster: who types the command that needs it?"
    assert set(ALLOWED) - found == set(), "no longer imported: take it off the list"


@pytest.mark.parametrize(
    "line", ["import posthog", "    from sentry_sdk import init", "from urllib.request import urlopen", "import requests  # noqa"]
)
def test_the_rule_sees_a_client(line: str) -> None:
    assert CLIENTS.search(f"import os\n{line}\n")


def test_the_rule_sees_a_host() -> None:
    assert hosts('post("https://stats.example.org/v1", http://10.0.0.1:80)') == {"stats.example.org", "10.0.0.1"}


PROGRAM = """
import contextlib, importlib, io, json, pkgutil, socket, sys
met = []
def hook(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto"):
        met.append([event, str(arguments[-1] if event == "socket.connect" else arguments[0])])
sys.addaudithook(hook)
if sys.argv[1] == "control":
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", 9), timeout=1)
else:
    import homelab
    for module in pkgutil.walk_packages(homelab.__path__, "homelab."):
        if not module.name.startswith("homelab.worker") and not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    from homelab.cli.main import run
    for line in sys.argv[1:]:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            assert run(line.split()) == 0, (line, out.getvalue())
print(json.dumps(met))
"""


def connections(tmp_path: Path, *lines: str) -> list[list[str]]:
    """What a process has connected to or looked up that imports the package and runs these commands."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, *lines], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    found: list[list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_neither_an_import_nor_a_command_that_asks_no_node_connects(tmp_path: Path) -> None:
    root = PACKAGE.parent
    recipe, cluster = root / "recipes" / "llama7b-lora.toml", root / "cluster.toml"
    commands = ["--help", "--version", "explain law", f"plan {recipe} --offline --cluster {cluster}", "preflight --list", "lab faults"]
    assert connections(tmp_path, *commands) == []


def test_a_connection_would_be_seen(tmp_path: Path) -> None:
    assert connections(tmp_path, "control")
