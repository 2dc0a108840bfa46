"""Adding a check is one function and one file of recorded cases: done with those of toy/, on the paths of the product."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from homelab.controller.checks import registry
from homelab.controller.checks.check import SOURCES, Check, check, in_order
from homelab.controller.facts.node import Facts
from homelab.node.facts import PROBES

pytestmark = pytest.mark.timeout(60)

TOY = Path(__file__).parent / "toy"
# The folder of the toy becomes a part of a room of the checks. Nothing else is told of it.
JOINED = f"import homelab.controller.checks.machine as room; room.__path__.append({str(TOY)!r}); "
LIST = "from homelab.cli.main import main; main()"
JUDGE = """
import json
from pathlib import Path
from tests.controller.checks import test_recorded as recorded
cases = recorded.load(Path({path!r}))
print(json.dumps([[case.name, [finding.as_dict() for finding in recorded.judged("disk.nearly_full", recorded.built(case))]] for case in cases]))
"""


def output_of(code: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", JOINED + code, *arguments], capture_output=True, text=True, cwd=TOY.parents[3])
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_new_check_is_listed_at_its_place_and_the_others_stay_as_they_are() -> None:
    rows = output_of(LIST, "preflight", "--list").splitlines()
    place = rows.index("| `disk.nearly_full` | a tenth of the disk is free | warn |")
    assert rows[place - 1].startswith("| `disk.room` |")
    without = subprocess.run([sys.executable, "-c", LIST, "preflight", "--list"], capture_output=True, text=True).stdout.splitlines()
    assert rows[:place] + rows[place + 1 :] == without


def test_a_new_check_is_judged_by_its_recorded_cases() -> None:
    (bad, findings), (good, nothing) = json.loads(output_of(JUDGE.format(path=str(TOY / "disk.nearly_full.toml"))))
    assert bad == "a disk that is nearly full"
    assert [(finding["check"], finding["node"], finding["level"]) for finding in findings] == [("disk.nearly_full", "laptop", "warn")]
    assert good == "a disk that is full to nine tenths"
    assert nothing == []


def test_a_check_that_sees_what_does_not_exist_is_refused_where_it_is_declared() -> None:
    with pytest.raises(ValueError, match=r'the check disk\.x sees "disks"'):
        check("disk.x", "", worst="warn", sees="disks")


def test_a_check_behind_one_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match=r"disk\.nowhere"):
        in_order([Check("disk.x", "", "warn", "resources", after="disk.nowhere")])


def test_every_probe_is_a_field_of_the_facts_and_a_source_of_checks() -> None:
    assert set(PROBES) == set(Facts.model_fields) - {"node", "broken"}
    assert set(PROBES) < SOURCES


def test_every_source_is_used_by_a_check_or_by_the_planner() -> None:
    assert SOURCES - {check.sees for check in registry.CHECKS} == {"speed_profiles", "collective_check"}
