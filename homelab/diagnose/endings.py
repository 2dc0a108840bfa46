"""What is known of an ending without any words: by a signal, by an exit code, or because a node is gone."""

from __future__ import annotations

import re

from homelab.diagnose.rules import RECOVER, Rule

KILLED = Rule(
    "killed",
    "rank {rank} on {node} was killed (signal 9): by hand, or by the kernel because memory ran out",
    '{on_node:journalctl -k | grep -i "killed process"} tells which; then: ' + RECOVER,
    True,
    70,
)
CRASHED = Rule(
    "crashed",
    "rank {rank} on {node} crashed inside native code (signal {signal})",
    "once may be chance: " + RECOVER + "; if it comes back, reinstall torch on {node} and test its memory",
    True,
    65,
)
ABORTED = Rule(
    "aborted",
    "rank {rank} on {node} gave up inside native code (signal {signal})",
    "its last words are in the log of rank {rank}: homelab logs {run}{options}; then: " + RECOVER,
    True,
    35,
)
OTHER_SIGNAL = Rule("signal", "rank {rank} on {node} was ended by signal {signal}", "start again: " + RECOVER, True, 50)
OF_SIGNAL: dict[int, Rule] = {4: CRASHED, 5: ABORTED, 6: ABORTED, 7: CRASHED, 8: CRASHED, 9: KILLED, 11: CRASHED}
WORKER_ERROR = Rule("worker-error", "{message}", "see {where}", False, 86)
PYTHON_ERROR = Rule(
    "python-error", "the program failed on {node}: {message}", "correct {where}, then: " + RECOVER, False, 55
)
# Where it is in the file that the recipe names: the run keeps the one it was launched with.
SCRIPT_ERROR_HINT = "correct {where}, then: homelab launch {recipe}{options} (a changed script is a new training)"
DISTRIBUTED_ERROR = Rule(
    "distributed-error",
    "the ranks lost each other: {message}",
    "homelab preflight tells whether every pair of nodes can talk; then: " + RECOVER,
    True,
    38,
    role="symptom",
)
EXIT_CODE = Rule(
    "exit-code",
    "rank {rank} on {node} ended with exit code {code} and said nothing",
    "its log may say more: homelab logs {run}{options}; the program itself chose this exit code",
    False,
    20,
)
UNREACHABLE = Rule(
    "unreachable",
    "{node} cannot be reached: {message}",
    "{way}; " + RECOVER + " goes on with the nodes that answer",
    True,
    60,
)
# What stands between this machine and a node today says nothing of why a run failed: with these the answer is only not to be had.
NOT_IN_CLUSTER = Rule(
    "not-in-cluster",
    "{node} is not in cluster.toml any more, and cannot be asked",
    "add it to cluster.toml again, or give the machine its old name back there (a run knows its nodes by name); or go on without it: " + RECOVER,
    True,
    40,
    re.compile(r"not in cluster\.toml|another machine has its name"),
)
HOST_KEY = Rule("host-key", "{node} cannot be asked: {message}", "{way}; or go on without it: " + RECOVER, True, 40, re.compile("host key CHANGED"))
OWN_NETWORK = Rule(
    "own-network",
    "this machine reaches no node of the run: it has no way into their network",
    "look at its own cable, Wi-Fi or VPN (ip address; ip route), then: homelab status {run}{options}; the nodes may train on meanwhile",
    True,
    40,
    re.compile("network is unreachable", re.IGNORECASE),
)
ALONE = Rule(
    "alone",
    "{node} had lost its controller and the other nodes, and stopped itself",
    "a switch or a cable (homelab preflight tells which), or all the others lost power; go on: " + RECOVER,
    True,
    55,
)
NODE_RESTARTED = Rule(
    "node-restarted",
    "{node} went down while it trained, and is back",
    "power cut, crash or reboot ({on_node:last -x | head}); go on: " + RECOVER,
    True,
    60,
)
VANISHED = Rule(
    "vanished",
    "homelab's watcher on {node} ended without a word, and the ranks with it",
    "something ended all programs of this user there: a logout ({on_node:loginctl enable-linger} prevents that), memory that ran out "
    '({on_node:journalctl -k | grep -i "killed process"} tells), or a person; go on: ' + RECOVER,
    True,
    50,
)
NOT_STARTED = Rule(
    "not-started", "torchrun could not start on {node}: {message}", "homelab preflight names what is missing", False, 80
)
TORCHRUN_KILLED = Rule(
    "torchrun-killed",
    "torchrun itself was killed on {node} (signal {signal})",
    '{on_node:journalctl -k | grep -i "killed process"} tells whether memory ran out; then: ' + RECOVER,
    True,
    60,
)
UNCONNECTED = Rule(
    "unconnected",
    "{who} could not connect to {node} ({target})",
    "a firewall of {node} or the network to it is in the way: homelab preflight --only network names which; then: " + RECOVER,
    True,
    48,
)
NOT_BEGUN = Rule(
    "not-begun",
    "rank {rank} on {node} had not begun to train when the others gave up waiting for it",
    "a blocked network at the start looks like this, and a slow load: homelab preflight --only network, and its log: "
    "homelab logs {run}{options}; then: " + RECOVER,
    True,
    44,
)
SILENT = Rule(
    "silent-rank",
    "rank {rank} on {node} fell silent, and the others could not go on",
    "it hangs or its machine is frozen ({on_node:top -b -n 1 | head -n 20}); start again: " + RECOVER,
    True,
    45,
)
# A node is gone, or was: it explains why the ranks of the others lost their connections, and is no reason of theirs.
OF_A_NODE: tuple[Rule, ...] = (UNREACHABLE, ALONE, NODE_RESTARTED, VANISHED)
OF_THE_CONTROLLER: tuple[Rule, ...] = (NOT_IN_CLUSTER, HOST_KEY, OWN_NETWORK)
ENDINGS: tuple[Rule, ...] = (
    KILLED, CRASHED, ABORTED, OTHER_SIGNAL, WORKER_ERROR, PYTHON_ERROR, DISTRIBUTED_ERROR, EXIT_CODE, UNREACHABLE, ALONE, NODE_RESTARTED, VANISHED,
    NOT_STARTED, TORCHRUN_KILLED, UNCONNECTED, NOT_BEGUN, SILENT, NOT_IN_CLUSTER, HOST_KEY, OWN_NETWORK,
)  # fmt: skip
