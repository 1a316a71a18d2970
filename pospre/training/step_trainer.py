"""Composer's Trainer and Engine with less work around a step: overrides say what they leave out.

They are made for Composer 0.32.1; a test fails if Composer changes what they rely on.
"""

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from composer import Trainer
from composer.core import Callback, Engine, Event, get_precision_context
from composer.core.engine import Traces
from composer.core.types import TrainerMode
from composer.distributed import ddp_sync_context
from composer.loggers import LoggerDestination
from composer.utils import dist
from torch import Tensor

from pospre.batch import Batch
from pospre.training.callbacks.metrics import StepLosses, wait_for
from pospre.training.precision import cudnn_first

_OF_A_STEP = frozenset(
    event
    for event in Event
    if event.value.startswith(("batch_", "before_", "after_"))
    and not event.is_eval
    and not event.is_predict
    and event not in (Event.BEFORE_LOAD, Event.AFTER_LOAD)
)


class StepTrainer(Trainer):
    """Composer's Trainer without the parts of a step that our runs do not need.

    It does not search for a microbatch size, which is known before, and has no token counts and no
    training metrics. Ranks do not exchange their numbers of samples and batches: ``ViewLoader``
    makes them equal. With ``cudnn`` attention is computed by cuDNN first. The forward pass runs in
    the context ``casting``.
    """

    def __init__(
        self,
        *arguments: Any,
        cudnn: bool = False,
        casting: AbstractContextManager[Any],
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self._casting = casting
        self._attention = cudnn_first if cudnn else nullcontext
        StepEngine.take_over(self.engine)
        # a GPU copies the next batch and draws its masks while it computes a step
        self._beside = SideStream("cuda" if self.state.device.name == "gpu" else "cpu")

    def fit(self, *arguments: Any, **options: Any) -> None:
        """Train. Recomputed blocks then choose the same attention kernel as in the forward pass."""
        with self._attention():
            super().fit(*arguments, **options)

    def _use_closures(self) -> bool:
        """Return false: with a closure, Composer fetches the loss before the optimiser starts."""
        return False

    def _train_batch(self, use_grad_scaling: bool) -> Any:
        """Train on a batch and leave its losses on the device; Composer fetches each one.

        It waits for the losses of the previous step, so that at most one step is queued. Composer
        also searches all modules for FSDP, and asks a GPU for memory statistics.
        """
        state, spec, size = (
            self.state,
            self._train_data_spec,
            self.state.device_train_microbatch_size,
        )
        assert spec is not None and size is not None
        before = state.total_loss_dict
        losses: dict[str, Tensor] = {}
        self._train_microbatches(spec.split_batch(state.batch, size), losses)
        for optimizer in state.optimizers:
            if use_grad_scaling:
                assert state.scaler is not None
                state.scaler.step(optimizer)
            else:
                optimizer.step()
        self.logger.log_metrics({"trainer/device_train_microbatch_size": size})
        self.first_train_batch_complete = True
        state.total_loss_dict = StepLosses(losses)  # type: ignore[assignment]
        wait_for(before)
        return None  # the loop has nothing left to fetch

    def _train_microbatches(
        self,
        microbatches: Sequence[Batch],
        total_loss_dict: dict[str, Tensor],
        ddp_sync: bool = True,
    ) -> Tensor:
        """Sum gradients and losses of microbatches; all ranks have as many samples."""
        state, spec = self.state, self._train_data_spec
        assert spec is not None
        self.engine.run_event(Event.BEFORE_TRAIN_BATCH)
        use_grad_scaling = self._use_grad_scaling(state.precision, state.scaler)
        for optimizer in state.optimizers:
            optimizer.zero_grad(set_to_none=True)
        size = sum(self._samples(microbatch) for microbatch in microbatches)
        whole = state.batch
        for number, microbatch in enumerate(microbatches, 1):
            state.batch = self._beside(partial(self._on_device, microbatch))
            is_last = number == len(microbatches)
            for name, loss in self._train_microbatch(use_grad_scaling, size, is_last).items():
                key = f"loss/train/{name}"
                known = total_loss_dict.get(key)
                total_loss_dict[key] = loss if known is None else known + loss
        state.batch = whole
        if use_grad_scaling:
            assert state.scaler is not None
            for optimizer in state.optimizers:
                state.scaler.unscale_(optimizer)
        self.engine.run_event(Event.AFTER_TRAIN_BATCH)
        return total_loss_dict["loss/train/total"]

    def _on_device(self, microbatch: Batch) -> Batch:
        assert self._train_data_spec is not None
        batch: Batch = self.state.device.batch_to_device(microbatch)
        return self._train_data_spec.microbatch_transforms(batch)

    def _samples(self, batch: Any) -> int:
        assert self._train_data_spec is not None
        return int(self._train_data_spec.get_num_samples_in_batch(batch))

    def _train_microbatch(
        self, use_grad_scaling: bool, current_batch_size: int | float, is_final_microbatch: bool
    ) -> dict[str, Tensor]:
        """Run forward and backward; Composer copies the batch before, for metrics of training."""
        state, run_event = self.state, self.engine.run_event
        share = self._samples(state.batch) / current_batch_size
        with ddp_sync_context(state, is_final_microbatch, self._ddp_sync_strategy):
            with self._drawing_beside():
                run_event(Event.BEFORE_FORWARD)
            with get_precision_context(state.precision, state.precision_config), self._casting:
                state.outputs = state.model(state.batch)
            run_event(Event.AFTER_FORWARD)
            run_event(Event.BEFORE_LOSS)
            with get_precision_context(state.precision, state.precision_config):
                losses: Any = self._original_model.loss(state.outputs, state.batch)
            state.loss = losses
            run_event(Event.AFTER_LOSS)
            run_event(Event.BEFORE_BACKWARD)
            losses = state.loss  # an algorithm may have replaced them
            if share != 1:
                losses = {name: loss * share for name, loss in losses.items()}
            total = losses["total"]
            if use_grad_scaling:
                assert state.scaler is not None
                total = state.scaler.scale(total)
            total.backward()
            run_event(Event.AFTER_BACKWARD)
        return {name: loss.detach() for name, loss in losses.items()}

    @contextmanager
    def _drawing_beside(self) -> Iterator[None]:
        """Run the draws of algorithms on the side stream, only for training batches."""
        model: Any = self._original_model
        others, model.draw_stream = model.draw_stream, self._beside
        try:
            yield
        finally:
            model.draw_stream = others

    def _iter_dataloader(self, trainer_mode: TrainerMode) -> Iterator[Any]:
        """Yield batches. All ranks have equally many, so none asks the others if any are left."""
        if trainer_mode != TrainerMode.TRAIN:
            yield from super()._iter_dataloader(trainer_mode)
            return
        length = self.state.dataloader_len
        batches = itertools.islice(self.state.dataloader, None if length is None else int(length))
        while True:
            self.engine.run_event(Event.BEFORE_DATALOADER)
            try:
                batch = next(batches)
            except StopIteration:
                self.engine.run_marker_only_event(Event.AFTER_DATALOADER)
                return
            yield batch

    def _accumulate_time_across_ranks(
        self, num_samples: int | float, num_tokens: int, batch_time: timedelta
    ) -> tuple[int, int, timedelta]:
        """Return the counts of all ranks, and the time of this one, without a fetch."""
        ranks = dist.get_world_size()
        return int(num_samples) * ranks, num_tokens * ranks, batch_time


class StepEngine(Engine):
    """Composer's Engine without calls of empty methods.

    Composer calls every callback for each event of a step, and sorts the algorithms. The order is
    the same here: algorithms, callbacks, loggers.
    """

    _callbacks: list[Callback]
    _listening: dict[Event, list[Callback]]

    @classmethod
    def take_over(cls, engine: Engine) -> None:
        """Convert Composer's Engine into this class."""
        engine.__class__ = cls
        engine._callbacks, engine._listening = [], {}  # type: ignore[attr-defined]

    def run_event(self, event: Event | str) -> Traces:
        """Run an event; all but those of a training step as Composer does."""
        state = self.state
        if event not in _OF_A_STEP or state.profiler is not None or self._is_closed:
            return super().run_event(event)
        assert isinstance(event, Event)
        running = [each for each in state.algorithms if each.match(event, state)]
        for algorithm in self._compile(running, event) if len(running) > 1 else running:
            algorithm.apply(event, state, self.logger)
        for callback in self._listeners(event):
            callback.run_event(event, state, self.logger)
        return {}

    def _listeners(self, event: Event) -> list[Callback]:
        """Return the callbacks with a method for an event, loggers last; found once."""
        if self._callbacks != self.state.callbacks:
            self._callbacks, self._listening = list(self.state.callbacks), {}
        if event not in self._listening:
            heard = [each for each in self._callbacks if _listens(each, event)]
            heard.sort(key=lambda each: isinstance(each, LoggerDestination))
            self._listening[event] = heard
        return self._listening[event]

    def _debug_log(self, event: Event, msg: str) -> None:
        """Format lines only if they are asked for: Composer formats one for each callback."""
        if os.environ.get("ENGINE_DEBUG"):
            super()._debug_log(event, msg)


def _listens(callback: Callback, event: Event) -> bool:
    """Return whether a callback has a method of its own for an event, or one for all."""
    kind, own = type(callback), vars(callback)
    return any(
        name in own or getattr(kind, name) is not getattr(Callback, name)
        for name in ("run_event", event.value)
    )


class SideStream:
    """Runs functions that make a batch on a second stream; on CPUs it calls them.

    It does not wait for the main stream, so a function must not read what that stream computes. The
    main stream waits for the batch; the CPU waits for neither.
    """

    def __init__(self, device: str) -> None:
        self._device = torch.get_device_module(device)
        self._stream = self._device.Stream()

    def __call__(self, make: Callable[[], Batch]) -> Batch:
        """Return the batch that ``make`` returns, ready for the main stream."""
        main = self._device.current_stream()
        with self._device.stream(self._stream):
            batch = make()
        main.wait_stream(self._stream)
        for value in batch.values():
            if value.is_cuda:  # its memory is not used again before the main stream is done with it
                value.record_stream(main)
        return batch
