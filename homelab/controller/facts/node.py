"""Facts: what a node answers about itself, one field per probe (`homelab.node.facts.PROBES`) under the probe's name.

Unknown keys are ignored, and what is missing has its default: a probe that could not run is a finding, and no crash.
"""

from __future__ import annotations

from typing import Any

from pydantic import model_validator

from homelab.controller.base.models import WireModel
from homelab.controller.facts.base import refuse_absurd
from homelab.controller.facts.gpu import AmdGpu, NvidiaFacts, Xid
from homelab.controller.facts.machine import PowerFacts, PythonFacts, ResourcesFacts, RunsFacts, SystemFacts
from homelab.controller.facts.network import NetworkFacts
from homelab.controller.facts.training import FileFacts, ModelFacts, SpeedsFacts


class CollectiveFacts(WireModel):
    """The record of the newest collective smoke test that passed here; `fingerprint` is that of the cluster then."""

    fingerprint: str
    time: float | None = None
    results: tuple[dict[str, Any], ...] = ()


class Facts(WireModel):
    """One answer of one node. `broken` names the probes that broke, with their errors; their fields have their defaults.

    Raises ValueError for numbers and nesting that no machine has.
    """

    node: str
    broken: dict[str, str] = {}
    system: SystemFacts = SystemFacts()
    resources: ResourcesFacts = ResourcesFacts()
    python: PythonFacts = PythonFacts()
    gpu: NvidiaFacts = NvidiaFacts()
    amd: tuple[AmdGpu, ...] = ()
    xid: tuple[Xid, ...] | None = None  # None: the kernel log cannot be read
    network: NetworkFacts = NetworkFacts()
    model: ModelFacts | None = None  # None: no recipe names one
    speed_profiles: SpeedsFacts | None = None
    data: dict[str, FileFacts] = {}  # by role, "train" or "eval"
    power: PowerFacts = PowerFacts()
    runs: RunsFacts = RunsFacts()
    collective_check: CollectiveFacts | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_sane(cls, value: Any) -> Any:
        refuse_absurd(value)
        return value
