"""Room for a run: the workdir and its disk, temporary files, the Hub's cache, shared memory, open files."""

import os
import resource

from homelab.node import hub, paths

_SHM = "/dev/shm"


def read(request):
    """Whether the workdir can be written, and what is free."""
    workdir = paths.expand(request["workdir"])
    problem = _write_problem(workdir)
    state = _statvfs(workdir)
    temporary = _temporary_folder()
    soft, hard = (
        None if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    return {
        "workdir": workdir,
        "workdir_writable": problem is None,
        "workdir_problem": problem,
        "workdir_identity": _identity(workdir),
        "disk_free_bytes": _free_bytes(state),
        "disk_total_bytes": None if state is None else state.f_blocks * state.f_frsize,
        "disk_free_inodes": free_inodes(state),
        "shm_free_bytes": _free_bytes(_statvfs(_SHM)) if os.path.isdir(_SHM) else None,
        "temporary_folder": temporary,
        "temporary_free_bytes": _free_bytes(_statvfs(temporary)) if temporary else None,
        "cache_folder": os.path.abspath(hub.cache()),
        "cache_free_bytes": _cache_free_bytes(workdir),
        "open_files_soft": soft,
        "open_files_hard": hard,
    }


def _identity(folder):
    """The same for two names of one folder on one machine, and for nothing else: the kernel's boot, the disk, the inode."""
    try:
        state = os.stat(folder)
        with open("/proc/sys/kernel/random/boot_id") as stream:
            return "%s:%d:%d" % (stream.read().strip(), state.st_dev, state.st_ino)
    except OSError:
        return None


def _write_problem(folder):
    """None where a file could be written there; else the system's words for what was in the way."""
    try:
        os.makedirs(folder, exist_ok=True)
        probe = os.path.join(folder, ".writable.%d" % os.getpid())
        try:
            with open(probe, "w") as stream:
                stream.write("x")
        finally:
            if os.path.lexists(probe):
                os.unlink(probe)
        return None
    except OSError as error:
        return os.strerror(error.errno) if error.errno is not None else str(error)


def free_inodes(state):
    """Files that can still be made; None where the file system makes inodes as it goes (btrfs and FAT report none at all)."""
    return state.f_favail if state is not None and state.f_files > 0 else None


def _statvfs(folder):
    """Of the folder, or of the one above it that is there."""
    folder = _existing(folder)
    try:
        return os.statvfs(folder)
    except OSError:
        return None


def _existing(folder):
    while folder and folder != "/" and not os.path.exists(folder):
        folder = os.path.dirname(folder)
    return folder or "."


def _free_bytes(state):
    return None if state is None else state.f_bavail * state.f_frsize


def _temporary_folder():
    """Where `tempfile` will look first: it passes over what is not there or cannot be written."""
    for folder in (*(os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP")), "/tmp", "/var/tmp", "/usr/tmp"):
        if folder and os.access(folder, os.W_OK | os.X_OK) and os.path.isdir(folder):
            return os.path.abspath(folder)
    return None


def _cache_free_bytes(workdir):
    """Of the disk that holds the Hub's cache, where it is another than the workdir's."""
    here = _existing(os.path.abspath(hub.cache()))
    try:
        if os.stat(here).st_dev == os.stat(_existing(workdir)).st_dev:
            return None
    except OSError:
        return None
    return _free_bytes(_statvfs(here))
