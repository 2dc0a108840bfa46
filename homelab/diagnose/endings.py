"""What is known of an ending without any words: by a signal, by an exit code, or because a node is gone."""

from __future__ import annotations

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
NOT_SHIPPED = Rule(  # `rules.RULES`: missing-package, where the module lies near the script on the desk
    "not-shipped",
    "the module {module} was not shipped with the script: it is missing on {node}, and lies here in {local}",
    "name it in the recipe, [script] files = [...] (it has to lie beside the script or below), then: homelab launch {recipe}{options} "
    "(a changed program is a new training)",
    False,
    85,
)
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
    "{node} cannot be reached: it lost power or the network, or it sleeps",
    "wake it or check its cable, then: homelab preflight; " + RECOVER + " goes on with the nodes that answer",
    True,
    60,
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
SILENT = Rule(
    "silent-rank",
    "rank {rank} on {node} fell silent, and the others could not go on",
    "it hangs or its machine is frozen ({on_node:top -b -n 1 | head -n 20}); start again: " + RECOVER,
    True,
    45,
)
ENDINGS: tuple[Rule, ...] = (
    KILLED, CRASHED, ABORTED, OTHER_SIGNAL, WORKER_ERROR, PYTHON_ERROR, NOT_SHIPPED, DISTRIBUTED_ERROR, EXIT_CODE, UNREACHABLE, ALONE, NODE_RESTARTED,
    NOT_STARTED, TORCHRUN_KILLED, SILENT,
)  # fmt: skip
