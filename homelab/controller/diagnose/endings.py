"""The rules of an ending without any words, by name: a signal, an exit code, or a node that is gone. Their text is in endings.toml."""

from __future__ import annotations

from homelab.controller.diagnose.rules import load

ENDINGS = load("endings.toml")
_BY_ID = {rule.id: rule for rule in ENDINGS}

KILLED = _BY_ID["killed"]
CRASHED = _BY_ID["crashed"]
BUS_ERROR = _BY_ID["bus-error"]
ILLEGAL_INSTRUCTION = _BY_ID["illegal-instruction"]
ABORTED = _BY_ID["aborted"]
OTHER_SIGNAL = _BY_ID["signal"]
WORKER_ERROR = _BY_ID["worker-error"]
PYTHON_ERROR = _BY_ID["python-error"]
NOT_SHIPPED = _BY_ID["not-shipped"]
DISTRIBUTED_ERROR = _BY_ID["distributed-error"]
EXIT_CODE = _BY_ID["exit-code"]
UNREACHABLE = _BY_ID["unreachable"]
NOT_IN_CLUSTER = _BY_ID["not-in-cluster"]
HOST_KEY = _BY_ID["host-key"]
OWN_NETWORK = _BY_ID["own-network"]
ALONE = _BY_ID["alone"]
NODE_RESTARTED = _BY_ID["node-restarted"]
VANISHED = _BY_ID["vanished"]
NOT_STARTED = _BY_ID["not-started"]
TORCHRUN_KILLED = _BY_ID["torchrun-killed"]
UNCONNECTED = _BY_ID["unconnected"]
NOT_BEGUN = _BY_ID["not-begun"]
SILENT = _BY_ID["silent-rank"]
PREPARING = _BY_ID["preparing"]

OF_SIGNAL = {4: ILLEGAL_INSTRUCTION, 5: ABORTED, 6: ABORTED, 7: BUS_ERROR, 8: CRASHED, 9: KILLED, 11: CRASHED}
# No rule knows the exception. It was raised in the file that the recipe names: the run keeps the copy that it was launched with.
SCRIPT_ERROR_HINT = "correct {where}, then: {launch} (a changed script is a new training)"
# No line of the person's own is in the traceback.
LIBRARY_ERROR_HINT = (
    "an installed package raised it, at {where}: does its version match the call? homelab preflight --only python.same compares the packages of the"
    " nodes. The whole traceback: {logs}; then: {recover}"
)
# A line of the person's own has called what raised it: either may be wrong, and nobody can tell which.
CALLED_ERROR_HINT = (
    "an installed package raised it, at {raised_at}, called from {where}: no rule knows which of the two is wrong. {node} may lack something, or the call"
    " may not match the installed version: homelab preflight --only python.same compares the packages of the nodes. The whole traceback: {logs}; if fixed on {node}: {recover}"
)
CALLED_SCRIPT_HINT = CALLED_ERROR_HINT + "; if the call is corrected: {launch}"
# A node is gone, or was: it explains why the ranks of the others lost their connections.
OF_A_NODE = (UNREACHABLE, ALONE, NODE_RESTARTED, VANISHED)
OF_THE_CONTROLLER = (NOT_IN_CLUSTER, HOST_KEY, OWN_NETWORK)
# What is also known by the words of torchrun, a shell or a program that started it.
IN_WORDS = (KILLED, CRASHED, BUS_ERROR, ABORTED)
