"""Grades the exercises of SHEET.md; each has a mark of its own.

    python -m pytest                  all
    python -m pytest -m exercise4     one

The number in a test's name is its exercise's. A failure gives a hint, what your function returned,
and what was expected: worked out with a pencil or read off plain forward passes, so that nothing
here shows how a function is written. Write it as you please. Exercises 1 to 7 do not need each
other.
"""
import functools
import math
import signal
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import cache
import draft_worker
import sampling
import saguaro
from cache import BACKUP, PRIMARY, Outcome, Speculation, SpeculationCache
from runtime.command import Stats, Texts
from runtime.model import CausalLM
from runtime.settings import Settings

torch.set_num_threads(1)
torch.set_printoptions(precision=4, threshold=20, edgeitems=2)
COINS = (torch.arange(200).double() + 0.5) / 200  # two hundred draws as even as draws can be


@pytest.fixture(autouse=True)
def in_time():
    """A minute for each test: an endless loop is a failure, and the other tests go on."""
    def late(*_):
        pytest.fail("not done after a minute", pytrace=False)

    signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    yield
    signal.alarm(0)


def check(hint: str, yours, expected, tolerance: float = 1e-6) -> None:
    """Equal shapes, and numbers as equal as rounding leaves them."""
    try:
        mine, wanted = (torch.as_tensor(part, dtype=torch.float64) for part in (yours, expected))
        right = mine.shape == wanted.shape and torch.allclose(mine, wanted, 0, tolerance)
    except (TypeError, ValueError, RuntimeError):  # not even numbers
        right = False
    if not right:
        pytest.fail(f"{hint}\n  yours     {yours}\n  expected  {expected}", pytrace=False)


def shares(tokens: torch.Tensor) -> torch.Tensor:
    """How often each of four tokens was drawn, of two hundred, `[n, 4]`."""
    return torch.nn.functional.one_hot(tokens.reshape(-1, 200), 4).double().mean(1)


@functools.cache
def model(owner: str, noise: float = 0.0) -> CausalLM:
    """A small random Llama in float64, always the same but for so much noise on its weights, and
    for the KV slots, which are their owner's."""
    torch.manual_seed(0)
    network = LlamaForCausalLM(LlamaConfig(
        vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=48, max_position_embeddings=64, initializer_range=0.3,
        eos_token_id=None)).double().requires_grad_(False)
    for weight in network.parameters():
        weight += noise * weight.std() * torch.randn_like(weight)
    return CausalLM(network)


def workers(fan_out: str, noise: float = 0.0, **chosen):
    """The program's target and draft worker, the shape by hand: no exercise 4 is needed."""
    settings = Settings(fan_out=fan_out, lookahead=fan_out.count(","), **chosen)
    settings.check()
    decoder = saguaro.Decoder(settings, 64, model("target"), model("draft", noise))
    return decoder.target, decoder.speculator


# ---- 1 to 6: values that were worked out with a pencil ----

TABLE = torch.tensor([  # p, q, acceptance by token, residual
    [[.5, .3, .2, 0], [.2, .4, .1, .3], [1, .75, 1, 0], [.75, 0, .25, 0]],
    [[.2, .4, .1, .3], [.5, .3, .2, 0], [.4, 1, .5, 1], [0, .25, 0, .75]],
    [[.5, .3, .2, 0], [1, 0, 0, 0], [.5, 1, 1, 1], [0, .6, .4, 0]],
    [[.5, .3, .2, 0], [0, 1, 0, 0], [1, .3, 1, 1], [5 / 7, 0, 2 / 7, 0]],
    [[.5, .3, .2, 0], [0, 0, 0, 0], [1, 1, 1, 1], [.5, .3, .2, 0]],
    [[1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]]], dtype=torch.float64)
P, Q, E0 = TABLE[0, 0], TABLE[0, 1], TABLE[2, 1]
SKEWED = torch.tensor([[.5, .1, .3, .1], [0, 1, 0, 0]]).double()
EXACT = 1e-6
VALUES = (  # exercise, function, hint, tolerance; the arguments and what should come out, and more
    (1, sampling.acceptance_probability, "at most 1; tokens of any shape", EXACT,
     ((P, Q, torch.tensor(1)), 0.75),
     ((P.expand(2, 2, 4), Q.expand(2, 2, 4), torch.tensor([[0, 1], [2, 3]])), [[1, .75], [1, 0]])),
    (1, sampling.residual, "what p has more than q, normalised; where there is nothing, p", EXACT,
     ((TABLE[:, 0], TABLE[:, 1]), TABLE[:, 3]), ((P, P), P)),
    (3, sampling.saguaro_distribution, "the F likeliest keep a share C, of 1", EXACT,
     ((SKEWED, 2, 0.5), [[5 / 12, 1 / 6, 1 / 4, 1 / 6], [0, 1, 0, 0]]),
     ((SKEWED, 0, 0.5), SKEWED), ((SKEWED, 9, 0.5), SKEWED)),
    (3, sampling.saguaro_distribution, "if C = 0 leaves nothing, q", EXACT,
     ((SKEWED, 1, 0.0), [[0, .2, .6, .2], [0, 1, 0, 0]])),
    (4, cache.acceptance_distribution, "k accepted, then a rejection unless k = K", EXACT,
     ((0.9, 1), [.1, .9]), ((0.2, 3), [.8, .16, .032, .008])),
    (4, cache.geometric_fan_out, "F_0 a^(k/(1+r)), the last times (1-a)^(-1/(1+r))", EXACT,
     ((7, 1, 0.64, 1), [3, 4]), ((41, 2, 0.36, 1), [20, 12, 9]),
     ((247, 3, 0.64, 1), [75, 60, 48, 64])),
    (4, cache.geometric_fan_out, "nowhere a whole guess away from the theorem", 0.999,
     ((12, 4, 0.8, 1), [2.48, 2.22, 1.98, 1.77, 3.55]),
     ((30, 3, 0.5, 0.5), [12.38, 7.8, 4.91, 4.91])),
    (6, cache.expected_tokens, "the bonus token counts, too", EXACT,
     ((0.5, 2), 1.75), ((0.0, 4), 1.0), ((0.8, 4), 3.3616)),
    (6, cache.throughput, "a verification hides T_p; one miss makes all wait for T_b", EXACT,
     ((0.8, 4, 3, 0.9, 0.5), 3.8 / 1.1), ((0.8, 4, 3, 1.5, 0.5), 3.8 / 1.5),
     ((0.5, 4, 2, 0.9, 1.0, 2), 3 / 1.75)),
    (6, cache.critical_batch_size, "where the throughputs are equal; 0, infinity if nowhere", 0.003,
     ((0.8, 4, 4, 1.5, 1.2, 0.5, 0.1), 2.39345), ((0.8, 4, 4, 4, 1, 0.8, 0), 0),
     ((0.8, 4, 4, 1, 1, 0.1, 0), math.inf)))


@pytest.mark.parametrize("values", [
    pytest.param(values, id=f"{number}-{values[0].__name__}",
                 marks=getattr(pytest.mark, f"exercise{number}"))
    for number, *values in VALUES])
def test_values(values):
    function, hint, tolerance, *cases = values
    for arguments, expected in cases:
        check(f"{hint}: {function.__name__}{arguments}", function(*arguments), expected, tolerance)


# ---- 2. lossless verification ----

def verify(*given):
    """Exercise 2's function, whatever became of exercise 1: its results stand in the table."""
    def entry(p, q, column):
        both = torch.stack([p, q], -2)[..., None, :, :]
        return TABLE[(both - TABLE[:, :2]).abs().sum((-2, -1)).argmin(-1), column]

    with patch.multiple(
            sampling, residual=lambda p, q: entry(p, q, 3),
            acceptance_probability=lambda p, q, tokens: entry(p, q, 2).gather(
                -1, tokens[..., None]).squeeze(-1)):
        return sampling.verify(*given)


@pytest.mark.exercise2
def test_2_batch():
    rows = torch.tensor([[.99, .74, .1], [.99, .76, .1], [.0, .0, .9], [.5, .75, .1], [.0, .9, .1]])
    tokens = torch.tensor([[0, 1]] * 4 + [[3, 0]])
    k, bonus = verify(P.expand(20, 3, 4), tokens.repeat(4, 1), Q.expand(20, 2, 4),
                      rows.repeat(4, 1).double(), sampling.mixed(torch.arange(60).view(20, 3)))
    check("a coin strictly below the probability accepts; nothing after a rejected token counts",
          k, [2, 1, 2, 1, 0] * 4)
    check("given keys, the largest residual / noise, with the key of the bonus token's position",
          bonus, [2, 0, 1, 0, 2, 2, 2, 0, 0, 2, 0, 2, 0, 0, 0, 1, 0, 0, 0, 0])


@pytest.mark.exercise2
def test_2_bonus_token():
    for hint, p, tokens, q, coins, k, expected in (
            ("from the residual where the rejection was; without any, the last p",
             [P, P, E0], [1, 0], torch.stack([Q, E0]), [(.8, .1), (.2, .6), (.2, .4)], [0, 1, 2],
             [[.75, 0, .25, 0], [0, .6, .4, 0], [1, 0, 0, 0]]),
            ("q of width 0: point masses", [P, P, P], [0, 1], torch.zeros(2, 0),
             [(.6, .1), (.4, .5)], [0, 1], [[0, .6, .4, 0], [5 / 7, 0, 2 / 7, 0]]),
            ("K = 0: p alone", [P], [], torch.zeros(0, 0), [()], [0], [[.5, .3, .2, 0]])):
        p, tokens, q = (part.expand(len(k) * 200, *part.shape) for part in (
            torch.stack(p), torch.tensor(tokens).long(), q.double()))
        coins, k = (torch.tensor(part).repeat_interleave(200, 0) for part in (coins, k))
        coins = torch.cat([coins.double(), COINS.repeat(len(k) // 200)[:, None]], 1)
        num_accepted, bonus = verify(p, tokens, q, coins)
        check(f"{hint}: k", num_accepted, k)
        check(f"{hint}: shares of 200 bonus tokens", shares(bonus), expected, 0.003)


# ---- 3 and 4: two hundred draws, twenty budgets ----

@pytest.mark.exercise3
def test_3_draw():
    logits = torch.tensor([4.0, 1, 2, 1]).double().log().expand(2, 100, 4)
    for temperature, expected, reported, hint in (
            (1, [.4, .2, .2, .2], [.4, .2, .2, .2], "drawn from sigma by the given coins"),
            (0, [1, 0, 0, 0], [], "greedy: the argmax, and q of width 0")):
        tokens, q = sampling.Warping(temperature).draw(logits, COINS.view(2, 100), 2, 0.5)
        check(f"{hint}: shares of 200 tokens", shares(tokens), [expected], 0.003)
        check(f"{hint}: what is reported is what was drawn from", q,
              torch.tensor(reported).expand(2, 100, -1))


@pytest.mark.exercise4
def test_4_budget():
    shapes = [cache.geometric_fan_out(budget, 4, 0.5, 1.0) for budget in range(20)]
    check("as many guesses as the budget, whatever it is", [sum(F) for F in shapes], range(20))
    check("whole numbers, some of them 0", shapes, [[max(0, int(F)) for F in s] for s in shapes])


# ---- 5. guesses and look-up: Definitions 4 and 10 ----

@pytest.mark.exercise5
def test_5_likely_outcomes():
    scores = torch.tensor([[[5., 4, -torch.inf, 2], [1, 2, 3, 4]], [[0, 3, 1, 2], [9, 8, 7, 0]]])
    k, token = cache.likely_outcomes(scores, torch.tensor([[3, 0], [1, 2]]))
    check("for each k its F_k likeliest tokens: 10 k + t*, sorted", (10 * k + token).sort().values,
          [[0, 1, 3], [1, 10, 11]])
    check("with more guesses than tokens, still a rectangle [B, budget]",
          cache.likely_outcomes(scores[:1], torch.tensor([[6, 0]])).bonus.shape, [1, 6])


@pytest.mark.exercise5
def test_5_look_up():
    guesses = Outcome(torch.tensor([[0, 0, 2]] * 3), torch.tensor([[7, 8, 7]] * 3))
    outcome = Outcome(torch.tensor([0, 2, 2]), torch.tensor([8, 7, 8]))
    check("guess by guess, [B, n]: both k and t* must match", cache.matches(guesses, outcome),
          [[0, 1, 0], [0, 0, 1], [0, 0, 0]])
    prepared = torch.arange(18).view(3, 3, 2)
    tokens, q, hit = SpeculationCache(
        guesses, prepared, prepared[..., None] * torch.ones(5)).look_up(outcome)
    check("both k and t* must match", hit, [True, True, False])
    check("what was prepared for this outcome", tokens[:2], [[2, 3], [10, 11]])
    check("q belongs to its tokens", q[:2], [[[2] * 5, [3] * 5], [[10] * 5, [11] * 5]])


# ---- 7. tree attention ----

TEXTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8]]
LENGTH, GUESSED = torch.tensor([8, 4]), torch.tensor([[0, 2, 2], [1, 0, 2]])  # k of three branches


@pytest.mark.exercise7
def test_7_tree_layout():
    tree, forks = draft_worker.tree_layout(LENGTH, GUESSED, 10, 2), [[8, 10, 10], [5, 4, 6]]
    check("a branch begins where its k accepted tokens end", tree.positions, forks)
    check("a branch sees the verified text, and as many drafted tokens as it takes for accepted",
          tree.visible[..., :10].sum(-1), forks)
    check("K n different slots, from the trunk's end on", tree.slots.flatten().sort().values,
          range(10, 16))


@pytest.mark.exercise7
def test_7_tree_pass():
    """Every branch, against a plain forward pass over its own text."""
    drafted, grown = torch.tensor([[11, 12], [13, 14]]), torch.arange(21, 33).view(2, 2, 3)
    draft = workers("1,1,1")[1]
    draft.start(TEXTS, 30)
    last = torch.tensor([[text[-1]] for text in TEXTS])
    draft.model.causal(torch.cat([last, drafted], 1), LENGTH - 1)
    tree = draft_worker.tree_layout(LENGTH, GUESSED, 10, 2)

    def plain(row: int, branch: int, step: int) -> list[float]:
        text = (TEXTS[row] + drafted[row, :GUESSED[row, branch]].tolist()
                + grown[:step + 1, row, branch].tolist())
        return draft.model.network(torch.tensor([text])).logits[0, -1].tolist()

    for step in (0, 1, 0, 1):  # again: what an earlier tree left in the slots must not be seen
        check(f"token {step} of a branch: its position, its slot, and what it sees",
              draft_worker.tree_pass(draft.model, tree, grown[step], step), torch.tensor(
                  [[plain(row, branch, step) for branch in range(3)] for row in range(2)],
                  dtype=torch.float64))


# ---- 8. Algorithm 1 (may need the others) ----

class Verifier:
    """The target, where `serve` expects the wire: an outcome is what comes of what was said."""

    def __init__(self, target, texts: Texts):
        self.target, self.texts, self.said = target, texts, [Speculation.empty(len(texts.prompts))]
        self.verdict = target.prefill(texts.prompts, texts.longest, 3)

    def outcome(self, rows: int) -> Outcome:
        if self.texts.ended:
            raise RuntimeError("all rows have ended: there is nothing to wait for")
        outcome = self.texts.extend(self.said[-1], self.verdict)
        self.target.advance(outcome)
        return outcome

    def listen(self, rows: int) -> tuple[Outcome, SimpleNamespace]:
        """The outcome arrives when it is asked or waited for."""
        outcome = Outcome(*torch.zeros(2, rows, dtype=torch.long))

        @functools.cache
        def arrive() -> bool:
            for here, verdict in zip(outcome, self.outcome(rows)):
                here.copy_(verdict)
            return True

        return outcome, SimpleNamespace(is_completed=arrive, wait=arrive)

    def speculation(self, rows: int, own: Speculation) -> Speculation:
        self.said.append(own)
        self.verdict = self.target.verify(own)
        return own

    def report(self, own: dict) -> None:
        pass


@pytest.mark.exercise8
def test_8_speculate():
    draft = workers("1,0,1", temperature=1.0)[1]
    draft.start(TEXTS, 30)
    tokens, q = torch.tensor([[[5, 6]], [[5, 6]]]), torch.full((2, 1, 2, 40), 1 / 40).double()
    draft.guesses = Outcome(torch.tensor([[0], [0]]), torch.tensor([[9], [8]]))
    draft.cache = SpeculationCache(draft.guesses, tokens, q)
    said = draft.speculate(Outcome(torch.tensor([0, 0]), torch.tensor([9, 9])))
    check("who drafted: the cache, or the backup", said.source, [PRIMARY, BACKUP])
    check("a hit is what was prepared", said.tokens[0], tokens[0, 0])
    check("with the q that it was drawn from", said.q[0], q[0, 0])
    check("a miss gets the backup's q, too", torch.allclose(said.q[1], q[1, 0]), False)
    check("it is under verification from now on", draft.verifying is said, True)
    check("a cache serves once, and the empty one never hits", draft.cache.look_up(
        Outcome(torch.tensor([0, 0]), torch.tensor([9, 8])))[2], [False, False])


@pytest.mark.exercise8
def test_8_early_outcome():
    draft = workers("1,0,1")[1]
    draft.start(TEXTS, 30)
    unlikely = Outcome(torch.tensor([1, 1]), torch.tensor([0, 0]))
    with patch.object(draft.model, "forward", wraps=draft.model.forward) as passes:
        draft.pre_speculate(lambda: unlikely)
    check("an outcome that is no guess ends the tree: the trunk pass alone", passes.call_count, 1)


@pytest.mark.exercise8
def test_8_two_ranks():
    expected = [model("target").network.generate(
        torch.tensor([text]), max_new_tokens=16, do_sample=False, pad_token_id=0)[0, len(text):]
        for text in TEXTS]
    for noise, early_outcome, sources in ((0.0, False, [PRIMARY]), (0.1, True, [PRIMARY, BACKUP])):
        target, draft = workers("2,1,1,2", noise)
        verifier = Verifier(target, Texts(TEXTS, 16, 64, [], Stats()))
        saguaro.serve(draft, verifier, TEXTS, verifier.texts.longest, early_outcome)
        check("greedy SSD writes the target's own text", verifier.texts.new, torch.stack(expected))
        drafted_by = torch.cat([speculation.source for speculation in verifier.said[1:]])
        check("from the cache if the draft is as good as the target, else from both sources",
              drafted_by.unique(), sources)
