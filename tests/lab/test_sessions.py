"""A node is reached like any machine: with the OpenSSH client, a verified host key and a key pair."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from homelab.controller.config.load import load_cluster
from homelab.lab import Lab
from homelab.lab.lab_state import load
from tests import private_etc
from tests.lab.conftest import needs_namespaces, output, ssh

pytestmark = pytest.mark.timeout(60)


def test_stdin_and_exit_code_pass_through(lab: Lab) -> None:
    blob = "".join(f"line {number}\n" for number in range(20_000))
    for node in lab.nodes:
        done = ssh(lab, node.name, "cat; exit 7", text=blob)
        assert (done.returncode, done.stdout) == (7, blob)


def test_a_signal_is_an_exit_code_too(lab: Lab) -> None:
    assert ssh(lab, "node1", "exec sh -c 'kill -TERM $$'").returncode == 255  # what OpenSSH says of a remote signal


def test_quoting_reaches_the_command_unchanged(lab: Lab) -> None:
    assert output(lab, "node1", """printf '%s|' "a  b" 'c"d' '$HOME' "e'f" """) == """a  b|c"d|$HOME|e'f|"""


def test_every_node_has_its_own_home(lab: Lab) -> None:
    homes = set()
    for node in lab.nodes:
        home, here, tilde = output(lab, node.name, 'echo "$HOME"; pwd; cd ~ && pwd').splitlines()
        assert home == here == tilde == node.home
        assert output(lab, node.name, "touch made-here; ls -d homelab") == "homelab"
        assert (Path(node.home) / "made-here").exists()
        homes.add(home)
    assert len(homes) == len(lab.nodes)


def test_sessions_carry_the_marker_and_nothing_of_ours_else(lab: Lab) -> None:
    environment = dict(line.split("=", 1) for line in output(lab, "node2", "env").splitlines())
    assert environment["HOMELAB_LAB_NODE"] == f"{lab.folder}:node2"
    assert environment["HOMELAB_LAB_ID"] == lab.state.id
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE", "its threads do not spin on processors that other nodes share"
    assert not environment.keys() & {"PYTHONPATH", "VIRTUAL_ENV", "SSH_ORIGINAL_COMMAND", "PYTEST_CURRENT_TEST"}


def test_a_program_in_the_nodes_bin_stands_in_front(lab: Lab) -> None:
    program = lab.state.node_folder(lab.nodes[0]) / "bin" / "nvidia-smi"
    program.write_text("#!/bin/sh\necho a recorded answer\n")
    program.chmod(0o755)
    assert output(lab, "node1", "nvidia-smi") == "a recorded answer"
    assert ssh(lab, "node2", "command -v nvidia-smi").stdout.strip() != str(program)


def test_python_of_the_cluster_file_runs(lab: Lab) -> None:
    cluster = load_cluster(lab.cluster_file)
    assert cluster.known_hosts == str(lab.folder / "known_hosts")
    for node in cluster.nodes:
        assert node.python == sys.executable  # the virtual environment's own path, links not resolved
        assert output(lab, node.name, f"'{node.python}' -c 'import sys; print(sys.prefix)'") == sys.prefix
        assert node.identity_file == str(lab.folder / "keys" / "id_ed25519")
        assert node.workdir.startswith(str(lab.folder))
        assert (node.lan_address, node.gpus, node.speed) == (node.host, (), None)
        assert output(lab, node.name, f"cat /sys/class/net/{node.interface}/operstate") in ("up", "unknown")


def test_no_password_and_no_other_key(lab: Lab, tmp_path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "other")], check=True)
    own_key = str(lab.folder / "keys" / "id_ed25519")
    command = [str(tmp_path / "other") if word == own_key else word for word in lab.ssh_command("node1")]
    done = subprocess.run([*command, "true"], capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 255
    assert "Permission denied (publickey)" in done.stderr


def test_another_host_key_is_refused(lab: Lab, tmp_path: Path) -> None:
    lines = (lab.folder / "known_hosts").read_text().splitlines()
    keys = [line.split(" ", 1) for line in lines]
    swapped = tmp_path / "known_hosts"
    swapped.write_text(f"{keys[0][0]} {keys[1][1]}\n{keys[1][0]} {keys[0][1]}\n")
    own = f'UserKnownHostsFile="{lab.folder / "known_hosts"}"'
    assert own in lab.ssh_command("node1")
    command = [f"UserKnownHostsFile={swapped}" if word == own else word for word in lab.ssh_command("node1")]
    done = subprocess.run([*command, "true"], capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 255
    assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in done.stderr


def test_files_are_copied_into_the_nodes_home(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "sent").write_bytes(bytes(range(256)) * 100)
    words = lab.ssh_command("node2")
    port = words.index("-p")
    options = [*words[1:port], "-P", words[port + 1], *words[port + 2 : -1]]
    subprocess.run(
        ["sftp", "-b", "-", *options, words[-1]],
        input=f'put "{tmp_path / "sent"}" received\n',
        text=True,
        check=True,
        timeout=30,
        capture_output=True,
    )
    assert (Path(lab.nodes[1].home) / "received").read_bytes() == (tmp_path / "sent").read_bytes()


def test_a_connection_is_quick(lab: Lab) -> None:
    seconds = []
    for _ in range(5):
        started = time.monotonic()
        output(lab, "node1", "true")
        seconds.append(time.monotonic() - started)
    assert min(seconds) < 4.0  # 0.15 to 0.25 s on an idle machine; the time-out of a reverse DNS question is 5 s


def test_nodes_outlive_the_terminal(lab: Lab) -> None:
    for node in lab.status()["nodes"]:
        fields = Path(f"/proc/{node['first_process']}/stat").read_text().rpartition(")")[2].split()
        session, terminal = int(fields[3]), int(fields[4])
        assert terminal == 0
        assert session != int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[3])


def test_state_is_read_back(lab: Lab) -> None:
    assert load(lab.folder) == lab.state == Lab.open(lab.folder).state


def test_isolated_nodes_have_their_own_machine(isolated: Lab) -> None:
    machine = Path("/proc/sys/kernel/hostname").read_text().strip()
    for node in isolated.nodes:
        assert output(isolated, node.name, "hostname; cat /etc/hostname").split() == [node.name, node.name]
        assert node.name != machine
        assert output(isolated, node.name, "getent hosts $(hostname)").split()[0] == node.host
        assert output(isolated, node.name, "cat /proc/1/cmdline").endswith("init.json\0")
        assert output(isolated, node.name, "ls /sys/class/net").split() == ["eth0", "lo"]
        assert output(isolated, node.name, "ip -4 -o addr show dev eth0").split()[3] == f"{node.host}/24"
        assert output(isolated, node.name, "ip route show default") == ""
        for folder in ("/tmp", "/dev/shm"):
            output(isolated, node.name, f"echo {node.name} > {folder}/homelab-lab-test")
            assert not Path(folder, "homelab-lab-test").exists()
    for node in isolated.nodes:
        assert output(isolated, node.name, "cat /tmp/homelab-lab-test /dev/shm/homelab-lab-test").split() == [node.name] * 2


# Runs where the files of /etc are copies. Prints one JSON object per file that a package has replaced.
A_PACKAGE_ADDS_AN_ACCOUNT = """
import json
from homelab.lab import Lab
from tests.lab.conftest import output
with Lab.up(sys.argv[1], nodes=1, backend="namespaces") as lab:
    for file in ("/etc/passwd", "/etc/shadow"):
        replace(file)
        seen = output(lab, "node1", 'echo "$HOME"; pwd; getent passwd "$(id -un)" | cut -d: -f6; cat /etc/hostname')
        print(json.dumps([file, lab.nodes[0].home, *seen.splitlines()]))
"""


@needs_namespaces
def test_a_package_that_adds_an_account_to_the_machine_leaves_the_nodes_their_homes(tmp_path: Path) -> None:
    """useradd and apt replace these files by rename. A file mounted on one of them would be gone then, in every node at once."""
    machines = {file: Path(file).stat().st_ino for file in ("/etc/passwd", "/etc/shadow")}
    told = private_etc.run(tmp_path / "etc-view", A_PACKAGE_ADDS_AN_ACCOUNT, str(tmp_path / "lab"), timeout_s=50)
    for file, home, *seen in map(json.loads, told.splitlines()):
        assert seen == [home, home, home, "node1"]
        assert Path(file).stat().st_ino == machines.pop(file), "the machine's own file was replaced"
    assert not machines


def test_a_folder_beside_the_lab_is_shared(isolated: Lab) -> None:
    (isolated.folder.parent / "model").mkdir()
    (isolated.folder.parent / "model" / "weights").write_text("the same on all nodes")
    for node in isolated.nodes:
        assert output(isolated, node.name, f"cat '{isolated.folder.parent}/model/weights'") == "the same on all nodes"
