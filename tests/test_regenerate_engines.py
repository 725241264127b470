"""The verifier's own answers from vLLM, in a process of its own and from a server, and rows proven
against that server: slow, run by `make test`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import DEMO, Answer, Project, kill, new_project, wait_for, workers
from servers import demo_options, vllm

from kimi_eagle.rows.answers import STOP, Answers, Prompt
from kimi_eagle.rows.table import Rows, load_rows

pytestmark = pytest.mark.slow

END = 969  # <|im_end|>

MANIFEST = """\
version: 1
name: answers
verifier: {{path: verifier}}
stages:
  answers:
    kind: regenerate
    sources: [{{path: asked.jsonl}}]
    sampling: {sampling}
    max_length: 256
    val_ratio: 0.2
    save_every: 2
    chunk: {chunk}
    engine: {engine}
"""
IN_PROCESS = """\
  vocab: {kind: vocab, rows: answers, size: 256}
  states: {kind: extract, rows: answers, layers: [2, 4, 5], engine: {kind: transformers}}
"""


def manifest(
    engine: str = "{kind: vllm}", sampling: str = "{max_tokens: 64}", chunk: int = 4096
) -> str:
    return MANIFEST.format(engine=engine, sampling=sampling, chunk=chunk)


def asked_project(folder: Path, text: str) -> Project:
    """Single turns as in a file of prompts, and two turns as in MT-Bench."""
    project = new_project(folder, text)
    prompts = [json.loads(line) for line in (DEMO / "prompts.jsonl").read_text().splitlines()]
    texts = [prompt["messages"][0]["content"] for prompt in prompts[:8]]
    records = [{"prompt": item} for item in texts[:5]]
    records += [{"turns": [item, "Is 17 or 65 the larger number?"]} for item in texts[5:8]]
    lines = [json.dumps(record) for record in records]
    (folder / "asked.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    return project


def metrics(answer: Answer, stage: str) -> dict[str, Any]:
    (found,) = (item["metrics"] for item in answer.json["stages"] if item["name"] == stage)
    return dict(found)


def stored(root: Path) -> Answers:
    """All answers of the one set under a root."""
    (folder,) = (root / "answers").iterdir()
    answers = Answers()
    assert answers.load(folder) == []
    return answers


def emitted(rows: Rows, row: int) -> list[list[int]]:
    """The parts of a row that are learnt, each with what comes before it."""
    parts: list[list[int]] = []
    before = 0
    for token, mask in zip(rows.ids(row).tolist(), rows.mask(row).tolist(), strict=True):
        if mask and not before:
            parts.append([])
        if mask:
            parts[-1].append(token)
        before = mask
    return parts


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, Answer]:
    """Answers from vLLM in a process of its own, and what takes their rows."""
    project = asked_project(tmp_path_factory.mktemp("own") / "p", manifest() + IN_PROCESS)
    answer = project.submit()
    assert answer.code == 0, answer.err
    return project, answer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a vLLM server of the demo verifier."""
    log = tmp_path_factory.mktemp("server") / "log"
    with vllm(log, "serve", str(DEMO / "verifier"), *demo_options()) as address:
        yield address


def test_rows_hold_the_ids_that_the_engine_emitted(own: tuple[Project, Answer]) -> None:
    project, answer = own
    rows = load_rows(project.object_of(answer, "answers"))
    found = metrics(answer, "answers")
    answers = stored(project.root)
    assert found["answers"] == found["answers_generated"] == len(answers)
    assert sum(found["finish_reasons"].values()) == found["answers"]
    assert found["finish_reasons"]["stop"] > 0
    learnt = 0
    for row in range(len(rows)):
        start = int(rows.mask(row).argmax())
        parts = emitted(rows, row)
        said = answers.get(Prompt(tuple(rows.ids(row)[:start].tolist()), 64))
        assert said is not None
        assert parts[0] == said.token_ids.tolist()
        assert (parts[0][-1] == END) == (said.finish == STOP)
        learnt += sum(map(len, parts))
    assert learnt == found["supervised_tokens"] == int(rows.loss_mask.sum())
    assert found["rows_val"] > 0
    assert int(rows.record.max()) == 8


def test_what_takes_rows_takes_these(own: tuple[Project, Answer]) -> None:
    """The reference engine, which computes the states, agrees that they are the verifier's."""
    _, answer = own
    assert answer.code == 0
    assert metrics(answer, "vocab")["coverage"] > 0.99
    assert metrics(answer, "states")["agreement"] >= 0.97


def test_the_verifier_would_say_it_again(own: tuple[Project, Answer]) -> None:
    """Greedy: each token is the likeliest after those before it, near ties in bf16 apart."""
    import torch
    from transformers import AutoModelForImageTextToText

    project, answer = own
    rows = load_rows(project.object_of(answer, "answers"))
    model = AutoModelForImageTextToText.from_pretrained(DEMO / "verifier", dtype=torch.bfloat16)
    same = total = 0
    for row in range(len(rows)):
        ids = torch.from_numpy(rows.ids(row).astype("int64"))
        with torch.no_grad():
            likeliest = model(input_ids=ids[None]).logits[0].argmax(-1)
        learnt = torch.from_numpy(rows.mask(row)).bool()[1:]
        same += int((likeliest[:-1] == ids[1:])[learnt].sum())
        total += int(learnt.sum())
    assert same / total >= 0.95, f"{same} of {total}"


def test_other_rows_of_the_same_answers_ask_nobody(
    own: tuple[Project, Answer], tmp_path: Path
) -> None:
    """Another split, a lower limit: all of it is known."""
    project = own[0].copy(tmp_path / "p")
    project.write(manifest(sampling="{max_tokens: 8}").replace("0.2", "0.4"))
    answer = project.submit()
    assert answer.code == 0, answer.err
    found = metrics(answer, "answers")
    assert found["answers_generated"] == 0
    assert found["finish_reasons"]["length"] > 0
    rows = load_rows(project.object_of(answer, "answers"))
    assert max(len(part) for row in range(len(rows)) for part in emitted(rows, row)) == 8


def test_a_run_that_is_killed_keeps_what_was_answered(server: str, tmp_path: Path) -> None:
    engine = f"{{kind: vllm, endpoint: '{server}', concurrency: 1}}"
    project = asked_project(tmp_path / "p", manifest(engine, chunk=2))
    first = project.start_submit()
    kept = wait_for(lambda: list(project.root.glob("answers/*/*.safetensors")), "answers", 120)
    kill(first.pid)
    first.communicate()
    wait_for(lambda: not workers(project.root), "the worker's end")
    before = len(stored(project.root))
    assert before >= 2 * len(kept) > 0
    answer = project.submit()
    assert answer.code == 0, answer.err
    found = metrics(answer, "answers")
    assert found["answers_kept_before"] == before
    assert found["answers_generated"] == found["answers"] - before
    assert project.submit().dispositions == {"answers": "reused"}


def test_a_server_and_an_engine_of_our_own_say_the_same(
    server: str, own: tuple[Project, Answer], tmp_path: Path
) -> None:
    """As far as batches of other shapes do in bf16; the server is asked by two workers."""
    engine = f"{{kind: vllm, endpoint: '{server}'}}"
    project = asked_project(tmp_path / "p", manifest(engine))
    answer = project.submit("--set", "stages.answers.resources.workers=2")
    assert answer.code == 0, answer.err
    found = metrics(answer, "answers")
    assert found["answers_generated"] == found["answers"] == found["answers_kept_before"]
    logs = sorted(path.name for path in project.root.glob("*/stages/*.log"))
    assert logs == ["answers.1-of-2.log", "answers.2-of-2.log", "answers.log"]
    ours = load_rows(own[0].object_of(own[1], "answers"))
    theirs = load_rows(project.object_of(answer, "answers"))
    mine = {(int(ours.record[row]), bytes(ours.id_bytes(row))) for row in range(len(ours))}
    same = sum((int(theirs.record[r]), theirs.id_bytes(r)) in mine for r in range(len(theirs)))
    assert same >= 0.7 * len(ours), f"{same} of {len(ours)}"


def test_drawn_answers_come_again_with_their_seed(server: str) -> None:
    from kimi_eagle.engines.endpoint import Endpoint

    endpoint = Endpoint(server)
    prompts = [Prompt((5, 6, 7, 8, 9, number), 16) for number in range(10, 14)]

    def drawn(seed: int) -> dict[int, list[int]]:
        sampling = {"temperature": 1.0, "top_p": 0.95, "top_k": 0, "seed": seed}
        return {at: list(said.token_ids) for at, said in endpoint.ask(prompts, sampling, 4)}

    first = drawn(1)
    assert drawn(1) == first
    assert drawn(2) != first


def test_a_server_renders_rows_to_the_same_tokens(
    server: str, own: tuple[Project, Answer], first_run: tuple[Project, Answer]
) -> None:
    for (project, answer), stage in ((own, "answers"), (first_run, "rows")):
        (digest,) = answer.outputs[stage].values()
        checked = project.cli("check-rows", digest[:12], "--endpoint", server, "--json")
        assert checked.code == 0, checked.err
        assert checked.json["status"] == "equal"
        assert checked.json["rows"] == len(load_rows(project.object_of(answer, stage)))
        assert checked.json["prompts"] >= checked.json["rows"]
        text = project.cli("check-rows", digest, "--endpoint", server, "--limit", "2")
        assert text.code == 0
        assert "2 rows" in text.err


def test_rows_of_another_template_are_found_out(server: str, tmp_path: Path) -> None:
    project = new_project(tmp_path / "p")
    template = project.folder / "verifier" / "chat_template.jinja"
    name, other = "(message.get('name') or role)", "('someone' if role == 'user' else role)"
    changed = template.read_text("utf-8").replace(name, other)
    assert other in changed
    template.unlink()
    template.write_text(changed, "utf-8")
    answer = project.submit()
    assert answer.code == 0, answer.err
    (digest,) = answer.outputs["rows"].values()
    checked = project.cli("check-rows", digest, "--endpoint", server, "--json")
    assert checked.code == 1
    found = checked.json
    assert found["status"] == "differs"
    assert found["mismatched"] == found["prompts"] > 0
    first = found["mismatches"][0]
    assert (first["row"], first["position"]) == (0, 1)
    assert first["ours"]["id"] != first["server"]["id"]
    assert project.cli("check-rows", digest, "--endpoint", server).code == 1
    shutil.rmtree(project.root)
