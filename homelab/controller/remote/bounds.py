"""How large anything may be that a node says: of every text, number and list of its answers (`homelab.controller.remote.answers`). Pure."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from homelab.shared.protocol.layout import USABLE_NAME

RunName = Annotated[str, Field(pattern=f"^(?:{USABLE_NAME})\\z", max_length=200)]
StepName = Annotated[str, Field(pattern=r"^[0-9]{1,12}\z")]
FileName = Annotated[str, Field(max_length=300)]
MOST_STEPS, MOST_FILES = 100_000, 100_000
Seconds = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Step = Annotated[int, Field(ge=0, lt=10**12)]
Number = Annotated[int, Field(ge=-1, lt=2**31)]
NodeName = Annotated[str, Field(max_length=200)]
Path = Annotated[str, Field(max_length=4096)]
Words = Annotated[str, Field(max_length=4000)]
Pids = Annotated[tuple[Annotated[int, Field(gt=0, lt=2**31)], ...], Field(max_length=10_000)]
Log = Annotated[tuple[Annotated[str, Field(max_length=100_000)], ...], Field(max_length=10_000)]
MOST_RUNS, MOST_NODES, MOST_ATTEMPTS = 20_000, 1000, 10_000
Milliseconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
