"""Grades the exercises of SHEET.md: `python -m pytest`, one alone: `python -m pytest -m exercise4`.

A failure gives a hint, the arguments, what your function returned or raised, and what was expected:
worked out with a pencil (values.toml) or read off ordinary forward passes, so that nothing here
shows how a function is written. Write it as you please.
"""
import functools
import inspect
import itertools
import operator
import tomllib
import traceback
from pathlib import Path
from typing import Sequence
from unittest import mock

import pytest
import torch

import cache
import draft_worker
import saguaro
import sampling
from cache import BACKUP, FINISHED, PRIMARY, Outcome, Speculation, SpeculationCache
from cli.settings import TINY
from draft_worker import DraftWorker
from engine.model import CausalLM, load

VALUES = tomllib.loads(Path(__file__).with_name("values.toml").read_text("utf-8"))["values"]
SEED = 0  # of texts and guesses in exercises 7 and 8
SPLIT = 16500  # equal parts of each token of a pencil's vocabulary of 4: V = 66,000, above 2^16
torch.set_num_threads(1)
torch.set_printoptions(precision=4, threshold=20, edgeitems=2)


def check(arguments, hint: str, yours, expected, tolerance: float = 1e-6) -> None:
    """Equal shapes, integers where integers are expected, and numbers as equal as rounding leaves
    them; words are never right."""
    try:
        numbers = [torch.as_tensor(each, dtype=torch.float64) for each in (yours, expected)]
        torch.testing.assert_close(*numbers, rtol=1e-6, atol=tolerance)
        assert is_real(expected) or not is_real(yours)
    except (AssertionError, TypeError, ValueError, RuntimeError):  # or not even numbers
        raise pytest.fail.Exception(f"{hint}\n  yours     {yours}\n  expected  {expected}\n"
                                    f"  arguments {arguments}", pytrace=False) from None


def is_real(numbers) -> bool:
    return torch.as_tensor(numbers).is_floating_point()


def copied(value):
    """A copy of a tensor, or of a list or tuple with all that is in it."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, (list, tuple)):
        parts = [copied(part) for part in value]
        return value._make(parts) if hasattr(value, "_make") else type(value)(parts)
    return value


def same(value, other) -> bool:
    if isinstance(value, torch.Tensor):
        return torch.equal(value, other)
    if isinstance(value, (list, tuple)):
        return len(value) == len(other) and all(map(same, value, other))
    return value is other


def call(function, *arguments):
    """Call a function, which must leave its arguments as they are."""
    given = copied(arguments)
    result = function(*given)
    if not same(given, arguments):
        raise AssertionError(f"it changes its arguments, which then are {given}")
    return result


def attempt(hint: str, function, *arguments, expected="a result"):
    """Call the function and return its result; report an exception."""
    try:
        return call(function, *arguments)
    except Exception as problem:
        place = traceback.extract_tb(problem.__traceback__)[-1]
        raised = f"{type(problem).__name__}: {problem} ({place.name}, line {place.lineno})"
    check(arguments, hint, raised, expected)


# ---- 1 to 6: values ----

def evenly(p: torch.Tensor) -> torch.Tensor:
    """Uniform numbers, as even as can be, with both ends of [0, 1): few for a large vocabulary."""
    count = 1000 if p.shape[-1] == 4 else 8
    numbers = (torch.arange(count).double() + 0.5) / count
    ends = 1 + count // 300
    numbers[:ends] = 0
    numbers[-ends:] = 1 - 1e-9
    return numbers


def shares(tokens: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """How often each of four tokens (of a large vocabulary: each quarter) was drawn `[n, 4]`."""
    quarters = tokens.reshape(len(p), -1) // (p.shape[-1] // 4)
    return torch.nn.functional.one_hot(quarters, 4).double().mean(1)


def verify(p, tokens, q, uniforms):
    numbers = evenly(p)
    q = q.reshape(*tokens.shape, q.shape[-1])
    rows = [part.repeat_interleave(len(numbers), 0) for part in (p, tokens.long(), q, uniforms)]
    rows[3] = torch.cat([rows[3], numbers.repeat(len(p))[:, None]], 1)
    num_accepted, bonus = call(sampling.verify, *rows)
    alone = call(sampling.verify, *(part[-1:] for part in rows))
    if not same(alone, (num_accepted[-1:], bonus[-1:])):
        raise AssertionError(f"the last row gets {num_accepted[-1:]}, {bonus[-1:]}, alone {alone}")
    return num_accepted[::len(numbers)], shares(bonus, p)


def sample(weights, temperature, downweight, fan_out, top_k=0, top_p=1.0):
    sampler = sampling.Sampler(temperature, top_k, top_p, downweight)
    numbers = evenly(weights).view(2, -1)
    logits = weights.log().repeat_interleave(2, 0)[:, None].repeat(1, numbers.shape[1], 1)
    tokens, q = call(sampler.sample, logits, numbers.repeat(len(weights), 1), fan_out)
    return shares(tokens, weights), q[::2, -1]


def geometric_fan_out(*arguments):
    shape = cache.geometric_fan_out(*arguments)
    return shape, sum(shape)


def likely_outcomes(candidates, fan_out):
    num_accepted, bonus = call(cache.likely_outcomes, candidates, fan_out)
    return (100 * num_accepted + bonus).sort().values


def look_up(k, bonus, tokens, *outcome):
    guesses, outcome = Outcome(k, bonus), Outcome(*outcome)
    prepared = SpeculationCache(guesses, tokens, -tokens[..., None])
    found, q, hit = call(SpeculationCache.look_up, prepared, outcome)
    found, q = (part.where(hit[:, None], 0) for part in (found, q[..., 0]))
    return call(cache.matches, guesses, outcome), hit, found, q


FUNCTIONS = {function.__name__: function for function in (
    sampling.acceptance_probability, sampling.residual, verify,
    sampling.saguaro_distribution, sample, cache.acceptance_distribution, geometric_fan_out,
    likely_outcomes, look_up, cache.expected_tokens, cache.throughput, cache.critical_batch_size)}


def as_tensor(value):
    """Lists as tensors, of float64 or int64."""
    if not isinstance(value, list):
        return value
    tensor = torch.tensor(value, dtype=torch.float64)
    return tensor if torch.tensor(value).is_floating_point() else tensor.long()


def split(parameter: str, value):
    """An argument for the large vocabulary, in which every token is split in equal parts."""
    if parameter in ("tokens", "fan_out", "top_k"):
        return value * SPLIT
    if parameter in ("p", "q", "weights"):
        return value.repeat_interleave(SPLIT, -1) / SPLIT
    return value


def together(result):
    """A distribution over split tokens as one over the four; other results as they are."""
    if isinstance(result, torch.Tensor) and result.shape[-1:] == (4 * SPLIT,):
        return result.unflatten(-1, (4, SPLIT)).sum(-1)
    return result


def ways(values: dict, case: list, right: list):
    """A case as it stands, and in other ways that give the same: the name of the way, the
    arguments, what is expected, and how nearly."""
    near = values.get("tolerance", 1e-6)
    yield "", case, right, near
    if not isinstance(case[0], torch.Tensor):
        return
    for row in range(len(case[0]) if case[0].dim() > 1 else 0):
        alone = [part[row:row + 1] if isinstance(part, torch.Tensor) else part for part in case]
        parts = [part[row:row + 1] for part in right] if "parts" in values else right[row:row + 1]
        yield f", row {row} alone", alone, parts, near
    if is_real(case[0]):
        narrow = [part.float() if isinstance(part, torch.Tensor) and is_real(part) else part
                  for part in case]
        yield " in float32", narrow, right, max(near, 0.001)
        if values.get("split", True):
            names = inspect.signature(FUNCTIONS[values["function"]]).parameters
            few = 0.1249 if "parts" in values else near  # shares of 8 draws
            yield ", V = 66,000", [*map(split, names, case)], right, few


@pytest.mark.parametrize("values", [
    pytest.param(values, marks=getattr(pytest.mark, f"exercise{values['exercise']}"))
    for values in VALUES], ids=operator.itemgetter("function"))
def test_values(values):
    for given, right in values["cases"]:
        case = [as_tensor(value) for value in given]
        for way, arguments, expected, near in ways(values, case, right):
            hint = f"{values['function']}{way}: {values['hint']}"
            yours = attempt(hint, FUNCTIONS[values["function"]], *arguments, expected=expected)
            hints = [f"{part} of {hint}" for part in values.get("parts", [])]
            if not hints or not isinstance(yours, tuple):
                hints, yours, expected = [hint], [yours], [expected]
            for asked, part, value in zip(hints, yours, expected):
                check(arguments, asked, together(part), value, near)


@pytest.mark.exercise5
def test_5():
    """45 outcomes, all guessed in every row: each is found in its own place alone."""
    sizes = torch.tensor([0, 1, 100, 1000, 10000, 32000, 2**15, 50257, 2**16, 100000, 128256,
                          2**17, 151936, 256000, 2**18])
    k, bonus = torch.cartesian_prod(torch.arange(3), 7 + sizes).T
    places = torch.arange(len(k))
    guesses = Outcome(*(part.repeat(len(k), 1) for part in (k, bonus)))
    tokens = places.repeat(len(k), 1)[..., None]
    arguments = SpeculationCache(guesses, tokens, -tokens[..., None]), Outcome(k, bonus)
    match = attempt("matches", cache.matches, guesses, arguments[1])
    for guess, outcome in (match != torch.eye(len(k))).nonzero()[:1].flip(1).tolist():
        yours = bool(match[outcome, guess])
        check((k[[guess, outcome]], bonus[[guess, outcome]]),
              "matches, of the guess (k, t*) and the outcome", yours, not yours)
    found, _, hit = attempt("look_up", SpeculationCache.look_up, *arguments)
    check(arguments, "look_up of 45 outcomes, all guessed: hits", hit, hit | True)
    check(arguments, "look_up of 45 outcomes, all guessed: their places", found[:, 0], places)


# ---- 7 and 8: the embedded draft, and two texts ----

MODEL = CausalLM(load(str(TINY / "draft"), None, torch.float64, "cpu"))
V = MODEL.vocab_size
torch.manual_seed(SEED)
LENGTH = torch.tensor([8, 4])
TEXTS = [torch.randint(V, (length,)).tolist() for length in LENGTH.tolist()]
IN_FLIGHT = Speculation(torch.randint(V, (2, 2)), torch.zeros(2, 2, 0),
                        torch.tensor([PRIMARY, BACKUP]))
DRAFTED = IN_FLIGHT.tokens.tolist()
GUESSED = torch.tensor([[2, 0, 1, 0], [1, 1, 2, 0]])  # k of four branches in two rows
SHAPES = [3, 1, 2], [1, 4, 1]  # F_0..F_K after a hit and after a backup
OTHER_TEXT = "after another text. Where does the tree begin? Do guesses and branches correspond?"


def plain(text: list[int], tokens: Sequence[int] = ()) -> torch.Tensor:
    """Logits `[1 + K, V]` after a text and after each of K tokens, by an ordinary forward pass."""
    return MODEL.model(torch.tensor([[*text, *tokens]])).logits[0, len(text) - 1:].detach()


def sigma(logits: torch.Tensor, fan_out: list[int]) -> torch.Tensor:
    """The distributions `[K, V]` that tokens are drawn from, each with its own of K fan-outs."""
    return torch.stack([sampling.saguaro_distribution(q, F, 0.5)
                        for q, F in zip(logits.softmax(-1), fan_out)])


def first_rows(batch, count: int):
    """An `Outcome` or a `Speculation` of the first rows of a batch alone."""
    return batch._make(part[:count] for part in batch)


def worker(after_primary, after_backup, temperature=1.0, backup="neural",
           seed=SEED, texts=TEXTS) -> DraftWorker:
    """The draft at the start of the texts, with C = 1/2, and fan-outs by hand."""
    plan = draft_worker.Plan([[*after_primary], [*after_backup]], backup)
    draft = DraftWorker(MODEL, sampling.Sampler(temperature, downweight=0.5), seed, plan)
    draft.start(texts, 30)
    draft.clock.read()  # the clock is MODEL's: forget what a failed answer left there
    return draft


@pytest.mark.exercise7
def test_7():
    """Every branch of a tree, against an ordinary forward pass over its own text."""
    draft = worker([1, 1, 1, 0], [1, 1, 1, 0])
    draft.trunk_pass(IN_FLIGHT)
    tree = attempt("tree_layout", draft_worker.tree_layout, LENGTH, GUESSED, 10, 3)
    tokens = torch.arange(21, 45).view(3, 2, 4)
    for step in (0, 1, 2, 0, 1, 2):  # again: what an earlier tree left must not be seen
        MODEL.forward_fn = mock.Mock(wraps=MODEL.forward_eager)
        arguments = MODEL, tree, tokens[step], step
        logits = attempt("tree_pass", draft_worker.tree_pass, *arguments)
        calls = [call.args[3] for call in MODEL.forward_fn.call_args_list]  # or one of all branches
        width = max(seen.shape[-1] for seen in calls)
        visible = torch.cat([torch.nn.functional.pad(seen, (0, width - seen.shape[-1]))
                             for seen in calls], 1)
        for row, branch in itertools.product(range(2), range(4)):
            name = f"branch {branch} of row {row}"
            k = int(GUESSED[row, branch])
            seen = visible[row, branch].nonzero().flatten().tolist()
            right = [*range(LENGTH[row] + k), *tree.slots[:step + 1, branch].tolist()]
            for slot in sorted({*seen} ^ {*right}):
                verb = "sees" if slot in seen else "does not see"
                check(arguments, f"{name} {verb} slot {slot}: all that it sees", seen, right)
            text = TEXTS[row] + DRAFTED[row][:k] + tokens[:step + 1, row, branch].tolist()
            check(arguments, f"token {step} of {name}: position {len(text) - 1}, and its slot",
                  logits[row, branch], plain(text)[0])


@pytest.mark.exercise8a
@pytest.mark.parametrize("k, bonus, hits, temperature", [
    ([1, 1], [7, 9], [0], 1.0), ([0, 1], [3, 7], [1], 1.0), ([2, 0], [9, 9], [], 1.0),
    ([0, 1], [9, 7], [0, 1], 1.0), ([FINISHED, 0], [9, 8], [1], 1.0),
    ([FINISHED, 0], [9, 9], [], 1.0), ([1, FINISHED], [9, 9], [], 1.0), ([1, 2], [7, 9], [0], 0.0),
    ([1], [7], [0], 1.0), ([2], [7], [], 1.0)])
def test_8a(k, bonus, hits, temperature):
    """The cache guesses (0, 9) and (1, 7) in row 0, (0, 8) and (1, 7) in row 1."""
    draft = worker([1, 1, 0], [0, 2, 0], temperature, texts=TEXTS[:len(k)])
    in_flight = first_rows(IN_FLIGHT, len(k))
    draft.trunk_pass(in_flight)
    guesses = Outcome(torch.tensor([[0, 1], [0, 1]]), torch.tensor([[9, 7], [8, 7]]))
    prepared = torch.arange(8).view(2, 2, 2)
    q = torch.nn.functional.one_hot(prepared, V).double()[..., :len(draft.q_template)]
    cached = SpeculationCache(first_rows(guesses, len(k)), prepared[:len(k)], q[:len(k)])
    arguments = in_flight, Outcome(torch.tensor(k), torch.tensor(bonus)), cached
    MODEL.forward_fn = mock.Mock(wraps=MODEL.forward_eager)
    answer = attempt("8a", draft.speculate, *arguments)
    says = functools.partial(check, arguments)
    active = [row for row in range(len(k)) if k[row] != FINISHED]
    source = [PRIMARY if row in hits else BACKUP for row in active]
    work = [name for name, *_ in draft.clock.read()]
    says("who drafted: the cache, or the backup", answer.source[active], source)
    says("one backup if a row missed, else none; timed", work.count("backup"), BACKUP in source)
    says("passes of the draft: K or none", MODEL.forward_fn.call_count, 2 * work.count("backup"))
    for row, drafted_by in zip(active, source):
        text = TEXTS[row] + DRAFTED[row][:k[row]] + [bonus[row]]
        says("accepted tokens and t* join the text", draft.text[row, :draft.length[row]], text)
        if drafted_by == PRIMARY:
            says("a hit is what was prepared", answer.tokens[row], prepared[row, k[row]])
            expected = q[row, k[row]]
        elif temperature:
            expected = sigma(plain(text, answer.tokens[row].tolist()), [0, 2])
        else:
            expected = torch.zeros(2, 0)
        says(f"row {row}: q is what the tokens were drawn from", answer.q[row], expected)


@pytest.mark.exercise8a
def test_8a_backup():
    """The backup is the plan's: random tokens, each with q = 1/V."""
    draft = worker([1, 1, 0], [0, 2, 0], backup="random")
    nothing = SpeculationCache.empty(2, 2, draft.q_template)
    arguments = IN_FLIGHT, Outcome(torch.tensor([0, 1]), torch.tensor([9, 9])), nothing
    answer = attempt("8a", draft.speculate, *arguments)
    uniform = torch.full((2, 2, V), 1 / V)
    check(arguments, "q after a miss, with the random backup", answer.q, uniform)


ONE_TOKEN = Speculation(IN_FLIGHT.tokens[1:, :1], IN_FLIGHT.q[1:, :1], IN_FLIGHT.source[1:])


@pytest.mark.exercise8b
@pytest.mark.parametrize("shapes, temperature, in_flight", [
    (SHAPES, 1.0, IN_FLIGHT), (SHAPES, 0.0, IN_FLIGHT), (SHAPES, 1.0, Speculation.empty(2)),
    (([0, 0, 0], [0, 0, 0]), 1.0, IN_FLIGHT), (([0, 3], [2, 1]), 1.0, ONE_TOKEN)])
def test_8b(shapes, temperature, in_flight):
    """Guesses, and every branch, against ordinary forward passes."""
    texts = TEXTS[-len(in_flight.tokens):]
    draft = worker(*shapes, temperature, texts=texts)
    budget = sum(shapes[PRIMARY])
    draft.trunk_pass = mock.Mock(wraps=draft.trunk_pass)
    cached = attempt(f"8b, with a budget of {budget}", draft.pre_speculate, in_flight)
    says = functools.partial(check, in_flight)
    work = [name for name, *_ in draft.clock.read()]
    says("a trunk, timed, a trunk pass, a tree, timed; without a budget, none",
         [work.count("trunk"), draft.trunk_pass.call_count, work.count("tree")],
         [1, 1, 1] if budget else [0, 0, 0])
    fresh = worker(*shapes, temperature, texts=texts)
    says("the length does not change", draft.length, fresh.length)
    says("the text does not change", draft.text, fresh.text)
    says("the fan-outs do not change", draft.plan.fan_out, list(shapes))
    says("the width of q: V, or 0 if greedy", cached.q.shape[-1], V if temperature else 0)
    says("tokens: K in every branch", cached.tokens.shape[-1], len(shapes[PRIMARY]) - 1)
    candidates = fresh.trunk_pass(in_flight)
    for row, source in enumerate(in_flight.source):
        drafted = in_flight.tokens[row].tolist()
        fan_out = shapes[source] if drafted else [budget]
        expected = [(k, bonus) for k, F in enumerate(fan_out)
                    for bonus in candidates[row, k, :F].tolist()]
        guesses = [(k, bonus) for k, bonus in zip(*(part[row].tolist() for part in cached.guesses))
                   if k != cache.NO_OUTCOME]
        says(f"guesses (k, t*) by the fan-out {fan_out}, sorted", sorted(guesses), sorted(expected))
        for branch, (k, bonus) in enumerate(guesses):
            tokens = cached.tokens[row, branch].tolist()
            logits = plain(texts[row] + drafted[:k] + [bonus], tokens)
            name = f"row {row}, branch {branch}"
            if not temperature:
                says(f"{name}, greedy: the likeliest tokens", tokens, logits[:-1].argmax(-1))
            for step, F in enumerate(shapes[PRIMARY][:-1] if temperature else []):
                q = cached.q[row, branch, step]
                right = sigma(logits[step].expand(10, -1), range(10))  # with F = 0..9
                fits = [other for other in range(10) if torch.allclose(q, right[other])]
                found = f"with F = {fits[0]}; after a hit it is {F}" if fits else OTHER_TEXT
                says(f"{name}: the q reported of s_{step + 1} is that {found}", q, right[F])


def draws(seed: int, rounds: int) -> torch.Tensor:
    """The tokens `[rounds, 5, 7, 5]` of all branches, where all are equally likely but for token 7,
    which C = 0 excludes. Every second round is a first one."""
    fan_out = [1, 1, 1, 1, 1, 2]
    draft, fresh = (worker(fan_out, fan_out, seed=seed, texts=[[1, 2]] * 5) for _ in range(2))
    draft.sampler.downweight = 0.0
    logits = torch.zeros(V, dtype=torch.float64).index_fill(0, torch.tensor(7), 1.0)
    drafted = torch.arange(25).view(5, 5), torch.zeros(5, 5, 0), torch.tensor([0, 1, 0, 1, 0])
    in_flight = Speculation(*drafted), Speculation.empty(5)
    found = []
    for number in range(rounds):
        arguments = in_flight[number % 2]
        with mock.patch.object(MODEL, "forward_fn",
                               lambda tokens, *_: logits.repeat(*tokens.shape, 1)):
            cached = attempt("8b", draft.pre_speculate, arguments)
        likely = cached.q.gather(-1, cached.tokens[..., None])
        check(arguments, "the least q of a drawn token is 0", bool(likely.min() > 0), True)
        found.append(cached.tokens)
    check(arguments, "the backup's numbers are left to the backup",
          *(each.uniforms[BACKUP].draw(2) for each in (draft, fresh)))
    return torch.stack(found)


@pytest.mark.exercise8b
def test_8b_draws(rounds=40):
    """Every token is drawn with a number of its own, by which the worker's seed decides. The same
    number would draw the same token again."""
    tokens = draws(SEED, rounds)
    again, other = draws(SEED, 1), draws(SEED + 1, 1)
    check((), "a worker of the same seed draws the same tokens", again, tokens[:1])
    check((), "one of another seed draws others", torch.equal(other, tokens[:1]), False)
    series = tokens.flatten(1)  # by row, branch and step
    worst = (0, 0, 0)
    for later in range(rounds // 2):
        alike = (series[:rounds - later, :, None] == series[later:, None]).sum(0)
        alike = alike if later else alike.fill_diagonal_(0)
        worst = max(worst, (int(alike.max()), later, int(alike.argmax())))
    count, later, pair = worst
    if count > 5:  # by chance in fewer than one of 10 million gradings
        first, second = (f"(row {place // 35}, branch {place // 5 % 7}, step {place % 5})"
                         for place in divmod(pair, 175))
        check((), f"numbers are used twice: by {first}, and {later} rounds later by {second}",
              f"the same token in {count} of {rounds - later} rounds", "hardly ever the same")


def as_text(argument) -> str:
    """An argument of a call, for comparison; any speculation with K = 0 will do."""
    if not isinstance(argument, Speculation) or argument.tokens.shape[1:] != (0,):
        return str(argument)
    kind = "real" if is_real(argument.tokens) else "whole"
    return f"K = 0, {kind} tokens of {len(argument.tokens)} rows, {len(argument.source)} sources"


@pytest.mark.exercise8c
@pytest.mark.parametrize("rows, rounds", [
    (2, [[0, 0], [0, 0], [1, FINISHED], [0, FINISHED], [FINISHED, FINISHED]]),
    (3, [[0, 0, 0], [FINISHED, 0, 2], [FINISHED, 0, 0], [FINISHED, 2, FINISHED], [FINISHED] * 3]),
    (1, [[0], [0], [2], [0], [FINISHED]]), (2, [[FINISHED, FINISHED]])])
def test_8c(rows, rounds):
    """The calls of `serve`, in order, for the k of all rows in these rounds."""
    count = len(rounds)
    v = [Outcome(k, 9 + k) for k in map(torch.tensor, rounds)]
    s = [Speculation.empty(rows)] + [
        Speculation(torch.full((rows, 2), number), torch.zeros(rows, 2, 0), torch.ones(rows).long())
        for number in range(1, count)]
    caches = [f"cache {number}" for number in range(count)]
    expected = [["start", TEXTS[:1] * rows, 30]]
    for number in range(count):
        expected += [["pre_speculate", s[number]], ["receive_outcome", rows]]
        if number < count - 1:
            expected += [["speculate", s[number], v[number], caches[number]],
                         ["send_speculation", s[number + 1]]]
    expected = [[as_text(part) for part in call] for call in expected]  # before it can be changed
    draft, channel = worker(*SHAPES), saguaro.Channel(mock.Mock(), 2, V, torch.float64)
    ranks = mock.Mock()
    for side, name, results in (
            (draft, "start", [None]), (draft, "pre_speculate", caches),
            (draft, "speculate", [*s[1:], AssertionError("all rows are finished: return")]),
            (channel, "receive_outcome", v), (channel, "send_speculation", [None] * count)):
        setattr(side, name, mock.create_autospec(getattr(side, name), side_effect=results))
        ranks.attach_mock(getattr(side, name), name)
    attempt("8c", saguaro.serve, draft, channel, TEXTS[:1] * rows, 30)
    calls = []
    for name, given, named in ranks.mock_calls:
        side = draft if hasattr(draft, name) else channel
        arguments = inspect.signature(getattr(side, name)).bind(*given, **named).arguments
        calls.append([as_text(part) for part in (name, *arguments.values())])
    for number, (yours, right) in enumerate(itertools.zip_longest(calls, expected), start=1):
        if yours != right:
            says = f"call {number} of `serve`, whose rows have these k, round by round"
            check(rounds, says, str(yours), right)
