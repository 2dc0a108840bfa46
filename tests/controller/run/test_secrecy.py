"""A token that a program prints leaves the controller by no way, where the controller knows its value."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from homelab.cli import streams
from homelab.controller.attempt import diagnosis_store
from homelab.controller.base import secrets
from homelab.controller.base.errors import HomelabError
from homelab.controller.base.hint import Hint
from homelab.controller.dashboard.event_rows import event_row
from homelab.controller.diagnose.cause import Diagnosis
from homelab.controller.facts.reading import read
from homelab.controller.run import event_log, events, store
from homelab.controller.run.paths import RunPaths
from homelab.shared.protocol.run_messages import Reply

pytestmark = pytest.mark.timeout(30)
TOKEN = "xyzzy-Q7rT9pLm4242"  # like nothing that a pattern would know
SAID = f"RuntimeError: 401 for token {TOKEN}, twice {TOKEN}"


@pytest.fixture(autouse=True)
def known() -> Iterator[None]:
    secrets.know({"HF_TOKEN": TOKEN, "HOME": "/home/somebody", "TOKENIZERS_PARALLELISM": "false-or-true"})
    yield
    secrets.know({})


@pytest.mark.parametrize(
    ("name", "value", "is_hidden"),
    [
        ("HF_TOKEN", TOKEN, True), ("HUGGING_FACE_HUB_TOKEN", TOKEN, True), ("WANDB_API_KEY", TOKEN, True), ("AWS_SECRET_ACCESS_KEY", TOKEN, True),
        ("HF_TOKEN", f" {TOKEN}\n", True), ("SSH_PRIVATE_KEY", f"-----BEGIN-----\n{TOKEN}\n-----END-----", True),
        ("HF_TOKEN", "short", False), ("HF_TOKEN", "", False), ("HOMELAB_RUNS", TOKEN, False), ("TOKENIZERS_PARALLELISM", TOKEN, False),
        ("HF_TOKEN_PATH", f"/run/{TOKEN}", False), ("MAX_TOKENS", "4096000000", False), ("API_KEY", f"https://{TOKEN}", False),
    ],
)  # fmt: skip
def test_what_counts_as_a_secret(name: str, value: str, is_hidden: bool) -> None:
    secrets.know({name: value})
    text = f"said {value.strip() if value.strip() else 'nothing'} and {TOKEN}"
    assert (TOKEN not in secrets.hide(text)) is is_hidden


def test_the_longer_one_is_hidden_whole() -> None:
    secrets.know({"A_TOKEN": "abcdefgh", "B_TOKEN": "abcdefgh-more"})
    assert secrets.hide("abcdefgh-more abcdefgh") == "*** ***"


def test_words_of_a_node_and_errors_come_without_it() -> None:
    error = HomelabError(SAID, where=SAID, hint=SAID)
    rank = {
        "log_tail": {"stdout": [SAID], "stderr": [SAID]},
        "error": {"message": SAID, "where": SAID, "hint": SAID},
        "metrics": [{"kind": "note", "message": SAID}],
    }
    reply = read(Reply, {"node": "n", "time": 1.0, "run": {"name": "r", "ranks": {"0": rank}, "torchrun_tail": [SAID]}})
    row = event_row({"time": 1.0, "what": SAID, "hint": SAID})
    for text in (str(error), str(reply), row.text, str(error.as_dict())):
        assert TOKEN not in text and "401 for token ***" in text


def test_no_file_that_tells_people_what_happened_holds_it(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "r")
    event_log.append(paths, events.note(SAID, hint=SAID))
    store.write_json(paths.supervisor_json, {"why": SAID})
    store.append_lines(paths.metrics_jsonl, [{"kind": "note", "message": SAID}])
    store.write_text(paths.plan_txt, SAID)
    found = Diagnosis(cause="python-error", title=SAID, first_node="n", because=(SAID,), hint=Hint(SAID), retryable=False)
    diagnosis_store.keep(paths, 1, found, {"n": SAID})
    written = [path for path in paths.root.rglob("*") if path.is_file()]
    assert len(written) == 5
    assert not [path for path in written if TOKEN in path.read_text(encoding="utf-8")]
    assert event_log.lines(paths)[0]["what"] == "RuntimeError: 401 for token ***, twice ***"


def test_what_later_commands_go_by_stays_word_for_word(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "r")
    for file in (paths.run_json, paths.plan_json(1), paths.cluster_json):
        store.write_json(file, {"args": ["--name", TOKEN]})
        assert store.read_json(file) == {"args": ["--name", TOKEN]}, "another argument would be another training"


def test_stderr_and_the_supervisors_log_hide_it(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as file:
        stream = streams.told(file.fileno(), None)
        assert stream.write(f"{SAID}\n") == len(SAID) + 1
        stream.flush()
    assert (tmp_path / "log").read_text() == "RuntimeError: 401 for token ***, twice ***\n"


def test_a_command_prints_it_nowhere() -> None:
    """The whole way, with what the process itself was given: `main` knows its own environment."""
    script = (
        "import json, sys; from homelab.cli import main; from homelab.controller.base import errors\n"
        "def run(arguments):\n"
        f"    print({SAID!r}); json.dump({{'said': {SAID!r}}}, sys.stdout); sys.stderr.write({SAID!r})\n"
        f"    main._show(errors.HomelabError({SAID!r}), '--json' in arguments)\n"
        "    return 0\n"
        "main.run = run; main.main()"
    )
    done = subprocess.run([sys.executable, "-c", script], env={**os.environ, "HF_TOKEN": TOKEN}, capture_output=True, text=True, check=True)
    assert TOKEN not in done.stdout + done.stderr
    assert done.stdout.count("***") == 4 and done.stderr.count("***") == 4
    assert json.loads(done.stdout.splitlines()[1])["said"].endswith("twice ***")


def test_without_a_secret_the_stream_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    secrets.know({})
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))
    streams.prepare()
    assert sys.stdout is stream
