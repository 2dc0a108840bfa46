"""How torchrun is started: with its defaults, and tuned by its source (torch 2.13)."""

from __future__ import annotations

from dataclasses import dataclass

PORT = 29400


@dataclass(frozen=True)
class Setting:
    """A way to start torchrun. `conf` is --rdzv-conf, `program` the arguments of the training program."""

    name: str
    conf: tuple[tuple[str, int], ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    program: tuple[str, ...] = ()

    def command(self, python: str, run: str, head: str, program: list[str]) -> list[str]:
        """The same command on every node. `head`: the address whose torchrun holds the rendezvous."""
        words = [
            python, "-m", "torch.distributed.run", "--nnodes=2:3", "--nproc-per-node=1", "--max-restarts=3",
            "--rdzv-backend=c10d", f"--rdzv-endpoint={head}:{PORT}", f"--rdzv-id={run}",
        ]  # fmt: skip
        if self.conf:
            words.append("--rdzv-conf=" + ",".join(f"{key}={value}" for key, value in self.conf))
        return [*words, *program, *self.program]


DEFAULT = Setting("default")

TUNED = Setting(
    "tuned",
    conf=(
        # With 2 of 3 nodes a round waits this long for the third; the default is 30 s. With much less, a node that is one second late is
        # left out, joins the next round, and costs everybody one more restart: agents poll once a second.
        ("last_call_timeout", 3),
        # A dead node must be out of the old round before the others have given it up (10 s, below), or they wait for it: 2 s x 3
        # instead of 5 s x 3. No shorter: this runs beside the training, and late must not mean dead.
        ("keep_alive_interval", 2),
        ("keep_alive_max_attempt", 3),
        # Longer than the default of 60 s on purpose: while the head is silent for a minute, a shorter time ends all other torchruns
        # ("The connection to the C10d store has failed"), and nobody starts them again.
        ("read_timeout", 180),
        # join_timeout stays at 600 s: it is no delay, only the time until torchrun gives up.
    ),
    environment=(
        # Otherwise the workers of every round meet at the one store of the first round: with the keys of the dead round still in it,
        # and at an address that is not asked for again. With this each round has a store of its own, on a fresh port.
        ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1"),
    ),
    # torchrun restarts workers that end, and only those: a collective must give up, which it does after 30 minutes by default. 10 s is
    # what the other side of the comparison takes to call a node dead, too.
    program=("--silence-s=10",),
    # What does not help: --monitor-interval is 0.1 s already. --shutdown-timeout is not used when workers are restarted: a stopped one
    # is waited for 30 s (LocalElasticAgent._stop_workers). The watchdog for workers that hang (TORCHELASTIC_ENABLE_FILE_TIMER) kills
    # torchrun itself along with them (FileTimerServer._run_watchdog). TORCH_NCCL_* says nothing to gloo.
)

ALL = (DEFAULT, TUNED)
