"""An example or two for the help of each command. A test parses every one."""

from __future__ import annotations

EXAMPLES: dict[str, tuple[str, ...]] = {
    "init": ("homelab init", "homelab init tower me@laptop:2222"),
    "data": ("homelab data chats.jsonl --rows 3",),
    "new": ("homelab new chats.jsonl", "homelab new chats.jsonl --model Qwen/Qwen3-4B"),
    "setup": ("homelab setup", "homelab setup --recipe recipes/llama7b-lora.toml tower laptop"),
    "wake": ("homelab wake", "homelab wake tower"),
    "preflight": ("homelab preflight recipes/llama7b-lora.toml --fix", "homelab preflight --only network --watch"),
    "doctor": ("homelab doctor laptop > laptop.txt",),
    "plan": (
        "homelab plan recipes/llama7b-lora.toml --why",
        "homelab plan recipes/llama7b-lora.toml --what-if +RTX3090",
        "homelab plan recipes/llama7b-lora.toml --what-if-nodes 1..10",
    ),
    "launch": (
        "homelab launch recipes/llama7b-lora.toml",
        "homelab launch recipes/llama7b-lora.toml --nodes tower,laptop --wait",
        "homelab launch recipes/llama7b-lora.toml --profile 3",
    ),
    "run": ("homelab run -- python train.py --epochs 3", "homelab run --nodes tower,laptop -- accelerate launch train.py"),
    "status": ("homelab status", "homelab status 2026-11-21 --once"),
    "web": ("homelab web", "homelab web 2026-11-21 --port 8900"),
    "logs": ("homelab logs --rank 1", "homelab logs 2026-11-21 --attempt 1"),
    "stop": ("homelab stop", "homelab stop --orphans"),
    "recover": ("homelab recover",),
    "yield": ("homelab yield tower --until 23:00", "homelab yield tower --for 2h", "homelab yield tower --back"),
    "why": ("homelab why --attempt 1",),
    "explain": ("homelab explain install", "homelab explain network.reach", "homelab explain 'CUDA out of memory'"),
    "schema": ("homelab schema recipe > homelab-recipe.schema.json",),
    "runs": ("homelab runs", "homelab runs --prune"),
    "chat": ("homelab chat", "homelab chat 2026-11-21 --prompt 'What is the law of homelab?'"),
    "fetch": ("homelab fetch", "homelab fetch 2026-11-21 my-model --merged"),
    "merge": ("homelab merge --base auto",),
    "gguf": ("homelab gguf --quantise q4_k_m",),
    "push": ("homelab push me/llama7b-support", "homelab push 2026-11-21 me/llama7b-support --merged --public"),
    "tensorboard": ("homelab tensorboard",),
    "track": ("homelab track --to trackio",),
    "profile": ("homelab profile", "homelab profile 2026-11-21 --json"),
    "queue add": (
        "homelab queue add a.toml b.toml --nodes tower,laptop --not-before 23:00 --stop-at 07:00",
        "homelab queue add recipes/llama7b-lora.toml --set train.learning_rate=1e-4,2e-4",
    ),
    "queue move": ("homelab queue move 3 1",),
    "queue remove": ("homelab queue remove 3",),
    "queue pause": ("homelab queue pause",),
    "queue resume": ("homelab queue resume",),
    "queue run": ("homelab queue run",),
    "queue install": ("homelab queue install",),
    "report": ("homelab report", "homelab report 2026-11-21 --output llama7b.html"),
    "verify": ("homelab verify", "homelab verify 2026-11-21 --windows 5 --on laptop", "homelab verify 2026-11-21 --steps 100..120"),
    "bench suite": ("homelab bench suite recipes/bench/lab.toml", "homelab bench suite recipes/bench/lab.toml --dry-run"),
    "bench card": ("homelab bench card tower", "homelab bench card tower --method qlora"),
    "compare": ("homelab compare 2026-11-21 2026-11-22",),
    "export": (
        "homelab export recipes/llama7b-lora.toml --to slurm --machines 3 --gpus 1 --vram 24",
        "homelab export recipes/llama7b-lora.toml --to pytorchjob --image registry.example/homelab:1",
    ),
    "trust": ("homelab trust tower",),
    "teardown": ("homelab teardown laptop",),
    "demo": ("homelab demo", "homelab demo ~/practice --python ~/.homelab/env/bin/python"),
    "supervise": ("homelab supervise 2026-11-21",),
    "lab up": ("homelab lab up practice --nodes 3 --cpu 0.9,0.5,0.3",),
    "lab down": ("homelab lab down practice",),
    "lab status": ("homelab lab status practice",),
    "lab fault": ("homelab lab fault practice node2 kill-worker",),
    "lab faults": ("homelab lab faults",),
}


def epilog(name: str) -> str:
    """What stands at the end of the command's help. An empty line between two: the help joins lines without one."""
    examples = EXAMPLES.get(name, ())
    return "\n\n".join([f"Example{'s' if len(examples) > 1 else ''}:", *examples]) if examples else ""
