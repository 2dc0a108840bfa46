"""Topics: what goes wrong between the machines."""

from __future__ import annotations

from homelab.diagnose.topic import Topic

TOPICS: tuple[Topic, ...] = (
    Topic(
        "hang-at-start",
        "It hangs at the start, and nobody says a word",
        (
            'the last line is "initialized", "Rendezvous" or nothing at all; the cards are idle',
            "after minutes: DistNetworkError: The client socket has timed out",
        ),
        "The ranks do not find each other. The usual three: a firewall lets port 29500 in but not the others that gloo and NCCL "
        "open for themselves, in both directions and between every pair; the wrong network interface was taken; or a machine's own name "
        "means 127.0.1.1 on itself, so that it tells the others an address that leads nowhere. Without homelab also: ranks or a node "
        "count typed wrongly; homelab hands them out itself. torchrun alone waits up to 15 minutes before it says anything.",
        (
            "homelab preflight dials every pair, on the rendezvous port and on others, and names the pair that cannot talk",
            "homelab preflight --deep lets all nodes add up numbers with the real backend, and says where it stops",
            "a firewall: homelab explain firewall; an interface: homelab explain wrong-interface; a name: homelab explain own-name",
        ),
        checks=("collective.works",),
        checks_too=("network.reach", "network.name", "network.port", "network.place"),
        rules=("unconnected", "not-begun"),
        words=(
            "initialized",
            "rendezvous",
            "stuck",
            "node_rank",
            "rank",
            "mismatch",
            "collective",
            "all-reduce",
        ),
    ),
    Topic(
        "firewall",
        "A firewall stands between two nodes",
        (
            "one node reaches the other, but not the other way round",
            "port 29500 is open, and the training still hangs",
        ),
        "gloo and NCCL listen on ports that the kernel picks (32768 to 60999) and connect back, so opening the rendezvous port is not "
        "enough: every node must let every other one in, on all ports. On a home LAN that means to trust the LAN's addresses.",
        (
            "homelab preflight --fix shows the line for the firewall this node has, asks, and runs it",
            "by hand with ufw, on the node: sudo ufw allow from 192.168.1.0/24 (your LAN's network); where it stops what leaves: sudo ufw "
            "allow out to 192.168.1.0/24",
            "then: homelab preflight --only network.reach",
        ),
        checks=("network.reach",),
        checks_too=("collective.works",),
        words=("ufw", "firewalld", "nftables", "iptables", "ports", "29500", "23456"),
    ),
    Topic(
        "packet-loss",
        "Packets are lost between two nodes",
        (
            "connections open at once, or after one second, or not at all, as it pleases",
            "steps stall for 0.2 s or more now and then; the speed of a cable changes from look to look",
        ),
        "A plug that is not quite in, a bent cable, a tired port of a switch, Wi-Fi or power-line: some packets never arrive, small ones as "
        "well as large ones. TCP sends them again, after waiting, and every step waits for the slowest link. By turns it looks like a "
        "firewall, a wrong MTU or a slow cable, and a mend for one of these seems to help once.",
        (
            "homelab preflight --only network.loss counts packets in both directions of every pair and names the node and the direction",
            "change the cable of the node that is named, then its port of the switch, then its network card",
            "once more: homelab preflight --only network",
        ),
        checks=("network.loss",),
        checks_too=("network.reach", "network.throughput"),
        words=("packet", "loss", "drop", "retransmit", "retransmission", "unsteady", "plug"),
    ),
    Topic(
        "own-name",
        "A machine takes its own name for 127.0.1.1",
        (
            "gloo: connect [127.0.1.1]: Connection refused",
            "the head waits for ranks that are dialling themselves",
        ),
        "Debian and Ubuntu write `127.0.1.1 NAME` into /etc/hosts. Whoever asks the name for an address is given one that only the "
        "machine itself can reach. homelab names nodes to each other by their LAN addresses; programs of your own may ask by name.",
        (
            "homelab preflight --only network.name names the nodes",
            "in /etc/hosts of the node, put its LAN address in place of 127.0.1.1; homelab preflight --fix offers the line",
        ),
        checks=("network.name",),
        words=("127.0.1.1", "hostname", "hosts", "localhost", "loopback"),
    ),
    Topic(
        "wrong-interface",
        "NCCL or gloo takes the wrong network interface",
        (
            "NCCL WARN Bootstrap : no socket interface found",
            "NCCL INFO names docker0, virbr0, tun0 or wlan0 instead of the cable",
        ),
        "A machine has several interfaces: containers, virtual machines, a VPN, Wi-Fi. Each library picks one by rules of its own, and the "
        "names differ from machine to machine, so one NCCL_SOCKET_IFNAME for all of them is wrong. homelab asks each node which interface "
        "leads to the others and sets NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME for each.",
        (
            "homelab plan RECIPE --why prints the interface of each node and why it was taken",
            'where it took the wrong one: network = "192.168.1.0/24" under [cluster] in cluster.toml, or interface = "..." at the node',
            "homelab preflight --only network",
        ),
        checks=("network.place", "network.virtual", "network.subnets"),
        words=(
            "NCCL_SOCKET_IFNAME",
            "GLOO_SOCKET_IFNAME",
            "docker0",
            "vpn",
            "bridge",
            "InfiniBand",
            "NCCL_IB_DISABLE",
            "eth0",
        ),
    ),
    Topic(
        "connection-refused",
        "One node cannot connect to another",
        (
            "connect() call failed; Connection refused; No route to host",
            "NCCL WARN Call to connect returned Connection refused",
        ),
        "Refused means that the machine answered and nobody listens there: the head is not up yet or has died, it listens on another "
        "address (127.0.1.1), or a firewall refuses in its name. NCCL_IB_DISABLE and NCCL_P2P_DISABLE, often advised here, mend none of "
        "these: the first matters only to InfiniBand cards, the second only to several cards within one machine.",
        (
            "homelab why RUN tells whether the head itself had failed first: then that is what to mend",
            "homelab preflight dials every pair of nodes and names the one that refuses",
            "then: homelab recover RUN",
        ),
        checks_too=("network.reach", "network.name", "network.port"),
        rules=("connection-refused", "distributed-error"),
        words=("nccl", "gloo", "master", "MASTER_ADDR", "ping", "ncclSystemError", "NCCL_P2P_DISABLE"),
    ),
    Topic(
        "connection-lost",
        "The connection to another rank broke",
        (
            "Connection closed by peer; Connection reset by peer; ncclRemoteError",
            "all ranks fail within a second or two",
        ),
        "This is what the others see when one rank is gone. It says who was left alone, never why: the cause is in the log of the rank "
        "that failed first.",
        (
            "homelab why RUN names that rank, its node and its last words",
            "where every rank says only this: a switch or a cable; homelab preflight, then homelab recover RUN",
        ),
        checks_too=("network.reach",),
        rules=("connection-lost",),
        words=("nccl", "peer", "broken pipe", "victim", "worker died"),
    ),
    Topic(
        "timeout",
        "The ranks wait for each other in vain",
        (
            "Watchdog caught collective operation timeout; Timed out waiting ... for recv operation",
            "it trained, then stood still: no step, no error, cards at 0 % or (NCCL spins while it waits) at 100 %",
        ),
        "No data came through for as long as the limit allows: a cable was pulled, a machine froze or went to sleep, Wi-Fi went away, or one "
        "rank does something else than the others. Left alone that lasts long: 10 minutes with NCCL, 30 with gloo and with the Trainer's "
        "default. homelab waits 2 minutes while ranks connect and 30 later, and its supervisor finds a rank that is dead, frozen or cut off in "
        "seconds. Processes that are stuck hold their cards until they are ended.",
        (
            "homelab why RUN names the rank that fell silent, where one did",
            "homelab preflight tells whether every pair of nodes can talk now",
            "homelab stop RUN ends what is stuck on every node and verifies it; homelab recover RUN goes on",
        ),
        checks_too=("network.reach", "network.wifi", "power.sleep"),
        rules=("timeout",),
        words=("nccl", "gloo", "watchdog", "hang", "cable", "NCCL_DEBUG", "interruption"),
    ),
    Topic(
        "port-in-use",
        "The port is in use",
        ("EADDRINUSE: Address already in use; The server socket has failed to listen",),
        "A program holds the rendezvous port on the head: often an earlier run whose torchrun was never ended, or a notebook.",
        (
            "homelab preflight --only network.port names the process that holds it",
            "was it a run of ours: homelab runs, then homelab stop RUN",
            "homelab recover RUN takes a fresh port by itself; for good: [parallel] port in the recipe",
        ),
        checks=("network.port",),
        checks_too=("runs.alive",),
        rules=("port-in-use",),
        words=("29500", "EADDRINUSE", "TIME_WAIT", "bind"),
    ),
    Topic(
        "wifi",
        "A node is on Wi-Fi",
        ("steps take several times as long as planned, and unevenly", "a node drops out and comes back"),
        "Wi-Fi shares the air with everything else, roams, and saves power by pausing. Every step waits for the slowest link, so one node "
        "on Wi-Fi slows all of them down, and a pause of some seconds can end the attempt.",
        (
            "use a cable; where none goes: powerline or MoCA is steadier than Wi-Fi",
            "homelab plan RECIPE --what-if=-NODE tells whether the node is worth its wire",
            'a laptop with both: interface = "..." at the node in cluster.toml names the cable',
        ),
        checks=("network.wifi",),
        words=("wi-fi", "wlan", "wireless", "roaming"),
    ),
    Topic(
        "mtu",
        "Packets of full size do not arrive",
        ("ping and ssh work; the training hangs at its first large transfer",),
        "Two ends believe in another packet size (MTU) than the way between them carries: jumbo frames on one card but not on the switch, or "
        "a VPN. Small packets pass, full ones vanish without a word, which is why ping shows nothing.",
        (
            "homelab preflight --only network.path_mtu sends packets of full size both ways between all pairs",
            "the same size everywhere, on each node: sudo ip link set INTERFACE mtu 1500",
        ),
        checks=("network.mtu", "network.path_mtu"),
        words=("jumbo", "9000", "packet"),
    ),
    Topic(
        "slow-wire",
        "Most of each step is spent on the network",
        ("high network overhead: homelab status shows more seconds of communication than of computing",),
        "What is sent per step is the gradient of the trainable weights. A LoRA adapter of a 7B model is 17 to 34 MB: 0.2 to 0.4 s "
        "for three nodes at 1 Gbit/s. Full fine-tuning of the same model sends all of its gigabytes: minutes per step. Logging less often, "
        "an advice one reads, saves nothing. A link that fell back to 100 Mbit/s costs ten times as much.",
        (
            "homelab plan RECIPE says how many seconds the wire costs, and what would change it",
            "homelab preflight --only network.speed --only network.throughput finds a bad cable or a slow switch",
            "adapters instead of full weights ([method] kind), fewer targets, or a larger [train] global_batch: fewer, fuller steps",
            '[parallel] compress = "bf16" halves the bytes and rounds the gradient for it',
        ),
        checks=("network.throughput", "network.speed", "network.latency", "collective.speed"),
        words=("bandwidth", "overhead", "congestion", "gigabit", "gradient", "switch", "cable", "communication"),
    ),
    Topic(
        "wrong-sums",
        "What the ranks add up is wrong",
        ("homelab preflight --deep finishes, but its sums are not right to the last element",),
        "Bytes change on their way or in a machine: bad memory, a failing network card, a driver that puts segments together wrongly. "
        "Training would go on and learn nonsense.",
        (
            "leave the node that preflight names out (--nodes) and test its memory (memtest86+)",
            "another cable, another port of the switch, then: homelab preflight --deep",
        ),
        checks=("collective.right",),
        words=("corruption", "checksum", "all-reduce"),
    ),
    Topic(
        "nat-wsl2",
        "A node stands behind a translated address (WSL2)",
        (
            "the node is reached by SSH, but its peers cannot dial it back",
            "its own address is 172.x or 10.x, not the LAN's",
        ),
        "WSL2 is by default a small network of its own behind Windows, and so is a container or a virtual machine with NAT. Ranks connect "
        "to each other in both directions on any port, so a forwarded port is not enough.",
        (
            "WSL2, in %UserProfile%\\.wslconfig under [wsl2]: networkingMode=mirrored; then in PowerShell: wsl --shutdown",
            "let the LAN in through Windows' firewall too; homelab preflight --only network.nat prints the line",
            "virtual machine: bridged network; container: --network host",
        ),
        checks=("network.nat",),
        words=("windows", "wsl", "container", "docker", "bridged", "virtual machine"),
    ),
)
