"""Topics: what goes wrong with the cards."""

from __future__ import annotations

from homelab.diagnose.topic import Topic
from homelab.torch_builds import BEFORE_TURING, FROM_TURING, TORCH

TOPICS: tuple[Topic, ...] = (
    Topic(
        "cuda-out-of-memory",
        "The card ran out of memory",
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate ...",
            "CUBLAS_STATUS_ALLOC_FAILED; Failed to CUDA calloc",
        ),
        "What a step needs is more than what is free, on the smallest card. A desktop session, a browser or a stale run may hold "
        "gigabytes of it. Rows per forward pass decide about activations and logits, and they change nothing in the training: the global "
        "batch is that of the recipe, and the gradient is the same. One row per pass is not a rule of any library. In QLoRA of a 7B model the "
        "adapter's optimizer state is tens of MB, so another optimizer saves nothing there.",
        (
            "homelab plan RECIPE itemises the bytes of every rank against free memory; --fit writes a copy of the recipe that fits",
            "[parallel] micro_batch = 1, or [train] seq_len halved, or no [train] fused_loss = false (without it no logits are built)",
            '[train] gradient_checkpointing = true (the default); [method] kind = "qlora" instead of "lora"',
            "what else is on the card: ssh NODE nvidia-smi; a stale run of ours: homelab stop RUN",
            "inside of WSL2 there may be no error but a run ten times slower, as Windows lends the card the machine's memory: NVIDIA Control "
            "Panel, Manage 3D settings, CUDA - Sysmem Fallback Policy = Prefer No Sysmem Fallback",
            "then: homelab recover RUN",
        ),
        checks=("gpu.memory", "fit.memory"),
        rules=("cuda-out-of-memory",),
        words=(
            "oom",
            "vram",
            "batch size",
            "gradient accumulation",
            "gradient checkpointing",
            "max_seq_length",
            "unsloth",
            "wsl",
            "sysmem",
        ),
    ),
    Topic(
        "no-kernel-image",
        "This torch has no kernels for the card (RTX 50xx: sm_120)",
        (
            "CUDA error: no kernel image is available for execution on the device",
            "... with CUDA capability sm_120 is not compatible with the current PyTorch installation",
        ),
        f"Each build of torch carries machine code for certain generations of cards. The build of {TORCH} for CUDA {FROM_TURING.cuda} knows Turing "
        f"(GTX 16xx, RTX 20xx) to Blackwell (RTX 50xx, sm_120) and needs driver {FROM_TURING.driver} or newer; the one for CUDA {BEFORE_TURING.cuda} knows GTX 10xx "
        "and older, and no RTX 50xx. There is none for CUDA 12.8 any more.",
        (
            "homelab preflight --only gpu.kernels names the nodes and offers the command",
            f"on the node: PYTHON -m pip install --force-reinstall torch=={TORCH} --index-url {FROM_TURING.index}",
            f"GTX 10xx and older: the same with {BEFORE_TURING.tag} at the end; the two have different versions of NCCL, so all nodes need the same one",
            f"an RTX 50xx with a driver before {FROM_TURING.driver}: renew the driver first",
        ),
        checks=("gpu.kernels", "gpu.compute"),
        rules=("no-kernel-image",),
        words=("sm_120", "blackwell", "5070", "5080", "5090", "compute capability", "arch", "cu128", "cu130"),
    ),
    Topic(
        "driver-mismatch",
        "The driver does not answer, or does not fit",
        (
            "Failed to initialize NVML: Driver/library version mismatch",
            "CUDA driver version is insufficient; Found no NVIDIA driver; Torch not compiled with CUDA enabled",
        ),
        "After an upgrade the running kernel still has the old driver while its libraries are new: only a restart brings them together. "
        "Else: the kernel was renewed and the module was not built for it, Secure Boot refuses it, the driver is older than torch's CUDA "
        "needs, or the torch on the node is a build for CPUs.",
        (
            "ssh NODE nvidia-smi; where it complains of versions: ssh -t NODE sudo reboot",
            "a laptop whose card was switched off to save power: sudo prime-select nvidia (or envycontrol -s nvidia), then restart it",
            "homelab preflight --only gpu says which of these it is, and offers the command (--fix)",
            "keep upgrades away from a training: homelab preflight --only power.updates",
        ),
        checks=("gpu.mismatch", "gpu.driver", "gpu.torch"),
        checks_too=("power.reboot", "power.updates"),
        rules=("cuda-driver",),
        words=("nvml", "nvidia-smi", "secure boot", "dkms", "cuda version", "upgrade", "nouveau", "cpu build", "prime-select", "optimus"),
        says=r"torch sees (?:no GPU|\d+ of the \d+ cards)",
    ),
    Topic(
        "gpu-lost",
        "A card stopped working",
        (
            "GPU is lost; has fallen off the bus; Xid 79, 48, 62 in the kernel's log",
            "CUDA error: unspecified launch failure; uncorrectable ECC error",
        ),
        "Heat, a power supply or a cable to the card that gives out under load, a riser, overclocking, or failing memory. Xid is the "
        "number under which the driver reports it; 13 and 31 are mostly a program's fault, the others the machine's.",
        (
            "ssh NODE 'journalctl -k | grep Xid' and homelab preflight --only gpu",
            "restart the node (the card needs it), then: homelab recover RUN",
            "if it comes back: less power (sudo nvidia-smi -pl 200), no overclocking, another cable from the power supply",
        ),
        checks=("gpu.xid", "gpu.ecc", "gpu.recovery"),
        rules=("gpu-lost",),
        words=("xid", "ecc", "bus", "riser", "power supply", "illegal memory access"),
    ),
    Topic(
        "gpu-slow",
        "A card is slower than it should be",
        ("a node's tokens/s fall after some minutes", "nvidia-smi shows a low clock or a throttle reason"),
        "Heat and dust, a laptop on battery, a power limit set long ago, or a slot with few PCIe lanes.",
        (
            "homelab preflight --only gpu --only power names the reason",
            "clean it, plug it in, give it air; a limit: sudo nvidia-smi -pl WATTS on the node",
            "shares by measured speed carry what is left: homelab explain one-slow-node",
        ),
        checks=("gpu.throttle", "gpu.temperature", "gpu.power_limit", "gpu.pcie"),
        words=("throttle", "heat", "hot", "clock", "fan", "watt", "thermal", "pcie"),
    ),
    Topic(
        "cuda-assert",
        "An index was out of range on the card",
        ("CUDA error: device-side assert triggered",),
        "A token id or a label is larger than the model's vocabulary: the tokenizer is not this model's, special tokens were added, or the "
        "program computes wrong labels. The line that the traceback names is often a later one, as the card works on its own.",
        (
            "homelab preflight RECIPE --only model.tokenizer --only model.same",
            "in a [script]: set CUDA_LAUNCH_BLOCKING=1 there, and the traceback names the right line",
        ),
        checks_too=("model.tokenizer", "model.same"),
        rules=("cuda-assert",),
        words=("device-side", "vocabulary", "token id", "label"),
    ),
    Topic(
        "peer-access",
        "NCCL cannot use the cards of a machine",
        (
            "Cuda failure 217 'peer access is not supported between these two devices'; failed to open CUDA IPC handle",
            "Using RTX 4000 series doesn't support faster communication broadband via P2P or IB",
            "ncclUnhandledCudaError: Call to CUDA function failed. Last error: Cuda failure ...",
        ),
        "Between two cards of one machine NCCL copies directly where the driver says that it can, and with GeForce cards it often says so "
        "wrongly; through the machine's memory it always works, and beside a network at home it costs nothing. accelerate refuses several RTX "
        "40xx with a driver before 550.40.07 unless such copies are off. Any other failed call of CUDA is the card's or the driver's.",
        (
            'environment = { NCCL_P2P_DISABLE = "1" } of the node in cluster.toml; where that is not enough: NCCL_CUMEM_HOST_ENABLE = "0", too',
            "a newer driver on the node, and ssh NODE 'journalctl -k | grep Xid' for a card that is not well",
            "then: homelab recover RUN",
        ),
        checks_too=("gpu.xid",),
        rules=("peer-access", "peer-access-refused", "nccl-cuda"),
        words=("p2p", "peer to peer", "nvlink", "unhandled cuda error", "NCCL_P2P_DISABLE", "ipc handle", "two cards"),
    ),
    Topic(
        "no-bf16",
        "A card has no bf16",
        ("bf16 is asked for, and a card is older than Ampere (RTX 20xx, GTX 16xx, T4)",),
        "All ranks must compute in one precision. With one old card the others can use fp16, which needs loss scaling and rounds differently, "
        "or fp32, which is slow. A model that was made in bf16 (dtype in its config.json) may overflow in fp16: its loss is then not a number.",
        (
            'leave [train] precision = "auto": homelab plan RECIPE says what it takes and why',
            "or leave the old card out: homelab plan RECIPE --what-if=-NODE tells what that costs",
        ),
        checks=("gpu.bf16",),
        words=("turing", "fp16", "precision", "half"),
    ),
    Topic(
        "other-cards",
        "The cards are not those of cluster.toml",
        ("homelab preflight finds fewer cards, or less memory, than cluster.toml says", "cluster.toml names the card GPU-..., and it is not there"),
        "A card is not seated or not powered, MIG has split it (the plan counts with one instance), it is another model than thought (the RTX 5070 Ti has 16 GB, its laptop "
        "namesake 12), or it is none of NVIDIA's. Nodes with a card and nodes without cannot share one training with NCCL. Where gpus names "
        "fewer cards than the node has, the others take no part; a uuid or index there must be that of a card which is in the machine now.",
        (
            "homelab preflight --only gpu, and homelab doctor NODE for all that the node says of itself",
            "correct gpus = [...] of the node in cluster.toml, or leave the node out with --nodes",
            "an old card for the display: leave it out of gpus; of two twins uuid = \"GPU-...\" says which one trains (ssh NODE nvidia-smi -L)",
        ),
        checks=("gpu.inventory", "gpu.mig", "gpu.amd", "gpu.mixed"),
        words=("mig", "amd", "radeon", "rocm", "missing card", "laptop gpu", "uuid", "display card", "leave a card out"),
    ),
)
