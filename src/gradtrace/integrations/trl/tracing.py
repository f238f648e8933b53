"""Where a `GRPOTrainer` is listened to: four methods and three callbacks, none of which changes what it computes."""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers import TrainerCallback
from trl import GRPOTrainer

from gradtrace.errors import GradtraceError
from gradtrace.integrations.trl.session import TraceSession
from gradtrace.integrations.trl.settings import TraceSettings, check_supported


class GRPOTracing(GRPOTrainer):
    """Overrides that tell `gradtrace` what happens. Put before a GRPOTrainer class, see `attach`."""

    gradtrace: TraceSession

    @property
    def _is_training(self) -> bool:
        """Whether the trainer is training, told as TRL itself tells it from evaluation."""
        return bool(self.model is not None and self.model.training)

    def plain_rewards(self, *args: Any, **options: Any) -> torch.Tensor:
        """float[R, functions] of completions that are not the rollout's."""
        return super()._calculate_rewards(*args, **options)

    def _calculate_rewards(self, *args: Any, **options: Any) -> torch.Tensor:
        rewards = super()._calculate_rewards(*args, **options)
        self.gradtrace.see_rewards(rewards)
        return rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if not self._is_training:
            return super()._generate_and_score_completions(inputs)
        with self.gradtrace.generating():
            output = super()._generate_and_score_completions(inputs)
        return self.gradtrace.begin(inputs, output)

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **options: Any) -> Any:
        if not self.gradtrace.wants_statistics or model is self.ref_model:
            return super()._get_per_token_logps_and_entropies(model, *args, **options)
        # TRL computes the policy's entropies in any case and leaves them out of the answer unless asked.
        found = super()._get_per_token_logps_and_entropies(model, *args, **{**options, "compute_entropy": True})
        self.gradtrace.see_statistics(found[0], found[1])
        return found

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        if self._is_training:
            self.gradtrace.enter_slice(inputs)
        return super()._compute_loss(model, inputs)

    def training_step(self, *args: Any, **options: Any) -> torch.Tensor:
        with self.gradtrace.training_step():
            return super().training_step(*args, **options)


class _Events(TrainerCallback):
    def __init__(self, session: TraceSession) -> None:
        self.session = session

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.session.open()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.session.see_optimizer_step()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        self.session.see_logs(logs or {})

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.session.close()


class TracedGRPOTrainer(GRPOTracing):
    """`GRPOTrainer` with a trace: the arguments of GRPOTrainer, and those of `TraceSettings` by keyword."""

    def __init__(self, *args: Any, **options: Any) -> None:
        names = TraceSettings.__dataclass_fields__
        settings = {name: options.pop(name) for name in list(options) if name in names}
        if "run_dir" not in settings:
            raise GradtraceError('TracedGRPOTrainer needs run_dir="runs/NAME": where the trace goes.')
        super().__init__(*args, **options)
        _start(self, TraceSettings(**settings))


def attach(trainer: GRPOTrainer, run_dir: str | os.PathLike[str], **settings: Any) -> TraceSession:
    """Trace `trainer` from its next `train()` on. `settings`: see `TraceSettings`.

    ```python
    attach(trainer, run_dir="runs/mine", write_every=10)
    ```
    """
    if not isinstance(trainer, GRPOTrainer):
        raise GradtraceError(f"attach() needs TRL's GRPOTrainer or a subclass, not {type(trainer).__name__}.")
    if isinstance(trainer, GRPOTracing):
        raise GradtraceError("this trainer is traced already: attach() once, or use TracedGRPOTrainer alone.")
    return _start(trainer, TraceSettings(run_dir, **settings))


def _start(trainer: Any, settings: TraceSettings) -> TraceSession:
    check_supported(trainer, settings)
    if not isinstance(trainer, GRPOTracing):
        own = type(trainer)
        trainer.__class__ = type(f"Traced{own.__name__}", (GRPOTracing, own), {"__module__": own.__module__})
    plain = super(GRPOTracing, trainer)._get_per_token_logps_and_entropies
    trainer.gradtrace = TraceSession(trainer, settings, plain)
    trainer.add_callback(_Events(trainer.gradtrace))
    return trainer.gradtrace
