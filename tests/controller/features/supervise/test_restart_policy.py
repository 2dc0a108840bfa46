"""Go on, without whom, or give up: the decision after a failure."""

from __future__ import annotations

from typing import Any

import pytest

from homelab.controller.attempt.watchdog import AttemptVerdict, NodeStatus, common_checkpoint
from homelab.controller.base.hint import Hint
from homelab.controller.config.recipe import parse_recipe
from homelab.controller.diagnose.cause import Diagnosis
from homelab.controller.features.supervise import log_policies, restart_policy
from homelab.controller.features.supervise.restart_policy import Failure
from homelab.controller.run.restart import Restart, halvings
from homelab.shared.recipe import Checkpoint, LogPolicy, Recovery

pytestmark = pytest.mark.timeout(10)

NOW = 1e9
NODES = ("tower", "laptop", "oldtower")
DEAD = AttemptVerdict("dead-rank", ("laptop",), (1,), "the process of rank 1 on laptop is gone")
SILENT = AttemptVerdict("silent-node", ("laptop",), (), "nothing is heard of laptop")


def diagnosis(cause: str = "killed", *, retryable: bool = True) -> Diagnosis:
    return Diagnosis(
        cause=cause, title="rank 1 on laptop was killed", first_node="laptop", first_rank=1, hint=Hint("look"), retryable=retryable
    )


def decide(
    verdict: AttemptVerdict = DEAD,
    found: Diagnosis | None = None,
    restarts: list[Restart] | None = None,
    step: int = 40,
    logs: Any = None,
    **recovery: Any,
) -> restart_policy.Decision:
    if "log_policies" in recovery:
        recovery["log_policies"] = tuple(LogPolicy(**policy) for policy in recovery["log_policies"])
    wanted = Recovery(**recovery)
    met, slow = log_policies.met(logs or {}, wanted.log_policies)
    assert not slow
    return restart_policy.decide(Failure(verdict, found, met), restarts or [], wanted, now=NOW, step=step, nodes=NODES)


def test_a_node_that_alone_has_a_shard_is_not_left_out() -> None:
    full = diagnosis("disk-full", retryable=False)
    found = decide(found=full)
    assert found.exclude == ("laptop",)
    assert restart_policy.keeping({}, found) == found
    assert restart_policy.keeping({"tower": (0,)}, found) == found
    kept = restart_policy.keeping({"laptop": (1, 2)}, found)
    assert (kept.kind, kept.exclude) == ("give-up", ())
    assert "laptop is the only node with shard 1, 2 of the checkpoint, and cannot be left out" in kept.because


def test_a_killed_worker_goes_on_with_everybody() -> None:
    found = decide(found=diagnosis())
    assert (found.kind, found.exclude, found.cause, found.node) == ("go-on", (), "killed", "laptop")


def test_a_node_that_was_silent_and_answers_again_is_one_to_go_on_with() -> None:
    # Too few were left without it, so it was waited for: the run is not given up because it is back.
    found = decide(SILENT, min_nodes=3)
    assert (found.kind, found.exclude) == ("go-on", ())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"found": diagnosis("python-error", retryable=False)}, "would end the same way"),
        ({"auto": False}, "auto is off"),
        ({"max_restarts": 0}, "max_restarts = 0"),
        ({"restarts": [Restart(NOW - 60 * age, "x", "y", age) for age in range(5)]}, "5 restarts within the last hour"),
        ({"found": diagnosis(), "restarts": [Restart(NOW - 9000, "killed", "laptop", 40)] * 3}, "ended like this 3 times before"),
    ],
    ids=["not retryable", "by hand only", "none allowed", "too often", "always at the same place"],
)
def test_when_it_is_given_up(arguments: dict[str, Any], words: str) -> None:
    found = decide(**arguments)
    assert found.kind == "give-up" and words in found.because


def test_what_is_wrong_with_one_node_leaves_that_node_out_while_enough_are_left() -> None:
    full = diagnosis("disk-full", retryable=False)
    assert decide(found=full).exclude == ("laptop",)
    assert decide(found=full, min_nodes=3).kind == "give-up"


def test_old_restarts_and_other_places_do_not_count() -> None:
    assert decide(restarts=[Restart(NOW - 3700, "x", "y", age) for age in range(9)]).kind == "go-on"
    assert decide(found=diagnosis(), restarts=[Restart(NOW - 9000, "killed", "laptop", step) for step in (10, 20, 30)]).kind == "go-on"
    assert decide(found=diagnosis(), restarts=[Restart(NOW - 9000, "killed", "tower", 40)] * 3).kind == "go-on"


def test_restarts_of_before_the_clock_was_put_back_do_not_count() -> None:
    ahead = [Restart(NOW + 3600 + 60 * age, "x", "y", age) for age in range(9)]
    assert decide(restarts=ahead).kind == "go-on"
    lately = [Restart(NOW - 60 * age, "x", "y", age) for age in range(5)]
    assert "5 restarts within the last hour" in decide(restarts=[*ahead, *lately]).because


def test_the_owner_knows_lines_that_mean_something() -> None:
    logs = {"tower": ["all is well"], "laptop": ["NVRM: Xid 79"]}
    policies = [{"pattern": "Xid (79|48)", "action": "exclude"}]
    assert decide(logs=logs, log_policies=policies).exclude == ("laptop",)
    stopped = decide(logs=logs, log_policies=[{"pattern": "Xid", "action": "stop"}])
    assert stopped.kind == "give-up" and "laptop printed" in stopped.because
    assert decide(logs={"tower": ["all is well"]}, log_policies=policies).exclude == ()


def test_a_pattern_that_would_take_for_ever_counts_as_not_met(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_policies, "PATTERN_S", 0.2)
    first, endless, last = (LogPolicy(pattern=text, action="stop") for text in ("Xid", "(a+)+$", "lost"))
    logs = {"tower": ["a" * 40 + "b", "GPU is lost"], "laptop": ["Xid 79", "\udcff" + "a" * 9000 + "lost"]}
    assert log_policies.met(logs, [first, endless, last]) == ([("laptop", first), ("tower", last)], [endless])
    assert log_policies.met({"tower": [], "laptop": ["all is well"]}, [first, last]) == ([], [])


def test_memory_that_ran_out_halves_that_nodes_micro_batch_each_time() -> None:
    again = Restart(NOW, "cuda-out-of-memory", "laptop", 40)
    assert halvings([again]) == {"laptop": 1}
    assert halvings([again, Restart(NOW, "killed", "tower", 40), Restart(NOW, "oom-killer", "laptop", 50)]) == {"laptop": 2}
    assert halvings([Restart(NOW, "killed", "tower", 40)]) == {}


@pytest.mark.parametrize(
    "line",
    [
        "NVRM: Xid (PCI:0000:01:00): 79, pid=1234, GPU has fallen off the bus.",
        "RuntimeError: CUDA error: uncorrectable ECC error encountered",
        "OSError: [Errno 5] Input/output error: 'model.safetensors'",
    ],
)
def test_a_machine_that_needs_its_owner_is_left_out_by_default(line: str) -> None:
    assert decide(logs={"laptop": ["step 40", line]}).exclude == ("laptop",)
    assert decide(logs={"laptop": ["NVRM: Xid (PCI:0000:01:00): 13, pid=7", "step 79"]}).exclude == ()


def test_who_leaves_nobody_to_go_on_with_is_not_left_out() -> None:
    logs = {name: ["GPU is lost"] for name in NODES}
    found = decide(logs=logs)
    assert found.kind == "give-up" and "no node left" in found.because
    assert decide(logs={"laptop": ["GPU is lost"]}, min_nodes=3).kind == "give-up"
    assert decide(logs={"laptop": ["GPU is lost"]}, min_nodes=2).kind == "go-on"


def everywhere(*checkpoints: int) -> int:
    return common_checkpoint({name: NodeStatus(attempt=2, checkpoint=step) for name, step in zip(NODES, checkpoints, strict=False)})


def test_a_node_is_taken_back_right_after_the_next_checkpoint_that_all_have() -> None:
    well = AttemptVerdict("well")
    back, since = restart_policy.rejoining(["oldtower"], {}, everywhere(40, 40), well)
    assert (back, since) == ((), {"oldtower": 40})
    back, since = restart_policy.rejoining(["oldtower"], since, everywhere(50, 40), well)
    assert back == (), "one of them is still writing it"
    assert restart_policy.rejoining(["oldtower"], since, everywhere(50, 50), well)[0] == ("oldtower",)
    assert restart_policy.rejoining(["oldtower"], since, everywhere(50, 50), AttemptVerdict("well", blind=("laptop",)))[0] == ()
    assert restart_policy.rejoining([], since, everywhere(50, 50), well) == ((), {}), "it is ill again: it has to wait anew"


def test_beginning_again_is_allowed_only_while_no_checkpoint_was_due() -> None:
    every_ten = Checkpoint(every_steps=10)
    assert restart_policy.may_begin_again(9, every_ten) and not restart_policy.may_begin_again(11, every_ten)
    assert restart_policy.may_begin_again(10, every_ten), "the fault came while the first one was written"
    # By itself the first is after step 1, and whoever has done step 2 has seen it whole on every node.
    assert restart_policy.may_begin_again(1, Checkpoint()) and not restart_policy.may_begin_again(2, Checkpoint())


def test_a_pattern_that_is_none_is_refused_with_its_place() -> None:
    with pytest.raises(ValueError, match="a regular expression"):
        parse_recipe({"script": {"path": "train.py"}, "recovery": {"log_policies": [{"pattern": "(", "action": "stop"}]}}, strict=False)
