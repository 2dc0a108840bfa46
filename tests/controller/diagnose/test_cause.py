"""The cases no recording has: gone nodes, the worker's own account, two things at once, stops, and what is printed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from homelab.controller.config.cluster import Cluster as ClusterOfNodes
from homelab.controller.config.cluster import Node as NodeOfCluster
from homelab.controller.dashboard.snapshot_builder import next_commands
from homelab.controller.diagnose import cause
from homelab.controller.diagnose.cause import Context, Diagnosis, diagnose, render
from homelab.controller.diagnose.endings import ENDINGS
from homelab.controller.diagnose.rules import RULES, Rule
from homelab.controller.diagnose.suspects import Suspect
from homelab.controller.remote.poll_reply import parse_replies
from homelab.controller.run import shipped_files as shipped

NOW = 1_795_268_700.0
CLOSED = "RuntimeError: [/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:9128."
TIMED_OUT = "RuntimeError: [/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 6000ms for recv operation"


def traceback(text: str) -> list[str]:
    return ["Traceback (most recent call last):", '  File "/home/me/train.py", line 7, in <module>', "    main()", text]


def node(
    name: str, rank: int, stderr: list[str] | None = None, *, code: int | None = 1, signal: int | None = None,
    ended_at: float = NOW - 3, stopped: bool = False, alive: bool = False, step: int = 5, tail: list[str] | None = None,
    error: Mapping[str, object] | None = None, exit_error: str | None = None, memory: float = 0.3, has_exit: bool = True,
    attempt: int = 1,
) -> dict[str, Any]:  # fmt: skip
    exit_json = {"returncode": code, "signal": signal, "ended_at": ended_at, "stopped": stopped, "error": exit_error}
    return {
        "node": name, "time": NOW, "hostname": name,
        "load": {"memory_used_bytes": int(memory * 2**35), "memory_total_bytes": 2**35}, "gpus": [],
        "run": {
            "name": "r", "attempt": attempt, "agent_alive": alive, "torchrun_alive": alive, "started_at": NOW - 100,
            "exit": None if alive or not has_exit else exit_json,
            "ranks": {str(rank): {
                "heartbeat": {"time": NOW - 5, "phase": "training", "step": step},
                "log_tail": {"stdout": [], "stderr": stderr or []}, "error": error,
            }},
            "torchrun_tail": tail or [], "checkpoints": [], "final": False,
        },
    }  # fmt: skip


def block(rank: int, *, code: int, at: str = "2026-11-21_13:00:00") -> list[str]:
    return [
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ", "=" * 60, "Failures:",
        "  <NO_OTHER_FAILURES>", "-" * 60, "Root Cause (first observed failure):", "[0]:", f"  time      : {at}",
        "  host      : x", f"  rank      : {rank} (local_rank: 0)", f"  exitcode  : {code} (pid: 5) ",
        "  error_file: <N/A>", "  traceback : To enable traceback see: https://pytorch.org", "=" * 60,
    ]  # fmt: skip


def judge(*nodes: dict[str, Any], unreachable: dict[str, str] | None = None, **arguments: Any) -> Diagnosis | None:
    replies = parse_replies({reply["node"]: reply for reply in nodes})
    return diagnose("r", replies, unreachable or {}, Context(**arguments))


def found(*nodes: dict[str, Any], **arguments: Any) -> Diagnosis:
    diagnosis = judge(*nodes, **arguments)
    assert diagnosis is not None
    return diagnosis


def with_cluster(diagnosis: Diagnosis) -> Diagnosis:
    """As a person sees it who gave --cluster c.toml."""
    return diagnosis.with_options(lambda name: " --cluster c.toml")


def test_nothing_has_failed() -> None:
    assert judge(node("tower", 0, alive=True), node("mini", 1, alive=True)) is None
    assert judge(node("tower", 0, code=0), node("mini", 1, code=0)) is None
    assert judge({"node": "tower", "time": NOW, "run": None}) is None


def test_a_run_that_was_stopped_by_hand_has_not_failed() -> None:
    stopped = [node(name, rank, traceback(CLOSED), code=None, signal=15, stopped=True) for rank, name in enumerate("ab")]
    assert judge(*stopped) is None


def test_a_node_that_is_gone_explains_the_lost_connections() -> None:
    diagnosis = found(node("tower", 0, traceback(CLOSED)), node("mini", 1, traceback(TIMED_OUT)), unreachable={"laptop": "timed out"})
    assert (diagnosis.cause, diagnosis.first_node, diagnosis.retryable) == ("unreachable", "laptop", True)
    assert [victim.node for victim in diagnosis.victims] == ["mini", "tower"]


def test_but_it_does_not_explain_an_error_in_the_program() -> None:
    diagnosis = found(node("tower", 0, traceback("KeyError: 'x'")), unreachable={"laptop": "timed out"})
    assert (diagnosis.cause, diagnosis.first_node) == ("python-error", "tower")
    assert any("laptop, too" in line for line in diagnosis.because)


def test_an_ending_without_a_word_explains_less_than_a_gone_node_or_a_reason() -> None:
    wordless = node("tower", 0, tail=block(0, code=3), ended_at=NOW - 90)
    assert found(wordless).cause == "exit-code"
    assert found(wordless, unreachable={"laptop": "timed out"}).cause == "unreachable"
    assert found(wordless, node("mini", 1, traceback("MemoryError"))).first_node == "mini"


def test_a_node_that_was_rebooted() -> None:
    mini = node("mini", 1, has_exit=False)
    mini["run"]["rebooted"] = True
    diagnosis = found(node("tower", 0, traceback(CLOSED)), mini)
    assert (diagnosis.cause, diagnosis.first_node) == ("node-restarted", "mini")


def test_a_watcher_that_is_gone_from_a_machine_that_is_not_is_no_reboot() -> None:
    for known in ({"rebooted": False}, {"rebooted": None}, {}):  # the last two: an attempt of an older homelab
        mini = node("mini", 1, has_exit=False)
        mini["run"] |= known
        diagnosis = found(node("tower", 0, traceback(CLOSED)), mini)
        assert (diagnosis.cause, diagnosis.first_node, diagnosis.retryable) == ("vanished", "mini", True)
        assert "went down" not in diagnosis.title and "ended without a message" in diagnosis.title


def test_between_the_last_signal_of_a_stop_and_its_record_nothing_has_failed() -> None:
    mini = node("mini", 1, traceback(CLOSED), has_exit=False)
    mini["run"] |= {"rebooted": False, "stop_marked_at": NOW - 4}
    assert judge(mini) is None
    diagnosis = found(node("tower", 0, traceback("MemoryError"), ended_at=NOW - 9), mini)
    assert (diagnosis.cause, diagnosis.first_node) == ("host-out-of-memory", "tower")


def test_a_node_that_stopped_itself_is_blamed_only_when_nobody_else_is_gone() -> None:
    alone = node("mini", 1, traceback(CLOSED))
    alone["run"]["exit"]["alone"] = "no controller was heard for 60 s, and no step was done for 60 s"
    both = found(node("tower", 0, traceback(CLOSED)), alone)
    assert (both.cause, both.first_node, both.retryable) == ("alone", "mini", True)
    assert found(alone, unreachable={"tower": "timed out"}).first_node == "tower"


def test_the_workers_own_account_comes_first() -> None:
    own = {"message": "row 17 has no 'completion'", "where": "train.jsonl:17", "hint": "homelab data check train.jsonl"}
    diagnosis = found(node("tower", 0, traceback(CLOSED)), node("mini", 1, traceback("ValueError: x"), error=own))
    assert (diagnosis.cause, diagnosis.first_rank, diagnosis.where) == ("worker-error", 1, "train.jsonl:17")
    assert (diagnosis.title, diagnosis.hint) == (own["message"], f"node mini says: {own['hint']}")
    assert not diagnosis.retryable


def test_a_base_that_differs_on_one_node_is_not_tried_again() -> None:
    """As `homelab.worker.strategies.replica_check` says it, on every rank alike."""
    message = "the ranks do not hold the same base model: that of rank 1 (mini) differs from rank 0 (tower), rank 2 (laptop)"
    own = {
        "message": message,
        "where": "mini: /models/m",
        "hint": "homelab preflight RECIPE --deep --only model.files ...; then: homelab recover r",
    }
    diagnosis = with_cluster(found(*(node(name, rank, error=own) for rank, name in enumerate(("tower", "mini", "laptop")))))
    assert (diagnosis.title, diagnosis.where, diagnosis.topic, diagnosis.retryable) == (message, own["where"], "model-differs", False)
    assert diagnosis.hint.endswith("then: homelab recover --cluster c.toml r")


def test_the_workers_own_account_of_a_known_cause_keeps_the_causes_name() -> None:
    own = {"message": "the loss is not a number", "where": "step 12", "hint": "lower [train] learning_rate", "needs_launch": True}
    diagnosis = found(node("mini", 1, error=own))
    assert (diagnosis.cause, diagnosis.where) == ("nan-loss", "step 12")
    assert diagnosis.hint == "node mini says: lower [train] learning_rate; then, as a new training: homelab launch RECIPE"
    assert diagnosis.launch == "homelab launch RECIPE" and with_cluster(diagnosis).launch == "homelab launch --cluster c.toml RECIPE"
    as_before = found(node("mini", 1, error={**own, "needs_launch": False}))
    assert (as_before.hint, as_before.launch) == ("node mini says: lower [train] learning_rate", "")


def test_a_worker_that_only_lost_its_peer_is_a_victim_by_its_own_account() -> None:
    own = {"message": "Connection closed by peer", "where": "rank 0", "hint": "see the other ranks"}
    diagnosis = found(node("tower", 0, error=own), node("mini", 1, tail=block(1, code=-9), signal=None), unreachable={})
    assert (diagnosis.cause, diagnosis.first_node, diagnosis.signal) == ("killed", "mini", 9)


def test_of_two_reasons_the_earlier_is_the_first() -> None:
    early = node("tower", 0, traceback("OSError: [Errno 28] No space left on device"), ended_at=NOW - 60)
    late = node("mini", 1, traceback("torch.OutOfMemoryError: CUDA out of memory."), ended_at=NOW - 3)
    diagnosis = found(early, late)
    assert (diagnosis.cause, diagnosis.first_node) == ("disk-full", "tower")
    assert any("rank 1 on mini, too: torch.OutOfMemoryError" in line for line in diagnosis.because)


def test_the_same_reason_everywhere_is_said_once() -> None:
    missing = traceback("ModuleNotFoundError: No module named 'peft'")
    diagnosis = found(node("tower", 0, missing, ended_at=NOW - 9), node("mini", 1, missing))
    assert (diagnosis.cause, diagnosis.first_node) == ("missing-package", "tower")
    assert "the same on rank 1 on mini" in diagnosis.because
    assert "peft" in diagnosis.title


def test_an_exception_that_was_survived_is_not_what_killed_it() -> None:
    diagnosis = found(node("mini", 1, traceback("KeyError: 'logged and handled'"), tail=block(1, code=-9)))
    assert diagnosis.cause == "killed"


@pytest.mark.parametrize(
    "text", [CLOSED, TIMED_OUT, "requests.exceptions.ReadTimeout: HTTPSConnectionPool(host='huggingface.co', port=443)", "MemoryError"]
)
def test_whatever_was_logged_before_it_is_not_what_killed_it(text: str) -> None:
    diagnosis = found(node("mini", 1, traceback(text), tail=block(1, code=-9)), node("tower", 0, traceback(CLOSED)))
    assert (diagnosis.cause, diagnosis.first_node, diagnosis.signal, diagnosis.retryable) == ("killed", "mini", 9, True)
    assert text in diagnosis.because[0], "what it had logged is told, too"
    assert [victim.node for victim in diagnosis.victims] == ["tower"]
    kernel = ["Memory cgroup out of memory: Killed process 5 (python3)"]
    assert found(node("mini", 1, kernel, tail=block(1, code=-9))).cause == "oom-killer"


HARMLESS = [
    "libibverbs: Warning: couldn't load driver 'libmlx4-rdmav34.so': libmlx4-rdmav34.so: cannot open shared object file: No such file or directory",
    "No CUDA runtime is found, using CUDA_HOME='/usr/local/cuda'",
    "FlashAttention2 is not installed, falling back to sdpa",
]


@pytest.mark.parametrize("line", HARMLESS)
def test_a_warning_hides_neither_a_power_cut_nor_a_signal(line: str) -> None:
    mini = node("mini", 1, [line], has_exit=False)
    mini["run"]["rebooted"] = True
    assert found(node("tower", 0, traceback(CLOSED)), mini).cause == "node-restarted"
    for signal, cause_of_signal in ((4, "illegal-instruction"), (6, "aborted"), (7, "bus-error"), (9, "killed"), (11, "crashed")):
        assert found(node("mini", 1, [line], tail=block(1, code=-signal))).cause == cause_of_signal


def test_a_reason_that_was_printed_still_explains_a_signal() -> None:
    said = "what():  CUDA error: an illegal memory access was encountered"
    assert found(node("mini", 1, [f"  {said}"], tail=block(1, code=-6))).cause == "gpu-lost"
    compiler = "  what():  Failed to find C compiler. Please specify via CC environment variable."
    assert found(node("mini", 1, [compiler], tail=block(1, code=-6))).cause == "no-compiler"
    bus = "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm)."
    assert found(node("mini", 1, [bus], tail=block(1, code=-7))).cause == "shared-memory"


def test_a_rank_that_its_launcher_has_ended_is_a_victim_whatever_it_has_printed() -> None:
    """homelab's launcher names the ranks that failed, and not those that it then ended itself."""
    tower = node("tower", 0, [HARMLESS[0]], tail=block(1, code=-11))
    tower["run"]["ranks"]["1"] = node("tower", 1)["run"]["ranks"]["1"]
    diagnosis = found(tower)
    assert (diagnosis.cause, diagnosis.first_rank) == ("crashed", 1)
    assert [(victim.rank, victim.saw) for victim in diagnosis.victims] == [(0, "ended after another rank of its node had failed")]
    tower["run"]["ranks"]["0"]["heartbeat"]["phase"] = "done"
    assert not found(tower).victims


def test_an_abort_is_explained_by_its_last_words() -> None:
    words = [
        "terminate called after throwing an instance of 'c10::DistBackendError'",
        "  what():  Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1) ran for 600060 milliseconds",
    ]
    diagnosis = found(node("tower", 0, words, tail=block(0, code=-6)), unreachable={"mini": "no answer"})
    assert diagnosis.cause == "unreachable"
    assert diagnosis.victims[0].rank == 0


def test_only_lost_connections_accuse_nobody() -> None:
    diagnosis = found(*(node(name, rank, traceback(CLOSED)) for rank, name in enumerate(("tower", "mini", "laptop"))))
    assert diagnosis.cause == "connection-lost"
    assert "tower" not in diagnosis.title
    assert diagnosis.retryable


def test_two_that_wait_at_the_same_step_are_not_told_apart() -> None:
    diagnosis = found(node("tower", 0, traceback(TIMED_OUT)), node("mini", 1, alive=True), node("laptop", 2, alive=True))
    assert (diagnosis.cause, diagnosis.first_node) == ("timeout", "tower")


def test_a_rank_whose_heartbeat_was_missed() -> None:
    stopped = [node(name, rank, code=None, signal=15, stopped=True) for rank, name in enumerate(("tower", "mini", "laptop"))]
    diagnosis = found(*stopped, silent_ranks={2})
    assert (diagnosis.cause, diagnosis.first_node, diagnosis.first_rank) == ("silent-rank", "laptop", 2)


def test_torchrun_that_could_not_start() -> None:
    diagnosis = found(node("tower", 0, code=127, exit_error="[Errno 2] No such file or directory: '/no/python'"))
    assert (diagnosis.cause, diagnosis.first_node, diagnosis.exit_code) == ("missing-file", "tower", 127)
    assert "/no/python" in diagnosis.hint


def test_torchrun_itself_was_killed() -> None:
    diagnosis = found(node("tower", 0, code=None, signal=9), node("mini", 1, traceback(CLOSED)))
    assert (diagnosis.cause, diagnosis.first_node) == ("torchrun-killed", "tower")


def test_python_without_torch() -> None:
    diagnosis = found(node("tower", 0, tail=["/usr/bin/python3: No module named torch"]))
    assert (diagnosis.cause, diagnosis.first_node) == ("missing-package", "tower")


def test_an_older_attempt_is_not_judged() -> None:
    old = node("laptop", 2, traceback("KeyError: 'old'"))
    diagnosis = found(node("tower", 0, traceback("MemoryError"), attempt=2), old)
    assert (diagnosis.cause, diagnosis.first_node) == ("host-out-of-memory", "tower")


def test_full_memory_is_evidence() -> None:
    diagnosis = found(node("mini", 1, tail=block(1, code=-9), memory=0.97))
    assert "97% of the memory of mini is in use" in diagnosis.because


def test_hints_use_the_ssh_name_and_the_options() -> None:
    cluster = {"mini": NodeOfCluster(name="mini", host="192.168.1.7", user="me")}
    diagnosis = with_cluster(found(node("mini", 1, traceback("OSError: [Errno 28] No space left on device")), nodes=cluster))
    assert "ssh me@192.168.1.7 'df -h'" in diagnosis.hint
    assert "homelab recover --cluster c.toml r" in diagnosis.hint


def test_what_a_hint_tells_to_run_on_a_node_works_when_it_is_pasted() -> None:
    killed = node("mini", 1, tail=block(1, code=-9))
    cluster = ClusterOfNodes(
        known_hosts="/k/known hosts", nodes=(NodeOfCluster(name="mini", host="192.168.1.7", user="me", port=2222, identity_file="/k/id"),)
    )
    hint = found(killed, nodes={one.name: one for one in cluster.nodes}).hint
    words = shlex.split(hint.partition(" shows which")[0])
    assert words == [
        "ssh", "-o", 'UserKnownHostsFile="/k/known hosts"', "-p", "2222", "-i", "/k/id", "me@192.168.1.7",
        'journalctl -k | grep -i "killed process"',
    ]  # fmt: skip
    here = {"mini": NodeOfCluster(name="mini", host="local", python="~/env/bin/python")}
    assert found(killed, nodes=here).hint.startswith('journalctl -k | grep -i "killed process" shows which')
    old = node("mini", 1, traceback("RuntimeError: CUDA error: no kernel image is available for execution on the device"))
    hint = found(old, nodes=here).hint
    assert (
        ": ~/env/bin/python -m pip install --force-reinstall torch==2.13.0 --index-url https://download.pytorch.org/whl/cu130; GTX 10xx"
        in hint
    )
    assert "the same with cu126; then: homelab recover r" in hint


NCCL = "torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled {kind} error, NCCL version 2.29.7"


def test_what_nccl_said_last_is_the_cause() -> None:
    """torch puts it on the last line of its own message."""
    shm = [*traceback(NCCL.format(kind="system")), "ncclSystemError: System call failed.", "Last error:"]
    shm.append("Error while creating shared memory segment /dev/shm/nccl-cjY8K5 (size 10617216), error: No space left on device (28)")
    diagnosis = found(node("mini", 1, shm), node("tower", 0, traceback(CLOSED)))
    assert (diagnosis.cause, diagnosis.first_node, diagnosis.topic) == (
        "shared-memory",
        "mini",
        "shared-memory",
    ) and "df -h /dev/shm" in diagnosis.hint
    peer = [*traceback(NCCL.format(kind="cuda")), "ncclUnhandledCudaError: Call to CUDA function failed.", "Last error:"]
    peer.append("Cuda failure 217 'peer access is not supported between these two devices'")
    diagnosis = found(node("mini", 1, peer))
    assert (diagnosis.cause, diagnosis.topic, diagnosis.retryable) == ("peer-access", "peer-access", False)
    assert 'node mini: environment = { NCCL_P2P_DISABLE = "1", ' in diagnosis.hint and "homelab recover r" in diagnosis.hint


def test_bitsandbytes_ends_a_process_without_an_exception() -> None:
    said = ["Error out of memory at line 380 in file /src/csrc/pythonInterface.cpp"]
    diagnosis = found(node("mini", 1, said, tail=block(1, code=1)))
    assert (diagnosis.cause, diagnosis.exit_code) == ("cuda-out-of-memory", 1)


SHA = "148cb44a9d59563d" + "0" * 48
RUN_JSON: dict[str, Any] = {
    "recipe_file": "my run.toml",
    "data": {
        "train": {"sent": "shipped", "path": "/desk/rows.jsonl", "name": "rows.jsonl", "sha256": SHA}, "eval": None,
        "script": {"sent": "shipped", "path": "/desk/src/train.py", "name": "train.py", "sha256": SHA},
    },
}  # fmt: skip


def raised_in(file: str) -> dict[str, Any]:
    return node("mini", 1, ["Traceback (most recent call last):", f'  File "{file}", line 7, in <module>', "KeyError: 'x'"])


def test_an_error_in_a_shipped_script_is_corrected_in_the_persons_own_file() -> None:
    copy = raised_in("/home/me/homelab/data/148cb44a9d59563d/train.py")
    diagnosis = with_cluster(found(copy, own_files=shipped.of_run(RUN_JSON)))
    assert diagnosis.where == "/home/me/homelab/data/148cb44a9d59563d/train.py:7", "what the node has said"
    assert diagnosis.hint.startswith("correct /desk/src/train.py:7, then: homelab launch --cluster c.toml 'my run.toml'")
    for other in ("/home/me/homelab/data/0123456789abcdef/train.py", "/home/me/lib.py", "/home/me/homelab/data/148cb44a9d59563d/train.py2"):
        assert found(raised_in(other), own_files=shipped.of_run(RUN_JSON)).hint == f"correct {other}:7, then: homelab recover r"


def test_nobody_is_told_to_correct_an_installed_package() -> None:
    where = "/env/lib/python3.11/site-packages/transformers/modeling_utils.py"
    hint = found(raised_in(where), own_files=shipped.of_run(RUN_JSON)).hint
    assert (
        hint.startswith(f"an installed package raised it, at {where}:7: ")
        and "homelab logs r --attempt 1 --rank 1 -n 400; then: homelab recover r" in hint
        and "correct" not in hint
    )


def test_a_module_that_did_not_come_along_is_told_where_it_lies() -> None:
    lines = [
        "Traceback (most recent call last):",
        '  File "/w/train.py", line 1, in <module>',
        "ModuleNotFoundError: No module named 'helper.deep'",
    ]
    own, near = shipped.of_run(RUN_JSON), {"helper": "/desk/src/helper"}
    diagnosis = with_cluster(found(node("mini", 1, lines), node("tower", 0, lines), own_files=own, near=near))
    assert diagnosis.title.startswith("the module helper.deep was not sent with the script: it is missing on")
    assert diagnosis.title.endswith("and is here in /desk/src/helper")
    assert "[script] files" in diagnosis.hint and "homelab launch --cluster c.toml 'my run.toml'" in diagnosis.hint
    assert (diagnosis.cause, diagnosis.topic, diagnosis.names_a_reason) == ("not-shipped", "missing-package", True)
    assert any(line.startswith("the same on") for line in diagnosis.because)
    assert found(node("mini", 1, lines), own_files=own, near={"torch": "/desk/torch.py"}).cause == "missing-package"


def test_a_run_that_only_the_nodes_know_names_the_script_alone() -> None:
    entry = {"sent": "shipped", "path": "/w/data/148cb44a9d59563d/train.py", "name": "train.py", "sha256": SHA}
    described = {"recipe_file": "r.toml", "data": {"script": entry}}
    assert shipped.originals(described) == []
    diagnosis = found(raised_in("/w/data/148cb44a9d59563d/train.py"), own_files=shipped.of_run(described))
    assert diagnosis.hint.startswith("correct train.py:7, then: homelab launch r.toml")
    typed = {**described, "typed": {"words": ["python", "train.py", "--name", "a b"], "folder": "/desk"}}
    diagnosis = found(raised_in("/w/data/148cb44a9d59563d/train.py"), own_files=shipped.of_run(typed))
    assert diagnosis.hint.startswith("correct train.py:7, then: homelab run -- python train.py --name 'a b' (a changed")
    assert shipped.launch({**typed, "typed": {"words": 3}}) == "launch r.toml"
    for damaged in ({}, {"data": None}, {"data": {"script": 3}}, {"data": {"script": {"sent": "shipped"}}}):
        assert shipped.of_run(damaged) == () and shipped.originals(damaged) == []


def test_what_a_worker_says_of_a_shipped_data_file() -> None:
    own = {"message": "this line is not JSON", "where": "/w/data/148cb44a9d59563d/rows.jsonl, line 9", "hint": "every line is one object"}
    hint = with_cluster(found(node("mini", 1, error=own), own_files=shipped.of_run(RUN_JSON))).hint
    assert (
        hint == "node mini says: every line is one object; in /desk/rows.jsonl, line 9, then: homelab launch --cluster c.toml 'my run.toml'"
    )
    own |= {"where": "/w/data/148cb44a9d59563d/rows.jsonl", "hint": "homelab recover r brings it again"}
    hint = with_cluster(found(node("mini", 1, error=own), own_files=shipped.of_run(RUN_JSON))).hint
    assert hint == "node mini says: homelab recover --cluster c.toml r brings it again"


def test_braces_in_a_message_are_only_text() -> None:
    diagnosis = found(node("mini", 1, traceback("ValueError: {node} {unknown} {0}")))
    assert "ValueError: {node} {unknown} {0}" in diagnosis.title


def test_the_box() -> None:
    diagnosis = found(
        node("mini", 1, traceback("ValueError: [red]not markup[/red]"), tail=block(1, code=1)), node("tower", 0, traceback(CLOSED))
    )
    console = Console(file=StringIO(), width=80, color_system=None)
    console.print(render(diagnosis))
    assert isinstance(console.file, StringIO)
    seen = console.file.getvalue()
    assert max(len(line) for line in seen.splitlines()) == 80
    for wanted in ("why it failed", "[red]not markup[/red]", "because", "train.py:7", "fix", "rank 0 on tower"):
        assert wanted in seen, wanted


@pytest.mark.parametrize(
    ("own", "launch"),
    [
        ({"message": "x", "hint": "raise [train] seq_len", "needs_launch": True}, "homelab launch 'my run.toml'"),
        (
            {"message": "x", "where": "/w/data/148cb44a9d59563d/rows.jsonl, line 9", "hint": "every line is one object"},
            "homelab launch 'my run.toml'",
        ),
        ({"message": "x", "hint": "put it back: homelab recover r; or a new one: homelab launch a.toml"}, ""),
        ({"message": "x", "hint": "make room: ssh laptop df -h"}, ""),
        ({"message": "the loss is not a number"}, "homelab launch 'my run.toml'"),
        ({"message": "CUDA out of memory"}, ""),
    ],
)
def test_a_fix_that_is_a_new_training_is_what_comes_next(own: dict[str, object], launch: str) -> None:
    diagnosis = found(node("mini", 1, error=own), own_files=shipped.of_run(RUN_JSON))
    assert diagnosis.launch == launch
    assert next_commands("failed", "r", diagnosis)[0].command == (launch or "homelab recover r")
    assert next_commands("running", "r", diagnosis)[0].command == "homelab status r", "it has gone on meanwhile"


def test_a_diagnosis_from_a_file_gets_the_options_too() -> None:
    fresh = found(raised_in("/w/data/148cb44a9d59563d/train.py"), own_files=shipped.of_run(RUN_JSON))
    stored = fresh.model_dump(mode="json")
    assert type(stored["hint"]) is str and stored["launch"] == "homelab launch 'my run.toml'"
    assert Diagnosis.model_validate(stored) == fresh and with_cluster(Diagnosis.model_validate(stored)) == with_cluster(fresh)
    del stored["launch"]  # an older one has no such key, and its hints may have options
    older = Diagnosis.model_validate({**stored, "hint": "look, then: homelab recover r --cluster c.toml"})
    assert (older.launch, with_cluster(older).hint) == ("", older.hint)


@pytest.mark.parametrize("rule", [*RULES, *ENDINGS], ids=lambda rule: rule.id)
def test_every_command_of_a_rule_gets_the_options(rule: Rule) -> None:
    suspect = Suspect(rule, "mini", 1, saw="x", values={"way": "wake it"})
    hint, _ = cause._fix(suspect, None, cause._values("r", suspect, None), Context())
    named = [word for word in hint.with_options(lambda name: " -c x").split("homelab ")[1:] if not word.startswith("logs in")]
    assert all(re.match(r"\w+ -c x\b", word) for word in named), named
