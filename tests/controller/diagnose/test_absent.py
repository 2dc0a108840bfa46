"""A node that cannot be asked: off, renamed, with another host key, or this machine's own network; and what may be said of each."""

from __future__ import annotations

from typing import Any

import paramiko
import pytest

from homelab.controller.base.hint import Options
from homelab.controller.config.cluster import Cluster, Node
from homelab.controller.diagnose.cause import Diagnosis, diagnose
from homelab.controller.remote import login_errors
from tests.controller.diagnose.test_cause import CLOSED, found, node, traceback

pytestmark = pytest.mark.timeout(30)
OFF = "no answer within 5 s: it is off, asleep, unplugged, or its firewall drops port 22"
UNNAMED = "it is not in cluster.toml"
OPTIONS: Options = lambda name: " -c x"  # noqa: E731
NO_WAY = "this machine has no way to 192.168.1.7: Network is down"


def changed_key() -> str:
    key = paramiko.ECDSAKey.generate()
    of = Node(name="mini", host="192.0.2.7")
    login = login_errors.Login(Cluster(nodes=(of,)), of, of.host, 22, None, (), "node mini")
    return login_errors.changed_key(login, key, key).message


def of(why: str, **more: Any) -> Diagnosis:
    return found(node("tower", 0, traceback(CLOSED)), unreachable={"mini": why}, **more)


def test_what_the_connection_said_stands_in_the_title_and_what_mends_it_in_the_fix() -> None:
    diagnosis = of(OFF, ways={"mini": "wake it, then: ssh -v mini true"})
    assert (diagnosis.cause, diagnosis.title) == ("unreachable", f"mini cannot be reached: {OFF}")
    assert diagnosis.hint == "wake it, then: ssh -v mini true; homelab recover r continues with the nodes that answer"
    assert [victim.node for victim in diagnosis.victims] == ["tower"] and diagnosis.names_a_reason
    refused = of("nothing answers on port 22: Connection refused")
    assert "power" not in refused.title and refused.hint.startswith("wake it or check its cable, then: homelab preflight; ")


def test_a_renamed_node_did_not_lose_its_power() -> None:
    diagnosis = of(UNNAMED)
    assert (diagnosis.cause, diagnosis.title) == ("not-in-cluster", "mini is no longer in cluster.toml, so it cannot be asked")
    assert "its old name" in diagnosis.hint and "continue without it: homelab recover r" in diagnosis.hint and "cable" not in diagnosis.hint
    assert diagnosis.victims == () and "rank 0 on tower: RuntimeError" in diagnosis.because[-1], "that it cannot be asked made nobody fail"
    assert not diagnosis.names_a_reason, "later its own words may be read"
    assert (
        of(UNNAMED, ways={"mini": "write its new name, then: homelab recover r"})
        .with_options(OPTIONS)
        .hint.endswith("homelab recover -c x r")
    )


def test_a_changed_host_key_is_no_cable() -> None:
    diagnosis = of(changed_key(), ways={"mini": "if you know why: ssh-keygen -R mini && homelab trust mini"})
    assert diagnosis.cause == "host-key" and diagnosis.title.startswith("mini cannot be asked: the host key CHANGED")
    assert diagnosis.hint == "if you know why: ssh-keygen -R mini && homelab trust mini; or continue without it: homelab recover r"
    assert diagnosis.victims == () and not diagnosis.names_a_reason and diagnosis.topic == "host-key-changed"
    assert "homelab trust mini" in of(changed_key()).hint and "cable" not in of(changed_key()).hint


def test_where_every_node_is_behind_a_network_that_this_machine_has_not() -> None:
    diagnosis = found(unreachable={"tower": NO_WAY, "mini": NO_WAY}).with_options(OPTIONS)
    assert (diagnosis.cause, diagnosis.first_node, diagnosis.victims) == ("own-network", "", ())
    assert "tower" not in diagnosis.title and diagnosis.because == (f"tower: {NO_WAY}; mini: {NO_WAY}",)
    assert "homelab status -c x r" in diagnosis.hint and "recover" not in diagnosis.hint
    assert of(NO_WAY).cause == "unreachable", "another node answers: it is not this machine's network alone"
    assert found(unreachable={"tower": NO_WAY, "mini": OFF}).cause == "unreachable"


def test_where_no_node_answers_it_may_be_this_machine() -> None:
    assert "no node of the run answers: it may be this machine's own network" in found(unreachable={"tower": OFF, "mini": OFF}).because
    assert "this machine" not in " ".join(of(OFF).because) and "this machine" not in " ".join(found(unreachable={"mini": OFF}).because)


def test_a_node_that_is_off_explains_more_than_one_that_is_only_renamed() -> None:
    both = found(node("tower", 0, traceback(CLOSED)), unreachable={"mini": UNNAMED, "old": OFF})
    assert (both.cause, both.first_node) == ("unreachable", "old")
    wordless = found(node("tower", 0, code=3), unreachable={"mini": UNNAMED})
    assert (wordless.cause, wordless.first_node) == ("exit-code", "tower"), "what is known before what cannot be asked"
    assert diagnose("r", {}, {}) is None
