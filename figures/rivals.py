"""transformers' own `generate`, alone and with an `assistant_model`, timed as what else bench.py
measures: without the first round, which ends prefill."""
import time

import torch
from transformers import GenerationConfig
from transformers.utils import logging

from cache import BACKUP, RowRound
from cli.settings import Settings
from run.job import Models
from run.stats import Stats, TimedRound

OPTIONS = ("num_assistant_tokens", "num_assistant_tokens_schedule",
           "assistant_confidence_threshold")
ASSISTANTS = [  # values of OPTIONS to try
    [20, "constant", 0.4], [5, "heuristic", 0.4],  # the default of transformers, and an older one
    *([K, "constant", 0.0] for K in (3, 4, 5, 6, 8, 10)),
    [5, "heuristic", 0.0], [6, "constant", 0.4]]


logging.set_verbosity_error()  # of what `generate` asks of itself


class Generate:
    """Stands in for a `run.Decoder`: `generate`, with the same models, prompts, lengths and
    sampling, and no end-of-sequence."""

    def __init__(self, settings: Settings, models: Models, assistant: list):
        """`assistant` has the values of OPTIONS; if it is empty, no model assists."""
        self.settings = settings
        self.models = models
        self.assists = assistant != []
        # kept, since the heuristic schedule learns from text to text
        self.assistant = GenerationConfig(**dict(zip(OPTIONS, assistant)))
        self.placement = None  # one process does all
        self.stats = Stats()

    def __call__(self, prompts: list[list[int]]) -> None:
        """Continue one prompt."""
        settings = self.settings
        how = GenerationConfig(max_new_tokens=settings.max_new_tokens, do_sample=False)
        if settings.temperature:
            how.update(do_sample=True, temperature=settings.temperature, top_k=settings.top_k,
                       top_p=settings.top_p)
        target = self.models.target.model
        draft = self.models.draft.model
        # else `generate` would add the checkpoints' own eos tokens, filters and penalties
        target.generation_config = GenerationConfig()
        draft.generation_config = self.assistant
        tokens = torch.tensor(prompts, device=target.device)
        torch.manual_seed(settings.seed + len(self.stats.log))
        self.number = -1  # of the round: what is heard first is the prompt
        with torch.compiler.set_stance("force_eager"):  # layers may be compiled for our own passes
            target.generate(tokens, attention_mask=torch.ones_like(tokens), streamer=self,
                            generation_config=how, assistant_model=draft if self.assists else None)

    def put(self, tokens: torch.Tensor) -> None:
        """Hear the new tokens of a round, as a streamer does. It does not hear what was drafted."""
        end = time.perf_counter()
        new = tokens.flatten().tolist()
        if self.number >= 0:
            row = RowRound(0, BACKUP, [], 0, new[-1], new)
            self.stats.log.append(TimedRound(self.number, self.start, end, [row]))
        self.number += 1
        self.start = end

    def end(self) -> None:
        """Hear that the text has ended."""
