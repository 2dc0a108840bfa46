"""Whether a node is its owner's, by what the node says: the owner is there if a sign lasts, and gone if there has been no sign for long. Pure.

Moments are of a monotonic clock. A clock of a node that is set changes the node's hours, and nothing else.
"""

from __future__ import annotations

from collections.abc import Collection

from homelab.controller.base import daily_hours
from homelab.controller.run.leave import HOURS, Away, sign_key
from homelab.shared.protocol.house_messages import House, HouseSign

STAYS_S = 2.0  # a program that ends by itself at once wants nothing
QUIET_S = 600.0  # a game that is started anew, or a look at the mail, must not bring the run back in between
DEAF_S = 60.0  # whoever was not heard for so long may have come and gone


class HouseJudge:
    """Of one node. `hours` as cluster.toml has them. `before`: as which it was last known to be its owner's, None where it was not; `ignored`: keys of
    signs that a person has overridden, until each is gone once.

    It comes back at most once in `quiet_s`, because no sign may be seen for so long before. Hours, and the file of a person at the machine, are exact.
    """

    def __init__(self, hours: daily_hours.Spans, quiet_s: float, before: Away | None = None, ignored: Collection[str] = ()) -> None:
        self._hours, self._quiet_s = hours, quiet_s
        self._result = before
        self._why = before.because if before is not None and before.because != HOURS else ""
        self._needs_quiet = self._why != HouseSign(kind="asked").words
        self._quiet_since_s: float | None = None
        self._since_s: dict[tuple[str, int], float] = {}
        self._heard_s: float | None = None
        self.ignored = frozenset(ignored)

    def take_back(self, keys: Collection[str]) -> None:
        """A person wants it back now: these signs count no more until each is gone once."""
        self.ignored |= frozenset(keys)
        self._since_s.clear()
        self._why, self._result = "", None

    def see(self, house: House, at_s: float) -> None:
        """What the node has said at `at_s`. The same a second time changes nothing."""
        if self._heard_s is not None and at_s - self._heard_s > DEAF_S:
            self._since_s.clear()
            self._quiet_since_s = None
        self._heard_s = at_s
        opens = daily_hours.opens(self._hours, house.minute) if self._hours else None
        there = {sign_key(sign) for sign in house.signs} | ({HOURS} if opens is not None else set())
        self.ignored &= there
        signs = [sign for sign in house.signs if sign_key(sign) not in self.ignored]
        self._judge(signs, at_s)
        closed = opens is not None and HOURS not in self.ignored
        self._result = Away(daily_hours.clock(opens), HOURS) if closed and opens is not None else Away("", self._why) if self._why else None

    @property
    def away(self) -> Away | None:
        """That it is its owner's; None where it is not."""
        return self._result

    def _judge(self, signs: Collection[HouseSign], at_s: float) -> None:
        marks = {(sign_key(sign), sign.pid): sign for sign in signs}
        self._since_s = {mark: self._since_s.get(mark, at_s) for mark in marks}
        lasting = [sign for mark, sign in marks.items() if sign.kind == "asked" or at_s - self._since_s[mark] >= STAYS_S]
        if lasting and not self._why:
            self._why, self._needs_quiet = lasting[0].words, False
        self._needs_quiet = self._needs_quiet or any(sign.kind != "asked" for sign in lasting)
        if signs:
            self._quiet_since_s = None
        elif self._why:
            self._quiet_since_s = at_s if self._quiet_since_s is None else self._quiet_since_s
            if not self._needs_quiet or at_s - self._quiet_since_s >= self._quiet_s:
                self._why, self._quiet_since_s = "", None
