"""Data as people have it: the forms of the field are read by one rule, whole, and what nobody reads is named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from homelab.worker.errors import WorkerError
from tests.worker.data.test_data import encode, trained_text, whole_text

pytestmark = pytest.mark.timeout(60)

QUESTION = "<|start|>user\none<|end|>\n<|start|>assistant\n"
MESSAGES = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
SHARED = [{"from": "human", "value": "one"}, {"from": "gpt", "value": "two"}]
FUNCTION = {"name": "get_weather", "description": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
SHOWING = (  # a template that shows everything it knows
    "{% if tools %}<|start|>tools\n{{ tools | tojson }}<|end|>\n{% endif %}{% if documents %}<|start|>documents\n{{ documents | tojson }}<|end|>\n{% endif %}"
    "{% if mood is defined %}<|start|>mood\n{{ mood }}<|end|>\n{% endif %}"
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.name %}={{ m.name }}{% endif %}{{ '\n' }}{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}CALL {{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def with_template(tokenizer: Any, template: str | None) -> Any:
    own = type(tokenizer).from_pretrained(tokenizer.name_or_path)
    own.chat_template = template
    return own


@pytest.mark.parametrize(
    "row",
    [
        {"messages": MESSAGES}, {"messages": json.dumps(MESSAGES)}, {"conversations": SHARED}, {"conversations": MESSAGES}, {"conversation": json.dumps(SHARED)},
        {"dialogue": SHARED, "id": 3}, {"question": "one", "answer": "two"}, {"prompt": "one", "response": "two"}, {"prompt": "one", "completion": "two"},
        {"instruction": "one", "input": "", "output": "two"}, {"instruction": "one", "output": "two", "history": []}, {"instruction": "one", "response": "two"},
        {"prompt": MESSAGES[:1], "completion": MESSAGES[1:]}, {"query": "one", "response": "two", "source": "x"}, {"input": "one", "output": "two"},
        {"user": "one", "assistant": "two"}, {"messages": [{"role": "user", "content": [{"type": "text", "text": "one"}]}, MESSAGES[1]]},
        {"messages": [{"role": "human", "content": "one"}, {"role": "gpt", "content": "two"}]},
    ],
)  # fmt: skip
def test_the_forms_of_the_field_are_one_question_and_its_answer(tokenizer: Any, row: dict[str, Any]) -> None:
    (made,), _ = encode(tokenizer, [row])
    assert whole_text(tokenizer, made) == f"{QUESTION}two<|end|>\n" and trained_text(tokenizer, made) == "two<|end|>"


@pytest.mark.parametrize(
    ("columns", "row"),
    [
        ({"prompt": "ask", "completion": "say"}, {"ask": "one", "say": "two", "text": "x"}), ({"prompt": "ask"}, {"ask": "one", "answer": "two"}),
        ({"messages": "chat", "role": "who", "content": "said"}, {"chat": [{"who": "human", "said": "one"}, {"who": "bot", "said": "two"}]}),
        ({"prompt": "problem", "completion": "answer"}, {"problem": "one", "solution": "x", "answer": "two"}),
        ({"prompt": "prompt", "completion": "chosen"}, {"prompt": MESSAGES[:1], "chosen": MESSAGES[1:], "rejected": []}),
    ],
)  # fmt: skip
def test_the_recipe_says_which_column_is_which(tokenizer: Any, columns: dict[str, str], row: dict[str, Any]) -> None:
    (made,), _ = encode(tokenizer, [row], columns=columns)
    assert whole_text(tokenizer, made) == f"{QUESTION}two<|end|>\n" and trained_text(tokenizer, made) == "two<|end|>"


@pytest.mark.parametrize("row", [{"text": "hello"}, {"body": "hello", "id": 1}, {"content": "hello", "url": "x", "title": "y"}])
def test_one_column_of_text_is_text(tokenizer: Any, row: dict[str, Any]) -> None:
    (made,), notes = encode(tokenizer, [row])
    assert whole_text(tokenizer, made) == "hello<|end|>" and "rows as text" in notes[0]
    (made,), _ = encode(tokenizer, [{"a": "no", "b": "hello"}], columns={"text": "b"})
    assert whole_text(tokenizer, made) == "hello<|end|>"


def test_alpaca_has_its_input_its_system_and_its_history(tokenizer: Any) -> None:
    row = {"instruction": "add", "input": "1 2", "output": "3", "system": "be kind", "history": [["hi", "ho"]]}
    (made,), notes = encode(tokenizer, [row])
    said = "<|start|>system\nbe kind<|end|>\n<|start|>user\nhi<|end|>\n<|start|>assistant\nho<|end|>\n<|start|>user\nadd\n\n1 2<|end|>\n<|start|>assistant\n3<|end|>\n"
    assert whole_text(tokenizer, made) == said and trained_text(tokenizer, made) == "3<|end|>"
    assert "1 rows as Alpaca (instruction, input, output)" in notes[0] and any("blank line" in note for note in notes)
    plain = with_template(tokenizer, None)
    for settings in ({}, {"template": "none"}):
        (made,), notes = encode(plain, [{"instruction": "add", "input": "1 2", "output": "3"}], seq_len=999, **settings)
        assert whole_text(plain, made) == (
            "Below is an instruction that describes a task, paired with an input that provides further context. Write a response that "
            "appropriately completes the request.\n\n### Instruction:\nadd\n\n### Input:\n1 2\n\n### Response:\n3<|end|>"
        )
        assert trained_text(plain, made) == "3<|end|>" and any("published text of Alpaca" in note for note in notes)
    (made,), _ = encode(plain, [{"instruction": "add", "output": "3"}], seq_len=999)
    assert "describes a task. Write" in whole_text(plain, made) and "Input" not in whole_text(plain, made)


def test_the_speakers_of_sharegpt(tokenizer: Any) -> None:
    tokenizer = with_template(tokenizer, SHOWING)
    chat = [
        {"from": "system", "value": "s"}, {"from": "Human", "value": "one"},
        {"from": "function_call", "value": '{"name": "get_weather", "arguments": {"city": "Rome"}}'}, {"from": "observation", "value": "sunny"}, {"from": "gpt", "value": "two"},
    ]  # fmt: skip
    (made,), notes = encode(tokenizer, [{"conversations": chat, "tools": json.dumps([FUNCTION])}], seq_len=2000)
    text = whole_text(tokenizer, made)
    assert (
        '<|start|>assistant\nCALL get_weather {"city": "Rome"}<|end|>\n<|start|>tool\nsunny<|end|>' in text
        and '"description": "weather"' in text
    )
    assert trained_text(tokenizer, made) == 'CALL get_weather {"city": "Rome"}<|end|>two<|end|>'
    assert "as ShareGPT (conversations, from and value)" in notes[0] and not any("are not used" in note for note in notes)
    with pytest.raises(WorkerError, match='the speaker "narrator" is not known') as caught:
        encode(tokenizer, [{"conversations": SHARED}, {"conversations": [{"from": "narrator", "value": "x"}]}])
    assert caught.value.where == "rows, line 2, message 1" and "human" in caught.value.hint


@pytest.mark.parametrize("content", [None, "", "absent"])
@pytest.mark.parametrize("arguments", ['{"city": "Rome"}', {"city": "Rome"}])
@pytest.mark.parametrize("older", [False, True])
def test_a_call_in_openais_form(tokenizer: Any, content: Any, arguments: Any, older: bool) -> None:
    tokenizer = with_template(tokenizer, SHOWING)
    function = {"name": "get_weather", "arguments": arguments}
    said = {"function_call": function} if older else {"tool_calls": [{"id": "c1", "type": "function", "function": function}]}
    call: dict[str, Any] = {"role": "assistant", "content": content, **said}
    if content == "absent":
        del call["content"]
    (made,), notes = encode(
        tokenizer, [{"messages": [MESSAGES[0], call, {"role": "tool", "tool_call_id": "c1", "content": "sunny"}, MESSAGES[1]]}], seq_len=999
    )
    assert trained_text(tokenizer, made) == 'CALL get_weather {"city": "Rome"}<|end|>two<|end|>'
    assert "None" not in whole_text(tokenizer, made) and not any("are not used" in note for note in notes)


TOOL_TEMPLATES = {
    "inside": "{% for t in tools or [] %}{{ t.function.name }}{{ t.function.description }}{% endfor %}",
    "bare": "{% for t in tools or [] %}{{ t.name }}{{ t.description }}{% endfor %}",
    "whole": "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}",
}


@pytest.mark.parametrize("template", TOOL_TEMPLATES)
@pytest.mark.parametrize("tools", [[FUNCTION], [{"type": "function", "function": FUNCTION}], json.dumps([FUNCTION])])
def test_tools_reach_the_template_in_the_shape_that_it_reads(tokenizer: Any, template: str, tools: Any) -> None:
    tokenizer = with_template(tokenizer, TOOL_TEMPLATES[template] + SHOWING.replace("{{ tools | tojson }}", ""))
    for row in ({"messages": MESSAGES, "tools": tools}, {"prompt": "one", "completion": "two", "tools": tools}):
        (made,), notes = encode(tokenizer, [row], seq_len=999)
        assert "get_weather" in whole_text(tokenizer, made) and "weather" in whole_text(tokenizer, made)
        assert trained_text(tokenizer, made) == "two<|end|>" and not any("are not used" in note for note in notes)


CALL_TEMPLATES = {  # what the calls are written as; a template that joins text wants JSON text
    "an object": ("{{ c.function.arguments | tojson }}", "{{ m.content }}"), "text": ("{{ 'a' + c.function.arguments }}", "{{ m.content }}"),
    "null content": ("{{ c.function.arguments | tojson }}", "{% if m.content is not none %}{{ 'x' + m.content }}{% endif %}"),
    "any content": ("{{ c.function.arguments | tojson }}", "{{ 'x' + m.content }}"), "bare": ("{{ c.arguments | tojson }}", "{{ m.content }}"),
}  # fmt: skip


@pytest.mark.parametrize("kind", CALL_TEMPLATES)
def test_calls_reach_the_template_in_the_shape_that_it_reads(tokenizer: Any, kind: str) -> None:
    arguments, content = CALL_TEMPLATES[kind]
    template = SHOWING.replace("{{ c.function.arguments | tojson }}", arguments).replace("{{ m.content }}", content)
    tokenizer = with_template(tokenizer, template.replace("c.function.name", "c.name") if kind == "bare" else template)
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}],
    }
    (made,), notes = encode(tokenizer, [{"messages": [MESSAGES[0], call, {"role": "tool", "content": "sunny"}, MESSAGES[1]]}], seq_len=999)
    text = whole_text(tokenizer, made)
    assert "get_weather" in text and '{"city": "Rome"}' in text and "None" not in text and not any("are not used" in note for note in notes)


@pytest.mark.parametrize(("role", "shown", "as_role"), [("developer", "system user assistant", "system"), ("developer", "developer user assistant", "developer"),
    ("function", "user assistant tool", "tool"), ("ipython", "user assistant tool", "tool"), ("ipython", "user assistant ipython", "ipython")])  # fmt: skip
def test_a_role_that_the_template_leaves_out_is_shown_under_its_other_name(tokenizer: Any, role: str, shown: str, as_role: str) -> None:
    tokenizer = with_template(tokenizer, SHOWING.replace("in messages", f"in messages if m.role in '{shown}'.split()"))
    said = {"role": role, "content": "sunny"}
    (made,), notes = encode(tokenizer, [{"messages": [said, *MESSAGES] if role == "developer" else [*MESSAGES, said, MESSAGES[1]]}])
    assert f"<|start|>{as_role}\nsunny<|end|>" in whole_text(tokenizer, made) and not any("are not used" in note for note in notes)


def test_a_call_that_the_template_does_not_know_spoils_no_row_and_is_named(tokenizer: Any) -> None:
    strict = with_template(
        tokenizer,
        tokenizer.chat_template.replace("message['content']", "'' + message['content']").replace("message.content", "'' + message.content"),
    )
    call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]}
    (made,), notes = encode(strict, [{"messages": [MESSAGES[0], call, {"role": "tool", "content": "x"}, MESSAGES[1]]}])
    assert trained_text(strict, made) == "<|end|>two<|end|>" and any('"tool_calls" (in 1 rows)' in note for note in notes)


def test_all_that_a_template_asks_for_reaches_it(tokenizer: Any) -> None:
    tokenizer = with_template(tokenizer, SHOWING)
    named = [{"role": "user", "name": "Ann", "content": "one"}, {"role": "assistant", "content": "two", "reasoning_content": "hm"}]
    row = {"messages": named, "documents": [{"title": "t", "text": "paper"}], "mood": "glad", "label": 1, "id": "7"}
    (made,), notes = encode(tokenizer, [row], seq_len=999)
    text = whole_text(tokenizer, made)
    assert all(word in text for word in ("paper", "glad", "user=Ann", "(hm)two"))
    assert [note for note in notes if "are not used" in note] == [
        'train data: these keys are not used: "id" (in 1 rows), "label" (in 1 rows)'
    ]
    (made,), _ = encode(tokenizer, [{"messages": MESSAGES, "chat_template_kwargs": {"mood": "sad"}}])
    assert "sad" in whole_text(tokenizer, made)


def test_what_nobody_reads_is_named_with_its_count(tokenizer: Any) -> None:
    """The tests' template knows neither tools nor names, and no thoughts; and another leaves messages out."""
    row = {"messages": [MESSAGES[0], {**MESSAGES[1], "weight": 1, "thinking": "hm"}], "tools": [FUNCTION], "label": 3}
    _, notes = encode(tokenizer, [row, row, {"messages": MESSAGES}])
    (note,) = [note for note in notes if "are not used" in note]
    for name in (
        '"tools" (in 2 rows)',
        '"label" (in 2 rows)',
        '"weight" of assistant messages (in 2 rows)',
        '"thinking" of assistant messages (in 2 rows)',
    ):
        assert name in note
    silent = with_template(tokenizer, SHOWING.replace("in messages", "in messages if m.role != 'tool'"))
    _, notes = encode(silent, [{"messages": [*MESSAGES, {"role": "tool", "content": "sunny weather"}, MESSAGES[1]]}])
    assert any("messages of the role tool (in 1 rows)" in note for note in notes)


@pytest.mark.parametrize(
    ("row", "message", "hint"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "preferences", 'columns = { prompt = "prompt", completion = "chosen" }'),
        ({"chosen": MESSAGES, "rejected": MESSAGES}, "preferences", 'columns = { messages = "chosen" }'),
        ({"input_ids": [1, 2]}, "tokens", "text"), ({"problem": "a", "solution": "b", "answer": "c"}, "problem", "columns = { prompt ="),
        ({"first": "a", "second": "b"}, "first", 'columns = { prompt = "first", completion = "second" }'), ({"label": 3}, '"label"', "columns"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "is not text, it is 'image_url'", "leave this part out"),
        ({"messages": [MESSAGES[0], {"role": "assistant", "content": None}]}, "NoneType", "role"),
        ({"messages": [MESSAGES[0], {"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}]}, "no function with a name", "function"),
        ({"messages": [MESSAGES[0], {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{x"}}]}]}, "not JSON", "arguments"),
        ({"messages": MESSAGES, "tools": "[{"}, '"tools" is not JSON', "JSON"), ({"messages": MESSAGES, "tools": ["f"]}, "list of objects", "function"),
        ({"instruction": "a", "output": "b", "history": ["x"]}, "list of pairs", "history"),
        ({"instruction": "a", "output": 3}, '"output" must be text', "output"),
    ],
)  # fmt: skip
def test_a_row_that_fits_nothing_has_an_edit(tokenizer: Any, row: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(WorkerError) as caught:
        encode(tokenizer, [row])
    assert message in caught.value.message and hint in caught.value.hint and "rows, line 1" in caught.value.where


def test_the_first_row_decides_and_a_row_that_does_not_fit_is_named(tokenizer: Any) -> None:
    for rows in (
        [{"question": "a", "answer": "b"}, {"text": "c"}],
        [{"conversations": SHARED}, {"messages": MESSAGES}],
        [{"body": "a"}, {"text": "c"}],
    ):
        with pytest.raises(WorkerError, match="the row has no") as caught:
            encode(tokenizer, rows)
        assert caught.value.where == "rows, line 2"
    with pytest.raises(WorkerError, match='no "qestion", it has "question", "answer"; did you mean "question"'):
        encode(tokenizer, [{"question": "a", "answer": "b"}], columns={"prompt": "qestion"})


def test_a_line_break_behind_the_end_of_a_turn_is_the_templates(tokenizer: Any) -> None:
    """Also where the tokenizer's end token is another one, as that of a base model with ChatML is, and where the mark is no token at all."""
    for mark, add in (("<|im_end|>", True), ("<|im_end|>", False), ("</turn>", False)):
        own = with_template(tokenizer, tokenizer.chat_template.replace("<|end|>", mark))
        own.eos_token = "<|start|>"
        if add:
            own.add_special_tokens({"additional_special_tokens": [mark]})
        (made,), _ = encode(
            own, [{"messages": [*MESSAGES, {"role": "user", "content": "three"}, {"role": "assistant", "content": "four"}]}]
        )
        assert trained_text(own, made) == f"two{mark}four{mark}"
    unmarked = with_template(
        tokenizer,
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}",
    )
    (made,), _ = encode(unmarked, [{"messages": MESSAGES}])
    assert trained_text(unmarked, made) == "two\n\n", "without a mark, the line break is what ends the turn"


PROMPT = "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
CLOSING = {  # templates that TRL does not know, and that write the whole chat otherwise than its beginning
    "the end of text behind the last turn":
        "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|stop|>\n{% endfor %}" + PROMPT + "{% if not add_generation_prompt %}<|end|>{% endif %}",
    "a prompt that opens thoughts":
        "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|stop|>{% endfor %}" + PROMPT.replace("assistant\n", "assistant\n<think>\n"),
    "the end in the next message":
        "{% for m in messages %}{% if not loop.first %}<|stop|>{% endif %}<|start|>{{ m.role }}\n{{ m.content }}{% endfor %}<|stop|>" + PROMPT,
    "another end of the last turn":
        "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}{% if loop.last %}<|end|>{% else %}<|stop|>{% endif %}{% endfor %}" + PROMPT,
}  # fmt: skip


@pytest.mark.parametrize("kind", CLOSING)
def test_every_turn_is_learned_whatever_closes_the_chat(tokenizer: Any, kind: str) -> None:
    own = with_template(tokenizer, CLOSING[kind])
    own.add_special_tokens({"additional_special_tokens": ["<|stop|>"]})
    chat = [*MESSAGES, {"role": "user", "content": "three"}, {"role": "assistant", "content": "four"}]
    (made,), notes = encode(own, [{"messages": chat}])
    learned = trained_text(own, made).replace("\n<|end|>", "").replace("four<|end|>", "four<|stop|>")
    assert learned == "two<|stop|>four<|stop|>" and not any("rewrites" in note for note in notes)


@pytest.mark.parametrize(
    ("role", "meant"), [("User", "user"), ("ASSISTANT", "assistant"), ("AI", "assistant"), ("Human", "user"), ("bot", "assistant")]
)
def test_a_role_that_no_template_knows_is_refused_with_the_one_that_is_meant(tokenizer: Any, role: str, meant: str) -> None:
    with pytest.raises(WorkerError, match=f'no chat template knows the role "{role}"') as refused:
        encode(tokenizer, [{"messages": [{"role": role, "content": "one"}, MESSAGES[1]]}])
    assert f'"role": "{meant}"' in refused.value.hint and "message 1" in refused.value.where
    (made,), _ = encode(tokenizer, [{"conversations": [{"from": "Human", "value": "one"}, {"from": "AI", "value": "two"}]}])
    assert trained_text(tokenizer, made) == "two<|end|>"


def test_text_under_another_key_of_a_message_is_named(tokenizer: Any) -> None:
    row = {"messages": [{"role": "user", "text": "one"}, {"role": "assistant", "text": "two"}]}
    with pytest.raises(WorkerError) as refused:
        encode(tokenizer, [row])
    assert '[data] columns = { content = "text" }' in refused.value.hint
    (made,), _ = encode(tokenizer, [row], columns={"content": "text"})
    assert trained_text(tokenizer, made) == "two<|end|>"
