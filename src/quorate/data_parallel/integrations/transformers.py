"""Hugging Face Trainer: `Trainer(…, policy=quorate.BackupSync(3, 1))`, with everything else as it was.

    from quorate.data_parallel.integrations.transformers import Trainer  # instead of: from transformers import Trainer

For another trainer, write `class MyTrainer(Trainer, Seq2SeqTrainer)`.
"""

from __future__ import annotations

import math
import sys
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from quorate.data_parallel.integrations.accelerate import prepare_other, trained_models_of
from quorate.data_parallel.module import DataParallel
from quorate.data_parallel.sampler import Sampler
from quorate.errors import install_line
from quorate.policies import FullSync, Policy

try:
    import transformers
    from transformers.trainer_callback import DefaultFlowCallback
except ImportError as error:
    raise ImportError(f"transformers is not installed; type: {install_line('transformers')}") from error


class Trainer(transformers.Trainer):  # type: ignore[misc]
    """`transformers.Trainer`, but the model is wrapped in `quorate.DataParallel`.

    policy: as for `DataParallel`; the default is full sync.
    data_parallel: further options of `DataParallel`, by name, such as `out`.

    Under a quorum, processes make different numbers of iterations. So `global_step` counts updates of the model, and
    so do `max_steps` and the intervals of logging, evaluating and saving. All processes reach the same version before
    they log, evaluate or save. Batches come from a `quorate.Sampler`.
    """

    def __init__(
        self, *arguments: Any, policy: Policy | None = None, data_parallel: dict[str, Any] | None = None, **named: Any
    ) -> None:
        super().__init__(*arguments, **named)
        self._policy = FullSync() if policy is None else policy
        self._options = dict(data_parallel or {})
        self._decides = not self._policy.takes_everybody
        #: Whether the averaged gradient is there before the step: then transformers clips it and reports its norm.
        self._averages_first = self._policy.takes_everybody and not self._policy.history
        if not self._averages_first and self.args.max_grad_norm:
            self._options.setdefault("clip_norm", self.args.max_grad_norm)
        if self._decides:
            self.args.average_tokens_across_devices = False  # it would gather in every iteration
            self.args.ignore_data_skip = True  # updates, not iterations, determine the used batches
            self._flow = _ByVersion(self)
            callbacks = self.callback_handler.callbacks
            callbacks[:] = [self._flow if type(one) is DefaultFlowCallback else one for one in callbacks]

    def get_train_dataloader(self) -> Any:
        loader = super().get_train_dataloader()
        if not self._decides:
            return loader
        self._options["sampler"] = Sampler(
            loader.dataset,
            self._train_batch_size,
            accumulate=self.args.gradient_accumulation_steps,
            seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
        )
        self._options["sampler"].endless = True
        kept = ("collate_fn", "num_workers", "pin_memory", "worker_init_fn", "persistent_workers", "prefetch_factor")
        options = {name: getattr(loader, name) for name in kept}
        made: Any = DataLoader(loader.dataset, batch_sampler=self._options["sampler"], **options)
        return prepare_other(self.accelerator, made)

    def set_initial_training_values(self, args: Any, dataloader: Any) -> tuple[Any, ...]:
        values = super().set_initial_training_values(args, dataloader)
        if not self._decides:
            return tuple(values)
        _, _, examples, _, per_update, _, _ = values
        batches = math.ceil(examples / self._options["sampler"].per_step)
        updates = math.ceil(batches / self._policy.begin(args.world_size).per_update)
        most = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * updates)
        self._flow.updates = updates
        steps = updates * args.gradient_accumulation_steps
        return math.ceil(most / updates), updates, examples, most * per_update, per_update, steps, most

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> Any:
        if not training:
            return super()._wrap_model(model, training, dataloader)
        net = self.accelerator.prepare_model(self.model, evaluation_mode=True)
        optimizer: Any = getattr(self.optimizer, "optimizer", self.optimizer)  # wrapped by an earlier train()
        wrapped = DataParallel(net, optimizer, self._policy, **self._options)
        trained_models_of(self.accelerator).add(wrapped)
        return wrapped

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """If the averaged gradient is not there before the step, DataParallel clips it later (`clip_norm`)."""
        return super()._clip_grad_norm(model) if self._averages_first else None

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return super()._get_grad_norm(model, grad_norm) if self._averages_first else None

    def _run_epoch(self, **named: Any) -> None:
        if self._decides:
            named["num_update_steps_per_epoch"] = sys.maxsize  # one pass covers all epochs; `max_steps` ends it
        super()._run_epoch(**named)

    def _maybe_log_save_evaluate(self, tr_loss: Any, *arguments: Any, **named: Any) -> None:
        if self._decides:
            self._flow.follow(self.args, self.state, self.control)
            if self.control.should_log or self.control.should_evaluate or self.control.should_save:
                self.model_wrapped.meet()
                self._flow.follow(self.args, self.state, self.control)
                # The trainer divides the loss by updates, but sums it over this process's iterations.
                tr_loss *= (self.state.global_step - self._globalstep_last_logged) / max(self._flow.iterations, 1)
                self._flow.iterations = 0
        super()._maybe_log_save_evaluate(tr_loss, *arguments, **named)

    def _finalize_training(self, *arguments: Any, **named: Any) -> Any:
        self.model_wrapped.finish()
        return super()._finalize_training(*arguments, **named)


class _ByVersion(DefaultFlowCallback):  # type: ignore[misc]
    """Counts updates of the model, and epochs by updates. It handles every one of several updates made at once."""

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._followed, self._is_following = trainer, 0, False
        self.iterations, self.updates = 0, 1  # since the last report; in an epoch

    def on_train_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self._followed, self.iterations = state.global_step, 0
        self._base = state.global_step - self._trainer.model_wrapped.version

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self.iterations += 1
        state.global_step = self._base + self._trainer.model_wrapped.version - 1  # the trainer adds one

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> Any:
        return self.follow(args, state, control)

    def follow(self, args: Any, state: Any, control: Any) -> Any:
        """Run the end-of-step callbacks for each update since the last call."""
        newest = self._base + self._trainer.model_wrapped.version
        self._is_following = True
        for state.global_step in range(self._followed + 1, newest + 1):
            super().on_step_end(args, state, control)
            state.epoch = state.global_step / self.updates
            if state.global_step % self.updates == 0:
                self._trainer.callback_handler.on_epoch_end(args, state, control)
        self._is_following = False
        self._followed = state.global_step = newest
        return control

    def on_epoch_end(self, args: Any, state: Any, control: Any, **named: Any) -> Any:
        return super().on_epoch_end(args, state, control, **named) if self._is_following else control
