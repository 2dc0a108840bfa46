"""Every verb of the node program, declared once: its function on the node, the message that answers, and how long that may be.

Modules are named, and imported when they are needed: an answer costs milliseconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from homelab.shared.protocol.message import Message


class Verb:
    """`function`: place of its function below `homelab.node`. `answer`: place of its message below `homelab.shared.protocol`, "" for bytes and for
    a word or two that nobody relies on; of a verb that stays, it is the message of a line. `stream`: where its body of bytes goes, "stdin" or "stdout".
    """

    def __init__(self, function: str, answer: str = "", *, stream: str = "", most_bytes: int = 4 << 20, most_values: int = 200_000) -> None:
        self.module, _, self.function = function.rpartition(".")
        self.answer, self.stream = answer, stream
        # The longest answers of most verbs have some hundred kilobytes. A poll brings the metrics of a long run in parts (`homelab.node.run.poll`).
        self.most_bytes, self.most_values = most_bytes, most_values

    def answer_type(self) -> type[Message] | None:
        """The message that answers; None where no type is declared."""
        module, _, name = self.answer.rpartition(".")
        found: type[Message] | None = getattr(importlib.import_module(f"homelab.shared.protocol.{module}"), name) if name else None
        return found


VERBS = {
    "build-model": Verb("model_build.build", "worker_messages.BuildAnswer"),
    "chat": Verb("worker_programs.chat", "worker_messages.Answer"),
    "checkpoints": Verb("storage.transfer.checkpoints", "checkpoint_messages.Checkpoints"),
    "claim": Verb("run.claims.claim", "owner_messages.Claimed"),
    "collective": Verb("collective_check.collective", "collective_messages.CollectiveLine"),
    "collective-end": Verb("collective_check.end", "run_messages.Stopped"),
    "collective-keep": Verb("collective_check.keep"),
    "collective-look": Verb("collective_check.look", "collective_messages.CollectiveLook"),
    "converse": Verb("conversation.converse"),
    "describe": Verb("run.poll.describe", "run_messages.Described", most_bytes=16 << 20, most_values=1_000_000),
    "dry-run": Verb("worker_programs.dry_run", "worker_messages.DryRuns"),
    "energies": Verb("run.energy_meter.energies", "run_messages.Energies"),
    "facts": Verb("facts.collect"),
    "follow": Verb("run.status_stream.follow", "run_messages.StatusLine"),
    "free-port": Verb("system.ports.answer_free_port", "network_messages.Port"),
    "has-file": Verb("storage.transfer.has_file", "checkpoint_messages.HasFile"),
    "manifest": Verb("storage.transfer.checkpoint_manifest", "checkpoint_messages.Manifest"),
    "mark-stop": Verb("run.torchrun.mark_stop"),
    "meet": Verb("network.connectivity.meet", "network_messages.Dials"),
    "model-look": Verb("setup.model_folder.look", "setup_messages.ModelState"),
    "model-receive": Verb("setup.model_folder.receive", "setup_messages.SetupReceived", stream="stdin"),
    "poll": Verb("run.poll.poll", "run_messages.Reply", most_bytes=24 << 20, most_values=1_500_000),
    "receive-checkpoint": Verb("storage.transfer.receive_checkpoint", stream="stdin"),
    "receive-file": Verb("storage.transfer.receive_file", stream="stdin"),
    "release": Verb("run.claims.release"),
    "result-files": Verb("storage.results.listed", "result_messages.ResultFiles"),
    "result-look": Verb("storage.results.look", "result_messages.Results"),
    "result-make": Verb("result_programs.make"),
    "result-part": Verb("storage.results.send_part", stream="stdout"),
    "run-remove": Verb("run.run_folders.remove"),
    "run-weigh": Verb("run.run_folders.weigh", "result_messages.RunFolders"),
    "runs": Verb("run.poll.runs", "run_messages.Runs"),
    "sample-data": Verb("data_sample.sample_data", "worker_messages.SampleOfData", stream="stdin"),
    "saved-files": Verb("storage.results.listed", "result_messages.SavedFiles"),
    "send-checkpoint": Verb("storage.transfer.send_checkpoint", stream="stdout"),
    "setup-fetch": Verb("setup.download.download", "setup_messages.SetupReceived"),
    "setup-look": Verb("setup.installed.look", "setup_messages.SetupState"),
    "setup-make": Verb("setup.worker_environment.make", "setup_messages.SetupMade"),
    "setup-receive": Verb("setup.pieces.receive", "setup_messages.SetupReceived", stream="stdin"),
    "setup-remove": Verb("setup.worker_environment.remove", "setup_messages.SetupRemoved"),
    "setup-share": Verb("setup.share.share", "setup_messages.SetupShared"),
    "stacks": Verb("run.stacks.stacks", "run_messages.Stacks", most_bytes=16 << 20),
    "start": Verb("run.torchrun.start"),
    "stop": Verb("run.torchrun.stop", "run_messages.Stopped"),
    "supervisor-discard": Verb("run.supervisor_host.discard"),
    "supervisor-end": Verb("run.supervisor_host.end", "supervisor_messages.SupervisorEnded"),
    "supervisor-look": Verb("run.supervisor_host.look", "run_messages.SupervisorLook"),
    "supervisor-needs": Verb("run.supervisor_host.needs", "supervisor_messages.SupervisorNeeds"),
    "supervisor-put": Verb("run.supervisor_host.put", stream="stdin"),
    "supervisor-reach": Verb("run.supervisor_host.reach", "supervisor_messages.SupervisorReach"),
    "supervisor-start": Verb("run.supervisor_host.start", "supervisor_messages.SupervisorStarted"),
    "undo": Verb("run.torchrun.undo", "run_messages.Stopped"),
    "wake": Verb("network.wake.wake", "network_messages.PacketSent"),
}
