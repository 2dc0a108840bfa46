"""A misconfigured Python environment: other versions, missing packages, damaged files. The node has a layer of its own over it."""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import homelab
from homelab.controller.base.hint import Hint
from homelab.controller.base.hint import homelab as own
from homelab.lab.lab import Lab
from homelab.shared import law
from scripts.practice.misconfigurations.misconfiguration import Inject, NotInjectable, add, misconfiguration
from scripts.practice.misconfigurations.node_changes import cluster_says, inside, layered, view


@contextlib.contextmanager
def environment(lab: Lab, node: str) -> Iterator[Path]:
    """The node's own layer over the folder that its Python's packages are in."""
    with layered(lab, node, _folder(lab, node, lab.state.node(node).python)) as packages:
        yield packages


def _folder(lab: Lab, node: str, python: str) -> str:
    return inside(lab, node, python, "-I", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()


def metadata_of(packages: Path, name: str) -> Path:
    """The folder with a package's metadata. Raises NotInjectable where the package is not installed."""
    folders = sorted(packages.glob(f"{name}-*.dist-info"))
    if not folders:
        raise NotInjectable(f"{name} is not installed in the nodes' Python", where=str(packages), hint=f"pip install {name}")
    return folders[0]


def give_version(packages: Path, name: str, version: str) -> None:
    """What pip would leave after installing another version: the metadata's name and version, and the module's own word."""
    old = metadata_of(packages, name)
    new = packages / f"{name}-{version}.dist-info"
    if new == old:
        return
    shutil.copytree(old, new)
    shutil.rmtree(old)
    text = (new / "METADATA").read_text(errors="surrogateescape")
    (new / "METADATA").write_text(re.sub(r"(?m)^Version: .*$", f"Version: {version}", text, count=1), errors="surrogateescape")
    for file in (packages / name / "__init__.py", packages / name / "version.py"):
        if file.exists():
            lines = file.read_text()
            file.write_text(re.sub(r"(?m)^__version__(: str)? = .*$", f'__version__ = "{version}"', lines, count=1))


def remove(packages: Path, name: str) -> None:
    """What `pip uninstall` leaves."""
    shutil.rmtree(metadata_of(packages, name))
    shutil.rmtree(packages / name)


def _changed(change: Callable[[Path], object]) -> Inject:
    """`change` is made to the node's folder of packages."""

    @contextlib.contextmanager
    def inject(lab: Lab, node: str) -> Iterator[None]:
        with environment(lab, node) as packages:
            change(packages)
            yield

    return inject


def _break_torch(packages: Path) -> None:
    libraries = sorted((packages / "torch" / "lib").glob("libtorch_python*"))
    if not libraries:
        raise NotInjectable("torch is not installed here", where=str(packages), hint="pip install torch")
    for library in libraries:
        library.unlink()


def _remove_half_of_torch(packages: Path) -> None:
    """As after an interrupted pip."""
    shutil.rmtree(metadata_of(packages, "torch"))
    (packages / "torch" / "__init__.py").unlink()


add("other-peft", "another version of peft on one node", "python.same", inject=_changed(lambda at: give_version(at, "peft", "0.17.1")))
# The chat templates differ between versions, and with them the tokens.
add(
    "other-transformers", "another version of transformers on one node", "python.same",
    inject=_changed(lambda at: give_version(at, "transformers", "4.57.1")),
)  # fmt: skip
add("no-peft", "peft is not installed on one node", "python.packages", inject=_changed(lambda at: remove(at, "peft")))
add("no-torch", "torch is not installed on one node", "python.packages", inject=_changed(_remove_half_of_torch))
# As when the disk was full while pip unpacked it: the versions are right, the import fails.
add("broken-torch", "a library of torch is missing on one node", "collective.works", inject=_changed(_break_torch), needs=("deep",))


@contextlib.contextmanager
def cuda_build(lab: Lab, node: str) -> Iterator[Path]:
    """The metadata of torch on the node is that of a build for CUDA 13.0 (the libraries stay those of the CPU)."""
    with environment(lab, node) as packages:
        _say_cuda(packages, "+cu130", "13.0")
        yield packages


@contextlib.contextmanager
def cpu_build(lab: Lab, node: str) -> Iterator[None]:
    """The same for a build without CUDA, on a node that has `cuda_build`."""
    python = lab.state.node(node).python
    packages = view(lab, node, _folder(lab, node, python))
    _say_cuda(packages, "+cpu", None)
    try:
        yield
    finally:
        _say_cuda(packages, "+cu130", "13.0")


def _say_cuda(packages: Path, build: str, cuda: str | None) -> None:
    release = metadata_of(packages, "torch").name.removesuffix(".dist-info").split("-")[1].split("+")[0]
    give_version(packages, "torch", release + build)
    file = packages / "torch" / "version.py"
    text, count = re.subn(r"(?m)^(cuda(?:: [^=]*)?) = .*$", rf"\1 = {cuda!r}", file.read_text(), count=1)
    assert count == 1, file
    file.write_text(text)


add("other-torch-build", "torch is built for another CUDA on one node", "python.same_build", "python.same", inject=cuda_build)


def _other_python(is_wanted: Callable[[tuple[int, int]], bool]) -> Inject:
    """cluster.toml names a Python of this machine whose (major, minor) version `is_wanted`."""
    return lambda lab, node: cluster_says(lab, node, python=f'"{_python(is_wanted)}"')


add(
    "other-python", "the node's Python is another version, without the packages", "python.version", "python.packages", "python.same",
    inject=_other_python(lambda version: version >= (3, 9) and version != sys.version_info[:2]), namespaces=False,
)  # fmt: skip
add(
    "old-python", "the node's Python is older than the agent supports", "python.version", "ssh.login",
    inject=_other_python(lambda version: (3, 6) <= version < (3, 9)), namespaces=False,
)  # fmt: skip


def _python(is_wanted: Callable[[tuple[int, int]], bool]) -> str:
    folders = ".pyenv/versions/*/bin", ".local/share/uv/python/*/bin"
    files = [
        *(file for folder in folders for file in sorted(Path.home().glob(f"{folder}/python3.*"))),
        *sorted(Path("/usr/bin").glob("python3.*")),
    ]
    for file in files:
        if (version := re.fullmatch(r"python3\.(\d+)", file.name)) and is_wanted((3, int(version[1]))):
            return str(file)
    raise NotInjectable("there is no such Python on this machine", where="this machine", hint="pyenv install 3.12 3.8")


# Below a folder of shipped code: the file that is damaged. Every part of homelab on a node imports it.
DAMAGED = Path(law.__file__).relative_to(Path(homelab.__file__).parents[1])


def _shipped(lab: Lab, node: str) -> list[Path]:
    """A file of homelab's code on the node, once for each version there."""
    files = sorted(Path(lab.state.node(node).workdir, "code").glob(f"*/{DAMAGED}"))
    if not files:
        raise NotInjectable("no code was shipped to this node yet", where=node, hint=Hint("{}, once", own("preflight")))
    return files


@misconfiguration("damaged-code", "a file of homelab's shipped code has another byte", "python.code", namespaces=False)
def damaged_code(lab: Lab, node: str) -> Iterator[None]:
    """As from a failing disk: the file is there, Python reads it, and one character is another one."""
    kept = {file: file.read_bytes() for file in _shipped(lab, node)}
    try:
        for file, content in kept.items():
            file.write_bytes(content.replace(b"e", b"3", 1))
        yield
    finally:
        for file, content in kept.items():
            file.write_bytes(content)


@misconfiguration(
    "half-shipped-code", "a file of homelab's shipped code is missing", "python.code", "ssh.probes", "ssh.login", namespaces=False
)
def half_shipped_code(lab: Lab, node: str) -> Iterator[None]:
    """As after a clean-up by hand."""
    files = _shipped(lab, node)
    try:
        for file in files:
            file.rename(file.with_suffix(".away"))
        yield
    finally:
        for file in files:
            file.with_suffix(".away").rename(file)
