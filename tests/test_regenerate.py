"""The verifier's own answers: what is asked, in which order, what is kept, what becomes a row."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from cases import demo_verifier
from conftest import DEMO, Project
from conftest import Answer as Answer_
from pydantic import ValidationError

from kimi_eagle.identity import digest_file
from kimi_eagle.job import EventWriter, Given, Job, StageFailed
from kimi_eagle.rows.answers import (
    LENGTH,
    STOP,
    Answer,
    Answers,
    AnswerWriter,
    Prompt,
    answers_folder,
    seed_of,
)
from kimi_eagle.rows.conversations import Rejected
from kimi_eagle.rows.dialogue import Asking, Dialogue, Tally, ask_all, known_only
from kimi_eagle.rows.questions import Questions, read_questions
from kimi_eagle.rows.render import Renderer
from kimi_eagle.rows.table import load_rows
from kimi_eagle.rows.tokenizer import load_tokenizer
from kimi_eagle.stages.context import Context
from kimi_eagle.stages.regenerate import run as regenerate_run
from kimi_eagle.stages.regenerate.spec import AnswerEngine, Regenerate, RegenerateParams
from kimi_eagle.verifiers.facts import read_facts

END = "<|im_end|>"


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(load_tokenizer(demo_verifier()))


def asking(renderer: Renderer, **changes: Any) -> Asking:
    values = {"thinking": False, "max_length": 512, "max_tokens": 64, "keep_cut": True}
    return Asking(renderer, **{**values, **changes})


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def asked(value: dict[str, Any], form: str = "messages") -> list[list[str]]:
    return [[m["content"] for m in turn] for turn in read_questions(value, form).turns]


class Asks:
    """Answers prompts by a rule, and remembers what it was asked."""

    def __init__(self, renderer: Renderer, rule: Callable[[str], str], finish: str = STOP):
        self._renderer, self._rule, self._finish = renderer, rule, finish
        self.chunks: list[list[str]] = []

    def __call__(self, prompts: Sequence[Prompt]) -> Iterator[tuple[int, Answer]]:
        texts = [self._renderer.decode(prompt.token_ids) for prompt in prompts]
        self.chunks.append(texts)
        # As an engine does: whichever is ready first.
        for position in reversed(range(len(prompts))):
            ids = self._renderer.encode(self._rule(texts[position]))
            yield position, Answer(ids[: prompts[position].limit], self._finish)


class Kept(list[tuple[str, Answer]]):
    def add(self, key: str, answer: Answer) -> None:
        self.append((key, answer))


def go(dialogues: list[Dialogue], ask: Any, answers: Answers | None = None, chunk: int = 9) -> Kept:
    kept = Kept()
    ask_all(dialogues, answers or Answers(), ask, kept, chunk, lambda done, total: None)
    return kept


# What is asked


@pytest.mark.parametrize(
    ("value", "form", "turns"),
    [
        ({"messages": [user("a")]}, "messages", [["a"]]),
        ({"messages": [user("a"), assistant("x"), user("b")]}, "messages", [["a"], ["b"]]),
        ({"messages": [user("a"), assistant("")]}, "messages", [["a"]]),
        ({"messages": [user("a"), user("b"), assistant("x")]}, "messages", [["a", "b"]]),
        ({"messages": [assistant("hi"), user("a")]}, "messages", [["hi", "a"]]),
        ({"messages": [user("a"), assistant("x"), assistant("y")]}, "messages", [["a"]]),
        ({"system": "s", "messages": [user("a")]}, "messages", [["s", "a"]]),
        ({"turns": ["a", "b"]}, "messages", [["a"], ["b"]]),
        ({"prompt": "a"}, "messages", [["a"]]),
        ({"conversations": [{"from": "human", "value": "a"}]}, "sharegpt", [["a"]]),
        ({"instruction": "a", "input": "b"}, "alpaca", [["a\n\nb"]]),
        ({"instruction": "b", "history": [["a", "x"]]}, "alpaca", [["a"], ["b"]]),
    ],
)
def test_user_turns_are_asked_and_recorded_answers_are_not_read(
    value: dict[str, Any], form: str, turns: list[list[str]]
) -> None:
    assert asked(value, form) == turns


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ([], "not_a_record"),
        ({}, "no_messages"),
        ({"turns": [3]}, "no_messages"),
        ({"messages": [{"role": "system", "content": "s"}]}, "no_user_turn"),
        ({"messages": [{"role": "oracle", "content": "s"}]}, "unknown_role"),
        ({"system": "s", "messages": [{"role": "system", "content": "t"}, user("a")]}, "two_sys"),
    ],
)
def test_what_asks_nothing_is_left_out_with_its_reason(value: Any, reason: str) -> None:
    with pytest.raises(Rejected, match=reason):
        read_questions(value, "messages")


def test_nothing_is_asked_after_a_tools_return() -> None:
    call = {"function": {"name": "f", "arguments": "{}"}}
    returned = {"role": "tool", "content": "4", "tool_call_id": "1"}
    messages = [user("a"), assistant("", tool_calls=[call]), returned, user("b")]
    questions = read_questions({"messages": messages}, "messages")
    assert len(questions.turns) == 1
    assert questions.unasked == 1


def test_questions_are_read_as_they_were_written() -> None:
    questions = read_questions({"messages": [user("a"), assistant("x"), user("b")]}, "messages")
    assert Questions.read(json.loads(json.dumps(questions.document()))) == questions


# How it is asked


def test_a_turn_is_asked_after_the_verifiers_own_answer(renderer: Renderer) -> None:
    questions = read_questions(
        {"messages": [user("Add 2 and 3."), assistant("recorded"), user("And 4?")]}, "messages"
    )
    dialogue = Dialogue(questions, asking(renderer))
    ask = Asks(renderer, lambda text: f"The sum is 9.{END}")
    go([dialogue], ask)
    assert len(ask.chunks) == 2
    second = ask.chunks[1][0]
    assert "The sum is 9." in second
    assert "recorded" not in second
    assert second == renderer.prompt(
        [user("Add 2 and 3."), assistant("The sum is 9."), user("And 4?")], thinking=False
    )


def test_all_first_turns_come_before_all_second_ones_in_the_order_of_the_source(
    renderer: Renderer,
) -> None:
    dialogues = [
        Dialogue(read_questions({"turns": [f"Spell {n}.", "Again."]}, "messages"), asking(renderer))
        for n in range(5)
    ]
    ask = Asks(renderer, lambda text: f"Yes.{END}")
    go(dialogues, ask, chunk=2)
    flat = [text for chunk in ask.chunks for text in chunk]
    assert [len(chunk) for chunk in ask.chunks] == [2, 2, 1] * 2
    assert [text.count("Again.") for text in flat] == [0] * 5 + [1] * 5
    assert [n for text in flat for n in range(5) if f"Spell {n}." in text] == [*range(5)] * 2


def test_one_prompt_is_asked_once(renderer: Renderer) -> None:
    dialogues = [
        Dialogue(read_questions({"turns": ["Spell door.", end]}, "messages"), asking(renderer))
        for end in ("Thanks.", "Again.")
    ]
    ask = Asks(renderer, lambda text: f"Yes.{END}")
    assert len(go(dialogues, ask)) == 3
    assert [len(dialogue.rows) for dialogue in dialogues] == [1, 1]


# What becomes a row


def test_the_mask_marks_what_was_emitted_and_nothing_else(renderer: Renderer) -> None:
    dialogue = Dialogue(
        read_questions({"turns": ["Spell door.", "Again."]}, "messages"), asking(renderer)
    )
    kept = go([dialogue], Asks(renderer, lambda text: f"D O O R.{END}"))
    (row,) = dialogue.rows
    emitted = [t for t, m in zip(row.token_ids, row.loss_mask, strict=True) if m]
    assert emitted == [int(token) for _, answer in kept for token in answer.token_ids]
    assert row.turns == (0, 1)
    text = renderer.decode(row.token_ids)
    assert (
        text
        == renderer.prompt(
            [user("Spell door."), assistant("D O O R."), user("Again.")], thinking=False
        )
        + f"D O O R.{END}"
    )


def test_ids_that_encode_otherwise_are_kept_and_make_a_row_of_their_own(renderer: Renderer) -> None:
    """The verifier may say a word in other pieces than its tokenizer: so it is learnt, while the
    next prompt has the pieces that serving sends."""
    pieces = [t for letter in "Yes." for t in renderer.encode(letter)] + renderer.encode(END)
    assert renderer.encode(renderer.decode(pieces)) != pieces
    dialogue = Dialogue(
        read_questions({"turns": ["Spell door.", "Again."]}, "messages"), asking(renderer)
    )
    go([dialogue], lambda prompts: ((n, Answer(pieces, STOP)) for n in range(len(prompts))))
    first, second = dialogue.rows
    assert list(first.token_ids[-len(pieces) :]) == pieces
    assert list(second.token_ids[-len(pieces) :]) == pieces
    assert sum(second.loss_mask) == len(pieces)
    history = [user("Spell door."), assistant("Yes."), user("Again.")]
    prompt = renderer.encode(renderer.prompt(history, thinking=False))
    assert list(second.token_ids[: -len(pieces)]) == prompt


def test_reasoning_is_learnt_and_the_template_has_its_way_with_history(renderer: Renderer) -> None:
    dialogue = Dialogue(
        read_questions({"turns": ["Spell door.", "Again."]}, "messages"),
        asking(renderer, thinking=None),
    )
    ask = Asks(renderer, lambda text: f"Let me see.</think>D O O R.{END}")
    go([dialogue], ask)
    assert ask.chunks[0][0].endswith("<think>")
    assert "Let me see." not in ask.chunks[1][0]
    assert "D O O R." in ask.chunks[1][0]
    first, _ = dialogue.rows
    assert renderer.decode(first.token_ids).endswith(f"<think>Let me see.</think>D O O R.{END}")


@pytest.mark.parametrize(
    ("said", "finish", "keep", "rows", "why"),
    [
        ("D O O", LENGTH, True, 1, "after_length"),
        ("D O O", LENGTH, False, 0, "after_length"),
        (END, STOP, True, 0, "after_empty"),
        (f"  {END}", STOP, True, 0, "after_empty"),
        (f"D<|im_user|>O{END}", STOP, True, 1, "after_control_token"),
    ],
)
def test_a_conversation_ends_where_no_client_would_go_on(
    renderer: Renderer, said: str, finish: str, keep: bool, rows: int, why: str
) -> None:
    limit = len(renderer.encode(said)) if finish == LENGTH else 64
    dialogue = Dialogue(
        read_questions({"turns": ["Spell door.", "Again.", "And again."]}, "messages"),
        asking(renderer, keep_cut=keep, max_tokens=limit),
    )
    go([dialogue], Asks(renderer, lambda text: said, finish))
    assert len(dialogue.rows) == rows
    found = Tally()
    found.add(dialogue)
    assert found.unasked == {why: 2}
    assert found.finish[finish] == 1
    assert (found.empty, found.dropped) == (why == "after_empty", finish == LENGTH and not keep)
    if rows:
        emitted = renderer.encode(said)
        assert list(dialogue.rows[0].token_ids[-len(emitted) :]) == emitted
        assert sum(dialogue.rows[0].loss_mask) == len(emitted)


def test_an_answer_has_the_room_that_its_row_has(renderer: Renderer) -> None:
    questions = read_questions({"turns": ["Spell door."]}, "messages")
    prompt = Dialogue(questions, asking(renderer)).prompt()
    assert prompt is not None
    assert prompt.limit == 64
    length = len(prompt.token_ids)
    short = Dialogue(questions, asking(renderer, max_length=length + 3)).prompt()
    assert short is not None
    assert short.limit == 3
    none = Dialogue(questions, asking(renderer, max_length=length))
    assert none.prompt() is None
    assert none.ended == "prompt_too_long"


@pytest.mark.parametrize("said", [[(0, Answer([1, 2], LENGTH))], []])
def test_an_engine_that_gives_up_is_no_endless_loop(renderer: Renderer, said: Any) -> None:
    dialogue = Dialogue(read_questions({"turns": ["Spell."]}, "messages"), asking(renderer))
    with pytest.raises(StageFailed, match=r"before its limit of 64|1 prompts came back"):
        go([dialogue], lambda prompts: iter(said))


# What is kept

PROMPT = Prompt((5, 6, 7), 4)


@pytest.mark.parametrize(
    ("known", "limit", "given"),
    [
        (([1, 2, 9], STOP), 4, ([1, 2, 9], STOP)),
        (([1, 2, 9], STOP), 3, ([1, 2, 9], STOP)),
        (([1, 2, 9], STOP), 2, ([1, 2], LENGTH)),
        (([1, 2, 3], LENGTH), 3, ([1, 2, 3], LENGTH)),
        (([1, 2, 3], LENGTH), 2, ([1, 2], LENGTH)),
        (([1, 2, 3], LENGTH), 4, None),
    ],
)
def test_an_answer_under_a_higher_limit_holds_those_under_lower_ones(
    known: tuple[list[int], str], limit: int, given: tuple[list[int], str] | None
) -> None:
    answers = Answers()
    answers.add(PROMPT.key, Answer(*known))
    found = answers.get(Prompt(PROMPT.token_ids, limit))
    assert (found and (found.token_ids, found.finish)) == given


def test_answers_come_back_as_they_were_written_and_damaged_files_are_passed_over(
    tmp_path: Path,
) -> None:
    names: list[str] = []
    writer = AnswerWriter(tmp_path, 2, names.append)
    prompts = [Prompt((n, n + 1), 8) for n in range(5)]
    said = [Answer([n] * (n + 1), STOP if n % 2 else LENGTH) for n in range(5)]
    for prompt, answer in zip(prompts, said, strict=True):
        writer.add(prompt.key, answer)
    assert len(names) == 2
    writer.flush()
    writer.flush()
    assert len(names) == 3
    for name in names:
        (tmp_path / name).rename(tmp_path / f"{digest_file(tmp_path / name)}.safetensors")
    answers = Answers()
    assert answers.load(tmp_path) == []
    assert answers.load(tmp_path / "nowhere") == []
    for prompt, answer in zip(prompts, said, strict=True):
        found = answers.get(Prompt(prompt.token_ids, len(answer.token_ids)))
        assert found is not None
        assert (found.token_ids.tolist(), found.finish) == (answer.token_ids, answer.finish)
    path = sorted(tmp_path.iterdir())[0]
    path.write_bytes(path.read_bytes()[:-1] + b"\x07")
    fresh = Answers()
    assert fresh.load(tmp_path) == [path]
    assert len(fresh) < 5


def test_with_known_answers_a_conversation_goes_as_far_as_they_lead(renderer: Renderer) -> None:
    questions = read_questions({"turns": ["Spell door.", "Again."]}, "messages")
    first = Dialogue(questions, asking(renderer))
    kept = go([first], Asks(renderer, lambda text: f"D O O R.{END}"))
    answers = Answers()
    answers.add(*kept[0])
    again = Dialogue(questions, asking(renderer))
    assert known_only([again], answers) == [again]
    assert again.turn == 1
    ask = Asks(renderer, lambda text: f"D O O R.{END}")
    assert len(go([again], ask, answers)) == 1
    assert again.rows == first.rows


def test_an_answers_seed_is_its_prompts_own() -> None:
    other = Prompt((5, 6, 8), 4)
    seeds = {seed_of(0, PROMPT), seed_of(0, other), seed_of(1, PROMPT)}
    assert len(seeds) == 3
    assert seed_of(0, PROMPT) == seed_of(0, Prompt(PROMPT.token_ids, 99))
    assert all(0 <= seed < 2**63 for seed in seeds)


# What is proven against a server


def test_rows_are_checked_against_a_server_that_is_there(
    first_run: tuple[Project, Answer_], tmp_path: Path
) -> None:
    project, answer = first_run
    (digest,) = answer.outputs["rows"].values()
    nobody = ("--endpoint", "http://127.0.0.1:9")
    refused = project.cli("check-rows", digest, *nobody, "--json")
    assert refused.code == 2
    assert "http://127.0.0.1:9 does not answer" in refused.json["error"]
    (head,) = answer.outputs["head"].values()
    assert "is no rows artifact" in project.cli("check-rows", head, *nobody).err
    assert project.cli("check-rows", digest).code == 2
    assert project.cli("check-rows", digest, *nobody, "--limit", "0").code == 2


def test_rows_are_checked_by_the_sources_they_were_made_of(
    first_run: tuple[Project, Answer_], tmp_path: Path
) -> None:
    project = first_run[0].copy(tmp_path / "copy")
    (digest,) = first_run[1].outputs["rows"].values()
    project.chats.write_text(project.chats.read_text("utf-8") + "\n", "utf-8")
    arguments = ("--endpoint", "http://127.0.0.1:9", "--sources", str(project.folder))
    refused = project.cli("check-rows", digest, *arguments)
    assert refused.code == 2
    assert "sources.0 (chats.jsonl) is not what the rows were made of" in refused.err


# The stage, where every answer is known


class Stage:
    """The stage as its worker runs it, over answers that are kept: no engine is started."""

    def __init__(self, folder: Path, renderer: Renderer, records: list[dict[str, Any]]):
        self.root, self._renderer, self._count = folder, renderer, 0
        self.source = folder / "asked.jsonl"
        self.source.write_text("".join(json.dumps(item) + "\n" for item in records), "utf-8")

    def run(self, rule: Callable[[str], tuple[str, str]], **fields: Any) -> Any:
        """(artifact's folder, metrics) after `rule` said what is answered to each prompt's text,
        and whether it ended."""
        self._count += 1
        folder = self.root / str(self._count)
        folder.mkdir()
        params = RegenerateParams.model_validate(
            {
                "kind": "regenerate",
                "sources": ({"path": "asked.jsonl"},),
                "thinking": "never",
                "max_length": 256,
                **fields,
            }
        )
        inputs = {
            "sources.0": (Given("", str(self.source)),),
            "verifier": (Given(f"verifier-{self._count}", ""),),
        }
        job = Job(
            "answers", "regenerate", {}, inputs, str(DEMO / "verifier"), str(folder),
            str(self.root), "",
        )  # fmt: skip
        context = Context(job, params, EventWriter(folder / "events"))
        self._keep(context, rule)
        metrics = regenerate_run.run(context)
        return context.out("rows"), metrics

    def _keep(self, context: Context, rule: Callable[[str], tuple[str, str]]) -> None:
        params = context.params
        how = asking(
            self._renderer, max_length=params.max_length, max_tokens=params.sampling.max_tokens
        )
        lines = self.source.read_text("utf-8").splitlines()
        dialogues = [Dialogue(read_questions(json.loads(line), "messages"), how) for line in lines]

        def ask(prompts: Sequence[Prompt]) -> Iterator[tuple[int, Answer]]:
            for position, prompt in enumerate(prompts):
                text, finish = rule(self._renderer.decode(prompt.token_ids))
                ids = self._renderer.encode(text)
                if finish == LENGTH:
                    ids = (ids * prompt.limit)[: prompt.limit]
                yield position, Answer(ids, finish)

        kept = answers_folder(self.root, regenerate_run._set(context))
        writer = AnswerWriter(kept, 2, lambda name: None)
        ask_all(dialogues, Answers(), ask, writer, 9, lambda done, total: None)
        writer.flush()
        for path in kept.iterdir():
            path.rename(kept / f"{digest_file(path)}.safetensors")


RECORDS: list[dict[str, Any]] = [
    {"turns": ["Spell door.", "Again."]},
    {"prompt": "Is it so long?"},
    {"prompt": "Say nothing."},
    {"messages": [user("Hello."), assistant("recorded"), user("Bye.")]},
    {"prompt": "Is it so long?"},
]


def rule(text: str) -> tuple[str, str]:
    last = text.rpartition("<|im_user|>")[2]
    if "so long" in last:
        return " and", LENGTH
    return (END if "nothing" in last else f"It is so.{END}"), STOP


def test_the_stage_makes_rows_of_answers_and_counts_them(
    tmp_path: Path, renderer: Renderer
) -> None:
    stage = Stage(tmp_path, renderer, RECORDS)
    folder, metrics = stage.run(rule, val_ratio=0.4)
    rows = load_rows(folder)
    assert metrics["answers_generated"] == 0
    assert metrics["answers_kept_before"] == metrics["answers"] == 6
    assert metrics["finish_reasons"] == {"length": 1, "stop": 5}
    assert metrics["empty"] == 1
    assert metrics["rejects"] == {"duplicate": 1}
    assert (metrics["rows"], metrics["conversations"]) == (3, 3)
    assert (metrics["rows_train"], metrics["rows_val"]) == (1, 2)
    assert rows.record.tolist() == [1, 2, 4]
    assert metrics["supervised_tokens"] == int(rows.loss_mask.sum())
    assert len(rows.ids(1)) == 256  # as long as a row may be
    lines = (folder / "answers.ndjson").read_text("utf-8").splitlines()
    listed = [json.loads(line) for line in lines]
    assert [(item["record"], item["turn"]) for item in listed] == [
        (1, 0), (1, 1), (2, 0), (3, 0), (4, 0), (4, 1),
    ]  # fmt: skip
    assert [item["finish"] for item in listed].count("length") == 1
    assert [item["kept"] for item in listed] == [True, True, True, False, True, True]


def test_what_a_limit_cut_off_can_be_left_out(tmp_path: Path, renderer: Renderer) -> None:
    stage = Stage(tmp_path, renderer, RECORDS)
    folder, metrics = stage.run(rule, on_length="drop", sampling={"max_tokens": 20})
    assert load_rows(folder).record.tolist() == [1, 4]
    assert metrics["dropped_length"] == 1
    assert metrics["finish_reasons"] == {"length": 1, "stop": 5}


def test_the_artifact_is_the_same_each_time(tmp_path: Path, renderer: Renderer) -> None:
    stage = Stage(tmp_path, renderer, RECORDS)
    (one, _), (two, _) = stage.run(rule), stage.run(rule)
    names = sorted(path.name for path in one.iterdir())
    assert names == ["answers.ndjson", "report.json", "rows.safetensors"]
    assert all((one / name).read_bytes() == (two / name).read_bytes() for name in names)


def test_no_row_at_all_is_a_failure_that_says_why(tmp_path: Path, renderer: Renderer) -> None:
    with pytest.raises(
        StageFailed, match="no row is left of 4 conversations: 4 answers were empty"
    ):
        Stage(tmp_path, renderer, RECORDS).run(lambda text: (END, STOP))
    empty = Stage(tmp_path, renderer, [{"messages": [{"role": "system", "content": "s"}]}])
    with pytest.raises(StageFailed, match="nothing is asked, 1 records were left out"):
        regenerate_run.run(
            Context(
                Job(
                    "a", "regenerate", {}, {"sources.0": (Given("", str(empty.source)),)},
                    str(DEMO / "verifier"), str(tmp_path), str(tmp_path), "",
                ),
                RegenerateParams.model_validate(
                    {"kind": "regenerate", "sources": ({"path": "asked.jsonl"},)}
                ),
                EventWriter(tmp_path / "events"),
            )
        )  # fmt: skip


# What it is


def identity(**fields: Any) -> dict[str, Any]:
    facts = read_facts(json.loads((DEMO / "verifier" / "config.json").read_text("utf-8")))
    source = ({"path": "asked.jsonl"},)
    params = RegenerateParams.model_validate({"kind": "regenerate", "sources": source, **fields})
    return Regenerate.identity(params, facts)


@pytest.mark.parametrize(
    "fields",
    [
        {"sampling": {"temperature": 0.7}},
        {"sampling": {"top_p": 0.9}},
        {"sampling": {"top_k": 5}},
        {"sampling": {"seed": 1}},
        {"sampling": {"max_tokens": 5}},
        {"thinking": "never"},
        {"on_length": "drop"},
        {"max_length": 99},
    ],
)
def test_what_decides_the_answers_is_part_of_the_key(fields: dict[str, Any]) -> None:
    assert identity(**fields) != identity()


def test_where_and_how_many_at_once_is_not() -> None:
    placed = {"chunk": 7, "shards": 4, "engines_per_gpu": 2, "save_every": 1}
    assert identity(**placed) == identity()
    assert identity(engine={"kind": "vllm", "tensor_parallel": 8}) == identity()
    served = {"kind": "vllm", "endpoint": "https://host/v1", "model": "m", "concurrency": 1}
    assert identity(engine=served) == identity()


def test_a_manifest_takes_rows_from_either_kind(project: Project) -> None:
    text = project.manifest.read_text("utf-8")
    asked = "  answers: {kind: regenerate, sources: [{path: chats.jsonl}]}\n"
    project.write(text.replace("rows: rows", "rows: answers") + asked)
    planned = project.plan()
    assert planned["vocab"]["action"] == "depends"
    assert planned["vocab"]["reasons"] == ["depends on answers"]
    project.write(project.manifest.read_text("utf-8").replace("rows: answers", "rows: head"))
    answer = project.cli("validate", str(project.manifest))
    assert answer.code == 2
    assert "prepare or regenerate or import_rows; 'head' is of kind head" in answer.err


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "ftp://host", "http://me:secret@host", "http://"]
)
def test_a_servers_address_is_one_and_holds_no_secret(url: str) -> None:
    with pytest.raises(ValidationError):
        identity(engine={"endpoint": url})


def test_a_server_of_another_kind_is_not_taken_for_one(
    first_run: tuple[Project, Answer_], tmp_path: Path
) -> None:
    project, answer = first_run
    (digest,) = answer.outputs["rows"].values()
    serves = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), serves) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        missing = project.cli("check-rows", digest, "--endpoint", address)
        (tmp_path / "v1").mkdir()
        (tmp_path / "v1" / "models").write_text("[]", "utf-8")
        other = project.cli("check-rows", digest, "--endpoint", address)
        server.shutdown()
    assert (missing.code, other.code) == (2, 2)
    assert f"{address}/v1/models: 404" in missing.err
    assert "not what a vLLM server answers" in other.err
    assert "Traceback" not in missing.err + other.err


def test_engines_at_once_share_no_prompt(renderer: Renderer) -> None:
    dialogues = [
        Dialogue(read_questions({"turns": [f"Spell {n % 7}.", f"{n}?"]}, "messages"), how)
        for how in [asking(renderer)]
        for n in range(28)
    ]
    shares = regenerate_run._dealt(dialogues, 3)
    assert sum(map(len, shares)) == 28
    assert 1 < len(shares) <= 3
    prompts = [{dialogue.prompt() for dialogue in share} for share in shares]
    assert sum(map(len, prompts)) == len(set().union(*prompts)) == 7
    assert regenerate_run._dealt(dialogues, 1) == [dialogues]


def test_engines_have_gpus_of_their_own_or_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def devices(shards: int, per_gpu: int, tensor_parallel: int = 1) -> list[str]:
        engine = AnswerEngine(tensor_parallel=tensor_parallel)
        environments = regenerate_run._environments(shards, engine, per_gpu, cpu=False)
        return [environment["CUDA_VISIBLE_DEVICES"] for environment in environments]

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,6,7")
    assert devices(4, 1) == ["3", "5", "6", "7"]
    assert devices(5, 3) == ["3", "3", "3", "5", "5"]
    assert devices(4, 2, tensor_parallel=2) == ["3,5", "3,5", "6,7", "6,7"]
    with pytest.raises(StageFailed, match=r"6 shards of 1 GPUs, 1 on the same, need 6; .* names 4"):
        devices(6, 1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert devices(4, 2) == ["0", "0", "1", "1"]


def test_prompts_of_rows_are_found_in_their_source_and_parted_from_others(
    first_run: tuple[Project, Answer_], renderer: Renderer, tmp_path: Path
) -> None:
    from kimi_eagle.engines.serving_rows import _difference, _Found

    project, answer = first_run
    tokenizer = load_tokenizer(DEMO / "verifier")
    rows = load_rows(project.object_of(answer, "rows"))
    params = {"thinking": "auto", "sources": [{"format": "messages"}]}
    job = {"kind": "prepare", "params": params, "sources": [[str(project.chats)]]}
    found = _Found(rows, renderer, job, len(rows))
    asked = list(found.prompts())
    assert found.missing() == []
    assert {item.row for item in asked} == set(range(len(rows)))
    for item in asked:
        ids = list(item.token_ids)
        assert ids == rows.ids(item.row)[: len(ids)].tolist()
        assert rows.mask(item.row)[len(ids)] == 1
        sent = renderer.prompt_ids(item.messages, item.tools, thinking=item.thinking)
        assert sent == ids
        assert _difference(item, ids, tokenizer) is None
    ids = list(asked[0].token_ids)
    other = _difference(asked[0], [*ids[:3], 7, *ids[4:]], tokenizer)
    assert other is not None
    assert (other["position"], other["ours"]["id"], other["server"]["id"]) == (3, ids[3], 7)
    short = _difference(asked[0], ids[:-1], tokenizer)
    assert short is not None
    assert (short["position"], short["server"]) == (len(ids) - 1, None)
    rows.token_ids[1] += 1  # another template made the first row
    again = _Found(rows, renderer, job, len(rows))
    list(again.prompts())
    assert [item["row"] for item in again.missing()] == [0]


def test_prompts_of_regenerated_rows_are_found_after_their_answers(
    renderer: Renderer, tmp_path: Path
) -> None:
    from kimi_eagle.engines.serving_rows import _Found

    stage = Stage(tmp_path, renderer, RECORDS)
    folder, _ = stage.run(rule)
    rows = load_rows(folder)
    params = {"thinking": "never", "sources": [{"format": "messages"}]}
    job = {"kind": "regenerate", "params": params, "sources": [[str(stage.source)]]}
    found = _Found(rows, renderer, job, len(rows))
    asked = list(found.prompts())
    assert found.missing() == []
    assert [len(item.messages) for item in asked if item.row == 0] == [1, 3]
    assert len(asked) == 5
