"""`scripts/setup` says that it is done and what comes next, unless another script goes on."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(30)

REPOSITORY = Path(__file__).parent.parent
# Instead of a Python with packages, and of what would install some.
NOTHING = '#!/bin/sh\necho "$@" >>"$ASKED"\necho nothing done\n'


def checkout(tmp_path: Path) -> dict[str, str]:
    """A copy of what the script reads, with stand-ins for what it asks; returns the environment in which it runs."""
    for name in ("constraints.txt", "pyproject.toml", "scripts/setup"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    for name in (".venv/bin/python", "bin/apt-get", "bin/sudo"):
        program(tmp_path / name, NOTHING)
    return {**os.environ, "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}", "ASKED": str(tmp_path / "asked")}


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def setup(tmp_path: Path, environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [tmp_path / "scripts" / "setup", *arguments],
        env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(("arguments", "said"), [((), True), (("--within",), False), (("--for-tests",), False)])
def test_it_ends_with_the_next_command(tmp_path: Path, arguments: tuple[str, ...], said: bool) -> None:
    done = setup(tmp_path, checkout(tmp_path), *arguments)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    if said:
        assert lines[-1].startswith("Set up. Next: scripts/demo") and "homelab init" in lines[-1]
        assert (REPOSITORY / "scripts" / "demo").exists()
    else:
        assert not any("Next:" in line for line in lines)
    asked = (tmp_path / "asked").read_text()
    assert (" homelab.lab.model " in asked) == (arguments != ("--for-tests",))


def test_it_runs_from_its_own_folder(tmp_path: Path) -> None:
    environment = checkout(tmp_path)
    done = subprocess.run(
        ["./setup"], cwd=tmp_path / "scripts", env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and "Set up. Next:" in done.stdout, done.stderr


# A Python whose version is in a file beside it ("3 12"). `bare`: without what makes an environment. It makes one of itself.
PYTHON = """#!/bin/sh
echo "$(basename "$0") $@" >>"$ASKED"
case $* in
  *version_info*print*) ;;
  *print*version_info*) cat "$VERSION";;
  *"import ensurepip"*) ! [ -e "$0.bare" ];;
  "-m venv "*) mkdir -p "$3/bin" && touch "$3/pyvenv.cfg" && cp "$0" "$3/bin/python";;
  "-m pip --version") ! [ -e "$0.bare" ];;
esac
"""


def pythons(tmp_path: Path, **is_bare: bool) -> dict[str, str]:
    """No environment yet, and Pythons of these names (`python3_12`); returns the environment of the script."""
    environment = checkout(tmp_path)
    shutil.rmtree(tmp_path / ".venv")
    (tmp_path / "version").write_text("python3.12-venv\n")
    for name, bare in is_bare.items():
        program(tmp_path / "bin" / name.replace("_", "."), PYTHON)
        if bare:
            (tmp_path / "bin" / f"{name.replace('_', '.')}.bare").touch()
    environment.pop("HOMELAB_PYTHON", None)
    return {**environment, "VERSION": str(tmp_path / "version")}


def asked(tmp_path: Path) -> list[str]:
    """What was asked since the last time."""
    lines = (tmp_path / "asked").read_text().splitlines()
    (tmp_path / "asked").write_text("")
    return lines


def test_an_environment_without_pip_is_made_anew(tmp_path: Path) -> None:
    """It was interrupted while pip came into it, or uv has made it."""
    environment = pythons(tmp_path, python3_13=False)
    program(tmp_path / ".venv" / "bin" / "python", "#!/bin/sh\necho 'No module named pip' >&2\nexit 1\n")
    (tmp_path / ".venv" / "pyvenv.cfg").touch()
    done = setup(tmp_path, environment)
    assert done.returncode == 0 and ".venv has no pip that works: it is made anew" in done.stderr, done.stderr
    assert "python3.13 -m venv .venv" in asked(tmp_path)
    assert setup(tmp_path, environment).returncode == 0
    assert not [line for line in asked(tmp_path) if "-m venv" in line or "pip install" in line], "it is whole now"


def test_another_python_in_the_environment_has_it_filled_again(tmp_path: Path) -> None:
    environment = pythons(tmp_path, python3_13=False)
    assert setup(tmp_path, environment).returncode == 0 and any(" install " in line for line in asked(tmp_path))
    assert setup(tmp_path, environment).returncode == 0 and not any(" install " in line for line in asked(tmp_path))
    (tmp_path / "version").write_text("another\n")
    assert setup(tmp_path, environment).returncode == 0 and any(" install " in line for line in asked(tmp_path))


def test_a_python_that_can_make_an_environment_is_taken_first(tmp_path: Path) -> None:
    environment = pythons(tmp_path, python3_13=True, python3_12=False)
    assert setup(tmp_path, environment).returncode == 0
    seen = asked(tmp_path)
    assert "python3.12 -m venv .venv" in seen and not any("-venv" in line for line in seen)


def test_the_package_of_the_very_version_is_installed(tmp_path: Path) -> None:
    """python3-venv of Ubuntu 22.04 is that of its Python 3.10, which is too old."""
    environment = pythons(tmp_path, python3_13=True, python3_12=True, python3_11=True, python3=True)
    assert setup(tmp_path, environment).returncode == 0
    seen = asked(tmp_path)
    assert any("install" in line and line.endswith("python3.12-venv") for line in seen), seen
    assert "python3.13 -m venv .venv" in seen


@pytest.mark.parametrize("has_systemd", [True, False])
@pytest.mark.parametrize("fails", [False, True])
def test_an_ssh_server_that_it_installs_stays_off(tmp_path: Path, has_systemd: bool, fails: bool) -> None:
    environment = checkout(tmp_path)
    script = (tmp_path / "scripts" / "setup").read_text()
    systemd = tmp_path / "systemd"
    (tmp_path / "scripts" / "setup").write_text(
        script.replace("/usr/sbin/", f"{tmp_path}/sbin/").replace("/run/systemd/system", str(systemd))
    )
    if has_systemd:
        systemd.mkdir()
    for name in ("systemctl", "service", "update-rc.d", "apt-get"):
        program(tmp_path / "bin" / name, f'#!/bin/sh\necho {name} "$@" >>"$ASKED"\n')
    program(tmp_path / "bin" / "sudo", '#!/bin/sh\nexec "$@"\n')
    if fails:
        program(tmp_path / "bin" / "apt-get", '#!/bin/sh\necho apt-get "$@" >>"$ASKED"\n[ "$1" = update ]\n')
    done = setup(tmp_path, {**environment, "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"})
    assert (done.returncode == 0) == (not fails), done.stderr
    assert "the SSH server of this machine stays off" in done.stderr
    seen = asked(tmp_path)
    installed = next(number for number, line in enumerate(seen) if line.startswith("apt-get install") and "openssh-server" in line)
    if has_systemd:
        assert seen.index("systemctl -q mask --runtime ssh.service ssh.socket") < installed
        assert seen[installed + 1 : installed + 3] == [
            "systemctl -q unmask --runtime ssh.service ssh.socket", "systemctl -q disable --now ssh.service ssh.socket",
        ]  # fmt: skip
    else:
        assert seen[installed + 1 : installed + 3] == ["service ssh stop", "update-rc.d ssh disable"]


def test_an_ssh_server_that_is_there_is_left_as_it_is(tmp_path: Path) -> None:
    environment = pythons(tmp_path, python3_13=True, python3_12=True, python3_11=True, python3=True)
    for name in ("sshd", "systemctl", "service", "update-rc.d"):
        program(tmp_path / "bin" / name, NOTHING)
    done = setup(tmp_path, environment)
    assert done.returncode == 0 and "SSH server" not in done.stderr
    assert not any(" ssh" in line for line in asked(tmp_path))


@pytest.mark.parametrize(
    ("manager", "fix"),
    [
        ("dnf", "sudo dnf install openssh-server openssh-clients iproute iproute-tc util-linux python3"),
        ("pacman", "sudo pacman -S openssh iproute2 util-linux python"),
        ("", "install them with this system's package manager, then run again"),
    ],
)
def test_another_distribution_is_told_its_own_packages(tmp_path: Path, manager: str, fix: str) -> None:
    checkout(tmp_path)
    script = (tmp_path / "scripts" / "setup").read_text()
    (tmp_path / "scripts" / "setup").write_text(script.replace("/usr/sbin/", f"{tmp_path}/sbin/"))
    (tmp_path / "few").mkdir()
    for name in ("env", "bash", "dirname"):
        (tmp_path / "few" / name).symlink_to(str(shutil.which(name)))
    if manager:
        program(tmp_path / "few" / manager, NOTHING)
    done = setup(tmp_path, {"PATH": str(tmp_path / "few"), "HOME": str(tmp_path)})
    assert done.returncode == 1 and done.stderr.endswith(f"fix:   {fix}\n"), done.stderr
