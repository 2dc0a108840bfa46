"""A look into the training data before a launch: this node's tokenizer over some rows. What was seen once is kept."""

import contextlib
import heapq
import json
import os
import re
import subprocess
import sys
import tempfile
import time

from homelab.node import files, hub, paths

ON_NODE_BYTES = 32 << 20  # of a file that lies here
_KEPT_AT_MOST = 50
_LIMIT_S = 120.0
LONGEST_ROWS = 3
_LONGEST_BYTES = 1 << 20  # of the text of one such row; of a longer one the size alone is told
_SCAN_S = 10.0
_KEY = re.compile("[0-9a-f]{16,64}")


def sample_data(request, stream):
    """{"sample": what `homelab.worker.sample` found, or None}.

    `request`: workdir, key (names everything that the answer depends on), only_kept (true: nothing is read, None where nothing
    is kept), model (folder or None), revision, data ([data] of the recipe), seq_len, files {role: {"shown", "bytes", "whole",
    "unread", "longest", "path", "hub"}}, secrets (for the hub, kept nowhere). The rows are the next `bytes` of `stream`, in the order of
    the roles, or those of `path` where `bytes` is None, or those of the data set `hub`, which may be another one the next time: of it
    nothing is kept. `longest`: what `longest_after` found behind them.
    """
    key = str(request["key"])
    if not _KEY.fullmatch(key):
        raise ValueError("not a usable key: %r" % key)
    place = os.path.join(paths.expand(request["workdir"]), "samples.json")
    kept = files.read_json(place)
    kept = kept if isinstance(kept, dict) else {}
    if key in kept or request.get("only_kept"):
        return {"sample": kept.get(key)}
    with tempfile.TemporaryDirectory(prefix="homelab-sample-") as folder:
        found = _ask(dict(request, files=dict(_written(request["files"], stream, folder))))
    if any(file.get("hub") for file in request["files"].values()):
        return {"sample": found}
    kept[key] = found
    while len(kept) > _KEPT_AT_MOST:
        del kept[next(iter(kept))]
    with contextlib.suppress(OSError):  # the next look costs seconds again
        files.write_json(place, kept)
    return {"sample": found}


def _written(wanted, stream, folder):
    """Each role with a file of its own to read, which may be changed. A Parquet file is read where it lies, hub data by the worker."""
    for role, file in sorted(wanted.items()):
        if file.get("hub"):
            yield role, {"hub": file["hub"], "shown": file["shown"]}
            continue
        longest = file.get("longest") or []
        if file.get("bytes") is not None:
            rows, whole = stream.read(int(file["bytes"])), bool(file.get("whole"))
            rows = None if file.get("unread") else rows
        else:
            path = paths.expand(file["path"])
            if path.endswith(".parquet"):
                yield role, {"path": path, "shown": file["shown"], "whole": False}
                continue
            rows, whole = beginning(path, ON_NODE_BYTES)
            longest = longest_after(path, len(rows)) if rows is not None and not whole else []
        place = None
        if rows is not None:
            os.mkdir(os.path.join(folder, paths.checked(role)))
            place = os.path.join(folder, role, os.path.basename(str(file["shown"])))  # hints name it
            with open(place, "wb") as out:
                out.write(rows)
        yield role, {"path": place, "shown": file["shown"], "whole": whole, "longest": longest}


def longest_after(path, skipped_bytes):
    """The longest lines of a .jsonl file behind those `skipped_bytes`: [{"line", "bytes", "text" (None where it is too long to be sent)}].

    None of other kinds, whose rows cannot be told without a parser. At most `_SCAN_S` seconds of a file are read.
    """
    if os.path.splitext(path)[1] != ".jsonl":
        return []
    found, until = [], time.monotonic() + _SCAN_S
    with open(path, "rb") as stream:
        first = stream.read(skipped_bytes).count(b"\n") + 1
        for number, line in enumerate(stream, start=first):
            if len(found) < LONGEST_ROWS or len(line) > found[0][0]:
                text = line.decode("utf-8", "replace") if len(line) <= _LONGEST_BYTES else None
                push = heapq.heappush if len(found) < LONGEST_ROWS else heapq.heapreplace
                push(found, (len(line), number, text))
            if number % 4096 == 0 and time.monotonic() > until:
                break
    return [{"line": number, "bytes": size, "text": text} for size, number, text in sorted(found, reverse=True)]


def beginning(path, limit_bytes):
    """(the first rows of a data file, whether these are all of them). None for rows where a cut could not be told from a fault."""
    suffix = os.path.splitext(path)[1]
    with open(path, "rb") as stream:
        rows = stream.read(limit_bytes + 1)
    if len(rows) <= limit_bytes:
        return rows, True
    if suffix == ".jsonl":
        end = rows.rfind(b"\n") + 1
    elif suffix == ".csv":
        end = rows.rfind(b"\n") + 1
        while end and rows.count(b'"', 0, end) % 2:  # inside of quotes
            end = rows.rfind(b"\n", 0, end - 1) + 1
    elif suffix == ".txt":
        end = rows.rfind(b"\n\n") + 1
    elif suffix == ".json":
        return _first_of_list(rows), False
    elif suffix == ".parquet":
        return None, False
    else:  # no data file: its first bytes say what it is
        return rows[:limit_bytes], False
    return (rows[:end] or None), False


def _first_of_list(rows):
    """The whole elements at the start of a JSON list that is cut somewhere, as a list."""
    text = rows.decode("utf-8-sig", "ignore")
    decoder, end = json.JSONDecoder(), 0
    found = re.match(r"\s*\[\s*", text)
    place = found.end() if found else len(text)
    while place < len(text):
        try:
            _, end = decoder.raw_decode(text, place)
        except ValueError:
            break
        more = re.compile(r"\s*,\s*").match(text, end)
        if more is None:
            break
        place = more.end()
    return ("%s]" % text[:end]).encode() if end else None


def _ask(question):
    """The worker's look: the last JSON line of its stdout."""
    command = [sys.executable, "-m", "homelab.worker.sample"]
    environment = dict(os.environ, **question.pop("secrets", None) or {})
    if any(file.get("hub") for file in question["files"].values()) and hub.way() not in ("ok", None):
        environment["HF_HUB_OFFLINE"] = "1"  # what is in the cache is looked into at once; else every request is tried for half a minute
    try:
        done = subprocess.run(
            command, input=json.dumps(question), capture_output=True, text=True, timeout=_LIMIT_S, errors="replace", env=environment
        )
        return json.loads((done.stdout.strip().splitlines() or [""])[-1])
    except subprocess.TimeoutExpired:
        raise ValueError("the look into the data did not end within %.0f s" % _LIMIT_S) from None
    except ValueError:
        last = (done.stderr.strip().splitlines() or ["exit code %d" % done.returncode])[-1]
        raise ValueError("the look into the data failed: %s" % last[:500]) from None
