"""Bytes in and out of a node: data files and checkpoints, verified, and in place only when whole."""

import contextlib
import hashlib
import os
import re
import shutil
import tarfile

from homelab.node import files, manifest, paths


def has_file(request):
    """{"found", "differs"}: is the shipped file here with the content it was sent with, or with another one? `request`: workdir, sha256, name.

    It is read to its end: whoever edits the copy on one node leaves its name as it was, and often its size.
    """
    path = data_path(request)
    try:
        found = os.path.isfile(path) and files.sha256(path) == request["sha256"]  # a pipe would be waited for
    except OSError:  # it cannot be read, and is sent again
        found = False
    return {"found": found, "differs": not found and os.path.lexists(path), "path": path}


def data_path(request):
    """Where a shipped data file lies: its folder is named by its content, so a changed file is another file."""
    digest = str(request["sha256"])
    if not re.fullmatch("[0-9a-f]{64}", digest):
        raise ValueError("not a sha256: %r" % digest)
    name = os.path.basename(request["name"]) or "data"
    return os.path.join(paths.expand(request["workdir"]), "data", digest[:16], name)


def receive_file(request, stream):
    """Store the bytes of `stream` as a data file. Raises ValueError when they are not the promised ones."""
    path = data_path(request)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    partial = "%s.partial.%d" % (path, os.getpid())
    digest = hashlib.sha256()
    try:
        with open(partial, "wb") as out:
            for block in iter(lambda: stream.read(1 << 20), b""):
                digest.update(block)
                out.write(block)
            out.flush()
            os.fsync(out.fileno())
        if digest.hexdigest() != request["sha256"]:
            raise ValueError("the file arrived damaged: %s" % request["name"])
        os.replace(partial, path)
    finally:
        if os.path.exists(partial):
            os.unlink(partial)
    return {"path": path}


def checkpoints(request):
    """Complete checkpoints of a run, newest first, the first verified whole by content: {"good": [steps], "bad": {step: why}}.

    Only as many are read as it takes to find a good one: older ones are listed in "unread". With `set_aside` in the request the bad
    ones are moved out of the way where a good one is left; nothing of the run may be running then.
    """
    folder = paths.run_dir(request["workdir"], request["run"])
    good, bad, unread = [], {}, []
    for step in reversed(files.checkpoint_steps(folder)):
        if good:
            unread.append(step)
            continue
        fault = files.checkpoint_fault(files.checkpoint_dir(folder, step))
        if fault is None:
            good.append(step)
        else:
            bad[str(step)] = fault
    if good and request.get("set_aside"):
        for step in sorted(map(int, bad)):
            with contextlib.suppress(OSError):  # one that cannot be moved hides no good one
                files.set_aside(files.checkpoint_dir(folder, step))
    return {"good": good, "bad": bad, "unread": unread, "run_known": os.path.isdir(folder)}


def verify_checkpoint(request):
    """{"fault": None or why} of one checkpoint."""
    folder = paths.run_dir(request["workdir"], request["run"])
    return {"fault": files.checkpoint_fault(files.checkpoint_dir(folder, request["step"]))}


def send_checkpoint(request, stream):
    """Write one checkpoint as a tar archive to `stream`. Raises ValueError when it is not whole."""
    folder = paths.run_dir(request["workdir"], request["run"])
    _send_folder(files.checkpoint_dir(folder, request["step"]), stream, check=True)


def send_final(request, stream):
    """Write the final model of a run as a tar archive to `stream`."""
    _send_folder(os.path.join(paths.run_dir(request["workdir"], request["run"]), "final"), stream, check=False)


def _send_folder(folder, stream, check):
    if not os.path.isdir(folder):
        raise ValueError("there is no %s" % folder)
    fault = files.checkpoint_fault(folder) if check else None
    if fault:
        raise ValueError("%s: %s" % (folder, fault))
    with tarfile.open(fileobj=stream, mode="w|") as archive:
        for name in sorted(os.listdir(folder)):
            path = os.path.join(folder, name)
            if os.path.isfile(path):
                archive.add(path, arcname=name, recursive=False)


def receive_checkpoint(request, stream):
    """Unpack a checkpoint beside its place, verify it, and put it there with one rename.

    A bad copy that lay there is set aside, and a whole one whose files differ from `files` of the request ({name: sha256}), too.
    """
    folder = paths.run_dir(request["workdir"], request["run"])
    place = files.checkpoint_dir(folder, request["step"])
    root, name = os.path.split(place)
    partial = os.path.join(root, ".%s.%d.partial" % (name, os.getpid()))  # the worker clears away what is left of such
    os.makedirs(partial)
    try:
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            for member in archive:
                if not member.isfile() or os.path.basename(member.name) != member.name or member.name in (".", ".."):
                    raise ValueError("unexpected entry in the archive: %r" % member.name)
                source = archive.extractfile(member)
                with open(os.path.join(partial, member.name), "wb") as out:
                    shutil.copyfileobj(source, out, 1 << 20)
                    out.flush()
                    os.fsync(out.fileno())
        fault = files.checkpoint_fault(partial)
        if fault:
            raise ValueError("the checkpoint arrived damaged: %s" % fault)
        files.sync(partial)
        if os.path.isdir(place):
            wanted = request.get("files") or {}
            known = manifest.digests(place)
            if files.checkpoint_fault(place) is None and all(known.get(name) == wanted[name] for name in wanted):
                return {"path": place}
            files.set_aside(place)
        os.replace(partial, place)
        files.sync(root)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return {"path": place}
