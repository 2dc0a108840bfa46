"""A short job is started as the launch is: by the launcher, with another program."""

from __future__ import annotations

import pytest

from homelab.controller.attempt import short_job
from homelab.controller.launchers import torchrun_ssh
from tests import builders
from tests.controller.checks import healthy


def test_a_job_has_the_command_and_the_environment_of_the_launch_but_for_program_name_port_and_logs() -> None:
    seen = healthy.gpu()
    plan = builders.make_plan(seen.cluster, healthy.recipe(), seen.facts).model_copy(update={"master_port": 29900})
    for node in plan.nodes:
        asked = short_job.request(plan, node.name, "collective-1", ["-m", "tool", "nccl"])
        end = node.command.index("--redirects=3") + 1
        own = {"--log-dir": "logs", "--rdzv-id": f"collective-1-{plan.attempt}", "--master-port": "29900"}
        options = [f"{name}={own[name]}" if (name := option.partition("=")[0]) in own else option for option in node.command[:end]]
        assert asked.command == (*options, "-m", "tool", "nccl") and set(own) <= {option.partition("=")[0] for option in options}
        assert asked.environment == {**node.environment, "HOMELAB_RUN": "collective-1"} != node.environment
        assert (asked.name, asked.ranks, asked.head_port) == ("collective-1", node.rank_count, 29900)


def test_a_new_option_of_the_launcher_is_one_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it stands in the command."""
    before = torchrun_ssh._torchrun
    monkeypatch.setattr(torchrun_ssh, "_torchrun", lambda *given: (*before(*given)[:-2], "--new", *before(*given)[-2:]))
    seen = healthy.cpu()
    plan = builders.make_plan(seen.cluster, healthy.recipe(), seen.facts)
    assert short_job.request(plan, plan.head, "card-1", ["-m", "tool"]).command[-3:] == ("--new", "-m", "tool")
