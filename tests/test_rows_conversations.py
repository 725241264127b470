"""Records → conversations: one form, and a counted reason for everything that is not one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from cases import case_input
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kimi_eagle.identity import canonical
from kimi_eagle.rows.conversations import (
    ROLES,
    Conversation,
    Form,
    Rejected,
    read_conversation,
    read_messages,
)
from kimi_eagle.rows.prompts import BadPrompt, read_prompts
from kimi_eagle.rows.sources import read_records

USER = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}
CALL = {"id": "f:0", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


def _read(*turns: Any, **beside: Any) -> Conversation:
    return read_conversation({"messages": list(turns), **beside}, "messages")


def _reason(*turns: Any, **beside: Any) -> str:
    with pytest.raises(Rejected) as caught:
        _read(*turns, **beside)
    return caught.value.reason


def _public(name: str) -> list[Conversation | str]:
    """For each record of a public file, its conversation or the reason why it is left out."""
    found: list[Conversation | str] = []
    for record in read_records(case_input(f"chat/{name}.jsonl")):
        try:
            found.append(read_conversation(record.value, "messages"))
        except Rejected as error:
            found.append(error.reason)
    return found


@pytest.mark.parametrize(
    "role", ["observation", "function_response", "developer", "Assistant", "", None, 1, ["user"]]
)
def test_an_unknown_role_is_rejected_and_named(role: Any) -> None:  # PRE-06
    with pytest.raises(Rejected) as caught:
        _read(USER, {"role": role, "content": "SECRET"}, ANSWER)
    assert (caught.value.reason, repr(role) in str(caught.value)) == ("unknown_role", True)


@pytest.mark.parametrize("origin", ["function_response", "bing", "Human", 3])
def test_an_unknown_origin_is_rejected(origin: Any) -> None:  # PRE-06
    turns = [{"from": "human", "value": "q"}, {"from": origin, "value": "x"}]
    assert _reason(*turns, {"from": "gpt", "value": "a"}) == "unknown_role"


def test_public_unknown_roles_are_never_kept() -> None:  # PRE-06
    assert _public("unknown_roles") == ["unknown_role"] * 3


PAIRS = [
    pytest.param({"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}, id="sharegpt"),
    pytest.param(
        {"from": "human", "value": "q", "role": None, "content": None},
        {"from": "gpt", "value": "a", "role": None, "content": None},
        id="sharegpt, nulls beside",
    ),
    pytest.param(
        {"from": None, "value": None, **USER}, {"from": None, "value": None, **ANSWER}, id="openai"
    ),
    pytest.param({"role": "user", "value": "q"}, {"from": "gpt", "content": "a"}, id="crossed"),
    pytest.param({**USER, "from": "human"}, {**ANSWER, "value": "a"}, id="both, and agreed"),
]


@pytest.mark.parametrize(("user", "answer"), PAIRS)
@pytest.mark.parametrize("form", ["messages", "sharegpt"])
def test_roles_and_content_whichever_pair_carries_them(user: Any, answer: Any, form: str) -> None:
    found = read_conversation({"conversations": [user, answer]}, form)  # PRE-07
    assert found.messages == (USER, ANSWER)


def test_public_mixed_schemas_read_as_if_alone() -> None:  # PRE-07
    alone, filled = _public("mixed_schema"), _public("mixed_schema_nulls")
    assert alone == filled
    assert [[m["role"] for m in c.messages] for c in alone if isinstance(c, Conversation)] == [
        ["user", "assistant"]
    ] * 2


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        ({"role": "user", "from": "gpt", "content": "x"}, "unknown_role"),
        ({"role": "user", "content": "x", "value": "y"}, "bad_message"),
        ({"role": "user"}, "bad_message"),
        ({"role": "user", "content": None}, "bad_message"),
        ({"role": "tool", "content": None}, "bad_message"),
        ({"role": "user", "content": 3}, "bad_message"),
        ({"role": "user", "content": {"text": "x"}}, "bad_message"),
        ({"role": "user", "content": [{"type": "text"}]}, "bad_message"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "bad_tools"),
        ({"role": "assistant", "content": "x", "function_call": {"name": "f"}}, "bad_tools"),
        ({"role": "assistant", "content": "x", "reasoning_content": ["y"]}, "bad_message"),
        ("x", "bad_message"),
        (None, "bad_message"),
    ],
    ids=repr,
)
def test_a_turn_that_would_have_to_be_guessed_is_rejected(turn: Any, reason: str) -> None:
    assert _reason(USER, turn, ANSWER) == reason


@pytest.mark.parametrize("value", [None, [], "x", 3])
def test_a_record_that_is_none_is_rejected(value: Any) -> None:
    with pytest.raises(Rejected, match="not_a_record"):
        read_conversation(value, "messages")


@pytest.mark.parametrize("turns", [None, [], "x", {}])
def test_a_record_without_messages_is_rejected(turns: Any) -> None:
    with pytest.raises(Rejected, match="no_messages"):
        read_conversation({"messages": turns}, "messages")


@pytest.mark.parametrize("content", ["", "   ", "\n\t", "\u00a0", None, [], [{"text": " "}]])
@pytest.mark.parametrize("calls", [None, []])
def test_an_empty_answer_is_rejected(content: Any, calls: Any) -> None:  # PRE-31
    empty = {"role": "assistant", "content": content, "tool_calls": calls}
    assert _reason(USER, empty) == "empty_assistant"


def test_public_empty_answers_are_rejected_and_the_full_one_kept() -> None:  # PRE-31
    *empty, kept = _public("empty_assistant")
    assert empty == ["empty_assistant"] * 3
    assert isinstance(kept, Conversation)


@pytest.mark.parametrize(
    "turns", [[{"role": "system", "content": "s"}], [{"role": "system", "content": "s"}, USER]]
)
def test_conversations_without_an_answer_are_rejected(turns: Any) -> None:  # PRE-28
    assert _reason(*turns) == "no_assistant_turn"


@pytest.mark.parametrize(
    ("name", "roles"),
    [
        ("double_system", ["system", "system", "user", "assistant"]),
        ("consecutive_user", ["user", "user", "assistant"]),
    ],
)
def test_public_repeated_turns_are_never_merged(name: str, roles: list[str]) -> None:  # PRE-28
    (found,) = _public(name)
    assert isinstance(found, Conversation)
    assert [message["role"] for message in found.messages] == roles


def test_text_parts_read_as_the_text_and_other_parts_are_rejected() -> None:  # PRE-30
    parts, plain, image = _public("content_parts")
    assert parts == plain
    assert image == "unsupported_modality"


@pytest.mark.parametrize("kind", ["image", "image_url", "input_audio", "video_url", "file", 3])
def test_parts_of_other_modalities_are_rejected(kind: Any) -> None:  # PRE-30
    assert _reason({"role": "user", "content": [{"type": kind}]}, ANSWER) == "unsupported_modality"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ('{"city": Oslo', "bad_tools_json"),
        ('{"a": NaN}', "bad_tools_json"),
        ('{"a": 1, "a": 2}', "bad_tools_json"),
        ('{"a": 1e999}', "bad_tools_json"),
        ("", "bad_tools_json"),
        ("[1]", "bad_tools"),
        ("3", "bad_tools"),
        (None, "bad_tools"),
        (3, "bad_tools"),
        (["x"], "bad_tools"),
    ],
)
def test_arguments_that_are_no_json_object_are_rejected(  # PRE-10
    arguments: Any, reason: str
) -> None:
    call = {"id": "f:0", "function": {"name": "f", "arguments": arguments}}
    assert _reason(USER, {**ANSWER, "tool_calls": [call]}) == reason


@pytest.mark.parametrize("tools", ["[not json", '[{"a": NaN}]', '[{"a":1,"a":2}]'])
def test_tools_as_text_that_is_no_json_are_rejected(tools: str) -> None:  # PRE-10
    assert _reason(USER, ANSWER, tools=tools) == "bad_tools_json"


@pytest.mark.parametrize("tools", ['{"a": 1}', "3", ["f"], {"a": 1}, 3])
def test_tools_that_are_no_list_of_objects_are_rejected(tools: Any) -> None:  # PRE-10
    assert _reason(USER, ANSWER, tools=tools) == "bad_tools"


@pytest.mark.parametrize("tools", [None, "", "  ", "[]", "null", []])
def test_no_tools_in_any_spelling(tools: Any) -> None:
    assert _read(USER, ANSWER, tools=tools).tools == ()


def test_tools_as_text_and_as_values_are_equal() -> None:  # PRE-10
    as_text = _read(USER, ANSWER, tools='[{"name": "f"}]')
    assert as_text == _read(USER, ANSWER, tools=[{"name": "f"}])
    assert as_text.tools == ({"type": "function", "function": {"name": "f"}},)


def test_tools_stay_as_a_server_takes_them() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"x": None}}}
    assert _read(USER, ANSWER, tools=[tool]).tools == (tool,)


def test_public_bad_tools_are_rejected() -> None:  # PRE-10
    assert _public("tool_args_bad_json") == ["bad_tools_json"] * 2


def test_tool_calls_are_kept_as_they_are() -> None:
    found = _read(USER, {"role": "assistant", "content": None, "tool_calls": [CALL]})
    assert found.messages[1] == {"role": "assistant", "content": "", "tool_calls": [CALL]}


def test_lone_surrogates_are_replaced_and_counted() -> None:  # PRE-21
    lone, paired = _public("lone_surrogate")
    assert isinstance(lone, Conversation)
    assert isinstance(paired, Conversation)
    assert [m["content"] for m in lone.messages] == ["bad \ufffd end", "x \ufffd"]
    assert [m["content"] for m in paired.messages] == ["good 😀", "ok"]
    assert (lone.repaired, paired.repaired) == (2, 0)


@pytest.mark.parametrize(
    "turn",
    [
        {**ANSWER, "reasoning_content": "\ud83d"},
        {**ANSWER, "name": "\ud83d"},
        {**ANSWER, "tool_calls": [{**CALL, "id": "\ud83d"}]},
        {
            **ANSWER,
            "tool_calls": [{"id": "f:0", "function": {"name": "f", "arguments": {"\ud83d": "x"}}}],
        },
        {**ANSWER, "tool_calls": [{"function": {"name": "f", "arguments": '{"a":"\ud83d"}'}}]},
    ],
)
def test_lone_surrogates_anywhere_leave_valid_utf8(turn: Any) -> None:  # PRE-21
    found = _read(USER, turn)
    assert found.repaired == 1
    assert canonical(found.document()).decode("utf-8")


def test_lone_surrogates_in_tools_leave_valid_utf8() -> None:  # PRE-21
    found = _read(USER, ANSWER, tools=[{"type": "\ud83d"}])
    assert (found.tools, found.repaired) == (({"type": "\ufffd"},), 1)


def test_content_that_looks_like_something_else_is_untouched() -> None:  # PRE-23
    first, second = _public("dates")
    assert isinstance(first, Conversation)
    assert isinstance(second, Conversation)
    assert [m["content"] for m in (*first.messages, *second.messages)] == [
        "2024-01-01T00:00:00",
        "2024-05-06T07:08:09",
        "2024-01-02",
        "2024-05-07",
    ]


@pytest.mark.parametrize(
    ("record", "roles"),
    [
        ({}, ["user", "assistant"]),
        ({"input": "", "history": []}, ["user", "assistant"]),
        ({"system": "s"}, ["system", "user", "assistant"]),
        ({"history": [["q0", "a0"]]}, ["user", "assistant"] * 2),
    ],
)
def test_alpaca_records(record: dict[str, Any], roles: list[str]) -> None:
    found = read_conversation({"instruction": "q", "output": "a", **record}, "alpaca")
    assert [m["role"] for m in found.messages] == roles
    assert found.messages[-2:] == (USER, ANSWER)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"instruction": "q", "output": "a", "response": "b"}, "bad_message"),
        ({"instruction": "q", "output": "a", "input": 3}, "no_messages"),
        ({"instruction": "q"}, "no_messages"),
        ({"instruction": None, "output": "a"}, "no_messages"),
        ({"instruction": "q", "output": " "}, "empty_assistant"),
        ({"instruction": "q", "output": "a", "history": [["q0"]]}, "bad_message"),
    ],
)
def test_alpaca_records_that_are_rejected(record: dict[str, Any], reason: str) -> None:
    with pytest.raises(Rejected) as caught:
        read_conversation(record, "alpaca")
    assert caught.value.reason == reason


def test_a_system_text_beside_the_turns_is_the_first_turn() -> None:
    assert _read(USER, ANSWER, system="s").messages[0] == {"role": "system", "content": "s"}


def test_two_system_texts_are_rejected() -> None:
    turn = {"role": "system", "content": "one"}
    assert _reason(turn, USER, ANSWER, system="two") == "two_systems"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_is_kept_on_the_assistants_turns_alone(name: str) -> None:  # PRE-19
    found = _read({**USER, name: "x"}, {**ANSWER, name: "y"})
    assert found.messages == (USER, {**ANSWER, "reasoning_content": "y"})


def test_prompts_have_no_answer() -> None:
    assert read_messages([USER]) == [USER]


def _prompts(folder: Path, *records: Any, limit: int | None = None) -> list[Any]:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return [list(asked.messages) for asked in read_prompts(path, limit)]


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [USER]},
        {"prompt": "q"},
        {"turns": ["q", "q2"]},
        {"messages": [], "prompt": "q"},
    ],
    ids=str,
)
def test_prompts_in_every_form(tmp_path: Path, record: Any) -> None:
    assert _prompts(tmp_path, record, record, limit=1) == [[USER]]


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [USER, ANSWER]},
        {"messages": ["q"]},
        {"messages": [{"role": "observation", "content": "x"}]},
        {"messages": "q"},
        {"turns": [3]},
        {"turns": []},
        {"prompt": ""},
        {},
        [],
    ],
    ids=str,
)
def test_a_prompt_that_cannot_be_asked_is_refused_by_line(tmp_path: Path, record: Any) -> None:
    with pytest.raises(BadPrompt, match="jsonl:2: "):
        _prompts(tmp_path, {"prompt": "q"}, record)


def test_prompts_of_an_unknown_suffix_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadPrompt, match="unsupported"):
        read_prompts(_written(tmp_path / "prompts.txt"), None)
    with pytest.raises(BadPrompt, match="holds no prompt"):
        read_prompts(_written(tmp_path / "prompts.jsonl"), None)


def _written(path: Path) -> Path:
    path.write_bytes(b"")
    return path


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.just("assistant"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    *("role", "content", "from", "value", "messages", "tools", "tool_calls"),
                    *("function", "function_call", "chat", "chosen", "rejected", "history"),
                    *("instruction", "prompt", "response", "traj", "type"),
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(_json, st.sampled_from(get_args(Form)), st.booleans())
def test_any_json_is_read_or_rejected(value: Any, form: str, in_table: bool) -> None:
    try:
        found = read_conversation(value, form, in_table=in_table)
    except Rejected:
        return
    assert {message["role"] for message in found.messages} <= set(ROLES)
    canonical(found.document())
