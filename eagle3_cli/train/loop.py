"""The training loop: optimiser steps through accelerate, held-out numbers, states.

The next batch is a function of (lengths, seed, step), so a resumed run goes on as if it had never stopped.
"""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ..errors import Eagle3Error, OptionError
from ..interrupt import gentle_interrupt
from .compiling import (
    PAYS,
    Worker,
    compiles,
    give_back_memory,
    keep_memory,
    mixed_precision,
    release_threads,
    training_device,
)
from .loss import TrainingStep
from .model import Drafter, collate
from .order import Order, epoch_batches, rate
from .report import write_page
from .settings import Hooks, TrainSettings
from .shards import ShardReader
from .state import METRICS, LoopState, append_metrics, cut_metrics, load_state, read_metrics, save_state

HELD_OUT_TOKENS = 100_000  # an evaluation looks at no more
WAIT = timedelta(days=7)  # what the other processes grant the main one for its stages before the training


@dataclass(frozen=True)
class Job:
    """What the loop works on.

    drafter    on the CPU, initialised; trained in place
    reader     states of all samples; `training` and `held_out` are indices into it
    simulate   drafter -> acceptance on prompts unlike the training set, for the metrics
    folder     of the run
    """

    drafter: Drafter
    reader: ShardReader
    training: np.ndarray
    held_out: np.ndarray
    simulate: Callable[[Drafter], Mapping[str, Any]]
    folder: Path
    settings: TrainSettings


def training_step(drafter: Drafter, settings: TrainSettings, compiled: bool = False) -> TrainingStep:
    """The drafter with the objective that the settings ask for."""
    kind = "eagle" if settings.objective == "eagle" else settings.loss
    return TrainingStep(drafter, settings.ttt_steps, settings.decay, kind, compiled)


def accelerator_for(settings: TrainSettings) -> Any:
    """The Accelerator: one process, or as many as `accelerate launch` started.  OptionError for what shards weights.

    accelerate keeps one precision for all of a process.  Another one replaces it, for the accelerators made before,
    too; the process group stays.
    """
    from accelerate import Accelerator, DistributedType
    from accelerate.state import AcceleratorState
    from accelerate.utils import InitProcessGroupKwargs

    mixed, on_cpu = mixed_precision(settings), settings.runtime.device == "cpu"
    if AcceleratorState._shared_state and AcceleratorState().mixed_precision != mixed:
        AcceleratorState._reset_state()
    made = Accelerator(mixed_precision=mixed, cpu=on_cpu, kwargs_handlers=[InitProcessGroupKwargs(timeout=WAIT)])
    if made.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise OptionError(
            f"accelerate: expected whole copies of the drafter in every process, got {made.distributed_type.value}.",
            "Start with `accelerate launch --multi_gpu`.",
        )
    return made


class Loop:
    """A training in progress.  `step` optimiser steps are done of `total`."""

    def __init__(self, job: Job, hooks: Hooks) -> None:
        s = job.settings
        self.job, self.hooks = job, hooks
        self.accelerator = accelerator_for(s)
        release_threads()  # those of llama.cpp, if it has captured here
        self.worker = Worker(self.accelerator.device.type, s.runtime.threads)
        keep_memory()
        self.order = Order(job.reader.lengths[job.training], s.batch_tokens, s.seed)
        self.group = s.accumulate * self.accelerator.num_processes
        self.total = s.steps or max(1, math.ceil(self.order.length(s.epochs or 1.0) / self.group))
        self.optimisers = optimisers(job.drafter, s)
        self.objective = training_step(job.drafter, s, self._compiled())
        self.model, *self.prepared = self.accelerator.prepare(self.objective, *self.optimisers)
        self.eval_steps = s.eval_steps or max(1, self.total // 10)
        self.step, self.seconds, self.tokens = 0, 0.0, 0
        self.main = bool(self.accelerator.is_main_process)
        self.states, self.metrics = job.folder / "states", job.folder / METRICS
        self._since_log: list[dict[str, Any]] = []
        self._restore()

    def _compiled(self) -> bool:
        """Whether torch.compile is to be used."""
        s = self.job.settings
        rows = self.total * s.batch_tokens * s.accumulate * s.ttt_steps
        if s.compile == "off" or (s.compile == "auto" and rows < PAYS):
            return False
        return compiles(training_device(s), self.hooks.report)

    # ---- one optimiser step ----

    def _load(self, micro: int) -> dict[str, torch.Tensor]:
        """Micro-batch `micro` (counted from the start of the training) of this process, on the CPU."""
        index = micro * self.accelerator.num_processes + self.accelerator.process_index
        samples = self.job.training[self.order.batch(index)]
        return collate([self.job.reader.sample(int(i)) for i in samples])

    def _batches(self, reading: ThreadPoolExecutor) -> Iterator[dict[str, torch.Tensor]]:
        """The micro-batches from here on, each read while the one before is worked on."""
        micro = self.step * self.job.settings.accumulate
        coming = reading.submit(self._load, micro)
        while True:
            batch = coming.result()
            micro += 1
            coming = reading.submit(self._load, micro)
            yield {name: value.to(self.accelerator.device, non_blocking=True) for name, value in batch.items()}

    def _take_step(self, batches: Iterator[dict[str, torch.Tensor]]) -> dict[str, Any]:
        """One optimiser step: the mean over the rows that count in all micro-batches of all processes."""
        s, last = self.job.settings, self.job.settings.accumulate - 1
        factor = rate(self._done(self.step + 1), s.warmup)
        for group in (group for optimiser in self.optimisers for group in optimiser.param_groups):
            group["lr"] = s.lr * group["factor"] * factor
        sums = torch.zeros(3 + 3 * s.ttt_steps, dtype=torch.float64)
        for micro in range(s.accumulate):
            batch = next(batches)
            with self.accelerator.no_sync(self.model) if micro < last else contextlib.nullcontext():
                loss, found = self.model(batch)
                part = _sums(loss, found, batch, s.decay)
                self.accelerator.backward(loss * float(part[0]))
            sums += part
        sums = self._summed(sums)
        weight = float(sums[0]) or 1.0
        for parameter in self.job.drafter.parameters():
            if parameter.grad is not None:  # DistributedDataParallel averages over processes
                parameter.grad.mul_(self.accelerator.num_processes / weight)
        norm = self.accelerator.clip_grad_norm_(self.job.drafter.parameters(), s.clip)
        if not math.isfinite(float(norm)):
            raise Eagle3Error(
                f"training: the gradient of step {self.step + 1} is not finite.",
                f"Start again with a lower --lr than {s.lr:g}; the last state is of an earlier step.",
            )
        for optimiser in self.prepared:
            optimiser.step()
            optimiser.zero_grad()
        return {"sums": sums, "lr": s.lr * factor, "norm": float(norm)}

    def _summed(self, values: torch.Tensor) -> torch.Tensor:
        """values added up over the processes."""
        if self.accelerator.num_processes == 1:
            return values
        return self.accelerator.reduce(values.to(self.accelerator.device), "sum").cpu()

    def _agreed(self, value: float) -> float:
        """The main process's value in every process."""
        if self.accelerator.num_processes == 1:
            return value
        from accelerate.utils import broadcast

        return float(broadcast(torch.tensor([value], device=self.accelerator.device)))

    def _done(self, step: int) -> float:
        """Share of the training that is over after `step` steps: by count or by time, whichever is further."""
        minutes = self.job.settings.max_minutes
        return max(step / self.total, self.seconds / (60 * minutes) if minutes else 0.0)

    # ---- the whole training ----

    def run(self) -> dict[str, Any]:
        """Train to the end; the last evaluation.  A first Ctrl-C or SIGTERM raises once the state is saved."""
        try:
            self._run()
        finally:
            self.worker.close()
        return self.last_evaluation()

    def _run(self) -> None:
        if self.step == 0:
            self.worker(self._evaluate)
        endings = (signal.SIGINT, signal.SIGTERM)
        with gentle_interrupt(signals=endings) as interrupted, ThreadPoolExecutor(1, "batches") as reading:
            batches, saved = self._batches(reading), time.monotonic()
            while self._done(self.step) < 1.0:
                started = time.monotonic()
                self._since_log.append(self.worker(self._take_step, batches))
                self.step += 1
                self.seconds += self._agreed(time.monotonic() - started)
                self.tokens += int(self._since_log[-1]["sums"][2])
                over = self._done(self.step) >= 1.0
                self._tell(over)
                stop = not over and self._agreed(float(interrupted())) > 0
                due = self._agreed(time.monotonic() - saved) > 60 * self.job.settings.checkpoint_minutes
                if over or stop or due:
                    self.save()
                    saved = time.monotonic()
                if stop:
                    self.hooks.report(f"stopped after step {self.step} of {self.total}; the state is saved.")
                    interrupted.end()

    def _tell(self, over: bool) -> None:
        s = self.job.settings
        self.hooks.progress(f"training, step {self.step}", self._done(self.step))
        if over or self.step % s.log_steps == 0:
            self._log()
        if over or self.step % self.eval_steps == 0:
            self.worker(self._evaluate)

    def _log(self) -> None:
        parts, self._since_log = self._since_log, []
        sums = torch.stack([p["sums"] for p in parts]).sum(0)
        line = {
            "kind": "train", "step": self.step, "epoch": self.order.place(self.step * self.group - 1)[0],
            "tokens": self.tokens, "seconds": round(self.seconds, 3), "lr": parts[-1]["lr"],
            "gradient_norm": sum(p["norm"] for p in parts) / len(parts), **_means(sums),
        }  # fmt: skip
        if self.main:
            append_metrics(self.metrics, line)
        give_back_memory()

    def _evaluate(self) -> None:
        """Held-out loss and simulated acceptance, by the main process; the others wait."""
        if self.main:
            drafter = self.job.drafter
            drafter.eval()
            with torch.no_grad(), self.accelerator.autocast():
                held_out = self._held_out()
                simulated = dict(self.job.simulate(drafter))
            drafter.train()
            line = {"kind": "eval", "step": self.step, "held_out": held_out, "simulated": simulated}
            append_metrics(self.metrics, line)
            write_page(self.job.folder, self.job.settings, {})
        self.accelerator.wait_for_everyone()

    def _held_out(self) -> dict[str, Any]:
        """Means over the held-out samples, at most `HELD_OUT_TOKENS` of them; empty where nothing is held out."""
        lengths = self.job.reader.lengths[self.job.held_out]
        looked_at = self.job.held_out[np.cumsum(lengths) - lengths < HELD_OUT_TOKENS]
        sums = torch.zeros(3 + 3 * self.job.settings.ttt_steps, dtype=torch.float64)
        for indices in epoch_batches(self.job.reader.lengths[looked_at], self.job.settings.batch_tokens, 0, 0):
            batch = collate([self.job.reader.sample(int(i)) for i in looked_at[indices]])
            batch = {name: value.to(self.accelerator.device) for name, value in batch.items()}
            loss, found = self.objective(batch)
            sums += _sums(loss, found, batch, self.job.settings.decay)
        return _means(sums) if sums[0] else {}

    def last_evaluation(self) -> dict[str, Any]:
        """The newest evaluation in metrics.jsonl."""
        found = [line for line in read_metrics(self.metrics) if line["kind"] == "eval"]
        return found[-1] if found else {}

    # ---- state ----

    def save(self) -> None:
        """The state after this step, by the main process."""
        if self.main:
            tensors = {f"model.{name}": value.detach().cpu() for name, value in self._trained().items()}
            for name, parameter in self._trained().items():
                for key, value in self._optimiser_of(parameter).state.get(parameter, {}).items():
                    tensors[f"optimiser.{name}.{key}"] = value.detach().cpu()
            tensors["rng"] = torch.get_rng_state()
            save_state(self.states, LoopState(tensors, self.step, self.seconds, self.tokens))
        self.accelerator.wait_for_everyone()

    def _restore(self) -> None:
        state = load_state(self.states)
        if state is None:
            if self.main:
                cut_metrics(self.metrics, -1)
            return
        self.step, self.seconds, self.tokens = state.step, state.seconds, state.tokens
        torch.set_rng_state(state.tensors["rng"])
        with torch.no_grad():
            for name, parameter in self._trained().items():
                parameter.copy_(state.tensors[f"model.{name}"])
                prefix = f"optimiser.{name}."
                moments = {k.removeprefix(prefix): v for k, v in state.tensors.items() if k.startswith(prefix)}
                # AdamW counts its steps on the CPU
                self._optimiser_of(parameter).state[parameter] = {
                    key: value if key == "step" else value.to(parameter.device) for key, value in moments.items()
                }
        if self.main:
            cut_metrics(self.metrics, self.step)
        self.accelerator.wait_for_everyone()

    def _optimiser_of(self, parameter: nn.Parameter) -> torch.optim.Optimizer:
        """The one that moves it."""
        return next(o for o in self.optimisers if any(parameter is p for g in o.param_groups for p in g["params"]))

    def _trained(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.job.drafter.named_parameters() if p.requires_grad}


def optimisers(drafter: Drafter, settings: TrainSettings) -> list[torch.optim.Optimizer]:
    """Muon for the matrices between features and head, as asked for, and AdamW for the rest: the head and its norm at
    their own rate, and no decay on norms.  Muon's steps are scaled to the size of AdamW's, so one rate fits both."""
    turned: list[nn.Parameter] = []
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in drafter.named_parameters():
        if not parameter.requires_grad:
            continue
        of_head = name in ("lm_head.weight", "norm.weight")
        if parameter.dim() == 2 and not of_head and settings.optimiser == "muon":
            turned.append(parameter)
            continue
        decay = settings.weight_decay if parameter.dim() > 1 else 0.0
        groups.setdefault((settings.head_lr_factor if of_head else 1.0, decay), []).append(parameter)
    described = [{"params": p, "factor": f, "weight_decay": d} for (f, d), p in groups.items()]
    made: list[torch.optim.Optimizer] = [torch.optim.AdamW(described, lr=settings.lr, betas=(0.9, 0.95))]
    if turned:
        group = {"params": turned, "factor": 1.0, "weight_decay": settings.weight_decay}
        made.append(torch.optim.Muon([group], lr=settings.lr, adjust_lr_fn="match_rms_adamw"))
    return made


def _sums(
    loss: torch.Tensor, found: Mapping[str, Any], batch: Mapping[str, torch.Tensor], decay: float
) -> torch.Tensor:
    """float64 [3 + 3 k]: weight, loss times weight, tokens; then by step counted rows, right ones, acceptance.

    `ttt_loss` is a mean weighted by decay**i over the rows that count, so times this weight it is a sum, and sums of
    micro-batches and processes add up to the mean over all of them.
    """
    counted, right, acceptance = (found[name].cpu().double() for name in ("counted", "accuracy", "acceptance"))
    weight = (counted * decay ** torch.arange(len(counted), dtype=torch.float64)).sum()
    head = torch.stack([weight, loss.detach().cpu().double() * weight, batch["length"].sum().cpu().double()])
    return torch.cat([head, counted, right, acceptance])


def _means(sums: torch.Tensor) -> dict[str, Any]:
    """What `_sums`, added up, says: the loss, and accuracy and expected acceptance per step."""
    counted, right, acceptance = sums[3:].chunk(3)
    return {
        "loss": float(sums[1] / sums[0].clamp(min=1e-9)),
        "rows": int(counted.sum()),
        "accuracy": (right / counted.clamp(min=1)).tolist(),
        "acceptance": (acceptance / counted.clamp(min=1)).tolist(),
    }
