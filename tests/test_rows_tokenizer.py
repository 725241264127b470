"""Tokenizers through a verifier's folder: each form gives what its own library gives."""

from __future__ import annotations

import base64
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cases import demo_verifier, material

from kimi_eagle.rows.conversations import read_conversation
from kimi_eagle.rows.render import Renderer, cut
from kimi_eagle.rows.tiktoken_form import PATTERN, fast_form, pieces, read_ranks
from kimi_eagle.rows.tokenizer import load_tokenizer, token_count
from kimi_eagle.verifiers.facts import VerifierError
from kimi_eagle.verifiers.folder import open_folder

TEMPLATE = (
    "{% for m in messages %}<|im_user|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_user|>{% endif %}"
)
KIMI = {
    "tokenizer_class": "TikTokenTokenizer",
    "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
    "eos_token": "[EOS]",
    "added_tokens_decoder": {},
}


def _ranks(*longer: str) -> dict[bytes, int]:
    tokens = [bytes([byte]) for byte in range(256)] + [token.encode() for token in longer]
    return {token: rank for rank, token in enumerate(tokens)}


def _write(folder: Path, ranks: dict[bytes, int], named: dict[int, tuple[str, bool]]) -> None:
    """A folder as Kimi's is published: no tokenizer.json."""
    folder.mkdir(exist_ok=True)
    lines = [b"%s %d" % (base64.b64encode(token), rank) for token, rank in ranks.items()]
    (folder / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    added = {
        str(number): {"content": text, "special": special}
        for number, (text, special) in named.items()
    }
    config = {**KIMI, "added_tokens_decoder": added}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, "utf-8")


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A vocabulary of bytes and a few words."""
    ranks = _ranks(
        "he", "ll", "hell", "llo", " w", "'m", "I'", "世", "界", "世界", "  ", "ab", "ba", "aba"
    )
    n = len(ranks)
    named = {n: ("[EOS]", True), n + 1: ("<|im_end|>", True), n + 2: ("<|im_user|>", True)}
    _write(tmp_path / "kimi", ranks, {**named, n + 3: ("<think>", False)})
    return tmp_path / "kimi"


def _tiktoken(folder: Path) -> Any:
    tiktoken = pytest.importorskip("tiktoken", reason="tiktoken is not installed")
    ranks = read_ranks(folder / "tiktoken.model")
    return tiktoken.Encoding("kimi", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})


def test_tiktoken_model_alone_is_read_as_tiktoken_reads_it(small: Path) -> None:
    form, own = fast_form(small), _tiktoken(small)
    choose = random.Random(0)
    for text in [
        "hello w'm I'm 世界世",
        "I'M\n\n  x",
        "abababa ababab",
        "\u0130ß é",
        *_texts(choose, 300),
    ]:
        assert form.encode(text, add_special_tokens=False).ids == own.encode_ordinary(text)


def test_the_ids_after_the_ranks_are_named_or_reserved(small: Path) -> None:
    tokenizer = load_tokenizer(small)
    base = 256 + 14
    assert tokenizer.encode("<|im_end|>", add_special_tokens=False) == [base + 1]
    assert tokenizer.get_added_vocab()[f"<|reserved_token_{base + 9}|>"] == base + 9
    assert tokenizer.eos_token_id == base
    assert token_count(small) == base + 256


def test_a_published_folder_makes_rows(small: Path) -> None:
    turns = [
        {"role": "user", "content": "hello <|im_end|>"},
        {"role": "assistant", "content": "I'm"},
    ]
    (row,) = Renderer(load_tokenizer(small)).rows(
        read_conversation({"messages": turns}, "messages")
    )
    end, user = 256 + 14 + 1, 256 + 14 + 2
    own = _tiktoken(small).encode_ordinary
    prompt = [user, *own("hello <|im_end|>"), end, user]
    assert list(row.token_ids) == [*prompt, *own("I'm"), end]
    assert row.loss_mask == (0,) * len(prompt) + (1,) * (len(own("I'm")) + 1)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda folder: (folder / "tokenizer_config.json").unlink(), "TikTokenTokenizer"),
        (lambda folder: (folder / "tokenizer_config.json").write_text("{}"), "TikTokenTokenizer"),
        (lambda folder: (folder / "tokenizer_config.json").write_text("[]"), "TikTokenTokenizer"),
        (lambda folder: (folder / "tiktoken.model").write_bytes(b"IQ== 0\n"), "for the byte 0x00"),
        (lambda folder: (folder / "tiktoken.model").write_bytes(b"IQ== 1\n"), "not 0, 1, 2"),
        (lambda folder: (folder / "tiktoken.model").write_bytes(b"IQ==\n"), "cannot be read"),
        (lambda folder: (folder / "tiktoken.model").write_bytes(b"!!! 0\n"), "cannot be read"),
    ],
    ids=["no config", "another class", "no object", "a byte short", "ranks", "no rank", "base64"],
)
def test_ranks_that_are_not_kimis_are_refused(small: Path, change: Any, says: str) -> None:
    change(small)
    with pytest.raises(VerifierError, match=says):
        load_tokenizer(small)


def test_long_runs_are_cut_where_kimis_own_tokenizer_cuts_them() -> None:
    assert list(pieces("x" * 25_000)) == ["x" * 25_000]
    assert list(pieces("x" * 25_001 + " y")) == ["x" * 25_000, "x y"]
    assert list(pieces("a b" + "\n" * 50_001)) == [
        "a b" + "\n" * 25_000,
        "\n" * 25_000,
        "\n",
    ]
    words = "word " * 100_000
    assert list(pieces(words)) == [words[:400_000], words[400_000:]]
    assert list(pieces("")) == []


def test_long_answers_are_encoded_in_pieces_and_only_as_far_as_a_row_goes(small: Path) -> None:
    tokenizer, own = load_tokenizer(small), _tiktoken(small).encode_ordinary

    def row(answer: str, limit: int | None) -> Any:
        turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": answer}]
        conversation = read_conversation({"messages": turns}, "messages")
        (found,) = Renderer(tokenizer, limit=limit).rows(conversation)
        return found

    answer = "hello" * 8_000  # cut after 25,000 characters, where nothing else would cut it
    whole = row(answer, None)
    pieces_of_it = [*own(answer[:25_000]), *own(answer[25_000:])]
    assert list(whole.token_ids[4:-1]) == pieces_of_it
    assert cut(row(answer * 40, 100), 100) == cut(row(answer * 40, None), 100)
    assert len(row(answer * 40, 100).token_ids) < len(pieces_of_it)


def test_additional_templates_are_part_of_the_tokenizer_and_render_tools(small: Path) -> None:
    """PRE-33: `tool_use` renders what has tools; a byte of it makes other rows."""
    (small / "config.json").write_text(
        (demo_verifier() / "config.json").read_text("utf-8"), "utf-8"
    )
    before = open_folder(small)
    more = small / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("TOOLS" + TEMPLATE, "utf-8")
    (more / "notes.txt").write_text("x", "utf-8")
    after = open_folder(small)
    added = "additional_chat_templates/tool_use.jinja"
    for part in ("tokenizer", "whole"):
        assert set(after.part(part)) - set(before.part(part)) == {added}
    renderer = Renderer(load_tokenizer(small))
    asked = [{"role": "user", "content": "q"}]
    assert renderer.prompt(asked, [{"type": "function", "function": {"name": "f"}}])[:5] == "TOOLS"
    assert renderer.prompt(asked)[:5] != "TOOLS"


def test_templates_in_the_config_are_read_where_there_is_no_file(small: Path) -> None:
    (small / "chat_template.jinja").unlink()
    path = small / "tokenizer_config.json"
    config = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps({**config, "chat_template": TEMPLATE}), "utf-8")
    assert load_tokenizer(small).chat_template == TEMPLATE
    named = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "x"}]
    path.write_text(json.dumps({**config, "chat_template": named}), "utf-8")
    assert load_tokenizer(small).chat_template == {"default": TEMPLATE, "tool_use": "x"}


@pytest.mark.slow  # transformers loads torch on the way to it
def test_sentencepiece_makes_rows_of_its_own_pieces(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    text = tmp_path / "text.txt"
    text.write_text("hello world\nhow are you\nI am well\nthe world is well\n" * 20, "utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=320,
        model_type="bpe",
        byte_fallback=True,
        user_defined_symbols=["<|im_start|>", "<|im_end|>"],
        minloglevel=2,
    )
    shutil.copyfile(demo_verifier() / "config.json", tmp_path / "config.json")
    config = {"tokenizer_class": "LlamaTokenizer", "legacy": False, "add_bos_token": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>{% endif %}",
        "utf-8",
    )
    own = sentencepiece.SentencePieceProcessor(str(tmp_path / "tokenizer.model"))
    renderer = Renderer(load_tokenizer(tmp_path))
    turns = [
        {"role": "user", "content": "how are you 世 world"},
        {"role": "assistant", "content": "I am well"},
    ]
    (row,) = renderer.rows(read_conversation({"messages": turns}, "messages"))
    assert own.decode(list(row.token_ids)) == own.decode(
        own.encode("<|im_start|>how are you 世 world<|im_end|><|im_start|>I am well<|im_end|>")
    )
    assert row.token_ids[-1] == own.piece_to_id("<|im_end|>")
    assert token_count(tmp_path) >= own.get_piece_size()


def _texts(choose: random.Random, count: int) -> Iterator[str]:
    """Text of many scripts, spaces and endings, in short stretches."""
    pools = [
        range(0x20, 0x7F),
        range(0x4E00, 0x9FFF),
        range(0xA0, 0x250),
        range(0x300, 0x370),
        range(0x400, 0x530),
        range(0x5D0, 0x700),
        range(0x900, 0xA00),
        range(0x2000, 0x2070),
        range(0x3000, 0x3100),
        range(0xAC00, 0xD7A0),
        range(0x1F300, 0x1F700),
        [*range(9, 14), *range(28, 33), 0x85, 0xA0, 0x1680, 0x2028, 0x202F, 0x3000, 0x200B],
        list(map(ord, "'sStTrReEvVmMlLdDſK")),
    ]
    for _ in range(count):
        stretches = [choose.choice(pools) for _ in range(choose.randint(1, 12))]
        yield "".join(
            chr(choose.choice(pool)) for pool in stretches for _ in range(choose.randint(1, 6))
        )


def _kimi(folder: Path) -> None:
    """The real vocabulary, from the material or from the package that carries it."""
    try:
        real = material("kimi-k2.5")
    except pytest.skip.Exception:
        splintr = pytest.importorskip("splintr", reason="neither the material nor splintr-rs here")
        kimi = splintr.Tokenizer.from_pretrained("kimi_k2")
        ranks = {bytes(kimi.decode_token_bytes(rank)): rank for rank in range(163_584)}
        _write(folder, ranks, {163_586: ("<|im_end|>", True), 163_587: ("<|im_user|>", True)})
    else:
        folder.mkdir()
        for name in ("tiktoken.model", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copyfile(real / name, folder / name)


@pytest.mark.slow
def test_a_million_tokens_of_kimis_vocabulary_are_tiktokens(tmp_path: Path) -> None:
    """Of the project's own text, of every character there is, and of scripts thrown together."""
    _kimi(tmp_path / "kimi")
    form, own = fast_form(tmp_path / "kimi"), _tiktoken(tmp_path / "kimi")
    root = Path(__file__).parent.parent
    tokens = 0

    def compare(text: str) -> None:
        nonlocal tokens
        expected = own.encode_ordinary(text)
        tokens += len(expected)
        assert form.encode(text, add_special_tokens=False).ids == expected, text

    added = tuple(form.get_added_tokens_decoder().values())
    for path in [*root.glob("kimi_eagle/**/*.py"), *root.glob("kimi_eagle/demo/*.jsonl")]:
        for line in path.read_text("utf-8").splitlines(keepends=True):
            if not any(token.content in line for token in added):
                compare(line)
    for first in range(0, 0x110000, 8):
        characters = [chr(c) for c in range(first, first + 8) if not 0xD800 <= c < 0xE000]
        if characters:
            compare("".join(f"ab{c}cd 'S {c}\n" for c in characters[:2]) + "".join(characters))
    for text in _texts(random.Random(1), 8_000):
        compare(text)
    assert tokens > 1_000_000
