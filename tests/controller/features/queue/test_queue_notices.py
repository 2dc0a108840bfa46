"""The owner of the queue is told when a night is over, and of a job that no run tells of; by the real command of [notify]."""

from __future__ import annotations

from pathlib import Path

import pytest

from homelab.controller.features.queue.queue_folder import QueueFolder
from homelab.controller.features.queue.queue_notices import QueueNotices
from tests.controller.features.queue.practice_nodes import NIGHT, Killed, PracticeNodes, filled, job, renames_counted

pytestmark = pytest.mark.timeout(120)
REFUSED = "rank 0 on a lacks 3.1 GB (recipe); to fix it: smaller batch"


@pytest.fixture
def queue(tmp_path: Path) -> QueueFolder:
    return QueueFolder(tmp_path)


class Told(list[tuple[str, str, str]]):
    """Each message: its occasion, whom it is of, its text."""

    def __call__(self, *message: str) -> None:
        self.append(message)  # type: ignore[arg-type]


def test_a_night_has_one_message_whose_first_sentence_is_the_answer(queue: QueueFolder) -> None:
    nodes, told = PracticeNodes(fates={2: "failed", 3: "refused"}), Told()
    filled(queue, job(1), job(2, settings="train.learning_rate=2e-4"), job(3), job(4))
    nodes.runner(queue, tell=told).go(stays=False)
    assert told == [
        ("gave up", "job 3, 3.toml", REFUSED),  # the supervisor of job 2 tells of its run by itself
        ("queue over", "", "2 done, 2 failed: job 2 (2.toml, train.learning_rate=2e-4), job 3 (3.toml).\n"
         f"job 2 failed: it ended\njob 3 failed: {REFUSED}\nNext: homelab queue"),
    ]  # fmt: skip
    filled(queue, job())
    nodes.runner(queue, tell=told).go(stays=False)  # another night, another process
    assert told[2:] == [("queue over", "", "1 done, 0 failed.\nNext: homelab queue")]
    nodes.runner(queue, tell=told).go(stays=False)
    assert len(told) == 3, "nothing is new"


def test_without_supervisors_the_runner_tells_of_each_failed_job(queue: QueueFolder) -> None:
    nodes, told = PracticeNodes(fates={1: "failed"}), Told()
    filled(queue, job())
    nodes.runner(queue, tell=told, is_supervised=False).go(stays=False)
    assert [message[:2] for message in told] == [("gave up", "job 1, 1.toml"), ("queue over", "")]


def test_the_end_of_the_hours_is_the_end_of_a_night(queue: QueueFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if a job waits for the next one, and if the rest waits for it or for a machine that a person has to look at."""
    nodes, told = PracticeNodes(fates={3: "broken", 4: "broken"}), Told()
    hours = {"not_before": "23:00", "stop_at": "07:00"}
    filled(queue, job(1, **hours), job(2, after="1"), *(job(number, nodes=("a",)) for number in (3, 4, 5)))
    runner = nodes.runner(queue, tell=told)
    runner.queue.untold()
    for _ in range(20):
        runner.look()
        nodes.tick(120)
        assert nodes.now < NIGHT + 3600
    assert [message[0] for message in told] == ["gave up", "gave up", "queue over"], told
    lines = told[-1][2].splitlines()
    assert lines[0] == "0 done, 2 failed: job 3 (3.toml), job 4 (4.toml)."
    assert {"job 1 waits: not before 23:00", "job 2 waits: after job 1"} <= set(lines)
    assert "job 5 waits: a has failed in jobs 3 and 4" in lines


def test_a_runner_that_is_killed_at_any_moment_forgets_no_end(tmp_path: Path) -> None:
    kills = 0
    for moment in range(1, 100):
        queue, told = QueueFolder(tmp_path / str(moment)), Told()
        nodes = PracticeNodes(fates={2: "refused"})
        filled(queue, job(1), job(2))
        queue.untold()
        with renames_counted(nodes):
            nodes.kill_at = [moment]
            try:
                nodes.runner(queue, tell=told).go(stays=False)
                break
            except Killed:
                kills += 1
            nodes.runner(queue, tell=told).go(stays=False)
        assert any("job 2 (2.toml)" in text for occasion, _, text in told if occasion == "queue over"), (moment, told)
        assert sum(int(text.split()[0]) for occasion, _, text in told if occasion == "queue over") >= 1, moment
    assert kills > 5


def test_a_real_command_gets_the_words(tmp_path: Path) -> None:
    out, said = tmp_path / "out", list[str]()
    cluster = tmp_path / "cluster.toml"
    nodes = '[[nodes]]\nname = "a"\nhost = "127.0.0.1"\n'
    cluster.write_text(f"{nodes}[notify]\ncommand = 'cat >> {out}; echo \"<$HOMELAB_RUN> $HOMELAB_OCCASION\" >> {out}'\n")
    notices = QueueNotices(cluster, said.append)
    notices.tell("gave up", "job 3, law.toml", "it lacks memory")
    notices.close()
    notices.tell("queue over", "", "3 done, 1 failed: job 3 (law.toml).")
    notices.close()
    assert out.read_text().splitlines() == [
        "homelab: job 3, law.toml gave up", "it lacks memory", "<> gave up",
        "homelab: queue over", "3 done, 1 failed: job 3 (law.toml).", "<> queue over",
    ]  # fmt: skip
    cluster.write_text(f'{nodes}[notify]\ncommand = "false"\non = ["done"]\n')
    notices.tell("queue over", "", "not asked for")
    notices.close()
    assert said == []
    cluster.write_text("[")
    notices.tell("queue over", "", "the runner says by itself that this file cannot be read")


@pytest.mark.parametrize("content", ["", "{", '{"a": 1}', '[{"a": 1}, "1", [2]]', "null"])
def test_a_damaged_record_of_what_was_told_costs_no_night(queue: QueueFolder, content: str) -> None:
    nodes, told = PracticeNodes(), Told()
    filled(queue, job())
    nodes.runner(queue, tell=told).go(stays=False)
    (queue.root / "told.json").write_text(content)
    for _ in range(2):
        filled(queue, job())
        nodes.runner(queue, tell=told).go(stays=False)
    assert told[-1][2].startswith(("1 done, 0 failed.", "2 done, 0 failed.")), told
    assert [message[0] for message in told] == ["queue over"] * 3
