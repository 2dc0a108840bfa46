"""Topics: what goes wrong with the machines themselves, and with reaching them."""

from __future__ import annotations

from homelab.diagnose.topic import Topic

TOPICS: tuple[Topic, ...] = (
    Topic(
        "unreachable",
        "A node cannot be reached, or went down",
        ("timed out; No route to host; nothing answers on port 22", "a node is back, and its part of the run is gone"),
        "It has no power, it sleeps, its cable is out, its address changed, or it crashed or was restarted while it trained. The ranks on "
        "the others end within the limit, and the newest complete checkpoint is on all of them. A node that has lost both the controller and "
        "the other nodes stops its ranks after a minute, and its card is free; one that has only lost the controller trains on.",
        (
            "homelab recover RUN goes on at once with the nodes that answer",
            "wake it, look at its cable; its address: a fixed one in the router, or the name in ~/.ssh/config",
            "why it went down: ssh NODE 'last -x | head'; journalctl -b -1 -e there",
            "then: homelab preflight",
        ),
        checks_too=("ssh.login",),
        rules=("unreachable", "alone", "node-restarted", "vanished", "not-in-cluster", "own-network"),
        words=("ssh", "power cut", "reboot", "offline", "dead", "address changed", "dhcp"),
    ),
    Topic(
        "ssh-login",
        "A node does not let us in",
        ("Permission denied (publickey)", "the login works by hand and not from homelab"),
        "homelab logs in with a key, never with a password, and as `ssh HOST` does: with the user, port and key of cluster.toml or "
        "~/.ssh/config. A key with a passphrase must be in the agent.",
        (
            "ssh-copy-id USER@ADDRESS once, then: homelab preflight --only ssh",
            "a passphrase: ssh-add; another user or key: user, identity_file at the node in cluster.toml",
        ),
        checks=("ssh.login", "ssh.probes"),
        words=("publickey", "password", "key", "authentication", "agent"),
    ),
    Topic(
        "slow-node-answers",
        "A node answers slowly",
        (
            "every command waits for one node",
            "homelab preflight says that a node answers late or is far from this machine",
        ),
        "The machine is overloaded, its disk is dying, its login runs something slow, or the way to it is long (a VPN, Wi-Fi).",
        ("ssh NODE uptime; then: time ssh NODE true", "homelab preflight --only ssh.slow --only network.controller"),
        checks=("ssh.slow", "network.controller"),
        words=("latency", "vpn", "load"),
    ),
    Topic(
        "host-key-changed",
        "The host key of a node has changed",
        ("homelab refuses to talk to a node whose host key is not the known one",),
        "The machine was installed anew, another one got its address, or somebody listens in between. Nothing of the three can be told from "
        "here, so homelab never accepts it by itself.",
        (
            "on the node's own screen: ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub, and compare",
            "if it is right: ssh-keygen -R ADDRESS (the message names the file), then: homelab trust NODE",
            "if an address wandered to another machine: fix it in the router, or correct host in cluster.toml",
        ),
        checks_too=("ssh.login",),
        rules=("host-key",),
        words=("known_hosts", "fingerprint", "man in the middle", "trust", "REMOTE HOST IDENTIFICATION HAS CHANGED"),
    ),
    Topic(
        "laptop-sleeps",
        "A laptop goes to sleep while it trains",
        ("a node is gone when its lid is shut, or after 15 minutes without a key pressed",),
        "Desktops suspend by default when nobody uses them, and a training is not a user. On battery the card is slowed down as well.",
        (
            "homelab preflight --only power names what would put it to sleep; --fix offers the commands",
            "by hand on the node: sudo systemctl mask sleep.target suspend.target hibernate.target",
            "plug it in, and leave the lid open or set HandleLidSwitch=ignore in /etc/systemd/logind.conf",
        ),
        checks=("power.sleep", "power.battery", "power.suspended"),
        words=("suspend", "lid", "battery", "hibernate", "idle", "inhibit"),
    ),
    Topic(
        "logout-ends-run",
        "Something on the node ended the training",
        ("SignalException: Process ... got signal: 15", "the run ends when somebody logs out, or at night"),
        "torchrun was told to stop, and not by homelab: a logout that ends all of a user's processes (KillUserProcesses), a shutdown, an "
        "unattended upgrade, a service manager, or a person.",
        (
            "ssh NODE 'journalctl -n 50' and ssh NODE 'last -x | head' tell which",
            "homelab preflight --only power finds the settings that would do it again",
            "then: homelab recover RUN",
        ),
        checks=("power.linger", "power.updates", "power.reboot"),
        rules=("stopped-from-outside",),
        words=("linger", "sigterm", "nohup", "logind", "unattended upgrades", "SIGHUP", "session"),
    ),
    Topic(
        "host-out-of-memory",
        "A machine ran out of main memory",
        (
            "a rank is killed by signal 9 without a word; Out of memory: Killed process ... in the kernel's log",
            "MemoryError; Cannot allocate memory; std::bad_alloc",
        ),
        "Loading a model takes its size in main memory for a moment, on every rank; a browser, other logins and the desktop take theirs. "
        "When nothing is left, the kernel kills the largest process, which is the training. Signal 9 may also be a person's kill -9.",
        (
            "ssh NODE 'journalctl -k | grep -i \"killed process\"' tells whether it was the kernel",
            "ssh NODE 'ps -eo rss,user,args --sort=-rss | head' shows who holds memory: close it",
            "fewer rows for that node: [parallel] shares; then: homelab recover RUN",
        ),
        checks=("memory.ram",),
        rules=("host-out-of-memory", "oom-killer", "killed", "torchrun-killed"),
        words=("oom killer", "ram", "swap", "signal 9", "SIGKILL", "exit code -9", "137"),
    ),
    Topic(
        "shared-memory",
        "/dev/shm is too small",
        (
            "Bus error ... insufficient shared memory (shm)",
            "NCCL WARN Error while creating shared memory segment; No space left on device: /dev/shm/nccl-...",
        ),
        "Data loaders and, between cards of one machine, NCCL pass data through /dev/shm. In a container it is 64 MB unless told otherwise; "
        "elsewhere it is half of the memory, and may be full of what crashed programs left.",
        (
            "ssh NODE 'df -h /dev/shm; ls -l /dev/shm', and remove what no program uses",
            "a container: docker run --shm-size=8g, or --ipc=host",
            "larger until the next start: sudo mount -o remount,size=8G /dev/shm",
        ),
        checks=("memory.shm",),
        rules=("shared-memory",),
        words=("/dev/shm", "shm", "bus error", "docker", "ipc"),
    ),
    Topic(
        "open-files",
        "Too many open files",
        ("OSError: [Errno 24] Too many open files",),
        "Each connection between ranks, each data loader and each shard of a model is an open file, and the limit of the login is low.",
        ("homelab preflight --only memory.open_files names the limit and the line that raises it",),
        checks=("memory.open_files",),
        words=("ulimit", "EMFILE", "nofile"),
    ),
    Topic(
        "disk-full",
        "The disk of a node is full",
        ("No space left on device; Disk quota exceeded", "the checkpoint of step ... cannot be written"),
        "Checkpoints, old runs, and the Hub's cache with its models fill it. A checkpoint counts only when it is whole, so the older ones are "
        "untouched. Space may be left while the file system has no room for more files (inodes).",
        (
            "ssh NODE 'df -h; df -i'; what is large: ssh NODE 'du -xh --max-depth=2 ~ | sort -h | tail'",
            "runs that are no longer needed: rm -r WORKDIR/runs/RUN on the node; fewer copies: [checkpoint] keep",
            "homelab preflight RECIPE --only disk tells how much the recipe needs; then: homelab recover RUN",
        ),
        checks=("disk.room", "disk.inodes", "disk.temporary", "disk.cache"),
        rules=("disk-full",),
        words=("space", "quota", "enospc", "inodes", "cache", "df"),
        says=r"checkpoint of step \d+ cannot be written",
    ),
    Topic(
        "permission",
        "A file may not be read or written",
        ("PermissionError: [Errno 13] Permission denied: ...", "Read-only file system"),
        "The user that homelab logs in with is not the owner: files made with sudo or inside a container, a disk of another system. A disk "
        "that turned read-only by itself is failing.",
        (
            "homelab preflight --only disk.writable --only disk.readonly",
            "on the node: sudo chown -R USER PATH; another place for runs: workdir at the node in cluster.toml",
        ),
        checks=("disk.writable", "disk.readonly"),
        rules=("permission",),
        words=("denied", "read-only", "owner", "chown", "errno 13"),
    ),
    Topic(
        "clock-skew",
        "The clocks of the nodes differ",
        ("times in logs do not fit together; certificates are not yet valid; a download from the Hub fails",),
        "A flat battery on the main board, or no time service. homelab itself compares only times of one and the same node, so that a training "
        "goes on; what you read, and TLS, do not.",
        ("on the node: sudo timedatectl set-ntp true", "then: homelab preflight --only clock"),
        checks=("clock.skew",),
        words=("time", "ntp", "chrony", "timezone", "certificate"),
    ),
)
