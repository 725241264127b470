"""Conversations → rows, in several processes, in the order in which they came."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from kimi_eagle.job import StageFailed
from kimi_eagle.rows.buckets import Rejected
from kimi_eagle.rows.conversations import Conversation
from kimi_eagle.rows.render import Renderer, cut
from kimi_eagle.rows.tool_support import ToolSupport
from kimi_eagle.stages.prepare.parallel import in_order

# What is handed to a process at once.
CHUNK_ITEMS, CHUNK_CHARACTERS = 256, 200_000


class Item(Protocol):
    """What has a conversation."""

    @property
    def conversation(self) -> Conversation: ...


AnyItem = TypeVar("AnyItem", bound=Item)


@dataclass(frozen=True)
class Made:
    """A row as it is written."""

    token_ids: Any
    """int32 [tokens]"""
    loss_mask: Any
    """uint8 [tokens]"""
    turns: int
    """How many turns it supervises, each behind a proven prompt."""


@dataclass(frozen=True)
class Left:
    """Why a conversation, or a row of it, is left out."""

    reason: str
    detail: str


def rendered(
    items: Iterable[AnyItem],
    renderer: Renderer,
    support: ToolSupport,
    max_length: int,
    processes: int,
) -> Iterator[tuple[AnyItem, list[Made | Left]]]:
    """Each item with its rows, or with why there are none: the same rows whatever the number of
    processes.

    Raises:
        StageFailed: a process was killed.
    """

    def work(chunk: list[AnyItem]) -> list[list[Made | Left]]:
        return [rows(item.conversation, renderer, support, max_length) for item in chunk]

    try:
        for chunk, found in in_order(_chunks(items), work, processes):
            yield from zip(chunk, found, strict=True)
    except BrokenProcessPool:
        raise StageFailed(
            "a process that renders rows was killed, for want of memory most likely; "
            f"{processes} were at work: set `workers` lower"
        ) from None


def rows(
    conversation: Conversation, renderer: Renderer, support: ToolSupport, max_length: int
) -> list[Made | Left]:
    """A conversation's rows, cut, and what is left out of it."""
    try:
        support.refuse_unwritten(conversation)
        whole = renderer.rows(conversation)
    except Rejected as error:
        return [Left(error.reason, error.detail)]
    found: list[Made | Left] = []
    for row in whole:
        try:
            kept = cut(row, max_length)
        except Rejected as error:
            found.append(Left(error.reason, error.detail))
        else:
            ids, mask = np.array(kept.token_ids, np.int32), np.array(kept.loss_mask, np.uint8)
            found.append(Made(ids, mask, len(row.turns)))
    return found


def _chunks(items: Iterable[AnyItem]) -> Iterator[list[AnyItem]]:
    chunk: list[AnyItem] = []
    characters = 0
    for item in items:
        chunk.append(item)
        characters += sum(len(message["content"]) for message in item.conversation.messages)
        if len(chunk) >= CHUNK_ITEMS or characters >= CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk
