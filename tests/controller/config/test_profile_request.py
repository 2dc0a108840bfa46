"""Which steps a person may have profiled, and what is said of those that a run does not have."""

from __future__ import annotations

import pytest

from homelab.controller.base.errors import InputError
from homelab.controller.config import profile_request
from homelab.controller.config.profile_request import ProfiledSteps

pytestmark = pytest.mark.timeout(20)


@pytest.mark.parametrize(
    ("steps", "ranks", "of", "expected"),
    [
        ("3", "", 100, ProfiledSteps(6, 8, (0, 1, 2))),
        ("3", "", None, ProfiledSteps(6, 8, (0, 1, 2))),
        ("3", "", 4, ProfiledSteps(2, 4, (0, 1, 2))),
        ("4", "", 4, ProfiledSteps(1, 4, (0, 1, 2))),
        ("8-10", "2,0,2", 10, ProfiledSteps(8, 10, (0, 2))),
        ("8-8", "1", None, ProfiledSteps(8, 8, (1,))),
    ],
)
def test_steps_and_ranks(steps: str, ranks: str, of: int | None, expected: ProfiledSteps) -> None:
    request = profile_request.parse(steps, ranks)
    assert request is not None and profile_request.chosen(request, of, 3) == expected


def test_nothing_is_asked() -> None:
    assert profile_request.parse("", "") is None


@pytest.mark.parametrize(
    ("steps", "ranks", "words", "hint"),
    [
        ("", "0", "the steps to profile are missing", "--profile 3 --profile-ranks 0"),
        ("soon", "", "names no steps", "--profile 8-10"),
        ("-3", "", "names no steps", "--profile 8-10"),
        ("0", "", "counted from 1", "--profile 3"),
        ("0-2", "", "counted from 1", "--profile 3"),
        ("9-8", "", "counted from 1", "--profile 3"),
        ("21", "", "at most 20", "--profile 6-8"),
        ("3", "a,b", "names no ranks", "--profile-ranks 0,2"),
        ("3", "1,", "names no ranks", "--profile-ranks 0,2"),
        ("11", "", "ends after step 10, before step 11", "--profile 10"),
        ("8-12", "", "ends after step 10, before step 12", "--profile 8-10"),
        ("12-14", "", "ends after step 10, before step 14", "--profile 3"),
        ("3", "0,3", "there is no rank 3: this run has 3 ranks", "--profile-ranks 0,1,2"),
    ],
)
def test_what_cannot_be(steps: str, ranks: str, words: str, hint: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        request = profile_request.parse(steps, ranks)
        assert request is not None
        profile_request.chosen(request, 10, 3)
    assert hint in caught.value.hint and caught.value.where.startswith("--profile")
