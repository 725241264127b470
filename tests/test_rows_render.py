"""Rows: the prompt is what serving sends, the completion what the verifier emits after it.

Three tokenizers: a small ChatML one made here, the demo verifier's, and the real Kimi-K2.5 one
(tiktoken and its own template) where the material is at hand.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from cases import case_input, case_json, demo_verifier, material

from kimi_eagle.rows.conversations import Rejected, read_conversation
from kimi_eagle.rows.render import Renderer, Row, cut
from kimi_eagle.rows.sources import read_records
from kimi_eagle.rows.tiktoken_form import PATTERN

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ASSISTANT = "<|im_assistant|>assistant<|im_middle|>"


def _chatml(template: str = CHATML, **options: Any) -> Any:
    """A byte-level BPE of few merges whose post-processor adds a BOS of its own."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from tokenizers import trainers as train
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(
        ["question number", "answer number", "user assistant system word word tok tok"],
        train.BpeTrainer(
            vocab_size=300,
            special_tokens=["<s>", "</s>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    made.add_tokens([AddedToken("    ", normalized=False)])
    bos = made.token_to_id("<s>")
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="module")
def chatml() -> Any:
    return _chatml()


@pytest.fixture(scope="module")
def demo() -> Any:
    from kimi_eagle.rows.tokenizer import load_tokenizer

    return load_tokenizer(demo_verifier())


class Kimi:
    """The real tokenizer and template as a slow tokenizer: no offsets, no assistant mask."""

    def __init__(self, folder: Path):
        import tiktoken
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        lines = (folder / "tiktoken.model").read_bytes().splitlines()
        ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, lines)}
        config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
        named = {int(i): token for i, token in config["added_tokens_decoder"].items()}
        self._added = {
            named[i]["content"] if i in named else f"<|reserved_token_{i}|>": i
            for i in range(len(ranks), len(ranks) + 256)
        }
        self.all_special_ids = [i for i, token in named.items() if token["special"]]
        self.all_special_tokens = [named[i]["content"] for i in self.all_special_ids]
        self._encoding = tiktoken.Encoding(
            "kimi", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=self._added
        )
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        self.chat_template = (folder / "chat_template.jinja").read_text("utf-8")
        environment.filters["tojson"] = lambda value, **options: json.dumps(
            value, **{"ensure_ascii": False, **options}
        )
        self._template = environment.from_string(self.chat_template)

    def apply_chat_template(self, conversation: Any, *, tokenize: bool, **options: Any) -> str:
        assert not tokenize
        return str(self._template.render(messages=conversation, **options))

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return list(self._encoding.encode(text, allowed_special="all"))

    def encode_ordinary(self, text: str) -> list[int]:
        return list(self._encoding.encode_ordinary(text))

    def decode(self, ids: list[int], **_: Any) -> str:
        return str(self._encoding.decode(ids))

    def get_added_vocab(self) -> dict[str, int]:
        return dict(self._added)


@pytest.fixture(scope="module")
def kimi() -> Kimi:
    pytest.importorskip("tiktoken", reason="tiktoken is not installed")
    return Kimi(material("kimi-k2.5"))


@pytest.fixture(params=["chatml", "demo", "kimi"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


@pytest.fixture(params=["demo", "kimi"])
def thinker(request: pytest.FixtureRequest) -> Any:
    """A tokenizer whose template opens prompts with `<think>`."""
    return request.getfixturevalue(request.param)


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def said(content: str, reasoning: str | None = None, **more: Any) -> dict[str, Any]:
    beside = {} if reasoning is None else {"reasoning_content": reasoning}
    return {"role": "assistant", "content": content, **beside, **more}


def _rows(tokenizer: Any, *turns: Any, thinking: str = "auto", **beside: Any) -> list[Row]:
    conversation = read_conversation({"messages": list(turns), **beside}, "messages")
    return Renderer(tokenizer, thinking).rows(conversation)


def _reason(tokenizer: Any, *turns: Any, **options: Any) -> str:
    with pytest.raises(Rejected) as caught:
        _rows(tokenizer, *turns, **options)
    return caught.value.reason


def _split(tokenizer: Any, row: Row) -> list[tuple[int, str]]:
    """The row's text in stretches of one mask value."""
    found: list[tuple[int, list[int]]] = []
    for token, mask in zip(row.token_ids, row.loss_mask, strict=True):
        if not found or found[-1][0] != mask:
            found.append((mask, []))
        found[-1][1].append(token)
    return [(mask, tokenizer.decode(ids)) for mask, ids in found]


def _learnt(tokenizer: Any, row: Row) -> list[str]:
    return [text for mask, text in _split(tokenizer, row) if mask]


def _public(tokenizer: Any, name: str) -> list[list[Row]]:
    renderer = Renderer(tokenizer)
    return [
        renderer.rows(read_conversation(record.value, "messages"))
        for record in read_records(case_input(f"chat/{name}.jsonl"))
    ]


def test_every_ordinary_conversation_has_supervised_tokens(tokenizer: Any) -> None:  # PRE-02, 20
    found = _public(tokenizer, "base")
    assert [len(rows) for rows in found] == [1] * 10
    for number, (row,) in enumerate(found):
        (text,) = _learnt(tokenizer, row)
        assert text.startswith(f"answer number {number}<|im_end|>")


def test_prompt_tokens_are_what_serving_sends(tokenizer: Any) -> None:
    """Serving renders the messages with a generation prompt and tokenizes without specials."""
    (row,) = _rows(tokenizer, {"role": "system", "content": "s"}, user("I'm here"), said("yes"))
    options = {"thinking": False, "tools": None, "add_generation_prompt": True}
    sent = [{"role": "system", "content": "s"}, user("I'm here")]
    text = tokenizer.apply_chat_template(sent, tokenize=False, **options)
    prompt = tokenizer.encode(text, add_special_tokens=False)
    assert list(row.token_ids[: len(prompt)]) == prompt
    assert row.loss_mask == (0,) * len(prompt) + (1,) * (len(row.token_ids) - len(prompt))


def test_completion_ends_with_the_end_of_turn(tokenizer: Any) -> None:
    """And not with what a template writes between turns: the verifier stops there."""
    (row,) = _rows(tokenizer, user("q"), said("a"))
    end = tokenizer.get_added_vocab()["<|im_end|>"]
    assert row.token_ids[-1] == end
    assert row.loss_mask[-1] == 1


def test_no_second_bos(chatml: Any) -> None:
    vectors = case_json("masks/vectors.json")["double_bos"]
    assert vectors["bad"][:2] == [vectors["bos"]] * 2
    assert chatml.encode("x", add_special_tokens=True)[0] == chatml.bos_token_id
    (row,) = _rows(_chatml("<s>" + CHATML), user("q"), said("a"))
    assert row.token_ids.count(chatml.bos_token_id) == 1


def test_a_turn_in_the_middle_leaves_the_mask_of_what_follows(tokenizer: Any) -> None:
    """PRE-04: an answer of one token, then a user's turn that is not learnt, then another."""
    (row,) = _rows(tokenizer, user("q"), said("A"), user("user message"), said("B"))
    learnt = _learnt(tokenizer, row)
    assert learnt == ["A<|im_end|>", "B<|im_end|>"]
    assert row.turns == (1, 3)


def test_a_turn_that_opens_the_conversation_is_context(tokenizer: Any) -> None:  # PRE-04
    rows = _rows(tokenizer, said("A"), user("user message"), said("B"))
    assert [_learnt(tokenizer, row) for row in rows] == [["B<|im_end|>"]]
    assert _reason(tokenizer, said("A"), user("user message")) == "no_assistant_turn"


def test_a_row_of_many_turns_equals_the_rows_of_its_parts(tokenizer: Any) -> None:
    """Joined rows supervise the same tokens after the same prefix as each turn alone."""
    turns = [user("one"), said("1"), user("two"), said("2"), user("three"), said("3")]
    (whole,) = _rows(tokenizer, *turns)
    for last in (2, 4, 6):
        (part,) = _rows(tokenizer, *turns[:last])
        length = len(part.token_ids)
        assert (whole.token_ids[:length], whole.loss_mask[:length]) == (
            part.token_ids,
            part.loss_mask,
        )


def test_reasoning_is_learnt_and_history_follows_the_template(thinker: Any) -> None:  # PRE-19
    ((first, last),) = _public(thinker, "thinking")
    assert _split(thinker, first) == [
        (0, f"<|im_user|>user<|im_middle|>2+2<|im_end|>{ASSISTANT}<think>"),
        (1, "add them</think>4<|im_end|>"),
    ]
    assert _split(thinker, last) == [
        (
            0,
            "".join(
                [
                    f"<|im_user|>user<|im_middle|>2+2<|im_end|>{ASSISTANT}<think></think>4<|im_end|>",
                    f"<|im_user|>user<|im_middle|>3+3<|im_end|>{ASSISTANT}<think>",
                ]
            ),
        ),
        (1, "add again</think>6<|im_end|>"),
    ]


@pytest.mark.parametrize(
    ("thinking", "reasoning", "opens", "completion"),
    [
        ("auto", None, "<think></think>", "a<|im_end|>"),
        ("auto", "why", "<think>", "why</think>a<|im_end|>"),
        ("always", None, "<think>", "</think>a<|im_end|>"),
        ("always", "why", "<think>", "why</think>a<|im_end|>"),
        ("never", None, "<think></think>", "a<|im_end|>"),
        ("never", "why", "<think></think>", "a<|im_end|>"),
    ],
)
def test_how_a_prompt_opens(
    thinker: Any, thinking: str, reasoning: str | None, opens: str, completion: str
) -> None:
    (row,) = _rows(thinker, user("q"), said("a", reasoning), thinking=thinking)
    (_, prompt), (_, learnt) = _split(thinker, row)
    assert prompt.endswith(ASSISTANT + opens)
    assert learnt == completion


def test_prompt_and_completion_of_a_reasoning_turn_are_tokenized_apart(thinker: Any) -> None:
    (row,) = _rows(thinker, user("q"), said("It's 4.", "I'm adding\n\n"))
    encode = thinker.encode
    prompt = encode(
        f"<|im_user|>user<|im_middle|>q<|im_end|>{ASSISTANT}<think>", add_special_tokens=False
    )
    completion = encode("I'm adding\n\n</think>It's 4.<|im_end|>", add_special_tokens=False)
    assert list(row.token_ids) == prompt + completion


def test_reasoning_within_the_content_is_taken_apart(thinker: Any) -> None:  # PRE-19
    inline = _rows(thinker, user("q"), said("<think>why</think>a"), user("q2"), said("b"))
    apart = _rows(thinker, user("q"), said("a", "why"), user("q2"), said("b"))
    assert inline == apart


@pytest.mark.parametrize(
    "turn",
    [
        said("why</think>a"),
        said("a <think>b</think>"),
        said("<think>x</think>a", "why"),
        said("a", "why</think>not"),
        said("<think>x</think><think>y</think>a"),
    ],
    ids=str,
)
def test_thinking_tokens_elsewhere_are_rejected(thinker: Any, turn: Any) -> None:
    assert _reason(thinker, user("q"), turn) == "think_token_in_text"


def test_reasoning_that_a_template_leaves_out_is_rejected_unless_never(chatml: Any) -> None:
    turns = [user("q"), said("a", "why")]  # PRE-19: never dropped silently
    assert _reason(chatml, *turns) == "reasoning_not_rendered"
    (row,) = _rows(chatml, *turns, thinking="never")
    assert _learnt(chatml, row) == ["a<|im_end|>"]


CALL = {
    "id": "functions.get:0",
    "type": "function",
    "function": {"name": "get", "arguments": '{"city":"Oslo"}'},
}
RETURN = {"role": "tool", "tool_call_id": "functions.get:0", "content": "31"}
TOOLS = [{"type": "function", "function": {"name": "get"}}]
SECTION = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.get:0<|tool_call_argument_begin|>"
    "{}<|tool_call_end|><|tool_calls_section_end|><|im_end|>"
)


def test_tool_calls_are_learnt_as_said_and_sent_as_served(kimi: Kimi) -> None:
    """Servers parse the arguments of earlier calls, so that history has the template's spacing."""
    first, last = _rows(kimi, user("q"), said("", tool_calls=[CALL]), RETURN, said("31 C"))
    assert _learnt(kimi, first) == [SECTION.format('{"city":"Oslo"}')]
    (_, prompt), (_, learnt) = _split(kimi, last)
    assert SECTION.format('{"city": "Oslo"}') in prompt
    assert "## Return of functions.get:0\n31<|im_end|>" in prompt
    assert learnt == "31 C<|im_end|>"


def test_tools_are_declared_as_typescript_in_every_prompt(kimi: Kimi) -> None:
    """As Kimi's own tokenizer hands them to its template."""
    rows = _rows(kimi, user("q"), said("", tool_calls=[CALL]), RETURN, said("a"), tools=TOOLS)
    declared = (
        "<|im_system|>tool_declare<|im_middle|># Tools\n\n## functions\nnamespace functions {\n"
        "type get = (_: {}) => any;\n}\n<|im_end|>"
    )
    assert all(_split(kimi, row)[0][1].startswith(declared) for row in rows)


def test_tools_without_a_typescript_form_are_declared_as_json(kimi: Kimi) -> None:
    """With sorted keys, which is all that Kimi's tokenizer does to them then."""
    odd = {"type": "object", "properties": {"b": {"not": {}}, "a": {"type": "string"}}}
    tools = [{"function": {"parameters": odd, "name": "get"}, "type": "function"}]
    (row,) = _rows(kimi, user("q"), said("a"), tools=tools)
    shown = {
        "function": {
            "description": None,
            "name": "get",
            "parameters": {
                "properties": {"a": {"type": "string"}, "b": {"not": {}}},
                "type": "object",
            },
        },
        "type": "function",
    }
    declared = "tool_declare<|im_middle|>" + json.dumps([shown], separators=(",", ":"))
    assert declared in _split(kimi, row)[0][1]


def test_other_templates_are_given_tools_as_vllm_orders_them() -> None:
    tokenizer = _chatml("{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML)
    tools = [{"function": {"parameters": {"b": 1, "a": 2}, "name": "f"}, "type": "function"}]
    (row,) = _rows(tokenizer, user("q"), said("a"), tools=tools)
    function = {"name": "f", "description": None, "parameters": {"b": 1, "a": 2}}
    declared = json.dumps([{"type": "function", "function": function}])
    assert _split(tokenizer, row)[0][1].startswith(declared + "<|im_start|>")


def test_reasoning_before_a_tool_call_stays_in_the_prompt_of_the_answer(kimi: Kimi) -> None:
    """With the answer there the template takes the call for history and erases its reasoning;
    serving has no answer yet, and sends it."""
    spaced = {**CALL, "function": {"name": "get", "arguments": '{"city": "Oslo"}'}}
    call = said("", "R1", tool_calls=[spaced])
    (row,) = _rows(kimi, user("q"), call, RETURN, said("31 C", "R2"))
    assert _learnt(kimi, row) == [
        "R1</think>" + SECTION.format('{"city": "Oslo"}'),
        "R2</think>31 C<|im_end|>",
    ]
    assert row.turns == (1, 3)


def test_an_answer_without_reasoning_leaves_that_of_the_call_before_it(kimi: Kimi) -> None:
    """Thinking was on for the call, and is on for what is asked next: turned off, it would take
    the call's reasoning out of the prompt. A new question has its own say."""
    spaced = {**CALL, "function": {"name": "get", "arguments": '{"city": "Oslo"}'}}
    call = said("", "R1", tool_calls=[spaced])
    first, second = _rows(kimi, user("q"), call, RETURN, said("31 C"), user("q2"), said("b"))
    assert _learnt(kimi, first) == [
        "R1</think>" + SECTION.format('{"city": "Oslo"}'),
        "</think>31 C<|im_end|>",
    ]
    assert first.turns == (1, 3)
    (_, prompt), (_, learnt) = _split(kimi, second)
    assert prompt.endswith(f"q2<|im_end|>{ASSISTANT}<think></think>")
    assert learnt == "b<|im_end|>"


@pytest.mark.parametrize(
    "turns",
    [
        [said("", tool_calls=[{"function": CALL["function"]}])],
        [said("", tool_calls=[CALL]), {"role": "tool", "content": "31"}, said("a")],
    ],
    ids=["call", "return"],
)
def test_calls_without_the_id_that_the_template_writes_are_rejected(
    kimi: Kimi, turns: list[Any]
) -> None:
    assert _reason(kimi, user("q"), *turns) == "bad_tools"


def test_calls_need_no_id_where_the_template_writes_none(chatml: Any) -> None:
    (row,) = _rows(chatml, user("q"), said("", tool_calls=[{"function": CALL["function"]}]))
    assert _learnt(chatml, row) == ['<tool_call>get{"city": "Oslo"}</tool_call><|im_end|>']


CONTROL = "<|im_end|>"


@pytest.mark.parametrize(
    ("turns", "beside"),
    [
        ([user(f"x{CONTROL}y"), said("a")], {}),
        ([user("q"), said(f"a{CONTROL}")], {}),
        ([{"role": "system", "content": CONTROL}, user("q"), said("a")], {}),
        ([{**user("q"), "name": CONTROL}, said("a")], {}),
        ([user("q"), said("a", f"why {CONTROL}")], {}),
        ([user("q"), said("a", tool_calls=[{**CALL, "id": CONTROL}])], {}),
        (
            [
                user("q"),
                said(
                    "a",
                    tool_calls=[{"id": "0", "function": {"name": "f", "arguments": {CONTROL: 1}}}],
                ),
            ],
            {},
        ),
        ([user("q"), said("a")], {"tools": [{"name": CONTROL}]}),
        ([user(f"{CONTROL}<|im_{CONTROL}end|>{CONTROL}"), said(f"{CONTROL}{CONTROL}")], {}),
    ],
    ids=["user", "assistant", "system", "name", "reasoning", "call id", "argument", "tools", "all"],
)
def test_control_tokens_in_text_stay_text(
    tokenizer: Any, turns: list[Any], beside: dict[str, Any]
) -> None:
    """The row's control tokens are those of the same conversation with harmless text instead, and
    its text is what was written."""
    if isinstance(tokenizer, Kimi) or "think" in tokenizer.chat_template:
        thinking = "auto"
    else:
        thinking = "never"  # this template writes no reasoning

    def plain(value: Any) -> Any:
        return json.loads(json.dumps(value).replace(CONTROL, "HARMLESS"))

    end = tokenizer.get_added_vocab()[CONTROL]
    rows = _rows(tokenizer, *turns, thinking=thinking, **beside)
    harmless = _rows(tokenizer, *plain(turns), thinking=thinking, **plain(beside))
    for row, other in zip(rows, harmless, strict=True):
        assert row.token_ids.count(end) == other.token_ids.count(end)
        assert row.token_ids[-1] == end
        found = [text for _, text in _split(tokenizer, row)]
        wanted = [text for _, text in _split(tokenizer, other)]
        assert [text.replace(CONTROL, "") for text in found] == [
            text.replace(CONTROL, "").replace("HARMLESS", "") for text in wanted
        ]
        written = "".join(found).count(CONTROL) - "".join(wanted).count(CONTROL)
        assert written == "".join(wanted).count("HARMLESS")


def test_evaluation_sends_the_ids_of_the_rows(tokenizer: Any) -> None:
    turns = [user(f"x{CONTROL}y <think>"), said("a"), user("q2")]
    (row,) = _rows(tokenizer, *turns, said("b"))
    asked = Renderer(tokenizer).prompt_ids(turns, thinking=False)
    assert list(row.token_ids[: len(asked)]) == asked
    assert sum(row.loss_mask[len(asked) :]) == len(row.token_ids) - len(asked)


def test_thinking_tokens_in_a_question_stay_text(thinker: Any) -> None:
    (row,) = _rows(thinker, user("what does <think> do? </think>"), said("a", "why"))
    added = thinker.get_added_vocab()
    assert row.token_ids.count(added["<think>"]) == 1
    assert row.token_ids.count(added["</think>"]) == 1
    assert "what does <think> do? </think><|im_end|>" in _split(thinker, row)[0][1]


def test_marks_are_characters_that_the_text_does_not_have(thinker: Any) -> None:
    (row,) = _rows(thinker, user(f"\ufdd0 {CONTROL} \ufdd1"), said("a"))
    assert f"\ufdd0 {CONTROL} \ufdd1<|im_end|>" in _split(thinker, row)[0][1]
    every = "".join(map(chr, range(0xFDD0, 0xFDF0)))
    assert _reason(thinker, user(every + CONTROL), said("a")) == "control_token_in_text"


def test_a_template_that_escapes_text_rejects_control_tokens_in_it() -> None:
    escaping = _chatml(CHATML.replace("{{ m.content }}", "{{ m.content | tojson(true) }}"))
    assert _reason(escaping, user(CONTROL), said("a")) == "control_token_in_text"


def test_a_tokenizer_that_cannot_encode_control_tokens_as_text_rejects_them(chatml: Any) -> None:
    class Slow:
        """No more than transformers' tokenizers in Python have."""

        backend_tokenizer = None

        def __getattr__(self, name: str) -> Any:
            if name == "encode_ordinary":
                raise AttributeError(name)
            return getattr(chatml, name)

    turns = [user("q"), said("a")]
    assert _rows(Slow(), *turns) == _rows(chatml, *turns)
    assert _reason(Slow(), user(CONTROL), said("a")) == "control_token_in_text"


def test_added_runs_of_spaces_are_no_control_tokens(chatml: Any) -> None:
    (row,) = _rows(chatml, user("def f():\n        pass"), said("a"))
    assert any(row.loss_mask)


def test_a_template_that_raises_rejects_the_conversation() -> None:
    refusing = _chatml("{{ raise_exception('roles must alternate') }}")
    assert _reason(refusing, user("q"), said("a")) == "template_error"


@pytest.mark.parametrize(
    "opening", ["<|im_start|>", "<|im_start|><think>"], ids=["plain", "thinking"]
)
def test_a_turn_that_does_not_continue_its_prompt_is_rejected(opening: str) -> None:
    template = "{% for m in messages %}{{ m.content }}|{% endfor %}"
    template += "{% if add_generation_prompt %}" + opening + "{% endif %}"
    assert _reason(_chatml(template), user("q"), said("a")) == "template_mismatch"


def test_repeated_turns_are_rendered_as_they_are(tokenizer: Any) -> None:  # PRE-28
    ((row,),) = _public(tokenizer, "consecutive_user")
    prompt = _split(tokenizer, row)[0][1]
    assert prompt.count("<|im_end|>") == 2
    ((row,),) = _public(tokenizer, "double_system")
    assert _split(tokenizer, row)[0][1].count("one") == 2


def test_text_parts_give_the_ids_of_the_text(tokenizer: Any) -> None:  # PRE-30
    parts = user("")
    parts["content"] = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    assert _rows(tokenizer, parts, said("hi")) == _rows(tokenizer, user("hello"), said("hi"))


def test_repaired_surrogates_can_be_tokenized(tokenizer: Any) -> None:  # PRE-21
    lone, paired = _public(tokenizer, "lone_surrogate")
    assert _learnt(tokenizer, lone[0]) == ["x \ufffd<|im_end|>"]
    assert "good 😀" in _split(tokenizer, paired[0])[0][1]


def test_looking_alike_dates_keep_their_text(tokenizer: Any) -> None:  # PRE-23
    first, second = _public(tokenizer, "dates")
    assert _learnt(tokenizer, first[0]) == ["2024-05-06T07:08:09<|im_end|>"]
    assert _learnt(tokenizer, second[0]) == ["2024-05-07<|im_end|>"]


def test_long_rows_are_cut_and_dropped_when_nothing_is_learnt(tokenizer: Any) -> None:  # PRE-13
    (long_prompt,), (long_answer,) = _public(tokenizer, "long_prompt")
    with pytest.raises(Rejected) as caught:
        cut(long_prompt, 64)
    assert caught.value.reason == "too_long_no_supervision"
    kept = cut(long_answer, 64)
    assert len(kept.token_ids) == 64
    assert 1 <= sum(kept.loss_mask) < 64


def _vector(name: str) -> Any:
    return case_json("masks/vectors.json")[name]


def test_cutting_keeps_ids_and_mask_of_the_same_end() -> None:  # PRE-05
    vector = _vector("right_truncation")
    row = cut(Row(tuple(vector["ids"]), tuple(vector["mask"]), (1,)), vector["max_length"])
    assert row.loss_mask == tuple(vector["mask_out"])
    assert row.token_ids == tuple(vector["ids"][: vector["max_length"]])


def test_a_row_whose_learnt_end_would_be_cut_is_dropped_not_misaligned() -> None:  # PRE-05
    vector = _vector("left_truncation")
    row = Row(tuple(vector["ids"]), tuple(vector["mask"]), (1,))
    with pytest.raises(Rejected, match="too_long_no_supervision"):
        cut(row, vector["keep_last"])
    kept = cut(row, 7)
    assert [i for i, m in zip(kept.token_ids, kept.loss_mask, strict=True) if m] == [15, 16]


def test_a_span_that_ends_at_the_first_token_is_kept_by_cutting() -> None:  # PRE-04
    mask = tuple(_vector("span_ending_at_token0")["mask_out"])
    assert cut(Row(tuple(range(8)), mask, (0,)), 8).loss_mask == mask
    assert cut(Row(tuple(range(8)), mask, (0,)), 1).loss_mask == (1,)


def test_zero_width_offsets_change_nothing(chatml: Any) -> None:  # PRE-20
    class Offsetless:
        """What the slow tokenizers are: everything but offsets, which are all (0, 0)."""

        def __getattr__(self, name: str) -> Any:
            return getattr(chatml, name)

        def __call__(self, text: str, **options: Any) -> Any:
            found = chatml(text, **options)
            found["offset_mapping"] = [(0, 0)] * len(found["input_ids"])
            return found

    turns = [user("q"), said("a"), user("q2"), said("b")]
    assert _rows(Offsetless(), *turns) == _rows(chatml, *turns)


def test_a_public_verifier_folder_without_a_template_is_refused(tmp_path: Path) -> None:
    from kimi_eagle.rows.tokenizer import load_tokenizer
    from kimi_eagle.verifiers.facts import VerifierError

    tokenizer = _chatml()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(VerifierError, match="no chat template"):
        load_tokenizer(tmp_path)
