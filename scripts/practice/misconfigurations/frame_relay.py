"""A cable that takes its time: passes frames between a switch's port and a new one after a delay.

Run as a file with isolated Python in the switch's network namespace: `relay.py PORT NEW_PORT DELAY_S`.
(The kernel's own netem does this too, where it is built in; this needs /dev/net/tun alone.) Prints "ready" when it passes
frames, and ends with its parent.
"""

from __future__ import annotations

import collections
import ctypes
import fcntl
import os
import select
import signal
import socket
import struct
import sys
import time

# linux/if_tun.h, linux/if_ether.h, linux/if_packet.h, linux/prctl.h
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4, TUN_F_TSO6 = 0x01, 0x02, 0x04
ETH_P_ALL, SOL_PACKET, PACKET_VNET_HDR, PACKET_OUTGOING = 0x0003, 263, 15, 4
PR_SET_PDEATHSIG = 1
LONGEST_FRAME = 65_536 + 64


def main() -> None:
    """Open both ends, then pass frames until killed."""
    port, new_port, delay_s = sys.argv[1], sys.argv[2], float(sys.argv[3])
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # With the header of virtio_net in front of each frame, what is left to the network card (sums, cutting up) stays said.
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", new_port.encode(), IFF_TAP | IFF_NO_PI | IFF_VNET_HDR))
    fcntl.ioctl(tap, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6)
    wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    wire.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
    wire.bind((port, ETH_P_ALL))
    wire.setblocking(False)
    print("ready", flush=True)
    # (when it is due, whether it goes to the switch, the frame): in order, because the delay is the same for all.
    waiting: collections.deque[tuple[float, bool, bytes]] = collections.deque()
    ends: list[int | socket.socket] = [tap, wire]
    while True:
        pause_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        readable, _, _ = select.select(ends, [], [], pause_s)
        due = time.monotonic() + delay_s
        for source in readable:
            waiting.extend((due, source is wire, frame) for frame in received(source))
        while waiting and waiting[0][0] <= time.monotonic():
            _, to_switch, frame = waiting.popleft()
            try:
                if to_switch:
                    os.write(tap, frame)
                else:
                    wire.send(frame)
            except OSError:
                continue  # a full queue, a port that is down: frames are lost on wires


def received(source: int | socket.socket) -> list[bytes]:
    """What has come in, at most 64 frames; not what we have sent ourselves."""
    frames = []
    for _ in range(64):
        try:
            if isinstance(source, socket.socket):
                frame, address = source.recvfrom(LONGEST_FRAME)
                if address[2] == PACKET_OUTGOING:
                    continue
            else:
                frame = os.read(source, LONGEST_FRAME)
        except OSError:
            break
        frames.append(frame)
    return frames


if __name__ == "__main__":
    main()
