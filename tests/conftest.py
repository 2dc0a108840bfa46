"""The order of the suite: the dearest files come first, so that no lane is left with a long one at the end; what is spare comes behind
all others. And time enough on any machine: a limit is there for what hangs, not for what is slow.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import pytest_timeout
import typer

from tests import costs, lanes, selection, small_model, spare

IMPORTED = ("bitsandbytes", "peft", "transformers.models.llama.modeling_llama", "transformers.trainer")
LEAST_S = 120.0  # any test; the first of a file often brings a lab up in this time, too
LAST_S = 300.0
LONG = ("e2e", "cli", "worker", "lab", "remote")

# A slow machine, and what is thorough: every limit is so many times as long.
PATIENCE = float(os.environ.get("HOMELAB_TESTS_PATIENCE", "1"))
COSTS = costs.ROOT / ".pytest_cache" / "costs.jsonl"

# Each call of a command makes all commands with their options anew, 0.06 s: here once.
typer.main.get_command = functools.cache(typer.main.get_command)

# A shell starts what it puts into the background with Ctrl-C ignored, and children inherit that: our tests send it to some.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The servers of tests are on this machine: a person's proxy does not reach them.
os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(
    name for name in (os.environ.get("no_proxy") or os.environ.get("NO_PROXY"), "127.0.0.1", "localhost") if name
)


def pytest_addoption(parser: pytest.Parser) -> None:
    lanes.add_option(parser)
    spare.add_option(parser)
    parser.addoption("--select", metavar="fast|changed[:COMMIT]", help="only the test files without torch and labs, or above a change")
    parser.addoption("--budgets", action="store_true", help="fail when a test file costs more CPU than tests/budgets.toml says")


def pytest_configure(config: pytest.Config) -> None:
    lanes.configure(config)
    if config.option.lanes and config.option.select != "fast" and os.environ.get("HOMELAB_MODEL"):
        config.pluginmanager.register(small_model.SmallModel())
    config.pluginmanager.register(costs.Costs(COSTS))
    if config.option.spare_until is not None:
        config.pluginmanager.register(spare.SpareTime(config.option.spare_until))
    if config.option.select:
        config.stash[CHOSEN] = selection.selected(config.option.select)


CHOSEN = pytest.StashKey[set[str]]()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    chosen = config.stash.get(CHOSEN, None)
    if chosen is None or collection_path.is_dir() or not collection_path.is_relative_to(costs.ROOT):
        return None
    return str(collection_path.relative_to(costs.ROOT)) not in chosen or None


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if "not thorough" not in session.config.option.markexpr:  # a thorough test has no budget
        return
    session.config.stash[DEAR] = dear = costs.over_budget(costs.by_file(COSTS), *costs.told())
    if dear and session.config.option.budgets:
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


DEAR = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session", autouse=True)
def own_state_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What the commands remember between two calls is not that of the person who runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with a large budget first; of the same budget, folders of LONG in that order. A file stays together."""
    budgets, default = costs.told()

    def place(item: pytest.Item) -> tuple[float, int]:
        name = item.path.relative_to(costs.ROOT)
        return -budgets.get(str(name), default), LONG.index(name.parts[1]) if name.parts[1] in LONG else len(LONG)

    items.sort(key=place)
    spare.mark(items, costs.ROOT)
    for item in items:
        limit = item.get_closest_marker("timeout")
        if limit is not None and (limit.args[0] < LEAST_S or PATIENCE > 1):
            item.add_marker(pytest.mark.timeout(max(limit.args[0], LEAST_S) * PATIENCE), append=False)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Once for all lanes, while the small model is made: each of them would import it by itself, ten seconds of a core in whatever test comes first."""
    if session.config.option.lanes and any("worker" in item.path.parts for item in session.items):
        for name in IMPORTED:
            with contextlib.suppress(ImportError):  # not installed: the test that needs it says so
                importlib.import_module(name)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """The last test of a process takes all labs down with it, and is often one that has half a minute for itself."""
    if nextitem is None:
        hook = item.config.pluginmanager.hook
        hook.pytest_timeout_cancel_timer(item=item)
        settings = pytest_timeout.Settings(timeout=LAST_S, method="signal", func_only=False, disable_debugger_detection=False)
        hook.pytest_timeout_set_timer(item=item, settings=settings)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """What costs more than it may, and the shape of the house as `tests/test_limits.py` holds it."""
    for line in config.stash.get(DEAR, []):
        terminalreporter.write_line(f"too dear: {line}", red=True)
    if not any(report.nodeid.startswith("tests/test_limits.py") for report in terminalreporter.getreports("passed")):
        return
    from tests import limits

    terminalreporter.section("the shape of the house")
    for line in limits.summary():
        terminalreporter.write_line(line)
