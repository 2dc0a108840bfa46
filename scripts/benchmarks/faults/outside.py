"""Faults around the processes: cables, firewalls, sshd, clocks, ports, and the way of the controller to the nodes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from benchmarks.faults.deaths import CUT_S
from benchmarks.faults.ground import left_on
from benchmarks.faults.scene import Case, Scene

from homelab.lab import Lab, cgroup, network, nodes, procfs, sshd
from homelab.lab.tools import call
from scripts.practice.misconfigurations.network import firewall
from scripts.practice.misconfigurations.node_changes import enter, needs, own_folder, running, sessions_have

JUMP_S = 3600
PORTS = tuple(range(29500, 29506))

# The wall clock, plus the whole seconds in a file; read anew a few times a second, by the clock that does not jump.
CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long added(void) {
    static volatile long seconds = 0, read_at = -1;
    struct timespec now;
    syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &now);
    long tick = now.tv_sec * 4 + now.tv_nsec / 250000000;
    if (tick != read_at) {
        FILE *file = fopen(OFFSET_FILE, "r");
        long found;
        read_at = tick;
        if (file) {
            if (fscanf(file, "%ld", &found) == 1) seconds = found;
            fclose(file);
        }
    }
    return seconds;
}
int clock_gettime(clockid_t clock, struct timespec *found) {
    int failed = (int)syscall(SYS_clock_gettime, clock, found);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) found->tv_sec += added();
    return failed;
}
int gettimeofday(struct timeval *restrict found, void *restrict zone) {
    int failed = (int)syscall(SYS_gettimeofday, found, zone);
    if (!failed) found->tv_sec += added();
    return failed;
}
time_t time(time_t *found) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (found) *found = now.tv_sec;
    return now.tv_sec;
}
"""

# Takes every port as soon as it is free, and holds it.
STRANGER = """
import socket, sys, time
wanted, taken = [int(word) for word in sys.argv[1:]], []
while True:
    for port in list(wanted):
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("0.0.0.0", port))
            listener.listen()
        except OSError:
            listener.close()
            continue
        taken.append(listener)
        wanted.remove(port)
    time.sleep(0.02)
"""


def cable_pulled(scene: Scene) -> None:
    """A cable is pulled and put back after a minute."""
    scene.train()
    node = scene.node()
    with scene.fault():
        scene.lab.fault(node, "pull-cable")
    time.sleep(CUT_S)
    scene.lab.fault(node, "plug-cable")
    scene.finish()


def one_way_loss(scene: Scene) -> None:
    """What a node sends to the other nodes is lost, for good; what they send arrives, and the controller sees all of them."""
    scene.train()
    node = scene.node()
    with scene.fault():
        scene.undo.enter_context(mute(scene.lab, node))
    scene.finish()


def mute(lab: Lab, node: str) -> AbstractContextManager[None]:
    """What a node sends to the other nodes is lost."""
    peers = ", ".join(other.host for other in lab.nodes if other.name != node)
    return firewall(lab, node, "output", f"ip daddr {{ {peers} }} drop")


def controller_cut(scene: Scene) -> None:
    """The controller cannot reach one node, from now until the training is done. The ranks are well: nothing may be restarted."""
    scene.train()
    node = scene.node()
    us = network.address(scene.lab.state.network, -9)
    with scene.fault():
        wall = firewall(scene.lab, node, "input", f"ip saddr {us} drop")
        wall.__enter__()
    try:
        scene.until(scene.run.has_finished, "end of the training")
        time.sleep(3.0)
    finally:
        wall.__exit__(None, None, None)
    scene.finish()


def sshd_dead(scene: Scene) -> None:
    """sshd of a node is killed with all its sessions, and is back when the training is done. Nothing may be restarted."""
    scene.train()
    node = scene.node()
    with scene.fault():
        dead = without_sshd(scene.lab, node)
        dead.__enter__()
    try:
        scene.until(scene.run.has_finished, "end of the training")
        time.sleep(3.0)
    finally:
        dead.__exit__(None, None, None)
    scene.finish()


@contextmanager
def without_sshd(lab: Lab, node: str) -> Iterator[None]:
    """sshd of a node and all its sessions are killed; it is started again at the end."""
    place = lab.state.node_folder(lab.state.node(node))
    groups = nodes.group(lab.state, lab.state.node(node), cgroup.find_hierarchies()).member_files()
    servers = [pid for pid in lab.processes_of(node) if "sshd" in " ".join(procfs.command_line(pid))[:60]]
    procfs.send(servers, signal.SIGKILL)
    try:
        yield
    finally:
        # Below the node's first process and in its groups, as before: elsewhere its sessions would see other CPUs.
        joins = ["/bin/sh", "-c", 'while [ "$1" != -- ]; do echo 0 > "$1"; shift; done; shift; exec "$@"', "sh", *groups, "--"]
        with (place / "sshd.log").open("ab") as log:
            command = [*joins, *enter(lab, node), "setsid", "--fork", *sshd.command(place)]
            subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=True)


@contextmanager
def clock_with_offset(lab: Lab, node: str) -> Iterator[Path]:
    """All programs that sessions of the node start from now on ask a clock that adds the seconds in the file that is yielded (0).

    Raises NotInjectable where there is no C compiler.
    """
    needs("cc", package="gcc")
    with own_folder(lab, node) as folder:
        offset, source, library = folder / "offset", folder / "clock.c", folder / "clock.so"
        offset.write_text("0\n")
        source.write_text(CLOCK.replace("OFFSET_FILE", json.dumps(str(offset))))
        call("cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(source), "-ldl")
        with sessions_have(lab, node, LD_PRELOAD=str(library)):
            yield offset


def clock_jump(scene: Scene) -> None:
    """The wall clock of a node jumps by an hour while it trains: every program there asks a library that adds what stands in a file.

    (libfaketime will not do: without its monotonic clock, which must not jump, it refuses every sleep; version 0.9.10.)
    """
    node = scene.node()
    offset = scene.undo.enter_context(clock_with_offset(scene.lab, node))
    scene.train()
    scene.victim = node
    with scene.fault():
        offset.write_text(f"{JUMP_S}\n")
    number = scene.run.node_names(1).index(node)
    scene.until(lambda: abs(scene.run.heartbeat(1, number).get("time", 0) - time.time()) > JUMP_S / 2, "jump of the clock", 30)
    scene.finish()


def stranger(lab: Lab, node: str) -> AbstractContextManager[int]:
    """A foreign program that takes port 29500 and the next ports as soon as they are free."""
    return running(lab, node, sys.executable, "-I", "-c", STRANGER, *map(str, PORTS))


def port_taken(scene: Scene) -> None:
    """While the run recovers, a stranger takes port 29500 and those behind it on every node."""
    scene.train()
    node = scene.node()
    for other in scene.run.node_names(1):
        scene.undo.enter_context(stranger(scene.lab, other))
    with scene.fault():
        scene.lab.fault(node, "kill-worker")
    scene.finish()
    port = scene.run.plan(scene.run.attempt())["master_port"]
    assert port not in PORTS, f"the last attempt used port {port}"
    assert not left_on(scene.lab)


CASES = (
    Case("cable-pulled", "a cable is pulled for 60 s", "cut", cable_pulled, restarts=(1, 2)),
    Case("one-way-loss", "nothing that a node sends arrives at its peers", "cut", one_way_loss, restarts=(1, 2)),
    Case("sshd-dead", "sshd of a node is dead, its training is well", "quiet", sshd_dead, restarts=(0, 0)),
    Case("controller-cut", "the controller is cut off from one node", "quiet", controller_cut, restarts=(0, 0)),
    Case("clock-jump", "the clock of a node jumps by an hour", "quiet", clock_jump, restarts=(0, 0)),
    Case("port-taken", "a stranger takes the port at the restart", "death", port_taken, restarts=(1, 1)),
)
