"""The package as it is published: it builds, an index would take it, and it has all that it needs outside of this tree."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

import homelab

ROOT = Path(homelab.__file__).parents[1]
pytestmark = pytest.mark.timeout(120)


@dataclass(frozen=True)
class Built:
    """What `python -m build` has made."""

    sdist: Path
    wheel: Path


def tracked(*below: str) -> list[str]:
    names = subprocess.run(["git", "ls-files", *below], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [name for name in names if (ROOT / name).is_file()]


def build(folder: Path) -> Built:
    """From a copy of the tracked files: no test writes into the tree, and nothing that lies beside them gets in."""
    source = folder / "source"
    for name in tracked():
        if not name.startswith("tests/"):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name)
    # Without isolation: an environment of its own would be filled from an index.
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (sdist,), (wheel,) = (folder / "dist").glob("*.tar.gz"), (folder / "dist").glob("*.whl")
    return Built(sdist, wheel)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(tmp_path_factory.mktemp("package"))


def checked(*files: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *files], capture_output=True, text=True, check=False)


def test_an_index_would_take_both_files(built: Built) -> None:
    done = checked(built.sdist, built.wheel)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("PASSED") == 2
    version = homelab.__version__
    assert (built.sdist.name, built.wheel.name) == (f"homelab_trainer-{version}.tar.gz", f"homelab_trainer-{version}-py3-none-any.whl")


def test_a_package_without_a_description_is_refused(built: Built, tmp_path: Path) -> None:
    bare = tmp_path / built.wheel.name
    with zipfile.ZipFile(built.wheel) as whole, zipfile.ZipFile(bare, "w") as copy:
        for entry in whole.infolist():
            data = whole.read(entry)
            copy.writestr(entry, data.partition(b"\n\n")[0] + b"\n" if entry.filename.endswith("/METADATA") else data)
    assert checked(bare).returncode != 0


def test_both_files_have_every_file_of_the_package(built: Built) -> None:
    expected = {name for name in tracked("homelab") if not name.endswith(".md")}
    with zipfile.ZipFile(built.wheel) as wheel:
        names = set(wheel.namelist())
    assert expected - names == set()
    assert {name for name in names if name.startswith("homelab/") and not name.endswith(".md")} - expected == set()
    with tarfile.open(built.sdist) as sdist:
        assert expected - {name.partition("/")[2] for name in sdist.getnames()} == set()
    shared = {name.partition("share/homelab/")[2] for name in names if "share/homelab/" in name}
    assert shared == {"scripts/demo", *tracked("recipes")}


def test_the_wheel_works_outside_of_the_tree(built: Built, tmp_path: Path) -> None:
    """In an environment that has only its requirements beside it: those of this one, by their path alone, so that no `homelab` of the tree is among them."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", "--no-compile", built.wheel],
        check=True,
    )
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (site / "requirements.pth").write_text(sysconfig.get_path("purelib") + "\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HOMELAB_"))}

    def run(*arguments: str) -> str:
        return subprocess.run(
            [python.parent / "homelab", *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        ).stdout

    where = subprocess.run(
        [python, "-c", "import homelab; print(homelab.__file__)"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert Path(where.stdout.strip()).is_relative_to(tmp_path)
    assert run("--version").strip() == f"homelab {homelab.__version__}"
    assert "preflight" in run("--help")
    assert "--python" in run("demo", "--help")
    recipe = next((tmp_path / "venv" / "share").rglob("llama7b-lora.toml"))
    (tmp_path / "cluster.toml").write_text((ROOT / "cluster.toml").read_text())
    plan = json.loads(run("plan", str(recipe), "--offline", "--json", "--cluster", str(tmp_path / "cluster.toml")))
    assert plan["ranks"]
