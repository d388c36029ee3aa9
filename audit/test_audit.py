"""That the audit is right: it accepts the truth, finds each bias where it should, and says of a bad
file in one sentence what is wrong."""
import copy
import errno
import json
import math
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

import sampling
from audit.__main__ import main
from audit.evidence import (
    ALPHA,
    TESTS,
    Finding,
    audit,
    audit_groups,
    counts_p_value,
    evenness,
    sum_p_value,
    would_have_shown,
)
from audit.replay import Replayed, Text, precision_of, replay, target_logits, warpers_of
from cli.settings import TINY
from test_equivalence import MISTAKES, draw_uniforms, random_distributions, replace_line, texts_of
from testing.shared import RAGGED, assert_close, imitation, make_decoder, random_model, run_rounds

# for every id a set of 20 ids, or choices; an id is in 20 of these sets
SHIFTED = (torch.arange(40)[:, None] + torch.arange(40)) % 40
ANY = (draw_uniforms(40, seed=99).argsort() < 20)[SHIFTED]


def one_of_two_neighbours(logits: torch.Tensor, place: int, before: torch.Tensor) -> torch.Tensor:
    """Below the two likeliest tokens, of each two neighbours in the order of likelihood one gets
    the probability of both: the id before decides which."""
    ordered, order = logits.sort(descending=True)
    pairs = ordered[:, 2:].view(len(logits), 19, 2)
    first = ANY[before, :19, None] == torch.tensor([True, False])
    pairs.copy_(pairs.logsumexp(-1, keepdim=True).where(first, -torch.inf))
    return ordered.scatter(1, order, ordered)


WRITTEN = {  # how tokens may be drawn that are said to be drawn from softmax(logits); found by
    "the truth": (lambda logits, place, before: logits, set()),
    "the argmax, three tokens of ten": (
        lambda logits, place, before: logits + 99.0 * (place % 10 < 3)
        * (logits == logits.amax(-1, keepdim=True)), {"argmax", "bins", "log p"}),
    "another temperature": (
        lambda logits, place, before: logits / 0.9, {"argmax", "bins", "log p"}),
    "the first of each text more greedily": (
        lambda logits, place, before: logits / (1.0 if place else 0.3), {"place"}),
    "the upper half of the vocabulary 1.2 times as often": (
        lambda logits, place, before: logits + 0.18 * (torch.arange(40) >= 20), {"ids"}),
    "behind each id some ids 2.7 times as often: a watermark": (
        lambda logits, place, before: logits + ANY[before].double(), {"next id"}),
    "one of two neighbours in the order of likelihood": (one_of_two_neighbours, {"next nth"}),
    "every other token as the one before": (lambda logits, place, before: logits, {"pairs"}),
}


def drawn(how: str, seed: int, count: int = 10_000) -> Replayed:
    """Tokens drawn in one of the ways of `WRITTEN` from random distributions, in texts of 50, and
    replayed as if drawn from their softmax."""
    rows = count // 50
    logits = 2 * random_distributions(rows, 50, 40, seed=seed).log() / 3
    bent, _ = WRITTEN[how]
    uniforms = draw_uniforms(rows, 50, seed=seed + 1)
    if how.startswith("every other"):
        uniforms[:, 1::2] = uniforms[:, ::2]
    tokens = torch.zeros(rows, 51, dtype=torch.long)
    for place in range(50):
        p = bent(logits[:, place], place, tokens[:, place]).softmax(-1)
        p, likeliest_first = p.sort(-1, descending=True)
        drawn = sampling.inverse_cdf(p, uniforms[:, place])
        tokens[:, place + 1] = likeliest_first.gather(-1, drawn[:, None]).squeeze(-1)
    memory = []
    texts = []
    all_within = draw_uniforms(rows, 50, seed=seed + 2)
    for before, written, within in zip(logits, tokens[:, 1:], all_within):
        texts.append(replay(before, written, warpers_of(1.0, 0, 1.0), within, memory))
    return Replayed(*map(torch.cat, zip(*texts)))


@pytest.mark.parametrize("how", WRITTEN)
def test_the_audit_accepts_the_truth_and_finds_each_bias_where_it_should(how):
    finding = audit(drawn(how, seed=10))
    found_by = {test for test, p in finding.p_values.items() if p < ALPHA}
    _, expected = WRITTEN[how]
    assert expected <= found_by
    assert expected or not found_by
    assert finding.impossible == 0


def test_tokens_that_are_equally_likely_have_intervals_of_their_own():
    tokens = (40 * draw_uniforms(4000)).long()
    within = draw_uniforms(4000, seed=1)
    replayed = replay(torch.zeros(4000, 40), tokens, warpers_of(1.0, 0, 1.0), within, [])
    assert evenness(replayed.uniform, bins=20) > ALPHA


def test_the_audits_p_values_of_the_truth_are_uniform():
    findings = [audit(drawn("the truth", 3 * seed, count=2000)) for seed in range(100)]
    for test in TESTS:
        p_values = torch.tensor([finding.p_values[test] for finding in findings])
        assert evenness(p_values, bins=5) > ALPHA, test
        assert (p_values < 0.01).sum() < 8, test


def test_a_skewed_sum_has_its_p_value_on_both_sides():
    """100 - G, G the sum of 100 exponential numbers: G > x if fewer than 100 events of a Poisson
    process come before x."""
    for total in (-60, -30, 25, 40):
        x = 100 - total
        events = [k * math.log(x) - x - math.lgamma(k + 1) for k in range(100)]
        below = sum(map(math.exp, events))
        sample = torch.tensor([[total, 100, -200.0]], dtype=torch.float64)
        deviation, p_value = sum_p_value(sample)
        assert deviation == pytest.approx(total / 10)
        assert p_value == pytest.approx(2 * min(below, 1 - below))
    for sample in ([[3, 60, -120.0]], [[0, 0, 0.0]]):
        _, p_value = sum_p_value(torch.tensor(sample))
        assert math.isnan(p_value), "too few to tell"


def test_what_is_said_to_show_shows_99_times_of_a_hundred():
    """The bias that is hardest to see takes the same from each of ten bins."""
    count = 20_000
    change = would_have_shown(count) * torch.tensor([1.0, -1.0]).repeat(10)
    probability = (1 + 2 * change.double()) / 20
    assert 0.5 * (probability - 0.05).abs().sum() == pytest.approx(would_have_shown(count))
    torch.manual_seed(0)
    rejected = 0
    for _ in range(1000):
        bins = probability.multinomial(count, replacement=True)
        rejected += evenness((bins + 0.5) / 20, bins=20) < ALPHA
    assert 970 < rejected < 1000


@pytest.mark.parametrize("edge, wider", (((8, 1.0), (9, 1.0)), ((0, 0.8), (0, 0.85))))
def test_a_token_that_rounding_let_in_is_no_fault_but_another_edge_is(edge, wider):
    """The engine computes in bfloat16, the audit in float32, whose sums over many layers round by
    more than its last digit."""
    assert precision_of(torch.zeros(1)) == 1e-5
    logits = 2 * random_distributions(10_000, 40, seed=20).log() / 3
    precision = torch.finfo(torch.bfloat16).eps

    def finding(of_engine: tuple[int, float], precision: float) -> Finding:
        p = warpers_of(1.0, *of_engine)(None, logits.bfloat16().float()).softmax(-1)
        tokens = sampling.inverse_cdf(p, draw_uniforms(10_000, seed=21))
        within = draw_uniforms(10_000, seed=22)
        return audit(replay(logits, tokens, warpers_of(1.0, *edge), within, [], 0, precision))

    sound = finding(edge, precision)
    assert sound.impossible == 0 and sound.near_ties > 0
    assert min(sound.p_values.values()) > ALPHA  # NaN next to all: one text has none before it
    assert finding(edge, 0.0).impossible == sound.near_ties
    leaky = finding(wider, precision)
    assert leaky.impossible > 20 and abs(leaky.nats) < 0.1, "of the possible ones"


EOS = [3, 7]


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory) -> str:
    """The random model, whose texts end with `EOS`, in float64, without a tokenizer."""
    folder = tmp_path_factory.mktemp("target")
    random_model(max_position_embeddings=128).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    return str(folder)


def write_lines(path: Path, texts: list[Text], settings: dict | None) -> str:
    """The file that an engine would write."""
    rows = [{"settings": settings}] if settings else []
    rows += [{"prompt_tokens": text.prompt, "tokens": text.tokens, "group": text.group}
             for text in texts]
    rows += [{"statistics": {}}] if settings else []
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return str(path)


def texts_by_ssd(rounds: int, **choices) -> list[Text]:
    """200 rows of long texts by the random model, with four prompts."""
    target = random_model(max_position_embeddings=128)
    decoder = make_decoder(target, imitation(target, 0.3), **choices)
    prompts = 50 * RAGGED
    return texts_of(run_rounds(decoder, prompts, rounds), prompts)


def test_a_special_case_after_misses_is_found_in_their_groups_alone(target_folder, tmp_path,
                                                                    monkeypatch, capsys):
    """And without it nothing is. Wrong flags are found, too: they override the file's settings."""
    sampling = dict(temperature=0.8, top_k=12)
    settings = dict(target=target_folder, dtype="float64", top_p=1.0, **sampling)
    file = write_lines(tmp_path / "file.jsonl", texts_by_ssd(12, **sampling), settings)
    assert main([file, "--batch-size", "30"]) == 0
    said = capsys.readouterr().out  # all, round 0, four places after hits and after misses
    assert "Nothing found" in said and f"below {10 * 16 * ALPHA:.0e}." in said
    tokens, bias = re.search(r"In ([\d,]+) tokens the bins.* bias of (\S+%)", said, re.S).groups()
    assert bias == f"{would_have_shown(int(tokens.replace(',', ''))):.1%}"
    for flags, said in ((["--temperature", "0.9"], "log p"), (["--top-k", "11"], "impossible"),
                        (["--top-k", "3"], "another tokenizer")):
        assert main([file, *flags]) == 1
        assert said in capsys.readouterr().out
    mistake = "after a miss, tokens accepted if and only if they equal the argmax"
    replace_line(monkeypatch, *MISTAKES[mistake])
    texts = texts_by_ssd(12, **sampling)
    assert main([write_lines(tmp_path / "file.jsonl", texts, settings)]) == 1
    assert "FOUND" in capsys.readouterr().out
    target = random_model(max_position_embeddings=128)
    findings = audit_groups(target, texts, warpers_of(0.8, 12, 1.0), batch_size=200)
    assert not any(math.isnan(p) for p in findings["all"].p_values.values())
    guilty = {group for group, finding in findings.items()
             if any(p < ALPHA for p in finding.p_values.values())}
    assert guilty > {"all"} and all(group.startswith("miss") for group in guilty - {"all"})


def test_prompts_and_padding_do_not_matter_to_the_audit():
    """Texts of all lengths in batches: the logits are those of each text alone."""
    model = random_model("gpt2", max_position_embeddings=128)
    texts = []
    for number in range(12):
        written = list(range(number, 2 * number + 1))
        texts.append(Text(list(range(1, 2 + number)), written, []))
    for text, logits in zip(texts, target_logits(model, texts, 5), strict=True):
        with torch.inference_mode():
            alone = model(torch.tensor([text.prompt + text.tokens])).logits[0, :-1]
        assert_close(logits, alone[-len(text.tokens):], 1e-9)


def test_a_prompt_in_letters_is_read_by_the_targets_tokenizer(tmp_path, capsys):
    tokenizer = AutoTokenizer.from_pretrained(TINY / "target")
    prompt = "def f(x):"
    reports = []
    for key, given in (("prompt", prompt), ("prompt_tokens", tokenizer(prompt)["input_ids"])):
        path = tmp_path / "file.jsonl"
        path.write_text(json.dumps({key: given, "tokens": list(range(300, 400))}), "utf-8")
        flags = ["--target", str(TINY / "target"), "--temperature", "1"]
        assert main([str(path), *flags]) == 1, "no text of this target"
        reports.append(capsys.readouterr().out)
    assert reports[0] == reports[1] and "another tokenizer" in reports[0]
    assert "end-of-sequence" not in reports[0], "more than the ids is wrong"


@pytest.mark.parametrize("dtype", ("float64", "bfloat16"))
def test_greedy_texts_may_differ_from_the_argmax_by_rounding_alone(dtype, target_folder, tmp_path,
                                                                  capsys):
    model = random_model(max_position_embeddings=128)
    target, draft = (copy.deepcopy(each).to(getattr(torch, dtype))
                     for each in (model, imitation(model, 0.1)))
    decoder = make_decoder(target, draft, dtype=dtype, max_new_tokens=90)
    texts = [Text(prompt, tokens, ["hit 0"] * 90)
             for prompt, tokens in zip(RAGGED, decoder(RAGGED))]
    flags = ["--target", target_folder, "--temperature", "0", "--dtype", dtype]
    path = tmp_path / "file.jsonl"
    assert main([write_lines(path, texts, None), *flags]) == 0
    report = capsys.readouterr().out
    assert "hit 0" in report and "Nothing found" in report
    assert min(float(share) for share in re.findall(r"(\S+)%", report)) > 90, "are the argmax"
    texts[1].tokens[70] = (texts[1].tokens[70] + 1) % 40
    assert main([write_lines(path, texts, None), *flags]) == 1
    assert "FOUND" in capsys.readouterr().out


BAD_FILES = {
    "": "holds no tokens", "[1]": "line 1: not a JSON object", "not JSON": "not a JSON object",
    '{"tokens": [1]}': "no list of token ids called prompt_tokens",
    '{"prompt_tokens": [1]}': "no list of token ids called tokens",
    '{"prompt_tokens": [1], "tokens": ["a"]}': "no list of token ids called tokens",
    '{"prompt_tokens": [1], "tokens": []}': "holds no tokens",
    '{"prompt_tokens": [], "tokens": [1]}': "an empty prompt",
    '{"prompt_tokens": [1], "tokens": [40]}': "tokens holds the id 40, and the target's vocabulary "
                                              "has 40",
    '{"prompt_tokens": [-1], "tokens": [4]}': "holds the id -1",
    '{"prompt": "letters", "tokens": [1]}': "the target has no tokenizer",
    '{"prompt_tokens": [1], "tokens": [1, 2], "group": ["a"]}': "2 tokens and 1 entries of group",
    '{"prompt_tokens": [1], "tokens": [1, 2], "group": ["all", ""]}': "none called all",
    '{"prompt_tokens": [1], "tokens": [1, 2], "group": "ab"}': "group must be a list",
    '{"prompt_tokens": [1], "tokens": [1], "settings": {}}': "have lines of their own",
    '{"prompt_tokens": [1], "tokens": [1], "statistics": 1}': "have lines of their own",
    json.dumps({"prompt_tokens": [1], "tokens": [1] * 128}): "129 tokens, and the target's context",
    '{"settings": {"temperature": 1}}\n{"settings": {"temperature": 0.5}}': "another temperature",
    json.dumps({"settings": {"top_k": "\x1b[2J"}}) + '\n{"prompt_tokens": [1], "tokens": [1]}':
        r"\x1b[2J",
}


@pytest.mark.parametrize("content", BAD_FILES)
def test_a_bad_file_gets_one_sentence(content, target_folder, tmp_path, capsys):
    path = tmp_path / "file.jsonl"
    path.write_text(content, "utf-8")
    assert main([str(path), "--target", target_folder, "--temperature", "1"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert BAD_FILES[content] in said


def test_what_the_audit_cannot_read_or_guess_gets_one_sentence(target_folder, tmp_path, capsys):
    text = Text([1], [2], [])
    path = write_lines(tmp_path / "file.jsonl", [text], None)
    missing = str(tmp_path / "none")
    half = tmp_path / "half.jsonl"
    half.write_text(r'{"prompt": "a\ud800", "tokens": [1]}', "utf-8")
    lacks = shutil.copytree(target_folder, tmp_path / "lacks")
    weights = load_file(lacks / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, lacks / "model.safetensors", {"format": "pt"})
    sampled = [path, "--target", target_folder, "--temperature", "1"]
    for arguments, sentence in (
            ([missing], f"{missing}: No such file"), ([path], "name --target"),
            ([path, "--target", target_folder], "name --temperature"),
            ([*sampled, "--temperature", "-1"], "ValueError: `temperature` (="),
            ([path, "--target", missing, "--temperature", "1"], f"--target {missing}: "),
            ([path, "--target", str(lacks), "--temperature", "1"], "lack model.norm.weight"),
            ([*sampled, "--top-p", "nan"], "top-p is nan"), ([*sampled, "--top-p", "2"], "is 2.0"),
            ([str(half), "--target", str(TINY / "target"), "--temperature", "1"],
             "half.jsonl, line 1: the tokenizer cannot read it: ")):
        assert main(arguments) == 2
        assert sentence in capsys.readouterr().err


# ---- whom it accuses, what it tells them, and what it never does ----
def audited(texts: list[Text], folder: str, tmp_path: Path, *flags: str,
            settings: dict | None = None) -> int:
    """The exit status of the audit of texts at temperature 1."""
    path = write_lines(tmp_path / "file.jsonl", texts, settings)
    return main([path, "--target", folder, "--temperature", "1", "--dtype", "float64", *flags])


def test_innocent_texts_that_are_not_whole_or_not_independent_are_told_so(target_folder, tmp_path,
                                                                          capsys):
    whole = []
    stripped = []
    for prompt, tokens, _ in texts_by_ssd(20, temperature=1.0):
        end = next((place for place, token in enumerate(tokens) if token in EOS), len(tokens))
        whole.append(Text(prompt, tokens[:end + 1], []))
        stripped.append(Text(prompt, tokens[:end], []))
    hints = {"No text holds an end-of-sequence", "of 300 texts repeat another", "far less likely"}
    for texts, status, shown in (
            (whole, 0, []), (stripped, 1, ["No text holds an end-of-sequence"]),
            (3 * whole[:100], 1, ["of 300 texts repeat another"])):
        assert audited(texts, target_folder, tmp_path) == status
        report = capsys.readouterr().out
        assert [hint for hint in hints if hint in report] == shown


def test_too_few_tokens_are_not_nothing_found(target_folder, tmp_path, capsys):
    sound = texts_by_ssd(20, temperature=1.0)
    for texts, status, said in (([Text([1], [2], [])], 3, "Too few to tell: 1 tokens"),
                                (sound[:5], 3, "Too few"), (sound[:100], 0, "Nothing found"),
                                ([Text([1], 127 * [4], [])], 1, "FOUND")):
        assert audited(texts, target_folder, tmp_path) == status
        assert said in capsys.readouterr().out
    for known, count in ((False, 399), (True, 400)):
        assert (evenness(torch.linspace(0, 1, count), 20) > 0) == known
    for known, count in ((False, 79), (True, 80)):  # variance 39.5 and 40
        half = torch.full((count, 2), 0.5, dtype=torch.float64)
        assert (counts_p_value(0 * half, half) > 0) == known


def test_the_first_line_tells_what_the_file_itself_says(target_folder, tmp_path, monkeypatch,
                                                        capsys):
    texts = texts_by_ssd(4, temperature=0.9, top_k=30)
    said = dict(target="none", temperature=0.9, top_k=30, lookahead=3)
    assert audited(texts, target_folder, tmp_path, "--temperature", "0.9", settings=said) == 0
    assert capsys.readouterr().out.splitlines()[0] == (
        f"target {target_folder}, temperature 0.9, top_k 30, top_p 1.0, dtype float64, "
        "torch.float64, 200 texts; as the file says, unless you name --top-k")
    monkeypatch.setattr(sys, "stdout", None)  # closed: the status tells
    assert audited(texts, target_folder, tmp_path, "--top-k", "3") == 1


@pytest.mark.parametrize("problem", (
    MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory"), KeyError("x"),
    OSError(errno.ENOSPC, "No space left on device")))
def test_a_failure_has_not_the_status_of_a_finding(problem, target_folder, tmp_path, monkeypatch,
                                                   capsys):
    def fail(*_):
        raise problem

    monkeypatch.setattr("audit.report.audit_groups", fail)
    text = Text([1], 90 * [4], [])
    assert audited([text], target_folder, tmp_path) == 2
    assert re.fullmatch(f"{type(problem).__name__}: .+\n", capsys.readouterr().err)
