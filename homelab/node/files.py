"""Small files, written so that a reader never sees half of one; checkpoints verified by their manifest."""

import glob
import hashlib
import json
import os
import shutil

CHECKPOINT_SCHEMA = 1  # of complete.json, as homelab.worker.checkpoint writes it
_MOST_JSON_BYTES = 64 << 20  # the largest of ours, of kept digests, has one


def write_atomic(path, data, mode=0o644):
    """Write bytes beside `path`, fsync, and put them in place with one rename."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    partial = "%s.partial.%d" % (path, os.getpid())
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, path)
    except BaseException:
        if os.path.exists(partial):
            os.unlink(partial)
        raise


def write_json(path, value, mode=0o644):
    """`write_atomic` of readable JSON."""
    write_atomic(path, (json.dumps(value, indent=1, sort_keys=True) + "\n").encode(), mode)


def read_json(path):
    """The value, or None when the file is missing or broken (a reader cannot do better; the writer is atomic)."""
    try:
        if not os.path.isfile(path) or os.path.getsize(path) > _MOST_JSON_BYTES:  # a pipe would be waited for
            return None
        with open(path, encoding="utf-8") as stream:
            return json.load(stream)
    except (OSError, ValueError, RecursionError):
        return None


def read_object(path):
    """The JSON object; None when the file is missing, broken or holds something else."""
    value = read_json(path)
    return value if isinstance(value, dict) else None


def sha256(path):
    """Hex digest of a file."""
    return digest_and_rows(path)[0]


def digest_and_rows(path):
    """(hex digest of a file, its rows of training data), read once.

    Rows are lines (.jsonl), lines after the header (.csv) or paragraphs (.txt): a count of line breaks, so empty lines and breaks
    inside of quotes are miscounted by a few. None for kinds whose rows cannot be counted without a parser.
    """
    digest = hashlib.sha256()
    lines = paragraphs = 0
    last = b"\n"
    with open(path, "rb") as stream:
        for block in iter(lambda: stream.read(1 << 20), b""):
            digest.update(block)
            lines += block.count(b"\n")
            paragraphs += (last[-1:] + block).count(b"\n\n")
            last = block[-1:]
    lines += last != b"\n"
    rows = {".jsonl": lines, ".csv": lines - 1, ".txt": paragraphs + 1}.get(os.path.splitext(path)[1].lower())
    return digest.hexdigest(), None if rows is None or rows < 1 else rows


def objects(lines):
    """The JSON objects among some lines of text; one that was cut short, or is broken in another way, is left out."""
    found = []
    for line in lines:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def tail(path, line_count, byte_limit=64 * 1024):
    """The last lines of a text file, [] when there is none. Reads at most `byte_limit` bytes."""
    if not os.path.isfile(path):  # a pipe would be waited for
        return []
    try:
        with open(path, "rb") as stream:
            stream.seek(0, os.SEEK_END)
            start = max(0, stream.tell() - byte_limit)
            stream.seek(start)
            lines = stream.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    if start:
        lines = lines[1:]
    return lines[-line_count:] if line_count else []


def checkpoint_fault(folder):
    """None when the checkpoint is whole and that of its folder's step, else what is wrong with it (sizes and sha256 against complete.json)."""
    manifest = read_json(os.path.join(folder, "complete.json"))
    if not isinstance(manifest, dict):
        return "no manifest"
    parts = manifest.get("files")
    if manifest.get("schema") != CHECKPOINT_SCHEMA or not isinstance(manifest.get("step"), int):
        return "its manifest is not one of homelab's"
    if not isinstance(parts, dict) or not parts or not all(isinstance(part, dict) for part in parts.values()):
        return "its manifest names no files"
    if os.path.basename(folder).lstrip(".").split(".")[0] != checkpoint_name(manifest["step"]):
        return "its manifest is of step %d" % manifest["step"]
    for name, expected in parts.items():
        path = os.path.join(folder, name)
        try:
            size_bytes = os.path.getsize(path)
            if size_bytes != expected.get("bytes"):
                return "%s has %d bytes, not %s" % (name, size_bytes, expected.get("bytes"))
            if sha256(path) != expected.get("sha256"):
                return "%s has another content than when it was saved" % name
        except FileNotFoundError:
            return "%s is missing" % name
        except OSError as error:  # a disk that fails, too: there may be an older one that it still gives back
            return "%s cannot be read: %s" % (name, error.strerror or error)
    return None


def set_aside(folder):
    """Move a checkpoint that is not whole out of the way; the newest such is kept as evidence. Its new path."""
    root, name = os.path.split(folder)
    for old in glob.glob(os.path.join(glob.escape(root), ".step-*.corrupt")):
        shutil.rmtree(old, ignore_errors=True)
    aside = os.path.join(root, ".%s.corrupt" % name)
    os.replace(folder, aside)
    return aside


def sync(path):
    """Have the disk hold a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checkpoint_steps(run_folder):
    """Steps of the checkpoints that have a manifest, rising; their contents are not read. Somebody's copy by another name is none."""
    root = os.path.join(run_folder, "checkpoints")
    try:
        names = os.listdir(root)
    except OSError:
        return []
    steps = []
    for name in names:
        digits = name[5:] if name.startswith("step-") else ""
        is_ours = digits.isascii() and digits.isdecimal() and name == checkpoint_name(digits)
        if is_ours and os.path.exists(os.path.join(root, name, "complete.json")):
            steps.append(int(digits))
    return sorted(steps)


def checkpoint_name(step):
    """Of the folder of the checkpoint after this optimizer step."""
    return "step-%08d" % int(step)


def checkpoint_dir(run_folder, step):
    """Folder of the checkpoint after this optimizer step."""
    return os.path.join(run_folder, "checkpoints", checkpoint_name(step))
