"""Hidden states from a vLLM server that runs already: slow, run by `make test`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from agreement import cosines
from conftest import DEMO, new_project
from servers import demo_options, vllm

pytestmark = pytest.mark.slow

LAYERS = [2, 4, 5]
MANIFEST = """\
version: 1
name: endpoint
verifier: {{path: verifier}}
stages:
  head: {{kind: head}}
  rows: {{kind: prepare, sources: [{{path: chats.jsonl}}], max_length: 512}}
  states: {{kind: extract, rows: rows, layers: {layers}, dtype: {dtype}, engine: {engine}}}
"""


@pytest.fixture(scope="module")
def spool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("spool")


@pytest.fixture(scope="module", params=["bfloat16", "fp8"])
def dtype(request: pytest.FixtureRequest) -> str:
    """What the server stores."""
    return str(request.param)


@pytest.fixture(scope="module")
def server(spool: Path, dtype: str) -> Iterator[str]:
    """A server with our connector, started as docs/extraction.md says."""
    verifier = DEMO / "verifier"
    config = json.loads((verifier / "config.json").read_text("utf-8"))
    last = config["text_config"]["num_hidden_layers"]
    aux = {"hf_config": {"eagle_aux_hidden_state_layer_ids": [*LAYERS, last]}}
    speculative = {"method": "extract_hidden_states", "num_speculative_tokens": 1}
    transfer = {
        "kv_connector": "StatesConnector",
        "kv_connector_module_path": "kimi_eagle.engines.connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"spool": str(spool), "dtype": dtype},
    }
    options = ["--no-enable-prefix-caching"]
    options += ["--speculative-config", json.dumps({**speculative, "draft_model_config": aux})]
    options += ["--kv-transfer-config", json.dumps(transfer)]
    with vllm(spool / "log", "serve", str(verifier), *options, *demo_options(1024)) as address:
        yield address


def test_a_server_gives_what_the_reference_engine_gives(
    server: str, spool: Path, dtype: str, tmp_path: Path
) -> None:
    engine = f'{{kind: vllm, endpoint: "{server}", spool: {spool}}}'
    text = MANIFEST.format(layers=LAYERS, dtype=dtype, engine=engine)
    project = new_project(tmp_path / "served", text)
    served = project.submit()
    assert served.code == 0, served.err
    metrics = served.json["stages"][-1]["metrics"]
    assert metrics["rows_extracted"] == metrics["rows"] == 10
    assert metrics["agreement"] >= 0.97
    assert ("fp8_error" in metrics) == (dtype == "fp8")
    assert [path.name for path in spool.iterdir()] == ["log"], "nothing is left in its folder"

    other = new_project(
        tmp_path / "own",
        MANIFEST.format(layers=LAYERS, dtype="bfloat16", engine="{kind: transformers}"),
    )
    own = other.submit()
    assert own.code == 0, own.err
    ours, theirs = other.states_of(own), project.states_of(served)
    assert len(theirs) == 10
    # Another engine of a verifier is another key: the rows are paired by their order.
    for a, b in zip(ours.values(), theirs.values(), strict=True):
        assert float(cosines(a, b).mean()) > 0.995

    again = project.submit()
    assert again.dispositions["states"] == "reused"


@pytest.mark.parametrize("what", ["layers", "dtype"])
def test_a_server_that_stores_something_else_is_refused(
    what: str, server: str, spool: Path, dtype: str, tmp_path: Path
) -> None:
    engine = f'{{kind: vllm, endpoint: "{server}", spool: {spool}}}'
    other = "bfloat16" if dtype == "fp8" else "fp8"
    asked, said = {
        "layers": ([1, 3, 5], "layers is [2, 4, 5, 8], not [1, 3, 5, 8]"),
        "dtype": (LAYERS, f"dtype is {dtype!r}, not {other!r}"),
    }[what]
    text = MANIFEST.format(layers=asked, dtype=other if what == "dtype" else dtype, engine=engine)
    answer = new_project(tmp_path / "p", text).submit()
    assert answer.code == 1
    assert said in answer.err
    assert not [path for path in spool.iterdir() if path.name != "log"]
