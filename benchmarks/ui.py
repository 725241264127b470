"""How long the server takes for each page of `kimi-eagle ui`, in a large registry.

    python benchmarks/ui.py [--runs 10000] [--record]

The registry holds 10,000 runs and about 100,000 artifacts (`many`), and the events of one training
of 20,000 steps with seven TTT steps. Every page is asked for over HTTP on loopback, as a browser
does, several times; the figure is the slowest page's median, and beside it are the medians in
milliseconds and the sizes in kB of all. The first look at the long training is told apart
(`curves_first`): what was read is kept.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from pathlib import Path

from common import Figures, parser
from many import seed
from starlette.testclient import TestClient

from kimi_eagle.job import EventWriter
from kimi_eagle.ui.site import site

STEPS, TTT = 20_000, 7


def main() -> None:
    options = parser("Ask for every page in a registry of many runs.")
    options.add_argument("--runs", type=int, default=10_000, metavar="N")
    options.add_argument("--times", type=int, default=7, metavar="N")
    given = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="ui-") as folder:
        root = Path(folder)
        made = seed(root, runs=given.runs, drafts=lambda number: 14 if number % 40 == 1 else 1)
        wide, long = made.runs[0], made.runs[1]
        write_training(root, long, "train")
        draft, middle = made.drafts[0], made.runs[len(made.runs) // 2]
        pages = {
            "runs": "/runs",
            "runs_middle": f"/runs?before={given.runs // 2}",
            "runs_search": "/runs?q=state:failed+stage:train",
            "runs_name": "/runs?q=project-77",
            "runs_none": "/runs?q=state:failed+nothing-is-called-so",
            "run": f"/runs/{middle}",
            "run_of_fourteen": f"/runs/{wide}",
            "inputs": f"/runs/{middle}/inputs",
            "artifact": f"/artifacts/{draft}",
            "artifact_of_all": f"/artifacts/{made.verifier}",
            "lineage": f"/artifacts/{draft}/lineage",
            "lineage_deep": f"/artifacts/{draft}/lineage?depth=8",
            "lineage_of_all": f"/artifacts/{made.verifier}/lineage",
            "diff": f"/diff?a={middle}&b={made.runs[-1]}",
            "acceptance": "/acceptance",
            "curves_first": f"/runs/{long}/curves",
            "curves": f"/runs/{long}/curves",
            "curve_data": f"/runs/{long}/curves/train/accuracy",
        }
        taken: dict[str, float] = {}
        sizes: dict[str, float] = {}
        with TestClient(site(root)) as client:
            client.get("/acceptance")  # templates are read once
            for name, address in pages.items():
                times = []
                for _ in range(1 if name == "curves_first" else given.times):
                    started = time.perf_counter()
                    answer = client.get(address)
                    times.append((time.perf_counter() - started) * 1000)
                    answer.raise_for_status()
                taken[name] = round(statistics.median(times), 1)
                sizes[name] = round(len(answer.content) / 1000, 1)
        slowest = max(taken, key=lambda name: taken[name])
        Figures(given).emit(
            "ui_slowest_page",
            taken[slowest],
            "ms",
            page=slowest,
            pages=taken,
            kilobytes=sizes,
            runs=len(made.runs),
            artifacts=made.artifacts,
        )


def write_training(root: Path, run: str, stage: str) -> None:
    """The events of a long training, as its worker writes them."""
    folder = root / run / "stages"
    folder.mkdir(parents=True)
    writer = EventWriter(folder / f"{stage}.events")
    for step in range(1, STEPS + 1):
        share = step / STEPS
        values = {"loss": 24 * math.exp(-4 * share) + 0.2 * math.sin(step)}
        for k in range(TTT):
            values[f"loss_{k}"] = values["loss"] / TTT
            values[f"full_acc_{k}"] = 0.8 ** (k + 1) * share
        values["grad_norm"] = 2 + math.sin(step)
        writer.emit(
            "metric",
            split="train",
            step=step,
            epoch=0,
            lr=1e-3 * (1 - share),
            values=values,
            tokens_per_second=5000 + 500 * math.sin(step / 50),
        )
        writer.progress(step, STEPS, "steps", loss=values["loss"])


if __name__ == "__main__":
    main()
