"""What it takes to add a launcher: one class and its registration. Rendered and printed by the real command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from homelab.cli.main import run
from homelab.controller.base.errors import InputError
from homelab.controller.launchers import registry
from homelab.controller.launchers.base import Launcher, NodeCommand, environment_of, program_of
from homelab.controller.planning import plan as planning
from homelab.controller.planning.types import LaunchDocument, LaunchSpec, Placement
from tests import builders


class Batch(Launcher):
    """A toy of a batch system, which knows the head and the node's rank when the job starts."""

    name = "toy-batch"
    title = "a batch system"

    def render(self, spec: LaunchSpec, placement: Placement) -> tuple[NodeCommand, ...]:
        return tuple(
            NodeCommand(
                node=node.name,
                argv=("toy-run", f"--tasks={count}", "--head=$TOY_HEAD", *program_of(spec, node)),
                environment=environment_of(spec, node),
            )
            for node, count in zip(placement.nodes, spec.processes_per_node, strict=True)
        )


class BatchFile(Batch):
    """The same system, which takes one file for all nodes."""

    name = "toy-file"
    title = "a file for a batch system"

    def render_plan(self, spec: LaunchSpec, placement: Placement) -> LaunchDocument:
        lines = [f"#TOY --nodes={len(placement.nodes)}", *(f"export {key}={value}" for key, value in sorted(spec.environment.items()))]
        return LaunchDocument(
            file_name="job.toy", text="\n".join([*lines, " ".join(("toy-run", *program_of(spec, placement.nodes[0])))]) + "\n"
        )


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Batch:
    monkeypatch.setattr(registry, "LAUNCHERS", dict(registry.LAUNCHERS))
    launcher = Batch()
    registry.register(launcher)
    registry.register(BatchFile())
    return launcher


def planned(folder: Path, *options: str, recipe: str = '[script]\npath = "train.py"\nargs = ["--x", "1"]\n') -> int:
    (folder / "cluster.toml").write_text('[[nodes]]\nname = "a"\nhost = "192.168.1.1"\n[[nodes]]\nname = "b"\nhost = "192.168.1.2"\n')
    (folder / "toy.toml").write_text(recipe)
    return run(["plan", str(folder / "toy.toml"), "--offline", "--cluster", str(folder / "cluster.toml"), *options])


def test_plan_prints_its_commands(toy: Batch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert planned(tmp_path, "--commands", "--launcher", toy.name) == 0
    shown = capsys.readouterr().out
    assert shown.count("toy-run --tasks=1 '--head=$TOY_HEAD' train.py --x 1") == 2
    assert "torch.distributed.run" not in shown


LONG = "x" * 300


def test_one_document_for_all_nodes_is_printed_in_place_of_the_commands(
    toy: Batch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert planned(tmp_path, "--launcher", "toy-file") == 0
    shown = capsys.readouterr().out
    assert "job.toy, which starts it on all nodes" in shown and "#TOY --nodes=2\n" in shown
    assert shown.count("toy-run train.py --x 1") == 1 and "--tasks" not in shown and "Commands on each node" not in shown
    assert "Next: homelab launch" not in shown, "that would start it in another way"


def test_a_document_is_in_json_and_commands_alone_have_none(toy: Batch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert planned(tmp_path, "--launcher", "toy-file", "--json") == 0
    document = json.loads(capsys.readouterr().out)["document"]
    assert document["file_name"] == "job.toy" and document["text"].endswith("toy-run train.py --x 1\n")
    assert planned(tmp_path, "--launcher", toy.name, "--json") == 0
    assert "document" not in json.loads(capsys.readouterr().out)


def test_a_long_line_of_a_document_is_not_broken(toy: Batch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert planned(tmp_path, "--launcher", "toy-file", recipe=f'[script]\npath = "train.py"\nargs = ["--x", "{LONG}"]\n') == 0
    assert f"toy-run train.py --x {LONG}\n" in capsys.readouterr().out


def test_without_the_option_it_is_torchrun_over_ssh(toy: Batch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert planned(tmp_path, "--commands") == 0
    default = capsys.readouterr().out
    assert planned(tmp_path, "--commands", "--launcher", "torchrun-ssh") == 0
    assert capsys.readouterr().out == default
    assert default.count("torch.distributed.run") == 2


def test_a_name_that_nobody_has_registered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert planned(tmp_path, "--launcher", "torchrun-shh") == 2
    shown = capsys.readouterr().err
    assert 'no launcher is named "torchrun-shh". Did you mean "torchrun-ssh"?' in shown
    assert "--launcher" in shown
    with pytest.raises(InputError):
        registry.launcher_named("nothing")


def test_the_spec_names_no_address_no_port_and_no_rank_of_a_node() -> None:
    cluster = builders.cluster()
    plan = planning.make(builders.plan_inputs(cluster, builders.recipe(), {}, port=29777, files=("data/abc/train.jsonl",)))
    assert plan.launch is not None
    text = plan.launch.model_dump_json()
    for node in cluster.nodes:
        assert node.host not in text
        assert f'"{node.name}"' not in text
    assert "29777" not in text
    assert plan.launch.inputs == ("code/abc", "data/abc/train.jsonl")


def test_what_a_launcher_has_rendered_is_in_plan_json_and_the_spec_is_not() -> None:
    plan = builders.make_plan(builders.cluster(), builders.recipe(), {})
    written = plan.model_dump(mode="json")
    assert "launch" not in written
    assert all(node["command"] and node["environment"]["HOMELAB_NODE"] == node["name"] for node in written["nodes"])
