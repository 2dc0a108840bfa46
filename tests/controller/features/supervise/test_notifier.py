"""The owner is told by a real command, and nothing that it does wrong disturbs the run."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from homelab.controller.base.errors import InputError
from homelab.controller.config.cluster import Notify
from homelab.controller.config.load import load_cluster
from homelab.controller.features.supervise import notifier
from homelab.controller.run import event_log
from homelab.controller.run.paths import RunPaths

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    (tmp_path / "r-1").mkdir()
    return RunPaths(tmp_path / "r-1")


def told(paths: RunPaths, notify: Notify, *occasions: str) -> list[str]:
    """What was said besides, after telling of these."""
    said: list[str] = []
    one = notifier.of_run(notify, paths, said.append)
    for occasion in occasions:
        one.tell(occasion, "the disk is full")  # type: ignore[arg-type]
        one.close()
    return said


def test_the_command_gets_the_words(paths: RunPaths) -> None:
    out = paths.root / "out"
    notify = Notify(command=f"cat >> '{out}'; echo \"$HOMELAB_RUN $HOMELAB_OCCASION\" >> '{out}'", on=["done", "gave up"])  # type: ignore[arg-type]
    assert told(paths, notify, "done", "failed", "gave up") == []
    assert out.read_text() == "".join(f"homelab: r-1 {occasion}\nthe disk is full\nr-1 {occasion}\n" for occasion in ("done", "gave up"))
    assert event_log.lines(paths) == []


def test_a_command_that_fails_or_hangs_is_said_once(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(paths, Notify(command="echo no such phone >&2; exit 3"), "done", "failed") == ["[notify] command failed: no such phone"]
    monkeypatch.setattr(notifier, "LIMIT_S", 0.3)
    began_s = time.monotonic()
    assert told(paths, Notify(command="sleep 50 & sleep 50"), "done") == ["[notify] command did not end within 0 s"]
    assert time.monotonic() - began_s < 40
    assert [line["text"] for line in event_log.lines(paths)] == [
        "[notify] command failed: no such phone (the run is not touched)", "[notify] command did not end within 0 s (the run is not touched)",
    ]  # fmt: skip


def test_apprise_takes_its_own_configuration(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apprise", None)
    assert "not installed" in told(paths, Notify(apprise="x"), "done")[0]
    heard: list[tuple[str, str]] = []

    class Services(list[str]):
        def add(self, entry: object) -> None:
            self.append(str(entry))

        def notify(self, title: str, body: str) -> bool:
            heard.append((title, body))
            return True

    monkeypatch.setitem(sys.modules, "apprise", SimpleNamespace(Apprise=Services, AppriseConfig=Services))
    assert "there is no file" in told(paths, Notify(apprise=str(paths.root / "none")), "done")[0]
    (paths.root / "apprise.yml").write_text("urls: []")
    assert told(paths, Notify(apprise=str(paths.root / "apprise.yml")), "done") == []
    assert heard == [("homelab: r-1 done", "the disk is full")]


def test_a_token_does_not_leave_this_machine_and_a_plugin_s_mistake_is_told(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    out = paths.root / "out"
    one = notifier.of_run(Notify(command=f"cat > '{out}'"), paths, print)
    one.tell("gave up", "401 for hf_abcdefghijklmnopqrstuvwxyzABCDEFGH")
    one.close()
    assert out.read_text() == "homelab: r-1 gave up\n401 for ***\n"

    def broken(*_: object) -> str:
        raise KeyError("odd")

    monkeypatch.setattr(notifier, "by_apprise", broken)
    assert told(paths, Notify(apprise="x"), "done") == ["[notify] failed: KeyError: 'odd'"]


def test_the_section_is_checked(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    nodes = '[[nodes]]\nname = "a"\nhost = "127.0.0.1"\n'
    file.write_text(f'{nodes}[notify]\ncommand = "notify-send"\non = ["done"]\n')
    assert load_cluster(file).notify == Notify(command="notify-send", on=("done",))
    file.write_text(f'{nodes}[notify]\ncomand = "x"\non = ["won"]\n')
    with pytest.raises(InputError) as refused:
        load_cluster(file)
    assert "comand" in refused.value.message + refused.value.where and "won" in refused.value.message + refused.value.where
