"""The secrets of runs on this node: files in memory, for this user alone, as long as their run lives. No environment and no argument holds one.

A program gets the path (HF_TOKEN_PATH, which huggingface_hub reads), and reads the file when it needs the token.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import re
import shutil
import stat
import tempfile
from typing import TYPE_CHECKING

from homelab.node import paths
from homelab.node.system import processes
from homelab.shared.protocol import files, layout, secrecy

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_IN_MEMORY = ("tmpfs", "ramfs")
_OWNER = "run-folder"  # in each folder of secrets: the run's folder that they belong to
_LENT = re.compile(r"lent-(\d+)-.*")  # the number of the process that lends them
# Programs that find one of these variables do not read the file that HF_TOKEN_PATH names.
_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


def _places() -> list[str]:
    """Where they may lie, the best first: a login's own folder, the memory that all users share, and a disk where there is nothing else."""
    own = [os.environ.get("XDG_RUNTIME_DIR") or "", f"/run/user/{os.getuid()}"]
    logins = [os.path.join(folder, "homelab-secrets") for folder in dict.fromkeys(own) if os.path.isabs(folder)]
    return [*logins, f"/dev/shm/homelab-{os.getuid()}", os.path.join(os.path.expanduser("~"), ".homelab-secrets")]


def _is_in_memory(folder: str) -> bool:
    return paths.mounted_as(folder) in _IN_MEMORY


def _is_ours(folder: str) -> bool:
    """A real folder of this user that nobody else may enter: in /dev/shm another user may have made it first."""
    try:
        status = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


def _usable_place() -> str:
    """The first place that can be used, made. Raises OSError where none can."""
    *in_memory, on_disk = _places()
    for place in in_memory:
        if _is_in_memory(os.path.dirname(place)):
            with contextlib.suppress(OSError):
                os.mkdir(place, 0o700)
            if _is_ours(place) and os.access(place, os.W_OK):
                return place
    with contextlib.suppress(FileExistsError):
        os.mkdir(on_disk, 0o700)
    if not _is_ours(on_disk):
        raise PermissionError(1, "it must be a folder of this user that no other user can read", on_disk)
    return on_disk


def _name(run_folder: str) -> str:
    """The folder of a run's secrets in a place. Practice nodes share the places: the run's whole path counts."""
    real = os.path.realpath(run_folder)
    return f"{os.path.basename(real)}-{hashlib.sha256(os.fsencode(real)).hexdigest()[:16]}"


def _folders(run_folder: str) -> list[str]:
    found = [os.path.join(place, _name(run_folder)) for place in _places() if _is_ours(place)]
    return [folder for folder in found if _is_ours(folder)]


def put(run_folder: str, secrets: Mapping[str, str]) -> None:
    """Keep the secrets (name -> value) of a run, and no others. Raises OSError, ValueError for a name that is none."""
    remove(run_folder)
    if secrets:
        folder = os.path.join(_usable_place(), _name(run_folder))
        _write(folder, {_OWNER: os.path.realpath(run_folder), **{layout.checked(name): value for name, value in secrets.items()}})


@contextlib.contextmanager
def lent(secrets: Mapping[str, str], environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """The environment in which a program finds these secrets while the block runs."""
    if not secrets:
        yield dict(environment)
        return
    folder = tempfile.mkdtemp(prefix=f"lent-{os.getpid()}-", dir=_usable_place())
    try:
        _write(folder, {layout.checked(name): value for name, value in secrets.items()})
        yield _pointed(environment, folder)
    finally:
        _drop(folder)


def _write(folder: str, texts: Mapping[str, str]) -> None:
    try:
        if not os.path.isdir(folder):
            os.mkdir(folder, 0o700)
        for name, text in texts.items():
            descriptor = os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
                stream.write(text)
    except OSError:
        _drop(folder)
        raise


def _drop(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # other runs have theirs there
        os.rmdir(os.path.dirname(folder))


def environment_of(run_folder: str, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of the run's programs: paths of secrets, and not the login's own token in place of the run's."""
    folders = _folders(run_folder)
    return _pointed(environment, folders[0]) if folders else dict(environment)


def _pointed(environment: Mapping[str, str], folder: str) -> dict[str, str]:
    names = sorted(name for name in os.listdir(folder) if name != _OWNER)
    kept = {key: value for key, value in environment.items() if key not in (*names, *_VARIABLES)}
    return {**kept, **{f"{name}_PATH": os.path.join(folder, name) for name in names}}


def words(run_folder: str | None = None) -> list[str]:
    """What is searched for in words that leave this node: the secrets of one run, or of all runs of this user."""
    folders = (
        _folders(run_folder)
        if run_folder
        else [os.path.join(place, name) for place in _places() if _is_ours(place) for name in os.listdir(place)]
    )
    return secrecy.searched(files.text(os.path.join(folder, name)) for folder in folders for name in _listed(folder) if name != _OWNER)


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:  # removed meanwhile
        return []


def owners() -> list[str]:
    """The folders of the runs that have secrets here."""
    folders = [os.path.join(place, name) for place in _places() if _is_ours(place) for name in _listed(place)]
    return [owner for folder in folders if (owner := files.text(os.path.join(folder, _OWNER)))]


def has(run_folder: str) -> bool:
    """Whether the run has secrets here."""
    return bool(_folders(run_folder))


def remove(run_folder: str) -> None:
    """Cover the run's secrets in what its programs have printed, and remove them from this node."""
    folders = _folders(run_folder)
    if not folders:
        return
    # Logs of gigabytes take seconds. Who is killed meanwhile leaves the secrets to the next one, who needs them to find them there.
    cover(os.path.join(run_folder, layout.ATTEMPTS), [word.encode() for word in words(run_folder)])
    for folder in folders:
        _drop(folder)


def cover(root: str, values: Iterable[bytes]) -> None:
    """Write stars over these values in all files below a folder. No byte moves: whoever follows a log by its offset misses nothing."""
    searched = list(values)
    for folder, _, names in os.walk(root):
        for name in names if searched else ():
            path = os.path.join(folder, name)
            with contextlib.suppress(OSError, ValueError):  # a pipe, an empty file, a disk that has become read-only
                if os.path.isfile(path) and not os.path.islink(path):
                    _cover_in(path, searched)


def _cover_in(path: str, values: list[bytes]) -> None:
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        for value in values:
            at = content.find(value)
            while at >= 0:
                # Not through the memory: a full disk that copies on write (btrfs) would end this process by SIGBUS.
                os.pwrite(file.fileno(), b"*" * len(value), at)
                at = content.find(value, at + len(value))


def remove_leftovers(workdir: str, run: str | None = None) -> list[str]:
    """Remove the secrets of runs that nothing is alive of here (`run`: of this one alone); their names, rising.

    The next start of such a run brings them anew. Without `run` also those that a process lent which is gone.
    """
    for place in _places() if run is None else ():
        for name in _listed(place) if _is_ours(place) else ():
            if (lender := _LENT.fullmatch(name)) and not processes.is_alive(int(lender[1])):
                _drop(os.path.join(place, name))
    root = os.path.join(paths.expand(workdir), layout.RUNS)
    real = os.path.realpath(root)
    names = {os.path.basename(owner) for owner in owners() if os.path.dirname(owner) == real}
    removed = []
    for name in sorted(names & {layout.checked(run)} if run else names):
        folder = os.path.join(root, name)
        if not processes.of_run(name, workdir, "", standbys=True) and _has_begun(folder):
            remove(folder)
            if not has(folder):
                removed.append(name)
    return removed


def _has_begun(folder: str) -> bool:
    """The newest attempt has begun here, or ended. One that is about to begin has not begun."""
    if not os.path.isdir(folder):  # a person has deleted it
        return True
    newest = paths.newest_attempt(folder)
    if not newest:
        return False
    nodes = os.path.join(paths.attempt_dir(folder, newest), "nodes")  # under the name that this node had then
    names = os.listdir(nodes) if os.path.isdir(nodes) else []
    return any(os.path.exists(os.path.join(nodes, name, file)) for name in names for file in ("agent.json", "exit.json"))
