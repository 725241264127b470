"""The documentation: what is made from the code is as the code says, and shown commands work.

A comment before a block says how it is tested: `<!-- test: quick -->` runs at once, `demo` on what
the demo made, `manifest` validates, `parse` (what needs GPUs or Kimi's weights) is read by the
command line's parser, `make` and a test's file are run elsewhere.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from cases import ROOT
from conftest import Project

from kimi_eagle.cli import COMMANDS, build_parser

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
_BLOCK = re.compile(
    r"(?:^<!-- test: (?P<test>\S+) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```", re.M | re.S
)


@dataclass(frozen=True)
class Block:
    page: str
    test: str | None
    language: str
    text: str

    @property
    def commands(self) -> list[list[str]]:
        """Its lines as words, continued ones joined."""
        joined = self.text.replace("\\\n", " ")
        return [shlex.split(line, comments=True) for line in joined.splitlines() if line.strip()]


def blocks(*tests: str) -> list[Block]:
    found = [
        Block(str(page.relative_to(ROOT)), item["test"], item["language"], item["text"])
        for page in PAGES
        for item in _BLOCK.finditer(page.read_text("utf-8"))
    ]
    return [block for block in found if not tests or block.test in tests]


# Made from the code


@cache
def made() -> dict[str, str]:
    sys.path.insert(0, str(DOCS))
    try:
        import generate
    finally:
        sys.path.remove(str(DOCS))
    return dict(generate.pages())


def test_what_is_made_from_the_code_is_as_the_code_says() -> None:
    for path, text in made().items():
        written = (DOCS / path).read_text("utf-8")
        assert written == text, f"docs/{path} is not what docs/generate.py makes: `make schema`"
    schemas = {str(path.relative_to(DOCS)) for path in DOCS.glob("schemas/*")}
    assert schemas == {path for path in made() if path.startswith("schemas/")}


def test_the_references_name_every_command_and_every_key() -> None:
    from kimi_eagle.stages.catalog import KINDS

    cli, manifest = made()["reference/cli.md"], made()["reference/manifest.md"]
    for name in COMMANDS:
        assert re.search(rf"^## {name}\b", cli, re.M)
    for kind in KINDS.values():
        assert f"\n## {kind.name}\n" in manifest
        for key in kind.params.model_fields:
            assert f"| `{key}` |" in manifest


def test_the_page_on_python_names_every_method_with_its_parameters() -> None:
    import inspect

    from kimi_eagle.api import Root

    page = (DOCS / "reference" / "python.md").read_text("utf-8")
    for name, method in inspect.getmembers(Root, inspect.isfunction):
        if not name.startswith("_"):
            (row,) = re.findall(rf"^\| `{name}\((.*?)\)` \|", page, re.M)
            shown = re.findall(r"(\w+)(?:=[^,)]+)?(?:, |$)", row)
            assert shown == list(inspect.signature(method).parameters)[1:], name


def test_the_site_builds_strictly(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "tutorial.html").read_text("utf-8")
    assert "<h1" in page
    # Read on a node without a network, too.
    assert not re.findall(
        r"""(?:src|href)=["']?https?://(?!squidfunk|127\.)[^"' >]*\.(?:js|css)""", page
    )
    assert (tmp_path / "schemas" / "plan.json").is_file()


# Commands


def test_every_block_of_commands_says_how_it_is_tested() -> None:
    known = {"quick", "demo", "parse", "make"}
    for block in blocks():
        if block.language in ("sh", "python") and block.page.startswith("docs/"):
            assert block.test in known or (ROOT / str(block.test)).is_file(), block
    assert {block.test for block in blocks()} >= {*known, "manifest"}


def words_of(parser: argparse.ArgumentParser, words: list[str]) -> None:
    """Read a command line as it stands. Raises: AssertionError."""
    try:
        parser.parse_args(words)
    except SystemExit as exit_:
        raise AssertionError(f"kimi-eagle {shlex.join(words)} is not read") from exit_


def test_every_command_that_is_shown_is_read_as_it_stands() -> None:
    parser = build_parser()
    seen = 0
    for block in blocks():
        for line in block.text.replace("\\\n", " ").splitlines():
            shown = re.match(r"(?:\$ )?(?:\.venv/bin/)?kimi-eagle (.*)", line)
            # A summary of what there is, with choices in brackets, is no command.
            if shown and not {"[", "…", "|"} & set(line) and "COMMAND" not in line:
                words = shlex.split(shown[1], comments=True)
                words_of(parser, words[: words.index(">")] if ">" in words else words)
                seen += 1
    assert seen > 30


def test_commands_in_running_text_exist() -> None:
    (commands,) = (item for item in build_parser()._actions if isinstance(item.choices, dict))
    shown = re.compile(r"`kimi-eagle ([a-z][^`]*)`")
    for page in PAGES:
        for text in shown.findall(page.read_text("utf-8")):
            name, *rest = text.replace("\n", " ").split()
            assert name in commands.choices, f"{page}: kimi-eagle {text}"
            options = commands.choices[name]._option_string_actions
            unknown = [word for word in rest if word.startswith("--") and word not in options]
            assert not unknown, f"{page}: kimi-eagle {text}"


def test_manifests_that_are_shown_are_valid(project: Project) -> None:
    found = [block for block in blocks() if block.language == "yaml" and "version: 1" in block.text]
    assert len(found) >= 3
    for block in found:
        project.write(block.text)
        answer = project.cli("validate", str(project.manifest))
        assert answer.code == 0, f"{block.page}: {answer.err}"


def test_what_make_runs_is_what_the_tests_run() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for block in blocks("make"):
        assert block.commands == [["make", "demo"]]
    assert "submit manifests/demo.yaml" in makefile


# Run


@dataclass(frozen=True)
class Checkout:
    """A folder as after `git clone` and `make install`: with a root of its own."""

    folder: Path

    @classmethod
    def at(cls, folder: Path, root: Path | None = None) -> Checkout:
        (folder / ".venv" / "bin").mkdir(parents=True)
        program = folder / ".venv" / "bin" / "kimi-eagle"
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m kimi_eagle "$@"\n')
        program.chmod(0o755)
        (folder / ".venv" / "bin" / "activate").write_text(f'PATH="{program.parent}:$PATH"\n')
        for name in ("manifests", "kimi_eagle"):
            (folder / name).symlink_to(ROOT / name)
        if root is not None:
            (folder / "runs").symlink_to(root)
        return cls(folder)

    def run(self, block: Block, named: dict[str, str]) -> str:
        """Run a block's commands as a script; what they printed."""
        text = re.sub(r"\b[A-Z_]{3,}\b", lambda found: named.get(found[0], found[0]), block.text)
        script = f". .venv/bin/activate\n{text}"
        if block.language == "python":
            script = f"{shlex.quote(sys.executable)} - <<'END'\n{text}\nEND"
        environment = {k: v for k, v in os.environ.items() if k != "KIMI_EAGLE_ROOT"}
        done = subprocess.run(
            ["bash", "-e", "-c", script],
            cwd=self.folder,
            env={**environment, "PYTHONPATH": f"{ROOT}:{environment.get('PYTHONPATH', '')}"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{block.page}: {block.text}{done.stdout}{done.stderr}"
        return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    return Checkout.at(tmp_path_factory.mktemp("docs") / "checkout")


@pytest.mark.parametrize("block", blocks("quick"), ids=lambda block: block.page)
def test_quick_commands_run(checkout: Checkout, block: Block) -> None:
    checkout.run(block, {})


@pytest.mark.slow
def test_commands_on_what_the_demo_made_run(
    demo: dict[str, dict[str, Any]], store: Path, tmp_path: Path
) -> None:
    checkout = Checkout.at(tmp_path / "checkout", store)
    named = {
        "CHECKPOINT": demo["draft"]["outputs"]["checkpoint"][:12],
        "ROWS": demo["rows"]["outputs"]["rows"][:12],
        "RELEASE": demo["release"]["outputs"]["release"][:12],
        "KEY": demo["draft"]["key"][:12],
    }
    printed = "".join(checkout.run(block, named) for block in blocks("demo"))
    assert "identical" in printed, "what `reproduce ROWS` says"
    assert named["CHECKPOINT"] in printed


# Messages


def messages() -> Iterator[str]:
    """Every text in the code, `…` for what is filled in."""
    for path in (ROOT / "kimi_eagle").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (
                    str(part.value) if isinstance(part, ast.Constant) else "…"
                    for part in node.values
                )
                yield "".join(parts)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_troubleshooting_knows_messages_that_there_are() -> None:
    page = (DOCS / "troubleshooting.md").read_text("utf-8")
    headings = re.findall(r"^### `(.+)`$", page, re.M)
    assert len(headings) > 25
    known = list(messages())
    for heading in headings:
        parts = [part.strip() for part in heading.split("…") if len(part.strip()) > 3]
        assert parts, heading
        in_order = re.compile(".*".join(map(re.escape, parts)), re.S)
        assert any(in_order.search(text) for text in known), f"no message reads {heading!r}"
