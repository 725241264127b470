"""The forms that records have: each read as the conversation that it is, tools and all."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from cases import ROOT, material
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pyarrow import parquet

from kimi_eagle.rows.buckets import BUCKETS, KEPT, Buckets
from kimi_eagle.rows.conversations import Conversation, Rejected, read_conversation
from kimi_eagle.rows.intake import Intake
from kimi_eagle.rows.sources import read_records
from kimi_eagle.rows.tool_support import ToolSupport
from kimi_eagle.stages.prepare.spec import Source

USER = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}
WEATHER = {"name": "weather", "arguments": {"city": "Oslo"}}


def _call(number: int, name: str = "weather", **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments or {"city": "Oslo"}}
    return {"id": f"functions.{name}:{number}", "type": "function", "function": function}


def _read(form: str, columns: dict[str, str] | None = None, **record: Any) -> Conversation:
    return read_conversation(record, form, columns)


def _reason(form: str, **record: Any) -> str:
    with pytest.raises(Rejected) as caught:
        read_conversation(record, form)
    return caught.value.reason


FORMS = [
    pytest.param("messages", {"messages": [USER, ANSWER]}, id="messages"),
    pytest.param("messages", {"conversations": [USER, ANSWER]}, id="conversations"),
    pytest.param(
        "sharegpt",
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        id="sharegpt",
    ),
    pytest.param("alpaca", {"instruction": "q", "input": "", "output": "a"}, id="alpaca"),
    pytest.param("alpaca", {"instruction": "q", "response": "a"}, id="gpteacher"),
    pytest.param("pairs", {"prompt": "q", "response": "a"}, id="pair"),
    pytest.param("pairs", {"question": "q", "answer": "a"}, id="question and answer"),
    pytest.param("pairs", {"prompt": [USER], "completion": [ANSWER]}, id="pair of turns"),
    pytest.param(
        "preference",
        {"messages": [USER], "chosen": ANSWER, "rejected": {**ANSWER, "content": "b"}},
        id="preference",
    ),
    pytest.param(
        "preference",
        {
            "conversations": [{"from": "human", "value": "q"}],
            "chosen": {"from": "gpt", "value": "a"},
            "rejected": {"from": "gpt", "value": "b"},
        },
        id="LLaMA-Factory's preference",
    ),
    pytest.param(
        "preference",
        {"instruction": "q", "input": "", "chosen": "a", "rejected": "b"},
        id="alpaca preference",
    ),
    pytest.param(
        "preference", {"prompt": "q", "chosen": "a", "rejected": "b"}, id="pair preference"
    ),
    pytest.param(
        "preference",
        {"chosen": [USER, ANSWER], "rejected": [USER, {**ANSWER, "content": "b"}]},
        id="TRL's preference",
    ),
    pytest.param("tau_bench", {"task_id": 0, "traj": [USER, ANSWER], "reward": 1.0}, id="tau"),
    pytest.param(
        "glaive", {"system": "", "chat": "USER: q\n\n\nASSISTANT: a <|endoftext|>"}, id="glaive"
    ),
]


@pytest.mark.parametrize(("form", "record"), FORMS)
def test_one_conversation_in_every_form(form: str, record: dict[str, Any]) -> None:
    expected = Conversation((USER, ANSWER))
    assert read_conversation(record, form) == expected
    assert read_conversation(record, "auto") == expected


@pytest.mark.parametrize(
    "record", [{}, {"text": "q"}, {"prompt": "q"}, {"messages_display": "user: q"}]
)
def test_a_record_of_no_form_is_counted_as_that(record: dict[str, Any]) -> None:
    assert _reason("auto", **record) == "unknown_form"


def test_columns_say_what_records_call_it() -> None:
    found = _read("pairs", {"prompt": "ask", "response": "say"}, ask="q", say="a", response="x")
    assert found.messages == (USER, ANSWER)


def test_columns_and_roles_name_what_turns_have() -> None:
    turns = [{"speaker": "Human", "text": "q"}, {"speaker": "AI", "text": "a"}]
    columns = {"messages": "dialogue", "role": "speaker", "content": "text"}
    record = {"dialogue": turns}
    roles = {"Human": "user", "AI": "assistant"}
    assert read_conversation(record, "auto", columns, roles).messages == (USER, ANSWER)
    with pytest.raises(Rejected, match="unknown_role: 'Human'"):
        read_conversation(record, "auto", columns)


CALLED = (
    USER,
    {"role": "assistant", "content": "", "tool_calls": [_call(0)]},
    {"role": "tool", "content": "31", "tool_call_id": "functions.weather:0"},
    ANSWER,
)
OBSERVED = {"from": "observation", "value": "31"}


def test_sharegpt_calls_get_the_ids_that_kimi_writes_and_results_follow() -> None:
    turns = [
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": json.dumps(WEATHER)},
        OBSERVED,
        {"from": "gpt", "value": "a"},
    ]
    tools = json.dumps([{"name": "weather", "parameters": {}}])
    found = _read("sharegpt", conversations=turns, tools=tools)
    assert found.messages == CALLED
    assert found.tools == ({"type": "function", "function": {"name": "weather", "parameters": {}}},)


def test_ids_count_through_the_conversation_and_parallel_calls_pair_in_order() -> None:
    turns = [
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": json.dumps([WEATHER, WEATHER])},
        OBSERVED,
        OBSERVED,
        {"from": "function_call", "value": json.dumps({"name": "f", "arguments": {}})},
    ]
    found = _read("auto", conversations=turns)
    ids = [call["id"] for turn in found.messages for call in turn.get("tool_calls", ())]
    assert ids == ["functions.weather:0", "functions.weather:1", "functions.f:2"]
    answered = [turn["tool_call_id"] for turn in found.messages if turn["role"] == "tool"]
    assert answered == ids[:2]


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ([{"from": "gpt", "value": "a"}, OBSERVED], "bad_tools"),
        ([{"from": "function_call", "value": "{weather"}], "bad_tools_json"),
        ([{"from": "function_call", "value": "[]"}], "bad_tools"),
        ([{"from": "function_call", "value": '{"arguments": {}}'}], "bad_tools"),
        ([{"from": "function_call", "value": '{"name": "f", "arguments": 3}'}], "bad_tools"),
        ([{"from": "function_call", "value": None}], "bad_tools"),
        (
            [
                {"from": "function_call", "value": json.dumps(WEATHER)},
                {"from": "gpt", "value": "a"},
            ],
            "bad_tools",
        ),
        (
            [
                {"from": "function_call", "value": json.dumps([WEATHER, WEATHER])},
                OBSERVED,
                {"from": "gpt", "value": "a"},
            ],
            "bad_tools",
        ),
    ],
)
def test_calls_and_results_that_do_not_pair_are_never_guessed(turns: Any, reason: str) -> None:
    assert _reason("sharegpt", conversations=[{"from": "human", "value": "q"}, *turns]) == reason


def test_openai_s_older_function_calls_read_as_tool_calls() -> None:
    called = {"role": "assistant", "content": None, "function_call": WEATHER}
    result = {"role": "function", "name": "weather", "content": "31"}
    assert _read("messages", messages=[USER, called, result, ANSWER]).messages == CALLED


def test_ids_that_are_given_are_kept() -> None:
    call = {**_call(0), "id": "call_x", "index": None}
    turns = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "31", "tool_call_id": "call_x", "name": "weather"},
    ]
    _, called, result = _read("tau_bench", traj=turns).messages
    assert called["tool_calls"] == [{**_call(0), "id": "call_x"}]
    assert (result["tool_call_id"], result["name"]) == ("call_x", "weather")


def _trace(*ids: str | None, results: tuple[str, ...]) -> list[Any]:
    calls = [{**_call(0), "id": given} for given in ids]
    answers = [{"role": "tool", "content": "31", "tool_call_id": given} for given in results]
    return [USER, {"role": "assistant", "content": "", "tool_calls": calls}, *answers, ANSWER]


def test_ids_of_other_models_can_be_written_anew_as_kimi_writes_them() -> None:
    # Parallel calls may be answered in another order, and an id may come again later.
    turns = _trace("x", "y", results=("y", "x")) + _trace("x", results=("x",))
    found = read_conversation({"traj": turns}, "auto", tool_call_ids="kimi").messages
    ids = [call["id"] for turn in found for call in turn.get("tool_calls", ())]
    assert ids == ["functions.weather:0", "functions.weather:1", "functions.weather:2"]
    answered = [turn["tool_call_id"] for turn in found if turn["role"] == "tool"]
    assert answered == [ids[1], ids[0], ids[2]]
    again = read_conversation({"messages": list(found)}, "auto", tool_call_ids="kimi")
    assert again.messages == found


@pytest.mark.parametrize(
    "turns",
    [
        _trace("x", results=("z",)),
        _trace("x", results=("x", "x")),
        _trace("x", "x", results=("x",)),
        _trace(None, results=()),
    ],
)
def test_ids_that_do_not_pair_are_not_written_anew(turns: list[Any]) -> None:
    with pytest.raises(Rejected, match="bad_tools"):
        read_conversation({"messages": turns}, "messages", tool_call_ids="kimi")


def test_parts_of_reasoning_and_calls_are_read_as_such() -> None:
    parts = [
        {"type": "reasoning", "value": "think"},
        {"type": "text", "value": "wait"},
        {"type": "tool_call", "value": json.dumps(WEATHER)},
    ]
    result = {"role": "tool", "content": [{"type": "text", "value": "31"}]}
    found = _read("auto", messages=[USER, {"role": "assistant", "content": parts}, result, ANSWER])
    expected = {**CALLED[1], "content": "wait", "reasoning_content": "think"}
    assert found.messages == (USER, expected, *CALLED[2:])


@pytest.mark.parametrize("kind", ["reasoning", "tool_call"])
def test_parts_of_the_assistant_are_nobody_else_s(kind: str) -> None:
    turn = {"role": "user", "content": [{"type": kind, "value": "x"}]}
    assert _reason("messages", messages=[turn, ANSWER]) == "unsupported_modality"


GLAIVE = """SYSTEM: You are a helpful assistant with access to the following functions. \
Use them if required -
{
    "name": "weather",
    "parameters": {"city": {"type": "string"}}
}
{"name": "time"}
"""
CHAT = """USER: q


ASSISTANT: <functioncall> {"name": "weather", "arguments": '{"city": "Oslo"}'} <|endoftext|>


FUNCTION RESPONSE: 31


ASSISTANT: a <|endoftext|>


"""


def test_glaive_s_text_is_taken_apart() -> None:
    found = _read("auto", system=GLAIVE, chat=CHAT)
    assert found.messages == (
        {"role": "system", "content": "You are a helpful assistant."},
        *CALLED,
    )
    assert [tool["function"]["name"] for tool in found.tools] == ["weather", "time"]


def test_glaive_without_functions_keeps_its_system_text() -> None:
    said = "You are a helpful assistant, with no access to external functions."
    found = _read("glaive", system=f"SYSTEM: {said}\n", chat="USER: q\n\n\nASSISTANT: a")
    assert found.messages[0] == {"role": "system", "content": said}
    assert found.tools == ()


@pytest.mark.parametrize(
    ("system", "chat", "reason"),
    [
        (GLAIVE, "hello", "no_messages"),
        (GLAIVE, "hello\nUSER: q\n\nASSISTANT: a", "no_messages"),
        (GLAIVE[:-3], CHAT, "bad_tools_json"),
        (GLAIVE, CHAT.replace('Oslo"', "Oslo"), "bad_tools_json"),
        (GLAIVE, CHAT.replace("USER: q", "USER: <functioncall> q"), "bad_tools"),
        (GLAIVE, CHAT.replace("FUNCTION RESPONSE: 31", ""), "bad_tools"),
        (3, CHAT, "no_messages"),
    ],
)
def test_glaive_s_text_that_does_not_come_apart_is_rejected(
    system: Any, chat: str, reason: str
) -> None:
    assert _reason("glaive", system=system, chat=chat) == reason


def _table(folder: Path, rows: list[Any]) -> list[Conversation | str]:
    parquet.write_table(pa.Table.from_pylist(rows), folder / "x.parquet")
    found: list[Conversation | str] = []
    for record in read_records(folder / "x.parquet"):
        try:
            found.append(read_conversation(record.value, "auto", in_table=record.in_table))
        except Rejected as error:
            found.append(error.reason)
    return found


def test_a_table_s_struct_may_not_add_arguments_that_were_never_given(tmp_path: Path) -> None:
    def record(**arguments: Any) -> dict[str, Any]:
        call = {"id": "x", "function": {"name": "f", "arguments": arguments}}
        return {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]}

    assert _table(tmp_path, [record(a="1"), record(b="1")]) == ["null_filled"] * 2
    (same, _) = _table(tmp_path, [record(a="1"), record(a="2")])
    assert isinstance(same, Conversation)


def test_a_table_reads_as_the_lines_it_was_made_from(tmp_path: Path) -> None:  # PRE-07, PRE-23
    rows = [
        {"messages": [USER, {**ANSWER, "content": "2024-01-01T00:00:00"}], "tools": "[]"},
        {"messages": [USER, {**ANSWER, "reasoning_content": "think"}], "tools": None},
    ]
    assert _table(tmp_path, rows) == [read_conversation(row, "auto") for row in rows]


def test_values_that_json_has_not_are_rejected(tmp_path: Path) -> None:
    call = {"id": "x", "function": {"name": "f", "arguments": {"a": b"bytes"}}}
    turns = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    assert _table(tmp_path, [{"messages": turns}]) == ["bad_message"]


def test_every_reason_that_the_code_gives_is_a_bucket() -> None:
    """A reason without a bucket could not be limited, and `show` could not say what it means."""
    given = set()
    for path in (ROOT / "kimi_eagle" / "rows").glob("*.py"):
        given |= set(re.findall(r'Rejected\(\s*"([a-z_]+)"', path.read_text("utf-8")))
    assert given
    assert given <= set(BUCKETS)


class _Template:
    """A chat template, without a tokenizer behind it."""

    def __init__(self, text: str):
        environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
        # As transformers has it: without options that are jinja2's own, and without escapes.
        environment.filters["tojson"] = lambda value, **_: json.dumps(value)
        self._template = environment.from_string(text)

    def apply_chat_template(self, conversation: Any, **options: Any) -> str:
        return str(self._template.render(messages=conversation, **options))


_SAID = "{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}"
_CALLS = "{% for m in messages %}{{ m.content if m.role != 'tool' }}{{ m.tool_calls }}{% endfor %}"
_KIMI = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.id }}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
)
_ALL = "{{ tools }}{% for m in messages %}{{ m.content }}{{ m.tool_calls }}{% endfor %}"
_HAS_TOOLS = Conversation((USER, ANSWER), ({"type": "function"},))
_HAS_CALL = Conversation(CALLED[:2])
_HAS_RESULT = Conversation(CALLED)


@pytest.mark.parametrize(
    ("template", "conversation", "written"),
    [
        (_SAID, Conversation((USER, ANSWER)), True),
        (_SAID, _HAS_TOOLS, False),
        (_SAID, _HAS_CALL, False),
        (_CALLS, _HAS_TOOLS, False),
        (_CALLS, _HAS_CALL, True),
        (_CALLS, _HAS_RESULT, False),
        (_KIMI, _HAS_CALL, True),
        (_ALL, _HAS_TOOLS, True),
        (_ALL, _HAS_RESULT, True),
        ("{{ messages[9].content.x }}", _HAS_RESULT, True),  # what it refuses is told there
    ],
)
def test_tools_that_a_template_writes_nothing_for_are_rejected(  # PRE-10
    template: str, conversation: Conversation, written: bool
) -> None:
    support = ToolSupport(_Template(template))
    if written:
        support.refuse_unwritten(conversation)
    else:
        with pytest.raises(Rejected, match="tools_not_rendered"):
            support.refuse_unwritten(conversation)


def test_kimi_s_own_template_writes_tools_calls_and_results() -> None:
    template = material("kimi-k2.5/chat_template.jinja").read_text("utf-8")
    support = ToolSupport(_Template(template))
    for conversation in (_HAS_TOOLS, _HAS_CALL, _HAS_RESULT):
        support.refuse_unwritten(conversation)


REAL = {
    "gpteacher/codegen-instruct.json": {"kept": 4535},
    "gpteacher/roleplay-simple-deduped-roleplay-instruct.json": {"kept": 1923},
    "gpteacher/toolformer-similarity-0.8-dataset.json": {"kept": 4709},
    "llamafactory_demo/alpaca_en_demo.json": {"kept": 985, "duplicate": 14},
    "llamafactory_demo/alpaca_zh_demo.json": {"kept": 992, "duplicate": 8},
    "llamafactory_demo/dpo_en_demo.json": {"kept": 295, "duplicate": 5},
    "llamafactory_demo/dpo_zh_demo.json": {"kept": 289, "duplicate": 11},
    "llamafactory_demo/glaive_toolcall_en_demo.json": {"kept": 265, "duplicate": 35},
    "llamafactory_demo/glaive_toolcall_zh_demo.json": {
        "kept": 255,
        "duplicate": 43,
        "bad_tools": 2,
    },
    "llamafactory_demo/reason_tool_use_demo_50.jsonl": {"kept": 47, "bad_tools": 3},
    "tau_bench/MockAirlineDomainEnv-few_shot.jsonl": {"unknown_form": 19},
    "tau_bench/gpt-4o-airline.json": {"kept": 200},
}


@pytest.mark.slow
def test_every_file_of_real_chats_is_read_and_every_record_accounted_for() -> None:
    folder = material("chat")
    files = [path for path in folder.rglob("*.json*") if path.is_file()]
    assert {path.relative_to(folder).as_posix() for path in files} == set(REAL)
    for name, expected in REAL.items():
        path, buckets = folder / name, Buckets()
        for taken in Intake([Source(path=name)], [[path]], buckets, on_bad_record="skip"):
            buckets.add(KEPT, taken.place)
        assert buckets.metrics() == expected, name
        text = path.read_text("utf-8")
        records = json.loads(text) if name.endswith(".json") else text.splitlines()
        assert buckets.records == len(records), name
