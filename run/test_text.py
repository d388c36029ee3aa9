"""Tests of text: with decoders of every kind, and streamed as the file has it."""
import json
import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cache import PRIMARY
from cli.settings import Settings
from run.job import Job
from run.screen import Display
from run.text import text_pieces

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["▁", "▁▁▁▁", "a", "▁b", "é", "▁return", "ü▁", ".", "\ufffd", *BYTES]
SPACES = decoders.Replace("▁", " ")
LLAMA_2 = [SPACES, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
DECODERS = {  # of tokenizers that are in use: Gemma's falls back to bytes, and strips nothing
    "byte level": (decoders.ByteLevel(), [*pre_tokenizers.ByteLevel.alphabet(), "ab", "ĠĠ"]),
    "byte fallback": (decoders.Sequence(LLAMA_2[:3]), PIECES),
    "strip": (decoders.Sequence(LLAMA_2), PIECES),
    "metaspace": (decoders.Metaspace(prepend_scheme="first"), PIECES),
    "word pieces": (decoders.WordPiece(), ["a", "##b", ".", "n't", "c"]),
    "suffixes": (decoders.BPEDecoder(), ["a</w>", "b", "c</w>"])}


def tokenizer_with(kind: str) -> PreTrainedTokenizerFast:
    decoder, pieces = DECODERS[kind]
    tokenizer = Tokenizer(models.WordLevel(dict(zip(pieces, range(len(pieces)))), pieces[0]))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("kind", DECODERS)
def test_the_text_is_what_the_prompt_lacks_whatever_the_decoder_does(kind):
    """2,000 random streams, stray bytes and special tokens among them."""
    tokenizer = tokenizer_with(kind)
    rng = random.Random(0)
    often = range(-2, 4)  # special tokens, blanks

    def some_tokens(most: int) -> list[int]:
        return [rng.choice([rng.choice(often) % len(tokenizer), rng.randrange(len(tokenizer))])
                for _ in range(rng.randint(1, most))]

    possible = 0
    for _ in range(2000):
        prompt = some_tokens(6)
        tokens = some_tokens(30)
        before = tokenizer.decode(prompt, skip_special_tokens=True)
        whole = tokenizer.decode(prompt + tokens, skip_special_tokens=True)
        pieces = text_pieces(tokenizer, prompt, tokens)
        assert len(pieces) == len(tokens)
        if whole.startswith(before):  # else a stray byte spoils the prompt's own last character
            possible += 1
            assert before + "".join(pieces) == whole, (prompt, tokens)
    assert possible > 1500


@pytest.mark.parametrize("kind, prompt, tokens, text", (
    ("strip", ["a"], ["▁▁▁▁", "▁return"], "     return"),
    ("strip", ["a"], ["▁b"], " b"),
    ("byte fallback", ["a"], ["a", "<0xEB>", "▁b"], "a\ufffd b"),
    ("byte fallback", ["a"], ["<0xF0>", "<0x9F>", "<0xA6>"], "\ufffd\ufffd\ufffd"),
    ("byte fallback", ["a"], ["<0xF0>", "<0x9F>", "<0xA6>", "<0x89>"], "🦉"),
    ("byte level", ["a"], ["Ã", "©", "Ã"], "é\ufffd")))
def test_what_is_streamed_is_what_the_file_has(kind, prompt, tokens, text, tmp_path, capsys):
    job = Job(Settings(mode="ar", prompt="x", output=str(tmp_path / "out")))
    job.tokenizer = tokenizer_with(kind)
    job.prompts = [job.tokenizer.convert_tokens_to_ids(prompt)]
    tokens = job.tokenizer.convert_tokens_to_ids(tokens)
    display = Display(job)
    display.begin()
    for token in tokens:
        display.show(0, [token], PRIMARY)
    display.end_batch([tokens], ["length"])
    _, output = map(json.loads, (tmp_path / "out").read_text("utf-8").splitlines())
    assert output["text"] == text
    assert capsys.readouterr().out == f"x\n----- continued -----\n{text}"
