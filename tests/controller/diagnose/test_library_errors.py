"""Faults of the machine, the network, the hub or an installed package: none of them is the person's line, whatever the traceback looks like."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from homelab.cli.command_list import app
from homelab.controller.diagnose import cause, topic_index
from homelab.controller.diagnose.cause import Context, Diagnosis, diagnose
from homelab.controller.diagnose.rules import EXPLAINING_A_PEER, RULES
from homelab.controller.remote.poll_reply import parse_replies
from homelab.controller.run import shipped_files as shipped
from tests.controller.diagnose.test_cause import CLOSED, RUN_JSON, block, found, node, traceback
from tests.controller.diagnose.test_rules import LINES, SAMPLES

OWN, LIBRARY = "/w/data/148cb44a9d59563d/train.py", "/env/lib/python3.11/site-packages/somewhere/deep.py"
UNHANDLED = "torch.distributed.DistBackendError: NCCL error in: x.cpp:94, unhandled system error"
BY_ID = {rule.id: rule for rule in RULES}
CAUSES = [(rule, line) for rule, line in LINES if BY_ID[rule].role == "cause"]


def raised(text: str, *, own: str = OWN, library: str = LIBRARY, start: str = "") -> list[str]:
    """A traceback from the person's line 7 into an installed package. A sample that brings the place of its exception has it there."""
    words, _, at = text.partition("\n@ ")
    place, _, functions = at.partition(" in ")
    file, _, line = (place or f"{library}:99").rpartition(":")
    frames = [
        f'  File "{own}", line 7, in <module>',
        "    main()",
        *(f'  File "{file}", line {line}, in {name}' for name in (functions or "deep").split(" > ")),
    ]
    return [f"{start}Traceback (most recent call last):", *frames, "    deep()", *words.splitlines()]


def printed(line: str) -> list[str]:
    """As a rank prints it: raised where it is an exception, else a line beside one that says nothing."""
    kind = line.splitlines()[0].split(":")[0]
    is_exception = " " not in kind and kind.endswith(("Error", "Exception", "Timeout", "Enabled"))
    return raised(line) if is_exception else [line, *raised("RuntimeError: the child has failed")]


def why(stderr: list[str], **arguments: Any) -> Diagnosis:
    return found(node("mini", 1, stderr, tail=block(1, code=1)), own_files=shipped.of_run(RUN_JSON), **arguments)


@pytest.mark.parametrize("rule", [rule.id for rule in RULES if rule.environment])
def test_a_fault_of_the_environment_never_blames_the_person_s_line(rule: str) -> None:
    for line in (line for name, line in CAUSES if name == rule and (BY_ID[rule].explains or printed(line)[0] != line)):
        diagnosis = why(printed(line))
        assert diagnosis.cause == rule, line
        assert "correct /desk" not in diagnosis.hint and "train.py:7" not in diagnosis.hint + diagnosis.title
        assert diagnosis.topic and diagnosis.topic == topic_index.find(line)[0].id, "why and explain say the same"
        assert diagnosis.retryable == BY_ID[rule].retryable


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.environment], ids=lambda rule: rule.id)
def test_a_rule_of_the_environment_names_what_mends_it(rule: Any) -> None:
    assert "{where}" not in rule.hint + rule.title
    assert "{recover}" in rule.hint or "{launch}" in rule.hint or "homelab preflight" in rule.hint, "what comes after the mending"
    assert len(rule.hint.replace("{recover}", "")) > 40


def test_an_exception_of_a_library_that_no_rule_knows_names_both_places() -> None:
    for own_files, hint_end in (
        (shipped.of_run(RUN_JSON), "if the call is corrected: homelab launch 'my run.toml'"),
        ((), "if fixed on mini: homelab recover r"),
    ):
        diagnosis = found(node("mini", 1, raised("ValueError: too many values to unpack (expected 2)")), own_files=own_files)
        assert diagnosis.cause == "python-error" and "homelab logs r" in diagnosis.hint and diagnosis.hint.endswith(hint_end)
        assert "homelab logs r --attempt 1 --rank 1 -n 400; " in diagnosis.hint, "the whole of it, of the attempt that failed"
        assert f"at {LIBRARY}:99, called from " in diagnosis.hint and not diagnosis.hint.startswith("correct")
        assert f"at {LIBRARY}:99, called from {OWN}:7" in diagnosis.because
    own = found(node("mini", 1, raised("ValueError: x", library="/w/data/148cb44a9d59563d/train.py")), own_files=shipped.of_run(RUN_JSON))
    assert own.hint.startswith("correct /desk/src/train.py:99"), "raised in the person's own file"


@pytest.mark.parametrize(
    "rule", ["gpu-after-suspend", "shared-memory", "open-files", "locked-memory", "bitsandbytes-library", "driver-too-old", "hub-busy"]
)
def test_what_is_printed_beside_explains_an_exception_that_says_little(rule: str) -> None:
    """CUDA warns of an unknown error, and then there is no GPU; NCCL prints on stdout, and then there is an "unhandled system error"."""
    line = next(line for name, line in LINES if name == rule and "\n" not in line)
    for last in ("RuntimeError: No CUDA GPUs are available", "AttributeError: 'NoneType' object has no attribute 'x'"):
        assert why([line, *raised(last)]).cause == rule
    breaks_a_connection = BY_ID[rule] in EXPLAINING_A_PEER
    assert why([line, *raised(UNHANDLED)]).cause == (rule if breaks_a_connection else "connection-refused")
    assert breaks_a_connection == (rule not in ("bitsandbytes-library", "hub-busy"))
    if "NCCL WARN" in line:
        silent = node("mini", 1, raised(UNHANDLED))
        silent["run"]["ranks"]["1"]["log_tail"]["stdout"] = [f"mini:77:99 [0] {line}"]
        assert found(silent).cause == rule


@pytest.mark.parametrize("survived", SAMPLES["survived"]["lines"])
def test_what_a_program_survived_explains_nothing(survived: str) -> None:
    """It was printed while all was well; then the program failed, or another node died."""
    lines = survived.strip().splitlines()
    assert why([*lines, *raised("KeyError: 'x'")]).cause == "python-error"
    lost = node("tower", 0, [*lines, *traceback(CLOSED)])
    assert found(lost).cause == "connection-lost"
    assert found(lost, unreachable={"mini": "timed out"}).cause == "unreachable"
    assert found(lost, node("mini", 1, raised("torch.OutOfMemoryError: CUDA out of memory."))).cause == "cuda-out-of-memory"
    assert found(node("mini", 1, lines, tail=block(1, code=3))).cause == "exit-code"


@pytest.mark.parametrize("warned", ["hub-unreachable", "hub-offline", "certificate", "bitsandbytes-library"])
def test_a_hub_or_a_package_that_was_warned_of_breaks_no_connection(warned: str) -> None:
    line = next(line for name, line in LINES if name == warned and "\n" not in line)
    lost = node("tower", 0, [line, *traceback(CLOSED)])
    assert found(lost, unreachable={"mini": "timed out"}).cause == "unreachable"


def test_the_source_in_a_traceback_explains_nothing() -> None:
    call = ["    model = AutoModel.from_pretrained(", "        path, local_files_only=True, force_download=True", "    )"]
    assert why([*raised("KeyError: 'x'")[:2], *call, "KeyError: 'x'"]).cause == "python-error"


def test_no_bf16_may_be_no_card_at_all() -> None:
    said = "ValueError: Your setup doesn't support bf16/gpu."
    assert (
        why(
            ["UserWarning: CUDA initialization: CUDA unknown error - this may be due to an incorrectly set up environment", *raised(said)]
        ).cause
        == "gpu-after-suspend"
    )
    assert why(raised(said)).cause == "no-bf16"


def test_but_it_does_not_explain_away_what_says_enough() -> None:
    warned = "OSError: [Errno 28] No space left on device: '/tmp/x'"
    assert why([warned, *raised("torch.OutOfMemoryError: CUDA out of memory.")]).cause == "cuda-out-of-memory"
    assert why(["a note: ImportError of flash_attn", *raised("KeyError: 'x'")]).cause == "python-error"


def test_of_a_chain_the_words_that_say_most_count() -> None:
    """transformers hides the hub's answer behind its own: 429, then LocalEntryNotFoundError, then OSError."""
    link = ["", "The above exception was the direct cause of the following exception:", ""]
    chain = [
        *raised("huggingface_hub.errors.HfHubHTTPError: 429 Client Error: Too Many Requests for url: https://huggingface.co/x"), *link,
        *raised("huggingface_hub.errors.LocalEntryNotFoundError: An error happened while trying to locate the file on the Hub"), *link,
        *raised("OSError: We couldn't connect to 'https://huggingface.co' to load the files"),
    ]  # fmt: skip
    assert (why(chain).cause, why(chain).retryable) == ("hub-busy", True)


@pytest.mark.parametrize("prefix", ["[rank1]: ", "[default0]:[rank0]: "])
def test_prefixes_and_progress_bars_hide_no_traceback(prefix: str) -> None:
    lines = raised(
        "safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge",
        start="Loading weights:  3%|▎    | 1/29 [00:01<00:30]",
    )
    assert why([prefix + line for line in lines]).cause == "weights-damaged"
    ending = ["Exception ignored in: <function X.__del__ at 0x7f>", *raised("TypeError: 'NoneType' object is not callable")]
    assert why([*lines, *ending]).cause == "weights-damaged", "what a destructor says while Python ends is no reason"


def test_a_traceback_that_rich_draws() -> None:
    drawn = [
        "╭───── Traceback (most recent call last) ─────╮",
        "│ /w/train.py:3 in main                        │",
        "╰──────────────────────────────────────────────╯",
    ]
    assert why([*drawn, "ValueError: Attempting to unscale FP16 gradients."]).cause == "adapters-fp16"
    assert why([*drawn, "KeyError: 'x'"]).cause == "python-error"


def test_a_message_goes_on_behind_an_empty_line() -> None:
    said = raised("RuntimeError: the library said:") + ["", "the provided PTX was compiled with an unsupported toolchain", ""]
    assert why(said).cause == "driver-too-old"


@pytest.mark.parametrize("rule", [rule.id for rule in RULES if rule.environment])
def test_a_general_hint_of_the_worker_does_not_hide_what_the_rule_knows(rule: str) -> None:
    line = next(line for name, line in LINES if name == rule).splitlines()[0]
    if topic_index.find(line) != (topic_index.of_rule(rule),):
        pytest.skip("this sample says it on its second line")
    own = {
        "message": f"the model cannot be loaded: {line}",
        "where": "[model] name = 'x'",
        "hint": "check the name; a private or gated model needs HF_TOKEN",
    }
    diagnosis = found(node("mini", 1, error=own))
    assert "check the name" not in diagnosis.hint and diagnosis.title != own["message"]


def test_the_worker_s_account_of_an_error_that_it_did_not_foresee_is_explained_by_its_log() -> None:
    own = {"message": "RuntimeError: unhandled", "where": "step 2, rank 1 on mini", "hint": ""}
    assert found(node("mini", 1, raised("OSError: [Errno 24] Too many open files"), error=own)).cause == "open-files"
    unknown = found(node("mini", 1, raised("ValueError: odd"), error=own))
    assert unknown.cause == "worker-error" and "homelab logs r" in unknown.hint and "see step 2" not in unknown.hint


WATCHDOG = (
    "[rank1]:[E ProcessGroupNCCL.cpp:607] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=ALLREDUCE, NumelIn=1, NumelOut=1,"
    " Timeout(ms)=600000) ran for 600060 milliseconds before timing out."
)
BARS = [
    "Running tokenizer on dataset:   9%|███▊      | 280000/2969526 [29:55<4:48:08, 155.57 examples/s]", "Map (num_proc=8):  37%|███▋ | 12000/32000 [09:00<1:00, 20 examples/s]",
    "Downloading shards:  50%|█████     | 1/2 [08:01<08:01, 481s/it]", "Generating train split:  12%|█ | 1200/9999 [00:10<02:00]", "model-00001-of-00004.safetensors: noise",
]  # fmt: skip


@pytest.mark.parametrize("bar", BARS[:4])
def test_a_rank_that_prepares_while_the_others_wait(bar: str) -> None:
    waits, prepares = (
        node("mini", 1, [WATCHDOG], tail=block(1, code=-6), code=1),
        node("tower", 0, [f"\r{BARS[3]}\r{bar}"], alive=True, step=0),
    )
    for reply in (waits, prepares):
        reply["run"]["ranks"][next(iter(reply["run"]["ranks"]))]["heartbeat"] = None
    diagnosis = found(waits, prepares)
    assert (diagnosis.cause, diagnosis.first_node, diagnosis.first_rank, diagnosis.topic) == ("preparing", "tower", 0, "one-rank-prepares")
    assert bar[:20] in diagnosis.because[0] and "ddp_timeout" in diagnosis.hint
    reset = "torch.distributed.DistBackendError: [1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but"
    assert found(node("mini", 1, raised(f"{reset} store->get('0') got error: Connection reset by peer."))).cause == "connection-lost"
    alone = found(waits)
    assert (alone.cause, alone.topic) == ("one-rank-prepares", "one-rank-prepares")
    died = node("tower", 0, [f"\r{bar}", *traceback("torch.OutOfMemoryError: CUDA out of memory.")])
    assert found(waits, died).cause == "cuda-out-of-memory", "the first cause wins over the wait"


def test_who_prepared_itself_and_then_timed_out_waited_for_a_preparation() -> None:
    timed_out = raised("torch.distributed.DistStoreError: wait timeout after 1800000ms, keys: /default_pg/0//cuda//1")
    assert found(node("mini", 1, [BARS[0], *timed_out])).cause == "one-rank-prepares"
    assert found(node("mini", 1, [BARS[0], "  3%|▎    | 12/400 [01:00<30:30, 5.1s/it]", *timed_out])).cause == "timeout", (
        "it has trained since"
    )


def test_a_rank_that_trains_does_not_prepare() -> None:
    waits, trains = node("mini", 1, [WATCHDOG.replace("NumelIn=1,", "NumelIn=9999999,")]), node("tower", 0, [BARS[1]], alive=True, step=40)
    assert found(waits, trains).cause == "silent-rank"


def test_the_first_cause_wins_over_its_consequences() -> None:
    """One rank's machine lacks something; the others lose it, wait for it, or fail in their own way later."""
    late = raised("RuntimeError: the peer has gone, and so the reduction cannot be finished")
    for first in (
        "OSError: [Errno 24] Too many open files",
        "RuntimeError: CUDA error: uncorrectable ECC error encountered",
        "OSError: We couldn't connect to 'https://huggingface.co'",
    ):
        diagnosis = found(
            node("mini", 1, raised(first), ended_at=1_795_268_600.0), node("tower", 0, late), node("laptop", 2, traceback(CLOSED))
        )
        assert diagnosis.first_node == "mini" and diagnosis.cause not in ("python-error", "connection-lost")


def test_the_signals_of_a_missing_page_and_of_an_unknown_instruction() -> None:
    bus, cpu = (found(node("mini", 1, tail=block(1, code=-signal))) for signal in (7, 4))
    assert (bus.cause, bus.topic) == ("bus-error", "shared-memory") and "df -h /dev/shm" in bus.hint
    assert (cpu.cause, cpu.retryable) == ("illegal-instruction", False)


@pytest.mark.parametrize(
    "line",
    [
        "RuntimeError:", "OSError", "ValueError: too many values to unpack (expected 2)", "AttributeError: 'Foo' object has no attribute 'bar' in this place",
        "step 12 of 100 | loss 1.2 | 300 tokens per second", "Some weights of LlamaForCausalLM were not initialized from the model checkpoint",
        "Loading checkpoint shards: 100%|███| 2/2 [00:03<00:00]", "The tokenizer class you load from this checkpoint is not the same type",
    ],
)  # fmt: skip
def test_a_line_that_no_rule_knows_gets_no_topic(line: str) -> None:
    assert topic_index.find(line) == ()
    assert len(topic_index.nearest(line)) <= 3


def test_the_nearest_topics_are_named() -> None:
    line = "kernel: ufw: firewall has dropped a packet of eth0 to 192.168.1.7"
    result = CliRunner().invoke(app, ["explain", line])
    assert topic_index.find(line) == () and "firewall" in [topic.id for topic in topic_index.nearest(line)]
    assert "no rule matches the line" in str(result.exception) and "firewall" in str(result.exception)


def test_diagnose_is_the_same_in_any_order() -> None:
    replies = {
        name: node(name, rank, raised(line))
        for rank, (name, line) in enumerate(zip("ab", ("OSError: [Errno 24] Too many open files", "KeyError: 'x'"), strict=True))
    }
    one, other = (diagnose("r", parse_replies(dict(order)), {}, Context()) for order in (replies.items(), reversed(replies.items())))
    assert one is not None and other is not None and one.cause == other.cause == "open-files" and cause.render(one)


def test_a_server_of_one_s_own_is_not_the_hub() -> None:
    """mlflow at home is down: the internet is not what is wrong."""
    down = "requests.exceptions.ConnectionError: HTTPConnectionPool(host='192.168.1.5', port=5000): Max retries exceeded with url: /api"
    diagnosis = why(raised(down))
    assert (diagnosis.cause, diagnosis.title) == ("server-unreachable", "192.168.1.5, which the program asks, did not answer mini")
    assert "'curl -sI 192.168.1.5:5000'" in diagnosis.hint and "huggingface" not in diagnosis.hint
    assert why(raised(down.replace("192.168.1.5", "evil;rm"))).cause == "hub-unreachable", "no address of a server"
