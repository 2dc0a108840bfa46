"""Work on all nodes at once: outcomes by name, and Ctrl-C ends what goes on."""

from __future__ import annotations

import signal
import threading
from typing import Any, cast

import pytest

from homelab.controller.base.errors import HomelabError
from homelab.controller.remote.fanout import Fleet, on_all
from tests import builders

pytestmark = pytest.mark.timeout(60)


def test_an_error_is_the_outcome_of_its_node() -> None:
    def work(name: str) -> int:
        if name == "b":
            raise HomelabError("no")
        return 1

    results, errors = on_all(["a", "b", "c"], work)
    assert results == {"a": 1, "c": 1} and str(errors["b"].message) == "no"


def test_ctrl_c_calls_stop_and_starts_nothing_more() -> None:
    stopped, begun = threading.Event(), threading.Barrier(33)
    names = [str(number) for number in range(40)]  # more than there are threads
    worked: list[str] = []

    def work(name: str) -> None:
        worked.append(name)
        begun.wait(30)
        assert stopped.wait(30)

    def press() -> None:
        begun.wait(30)
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGINT)
        while not stopped.wait(2):  # a signal in the instant before the main thread goes to sleep does not wake it
            signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=press).start()
    with pytest.raises(KeyboardInterrupt):
        on_all(names, work, stop=stopped.set)
    assert stopped.is_set() and len(worked) == 32


def test_a_node_that_is_reached_while_the_fleet_closes_is_let_go_of_too() -> None:
    """Soaked for four minutes, a supervisor ended with "dictionary changed size during iteration": its own look connected to a node that was back."""
    fleet, closed = Fleet(builders.cluster(["a", "b"])), list[str]()

    class Reached:
        def __init__(self, name: str) -> None:
            self.name = name

        def close(self) -> None:
            closed.append(self.name)
            if self.name == "a":
                fleet._agents["b"] = cast(Any, Reached("b"))

    fleet._agents["a"] = cast(Any, Reached("a"))
    with fleet:
        pass
    assert closed == ["a", "b"]
