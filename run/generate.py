"""The shortest way in from Python: `Saguaro(temperature=0.7)("def f(x):")` continues a text."""
from dataclasses import replace
from typing import Callable

from cli.settings import Settings
from engine.errors import reported_as
from run.decoder import Decoder, batches_of
from run.job import Job, check_prompts, encode
from run.text import TextStream, text_pieces


class Saguaro:
    """Continues texts by its `decoder`, which takes token ids. `stats` are of the last call."""

    def __init__(self, **options):
        """Load both models. `options` are the fields of `Settings`; of its prompts only the length
        matters, for buffers (longer texts make new ones), and its files are not written."""
        with reported_as("Saguaro takes the options of saguaro.py by name", TypeError):
            self.job = Job(Settings(**options))
        self.decoder = Decoder(self.job.settings, self.job.load())
        self.stats = self.decoder.stats

    def __call__(self, texts: str | list[str],
                 on_text: Callable[[int, str], None] = lambda *_: None) -> str | list[str]:
        """Return what follows a text, or each of several. All ranks continue those of rank 0, and
        return the same. `on_text` hears the number of a text and a piece of what follows it, which
        may be empty: on rank 0 once it is verified, on others once the batch has ended. What it
        raises ends the call on all ranks: the others raise `UserError`."""
        if isinstance(texts, str):
            return self([texts], on_text)[0]
        with self.decoder.alone():
            return self.write(texts, on_text)

    def write(self, texts: list[str], on_text: Callable) -> list[str]:
        """Do as a call does, with models that are kept `alone` already."""
        job = self.job
        prompts = self.decoder.of_rank_0(
            lambda: encode(job.tokenizer, texts, job.settings.apply_chat_template))
        check_prompts(prompts, job.context, job.vocab_size)
        streams = [TextStream(job.tokenizer, prompt) for prompt in prompts]
        written = []

        def on_tokens(row: int, new_tokens: list[int], _) -> None:
            number = len(written) + row
            on_text(number, "".join(map(streams[number].step, new_tokens)))

        self.stats = self.decoder.stats = replace(self.decoder.stats, log=[], spans=[])
        if self.decoder.draft:
            self.decoder.draft.guess_counts.clear()
        for batch in batches_of(prompts, job.settings.batch_size):
            with self.decoder.ending_together():
                found = self.decoder.decode_batch(batch, on_tokens)
                for number, tokens in enumerate(found, start=len(written)):
                    text = "".join(text_pieces(job.tokenizer, prompts[number], tokens))
                    on_text(number, text.removeprefix(streams[number].text))
                    written.append(text)
        return written
