"""What a newcomer reads of a dashboard that draws over itself is its last picture, and not each of them."""

from __future__ import annotations

import io

import pytest
from benchmarks import journey
from rich.console import Console
from rich.live import Live
from rich.text import Text

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("screen", [False, True])
def test_what_stays_on_the_screen(screen: bool) -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=80, height=24, legacy_windows=False)
    console.print("run one is starting")
    with Live(Text("step 0\nrank 0  waits"), console=console, auto_refresh=False, screen=screen) as live:
        for step in range(1, 50):
            live.update(Text(f"step {step}\nrank 0  trains" + "\nrank 1  trains" * (step > 20)), refresh=True)
        live.update(Text("step 50\ndone"), refresh=True)
    console.print("Next: homelab chat")
    raw = written.getvalue().replace("\n", "\r\n")
    assert raw.count("trains") > 49, "all pictures were written"
    shown = [line for line in journey.on_screen(raw).splitlines() if line]
    assert shown == ["run one is starting", *([] if screen else ["step 50", "done"]), "Next: homelab chat"]
