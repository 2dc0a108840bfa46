"""Flaws of a node's Python environment: other versions, missing packages, damaged files. The node has a layer of its own over it."""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from homelab.lab.flaws.flaw import NotInjectable, flaw
from homelab.lab.flaws.inside import cluster_says, inside, layered, view
from homelab.lab.lab import Lab


@contextlib.contextmanager
def environment(lab: Lab, node: str) -> Iterator[Path]:
    """The node's own layer over the folder that its Python's packages are in."""
    with layered(lab, node, _folder(lab, node, lab.state.node(node).python)) as packages:
        yield packages


def _folder(lab: Lab, node: str, python: str) -> str:
    return inside(lab, node, python, "-I", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()


def metadata_of(packages: Path, name: str) -> Path:
    """The folder with a package's metadata. Raises NotInjectable where the package is not installed."""
    found = sorted(packages.glob(f"{name}-*.dist-info"))
    if not found:
        raise NotInjectable(
            f"{name} is not installed in the nodes' Python", where=str(packages), hint=f"pip install {name}"
        )
    return found[0]


def give_version(packages: Path, name: str, version: str) -> None:
    """What pip would leave after installing another version: the metadata's name and version, and the module's own word."""
    old = metadata_of(packages, name)
    new = packages / f"{name}-{version}.dist-info"
    if new == old:
        return
    shutil.copytree(old, new)
    shutil.rmtree(old)
    text = (new / "METADATA").read_text(errors="surrogateescape")
    (new / "METADATA").write_text(
        re.sub(r"(?m)^Version: .*$", f"Version: {version}", text, count=1), errors="surrogateescape"
    )
    for file in (packages / name / "__init__.py", packages / name / "version.py"):
        if file.exists():
            lines = file.read_text()
            file.write_text(re.sub(r"(?m)^__version__(: str)? = .*$", f'__version__ = "{version}"', lines, count=1))


def remove(packages: Path, name: str) -> None:
    """What `pip uninstall` leaves."""
    shutil.rmtree(metadata_of(packages, name))
    shutil.rmtree(packages / name)


@flaw("other-peft", "another version of peft on one node", "python.same")
def other_peft(lab: Lab, node: str) -> Iterator[None]:
    """Installed half a year later than on the others."""
    with environment(lab, node) as packages:
        give_version(packages, "peft", "0.17.1")
        yield


@flaw("other-transformers", "another version of transformers on one node", "python.same")
def other_transformers(lab: Lab, node: str) -> Iterator[None]:
    """The templates of chats differ between versions, and with them the tokens."""
    with environment(lab, node) as packages:
        give_version(packages, "transformers", "4.57.1")
        yield


@flaw("other-torch-build", "torch is built for another CUDA on one node", "python.same_build", "python.same")
def other_torch_build(lab: Lab, node: str) -> Iterator[None]:
    """`pip install torch` gave it the default build, the others have the CPU's."""
    with cuda_build(lab, node):
        yield


@contextlib.contextmanager
def cuda_build(lab: Lab, node: str) -> Iterator[Path]:
    """What is written of torch on the node is that of a build for CUDA 13.0 (the libraries stay those of the CPU)."""
    with environment(lab, node) as packages:
        _say_cuda(packages, "+cu130", "13.0")
        yield packages


@contextlib.contextmanager
def cpu_build(lab: Lab, node: str) -> Iterator[None]:
    """The same, for a build without CUDA, on a node that has `cuda_build`."""
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


@flaw("no-peft", "peft is not installed on one node", "python.packages")
def no_peft(lab: Lab, node: str) -> Iterator[None]:
    """The environment was made from another list."""
    with environment(lab, node) as packages:
        remove(packages, "peft")
        yield


@flaw("no-torch", "torch is not installed on one node", "python.packages")
def no_torch(lab: Lab, node: str) -> Iterator[None]:
    """pip was interrupted: 800 MB take their time."""
    with environment(lab, node) as packages:
        shutil.rmtree(metadata_of(packages, "torch"))
        (packages / "torch" / "__init__.py").unlink()
        yield


@flaw("broken-torch", "a library of torch is missing on one node", "collective.works", deep=True)
def broken_torch(lab: Lab, node: str) -> Iterator[None]:
    """The disk was full while pip unpacked it: the versions are right, the import fails."""
    with environment(lab, node) as packages:
        libraries = sorted((packages / "torch" / "lib").glob("libtorch_python*"))
        if not libraries:
            raise NotInjectable("torch is not installed here", where=str(packages), hint="pip install torch")
        for library in libraries:
            library.unlink()
        yield


@flaw("other-python", "the node's Python is another one", "python.version", "python.packages", "python.same")
def other_python(lab: Lab, node: str) -> Iterator[None]:
    """The one of the system, without the packages."""
    with cluster_says(
        lab, node, python=f'"{_python(lambda version: version >= (3, 9) and version != sys.version_info[:2])}"'
    ):
        yield


@flaw("old-python", "the node's Python is older than the agent can do with", "python.version", "ssh.login")
def old_python(lab: Lab, node: str) -> Iterator[None]:
    """An old distribution."""
    with cluster_says(lab, node, python=f'"{_python(lambda version: (3, 6) <= version < (3, 9))}"'):
        yield


def _python(wanted: object) -> str:
    assert callable(wanted)
    for pattern in (".pyenv/versions/*/bin/python3.*", ".local/share/uv/python/*/bin/python3.*"):
        for file in sorted(Path.home().glob(pattern)):
            if (found := re.fullmatch(r"python3\.(\d+)", file.name)) and wanted((3, int(found.group(1)))):
                return str(file)
    for file in sorted(Path("/usr/bin").glob("python3.*")):
        if (found := re.fullmatch(r"python3\.(\d+)", file.name)) and wanted((3, int(found.group(1)))):
            return str(file)
    raise NotInjectable("there is no such Python on this machine", where="this machine", hint="pyenv install 3.12 3.8")


@flaw("damaged-code", "a file of homelab's shipped code has another byte", "python.code")
def damaged_code(lab: Lab, node: str) -> Iterator[None]:
    """A disk or a memory that forgets: the file is there, Python reads it, and one character is another one."""
    files = sorted(Path(lab.state.node(node).workdir, "code").glob("*/homelab/worker/sampler.py"))
    if not files:
        raise NotInjectable("no code was shipped to this node yet", where=node, hint="homelab preflight, once")
    kept = {file: file.read_bytes() for file in files}
    try:
        for file, content in kept.items():
            file.write_bytes(content.replace(b"e", b"3", 1))
        yield
    finally:
        for file, content in kept.items():
            file.write_bytes(content)


@flaw("half-shipped-code", "a file of homelab's shipped code is gone", "python.code", "ssh.probes", "ssh.login")
def half_shipped_code(lab: Lab, node: str) -> Iterator[None]:
    """Somebody tidied up."""
    files = sorted(Path(lab.state.node(node).workdir, "code").glob("*/homelab/worker/sampler.py"))
    if not files:
        raise NotInjectable("no code was shipped to this node yet", where=node, hint="homelab preflight, once")
    try:
        for file in files:
            file.rename(file.with_name("sampler.away"))
        yield
    finally:
        for file in files:
            file.with_name("sampler.away").rename(file)
