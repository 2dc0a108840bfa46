"""The README's picture, drawn by today's dashboard from the recorded answer of a real run: `scripts/docs --texts` writes it.

To record another run, while it trains: homelab status --json > scripts/pages/recorded_status.json
"""

from __future__ import annotations

import os
import time
from io import StringIO
from pathlib import Path

from rich.console import Console

from homelab.controller.dashboard import view
from homelab.controller.dashboard.snapshot import Snapshot

_RECORDED = Path(__file__).with_name("recorded_status.json")
_WIDTH = 100
# rich's own, without its web fonts: a picture in a README must not load anything.
_SVG = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xml:space="preserve" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: "DejaVu Sans Mono", Menlo, Consolas, monospace; font-size: {char_height}px;
  line-height: {line_height}px; font-variant-east-asian: full-width; }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" /></clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def svg() -> str:
    """The picture; times are UTC."""
    snapshot = Snapshot.model_validate_json(_RECORDED.read_text(encoding="utf-8"))
    console = Console(record=True, width=_WIDTH, file=StringIO(), force_terminal=True, color_system="truecolor")
    before = os.environ.get("TZ")
    try:
        os.environ["TZ"] = "UTC"
        time.tzset()
        console.print(view.render(snapshot, _WIDTH, None))
    finally:
        os.environ.pop("TZ")
        os.environ.update({} if before is None else {"TZ": before})
        time.tzset()
    return console.export_svg(title=f"homelab status {snapshot.run}", code_format=_SVG)
