"""The shortest way in from Python: texts in, texts out."""
from typing import Callable

from cli.settings import Settings
from engine.errors import reported_as
from run.decoder import Decoder, batches_of
from run.job import Job, check_prompts, encode
from run.placement import gather
from run.stats import Stats
from run.text import TextStream, text_pieces


class Saguaro:
    """Continues texts: `Saguaro(temperature=0.7)("def f(x):")`. `stats` are those of the last call.
    Of its parts `job` has the settings and the tokenizer, and `decoder` takes token ids."""

    def __init__(self, **options):
        """Load both models. `options` are the fields of `Settings`. Its prompts only say how long
        buffers must be; a longer text makes new ones. Its files are not written."""
        with reported_as("Saguaro takes the options of saguaro.py by name", TypeError):
            settings = Settings(**options)
        self.job = Job(settings)
        self.decoder = Decoder(settings, self.job.load())
        self.stats = self.decoder.stats

    def __call__(self, texts: str | list[str],
                 on_text: Callable[[int, str], None] = lambda *_: None) -> str | list[str]:
        """Return what follows a text, or each of several. All ranks continue those of rank 0, and
        return the same. `on_text` hears the number of a text and a piece of what follows it, which
        may be empty: on rank 0 once it is verified, on others once the batch has ended."""
        if isinstance(texts, str):
            return self([texts], on_text)[0]
        settings = self.job.settings
        tokenizer = self.job.tokenizer
        prompts = encode(tokenizer, texts, settings.apply_chat_template) if texts else []
        if self.decoder.channel:
            prompts, *_ = gather(prompts)
        check_prompts(prompts, self.job.context, self.job.vocab_size)
        before = self.decoder.stats
        self.stats = self.decoder.stats = Stats(before.choices, before.in_turns)
        if self.decoder.draft:
            self.decoder.draft.guess_counts.clear()
        streams = [TextStream(tokenizer, prompt) for prompt in prompts]
        written = []

        def on_tokens(row: int, new_tokens: list[int], _) -> None:
            number = len(written) + row
            on_text(number, "".join(map(streams[number].step, new_tokens)))

        for batch in batches_of(prompts, settings.batch_size):
            for prompt, tokens in zip(batch, self.decoder(batch, on_tokens)):
                text = "".join(text_pieces(tokenizer, prompt, tokens))
                number = len(written)
                on_text(number, text.removeprefix(streams[number].text))
                written.append(text)
        return written
