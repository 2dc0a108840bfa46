"""Topics: what goes wrong in the training and with a run."""

from __future__ import annotations

from homelab.diagnose.topic import Topic

TOPICS: tuple[Topic, ...] = (
    Topic(
        "loss-nan",
        "The loss or the gradient is not a number",
        ("the loss is not a number in step ...; loss: nan; grad_norm: inf",),
        "The learning rate is too high for this batch, the warmup too short, fp16 overflows, or single rows are broken (empty, or without "
        "a token that carries loss). Starting again does the same again.",
        (
            "the message names the step, the rank and the rows: look at them first",
            "lower [train] learning_rate (a third of it), raise [train] warmup_steps; gradients are clipped at [train] max_grad_norm = 1.0",
            'where a card allows it: [train] precision = "bf16"; then as a new run: homelab launch RECIPE',
        ),
        checks_too=("data.loss", "data.parses"),
        rules=("nan-loss",),
        words=("nan", "inf", "infinite", "overflow", "clipping", "learning rate", "grad_norm"),
        says=r"is not a number in step",
    ),
    Topic(
        "loss-diverges",
        "The loss rises, or does not fall",
        ("training diverges: the loss jumps up and stays there",),
        "Nearly always the learning rate, or the data (answers that are wrong, doubled, or cut off). It is not the number of machines: homelab never "
        "multiplies the learning rate by the number of GPUs, since the global batch, which it belongs to, is the same on one node or five.",
        (
            "lower [train] learning_rate; longer [train] warmup_steps, but no more than a tenth of all steps",
            "homelab preflight RECIPE --only data looks at the rows; [tracking] eval_every_steps shows when it began to go wrong",
            "a larger batch on purpose: [train] lr_scale with reference_batch says in the recipe what becomes of the rate",
        ),
        checks_too=("data.truncated", "data.enough"),
        words=("diverging", "unstable", "overfitting", "scaling", "world_size", "quality"),
    ),
    Topic(
        "ranks-disagree",
        "The ranks do not learn the same",
        ("different loss values on two ranks or machines; the models differ after training",),
        "Loss of a rank's own rows differs always: each has other rows. The loss that homelab shows is one number, the mean per token over the "
        "global batch, equal on all ranks. Weights that differ mean that gradients are not added up: a script that never wraps its model "
        "in DDP, other weights at the start, or steps that only some ranks do (conditions on the rank inside the loop hang or drift).",
        (
            "a [script]: DistributedDataParallel around the model, and the same number of collectives on every rank",
            "the same weights everywhere: homelab preflight RECIPE --only model; that sums are right: homelab preflight --deep",
            "a common seed does not replace the exchange of gradients, and none is needed with the built-in worker",
        ),
        checks_too=("collective.right", "model.same"),
        says=r"do not start from the same weights",
        words=(
            "synchronizing",
            "gradients",
            "ddp",
            "seed",
            "ddp_backend",
            "find_unused_parameters",
            "sync",
            "divergence",
        ),
    ),
    Topic(
        "one-slow-node",
        "One node is slower than the others",
        ("one GPU is slower than the others, and all wait for it at the end of each step",),
        "Unequal machines are normal; that all wait for the slowest is not a law of nature but of equal batches. With shares by measured speed a "
        "slow node gets fewer rows, all finish together, and the gradient is the same.",
        (
            '[parallel] shares = "auto" (the default); homelab status shows who computes how many rows, and each move with its reason',
            "homelab plan RECIPE tells the efficiency against the sum of all cards; --what-if=-NODE whether the node is worth waiting for",
            "slower than it was: homelab explain gpu-slow; on Wi-Fi: homelab explain wifi",
        ),
        checks_too=("gpu.throttle", "network.wifi", "power.battery"),
        words=("straggler", "heterogeneous", "unequal", "bottleneck", "shares", "speedup", "efficiency", "ddp waits"),
    ),
    Topic(
        "silent-rank",
        "A rank fell silent",
        ("its last sign of life was at step ...; the other ranks waited in vain",),
        "The process hangs, or its whole machine is frozen: out of memory and swapping, a disk that does not answer, a card that is lost, "
        "a laptop asleep, or a program that waits for something only it waits for.",
        (
            "ssh -t NODE top; does it answer at all? ssh NODE 'journalctl -k | tail'",
            "homelab stop RUN ends what hangs and verifies it; homelab recover RUN goes on, without a node that is not well",
            "a [script] that hangs again at the same place: every rank must do the same collectives, in the same order",
        ),
        checks_too=("power.sleep", "memory.ram", "gpu.recovery"),
        rules=("silent-rank",),
        words=("hang", "stuck", "heartbeat", "swap", "deadlock"),
    ),
    Topic(
        "checkpoint-damaged",
        "A checkpoint is damaged, not there, or of another recipe",
        (
            "a file of the checkpoint was altered: its sha256 differs; the checkpoint is not complete",
            "no complete checkpoint is left on the nodes that answer",
        ),
        "Power went while it was written, the disk is failing, or files were touched. A checkpoint counts only with its manifest, written last, and "
        "every file is compared with it before use; each node keeps a copy of its own, so another node's or an older one is taken.",
        (
            "homelab recover RUN takes the newest whole one by itself, and says which it passed over",
            "none left: wake the nodes that are off; or begin again: homelab recover RUN --from-scratch",
            "of another recipe: a changed [model], [data], [method] or [train] is a new training: homelab launch RECIPE",
            "more of them, more often: [checkpoint] every_steps, keep",
        ),
        checks_too=("disk.room",),
        words=("resume", "corrupt", "manifest", "truncated", "safetensors", "from-scratch", "epoch"),
        rules=("checkpoint-set-aside",),
        says=r"\bcheckpoint\b(?!.*cannot be written)",
    ),
    Topic(
        "stale-run",
        "Something of an earlier run is still there",
        ("the card's memory is in use although nothing trains", "another run of ours is alive on the node"),
        "Processes whose controller was closed, or that hang in a collective, keep their cards and their port. Ending them by name would also "
        "end what belongs to others.",
        (
            "homelab runs lists what is alive; homelab stop RUN ends it on every node and verifies that nothing is left",
            "who holds a card: ssh NODE nvidia-smi; homelab preflight --only gpu.memory names the processes",
        ),
        checks=("runs.alive", "collective.ended"),
        checks_too=("gpu.memory",),
        words=("zombie", "orphan", "pkill", "leftover", "kill"),
    ),
)
