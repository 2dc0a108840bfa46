"""`homelab chat` where no node has room for the model: its stages answer, what they say is what the whole model says, and nothing of them is left."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from homelab.lab import Lab, procfs
from scripts.practice.desk import Desk, Run, wait_until, wait_until_none_left
from scripts.practice.misconfigurations.resources import free_memory
from tests.e2e.conftest import recipe
from tests.worker import harness

pytestmark = [pytest.mark.slow, pytest.mark.namespaces, pytest.mark.thorough, pytest.mark.timeout(300)]
STEPS = 6
LAYERS = 24
FREE_KIB = 40 * 1024  # the model needs 60 MB, and a third of it 25
QUESTION = ("--prompt", "red or green?", "--max-new-tokens", "24")


@pytest.fixture(scope="module")
def run(desk: Desk, base: Path) -> Run:
    """A model in three stages, trained to its end."""
    model = harness.tiny_llama(base / "deep", hidden=256, intermediate=512, layers=LAYERS)
    text = recipe(model, length=f"steps = {STEPS}").replace("shares = { node1 = 6, node2 = 4, node3 = 2 }", 'strategy = "pipeline"')
    desk.write("deep.toml", text)
    run = desk.launch("deep.toml")
    run.wait_for_end(1, nodes=3)
    assert desk.json("status", run.name)["state"] == "done", run.logs(1)
    return run


@pytest.fixture
def little_memory(lab: Lab) -> Iterator[None]:
    """No node has room for the whole model, by what the kernel says is free."""
    with contextlib.ExitStack() as stack:
        for node in lab.nodes:
            stack.enter_context(free_memory(lab, node.name, FREE_KIB))
        yield


@pytest.fixture(scope="module")
def whole(desk: Desk, run: Run) -> dict[str, str]:
    """What the whole model answers on the head: trained, and base."""
    answers = {name: desk.json("chat", run.name, *QUESTION, *options) for name, options in (("trained", ()), ("base", ("--base",)))}
    assert all(answer["node"] == "node1" and "notes" not in answer for answer in answers.values())
    return {name: answer["answer"] for name, answer in answers.items()}


def stages(lab: Lab, node: str) -> list[int]:
    """The ranks of a node that have begun."""
    return [
        pid for pid in lab.processes_of(node)
        if "homelab.worker.tools.stage_chat" in (words := procfs.command_line(pid)) and "torch.distributed.run" not in words
    ]  # fmt: skip


def begun(desk: Desk, run: Run) -> subprocess.Popen[str]:
    """A chat whose stages have begun on all nodes."""
    chat = desk.spawn("chat", run.name, *QUESTION)
    wait_until(lambda: all(stages(desk.lab, node.name) for node in desk.lab.nodes), 90, lambda: "no stage began")
    return chat


def test_the_stages_answer_what_the_whole_model_answers(desk: Desk, run: Run, whole: dict[str, str], little_memory: None) -> None:
    trained, base = desk.json("chat", run.name, *QUESTION), desk.json("chat", run.name, *QUESTION, "--base")
    assert (trained["answer"], base["answer"]) == (whole["trained"], whole["base"])
    assert whole["trained"] != whole["base"]
    note = trained["notes"][0]
    assert note.startswith("answered across 3 stages, because the model needs about 0.06 GB to answer"), note
    assert all(f"on {node.name}" in note for node in desk.lab.nodes)
    assert "note: answered across 3 stages" in desk.homelab("chat", run.name, *QUESTION).stderr
    # Of chats: a node that lost its power in an earlier test keeps what that has left, for an hour.
    assert not [folder for node in desk.lab.nodes for folder in (Path(node.workdir) / "collective").glob("chat-*")]


def test_a_conversation_says_what_can_be_asked(desk: Desk, run: Run, little_memory: None) -> None:
    refused = desk.homelab("chat", run.name, code=1)
    assert (
        "a conversation does not work across the stages of a pipeline" in refused.stderr
        and f"chat --prompt Hello {run.name}" in refused.stderr
    )


def test_a_stage_that_is_killed_ends_it_everywhere(desk: Desk, run: Run, little_memory: None) -> None:
    chat = begun(desk, run)
    procfs.send(stages(desk.lab, "node2"), signal.SIGKILL)
    said, _ = chat.communicate(timeout=60)
    assert (
        chat.returncode == 1 and "a stage of the model failed: a rank was ended by SIGKILL" in said and "where: node node2, layers " in said
    ), said
    wait_until_none_left(desk.lab)


def test_ctrl_c_leaves_nothing(desk: Desk, run: Run, little_memory: None) -> None:
    chat = begun(desk, run)
    chat.send_signal(signal.SIGINT)
    said, _ = chat.communicate(timeout=60)
    assert chat.returncode == 130, said
    wait_until_none_left(desk.lab)


def test_a_node_that_loses_its_power_is_named(desk: Desk, run: Run, little_memory: None) -> None:
    chat = begun(desk, run)
    desk.lab.fault("node3", "power-cut")
    said, _ = chat.communicate(timeout=100)
    assert chat.returncode == 3 and "where: node node3" in said and "it has layers " in said, said
    wait_until_none_left(desk.lab)
