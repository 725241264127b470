"""Artifacts to and from a real object store on loopback, through connections that break and change
what they carry."""

from __future__ import annotations

import json
import socket
import sqlite3
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import fsspec
import pytest
from conftest import WITH_STATES, Answer, Project, new_project, wait_for

from kimi_eagle.registry.ledger import Ledger

pytest.importorskip("s3fs", reason="s3fs is not installed")
pytest.importorskip("moto", reason="moto is not installed")

pytestmark = pytest.mark.slow

BUCKET = "s3://team/eagle"


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    """The port of an S3 server."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def answers() -> bool:
        try:
            with socket.create_connection(("127.0.0.1", port), 1):
                return True
        except OSError:
            return False

    wait_for(answers, "the object store")
    try:
        yield port
    finally:
        process.kill()
        process.wait()


class Wire:
    """A connection to the server that can be made to break, or to change what it carries."""

    def __init__(self, server: int):
        self._server = server
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        self.drops = 0
        """How many transfers of bodies are still to be cut off."""
        self.flip: bytes | None = None
        """What the next body that holds it is to carry otherwise, or every one."""
        self.always = False
        self.flipped = self.dropped = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            upstream = socket.create_connection(("127.0.0.1", self._server))
            for source, target, up in ((client, upstream, True), (upstream, client, False)):
                threading.Thread(target=self._pump, args=(source, target, up), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, up: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                if not up and self.drops and len(data) > 4000:
                    self.drops -= 1
                    self.dropped += 1
                    target.sendall(data[:2000])
                    break
                if up and self.flip is not None and self.flip in data:
                    data = data.replace(self.flip, self.flip[::-1], 1)
                    self.flipped += 1
                    if not self.always:
                        self.flip = None
                target.sendall(data)
        except OSError:
            pass
        finally:
            for end in (source, target):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def wire(server: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Wire]:
    """The way to a store that is empty."""
    urllib.request.urlopen(
        urllib.request.Request(f"http://127.0.0.1:{server}/moto-api/reset", method="POST")
    ).close()
    created = urllib.request.Request(f"http://127.0.0.1:{server}/team", method="PUT")
    urllib.request.urlopen(created).close()
    made = Wire(server)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{made.port}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # what it tries again is ours to test
    yield made
    made.close()


def digest_of(answer: Answer, stage: str) -> str:
    (digest,) = answer.outputs[stage].values()
    return digest


@pytest.fixture
def elsewhere(tmp_path: Path) -> Project:
    """A colleague's machine: the manifest and its sources, and nothing that was made."""
    return new_project(tmp_path / "elsewhere")


def test_a_colleague_gets_an_artifact_with_its_lineage(
    wire: Wire, first_run: tuple[Project, Answer], elsewhere: Project
) -> None:
    project, answer = first_run
    vocab = digest_of(answer, "vocab")
    pushed = project.cli("push", vocab[:8], BUCKET, "--json")
    assert pushed.code == 0, pushed.err
    assert pushed.json["moved"] is True
    assert project.cli("push", vocab, BUCKET, "--json").json["moved"] is False
    pulled = elsewhere.cli("pull", vocab[:8], BUCKET, "--json")
    assert pulled.code == 0, pulled.err
    assert elsewhere.objects() == {vocab}
    ours, theirs = (
        item.cli("lineage", vocab, "--up", "--json").json for item in (project, elsewhere)
    )
    assert theirs["edges"] == ours["edges"]
    state = {node["digest"]: node["state"] for node in theirs["nodes"]}
    assert state.pop(vocab) == "present"
    assert state[digest_of(answer, "rows")] == "evicted"
    assert elsewhere.cli("verify", "--all").code == 0
    assert elsewhere.cli("registry", "check").code == 0
    # what is known of what is not there is enough for what takes from it
    again = elsewhere.submit()
    assert again.dispositions == {"head": "executed", "rows": "reused", "vocab": "reused"}
    assert again.outputs == answer.outputs
    rebuilt = elsewhere.cli("registry", "rebuild")
    assert rebuilt.code == 0, rebuilt.err
    assert elsewhere.cli("lineage", vocab, "--up", "--json").json["edges"] == ours["edges"]


def test_a_submit_takes_what_somebody_pushed(
    wire: Wire, first_run: tuple[Project, Answer], elsewhere: Project
) -> None:
    project, answer = first_run
    assert project.cli("push", digest_of(answer, "rows"), BUCKET).code == 0
    found = elsewhere.submit("--set", f"store.remote={BUCKET}")
    assert found.code == 0, found.err
    assert "rows: taken from the store elsewhere" in found.err
    assert found.dispositions == {"head": "executed", "rows": "reused", "vocab": "executed"}
    assert found.outputs == answer.outputs


def test_connections_that_break_off_are_made_again(
    wire: Wire, first_run: tuple[Project, Answer], elsewhere: Project
) -> None:
    project, answer = first_run
    rows = digest_of(answer, "rows")
    wire.drops = 1
    assert project.cli("push", rows, BUCKET).code == 0
    wire.drops = 2
    pulled = elsewhere.cli("pull", rows, BUCKET)
    assert pulled.code == 0, pulled.err
    assert wire.dropped == 3
    assert elsewhere.cli("verify", "--all").code == 0


def test_a_connection_that_always_breaks_off_leaves_nothing_behind(
    wire: Wire, first_run: tuple[Project, Answer], elsewhere: Project
) -> None:
    project, answer = first_run
    rows = digest_of(answer, "rows")
    assert project.cli("push", rows, BUCKET).code == 0
    wire.drops = 1000
    pulled = elsewhere.cli("pull", rows, BUCKET)
    assert pulled.code == 2
    assert "in 3 tries" in pulled.err
    assert elsewhere.objects() == set()
    assert not list(elsewhere.root.glob(".arriving/*"))
    # that a store is away is no reason to fail
    wire.close()
    found = elsewhere.submit("--set", f"store.remote={BUCKET}")
    assert found.code == 0
    assert "rows: made here, since" in found.err


def test_an_upload_that_is_changed_on_the_way_is_sent_again_or_refused(
    wire: Wire, first_run: tuple[Project, Answer], elsewhere: Project
) -> None:
    project, answer = first_run
    rows = digest_of(answer, "rows")
    wire.flip = b'"loss_mask"'
    pushed = project.cli("push", rows, BUCKET)
    assert pushed.code == 0, pushed.err
    assert wire.flipped == 1
    assert elsewhere.cli("pull", rows, BUCKET).code == 0
    head = digest_of(answer, "head")
    wire.flip, wire.always = b"BF16", True
    refused = project.cli("push", head, BUCKET)
    assert refused.code == 2
    assert "model.safetensors could not be stored, in 3 tries" in refused.err
    # what is not whole is not there
    assert "names nothing" in elsewhere.cli("pull", head, BUCKET).err


def test_what_was_damaged_where_it_lay_is_refused(
    wire: Wire, first_run: tuple[Project, Answer], elsewhere: Project
) -> None:
    project, answer = first_run
    vocab = digest_of(answer, "vocab")
    assert project.cli("push", vocab, BUCKET).code == 0
    name = sorted(path.name for path in project.object_of(answer, "vocab").iterdir())[0]
    store = fsspec.filesystem("s3", skip_instance_cache=True)
    store.pipe_file(f"team/eagle/objects/{vocab[:2]}/{vocab}/{name}", b"something else")
    pulled = elsewhere.cli("pull", vocab, BUCKET)
    assert pulled.code == 2
    assert f"{name} is damaged: expected" in pulled.err
    assert elsewhere.objects() == set()


def test_a_folder_is_a_store_too(
    first_run: tuple[Project, Answer], elsewhere: Project, tmp_path: Path
) -> None:
    project, answer = first_run
    head = digest_of(answer, "head")
    shared = str(tmp_path / "shared")
    assert project.cli("push", head, shared).code == 0
    assert elsewhere.cli("pull", head[:6], shared).code == 0
    assert elsewhere.objects() == {head}
    assert "there already" in elsewhere.cli("pull", head, shared).out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["pull", "abcdef", "nowhere://x"], "cannot be used as a store"),
        (["pull", "ab", "{folder}"], "too short"),
        (["pull", "abcdef", "{folder}"], "names nothing in"),
    ],
)
def test_what_cannot_be_had_is_said(
    elsewhere: Project, tmp_path: Path, arguments: list[str], said: str
) -> None:
    given = [part.format(folder=tmp_path) for part in arguments]
    answer = elsewhere.cli(*given)
    assert answer.code == 2
    assert said in answer.err


def test_an_address_with_a_password_is_refused(elsewhere: Project) -> None:
    answer = elsewhere.cli(
        "validate", str(elsewhere.manifest), "--set", "store.remote=s3://me:secret@host/x"
    )
    assert answer.code == 2
    assert "would be kept with every run" in answer.err


# Hidden states


def shards_of(project: Project) -> set[str]:
    return {path.stem for path in (project.root / "states").glob("*/*.safetensors")}


def test_hidden_states_go_with_their_artifact_and_nothing_is_extracted_again(
    wire: Wire, first_extraction: tuple[Project, Answer], elsewhere: Project
) -> None:
    project, answer = first_extraction
    states, shards = digest_of(answer, "states"), shards_of(project)
    assert len(shards) > 2
    pushed = project.cli("push", states, BUCKET, "--json")
    assert pushed.code == 0, pushed.err
    size = sum(path.stat().st_size for path in (project.root / "states").glob("*/*.safetensors"))
    assert (pushed.json["shards"], pushed.json["shard_bytes"]) == (len(shards), size)
    first_line = pushed.err.splitlines()[0]
    assert f"{len(shards)} shards of hidden states" in first_line, "before anything goes"
    again = project.cli("push", states, BUCKET, "--json")
    assert (again.json["moved"], again.json["shards"]) == (False, 0)
    assert f"{len(shards)} are there already" in again.err
    # A submit takes none of it unless its manifest says so.
    elsewhere.write(WITH_STATES)
    remote = ("--set", f"store.remote={BUCKET}")
    assert elsewhere.cli("pull", digest_of(answer, "rows"), BUCKET).code == 2, "never pushed"
    found = elsewhere.submit(*remote, "--set", "store.fetch_states=true")
    assert found.code == 0, found.err
    assert found.dispositions["states"] == "reused"
    assert f"{len(shards)} shards of hidden states" in found.err
    assert found.outputs == answer.outputs
    assert shards_of(elsewhere) == shards
    assert elsewhere.cli("verify", "--all").code == 0
    assert elsewhere.cli("registry", "check").code == 0
    # Every row is in the index: another stage with the same rows extracts none.
    other = elsewhere.submit("--set", "stages.states.max_bad_rows=1")
    (metrics,) = [s["metrics"] for s in other.json["stages"] if s["name"] == "states"]
    assert other.dispositions["states"] == "executed"
    assert metrics["rows_extracted"] == 0
    rebuilt = elsewhere.cli("registry", "rebuild")
    assert rebuilt.code == 0, rebuilt.err
    assert elsewhere.submit().dispositions["states"] == "reused"


def test_a_store_elsewhere_sends_no_hidden_states_by_itself(
    wire: Wire, first_extraction: tuple[Project, Answer], elsewhere: Project
) -> None:
    project, answer = first_extraction
    assert project.cli("push", digest_of(answer, "states"), BUCKET).code == 0
    elsewhere.write(WITH_STATES)
    found = elsewhere.submit("--set", f"store.remote={BUCKET}")
    assert found.dispositions["states"] == "executed"
    assert "states: made here, since its hidden states" in found.err
    assert "store.fetch_states" in found.err


def test_shards_go_on_where_a_connection_broke_off(
    wire: Wire, first_extraction: tuple[Project, Answer], elsewhere: Project
) -> None:
    project, answer = first_extraction
    states, shards = digest_of(answer, "states"), shards_of(project)
    wire.drops = 1  # while what was sent is read back
    assert project.cli("push", states, BUCKET).code == 0
    # Fetched half: one shard is whole, one was cut off in the middle, and the machine went away.
    whole, half, *_ = sorted(shards)
    (arriving := elsewhere.root / ".arriving" / "states").mkdir(parents=True)
    for shard, share in ((whole, 1.0), (half, 0.5)):
        data = (project.root / "states" / shard[:2] / f"{shard}.safetensors").read_bytes()
        (arriving / f"{shard}.safetensors").write_bytes(data[: int(len(data) * share)])
    wire.drops = 2
    pulled = elsewhere.cli("pull", states, BUCKET, "--json")
    assert pulled.code == 0, pulled.err
    assert wire.dropped == 3
    assert shards_of(elsewhere) == shards
    assert elsewhere.cli("verify", "--all").code == 0
    assert not list(arriving.iterdir())


def test_a_shard_that_is_changed_on_the_way_is_sent_again_or_refused(
    wire: Wire, first_extraction: tuple[Project, Answer], elsewhere: Project
) -> None:
    project, answer = first_extraction
    states = digest_of(answer, "states")
    wire.flip, wire.always = b'"hidden_states"', True
    refused = project.cli("push", states, BUCKET)
    assert refused.code == 2
    assert ".safetensors could not be stored, in 3 tries" in refused.err
    assert "names nothing" in elsewhere.cli("pull", states, BUCKET).err
    wire.flip, wire.always = b'"hidden_states"', False
    flipped = wire.flipped
    assert project.cli("push", states, BUCKET).code == 0
    assert wire.flipped == flipped + 1
    # What was damaged where it lies is refused, and so is a listing that says something else.
    shard = sorted(shards_of(project))[0]
    store = fsspec.filesystem("s3", skip_instance_cache=True)
    name = f"team/eagle/states/{shard[:2]}/{shard}"
    good = store.cat_file(f"{name}.safetensors")
    store.pipe_file(f"{name}.safetensors", good[:-1] + bytes([good[-1] ^ 1]))
    pulled = elsewhere.cli("pull", states, BUCKET)
    assert pulled.code == 2
    assert f"{shard}.safetensors is damaged: expected {shard[:12]}" in pulled.err
    store.pipe_file(f"{name}.safetensors", good)
    listed = json.loads(store.cat_file(f"{name}.json"))
    listed["rows"][0][1] += 1
    store.pipe_file(f"{name}.json", json.dumps(listed).encode("ascii"))
    pulled = elsewhere.cli("pull", states, BUCKET)
    assert pulled.code == 2
    assert "is not where it says" in pulled.err
    assert shard not in shards_of(elsewhere)
    assert elsewhere.objects() == set()


def test_states_go_with_what_was_made_of_them_when_that_is_asked_for(
    first_extraction: tuple[Project, Answer], extracted: Project, elsewhere: Project, tmp_path: Path
) -> None:
    _, answer = first_extraction
    states, vocab, shared = digest_of(answer, "states"), digest_of(answer, "vocab"), tmp_path / "s"
    # A training takes minutes: what is on record of one, that made of these states what is there.
    ledger = Ledger(extracted.root)
    record = ledger.artifact(vocab)
    assert record is not None
    run, key = answer.json["run_id"], "d" * 64
    taken = {"states": [states]}
    document = {"kind": "train", "inputs": taken}
    number = ledger.begin_execution(run, "draft", "train", key, document, taken, [], "", {})
    ledger.end_execution(number, "executed", seconds=1.0, outputs={"checkpoint": record})
    ledger.close()
    alone = extracted.cli("push", vocab, str(shared), "--json")
    assert (alone.code, alone.json["shards"]) == (0, 0), alone.err
    assert not (shared / "states").exists(), "nobody asked for them"
    assert elsewhere.cli("pull", vocab, str(shared), "--with-states", "--json").json["shards"] == 0
    count = len(shards_of(extracted))
    pushed = extracted.cli("push", vocab, str(shared), "--with-states", "--json")
    assert (pushed.code, pushed.json["shards"]) == (0, count), pushed.err
    pulled = elsewhere.cli("pull", vocab, str(shared), "--with-states", "--json")
    assert (pulled.code, pulled.json["shards"]) == (0, count), pulled.err
    assert shards_of(elsewhere) == shards_of(extracted)
    assert elsewhere.objects() == {vocab, states}


def test_rows_that_are_here_as_other_bytes_are_refused_before_anything_moves(
    first_extraction: tuple[Project, Answer], extracted: Project, tmp_path: Path
) -> None:
    project, answer = first_extraction
    states, shared = digest_of(answer, "states"), str(tmp_path / "shared")
    assert project.cli("push", states, shared).code == 0
    with sqlite3.connect(extracted.root / "registry.sqlite") as connection:
        connection.execute("update state_rows set digest = ? where start = 0", ("a" * 64,))
    connection.close()
    pulled = extracted.cli("pull", states, shared)
    assert pulled.code == 2
    assert "stored here already, as other bytes" in pulled.err
    # and what is not here as it was made is not pushed
    pushed = extracted.cli("push", states, str(tmp_path / "another"))
    assert pushed.code == 2
    assert "nothing whole to push" in pushed.err
