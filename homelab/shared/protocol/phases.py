"""What a rank says that it does (the "phase" of its heartbeat), and for how long it may rightly say nothing new."""

from __future__ import annotations

from collections.abc import Mapping

ABSENT = "absent"  # no heartbeat yet
STARTING = "starting"
LOADING = "loading"
CONNECTING = "connecting"  # it has loaded, and waits for the other ranks to have loaded, too
FETCHING = "fetching"
TRAINING = "training"
SAVING = "saving"
EVALUATING = "evaluating"
DONE = "done"

BEFORE_TRAINING = frozenset({ABSENT, STARTING, LOADING, CONNECTING, FETCHING})
# A healthy rank may give no sign for minutes in these: its process is observed instead. Not while it connects: each try to reach a peer that is
# gone costs processor time, as work does.
OBSERVED_BY_PROCESS = frozenset({STARTING, LOADING, FETCHING, SAVING})

# Seconds without a sign while nothing else is wrong; the supervisor and the node's own guard start from these.
LIMITS_S: Mapping[str, float] = {LOADING: 1200.0, CONNECTING: 1200.0, SAVING: 900.0, EVALUATING: 1800.0}
# The first step (kernels are compiled, caches are cold): so many of the steps that the plan expects, because the plan may be wrong about
# a card that was never measured.
FIRST_STEP_FACTOR = 4.0
