"""Digests of large files, cheap enough for every preflight: samples of the content, and full digests that are kept while the file is the same."""

import contextlib
import hashlib
import os
import re
import time

from homelab.node import files, paths

SMALL_BYTES = 32 << 20  # up to here a file is read wholly: a tokenizer has 2 to 34 MB
_ENDS_BYTES = 1 << 20
_BLOCK_BYTES = 64 << 10
_BLOCKS = 16
_KEPT_AT_MOST = 5000
_DIGEST = re.compile("[0-9a-f]{64}")


def sampled(path, size_bytes):
    """Hex digest of a file's size, its first and last MB and 16 blocks of 64 KB spread evenly between them: 3 MB of reading."""
    digest = hashlib.sha256(b"%d\0" % size_bytes)
    step = (size_bytes - 2 * _ENDS_BYTES) // (_BLOCKS + 1)
    places = [_ENDS_BYTES + number * step for number in range(1, _BLOCKS + 1)] if step > _BLOCK_BYTES else []
    with open(path, "rb", buffering=0) as stream:
        for start, count in [(0, _ENDS_BYTES)] + [(place, _BLOCK_BYTES) for place in places]:
            digest.update(_read(stream, start, count))
        digest.update(_read(stream, max(0, size_bytes - _ENDS_BYTES), _ENDS_BYTES))
    return digest.hexdigest()


def _read(stream, start, count):
    stream.seek(start)
    return stream.read(count)


class Kept:
    """Full digests, kept in `<workdir>/digests.json` by path for as long as size, time of change and inode are the same."""

    def __init__(self, workdir, limit_s=60.0):
        self._path = os.path.join(paths.expand(workdir), "digests.json")
        known = files.read_json(self._path)
        self._known = known if isinstance(known, dict) else {}
        self._changed = False
        self._until = time.monotonic() + limit_s

    def of(self, path, deep=False):
        """One file: {"size_bytes", "sampled", "sha256", "blob"}.

        Small files have "sha256" alone; larger ones "sampled", and "sha256" where it is kept, or `deep` asks for it and there is time.
        "blob" is the sha256 that the hub's cache gave the file as its name when it was downloaded.
        """
        path = os.path.realpath(path)
        state = os.stat(path)
        mark = [state.st_size, state.st_mtime_ns, state.st_ino]
        entry = self._known.get(path)
        kept = entry.get("sha256") if isinstance(entry, dict) and entry.get("mark") == mark else None
        kept = kept if isinstance(kept, str) and _DIGEST.fullmatch(kept) else None
        small = state.st_size <= SMALL_BYTES
        if kept is None and (small or deep) and time.monotonic() < self._until:
            kept = files.sha256(path)
            self._known[path] = {"mark": mark, "sha256": kept}
            self._changed = True
        name = os.path.basename(path)
        return {
            "size_bytes": state.st_size,
            "sampled": None if small else sampled(path, state.st_size),
            "sha256": kept,
            "blob": name if _DIGEST.fullmatch(name) else None,
        }

    def save(self):
        """Write down what is new. A workdir that cannot be written costs time at the next call, and nothing else."""
        if not self._changed:
            return
        while len(self._known) > _KEPT_AT_MOST:
            del self._known[next(iter(self._known))]
        with contextlib.suppress(OSError):
            files.write_json(self._path, self._known)
