"""Turns tokens into text, as they come."""
import os
import re
from functools import partial

BYTE = re.compile(r"<0x[0-9A-F]{2}>")  # a token of byte fallback; a run of them is decoded as one


class TextStream:
    """Gives the text of new tokens as they come: decode(prompt + new) = decode(prompt) + text.
    Tokens are decoded behind others, because decoders may treat the first one differently."""

    def __init__(self, tokenizer, prompt: list[int]):
        """`prompt` holds token ids."""
        self.tokenizer = tokenizer
        self.decode = partial(tokenizer.decode, skip_special_tokens=True,
                              clean_up_tokenization_spaces=False)
        self.text = ""  # all that was given
        self.before = prompt  # in the end the last tokens that have given text
        self.waiting = []

    def step(self, token: int, last: bool = False) -> str:
        """Return the text that this token settles. What later ones could change waits; after the
        `last` nothing waits."""
        self.waiting.append(token)
        in_run = BYTE.fullmatch(self.tokenizer.convert_ids_to_tokens(token) or "")
        end = [*self.before[-3:], *self.waiting[-4:]][-4:]  # a letter has at most four bytes
        unsettled = in_run or not self.decode([token]) or self.decode(end).endswith("\ufffd")
        if unsettled and not last:
            return ""
        text = self.decode(self.before + self.waiting)
        text = text[len(os.path.commonprefix([self.decode(self.before), text])):]
        if text:
            self.text += text
            self.before = self.waiting
            self.waiting = []
        return text


def text_pieces(tokenizer, prompt: list[int], tokens: list[int]) -> list[str]:
    """Return the text of new tokens behind a prompt, in pieces, one for each token."""
    stream = TextStream(tokenizer, prompt)
    return [stream.step(token, place == len(tokens)) for place, token in enumerate(tokens, start=1)]
