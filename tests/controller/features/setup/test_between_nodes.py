"""A model goes over this machine's own link once, and from the first node to the others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from homelab.lab import Lab
from tests.controller.features.setup.test_on_a_lab import RECIPE, REQUIREMENTS
from tests.lab.conftest import namespaces_missing

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.thorough,
    pytest.mark.namespaces,
    pytest.mark.skipif(bool(namespaces_missing()), reason=namespaces_missing() or "-"),
]
SIZE_BYTES = 60_000_000


def sent_bytes() -> int:
    """What this machine has sent on the interfaces of its labs."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return sum(int(line.split(":")[1].split()[8]) for line in lines if line.split(":")[0].strip() not in ("lo", "eth0"))


def test_the_others_copy_from_the_first(tmp_path: Path) -> None:
    home = tmp_path / "home"
    model = home / "models/tiny"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(os.urandom(SIZE_BYTES))
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "requirements.txt").write_text(REQUIREMENTS)
    with Lab.up(tmp_path / "lab", nodes=3, backend="namespaces") as lab:
        cluster = lab.folder / "bare.toml"
        lines = lab.cluster_file.read_text().splitlines()
        cluster.write_text(
            "\n".join('python = "~/.homelab/env/bin/python"' if line.startswith("python =") else line for line in lines) + "\n"
        )
        environment = {key: value for key, value in os.environ.items() if not key.startswith("HOMELAB_")}
        pip = os.environ.get("PIP_CONFIG_FILE") or str(Path.home() / ".config/pip/pip.conf")
        environment |= {
            "HOME": str(home),
            "HOMELAB_CLUSTER": str(cluster),
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
            "PIP_CONFIG_FILE": pip,
        }
        words = [
            sys.executable,
            "-m",
            "homelab",
            "setup",
            "--requirements",
            "requirements.txt",
            "--recipe",
            "recipe.toml",
            "--between-nodes",
        ]
        before = sent_bytes()
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False)
        sent = sent_bytes() - before
        assert done.returncode == 0, done.stdout + done.stderr
        for node in lab.nodes:
            assert (Path(node.home) / "models/tiny/model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
        assert done.stderr.count("the other nodes copy it from there") == 2, "the packages and the model"
        # The model once, and uv to every node; to each of the nodes it would be three times the model.
        assert sent < 2.5 * SIZE_BYTES, sent
