"""What `prepare` takes of its sources: mixtures, duplicates, and every record in one bucket."""

from __future__ import annotations

import json
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from cases import case_input
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kimi_eagle.rows.buckets import KEPT, Buckets, Place
from kimi_eagle.rows.intake import Intake, Refused
from kimi_eagle.rows.mixture import lowest, take_counts
from kimi_eagle.stages.prepare.spec import Source


def _said(*texts: str) -> bytes:
    return b"".join(
        json.dumps({"prompt": text, "response": "a"}).encode() + b"\n" for text in texts
    )


def _files(folder: Path, *contents: bytes) -> list[list[Path]]:
    paths = []
    for number, content in enumerate(contents):
        path = folder / f"{number}.jsonl"
        path.write_bytes(content)
        paths.append([path])
    return paths


def _take(
    files: Sequence[Sequence[Path]], *sources: dict[str, Any], **options: Any
) -> tuple[list[str], Buckets]:
    """What the first turns say of those that are taken, and the buckets."""
    buckets = Buckets()
    given = [Source(path="x", **source) for source in sources or [{}] * len(files)]
    said = []
    for taken in Intake(given, files, buckets, **options):
        buckets.add(KEPT, taken.place)
        said.append(taken.conversation.messages[0]["content"])
    return said, buckets


def test_duplicates_are_found_across_sources_and_forms(tmp_path: Path) -> None:
    other = {"conversations": [{"from": "human", "value": "1"}, {"from": "gpt", "value": "a"}]}
    files = _files(tmp_path, _said("1", "2", "1"), json.dumps(other).encode() + b"\n" + _said("3"))
    said, buckets = _take(files)
    assert said == ["1", "2", "3"]
    assert buckets.metrics() == {"kept": 3, "duplicate": 2}
    assert buckets.places("duplicate", ["a", "b"]) == ["a:3", "b:1"]
    said, buckets = _take(files, deduplicate="none")
    assert said == ["1", "2", "1", "1", "3"]
    assert buckets.metrics() == {"kept": 5}


def test_a_limit_takes_by_content_and_seed_and_not_by_order(tmp_path: Path) -> None:
    names = [str(number) for number in range(40)]
    files = _files(tmp_path, _said(*names), _said(*reversed(names)))
    first, buckets = _take(files[:1], {"limit": 10}, seed=0)
    assert (len(first), buckets.metrics()) == (10, {"kept": 10, "not_sampled": 30})
    assert first != names[:10]
    assert sorted(_take(files[1:], {"limit": 10}, seed=0)[0]) == sorted(first)
    assert set(first) < set(_take(files[:1], {"limit": 20}, seed=0)[0])
    assert set(first) != set(_take(files[:1], {"limit": 10}, seed=1)[0])
    assert _take(files[:1], {"limit": 99})[0] == names


def test_how_a_source_is_cut_into_files_does_not_matter(tmp_path: Path) -> None:
    names = [str(number) for number in range(20)]
    whole = _files(tmp_path, _said(*names), _said(*names[7:]), _said(*names[:7]))
    parts = [[whole[1][0], whole[2][0]]]
    assert sorted(_take(whole[:1], {"limit": 5})[0]) == sorted(_take(parts, {"limit": 5})[0])


def test_duplicates_count_against_no_limit(tmp_path: Path) -> None:
    files = _files(tmp_path, _said("1", "1", "2", "2", "3"))
    said, buckets = _take(files, {"limit": 3})
    assert said == ["1", "2", "3"]
    assert buckets.metrics() == {"kept": 3, "duplicate": 2}


def test_weights_are_shares_of_the_mixture(tmp_path: Path) -> None:
    files = _files(
        tmp_path, _said(*map(str, range(30))), _said(*(str(100 + number) for number in range(30)))
    )
    said, buckets = _take(files, {"weight": 3.0}, {"weight": 1.0})
    assert len([text for text in said if int(text) < 100]) == 30
    assert len([text for text in said if int(text) >= 100]) == 10
    assert buckets.metrics() == {"kept": 40, "not_sampled": 20}


def test_a_source_that_adds_nothing_to_a_mixture_is_named(tmp_path: Path) -> None:
    files = _files(tmp_path, _said("1", "2"), _said("2", "1"))
    with pytest.raises(Refused, match=r"1\.jsonl: source 2 has no conversation"):
        _take(files, {"weight": 1.0}, {"weight": 1.0})


@pytest.mark.parametrize(
    ("sizes", "limits", "weights", "taken"),
    [
        ([10, 10], [None, None], [None, None], [10, 10]),
        ([10, 10], [None, 4], [None, None], [10, 4]),
        ([10, 10], [None, None], [1.0, 1.0], [10, 10]),
        ([10, 10], [None, 4], [1.0, 1.0], [4, 4]),
        ([10, 100], [None, None], [0.1, 0.9], [10, 90]),
        ([10, 100], [None, None], [0.7, 0.3], [10, 4]),
        ([0, 100], [None, None], [0.5, 0.5], [0, 0]),
        ([3, 3, 3], [None, None, None], [0.3, 0.3, 0.4], [2, 2, 3]),
    ],
)
def test_how_many_a_mixture_takes(
    sizes: list[int], limits: list[Any], weights: list[Any], taken: list[int]
) -> None:
    assert take_counts(sizes, limits, weights) == taken


@given(
    st.lists(
        st.tuples(st.integers(0, 500), st.sampled_from([0.1, 0.3, 1.0, 2.5, 7.0])),
        min_size=1,
        max_size=5,
    )
)
def test_a_mixture_keeps_its_proportions_and_uses_up_its_scarcest_source(
    sources: list[tuple[int, float]],
) -> None:
    sizes, weights = [size for size, _ in sources], [weight for _, weight in sources]
    taken = take_counts(sizes, [None] * len(sizes), weights)
    assert all(count <= size for count, size in zip(taken, sizes, strict=True))
    assert any(count == size for count, size in zip(taken, sizes, strict=True))
    scale = min(Fraction(size) / Fraction(repr(weight)) for size, weight in sources)
    for count, weight in zip(taken, weights, strict=True):
        assert 0 <= scale * Fraction(repr(weight)) - count < 1


def test_equal_conversations_count_apart_in_a_sample() -> None:
    taken = lowest([b"same"] * 9, 4, 0)
    assert sum(position in taken for position in range(9)) == 4


def test_conversations_that_call_tools_and_declare_none_are_told(tmp_path: Path) -> None:
    turns = [
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {}}'},
    ]
    tools = '[{"name": "f"}]'
    path = tmp_path / "x.jsonl"
    records = [{"conversations": turns}, {"conversations": turns, "tools": tools}]
    path.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    intake = Intake([Source(path="x")], [[path]], Buckets())
    assert (len(list(intake)), intake.undeclared) == (2, 1)


BAD = b'{"prompt": '


def test_a_bad_record_ends_the_intake_with_its_place_or_is_counted(tmp_path: Path) -> None:
    files = _files(tmp_path, _said("1") + BAD + b"\n" + _said("2") + BAD)
    with pytest.raises(Refused, match=r"0\.jsonl:2: not JSON.*on_bad_record: skip"):
        _take(files)
    said, buckets = _take(files, on_bad_record="skip")
    assert said == ["1", "2"]
    assert buckets.metrics() == {"kept": 2, "unreadable": 1, "truncated": 1}


def test_a_file_of_another_kind_ends_the_intake_whatever_the_policy(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(b"3")
    with pytest.raises(Refused, match=rf"{path}: must hold an array of records"):
        _take([[path]], on_bad_record="skip")


def test_public_truncated_file_is_never_9_records(tmp_path: Path) -> None:  # PRE-32
    path = case_input("chat/truncated_last_line.jsonl")
    with pytest.raises(Refused, match=r"truncated_last_line\.jsonl:10: not JSON"):
        _take([[path]])
    said, buckets = _take([[path]], on_bad_record="skip")
    assert len(said) == buckets.metrics()["kept"] <= 9
    assert buckets.metrics()["truncated"] == 1
    assert buckets.records == 10


_records = st.lists(
    st.sampled_from(
        [
            *(_said(text) for text in "1234"),
            b'{"messages": [{"role": "observation", "content": "x"}]}\n',
            b'{"messages": [{"role": "user", "content": "x"}]}\n',
            b'{"prompt": "q", "response": " "}\n',
            b'{"a": 1}\n',
            b"[]\n",
            b"{,\n",
        ]
    ),
    max_size=8,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(_records, min_size=1, max_size=3),
    st.sampled_from([None, 1, 3]),
    st.sampled_from([None, 1.0]),
    st.sampled_from(["none", "exact"]),
)
def test_every_record_ends_in_exactly_one_bucket(
    tmp_path_factory: pytest.TempPathFactory,
    contents: list[list[bytes]],
    limit: int | None,
    weight: float | None,
    deduplicate: str,
) -> None:
    folder = tmp_path_factory.getbasetemp()
    files = _files(folder, *(b"".join(content) for content in contents))
    source = {"limit": limit, "weight": weight}
    try:
        said, buckets = _take(
            files, *[source] * len(files), on_bad_record="skip", deduplicate=deduplicate
        )
    except Refused as error:
        if weight is None or "has no conversation" not in str(error):
            raise
        return
    assert sum(buckets.metrics().values()) == sum(map(len, contents)) == buckets.records
    assert buckets.metrics().get("kept", 0) == len(said)
    if deduplicate == "exact":
        assert len(set(said)) == len(said)


def _filled(**counts: int) -> Buckets:
    buckets = Buckets()
    for name, count in counts.items():
        for number in range(count):
            buckets.add(name, Place(0, number + 1, number + 1), "why")
    return buckets


def test_limits_are_held_against_what_records_are_and_not_against_what_was_asked_for() -> None:
    buckets = _filled(kept=6, duplicate=2, not_sampled=1, unknown_role=1)
    assert (buckets.records, buckets.rejected) == (10, 1)
    assert buckets.exceeded(0.1, {}, ["x"]) == []
    assert buckets.exceeded(0.09, {}, ["x"]) == [
        "1 of 10 records (10.0%) were left out, max_rejected allows 9.0%"
    ]
    assert buckets.exceeded(None, {"unknown_role": 0, "duplicate": 2, "truncated": 0}, ["x"]) == [
        "1 unknown_role, allowed are 0: x:1 (why)"
    ]
    assert Buckets().exceeded(0.0, {}, []) == []


def test_a_bucket_remembers_its_first_places() -> None:
    assert _filled(unknown_role=9).places("unknown_role", ["x"]) == [
        f"x:{number} (why)" for number in (1, 2, 3)
    ]
