"""Every stage kind there is, in the order data flows through them. Pure.

A kind is added here, in one line, and nowhere else.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from kimi_eagle.stages.contract import StageKind
from kimi_eagle.stages.evaluate.spec import Evaluate, EvaluateParams
from kimi_eagle.stages.export.spec import Export, ExportParams
from kimi_eagle.stages.extract.spec import Extract, ExtractParams
from kimi_eagle.stages.head.spec import Head, HeadParams
from kimi_eagle.stages.import_rows.spec import ImportRows, ImportRowsParams
from kimi_eagle.stages.import_states.spec import ImportStates, ImportStatesParams
from kimi_eagle.stages.prepare.spec import Prepare, PrepareParams
from kimi_eagle.stages.regenerate.spec import Regenerate, RegenerateParams
from kimi_eagle.stages.train.spec import Train, TrainParams
from kimi_eagle.stages.vocab.spec import Vocab, VocabParams

KINDS: dict[str, type[StageKind]] = {
    kind.name: kind
    for kind in (
        Head,
        Prepare,
        Regenerate,
        ImportRows,
        Extract,
        ImportStates,
        Vocab,
        Train,
        Evaluate,
        Export,
    )
}

AnyStage = Annotated[
    HeadParams
    | PrepareParams
    | RegenerateParams
    | ImportRowsParams
    | ExtractParams
    | ImportStatesParams
    | VocabParams
    | TrainParams
    | EvaluateParams
    | ExportParams,
    Field(discriminator="kind"),
]
