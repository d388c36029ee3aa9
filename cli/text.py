"""Turns tokens into text, as they come, and text into what may be printed."""
import os
import re
from functools import partial

# all but tab and newline; what turns text around; half characters, and others not for XML
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069"
                     r"\ud800-\udfff\ufffe\uffff]")
BYTE = re.compile(r"<0x[0-9A-F]{2}>")  # a token of byte fallback; a run of them is decoded as one


def printable(text: str) -> str:
    """Return the text with control characters escaped, so that it cannot move the cursor."""
    return CONTROL.sub(lambda match: repr(match[0])[1:-1], text)


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
        text = self.decode(self.before + self.waiting)
        text = text[len(os.path.commonprefix([self.decode(self.before), text])):]
        in_run = BYTE.fullmatch(self.tokenizer.convert_ids_to_tokens(token) or "")
        unsettled = in_run or not self.decode([token]) or text.endswith("\ufffd")
        if not text or unsettled and not last:
            return ""
        self.text += text
        self.before = self.waiting
        self.waiting = []
        return text


def text_pieces(tokenizer, prompt: list[int], tokens: list[int]) -> list[str]:
    """Return the text of new tokens behind a prompt, in pieces, one for each token."""
    stream = TextStream(tokenizer, prompt)
    return [stream.step(token, place == len(tokens)) for place, token in enumerate(tokens, start=1)]
