"""A window of a run that is computed again: what asks for it in run.json, and what it leaves in its own folder.

    run.json        "window": {"run": "chats-...", "begin": 100, "end": 120, "passes": {"101": "00112", ...}, "kept": {"100": ..., "120": ...}}
    window/
        curves.jsonl    the lines of its own record after its first step
        compared.json   how far its weights are from those of the kept checkpoint of its last step, and the versions that have computed it

It begins from the kept checkpoint of step "begin" of that run (0: from nothing), and ends after step "end". "passes" may be left out: they are
those of the run's record, where they are to be repeated. "kept" are the digests of the state (`checkpoint_copies.state_digest`) that the record
names: a node that has another checkpoint of such a step has none.
"""

from __future__ import annotations

REQUEST = "window"
FOLDER = "window"
COMPARED = "compared.json"
