"""`homelab export`: the folder and the scheduler's file, from the real command line. Nothing is started here."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from homelab.cli.main import run
from homelab.controller.features.export.schedulers import SCHEDULERS

RECIPE = """[model]
name = "some/model"
[data]
train = "chats.jsonl"
[method]
kind = "lora"
[train]
global_batch = 8
steps = 2
learning_rate = 1e-3
"""
IMAGE = ("--image", "registry.example/homelab:1")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    cards = ', gpus = [{ model = "RTX 3060", vram_gb = 12 }]'
    nodes = "".join(
        f'  {{ name = "{name}", host = "192.168.1.{number}"{cards} }},\n' for number, name in enumerate(("tower", "laptop", "attic"), 10)
    )
    (tmp_path / "cluster.toml").write_text(f"nodes = [\n{nodes}]\n")
    (tmp_path / "smol.toml").write_text(RECIPE)
    (tmp_path / "chats.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}) + "\n"
    )
    return tmp_path


def export(folder: Path, to: str, *options: str, code: int = 0, recipe: str = "smol.toml") -> Path:
    job = folder / "job"
    assert (
        run(["export", str(folder / recipe), "--to", to, "--output", str(job), "--cluster", str(folder / "cluster.toml"), *options]) == code
    )
    return job


def document(folder: Path, to: str, *options: str) -> Any:
    job = export(folder, to, *(IMAGE if SCHEDULERS[to].needs_image else ()), *options)
    (file,) = job.glob("*.y*ml")
    return yaml.safe_load(file.read_text())


def test_the_folder_has_all_that_the_ranks_need_and_no_name_of_a_node(folder: Path) -> None:
    job = export(folder, "slurm")
    assert {path.name for path in job.iterdir()} == {"job.sbatch", "requirements.txt", "smol.toml", "code", "data", "runs"}
    (run_dir,) = (job / "runs").iterdir()
    plan, described = (json.loads((run_dir / name).read_text()) for name in ("attempts/0/plan.json", "run.json"))
    assert plan["world_size"] == 3 and plan["balance"] == "measured" and plan["shared_folder"] is True
    assert [rank["share"] for rank in plan["ranks"]] == [3, 3, 2] and [rank["node"] for rank in plan["ranks"]] == [
        "node-0",
        "node-1",
        "node-2",
    ]
    assert len({(rank["micro_batch"], rank["token_cap"]) for rank in plan["ranks"]}) == 1, "any rank may get the smallest card"
    assert Path(described["data"]["train"]["path"]).read_bytes() == (folder / "chats.jsonl").read_bytes()
    everything = "".join(path.read_text() for path in [job / "job.sbatch", *run_dir.rglob("*.json")])
    assert not [name for name in ("tower", "laptop", "attic", "192.168.1.", "198.18.") if name in everything]
    assert not [line for line in (job / "job.sbatch").read_text().splitlines() if "NCCL_" in line], (
        "InfiniBand is off at home, and not there"
    )
    assert (job / "requirements.txt").read_text().startswith("torch>=")


def test_the_fingerprint_is_that_of_a_launch(folder: Path) -> None:
    from homelab.controller.config.load import load_recipe
    from homelab.shared.protocol.digest import file_sha256

    (described,) = (json.loads(path.read_text()) for path in (export(folder, "slurm") / "runs").glob("*/run.json"))
    assert described["recipe_hash"] == load_recipe(folder / "smol.toml").law_hash((f"train:{file_sha256(folder / 'chats.jsonl')}",))
    assert described["draws"] == 2, "each layer draws its own numbers"


def test_the_script_is_one_that_bash_reads_and_slurm_gets_its_size(folder: Path) -> None:
    job = export(folder, "slurm", "--hours", "5", "--partition", "gpu", "--python", "/opt/my.env/bin/python")
    script = (job / "job.sbatch").read_text()
    subprocess.run(["bash", "-n", job / "job.sbatch"], check=True)
    options = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]
    assert {"--nodes=3", "--ntasks-per-node=1", "--gpus-per-node=1", "--requeue", "--time=5:00:00", "--partition=gpu"} <= set(options)
    assert "/opt/my.env/bin/python" in script and "homelab-smol" in options[0]


def test_slurm_is_asked_for_the_cpus_and_the_memory_of_all_ranks_of_a_machine(folder: Path) -> None:
    def asked(*options: str) -> set[str]:
        script = (export(folder, "slurm", *options) / "job.sbatch").read_text()
        shutil.rmtree(folder / "job")
        return {line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")}

    assert {"--cpus-per-task=4", "--mem=20G", "--gpus-per-node=1"} <= asked()
    assert {"--cpus-per-task=8", "--mem=64G", "--gpus-per-node=2"} <= asked("--machines", "2", "--gpus", "2", "--vram", "23.5")
    on_cpus = asked("--machines", "2", "--gpus", "0")
    assert {"--exclusive", "--mem=0"} <= on_cpus and not any(option.startswith(("--gpus", "--cpus")) for option in on_cpus)


def test_a_place_with_blanks_and_quotes_stays_one_word(folder: Path) -> None:
    place = "/shared/my job's $(touch pwned)"
    script = (export(folder, "slurm", "--at", place) / "job.sbatch").read_text()
    assigned = next(line for line in script.splitlines() if line.startswith("export HOMELAB_JOB="))
    said = subprocess.run(
        ["bash", "-c", f'{assigned}; printf %s "$HOMELAB_JOB"'], capture_output=True, text=True, check=True, cwd=folder
    ).stdout
    assert said == place and not (folder / "pwned").exists()
    assert shlex.split(assigned)[1] == f"HOMELAB_JOB={place}"


@pytest.mark.parametrize("to", ["trainjob", "pytorchjob", "dstack"])
def test_yaml_says_the_machines_the_folder_and_no_secret(folder: Path, monkeypatch: pytest.MonkeyPatch, to: str) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_planted")
    content = document(folder, to, "--volume", "shelf")
    text = json.dumps(content)
    assert "hf_planted" not in text and "HF_TOKEN" in text and "/homelab" in text and "shelf" in text
    assert {"trainjob": '"numNodes": 3', "pytorchjob": '"replicas": 2', "dstack": '"nodes": 3'}[to] in text


def test_a_task_of_dstack_has_shared_memory_for_its_ranks(folder: Path) -> None:
    for cards in ("0", "4"):
        assert document(folder, "dstack", "--machines", "2", "--gpus", cards)["resources"]["shm_size"] == "8GB"
        shutil.rmtree(folder / "job")


@pytest.mark.parametrize("to", ["trainjob", "pytorchjob"])
def test_a_pod_has_as_much_shared_memory_as_its_machine(folder: Path, to: str) -> None:
    content = document(folder, to, "--machines", "2", "--gpus", "4")["spec"]
    if to == "trainjob":
        (job,) = content["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        pods = [job["template"]["spec"]["template"]["spec"]]
    else:
        pods = [replica["template"]["spec"] for replica in content["pytorchReplicaSpecs"].values()]
    for pod in pods:
        (mount,) = (entry for entry in pod["containers"][0]["volumeMounts"] if entry["mountPath"] == "/dev/shm")
        assert {"name": mount["name"], "emptyDir": {"medium": "Memory"}} in pod["volumes"]


def test_words_that_yaml_would_misread_stay_words(folder: Path) -> None:
    (folder / "1e3.toml").write_text(RECIPE + '[environment]\nA = "no"\nB = "012"\nC = "1e3"\nD = "null"\n')
    export(folder, "pytorchjob", *IMAGE, recipe="1e3.toml")
    content = yaml.safe_load((folder / "job/pytorchjob.yaml").read_text())
    container = content["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]
    values = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert [values[name] for name in "ABCD"] == ["no", "012", "1e3", "null"] and re.fullmatch(
        r"homelab-1e3-\d{12}", content["metadata"]["name"]
    )
    assert all(isinstance(value, str) for name, value in values.items() if name != "HF_TOKEN")


def test_a_second_export_of_one_recipe_is_another_job(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / f"{'long-' * 20}.toml").write_text(RECIPE)
    for recipe in ("smol.toml", f"{'long-' * 20}.toml"):
        names = set()
        for moment in (1e9, 1e9 + 60):
            monkeypatch.setattr(time, "time", lambda moment=moment: moment)
            export(folder, "pytorchjob", *IMAGE, recipe=recipe)
            names.add(yaml.safe_load((folder / "job/pytorchjob.yaml").read_text())["metadata"]["name"])
            shutil.rmtree(folder / "job")
        assert len(names) == 2 and all(re.fullmatch(r"homelab-[a-z][a-z0-9-]*[0-9]", name) and len(name) <= 40 for name in names), names


def test_unequal_nodes_become_machines_of_one_card_and_it_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cards = ["[{ model = 'RTX 3090', vram_gb = 24 }, { model = 'RTX 3090', vram_gb = 24 }]", "[{ model = 'RTX 3060', vram_gb = 12 }]"]
    nodes = "".join(f'[[nodes]]\nname = "n{number}"\nhost = "192.168.1.{number}"\ngpus = {text}\n' for number, text in enumerate(cards, 10))
    (folder / "cluster.toml").write_text(nodes)
    content = document(folder, "dstack")
    assert content["nodes"] == 3 and content["resources"]["gpu"] == {"count": 1, "memory": "12GB.."}
    assert "ach card counts as one machine" in capsys.readouterr().out


def test_machines_can_be_asked_for_by_number(folder: Path) -> None:
    content = document(folder, "trainjob", "--machines", "2", "--gpus", "4", "--vram", "40")
    assert content["spec"]["trainer"]["numNodes"] == 2 and content["spec"]["trainer"]["numProcPerNode"] == 4


@pytest.mark.parametrize(("options", "precision", "other"), [((), "bf16", "fp16"), (("--machines", "3"), "fp16", "bf16")])
def test_a_precision_that_the_recipe_leaves_open_is_said(
    folder: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], precision: str, other: str
) -> None:
    """Of cards that nobody names it is fp16, which every card has."""
    export(folder, "slurm", *options)
    said = " ".join(capsys.readouterr().out.split())
    assert f"this job trains in {precision}, which" in said and f'[train] precision = "{other}"' in said


REFUSED = {
    "no such scheduler": ("lsf", (), RECIPE, 'no scheduler is named "lsf"'),
    "no image": ("pytorchjob", (), RECIPE, "needs the image of its containers"),
    "no image for a TrainJob": ("trainjob", (), RECIPE, "needs the image of its containers"),
    "an image for Slurm": ("slurm", IMAGE, RECIPE, "starts no container"),
    "a volume with a blank": ("dstack", ("--volume", "a b"), RECIPE, "'a b' would be read there as something else"),
    "an option in place of a partition": ("slurm", ("--partition", "--wrap=x"), RECIPE, "would be read there as something else"),
    "a Python with a command": ("slurm", ("--python", "python;reboot"), RECIPE, "would be read there as something else"),
    "a Python in a home folder": ("slurm", ("--python=~/env/bin/python",), RECIPE, "on a machine of the job: echo ~/env/bin/python"),
    "a place that is not absolute": ("dstack", ("--at", "there"), RECIPE, "is not an absolute path"),
    "a line break in the place": ("slurm", ("--at", "/a\n#SBATCH --x"), RECIPE, "is not an absolute path"),
    "a program of one's own": ("slurm", (), '[script]\npath = "train.py"\n', "starts your own program"),
    "data that lie on the nodes": ("slurm", (), RECIPE.replace('"chats.jsonl"', '"/data/chats.jsonl"'), "is on your nodes"),
    "data that are not there": ("slurm", (), RECIPE.replace("chats", "chatz"), "this file does not exist"),
    "more ranks than rows": ("slurm", ("--machines", "9"), RECIPE, "9"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_travel_is_said_before_anything_is_written(folder: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    to, options, recipe, words = REFUSED[name]
    (folder / "smol.toml").write_text(recipe)
    before = sorted(folder.rglob("*"))
    job = export(folder, to, *options, code=2)
    said = capsys.readouterr().err
    assert words in said and "where:" in said and "fix:" in said, said
    assert not job.exists() and sorted(folder.rglob("*")) == before


def test_a_folder_with_something_in_it_is_left_as_it_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "job").mkdir()
    (folder / "job/mine").write_text("x")
    export(folder, "slurm", code=2)
    assert "there is something already" in capsys.readouterr().err and [path.name for path in (folder / "job").iterdir()] == ["mine"]


def test_a_disk_that_refuses_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    before = sorted(folder.iterdir())
    job = folder / "job"
    assert run(["export", str(folder / "smol.toml"), "--to", "slurm", "--output", str(job), "--cluster", str(folder / "cluster.toml")]) != 0
    said = capsys.readouterr().err
    assert "No space left" in said and "Traceback" not in said and sorted(folder.iterdir()) == before


_CHECK = {  # these drop what they do not know without a word, so only equality proves; dstack's parser refuses it
    "trainjob": ("kubeflow-trainer-api==2.3.0", "from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob as Job\nassert Job.from_dict(content).to_dict() == content"),
    "pytorchjob": (
        "kubeflow-training==1.9.4",
        "from types import SimpleNamespace\nfrom kubernetes.client import ApiClient\nfrom kubeflow.training import models\nimport kubernetes.client.models as known\n"
        "for name in dir(models):\n    setattr(known, name, getattr(models, name))\n"
        "client = ApiClient()\njob = client.deserialize(SimpleNamespace(data=json.dumps(content)), 'KubeflowOrgV1PyTorchJob')\n"
        "assert client.sanitize_for_serialization(job) == content",
    ),
    "dstack": (
        "dstack==0.22.5",
        "from dstack._internal.core.models.configurations import parse_run_configuration\nparse_run_configuration(content)",
    ),
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("to", _CHECK)
def test_the_scheduler_s_own_schema_takes_it(folder: Path, tmp_path_factory: pytest.TempPathFactory, to: str) -> None:
    """In an environment of their own: these packages want other versions of ours."""
    package, check = _CHECK[to]
    environment = tmp_path_factory.mktemp("schema") / "env"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    python = environment / "bin/python"
    installed = subprocess.run([python, "-m", "pip", "install", "-q", package, "pyyaml"], capture_output=True, text=True)
    assert installed.returncode == 0, installed.stderr
    content = document(folder, to, "--hours", "3")
    program = f"import json, sys\ncontent = json.load(sys.stdin)\n{check}\nprint('taken')\n"

    def judged(value: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run([python, "-c", program], input=json.dumps(value), capture_output=True, text=True)

    done = judged(content)
    assert done.stdout == "taken\n", done.stderr
    assert judged(_misspelt(content, to)).returncode != 0, "a check that takes anything proves nothing"


def _misspelt(content: Any, to: str) -> Any:
    wrong = json.loads(json.dumps(content))
    (wrong if to == "dstack" else wrong["spec"])["nodez"] = 3
    return wrong
