"""Every verb of the node program, declared once: its function on the node, the messages that ask and answer, and how long the answer may be.

Modules are named, and imported when they are needed: an answer costs milliseconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from homelab.shared.protocol.message import Message


class Verb:
    """`function`: place of its function below `homelab.node`. `request` and `answer`: places of its messages below `homelab.shared.protocol`.
    An answer of "" is bytes, or the words of another program; of a verb that stays, it is the message of a line.
    `stream`: where its body of bytes goes, "stdin" or "stdout".
    """

    def __init__(
        self, function: str, request: str, answer: str = "", *, stream: str = "", most_bytes: int = 4 << 20, most_values: int = 200_000
    ) -> None:
        self.module, _, self.function = function.rpartition(".")
        self.request, self.answer, self.stream = request, answer, stream
        # The longest answers of most verbs have some hundred kilobytes. A poll brings the metrics of a long run in parts (`homelab.node.run.poll`).
        self.most_bytes, self.most_values = most_bytes, most_values

    def request_type(self) -> type[Message] | None:
        """The message that asks; None where no type is declared."""
        return _message(self.request)

    def answer_type(self) -> type[Message] | None:
        """The message that answers; None where no type is declared."""
        return _message(self.answer)


def _message(place: str) -> type[Message] | None:
    module, _, name = place.rpartition(".")
    found: type[Message] | None = getattr(importlib.import_module(f"homelab.shared.protocol.{module}"), name) if name else None
    return found


VERBS = {
    "build-model": Verb("model_build.build", "", "worker_messages.BuildAnswer"),
    "chat": Verb("worker_programs.chat", "", "worker_messages.Answer"),
    "checkpoints": Verb("storage.transfer.checkpoints", "checkpoint_messages.CheckpointsRequest", "checkpoint_messages.Checkpoints"),
    "claim": Verb("run.claims.claim", "run_requests.ClaimRequest", "owner_messages.Claimed"),
    "collective": Verb("collective_check.collective", "collective_messages.CollectiveRequest", "collective_messages.CollectiveLine"),
    "collective-end": Verb("collective_check.end", "collective_messages.JobRequest", "run_messages.Stopped"),
    "collective-keep": Verb("collective_check.keep", "collective_messages.KeepRequest", "message.Done"),
    "collective-look": Verb("collective_check.look", "collective_messages.JobRequest", "collective_messages.CollectiveLook"),
    "converse": Verb("conversation.converse", ""),
    "describe": Verb("run.poll.describe", "request.RunRequest", "run_messages.Described", most_bytes=16 << 20, most_values=1_000_000),
    "dry-run": Verb("worker_programs.dry_run", "", "worker_messages.DryRuns"),
    "energies": Verb("run.energy_meter.energies", "request.RunRequest", "run_messages.Energies"),
    "facts": Verb("facts.collect", ""),
    "follow": Verb("run.status_stream.follow", "run_requests.FollowRequest", "run_messages.StatusLine"),
    "free-port": Verb("system.ports.answer_free_port", "network_messages.FreePortRequest", "network_messages.Port"),
    "has-file": Verb("storage.transfer.has_file", "checkpoint_messages.FileRequest", "checkpoint_messages.HasFile"),
    "house": Verb("run.house_watch.look", "house_messages.HouseRequest", "house_messages.House"),
    "manifest": Verb("storage.transfer.checkpoint_manifest", "checkpoint_messages.CheckpointRequest", "checkpoint_messages.Manifest"),
    "mark-stop": Verb("run.torchrun.mark_stop", "run_requests.StopRequest", "message.Done"),
    "meet": Verb("network.connectivity.meet", "network_messages.MeetRequest", "network_messages.Dials"),
    "model-look": Verb("setup.model_folder.look", "setup_messages.ModelRequest", "setup_messages.ModelState"),
    "model-name": Verb("setup.model_folder.name_commit", "setup_messages.ModelRequest", "message.Done"),
    "model-receive": Verb("setup.model_folder.receive", "setup_messages.PieceRequest", "setup_messages.SetupReceived", stream="stdin"),
    "poll": Verb("run.poll.poll", "run_requests.PollRequest", "run_messages.Reply", most_bytes=24 << 20, most_values=1_500_000),
    "prepare": Verb("run.standby.prepare", "request.RunRequest", "run_messages.Preparation"),
    "receive-checkpoint": Verb(
        "storage.transfer.receive_checkpoint", "checkpoint_messages.CheckpointRequest", "message.Done", stream="stdin"
    ),
    "receive-file": Verb("storage.transfer.receive_file", "checkpoint_messages.FileRequest", "message.Done", stream="stdin"),
    "release": Verb("run.claims.release", "run_requests.ReleaseRequest", "message.Done"),
    "result-files": Verb("storage.results.listed", "result_messages.ResultRequest", "result_messages.ResultFiles"),
    "result-look": Verb("storage.results.look", "request.RunRequest", "result_messages.Results"),
    "result-make": Verb("result_programs.make", ""),
    "result-part": Verb("storage.results.send_part", "result_messages.PartRequest", stream="stdout"),
    "run-remove": Verb("run.run_folders.remove", "request.RunRequest", "message.Done"),
    "run-weigh": Verb("run.run_folders.weigh", "request.Request", "result_messages.RunFolders"),
    "runs": Verb("run.poll.runs", "request.Request", "run_messages.Runs"),
    "sample-data": Verb("data_sample.sample_data", "", "worker_messages.SampleOfData", stream="stdin"),
    "saved-files": Verb("storage.results.listed", "result_messages.ResultRequest", "result_messages.SavedFiles"),
    "save": Verb("run.save_request.put", "run_requests.SaveRequest", "message.Done"),
    "send-checkpoint": Verb("storage.transfer.send_checkpoint", "checkpoint_messages.CheckpointRequest", stream="stdout"),
    "setup-fetch": Verb("setup.download.download", "setup_messages.FetchRequest", "setup_messages.SetupReceived"),
    "setup-look": Verb("setup.installed.look", "setup_messages.LookRequest", "setup_messages.SetupState"),
    "setup-make": Verb("setup.worker_environment.make", "setup_messages.MakeRequest", "setup_messages.SetupMade"),
    "setup-receive": Verb("setup.pieces.receive", "setup_messages.PieceRequest", "setup_messages.SetupReceived", stream="stdin"),
    "setup-remove": Verb("setup.worker_environment.remove", "request.Request", "setup_messages.SetupRemoved"),
    "setup-share": Verb("setup.share.share", "setup_messages.ShareRequest", "setup_messages.SetupShared"),
    "stacks": Verb("run.stacks.stacks", "request.RunRequest", "run_messages.Stacks", most_bytes=16 << 20),
    "start": Verb("run.torchrun.start", "run_requests.StartRequest", "message.Done"),
    "stop": Verb("run.torchrun.stop", "run_requests.StopRequest", "run_messages.Stopped"),
    "supervisor-discard": Verb("run.supervisor_host.discard", "supervisor_messages.PlaceRequest", "message.Done"),
    "supervisor-end": Verb("run.supervisor_host.end", "supervisor_messages.EndRequest", "supervisor_messages.SupervisorEnded"),
    "supervisor-look": Verb("run.supervisor_host.look", "request.RunRequest", "run_messages.SupervisorLook"),
    "supervisor-needs": Verb("run.supervisor_host.needs", "supervisor_messages.NeedsRequest", "supervisor_messages.SupervisorNeeds"),
    "supervisor-put": Verb("run.supervisor_host.put", "supervisor_messages.PlaceRequest", "message.Done", stream="stdin"),
    "supervisor-reach": Verb("run.supervisor_host.reach", "supervisor_messages.PlaceRequest", "supervisor_messages.SupervisorReach"),
    "supervisor-start": Verb("run.supervisor_host.start", "supervisor_messages.PlaceRequest", "supervisor_messages.SupervisorStarted"),
    "undo": Verb("run.torchrun.undo", "run_requests.UndoRequest", "run_messages.Stopped"),
    "unpack-checkpoint": Verb("storage.transfer.unpack_checkpoint", "checkpoint_messages.CheckpointRequest", "message.Done"),
    "wake": Verb("network.wake.wake", "network_messages.WakeRequest", "network_messages.PacketSent"),
}
