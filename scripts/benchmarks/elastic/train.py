"""What people run under an elastic torchrun: plain PyTorch DDP over the same tiny model, chats, LoRA and batch as the runs it is compared with.

Every node keeps a checkpoint on its own disk; at the start the newest one of all ranks is broadcast. It trains until it is killed,
and writes one line per step to steps.jsonl in --folder: step, rank, ranks, loss, time, and when this worker started (seconds since 1970).
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

STARTED_AT = time.time()  # before anything heavy is imported
GLOBAL_BATCH = 12


def main() -> None:
    """Train until it is killed."""
    options = _arguments()
    # The imports of the worker that this is compared with: the Trainer with all it needs, without two libraries nobody uses here.
    sys.modules.update({"bitsandbytes": None, "datasets": None})  # type: ignore[dict-item]
    importlib.import_module("transformers.trainer")
    import peft
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    chats = [json.loads(line)["messages"] for line in options.data.read_text(encoding="utf-8").splitlines()]
    rows = [tokenizer(tokenizer.apply_chat_template(chat, tokenize=False))["input_ids"] for chat in chats]
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(options.model), config)
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-3, weight_decay=0.01)

    group = None
    if options.silence_s is None:
        dist.init_process_group("gloo")
    else:
        # Nodes load at different speeds, so the start is given more time than a step; all that is done in steps uses the second group.
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=options.patience_s))
        group = dist.new_group(timeout=datetime.timedelta(seconds=options.silence_s))
    rank, ranks = dist.get_rank(), dist.get_world_size()

    file = options.folder / "checkpoint.pt"
    own = torch.load(file) if file.exists() else {"step": 0}
    reached: list[Any] = [None] * ranks
    dist.all_gather_object(reached, own["step"])
    box = [own]
    dist.broadcast_object_list(box, src=reached.index(max(reached)))
    step = int(box[0]["step"])
    if step:
        peft.set_peft_model_state_dict(model, box[0]["adapter"])
        optimizer.load_state_dict(box[0]["optimizer"])
    parallel = DistributedDataParallel(model, process_group=group)
    with (options.folder / "steps.jsonl").open("a", encoding="utf-8", buffering=1) as log:
        while True:
            share = [rows[(step * GLOBAL_BATCH + number) % len(rows)] for number in range(GLOBAL_BATCH)][rank::ranks]
            batch = tokenizer.pad({"input_ids": share}, return_tensors="pt")
            labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
            loss = parallel(**batch, labels=labels).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            shown = loss.detach() / ranks
            dist.all_reduce(shown, group=group)
            step += 1
            line = {"step": step, "rank": rank, "ranks": ranks, "loss": float(shown), "time": time.time(), "started_at": STARTED_AT}
            log.write(json.dumps(line) + "\n")
            if step % options.every_steps == 0:  # one rank per node, so every node has one
                state = {"step": step, "adapter": peft.get_peft_model_state_dict(model), "optimizer": optimizer.state_dict()}
                torch.save(state, file.with_suffix(".partial"))
                os.replace(file.with_suffix(".partial"), file)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--data", type=Path, required=True, metavar="FILE", help="chats, one JSON object a line")
    parser.add_argument("--folder", type=Path, required=True, metavar="FOLDER", help="on this node: checkpoint and steps.jsonl")
    parser.add_argument("--every-steps", type=int, required=True, metavar="N", help="steps between checkpoints")
    parser.add_argument("--silence-s", type=float, metavar="S", help="give up a collective after so long (torch's default: 1800)")
    parser.add_argument("--patience-s", type=float, default=60.0, metavar="S", help="with --silence-s: the same for the start (60)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
