"""Words from nodes and files, on their way to a terminal: in a picture of a run, in its diagnosis, in an error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from homelab.controller.base.errors import HomelabError
from homelab.controller.base.hint import Hint
from homelab.controller.diagnose.cause import Diagnosis
from homelab.controller.remote.poll_reply import parse_replies
from tests.controller.dashboard import sample

EVIL = "\x1b]0;owned\x07\x1b[2Jev\x9bil\x00"


def words(value: Any) -> Iterator[str]:
    """Every text in a value."""
    if isinstance(value, BaseModel):
        value = value.model_dump()
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from words(entry)


def test_a_picture_of_a_run_steers_no_terminal() -> None:
    raw = sample.raw_reply("tower", 0, 3)
    raw["run"]["ranks"]["0"]["heartbeat"]["phase"] = EVIL
    raw["run"]["ranks"]["0"]["log_tail"] = {"stdout": [EVIL], "stderr": [EVIL]}
    raw["gpus"][0]["name"] = EVIL
    known = sample.plan()
    plan = known.model_copy(update={
        "ranks": tuple(rank.model_copy(update={"device_name": EVIL}) for rank in known.ranks),
        "nodes": tuple(node.model_copy(update={"lan_address": EVIL}) for node in known.nodes),
    })  # fmt: skip
    events = [{"time": 5.0, "what": EVIL, EVIL: EVIL}]
    shot = sample.snapshot(
        replies=parse_replies({"tower": raw}), plan=plan, recipe=EVIL, events=events, unreachable={"old": EVIL}, supervisor=EVIL
    )
    found = list(words(shot))
    assert "evil" in found and shot.recipe == "evil" and shot.ranks[0].phase == "evil"
    assert not [word for word in found if not word.isprintable()]


@pytest.mark.parametrize("recipe", [5, None, ["x"], {}])
def test_a_recipe_that_has_no_name_is_shown_without(recipe: Any) -> None:
    assert sample.snapshot(recipe=recipe).recipe == ""


def test_a_diagnosis_and_an_error_steer_no_terminal() -> None:
    found = Diagnosis(cause="x", title=EVIL, first_node=EVIL, because=(EVIL, f"  {EVIL}"), hint=Hint(EVIL), retryable=False)
    assert all(word.isprintable() for word in words(found)) and found.because == ("evil", "  evil"), "the indentation of a log stays"
    error = HomelabError(f"{EVIL}\nsecond", where=EVIL, hint=EVIL)
    assert error.as_dict() == {"message": "evil\nsecond", "where": "evil", "hint": "evil"} and str(error).count("\n") == 3
