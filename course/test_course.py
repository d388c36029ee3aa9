"""The assignment, tried out: nothing is solved when it is handed out; every solution solves exactly
its exercise, written differently, too; and plausible wrong answers are found to be wrong.

    python -m course.test_course         the table of answers
"""
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from course.handout import EXERCISES, ROOT, replaced, unsolved, write
from runtime.settings import parse

# Right answers, written differently, by function; wrong ones are edits of these.
RIGHT = {
    "sampling.acceptance_probability": """
at = torch.nn.functional.one_hot(tokens, p.shape[-1]).bool()
return torch.minimum(p[at], q[at]).view(tokens.shape) / q[at].view(tokens.shape)""",
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
    "draft_worker.DraftWorker.draw": """
if self.warping.greedy:
    return logits.max(-1).indices, logits[..., :0]
plain = self.warping.probabilities(logits)
q = sampling.saguaro_distribution(plain, fan_out, self.downweight)
tokens = (q.double().cumsum(-1) <= coins[..., None] * q.double().sum(-1, keepdim=True)).sum(-1)
return tokens, q""",
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
    "cache.SpeculationCache.look_up": """
found, hits = [], []
for b, (k, t) in enumerate(zip(*(part.tolist() for part in outcome))):
    prepared = list(zip(*(part[b].tolist() for part in self.guesses)))
    found.append(prepared.index((k, t)) if (k, t) in prepared else 0)
    hits.append((k, t) in prepared or k == -1)
rows = range(len(hits))
return self.tokens[rows, found], self.q[rows, found], torch.tensor(hits)""",
    "cache.throughput": """
p, p_b = hit_rate, hit_rate ** batch_size
tokens = p * tokens_hit + (1 - p) * tokens_miss
return tokens / (p_b * (T_p if T_p > 1 else 1) + (1 - p_b) * (1 + T_b))""",
    "cache.critical_batch_size": """
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
return low""",
    "draft_worker.tree_layout": """
B, n = num_accepted.shape
slots = trunk + torch.arange(lookahead * n).view(lookahead, n)
visible = torch.zeros(B, n, trunk + lookahead * n, dtype=torch.bool)
for b in range(B):
    for j in range(n):
        visible[b, j, :length[b] + num_accepted[b, j]] = True
        visible[b, j, slots[:, j]] = True
return Tree(length[:, None] + num_accepted, slots, visible)""",
    "draft_worker.DraftWorker.tree_pass": """
visible = tree.visible.clone()
for later in range(step + 1, self.lookahead):
    visible[..., tree.slots[later]] = False
slots = tree.slots[step].repeat(len(tokens), 1)
return self.model.forward(tokens, tree.positions + step, slots, visible)""",
    "draft_worker.DraftWorker.speculate": """
self.advance(outcome)
tokens, q, hit = self.cache.look_up(outcome)
if not (hit | (outcome.num_accepted < 0)).all():
    backup = {"neural": self.neural_backup, "fast": self.fast_backup,
              "random": self.random_backup}[self.fan_out.backup]()
    tokens = torch.stack([a if h else b for h, a, b in zip(hit, tokens, backup[0])])
    q = torch.stack([a if h else b for h, a, b in zip(hit, q, backup[1])])
self.judged = self.verifying.source
self.cache = SpeculationCache.empty(len(hit), self.lookahead, self.no_q)
self.verifying = Speculation(tokens, q, torch.where(hit, PRIMARY, BACKUP))
return self.verifying""",
    "draft_worker.DraftWorker.pre_speculate": """
self.learn()
if self.fan_out.budget == 0:
    return
self.guesses = guesses = self.guess()
trunk = int(self.length.max()) + self.verifying.tokens.shape[1]
tree = tree_layout(self.length, guesses.num_accepted, trunk, self.lookahead)
tree = Tree(*(part.to(self.model.device) for part in tree))
coins, tokens, grown = self.coins(self.lookahead, *guesses.bonus.shape), guesses.bonus, []
tokens = tokens.to(self.model.device)
for i in range(self.lookahead):
    early = peek()
    if early is not None and not matches(guesses, early).any():
        return
    grown.append(self.draw(self.tree_pass(tree, tokens, i), coins[i], self.fan_out.shapes[PRIMARY][i]))
    tokens = grown[-1][0]
self.cache = SpeculationCache(guesses, torch.stack([t for t, _ in grown], 2),
                              torch.stack([q for _, q in grown], 2))""",
    "saguaro.serve": """
draft.start(prompts, longest)
while True:
    draft.pre_speculate()
    outcome = wire.outcome(len(prompts))
    if max(outcome.num_accepted.tolist()) < 0:
        wire.report(draft.report())
        return
    wire.speculation(len(prompts), draft.speculate(outcome))"""}

WRONG = (  # what is wrong; where; the edit that makes it so, or the whole body
    ("q / p", "sampling.acceptance_probability", ") / q[at]", ") / p[at]"),
    ("not normalised", "sampling.residual", "(p - both) / left", "p - both"),
    ("|p - q|", "sampling.residual", "(p - both)", "(p - q).abs()"),
    ("a coin equal to the probability accepts", "sampling.verify", "k] <", "k] <="),
    ("bonus token from p, not the residual", "sampling.verify", "residual(p[b, k], here[k])",
     "p[b, k]"),
    ("residual of the last position", "sampling.verify", "p[b, k], here[k])",
     "p[b, -2], here[-1])"),
    ("the last token alone is judged", "sampling.verify", "while k < K and",
     "while k < K - 1 or k < K and"),
    ("public noise of another position", "sampling.verify", "keys[b, k]", "keys[b, -1]"),
    ("C is taken off the logits", "sampling.saguaro_distribution", "downweight * z.exp()",
     "(z - downweight).exp()"),
    ("sigma sums up to less than 1", "sampling.saguaro_distribution",
     "weight / weight.sum(-1, keepdim=True)", "weight"),
    ("draws from sigma, reports q", "draft_worker.DraftWorker.draw", "tokens, q", "tokens, plain"),
    ("draws from q, reports sigma", "draft_worker.DraftWorker.draw", "(q.double().cumsum",
     "(plain.double().cumsum"),
    ("1 - a for k = K, too", "cache.acceptance_distribution", "",
     "return [acceptance_rate ** k * (1 - acceptance_rate) for k in range(lookahead + 1)]"),
    ("a^k instead of a^(k/(1+r))", "cache.geometric_fan_out", "a ** (k * power)", "a ** k"),
    ("no cap for k = K", "cache.geometric_fan_out", "series[-1] *=", "1 or"),
    ("rounds and loses count", "cache.geometric_fan_out", "return whole",
     "return [round(F) for F in share]"),
    ("the first row's shape for all rows", "cache.likely_outcomes", "fan_out[b]", "fan_out[0]"),
    ("any k will do", "cache.matches", "", "return guesses.bonus == outcome.bonus[:, None]"),
    ("a row that has ended misses", "cache.SpeculationCache.look_up", " or k == -1", ""),
    ("no bonus token", "cache.expected_tokens", "",
     "return sum(acceptance_rate ** k for k in range(1, lookahead + 1))"),
    ("a miss delays its own row only", "cache.throughput", "hit_rate ** batch_size", "hit_rate"),
    ("T_p never shows", "cache.throughput", "(T_p if T_p > 1 else 1)", "1"),
    ("never 0", "cache.critical_batch_size", "return 0.0", "return math.inf"),
    ("branches see the whole trunk", "draft_worker.tree_layout",
     ":length[b] + num_accepted[b, j]", ":trunk"),
    ("branches see each other", "draft_worker.tree_layout", "slots[:, j]", "slots"),
    ("a branch stays at one position", "draft_worker.DraftWorker.tree_pass",
     "tree.positions + step", "tree.positions"),
    ("branches see stale slots", "draft_worker.DraftWorker.tree_pass", "range(step + 1,",
     "range(99,"),
    ("backup's tokens, cache's q", "draft_worker.DraftWorker.speculate",
     "q = torch.stack([a if h else b", "q = torch.stack([a"),
    ("a cache serves twice", "draft_worker.DraftWorker.speculate",
     "self.cache = SpeculationCache.empty(len(hit), self.lookahead, self.no_q)", ""),
    ("does not look for the early outcome", "draft_worker.DraftWorker.pre_speculate",
     "not matches(guesses, early).any()", "False"),
    ("nothing is prepared", "saguaro.serve", "    draft.pre_speculate()\n", ""))

CHILD = """
import json, os, sys
from pathlib import Path
import pytest
from test_exercises import Solved
options = ["-q", "--tb=no", "--assert=plain", "-p", "no:cacheprovider"]
for title, marks, files in json.load(sys.stdin):
    for name, text in files.items():
        Path(name).write_text(text, "utf-8")
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(os.getcwd()):
            del sys.modules[name]
    solved = Solved()
    pytest.main([*options, "-m", marks], plugins=[solved])
    print("\\nSOLVED", json.dumps([title, str(solved)]))
"""


def program(open_exercises=(), bodies=()) -> dict[str, str]:
    """The files of the program without these exercises, then with these `bodies` in."""
    files = {}
    for module in ("sampling", "cache", "draft_worker", "saguaro"):
        source = unsolved((ROOT / f"{module}.py").read_text("utf-8"), module, open_exercises)
        for function, body in bodies:
            if function.startswith(f"{module}."):
                source = replaced(source, function.split(".", 1)[1], body)
        files[f"{module}.py"] = source
    return files


def marks(numbers) -> str:
    return " ".join(f"exercise{number}" for number in numbers)


def variants():
    """(title, marks that are run, files, marks that should pass) of everything that is tried."""
    yield "as handed out", "", program(EXERCISES), "none"
    yield "solved", "", program(), marks(EXERCISES)
    for n, exercise in EXERCISES.items():
        others = [other for other in EXERCISES if other != n]
        missing, run = (others, "") if n < 8 else ((), "exercise8")  # 8 needs the others
        otherwise = [(name, RIGHT[name]) for name in exercise.functions if name in RIGHT]
        yield f"{n} alone", run, program(missing), marks([n])
        yield f"{n} alone, written differently", run, program(missing, otherwise), marks([n])
        yield f"all but {n}", "not exercise8" if n < 8 else "", program([n]), marks(
            other for other in others if other < 8)
        for title, function, right, wrong in WRONG:
            if function in exercise.functions:
                assert right in RIGHT.get(function, ""), title
                body = RIGHT[function].replace(right, wrong) if right else wrong
                yield f"{n} wrong: {title}", f"exercise{n}", program((), [(function, body)]), "none"


def tried() -> list[tuple[str, str, str]]:
    """(title, what should pass, what passes). Half of the variants in each of two processes."""
    everything, passes = list(variants()), {}
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for half in range(2):
            write(Path(folder) / str(half), list(EXERCISES))
            children.append(subprocess.Popen(
                [sys.executable, "-B", "-c", CHILD], cwd=Path(folder) / str(half), text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            children[-1].stdin.write(json.dumps([given[:3] for given in everything[half::2]]))
            children[-1].stdin.close()
        for child in children:
            lines = child.stdout.read().splitlines()
            passes |= dict(json.loads(line[7:]) for line in lines if line.startswith("SOLVED "))
            child.wait()
    return [(title, expected, passes.get(title)) for title, _, _, expected in everything]


# ---- the tests ----

@pytest.mark.slow
def test_each_body_solves_exactly_its_exercise():
    assert [row for row in tried() if row[1] != row[2]] == []


def test_nothing_that_is_handed_out_shows_a_solution(tmp_path):
    write(tmp_path, list(EXERCISES))
    given = {str(file.relative_to(tmp_path)): file.read_text("utf-8", "ignore")
             for file in tmp_path.rglob("*") if file.suffix in (".py", ".md", ".jsonl", ".ini")}
    assert "test_exercises.py" in given and not any("mistake" in text for text in given)
    for file, holes in program(EXERCISES).items():
        whole = (ROOT / file).read_text("utf-8").splitlines()
        assert given[file] == holes
        for line in set(map(str.strip, whole)) - set(map(str.strip, holes.splitlines())):
            assert len(line) < 30 or not any(line in text for text in given.values()), line


def test_only_and_solutions(tmp_path):
    write(tmp_path / "one", [4])
    write(tmp_path / "all", [], afterwards=True)
    one = (tmp_path / "one" / "cache.py").read_text("utf-8")
    assert one.count("NotImplementedError") == 2 and "def test" not in one
    for file in ("sampling.py", "test_equivalence.py", "runtime/test_runtime.py"):
        assert (tmp_path / "all" / file).read_bytes() == (ROOT / file).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--temperature", "1"],
                                   ["--temperature", "0.7", "--no-public-noise", "--budget", "5"]])
def test_slow_motion(capsys, monkeypatch, flags):
    from course.explain import ExplainSettings, explain
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0}, raising=False)  # one thread
    explain(parse(ExplainSettings, ["--prompt", "def f(x):", "--rounds", "2", *flags]))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert sum("HIT" in line or "MISS" in line for line in lines) == 3
    assert sum("-->" in line for line in lines) == sum("HIT" in line for line in lines)
    assert any("coin" in line for line in lines) == bool(flags)


if __name__ == "__main__":
    for title, expected, passes in tried():
        print(f"{title:48}{'' if passes == expected else 'SHOULD PASS ' + expected + ', PASSES '}"
              f"{passes.replace('exercise', '')}")
