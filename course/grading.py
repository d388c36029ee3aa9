"""Grades the exercises of SHEET.md: `python -m pytest`, one alone: `python -m pytest -m exercise4`.

A test draws arguments, calls your function, and brings what comes out into a form in which all
right answers agree: the order of guesses is yours, and so is which uniform number draws which
token. It should say what the solution says: expected.json, in a hand-out. Marking draws other
arguments. values.toml lists the tests, their points and hints. A failure gives a hint, the
arguments, what your function returned or raised, and what was expected.
"""
import functools
import inspect
import json
import math
import re
import tomllib
from collections import defaultdict
from itertools import cycle, product
from pathlib import Path
from typing import Callable, NamedTuple, Sequence
from unittest import mock

import pytest
import torch
from torch.nn.functional import one_hot, pad

import cache
import draft_worker
import saguaro
import sampling
from cache import BACKUP, FINISHED, NO_OUTCOME, PRIMARY, Outcome, Speculation, SpeculationCache
from cli.settings import TINY
from course.exam import Exam, Said, agree, answers, failure, is_real, plain, same
from engine.model import CausalLM, load

VALUES = tomllib.loads(Path(__file__).with_name("values.toml").read_text("utf-8"))
EXPECTED = Path(__file__).with_name("expected.json")
SEED = 0  # of the arguments here
torch.set_num_threads(1)


# ---- 1 to 6: functions of numbers ----

SHAPES = (), (3,), (1, 1), (2, 3), (1,), (2, 1, 3)  # leading dimensions
EVEN = (torch.arange(400).double() + 0.5) / 400  # uniform numbers: of these shares are counted
# Numbers on both sides of the borders between tokens. These are multiples of 1/16, or of 1/20 if an
# alias method draws one of 5 tokens, whose probabilities are multiples of 1/4.
BORDERS = torch.arange(81).double() / 80
BORDERS = torch.cat([BORDERS[:1], BORDERS[1:-1] + 1e-9, BORDERS[1:] - 1e-9])
TRIPLES = (3, 4, 5), (4, 3, 5), (5, 12, 13), (12, 5, 13), (15, 8, 17)  # x^2 + y^2 = z^2
LEAST_IDS = 0, 2**16, 2**31  # of tokens: ids may be large
IDS = torch.tensor([0, 1, 8, 100, 1000, 10000, 2**15, 50257, 2**16, 10**5, 2**17, 2**18])


def possible_tokens(exam, q):
    """Draw a token `[...]` that is not impossible, from each distribution q `[..., V]`."""
    return (exam.numbers(*q.shape) * (q > 0)).argmax(-1)


def acceptance_arguments(exam, shape, V):
    """Draw p, q and tokens. In half of the cases p = q / 2 for all tokens but one, however unlikely
    they are."""
    p = exam.distributions(*shape, V)
    q = exam.distributions(*shape, V)
    stays = exam.numbers(*shape, 1) < 0.5
    likeliest = one_hot(q.argmax(-1), V)
    p = p.where(stays, (q + likeliest) / 2)
    return p, q, possible_tokens(exam, q)


def residual_arguments(exam, shape, V, equal=0.0, step=1.0):
    """Draw p and q. The share `equal` of all q are p, some are 0, others a `step` away from p."""
    p = exam.distributions(*shape, V, steepest=5)
    other = exam.distributions(*shape, V, steepest=5)
    kind = exam.numbers(*shape, 1)
    q = torch.where(kind < equal, p, (1 - step) * p + step * other)
    return p, torch.where(kind > 0.9, 0.0, q)


def saguaro_arguments(exam, shape, V, C=(0.25, 0.5, 0.9, 1.0)):
    """Draw q, an F that may be larger than V, and one of these C."""
    q = exam.distributions(*shape, V, steepest=5)
    F = exam.randrange(V + 3)
    return q, F, exam.choice(C)


def tied_arguments(exam, shape, V):
    """Draw q and F. Most probabilities are equal to another one."""
    q = sixteenths(exam, *shape, parts=4, V=V)
    return q, exam.randint(1, V), 0.5


def integral_arguments(exam, shape, V, **_):
    """Draw a budget, K, a and r for which Theorem 12 is integral: a and 1 - a are squares."""
    x, y, z = exam.choice(TRIPLES)
    K = exam.choice([1, 2])
    fan_out = [y * z ** (K - k) * x ** k for k in range(K)]
    fan_out.append(z * x ** K)
    times = exam.choice([1, 2])
    budget = times * sum(fan_out)
    a = (x / z) ** 2
    return budget, K, a, 1.0


def numbers_arguments(exam, shape, V, **ranges):
    """Yield a number from each range: an integer between integers, else a real number."""
    for least, most in ranges.values():
        draw = exam.randint if isinstance(least, int) else exam.uniform
        yield draw(least, most)


def fan_out_arguments(exam, shape, V, beyond=0):
    """Draw likelihoods of k and of guesses, and a budget, or one that lies `beyond` all outcomes.
    Likelihoods need no sum of 1, and no two outcomes are equally likely."""
    rows = exam.choice([1, 2, 4])
    K = exam.choice([0, 1, 3, 4])
    n = exam.randint(1, 7)
    right = exam.numbers(rows, K + 1, n).sort(-1, descending=True).values
    outcomes = (K + 1) * n
    budget = outcomes + beyond if beyond else exam.randrange(outcomes + 1)
    likelihood = exam.numbers(rows, K + 1)
    return likelihood, right, budget


ARGUMENTS = {"acceptance": acceptance_arguments, "residual": residual_arguments,
             "saguaro": saguaro_arguments, "tied": tied_arguments, "fan_out": fan_out_arguments,
             "integral": integral_arguments, "numbers": numbers_arguments}


def ask_function(exam, name, draw="numbers", V=None, type="float64", near=1e-6, times=3, **options):
    """Ask a function for its value, with arguments that `draw` draws with its `options`: for a few
    tokens in each of the shapes, or for V tokens in one."""
    function = FUNCTIONS[name]
    for shape in [(2, 3)] if V else SHAPES * times:
        width = V or exam.choice([3, 4, 7])
        arguments = ARGUMENTS[draw](exam, shape, width, **options)
        arguments = [as_type(type, argument) for argument in arguments]
        value = exam.call(function, *arguments)
        if draw == "tied":  # which of equally likely tokens lose weight is yours
            exam.says("sorted; ", value.sort(-1).values, near, of="value")
        else:
            exam.says("", value, near, of="value")
        if name == "geometric_fan_out":
            say_theorem(exam, value, *arguments)


def as_type(type: str, argument):
    """Return an argument, as a tensor of this type if it is a tensor of real numbers."""
    if isinstance(argument, torch.Tensor) and is_real(argument):
        return argument.to(getattr(torch, type))
    return argument


def say_theorem(exam, fan_out, budget, K, a, r):
    """Note the sum of F_0..F_K, and beside them those of a budget 100 times as large: a 100th of
    these is what the theorem says."""
    exam.says("the sum F_0 + .. + F_K of ", sum(fan_out), of="sum")
    if "theorem" in exam.only:
        large = FUNCTIONS["geometric_fan_out"](100 * budget, K, a, r)
        exam.says("F_0.., and 100 times what the theorem says; ", [[*fan_out], [*large]], 0,
                  within_one, "theorem")


def within_one(mine, right):
    """Return what is expected: your F_0.. if they are less than 1 from a 100th of the solution's
    large ones."""
    fan_out, _ = mine
    _, large = right
    is_far = any(abs(F - real / 100) > 1.02 for F, real in zip(fan_out, large))
    if is_far or len(fan_out) < len(large):
        return right
    return mine


def sixteenths(exam, *shape, V, parts=16):
    """Draw distributions `[*shape, V]` of multiples of 1/`parts`, which leaves no rounding."""
    tokens = exam.integers(V, *shape, parts)
    return one_hot(tokens, V).double().mean(-2)


def first_fitting(fits, *candidates):
    """Return of each of the candidates `[N, *places, ...]` the first of N that `fits`
    `[N, *places]`, in every place."""
    chosen = fits.int().argmax(0)
    places = torch.meshgrid(*map(torch.arange, chosen.shape), indexing="ij")
    return [each[chosen, *places] for each in candidates]


def of_token(part, tokens):
    """Return the entry `[...]` of each token, or place, in `part` `[..., V]`."""
    return part.gather(-1, tokens[..., None]).squeeze(-1)


def speculations(exam, K, rows, V, parts, rejected, point_masses):
    """Draw p `[rows, K+1, V]`, tokens `[rows, K]` and their q, in multiples of 1/`parts`; and which
    rows shall have a rejected token, the share `rejected`. Of 50 candidates for a place we take the
    first whose residual is in parts of 1/4, 1/2 or 1, and not in thirds. In the rows that reject,
    the first token can be rejected; in the others every token can be accepted."""
    shape = 50, rows, K + 1
    p = sixteenths(exam, *shape, V=V, parts=parts)
    q = sixteenths(exam, *shape, V=V, parts=parts)
    tokens = possible_tokens(exam, q)
    if point_masses:
        q = one_hot(tokens, V).double()
    rejects = exam.numbers(rows) < rejected
    p_token = of_token(p, tokens)
    q_token = of_token(q, tokens)
    no_thirds = (p - q).abs().sum(-1) != 1.5
    can_accept = rejects[:, None] | (p_token > 0)
    fits = no_thirds & can_accept
    fits[..., 0] &= ~rejects | (p_token < q_token)[..., 0]
    p, q, tokens = first_fitting(fits, p, q, tokens)
    return p, q[:, :K], tokens[:, :K], rejects


def uniforms_that_reject(exam, p_drafted, q_drafted, rejects):
    """Draw uniform numbers `[rows, K+1]` that reject a token in these rows, and none in the others.
    The drafted tokens have these p and q, `[rows, K]`."""
    rows, K = p_drafted.shape
    u = exam.numbers(100, rows, K + 1)
    stays = exam.numbers(100, rows, K + 1) < 0.4
    u = u.where(stays, 0.2 * u)
    rejected = u[..., :K] * q_drafted >= p_drafted
    fits = rejected.any(-1) == rejects  # with K = 0 none is rejected
    return first_fitting(fits, u)[0]


def on_borders(exam, u, p_drafted, q_drafted):
    """Return u with the numbers of acceptance on their border, p / q, or just below it."""
    K = p_drafted.shape[1]
    u = u.clone()
    below = 1e-9 * (exam.numbers(*p_drafted.shape) < 0.5)
    for border in (0, 0.25, 0.5, 0.75):  # not 1/3: it is rounded
        is_border = border * q_drafted == p_drafted
        nearby = (border - below).clamp(min=0)
        u[:, :K] = nearby.where(is_border, u[:, :K])
    return u


def ask_verify(exam, lookaheads=(1, 2, 3, 4), counts=(2, 20), width=None, type="float64",
               V=5, parts=4, rejected=1.0, ties=False):
    """Ask for k and t*, where a few tokens of V have probabilities. `ties` asks uniform numbers on
    borders, of acceptance and then of t*: equally many numbers on both sides of borders draw it."""
    for K, rows in product(lookaheads, counts):
        few = exam.choice([3, 4, 5])
        chosen = exam.sample(range(V), few)
        ids = torch.tensor(sorted(chosen))
        p, q, places, rejects = speculations(exam, K, rows, few, parts, rejected, width == 0)
        p_drafted = of_token(p[:, :K], places)
        q_drafted = of_token(q, places)
        u = uniforms_that_reject(exam, p_drafted, q_drafted, rejects)
        asked = on_borders(exam, u, p_drafted, q_drafted) if ties else u
        p = spread(p, ids, V, type)
        q = spread(q, ids, V, type)
        q_width = width if K else exam.choice([0, None])
        q = q[..., :q_width]
        tokens = ids[places]
        k, bonus = exam.call(sampling.verify, p, tokens, q, asked)
        exam.says("k of ", k, of="k")
        if rows == 1:
            form = [*bonus.shape, not is_real(bonus)]
            exam.says("t* is integers [B], here of shape [1]; ", form, of="t*")
        last = BORDERS if ties else EVEN[9::20]  # one in each 1/20
        say_bonus_shares(exam, (p, tokens, q, u), last, ids)


def spread(part, ids, V, type):
    """Return probabilities `[..., few]` as those of the tokens `ids` among V, `[..., V]`."""
    everything = torch.zeros(*part.shape[:-1], V)
    everything = everything.index_copy(-1, ids, part.float())
    return everything.to(getattr(torch, type))


def say_bonus_shares(exam, arguments, last, ids):
    """Note how often each of the tokens `ids` is t*, if `last` are the last uniform numbers."""
    N = len(last)
    p, tokens, q, u = (torch.cat([part] * N) for part in arguments)
    rows = len(p) // N
    u[:, -1] = last.repeat_interleave(rows)
    _, bonus = sampling.verify(p, tokens, q, u)
    drawn = bonus.view(-1, rows, 1) == ids
    shares = drawn.double().mean(0)
    exam.says(f"shares of the tokens {ids.tolist()} as t*, by {N} last uniform numbers, of ",
              shares, of="t*")


def ask_sample(exam, T=(0.5, 1, 2), top_k=(0,), top_p=(1.0,), C=(0.0, 0.5, 1.0), V=None,
               type="float64", fine=False):
    """Ask samplers with some of these settings for tokens and their q. If `fine`, C = 0 leaves
    multiples of 1/8 beside the likeliest token."""
    for shape in [(2,)] * 6 if V else [(3,), (2, 3), (1,), (1, 1)] * 3:
        width = V or exam.choice([4, 7])
        settings = [exam.choice(values) for values in (T, top_k, top_p, C)]
        logits = 6 * exam.numbers(*shape, width).to(getattr(torch, type))
        uniforms = exam.numbers(*shape)
        F = exam.randrange(width)
        if fine:
            F = 1
            others = sixteenths(exam, *shape, V=width - 1, parts=8)
            logits = pad(others, (1, 0), value=1.0).log()
        sampler = sampling.Sampler(*settings)
        tokens, q = exam.call(sampler.sample, logits, uniforms, F)
        exam.says("tokens are integers; ", not is_real(tokens), of="sigma")
        exam.arguments += f"\n            Sampler({', '.join(map(str, settings))})"
        near = 1e-6 if type == "float64" else 1e-3
        exam.says("the reported q of ", q, near, of="sigma")
        if V or sampler.greedy:
            drawn = tokens if sampler.greedy else q.gather(-1, tokens[..., None].long()) == 0
            exam.says("the likeliest token, or else whether its q is 0, of ", drawn, of="drawn")
        elif fine:
            say_shares(exam, sampler, logits, q, F, BORDERS, 1e-6)
        else:
            say_shares(exam, sampler, logits, q, F, EVEN, 0.01)
    if V:
        say_unlikely_tokens(exam)


def say_shares(exam, sampler, logits, q, F, numbers, near):
    """Note how often each token is drawn with these uniform numbers, in every place in another
    order. What is reported, q, is how often it should be."""
    *shape, V = logits.shape
    N = len(numbers)
    place = torch.arange(math.prod(shape))
    order = torch.arange(N)[:, None] + 37 * place
    uniforms = numbers[order % N].view(N, *shape)
    tokens, _ = sampler.sample(logits.expand(N, *shape, V), uniforms, F)
    shares = one_hot(tokens.long(), V).double().mean(0)
    both = torch.stack([shares, q.expand_as(shares)])

    def reported(mine, _):
        _, q = mine
        return [q, q]
    exam.says(f"the drawn tokens' shares, by {N} uniform numbers, and the reported q of ", both,
              near, reported, "drawn")


def say_unlikely_tokens(exam):
    """Note how many of 1000 tokens of 2e-8 each are drawn by 50 numbers 2e-8 apart, behind a likely
    token and before it: float32 cannot add these to 1."""
    weights = torch.full((2, 1001), 2e-8)
    weights[0, 0] = 1
    weights[1, -1] = 1
    logits = weights.log().expand(50, 2, -1)
    sampler = sampling.Sampler(temperature=1.0)
    numbers = 2e-8 * (torch.arange(50).double() + 400.5)
    numbers = numbers[:, None].expand(50, 2)
    low, _ = sampler.sample(logits, numbers, 0)
    high, _ = sampler.sample(logits, 1 - numbers, 0)
    different = []
    for row in (0, 1):  # the order of tokens is yours
        counts = [len(tokens[:, row].unique()) for tokens in (low, high)]
        different.append(max(counts))
    exam.says("different tokens by 50 numbers 2e-8 apart; ", different, 2, of="drawn")


def ask_likely_outcomes(exam, n=(7, 9), fewest=1):
    """Ask for `fewest` to 7 guesses, of ids that may be large. Each row has ids of its own."""
    for rows, K in product((1, 2, 4), (0, 1, 3)):
        width = exam.choice(n)
        candidates = exam.numbers(rows, K + 1, width).argsort(-1)
        candidates += exam.choice(LEAST_IDS)
        candidates += exam.integers(90, rows, 1, 1)
        budget = exam.randint(fewest, 7)
        ks = exam.integers(K + 1, rows, budget)
        fan_out = one_hot(ks, K + 1).sum(1)
        guesses = exam.call(cache.likely_outcomes, candidates, fan_out)
        pairs = torch.stack([guesses.num_accepted, guesses.bonus], -1)  # by name: an `Outcome`
        found = [sorted(row) for row in pairs.tolist()]
        exam.says("", found)


def ask_matches(exam):
    """Ask for many outcomes, all guessed in every row: each is found in its own place alone."""
    ks = torch.tensor([0, 1, 2, 8, exam.choice([16, 32, 64])])
    pairs = torch.cartesian_prod(ks, exam.randrange(99) + IDS)
    N = len(pairs)
    guesses = pairs[exam.numbers(N, N).argsort(-1)]  # every row in an order of its own
    outcomes = pairs[exam.sample(range(N), N)]

    def where(mine, right):
        wrong = mine and (torch.tensor(mine) != torch.tensor(right)).nonzero().tolist()
        if not wrong:
            return ""
        row, guess = wrong[0]
        k_and_bonus = guesses[row, guess].tolist()
        return f"the guess (k, t*) = {k_and_bonus}, the outcome {outcomes[row].tolist()}: "
    guessed = Outcome(*guesses.unbind(-1))
    found = exam.call(cache.matches, guessed, Outcome(*outcomes.unbind(-1)))
    exam.says(where, found)


def ask_look_up(exam, counts=(2, 4, 6, 3, 9, 20), times=1):
    """Ask for what was prepared. Each row asks for one of its own guesses, or misses it by its
    bonus token."""
    for rows, width in product(counts * times, (0, 3)):
        n = exam.randint(2, 12)
        K = exam.randint(1, 3)
        k = exam.integers(3, rows, n)
        bonus = exam.integers(4, rows, n)
        k[exam.numbers(rows, n) < 0.1] = NO_OUTCOME
        least_id = exam.choice(LEAST_IDS)
        asked = exam.integers(n, rows)
        missed_by = exam.choice([1, 2**16]) * exam.integers(2, rows)
        asked_k = of_token(k.clamp(min=0), asked)
        asked_bonus = of_token(bonus, asked) + missed_by
        outcome = Outcome(asked_k, least_id + asked_bonus)
        content = 10 * k + bonus  # of equal guesses the same
        tokens = content[..., None] + 100 * torch.arange(K)
        q = tokens[..., None] + 0.1 * torch.arange(width)
        prepared = SpeculationCache(Outcome(k, least_id + bonus), tokens, q)
        found, found_q, hit = exam.call(SpeculationCache.look_up, prepared, outcome)
        exam.says("hits of ", hit, of="hits")
        exam.says("hits are booleans; ", hit.dtype == torch.bool, of="hits")
        hit = hit.bool()
        exam.says("hits' tokens of ", found[hit], of="prepared")
        exam.says("hits' q of ", found_q[hit], of="prepared")


# ---- 7 and 8: the embedded draft, and random texts ----

OTHER_TEXT = "after another text. Where does the tree begin? Do guesses and branches correspond?"
WORDS = 2048  # the draft's vocabulary


@functools.cache
def model() -> CausalLM:
    return CausalLM(load(str(TINY / "draft"), None, torch.float64, "cpu"))


@functools.lru_cache(10000)
def logits_after(*text: int) -> torch.Tensor:
    """Return logits `[V]` after a text, by an ordinary forward pass."""
    output = model().model(torch.tensor([text]))
    return output.logits[0, -1].detach()


def sigma(text: list[int], F: int) -> list[float]:
    """Return what the token after a text is drawn from."""
    q = logits_after(*text).softmax(-1)
    return plain(sampling.saguaro_distribution(q, F, 0.5))


def start(exam, fan_out, rows, temperature=1.0, backup="neural", drafted=None, lengths=()):
    """Start the draft behind random texts of different lengths, with C = 1/2. Returns the draft,
    the texts, and a speculation of `drafted` tokens that is under verification."""
    lengths = lengths or exam.sample(range(2, 10), rows)
    texts = [exam.integers(WORDS, length).tolist() for length in lengths]
    plan = draft_worker.Plan([[*shape] for shape in fan_out], backup)
    sampler = sampling.Sampler(temperature, downweight=0.5)
    draft = draft_worker.DraftWorker(model(), sampler, SEED, plan)
    draft.start(texts, 30)
    draft.clock.read()  # the clock is the model's: forget what a failed answer left there
    model().forward_fn = mock.Mock(wraps=CausalLM.forward_eager)
    K = plan.lookahead if drafted is None else drafted
    tokens = exam.integers(WORDS, rows, K)
    sources = [PRIMARY, BACKUP] * rows
    source = torch.tensor(sources[:rows])
    return draft, texts, Speculation(tokens, torch.zeros(rows, K, 0), source)


# Behind texts of 3 and 5 tokens, and two drafted ones: branches of 3 tokens, k = 0, 2 and 1, 1
TREE = draft_worker.Tree(
    positions=torch.tensor([[3, 5], [6, 6]]),
    slots=torch.tensor([[7, 8], [9, 10], [11, 12]]),
    visible=torch.tensor([[[1, 1, 1, 0, 0, 0, 0, 1, 0, 1, 0, 1, 0],
                           [1, 1, 1, 1, 1, 0, 0, 0, 1, 0, 1, 0, 1]],
                          [[1, 1, 1, 1, 1, 1, 0, 1, 0, 1, 0, 1, 0],
                           [1, 1, 1, 1, 1, 1, 0, 0, 1, 0, 1, 0, 1]]]).bool())


def ask_tree_layout(exam, rows=2, K=3, n=4):
    """Ask where branches lie and what each of them sees. The order of the slots is yours."""
    fan_out = [n] + [0] * K
    draft, _, _ = start(exam, [fan_out, fan_out], rows)
    k = exam.integers(K + 1, rows, n)
    longest = int(draft.length.max())
    trunk = longest + K + 2
    tree = exam.call(draft_worker.tree_layout, draft.length, k, trunk, K)
    slots = tree.slots.flatten().tolist()
    ordered = range(trunk, trunk + K * n)
    in_order = dict(zip(slots, ordered))  # in that of steps
    exam.says("the slots of the tree, sorted; ", sorted(in_order), of="slots")
    exam.says("positions of the first tokens; ", tree.positions, of="positions")
    order = ""
    if slots != sorted(slots):
        order = f"the slots {tree.slots.tolist()} are in another order; below in that of steps; "
    for row, branch in product(range(rows), range(n)):
        visible = tree.visible[row, branch].nonzero().flatten()
        seen = sorted(in_order.get(slot, slot) for slot in visible.tolist())
        name = f"{order}branch {branch} of row {row}"
        say_seen(exam, name, seen, trunk)


def say_seen(exam, name: str, seen: list[int], trunk: int) -> None:
    """Note the slots that the branch of this name sees, of the trunk and of the tree behind it."""
    def difference(mine, right):
        slot = min({*mine} ^ {*right}, default="?")
        verb = "sees" if slot in [*mine] else "lacks"
        return f"{name} {verb} slot {slot}; all of "
    of_trunk = [slot for slot in seen if slot < trunk]
    exam.says(difference, of_trunk, of="trunk")
    exam.says(difference, seen[len(of_trunk):], of="tree")


def ask_tree_pass(exam, rows=2, K=3):
    """Ask for passes over a tree that is written down."""
    lengths = (3, 5)[:rows]
    fan_out = [2, 0]
    draft, texts, in_flight = start(exam, [fan_out, fan_out], rows, drafted=2, lengths=lengths)
    draft.trunk_pass(in_flight)
    positions, slots, visible = TREE
    slots = slots[:K]
    in_use = 7 + slots.numel()
    tree = draft_worker.Tree(positions[:rows], slots, visible[:rows, :, :in_use])
    k = tree.positions - draft.length[:, None]
    say_passes(exam, tree, k, texts, in_flight.tokens)


def ask_tree(exam, rows=2, K=3, n=4, beyond=0):
    """Ask for a tree that may begin `beyond` its trunk, and for passes over it."""
    fan_out = [n] + [0] * K
    draft, texts, in_flight = start(exam, [fan_out, fan_out], rows)
    draft.trunk_pass(in_flight)
    k = exam.integers(K + 1, rows, n)
    longest = int(draft.length.max())
    trunk = longest + K + beyond
    tree = exam.call(draft_worker.tree_layout, draft.length, k, trunk, K)
    say_passes(exam, tree, k, texts, in_flight.tokens)


def say_passes(exam, tree, k, texts: list[list[int]], drafted) -> None:
    """Ask for K passes over a tree, and note the logits of every branch, for k `[B, n]` accepted
    ones of the `drafted` tokens `[B, K]`, against an ordinary forward pass over its own text."""
    K = len(tree.slots)
    rows, n = k.shape
    tokens = exam.integers(WORDS, K, rows, n)
    logits = []
    for step in [*range(K)] * 2:  # again: what an earlier tree left must not be seen
        model().forward_fn.reset_mock()
        logits.append(exam.call(draft_worker.tree_pass, model(), tree, tokens[step], step))
        say_forward(exam, tree, step)
    places = product(range(2 * K), range(rows), range(n))
    for place, row, branch in places:
        step = place % K
        accepted = drafted[row, :k[row, branch]].tolist()
        own = tokens[:step + 1, row, branch].tolist()
        text = texts[row] + accepted + own
        what = (f"the logits after token {step} of branch {branch} of row {row}, at position "
                f"{len(text) - 1}; ")
        found = logits[place][row, branch]
        exam.says(what, found, 1e-6, lambda *_, text=text: plain(logits_after(*text)), "logits")


def say_forward(exam, tree, step: int) -> None:
    """Note what the model was called with in this step, once or for each branch: the positions, and
    which slots of later steps are visible."""
    calls = [call.args for call in model().forward_fn.call_args_list]
    positions = torch.cat([positions for _, _, positions, *_ in calls], 1)
    exam.says(f"positions in step {step}, less those of the tree; ", positions - tree.positions,
              of="advance")
    later = tree.slots[step + 1:].flatten().tolist()
    seen = []
    for slot in later:
        if any(visible[..., slot:slot + 1].any() for *_, visible in calls):
            seen.append(slot)
    exam.says(f"slots of steps after {step} that are seen; ", seen, of="later")


def ask_speculate(exam, kinds, T=(1.0,), drafted=(2,), backups=("neural",)):
    """Ask for the answer to an outcome. Rows hit (h), miss (m) or are finished (f)."""
    for kind, temperature, K, backup in product(kinds, T, drafted, backups):
        rows = len(kind)
        draft, texts, in_flight = start(exam, [[2, 1, 0], [0, 3, 0]], rows, temperature, backup, K)
        draft.trunk_pass(in_flight)
        q_width = len(draft.q_template)
        cached, outcome = cache_and_outcome(exam, kind, K, q_width)
        model().forward_fn.reset_mock()
        answer = exam.call(draft.speculate, in_flight, outcome, cached)
        timed = [passes for work, _, _, passes, _ in draft.clock.read() if work == "backup"]
        exam.says("the passes in a backup, timed, if a row missed; ", timed, of="timed")
        exam.says("passes of the draft, K or none; ", model().forward_fn.call_count, of="passes")
        active = [row for row in range(rows) if kind[row] != "f"]
        source = torch.as_tensor(answer.source)
        is_whole = source is answer.source and source.dtype != torch.bool
        exam.says("`source` is a tensor of whole numbers; ", is_whole, of="whole")
        exam.says("who drafted, the cache or the backup; ", source[active], of="source")
        exam.says("lengths of the texts; a finished one's stays; ", draft.length, of="text")
        for row in active:
            text = draft.text[row, :draft.length[row]]
            exam.says("accepted tokens and t* join the text; ", text, of="text")
            say_sent(exam, row, texts[row], answer)


def cache_and_outcome(exam, kind: str, K: int, q_width: int) -> tuple[SpeculationCache, Outcome]:
    """Draw a cache of three guesses a row, with two tokens for each, and an outcome: guess number 1
    in rows that hit (h), another token in those that miss (m), FINISHED in others (f)."""
    rows = len(kind)
    k = exam.integers(K + 1, rows, 3)
    order = exam.numbers(rows, 20).argsort(-1)
    bonus = order[:, :3]
    prepared = exam.integers(WORDS, rows, 3, 2)
    q = one_hot(prepared, WORDS).double()
    cached = SpeculationCache(Outcome(k, bonus), prepared, q[..., :q_width])
    misses = torch.tensor([each == "m" for each in kind])
    finished = torch.tensor([each == "f" for each in kind])
    outcome_k = k[:, 1].where(~finished, FINISHED)
    outcome_bonus = bonus[:, 1] + 20 * misses
    outcome = Outcome(outcome_k, outcome_bonus)
    return cached, outcome


def say_sent(exam, row: int, old_text: list[int], answer: Speculation) -> None:
    """Note the tokens and the q that a row is sent. `old_text` lacks the outcome."""
    def drafted_after(mine, right):
        is_old = mine and agree(mine[0], sigma(old_text, 0), 1e-6)
        return "the backup drafted after the old text; " if is_old else f"q of row {row}; "
    exam.says(drafted_after, answer.q[row], of="sent")
    exam.says("what was prepared, or the backup's tokens; ", answer.tokens[row], of="sent")


def ask_pre_speculate(exam, rows=2, shapes=((1, 2, 4), (0, 2, 5)), T=(1.0, 1.0), drafted=None):
    """Ask for guesses, and for every branch, against ordinary forward passes."""
    for temperature in T:
        shapes = [exam.sample(shape, len(shape)) for shape in shapes]
        draft, texts, in_flight = start(exam, shapes, rows, temperature, drafted=drafted)
        before = [draft.text.clone(), draft.length.clone(), shapes]
        draft.trunk_pass = mock.Mock(wraps=draft.trunk_pass)
        cached = exam.call(draft.pre_speculate, in_flight)
        spans = draft.clock.read()
        timed = sorted((work, passes > 0) for work, _, _, passes, _ in spans)
        exam.says("timed work, and if passes are in it: trunk, tree, or none; ", timed, of="timed")
        trunk_passes = draft.trunk_pass.call_count
        exam.says("the number of trunk passes; ", trunk_passes, of="stays")
        after = [draft.text, draft.length, draft.plan.fan_out]
        exam.says("text, length and fan-outs stay; ", same(before, after), of="stays")
        say_guesses(exam, cached.guesses, in_flight.source, shapes)
        V = len(draft.q_template)
        say_cached(exam, cached, texts, in_flight.tokens, shapes[PRIMARY], V)


def numbered(guesses: Outcome) -> list[list[tuple[int, int, int]]]:
    """Return for each row its guesses (k, t*) with their number, sorted; without those of
    nothing."""
    found = []
    for row in torch.stack(guesses, -1).tolist():
        pairs = [(k, bonus, number) for number, (k, bonus) in enumerate(row) if k != NO_OUTCOME]
        found.append(sorted(pairs))
    return found


def say_guesses(exam, guesses: Outcome, sources, shapes: list[list[int]]) -> None:
    """Note the guesses of every row. Its fan-out is the shape after its `source`."""
    rows = numbered(guesses)
    for row, source in enumerate(sources):
        pairs = [(k, bonus) for k, bonus, _ in rows[row]]
        exam.says(f"row {row}: guesses (k, t*), sorted, by the fan-out {shapes[source]} (in round "
                  "0 all for k = 0); ", pairs, of="guesses")


def say_cached(exam, cached: SpeculationCache, texts: list[list[int]], drafted, fan_out, V) -> None:
    """Note the shapes of a cache and, if these are right, all tokens of all branches. V = 0 stands
    for greedy drafts. How many rows and guesses a cache has is asked elsewhere."""
    K = len(fan_out) - 1
    tokens = cached.tokens
    q = cached.q
    B_and_n = cached.guesses.bonus.shape

    def right(mine, _):
        B, n, *_ = mine
        return [B, n, B, n, K, B, n, K, V]
    exam.says("the shapes of guesses [B, n], tokens [B, n, K], and q [B, n, K, V], V = 0 if "
              "greedy; ", [*B_and_n, *tokens.shape, *q.shape], 0, right, "q")
    exam.says("tokens are integers; ", not is_real(tokens), of="q")
    if not tokens.shape[1:] == q.shape[1:3] == (B_and_n[1], K):
        return
    guesses = numbered(cached.guesses)
    for row, step in product(range(len(texts)), range(K)):
        for k, bonus, branch in guesses[row]:
            text = texts[row] + drafted[row, :k].tolist() + [bonus]
            own = tokens[row, branch, :step + 1].tolist()
            say_step(exam, text, own, plain(q[row, branch, step]), fan_out[step])


def say_step(exam, text: list[int], tokens: list[int], q: list[float], F: int) -> None:
    """Note what token s_i, the last of these, was drawn from; for which F that is right."""
    *earlier, last = tokens
    place = len(earlier)

    def read(mine):
        return text + [int(token) for token in mine[:place]]

    def right(mine, _):
        if q:
            return mine[:place] + sigma(read(mine), F)
        likeliest = logits_after(*read(mine)).argmax()
        return mine[:place] + [int(likeliest)]

    def hint(mine, _):
        fits = [other for other in range(10)
                if q and agree(mine[place:], sigma(read(mine), other), 1e-6)]
        found = f"with F = {fits[0]}; after a hit it is {F}" if fits else OTHER_TEXT
        what = "the q reported of" if q else "the greedy"
        return f"after the guess {text[-1]}, {what} s_{place + 1} is that {found} "
    exam.says(hint, earlier + (q or [last]), 1e-6, right, "q")


def ask_draws(exam, rows=6, shape=(1, 1, 1, 1, 1), rounds=5, above=0.5, empty=False):
    """Ask for many tokens: every one is drawn with a number of its own. If `empty`, every second
    round is a first one. No two of rows, branches and steps are equally many, whatever their
    order."""
    draft, _, in_flight = start(exam, [[*shape]] * 2, rows)
    draft.sampler.downweight = 0.0  # excludes the likeliest token; all others are equally likely
    model().forward_fn = lambda _, tokens, *__: 9 * one_hot(tokens.long() % 8, WORDS).double()
    draw = counting_stream(exam, above)
    draft.uniforms[PRIMARY].draw = draw
    found = []
    for number in range(rounds):
        speculation = Speculation.empty(rows) if empty and number % 2 else in_flight
        cached = exam.call(draft.pre_speculate, speculation)
        axes = [cached.tokens.shape.index(size) for size in (rows, sum(shape))]
        tokens = cached.tokens.long().movedim(axes, (0, 1))
        q = cached.q.movedim(axes, (0, 1))
        say_excluded(exam, cached.guesses.bonus, tokens, q)
        found.append(tokens)
    say_different(exam, torch.stack(found), draw)


def counting_stream(exam, above: float) -> mock.Mock:
    """Return the `draw` of a stream in which each number draws a token of its own, and lies so far
    `above` the border."""
    tokens = cycle(exam.sample(range(8, WORDS - 1), WORDS - 9))

    def draw(*shape):
        numbers = [next(tokens) for _ in range(math.prod(shape))]
        return (above + torch.tensor(numbers).double().view(shape)) / (WORDS - 1)
    return mock.Mock(side_effect=draw)


def say_excluded(exam, bonus, tokens, q) -> None:
    """Note how many tokens `[B, n, K]` are drawn, or have a q, although C = 0 excludes them: each
    is the likeliest after the token before it."""
    before = torch.cat([bonus[..., None], tokens[..., :-1]], -1)
    likeliest = before % 8
    excluded = (tokens == likeliest) | (of_token(q, likeliest) != 0)
    exam.says("tokens that C = 0 excludes are drawn, or have a q; ", excluded.sum(), of="sigma")


def say_different(exam, found, draw: mock.Mock) -> None:
    """Note how many of the tokens `[rounds, rows, branches, steps]` are different, of all and along
    each dimension."""
    for axis, name in enumerate(("rounds", "rows", "branches", "steps")):
        different = found.movedim(axis, 0).flatten(1).unique(dim=0)
        exam.says(f"{name} that are not drawn alike; ", len(different), of=name)

    def twice(mine, right):
        if not draw.called:
            return "no number is from `self.uniforms[PRIMARY]`; "
        places = {}
        for place, token in zip(product(*map(range, found.shape)), found.flatten()):
            first = places.setdefault(int(token), place)
            if first != place:
                return ("numbers are used twice, or are not the stream's: by (round, row, branch, "
                        f"step) = {first} and {place}; ")
        return "numbers are used twice, or are not the stream's; "
    exam.says(twice, len(found.unique()), of="all")


def outcomes_and_replies(exam, rows, rounds, apart) -> tuple[list[Outcome], list[Speculation]]:
    """Draw what target and draft say in turn. All rows are finished in the same round, `rounds` or
    before; or `apart`, most of them early."""
    last = exam.randint(rounds // 2, rounds)
    ends = [exam.randrange(3) if apart else last for _ in range(rows - 1)]
    ends = exam.sample([*ends, last], rows)  # the round in which each row is finished
    ks = []
    for number in range(max(ends) + 1):
        ks.append([FINISHED if number >= end else exam.choice([0, 0, 1, 2]) for end in ends])
    outcomes = [Outcome(torch.tensor(k), exam.integers(99, rows)) for k in ks]
    replies = []
    for _ in outcomes[1:]:
        tokens = exam.integers(99, rows, 2)
        source = exam.integers(2, rows)
        replies.append(Speculation(tokens, torch.zeros(rows, 2, 0), source))
    return outcomes, replies


def recorder(draft, channel, outcomes: list, replies: list[Speculation]) -> mock.Mock:
    """Return what records the calls of a draft and a channel that give these, one after the
    other."""
    calls = mock.Mock()
    caches = [f"cache {number}" for number in range(len(outcomes))]
    for side, name, results in (
            (draft, "start", [None]), (draft, "speculate", replies),
            (draft, "pre_speculate", caches), (channel, "receive_outcome", outcomes),
            (channel, "send_speculation", [None] * len(replies))):
        results = [*results, AssertionError(f"`{name}` is asked after all rows had finished")]
        recorded = mock.create_autospec(getattr(side, name), side_effect=results)
        setattr(side, name, recorded)
        calls.attach_mock(recorded, name)
    return calls


def ask_serve(exam, counts=(1, 2, 3, 4), rounds=6, apart=False, gone=False):
    """Ask for the calls of `serve`, and how it ends. If `gone`, the channel breaks instead of
    saying so."""
    for rows in counts:
        outcomes, replies = outcomes_and_replies(exam, rows, rounds, apart)
        draft, texts, _ = start(exam, [[1, 1, 1]] * 2, rows)
        channel = saguaro.Channel(mock.Mock(), 2, exam.numbers(0))
        heard = [*outcomes[:-1], OSError()] if gone and rows > 1 else outcomes
        recorded = recorder(draft, channel, heard, replies)
        ks = str([outcome.num_accepted.tolist() for outcome in outcomes])
        end = "it returned"
        try:
            exam.call(saguaro.serve, draft, channel, texts, exam.randint(20, 40))
        except OSError:
            end = "the channel's error came out of it"
        except AssertionError as problem:  # a call too many
            end = str(problem)
        exam.arguments = f"rows whose k are, round by round, {ks:.300}"
        say_calls(exam, recorded, end)


def say_calls(exam, recorded: mock.Mock, end: str) -> None:
    """Note the order and the arguments of the calls of the first three rounds, and how it ends."""
    calls = recorded.mock_calls
    arguments = defaultdict(list)  # by name, as they are in the end: nobody may change them
    for name, given, named in calls:
        called = inspect.signature(getattr(recorded, name))
        values = called.bind(*given, **named).arguments.values()
        arguments[name].append(", ".join(map(as_text, values)))
    exam.says("the calls of `start`; ", arguments["start"], of="end")
    exam.says(f"its {len(calls)} calls of `serve`, and then; ", [len(calls), end], of="end")
    order = [name for name, *_ in calls if name != "start"]
    for number, name in enumerate(order[:12], start=1):  # of three rounds
        exam.says(f"call {number} of `serve` after `start`; ", name, of="order")
    first = arguments["pre_speculate"][:3]
    exam.says("the first calls of `pre_speculate`; ", first, of="arguments")
    for name in "receive_outcome", "speculate", "send_speculation":  # if it makes some
        exam.says(f"the first calls of `{name}`; ", arguments[name][:3], 0,
                  lambda mine, right: right if mine else mine, "arguments")


def as_text(argument) -> str:
    """Return an argument of a call, for comparison; any speculation with K = 0 will do."""
    if not isinstance(argument, Speculation) or argument.tokens.shape[1:] != (0,):
        return str(argument)
    kind = "real numbers as" if is_real(argument.tokens) else "integer"
    return f"K = 0, {kind} tokens of {len(argument.tokens)} rows, {len(argument.source)} sources"


# ---- the tests ----

FUNCTIONS = {  # of numbers
    "acceptance_probability": sampling.acceptance_probability, "residual": sampling.residual,
    "saguaro_distribution": sampling.saguaro_distribution, "best_fan_out": cache.best_fan_out,
    "acceptance_distribution": cache.acceptance_distribution, "throughput": cache.throughput,
    "geometric_fan_out": cache.geometric_fan_out, "expected_tokens": cache.expected_tokens,
    "critical_batch_size": cache.critical_batch_size}
ASKS = {"verify": ask_verify, "sample": ask_sample, "likely_outcomes": ask_likely_outcomes,
        "matches": ask_matches, "look_up": ask_look_up, "tree_layout": ask_tree_layout,
        "tree_pass": ask_tree_pass, "tree": ask_tree, "speculate": ask_speculate,
        "pre_speculate": ask_pre_speculate, "draws": ask_draws, "serve": ask_serve}


class Question(NamedTuple):
    """Holds what a test asks."""
    exercise: str
    points: int
    hint: str
    only: Sequence[str]  # the properties that it asks; none: all
    ask: Callable[[Exam], None]


TESTS = {}  # by name, its `Question`
for name, values in VALUES.items():
    ask = ASKS.get(name) or functools.partial(ask_function, name=name)
    for situation, changes in values["tests"].items():
        keywords = {"hint": values["hint"], "only": ()} | values.get("all", {}) | changes
        points, hint, only = map(keywords.pop, ("points", "hint", "only"))
        asks = functools.partial(ask, **keywords)
        TESTS[f"{name}, {situation}"] = Question(values["exercise"], points, hint, only, asks)


def exam_of(name: str, seed: int, solved: bool = False) -> list[Said]:
    """Return what the functions of this process, which are `solved` or an answer, say in a test."""
    torch.set_printoptions(precision=6, threshold=20, edgeitems=2)
    test = TESTS[name]
    exam = Exam(name, test.hint, seed, test.only)
    return answers(test.ask, exam, solved)


@functools.cache
def expected(name: str) -> list:
    """Return what the solution says; without the file it is what this process says first."""
    if EXPECTED.exists():
        return json.loads(EXPECTED.read_text("utf-8"))[name]
    return [each.value for each in exam_of(name, SEED, solved=True)]


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=getattr(pytest.mark, f"exercise{test.exercise}"))
    for name, test in TESTS.items()])
def test(name):
    said = exam_of(name, SEED)
    fault = failure(said, [each.value for each in said], expected(name))
    if "NotImplementedError: exercise" in fault:  # said once for each exercise, at the end
        pytest.skip(re.search(r"(exercise .*?) \(", fault)[1])
    if fault:
        pytest.fail(fault, pytrace=False)
