"""The assignment, tried out: nothing is solved when it is handed out; every solution solves exactly
its exercise, written differently, too; and plausible wrong answers are found to be wrong.

    python -m pytest course -v         each answer by its name

Only one test starts pytest in a real hand-out, which takes seconds. The others give functions of
this very program other bodies, the ones that the hand-out would hold, and call the grading tests.
"""
import subprocess
import sys

import pytest

from course import grading, handout
from course.explain import ExplainSettings, explain
from course.handout import EXERCISES, ROOT, missing, replaced, write
from runtime.settings import parse

# By function: a right answer, written differently.
DIFFERENT = {
    "sampling.residual": """
both = torch.minimum(p, q)
left = 1 - both.sum(-1, keepdim=True)
return torch.where((p == q).all(-1, keepdim=True), p, (p - both) / left)""",
    "sampling.verify": """
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
return torch.tensor(ks), torch.stack(bonus)""",
    "sampling.saguaro_distribution": """
z, F = q.log(), min(fan_out, q.shape[-1])
if F == 0 or downweight == 1:
    return q
top = torch.zeros_like(q, dtype=torch.bool).scatter(-1, z.topk(F).indices, True)
weight = torch.where(top, downweight * z.exp(), z.exp())
return torch.where(weight.sum(-1, keepdim=True) > 0, weight / weight.sum(-1, keepdim=True), q)""",
    "cache.geometric_fan_out": """
a, power = acceptance_rate, 1 / (1 + miss_exponent)
series = [a ** (k * power) for k in range(lookahead + 1)]
series[-1] *= (1 - a) ** -power
share = [budget * F / sum(series) for F in series]
whole = [int(F + 1e-9) for F in share]
left = sorted(range(lookahead + 1), key=lambda k: whole[k] - share[k])
for k in left[:budget - sum(whole)]:
    whole[k] += 1
return whole""",
    "cache.likely_outcomes": """
ks, tokens = [], []
for b in range(len(scores)):
    guesses = [(k, int(t)) for k, F in enumerate(fan_out[b].tolist())
               for t in (scores[b, k].argsort(descending=True).tolist() + [0] * F)[:F]]
    ks.append([k for k, _ in guesses])
    tokens.append([t for _, t in guesses])
return Outcome(torch.tensor(ks), torch.tensor(tokens))""",
    "cache.expected_tokens": """
return (1 - acceptance_rate ** (lookahead + 1)) / (1 - acceptance_rate)""",
    "draft_worker.tree_layout": """
B, n = num_accepted.shape
slots = trunk + torch.arange(lookahead * n).view(lookahead, n)
visible = torch.zeros(B, n, trunk + lookahead * n, dtype=torch.bool)
for b in range(B):
    for j in range(n):
        visible[b, j, :length[b] + num_accepted[b, j]] = True
        visible[b, j, slots[:, j]] = True
return Tree(length[:, None] + num_accepted, slots, visible)""",
    "saguaro.serve": """
draft.start(prompts, longest)
while True:
    draft.pre_speculate()
    outcome = wire.outcome(len(prompts))
    if max(outcome.num_accepted.tolist()) < 0:
        wire.report(draft.report())
        return
    wire.speculation(len(prompts), draft.speculate(outcome))"""}

# Plausible mistakes: edits of the answer above, or, where there is none, of the program's own.
WRONG = (
    ("sampling.acceptance_probability", "q / p",
     "p.gather(-1, tokens) / q.gather(-1, tokens)", "q.gather(-1, tokens) / p.gather(-1, tokens)"),
    ("sampling.residual", "not normalised", "(p - both) / left", "p - both"),
    ("sampling.residual", "nothing where p = q", "(p == q).all(-1, keepdim=True)", "left < 0"),
    ("sampling.verify", "a coin equal to the probability accepts", "k] <", "k] <="),
    ("sampling.verify", "bonus token from p", "residual(p[b, k], here[k])", "p[b, k]"),
    ("sampling.verify", "noise of another position", "keys[b, k]", "keys[b, -1]"),
    ("sampling.saguaro_distribution", "C is taken off the logits",
     "downweight * z.exp()", "(z - downweight).exp()"),
    ("sampling.Warping.draw", "draws from sigma, reports q",
     "return inverse_cdf(q, coins), q", "return inverse_cdf(q, coins), self.probabilities(logits)"),
    ("sampling.Warping.draw", "draws from q, reports sigma",
     "return inverse_cdf(q, coins)", "return inverse_cdf(self.probabilities(logits), coins)"),
    ("cache.acceptance_distribution", "1 - a for k = K, too",
     "+ [a ** lookahead]", "+ [a ** lookahead * (1 - a)]"),
    ("cache.geometric_fan_out", "no cap for k = K", "series[-1] *=", "1 or"),
    ("cache.geometric_fan_out", "rounds and loses count", "return whole",
     "return [round(F) for F in share]"),
    ("cache.likely_outcomes", "the first row's shape for all", "fan_out[b]", "fan_out[0]"),
    ("cache.matches", "k or t* will do", "            & (", "            | ("),
    ("cache.SpeculationCache.look_up", "q of the first branch",
     "self.q[row, branch]", "self.q[:, 0]"),
    ("cache.expected_tokens", "no bonus token", "lookahead + 1", "lookahead"),
    ("cache.throughput", "a miss delays its own row", "hit_rate ** batch_size", "hit_rate"),
    ("cache.critical_batch_size", "never infinite", "return math.inf", "return 0.0"),
    ("draft_worker.tree_layout", "branches see the whole trunk",
     ":length[b] + num_accepted[b, j]", ":trunk"),
    ("draft_worker.tree_layout", "branches see each other", "slots[:, j]", "slots"),
    ("draft_worker.tree_pass", "a branch stays at one position",
     "tree.positions + step", "tree.positions"),
    ("draft_worker.tree_pass", "branches see stale slots", "tree.slots[step + 1:]",
     "tree.slots[len(tree.slots):]"),
    ("draft_worker.DraftWorker.speculate", "the cache serves twice",
     "self.verifying.source, self.nothing,", "self.verifying.source, self.cache,"),
    ("draft_worker.DraftWorker.speculate", "the backup's tokens with the cache's q",
     "q.where(keep[..., None], q_now)", "q"),
    ("draft_worker.DraftWorker.pre_speculate", "no look for the early outcome",
     "outcome = peek()", "outcome = None"),
    ("saguaro.serve", "nothing is prepared", "    draft.pre_speculate()\n", ""),
    ("saguaro.serve", "reads an outcome that has not arrived",
     "outcome = wire.outcome(", "outcome, _ = wire.listen("),
    ("saguaro.serve", "goes on when all rows have ended", "return", "pass"))


def module_of(function: str) -> str:
    return (ROOT / f"{function.split('.')[0]}.py").read_text("utf-8")


def with_body(function: str, body: str) -> str:
    """The module of a function, with another body for it."""
    return replaced(module_of(function), function.split(".", 1)[1], body)


def install(monkeypatch, function: str, source: str) -> None:
    """Let a function of this program do, wherever it was imported, what it does in this source."""
    module, *names = function.split(".")
    found, code = sys.modules[module], compile(source, function, "exec")
    for name in names:
        found = getattr(found, name)
        code = next(part for part in code.co_consts if getattr(part, "co_name", "") == name)
    monkeypatch.setattr(found, "__code__", code)


def solved(*numbers: int) -> list[int]:
    """Those of the exercises (default: of all) whose tests pass."""
    def passes(number: int) -> bool:
        mark = f"exercise{number}"
        try:
            for test in vars(grading).values():
                if any(each.name == mark for each in getattr(test, "pytestmark", ())):
                    test()
            for exercise, *values in grading.VALUES:
                if exercise == number:
                    grading.test_values(values)
        except (Exception, pytest.fail.Exception):
            return False
        return True

    return [number for number in numbers or EXERCISES if passes(number)]


# ---- the tests ----

@pytest.fixture(scope="module")
def hand_out(tmp_path_factory):
    """All exercises but 4, a wrong answer in 6, and pytest at work: on the core that the other
    tests leave idle."""
    folder = tmp_path_factory.mktemp("hand-out")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(sys, "argv", ["handout.py", str(folder), "--only", *"1235678"])
        handout.main()
    module = folder / "cache.py"
    module.write_text(replaced(module.read_text("utf-8"), "expected_tokens", "return 7"), "utf-8")
    with subprocess.Popen([sys.executable, "-m", "pytest", "-q"], cwd=folder, text=True,
                          stdout=subprocess.PIPE) as job:
        yield folder, job
        job.kill()


@pytest.mark.slow
def test_a_hand_out_lacks_the_exercises_that_were_named(hand_out):
    for number, (_, *functions) in EXERCISES.items():
        modules = {function.split(".")[0] for function in functions}
        taken_out = sum((hand_out[0] / f"{module}.py").read_text("utf-8").count(missing(number))
                        for module in modules)
        assert taken_out == (number != 4) * len(functions) - (number == 6), "6 has an answer"


@pytest.mark.parametrize("put_back", [[], [1], [2], [3], [4], [5], [6], [7], list(EXERCISES)],
                         ids=str)  # 8 needs the others
@pytest.mark.parametrize("written", ["as here", "differently"])
def test_what_is_put_back_passes_and_nothing_else(monkeypatch, put_back, written):
    for number, (_, *functions) in EXERCISES.items():
        for function in functions:
            if number not in put_back:
                install(monkeypatch, function, with_body(function, missing(number)))
            elif written == "differently" and function in DIFFERENT:
                install(monkeypatch, function, with_body(function, DIFFERENT[function]))
    assert solved() == put_back


@pytest.mark.parametrize("function, mistake, right, wrong", WRONG)
def test_wrong_answers_fail(monkeypatch, function, mistake, right, wrong):
    answer = DIFFERENT.get(function) or module_of(function)
    assert right in answer
    answer = answer.replace(right, wrong)
    install(monkeypatch, function,
            with_body(function, answer) if function in DIFFERENT else answer)
    assert not solved(next(n for n, exercise in EXERCISES.items() if function in exercise))


def test_a_hand_out_shows_no_solution_before_it_is_asked_to(tmp_path):
    write(tmp_path, list(EXERCISES))
    given = {file.relative_to(tmp_path).as_posix(): file.read_text("utf-8", "ignore")
             for file in tmp_path.rglob("*") if file.suffix in (".py", ".md", ".jsonl", ".ini")}
    assert {"test_exercises.py", "SHEET.md", "tiny/prompts.jsonl"} < set(given)
    assert "README.md" not in given and not [*tmp_path.glob("figures/*.svg")], "what L asks for"
    assert (tmp_path / "tiny/target/model.safetensors").is_file()
    for n, (title, *functions) in EXERCISES.items():
        assert f"| {n} | {title} |" in given["SHEET.md"]
        modules = "".join(given[f"{module}.py"] for module in {
            function.split(".")[0] for function in functions})
        assert modules.count(missing(n)) == len(functions)
    for file in ("sampling.py", "cache.py", "draft_worker.py", "saguaro.py"):
        whole, holes = (set(map(str.strip, text.splitlines())) for text in (
            (ROOT / file).read_text("utf-8"), given[file]))
        for line in whole - holes:
            assert len(line) < 30 or not any(line in text for text in given.values()), line
    write(tmp_path, [])
    for file in ("sampling.py", "saguaro.py", "test_equivalence.py", "runtime/test_runtime.py",
                 "README.md", "figures/shape.svg"):
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


@pytest.mark.slow
def test_a_hand_out_grades_itself(hand_out):
    report = hand_out[1].communicate()[0]
    assert "yours     7\n  expected  1.75" in report
    assert [n for n in EXERCISES if f"NotImplementedError: exercise {n}:" in report] == [
        n for n in EXERCISES if n != 4]
    assert "geometric_fan_out" not in report
