"""Runs of tests have names of their own: `stop` looks through all processes of the machine for those of a run, also another test's."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path


def test_no_two_files_have_a_run_of_one_name() -> None:
    files = sorted(Path(__file__).parent.rglob("test_*.py"))
    names = [name for file in files for name in re.findall(r'^RUN\b[^=]*= (f?"[^"]+")', file.read_text(encoding="utf-8"), re.MULTILINE)]
    assert len(names) >= 8 and [name for name, count in Counter(names).items() if count > 1] == []
