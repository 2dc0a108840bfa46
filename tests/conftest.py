"""The order of the suite: what takes long comes first, so that no worker is left with a long file at the end. And time enough on
any machine: a limit is there for what hangs, not for what is slow.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import pytest_timeout

from tests.lanes import pytest_addoption, pytest_configure  # noqa: F401

LEAST_S = 120.0  # any test; the first of a file often brings a lab up in this time, too
LAST_S = 300.0
LONG = ("e2e", "cli", "worker", "lab", "remote")

# A shell starts what it puts into the background with Ctrl-C ignored, and children inherit that: our tests send it to some.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def own_state_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What the commands remember between two calls is not that of the person who runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Folders of LONG first, in that order; a file stays together."""
    here = Path(__file__).parent

    def place(item: pytest.Item) -> int:
        folder = item.path.relative_to(here).parts[0]
        return LONG.index(folder) if folder in LONG else len(LONG)

    items.sort(key=place)
    for item in items:
        limit = item.get_closest_marker("timeout")
        if limit is not None and limit.args[0] < LEAST_S:
            item.add_marker(pytest.mark.timeout(LEAST_S), append=False)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """The last test of a process takes all labs down with it, and is often one that has half a minute for itself."""
    if nextitem is None:
        hook = item.config.pluginmanager.hook
        hook.pytest_timeout_cancel_timer(item=item)
        settings = pytest_timeout.Settings(timeout=LAST_S, method="signal", func_only=False, disable_debugger_detection=False)
        hook.pytest_timeout_set_timer(item=item, settings=settings)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The shape of the house, as `tests/test_limits.py` holds it."""
    if not any(
        "test_limits.py" in report.nodeid for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
    ):
        return  # reading the whole house takes seconds
    from tests import limits

    terminalreporter.section("the shape of the house")
    for line in limits.summary():
        terminalreporter.write_line(line)
