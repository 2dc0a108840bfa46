"""What NCCL is told of the wire between the nodes: a table with one entry per kind of wire, and which entry fits. Pure.

Only what has a reason is set; everything else stays as NCCL chooses it. NCCL reads the speed of an interface by itself (/sys/class/net/NAME/speed,
and takes 10 Gbit/s where that says nothing: src/transport/net_socket.cc), and it begins with one socket and no helper thread for each connection.
gloo has no variables for the network, so nothing is set on CPUs. None of these values changes what is computed but the order of sums.

Sources: NCCL's user guide, environment variables (docs/userguide/source/env.rst); its source (src/init.cc, src/transport/net_socket.cc); issues of
github.com/NVIDIA/nccl, where its authors answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from homelab.controller.base.units import megabytes
from homelab.controller.config.cluster import Cluster, NetworkProfileName
from homelab.controller.config.recipe import Recipe
from homelab.controller.facts.network import Interface
from homelab.controller.facts.node import Facts
from homelab.controller.planning.inputs import Throughputs
from homelab.controller.planning.machines.lan_address import LanAddress
from homelab.controller.planning.machines.machines import Machines
from homelab.controller.planning.time import network_cost
from homelab.controller.planning.types import Choice


@dataclass(frozen=True)
class Variable:
    """One variable of all ranks. `one_card_each`: set only where no machine has several cards, which it would slow down between themselves."""

    name: str
    value: str
    because: str
    source: str
    one_card_each: bool = False


@dataclass(frozen=True)
class NetworkProfile:
    """What is set for one kind of wire. `because`: why it is no more than that."""

    variables: tuple[Variable, ...]
    because: str


_TWO_CHANNELS = Variable(
    "NCCL_MAX_CTAS", "2", "two channels fill this network; each further channel takes a block of the card from the training while it waits",
    "NCCL guide, NCCL_MAX_CTAS and NCCL_MAX_NCHANNELS; NVIDIA/nccl issues 438 and 689", one_card_each=True,
)  # fmt: skip
_SMALL_BUFFERS = Variable(
    "NCCL_BUFFSIZE", "1048576", "a quarter of the usual buffers of each channel and peer, which are in the card's memory; 128 KiB are sent at a time",
    "NCCL guide, NCCL_BUFFSIZE (4 MiB; for short memory); src/init.cc (1 MiB is the default on Arm, in eight steps)",
)  # fmt: skip
_HELPER_THREADS = Variable(
    "NCCL_SOCKET_NTHREADS", "2", "one thread would copy all data, up to 5 GB/s: that is more than one core can copy",
    "NCCL guide, NCCL_SOCKET_NTHREADS (default 1; NVIDIA names 4 for 100 Gbit/s)",
)  # fmt: skip

PROFILES: Mapping[NetworkProfileName, NetworkProfile] = {
    "wifi": NetworkProfile(
        (_TWO_CHANNELS, _SMALL_BUFFERS), "packets are lost on the air; no variable helps, but a cable does"
    ),
    "1gbe": NetworkProfile(
        (_TWO_CHANNELS, _SMALL_BUFFERS), "one socket fills 1 Gbit/s: no setting is faster, and these two leave more of the card to the training"
    ),
    "2.5gbe": NetworkProfile((_TWO_CHANNELS, _SMALL_BUFFERS), "one socket fills 2.5 Gbit/s, too (and 5)"),
    "10gbe": NetworkProfile(
        (), "NCCL's own settings are good: one socket fills 10 Gbit/s, and more threads gained nothing there (NVIDIA/nccl issue 398); NVIDIA names other values only for 100 Gbit/s"
    ),
    "thunderbolt": NetworkProfile((_HELPER_THREADS,), "10 to 20 Gbit/s by an interface that uses the processor"),
}  # fmt: skip
# Up to how many times 1 Gbit/s a measured wire is taken for which kind: 5 Gbit/s is as 2.5, and what is faster is as 10.
_FASTEST_GIGABITS: Sequence[tuple[float, NetworkProfileName]] = ((1.5, "1gbe"), (6.0, "2.5gbe"), (float("inf"), "10gbe"))
_OTHER_WIRE = ("NCCL_IB_DISABLE", "NCCL_NET", "NCCL_NET_PLUGIN")
_THUNDERBOLT = "thunderbolt"  # how Linux names the interface (drivers/net/thunderbolt)


@dataclass(frozen=True)
class ChosenProfile:
    """The variables of every rank, and the reasons. Both are empty where nothing goes over a wire."""

    environment: Mapping[str, str]
    choices: tuple[Choice, ...] = ()


def choose(
    cluster: Cluster, recipe: Recipe, machines: Machines, addresses: Mapping[str, LanAddress], throughputs: Throughputs
) -> ChosenProfile:
    """The profile that cluster.toml names, or the one that fits to what was measured."""
    asked = cluster.wire.profile
    if len(machines.nodes) < 2 or (machines.device != "cuda" and asked == "auto"):
        return ChosenProfile({})
    if machines.device != "cuda":
        return _nothing(f"{asked}: nothing is set", "cluster.toml, [network] profile; gloo has no variables for the network")
    if asked != "auto":
        return _chosen(asked, "cluster.toml, [network] profile", machines)
    personal = {**recipe.environment, **{name: value for node in machines.nodes for name, value in node.environment.items()}}
    other = next((name for name in _OTHER_WIRE if name in personal), None)
    if other:
        return _nothing("none", f"{other} is set: NCCL may use another network than the measured one")
    found = _found(machines, addresses, throughputs)
    if found is None:
        return _nothing("none", "the network between the nodes was not measured, and not every interface reports its speed")
    return _chosen(*found, machines)


def _found(machines: Machines, addresses: Mapping[str, LanAddress], throughputs: Throughputs) -> tuple[NetworkProfileName, str] | None:
    """The kind of the wire, and how that is known."""
    links = {node.name: _link(machines.facts.get(node.name), addresses[node.name].interface) for node in machines.nodes}
    wireless = next((name for name, link in links.items() if link and link.kind == "wifi"), None)
    if wireless:
        return "wifi", f"{wireless} is on Wi-Fi ({addresses[wireless].interface})"
    if all(link and link.name.startswith(_THUNDERBOLT) for link in links.values()):
        return "thunderbolt", "all nodes are on a Thunderbolt cable"
    wire = network_cost.wire_between(machines.names, throughputs)
    if wire.is_measured:
        return _kind_of(wire.bytes_per_s), f"measured: {megabytes(wire.bytes_per_s, '.4g')} MB/s between the slowest pair of nodes"
    speeds = {name: link.speed_mbit for name, link in links.items() if link and link.speed_mbit}
    if len(speeds) < len(links):
        return None
    slowest = min(speeds, key=lambda name: speeds[name])
    return _kind_of(
        speeds[slowest] / 1000 * network_cost.GIGABIT_BYTES_PER_S
    ), f"not measured; {slowest}'s cable runs at {speeds[slowest]} Mbit/s"


def _link(facts: Facts | None, interface: str) -> Interface | None:
    return next((entry for entry in (facts.network.interfaces if facts else ()) if entry.name == interface), None)


def _kind_of(bytes_per_s: float) -> NetworkProfileName:
    return next(name for gigabits, name in _FASTEST_GIGABITS if bytes_per_s <= gigabits * network_cost.GIGABIT_BYTES_PER_S)


def _chosen(name: NetworkProfileName, because: str, machines: Machines) -> ChosenProfile:
    profile, several = PROFILES[name], any(machines.ranks_on(node) > 1 for node in machines.nodes)
    variables = [variable for variable in profile.variables if not (variable.one_card_each and several)]
    choices = [Choice(subject="network profile", value=name, because=f"{because}; {profile.because}")]
    choices += [
        Choice(subject=variable.name, value=variable.value, because=f"{variable.because} ({variable.source})") for variable in variables
    ]
    return ChosenProfile({variable.name: variable.value for variable in variables}, tuple(choices))


def _nothing(value: str, because: str) -> ChosenProfile:
    return ChosenProfile({}, (Choice(subject="network profile", value=value, because=because),))
