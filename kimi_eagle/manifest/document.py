"""Read YAML into plain JSON types, remembering where every value was written.

Scalars follow the YAML 1.2 core schema. What YAML readers are known to disagree about (`no`,
`0123`) is refused instead of guessed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import yaml
from yaml.resolver import Resolver

from kimi_eagle.manifest.problem import UNSET, ManifestError, Path, Problem

Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | float | bool | None"

MAX_NODES = 100_000
MAX_DEPTH = 100

_TOO_DEEP = f"more than {MAX_DEPTH} levels of nesting"

_PLAIN = "plain scalar"  # Holds a space, so no tag in a file can spell it.
_YAML_TAG = "tag:yaml.org,2002:"
_MERGE_KEY = "<<"

_CONSTANTS: dict[str, bool | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_SWITCHES = {
    **dict.fromkeys(("yes", "on", "y"), "true"),
    **dict.fromkeys(("no", "off", "n"), "false"),
}
_DECIMAL = re.compile(r"[-+]?[0-9]+")
_PREFIXED = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9]")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")

# Besides control characters: the line breaks of YAML 1.1 that editors do not count as lines,
# and byte-order marks inside the text.
_UNREADABLE = re.compile(
    "[^\t\n\r\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]"
)

# What libyaml and PyYAML may disagree about: whether it is allowed, what it means, or where it is.
_READERS_DIFFER = re.compile("[\t\r&*!|>%@`?\\\\]|---|\\.\\.\\.")

_PLAIN_WORDS = (
    ("mapping values are not allowed", "a ':' is not allowed here", "quote text that holds ': '"),
    ("expected <block end>", "does not line up with the lines above", "check the indentation"),
    ("could not find expected ':'", "a key without ':'", "write 'key: value'"),
    ("cannot start any token", "text cannot start with this character", "quote it"),
    ("while scanning a quoted scalar", "a quote is not closed", None),
)


class Location(NamedTuple):
    """Where something was written: a line and column of the file, or command-line text."""

    line: int | None
    column: int | None
    source: str | None = None


@dataclass(frozen=True, eq=False)
class Document:
    """A mapping read from `file`, and where each of its keys and values was written."""

    file: str
    data: dict[str, Json]
    values: Mapping[Path, Location]
    keys: Mapping[Path, Location]

    def locate(self, path: Path) -> tuple[int | None, int | None]:
        """Return the line and column of the value at `path`, or else of its nearest ancestor.

        Both are None where the value comes from an override, which `source` then tells.
        """
        return self.value_location(path)[:2]

    def locate_key(self, path: Path) -> tuple[int | None, int | None]:
        """Return the line and column of the key at `path`, as `locate` does; of a list item those
        of its value, and where there is neither, of the nearest ancestor."""
        return self.key_location(path)[:2]

    def source(self, path: Path) -> str | None:
        """Return the override that the value at `path` comes from, or None if the file."""
        return self.value_location(path).source

    def value_location(self, path: Path) -> Location:
        """Where the value at `path`, or else its nearest ancestor, was written."""
        while path not in self.values:
            path = path[:-1]
        return self.values[path]

    def key_location(self, path: Path) -> Location:
        """Where the key at `path` was written; see `locate_key`."""
        while path not in self.keys and path not in self.values:
            path = path[:-1]
        return self.keys.get(path) or self.values[path]

    def value(self, path: Path) -> Json | object:
        """Return the value at `path`, or UNSET where there is none."""
        value: Json = self.data
        for part in path:
            if isinstance(value, dict) and part in value:
                value = value[str(part)]
            elif isinstance(value, list) and isinstance(part, int) and part < len(value):
                value = value[part]
            else:
                return UNSET
        return value

    def problem(
        self, path: Path, message: str, *, hint: str | None = None, at_key: bool = False
    ) -> Problem:
        """Return a problem with the value at `path`, placed at its value or its key.

        A path that the document lacks is placed at the key of its nearest ancestor.
        """
        found = self.value(path)
        locate = self.key_location if at_key or found is UNSET else self.value_location
        line, column, source = locate(path)
        return Problem(path, message, line, column, found, hint, source)


def parse(text: str | bytes, file: str) -> Document:
    """Read one YAML document whose top level is a mapping.

    Raises:
        ManifestError: with all that is wrong with the file, as far as it can be read.
    """
    document, problems = parse_leniently(text, file)
    if problems:
        raise ManifestError(file, problems)
    return document


def parse_leniently(text: str | bytes, file: str) -> tuple[Document, list[Problem]]:
    """Read a document as `parse` does, values that are refused as null.

    Returns the document and all that was refused in it.

    Raises:
        ManifestError: no mapping can be made of the file.
    """
    if isinstance(text, bytes):
        text = _decode(text, file)
    reading = _read(text.removeprefix("\ufeff"))
    if not isinstance(reading.value, dict):
        problems = reading.problems or [
            Problem((), "the top level must be a mapping", 1, 1, reading.value)
        ]
        raise ManifestError(file, problems)
    return Document(file, reading.value, reading.values, reading.keys), reading.problems


def parse_value(text: str, path: Path, source: str) -> tuple[Json, list[Problem]]:
    """Read one command-line value as YAML: a scalar, or a collection in flow style.

    Returns the value, to be used only if there are no problems. Their paths start with `path`,
    where the value goes, and they carry `source` in place of a line.
    """
    reading = _read(text, inline=True)
    problems = [
        replace(problem, path=path + problem.path, line=None, column=None, source=source)
        for problem in reading.problems
    ]
    return reading.value, problems


def _decode(raw: bytes, file: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        message = f"not UTF-8 text: byte 0x{raw[error.start]:02x} at offset {error.start}"
        raise ManifestError(file, [Problem((), message, line)]) from None


@dataclass(frozen=True)
class _Reading:
    value: Json
    values: dict[Path, Location]
    keys: dict[Path, Location]
    problems: list[Problem]


def _read(text: str, *, inline: bool = False) -> _Reading:
    """Read the one document of `text`; `inline` allows it to be empty, but not in block style."""
    builder = _Builder()
    unreadable = _UNREADABLE.search(text)
    if unreadable is not None:
        return builder.failed(_unreadable(text, unreadable.start()))
    if not inline:
        root = _root_by_libyaml(text)
        if root is not None:
            value = builder.build(root)
            return _Reading(value, builder.values, builder.keys, builder.problems)
    loader = _Loader(text)
    try:
        root = loader.get_node() if loader.check_node() else None
        if root is None and not inline:
            return builder.failed(Problem((), "the file holds no document", 1, 1))
        if root is not None and inline and getattr(root, "flow_style", None) is False:
            message = "must be in flow style, such as {a: 1} or [1, 2]"
            return builder.failed(Problem((), message, hint="quote it if it is text"))
        value = None if root is None else builder.build(root)
        if loader.check_node():
            mark = loader.peek_event().start_mark  # type: ignore[no-untyped-call]
            line, column = _position(mark)
            message = "a second document starts here; only one is allowed"
            builder.problems.append(Problem((), message, line, column, "---"))
    except yaml.MarkedYAMLError as error:
        return builder.failed(_syntax_problem(error, tuple(loader.path), text))
    return _Reading(value, builder.values, builder.keys, builder.problems)


def _unreadable(text: str, index: int) -> Problem:
    line = text.count("\n", 0, index) + 1
    column = index - text.rfind("\n", 0, index)
    code = ord(text[index])
    escape = f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
    message = f"character U+{code:04X} is not allowed"
    return Problem((), message, line, column, hint=f'write "{escape}" in double quotes')


def _syntax_problem(error: yaml.MarkedYAMLError, path: Path, text: str) -> Problem:
    """Say in plain words why PyYAML gave up, showing the line where it did."""
    mark = error.problem_mark or error.context_mark
    line, column = _position(mark)
    lines = re.split("\r\n|\r|\n", text)
    written = lines[line - 1] if line <= len(lines) else ""
    said = f"{error.context}: {error.problem}" if error.context else str(error.problem)
    message, hint = f"cannot be read as YAML: {said}", None
    if "\t" in written[: len(written) - len(written.lstrip())]:
        message, hint = "indented with a tab", "use spaces"
    else:
        for fragment, plain, advice in _PLAIN_WORDS:
            if fragment in said:
                message, hint = plain, advice
                break
    start = error.context_mark
    if start is not None and start.line + 1 != line:
        message += f" (in what starts on line {start.line + 1})"
    return Problem(path, message, line, column, written or UNSET, hint)


def _position(mark: Any) -> tuple[int, int]:
    return mark.line + 1, mark.column + 1


def _resolved(resolver: Resolver, kind: type[yaml.Node], value: Any, implicit: Any) -> Any:
    """A node's tag; a plain scalar without one of its own is left unresolved."""
    if kind is yaml.ScalarNode and implicit[0]:
        return _PLAIN
    return Resolver.resolve(resolver, kind, value, implicit)  # type: ignore[no-untyped-call]


class _Loader(yaml.SafeLoader):
    """Composes nodes without resolving plain scalars; `path` is where it stopped on an error."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.path: list[str | int] = []
        self._depth = 0

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> Any:
        return _resolved(self, kind, value, implicit)

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self._depth > MAX_DEPTH:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, _TOO_DEEP, mark)
        key = index.value if isinstance(index, yaml.ScalarNode) else index
        part = [key] if isinstance(key, str | int) else []
        self.path += part
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        del self.path[len(self.path) - len(part) :]
        return node


if yaml.__with_libyaml__:

    class _FastLoader(yaml.CSafeLoader):
        """Composes the same nodes by libyaml."""

        def __init__(self, text: str) -> None:
            super().__init__(text)
            self._depth = 0

        def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> Any:
            return _resolved(self, kind, value, implicit)

        def descend_resolver(self, _parent: Any, _index: Any) -> None:
            self._depth += 1
            if self._depth > MAX_DEPTH:
                raise yaml.composer.ComposerError(None, None, _TOO_DEEP)

        def ascend_resolver(self) -> None:
            self._depth -= 1


def _root_by_libyaml(text: str) -> yaml.Node | None:
    """The root of a document that libyaml and PyYAML read alike, ten times as fast.

    None for any other: one with what the two are known to treat differently, or with an error,
    which PyYAML words and places.
    """
    if not yaml.__with_libyaml__ or _READERS_DIFFER.search(text):
        return None
    loader = _FastLoader(text)
    try:
        root: yaml.Node | None = loader.get_single_node()
    except yaml.YAMLError:
        return None
    finally:
        loader.dispose()
    return root


class _TooLargeError(Exception):
    """Stops building where aliases expand to more nodes than allowed."""


class _RefusedError(ValueError):
    """A scalar that is not read as anything; the message says why."""


class _Builder:
    """Turns composed nodes into JSON types, collecting locations and problems."""

    def __init__(self) -> None:
        self.values: dict[Path, Location] = {}
        self.keys: dict[Path, Location] = {}
        self.problems: list[Problem] = []
        self._count = 0
        self._open: set[int] = set()
        self._reported: set[int] = set()

    def failed(self, problem: Problem) -> _Reading:
        """Return a reading without a value, for a problem that ends the reading."""
        return _Reading(None, self.values, self.keys, [*self.problems, problem])

    def build(self, root: yaml.Node) -> Json:
        try:
            return self._value(root, ())
        except _TooLargeError:
            return None

    def _report(self, node: yaml.Node, path: Path, message: str, found: object = UNSET) -> None:
        """Add a problem, once however many aliases lead to its node."""
        if id(node) not in self._reported:
            self._reported.add(id(node))
            self.problems.append(Problem(path, message, *_position(node.start_mark), found))

    def _value(self, node: yaml.Node, path: Path) -> Json:
        self.values[path] = Location(*_position(node.start_mark))
        self._count += 1
        if self._count > MAX_NODES:
            self._report(node, path, f"more than {MAX_NODES} values once aliases are expanded")
            raise _TooLargeError
        if isinstance(node, yaml.ScalarNode):
            try:
                return _scalar(node)
            except _RefusedError as error:
                self._report(node, path, str(error), node.value)
                return None
        if id(node) in self._open:
            self._report(node, path, "holds itself through an alias")
            return None
        if len(path) > MAX_DEPTH:
            self._report(node, path, _TOO_DEEP)
            return None
        self._open.add(id(node))
        value: Json
        if isinstance(node, yaml.MappingNode):
            self._check_tag(node, path, "map")
            value = self._mapping(node, path)
        else:
            self._check_tag(node, path, "seq")
            value = [self._value(item, (*path, i)) for i, item in enumerate(node.value)]
        self._open.discard(id(node))
        return value

    def _check_tag(self, node: yaml.Node, path: Path, kind: str) -> None:
        if node.tag != _YAML_TAG + kind:
            self._report(node, path, _tag_message(node.tag))

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Json]:
        result: dict[str, Json] = {}
        for key_node, value_node in node.value:
            key = self._key(key_node, path)
            if key is None:
                continue
            where = (*path, key)
            if key not in result:
                self.keys[where] = Location(*_position(key_node.start_mark))
                result[key] = self._value(value_node, where)
                continue
            message = f"repeated; first set on line {self.keys[where].line}"
            self._report(key_node, where, message, self._value(value_node, where))
        return result

    def _key(self, node: yaml.Node, path: Path) -> str | None:
        """Return a mapping's key as text, or None after reporting why it is none."""
        if not isinstance(node, yaml.ScalarNode):
            self._report(node, path, "keys must be text, not lists or mappings")
            return None
        if node.tag == _PLAIN and node.value.lower() in _SWITCHES:
            return str(node.value)
        where = (*path, node.value)
        if node.tag == _PLAIN and node.value == _MERGE_KEY:
            self._report(node, where, "merge keys are not supported; write the keys out")
            return None
        try:
            key = _scalar(node)
        except _RefusedError as error:
            self._report(node, where, str(error), node.value)
            return None
        if not isinstance(key, str):
            self._report(node, where, "keys must be text; quote it", key)
            return None
        return key


def _scalar(node: yaml.ScalarNode) -> str | int | float | bool | None:
    """Return a scalar node's value, which a tag of the core schema may force.

    Raises:
        _RefusedError: the text is ambiguous, not finite or not text, or the tag does not fit.
    """
    if node.tag == _PLAIN:
        return _plain(node.value)
    kind = node.tag.removeprefix(_YAML_TAG)
    if kind == "str":
        return _joined(node.value)
    if kind not in ("int", "float", "bool", "null"):
        raise _RefusedError(_tag_message(node.tag))
    value = _plain(node.value)
    if kind == "float" and type(value) is int:
        return float(value)
    if {"int": int, "float": float, "bool": bool, "null": type(None)}[kind] is not type(value):
        raise _RefusedError(f"does not fit its tag !!{kind}")
    return value


def _plain(text: str) -> str | int | float | bool | None:
    """Return the core schema's reading of an unquoted scalar.

    A number beyond the range of a float stays text, since it more likely is a revision such as
    `695e0514`.

    Raises:
        _RefusedError: YAML readers disagree about the text, or it is no finite number.
    """
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    switch = _SWITCHES.get(text.lower())
    if switch is not None:
        raise _RefusedError(
            f"`{text}` is {switch} to some YAML readers and text to others: "
            f"write {switch}, or quote it"
        )
    if _NOT_FINITE.fullmatch(text):
        raise _RefusedError("not a finite number")
    if _PREFIXED.fullmatch(text):
        whole = int(text, 0)
        return whole if whole.bit_length() <= 1023 else text
    if not _FLOAT.fullmatch(text):
        return text
    number = float(text)
    mantissa = re.split("[eE]", text)[0]
    if math.isinf(number) or (number == 0 and mantissa.strip("+-0.")):
        return text
    if _LEADING_ZERO.match(text):
        raise _RefusedError("a number with a leading zero is ambiguous: quote it, or drop the zero")
    return int(text) if _DECIMAL.fullmatch(text) else number


def _joined(text: str) -> str:
    r"""Join the surrogate pairs that JSON writes as two escapes, `"\ud83d\ude00"`."""
    try:
        return text.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        raise _RefusedError("holds half of a surrogate pair, which is not text") from None


def _tag_message(tag: str) -> str:
    short = f"!!{tag.removeprefix(_YAML_TAG)}" if tag.startswith(_YAML_TAG) else tag
    return f"tag {short} is not supported"
