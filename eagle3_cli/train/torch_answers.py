"""The target writes through transformers: the conversations, laws and cuts of answers.py, for a Hugging Face directory.

Several messages are generated together, padded on the left; which token comes next, and when a message ends, is said
for every row by its own conversation.  So what is written depends on the conversation and its number alone, as far as
batches of different widths give the same logits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from ..settings import RuntimeSettings, SamplingSettings, context_cells
from .capture import TORCH_TYPES
from .compiling import Worker
from .dialogue import AnswerSettings, Dialogue, Dialogues, Job, Writer, WriterProgress, Written
from .hf_tokenizer import HfTokenizer
from .render import Renderer
from .samples import Conversation
from .torch_states import load_model, torch_device


@dataclass(eq=False)
class _Row:
    """A message that is being written.  draws: where its random numbers come from; written: tokens so far."""

    dialogue: Dialogue
    job: Job
    draws: np.random.Generator
    written: list[int] = field(default_factory=list)
    ended: bool = False


class TorchAnswerWriter(Writer):
    """A Hugging Face directory that writes, in transformers.  An interruption loses at most one batch's messages."""

    def __init__(
        self,
        path: Path,
        runtime: RuntimeSettings,
        settings: AnswerSettings,
        progress: Callable[[WriterProgress], None] = lambda progress: None,
        dtype: str = "bf16",
    ) -> None:
        """FileError for a directory that cannot write.  Of runtime ctx_size, device and threads count.  progress is
        called after every token of a batch.  dtype: "bf16" or "f32"."""
        super().__init__(settings, progress)
        tokenizer = HfTokenizer(path)
        self.device = torch_device(runtime.device)
        self._worker = Worker(self.device.type, runtime.threads)
        self.model = load_model(path, TORCH_TYPES[dtype]).to(self.device).eval()
        self.model.generation_config = _generation()  # its penalties and temperatures are not the law here
        trained = int(self.model.config.max_position_embeddings)
        self.renderer = Renderer(tokenizer, context_cells(runtime.ctx_size, trained))

    def write(
        self, conversations: Iterable[Conversation], skip: int = 0, seen: Iterable[str] = ()
    ) -> Iterator[Written]:
        dialogues = Dialogues(conversations, skip, seen, self.settings, self.renderer)
        rows: list[_Row] = []
        started, tokens = time.perf_counter(), 0

        def progress(new: int) -> None:
            nonlocal tokens
            tokens += new
            self._progress(WriterProgress(dialogues.number - skip, tokens, time.perf_counter() - started))

        while True:
            self._fill(rows, dialogues)
            yield from dialogues.in_order()
            if not rows:
                return
            # user turns are short: beside answers their rows would wait
            batch = [row for row in rows if row.job.role == "user"] or rows
            self._generate(batch, progress)
            rows = [row for row in rows if row not in batch] + self._next(batch, dialogues)

    def _fill(self, rows: list[_Row], dialogues: Dialogues) -> None:
        while len(rows) < self.settings.sequences:
            dialogue = dialogues.next()
            if dialogue is None:
                return
            rows += self._begin(dialogue, dialogues)

    def _begin(self, dialogue: Dialogue, dialogues: Dialogues) -> list[_Row]:
        """The row of the next message; none where the conversation is finished."""
        job = dialogue.next_job()
        if job is None:
            dialogues.finish(dialogue)
            return []
        return [_Row(dialogue, job, np.random.default_rng(job.sampling.seed))]

    def _next(self, batch: Sequence[_Row], dialogues: Dialogues) -> list[_Row]:
        return [row for done in batch for row in self._begin(done.dialogue, dialogues)]

    def _generate(self, batch: Sequence[_Row], progress: Callable[[int], None]) -> None:
        """Write the message of every row to its end.  progress: told of the tokens that each step adds."""
        width = max(len(row.job.prompt) for row in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for i, row in enumerate(batch):
            ids[i, width - len(row.job.prompt) :] = torch.tensor(row.job.prompt)
            mask[i, width - len(row.job.prompt) :] = 1
        most = max(row.job.most for row in batch)
        turn = _Turn(batch, progress)
        self._worker(
            self.model.generate,
            ids.to(self.device),
            attention_mask=mask.to(self.device),
            generation_config=_generation(max_new_tokens=most, do_sample=False, use_cache=True),
            logits_processor=LogitsProcessorList([turn.draw]),
            stopping_criteria=StoppingCriteriaList([turn.take]),
        )

    def close(self) -> None:
        self._worker.close()
        del self.model


def _generation(**values: Any) -> Any:
    made: Any = GenerationConfig
    return made(**values)


@dataclass
class _Turn:
    """What `generate` asks of a batch: `draw` before each token, `take` after it."""

    rows: Sequence[_Row]
    progress: Callable[[int], None]

    def draw(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """logits [rows, V], where those of a sampled row leave nothing but the token that was drawn."""
        laws: dict[SamplingSettings, list[int]] = {}
        for i, row in enumerate(self.rows):
            if not row.ended and not row.job.sampling.greedy:
                laws.setdefault(replace(row.job.sampling, seed=None), []).append(i)
        for law, picked in laws.items():
            uniform = torch.tensor([self.rows[i].draws.random() for i in picked], device=logits.device)
            drawn = sample(logits[picked], law, uniform)
            logits[picked] = torch.full_like(logits[picked], -torch.inf).scatter(1, drawn[:, None], 0.0)
        return logits

    def take(self, ids: torch.Tensor, _scores: Any, **_: Any) -> torch.Tensor:
        """bool [rows]: which messages have ended."""
        going_on = [(row, token) for row, token in zip(self.rows, ids[:, -1].tolist(), strict=True) if not row.ended]
        for row, token in going_on:
            row.written.append(token)
            row.ended = row.dialogue.take(row.job, row.written)
        self.progress(len(going_on))
        return torch.tensor([row.ended for row in self.rows], device=ids.device)


def sample(logits: torch.Tensor, law: SamplingSettings, uniform: torch.Tensor) -> torch.Tensor:
    """int64 [n] ids drawn from rows of logits [n, V], in llama.cpp's order: top-k, top-p, min-p, temperature.

    uniform   [n] numbers from 0 to 1
    """
    count = law.top_k or logits.shape[1]
    ranked, ids = logits.float().topk(min(count, logits.shape[1]))
    chances = ranked.softmax(1)
    before = chances.cumsum(1) - chances
    kept = (before < law.top_p) & (chances >= law.min_p * chances[:, :1])
    kept[:, 0] = True
    reached = (ranked / law.temperature).masked_fill(~kept, -torch.inf).softmax(1).cumsum(1)
    place = (reached < (uniform[:, None] * reached[:, -1:])).sum(1)
    return ids.gather(1, place[:, None])[:, 0]
