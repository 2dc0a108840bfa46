"""The number of run.json: what is read, and the sentence for what is not."""

from __future__ import annotations

from typing import Any

import pytest

import homelab
from homelab.controller.base.errors import HomelabError
from homelab.controller.run import run_record
from tests import builders

TODAY = {"schema": 1, "moment": builders.MOMENT, "rows": 2, "homelab": "0.1.0", "recipe": {}, "git_revision": "ab" * 20}


def refusal(run_json: dict[str, Any]) -> HomelabError:
    with pytest.raises(HomelabError) as caught:
        run_record.refuse_other(run_json, "runs/a", "mv runs/a runs/a.old")
    assert caught.value.where == "runs/a" and not run_record.is_known(run_json)
    return caught.value


@pytest.mark.parametrize("changes", [{}, {"homelab": "0.9.0"}, {"more": 1}])
def test_this_number_is_read_whoever_wrote_it(changes: dict[str, Any]) -> None:
    run_record.refuse_other({**TODAY, **changes}, "runs/a", "")
    assert run_record.is_known({**TODAY, **changes})


def test_a_run_without_a_number_is_read_if_it_is_like_those_of_today() -> None:
    run_record.refuse_other({key: value for key, value in TODAY.items() if key != "schema"}, "runs/a", "")


def test_a_newer_run_names_the_version_to_install() -> None:
    error = refusal({**TODAY, "schema": 2, "homelab": "0.5.0"})
    assert (
        str(error.message)
        == f"a newer homelab (0.5.0) made this run: its run.json has schema 2, and this version ({homelab.__version__}) reads schema 1"
    )
    assert "pip install ./homelab_trainer-0.5.0-py3-none-any.whl" in str(error.hint)


@pytest.mark.parametrize("missing", ["moment", "rows"])
def test_an_older_run_names_the_tree_that_made_it(missing: str) -> None:
    error = refusal({key: value for key, value in TODAY.items() if key != missing})
    assert str(error.message).endswith(f"its run.json lacks {missing}")
    assert str(error.hint) == f"read it with the version that made it (git checkout {'ab' * 20}), or move it away: mv runs/a runs/a.old"


@pytest.mark.parametrize("version", ["0.5.0; rm -rf ~", "\x1b[31m1", 5, None, "9" * 50, ["0.5.0"]])
def test_a_version_that_is_none_is_not_repeated(version: object) -> None:
    error = refusal({**TODAY, "schema": 2, "homelab": version, "git_revision": version})
    assert "VERSION" in str(error.hint) and "a newer homelab made" in str(error.message)


@pytest.mark.parametrize(
    "run_json", [{}, {"schema": "seven", "recipe": {}}, {"schema": True, "recipe": {}}, {"name": "a"}, {"schema": None}]
)
def test_damage_is_named_by_others(run_json: dict[str, Any]) -> None:
    run_record.refuse_other(run_json, "runs/a", "")
