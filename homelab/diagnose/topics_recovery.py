"""Topics: the words in which a run says what it has seen of its nodes and ranks, and what it does about it by itself."""

from __future__ import annotations

from homelab.diagnose.topic import Topic

TOPICS: tuple[Topic, ...] = (
    Topic(
        "supervisor",
        "The supervisor: what recovers a run by itself, and when it gives up",
        ("has a supervisor on this machine already; attempt 2 goes on after step 40; given up: ...",),
        "launch leaves one process behind, on your machine or with --supervise head on the head node. It follows every node; on trouble it stops "
        "what is left, keeps the cause, and starts the next attempt from the newest complete checkpoint on the nodes that are well. It gives up "
        "where trying again would end the same way, where fewer nodes are left than [recovery] min_nodes, and after [recovery] max_restarts "
        "restarts within an hour (5, unless the recipe says otherwise).",
        (
            "given up: homelab why RUN says why and what mends it; then: homelab recover RUN",
            "its machine was off or restarted: homelab recover RUN, from any machine with the same cluster.toml",
            "how often, with how many nodes, or not at all: [recovery] max_restarts, min_nodes, auto in the recipe",
        ),
        words=(
            "recover",
            "recovery",
            "restart",
            "given up",
            "give up",
            "gave up",
            "supervise",
            "superseded",
            "max_restarts",
            "min_nodes",
            "attempt",
            "self-recovery",
        ),
        lines=r"\bgiven up\b|has a supervisor\b|knows a newer attempt|\brestarts within the last hour\b",
        next_command="homelab status",
    ),
    Topic(
        "rejoin",
        "A node was left out, and is taken back",
        ("NODE is well again; left out: NODE",),
        "An attempt goes on without a node that does not answer or is not well. The supervisor goes on asking it; once it passes the checks of a "
        "launch, it is taken back at the next checkpoint, where next to nothing is lost by starting anew. Not while another node cannot be "
        "heard, and not in a run with a program of your own ([script]).",
        (
            "it does not come back: homelab preflight names what is wrong with it",
            "without a supervisor: homelab stop RUN, then homelab recover RUN takes all nodes that are well",
            'never: [recovery] rejoin = "never" in the recipe',
        ),
        words=("left out", "leave out", "excluded", "returning", "taken back", "comes back"),
        lines=r"\bis well again\b",
        next_command="homelab preflight",
    ),
    Topic(
        "dead-rank",
        "The process of a rank is gone",
        (
            "the process of rank 1 on NODE is gone",
            "torchrun on NODE ended with ...; torchrun on NODE is gone, and its end was not written down",
        ),
        "A worker, or torchrun with it, has ended or was killed while the others trained: by its own error, by the kernel because memory ran out, "
        "or by somebody's kill. The others cannot go on without it, and are stopped.",
        (
            "homelab why RUN names the rank and what it said last; homelab logs RUN --rank N shows all that it printed",
            "it goes on by itself where a supervisor is left; else: homelab recover RUN",
            "killed (signal 9) and nobody did it: homelab explain host-out-of-memory",
        ),
        checks_too=("memory.ram",),
        words=("killed", "kill-worker", "process gone", "died"),
        lines=r"\bthe process of rank .* is gone\b|\btorchrun on .* (ended with|is gone)\b",
        next_command="homelab why",
    ),
    Topic(
        "frozen-rank",
        "A rank is frozen: its process was stopped by a signal",
        ("rank 0 on NODE was stopped by a signal",),
        "The process is there and does nothing: somebody sent it SIGSTOP or pressed Ctrl-Z, a debugger holds it, or a program that pauses others "
        "did so. After three seconds it counts as frozen: the others wait for it, and no step ends.",
        (
            "who is stopped (state T), and by whom it was started: ssh NODE 'ps -eo pid,ppid,stat,user,args'",
            "it goes on by itself where a supervisor is left: the frozen process is ended; else: homelab recover RUN",
        ),
        words=("freeze", "frozen", "freezes", "froze", "sigstop", "ctrl-z", "paused", "suspended"),
        lines=r"\bwas stopped by a signal\b",
        next_command="homelab why",
    ),
    Topic(
        "silent-node",
        "Nothing is heard of a node",
        (
            "nothing is heard of NODE, and OTHER cannot reach it any more",
            "nothing is heard of NODE, and all others have stood still for 10 s",
        ),
        "It lost power or the network, it sleeps, or its whole system stands still. It counts as gone when the other nodes cannot reach it either, "
        "or when the ranks that are heard stand still, too. While they go on, it trains and only your machine does not hear it: that is no trouble.",
        (
            "look at its power, its cable and its lid; it is taken back when it is well again: homelab explain rejoin",
            "it goes on by itself without the node where a supervisor is left; else: homelab recover RUN",
            "why it went down: homelab explain unreachable; a laptop: homelab explain laptop-sleeps",
        ),
        checks_too=("ssh.login", "network.reach", "power.sleep"),
        words=("power-cut", "pull-cable", "unheard", "not heard"),
        lines=r"\bnothing is heard of\b",
    ),
    Topic(
        "hang",
        "All ranks stand still: a hang",
        ("all ranks have stood still for 31 s (training at step 40)",),
        "Every process is there, every node is heard, and no step ends: the ranks wait for each other. Packets are lost on the way, a card or a "
        "disk does not answer, or ranks do not do the same collectives. The limit is twelve times the slowest of the last steps, at least "
        "30 s, counted from the last pass of any rank (a rank that computes slowly gives a sign after each: slow is not dead); before two steps were "
        "seen it is four times what the plan expects of one, at least 300 s; for loading, "
        "saving and evaluating it is minutes in which no process is seen to work. Before stuck ranks are ended, their stacks are kept with the attempt.",
        (
            "homelab why RUN shows who was behind; the stacks are in runs/RUN/attempts/N/",
            "it goes on by itself where a supervisor is left; else: homelab recover RUN",
            "before the first step: homelab explain hang-at-start; with a timeout of NCCL or gloo: homelab explain timeout",
            "a program of your own ([script]): only its end is seen; homelab stop RUN ends it",
        ),
        checks_too=("network.reach", "network.path_mtu", "collective.works"),
        words=("hangs", "stuck", "stood still", "stand still", "deadlock"),
        lines=r"\ball ranks have stood still\b",
        next_command="homelab why",
    ),
)
