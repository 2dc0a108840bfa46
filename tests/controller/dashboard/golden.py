"""The pictures of recorded snapshots, as texts in the folder golden/. `python -m tests.controller.dashboard.golden` writes them anew: look at the difference."""

from __future__ import annotations

from pathlib import Path

from homelab.controller.dashboard import card_history, view
from homelab.controller.dashboard.plain_characters import ascii_line
from homelab.controller.dashboard.snapshot import Snapshot
from homelab.controller.dashboard.view_state import ViewState
from tests.controller.dashboard import sample, test_large, test_view

FOLDER = Path(__file__).parent / "golden"


def without_cards() -> Snapshot:
    """Nodes that train on their processors, at the third look."""
    shot = sample.snapshot()
    seen = None
    for count in range(3):
        rows = tuple(
            row.model_copy(
                update={"gpus": (), "received_bytes": 3_000_000 * count, "sent_bytes": 1_000_000 * count, "counted_at_s": 2.0 * count}
            )
            for row in shot.nodes
        )
        seen = card_history.with_history(shot.model_copy(update={"nodes": rows}), seen)
    assert seen
    return seen


# Name -> snapshot, width, height, what was chosen by keys.
PICTURES: dict[str, tuple[Snapshot, int, int | None, ViewState | None]] = {
    "running-80x24": (sample.snapshot(), 80, 24, ViewState()),
    "running-200x50": (test_large.shot(), 200, 50, ViewState()),
    "running-40x20": (sample.snapshot(), 40, 20, ViewState()),
    "running-piped": (sample.snapshot(), 100, None, None),
    "rank-1-120x40": (sample.snapshot(), 120, 40, ViewState(rank=1)),
    "scrolled-120x40": (sample.snapshot(), 120, 40, ViewState(lines_up=4)),
    "processors-200x50": (without_cards(), 200, 50, ViewState()),
    "paused-80x24": (sample.snapshot(), 80, 24, ViewState(is_paused=True)),
    "help-80x24": (sample.snapshot(), 80, 24, ViewState(is_help=True)),
    "failed-80x24": (test_view.failed(), 80, 24, ViewState()),
    "failed-200x50": (test_view.failed(), 200, 50, ViewState()),
    "ten-nodes-80x24": (test_view.many(10), 80, 24, ViewState()),
    "nobody-answers-80x24": (sample.snapshot(replies={}), 80, 24, ViewState()),
}


def drawn(name: str) -> str:
    """The picture as text, once with every sign and once in ASCII."""
    snapshot, width, height, state = PICTURES[name]
    lines = view.lines(snapshot, width, height, state)
    return (
        "\n".join(line.plain.rstrip() for line in lines)
        + "\n\nin ASCII:\n"
        + "\n".join(ascii_line(line).plain.rstrip() for line in lines)
        + "\n"
    )


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for picture in PICTURES:
        (FOLDER / f"{picture}.txt").write_text(drawn(picture), encoding="utf-8")
