"""What a test costs is written down, and a file that costs more than its budget fails the run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests import costs, selection

SAMPLE = """
import subprocess, sys, time
SPEND = "import time; end = time.process_time() + 0.3\\nwhile time.process_time() < end: pass"
def test_computes(): exec(SPEND)
def test_has_it_computed(): subprocess.run([sys.executable, "-c", SPEND], check=True)
def test_waits(): time.sleep(0.5)
def test_has_it_computed_by_nobodys_child():
    first = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SPEND!r}], start_new_session=True)"
    subprocess.run([sys.executable, "-c", first], check=True)
    time.sleep(1.5)
"""
OPTIONS = """
from pathlib import Path
from tests.costs import Costs
def pytest_configure(config): config.pluginmanager.register(Costs(Path(__file__).with_name("costs.jsonl")))
"""


def test_cpu_seconds_of_a_test_and_its_children(tmp_path: Path) -> None:
    (tmp_path / "test_sample.py").write_text(SAMPLE)
    (tmp_path / "options_here.py").write_text(OPTIONS)
    line = [sys.executable, "-m", "pytest", "-p", "options_here", "--rootdir", str(tmp_path), "-c", "/dev/null", str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment["PYTHONPATH"] = f"{costs.ROOT}{os.pathsep}{tmp_path}"
    subprocess.run(line, check=True, env=environment, capture_output=True, timeout=60)
    computes, asks, waits, leaves = map(eval, (tmp_path / "costs.jsonl").read_text().splitlines())
    assert computes["cpu_seconds"] >= 0.3 and asks["cpu_seconds"] >= 0.3
    assert waits["cpu_seconds"] < 0.3 and waits["seconds"] >= 0.5
    if os.access(costs.Account.tree / "cgroup.procs", os.W_OK):
        assert leaves["cpu_seconds"] >= 0.3, "as the nodes of a lab are: what they do counted as nothing"
    (spent,) = costs.by_file(tmp_path / "costs.jsonl").values()
    assert spent >= 0.6


def test_two_and_a_half_times_the_budget_are_too_dear() -> None:
    budgets = {"tests/a.py": 10.0, "tests/b.py": 10.0}
    found = costs.over_budget(Counter({"tests/a.py": 25.1, "tests/b.py": 24.9, "tests/c.py": 5.1}), budgets, 2.0)
    assert [line.split(":")[0] for line in found] == ["tests/a.py", "tests/c.py"]


def test_a_slow_machine_is_not_a_dear_test() -> None:
    budgets = {f"tests/{number}.py": 10.0 for number in range(costs.ENOUGH)}
    usual = Counter(dict.fromkeys(budgets, 4.0))
    slow = Counter(dict.fromkeys(budgets, 9.0)) | Counter({"tests/0.py": 50.0})
    assert costs.over_budget(usual | Counter({"tests/0.py": 25.5}), budgets, 2.0) != []
    assert costs.over_budget(slow, budgets, 2.0) == []
    assert [line.split(":")[0] for line in costs.over_budget(slow | Counter({"tests/0.py": 57.0}), budgets, 2.0)] == ["tests/0.py"]
    assert costs.slowness(slow, {name: budgets[name] for name in list(budgets)[1:]}) == 1.0, "few files say nothing of a machine"


def test_files_that_were_skipped_make_no_other_too_dear() -> None:
    """Without root, a card or a compiler many files cost next to nothing, on a slow machine too."""
    played = {f"tests/{number}.py": 10.0 for number in range(costs.ENOUGH)}
    skipped = {f"tests/skipped_{number}.py": 10.0 for number in range(2 * costs.ENOUGH)}
    sums = Counter(dict.fromkeys(played, 9.0)) | Counter(dict.fromkeys(skipped, 0.2)) | Counter({"tests/0.py": 50.0})
    assert costs.over_budget(sums, played | skipped, 2.0) == []


def test_every_budget_is_of_a_file() -> None:
    budgets, default = costs.told()
    assert [name for name in budgets if not (costs.ROOT / name).is_file()] == []
    assert all(budget > default > 0 for budget in budgets.values())


def test_fast_tests_need_no_torch_and_no_lab() -> None:
    fast = selection.fast()
    assert {"tests/shared/law/test_order.py", "tests/controller/planning/test_plan.py", "tests/controller/dashboard/test_view.py"} <= fast
    assert not any(name.startswith(("tests/e2e/", "tests/lab/", "tests/cli/")) for name in fast)
    assert "tests/worker/training/test_exactness.py" not in fast and len(fast) > 100


def test_what_lies_above_a_change_is_chosen() -> None:
    view = selection.above(["homelab/controller/dashboard/view.py"])
    assert {"tests/controller/dashboard/test_view.py", "tests/cli/test_status.py", "tests/test_limits.py"} <= view
    assert "tests/shared/law/test_order.py" not in view and "tests/worker/training/test_exactness.py" not in view
    assert "tests/worker/training/test_exactness.py" in selection.above(["tests/worker/harness.py"])
    assert "tests/e2e/test_law.py" in selection.above(["homelab/worker/training/trainer.py"])
    assert "tests/test_readme.py" in selection.above(["README.md"])
    assert selection.above([]) == set()


def test_every_file_of_the_product_has_a_test_above_it() -> None:
    """A program that other machines start has none: the worker itself."""
    product = {name for name in selection.arrows() if name.startswith("homelab/") and not name.endswith("__init__.py")}
    above = set().union(*(selection.reached(name) for name in selection.tests() if name not in selection.RULES))
    assert product - above == {"homelab/worker/__main__.py"}


@pytest.mark.parametrize(
    ("changed", "test"),
    [
        ("homelab/controller/checks/machine/memory.py", "tests/controller/checks/test_recorded.py"),
        ("tests/controller/checks/recorded/memory.free.toml", "tests/controller/checks/test_recorded.py"),
        ("homelab/controller/diagnose/rules/hub.toml", "tests/controller/diagnose/test_rules.py"),
        ("homelab/docs/preflight.md", "tests/test_english.py"),
        ("homelab/docs/reference/recipe.train.toml", "tests/controller/config/test_reference.py"),
    ],
)
def test_what_is_read_and_not_imported_has_its_tests(changed: str, test: str) -> None:
    assert test in selection.above([changed])
