"""A GGUF file is made by llama.cpp's converter, and its Modelfile writes a conversation as the model was trained on it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from homelab.controller.base.hint import homelab
from homelab.worker.errors import WorkerError
from homelab.worker.tools import gguf, modelfile
from tests.worker import harness

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
INST = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
COUNTS = "{% for m in messages %}{{ loop.index }}{{ m.role }}: {{ m.content }}\n{% endfor %}"
QUESTION = "Who was Albert Einstein?"


def renderer(template: str) -> modelfile.Render:
    import jinja2

    compiled = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(template)
    return lambda messages: compiled.render(messages=messages, add_generation_prompt=True)


@pytest.mark.parametrize(("template", "beginning"), [(CHATML, ""), (INST, "<s>")])
def test_a_conversation_is_written_as_the_template_writes_it(template: str, beginning: str) -> None:
    render = renderer(template)
    form = modelfile.chat_form(render, beginning)
    assert form
    two = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    assert beginning + form.head + "a" + form.to_answer + form.before_answer + "b" + form.to_question + "c" + form.to_answer == render(two)
    text = modelfile.text("x.gguf", form, ["<|im_end|>", "", 'a"b'], is_chat=True)
    assert text.startswith('FROM ./x.gguf\nTEMPLATE """{{ $begun') and form.to_question in text and text.count("PARAMETER stop") == 1
    assert text.count("{{ if") + text.count("{{ range") == text.count("{{ end }}")


def as_ollama(template: str) -> modelfile.Render:
    """What Go makes of a template of a Modelfile, said in Jinja: the words that ours use mean the same."""
    words = {
        "$begun := false": "set ns.begun = false", "$asked := false": "set ns.asked = false", "$begun = true": "set ns.begun = true",
        "$asked = true": "set ns.asked = true", "range $message := .Messages": "for message in messages", "if $asked": "if ns.asked",
        "if not $begun": "if not ns.begun", "else if not $begun": "elif not ns.begun", "else": "else",
    }  # fmt: skip
    open_blocks: list[str] = []

    def said(found: re.Match[str]) -> str:
        word = found[1]
        if word == "$message.Content":
            return "{{ message.content }}"
        if word == "end":
            return "{% end" + open_blocks.pop() + " %}"
        role = re.fullmatch(r'(else )?if eq \$message.Role "(\w+)"', word)
        jinja = f"{'elif' if role[1] else 'if'} message.role == '{role[2]}'" if role else words[word]
        if jinja.partition(" ")[0] in ("if", "for"):
            open_blocks.append(jinja.partition(" ")[0])
        return "{% " + jinja + " %}"

    import jinja2

    text = "{% set ns = namespace() %}" + re.sub(r"{{ (.*?) }}", said, template)
    assert not open_blocks
    compiled = jinja2.Environment(keep_trailing_newline=True).from_string(text)
    return lambda messages: compiled.render(messages=messages)


SYSTEM = {"role": "system", "content": "Be short."}
DEFAULTS = "{% if messages[0].role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}" + CHATML
FOLDED = (
    "<s>{% if messages[0].role == 'system' %}{% set system = '<<SYS>>' + messages[0].content + '<</SYS>>' %}{% set rest = messages[1:] %}"
    "{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}{% for m in rest %}"
    "{% if m.role == 'user' %}[INST] {% if loop.first %}{{ system }}{% endif %}{{ m.content }} [/INST]{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
REFUSES = "{% if messages[0].role == 'system' %}{{ 1 / 0 }}{% endif %}" + CHATML
LAST = CHATML.replace(
    "{{ m.role }}\n", "{{ m.role }}\n{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
)


@pytest.mark.parametrize("template", [CHATML, DEFAULTS, FOLDED, REFUSES, LAST])
@pytest.mark.parametrize("is_told", [False, True])
def test_ollama_writes_a_system_message_where_the_template_does(template: str, is_told: bool) -> None:
    """Where the template has no place for one, the rest of the conversation is as without it."""
    render = renderer(template)
    form = modelfile.chat_form(render, "")
    assert form
    has_place = template not in (REFUSES, LAST)
    assert (form.before_system is not None) == has_place
    ollama = as_ollama(modelfile.text("x", form, [], is_chat=True).partition('"""')[2].rpartition('"""')[0])
    turns = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"))]
    for count in (1, 3):
        asked = [*([SYSTEM] if is_told else []), *turns[:count]]
        assert ollama(asked) == render(asked if has_place else turns[:count])


def test_what_a_modelfile_cannot_hold_is_left_to_ollama() -> None:
    def refuses(messages: list[dict[str, str]]) -> str:
        raise ValueError("roles must alternate")

    assert modelfile.chat_form(renderer(COUNTS), "") is None and modelfile.chat_form(refuses, "") is None
    assert modelfile.chat_form(renderer(CHATML.replace("<|im_end|>", "{{ '{{' }}")), "") is None
    assert modelfile.text("x.gguf", None, [], is_chat=True) == "FROM ./x.gguf\n"
    assert 'TEMPLATE """{{ .Prompt }}"""' in modelfile.text("x.gguf", None, [], is_chat=False)


def question(run_dir: Path, tools: Path, kind: str = "bf16") -> dict[str, Any]:
    return {"run_dir": str(run_dir), "folder": "final", "kind": kind, "llama_cpp": str(tools)}


@pytest.fixture
def trained(tmp_path: Path, model: Path, data: Path) -> Path:
    """A run folder with a wholly trained model."""
    run_dir = harness.make_run(tmp_path / "run", model, data, method__kind="full")
    final = run_dir / "final"
    transformers.AutoModelForCausalLM.from_pretrained(model).save_pretrained(final)
    transformers.AutoTokenizer.from_pretrained(model).save_pretrained(final)
    (final / "README.md").write_text("# card\n")
    return run_dir


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("script", "message", "hint"),
    [
        ("raise SystemExit('ERROR:hf-to-gguf:Model FooForCausalLM is not supported')", "does not know FooForCausalLM", "--llama-cpp"),
        ("import nothing_like_it", "needs the package nothing_like_it", "homelab setup"),
        ("raise OSError(28, 'No space left on device')", "the disk is full", "make room"),
        ("import os; os.kill(os.getpid(), 9)", "exit code -9", "--quantise q8_0"),
    ],
)
def test_a_converter_that_fails_is_told_in_three_parts(trained: Path, tmp_path: Path, script: str, message: str, hint: str) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools/convert_hf_to_gguf.py").write_text(script)
    with pytest.raises(WorkerError) as refused:
        gguf.make(question(trained, tmp_path / "tools"))
    assert message in refused.value.text and hint in refused.value.text
    assert [path.name for path in trained.iterdir() if "gguf" in path.name] == []


def test_without_a_whole_model_or_room_nothing_is_begun(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "_SPARE_BYTES", 10**18)
    with pytest.raises(WorkerError, match="GB of disk while it is made"):
        gguf.make(question(trained, tmp_path))
    for path in (trained / "final").glob("*.safetensors"):
        path.unlink()
    with pytest.raises(WorkerError, match="there is no complete model"):
        gguf.make(question(trained, tmp_path))


WRITES = "import sys; open(sys.argv[sys.argv.index('--outfile') + 1], 'wb').write({content!r})"


def converter(folder: Path, content: bytes) -> Path:
    folder.mkdir()
    (folder / "convert_hf_to_gguf.py").write_text(WRITES.format(content=content))
    return folder


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("place", "is_right"), [(100, True), ((1 << 20) - 5, True), ((3 << 20) - 20, True), (None, False)])
def test_a_file_without_the_models_head_is_not_kept(trained: Path, tmp_path: Path, place: int | None, is_right: bool) -> None:
    """The name lies anywhere in the header, also over the end of a piece that is read at once. The file has a name that may be fetched."""
    trained = trained.rename(trained.with_name("größe"))
    name = b"\x0d" + bytes(7) + b"output.weight" if place else b"\x12" + bytes(7) + b"output_norm.weight"
    tools = converter(tmp_path / "tools", bytes(place or 0) + name + bytes(4 << 20))
    if is_right:
        assert gguf.make(question(trained, tools))["folder"] == "gguf-bf16"
        assert (trained / "gguf-bf16/gro-e-bf16.gguf").is_file()
        return
    with pytest.raises(WorkerError, match="left out the model's head"):
        gguf.make(question(trained, tools))
    assert [path.name for path in trained.iterdir() if "gguf" in path.name] == []


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("name", "message"), [("OPTForCausalLM", "does not know OPTForCausalLM"), ("Gemma2ForCausalLM", "no separate head")]
)
def test_what_the_tested_converter_cannot_do_is_not_begun(trained: Path, tmp_path: Path, name: str, message: str) -> None:
    config = trained / "final/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": [name]}))
    tools = converter(tmp_path / "tools", b"\x0d" + bytes(7) + b"output.weight")
    with pytest.raises(WorkerError, match=message):
        gguf.make(question(trained, tools))
    assert gguf.make({**question(trained, tools), "own_converter": True})["folder"] == "gguf-bf16"


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_the_lists_of_classes_are_those_of_the_converter(tmp_path: Path) -> None:
    from homelab.controller.features.results import llama_cpp
    from homelab.shared.law import gguf_classes

    with tarfile.open(fileobj=BytesIO(llama_cpp.archive(None, None, homelab("gguf"))[1])) as archive:
        archive.extractall(tmp_path, filter="data")
    script = (
        "import sys, json; sys.path[:0] = ['gguf-py', '.']; import gguf, conversion\n"
        "names = [n for n in conversion.TEXT_MODEL_MAP if n.endswith(('CausalLM', 'LMHeadModel', 'ForConditionalGeneration'))]\n"
        "found = {}\n"
        "for n in names:\n"
        "    try: found[n] = gguf.MODEL_TENSOR.OUTPUT in gguf.MODEL_TENSORS[conversion.get_model_class(n).model_arch]\n"
        "    except KeyError: pass\n"
        "print(json.dumps(found))"
    )
    said = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    found = json.loads(said.splitlines()[-1])
    assert set(found) == gguf_classes.KNOWN and {name for name, has_head in found.items() if not has_head} == gguf_classes.WITHOUT_A_HEAD


ASK = """
import json, sys, xllamacpp
parameters = xllamacpp.CommonParams()
parameters.model.path, parameters.n_ctx, parameters.warmup = sys.argv[1], 512, False
parameters.cpuparams.n_threads = 2
answer = xllamacpp.Server(parameters).handle_chat_completions({"messages": [{"role": "user", "content": sys.argv[2]}], "max_tokens": 40, "temperature": 0})
print(json.dumps(answer if isinstance(answer, dict) else json.loads(answer)))
"""


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_a_real_llama_cpp_answers_as_the_model_does(tmp_path: Path, data: Path) -> None:
    """The real small model through the real converter and quantiser; xllamacpp from PyPI asks the file."""
    from homelab.controller.features.results import llama_cpp

    real_model = Path(os.environ["HOMELAB_MODEL"])
    tools = tmp_path / "tools"
    with tarfile.open(fileobj=BytesIO(llama_cpp.archive("x86_64", None, homelab("gguf"))[1])) as archive:
        archive.extractall(tools, filter="data")
    run_dir = harness.make_run(tmp_path / "run", real_model, data, method__kind="full")
    model = transformers.AutoModelForCausalLM.from_pretrained(real_model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(real_model)
    model.save_pretrained(run_dir / "final")
    tokenizer.save_pretrained(run_dir / "final")
    (run_dir / "final/README.md").write_text("# card\n")
    tokens = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**tokens, max_new_tokens=40, do_sample=False)
    answer = tokenizer.decode(output[0, tokens["input_ids"].shape[1] :], skip_special_tokens=True).strip()
    environment = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    subprocess.run([str(environment / "bin/pip"), "install", "-q", "xllamacpp"], check=True)
    sizes = {}
    for kind in ("bf16", "q4_k_m"):
        made = gguf.make(question(run_dir, tools, kind))
        (file,) = (run_dir / made["folder"]).glob("*.gguf")
        sizes[kind] = file.stat().st_size
        done = subprocess.run([str(environment / "bin/python"), "-c", ASK, str(file), QUESTION], capture_output=True, text=True, check=True)
        said = json.loads(done.stdout.strip().splitlines()[-1])["choices"][0]["message"]["content"].strip()
        assert said == answer if kind == "bf16" else "physicist" in said, said
        assert {path.name for path in file.parent.iterdir()} == {file.name, "Modelfile", "README.md"}
    assert sizes["q4_k_m"] < 0.5 * sizes["bf16"]
    text = (run_dir / "gguf-q4_k_m/Modelfile").read_text()
    assert "{{ else if not $begun }}<|im_start|>system\n" in text and 'PARAMETER stop "<|im_end|>"' in text


TELLS = """
import sys
name = sys.argv[sys.argv.index('--outfile') + 1]
if {refuses} and '--no-mtp' in sys.argv:
    sys.exit("ERROR:hf-to-gguf:--mtp / --no-nextn are not supported for FooForCausalLM")
open(name, 'wb').write(' '.join(sys.argv[1:]).encode())
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("config", "refuses", "is_told"),
    [
        ({"model_type": "llama"}, False, False),
        ({"model_type": "qwen3_next"}, False, True),
        ({"model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1}, False, True),
        ({"model_type": "glm4_moe", "num_nextn_predict_layers": 1}, False, True),
        ({"model_type": "deepseek_v3", "num_nextn_predict_layers": 1}, True, False),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_layers_that_transformers_leaves_out_are_not_counted(config: dict[str, Any], refuses: bool, is_told: bool, tmp_path: Path) -> None:
    """The converter takes the layers that predict further tokens from config.json, and fails, or makes a file that nothing loads."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "convert_hf_to_gguf.py").write_text(TELLS.format(refuses=refuses))
    gguf._convert(tmp_path, tmp_path, tmp_path / "made", "bf16", 1)
    assert ("--no-mtp" in (tmp_path / "made").read_text()) is is_told
