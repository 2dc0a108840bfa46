"""What a rank of the collective test does, in its order: first torchrun alone, then the rank itself. LOADING and ANSWERING are those of a chat
across stages, MAKING and TRAINING those of a card that is measured."""

from __future__ import annotations

STARTING = "starting torchrun"
CONNECTING = "connecting to the head"
WAITING = "waiting for the other nodes"
IMPORTING = "importing torch"
JOINING = "joining"
SIZES = {8: "8 bytes", 1_000_000: "1 MB", 64_000_000: "64 MB"}
DONE = "done"
STAGES = (STARTING, CONNECTING, WAITING, IMPORTING, JOINING, *SIZES.values(), DONE)
LOADING = "loading its layers"
ANSWERING = "answering"
MAKING = "making a model of random weights"
TRAINING = "training"
