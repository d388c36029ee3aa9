"""The assignment, tried out: nothing is solved when it is handed out; every solution solves exactly
its exercise, written differently, too; and plausible wrong answers are found to be wrong.

    python -m pytest course -v         each answer by its name

Only one test starts pytest in a real hand-out, which takes seconds. The others give functions of
this very program other bodies, the ones that the hand-out would hold, and call the grading tests.
"""
import subprocess
import sys

import pytest

from course import grading
from course.explain import ExplainSettings, explain
from course.handout import EXERCISES, ROOT, missing, replaced, write
from draft_worker import DraftWorker
from runtime.settings import parse

# By function: a right answer, written differently; what is wrong about which edits of it.
ANSWERS = {
    "sampling.acceptance_probability": ("""
at = torch.nn.functional.one_hot(tokens, p.shape[-1]).bool()
return torch.minimum(p[at], q[at]).view(tokens.shape) / q[at].view(tokens.shape)""", {
        "q / p": (") / q[at]", ") / p[at]")}),
    "sampling.residual": ("""
both = torch.minimum(p, q)
left = 1 - both.sum(-1, keepdim=True)
return torch.where((p == q).all(-1, keepdim=True), p, (p - both) / left)""", {
        "not normalised": ("(p - both) / left", "p - both"),
        "|p - q|": ("(p - both)", "(p - q).abs()"),
        "nothing where p = q": ("(p == q).all(-1, keepdim=True)", "left < 0")}),
    "sampling.verify": ("""
ks, bonus = [], []
for b in range(len(p)):
    k, K = 0, tokens.shape[1]
    here = q[b] if q.shape[-1] else point_mass(tokens[b], like=p[b])
    while k < K and coins[b, k] < acceptance_probability(p[b, k], here[k], tokens[b, k]):
        k += 1
    r = residual(p[b, k], here[k]) if k < K else p[b, K]
    if keys is None:
        bonus.append(inverse_cdf(r, coins[b, K]))
    else:
        bonus.append((r.log() - public_noise(keys[b, k], len(r)).log()).argmax())
    ks.append(k)
return torch.tensor(ks), torch.stack(bonus)""", {
        "a coin equal to the probability accepts": ("k] <", "k] <="),
        "bonus token from p, not the residual": ("residual(p[b, k], here[k])", "p[b, k]"),
        "residual of the last position": ("p[b, k], here[k])", "p[b, -2], here[-1])"),
        "the last token alone is judged": ("while k < K and", "while k < K - 1 or k < K and"),
        "public noise of another position": ("keys[b, k]", "keys[b, -1]")}),
    "sampling.saguaro_distribution": ("""
z, F = q.log(), min(fan_out, q.shape[-1])
if F == 0 or downweight == 1:
    return q
top = torch.zeros_like(q, dtype=torch.bool).scatter(-1, z.topk(F).indices, True)
weight = torch.where(top, downweight * z.exp(), z.exp())
return torch.where(weight.sum(-1, keepdim=True) > 0, weight / weight.sum(-1, keepdim=True), q)""", {
        "C is taken off the logits": ("downweight * z.exp()", "(z - downweight).exp()"),
        "sums up to less than 1": ("weight / weight.sum(-1, keepdim=True)", "weight")}),
    "sampling.Warping.draw": ("""
if self.greedy:
    return logits.max(-1).indices, logits[..., :0]
plain = self.probabilities(logits)
q = saguaro_distribution(plain, fan_out, downweight)
tokens = (q.double().cumsum(-1) <= coins[..., None] * q.double().sum(-1, keepdim=True)).sum(-1)
return tokens, q""", {
        "draws from sigma, reports q": ("tokens, q", "tokens, plain"),
        "draws from q, reports sigma": ("(q.double().cumsum", "(plain.double().cumsum")}),
    "cache.acceptance_distribution": ("""
a, K = acceptance_rate, lookahead
return [a ** k - a ** (k + 1) for k in range(K)] + [a ** K]""", {
        "1 - a for k = K, too": ("[a ** K]", "[a ** K * (1 - a)]")}),
    "cache.geometric_fan_out": ("""
a, power = acceptance_rate, 1 / (1 + miss_exponent)
series = [a ** (k * power) for k in range(lookahead + 1)]
series[-1] *= (1 - a) ** -power
share = [budget * F / sum(series) for F in series]
whole = [int(F + 1e-9) for F in share]
left = sorted(range(lookahead + 1), key=lambda k: whole[k] - share[k])
for k in left[:budget - sum(whole)]:
    whole[k] += 1
return whole""", {
        "a^k instead of a^(k/(1+r))": ("a ** (k * power)", "a ** k"),
        "no cap for k = K": ("series[-1] *=", "1 or"),
        "rounds and loses count": ("return whole", "return [round(F) for F in share]")}),
    "cache.likely_outcomes": ("""
ks, tokens = [], []
for b in range(len(scores)):
    guesses = [(k, int(t)) for k, F in enumerate(fan_out[b].tolist())
               for t in (scores[b, k].argsort(descending=True).tolist() + [0] * F)[:F]]
    ks.append([k for k, _ in guesses])
    tokens.append([t for _, t in guesses])
return Outcome(torch.tensor(ks), torch.tensor(tokens))""", {
        "the first row's shape for all rows": ("fan_out[b]", "fan_out[0]")}),
    "cache.matches": ("""
return torch.stack([ours == out[:, None] for ours, out in zip(guesses, outcome)]).all(0)""", {
        "k or t* will do": (".all(0)", ".any(0)")}),
    "cache.SpeculationCache.look_up": ("""
found, hits = [], []
for b, (k, t) in enumerate(zip(*(part.tolist() for part in outcome))):
    prepared = list(zip(*(part[b].tolist() for part in self.guesses)))
    found.append(prepared.index((k, t)) if (k, t) in prepared else 0)
    hits.append((k, t) in prepared)
rows = range(len(hits))
return self.tokens[rows, found], self.q[rows, found], torch.tensor(hits)""", {
        "the first branch for every hit": ("prepared.index((k, t))", "0"),
        "q of the first branch": ("self.q[rows, found]", "self.q[:, 0]")}),
    "cache.expected_tokens": ("""
a, K = acceptance_rate, lookahead
return (1 - a ** (K + 1)) / (1 - a)""", {
        "no bonus token": ("K + 1", "K")}),
    "cache.throughput": ("""
p, p_b = hit_rate, hit_rate ** batch_size
tokens = p * tokens_hit + (1 - p) * tokens_miss
return tokens / (p_b * (T_p if T_p > 1 else 1) + (1 - p_b) * (1 + T_b))""", {
        "a miss delays its own row only": ("hit_rate ** batch_size", "hit_rate"),
        "T_p never shows": ("(T_p if T_p > 1 else 1)", "1")}),
    "cache.critical_batch_size": ("""
def lead(b):
    return (throughput(hit_rate, tokens_hit, tokens_neural, T_p, T_neural, b)
            - throughput(hit_rate, tokens_hit, tokens_fast, T_p, T_fast, b))
low, high = 0.0, 1e6
if lead(high) >= 0:
    return math.inf
if lead(low) <= 0:
    return 0.0
for _ in range(100):
    middle = (low + high) / 2
    low, high = (middle, high) if lead(middle) > 0 else (low, middle)
return low""", {
        "never 0": ("return 0.0", "return math.inf"),
        "never infinite": ("return math.inf", "return 0.0")}),
    "draft_worker.tree_layout": ("""
B, n = num_accepted.shape
slots = trunk + torch.arange(lookahead * n).view(lookahead, n)
visible = torch.zeros(B, n, trunk + lookahead * n, dtype=torch.bool)
for b in range(B):
    for j in range(n):
        visible[b, j, :length[b] + num_accepted[b, j]] = True
        visible[b, j, slots[:, j]] = True
return Tree(length[:, None] + num_accepted, slots, visible)""", {
        "branches see the whole trunk": (":length[b] + num_accepted[b, j]", ":trunk"),
        "branches see each other": ("slots[:, j]", "slots")}),
    "draft_worker.tree_pass": ("""
visible = tree.visible.clone()
for later in range(step + 1, len(tree.slots)):
    visible[..., tree.slots[later]] = False
slots = tree.slots[step].repeat(len(tokens), 1)
return model.forward(tokens, tree.positions + step, slots, visible)""", {
        "a branch stays at one position": ("tree.positions + step", "tree.positions"),
        "branches see stale slots": ("range(step + 1,", "range(99,"),
        "every step in the first step's slots": ("tree.slots[step]", "tree.slots[0]")}),
    "saguaro.serve": ("""
draft.start(prompts, longest)
while True:
    draft.pre_speculate()
    outcome = wire.outcome(len(prompts))
    if max(outcome.num_accepted.tolist()) < 0:
        wire.report(draft.report())
        return
    wire.speculation(len(prompts), draft.speculate(outcome))""", {
        "nothing is prepared": ("    draft.pre_speculate()\n", ""),
        "goes on when all rows have ended": ("return", "pass")})}


def cache_serves_twice(right, draft, outcome):
    served, said = draft.cache, right(draft, outcome)
    draft.cache = served
    return said


def cache_gives_the_backup_its_q(right, draft, outcome):
    q = draft.cache.look_up(outcome)[1]
    draft.verifying = right(draft, outcome)._replace(q=q)
    return draft.verifying


def early_outcome_is_not_looked_for(right, draft, *_):
    return right(draft)


def bodies(monkeypatch, new: dict[str, str]) -> None:
    """Give functions of this program other bodies, wherever they have been imported."""
    for function, body in new.items():
        module, *names = function.split(".")
        source = (ROOT / f"{module}.py").read_text("utf-8")
        found = sys.modules[module]
        code = compile(replaced(source, ".".join(names), body), function, "exec")
        for name in names:
            found = getattr(found, name)
            code = next(part for part in code.co_consts if getattr(part, "co_name", "") == name)
        monkeypatch.setattr(found, "__code__", code)


def without(*numbers: int) -> dict[str, str]:
    return {function: missing(n) for n in numbers for function in EXERCISES[n].functions}


def passes(number: int) -> bool:
    """Do all tests of this exercise, with the bodies that functions now have?"""
    try:
        for test in vars(grading).values():
            if any(mark.name == f"exercise{number}" for mark in getattr(test, "pytestmark", ())):
                test()
    except (Exception, pytest.fail.Exception):
        return False
    return True


def others(number: int) -> list[int]:
    return [other for other in EXERCISES if other != number]


# ---- the tests ----

@pytest.mark.parametrize("open_ones", [[], list(EXERCISES), *([n] for n in EXERCISES),
                                       *(others(n) for n in EXERCISES if n < 8)], ids=str)
def test_what_is_missing_fails_and_nothing_else(monkeypatch, open_ones):
    bodies(monkeypatch, without(*open_ones))
    for number in EXERCISES:
        if number < 8 or not open_ones or 8 in open_ones:  # 8 may need the others
            assert passes(number) == (number not in open_ones), number


@pytest.mark.parametrize("number", EXERCISES)
def test_right_answers_written_differently_pass(monkeypatch, number):
    open_ones = others(number) if number < 8 else []
    bodies(monkeypatch, without(*open_ones) | {function: ANSWERS[function][0]
           for function in EXERCISES[number].functions if function in ANSWERS})
    assert [n for n in EXERCISES if n not in open_ones and passes(n)] == (
        [number] if open_ones else list(EXERCISES))


@pytest.mark.parametrize("number, function, mistake", [
    (number, function, mistake) for number, exercise in EXERCISES.items()
    for function in exercise.functions if function in ANSWERS for mistake in ANSWERS[function][1]])
def test_wrong_answers_fail(monkeypatch, number, function, mistake):
    right, mistakes = ANSWERS[function]
    assert mistakes[mistake][0] in right
    bodies(monkeypatch, {function: right.replace(*mistakes[mistake])})
    assert not passes(number)


@pytest.mark.parametrize("name, wrong", [
    ("speculate", cache_serves_twice), ("speculate", cache_gives_the_backup_its_q),
    ("pre_speculate", early_outcome_is_not_looked_for)])
def test_wrong_rounds_fail(monkeypatch, name, wrong):
    right = getattr(DraftWorker, name)
    monkeypatch.setattr(DraftWorker, name, lambda *given: wrong(right, *given))
    assert not passes(8)


@pytest.mark.slow
def test_a_hand_out_grades_itself(tmp_path):
    """With exercise 4 solved, and a wrong answer in 6."""
    def python(folder, *command) -> str:
        return subprocess.run([sys.executable, *command], cwd=folder, text=True, check=True,
                              stdout=subprocess.PIPE).stdout

    folder = tmp_path / "hand-out"
    python(ROOT, "-m", "course.handout", folder, "--only", *map(str, others(4)))
    module = folder / "cache.py"
    module.write_text(replaced(module.read_text("utf-8"), "expected_tokens", "return 7"), "utf-8")
    report = python(folder, "test_exercises.py")
    assert report.splitlines()[-1] == "solved: exercise4"
    assert "yours     7\n  expected  1.75" in report
    assert [n for n in EXERCISES if f"NotImplementedError: exercise {n}:" in report] == others(4)


def test_a_hand_out_shows_no_solution_before_it_is_asked_to(tmp_path):
    write(tmp_path, list(EXERCISES))
    given = {file.relative_to(tmp_path).as_posix(): file.read_text("utf-8", "ignore")
             for file in tmp_path.rglob("*") if file.suffix in (".py", ".md", ".jsonl", ".ini")}
    assert {"test_exercises.py", "SHEET.md", "tiny/prompts.jsonl"} < set(given)
    assert (tmp_path / "tiny/target/model.safetensors").is_file()
    for n, exercise in EXERCISES.items():
        assert f"| {n} | {exercise.title} |" in given["SHEET.md"]
        assert f"| {exercise.points} |" in given["SHEET.md"].split(exercise.title)[1][:150]
        modules = "".join(given[f"{module}.py"] for module in {
            function.split(".")[0] for function in exercise.functions})
        assert modules.count(missing(n)) == len(exercise.functions)
    for file in ("sampling.py", "cache.py", "draft_worker.py", "saguaro.py"):
        whole, holes = (set(map(str.strip, text.splitlines())) for text in (
            (ROOT / file).read_text("utf-8"), given[file]))
        for line in whole - holes:
            assert len(line) < 30 or not any(line in text for text in given.values()), line
    write(tmp_path, [], afterwards=True)
    for file in ("sampling.py", "saguaro.py", "test_equivalence.py", "runtime/test_runtime.py"):
        assert (tmp_path / file).read_bytes() == (ROOT / file).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--temperature", "1"],
                                   ["--temperature", "0.7", "--no-public-noise", "--budget", "5"]])
def test_slow_motion(capsys, monkeypatch, flags):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0}, raising=False)  # one thread
    explain(parse(ExplainSettings, ["--prompt", "def f(x):", "--rounds", "2", *flags]))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert sum("HIT" in line or "MISS" in line for line in lines) == 3
    assert sum("-->" in line for line in lines) == 3
    assert sum("not guessed" in line for line in lines) == sum("MISS" in line for line in lines)
    assert any("coin" in line for line in lines) == bool(flags)
