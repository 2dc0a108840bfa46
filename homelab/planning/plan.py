"""The plan: cluster x recipe x facts -> who does what, and why. Pure; it reads from top to bottom as a list of decisions."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from homelab import hardware
from homelab.config.cluster import Cluster, Node
from homelab.config.recipe import Recipe
from homelab.errors import InputError, did_you_mean
from homelab.facts import Facts
from homelab.planning import addresses, cards, cuda, environment, exactness, network, outlook, source, trainer, wsl
from homelab.planning.command import torchrun
from homelab.planning.model import Choice, NodePlan, Plan
from homelab.planning.outlook import Throughputs
from homelab.planning.ranks import card_count, plan_ranks, rank_count, shape_of
from homelab.planning.rows import DataFile
from homelab.worker.learning_rate import scaled

DDP_TIMEOUT_S = 120  # for ranks to connect; in a step a slow peer is waited for longer (`homelab.worker.ranks`)


def make(
    cluster: Cluster,
    recipe: Recipe,
    facts: Mapping[str, Facts],
    *,
    run: str,
    attempt: int,
    port: int,
    resume_step: int,
    code_dir: Callable[[str], str],
    script_path: Callable[[str], str] | None,
    data: Mapping[str, DataFile] | None = None,
    throughputs: Throughputs | None = None,
) -> Plan:
    """The plan of one attempt on all nodes of `cluster` (reachable ones: the caller leaves the others out).

    `facts` may be empty (offline): cluster.toml is believed then. `code_dir` and `script_path` give the place of the shipped
    code and of a [script] below a node's workdir. `data` has the files that are shipped, by role (those on the nodes are in the
    facts), `throughputs` bytes per second from node to node, where measured. Raises InputError for a recipe that cannot be trained on these nodes.
    """
    choices: list[Choice] = []
    warnings: list[str] = []
    facts = cards.of_cluster(cluster, facts)
    device, nodes, left_out = _device(cluster, facts, choices)
    without_card = tuple(left_out)
    if recipe.train:
        nodes, zero = _without_zero_shares(cluster, nodes, recipe)
        left_out += zero
        choices += [
            Choice(subject=f"node {name}", value="left out", because="its share in the recipe is 0") for name in zero
        ]
    if len(nodes) < recipe.recovery.min_nodes:
        raise InputError(
            f"{len(nodes)} node{' is' if len(nodes) == 1 else 's are'} left, the recipe wants at least {recipe.recovery.min_nodes}",
            where="recipe, [recovery] min_nodes",
            hint="bring a node back (homelab preflight), or lower min_nodes",
        )
    wsl.refuse_paging(recipe, [node.name for node in nodes], facts, device)
    spare = cards.spare(nodes, facts, choices)
    choices += environment.told(nodes, recipe)
    backend = "nccl" if device == "cuda" else "gloo"
    choices.append(
        Choice(
            subject="backend",
            value=backend,
            because="every rank has a CUDA card" if device == "cuda" else "no CUDA cards: gloo runs on CPUs",
        )
    )
    precision = _precision(recipe, device, nodes, facts, choices)
    shape = shape_of(recipe.model.name, facts) if recipe.model else None
    world_size = sum(rank_count(node, facts, device) for node in nodes)
    wire = network.wire_between([node.name for node in nodes], throughputs or {})
    strategy = network.verdict(
        recipe.parallel.strategy, shape, recipe.method, precision, world_size, wire=wire, compress=recipe.parallel.compress,
        machines=len(nodes),
    )  # fmt: skip
    choices.append(strategy)
    choices += trainer.choices(recipe, nodes, facts, device, world_size)
    choices += _learning_rate(recipe)
    choices += source.choices(recipe, facts, data or {})
    head = nodes[0]
    places = _places(cluster, nodes, facts, choices)
    choices.append(Choice(subject="head", value=head.name, because="the first well node of cluster.toml"))
    known = outlook.look(recipe, nodes, facts, device, precision, shape, data or {}, warnings)
    ranks = plan_ranks(
        (*cluster.left_out, *without_card), recipe, nodes, facts, device, precision, shape, known, choices, warnings
    )
    time = None
    if known is not None:
        time = outlook.estimate(recipe, known, ranks, shape, precision, throughputs or {}, resume_step, choices)
    master = places[head.name][0]
    plans = []
    for index, node in enumerate(nodes):
        workdir = facts[node.name].workdir if node.name in facts else node.workdir
        run_dir = f"{workdir}/runs/{run}"
        count = rank_count(node, facts, device)
        plans.append(
            NodePlan(
                name=node.name,
                node_rank=index,
                lan_address=places[node.name][0],
                interface=places[node.name][1],
                rank_count=count,
                workdir=workdir,
                run_dir=run_dir,
                environment=_environment(
                    node,
                    facts.get(node.name),
                    recipe,
                    run,
                    attempt,
                    run_dir,
                    *places[node.name],
                    count,
                    device,
                    code_dir(workdir),
                ),
                spare_cards=spare[node.name],
                command=torchrun(
                    python=_python(node, facts.get(node.name)),
                    node_count=len(nodes),
                    ranks_per_node=count,
                    node_rank=index,
                    master_address=master,
                    master_port=port,
                    local_address=places[node.name][0],
                    rendezvous_id=f"{run}-{attempt}",
                    log_dir=f"{run_dir}/attempts/{attempt}/nodes/{node.name}/logs",
                    program=_program(recipe, workdir, script_path),
                ),
            )
        )
    if device == "cuda":
        environment.refuse_unequal({plan.name: plan.environment for plan in plans})
    warnings += exactness.warnings_of(recipe, facts, device, world_size)
    warnings += wsl.warnings_of(ranks, facts, device)
    without = _without_bf16(nodes, facts) if device == "cuda" else []
    warnings += exactness.precision_warnings(recipe, precision, facts, [node.name for node in nodes], without, time.gains if time else ())
    return Plan(
        run=run, attempt=attempt, world_size=len(ranks), backend=backend, device=device, precision=precision, strategy=strategy.value,
        head=head.name, master_address=master, master_port=port, resume_step=resume_step, ranks=tuple(ranks), nodes=tuple(plans),
        choices=tuple(choices), warnings=tuple(warnings), left_out=tuple(left_out), time=time,
        balance="measured" if recipe.train and recipe.parallel.shares == "auto" else "fixed",
    )  # fmt: skip


def _device(cluster: Cluster, facts: Mapping[str, Facts], choices: list[Choice]) -> tuple[str, list[Node], list[str]]:
    """cuda where any node has a card: nodes without one would hold every step back, and gloo beside NCCL cannot be."""
    with_cards = [node for node in cluster.nodes if card_count(node, facts) > 0]
    if not with_cards:
        choices.append(Choice(subject="device", value="cpu", because="no node has a CUDA card"))
        return "cpu", list(cluster.nodes), []
    without = [node.name for node in cluster.nodes if node not in with_cards]
    choices.append(
        Choice(
            subject="device", value="cuda", because=f"{len(with_cards)} of {len(cluster.nodes)} nodes have CUDA cards"
        )
    )
    choices.extend(
        Choice(
            subject=f"node {name}", value="left out", because="it has no CUDA card, and CPU ranks would slow every step"
        )
        for name in without
    )
    return "cuda", with_cards, without


def _without_zero_shares(cluster: Cluster, nodes: list[Node], recipe: Recipe) -> tuple[list[Node], list[str]]:
    wanted = recipe.parallel.shares
    if not isinstance(wanted, dict):
        return nodes, []
    known = [node.name for node in cluster.nodes] + list(cluster.left_out)
    for name in wanted:
        if name not in known:
            raise InputError(
                f'no node is named "{name}".{did_you_mean(name, known)}',
                where="recipe, [parallel] shares", hint=f"the nodes are: {', '.join(known)}",
            )  # fmt: skip
    left_out = [node.name for node in nodes if wanted.get(node.name) == 0]
    kept = [node for node in nodes if node.name not in left_out]
    if not kept:
        raise InputError(
            f"the recipe gives no samples to {', '.join(left_out)}, and no other node takes part",
            where="recipe, [parallel] shares", hint='give one of them a share, or shares = "auto"',
        )  # fmt: skip
    return kept, left_out


def _precision(
    recipe: Recipe,
    device: str,
    nodes: list[Node],
    facts: Mapping[str, Facts],
    choices: list[Choice],
) -> str:
    asked = recipe.train.precision if recipe.train else "auto"
    if asked != "auto":
        choices.append(Choice(subject="precision", value=asked, because="the recipe says so"))
        return asked
    if device == "cpu":
        value, because = "fp32", "CPUs: exact, and 16-bit gains little there"
    else:
        without = _without_bf16(nodes, facts)
        value = "fp16" if without else "bf16"
        because = f"no bf16 on {', '.join(without)}" if without else "every card has bf16"
    choices.append(Choice(subject="precision", value=value, because=because))
    return value


def _learning_rate(recipe: Recipe) -> list[Choice]:
    """Where the recipe scales it: what it comes to."""
    train = recipe.train
    if train is None or train.lr_scale == "none":
        return []
    value = scaled(train.learning_rate, train.lr_scale, train.global_batch, train.reference_batch)
    ratio = f"{train.global_batch} / {train.reference_batch}"
    because = (
        f"{train.learning_rate:g} x {ratio if train.lr_scale == 'linear' else f'sqrt({ratio})'}: chosen for a global batch of "
        f"{train.reference_batch}, lr_scale = \"{train.lr_scale}\""
    )
    return [Choice(subject="learning rate", value=f"{value:.4g}", because=because)]


def _without_bf16(nodes: list[Node], facts: Mapping[str, Facts]) -> list[str]:
    return [node.name for node in nodes if not _has_bf16(node, facts)]


def _has_bf16(node: Node, facts: Mapping[str, Facts]) -> bool:
    names = [card.name for card in facts[node.name].gpus] if node.name in facts else [card.model for card in node.gpus]
    cards = [hardware.lookup(name) for name in names]
    # A card nobody has heard of is newer than the table.
    return all(card is None or card.has_bf16 for card in cards)


def _places(
    cluster: Cluster, nodes: list[Node], facts: Mapping[str, Facts], choices: list[Choice]
) -> dict[str, tuple[str, str]]:
    found = {}
    for node in nodes:
        chosen = addresses.lan_of(cluster, node, facts.get(node.name))
        if chosen is None and len(nodes) == 1:
            chosen = ("127.0.0.1", "lo", "a single node needs no LAN")
        if chosen is None:
            seen = ", ".join(
                f"{entry.name} {' '.join(entry.addresses)}"
                for entry in (facts[node.name].interfaces if node.name in facts else ())
            )
            raise InputError(
                f"which address of {node.name} is on the LAN is not clear{f' (it has {seen})' if seen else ''}",
                where=f"cluster.toml, node {node.name}",
                hint='set lan_address = "..." (and interface = "...") for this node, or network = "..." in [cluster]',
            )
        found[node.name] = chosen[:2]
        choices.append(addresses.choice_of(node.name, chosen))
    return found


def _python(node: Node, known: Facts | None) -> str:
    """The configured interpreter with the node's own home in place of `~/`: torchrun's command must mean the same in any shell."""
    if known and node.python.startswith("~/"):
        return known.home.rstrip("/") + node.python[1:]
    return node.python


def _program(recipe: Recipe, workdir: str, script_path: Callable[[str], str] | None) -> tuple[str, ...]:
    if recipe.script is None:
        return ("-m", "homelab.worker")
    place = script_path(workdir) if script_path else recipe.script.path
    return (place, *recipe.script.args)


def _environment(
    node: Node,
    known: Facts | None,
    recipe: Recipe,
    run: str,
    attempt: int,
    run_dir: str,
    address: str,
    interface: str,
    ranks: int,
    device: str,
    code: str,
) -> dict[str, str]:
    """What torchrun and the workers are told. Sources: torch/distributed (2.13), NCCL's documentation of environment variables."""
    found = {
        "PYTHONPATH": code,
        "PYTHONUNBUFFERED": "1",
        "HOMELAB_RUN": run,
        "HOMELAB_RUN_DIR": run_dir,
        "HOMELAB_ATTEMPT": str(attempt),
        "HOMELAB_NODE": node.name,
        "HOMELAB_DDP_TIMEOUT_S": str(DDP_TIMEOUT_S),
        # Per node: the names of interfaces differ between machines, and a wrong guess hangs without a word.
        "GLOO_SOCKET_IFNAME": interface,
        "OMP_NUM_THREADS": str(max(1, (known.cpu_count if known else 1) // ranks)) if device == "cpu" else "4",
    }
    if device == "cuda":
        node_dir = f"{run_dir}/attempts/{attempt}/nodes/{node.name}"
        found |= cuda.environment(node, known, address=address, interface=interface, node_dir=node_dir)
    if (
        recipe.model
        and recipe.model.is_folder
        and recipe.data
        and not recipe.data.train.startswith("hub:")
        and not (recipe.data.eval or "").startswith("hub:")
    ):
        found["HF_HUB_OFFLINE"] = "1"  # nothing of this run is on the hub: do not even look
    return environment.merged(found, recipe, node)
