"""Room for a run: the workdir and its disk, temporary files, the Hub's cache, shared memory, open files."""

from __future__ import annotations

import contextlib
import os
import resource
from typing import TYPE_CHECKING

from homelab.node import paths
from homelab.shared.protocol import files, hub_cache

if TYPE_CHECKING:
    from homelab.shared.protocol.files import JsonObject

_SHM = "/dev/shm"
_SHARED = ("nfs", "cifs", "smb", "9p", "virtiofs", "ceph", "fuse.", "glusterfs", "lustre", "beegfs", "vboxsf", "prl_fs", "afs")
_NO_COUNT = 1 << 63  # a -1 of the kernel, as Python reads it


def read(request: JsonObject) -> JsonObject:
    """Whether the workdir can be written, and what is free."""
    workdir = paths.expand(request["workdir"])
    problem = _write_problem(workdir)
    state = _statvfs(workdir)
    temporary = _temporary_folder()
    soft, hard = (None if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(resource.RLIMIT_NOFILE))
    return {
        "workdir": workdir,
        "workdir_writable": problem is None,
        "workdir_problem": problem,
        "workdir_identity": _identity(workdir),
        "workdir_mark": None if problem else _mark(workdir),
        "disk_free_bytes": _free_bytes(state),
        "disk_total_bytes": None if state is None else state.f_blocks * state.f_frsize,
        "disk_turns": _turns(workdir),
        "disk_free_inodes": free_inodes(state),
        "shm_free_bytes": _free_bytes(_statvfs(_SHM)) if os.path.isdir(_SHM) else None,
        "temporary_folder": temporary,
        "temporary_free_bytes": _free_bytes(_statvfs(temporary)) if temporary else None,
        "cache_folder": os.path.abspath(hub_cache.folder()),
        "cache_free_bytes": _cache_free_bytes(workdir),
        "open_files_soft": soft,
        "open_files_hard": hard,
    }


def _identity(folder: str) -> str | None:
    """The same for two names of one folder on one machine, and for nothing else: the kernel's boot, the disk, the inode."""
    try:
        state = os.stat(folder)
        with open("/proc/sys/kernel/random/boot_id") as stream:
            return f"{stream.read().strip()}:{state.st_dev}:{state.st_ino}"
    except OSError:
        return None


def _mark(folder: str, mounts: str = "/proc/self/mounts") -> str | None:
    """What a file of the folder says, which is made with random words: the same on two machines that share it. None on a disk of this machine
    alone, where a copy of the whole disk would say the same.
    """
    if not paths.mounted_as(folder, mounts).startswith(_SHARED):
        return None
    place = os.path.join(folder, ".workdir-id")
    try:
        with contextlib.suppress(FileExistsError), open(place, "x") as stream:
            stream.write(os.urandom(16).hex())
    except OSError:
        return None
    return files.text(place) or None


def _turns(folder: str, blocks: str = "/sys/dev/block") -> bool | None:
    """Whether it lies on a hard disk. The disks of virtual machines say so of themselves, whatever is below them: of these it is not known."""
    try:
        number = os.stat(folder).st_dev
        device = os.path.realpath(f"{blocks}/{os.major(number)}:{os.minor(number)}")
        whole = device if os.path.isdir(os.path.join(device, "queue")) else os.path.dirname(device)
        with open(os.path.join(whole, "queue", "rotational")) as stream:
            turns = stream.read().strip() == "1"
    except OSError:
        return None
    is_real = any(bus in whole for bus in ("/ata", "/usb", "/nvme", "/mmc"))
    return turns if is_real else None


def _write_problem(folder: str) -> str | None:
    """None where a file could be written there; otherwise the error text of the system."""
    try:
        os.makedirs(folder, exist_ok=True)
        probe = os.path.join(folder, f".writable.{os.getpid()}")
        try:
            with open(probe, "w") as stream:
                stream.write("x")
        finally:
            if os.path.lexists(probe):
                os.unlink(probe)
        return None
    except OSError as error:
        return os.strerror(error.errno) if error.errno is not None else str(error)


def free_inodes(state: os.statvfs_result | None) -> int | None:
    """Files that can still be made; None where the file system makes inodes as it goes: btrfs and FAT report none at all, CephFS and bcachefs
    say -1 or the largest number that there is."""
    if state is None or not 0 < state.f_files < _NO_COUNT or not 0 <= state.f_favail < _NO_COUNT:
        return None
    return state.f_favail


def _statvfs(folder: str) -> os.statvfs_result | None:
    """statvfs of the folder, or of the nearest parent that exists."""
    folder = _existing(folder)
    try:
        return os.statvfs(folder)
    except OSError:
        return None


def _existing(folder: str) -> str:
    while folder and folder != "/" and not os.path.exists(folder):
        folder = os.path.dirname(folder)
    return folder or "."


def _free_bytes(state: os.statvfs_result | None) -> int | None:
    return None if state is None else state.f_bavail * state.f_frsize


def _temporary_folder() -> str | None:
    """The folder that `tempfile` will use: the first one that exists and can be written."""
    for folder in (*(os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP")), "/tmp", "/var/tmp", "/usr/tmp"):
        if folder and os.access(folder, os.W_OK | os.X_OK) and os.path.isdir(folder):
            return os.path.abspath(folder)
    return None


def _cache_free_bytes(workdir: str) -> int | None:
    """Of the disk that holds the Hub's cache, where it is another than the workdir's."""
    cache = _existing(os.path.abspath(hub_cache.folder()))
    try:
        if os.stat(cache).st_dev == os.stat(_existing(workdir)).st_dev:
            return None
    except OSError:
        return None
    return _free_bytes(_statvfs(cache))
