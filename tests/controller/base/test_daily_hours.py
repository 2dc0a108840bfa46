"""Hours of the day, over midnight too."""

from __future__ import annotations

import pytest

from homelab.controller.base import daily_hours

pytestmark = pytest.mark.timeout(30)


@pytest.mark.parametrize(
    ("hours", "now", "opens"),
    [
        ("23:00-07:00", "22:59", "23:00"),
        ("23:00-07:00", "23:00", None),
        ("23:00-07:00", "00:00", None),
        ("23:00-07:00", "06:59", None),
        ("23:00-07:00", "07:00", "23:00"),
        ("23:00-07:00, 12:00-13:00", "07:00", "12:00"),
        ("23:00-07:00, 12:00-13:00", "12:30", None),
        ("23:00-07:00, 12:00-13:00", "13:00", "23:00"),
        ("09:00-10:00", "23:59", "09:00"),
        ("00:00-23:59", "23:59", "00:00"),
    ],
)
def test_when_a_node_trains(hours: str, now: str, opens: str | None) -> None:
    found = daily_hours.opens(daily_hours.spans(hours), daily_hours.minute(now))
    assert (None if found is None else daily_hours.clock(found)) == opens


def test_one_way_to_write_them() -> None:
    assert daily_hours.tidy(" 9:00 - 10:30,23:00-7:00") == "09:00-10:30, 23:00-07:00" and daily_hours.tidy("") == ""


@pytest.mark.parametrize(
    "text", ["23:00", "23-07", "24:00-07:00", "23:00-07:60", "08:00-08:00", "23:00-07:00,", "night", "-", "1:00-2:00-3:00"]
)
def test_what_are_no_hours(text: str) -> None:
    with pytest.raises(ValueError):
        daily_hours.tidy(text)
