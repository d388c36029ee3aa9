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
EVEN = (torch.arange(1000).double() + 0.5) / 1000  # uniform numbers, as even as can be
torch.set_num_threads(1)
torch.set_printoptions(precision=4, threshold=20, edgeitems=2)


def check(arguments, hint: str, yours, expected, tolerance: float = 1e-6) -> None:
    """Equal shapes, integers where integers are expected, and numbers as equal as rounding leaves
    them; words are never right."""
    try:
        numbers = [torch.as_tensor(each, dtype=torch.float64) for each in (yours, expected)]
        torch.testing.assert_close(*numbers, rtol=0, atol=tolerance)
        assert is_real(expected) or not is_real(yours)
    except (AssertionError, TypeError, ValueError, RuntimeError):  # or not even numbers
        raise pytest.fail.Exception(f"{hint}\n  yours     {yours}\n  expected  {expected}\n"
                                    f"  arguments {arguments}", pytrace=False) from None


def is_real(numbers) -> bool:
    return torch.as_tensor(numbers).is_floating_point()


def attempt(hint: str, function, *arguments, expected="a result"):
    """Call the function and return its result; report an exception."""
    try:
        return function(*arguments)
    except Exception as problem:
        place = traceback.extract_tb(problem.__traceback__)[-1]
        raised = f"{type(problem).__name__}: {problem} ({place.name}, line {place.lineno})"
    check(arguments, hint, raised, expected)


# ---- 1 to 6: values ----

def shares(tokens: torch.Tensor) -> torch.Tensor:
    """How often each of four tokens was drawn `[n, 4]`, of 1000 a row."""
    return torch.nn.functional.one_hot(tokens.reshape(-1, len(EVEN)), 4).double().mean(1)


def verify(p, tokens, q, uniforms):
    q = q.reshape(*tokens.shape, q.shape[-1])
    rows = [part.repeat_interleave(len(EVEN), 0) for part in (p, tokens.long(), q, uniforms)]
    rows[3] = torch.cat([rows[3], EVEN.repeat(len(p))[:, None]], 1)
    num_accepted, bonus = sampling.verify(*rows)
    return num_accepted[::len(EVEN)], shares(bonus)


def sample(weights, temperature, downweight, fan_out, top_k=0, top_p=1.0):
    sampler = sampling.Sampler(temperature, top_k, top_p, downweight)
    logits = weights.log().expand(2, len(EVEN) // 2, 4)
    tokens, q = sampler.sample(logits, EVEN.view(2, -1), fan_out)
    return shares(tokens)[0], q[1, -1]


def geometric_fan_out(*arguments):
    shape = cache.geometric_fan_out(*arguments)
    return shape, sum(shape)


def likely_outcomes(candidates, fan_out):
    num_accepted, bonus = cache.likely_outcomes(candidates, fan_out)
    return (100 * num_accepted + bonus).sort().values


def look_up(k, bonus, tokens, *outcome):
    guesses, outcome = Outcome(k, bonus), Outcome(*outcome)
    found, q, hit = SpeculationCache(guesses, tokens, -tokens).look_up(outcome)
    return cache.matches(guesses, outcome), hit, found[hit], q[hit]


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


@pytest.mark.parametrize("values", [
    pytest.param(values, marks=getattr(pytest.mark, f"exercise{values['exercise']}"))
    for values in VALUES], ids=operator.itemgetter("function"))
def test_values(values):
    hint = f"{values['function']}: {values['hint']}"
    for given, expected in values["cases"]:
        arguments = [as_tensor(value) for value in given]
        yours = attempt(hint, FUNCTIONS[values["function"]], *arguments, expected=expected)
        hints = [f"{part} of {hint}" for part in values.get("parts", [])]
        if not hints or not isinstance(yours, tuple):
            hints, yours, expected = [hint], [yours], [expected]
        for asked, part, right in zip(hints, yours, expected):
            check(arguments, asked, part, right, values.get("tolerance", 1e-6))


# ---- 7 and 8: the embedded draft, and two texts ----

MODEL = CausalLM(load(str(TINY / "draft"), None, torch.float64, "cpu"))
V = MODEL.vocab_size
torch.manual_seed(SEED)
LENGTH = torch.tensor([8, 4])
TEXTS = [torch.randint(V, (length,)).tolist() for length in LENGTH.tolist()]
IN_FLIGHT = Speculation(torch.randint(V, (2, 2)), torch.zeros(2, 2, 0),
                        torch.tensor([PRIMARY, BACKUP]))
DRAFTED = IN_FLIGHT.tokens.tolist()
GUESSED = torch.stack([torch.randperm(3), torch.randperm(3)])  # k of three branches in two rows
SHAPES = [3, 1, 2], [1, 4, 1]  # F_0..F_K after a hit and after a backup
OTHER_TEXT = "after another text. Where does the tree begin? Do guesses and branches correspond?"


def plain(text: list[int], tokens: Sequence[int] = ()) -> torch.Tensor:
    """Logits `[1 + K, V]` after a text and after each of K tokens, by an ordinary forward pass."""
    return MODEL.model(torch.tensor([[*text, *tokens]])).logits[0, len(text) - 1:].detach()


def sigma(logits: torch.Tensor, fan_out: list[int]) -> torch.Tensor:
    """The distributions `[K, V]` that tokens are drawn from, each with its own of K fan-outs."""
    return torch.stack([sampling.saguaro_distribution(q, F, 0.5)
                        for q, F in zip(logits.softmax(-1), fan_out)])


def worker(after_primary, after_backup, temperature=1.0, backup="neural",
           seed=SEED) -> DraftWorker:
    """The draft at the start of TEXTS, with C = 1/2, and fan-outs by hand."""
    plan = draft_worker.Plan([after_primary, after_backup], backup)
    draft = DraftWorker(MODEL, sampling.Sampler(temperature, downweight=0.5), seed, plan)
    draft.start(TEXTS, 30)
    draft.clock.read()  # the clock is MODEL's: forget what a failed answer left there
    return draft


@pytest.mark.exercise7
def test_7():
    """Every branch of a tree, against an ordinary forward pass over its own text."""
    draft = worker([1, 1, 1, 0], [1, 1, 1, 0])
    draft.trunk_pass(IN_FLIGHT)
    tree = attempt("tree_layout", draft_worker.tree_layout, LENGTH, GUESSED, 10, 3)
    tokens = torch.arange(21, 39).view(3, 2, 3)
    for step in (0, 1, 2, 0, 1, 2):  # again: what an earlier tree left must not be seen
        MODEL.forward_fn = mock.Mock(wraps=MODEL.forward_eager)
        arguments = MODEL, tree, tokens[step], step
        logits = attempt("tree_pass", draft_worker.tree_pass, *arguments)
        calls = [call.args[3] for call in MODEL.forward_fn.call_args_list]  # or one of all branches
        width = max(seen.shape[-1] for seen in calls)
        visible = torch.cat([torch.nn.functional.pad(seen, (0, width - seen.shape[-1]))
                             for seen in calls], 1)
        for row, branch in itertools.product(range(2), range(3)):
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
@pytest.mark.parametrize("k, bonus, hits", [
    ([1, 1], [7, 9], [0]), ([0, 1], [3, 7], [1]), ([2, 0], [9, 9], []), ([0, 1], [9, 7], [0, 1]),
    ([FINISHED, 0], [9, 8], [1])])
def test_8a(k, bonus, hits):
    """The cache guesses (0, 9) and (1, 7) in row 0, (0, 8) and (1, 7) in row 1."""
    draft = worker([1, 1, 0], [0, 2, 0])
    draft.trunk_pass(IN_FLIGHT)
    guesses = Outcome(torch.tensor([[0, 1], [0, 1]]), torch.tensor([[9, 7], [8, 7]]))
    prepared = torch.arange(8).view(2, 2, 2)
    q = torch.nn.functional.one_hot(prepared, V).double()
    cached = SpeculationCache(guesses, prepared, q)
    arguments = IN_FLIGHT, Outcome(torch.tensor(k), torch.tensor(bonus)), cached
    MODEL.forward_fn = mock.Mock(wraps=MODEL.forward_eager)
    answer = attempt("8a", draft.speculate, *arguments)
    says = functools.partial(check, arguments)
    active = [row for row in range(2) if k[row] != FINISHED]
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
        else:
            expected = sigma(plain(text, answer.tokens[row].tolist()), [0, 2])
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


@pytest.mark.exercise8b
@pytest.mark.parametrize("shapes, temperature, in_flight", [
    (SHAPES, 1.0, IN_FLIGHT), (SHAPES, 0.0, IN_FLIGHT), (SHAPES, 1.0, Speculation.empty(2)),
    (([0, 0, 0], [0, 0, 0]), 1.0, IN_FLIGHT)])
def test_8b(shapes, temperature, in_flight):
    """Guesses, and every branch, against ordinary forward passes."""
    draft = worker(*shapes, temperature)
    budget = sum(shapes[PRIMARY])
    draft.trunk_pass = mock.Mock(wraps=draft.trunk_pass)
    cached = attempt(f"8b, with a budget of {budget}", draft.pre_speculate, in_flight)
    says = functools.partial(check, in_flight)
    work = [name for name, *_ in draft.clock.read()]
    says("a trunk, timed, a trunk pass, a tree, timed; without a budget, none",
         [work.count("trunk"), draft.trunk_pass.call_count, work.count("tree")],
         [1, 1, 1] if budget else [0, 0, 0])
    says("the text does not change", draft.length, LENGTH)
    says("the width of q: V, or 0 if greedy", cached.q.shape[-1], V if temperature else 0)
    candidates = worker(*shapes, temperature).trunk_pass(in_flight)
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
            logits = plain(TEXTS[row] + drafted[:k] + [bonus], tokens)
            name = f"row {row}, branch {branch}"
            if not temperature:
                says(f"{name}, greedy: the likeliest tokens", tokens, logits[:-1].argmax(-1))
            for step, F in enumerate(shapes[PRIMARY][:-1] if temperature else []):
                q = cached.q[row, branch, step]
                right = sigma(logits[step].expand(10, -1), range(10))  # with F = 0..9
                fits = [other for other in range(10) if torch.allclose(q, right[other])]
                found = f"with F = {fits[0]}; after a hit it is {F}" if fits else OTHER_TEXT
                says(f"{name}: the q reported of s_{step + 1} is that {found}", q, right[F])


@pytest.mark.exercise8b
def test_8b_draws():
    """A token's place in the cumulative q is as random as the uniform number it was drawn with.
    These numbers are the worker's own, so that its seed decides."""
    tokens, again, other = (
        attempt("8b", worker(*SHAPES, seed=seed).pre_speculate, IN_FLIGHT).tokens
        for seed in (SEED, SEED, SEED + 1))
    check(IN_FLIGHT, "a worker of the same seed draws the same tokens", again, tokens)
    check(IN_FLIGHT, "one of another seed draws others", torch.equal(other, tokens), False)
    draft = worker(*SHAPES)
    places = []
    for _ in range(40):
        cached = attempt("8b", draft.pre_speculate, IN_FLIGHT)
        middles = cached.q.cumsum(-1) - cached.q / 2
        places.append(middles.gather(-1, cached.tokens[..., None]))
    for axis, name in enumerate(("rounds", "rows", "branches", "steps")):
        draws = torch.stack(places).transpose(0, axis)  # of [rounds, B, n, K, 1]
        pairs = torch.stack([draws[:-1].flatten(), draws[1:].flatten()])
        check(IN_FLIGHT, f"draws of successive {name} correlate", pairs.corrcoef()[0, 1], 0.0, 0.25)


@pytest.mark.exercise8c
def test_8c():
    """The calls of `serve`, in order, in three rounds. In the second one row is finished."""
    s = [Speculation.empty(2)._replace(tokens=torch.full((2, number), 7)) for number in range(3)]
    v = [Outcome(k, 9 + k) for k in torch.tensor([[0, 0], [1, FINISHED], [FINISHED, FINISHED]])]
    ranks = mock.Mock(draft=mock.create_autospec(DraftWorker, instance=True),
                      channel=mock.create_autospec(saguaro.Channel, instance=True))
    ranks.draft.pre_speculate.side_effect = ["cache 0", "cache 1", "cache 2"]
    ranks.draft.speculate.side_effect = [*s[1:], AssertionError("all rows are finished: return")]
    ranks.channel.receive_outcome.side_effect = v
    attempt("8c", saguaro.serve, ranks.draft, ranks.channel, TEXTS, 30)
    calls = []
    for name, given, named in ranks.mock_calls:
        signature = inspect.signature(operator.attrgetter(name)(ranks))
        calls.append(str([name, *signature.bind(*given, **named).arguments.values()]))
    expected = [["draft.start", TEXTS, 30]]
    for number in range(2):
        expected += [["draft.pre_speculate", s[number]], ["channel.receive_outcome", 2],
                     ["draft.speculate", s[number], v[number], f"cache {number}"],
                     ["channel.send_speculation", s[number + 1]]]
    expected += [["draft.pre_speculate", s[2]], ["channel.receive_outcome", 2]]
    assert calls == [str(call) for call in expected], "the calls of `serve`, in order"
