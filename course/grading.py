"""Grades the exercises of SHEET.md; each has a mark of its own.

    python -m pytest                  all
    python -m pytest -m exercise4     one
    python test_exercises.py          all, and which are solved

A failure gives a hint, what your function returned, and what was expected: worked out with a pencil
or read off plain forward passes, so that nothing here shows how a function is written. Write it as
you please. Exercises 1 to 7 do not need each other.
"""
import math
import queue
import threading
import traceback

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import cache
import draft_worker
import sampling
from cache import BACKUP, PRIMARY, FanOut, Outcome, SpeculationCache
from draft_worker import DraftWorker
from runtime.command import Stats, Texts
from runtime.model import CausalLM
from saguaro import RemoteSpeculator, decode, serve
from target_worker import TargetWorker

torch.set_num_threads(1)
torch.set_printoptions(precision=4, threshold=20, edgeitems=2)
COINS = (torch.arange(1000).double() + 0.5) / 1000  # a thousand draws as even as draws can be


# ---- helpers ----

def parts(value) -> list[torch.Tensor]:
    several = isinstance(value, tuple)
    return [torch.as_tensor(part, dtype=torch.float64) for part in (value if several else (value,))]


def equal(yours, expected, tolerance: float = 1e-6) -> bool:
    """Equal shapes, and numbers as equal as rounding leaves them."""
    yours, expected = parts(yours), parts(expected)
    return len(yours) == len(expected) and all(
        a.shape == b.shape and torch.allclose(a, b, tolerance, tolerance)
        for a, b in zip(yours, expected))


def nearly(yours, expected) -> bool:
    return equal(yours, expected, tolerance=0.003)


def check(hint: str, expected, function, *arguments, agree=equal) -> None:
    try:
        yours = function(*arguments)
        right = agree(yours, expected)
    except Exception as problem:
        place = traceback.extract_tb(problem.__traceback__)[-1]
        right, yours = False, f"{problem!r} ({place.filename}, line {place.lineno})"
    if not right:
        pytest.fail(f"{hint}\n  yours     {yours}\n  expected  {expected}", pytrace=False)


def shares(tokens: torch.Tensor, vocab_size: int = 4) -> torch.Tensor:
    """How often each token was drawn."""
    return tokens.flatten().bincount(minlength=vocab_size) / tokens.numel()


def network(seed: int = 0, like=None, noise: float = 0.0):
    """A small random Llama in float64; `like` another, with so much noise on its weights."""
    torch.manual_seed(seed)
    made = AutoModelForCausalLM.from_config(LlamaConfig(
        vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=48, max_position_embeddings=64, initializer_range=0.3,
        eos_token_id=None)).double().eval()
    if like:
        made.load_state_dict({name: weight + noise * weight.std() * torch.randn_like(weight)
                              for name, weight in like.state_dict().items()})
    return made


def worker(net=None, temperature=0.0, fan_out="2,1,2", downweight=1.0) -> DraftWorker:
    shape = [int(F) for F in fan_out.split(",")]
    return DraftWorker(CausalLM(net or network()), sampling.Warping(temperature), 1,
                       FanOut(len(shape) - 1, sum(shape), fan_out), downweight)


# ---- 1. accept and residual ----

P, Q, E0, E1, NONE = torch.tensor([[.5, .3, .2, 0], [.2, .4, .1, .3], [1, 0, 0, 0], [0, 1, 0, 0],
                                   [0, 0, 0, 0]], dtype=torch.float64)


@pytest.mark.exercise1
def test_acceptance_probability():
    accept, hint = sampling.acceptance_probability, "at most 1; tokens of any shape"
    check(hint, [1, 0.75, 1, 0], accept, P.repeat(4, 1), Q.repeat(4, 1), torch.arange(4))
    check(hint, [[0.4, 1, 0.5]], accept, Q.repeat(1, 3, 1), P.repeat(1, 3, 1),
          torch.arange(3)[None])


@pytest.mark.exercise1
def test_residual():
    check("what p has more than q, normalised", [[0.75, 0, 0.25, 0], [0, 0.25, 0, 0.75]],
          sampling.residual, torch.stack([P, Q]), torch.stack([Q, P]))
    check("where p = q nothing can be rejected", P.tolist(), sampling.residual, P, P)


# ---- 2. lossless verification ----

# Exercise 1's results for all that is tried here: p is P or E0, q is Q, P, E0, E1 or 0.
RESIDUAL = torch.stack([torch.tensor([.75, 0, .25, 0]).double(), P, torch.tensor([0, .6, .4, 0]),
                        torch.tensor([5, 0, 2, 0]).double() / 7, P, E0, E0, E0, E0, E0])
ACCEPTANCE = torch.tensor([[1, .75, 1, 0], [1] * 4, [.5, 1, 1, 1], [1, .3, 1, 1], [1] * 4,
                           [1, 0, 0, 0], [1, 0, 0, 1], [1] * 4, [1, 0, 1, 1], [1] * 4]).double()
P_TRIED, Q_TRIED = torch.stack([P, E0]), torch.stack([Q, P, E0, E1, NONE])


def line(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Where `[...]` in these tables p and q `[..., V]` stand."""
    i, j = ((given[..., None, :] - tried).abs().sum(-1).argmin(-1)
            for given, tried in ((p, P_TRIED), (q, Q_TRIED)))
    return i * len(Q_TRIED) + j


@pytest.fixture
def tables(monkeypatch):
    monkeypatch.setattr(sampling, "residual", lambda p, q: RESIDUAL[line(p, q)])
    monkeypatch.setattr(sampling, "acceptance_probability",
                        lambda p, q, tokens: ACCEPTANCE[line(p, q), tokens])


def bonus_after(p, tokens, q, *coins) -> tuple[float, torch.Tensor]:
    """`verify` with these coins and a thousand last ones: mean k, and shares of bonus tokens."""
    p, tokens, q, coins = (torch.as_tensor(part).expand(1000, *torch.as_tensor(part).shape)
                           for part in (torch.stack(p), torch.tensor(tokens).long(), q,
                                        torch.tensor(coins).double()))
    k, bonus = sampling.verify(p, tokens, q, torch.cat([coins, COINS[:, None]], 1))
    return k.double().mean(), shares(bonus)


@pytest.mark.exercise2
def test_num_accepted(tables):
    tokens, coins = torch.tensor([[0, 1]] * 4 + [[3, 0]]), torch.tensor(
        [[.99, .74, .1], [.99, .76, .1], [.0, .0, .9], [.5, .75, .1], [.0, .9, .1]]).double()
    check("a coin strictly below the probability accepts; nothing after a rejected token counts",
          [2, 1, 2, 1, 0], lambda: sampling.verify(P.repeat(5, 3, 1), tokens, Q.repeat(5, 2, 1),
                                                   coins)[0])


@pytest.mark.exercise2
def test_bonus_token(tables):
    hint = "from the residual where the rejection was; if there was none, from the last p"
    for coins, expected in (((.8, .1), (0, [.75, 0, .25, 0])), ((.2, .6), (1, [0, .6, .4, 0])),
                            ((.2, .4), (2, [1, 0, 0, 0]))):
        check(hint, expected, bonus_after, [P, P, E0], [1, 0], torch.stack([Q, E0]), *coins,
              agree=nearly)
    for coins, expected in (((.6, .1), (0, [0, .6, .4, 0])), ((.4, .5), (1, [5 / 7, 0, 2 / 7, 0]))):
        check("q of width 0: point masses", expected, bonus_after, [P, P, P], [0, 1],
              torch.zeros(2, 0).double(), *coins, agree=nearly)
    check("K = 0: p alone", (0, P.tolist()), bonus_after, [P], [], torch.zeros(0, 4).double(),
          agree=nearly)


@pytest.mark.exercise2
def test_public_noise(tables):
    keys, tokens = sampling.mixed(torch.arange(48).view(16, 3)), torch.tensor([[1, 1]] * 16)
    coins = torch.tensor([[0.8, 0.1, 0.5], [0.2, 0.1, 0.5]]).double().repeat(8, 1)
    check("given keys, the largest residual / noise, with the key of the bonus token's position",
          [2, 0, 0, 0, 2, 2, 0, 0, 0, 0, 0, 0, 0, 2, 0, 1], lambda: sampling.verify(
              P.repeat(16, 3, 1), tokens, Q.repeat(16, 2, 1), coins, keys)[1])


# ---- 3. Saguaro sampling ----

@pytest.mark.exercise3
def test_saguaro_distribution():
    q, hint = torch.tensor([0.5, 0.1, 0.3, 0.1]).double(), "the F likeliest keep a share C, of 1"
    for fan_out, downweight, expected in ((2, 0.5, [5 / 12, 1 / 6, 1 / 4, 1 / 6]),
                                          (1, 0.0, [0, 0.2, 0.6, 0.2]), (2, 1.0, q.tolist()),
                                          (0, 0.5, q.tolist()), (9, 0.5, q.tolist())):
        check(hint, [expected] * 2, sampling.saguaro_distribution, q.repeat(2, 1), fan_out,
              downweight)
    check("if C = 0 leaves nothing, q", E1.tolist(), sampling.saguaro_distribution, E1, 1, 0.0)


@pytest.mark.exercise3
def test_draw():
    logits, sigma = torch.tensor([4.0, 1, 2, 1]).log(), torch.tensor([2.0, 1, 1, 1]).double() / 5

    def drawn(downweight: float, temperature: float = 1.0):
        rows = logits.double().expand(2, 500, 4)
        tokens, q = worker(None, temperature, "2,1,2", downweight).draw(rows, COINS.view(2, 500), 2)
        return shares(tokens), q

    check("drawn from sigma, by the given coins; sigma is what must be reported",
          (sigma.tolist(), sigma.repeat(2, 500, 1)), drawn, 0.5, agree=nearly)
    check("greedy: the argmax, and q of width 0", (E0.tolist(), torch.zeros(2, 500, 0)), drawn, 0.5,
          0)
    check("C = 1 is ordinary sampling", logits.exp().double() / 8, lambda: drawn(1.0)[1][0, 0])


# ---- 4. the shape of the cache: Theorem 12 ----

@pytest.mark.exercise4
def test_acceptance_distribution():
    for a, K, expected in ((0.5, 2, [.5, .25, .25]), (0.9, 1, [.1, .9]),
                           (0.2, 3, [.8, .16, .032, .008])):
        check("k accepted, then a rejection unless k = K; adds up to 1", expected,
              cache.acceptance_distribution, a, K)


@pytest.mark.exercise4
def test_geometric_fan_out():
    hint = "F_0 a^(k/(1+r)) for k < K, the last times (1-a)^(-1/(1+r)); whole numbers, whose sum is"
    for budget, a, r, series in ((7, 0.64, 1, [3, 4]), (43, 0.64, 1, [15, 12, 16]),
                                 (41, 0.36, 1, [20, 12, 9]), (247, 0.64, 1, [75, 60, 48, 64]),
                                 (12, 0.8, 1, [2.48, 2.22, 1.98, 1.77, 3.55]),
                                 (30, 0.5, 0.5, [12.38, 7.8, 4.91, 4.91])):
        exact = all(isinstance(F, int) for F in series)
        check(f"{hint} {budget}", series, cache.geometric_fan_out, budget, len(series) - 1, a, r,
              agree=lambda F, series: sum(F) == budget and all(map(is_count, F)) and len(F) == len(
                  series) and all(abs(x - y) < (0.1 if exact else 1) for x, y in zip(F, series)))
    check(f"{hint} the budget, whatever it is; some may be 0", list(range(20)), lambda: [
        sum(cache.geometric_fan_out(budget, 4, 0.5, 1.0)) for budget in range(20)])


def is_count(F) -> bool:
    return F == int(F) >= 0


# ---- 5. guesses and look-up: Definitions 4 and 10 ----

def pairs(outcome: Outcome) -> list[list[tuple[int, int]]]:
    """Guesses row by row, in any order."""
    return [sorted(zip(k, token)) for k, token in zip(*(part.tolist() for part in outcome))]


@pytest.mark.exercise5
def test_likely_outcomes():
    scores = torch.tensor([[[5., 4, -torch.inf, 2], [1, 2, 3, 4]], [[0, 3, 1, 2], [9, 8, 7, 0]]])
    check("for each k its F_k likeliest tokens",
          [[(0, 0), (0, 1), (0, 3)], [(0, 1), (1, 0), (1, 1)]],
          lambda: pairs(cache.likely_outcomes(scores, torch.tensor([[3, 0], [1, 2]]))),
          agree=list.__eq__)
    check("with more guesses than tokens, still a rectangle [B, budget]", (1, 6),
          lambda: tuple(cache.likely_outcomes(scores[:1], torch.tensor([[6, 0]])).bonus.shape))


@pytest.mark.exercise5
def test_look_up():
    guesses = Outcome(torch.tensor([[0, 0, 2]] * 4), torch.tensor([[7, 8, 7]] * 4))
    tokens = torch.arange(24).view(4, 3, 2)
    prepared = SpeculationCache(guesses, tokens, tokens[..., None] * torch.ones(5))
    outcome = Outcome(torch.tensor([0, 2, 2, -1]), torch.tensor([8, 7, 8, 8]))
    hint = "both k and t* must match"

    def found(part: int):
        return prepared.look_up(outcome)[part][:2]

    check(hint, [True, True, False, False], lambda: prepared.look_up(outcome)[2])
    check(hint, [[2, 3], [10, 11]], found, 0)
    check("q belongs to its tokens", [[[2] * 5, [3] * 5], [[10] * 5, [11] * 5]], found, 1)
    check("guess by guess, [B, n]", [[0, 1, 0], [0, 0, 1], [0, 0, 0], [0, 0, 0]], cache.matches,
          guesses, outcome)
    empty = SpeculationCache.empty(2, 3, torch.zeros(5))
    check("an empty cache never hits", [False, False], lambda: empty.look_up(
        Outcome(torch.tensor([0, -1]), torch.tensor([1, 1])))[2])


# ---- 6. what it is worth ----

@pytest.mark.exercise6
def test_expected_tokens():
    for a, K, expected in ((0.5, 2, 1.75), (0.0, 4, 1.0), (0.9, 1, 1.9), (0.8, 4, 3.3616)):
        check("the bonus token counts, too", expected, cache.expected_tokens, a, K)


@pytest.mark.exercise6
def test_throughput():
    for given, expected in (((0.8, 4, 3, 0.9, 0.5), 3.8 / 1.1), ((0.8, 4, 3, 1.5, 0.5), 3.8 / 1.5),
                            ((0.0, 4, 3, 0.9, 0.5), 2.0), ((0.5, 4, 2, 0.9, 1.0, 2), 3 / 1.75)):
        check("a verification costs 1 and hides T_p; one miss makes the whole batch wait for T_b",
              expected, cache.throughput, *given)


@pytest.mark.exercise6
def test_critical_batch_size():
    for given, expected in (((0.9, 4, 4, 1, 1, 0.5, 0), 1.67929),
                            ((0.8, 4, 4, 1.5, 1.2, 0.5, 0.1), 2.39345),
                            ((0.8, 4, 4, 4, 1, 0.8, 0), 0), ((0.8, 4, 4, 1, 1, 0.1, 0), math.inf)):
        check("where both throughputs of Cor. 16 are equal; 0 and infinity where they nowhere are",
              expected, cache.critical_batch_size, *given, agree=nearly)


# ---- 7. tree attention ----

TEXTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8]]


@pytest.mark.exercise7
def test_tree_layout():
    tree, k = draft_worker.tree_layout, torch.tensor([[0, 2, 2], [1, 0, 2]])
    check("a branch begins where its k accepted tokens end", [[8, 10, 10], [5, 4, 6]],
          lambda: tree(torch.tensor([8, 4]), k, 10, 2).positions)
    check("a branch sees the verified text, and as many drafted tokens as it takes for accepted",
          [[8, 10, 10], [5, 4, 6]],
          lambda: tree(torch.tensor([8, 4]), k, 10, 2).visible[..., :10].sum(-1))
    check("K n different slots, from the trunk's end on", list(range(10, 16)),
          lambda: tree(torch.tensor([8, 4]), k, 10, 2).slots.flatten().sort().values)


@pytest.mark.exercise7
def test_tree_pass():
    """Every branch, against a plain forward pass over its own text."""
    draft = worker(fan_out="1,1,1")
    drafted, k, grown = torch.tensor([[11, 12], [13, 14]]), torch.tensor([[0, 2, 2], [1, 0, 2]]), (
        torch.tensor([[[21, 22, 23], [24, 25, 26]], [[27, 28, 29], [30, 31, 32]]]))  # [K, B, n]
    draft.start(TEXTS, 30)

    def logits(step: int) -> torch.Tensor:
        length, whole = torch.tensor([8, 4]), torch.tensor([TEXTS[0], TEXTS[1] + [0] * 4])
        draft.model.causal(whole, torch.tensor([0, 0]))
        draft.model.causal(drafted, length)
        tree = draft_worker.tree_layout(length, k, 10, 2)
        return [draft.tree_pass(tree, grown[i], i) for i in range(step + 1)][-1]

    def plain(row: int, branch: int, step: int) -> torch.Tensor:
        text = (TEXTS[row] + drafted[row, :k[row, branch]].tolist()
                + grown[:step + 1, row, branch].tolist())
        with torch.inference_mode():
            return draft.model.network(torch.tensor([text])).logits[0, -1]

    for step in (1, 0, 1):  # again and again: what is left in the slots must not be seen
        check(f"token {step} of a branch: its position, its slot, and what it sees", torch.stack([
            torch.stack([plain(row, branch, step) for branch in range(3)]) for row in range(2)]),
            logits, step)


# ---- 8. Algorithm 1 (may need the others) ----

class Wire:
    """Two threads instead of two ranks."""
    lookahead = 3

    def __init__(self):
        self.outcomes, self.speculations, self.said = queue.Queue(), queue.Queue(), []

    def outcome(self, rows, own=None):
        return self.outcomes.put(own) or own if own else self.outcomes.get(timeout=10)

    def speculation(self, rows, own=None):
        if own:
            self.said.append(own)
            return self.speculations.put(own)
        heard = self.speculations.get(timeout=10)
        if isinstance(heard, Exception):
            raise heard
        return heard

    def report(self, own=None):
        return own or {"times": {}, "learnt": {}}


def ssd(target, draft, early_outcome: bool):
    """What two ranks write, and the sources of their speculations."""
    wire, texts = Wire(), Texts(TEXTS, 16, 64, [], Stats())

    def last_rank() -> None:
        try:
            serve(worker(draft, fan_out="2,1,1,2"), wire, TEXTS, texts.longest, early_outcome)
        except Exception as problem:
            wire.speculations.put(problem)

    threading.Thread(target=last_rank, daemon=True).start()
    try:
        verifier = TargetWorker(CausalLM(target), sampling.Warping(0), 0)
        decode(verifier, RemoteSpeculator(wire), texts)
    finally:
        wire.outcomes.put(Outcome(torch.tensor([-1, -1]), torch.tensor([0, 0])))
    return texts.new, torch.cat([said.source for said in wire.said]).unique().tolist()


@pytest.mark.exercise8
def test_speculate():
    draft = worker(temperature=1.0, fan_out="1,0,1")
    draft.start(TEXTS, 30)
    tokens, q = torch.tensor([[[5, 6]], [[5, 6]]]), torch.full((2, 1, 2, 40), 1 / 40).double()
    guesses = Outcome(torch.tensor([[0], [0]]), torch.tensor([[9], [8]]))
    draft.cache, said = SpeculationCache(guesses, tokens, q), []

    def answer(part: str):
        said[:] = said or [draft.speculate(Outcome(torch.tensor([0, 0]), torch.tensor([9, 9])))]
        return getattr(said[0], part)

    check("who drafted: the cache, or the backup", [PRIMARY, BACKUP], answer, "source")
    check("a hit is what was prepared", [5, 6], lambda: answer("tokens")[0])
    check("with the q that it was drawn from", q[0, 0], lambda: answer("q")[0])
    check("a miss gets the backup's q, too", False, lambda: equal(answer("q")[1], q[0, 0]))
    check("it is under verification from now on", True, lambda: draft.verifying is said[0])
    check("a cache serves once", [False, False], lambda: draft.cache.look_up(
        Outcome(torch.tensor([0, 0]), torch.tensor([9, 8])))[2])


@pytest.mark.exercise8
def test_early_outcome():
    draft = worker(fan_out="1,0,1")
    draft.start(TEXTS, 30)
    passes, forward = [], draft.model.forward
    draft.model.forward = lambda *given: passes.append(given) or forward(*given)
    unlikely = Outcome(torch.tensor([1, 1]), torch.tensor([0, 0]))
    check("an outcome that is no guess ends the tree: the trunk pass alone", 1,
          lambda: draft.pre_speculate(lambda: unlikely) or len(passes))


@pytest.mark.exercise8
def test_two_ranks():
    target = network()
    texts = [target.generate(torch.tensor([text]), max_new_tokens=16, do_sample=False,
                             pad_token_id=0)[0, len(text):].tolist() for text in TEXTS]
    for noise, early_outcome, sources in ((0.0, False, [PRIMARY]), (0.1, True, [PRIMARY, BACKUP])):
        check("greedy SSD writes the target's own text, from the cache if the draft is as good as "
              "the target, else from both sources", (texts, sources), ssd, target,
              network(1, target, noise), early_outcome, agree=tuple.__eq__)


# ---- which are solved ----

class Solved:
    """A plugin of pytest: the exercises all of whose tests passed."""

    def __init__(self):
        self.failed, self.seen = set(), set()

    def pytest_runtest_logreport(self, report) -> None:
        marks = {name for name in report.keywords if name.startswith("exercise")}
        self.seen |= marks
        self.failed |= set() if report.passed else marks

    def __str__(self) -> str:
        return " ".join(sorted(self.seen - self.failed)) or "none"


if __name__ == "__main__":
    solved = Solved()
    pytest.main([__file__, "-q"], plugins=[solved])
    print(f"solved: {solved}")
