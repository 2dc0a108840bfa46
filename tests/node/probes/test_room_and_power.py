"""The probes of room, memory, power and code, against trees of files as real machines have them, and against this machine."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from homelab.controller.facts.node import Facts
from homelab.controller.remote import ship
from homelab.node.probes import power, python, resources, upgrades
from homelab.node.system import control_group, programs

pytestmark = pytest.mark.timeout(30)
REPOSITORY = Path(__file__).resolve().parents[3]


def tree(root: Path, files: dict[str, str]) -> str:
    """A folder that stands for /; a text "-> x" makes a link to x."""
    for name, text in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        if text.startswith("-> "):
            path.symlink_to(text[3:])
        else:
            path.write_text(text)
    return str(root)


SYSTEMD = {"/run/systemd/system/x": ""}
LID = {"/proc/acpi/button/lid/LID0/state": "state:      open\n"}
# /etc/systemd/logind.conf of Debian 12: everything is a comment.
LOGIND = "[Login]\n#NAutoVTs=6\n#KillUserProcesses=no\n#HandleLidSwitch=suspend\n#IdleAction=ignore\n"


def sleep_of(tmp_path: Path, files: dict[str, str]) -> dict[str, Any]:
    found = power.read({}, tree(tmp_path, {**SYSTEMD, **files}))["sleep"]
    assert Facts.model_validate({"node": "n", "power": {"sleep": found}}).power.sleep is not None
    return dict(found)


def test_logind_as_it_comes(tmp_path: Path) -> None:
    found = sleep_of(tmp_path, {"/etc/systemd/logind.conf": LOGIND})
    assert found == {"masked": [], "idle_action": "ignore", "lid": False, "lid_action": "suspend", "kills_processes": False}
    assert power.read({}, tree(tmp_path / "other", {"/etc/systemd/logind.conf": LOGIND}))["sleep"] is None, "systemd does not run there"


@pytest.mark.parametrize(
    ("name", "value", "place"),
    [
        ("HF_HUB_CACHE", "{}/a", "{}/a"),
        ("HUGGINGFACE_HUB_CACHE", "{}/b", "{}/b"),
        ("HF_HOME", "{}/c", "{}/c/hub"),
        ("XDG_CACHE_HOME", "{}/d", "{}/d/huggingface/hub"),
        ("HOME", "{}", "{}/.cache/huggingface/hub"),
    ],
)
def test_the_disk_of_the_hubs_cache_is_where_the_hub_puts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, place: str
) -> None:
    for other in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, value.format(tmp_path))
    assert resources.read({"workdir": str(tmp_path)})["cache_folder"] == place.format(tmp_path)
    asked: list[str] = []
    monkeypatch.setattr(resources, "_existing", lambda folder: asked.append(folder) or str(tmp_path))
    assert resources._cache_free_bytes(str(tmp_path)) is None, "one disk: it is counted once"
    assert asked[0] == place.format(tmp_path)


def test_drop_ins_are_read_in_systemds_order(tmp_path: Path) -> None:
    found = sleep_of(
        tmp_path,
        {
            "/etc/systemd/logind.conf": "[Login]\nIdleAction=hibernate\n",
            "/usr/lib/systemd/logind.conf": "[Login]\nIdleAction=poweroff\nHandleLidSwitch=poweroff\n",  # hidden by the one of /etc
            "/usr/lib/systemd/logind.conf.d/10-vendor.conf": "[Login]\nIdleAction=reboot\nHandleLidSwitch=lock\n",
            "/usr/lib/systemd/logind.conf.d/50-hidden.conf": "[Login]\nIdleAction=kexec\n",
            "/etc/systemd/logind.conf.d/50-hidden.conf": "-> /dev/null",
            "/run/systemd/logind.conf.d/20-run.conf": "[Other]\nIdleAction=halt\n[Login]\n; IdleAction=halt\nIdleAction = suspend\n",
        },
    )
    assert (found["idle_action"], found["lid_action"]) == ("suspend", "lock")


def test_an_empty_value_is_the_default_again_and_mains_have_their_own_lid_switch(tmp_path: Path) -> None:
    files = {
        "/etc/systemd/logind.conf": "[Login]\nIdleAction=suspend\nHandleLidSwitchExternalPower=ignore\n",
        "/etc/systemd/logind.conf.d/a.conf": "[Login]\nIdleAction=\n",
        **LID,
    }
    found = sleep_of(tmp_path / "mains", files)
    assert (found["idle_action"], found["lid"], found["lid_action"]) == ("ignore", True, "ignore")
    battery = {"/sys/class/power_supply/BAT0/type": "Battery\n", "/sys/class/power_supply/BAT0/status": "Discharging\n"}
    assert sleep_of(tmp_path / "battery", {**files, **battery})["lid_action"] == "suspend"


def test_a_lid_among_the_input_devices(tmp_path: Path) -> None:
    devices = 'I: Bus=0019 Vendor=0000 Product=0005 Version=0000\nN: Name="Lid Switch"\nP: Phys=PNP0C0D/button/input0\n'
    assert sleep_of(tmp_path, {"/proc/bus/input/devices": devices})["lid"]


def test_masked_targets(tmp_path: Path) -> None:
    found = sleep_of(
        tmp_path,
        {
            "/etc/systemd/system/sleep.target": "-> /dev/null",  # systemctl mask
            "/run/systemd/system/suspend.target": "-> /dev/null",  # systemctl mask --runtime
            "/usr/lib/systemd/system/suspend.target": "[Unit]\n",
            "/etc/systemd/system/hibernate.target": "[Unit]\n",  # replaced by hand, not masked
            "/usr/lib/systemd/system/hybrid-sleep.target": "[Unit]\n",
        },
    )
    assert found["masked"] == ["sleep.target", "suspend.target"]


def test_targets_that_nixos_masks_by_a_chain_of_links(tmp_path: Path) -> None:
    store = tmp_path / "nix" / "store"
    links = {"/nix/store/units/sleep.target": "-> /dev/null", "/nix/store/units/suspend.target": f"-> {store}/systemd/suspend.target"}
    links |= {f"/etc/systemd/system/{name}.target": f"-> {store}/units/{name}.target" for name in ("sleep", "suspend", "hibernate")}
    assert sleep_of(tmp_path, {**links, "/nix/store/systemd/suspend.target": "[Unit]\n"})["masked"] == ["sleep.target"]


@pytest.mark.parametrize(
    ("options", "kills"),
    [
        ({}, False),
        ({"KillUserProcesses": "yes"}, True),
        ({"KillUserProcesses": "true", "KillOnlyUsers": "guest"}, False),
        ({"KillUserProcesses": "1", "KillOnlyUsers": "guest me"}, True),
        ({"KillUserProcesses": "yes", "KillExcludeUsers": "root me"}, False),
        ({"KillUserProcesses": "no"}, False),
    ],
)
def test_whose_processes_end_with_the_login(options: dict[str, str], kills: bool) -> None:
    assert power.kills_processes(options, "me") is kills
    assert not power.kills_processes({"KillUserProcesses": "yes"}, "root"), "root is on KillExcludeUsers unless somebody changes it"


@pytest.mark.parametrize(
    ("supplies", "expected"),
    [
        ({}, None),
        ({"AC/type": "Mains", "AC/online": "1"}, None),
        ({"BAT0/type": "Battery", "AC/type": "Mains", "AC/online": "1"}, "mains"),
        ({"BAT0/type": "Battery", "AC/type": "Mains", "AC/online": "0"}, "battery"),
        ({"BAT0/type": "Battery", "ucsi-source-psy-USBC000:001/type": "USB", "ucsi-source-psy-USBC000:001/online": "1"}, "mains"),
        ({"BAT0/type": "Battery", "BAT0/status": "Charging"}, "mains"),
        ({"hidpp_battery_0/type": "Battery", "hidpp_battery_0/scope": "Device"}, None),
    ],
)
def test_mains_and_battery(tmp_path: Path, supplies: dict[str, str], expected: str | None) -> None:
    files = {f"/sys/class/power_supply/{name}": text + "\n" for name, text in supplies.items()}
    assert power.read({}, tree(tmp_path, files))["source"] == expected


def test_sleep_is_seen_where_the_kernel_counted_one(tmp_path: Path) -> None:
    assert power.read({}, tree(tmp_path / "never", {"/sys/power/suspend_stats/success": "0\n"}))["suspended"] is None
    found = power.read({}, tree(tmp_path / "once", {"/sys/power/suspend_stats/success": "3\n"}))["suspended"]
    assert found["up_s"] > 0 and found["asleep_s"] >= 0 and found["ago_s"] is None


def test_the_journals_line() -> None:
    # journalctl -k -o short-unix of systemd 252
    assert power.parse_short_unix("1732189711.000001 t kernel: x\n1732189712.123456 tower kernel: PM: suspend exit\n") == 1732189712.123456
    assert power.parse_short_unix("-- No entries --\n") is None and power.parse_short_unix("") is None


def test_a_restart_that_waits(tmp_path: Path) -> None:
    packages = "linux-image-6.8.0-51-generic\nlinux-base\nlinux-base\n"
    files = {"/run/reboot-required": "*** System restart required ***\n", "/run/reboot-required.pkgs": packages}
    assert upgrades.reboot_required(tree(tmp_path / "a", files)) == ["linux-image-6.8.0-51-generic", "linux-base"]
    assert upgrades.reboot_required(tree(tmp_path / "b", {"/var/run/reboot-required": ""})) == []
    assert upgrades.reboot_required(str(tmp_path / "c")) is None


# As Ubuntu 24.04 ships them.
PERIODIC = 'APT::Periodic::Update-Package-Lists "1";\nAPT::Periodic::Unattended-Upgrade "1";\n'
FIFTY = """// Automatically upgrade packages from these (origin:archive) pairs
Unattended-Upgrade::Allowed-Origins {
\t"${distro_id}:${distro_codename}";
//\t"${distro_id}:${distro_codename}-updates";
};
// Python regular expressions, matching packages to exclude from upgrading
Unattended-Upgrade::Package-Blacklist {
    // The following matches all packages starting with linux-
//  "linux-";
};
//Unattended-Upgrade::Automatic-Reboot "false";
/* Unattended-Upgrade::Automatic-Reboot "true"; */
"""
INSTALLED = {"/usr/bin/unattended-upgrade": "", "/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  575.64"}
STATUS = """Package: libnvidia-compute-575
Status: install ok installed
Version: 575.64-0ubuntu1

Package: nvidia-driver-575
Status: hold ok installed
Version: 575.64-0ubuntu1

Package: nvidia-settings
Status: install ok installed

Package: nvidia-driver-550
Status: deinstall ok config-files
"""


def updates(tmp_path: Path, **files: str) -> dict[str, Any] | None:
    apt = {f"/etc/apt/apt.conf.d/{name}": text for name, text in files.items()}
    return upgrades.unattended(tree(tmp_path, {**INSTALLED, "/var/lib/dpkg/status": STATUS, **apt}))


def test_unattended_upgrades(tmp_path: Path) -> None:
    assert updates(tmp_path / "a", **{"20auto-upgrades": PERIODIC, "50unattended-upgrades": FIFTY}) == {
        "reboots": False, "reboot_time": "now", "driver_packages": ["libnvidia-compute-575"],
    }  # fmt: skip
    later = (
        'Unattended-Upgrade { Automatic-Reboot "true"; Automatic-Reboot-Time "02:00"; Package-Blacklist { "nvidia-"; "libnvidia-"; }; };'
    )
    assert updates(tmp_path / "b", **{"20auto-upgrades": PERIODIC, "50unattended-upgrades": FIFTY, "99mine": later}) == {
        "reboots": True, "reboot_time": "02:00", "driver_packages": [],
    }  # fmt: skip
    assert (
        updates(tmp_path / "c", **{"20auto-upgrades": PERIODIC.replace('Upgrade "1"', 'Upgrade "0"'), "50unattended-upgrades": FIFTY})
        is None
    )
    assert updates(tmp_path / "d", **{"20auto-upgrades.dpkg-old": PERIODIC}) is None, "apt does not read files of other endings"
    assert updates(tmp_path / "e", **{"20auto-upgrades": PERIODIC, "99broken": 'Unattended-Upgrade { { " }; x'}) is not None


def test_comments_and_lists_of_apts_options() -> None:
    options = upgrades.apt_options([PERIODIC, FIFTY])
    assert options["unattended-upgrade::allowed-origins"] == ["${distro_id}:${distro_codename}"]
    assert "unattended-upgrade::package-blacklist" not in options and "unattended-upgrade::automatic-reboot" not in options
    assert upgrades.apt_options(['A::B "1"; A::B "2";', "#clear A;"]) == {}
    assert upgrades.apt_options(['A { B { "x;y"; "z" }; C "d"; };', "# a comment", 'A::B:: "w";'])["a::c"] == ["d"]


def test_what_the_fixes_write_is_what_the_probes_read(tmp_path: Path) -> None:
    from homelab.controller.checks.machine import power as judges
    from tests.controller.checks.healthy import changed, gpu

    evidence = gpu()
    node = evidence.cluster.node("tower").model_copy(update={"host": "local"})
    bad = {
        "power": {
            "updates": {"reboots": True, "driver_packages": ["libnvidia-compute-575"]},
            "sleep": {"kills_processes": True, "lid": True, "lid_action": "poweroff"},
        },
        "system": {"user": "root"},
    }
    facts = changed(evidence.facts["tower"], **bad)
    tree(
        tmp_path,
        {
            **SYSTEMD,
            **INSTALLED,
            **LID,
            "/var/lib/dpkg/status": STATUS,
            "/etc/apt/apt.conf.d/20auto-upgrades": PERIODIC + 'Unattended-Upgrade::Automatic-Reboot "true";\n',
        },
    )
    for judge in (judges.updates, judges.linger, judges.sleep):
        for problem in judge(evidence, node, facts):
            subprocess.run(["sh", "-ec", problem.fix.replace("/etc/", f"{tmp_path}/etc/").replace("systemctl", "true")], check=True)
    found = power.read({}, str(tmp_path))
    assert found["updates"] == {"reboots": False, "reboot_time": "now", "driver_packages": []}
    assert found["sleep"]["lid_action"] == "ignore" and not found["sleep"]["kills_processes"]
    assert "KillUserProcesses=no" in (tmp_path / "etc/systemd/logind.conf.d/91-homelab.conf").read_text()


def test_the_lowest_limit_of_a_control_group_and_those_above_it(tmp_path: Path) -> None:
    second = tree(
        tmp_path / "v2",
        {
            "/user.slice/memory.max": "4294967296\n", "/user.slice/memory.current": "3221225472\n",
            "/user.slice/memory.stat": "anon 1\ninactive_file 1073741824\n", "/user.slice/user-1000.slice/memory.max": "max\n",
        },
    )  # fmt: skip
    groups = tmp_path / "cgroup"
    groups.write_text("0::/user.slice/user-1000.slice/session-3.scope\n")
    assert control_group.memory(str(groups), second) == (4294967296, 2147483648)
    first = tree(
        tmp_path / "v1",
        {
            "/memory/docker/abc/memory.limit_in_bytes": "536870912\n",
            "/memory/docker/abc/memory.usage_in_bytes": "1000\n",
            "/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
    )
    groups.write_text("5:cpu,cpuacct:/\n4:memory:/docker/abc\n")
    assert control_group.memory(str(groups), first) == (536870912, 1000)
    groups.write_text("0::/\n")
    assert control_group.memory(str(groups), first) == (None, None)
    assert control_group.memory(str(tmp_path / "nothing"), first) == (None, None)


def test_room_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = resources.read({"workdir": str(tmp_path / "new" / "work")})
    assert found["workdir_writable"] and found["workdir_problem"] is None and os.listdir(tmp_path / "new" / "work") == []
    assert found["disk_free_bytes"] > 0 and found["temporary_folder"] == str(tmp_path) and found["temporary_free_bytes"] > 0
    assert found["open_files_soft"] == soft and found["open_files_hard"] in (hard, None)
    Facts.model_validate({"node": "n", "resources": found})


@pytest.mark.parametrize(("workdir", "words"), [("/proc/homelab", "No such file or directory"), ("/dev/null/x", "Not a directory")])
def test_a_workdir_that_cannot_be_written(workdir: str, words: str) -> None:
    found = resources.read({"workdir": workdir})
    assert (found["workdir_writable"], found["workdir_problem"]) == (False, words)


@pytest.mark.parametrize(
    ("files", "free", "expected"),
    [(0, 7, None), (100, 7, 7), (100, 0, 0), (812, -1, None), (812, 2**64 - 1, None), (2**64 - 1, 7, None), (2**63, 2**63, None)],
    ids=["btrfs", "ext4", "full", "CephFS", "bcachefs", "no end", "half of no end"],
)
def test_file_systems_without_a_count_of_inodes(files: int, free: int, expected: int | None) -> None:
    class State:
        f_files, f_favail = files, free

    assert resources.free_inodes(cast(Any, State())) == expected


def test_a_disk_that_is_read_only_and_one_that_is_full(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    probe = "import json; from homelab.node.probes import resources; print(json.dumps(resources.read({'workdir': '%s/w'})))"
    for options, words in (("ro", "Read-only file system"), ("size=64k,nr_inodes=3", "No space left on device")):
        place = tmp_path / words.replace(" ", "-")
        place.mkdir()
        fill = f"for i in 1 2 3 4 5 6; do head -c 60k /dev/zero > {place}/$i || break; done 2>/dev/null" if "size" in options else ":"
        script = f'mount -t tmpfs -o {options} none {place} && {{ {fill}; {sys.executable} -c "{probe % place}"; }}'
        done = subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, cwd=REPOSITORY)
        if done.returncode != 0 and "unshare" in done.stderr:
            pytest.skip("no mount namespaces here")
        assert f'"workdir_problem": "{words}"' in done.stdout, done.stderr
        assert '"disk_free_inodes": 0' in done.stdout or "ro" in options


def test_the_agent_reckons_the_hash_that_the_controller_shipped(tmp_path: Path) -> None:
    digest, archive = ship.CODE.content_hash(), ship.CODE.archive()
    assert python.code_hash() == digest
    import io
    import tarfile

    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(tmp_path, filter="data")
    copy = tmp_path / "homelab"
    assert python.code_hash(str(copy)) == digest
    with (copy / "worker" / "training" / "train.py").open("a") as stream:
        stream.write("#")
    assert python.code_hash(str(copy)) not in (digest, None)
    (copy / "worker" / "training" / "train.py").unlink()
    assert python.code_hash(str(copy)) not in (digest, None)
    (copy / "__init__.py").unlink()
    assert python.code_hash(str(copy)) is None


def test_versions_are_what_importlib_metadata_says(tmp_path: Path) -> None:
    from importlib import metadata

    assert python.versions(python.PACKAGES, sys.path) == {name: installed(name) for name in python.PACKAGES}
    assert any(python.versions(python.PACKAGES, sys.path).values())
    files = {
        "a/torch-2.13.0+cu130.dist-info/METADATA": "Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0+cu130\n",
        "a/Some.Thing_else-1.0rc1.dist-info/METADATA": "Metadata-Version: 2.1\nName: some-thing-else\nVersion: 1.0rc1\n",
        "a/peft-0.19.0.dist-info/RECORD": "damaged: pip was interrupted",
        "a/numpy-1.24.2.egg-info/PKG-INFO": "Metadata-Version: 2.1\nName: numpy\nVersion: 1.24.2\n",  # Debian's
        "a/trl-0.9-py3.11.egg-info": "Metadata-Version: 2.1\nName: trl\nVersion: 0.9\n",
        "b/torch-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: torch\nVersion: 1.0\n",  # later on the path
    }
    places = [tree(tmp_path, files) + "/a", f"{tmp_path}/nowhere", f"{tmp_path}/b"]
    found = python.versions(("torch", "some-thing-else", "peft", "numpy", "trl", "unsloth"), places)
    assert found == {"torch": "2.13.0+cu130", "some-thing-else": "1.0rc1", "peft": None, "numpy": "1.24.2", "trl": "0.9", "unsloth": None}
    known = {one.metadata["Name"]: one.version for one in reversed(list(metadata.distributions(path=places))) if one.metadata["Name"]}
    assert {name: version for name, version in found.items() if version} == known


def installed(name: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def test_the_nccl_beside_torch() -> None:
    names = [
        "nvidia_nccl_cu12-2.27.3.dist-info",
        "nvidia_nccl_cu13-2.28.9.dist-info",
        "torch",
        "nvidia_nccl_cu12.libs",
        "numpy-2.4.6.dist-info",
    ]
    assert python.nccl_version(names, "12.8") == "2.27.3" and python.nccl_version(names, "13.0") == "2.28.9"
    assert python.nccl_version(names, None) is None and python.nccl_version(names[:1], "13.0") == "2.27.3"
    assert python.nccl_version([], "12.8") is None


def test_what_an_environment_of_unsloth_takes_is_read_without_starting_it(tmp_path: Path) -> None:
    metadata = (
        "Metadata-Version: 2.4\nName: unsloth\nVersion: 2026.10.9\nRequires-Dist: torch<2.15.0,>=2.4.0\n"
        "Requires-Dist: datasets!=4.0.*,!=4.1.0,<5.0.0,>=3.4.1\nRequires-Dist: transformers!=5.0.0,<=5.17.0,>=4.52.4\n"
        "Requires-Dist: peft!=0.11.0,>=0.18.0\nRequires-Dist: numpy (<3)\nRequires-Dist: tqdm<9\n"
        'Requires-Dist: trl<=0.1; extra == "old"\n\nRequires-Dist: accelerate<1 is prose\n'
    )
    there = "env/lib/python3.12/site-packages"
    tree(tmp_path, {
        f"{there}/unsloth-2026.10.9.dist-info/METADATA": metadata,
        f"{there}/unsloth_zoo-2026.10.9.dist-info/METADATA": "Name: unsloth_zoo\nRequires-Dist: trl!=0.19.0,<=1.15.0,>=0.18.2\n",
    })  # fmt: skip
    assert python.unsloth(f"{tmp_path}/env/bin/python") == {
        "unsloth": "2026.10.9",
        "unsloth_takes": {"torch": "<2.15.0", "datasets": "<5.0.0", "transformers": "<=5.17.0", "numpy": "<3", "trl": "<=1.15.0"},
    }
    for other in (f"{tmp_path}/nowhere/bin/python", "", "/usr/bin/python3"):
        assert python.unsloth(other) == {"unsloth": None, "unsloth_takes": {}}


@pytest.mark.parametrize(
    ("device", "partition", "rotational", "turns"),
    [
        ("pci0000:00/0000:00:17.0/ata1/host0/target0:0:0/0:0:0:0/block/sda", "/sda2", "1", True),
        ("pci0000:00/0000:00:17.0/ata1/host0/target0:0:0/0:0:0:0/block/sda", "", "0", False),
        ("pci0000:00/0000:01:00.0/nvme/nvme0/nvme0n1", "/nvme0n1p2", "0", False),
        ("pci0000:00/0000:00:14.0/usb2/2-1/2-1:1.0/host6/target6:0:0/6:0:0:0/block/sdb", "/sdb1", "1", True),
        ("pci0000:00/0000:00:04.0/virtio1/block/vda", "/vda1", "1", None),  # of a virtual machine, whatever is below it
        ("LNXSYSTM:00/VMBUS:01/fd1d2cbd/host0/target0:0:0/0:0:0:1/block/sdc", "", "1", None),  # of WSL2
        ("virtual/block/dm-0", "", "1", None),
    ],
)
def test_a_disk_that_turns(tmp_path: Path, device: str, partition: str, rotational: str, turns: bool | None) -> None:
    number = os.stat(tmp_path).st_dev
    root = Path(tree(tmp_path, {f"devices/{device}/queue/rotational": f"{rotational}\n", f"devices/{device}{partition}/size": "1\n"}))
    (root / "block").mkdir()
    (root / f"block/{os.major(number)}:{os.minor(number)}").symlink_to(root / f"devices/{device}{partition}")
    assert resources._turns(str(tmp_path), str(root / "block")) is turns


def test_a_folder_without_a_device_of_its_own(tmp_path: Path) -> None:
    assert resources._turns(str(tmp_path), str(tmp_path / "none")) is None and resources._turns(str(tmp_path / "gone")) is None


def test_what_can_install_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(programs, "_ELSEWHERE", [])
    monkeypatch.setattr(sys, "base_prefix", "/usr/of/another")
    (tmp_path / "site" / "pip").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", ["", str(tmp_path / "site")])
    assert python._installer() == {"has_pip": True, "uv": None, "is_managed": False}
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert python._installer() == {"has_pip": False, "uv": None, "is_managed": False}
    uv = tmp_path / ".local" / "bin" / "uv"
    uv.parent.mkdir(parents=True)
    uv.write_text("")
    uv.chmod(0o755)
    assert python._installer()["uv"] == str(uv)
    monkeypatch.setattr(sys, "base_prefix", sys.prefix)
    monkeypatch.setattr(os, "__file__", str(tmp_path / "os.py"))
    (tmp_path / "EXTERNALLY-MANAGED").touch()
    assert python._installer()["is_managed"] is True


def test_a_workdir_on_a_share_says_the_same_on_all_machines(tmp_path: Path) -> None:
    mounts, share = tmp_path / "mounts", tmp_path / "my share"
    share.mkdir()
    point = str(share).replace(" ", "\\040")
    mounts.write_text(f"/dev/sda1 / ext4 rw 0 0\nnas:/home {point} nfs4 rw 0 0\n")
    mark = resources._mark(str(share), str(mounts))
    assert mark and len(mark) == 32 and resources._mark(str(share), str(mounts)) == mark
    assert resources._mark(str(tmp_path), str(mounts)) is None, "a disk of its own, which may have been copied"
    assert [path.name for path in share.iterdir()] == [".workdir-id"]
    assert resources._mark(str(share / "gone"), str(mounts)) is None


@pytest.mark.parametrize(
    ("kernel", "written", "ends"),
    [
        ("5.15.167.4-microsoft-standard-WSL2", None, True),
        ("5.15.167.4-microsoft-standard-WSL2", "[wsl2]\r\nvmIdleTimeout=-1\r\n", True),
        ("5.15.167.4-microsoft-standard-WSL2", "[general]\r\ninstanceIdleTimeout = -1\r\n[wsl2]\r\nvmIdleTimeout=-1\r\n", False),
        ("5.15.167.4-microsoft-standard-WSL2", "#instanceIdleTimeout=-1\n", True),
        ("6.8.0-45-generic", None, None),
    ],
)
def test_a_wsl_that_windows_ends_when_its_last_window_is_closed(
    tmp_path: Path, kernel: str, written: str | None, ends: bool | None
) -> None:
    (tmp_path / "proc/sys/kernel").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/osrelease").write_text(kernel + "\n")
    (tmp_path / "mnt/c/Users/me").mkdir(parents=True)
    if written is not None:
        (tmp_path / "mnt/c/Users/me/.wslconfig").write_text(written)
    assert power.read({}, str(tmp_path))["ends_with_windows"] is ends
