"""The table of measured cards that the package ships (`homelab.controller.planning.speed.measured_cards`): read, typed and bounded row by row.

A line is one row in JSON, as `homelab bench card` writes it: to add one, its file is put at the table's end. A row that cannot be is refused and
named, and stops no plan: a run that needs a new plan in the night must get one.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

from pydantic import ValidationError

from homelab.controller.base.sanitize import plain_lines, shortened
from homelab.controller.config.file_faults import faults_of
from homelab.controller.planning.speed import measured_cards
from homelab.controller.planning.speed.measured_cards import MeasuredCard, Table

SHIPPED = Path(measured_cards.__file__).with_suffix(".jsonl")
_MOST_BYTES, _MOST_TOLD = 8 << 20, 3
_AGAIN = "install homelab again, or restore the file (git checkout)"
_FIX = "correct the row (homelab bench card writes valid ones), or remove the line"


@functools.cache
def shipped() -> Table:
    """The table of the package."""
    return read(SHIPPED)


def read(path: Path) -> Table:
    """The rows of a file that can be, and what is wrong with the others: file, line, key and what mends it."""
    try:
        with path.open(encoding="utf-8") as stream:
            text = stream.read(_MOST_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        return Table((), (f"the measured cards of others cannot be read: {error} ({path}): {_AGAIN}",))
    if len(text) > _MOST_BYTES:
        return Table((), (f"the measured cards of others are not used: over {_MOST_BYTES >> 20} MB ({path}): {_AGAIN}",))
    rows, refused = [], []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        row = parse(line)
        if isinstance(row, MeasuredCard):
            rows.append(row)
        else:
            key, why = row
            refused.append(
                f"a row of measured cards is not used: {path}, line {number}{f', key {key}' if key else ''}: {shortened(plain_lines(why))}; {_FIX}"
            )
    more = [f"{len(refused) - _MOST_TOLD} more rows of {path} are not used"] if len(refused) > _MOST_TOLD else []
    return Table(tuple(rows), (*refused[:_MOST_TOLD], *more))


def parse(line: str) -> MeasuredCard | tuple[str, str]:
    """The row of one line, or the key that is wrong in it, and why."""
    try:
        row = MeasuredCard.model_validate_json(line)
    except ValidationError as error:
        location, message = faults_of(error, MeasuredCard)[0]
        return ".".join(map(str, location)), message
    return measured_cards.fault(row) or row


def written(row: MeasuredCard) -> str:
    """The row as one line of the table."""
    return json.dumps(row.model_dump(mode="json", exclude_none=True)) + "\n"
