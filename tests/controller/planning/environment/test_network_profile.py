"""The network profiles: the table, which entry fits to a wire, what of it reaches the ranks, and what a person's own variables do to it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest

from homelab.controller.checks.evidence import Evidence
from homelab.controller.config.cluster import NetworkProfileName, NetworkSettings
from homelab.controller.config.environment import EQUAL_ON_ALL_NODES, refusal
from homelab.controller.planning.environment import network_profile
from homelab.controller.planning.types import Plan
from tests.controller.checks import healthy
from tests.controller.planning.machines.test_cards import two_cards
from tests.controller.planning.test_plan import make, why

# Of NCCL's user guide (docs/userguide/source/env.rst, 2.29): what concerns sockets, buffers and channels.
OF_NCCL = {
    "NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD", "NCCL_BUFFSIZE", "NCCL_MIN_CTAS", "NCCL_MAX_CTAS", "NCCL_ALGO", "NCCL_PROTO", "NCCL_CROSS_NIC",
    "NCCL_SOCKET_RETRY_CNT", "NCCL_SOCKET_RETRY_SLEEP_MSEC", "NCCL_NTHREADS",
}  # fmt: skip
LIMITS = {"NCCL_MAX_CTAS": "2", "NCCL_BUFFSIZE": "1048576"}
GIGABIT = 117.6e6


def rates(bytes_per_s: float) -> dict[tuple[str, str], float]:
    """All pairs, the first one slower than the others."""
    pairs = [(source, target) for source in healthy.NAMES for target in healthy.NAMES if source != target]
    return {pair: bytes_per_s * (1.0 if number == 0 else 1.2) for number, pair in enumerate(pairs)}


def with_profile(seen: Evidence, profile: str) -> Evidence:
    return replace(seen, cluster=seen.cluster.model_copy(update={"wire": NetworkSettings.model_validate({"profile": profile})}))


def interface(seen: Evidence, node: str, **changes: Any) -> Evidence:
    own = seen.facts[node].network.interfaces
    return healthy.with_facts(seen, node, network={"interfaces": [own[0], own[1].model_copy(update=changes)]})


def of_wire(made: Plan) -> dict[str, str]:
    """The variables of the profile that the first node has; all nodes have the same."""
    found = [{name: value for name, value in node.environment.items() if name in OF_NCCL} for node in made.nodes]
    assert all(one == found[0] for one in found)
    return found[0]


def test_the_table_is_whole_and_every_variable_has_a_reason_and_a_source() -> None:
    assert set(network_profile.PROFILES) == set(get_args(NetworkProfileName))
    fixed = make(with_profile(healthy.gpu(), "10gbe")).nodes[0].environment
    for profile in network_profile.PROFILES.values():
        assert profile.because
        for variable in profile.variables:
            assert variable.name in OF_NCCL and variable.name not in fixed, "homelab's own variables belong to no profile"
            assert refusal(variable.name) is None, "a person can set it otherwise"
            assert variable.because and "NCCL guide" in variable.source
            assert int(variable.value) > 0
    buffers = next(one for one in network_profile.PROFILES["1gbe"].variables if one.name == "NCCL_BUFFSIZE")
    assert int(buffers.value).bit_count() == 1, "NCCL's guide recommends powers of 2"
    assert {"NCCL_MAX_CTAS", "NCCL_BUFFSIZE"} <= set(EQUAL_ON_ALL_NODES)


@pytest.mark.parametrize(
    ("gigabits", "profile"),
    [
        (0.1, "1gbe"),
        (0.94, "1gbe"),
        (1.0, "1gbe"),
        (2.35, "2.5gbe"),
        (2.5, "2.5gbe"),
        (5.0, "2.5gbe"),
        (8.0, "10gbe"),
        (10.0, "10gbe"),
        (25.0, "10gbe"),
    ],
)
def test_auto_takes_what_fits_to_the_slowest_measured_pair(gigabits: float, profile: str) -> None:
    made = make(healthy.gpu(), throughputs=rates(gigabits * GIGABIT))
    value, because = why(made, "network profile")
    assert value == profile and because.startswith(f"measured: {gigabits * GIGABIT / 1e6:.4g} MB/s between the slowest pair")
    assert of_wire(made) == ({} if profile == "10gbe" else LIMITS)
    for name, chosen in of_wire(made).items():
        assert why(made, name)[0] == chosen and "NCCL guide" in why(made, name)[1]


def test_auto_without_a_measurement() -> None:
    seen = healthy.gpu()
    assert why(make(seen), "network profile")[0] == "1gbe" and "1000 Mbit/s" in why(make(seen), "network profile")[1], "what the cables say"
    assert why(make(interface(seen, "laptop", speed_mbit=None)), "network profile")[0] == "none"
    offline = make(seen, offline=True)
    assert why(offline, "network profile") == (
        "none",
        "the network between the nodes was not measured, and not every interface reports its speed",
    )
    assert of_wire(offline) == {}


def test_auto_sees_what_the_interface_is() -> None:
    wifi = make(interface(healthy.gpu(), "laptop", kind="wifi", speed_mbit=None), throughputs=rates(20 * GIGABIT))
    assert why(wifi, "network profile")[0] == "wifi" and why(wifi, "network profile")[1].startswith("laptop is on Wi-Fi (eth1)")
    seen = healthy.gpu()
    for number, node in enumerate(healthy.NAMES):
        seen = interface(seen, node, name=f"thunderbolt{number}", speed_mbit=None)
    made = make(seen)
    assert why(made, "network profile")[0] == "thunderbolt" and of_wire(made) == {"NCCL_SOCKET_NTHREADS": "2"}


def test_what_cluster_toml_names_goes_before_the_measurement() -> None:
    made = make(with_profile(healthy.gpu(), "thunderbolt"), throughputs=rates(GIGABIT))
    assert why(made, "network profile")[0] == "thunderbolt" and "cluster.toml" in why(made, "network profile")[1]
    assert of_wire(made) == {"NCCL_SOCKET_NTHREADS": "2"}


def test_a_person_s_variable_wins_whatever_it_is_called() -> None:
    seen = healthy.gpu()
    made = make(seen, healthy.recipe(environment={"NCCL_BUFFSIZE": "8388608"}))
    assert of_wire(made) == {"NCCL_BUFFSIZE": "8388608", "NCCL_MAX_CTAS": "2"}
    made = make(seen, healthy.recipe(environment={"NCCL_MAX_NCHANNELS": "8"}))
    assert of_wire(made) == {"NCCL_BUFFSIZE": "1048576"}, "NCCL would take the tighter one of two limits"
    made = make(seen, healthy.recipe(environment={"NCCL_IB_DISABLE": "0"}), throughputs=rates(GIGABIT))
    assert of_wire(made) == {} and "NCCL_IB_DISABLE is set" in why(made, "network profile")[1], "that wire was not measured"


def test_where_no_profile_is() -> None:
    on_cpus = make(healthy.cpu(), throughputs=rates(GIGABIT))
    assert of_wire(on_cpus) == {} and not [choice for choice in on_cpus.choices if choice.subject == "network profile"]
    named = make(with_profile(healthy.cpu(), "wifi"))
    assert of_wire(named) == {} and "gloo has no variables" in why(named, "network profile")[1]
    alone = healthy.gpu(names=("tower",))
    assert not [choice for choice in make(with_profile(alone, "wifi")).choices if choice.subject == "network profile"], (
        "nothing goes over a wire"
    )


def test_cards_of_one_machine_are_not_slowed_down_between_themselves() -> None:
    seen = two_cards("NVIDIA GeForce RTX 4090", gpus=())
    assert len(seen.cluster.nodes) > 1
    made = make(with_profile(seen, "1gbe"))
    assert of_wire(made) == {"NCCL_BUFFSIZE": "1048576"}
