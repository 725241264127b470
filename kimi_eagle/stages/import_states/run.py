"""Find each row's file by its token ids, check what it holds, and put it into shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kimi_eagle.artifacts.files import write_json, write_text
from kimi_eagle.engines.probe import POSITIONS, Probe
from kimi_eagle.identity import row_key
from kimi_eagle.job import StageFailed
from kimi_eagle.rows.table import Rows, load_rows
from kimi_eagle.stages.context import Context
from kimi_eagle.states.checks import BadStates, check_states
from kimi_eagle.states.contract import LayerContract, contract_of
from kimi_eagle.states.index import StateIndex
from kimi_eagle.states.layout import CONTRACT, ROWS, StateRow, write_rows
from kimi_eagle.states.refusals import Refusals
from kimi_eagle.states.samples import BadSample, read_ids, read_sample, sample_files
from kimi_eagle.states.shards import ShardWriter

NO_FILE = "no-file"
UNREADABLE = "unreadable"


def run(context: Context) -> dict[str, Any]:
    params, facts = context.params, context.verifier.facts
    rows = load_rows(context.path("rows"))
    contract = contract_of(params, facts)
    document = contract.document()
    verifier = context.input("verifier").digest
    keys = [row_key(verifier, document, rows.id_bytes(row)) for row in range(len(rows))]
    index = StateIndex(Path(context.job.registry))
    digests = {key: place.digest for key, place in index.places(keys).items()}
    index.close()
    missing = {key: row for row, key in enumerate(keys) if key not in digests}
    files, leftovers = _files_by_ids(context, rows)
    source = _Source(context, rows, contract, files)
    probe = source.probe(missing)
    refusals = Refusals(params.max_bad_rows, len(rows), context.events.note)
    writer = ShardWriter(
        context.shards,
        contract,
        params.shard_bytes,
        lambda name: context.events.emit("shard", name=name),
    )
    for done, (key, row) in enumerate(missing.items(), 1):
        try:
            writer.add(key, source.states(row), torch.from_numpy(rows.ids(row).copy()))
        except BadStates as error:
            refusals.add(key, error)
        if done % 100 == 0 or done == len(missing):
            context.events.progress(done, len(missing), "rows")
    writer.flush()
    digests.update(writer.digests)
    refusals.require(len(digests))
    lengths = np.diff(rows.offsets)
    out = context.out("states")
    write_text(
        out / ROWS,
        write_rows(
            StateRow(key, digests.get(key, ""), int(length), refusals.rows.get(key, ""))
            for key, length in zip(keys, lengths, strict=True)
        ),
    )
    write_json(out / CONTRACT, document)
    tokens = int(sum(lengths[missing[key]] for key in writer.digests))
    return {
        "rows": len(rows),
        "tokens": int(lengths.sum()),
        "rows_imported": len(writer.digests),
        "tokens_imported": tokens,
        "bytes_written": tokens * contract.bytes_per_token,
        "leftover_files": leftovers,
        "layers": list(contract.layers),
        "agreement": probe.agreement if probe.count else None,
        "next_best": probe.next_best,
        "probed": probe.count,
        **refusals.document(),
    }


class _Source:
    """States of rows, as the files have them."""

    def __init__(
        self, context: Context, rows: Rows, contract: LayerContract, files: Mapping[bytes, Path]
    ):
        self._context = context
        self._rows = rows
        self._contract = contract
        self._files = files

    def states(self, row: int) -> Any:
        """[tokens, layers, hidden] bfloat16 of one row, checked. Raises: BadStates."""
        params, contract = self._context.params, self._contract
        path = self._files.get(self._rows.id_bytes(row))
        if path is None:
            raise BadStates(NO_FILE, "no file holds these token ids")
        try:
            sample = read_sample(path, params.format, params.axes)
        except BadSample as error:
            raise BadStates(UNREADABLE, str(error)) from None
        if sample.states is None:
            raise BadStates(UNREADABLE, f"{path.name} has no `hidden_states`")
        sent = torch.from_numpy(self._rows.ids(row).astype(np.int64))
        try:
            check_states(
                sample.states, sample.token_ids, sent, len(contract.layers), contract.hidden_size
            )
        except BadStates as error:
            raise BadStates(error.reason, f"{path.name}: {error}") from None
        return sample.states.contiguous()

    def probe(self, missing: Mapping[str, int]) -> Probe:
        """Prove the layers on the first rows, before anything is stored.

        Raises: StageFailed.
        """
        context = self._context
        facts = context.verifier.facts
        head = {
            plain: (str(path), name)
            for plain, (path, name) in context.verifier.head_tensors().items()
        }
        probe = Probe(head, facts.rms_norm_eps, self._contract.layers)
        sound = 0
        for row, states in self._sound(missing):
            sound += 1
            ids, mask = self._rows.ids(row), self._rows.mask(row)
            # What the text goes on with, where that is learnt; after the end nothing is known.
            after = np.append(ids[1:], 0)
            probe.add(states, after.tolist(), np.append(mask[1:], 0) == 1)
            if probe.count >= POSITIONS:
                break
        if not sound:
            return probe  # nothing will be stored: what is wrong is told row by row
        probe.require_best()
        least = context.params.min_agreement
        if probe.agreement < least:
            raise StageFailed(
                f"the last states give the supervised token that follows at only "
                f"{probe.agreement:.1%} of {probe.count} positions (min_agreement {least:.0%})"
            )
        return probe

    def _sound(self, missing: Mapping[str, int]) -> Iterator[tuple[int, Any]]:
        """Rows whose states pass; what is wrong with the others is told when they are due."""
        for row in missing.values():
            try:
                yield row, self.states(row)
            except BadStates:
                continue


def _files_by_ids(context: Context, rows: Rows) -> tuple[dict[bytes, Path], int]:
    """The file of each row, by the bytes of its token ids, and how many files are of no row.

    Numbers in names decide nothing: files that an older data set left behind match no row.
    """
    form = context.params.format
    paths = [Path(given.path) for given in context.job.inputs["samples"]]
    try:
        files, others = sample_files(paths, form)
    except BadSample as error:
        raise StageFailed(str(error)) from None
    name = "data_N.pt" if form == "v1" else "hs_N.safetensors"
    for path in others:
        context.events.note(f"{path.name} is no sample's name ({name}): ignored")
    wanted = {rows.id_bytes(row) for row in range(len(rows))}
    found: dict[bytes, Path] = {}
    leftovers = 0
    for _, path in files:
        try:
            ids = read_ids(path, form).numpy().astype("<i4").tobytes()
        except BadSample as error:
            context.events.note(f"{error}: ignored")
            continue
        if ids not in wanted:
            leftovers += 1
        elif ids in found:
            context.events.note(
                f"{path.name} holds the same row as {found[ids].name}, which is taken"
            )
        else:
            found[ids] = path
    if leftovers:
        context.events.note(f"{leftovers} files hold other token ids than any row: ignored")
    return found, leftovers
