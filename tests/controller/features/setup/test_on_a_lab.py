"""Setup on real nodes with bare homes: real pip here, real uv there, and no way out of the node where the namespaces backend is."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from homelab.controller.base.units import decimal_size
from homelab.controller.config.interpreter import UNSLOTH_VERSIONS
from homelab.lab import Lab
from tests.lab.conftest import namespaces_missing
from tests.servers import serving
from tests.worker.fake_hub import Hub

pytestmark = [pytest.mark.timeout(600), pytest.mark.thorough]
REQUIREMENTS = "humanize\nidna\n"
RECIPE = """
[model]
name = "~/models/tiny"
[data]
train = "chats.jsonl"
[method]
kind = "lora"
[train]
steps = 1
global_batch = 1
learning_rate = 1e-4
"""


class Bench:
    """A lab of one node whose environment is still to be made, and the command with a cache of its own."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab = lab
        self.home = Path(lab.nodes[0].home)
        self.wheels = folder / "cache/homelab/setup/wheels"
        lines = lab.cluster_file.read_text().splitlines()
        bare = lab.folder / "bare.toml"
        bare.write_text("\n".join('python = "~/.homelab/env/bin/python"' if line.startswith("python =") else line for line in lines) + "\n")
        self.requirements = folder / "requirements.txt"
        self.requirements.write_text(REQUIREMENTS)
        outside = {key: value for key, value in os.environ.items() if not key.startswith("HOMELAB_")}
        self.environment = {**outside, "XDG_CACHE_HOME": str(folder / "cache"), "HOMELAB_CLUSTER": str(bare)}

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "homelab", *arguments]

    def homelab(self, *arguments: str, code: int = 0, **environment: str) -> str:
        done = subprocess.run(
            self.command(*arguments), env=self.environment | environment, capture_output=True, text=True, timeout=500, check=False
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def setup(self, *options: str, code: int = 0, part: str = "nodes") -> Any:
        """The node's entry of `homelab setup --json`; `part`: of its packages ("nodes") or its model ("models")."""
        done = subprocess.run(
            self.command("setup", "--requirements", str(self.requirements), "--json", *options), env=self.environment, capture_output=True, text=True,
            timeout=500, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        entry: dict[str, Any] = json.loads(done.stdout)[part]["node1"]
        return entry

    def on_node(self, command: str) -> str:
        done = subprocess.run([*self.lab.ssh_command("node1"), command], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def files(self) -> set[str]:
        """All of the home but the workdir, which belongs to runs."""
        return {str(path.relative_to(self.home)) for path in self.home.rglob("*") if "homelab" not in path.relative_to(self.home).parts[:1]}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("setup")
    backend: Any = "loopback" if namespaces_missing() else "namespaces"
    with Lab.up(folder / "lab", nodes=1, backend=backend) as lab:
        yield Bench(lab, folder)


def test_cut_off_while_it_sends_it_goes_on_at_the_next_call(bench: Bench) -> None:
    """kill -9 of the command while uv is on its way; the next call sends only what is missing, and installs."""
    before = bench.files()
    assert bench.setup("--check", code=1)["difference"].startswith("install humanize, idna; ") and bench.files() == before
    process = subprocess.Popen(
        bench.command("setup", "--requirements", str(bench.requirements)), env=bench.environment, stderr=subprocess.PIPE, text=True
    )
    partial = bench.home / ".homelab/setup/partial"
    deadline_s = time.monotonic() + 300
    while not any(path.stat().st_size > 2_000_000 for path in partial.glob("*")) and process.poll() is None:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    said = process.communicate()[1]
    assert process.returncode == -signal.SIGKILL, said
    done = bench.setup()
    whole = sum(path.stat().st_size for path in (bench.home / ".homelab/setup").rglob("*.whl"))
    assert done["changed"] and 0 < done["sent_bytes"] < whole - 1_000_000
    assert bench.on_node('.homelab/env/bin/python -c "import humanize, idna; print(humanize.naturalsize(2e6))"') == "2.0 MB"


def test_a_second_call_changes_nothing_and_says_so(bench: Bench) -> None:
    before = {name: (bench.home / name).lstat().st_mtime_ns for name in bench.files()}
    assert "Nothing was changed." in bench.homelab("setup", "--requirements", str(bench.requirements))
    assert "Nothing to do." in bench.homelab("setup", "--check", "--requirements", str(bench.requirements))
    assert {name: (bench.home / name).lstat().st_mtime_ns for name in bench.files()} == before


def test_a_damaged_wheel_is_sent_again(bench: Bench) -> None:
    """On the node and here: neither is installed, both are replaced. A package that somebody removed by hand comes back."""
    name = next(path.name for path in bench.wheels.glob("idna-*.whl"))
    size = (bench.wheels / name).stat().st_size
    (bench.home / ".homelab/setup/wheels" / name).write_bytes(b"damaged")
    (bench.wheels / name).write_bytes(b"damaged")
    for path in (bench.home / ".homelab/env/lib").rglob("idna-*.dist-info/METADATA"):
        path.unlink()
    done = bench.setup()
    assert done["difference"] == f"install idna; {decimal_size(size)} of wheels" and done["sent_bytes"] == size
    assert bench.on_node('.homelab/env/bin/python -c "import idna; print(idna.encode(chr(252)).decode())"') == "xn--tda"


def test_an_installation_that_was_cut_off_is_made_anew(bench: Bench) -> None:
    """As kill -9 on the node leaves it: the record says that nothing is installed whole, and a module is missing."""
    path = bench.home / ".homelab/setup.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "locks": {}}))
    for module in (bench.home / ".homelab/env/lib").rglob("humanize/__init__.py"):
        module.unlink()
    done = bench.setup()
    assert done["changed"] and done["sent_bytes"] == 0
    assert bench.on_node('.homelab/env/bin/python -c "import humanize; print(1)"') == "1"


def test_other_requirements_change_only_what_differs(bench: Bench) -> None:
    untouched = next((bench.home / ".homelab/env/lib").rglob("humanize/__init__.py")).stat().st_ino
    bench.requirements.write_text("humanize\nsix\n")
    done = bench.setup()
    assert done["difference"].startswith("install six; remove idna; ")
    assert next((bench.home / ".homelab/env/lib").rglob("humanize/__init__.py")).stat().st_ino == untouched


def waiting_setup(bench: Bench) -> subprocess.Popen[str]:
    """A setup that has said that it waits for another one on its node."""
    process = subprocess.Popen(
        bench.command("setup", "--requirements", str(bench.requirements)), env=bench.environment, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    assert any("waiting for another setup" in line for line in process.stderr), "it did not wait"
    return process


def test_ctrl_c_says_which_node_goes_on_installing(bench: Bench) -> None:
    bench.requirements.write_text("humanize\nidna\nsix\n")
    with (bench.home / ".homelab/setup/lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = waiting_setup(bench)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        said = process.stderr.read()
        assert process.wait(timeout=60) == 130
        assert (
            "node1 finishes the installation that has begun. To continue after it: homelab setup" in said
            and "homelab teardown" in said
            and "Traceback" not in said
        )


def test_the_setup_of_a_killed_command_is_waited_for(bench: Bench) -> None:
    """Its uv goes on alone and holds the lock: the next call waits and says so."""
    bench.requirements.write_text("humanize\n")
    with (bench.home / ".homelab/setup/lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = waiting_setup(bench)
    process.communicate(timeout=120)
    assert process.returncode == 0 and not list((bench.home / ".homelab/env/lib").rglob("six.py"))


def test_ctrl_c_stops_the_sending(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next call goes on where it stopped."""
    monkeypatch.setitem(bench.environment, "HOME", str(tmp_path))
    size = 2_000_000_000
    folder = tmp_path / "models/tiny"
    folder.mkdir(parents=True)
    (folder / "config.json").write_bytes(b"{}")
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(size)
    recipe = tmp_path / "tiny.toml"
    recipe.write_text(RECIPE)
    command = bench.command("setup", "--requirements", str(bench.requirements), "--recipe", str(recipe))
    process = subprocess.Popen(command, env=bench.environment, stderr=subprocess.PIPE, text=True)
    deadline_s = time.monotonic() + 300

    def arrived_bytes() -> int:
        return max((path.stat().st_size for path in (bench.home / "models").rglob("*") if path.is_file()), default=0)

    while arrived_bytes() < size / 20 and process.poll() is None:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=120)[1]
    assert process.returncode == 130 and "Traceback" not in said, said
    assert size / 20 <= arrived_bytes() < size / 2
    shutil.rmtree(bench.home / "models")


def test_the_model_of_a_recipe_comes_along(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From this machine's folder into the node's; once; what is damaged there comes again; pickles and other things of the folder stay here."""
    monkeypatch.setitem(bench.environment, "HOME", str(tmp_path))
    here, there = tmp_path / "models/tiny", bench.home / "models/tiny"
    here.mkdir(parents=True)
    content = {"config.json": b"{}", "model.safetensors": os.urandom(40_000_000), "tokenizer.json": b"[]"}
    for name, data in {**content, "pytorch_model.bin": b"pickle", "training.log": b"mine"}.items():
        (here / name).write_bytes(data)
    recipe = tmp_path / "tiny.toml"
    recipe.write_text(RECIPE)
    options = ("--recipe", str(recipe))
    assert (
        bench.setup("--check", *options, code=1, part="models")["missing_bytes"] == sum(map(len, content.values())) and not there.exists()
    )
    assert bench.setup(*options, part="models")["sent_bytes"] == sum(map(len, content.values()))
    assert {path.name: path.read_bytes() for path in there.iterdir()} == content
    assert "Nothing to do." in bench.homelab("setup", "--check", "--requirements", str(bench.requirements), *options)
    (there / "tokenizer.json").write_bytes(b"damaged")
    assert bench.setup(*options, part="models")["missing"] == ["tokenizer.json"]
    assert (there / "tokenizer.json").read_bytes() == b"[]"


def test_a_model_of_the_hub_is_fetched_here_and_lies_in_the_cache_there(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's own library finds it on the node's disk, offline."""
    hub = Hub()
    try:
        commit = hub.push(
            "org/tiny", {"config.json": "{}", "model.safetensors": "weights", "tokenizer.json": "[]", "pytorch_model.bin": "pickle"}
        )
        for name, value in {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}.items():
            monkeypatch.setitem(bench.environment, name, value)
        recipe = tmp_path / "tiny.toml"
        recipe.write_text(RECIPE.replace("~/models/tiny", "org/tiny"))
        done = bench.setup("--recipe", str(recipe), part="models")
        recipe.write_text(RECIPE.replace("~/models/tiny", "org/none"))
        assert "org/none cannot be fetched" in bench.homelab(
            "setup", "--requirements", str(bench.requirements), "--recipe", str(recipe), code=1
        )
    finally:
        hub.close()
    assert done["missing"] == ["model.safetensors", "tokenizer.json", "config.json"]
    ask = "from huggingface_hub import snapshot_download; print(snapshot_download('org/tiny'))"
    environment = {**os.environ, "HF_HOME": str(bench.home / ".cache/huggingface"), "HF_HUB_OFFLINE": "1"}
    answer = subprocess.run([sys.executable, "-c", ask], env=environment, capture_output=True, text=True, check=True)
    folder = Path(answer.stdout.strip())
    assert folder.name == commit and folder.is_relative_to(bench.home) and (folder / "model.safetensors").read_text() == "weights"


def test_data_of_the_hub_comes_along_as_the_library_takes_it_offline(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fetched here from a hub that the node does not reach; there the worker's own reader finds the rows, and the commit."""
    hub = Hub()
    try:
        card = "---\nconfigs:\n- config_name: default\n  data_files: train.jsonl\n---\n"
        commit = hub.push("org/facts", {"train.jsonl": '{"text": "one"}\n{"text": "two"}\n', "README.md": card})
        for name, value in {
            "HF_ENDPOINT": hub.endpoint,
            "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_OFFLINE": "0",
            "HOME": str(tmp_path),
        }.items():
            monkeypatch.setitem(bench.environment, name, value)
        (tmp_path / "models/tiny").mkdir(parents=True)
        (tmp_path / "models/tiny/config.json").write_text("{}")
        recipe = tmp_path / "tiny.toml"
        recipe.write_text(RECIPE.replace("chats.jsonl", "hub:org/facts"))
        (first,) = bench.setup("--recipe", str(recipe), part="data")
        (again,) = bench.setup("--recipe", str(recipe), part="data")
        recipe.write_text(RECIPE.replace("chats.jsonl", "hub:org/none"))
        assert "hub:org/none cannot be fetched" in bench.homelab(
            "setup", "--requirements", str(bench.requirements), "--recipe", str(recipe), code=1
        )
    finally:
        hub.close()
    assert first["what"] == "hub:org/facts" and first["sent_bytes"] and first["missing"][-1] == "dataset_info.json" and not again["missing"]
    ask = (
        "import json; from homelab.worker.data import hub; source = {'path': 'hub:org/facts', 'config': None, 'split': 'train', 'revision': None};"
        "rows, commit = hub.load(source, node='node1', run='r'); print(json.dumps([commit, [row.fields['text'] for row in rows]]))"
    )
    shutil.copytree(bench.home / ".cache/huggingface", tmp_path / "there")  # the library writes beside what it reads
    environment = {**os.environ, "HF_HOME": str(tmp_path / "there"), "HF_HUB_OFFLINE": "1"}
    answer = subprocess.run([sys.executable, "-c", ask], env=environment, capture_output=True, text=True, check=False)
    assert answer.returncode == 0 and json.loads(answer.stdout.splitlines()[-1]) == [commit, ["one", "two"]], answer.stderr
    shutil.rmtree(bench.home / "models")


def test_another_model_in_the_folder_of_the_recipe_stays(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bench.environment, "HOME", str(tmp_path))
    (tmp_path / "models/mine").mkdir(parents=True)
    (bench.home / "models/mine").mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "models/mine" / name).write_text("of this machine")
        (bench.home / "models/mine" / name).write_text("of the node")
    recipe = tmp_path / "mine.toml"
    recipe.write_text(RECIPE.replace("tiny", "mine"))
    said = bench.homelab("setup", "--requirements", str(bench.requirements), "--recipe", str(recipe), code=1)
    assert "config.json and model.safetensors of another model are there" in said and "fix: " in said
    assert (bench.home / "models/mine/model.safetensors").read_text() == "of the node"
    shutil.rmtree(bench.home / "models/mine")


def test_unsloth_has_an_environment_of_its_own(bench: Bench) -> None:
    """Beside the worker's, with its own lock: both stay whole. It is imported as the worker does, on a machine without a card."""
    assert "done: install" in bench.homelab("setup", "--unsloth")
    assert "Nothing was changed." in bench.homelab("setup", "--unsloth")
    ask = "import unsloth, torch, transformers; print(torch.__version__, transformers.__version__)"
    versions = bench.on_node(f'HF_HOME=$HOME/.homelab/unsloth/hub .homelab/unsloth/bin/python -c "{ask}"').split()
    assert versions[-2:] == [f"{UNSLOTH_VERSIONS['torch']}+cpu", UNSLOTH_VERSIONS["transformers"]]
    assert "Nothing to do." in bench.homelab("setup", "--check", "--requirements", str(bench.requirements))
    assert "leave --unsloth or --requirements out" in bench.homelab("setup", "--unsloth", "--requirements", str(bench.requirements), code=2)


def test_a_node_that_reaches_the_index_fetches_the_wheels_itself(bench: Bench, tmp_path: Path) -> None:
    """An index on this machine's address in the nodes' network; then one that only this machine reaches."""
    if bench.lab.state.backend != "namespaces":
        pytest.skip("the node has no network of its own")
    index, requirements = tmp_path / "index", tmp_path / "requirements.txt"
    requirements.write_text("idna\n")
    wheel = next(bench.wheels.glob("idna-*.whl"))
    (index / "simple/idna").mkdir(parents=True)
    shutil.copy(wheel, index / wheel.name)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    (index / "simple/idna/index.html").write_text(f'<a href="../../{wheel.name}#sha256={digest}">{wheel.name}</a>')
    own_address = bench.on_node("echo $SSH_CONNECTION").split()[0]
    for host, is_reached in ((own_address, True), ("127.0.0.1", False)):
        bench.homelab("teardown", "--yes")
        with serving(index, host) as server:
            cache = str(tmp_path / f"cache-{host}")
            pip: dict[str, Any] = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": f"{server.address}/simple", "PIP_TRUSTED_HOST": host}
            shutil.copytree(bench.wheels.parent, Path(cache) / "homelab/setup", ignore=shutil.ignore_patterns("locks", "wheels"))
            said = bench.homelab("setup", "--requirements", str(requirements), XDG_CACHE_HOME=cache, **pip)
        assert bench.on_node("ls ~/.homelab/env/lib/python*/site-packages/idna/__init__.py")
        fetched_here = [path.name for path in (Path(cache) / "homelab/setup/wheels").glob("*.whl")]
        assert (fetched_here, "cannot fetch the packages itself" in said) == (([], False) if is_reached else ([wheel.name], True)), said
        assert any(part.startswith("bytes=0-") for command, path, part in server.asked if path.endswith(wheel.name)) or not is_reached


def test_teardown_leaves_the_home_as_it_was(bench: Bench) -> None:
    mine = bench.home / "notes.txt"
    mine.write_text("mine")
    assert "there is no terminal to ask" in bench.homelab("teardown", code=2)
    assert "Removed from 1 node." in bench.homelab("teardown", "--yes")
    left = {name for name in bench.files() if not name.startswith(".ssh")}
    assert left == {"notes.txt"}
    assert "Nothing to remove." in bench.homelab("teardown", "--yes")


def test_an_environment_of_somebody_else_stays(bench: Bench) -> None:
    foreign = bench.home / ".homelab/env/pyvenv.cfg"
    foreign.parent.mkdir(parents=True)
    foreign.write_text("home = /usr/bin\n")
    said = bench.homelab("setup", "--requirements", str(bench.requirements), code=1)
    assert "its Python does not start" in said and "fix: " in said and foreign.exists()
    shutil.rmtree(foreign.parent)
    bench.on_node("python3 -m venv --without-pip ~/.homelab/env")
    before = foreign.stat().st_mtime_ns
    for options in ([], ["--check"]):
        said = bench.homelab("setup", "--requirements", str(bench.requirements), *options)
        assert "you made this environment" in said and ("Nothing to do." if options else "Next: homelab preflight") in said
    assert foreign.stat().st_mtime_ns == before and not (bench.home / ".homelab/setup.json").exists()
    assert "Nothing to remove." in bench.homelab("teardown", "--yes") and foreign.exists()
