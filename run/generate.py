"""The shortest way in from Python: `Saguaro(temperature=0.7)("def f(x):")` continues a text."""
from dataclasses import replace
from typing import Callable

from cli.launch import RANK_0, is_alone
from cli.settings import Settings
from engine.errors import UserError, reported_as
from run.assist import DraftProcess, job_of_calls
from run.decoder import Decoder, batches_of
from run.job import check_prompts, encode
from run.placement import in_turn
from run.text import TextStream, text_pieces


class Saguaro:
    """Continues texts by its `decoder`, which takes token ids. `stats` are of the last call. In ssd
    the draft has a process of its own. It ends with this object, with this program, or by `close`,
    also at the end of `with Saguaro() as saguaro:`, and is started anew by the next call."""

    def __init__(self, *, in_turns: bool = False, **options):
        """Load both models. `options` are the fields of `Settings`; of its prompts only the length
        matters, for buffers (longer texts make new ones), and its files are not written. With
        `in_turns` there is no other process: target and draft take turns in this one. Raises
        `UserError` where a launcher has started several ranks."""
        if not is_alone():
            raise UserError("Saguaro starts the draft's process itself: start this program by "
                            "python, not by torchrun, or decode by torchrun saguaro.py")
        with reported_as("Saguaro takes the options of saguaro.py by name", TypeError):
            settings = Settings(**options)
        assisted = settings.mode == "ssd" and not in_turns
        self.job = job_of_calls(settings, RANK_0 if assisted else {})
        if assisted:
            self.job.placement.assisted = True
            self.job.placement.draft_process = DraftProcess(settings)
        self.decoder = Decoder(settings, self.job.load())
        self.stats = self.decoder.stats
        with self.decoder.alone():
            pass  # the draft's process is there

    def __call__(self, texts: str | list[str],
                 on_text: Callable[[int, str], None] = lambda *_: None) -> str | list[str]:
        """Return what follows a text, or each of several. `on_text` hears the number of a text and
        a piece of what follows it, which may be empty, once it is verified. What it raises ends the
        call."""
        if isinstance(texts, str):
            return self([texts], on_text)[0]
        with self.decoder.alone():
            return self.write(texts, on_text)

    def write(self, texts: list[str], on_text: Callable) -> list[str]:
        """Do as a call does, with models that are kept `alone` already."""
        job = self.job
        prompts = encode(job.tokenizer, texts, job.settings.apply_chat_template)
        check_prompts(prompts, job.context, job.vocab_size)
        streams = [TextStream(job.tokenizer, prompt) for prompt in prompts]
        written = []

        def on_tokens(row: int, new_tokens: list[int], _) -> None:
            number = len(written) + row
            on_text(number, "".join(map(streams[number].step, new_tokens)))

        self.stats = self.decoder.stats = replace(
            self.decoder.stats, log=[], spans=[], guess_counts=[], fan_outs=[])
        for batch in batches_of(prompts, job.settings.batch_size):
            found = self.decoder.decode_batch(batch, on_tokens)
            for number, tokens in enumerate(found, start=len(written)):
                text = "".join(text_pieces(job.tokenizer, prompts[number], tokens))
                on_text(number, text.removeprefix(streams[number].text))
                written.append(text)
        return written

    def close(self) -> None:
        """End the draft's process, whoever still holds this object, such as a traceback."""
        if self.job.placement.draft_process:
            with in_turn():
                self.job.placement.draft_process.end()

    def __enter__(self) -> "Saguaro":
        return self

    def __exit__(self, *_) -> None:
        self.close()
