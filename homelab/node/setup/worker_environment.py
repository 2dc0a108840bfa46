"""Makes and removes the worker environment, from files that lie on this node, also the Python that was sent. uv asks no network."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from typing import TYPE_CHECKING

from homelab.node import paths
from homelab.node.run import claims, run_folders
from homelab.node.setup import installed, pieces, record
from homelab.node.system import processes
from homelab.shared.protocol import files, layout
from homelab.shared.protocol.digest import file_sha256
from homelab.shared.protocol.errors import Refusal
from homelab.shared.protocol.setup_messages import LookRequest, SetupMade, SetupRemoved

if TYPE_CHECKING:
    from homelab.shared.protocol.request import Request
    from homelab.shared.protocol.setup_messages import MakeRequest

ARCHIVE = "python.tar.gz"
_UV_LIMIT_S = 3000.0  # below the controller's limit, so that the reason is told


def make(request: MakeRequest) -> SetupMade:
    """Install exactly what requirements.txt says.

    An environment whose installation was cut off, that was changed since, or that has another Python, is made anew: half a package can look
    like a whole one. uv changes only one that holds another lock whole.
    Raises Refusal where a run uses what setup has made, where the folder was not made by setup, or uv fails.
    """
    environment = os.path.expanduser(request.environment)
    with record.held() as lock:
        _refuse_while_used(request)
        made = record.read()
        if os.path.lexists(environment) and environment not in made["folders"] and os.listdir(environment):
            raise Refusal("this environment was not made by homelab setup", where=environment, hint="move it away, then: homelab setup")
        there = installed.look(LookRequest(environment=environment)).environment_python
        keeps = made["locks"].get(environment, "") not in ("", request.lock) and there.startswith(request.version + ".")
        _unpack_uv()
        made = record.note(environment)
        record.write({**made, "locks": {**made["locks"], environment: ""}})
        if not keeps:
            _uv(lock, "venv", "--clear", "--python", request.python or unpack(request.version), environment)
        wheels = os.path.join(record.folder(), "wheels")
        os.makedirs(wheels, exist_ok=True)
        python = os.path.join(environment, "bin", "python")
        try:
            said = _uv(
                lock, "pip", "sync", "--python", python, "--no-index", "--find-links", wheels, "--require-hashes", "--allow-empty-requirements",
                pieces.place("requirements.txt"),
            )  # fmt: skip
        except Refusal as error:
            if error.kind == "full":  # the next call makes it anew: half an environment only takes the room for it
                shutil.rmtree(environment, ignore_errors=True)
                shutil.rmtree(os.path.join(record.folder(), "cache"), ignore_errors=True)
            raise
        if request.is_closed:
            said += _uv(lock, "pip", "check", "--python", python)
        _remove_other_wheels(wheels)
        shutil.rmtree(os.path.join(record.folder(), "cache"), ignore_errors=True)  # its files have a second name in the environment
        os.sync()  # uv syncs nothing: after a power cut the record would vouch for empty modules
        record.write({**made, "locks": {**made["locks"], environment: request.lock}})
    return SetupMade(packages=installed.look(LookRequest(environment=environment)).packages, said=tuple(said[-20:]))


def remove(request: Request) -> SetupRemoved:
    """Remove what the record lists, and the record. `left`: folders that are no folders of setup's, or hold files of others.

    Raises Refusal where a run uses them.
    """
    made = record.read()
    if not made["folders"]:
        return SetupRemoved(removed=(), left=())
    with record.held():
        _refuse_while_used(request)
        record.restore_references(made)
        kept = [os.path.realpath(os.path.expanduser(path)) for path in ("~", request.workdir)]
        removed: list[str] = []
        left: list[str] = []
        for path in sorted(made["folders"], key=lambda path: path == record.folder()):  # the lock's own folder goes last
            if os.path.islink(path) or any((place + os.sep).startswith(os.path.realpath(path).rstrip(os.sep) + os.sep) for place in kept):
                left.append(path)
                continue
            shutil.rmtree(path, ignore_errors=True)
            (left if os.path.lexists(path) else removed).append(path)
        if left:
            record.write({**made, "folders": left, "locks": {}, "refs": {}})
        elif os.path.exists(record.record_path()):
            os.unlink(record.record_path())
        for path in sorted(made["parents"], key=len, reverse=True):
            if os.path.isdir(path) and not os.listdir(path):
                os.rmdir(path)
    links = {path: os.path.realpath(path) for path in left if os.path.islink(path)}
    return SetupRemoved(removed=tuple(removed), left=tuple(left), links=links)


def _refuse_while_used(request: Request) -> None:
    """Raises Refusal where a run of this account lives, whatever its workdir, or where somebody is at work on one of this workdir.

    The caller holds the lock of setup, and no run starts meanwhile: a run that is about to start has a claim.
    """
    used_by = {run: (folder or "?", "it is running on this node") for run, folder in processes.of_home().items()}
    root = os.path.join(paths.expand(request.workdir), layout.RUNS)
    for run in {*(os.listdir(root) if os.path.isdir(root) else []), *claims.of_workdir(request.workdir)} - set(used_by):
        if layout.is_usable(run) and (why := run_folders.busy_with(request.workdir, run, {})):
            used_by[run] = paths.run_dir(request.workdir, run), why
    for run, (folder, why) in used_by.items():
        raise Refusal(
            f"run {run} uses what setup has made on this node: {why}", where=folder,
            hint=f"wait until it ends, or: homelab stop {shlex.quote(run)}",
        )  # fmt: skip


def _remove_other_wheels(wheels: str) -> None:
    """Wheels of an earlier lock: a torch alone is gigabytes. The lines of requirements.txt are name==version --hash=sha256:..."""
    with open(pieces.place("requirements.txt"), encoding="utf-8") as lines:
        hashes = {line.strip().rpartition("sha256:")[2] for line in lines}
    for name in os.listdir(wheels):
        path = os.path.join(wheels, name)
        if os.path.isfile(path) and file_sha256(path) not in hashes:
            os.unlink(path)


def _program() -> str:
    return os.path.join(record.folder(), "uv")


def _unpack_uv() -> None:
    """The program out of its wheel, where the packaging tools expect programs (PEP 427). Raises Refusal for a wheel without it."""
    wheel = pieces.place("uv.whl")
    with zipfile.ZipFile(wheel) as archive:
        name = next((name for name in archive.namelist() if name.endswith(".data/scripts/uv")), None)
        if name is None:
            raise Refusal("the wheel of uv has no program in it", where=wheel, hint="homelab setup")
        files.write_atomic(_program(), archive.read(name), 0o700)


def _uv(lock: int, *arguments: str) -> list[str]:
    """The lines that uv printed. The lock stays held as long as uv runs, even without this process. Raises Refusal."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("UV_", "PYTHON", "VIRTUAL_ENV"))}
    environment.update(
        UV_CACHE_DIR=os.path.join(record.folder(), "cache"), UV_OFFLINE="1", UV_NO_CONFIG="1", UV_PYTHON_DOWNLOADS="never", NO_COLOR="1"
    )
    try:
        done = subprocess.run(
            [_program(), *arguments], env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", check=False, pass_fds=[lock], timeout=_UV_LIMIT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise Refusal(
            f"uv {' '.join(arguments[:2])} did not end within {_UV_LIMIT_S / 60:.0f} minutes", where=record.folder(), hint="homelab setup"
        ) from None
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    if done.returncode != 0:
        text = "; ".join(line.strip() for line in lines[-6:]) or f"exit code {done.returncode}"
        kind = "full" if "No space left" in done.stdout else "refused"
        raise Refusal(f"uv {' '.join(arguments[:2])} failed: {text}", where=record.folder(), hint="homelab setup --check", kind=kind)
    return lines


def unpack(version: str) -> str:
    """The path of the program of this version ("3.12"). It is unpacked once, and gets its place with one rename.

    Raises Refusal for an archive without that program, ValueError for entries that lead out of the folder.
    """
    archive = pieces.place(ARCHIVE)
    folder = os.path.join(record.folder(), f"python-{file_sha256(archive)[:16]}")
    program = os.path.join(folder, "bin", f"python{version}")
    if not os.path.isdir(folder):
        partial = tempfile.mkdtemp(prefix=".python-", dir=record.folder())
        try:
            with tarfile.open(archive, "r:gz") as entries:
                for entry in entries:
                    _check_entry(entry)
                    entries.extract(entry, partial)
            os.chmod(partial, 0o755)
            os.sync()  # as after an installation: this name is never unpacked again
            os.replace(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    if not os.access(program, os.X_OK):
        raise Refusal(f"the Python that was sent has no python{version}", where=archive, hint="homelab setup")
    return program


def _check_entry(entry: tarfile.TarInfo) -> None:
    """Raises ValueError. Not tarfile's own filter, which Python 3.9 may be without."""
    paths = [entry.name] + ([os.path.join(os.path.dirname(entry.name), entry.linkname)] if entry.issym() else [])
    if not (entry.isfile() or entry.isdir() or entry.issym()) or any(
        os.path.isabs(path) or os.path.normpath(path).startswith("..") for path in paths
    ):
        raise ValueError(f"unexpected entry in the archive: {entry.name!r}")
