"""vLLM's worker whose verifier hands over the outputs of the layers that are asked for.

    llm = LLM(..., worker_cls="kimi_eagle.engines.capturing_worker.CapturingWorker",
              additional_config={"capture_layers": [2, 15, 27, 30]})
    llm.collective_rpc("capture", args=(settings,))  # see `capture.Capture`

The engine serves as ever and knows nothing of it. vLLM's own way, its speculative method
`extract_hidden_states`, keeps states in a cache of its own and has no place in its newer model
runner. Imports vLLM.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.models.interfaces import supports_eagle3
from vllm.platforms import current_platform

from kimi_eagle.engines.capture import Batch, Capture

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker


class CapturingWorker(Worker):  # type: ignore[misc]
    _hands_over = False
    _capture: Capture | None = None
    _prepared: Batch | None = None

    def load_model(self, **given: Any) -> None:
        super().load_model(**given)
        model = self.model_runner.get_model()
        if not supports_eagle3(model):
            raise RuntimeError(f"{type(model).__name__} does not give the outputs of its layers")
        # Before vLLM finds out how much memory a pass takes.
        layers = self.vllm_config.additional_config["capture_layers"]
        model.set_aux_hidden_state_layers(tuple(layers))
        model.register_forward_hook(self._ran)
        self._hands_over = get_tp_group().rank_in_group == 0  # all ranks have the same states
        if hasattr(self.model_runner, "prepare_inputs"):
            self._prepare_inputs = self.model_runner.prepare_inputs
            self.model_runner.prepare_inputs = self._prepare

    def capture(self, settings: dict[str, Any]) -> None:
        """Called by the client: hand over what is run from now on."""
        if self._hands_over:
            self._capture = Capture(settings, self.device)

    def capture_into(self, folder: str) -> None:
        """Called by the client: rows go to a folder of the spool from now on."""
        if self._capture is not None:
            self._capture.into(folder)

    def flush_captured(self) -> None:
        """Called by the client: hand over what has been run."""
        if self._capture is not None:
            self._capture.flush()

    def shutdown(self) -> None:
        if self._capture is not None:
            self._capture.end()
        super().shutdown()

    def _prepare(self, *given: Any, **named: Any) -> Any:
        """Of the newer model runner, which keeps what it runs to itself."""
        found = self._prepare_inputs(*given, **named)
        self._prepared = Batch(
            found.req_ids,
            found.query_start_loc_np[: found.num_reqs + 1].tolist(),
            found.num_computed_tokens_np[: found.num_reqs].tolist(),
            found.input_ids,
        )
        return found

    def _batch(self) -> Batch | None:
        """What this pass runs."""
        if hasattr(self.model_runner, "prepare_inputs"):
            found, self._prepared = self._prepared, None
            return found
        held = self.model_runner.input_batch
        if not held.num_reqs:
            return None
        return Batch(
            held.req_ids,
            self.model_runner.query_start_loc.np[: held.num_reqs + 1].tolist(),
            held.num_computed_tokens_cpu[: held.num_reqs].tolist(),
            self.model_runner.input_ids.gpu,
        )

    def _ran(self, _model: Any, _given: Any, output: Any) -> Any:
        """[tokens, hidden] after the last norm, as the engine expects it, without the others."""
        hidden, layers = output
        if self._hands_over:
            # Also where nobody takes them yet: that is when vLLM finds out what a pass takes.
            states, batch = torch.stack(tuple(layers), dim=1), self._batch()
            if self._capture is not None and batch is not None:
                self._capture.take(states, batch)
        return hidden
