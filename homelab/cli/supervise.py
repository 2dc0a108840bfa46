"""`homelab supervise`: what `launch` leaves behind. By hand only after this machine was restarted in the middle of a run."""

from __future__ import annotations

from homelab.cli import common, terminal


def command(
    run: common.RunArgument = None,
    cluster: common.ClusterOption = common.DEFAULT_CLUSTER,
    nodes: common.NodesOption = "",
    runs_dir: common.RunsOption = common.DEFAULT_RUNS,
) -> int:
    """Watch a run, and recover it when it fails. It ends with the run; Ctrl-C does not stop the run."""
    import signal
    import sys
    import time

    from homelab.cli import streams
    from homelab.controller.attempt import remote_supervisor, run_owner
    from homelab.controller.features.supervise import supervision
    from homelab.controller.remote.fanout import Fleet
    from homelab.controller.run import run_lookup, supervisor_lock

    # Its log may be on a disk that is full: the supervisor still looks after the run.
    sys.stdout = streams.told(1, sys.stdout)
    # All that it knows is on disk: it can be ended without waiting for a node that does not answer.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def say(text: str) -> None:
        terminal.echo(f"{time.strftime('%H:%M:%S')} {text}")

    loaded = common.load_cluster(cluster, nodes)
    with Fleet(loaded) as fleet:
        paths = run_lookup.run(fleet, runs_dir, run, say)
        away = remote_supervisor.at_work(fleet, paths) if remote_supervisor.recorded(paths) else None
        follower = None if away or supervisor_lock.is_held(paths) else run_owner.elsewhere(fleet, paths)
    place = f"on {away[0]}" if away else f"elsewhere ({follower.by or 'another machine'})" if follower else ""
    if place:
        say(f"{paths.name} has a supervisor {place} already. Next: homelab status {paths.name}{common.same_options(cluster, runs_dir)}")
        return 0
    ended = supervision.supervise(loaded, paths, say)
    options = common.same_options(cluster, runs_dir)
    if ended is None:
        say(f"{paths.name} has a supervisor on this machine already. Next: homelab status {paths.name}{options}")
    else:
        say(f"{paths.name}: {ended}. Next: homelab {'why' if ended == 'given up' else 'status'} {paths.name}{options}")
    return 1 if ended == "given up" else 0
