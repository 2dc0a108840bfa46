"""The picture on a terminal with keys: looks are made beside it, so that a key is answered while a node is slow."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from homelab.controller.dashboard import keyboard, log_section, view
from homelab.controller.dashboard.keyboard import Keyboard
from homelab.controller.dashboard.snapshot import Snapshot
from homelab.controller.dashboard.view_state import ViewState, press

_SIZE_EVERY_S = 0.5  # how often it is seen that a window has another size
_LAST_LOOK_S = 2.0  # a look that has its answers may still write them down


@dataclass(frozen=True)
class Watching:
    """What is watched: `collect` looks, once in `refresh_s`, until the run is over; `keep` is told each snapshot, and `on_leave` that nobody wants more."""

    collect: Callable[[], Snapshot]
    refresh_s: float
    keep: Callable[[Snapshot], None]
    on_leave: Callable[[], None]


class Looks:
    """Looks in a thread of their own, until one is the end. `on_news` is called behind each. A context manager."""

    def __init__(self, watched: Watching, on_news: Callable[[], None]) -> None:
        self._watched, self._on_news = watched, on_news
        self._newest: Snapshot | None = None
        self._error: BaseException | None = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="looks", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._watched.on_leave()
        self._thread.join(_LAST_LOOK_S)

    def newest(self) -> Snapshot | None:
        """The last one, None before the first. What `collect` has raised is raised here."""
        if self._error is not None:
            raise self._error
        return self._newest

    def _look(self) -> None:
        try:
            while not self._is_over.is_set():
                self._newest = self._watched.collect()
                self._on_news()
                if self._newest.is_over:
                    return
                self._is_over.wait(self._watched.refresh_s)
        except BaseException as error:  # noqa: BLE001 - it belongs to who draws: `newest` raises it
            self._error = error
            self._on_news()


class Picture:
    """What is on the screen, drawn anew only where something of it has changed."""

    def __init__(self, console: Console, board: Keyboard, *, is_ascii: bool) -> None:
        self._console, self._board, self._is_ascii = console, board, is_ascii
        self._live = Live(Text(" asking the nodes ..."), console=console, screen=True, auto_refresh=False)
        self._drawn: object = None
        self._is_shown = False

    def show(self) -> None:
        """Take the whole screen, and the keys; nothing in the background."""
        self.hide()
        if self._board.is_foreground():
            self._board.cbreak()
            self._live.start(refresh=True)
            self._is_shown, self._drawn = True, None

    def hide(self) -> None:
        """Give the screen back as it was."""
        if self._is_shown:
            self._live.stop()
            self._is_shown = False

    def draw(self, snapshot: Snapshot, state: ViewState) -> None:
        """The snapshot, at the terminal's size of now."""
        size = self._console.size
        wanted = (id(snapshot), state, size)
        if self._is_shown and wanted != self._drawn:
            drawn = view.render(snapshot, size.width, size.height, state, is_ascii=self._is_ascii)
            self._live.update(drawn, refresh=True)
            self._drawn = wanted


def watch(watched: Watching, console: Console, descriptor: int, *, is_ascii: bool) -> None:
    """Draw until the end, or until a key leaves. `descriptor`: the terminal of the keys. Raises what `collect` raises."""
    state, shown = ViewState(), None
    with keyboard.opened(descriptor) as board, Looks(watched, board.wake) as looks:
        picture = Picture(console, board, is_ascii=is_ascii)
        try:
            picture.show()
            while not state.is_left:
                newest = looks.newest()
                if newest is not None:
                    watched.keep(newest)
                    shown = shown if state.is_paused and shown else newest
                    picture.draw(shown, state)
                    if newest.is_over:
                        return
                for key in board.read(_SIZE_EVERY_S):
                    state = _after(key, state, shown, picture, board)
        finally:
            picture.hide()


def _after(key: str, state: ViewState, shown: Snapshot | None, picture: Picture, board: Keyboard) -> ViewState:
    """The state after a key. Ctrl-Z leaves the terminal to the shell as it was."""
    if key == keyboard.SUSPEND:
        picture.hide()
        board.give_back()
        board.stop_here()
        return state
    if key == keyboard.RESUME:
        picture.show()
        return state
    ranks = [row.rank for row in shown.ranks] if shown else []
    return press(state, key, ranks, len(log_section.log_lines(shown, state.rank)) if shown else 0)
