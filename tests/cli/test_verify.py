"""What a person reads of `homelab verify`: the answer first, a table that holds at 80 columns, the page, the next command, the exit code."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from homelab.cli import common
from homelab.cli import verify as command
from homelab.controller.base.errors import EXIT_DONE, EXIT_FAILED, InputError
from homelab.controller.features.verify import verify_run
from homelab.controller.features.verify.step_record import RecordFault, Window
from homelab.controller.features.verify.verification import Verification
from homelab.controller.features.verify.window_verdict import WindowResult
from homelab.controller.run import store
from homelab.controller.run.paths import RunPaths
from homelab.shared.protocol import files

pytestmark = pytest.mark.timeout(60)
RUN = "2026-11-21-1405-llama7b"
AGREES = WindowResult(
    window=Window(begin=100, end=120), verdict="agrees", run="verify-100-120", nodes=("tower", "laptop", "oldtower"), strategy="pipeline",
    loss_apart=1.3e-7, loss_bound=1e-5, weights_apart=0.0, weights_bound=1e-4, weights_most=0.0, same_passes=True,
)  # fmt: skip


def found(**changes: Any) -> Verification:
    whole = {
        "run": RUN, "answer": f"{RUN} agrees within fp32 rounding: steps 100..120", "verdict": "agrees", "precision": "fp32", "last_step": 300, "chain": "ab" * 16,
        "card_end": "ab" * 16, "node": "tower", "windows": (AGREES,), "window_count": 3, "notes": ("the chain chose <1> of 3 windows",),
    }  # fmt: skip
    return Verification.model_validate({**whole, **changes})


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command, which finds what the test says: (exit code, stdout)."""
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / RUN).mkdir()

    def run(result: Verification, *, as_json: bool = False, **options: Any) -> tuple[int, str]:
        @contextmanager
        def connected(*_: Any) -> Iterator[Any]:
            yield None, RunPaths(tmp_path / RUN), lambda text: None

        monkeypatch.setattr(common, "fleet_of_run", connected)
        monkeypatch.setattr(verify_run, "verify", lambda *_: result)
        code = command.command(RUN, cluster=tmp_path / "cluster.toml", runs_dir=tmp_path, as_json=as_json, **options)
        return code, capsys.readouterr().out

    return run


def test_the_answer_is_the_first_line_and_the_page_the_next_thing(said: Any, tmp_path: Path) -> None:
    code, out = said(found())
    lines = out.splitlines()
    assert code == EXIT_DONE and lines[0] == f"{RUN} agrees within fp32 rounding: steps 100..120"
    table = [line for line in lines if "100..120" in line or "weights" in line][1:]
    assert table and max(map(len, table)) <= 80 and "1e-07" in out and "note: the chain chose <1> of 3 windows" in out
    assert lines[-1] == f"Next: xdg-open {tmp_path / RUN / 'verify.html'} (or open it in any browser)"
    page = (tmp_path / RUN / "verify.html").read_text()
    assert (
        "the chain chose &lt;1&gt; of 3" in page
        and "tower, laptop, oldtower" in page
        and "default-src &#x27;none&#x27;" not in page
        and "default-src 'none'" in page
    )
    assert "proven" not in page + out


@pytest.mark.parametrize("verdict", ["differs", "unclear", "not computed"])
def test_what_does_not_agree_ends_with_1_and_names_why(said: Any, verdict: str) -> None:
    bad = AGREES.model_copy(update={"verdict": verdict, "because": "step 112 does not: the recipe gives it other rows"})
    code, out = said(found(verdict=verdict, windows=(bad,), answer=f"{RUN} does not agree: {bad.because}"))
    assert code == EXIT_FAILED and "steps 100..120: step 112 does not" in out and f"Next: homelab report {RUN}" in out


@pytest.mark.parametrize("name", ["", "file/page.html"])
def test_a_page_that_cannot_be_written_is_refused_before_anything_is_computed(
    said: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"is a folder|is no folder") as refused:
        said(None, output=tmp_path / name)
    assert "--output" in refused.value.hint and "mv " not in refused.value.hint


def test_a_disk_that_is_full_in_the_end_takes_no_verdict_away(said: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "UNWRITTEN", {})
    monkeypatch.setattr(files, "write_atomic", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    code, out = said(found())
    assert code == EXIT_FAILED and out.startswith(f"{RUN} agrees within") and "xdg-open" not in out and store.UNWRITTEN
    code, out = said(found(), as_json=True)
    assert code == EXIT_FAILED and json.loads(out)["verdict"] == "agrees" and "make room" in json.loads(out)["warnings"][0]["hint"]


def test_a_strategy_that_does_not_exist_is_refused_before_a_node_is_asked(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        command.command(RUN, strategy="pipline", cluster=tmp_path / "cluster.toml", runs_dir=tmp_path)
    assert 'no strategy is called "pipline"' in caught.value.message and str(caught.value.hint) == f"homelab verify {RUN} --strategy auto"


def test_json_has_all_of_it_and_faults_of_the_record(said: Any) -> None:
    fault = RecordFault(step=7, text="the line of step 7 was changed")
    code, out = said(found(verdict="differs", windows=(), faults=(fault,), answer=f"{RUN}: {fault.text}"), as_json=True)
    document = json.loads(out)
    assert code == EXIT_FAILED and document["faults"] == [{"step": 7, "text": fault.text}] and document["file"].endswith("verify.html")
