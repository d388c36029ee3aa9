"""Grades the exercises of SHEET.md; each has a mark of its own.

    python -m pytest                  all
    python -m pytest -m exercise4     one

A failure gives a hint, the arguments, what your function returned or raised, and what was expected:
worked out with a pencil (values.toml) or read off ordinary forward passes, so that nothing here
shows how a function is written. Write it as you please.
"""
import functools
import json
import os
import tomllib
import traceback
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import cache
import draft_worker
import sampling
import saguaro
from cache import BACKUP, FINISHED, PRIMARY, Outcome, Speculation, SpeculationCache
from draft_worker import DraftWorker, Plan
from runtime.model import CausalLM
from runtime.screen import Stats
from target_worker import TargetWorker

HERE = Path(__file__).resolve().parent
VALUES = tomllib.loads((HERE / "values.toml").read_text("utf-8"))["values"]
if (HERE / "varied.json").exists():  # further ones, by course/mark.py
    VALUES += json.loads((HERE / "varied.json").read_text())
SEED = int(os.environ.get("GRADING_SEED", 0))  # of texts and guesses in exercises 7 and 8
EVEN = (torch.arange(200).double() + 0.5) / 200  # 200 uniform numbers, as even as can be
V = 40  # the vocabulary of exercises 7 and 8
torch.set_num_threads(1)
torch.set_printoptions(precision=4, threshold=20, edgeitems=2)


def report(hint: str, arguments, yours, expected) -> None:
    lines = hint, f"arguments {arguments}", f"yours     {yours}", f"expected  {expected}"
    pytest.fail("\n  ".join(lines), pytrace=False)


def attempt(hint: str, function, *arguments, expected="a result"):
    """What the function returns; an exception is reported."""
    try:
        return function(*arguments)
    except Exception as problem:
        place = traceback.extract_tb(problem.__traceback__)[-1]
        raised = f"{type(problem).__name__}: {problem} ({place.name}, line {place.lineno})"
        report(hint, arguments, raised, expected)


def check(arguments, hint: str, yours, expected, tolerance: float = 1e-6) -> None:
    """Equal shapes, and numbers as equal as rounding leaves them."""
    try:
        mine = torch.as_tensor(yours, dtype=torch.float64)
        right = torch.as_tensor(expected, dtype=torch.float64)
        agree = mine.shape == right.shape and torch.allclose(mine, right, 0, tolerance)
    except (TypeError, ValueError, RuntimeError):  # not even numbers
        agree = False
    if not agree:
        report(hint, arguments, yours, expected)


# ---- 1 to 6: values ----

def shares(tokens: torch.Tensor) -> torch.Tensor:
    """How often each of four tokens was drawn, of 200, `[n, 4]`."""
    return torch.nn.functional.one_hot(tokens.reshape(-1, 200), 4).double().mean(1)


def verify(p, tokens, q, uniforms, keys=None):
    q = q.reshape(*tokens.shape, q.shape[-1])
    if keys is not None:
        return sampling.verify(p, tokens, q, uniforms.expand(-1, 2), sampling.splitmix64(keys))
    rows = [part.repeat_interleave(200, 0) for part in (p, tokens.long(), q, uniforms)]
    rows[3] = torch.cat([rows[3], EVEN.repeat(len(p))[:, None]], 1)
    num_accepted, bonus = sampling.verify(*rows)
    return num_accepted[::200], shares(bonus)


def sample(weights, temperature, downweight, fan_out):
    sampler = sampling.Sampler(temperature, downweight=downweight)
    logits = weights.log().expand(2, 100, 4)
    tokens, q = sampler.sample(logits, EVEN.view(2, 100), fan_out)
    return shares(tokens)[0], q[1, 99]


def geometric_fan_out(*arguments):
    shape = cache.geometric_fan_out(*arguments)
    return [F if F == int(F) >= 0 else "not whole" for F in shape], sum(shape)


def likely_outcomes(ranked, fan_out):
    num_accepted, bonus = cache.likely_outcomes(ranked, fan_out)
    return (100 * num_accepted + bonus).sort().values


def look_up(k, bonus, tokens, *outcome):
    guesses, outcome = Outcome(k, bonus), Outcome(*outcome)
    found, q, hit = SpeculationCache(guesses, tokens, -tokens, tokens).look_up(outcome)
    return cache.matches(guesses, outcome), hit, found[hit], q[hit]


FUNCTIONS = {"acceptance_probability": sampling.acceptance_probability,
             "residual": sampling.residual, "verify": verify, "sample": sample,
             "saguaro_distribution": sampling.saguaro_distribution,
             "acceptance_distribution": cache.acceptance_distribution,
             "geometric_fan_out": geometric_fan_out, "likely_outcomes": likely_outcomes,
             "look_up": look_up, "expected_tokens": cache.expected_tokens,
             "throughput": cache.throughput, "critical_batch_size": cache.critical_batch_size}


def as_tensor(value):
    if not isinstance(value, list):
        return value
    tensor = torch.tensor(value)
    return tensor.double() if tensor.is_floating_point() else tensor


@pytest.mark.parametrize("values", [
    pytest.param(values, marks=getattr(pytest.mark, f"exercise{values['exercise']}"))
    for values in VALUES])
def test_values(values):
    hint = f"{values['function']}: {values['hint']}"
    for given, expected in values["cases"]:
        arguments = [as_tensor(value) for value in given]
        yours = attempt(hint, FUNCTIONS[values["function"]], *arguments, expected=expected)
        if not isinstance(yours, tuple):
            yours, expected = [yours], [expected]
        for part, right in zip(yours, expected):
            check(arguments, hint, part, right, values.get("tolerance", 1e-6))


# ---- 7 and 8: small random models, and texts ----

@functools.cache
def model(owner: str, noise: float = 0.0) -> CausalLM:
    """A random Llama in float64, always the same but for so much noise on its weights, and for the
    KV slots, which are their owner's."""
    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(
        vocab_size=V, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=48, max_position_embeddings=64, initializer_range=0.3,
        eos_token_id=None)).double().requires_grad_(False)
    for weight in llama.parameters():
        weight += noise * weight.std() * torch.randn_like(weight)
    return CausalLM(llama)


def plain(text: list[int]) -> torch.Tensor:
    """Logits `[V]` after a text, by an ordinary forward pass without noise."""
    return model("draft").model(torch.tensor([text])).logits[0, -1]


def sigma(text: list[int], fan_out: int) -> torch.Tensor:
    return sampling.saguaro_distribution(plain(text).softmax(-1), fan_out, 0.5)


def watch_passes(of: CausalLM) -> list:
    """A list that receives the inputs of every pass that gives logits."""
    passes = []
    of.forward_fn = lambda *inputs: passes.append(inputs) or of.forward_eager(*inputs)
    return passes


def worker(after_primary: list[int], after_backup: list[int], temperature: float = 1.0,
           noise: float = 0.0) -> DraftWorker:
    """The draft at the start of TEXTS, with C = 1/2, and fan-outs by hand."""
    sampler = sampling.Sampler(temperature, downweight=0.5)
    plan = Plan([after_primary, after_backup], "neural")
    draft = DraftWorker(model("draft", noise), sampler, SEED, plan)
    draft.start(TEXTS, 30)
    return draft


random = torch.Generator().manual_seed(SEED)
LENGTH = torch.tensor([8, 4])
TEXTS = [torch.randint(V, (int(length),), generator=random).tolist() for length in LENGTH]
DRAFTED = torch.randint(V, (2, 2), generator=random)
IN_FLIGHT = Speculation(DRAFTED, torch.full((2, 2, V), 1 / V).double(),
                        torch.tensor([PRIMARY, BACKUP]))
GUESSED = torch.stack([torch.randperm(3, generator=random) for _ in TEXTS])  # k of three branches


def wrong_slot(visible: torch.Tensor, tree: draft_worker.Tree, steps: int) -> str:
    """The first slot that a branch sees by mistake, or fails to see."""
    for row, branch, slot in torch.cartesian_prod(
            torch.arange(2), torch.arange(3), torch.arange(visible.shape[2])).tolist():
        sees = bool(visible[row, branch, slot])
        own = slot in tree.slots[:steps, branch]
        if sees != (slot < LENGTH[row] + GUESSED[row, branch] or own):
            return f"branch {branch} of row {row} {'sees' if sees else 'does not see'} slot {slot}"
    return "none"


@pytest.mark.exercise7
def test_7():
    """Every branch of a tree, against an ordinary forward pass over its own text."""
    arguments = LENGTH, GUESSED, 10, 2
    tree = attempt("tree_layout", draft_worker.tree_layout, *arguments)
    says = functools.partial(check, arguments)
    says("a branch begins where its k accepted tokens end", tree.positions,
         LENGTH[:, None] + GUESSED)
    slots = tree.slots.flatten().sort().values
    says("K n different slots, from the trunk's end on", slots, range(10, 16))
    slot = wrong_slot(tree.visible, tree, steps=2)
    if slot != "none":
        report("a branch sees text, its k accepted tokens, itself", arguments, slot, "no such slot")
    grown = torch.arange(21, 33).view(2, 2, 3)
    draft = worker([1, 1, 1], [1, 1, 1])
    draft.trunk_pass(IN_FLIGHT)
    passes = watch_passes(draft.model)
    for step in (0, 1, 0, 1):  # again: what an earlier tree left in the slots must not be seen
        arguments = draft.model, tree, grown[step], step
        logits = attempt("tree_pass", draft_worker.tree_pass, *arguments)
        slot = wrong_slot(passes[-1][3] == 0, tree, step + 1)
        for row, branch in torch.cartesian_prod(torch.arange(2), torch.arange(3)).tolist():
            text = TEXTS[row] + DRAFTED[row, :GUESSED[row, branch]].tolist()
            text += grown[:step + 1, row, branch].tolist()
            check(arguments, f"token {step} of branch {branch} of row {row}: position, slot, and "
                  f"what it sees; slots seen wrongly: {slot}", logits[row, branch], plain(text))


# ---- 8. Algorithm 1 ----

@pytest.mark.exercise8a
@pytest.mark.parametrize("k, bonus, hits", [
    ([1, 1], [7, 9], [0]), ([0, 1], [3, 7], [1]), ([2, 0], [9, 9], []), ([0, 1], [9, 7], [0, 1]),
    ([FINISHED, 0], [9, 8], [1]), ([0, 1], [9, 7], None)])
def test_8a(k, bonus, hits):
    """The cache, if any, guesses (0, 9) and (1, 7) in row 0, (0, 8) and (1, 7) in row 1."""
    draft = worker([1, 1, 0], [0, 2, 0])
    ranked = draft.trunk_pass(IN_FLIGHT)
    ranked[:, :, 0] = torch.tensor([[9, 7, 1], [8, 7, 1]])
    guesses = Outcome(torch.tensor([[0, 1], [0, 1]]), ranked[:, :2, 0])
    prepared = torch.arange(8).view(2, 2, 2)
    q = torch.nn.functional.one_hot(prepared, V).double()
    arguments = [IN_FLIGHT, Outcome(torch.tensor(k), torch.tensor(bonus))]
    if hits is not None:
        arguments.append(SpeculationCache(guesses, prepared, q, ranked))
    passes = watch_passes(draft.model)
    answer = attempt("8a", draft.speculate, *arguments)
    active = [row for row in range(2) if k[row] != FINISHED]
    source = [PRIMARY if row in (hits or []) else BACKUP for row in active]
    missed = BACKUP in source
    says = functools.partial(check, arguments)
    says("who drafted: the cache, or the backup", answer.source[active], source)
    says("K passes of the backup if a row missed, else none", len(passes), 2 * missed)
    says("timed as backup", "backup" in draft.watch.read(), missed)
    says("active rows are counted", draft.bonus_ranks.sum(), len(active) * (hits is not None))
    for row, drafted_by in zip(active, source):
        text = TEXTS[row] + DRAFTED[row, :k[row]].tolist() + [bonus[row]]
        says("accepted tokens and bonus token join the text",
             draft.text[row, :draft.length[row]], text)
        if drafted_by == PRIMARY:
            says("a hit is what was prepared", answer.tokens[row], prepared[row, k[row]])
            expected = q[row, k[row]]
        else:
            first = answer.tokens[row, :1].tolist()
            expected = torch.stack([sigma(text, 0), sigma(text + first, 2)])
        says("q is what the tokens were drawn from", answer.q[row], expected)


@pytest.mark.exercise8b
@pytest.mark.parametrize("temperature, in_flight", [
    (1.0, IN_FLIGHT), (0.0, IN_FLIGHT), (1.0, Speculation.empty(2))])
def test_8b(temperature, in_flight):
    """Guesses, and every branch, against ordinary forward passes."""
    draft = worker([3, 1, 2], [1, 4, 1], temperature)
    passes = watch_passes(draft.model)
    cached = attempt("8b", draft.pre_speculate, in_flight)
    says = functools.partial(check, in_flight)
    says("a trunk pass and K tree passes", len(passes), 3)
    times = draft.watch.read()
    counts = [times.get(name, (0, 0))[1] for name in ("trunk", "step")]
    says("timed as trunk and step", counts, [1, 2])
    says("the text does not change", draft.length, LENGTH)
    for row, source in enumerate(in_flight.source):
        drafted = in_flight.tokens[row].tolist()
        fan_out = draft.plan.fan_out[source] if drafted else [6]
        expected = []
        for k, F in enumerate(fan_out):
            logits = plain(TEXTS[row] + drafted[:k])
            logits[drafted[k:k + 1]] = -torch.inf
            says("all guesses by rank", cached.ranked[row, k], logits.topk(6).indices)
            expected += (100 * k + logits.topk(F).indices).tolist()
        guesses = list(zip(*(part[row].tolist() for part in cached.guesses)))
        yours = sorted(100 * k + bonus for k, bonus in guesses)
        says(f"guesses 100 k + t* by the fan-out {fan_out}, sorted", yours, sorted(expected))
        for branch, (k, bonus) in enumerate(guesses):
            text = TEXTS[row] + drafted[:k] + [bonus]
            for step, token in enumerate(cached.tokens[row, branch].tolist()):
                if temperature:
                    says("q of its own branch; F of the cache after a hit",
                         cached.q[row, branch, step], sigma(text, [3, 1][step]))
                else:
                    says("greedy: the likeliest token", token, plain(text).argmax())
                text.append(token)


@pytest.mark.exercise8b
def test_8b_draws():
    """A token's place in the cumulative q is as random as the uniform number it was drawn with."""
    draft = worker([3, 1, 2], [1, 4, 1])
    places = []
    for _ in range(40):
        cached = attempt("8b", draft.pre_speculate, IN_FLIGHT)
        token = cached.tokens[..., None]
        place = cached.q.cumsum(-1).gather(-1, token) - cached.q.gather(-1, token) / 2
        places.append(place[..., 0])
    places = torch.stack(places)  # [rounds, B, n, K]
    for axis, name in enumerate(("rounds", "rows", "branches", "steps")):
        count = places.shape[axis] - 1
        pair = torch.stack([places.narrow(axis, start, count).flatten() for start in (0, 1)])
        check(IN_FLIGHT, f"correlation of the draws of successive {name}",
              torch.corrcoef(pair)[0, 1], 0, tolerance=0.25)


@pytest.mark.exercise8b
def test_8b_no_budget():
    draft = worker([0, 0, 0], [0, 0, 0])
    passes = watch_passes(draft.model)
    cached = attempt("8b with a budget of 0", draft.pre_speculate, IN_FLIGHT)
    hit = cached.look_up(Outcome(torch.tensor([0, 1]), torch.tensor([9, 7])))[2]
    check(IN_FLIGHT, "no hits, no passes", [*hit, len(passes)], [0, 0, 0])


class Verifier:
    """The target, where `serve` expects the channel."""

    def __init__(self, noise: float):
        self.draft = worker([2, 1, 1, 2], [2, 1, 1, 2], temperature=0.0, noise=noise)
        self.draft.start([[1], [1]], 2)  # `serve` starts it anew
        self.target = TargetWorker(model("target"), sampling.Sampler(0.0), SEED)
        self.sequences = saguaro.Sequences(TEXTS, 14, 18, [], Stats(), lambda *_: None)
        self.outcome = self.target.prefill(TEXTS, self.sequences.max_length, 3)
        self.sent = Speculation.empty(2)
        self.sources = set()  # of the speculations for rows that go on
        self.passes = watch_passes(self.draft.model)

    def receive_outcome(self, rows: int) -> Outcome:
        check(self.sent, "passes of the draft before `serve` waits for an outcome: trunk and tree",
              len(self.passes), 4)
        check(self.sent, "`serve` ends when all rows are finished", any(self.sequences.active), 1)
        outcome = self.sequences.extend(self.sent, self.outcome)
        self.target.advance(outcome)
        return outcome

    def send_speculation(self, speculation: Speculation) -> None:
        for row, new_tokens in enumerate(self.sequences.new_tokens):
            if self.sequences.active[row]:
                self.sources.add(int(speculation.source[row]))
                check(speculation, "the draft's text is the verified one",
                      self.draft.text[row, :self.draft.length[row]], TEXTS[row] + new_tokens)
        self.sent = speculation
        self.outcome = self.target.verify(speculation)
        self.passes.clear()


@pytest.mark.exercise8c
@pytest.mark.parametrize("noise, sources", [(0.0, [PRIMARY]), (0.1, [PRIMARY, BACKUP])])
def test_8c(noise, sources):
    verifier = Verifier(noise)
    arguments = verifier.draft, verifier, TEXTS, verifier.sequences.max_length
    attempt("8c", saguaro.serve, *arguments)
    for text, new_tokens in zip(TEXTS, verifier.sequences.new_tokens):
        expected = []
        for _ in range(min(14, 18 - len(text))):
            expected.append(int(plain(text + expected).argmax()))
        check(arguments, "the target's own text", new_tokens, expected)
    check(arguments, "from the cache if the draft is as good as the target, else from both",
          sorted(verifier.sources), sources)
