"""What a test asks, what an answer says, and where that is not what is expected.

A test is a function of an `Exam`, which draws arguments, calls functions and notes values. With the
same seed all answers are asked the same. The values are numbers or text, so that they can be kept
in a file, or compared in a process that the answer has no part in.
"""
import itertools
import math
import random
import traceback
from contextlib import suppress
from inspect import signature
from typing import Callable, NamedTuple, Sequence

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from engine.errors import UserError


class Said(NamedTuple):
    """A value that an answer gave."""
    hint: Callable          # what was asked, by your value and the expected one
    arguments: str
    value: object           # numbers, text, or lists of them
    near: float             # how near it must be
    right: Callable | None  # what is expected, by your value and the solution's; none: the latter


class Exam(random.Random):
    """Draws the arguments of a test, the same on every machine, and notes what is said: of the
    properties `only`, or if these are none, all."""

    def __init__(self, test: str, hint: str, seed: int, only: Sequence[str] = ()):
        super().__init__(f"{seed} {test}")
        self.hint = f"{test}: {hint}"
        self.only = only
        self.arguments = "none yet"
        self.changed = ""  # whether a function changed its arguments
        self.said: list[Said] = []

    def numbers(self, *shape: int) -> torch.Tensor:
        numbers = [self.random() for _ in range(math.prod(shape))]
        return torch.tensor(numbers, dtype=torch.float64).view(shape)

    def integers(self, below: int, *shape: int) -> torch.Tensor:
        return (below * self.numbers(*shape)).long()

    def distributions(self, *shape: int, steepest=30) -> torch.Tensor:
        """Draw distributions, some nearly uniform, others with probabilities down to e^-steepest; a
        quarter is 0."""
        *places, V = shape
        scales = torch.tensor([0.5, 5, steepest])
        scale = scales[self.integers(3, *places, 1)]
        weights = torch.exp(-scale * self.numbers(*shape))
        weights *= self.numbers(*shape) < 0.75
        possible = self.integers(V, *places, 1)  # at least one token is
        weights.scatter_(-1, possible, 1.0)
        return weights / weights.sum(-1, keepdim=True)

    def call(self, function: Callable, *arguments):
        """Return what a function returns. It must leave its arguments as they are."""
        shown = tree_map_only(is_large, lambda tensor: f"a tensor {[*tensor.shape]}", arguments)
        names = ["..."] * len(shown)  # where a decorator, or torch.jit.script, hides them
        with suppress(ValueError):
            names[:0] = signature(function).parameters
        self.arguments = "\n            ".join(
            f"{name} = {value}" for name, value in zip(names, shown))
        # copies, so that what it changes spoils nothing else
        given = tree_map_only(torch.Tensor, torch.clone, arguments)
        result = function(*given)
        if not same(tree_leaves(arguments), tree_leaves(given)):
            self.changed = "they were changed"
        return result

    def says(self, what: str | Callable, value, near=1e-6, right=None, of="") -> None:
        """Note a value of a property, `of`; `what` says what it is, before the hint."""
        if self.only and of not in self.only:
            return
        summed = "sums of 16 parts of V; " if is_large(value) else ""

        def hint(mine, wanted):
            words = what if isinstance(what, str) else what(mine, wanted)
            return f"{words}{summed}{self.hint}"
        self.said.append(Said(hint, self.arguments, plain(value), near, right))


def same(these: list, others: list) -> bool:
    return len(these) == len(others) and all(
        torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
        for one, other in zip(these, others))


def plain(value):
    """Return a value as JSON has it. What stands for each of many tokens is summed in 16 parts."""
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):  # no numbers
        return str(value)
    if is_large(tensor):
        tensor = tensor.unflatten(-1, (16, -1)).sum(-1)
    return tensor.tolist()


def is_large(value) -> bool:
    return isinstance(value, torch.Tensor) and value.shape[-1:] > (1000,)


def agree(yours, expected, near: float) -> bool:
    """Return whether shapes are equal, integers stand where integers are expected, and numbers are
    as equal as rounding leaves them."""
    try:
        numbers = [torch.as_tensor(each, dtype=torch.float64) for each in (yours, expected)]
        torch.testing.assert_close(*numbers, rtol=1e-6, atol=near)
        return is_real(expected) or not is_real(yours)
    except (AssertionError, TypeError, ValueError, RuntimeError):  # or no numbers
        return isinstance(expected, str) and yours == expected


def is_real(numbers) -> bool:
    return torch.as_tensor(numbers).is_floating_point()


def shown(value) -> str:
    """Return a value as text, with 7 digits of each number: enough to tell numbers that do not
    agree apart. A long one is shown as a tensor, of which few numbers are printed."""
    rounded = tree_map_only(float, lambda number: float(f"{number:.7g}"), value)
    text = str(rounded)
    if isinstance(value, list) and len(text) > 300:
        return str(torch.tensor(value))
    return text


def failure(said: list[Said], yours: list, expected: list) -> str:
    """Return where your values first differ from what is expected, or "" if nowhere."""
    if len(yours) == len(expected) + 1 and isinstance(yours[-1], str):
        yours = yours[:-1]  # an exception after all that this test asks
    for asked, mine, right in itertools.zip_longest(said, yours, expected, fillvalue="nothing"):
        if asked == "nothing":
            return ("another number of values\n"
                    f"  yours     {shown(mine)}\n  expected  {shown(right)}")
        if asked.right and not isinstance(mine, str):
            right = asked.right(mine, right)
        if not agree(mine, right, asked.near):
            hint = asked.hint("" if isinstance(mine, str) else mine, right)
            return (f"{hint}\n  yours     {shown(mine)}\n  expected  {shown(right)}\n"
                    f"  arguments {asked.arguments}")
    return ""


def answers(ask: Callable[[Exam], None], exam: Exam, solved: bool) -> list[Said]:
    """Return what the functions of this process say, up to an exception. If they are `solved`, that
    is a `UserError`: no answer is measured by an error."""
    try:
        ask(exam)
        if "unchanged" in exam.only:
            exam.says("arguments stay as they are; ", exam.changed, of="unchanged")
    except Exception as problem:
        place = traceback.extract_tb(problem.__traceback__)[-1]
        error = f"{type(problem).__name__}: {problem} ({place.name}, line {place.lineno})"
        if place.name.startswith(("ask_", "say_")):  # no line of the answer's
            error = f"what was returned does not fit: {error}"
        if solved:
            raise UserError(f"the solution itself fails, {error}, in {exam.hint}") from problem
        exam.only = ()
        exam.says("", error)
    return exam.said
