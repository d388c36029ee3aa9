"""Tests of the commands: settings, screen and files, processes, and the benchmark.
engine/test_engine.py has models, placement, CUDA graphs, tensor parallelism and GPUs,
test_equivalence.py the algorithm.

Starting a process costs seconds, most of them for importing PyTorch. So commands are obeyed in this
process (`obey`), or in ranks forked from a process that has done the imports (`in_ranks`); very few
are started as a user starts them.
"""
import builtins
import copy
import errno
import gzip
import importlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, redirect_stderr, redirect_stdout, suppress
from dataclasses import FrozenInstanceError, asdict, fields, replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Callable, NoReturn
from unittest.mock import Mock

import huggingface_hub
import matplotlib
import numpy
import psutil
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoTokenizer

import bench as bench_py
import cache
import draft_worker
import figures.growth
import run
import test_equivalence
from cache import BACKUP, PRIMARY, RowRound
from cli import launch
from cli.settings import ROOT, TINY, Settings, open_for_writing, parse
from course import page
from course.options import ExplainSettings, PageSettings
from engine import timing
from engine.check import check_model
from engine.errors import UserError, reported_as
from engine.model import CausalLM
from figures import draw
from figures.bench_options import BenchSettings, draw_again
from figures.rivals import ASSISTANTS, Generate
from figures.table import print_table
from ideas import SPECULATORS, VERIFICATIONS
from run import placement, screen
from run.decoder import Decoder, make_plan
from run.job import Job, encode, open_model
from run.screen import Display, print_summary
from run.stats import Span, Stats, TimedRound, choices_of
from testing.shared import (
    RAGGED,
    greedy_reference,
    imitation,
    in_ranks,
    make_decoder,
    random_model,
)

if os.name == "nt":
    pytest.skip("tests of processes and signals need POSIX: use WSL", allow_module_level=True)
slow = pytest.mark.slow
PROGRAMS = {"saguaro.py": (Settings, "run"), "bench.py": (BenchSettings, "bench")}
RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what torchrun tells a rank
RESULTS = json.loads((ROOT / "figures/results.json").read_text("utf-8"))["results"]
START_SECOND_RANK = launch.start_second_rank  # which no command of a test calls: see one_process
LEAVE = launch.leave


# ---- helpers ----

def leave(status: int) -> NoReturn:
    """As `launch.leave` does, but this process goes on."""
    placement.leave_groups()
    sys.exit(status)


def no_driver() -> None:
    raise RuntimeError("Found no NVIDIA driver")


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    """A command obeyed in this process leaves its threads, streams and Ctrl-C alone, sees no GPU
    and starts no other process."""
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(launch, "prepare_process", lambda: None)
    monkeypatch.setattr(launch, "leave", leave)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", no_driver)
    monkeypatch.setattr(launch, "start_second_rank", lambda module: None)
    monkeypatch.setattr(sys, "argv", sys.argv)
    # the variable HF_HUB_OFFLINE is read at the import, which other test files have done
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def obey(program: str, *words, out=None) -> tuple[int, str]:
    """`python program words` in this process: exit status, and its output (standard output goes to
    `out` if given)."""
    sys.argv = [program, *map(str, words)]
    output = StringIO()
    with redirect_stdout(out or output), redirect_stderr(output):
        with pytest.raises(SystemExit) as stopped:
            launch.launch(*PROGRAMS[program])
    return stopped.value.code or 0, output.getvalue()


def obey_in_rank(commands: list[tuple]) -> list[tuple[int, str]]:
    torch.set_num_threads = lambda count: None
    torch.cuda.is_available = lambda: False
    launch.prepare_process = lambda: None
    launch.leave = leave
    results = []
    for port, words in commands:
        os.environ["MASTER_PORT"] = str(port)
        results.append(obey(*words))
    return results


def obey_in_ranks(count: int, commands: list[tuple]) -> list[list[tuple[int, str]]]:
    """What `obey` returns in each of `count` ranks, on CPUs, command by command."""
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
              for _ in commands]  # where the ranks meet
    ports = [store.port for store in stores]
    return in_ranks(count, obey_in_rank, list(zip(ports, commands)))


def obey_own(commands: list[list]) -> tuple[int, str]:
    """Each rank obeys its own command."""
    words = ["saguaro.py", *commands[int(os.environ["RANK"])]]
    return obey_in_rank([(os.environ["MASTER_PORT"], words)])[0]


def read(file: Path) -> dict:
    return json.loads(file.read_text("utf-8"))


def read_output(file: Path) -> tuple[dict, list[dict], dict]:
    """Settings, texts and statistics of an --output."""
    first, *texts, last = map(json.loads, file.read_text("utf-8").splitlines())
    return first["settings"], texts, last["statistics"]


def the_error(result: tuple[int, str]) -> str:
    """The one sentence of a failure."""
    status, output = result
    assert status == 2 and output.count("\n") == 1, output
    assert output.startswith("saguaro.py: error: "), output
    return output


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> list:
    """Words of the command line for a small random target and draft, with the embedded pair's
    tokenizer, and three prompts."""
    folder = tmp_path_factory.mktemp("pair")
    target = random_model(  # two or three ranks may share it
        vocab_size=2048, max_position_embeddings=128, hidden_size=48, num_attention_heads=6,
        num_key_value_heads=6)
    draft = imitation(target, 0.15)
    draft.resize_token_embeddings(1984, mean_resizing=False)  # families pad them differently
    for name, model in (("target", target), ("draft", draft)):
        model.save_pretrained(folder / name)
        for file in (TINY / name).glob("tokenizer*.json"):
            shutil.copy(file, folder / name)
    rename(folder / "draft", "endoftext", "unheard-of")  # special tokens may differ
    return ["--target", folder / "target", "--draft", folder / "draft", "--dtype", "float64",
            "--prompt", "def f(x):", "class A:", "x", "--batch-size", 2, "--max-new-tokens", 12]


# ---- the command ----

WRONG = {  # a command, and what is said about it
    "--fanout uniform": "unrecognized arguments: --fanout (--help lists all options)",
    "--temp 1": "unrecognized arguments: --temp (--help",  # a later version may have two of these
    "--lookahead 0": "--lookahead is 0; it must be from 1 to 64",
    "--temperature nan": "--temperature is nan",
    "--top-p 1.5": "--top-p is 1.5", "--miss-exponent 0": "--miss-exponent is 0",
    "--fan-out 4,3,2,1": "[4, 3, 2, 1] is not 5 numbers, F_0 to F_K, of sum 10",
    "--fan-out 4,2,1,1,1,1": "[4, 2, 1, 1, 1, 1] is not 5 numbers",
    "--fan-out 4,3,2,1,-2": "neither " + " nor ".join([
        *cache.FAN_OUT_POLICIES, *SPECULATORS, "numbers"]),
    "--fan-out 4,,3": "''",
    "--fan-out 9999,1,1,1,1 --mode ar": "--budget is 10003; it must be from 0 to 4",
    "--backup fast": f"--backup fast: there are {', '.join(draft_worker.BACKUPS)} and auto",
    "--verification best": f"--verification best: not one of {', '.join(VERIFICATIONS)}",
    "--device cuda": "--device cuda: Found no NVIDIA driver",
    "--pace 60 -1": "--pace is -1.0; it must be from 0 to",
    "--prompt ''": "prompt 1 of 1 has 0 tokens",
    "--prompt a --prompts FIELDLESS": "exclude each other",
    "a --prompt b": "--prompt: not allowed with argument TEXT",
    "--prompts nowhere.jsonl": ": No such file",
    "--prompts EMPTY": "holds no prompt",
    "--prompts BART": "it must be a regular file", "--prompts PIPE": "it must be a regular file",
    "--prompts NESTED": "line 1: not a JSON obj",
    "--prompts TORN": "line 2: not a JSON object",
    "--prompts FIELDLESS": "line 1: no text in a field prompt, question or text, but only words",
    "--target ADDED --mode ar --apply-chat-template":
        "the chat template cannot read the prompts: no user here",
    "--prompts GZIP": "can't decode byte 0x8b in position 1",
    "--prompts MESSAGES": "no text in a field prompt, question or text, but list",
    "--prompts LONG": "context, 512",
    "--prompts GOOD --output GOOD --mode ar": "GOOD': it is the file of --prompts",
    "--prompts GOOD --trace LINK --mode ar": "LINK': it is the file of --prompts",
    "--output OUT --trace OUT --mode ar": "OUT': it is the file of --output",
    "--target POINTER --mode ar": "it holds no weights: a download that broke off, or a Git LFS po",
    "--output BART": ": Is a directory", "--output nowhere/out.jsonl": ": No such file or dir",
    "--target ./nowhere": "--target ./nowhere cannot be read, neither as a folder",
    "--target no-such/model": "no-such/model cannot be read, neither as a folder with a model",
    "--draft GGUF": "GGUF is GGUF, which is not", "--draft a.gguf": "a.gguf is GGUF, which is not",
    "--target ADAPTER": "ADAPTER holds an adapter (LoRA): merge it into its model",
    "--draft CODE": "contains custom code which must be executed",
    "a 'b <word>' --target ADDED --mode ar":
        "to 2048; the target's embedding has 0 to 2047",
    "--target BART": "cannot be decoded here", "--target CORRUPT --mode ar": "cannot load",
    "--draft RENAMED": "different vocabularies", "--apply-chat-template": "template is not set"}


def rename(folder: Path, old: str, new: str) -> None:
    """In all tokens."""
    file = folder / "tokenizer.json"
    file.write_text(file.read_text("utf-8").replace(old, new), "utf-8")


@pytest.fixture(scope="module")
def wrong_inputs(tmp_path_factory) -> dict[str, str]:
    """The files and folders that the words in capitals in WRONG stand for."""
    folder = tmp_path_factory.mktemp("wrong")
    for name, text in {"EMPTY": "\n", "TORN": '{"text": "a"}\n{"text": "b',
                       "FIELDLESS": '{"words": "a"}', "GOOD": '{"text": "a"}', "OUT": "",
                       "MESSAGES": '{"prompt": [{"role": "user"}], "question": "q"}',
                       "NESTED": '{"text": ' + "[" * 200_000,
                       "LONG": json.dumps({"text": "if x :\n" * 2000})}.items():
        (folder / name).write_text(text, "utf-8")
    for name in ("RENAMED", "BART", "CORRUPT", "ADDED", "DEEPER", "CODE", "ESCAPES", "POINTER",
                 "WIDER", "ADAPTER"):
        shutil.copytree(TINY / "draft", folder / name)
    added = AutoTokenizer.from_pretrained(folder / "ADDED")
    added.add_tokens("<word>")
    added.chat_template = "{{ raise_exception('no user here') }}"
    added.save_pretrained(folder / "ADDED")
    added.chat_template = "{{ raise_exception('\x1b[2J') }}"
    added.save_pretrained(folder / "ESCAPES")
    rename(folder / "RENAMED", "Ġ", "☃")  # the space before a word
    AutoConfig.for_model("bart", vocab_size=2048).save_pretrained(folder / "BART")
    for name, size in ("DEEPER", "num_hidden_layers"), ("WIDER", "intermediate_size"):
        config = AutoConfig.from_pretrained(folder / name)
        setattr(config, size, getattr(config, size) + 1)
        config.save_pretrained(folder / name)
    code = {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModel": "own.Own"}}
    (folder / "CODE" / "config.json").write_text(json.dumps(code), "utf-8")
    (folder / "CORRUPT" / "model.safetensors").write_bytes(b"\x08" + bytes(100))
    (folder / "POINTER/model.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    (folder / "GZIP").write_bytes(gzip.compress(b'{"text": "a"}'))
    (folder / "ADAPTER/adapter_config.json").write_text("{}")
    (folder / "GGUF").mkdir()
    (folder / "GGUF/q4.gguf").touch()
    os.mkfifo(folder / "PIPE")
    os.link(folder / "GOOD", folder / "LINK")
    return {path.name: str(path) for path in folder.iterdir()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("arguments", WRONG)
def test_a_wrong_command_gets_one_sentence_and_exit_status_2(arguments, wrong_inputs):
    words = [wrong_inputs.get(word, word) for word in shlex.split(arguments)]
    assert WRONG[arguments] in the_error(obey("saguaro.py", *words))


@pytest.mark.parametrize("name, sentence", (
    ("DEEPER", "its files lack model.layers.3."), ("WIDER", "has the shape [128, 352], but by")))
def test_no_report_of_a_library_stands_before_the_sentence(name, sentence, wrong_inputs):
    """In a process of its own: here transformers logs to the standard error that it saw first."""
    run = subprocess.run([sys.executable, "saguaro.py", "--target", wrong_inputs[name], "--mode",
                          "ar"], cwd=ROOT, capture_output=True, text=True)
    assert sentence in the_error((run.returncode, run.stderr))


def test_a_folder_that_also_holds_gguf_is_read(tmp_path):
    """As several of the Hub."""
    shutil.copytree(TINY / "draft", tmp_path, dirs_exist_ok=True)
    (tmp_path / "q4.gguf").touch()
    assert open_model("--draft", str(tmp_path))[0].vocab_size == 2048


def test_escape_sequences_of_names_and_libraries_reach_no_terminal(wrong_inputs, tmp_path):
    for words in (["--target", "a\x1b[2J"], ["--output", tmp_path / "\x9b1m" / "x"], ["--\x07"],
                  ["--target", wrong_inputs["ESCAPES"], "--mode", "ar", "--apply-chat-template"]):
        error = the_error(obey("saguaro.py", *words))
        assert re.search(r"\\x(1b|9b|07)", error) and not re.search("[\x1b\x9b\x07]", error)


@pytest.mark.parametrize("problem, expected", (
    (OSError(28, "No space"), pytest.raises(UserError, match="^the file: No space$")),
    (OSError("none of: \n(1) a\n(2) b"), pytest.raises(UserError, match=r"none of: \(1\) a$")),
    (KeyError("rope"), pytest.raises(UserError, match=r"^the file: KeyError\('rope'\)$")),
    (ZeroDivisionError("by 0"), pytest.raises(ZeroDivisionError)),
    (KeyboardInterrupt(), pytest.raises(KeyboardInterrupt)),
    (OSError(12, "Cannot allocate memory"), pytest.raises(OSError, match="memory")),
    (MemoryError(), pytest.raises(MemoryError))))
def test_what_a_library_raises_is_one_sentence_unless_memory_is_too_small(problem, expected):
    with expected, reported_as("the file", (OSError, MemoryError, KeyError)):
        raise problem


@pytest.mark.parametrize("wrong, sentence", (
    (dict(lookahead=0), "--lookahead is 0; it must be from 1 to 64"),
    (dict(mode="fast"), "--mode is 'fast'; it must be one of ssd, sd, ar"),
    (dict(backup_acceptance_rate=2), "--backup-acceptance-rate is 2; it must be from 0 to 1"),
    (dict(max_new_tokens=8.0), "argument --max-new-tokens: invalid int value: 8.0"),
    (dict(budget="8"), "--budget: invalid int value: '8'"),
    (dict(temperature=None), "--temperature: invalid float value: None"),
    (dict(fan_out=[4, 3]), "--fan-out: invalid str value: [4, 3]"),
    (dict(ignore_eos="false"), "--ignore-eos: invalid bool value: 'false'"),
    (dict(prompt=("a", 1)), "--prompt: invalid str value: 1"),
    (dict(pace=1), "--pace: expected 2 values, but got 1"), (dict(pace=(1, 2, 3)), "--pace: exp"),
    (dict(temperature=1e-9), "must be 0 or at least 1e-6"), (dict(top_p=0), "--top-p is 0")),
    ids=str)
def test_settings_made_in_python_are_checked_too(wrong, sentence):
    with pytest.raises(UserError, match=re.escape(sentence)):
        Settings(**wrong)


def test_what_was_checked_cannot_be_changed():
    with pytest.raises(FrozenInstanceError, match="temperature"):
        Settings().temperature = 1


@pytest.mark.parametrize("rank, world_size", (("", "2"), ("0", "0"), ("2", "2"), ("-1", "2")))
def test_what_no_launcher_says_gets_one_sentence(rank, world_size, monkeypatch):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", world_size)
    with pytest.raises(UserError, match="a launcher has set RANK, WORLD_SIZE, .*: "):
        placement.Placement(Settings())


def test_settings_made_of_numbers_and_paths_of_libraries_are_those_of_the_command_line():
    made = Settings(target=TINY / "target", max_new_tokens=numpy.int64(4), pace=(1, numpy.int8(2)),
                    temperature=numpy.float32(0.5))
    assert made == Settings(max_new_tokens=4, pace=(1, 2), temperature=0.5)
    json.dumps(asdict(made))


def make_two_jobs(own: bool) -> list:
    """A rank's job: the texts of two jobs of one script, which may have a group of its `own`."""
    if own:
        dist.init_process_group("gloo")
    for _ in range(2):
        job = Job(Settings(max_new_tokens=4, device="cpu"))
        decoder = Decoder(job.settings, job.load())
        texts = decoder(RAGGED[:1] if job.placement.rank == 0 else None)
    return texts


@pytest.mark.parametrize("prompts, sentence", (
    ([], "there is no prompt"), ([1, 2], "a list of lists of token ids: 'int' object is not iter"),
    ("12", "a list of lists of token ids: 'str' object cannot be inter"), ([[1.7]], "a list of"),
    ([[1], []], "prompt 2 of 2 has 0 tokens"), ([[1] * 64], "prompt 1 of 1 has 64 tokens"),
    ([[1, 40]], "holds tokens 1 to 40; the target's"), ([[-1]], "holds tokens -1 to -1")), ids=str)
def test_a_decoder_says_what_it_takes(prompts, sentence):
    """Such as one prompt without its batch, or a text."""
    with pytest.raises(UserError, match=sentence):
        make_decoder(random_model(), mode="ar")(prompts)


@pytest.mark.parametrize("own", (False, True))
def test_a_script_of_several_ranks_may_make_two_jobs_and_decodes_the_prompts_of_rank_0(own):
    here = Job(Settings(max_new_tokens=4, mode="ar"))
    texts = Decoder(here.settings, here.load())(RAGGED[:1])
    assert in_ranks(2, make_two_jobs, own)[0] == texts


def test_a_few_lines_of_python_decode_a_prompt_in_every_mode(capsys):
    """And one process that is target and draft in turns shows no speed."""
    texts = []
    for mode in ("ar", "sd", "ssd"):
        job = Job(Settings(mode=mode, prompt="def f(x):", dtype="float64", max_new_tokens=20))
        decoder = Decoder(job.settings, job.load())
        tokens = decoder(job.prompts)
        texts.append(job.tokenizer.decode(tokens[0]))
        summary = decoder.stats.summary()
        assert summary["tokens"] == len(tokens[0]) > 0 and len(str(summary)) < 800
        print_summary(job, summary)
        shown = capsys.readouterr().out
        assert ("tokens per second" in shown) == (mode != "ssd") == ("in turns" not in shown)
        assert ("cache hit rate" in shown) == (mode == "ssd") and "hidden" not in shown
        assert ("drafting (T_SD)" in shown) == (mode == "sd")
        assert ("fan_out" in summary) == (mode != "ar")
        for verification in ("block", "race"):
            job.settings = replace(job.settings, verification=verification)
            print_summary(job, summary)
            assert "acceptance" not in capsys.readouterr().out
    assert texts[0] == texts[1] == texts[2]


def end_texts_from_outside(decoder: Decoder | None = None) -> list:
    """What three rows write if the second is ended after two rounds, why they ended, what was
    raised in a second batch, after how many rounds, and what a third one writes. All ranks do
    this, with README's lines."""
    if decoder is None:  # a rank's
        job = Job(Settings(max_new_tokens=20, dtype="float64", device="cpu"))
        decoder = Decoder(job.settings, job.load())
    heard = []

    def on_tokens(row: int, *_) -> bool:
        heard.append(row)
        if heard.count(1) == 2:
            decoder.stop(1)
        return False  # what it returns means nothing

    def fail(row: int, *_) -> None:
        if heard.append(row) or heard.count(0) > 2:
            raise KeyboardInterrupt("the client is gone")

    ended = decoder(RAGGED[:3], on_tokens), decoder.finish_reasons
    heard.clear()
    problem = None
    try:
        decoder(RAGGED[:3], fail)
    except KeyboardInterrupt as raised:
        problem = str(raised), decoder.finish_reasons
    return [*ended, problem, heard.count(0), decoder(RAGGED[:3])]


@pytest.mark.parametrize("other", ("decoder", "of the same draft", "in a thread"))
def test_who_shares_a_model_waits_for_their_turn(other):
    """Else both would write into one KV: texts would be wrong, without a word."""
    target = random_model()
    decoder = make_decoder(target, imitation(target, 0.15), max_new_tokens=20)
    models = decoder.models
    if other == "of the same draft":
        models = models._replace(target=CausalLM(target))
    second = decoder if other == "decoder" else Decoder(decoder.settings, models)
    alone = decoder(RAGGED[:1]), second(RAGGED[1:2])
    said = []

    def on_tokens(*_) -> None:
        with ThreadPoolExecutor() if other == "in a thread" else nullcontext() as pool:
            with pytest.raises(UserError, match="one at a time"):
                pool.submit(second, RAGGED[1:2]).result() if pool else second(RAGGED[1:2])
        said.append(other)

    assert decoder(RAGGED[:1], on_tokens) == alone[0] and said
    assert second(RAGGED[1:2]) == alone[1]


def test_a_model_is_not_checked_while_another_thread_decodes_it():
    """The check changes the window that both have."""
    target = random_model("mistral", sliding_window=8)
    decoder = make_decoder(target, mode="ar", max_new_tokens=20)
    text = decoder(RAGGED[:1])
    said = []

    def on_tokens(*_) -> None:
        with ThreadPoolExecutor() as pool, pytest.raises(UserError, match="one at a time"):
            pool.submit(check_model, CausalLM(target)).result()
        said.append(check_model(CausalLM(target)))  # in this thread nothing else runs

    assert decoder(RAGGED[:1], on_tokens) == text and said


def test_target_and_draft_need_a_causal_lm_each():
    models = make_decoder(random_model(), random_model()).models
    with pytest.raises(UserError, match="target and draft need a CausalLM each"):
        Decoder(Settings(), models._replace(draft=models.target))


@pytest.mark.parametrize("ranks", (1, pytest.param(2, marks=slow)))
def test_whoever_hears_the_tokens_may_end_a_text_or_fail(ranks):
    """The other rows go on, and all ranks are in step for the next batch."""
    if ranks == 2:
        found, _ = in_ranks(2, end_texts_from_outside)
    else:
        target = random_model()
        decoder = make_decoder(target, imitation(target, 0.15), max_new_tokens=20)
        found = end_texts_from_outside(decoder)
    ended, reasons, problem, rounds, whole = found
    assert [len(text) for text in whole] == [20] * 3
    assert reasons == ["length", "stop", "length"]
    stopped = ended[1]
    assert 1 < len(stopped) <= 6
    assert ended == [whole[0], whole[1][:len(stopped)], whole[2]]
    assert problem == ("the client is gone", 3 * ["stop"])
    assert rounds == 3


def test_readmes_lines_decode_with_the_included_draft_and_with_ones_own(capsys):
    readme = (ROOT / "README.md").read_text("utf-8")
    first, _, own = re.findall("```python\n(.*?)```", readme, re.S)
    here = {}
    exec(first, here)
    *text, hit_rate = capsys.readouterr().out.splitlines()
    assert "".join(text) and 0 < float(hit_rate) < 1
    exec(own, here)
    here["saguaro"].close()
    assert capsys.readouterr().out and here["saguaro"].stats.summary()["hit_rate"] < float(hit_rate)
    model = re.search("from testing.*", own)[0]  # which leaves a script its threads
    program = f"import torch as t; t.set_num_threads(2); {model}; assert t.get_num_threads() == 2"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def go_on_after_errors() -> list[str]:
    """A rank's job: what it is told of errors that one rank alone has found, then what it writes,
    and what it is told of a batch within a batch, behind one that broke off, and of a rank that is
    gone."""
    job = Job(Settings(max_new_tokens=8, dtype="float64", device="cpu"))
    models = job.load()
    decoder, other = (Decoder(job.settings, models) for _ in range(2))
    said = []

    def attempt(prompts, on_tokens: Callable = lambda *_: None, decoder: Decoder = decoder) -> None:
        try:
            said.append(decoder(prompts, on_tokens))
        except (UserError, RuntimeError, ZeroDivisionError) as problem:
            said.append(str(problem))

    attempt([[1.5]] if decoder.leads else RAGGED[:1])
    attempt([[]] if decoder.leads else RAGGED[:1])
    other.target = other.draft = None
    other.workers = []
    attempt(RAGGED[:1], lambda *_: len(said) == 2 and attempt(RAGGED[:1], decoder=other))
    if decoder.leads:
        decoder.target.model.forward_fn = lambda *_: 1 / 0
        attempt(RAGGED[:1])
    attempt(RAGGED[:1])
    return said


@slow
def test_what_one_rank_has_found_leaves_no_rank_behind():
    """Else the others would wait for a day, or hear the next prompt in the place of this one."""
    first, second = in_ranks(2, go_on_after_errors, seconds=60)
    job = Job(Settings(mode="ar", max_new_tokens=8, dtype="float64"))
    text = Decoder(job.settings, job.load())(RAGGED[:1])
    refused = first[:2]
    busy = "another decoder of this program is at work with other ranks: one at a time, or take " \
           "Saguaro(in_turns=True)"
    broken = "a batch broke off, and the other ranks are still at work on it: end all"
    assert refused[0].startswith("prompts must be a list of lists") and "0 tokens" in refused[1]
    assert first == [*refused, busy, text, "division by zero", broken]
    assert second == [*refused, text, "another rank is gone: its own report says why"]


def test_portings_lines_leave_nothing_behind_a_stop_string():
    """Though the round in which it was written went on."""
    lines, = re.findall("```python\n(.*?)```", (ROOT / "docs/PORTING.md").read_text("utf-8"), re.S)
    here = {}
    exec(lines, here)
    here["saguaro"].close()
    text, other = here["texts"]
    assert text.endswith("return None") and here["stop"] not in text + other
    assert here["heard"][0].startswith(text + here["stop"] + "    def")
    assert here["saguaro"].decoder.finish_reasons[0] == "stop"


def test_a_text_that_has_ended_is_not_ended_again():
    target = random_model()
    decoder = make_decoder(target, imitation(target, 0.15), max_new_tokens=20)
    [text] = decoder(RAGGED[:1])
    eos = text[7]
    decoder.eos = [eos]

    def on_tokens(row: int, new: list[int], _) -> None:
        if eos in new:
            decoder.stop(row)

    decoder(RAGGED[:1], on_tokens)
    assert decoder.finish_reasons == ["eos"]
    decoder.models.target.model = copy.copy(target)
    decoder.models.target.model.generation_config = SimpleNamespace(eos_token_id=decoder.eos)
    further = Decoder(replace(decoder.settings, ignore_eos=True), decoder.models)
    assert len(further(RAGGED[:1])[0]) == 20


def test_a_decoder_made_in_inference_mode_decodes_outside_of_it():
    target = random_model()
    with torch.inference_mode():
        decoder = make_decoder(target, imitation(target, 0.15), max_new_tokens=20)
    assert decoder(RAGGED) == greedy_reference(target, RAGGED, 20)


def test_prompts_may_be_longer_than_those_of_the_job():
    job = Job(Settings(prompt="x", max_new_tokens=4, dtype="float64"))
    models = job.load()
    texts = Decoder(job.settings, models)([[5] * 99])
    assert texts == greedy_reference(models.target.model, [[5] * 99], 4)


@pytest.mark.parametrize("mode", ("sd", "ssd"))
def test_models_without_a_draft_do_not_speculate(mode):
    models = make_decoder(random_model(), mode="ar").models
    with pytest.raises(UserError, match=f"--mode {mode}: these models were loaded without a draft"):
        Decoder(Settings(mode=mode), models)


def test_the_target_alone_drafts_nothing_though_a_draft_is_loaded():
    """As in bench.py, whose SD has one."""
    target = random_model()
    models = make_decoder(target, target).models
    decoder = Decoder(Settings(mode="ar", max_new_tokens=9, dtype="float64"), models)
    decoder(RAGGED)
    assert decoder.stats.summary()["tokens_per_round"] == 1


def test_help_names_every_option_with_its_group_default_and_choices(capsys):
    with pytest.raises(SystemExit) as stopped:
        parse(Settings, ["--help"])
    output = capsys.readouterr().out
    assert not stopped.value.code and "docs/WORDS.md" in output
    defaults = set(re.findall(r"\(default: (\S+)\)", " ".join(output.split())))
    assert "tiny/target" in defaults and defaults.isdisjoint(("None", "()", "False"))
    assert all(f"\n{field.metadata['group']}:\n" in output for field in fields(Settings))
    names = {"geometric", "uniform", "confident", "neural", "lookup", "random"}
    assert names <= {*cache.FAN_OUT_POLICIES, *draft_worker.BACKUPS, *SPECULATORS}
    assert run.decoder.acceptance_after(Settings(), "lookup") == 0.2, "as --help says"
    assert run.decoder.acceptance_after(Settings(backup_acceptance_rate=0), "lookup") == 0
    assert all(name in output for name in names)


@slow
@pytest.mark.parametrize("command", (
    "saguaro.py", "bench.py", "-m course.explain", "-m course.page", "-m figures.draw", "-m audit",
    "-m tiny.enlarge", "test_equivalence.py"))
def test_help_is_there_at_once(command, tmp_path):
    """And a wrong flag is answered: the command line is read without torch."""
    (tmp_path / "torch.py").write_text("raise ImportError('this would take seconds')")
    run = subprocess.run([sys.executable, *command.split(), "--help"], cwd=ROOT, text=True,
                         capture_output=True, env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert run.returncode == 0
    usage = f"usage: {command}" if command.endswith(".py") else f"usage: python {command}"
    assert "--lookahead" in run.stdout or usage in run.stdout
    assert "audit" not in command or max(map(len, run.stdout.splitlines())) <= 80


@pytest.mark.parametrize("content, expected", (
    ("{{ m.content }}", nullcontext()),
    ("{% for part in m.content %}{{ part.text }}{% endfor %}", nullcontext()),
    ("", pytest.raises(UserError, match="the chat template cannot read the prompts"))))
def test_a_chat_template_makes_each_prompt_a_user_turn(content, expected):
    """It may read texts or lists of parts; one that drops both is refused."""
    tokenizer = open_model("--target", str(TINY / "target"))[1]
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>" + content + "{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}")
    with expected:
        prompts = encode(tokenizer, ["Why?", "How?"], chat=True)
        texts = ["<user>Why?<assistant>", "<user>How?<assistant>"]
        assert tokenizer.batch_decode(prompts) == texts


def test_the_output_file_holds_settings_texts_and_statistics(pair, tmp_path):
    words = [*pair, "--mode", "sd", "--batch-size", 64, "--output", tmp_path / "out"]
    assert obey("saguaro.py", *words)[0] == 0
    config, outputs, stats = read_output(tmp_path / "out")
    assert config.keys() == {field.name for field in fields(Settings)}
    assert config["batch_size"] == 3, "the rows that were decoded, as Theorem 17 is told"
    assert stats.keys() >= {"fan_out", "backup", "guess_counts", *Stats().summary()}
    assert 0 < stats["verifier_utilisation"] <= 1 and stats["tokens"] == 36
    assert [output["prompt"] for output in outputs] == ["def f(x):", "class A:", "x"]
    for output in outputs:
        assert output.keys() == {"prompt", "prompt_tokens", "text", "tokens", "group",
                                 "finish_reason"}
        assert output["finish_reason"] == "length"
        assert len(output["tokens"]) == len(output["group"]) == 12
        assert output["group"][:2] == ["round 0", "miss 0"]


def test_the_statistics_in_the_file_are_json_and_tell_after_what_was_guessed(tmp_path):
    plan = draft_worker.Plan([[1, 2], [3, 0]], "neural", critical_batch_size=float("inf"))
    stats = Stats(choices_of(plan, 0.5), guess_counts=[[[1]], [[2]]])
    display = Display(Job(Settings(prompt="x", output=str(tmp_path / "out"))))
    display.begin()
    display.finish(stats)
    written = (tmp_path / "out").read_text("utf-8")
    *_, told = read_output(tmp_path / "out")
    assert (told["guess_counts"], told["guess_counts_after_backup"]) == ([[1]], [[2]])
    assert told["critical_batch_size"] is None and "Infinity" not in written


def test_a_penalty_that_nobody_applies_is_named(tmp_path, capsys):
    shutil.copytree(TINY / "target", tmp_path, dirs_exist_ok=True)
    config = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 0, "suppress_tokens": [5],
              "temperature": 0.7, "eos_token_id": 0}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    Job(Settings(mode="ar", target=tmp_path)).load()
    assert capsys.readouterr().err == f"not applied, though {tmp_path} asks for it in its " \
        "generation config: repetition_penalty, suppress_tokens\n"
    Job(Settings(mode="ar")).load()
    assert not capsys.readouterr().err


def test_the_other_fields_of_a_prompt_travel_to_the_output(pair, tmp_path):
    rows = [{"task_id": "T/0", "question": "def f(x):", "answer": [1], "text": "x"},
            {"prompt": "class A:", "settings": 1, "statistics": 2, "tokens": "ours"}]
    (tmp_path / "prompts").write_text("\n".join(map(json.dumps, rows)), "utf-8-sig")
    words = [*pair[:pair.index("--prompt")], "--mode", "ar", "--prompts", tmp_path / "prompts",
             "--output", tmp_path / "out"]
    assert obey("saguaro.py", *words)[0] == 0
    _, (first, second), _ = read_output(tmp_path / "out")
    assert first.items() >= {"prompt": "def f(x):", "task_id": "T/0", "answer": [1]}.items()
    assert first["text"] != "x" and second["tokens"] != "ours"
    for line in (first, second):  # each is a batch
        assert len(line["group"]) == len(line["tokens"])
    assert not second.keys() & {"settings", "statistics"}


def test_an_output_keeps_what_it_held_until_all_is_loaded_and_names_the_type_used(tmp_path):
    out = tmp_path / "out"
    out.write_text("earlier")
    display = Display(Job(Settings(mode="ar", prompt="x", output=str(out))))
    assert out.read_text() == "earlier"
    display.begin()
    assert read(out)["settings"]["dtype"] == "float32"


def test_a_second_run_with_the_same_output_is_refused(pair, tmp_path):
    out = tmp_path / "out"
    with open_for_writing("--output", str(out)) as file:
        file.write("a text")
        file.flush()
        said = the_error(obey("saguaro.py", *pair, "--mode", "ar", "--output", out))
    assert "another run is writing it" in said and out.read_text() == "a text"
    assert obey("saguaro.py", *pair, "--mode", "ar", "--output", out)[0] == 0
    assert len(read_output(out)[1]) == 3


def test_a_crash_loses_the_batch_at_work_and_nothing_else(pair, tmp_path, monkeypatch):
    files = []

    def fail(*_) -> None:
        files.append((tmp_path / "out").read_text())  # whoever is killed closes no file
        if len(files) == 2:
            raise UserError("in the second batch")

    monkeypatch.setattr(run.decoder, "check_prompts", fail)
    words = [*pair, "--mode", "ar", "--output", tmp_path / "out"]
    assert obey("saguaro.py", *words)[0] == 2
    lines = list(map(json.loads, files[1].splitlines()))
    assert [line.get("prompt") for line in lines] == [None, "def f(x):", "class A:"]


def test_work_is_paced_by_its_passes_and_the_summary_names_the_share_in_time(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(timing, "time", SimpleNamespace(
        perf_counter=lambda: now[0], sleep=lambda time: now.append(now.pop() + time + 0.001)))
    job = Job(Settings(mode="ar", pace=(1000, 0), prompt="x"))
    models = job.load()
    Decoder(replace(job.settings, max_new_tokens=1), models)(job.prompts)  # sets the pace
    clock = models.target.clock
    stats = Stats()
    for passes, seconds in ((19, 7), (1, 1.5), (1, 1.5)):
        with clock("verify"):
            now[0] += seconds
            clock.passes += passes
        stats.add([{"spans": clock.read(), "rounds": [], "guesses": None}])
        print_summary(job, stats.summary())
    assert stats.seconds_of("verify") == pytest.approx([19, 1.5, 1.5], abs=0.01)
    kept = r"kept +(\S+)   of passes: target 1000 ms.*\n(  This machine)?"
    assert re.findall(kept, capsys.readouterr().out) == [
        ("100%", ""), ("95%", ""), ("90%", "  This machine")]


def test_the_summary_leaves_prefill_out_and_predicts_for_the_batch(capsys):
    row = RowRound(0, PRIMARY, [0, 0], 1, 0, [0, 0])
    log = [TimedRound(0, 0.0, 1.0, [row]), TimedRound(1, 1.0, 1.5, [row])]
    summary = Stats(log=log).summary()
    assert (summary["tokens_per_second"], summary["prefill_seconds"]) == (4, 1)
    summary |= {"T_b": 0.25, "backup": "neural", "tokens_per_round": 3, "hit_rate": 0.5, "E_hit": 3,
                "E_miss": 2}
    for T_p, told in ((1.004, "hidden behind it"), (1.5, "waits")):
        screen.print_times(Settings(batch_size=2), summary | {"T_p": T_p})
        shown = capsys.readouterr().out
        assert told in shown
    # 2.5 tokens; one round in four hits alone, in 1.5 verifications, and the others take 1.75
    assert "predicted speed         1.48   x AR, 0.62 x SD with this K, by Theorem 7" in shown
    screen.print_times(Settings(), summary | {"T_p": 0.9, "backup": "lookup"})  # SD has no such T_b
    assert "predicted" not in capsys.readouterr().out


def test_of_a_round_that_an_ending_cuts_short_tokens_are_those_kept_and_accepted_all_that_were():
    rows = [RowRound(0, PRIMARY, [5, 6, 7], 3, 8, [5]),       # 5 ends the text
            RowRound(1, BACKUP, [4, 5, 7], 2, 8, [4, 5]),     # the same, before t*
            RowRound(2, BACKUP, [6, 7, 6], 0, 6, [6])]
    summary = Stats(log=[TimedRound(1, 0.0, 1.0, rows)]).summary()
    assert summary.items() >= {
        "tokens": 4, "rounds": 1, "tokens_per_round": 4 / 3, "acceptance_rate": 5 / 7,
        "hit_rate": 1 / 3, "E_hit": 1, "E_miss": 3 / 2}.items()


def test_readme_shows_the_summary_that_is_printed_and_words_has_its_words(capsys):
    numbers = dict.fromkeys([name for name, *_ in screen.REPORT] + ["T_p", "T_b"], 0.5)
    shape = [2, 2, 2, 2, 4]
    alike = {"fan_out": shape, "fan_out_after_backup": shape, "backup": "neural"}
    summary = Stats().summary() | numbers | alike | {"tokens": 128}
    job = SimpleNamespace(settings=Settings(), placement=SimpleNamespace(devices=["cpu"]))
    print_summary(job, summary)
    shown = capsys.readouterr().out
    readme = (ROOT / "README.md").read_text("utf-8")
    block = re.search(r"128 tokens with.*?(?=```)", readme, re.S)[0]
    assert re.sub(r" *\d+\.\d+", "", block) == re.sub(r" *\d+\.\d+", "", shown)
    table = (ROOT / "docs/WORDS.md").read_text("utf-8").lower()
    for word in ("prefill", "bonus token", "acceptance rate", "hit", "outcome", "verification",
                 "utilisation", "pre-speculat", "T_p", "backup", "T_b", "AR", "SD", "fan-out"):
        assert word in shown and word.lower() in table, word
    print_summary(job, summary | {"T_p": 1.5, "fan_out_after_backup": [3] * 5})
    shown = capsys.readouterr().out
    assert re.search(r"F_K +\[2, 2, 2, 2, 4\]\n  after neural backup +\[3, 3, 3, 3, 3\]\n", shown)
    assert max(map(len, shown.splitlines())) <= 80  # a terminal's width


def test_the_trace_numbers_the_prompts_of_all_batches():
    rows = [RowRound(row, PRIMARY, [0], 1, 0, [0]) for row in range(2)]
    stats = Stats(log=3 * [TimedRound(0, 0.0, 1.0, rows), TimedRound(1, 1.0, 2.0, rows[1:])])
    told = [event["args"]["prompt"] for event in stats.trace([])["traceEvents"]]
    assert told == [0, 1, 1, 2, 3, 3, 4, 5, 5]


@pytest.mark.parametrize("prompt, text, shown", (
    ("x", "def f(x):\n    return '🦉é' + x\n\n", "def f(x):\n    return '🦉é' + x\n\n"),
    ("\x1b[2J", "a\x1b[2J\x07\x9b\r\tb\n", "a\\x1b[2J\\x07\\x9b\\r\tb\n")))
def test_a_text_is_streamed_whole_characters_and_control_characters_are_shown(
        prompt, text, shown, capsys):
    display = Display(Job(Settings(mode="ar", prompt=prompt)))
    display.begin()
    for token in display.job.tokenizer(text)["input_ids"]:
        display.show(0, [token], PRIMARY)
    shown_prompt = prompt.replace("\x1b", "\\x1b")
    assert capsys.readouterr().out == f"{shown_prompt}\n----- continued -----\n{shown}"
    several = Display(Job(Settings(mode="ar", prompt=(prompt, prompt))))
    several.begin()
    tokens = several.job.tokenizer(text)["input_ids"]
    several.show(0, tokens, PRIMARY)
    several.end_batch([tokens], ["length"])
    assert capsys.readouterr().out == (
        f"\n----- prompt 1 -----\n{shown_prompt}\n----- continued -----\n{shown}\n")


def test_on_a_terminal_words_have_colours_and_blanks_have_no_line(monkeypatch, capsys):
    monkeypatch.setattr(screen, "can_show_colours", lambda: True)
    display = Display(Job(Settings(mode="ar", prompt="x")))
    display.begin()
    tokens = display.job.tokenizer("a b\n    return c")["input_ids"]
    for token in tokens:
        display.show(0, [token], PRIMARY)
    underlined = re.compile(r"\x1b\[94m\x1b\[4m([^\x1b]*)\x1b\[0m")
    assert underlined.findall(capsys.readouterr().out) == ["a", "b", "return", "c"]
    display.show(0, tokens, PRIMARY)
    assert underlined.findall(capsys.readouterr().out) == ["c"], "the bonus token alone"


def decode_by_ideas(folder: Path) -> dict:
    """A rank's job: README's lines, with the ideas of this folder."""
    for name in [*sys.modules]:
        if name.split(".")[0] in ("ideas", "run"):
            del sys.modules[name]
    sys.path.insert(0, str(folder))
    from run import Decoder, Job
    job = Job(Settings(prompt="def f(x):", backup="repeat", fan_out="none accepted",
                       verification="never", device="cpu", max_new_tokens=12))
    decoder = Decoder(job.settings, job.load())
    decoder(job.prompts)
    return decoder.stats.summary()


def test_a_file_dropped_into_ideas_is_all_that_an_idea_needs(tmp_path):
    """README's backup, a shape and a verification, in a folder of its own."""
    shutil.copytree(ROOT / "ideas", tmp_path / "ideas")
    blocks = re.findall("```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.S)
    repeat, = [block for block in blocks if "ideas/repeat.py" in block]
    (tmp_path / "ideas/repeat.py").write_text(repeat + """
from cache import FAN_OUT_POLICIES
from ideas import VERIFICATIONS
FAN_OUT_POLICIES["none accepted"] = lambda budget, K, a, r: [budget] + K * [0]
VERIFICATIONS["never"] = lambda p, tokens, q, uniforms: VERIFICATIONS["token"](
    p[:, :1], tokens[:, :0], q[:, :0], uniforms[:, -1:])
""")
    [summary] = in_ranks(1, decode_by_ideas, tmp_path)
    assert summary["tokens_per_round"] == 1 and 0 < summary["hit_rate"] < 1
    assert summary["fan_out"] == [12, 0, 0, 0, 0] and summary["backup"] == "repeat"


def unpaced_rows(results: list[dict]) -> tuple[list[str], dict[float, list[str]]]:
    """The rows of the comparison without a pace as README shows them, and, for each temperature,
    as docs/RESULTS.md does."""
    rows = [f for f in results if f["sweep"] == "unpaced"]
    brief = {}
    full = {}
    for f in rows:
        name = re.sub(r"generate|assistant_model", r"`\g<0>`", f["name"])
        speed = f"{f['tokens/s']:.0f} ({f['least']:.0f}-{f['most']:.0f})|{f['/ SD']:.2f}"
        brief.setdefault(name, []).append(speed)
        settings = [f"K = {f['lookahead']}"] if f["lookahead"] else []
        if f["budget"]:
            settings.append(f"budget {f['budget']}")
        settings += map(str, f["assistant"] or [])
        threads = f["threads"]
        if isinstance(threads, list):
            threads = " + ".join(map(str, threads))
        error = "" if f["name"] == "SD" else f" ± {f['error of / SD']:.2f}"
        times = [f.get(key) for key in ("tokens_per_round", "hit_rate", "T_p", "T_v in ms",
                                        "T_v alone")]
        shown = ["" if time is None else f"{time:.2f}" for time in times]
        full.setdefault(f["value"], []).append("|".join(
            ["", name, ", ".join(settings), str(threads), speed + error, *shown, ""]))
    return [f"|{name}|{'|'.join(speeds)}|" for name, speeds in brief.items()
            if len(speeds) == 2], full


def test_the_tables_of_readme_and_results_are_those_of_the_launch():
    readme = (ROOT / "README.md").read_text("utf-8").replace("**", "")
    results = (ROOT / "docs/RESULTS.md").read_text("utf-8")
    tables = results.split("## AR, SD and SSD")[1].split("## Figures")[0]
    emulated = readme.split("H100s, emulated")[1].split("The paper measured")[0]
    chosen = re.findall(r"\n\|([^|-]+)\|", emulated)
    assert {"AR", "SD", "SSD"} < set(chosen) <= {f.get("name") for f in RESULTS}
    for f in RESULTS:
        if f["sweep"] == "comparison":
            name, temperature = f["name"], int(f["value"])
            error = f["standard error"]
            speed = f"{f['tokens/s']:.1f}" + ("" if error is None else f" ± {error:.1f}")
            ratios = [f"{f['/ AR']:.2f}", f"{f['/ SD']:.2f}"]
            if f["/ SD, block"]:
                ratios.append(f"{f['/ SD, block']:.2f}")
            row = ["", name, str(f["lookahead"] or ""), speed, *ratios, ""]
            assert "|".join(row) in tables.split("Temperature 1:")[temperature]
            row = re.escape(f"\n|{name}|") + temperature * r".*\|"
            if name in chosen:
                assert re.search(row + r"\|".join(ratios), readme)


def test_the_tables_without_a_pace_are_those_of_the_launch():
    """Row for row; and the processor, the number that README begins with, and its range."""
    readme = (ROOT / "README.md").read_text("utf-8").replace("**", "")
    results = (ROOT / "docs/RESULTS.md").read_text("utf-8").replace("**", "")
    launch = json.loads((ROOT / "figures/results.json").read_text("utf-8"))["other launches"]
    machine = launch["unpaced"]["machine"]
    brief, full = unpaced_rows(RESULTS)
    shown = readme.split("nothing emulated.")[1].split("H100s, emulated")[0]
    assert re.findall(r"^\|[`A-Za-z].*$", shown, re.M) == brief != []
    section = results.split("## Two cores")[1].split("\n## ")[0]
    tables = section.split("Temperature 1")
    assert len(tables) == 2
    for table, rows in zip(tables, full.values(), strict=True):
        assert re.findall(r"^\|[`A-Za-z].*$", table, re.M) == rows
    ratio, = [f"{f['/ SD']:.2f}" for f in RESULTS
              if (f["sweep"], f["name"], f.get("value")) == ("unpaced", "SSD", 0)]
    assert f"SSD is {ratio} x as fast as SD on two CPU cores" in readme
    for fact in (machine["processor"], f"torch {machine['torch'].partition('+')[0]}",
                 f"transformers {machine['transformers']}", f"Python {machine['python']}",
                 machine["date"]):
        assert fact in section


def test_the_numbers_in_sentences_are_those_of_the_launch():
    def metric(sweep: str, name: str, value: float, key: str, **choices) -> str:
        number, = [f[key] for f in RESULTS
                   if (f["sweep"], f["name"], f.get("value")) == (sweep, name, value)
                   and f["predicted"]
                   and f.get("top_p") == choices.get("top_p")
                   and choices.items() <= f["with"].items()]
        return f"{number:.2f}"

    def hits(shape: str, backup: str) -> str:
        return metric("shape", shape, 1, "hit_rate", backup=backup)

    def bent(key: str, downweight: float) -> str:
        return metric("downweight", "SSD", downweight, key)

    readme = (ROOT / "README.md").read_text("utf-8")
    results = (ROOT / "docs/RESULTS.md").read_text("utf-8")
    faster = float(bent("tokens/s", 0.75)) / float(bent("tokens/s", 1)) - 1
    speed = [metric("batch", f"{backup} backup", rows, "tokens a verification", lookahead=3)
             for backup, rows in (("neural", 1), ("neural", 16), ("random", 1))]
    noise = [metric("noise", name, 1, "hit_rate") for name in (
        "private noise", "public noise, geometric")]
    assert f"C = 0.75 is {-faster:.1%} slower" in results
    for name in ("hit_rate", "acceptance_rate"):
        assert f"from {bent(name, 1)} to {bent(name, 0)}" in results.split("### Downweight")[1]
    for sentence in (
            f"{hits('geometric', 'random')} of outcomes, uniform {hits('uniform', 'random')}",
            f"{hits('geometric', 'neural')} and {hits('uniform', 'neural')}",
            f"hits rise from {bent('hit_rate', 1)} to {bent('hit_rate', 0)}",
            f"falls from {bent('acceptance_rate', 1)} to {bent('acceptance_rate', 0)}",
            "{} tokens a verification at batch 1 and {} at 16, random tokens {}".format(*speed),
            "from {} to {} of outcomes".format(*noise)):
        assert sentence in readme, sentence


def test_readme_and_porting_name_what_exists():
    """Functions as `module.function` or `Class.method`, and options; tests; planted mistakes."""
    text = (ROOT / "README.md").read_text("utf-8")
    assert f"{len(test_equivalence.MISTAKES)} mistakes planted" in text
    assert f"plants the {len(test_equivalence.MISTAKES)} mistakes" in text
    modules = {name: importlib.import_module(name) for name in (
        "sampling", "cache", "target_worker", "draft_worker", "saguaro")}
    classes = {name: value for module in modules.values() for name, value in vars(module).items()}
    names = re.findall(r"`(\w+)\.(?!py\b)(\w+)(?=`|\.)", text)
    assert len(names) > 20
    for owner, name in names:
        assert hasattr((modules | classes)[owner], name), f"{owner}.{name}"
    porting = (ROOT / "docs/PORTING.md").read_text("utf-8")
    files = [ROOT / "test_equivalence.py", *ROOT.glob("*/test_*.py")]
    tests = "".join(file.read_text("utf-8") for file in files)
    for name in re.findall(r"`(test_\w+)`", porting):
        assert f"def {name}(" in tests, name
    known = {f"--{field.name.replace('_', '-')}"
             for kind in (Settings, BenchSettings, ExplainSettings, PageSettings)
             for field in fields(kind)}
    foreign = {"--help", "--index-url", "--local-addr", "--local-ranks-filter", "--nproc-per-node"}
    assert set(re.findall(r"--[a-z][a-z-]+", text)) <= known | foreign


class FullDisk(StringIO):
    def flush(self):
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("status, sentence", (
    (1, "saguaro.py: [Errno 28] No space left on device\n"), (141, "")))
def test_a_full_disk_and_a_closed_pipe_end_it_without_a_traceback(
        status, sentence, pair, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with suppress(OSError), FullDisk() if sentence else open(writer, "w") as out:
        result = obey("saguaro.py", *pair, "--mode", "ar", "--prompt", "x", out=out)
    assert result == (status, sentence)


# ---- processes ----

WAITING = """\
import os, signal, sys, time
from cli import launch
from cli.settings import Settings
from engine.errors import UserError
rank = os.environ.get("RANK", "0")

def fail():
    raise UserError("it")

def main(settings):
    rank = os.environ["RANK"]
    {}
    print("started", file=sys.stderr, flush=True)
    time.sleep(100)

if __name__ == "__main__":
    {}
    launch.GRACE = 1
    launch.launch(Settings, "waiting")
"""
SLOW_START = "if rank == '1': print('started', file=sys.stderr, flush=True); time.sleep(2)"
FAULTS = {  # of two ranks that only start: what they do before and after; a signal, and to whom;
            # exit status; what is reported
    "both end": ("", "import torch.distributed; return", None, 0, ""),
    "the draft finds an error": ("", "rank == '1' and fail()", None, 2, "waiting.py: error: it"),
    "no child's end is told": ("signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
                               "rank == '1' and fail()", None, 2, "waiting.py: error: it"),
    "the draft cannot be started": ("sys.executable = 'nowhere'", "", None, 1, "No such file"),
    "both find an error": ("", "fail()", None, 2, "waiting.py: error: it"),
    "the draft is killed": ("", "", (signal.SIGKILL, 1), 1, "rank has ended with status -9"),
    "the target is killed": ("", "", (signal.SIGKILL, 0), -signal.SIGKILL, ""),
    "the target is killed while the draft starts":
        (SLOW_START, "", (signal.SIGKILL, 0), -signal.SIGKILL, ""),
    "Ctrl-C": ("", "", (signal.SIGINT, 0), -signal.SIGINT, "")}  # a shell makes 130 of it


def start_command(folder: Path, name: str, tokens: int, *launcher: str) -> psutil.Popen:
    """The command as a user starts it, in a process group of its own, with the environment of a
    torchrun of one process: another one overrides it, and the store of that one is not where two
    ranks can meet. Without OMP_NUM_THREADS: torchrun prints a notice about it."""
    words = [*launcher, ROOT / "saguaro.py", *LINES["sampled"], "--prompt", "def f(x):",
             "--ignore-eos", "--max-new-tokens", tokens, "--output", f"{name}.jsonl"]
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    environment |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1",
                    "TORCHELASTIC_USE_AGENT_STORE": "True"}
    if not launcher[1:]:  # of a run on several machines, and none of this one's
        environment |= {"GLOO_SOCKET_IFNAME": "bond1", launch.STORE: "nowhere"}
    with open(folder / name, "w") as stdout, open(folder / f"{name}.err", "w") as stderr:
        return psutil.Popen(list(map(str, words)), stdout=stdout, stderr=stderr, cwd=folder,
                            env=environment, start_new_session=True)


NOTICE = r"(W\d+ .*distributed/run\.py:\d+\] )?(\**|Setting OMP_NUM_THREADS .*)"  # torchrun's
NO_ADDRESS = r"\[W.* ProcessGroupGloo\.cpp:\d+\] Warning: Unable to resolve hostname .*"
ON_MACS = r"W\d+ .*distributed/elastic/.*\] NOTE: Redirects are currently not supported .*"


def assert_quiet(errors: str) -> None:
    """Assert that nobody but PyTorch has said anything."""
    for line in errors.splitlines():
        assert re.fullmatch(f"{NOTICE}|{NO_ADDRESS}|{ON_MACS}", line), line


@slow
def test_no_rank_outlives_the_other(tmp_path):
    processes = {}
    ranks = []
    for name, (before, after, *_) in FAULTS.items():
        folder = tmp_path / name
        (folder / "temporary").mkdir(parents=True)
        (folder / "waiting.py").write_text(WAITING.format(after, before))
        processes[name] = psutil.Popen(
            [sys.executable, "waiting.py"], cwd=folder, stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder / "temporary")})
    for name, (*_, fault, _, _) in FAULTS.items():
        if fault:
            process = processes[name]
            assert [process.stderr.readline() for _ in range(2)] == [b"started\n"] * 2
            ranks += process.children()
            signal_sent, rank = fault
            [process, *process.children()][rank].send_signal(signal_sent)
    assert not psutil.wait_procs(ranks, timeout=10)[1]
    for name, (*_, status, report) in FAULTS.items():
        assert processes[name].wait(20) == status, name
        errors = processes[name].stderr.read().decode().replace("started\n", "")
        assert report in errors and errors.count("\n") == bool(report), errors
        assert not list((tmp_path / name / "temporary").iterdir()), "where they would have met"


@pytest.mark.parametrize("problem, status, sentence", (
    *((RuntimeError(f"[transport/tcp/pair.cc:547] {sign}"), 1, "stops: another rank is gone\n")
      for sign in ("Connection reset by peer", "Connection closed by peer", "No route to host",
                   "Broken pipe", "Timed out waiting 600000ms for recv operation to complete")),
    (RuntimeError("can't start new thread"), 2, "lacks memory or threads (can't start new thread)"),
    (MemoryError(), 2, "lacks memory or threads (MemoryError()): allow more, or try more target")))
def test_a_rank_without_the_others_or_without_memory_ends_with_one_sentence(
        problem, status, sentence, capsys, monkeypatch):
    def main():
        raise problem

    waited = []
    monkeypatch.setattr(time, "sleep", waited.append)
    assert launch.exit_status(main) == status
    assert f"rank 0 {sentence}" in capsys.readouterr().err
    assert sum(waited) == (2 * launch.GRACE if "is gone" in sentence else 0), "who is gone says why"


@pytest.mark.parametrize("ended, left", ((0, []), (1, [1]), (2, [2]), (141, [1]), (-9, [1])))
def test_rank_0_leaves_with_the_status_of_the_drafts_rank(ended, left, capsys, monkeypatch):
    statuses = []
    monkeypatch.setattr(launch, "leave", statuses.append)
    launch.exit_with_draft(SimpleNamespace(wait=lambda: ended))
    assert statuses == left
    assert ("has ended with status -9" in capsys.readouterr().err) == (ended == -9)


def test_the_drafts_rank_lets_rank_0_speak_first(capsys, monkeypatch):
    """A process without a launcher speaks at once: its RANK is something else."""
    waited = []
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(time, "sleep", lambda seconds: waited.append(
        (seconds, capsys.readouterr().err)))
    for world_size in ("2", ""):
        monkeypatch.setenv("WORLD_SIZE", world_size)
        launch.report("it")
    (first, said), (second, _) = waited
    assert (first, said, second) == (launch.GRACE, "", 0)
    assert launch.GRACE > 0


def test_a_rank_leaves_once_its_text_is_written_and_its_files_are_gone(monkeypatch):
    steps = []
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(flush=lambda: steps.append("written")))
    folder = SimpleNamespace(cleanup=lambda: steps.append("folder"))
    monkeypatch.setattr(launch, "until_exit", folder)
    monkeypatch.setenv(launch.STORE, "store")
    monkeypatch.setattr(os, "unlink", steps.append)
    monkeypatch.setattr(os, "_exit", steps.append)
    LEAVE(3)
    assert steps == ["written", "folder", "store", 3]


@slow
@pytest.mark.parametrize("words, names", (
    (["--seed", 1], "seed"), (["--mode", "ssd"], "mode"), (["--prompt", "y"], "prompt"),
    (["--target", "ODD"], "target"), (["--draft", "ODD"], "draft"),
    (["--seed", 1, "--output", "OUT", "--top-k", 5], "seed, top_k")))
def test_ranks_that_were_started_with_different_words_write_no_text(words, names, pair, tmp_path):
    """Whoever starts them on several machines gives each its command. Two ranks cannot share ODD's
    three heads; that is not what is wrong."""
    shutil.copytree(pair[1], tmp_path / "ODD")
    config = read(tmp_path / "ODD/config.json")
    config |= {"num_attention_heads": 3, "num_key_value_heads": 3}
    (tmp_path / "ODD/config.json").write_text(json.dumps(config))
    words = [tmp_path / word if str(word).isupper() else word for word in words]
    command = [*pair, "--mode", "sd", "--prompt", "x"]
    for result in in_ranks(2, obey_own, [command, command + words]):
        assert f"all ranks must be started with the same {names}\n" in the_error(result)


def obey_with_another_version(command: list) -> tuple[int, str]:
    run.job.__version__ += "-" + os.environ["RANK"]
    return obey_own([command, command])


@slow
def test_ranks_with_other_versions_of_transformers_write_no_text(pair):
    for result in in_ranks(2, obey_with_another_version, [*pair, "--mode", "sd"]):
        assert "all ranks must be started with the same transformers\n" in the_error(result)


@slow
def test_folders_and_files_may_lie_elsewhere_on_each_machine(pair, tmp_path):
    target = shutil.copytree(pair[1], tmp_path / "target")
    prompts = tmp_path / "prompts"
    prompts.write_text('{"text": "def f(x):"}')
    command = [*pair, "--mode", "sd", "--prompt", "def f(x):"]
    other = [*pair[2:6], "--target", target, "--prompts", prompts, *pair[-4:],
             "--mode", "sd", "--output", tmp_path / "out", "--device", "cpu"]
    results = in_ranks(2, obey_own, [command, other])
    assert [status for status, _ in results] == [0, 0]


def load_a_fault(where: Path, faulty: int, of: str, mode: str) -> list[str]:
    """A rank's job: what it is told of a model that is another one on the rank `faulty`, then what
    it writes with the right ones."""
    rank = int(os.environ["RANK"])
    choices = {"mode": mode, "max_new_tokens": 8, "dtype": "float64", "device": "cpu"}
    changes = {of: where} if rank == faulty else {}
    said = []
    try:
        Job(Settings(**choices, **changes)).load()
    except UserError as problem:
        said.append(str(problem))
    job = Job(Settings(**choices))
    decoder = Decoder(job.settings, job.load())
    return [*said, decoder(RAGGED[:1])]


@slow
@pytest.mark.parametrize("ranks, faulty, of, mode, fault, sentence", (
    (2, 1, "draft", "ssd", "cut off", "cannot load .*: it holds no weights"),
    (3, 0, "target", "ssd", "cut off", "cannot load .*: it holds no weights"),
    (3, 1, "target", "ssd", "cut off", "cannot load .*: it holds no weights"),
    (3, 1, "target", "ssd", "fine-tuned", "with the same weights of --target"),
    (2, 0, "target", "sd", "fine-tuned", "with the same weights of --target")))
def test_a_model_that_one_rank_cannot_load_or_that_differs_is_refused_on_all(
        ranks, faulty, of, mode, fault, sentence, tmp_path):
    weights = shutil.copytree(TINY / of, tmp_path, dirs_exist_ok=True) / "model.safetensors"
    if fault == "cut off":
        weights.write_bytes(b"version https://git-lfs")
    else:
        tensors = load_file(weights)
        tensors[min(tensors)][0] += 1e-3
        save_file(tensors, weights, {"format": "pt"})
    found = in_ranks(ranks, load_a_fault, tmp_path, faulty, of, mode, seconds=60)
    job = Job(Settings(mode="ar", max_new_tokens=8, dtype="float64"))
    text = Decoder(job.settings, job.load())(RAGGED[:1])
    for said, *others in found:
        assert re.search(sentence, said) and others == [text]


def test_the_second_rank_is_started_like_the_first_and_meets_it_in_a_private_file(monkeypatch):
    started = []
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(subprocess, "Popen", lambda *words, **form: started.append((words, form))
                        or SimpleNamespace(wait=lambda: 0))
    monkeypatch.setattr(sys, "argv", ["saguaro.py", "x"])
    for module, program in (("run", ["saguaro.py"]), ("course.page", ["-m", "course.page"])):
        START_SECOND_RANK(module)
        [words], form = started.pop()
        assert words == [sys.executable, *program, "x"]
        assert (os.environ["RANK"], form["env"]["RANK"]) == ("0", "1")
        assert form["env"]["GLOO_SOCKET_IFNAME"].startswith("lo")  # nobody else hears them
        assert form["stdin"] == subprocess.PIPE  # which closes when this process ends
        assert form["start_new_session"] and form["stdout"] == subprocess.DEVNULL
        store = Path(os.environ[launch.STORE])
        assert store.stat().st_mode == 0o100600
        store.unlink()


def test_pytorch_runs_no_kernels_from_a_folder_that_others_can_make(tmp_path):
    """Another account has put a file of that name into the temporary folder, at which PyTorch
    stops."""
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "torchinductor_you").touch()
    unset = ("TORCHINDUCTOR_CACHE_DIR", "QUACK_CACHE_DIR", "XDG_CACHE_HOME")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment |= {"HOME": str(tmp_path / "home"), "TMPDIR": str(shared), "LOGNAME": "you"}
    program = "import os, saguaro\nfolder = os.environ['TORCHINDUCTOR_CACHE_DIR']\n" \
              "print(folder, os.environ['QUACK_CACHE_DIR'], oct(os.stat(folder).st_mode))"
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, text=True,
                         capture_output=True)
    assert run.returncode == 0, run.stderr
    folder, quack, mode = run.stdout.split()
    assert mode == "0o40700" and quack == f"{folder}/quack"
    assert folder == str(tmp_path / "home/.cache/saguaro")


def join_as_intruder(store: Path) -> str:
    """A rank's job. Rank 1 has no right to be there: it does not know its word, and says that of
    rank 0. Returns what it ended with."""
    os.environ[launch.STORE] = str(store)
    here = placement.Placement(Settings(device="cpu"))
    all_gather = dist.all_gather

    def guess(words, own) -> None:
        heard = dist.FileStore(str(store), 2).get("0")
        all_gather(words, torch.tensor(list(heard)))
        placement.gather({})  # it has not heard

    if here.rank == 1:
        dist.all_gather = guess
    try:
        here.join({"prompt": "secret"})
    except (UserError, RuntimeError) as problem:
        return str(problem)


@slow
@pytest.mark.parametrize("program", (
    "import tempfile; tempfile.gettempdir = lambda: open('nowhere'); import engine",
    "import os; os.environ['MPLBACKEND'] = 'nowhere'; import bench"))
def test_a_container_without_a_temporary_folder_and_a_notebooks_shell_can_import_it(program):
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0


def test_in_ipython_nothing_is_changed_and_one_sentence_says_what_to_do(monkeypatch):
    monkeypatch.setattr(builtins, "__IPYTHON__", True, raising=False)
    monkeypatch.setattr(sys, "argv", ["saguaro.py"])
    monkeypatch.setattr(launch, "exit_status", lambda _: pytest.fail("its process is not ours"))
    with pytest.raises(SystemExit, match="in IPython and notebooks start it as !python s"):
        launch.launch(Settings, "run")


def test_who_connects_in_the_place_of_a_rank_is_told_nothing(tmp_path):
    """gloo takes the first connection to a port of a group for the other rank's, whosoever it
    is."""
    error, other = in_ranks(2, join_as_intruder, tmp_path / "store", seconds=30)
    assert error == "another program has connected in the place of a rank"
    assert any(sign in other.lower() for sign in launch.GONE), "before anything was said"


TELLS = """import atexit, os
from pathlib import Path

def tell():
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    with open("threads", "a") as file:
        print(*(name for name in names if "gloo" in name), file=file)

atexit.register(tell)  # the function that is registered first runs last
"""
OWN = """import os, sys, torch
from run import Decoder, Job, Settings
jobs = [Job(Settings(prompt="x", max_new_tokens=4)) for _ in range(2)]
decoders = [Decoder(job.settings, job.load()) for job in jobs]
for job, decoder in zip(jobs, decoders):
    decoder(job.prompts)
assert torch.get_num_threads() <= len(os.sched_getaffinity(0))  # or they wait for each other
if job.placement.rank == 1:
    sys.exit(3)
if job.placement.rank == 0:
    decoder(job.prompts)  # the others are gone
"""


@slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="Linux tells threads' names")
@pytest.mark.parametrize("words, statuses, told", (
    ([ROOT / "saguaro.py", "--max-new-tokens", "4", "x"], [0], 1),  # rank 1 leaves without an end
    ([ROOT / "saguaro.py", "--max-new-tokens", "4", "x"], [0, 0], 2),
    (["-m", "course.explain", "--rounds", "1"], [0], 1), ([OWN], [1, 3, 0], 3)))
def test_no_thread_of_gloos_is_alive_when_python_begins_to_end(words, statuses, told, tmp_path):
    """It would drop the tensors of the last message when it likes, which aborts Python's end: a
    race that is seldom lost, so threads are counted. Two of three ranks share the target."""
    (tmp_path / "sitecustomize.py").write_text(TELLS)
    (tmp_path / "own.py").write_text(OWN)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "WORLD_SIZE": str(len(statuses)),
             "LOCAL_WORLD_SIZE": str(len(statuses)), "MASTER_ADDR": "127.0.0.1",
             "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    ranks = [subprocess.Popen(
        [sys.executable, *("own.py" if word is OWN else word for word in words)], cwd=tmp_path,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env=os.environ | given | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(len(statuses))]
    assert [rank.wait(100) for rank in ranks] == statuses
    assert (tmp_path / "threads").read_text() == told * "\n"


@slow
def test_what_a_rank_alone_has_found_is_the_one_sentence_however_slow_its_end(tmp_path):
    """Its sockets must not close before its status is known."""
    slow_end = "import atexit, time; atexit.register(time.sleep, 9)"
    (tmp_path / "sitecustomize.py").write_text(slow_end)
    shutil.copytree(TINY / "draft", tmp_path / "draft")
    os.truncate(tmp_path / "draft/model.safetensors", 9999)
    run = subprocess.run([sys.executable, ROOT / "saguaro.py", "--draft", "draft", "x"],
                         cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)},
                         capture_output=True, text=True)
    assert "it holds no weights: a download that broke off" in the_error(
        (run.returncode, run.stderr))


@pytest.mark.parametrize("variable, reason", (
    ("MASTER_PORT=TAKEN", "EADDRINUSE"), ("GLOO_SOCKET_IFNAME=bond1", "bond1")))
def test_ranks_that_cannot_meet_end_with_one_sentence(variable, reason, monkeypatch, pair):
    taken = socket.create_server(("127.0.0.1", 0))
    name, value = variable.split("=")
    value = value.replace("TAKEN", str(taken.getsockname()[1]))
    given = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
             "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"} | {name: value}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    here = placement.Placement(Settings(mode="sd"))
    threads = threading.enumerate()
    with taken, pytest.raises(UserError, match=f"the ranks cannot meet: .*{reason}"):
        here.join({})
    for watching in set(threading.enumerate()) - set(threads):
        watching.join(5)
        assert not watching.is_alive(), "it would end this process after ten minutes"


def test_without_the_requirements_one_sentence_says_so(tmp_path):
    """As in a new terminal, in which no virtual environment is active."""
    run = subprocess.run([sys.executable, "-IS", "-c", "import runpy, sys\n"
                          f"sys.path.insert(0, {str(ROOT)!r}); sys.argv[:] = ['saguaro.py', 'x']\n"
                          "runpy.run_path('saguaro.py', run_name='__main__')"],
                         cwd=ROOT, capture_output=True, text=True)
    assert "No module named 'tqdm': is the virtual env" in the_error((run.returncode, run.stderr))
    for name in ("torch", "transformers", "matplotlib"):
        missing = Mock(side_effect=ModuleNotFoundError(name=name))
        assert launch.exit_status(missing) == 2
    with pytest.raises(ModuleNotFoundError):  # with its traceback: of a mistyped line, in an idea
        launch.exit_status(lambda: importlib.import_module("nump"))


LEAVES_WHILE_IT_MEETS = """
import os, subprocess
from threading import Event, Thread
from types import SimpleNamespace

from cli import launch
from run.placement import Placement
from testing.shared import settings

def exit_late(status):
    left.set()
    Event().wait(1)  # meanwhile the main thread comes to the store
    end(status)

subprocess.Popen = lambda *_, **__: SimpleNamespace(wait=lambda: 0)
launch.start_second_rank("run")
here = Placement(settings())
left = Event()
end, os._exit = os._exit, exit_late
Thread(target=launch.leave, args=[3]).start()
left.wait()
here.meet()
"""


def test_a_rank_that_leaves_is_not_held_by_a_store_that_it_has_removed(tmp_path):
    """No other thread runs while PyTorch looks for five minutes for a folder that is gone."""
    run = subprocess.run([sys.executable, "-c", LEAVES_WHILE_IT_MEETS], cwd=ROOT, timeout=60,
                         env=os.environ | {"TMPDIR": str(tmp_path)})
    assert run.returncode == 3


def test_a_command_with_closed_streams_runs_all_the_same():
    program = ("from cli import launch; import sys; launch.prepare_process(); print('x'); "
               "print('x', file=sys.stderr); sys.exit(sys.stdout.isatty() or sys.stderr.isatty())")
    command = f'exec "$0" -c "{program}" >&- 2>&-'
    assert subprocess.run(["sh", "-c", command, sys.executable], cwd=ROOT).returncode == 0


def test_texts_are_printed_whatever_the_encoding_of_the_output_is():
    """And a command's ranks choose their own cores and threads: see `Placement`."""
    program = ("import os; from cli import launch; launch.prepare_process(); print(chr(233), "
               "*map(os.environ.get, ('OMP_PROC_BIND', 'GOMP_SPINCOUNT')))")
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True,
                         env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert (run.returncode, run.stdout, run.stderr) == (0, b"\\xe9 false 10000\n", b"")


LINES = {"ar": ["--mode", "ar"], "greedy": ["--backup", "lookup"],
         "sampled": ["--temperature", 1, "--seed", 1, "--downweight", 0.5],
         "sampled sd": ["--temperature", 1, "--seed", 1, "--mode", "sd"],
         "float32": ["--mode", "ar", "--dtype", "auto"]}  # unless every rank has a GPU
RUNS = {1: ("ar", "sampled sd", "float32"), 2: (*LINES,), 3: ("ar", "sampled", "sampled sd")}


@slow
def test_the_text_is_the_same_in_every_mode_wherever_the_models_are(pair, tmp_path):
    """In one, two or three ranks; with a target that is whole, or shared by two ranks."""
    texts = {}
    hits = {}
    for count, names in RUNS.items():
        first, *others = obey_in_ranks(count, [
            ["saguaro.py", *pair, *LINES[name], "--output", tmp_path / f"{count}{name}"]
            for name in names])
        assert not any(output for other in others for _, output in other), "rank 0 alone prints"
        for name, (status, output) in zip(names, first):
            assert status == 0 and output.count("tokens with") == 1, output
            _, outputs, statistics = read_output(tmp_path / f"{count}{name}")
            hit_rate = statistics["hit_rate"]
            assert texts.setdefault(name, outputs) == outputs, (count, name)
            assert hits.setdefault(name, hit_rate) == hit_rate, (count, name)
    tokens = {name: [output["tokens"] for output in texts[name]] for name in texts}
    assert tokens["greedy"] == tokens["ar"] != tokens["sampled sd"]
    assert 0 < min(hits["greedy"], hits["sampled"]) and hits["sampled sd"] == 0


@slow
def test_started_by_torchrun_or_python_it_writes_the_same_text_until_ctrl_c(tmp_path):
    whole = start_command(tmp_path, "torchrun", 24, sys.executable, "-m", "torch.distributed.run",
                          "--standalone", "--local-addr", "localhost", "--nproc-per-node", "2")
    part = start_command(tmp_path, "python", 480, sys.executable)
    screen = tmp_path / "python"
    try:
        for _ in range(2000):
            time.sleep(0.05)
            if part.poll() is not None or screen.read_text().partition("continued -----\n")[2]:
                break  # it decodes
        ranks = [part, *part.children()]
        os.killpg(part.pid, signal.SIGINT)
        assert not psutil.wait_procs(ranks, timeout=15)[1]
        assert (whole.wait(200), part.wait()) == (0, -signal.SIGINT)
    finally:
        for process in (whole, part):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    for name in ("torchrun", "python"):
        assert_quiet((tmp_path / f"{name}.err").read_text())
    _, (complete,), _ = read_output(tmp_path / "torchrun.jsonl")
    assert complete["text"] in (tmp_path / "torchrun").read_text()
    streamed = screen.read_text().partition("continued -----\n")[2]
    length = min(len(streamed), len(complete["text"]))
    assert streamed[:length] == complete["text"][:length] != ""
    assert len((tmp_path / "python.jsonl").read_text().splitlines()) == 1, "the settings"


@pytest.mark.parametrize("family, changes, ranks, mode, sentence", (
    ("gpt2", {}, 3, "ssd", "no plan for splitting its linear layers, or one for other layers too"),
    ("mixtral", {}, 3, "ssd", "(experts, quantized ones); start one target rank\n"),
    ("qwen3", dict(quantization_config=dict(quant_method="fp8")), 2, "ar", "; start one target"),
    ("llama", dict(num_key_value_heads=1), 2, "sd", "must divide 1, its num_key_value_heads\n")))
def test_a_target_that_ranks_cannot_share_is_refused(
        family, changes, ranks, mode, sentence, tmp_path, monkeypatch):
    shutil.copytree(TINY / "target", tmp_path, dirs_exist_ok=True)
    shape = dict(vocab_size=2048, num_attention_heads=4, num_key_value_heads=2)
    AutoConfig.for_model(family, **shape | changes).save_pretrained(tmp_path)
    for variable, value in zip(RENDEZVOUS, ("0", str(ranks), "127.0.0.1", "1")):
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(placement.Placement, "join", lambda self, asked: None)
    assert sentence in the_error(obey("saguaro.py", "--target", tmp_path, "--mode", mode))


# ---- the benchmark ----

def bench_with(**attributes) -> bench_py.Bench:
    """A `Bench` that has loaded nothing."""
    bench = object.__new__(bench_py.Bench)
    vars(bench).update(attributes)
    return bench


def test_the_benchmark_does_not_write_over_its_prompts(tmp_path):
    prompts = tmp_path / "prompts"
    prompts.write_text('{"text": "def f(x):"}')
    status, said = obey("bench.py", "--quick", "--prompts", prompts, "--out", prompts)
    assert status == 2 and "it is the file of --prompts" in said


def test_the_benchmark_refuses_a_prompt_without_room_for_a_text():
    job = SimpleNamespace(settings=BenchSettings(), prompts=[[1] * 472], context=512)
    bench_py.check_lengths(job)
    job.prompts.append([1] * 473)
    with pytest.raises(UserError, match="^bench.py adds 40 tokens to each prompt. One has 473"):
        bench_py.check_lengths(job)


def test_what_was_measured_is_kept_where_a_later_sweep_fails(tmp_path, monkeypatch):
    def lacks(_) -> NoReturn:
        raise MemoryError

    job = SimpleNamespace(placement=SimpleNamespace(devices=["cpu", "cpu"]), dtype=torch.float32)
    out = tmp_path / "out"
    settings = BenchSettings(sweep=("residual", "growth"), out=str(out), figures=str(tmp_path))
    bench = bench_with(leads=True, job=job, settings=settings, prompts=[], all_cores=[0])
    monkeypatch.setattr(bench_py, "Bench", lambda _: bench)
    monkeypatch.setattr(bench_py, "UNDECODED",
                        {"residual": lambda _: [{"name": "C = 1"}], "growth": lacks})
    monkeypatch.setattr(draw, "figure", lambda *_: None)
    with pytest.raises(MemoryError):
        bench_py.main(settings)
    assert read(out)["results"] == [{"sweep": "residual", "name": "C = 1"}]


def test_a_launch_that_measures_nothing_leaves_the_results_of_an_earlier_one(tmp_path):
    (tmp_path / "out").write_text("an earlier launch's")
    assert obey("bench.py", "--quick", "--out", tmp_path / "out")[0] == 2, "one rank is too few"
    assert (tmp_path / "out").read_text() == "an earlier launch's"


@slow
def test_the_benchmark_compares_and_draws(pair, tmp_path):
    prompts = tmp_path / "prompts"
    prompts.write_text('{"text": "def f(x):"}')
    words = ["bench.py", *pair[:6], "--quick", "--prompts", prompts, "--pace", 0, 0]
    names = ("timeline", "residual", "frontier", "growth")
    compared, drawn = obey_in_ranks(2, [
        [*words, "--out", tmp_path / "out"],
        [*words, "--sweep", *names, "--figures", tmp_path, "--out", tmp_path / "rows"]])[0]
    assert compared[0] == drawn[0] == 0, compared[1] + drawn[1]
    assert drawn[1].count("decoding: ") > 2, "minutes in silence look like a hang"
    shown = [(result["name"], result["value"]) for result in read(tmp_path / "out")["results"]]
    assert len(set(shown)) == len(shown)
    assert {"generate", "AR", "SD", "SSD"} <= {name for name, _ in shown}
    assert "no generate with assistant_model" in compared[1], "the draft's vocabulary is smaller"
    sd = next(result for result in read(tmp_path / "out")["results"] if result["name"] == "SD")
    assert sd["by Theorem 7"] == sd["/ SD"] == 1
    commands = re.findall("fastest: (.*)", compared[1])
    assert len(commands) == 2 and compared[1].endswith(f"fastest: {commands[1]}\n")
    for temperature, command in enumerate(commands):
        best = max((result for result in read(tmp_path / "out")["results"]
                    if result["value"] == temperature), key=lambda result: result["tokens/s"])
        assert min(best["by turn"]) == best["least"] <= best["tokens/s"] <= best["most"]
        if best["assistant"] is not None:
            continue
        _, program, *options = shlex.split(command.removeprefix("OMP_NUM_THREADS=1 "))
        fastest = parse(Settings, options)
        assert (program, fastest.mode) == ("saguaro.py", best["with"].get("mode", "ssd"))
        assert (fastest.target, fastest.lookahead) == (str(pair[1]), best["lookahead"] or 4)
        assert fastest.temperature == temperature
        assert fastest.budget == best["with"].get("budget", 12)
    figures = {file.name: file.read_text("utf-8") for file in tmp_path.glob("*.svg")}
    assert figures.keys() == {f"{name}.svg" for name in names}
    growth = [f for f in read(tmp_path / "rows")["results"] if f["sweep"] == "growth"]
    for f in growth:
        assert f["T_b"] == pytest.approx(4 * f["draft, 1"] / f["target, 5"])
        assert f["T_p"] == pytest.approx((f["draft, 5"] + 4 * f["draft, 12"]) / f["target, 5"])
    again = tmp_path / "again"
    again.mkdir()
    redraw(tmp_path / "rows", "--figures", again)
    assert figures == {file.name: file.read_text("utf-8") for file in again.glob("*.svg")}


NUMBER = re.compile(r"-?\b\d+\.\d+\b")


def redraw(*words) -> None:
    sys.argv = ["draw.py", *map(str, words)]
    draw_again()


def test_the_committed_figures_are_those_of_the_committed_results(tmp_path):
    """Word for word, and number for number where matplotlib is that of the committed ones (another
    may choose other ticks), but for a last digit that depends on the processor."""
    folder = ROOT / "figures"
    redraw(folder / "results.json", folder / "growth.json", "--figures", tmp_path)
    names = sorted(file.name for file in folder.glob("*.svg"))
    assert names == sorted(file.name for file in tmp_path.glob("*"))
    words = re.compile(r"<text[^>]*>([^<]*[a-z]{2}[^<]*)<")
    for name in names:
        old = (folder / name).read_text("utf-8")
        new = (tmp_path / name).read_text("utf-8")
        if f"Matplotlib v{matplotlib.__version__}" in old:
            old_numbers = [float(number) for number in NUMBER.findall(old)]
            new_numbers = [float(number) for number in NUMBER.findall(new)]
            assert NUMBER.sub("", old) == NUMBER.sub("", new)
            assert old_numbers == pytest.approx(new_numbers, abs=1e-4)
        assert set(words.findall(old)) == set(words.findall(new))


def test_no_text_of_the_benchmark_is_decoded_twice():
    bench = bench_with(settings=BenchSettings(), prompts=[[*range(9)], [*range(90, 160)]])
    texts = bench.texts(2, 8)
    assert len(texts) == len({*map(tuple, texts)}) == 2 + 8
    assert min(map(len, texts)) == 1


def test_growth_divides_by_a_verification(monkeypatch):
    """K = 4 and 12 guesses: 5, 12 and 1 tokens of the draft, and 5 of the target, take 2, 3, 1 and
    10 ms."""
    passes = {("target", 5): 10.0, ("draft", 5): 2.0, ("draft", 12): 3.0, ("draft", 1): 1.0}
    read = []
    monkeypatch.setattr(figures.growth, "linear_layers", lambda model, tokens: None)

    def milliseconds(work, *inputs):
        if work is None or len(inputs) == 3:  # linear layers, sampling
            return 0.5
        model = "target" if len(read) < 3 else "draft"
        read.append(inputs[0].shape[1])
        return passes.get((model, read[-1]), 99.0)

    monkeypatch.setattr(figures.growth, "milliseconds", milliseconds)
    placement = SimpleNamespace(device=torch.device("cpu"))
    job = SimpleNamespace(placement=placement, dtype=torch.float32, with_graphs=lambda model: model)
    [f] = figures.growth.growth(bench_with(settings=BenchSettings(quick=True), job=job))
    assert read == [1, 5, 12, 1, 5, 12]
    assert (f["T_p"], f["T_b"]) == ((2 + 4 * 3) / 10, 4 * 1 / 10)


def test_the_lines_of_noise_differ_in_noise_alone():
    """Race verifies blocks, so the private line does."""
    lines, _ = bench_py.sweep_points(BenchSettings(), 16)["noise"]
    rules = {(point.name.split(",")[0], point.changes["verification"]) for point in lines}
    assert rules == {("private noise", "block"), ("public noise", "race")}


def test_the_position_that_is_drawn_is_where_c_moves_most():
    """At place 1 draft and target agree, so C moves all of the residual to the four guesses.
    Before and after it the target wants a token that the draft does not guess, with any C."""
    agreed = [float(-token) for token in range(8)]
    sure = 7 * [0.0] + [50.0]

    def causal(rows: list):
        return SimpleNamespace(device="cpu", causal=lambda *_: torch.tensor([rows]))

    bench = bench_with(settings=BenchSettings(temperature=1.0), prompts=[[1, 2, 3]],
                       sd_models=SimpleNamespace(target=causal([sure, agreed, sure]),
                                                 draft=causal(3 * [agreed])),
                       job=SimpleNamespace(tokenizer=SimpleNamespace(decode=str)))
    before, after = bench_py.one_position(bench)
    assert before["tokens"][0] == "'[tensor(0)]'"
    assert before["target's p"] == pytest.approx(before["draft's q"])
    assert sum(after["residual"][:4]) == pytest.approx(1)


def test_a_shell_takes_the_command_that_the_benchmark_names():
    settings = Settings(target="my models/l'une", apply_chat_template=True, fan_out="1,1,1,1,1")
    _, _, *words = shlex.split(bench_py.command_line(settings))
    assert parse(Settings, words) == settings


@pytest.mark.parametrize("mode", ("ar", "sd"))
def test_no_option_of_ssd_reaches_a_baseline(mode):
    """SD drafts with the draft model, whatever SSD's backup, C, budget and fan-out are."""
    bench = bench_with(settings=BenchSettings(
        backup="random", downweight=0.5, fan_out="1,1,1,1,1", acceptance_rate=0.3))
    point = bench_py.Point("", 0, {"mode": mode, "lookahead": 3, "temperature": 1.0})
    settings = bench.settings_of(point)
    chosen = make_plan(settings)
    assert (chosen.backup, chosen.budget, settings.downweight) == ("neural", 0, 1.0)


def test_the_benchmark_counts_the_hits_of_other_caches_by_the_guesses_of_the_largest():
    """K = 1, guesses 0, 1 and none after 0 accepted, 0 and 2 after 1; of two texts round 0 hit in
    one. Without `first` the hits are those of the run itself."""
    hit = RowRound(0, PRIMARY, [0], 0, 0, [0])
    miss = hit._replace(source=BACKUP)
    first = Stats()
    first.log.append(TimedRound(0, 0, 1, [miss, miss]))
    first.log.append(TimedRound(1, 0, 1, [hit, miss]))
    stats = Stats()
    for number, count in enumerate((1, 2, 1, 2, 1, 2, 1)):
        row = hit._replace(new_tokens=[0] * count)
        stats.log.append(TimedRound(number, 0, 1, [row]))
    stats.guess_counts = [[[1, 1, 0, 0], [0, 0, 1, 0]], [[0, 0, 0, 1], [1, 0, 0, 0]]]
    shapes = {"1,1": 1 + 2, "2,1": 1 + 3, "2,3": 1 + 4, "0,2": 1 + 1, "0,0": 1}
    for fan_out, hits in shapes.items():
        settings = Settings(lookahead=1, fan_out=fan_out)
        counts = bench_py.counts_of(settings, stats, first)
        assert counts["hit_rate"] == pytest.approx(hits / 7)
        assert counts["E_hit"] == counts["E_miss"] == 1.5
    counts = bench_py.counts_of(Settings(backup="lookup"), stats)
    assert counts["hit_rate"] == 1.0


@pytest.mark.parametrize("change, runs", (
    ({}, [(4, 64, 40), (1, 12, 2)]), ({"mode": "sd"}, [(4, 64, 40), (1, 0, 2)]),
    ({"backup": "lookup"}, [(4, 12, 40)]), ({"downweight": 0.5}, [(4, 12, 40)]),
    ({"fan_out": "confident"}, [(4, 12, 40)]),
    ({"fan_out": "3,3,2,2,2"}, [(4, 64, 40), (1, 12, 2)])))
def test_the_benchmark_counts_in_few_runs(change, runs):
    """K, budget and tokens of the runs: where the largest cache tells the hits of all others,
    only round 0, all of whose guesses are for one outcome, has a run with this budget."""
    ran = []
    row = RowRound(0, PRIMARY, [0], 0, 0, [0])
    log = [TimedRound(0, 0, 1, [row]), TimedRound(1, 0, 1, [row])]
    stats = Stats(log=log)
    stats.guess_counts = [[[1] + [0] * 64] * 5, [[0] * 65] * 5]

    def decode(points, texts):
        ran.extend(bench.settings_of(point) for point in points)
        return [stats] * len(points)

    bench = bench_with(settings=BenchSettings(), decode=decode)
    bench.count(bench_py.Point("", 0, change), [])
    assert [(s.lookahead, s.budget, s.max_new_tokens) for s in ran] == runs
    assert {(s.pace, s.batch_size, s.mode) for s in ran} == {((0.0, 0.0), 8, "ssd")}


def test_the_benchmark_counts_predicts_and_measures():
    """It counts without a pace, and predicts with the times of the pace, by Theorem 7. It measures
    at the pace, here twice as slow for 4 rows; the last round has only one row."""
    bench = bench_with(settings=BenchSettings(pace=(100, 10), lookahead=2, budget=24),
                       prompts=[[1]])
    decoded = []
    row = RowRound(0, PRIMARY, [0, 0], 1, 0, [0, 0])
    stats = Stats(spans=[Span(0, "verify", 0.0, 0.2, 1, True)], log=[
        TimedRound(0, 0.0, 1.0, 4 * [row]), TimedRound(1, 1.0, 1.25, 4 * [row]),
        TimedRound(2, 1.25, 1.5, [row])])
    stats.guess_counts = [[[8] + [0] * 64] * 3, [[0] * 65] * 3]  # the first guess is right

    def decode(points, texts):
        decoded.extend(bench.settings_of(point) for point in points)
        return [stats] * len(points)

    bench.decode = decode
    point = bench_py.Point("SSD", 4, {"batch_size": 4})
    predicted = bench.predict(point, [[1]])
    [measured] = bench.measure([point], [[1]])
    assert [(s.pace, s.batch_size, s.budget) for s in decoded] == [
        ((0.0, 0.0), 8, 64), ((0.0, 0.0), 8, 24), ((200, 20), 4, 24)]
    assert (predicted["T_v in ms"], predicted["T_p"], predicted["T_b"]) == (100, 0.3, 0.2)
    assert predicted["predicted"] and predicted["tokens/s"] == pytest.approx(1000 * 4 * 2 / 100)
    assert not measured["predicted"] and measured["T_v in ms"] == pytest.approx(100)
    assert measured["tokens/s"] == pytest.approx(2 * 8 / 0.25)
    assert measured["verifier_utilisation"] == pytest.approx(2 * 0.2 / 0.5)
    assert measured["measured / Theorem 7"] == measured["tokens/s"] / measured["Theorem 7"]
    assert predicted["tokens a verification"] == pytest.approx(2)
    by_race = {"mode": "sd", "temperature": 1.0, "verification": "race"}
    assert bench.predict(point.but(**by_race), [[1]])["hit_rate"] is None
    assert decoded[-1].verification == "race", "its rounds are longer"


def test_without_a_pace_a_few_texts_tell_how_long_passes_take():
    """Of K + 1 = 5 in a pre-speculation, of which the trunk is one, and K in a backup."""
    works = {"verify": 0.2, "trunk": 0.03, "tree": 0.06, "backup": 0.04}
    spans = [Span(0, work, 0.0, end, 1, None) for work, end in works.items()]
    stats = Stats(spans=spans)
    bench = bench_with(settings=BenchSettings(pace=(0, 0)), decode=lambda *_: [stats, stats],
                       texts=lambda *_: [])
    assert bench.times(Settings()) == pytest.approx((200, 18, 10))
    summary = stats.summary()
    assert (summary["T_p"], summary["T_b"]) == pytest.approx((0.45, 0.2))


def test_what_was_decoded_is_found_by_its_settings_and_number_of_texts():
    decoded = []

    def take_turns(points, texts) -> list:
        decoded.append(len(texts))
        return [len(texts)] * len(points)

    bench = bench_with(settings=BenchSettings(), stats={}, take_turns=take_turns)
    points = [bench_py.Point("", 0, {"budget": budget}) for budget in (4, 4, 8)]
    found = [bench.decode(points, texts) for texts in ([1], [1, 2], [1])]
    assert found == [[1] * 3, [2] * 3, [1] * 3] and decoded == [1, 2]
    for other in {"in_turns": True}, {"threads": 1}, {"threads": 2}, {"assistant": []}:
        bench.decode([points[0]._replace(**other)], [1])
    assert decoded == [1, 2, 1, 1, 1, 1]


COUNTED = {"hit_rate": None, "E_hit": None, "E_miss": 1.0, "tokens_per_round": 2.0, "T_p": 0.5,
           "T_b": 0.5, "backup": "neural", "Theorem 7": 3.0, "T_v in ms": 9.0}


def test_the_comparison_divides_by_what_its_columns_say():
    """Speeds are 1, 2, ... of what is decoded in the order of lines. AR has fewer prompts."""
    bench = bench_with(settings=BenchSettings(quick=True), texts=lambda *size: size)
    measured = []

    def measure(points, texts):
        measured.append(texts)
        return [COUNTED | {"name": point.name, "with": point.changes, "tokens/s": float(number),
                           "assistant": None, "threads": None, "by turn": [float(number)],
                           "shares": [0.0] if number == 1 else [-0.01 * number, 0.01 * number] * 4}
                for number, point in enumerate(points, start=1)]

    bench.measure = measure
    greedy, sampled = bench_py.comparison(bench, 0.0), bench_py.comparison(bench, 0.7)
    assert measured == [bench_py.GREEDY, bench_py.SAMPLED]
    together = {"budget": 64, "fan_out": "confident", "backup": "lookup", "lookahead": 4}
    assert greedy[-1]["with"] == together | {"temperature": 0.0}
    assert sampled[-1]["with"] == together | {"temperature": 0.7, "verification": "race"}
    by_block, = [f["tokens/s"] for f in sampled if f["name"] == "SD, block"]
    for f in greedy + sampled:
        rule = f["with"].get("verification", "token")
        assert (f["/ AR"], f["/ SD"]) == (f["tokens/s"], f["tokens/s"] / 2)
        assert f["/ SD, block"] == (None if rule == "token" else f["tokens/s"] / by_block)
    assert greedy[0]["error of / SD"] is None and greedy[1]["error of / SD"] == 0
    # line 3 is 1.5 x SD; half of the prompts change the ratio by 1% up, half down: 8 / 7 x 1%^2
    assert greedy[2]["error of / SD"] == pytest.approx(1.5 * 8 * 0.01 / 7 ** 0.5)


def log_of(*texts: tuple[int, float]) -> list[TimedRound]:
    """Texts of so many tokens, in so many seconds, after their round 0."""
    log = []
    for tokens, seconds in texts:
        row = RowRound(0, BACKUP, [], 0, 0, tokens * [1])
        log.append(TimedRound(0, 0.0, 9.0, [row]))
        log.append(TimedRound(1, 0.0, seconds, [row]))
    return log


def test_the_benchmark_says_how_far_a_speed_may_be_off():
    """Of eight prompts two texts each: one of 2 tokens in a second, one of 4 in three. So the speed
    is 1.5, from which texts are half a token off, but prompts are not. A last batch lacks a row."""
    texts = 4 * [(2, 1.0)] + 4 * [(4, 3.0)]  # tokens and seconds of a text
    log = log_of(*texts, *reversed(texts))
    log += [TimedRound(0, 0.0, 1.0, []), TimedRound(1, 0.0, 1.0, [])]
    decoded = bench_py.decoded_of(Stats(log=log), 1)
    assert decoded.shape == (16, 2)
    assert decoded.sum(0).tolist() == [48, 32]
    by_text = bench_py.shares_of(decoded, [*range(16)])
    share = 0.5 / 48
    assert by_text[:8] == pytest.approx(4 * [share] + 4 * [-share])
    variance = 16 * share ** 2 / 15
    error = bench_py.standard_error(1.5, by_text)
    assert error == pytest.approx(1.5 * (16 * variance) ** 0.5)
    by_prompt = bench_py.shares_of(decoded, 2 * [*range(8)])
    assert by_prompt == pytest.approx(8 * [0.0], abs=1e-12)
    assert bench_py.standard_error(1.5, by_text[:7]) is None


def test_texts_are_of_the_prompt_with_which_they_begin():
    """A short prompt is used up sooner, and has no other text."""
    bench = bench_with(settings=BenchSettings(pace=(0, 0)), prompts=[[1, 2], [*range(30)]])
    texts = bench.texts(2, 4)
    assert [bench.prompt_of(text) for text in texts] == [0, 1, 1, 1, 1]
    assert bench.other_texts() == [[1, 2], [*range(22)]]


def test_a_speed_is_the_median_of_turns():
    """Three turns of two texts: 2, 4 and 3 tokens a second."""
    log = log_of((2, 1.0), (1, 0.5), (2, 0.5), (2, 0.5), (1, 0.5), (2, 0.5))
    assistant = [7, "constant", 0.0]
    point = bench_py.Point("generate", 0, {"mode": "ar"}, threads=2, assistant=assistant)
    prompts = [[1], [2]]
    bench = bench_with(settings=BenchSettings(pace=(0, 0)), prompts=prompts)

    def decode(points, texts):
        assert texts == 3 * prompts
        return [Stats(log=log)]

    bench.decode = decode
    [f] = bench.measure([point], prompts, 3)
    assert (f["tokens/s"], f["least"], f["most"]) == (3, 2, 4)
    assert f["by turn"] == [2, 4, 3]
    assert (f["threads"], f["assistant"]) == (2, assistant)
    assert (f["T_v in ms"], f["Theorem 7"], f["acceptance_rate"]) == (None, None, None)


# ---- the comparison without a pace ----

def compared_without_a_pace(temperature: float, capsys, quick: bool = False) -> SimpleNamespace:
    """The comparison of a fake bench in which whatever is tried first is slowest. Line number n
    has 10 n tokens a second, and twice and thrice as many in the other turns, and T_v = n ms."""
    seen = SimpleNamespace(tried={}, finalists={})  # by line
    settings = BenchSettings(pace=(0, 0), quick=quick)
    bench = bench_with(settings=settings, prompts=[[number] * 20 for number in range(16)],
                       thread_counts=[1, 2], own_threads=1, may_assist=True)

    def measure(points, texts, turns=1):
        if turns == 3:
            seen.measured = points
            seen.texts = texts
        elif texts == bench.other_texts()[:4]:
            seen.tried[points[0].name] = points
        else:
            assert texts == bench.other_texts()[4:]
            seen.finalists[points[0].name] = points
        return [COUNTED | {"name": point.name, "with": point.changes, "tokens/s": 20.0 * number,
                           "assistant": point.assistant, "threads": point.threads,
                           "T_v in ms": number,
                           "by turn": [10.0 * number, 20.0 * number, 30.0 * number],
                           "shares": [0.0] * 8}
                for number, point in enumerate(points, start=1)]

    bench.measure = measure
    seen.found = bench_py.comparison(bench, temperature)
    seen.said = capsys.readouterr().out
    seen.texts_of_all = bench.texts(*bench_py.UNPACED)
    return seen


@pytest.mark.parametrize("temperature, names", (
    (0.0, ["generate", "generate with assistant_model", "AR", "SD", "SSD", "everything together"]),
    (0.7, ["generate", "generate with assistant_model", "AR", "SD", "SSD", "SD, block",
           "SSD, race", "everything together"])))
def test_without_a_pace_each_method_has_its_best_settings_and_all_cores(temperature, names, capsys):
    seen = compared_without_a_pace(temperature, capsys)
    assert [f["name"] for f in seen.found] == names
    measured = seen.measured[:len(names)]
    alone = seen.measured[len(names):]  # in the same turns
    for point in measured:
        last = seen.finalists[point.name][-1]
        assert last == point.but(max_new_tokens=160), "which is the fastest"
    for name, points in seen.tried.items():
        assert {one.changes["max_new_tokens"] for one in points} == {48}
        assert seen.finalists[name] == [one.but(max_new_tokens=160) for one in points[:-5:-1]]
    tried = seen.finalists | seen.tried
    assert {point.threads for point in tried["SSD"]} == {None}, "each rank has its own core"
    for name in "generate", "AR", "SD":
        assert {point.threads for point in tried[name]} == {1, 2}
    assert {point.changes["budget"] for point in tried["SSD"]} == {8, 24, 64}
    for name in "SD", "SSD":
        assert {point.changes["lookahead"] for point in tried[name]} == {2, 3, 4, 5, 6, 8, 10}
    schedules = {point.assistant[1] for point in tried["generate with assistant_model"]}
    assert schedules == {"constant", "heuristic"}
    assert {str(point.assistant) for point in tried["generate"]} == {"[]"}
    assert {point.changes["temperature"] for points in tried.values() for point in points} == {
        temperature}
    together = measured[-1].changes
    assert together["fan_out"] == "confident" and together["backup"] == "lookup"
    assert (together.get("verification") == "race") == (temperature > 0)
    for number, f in enumerate(seen.found, start=1):
        assert (f["/ AR"], f["/ SD"]) == pytest.approx((number / 3, number / 4))
    beside = [point for point in measured if point.threads is None]
    assert alone == [point._replace(in_turns=True) for point in beside], "the draft is idle"
    times = {point.name: number for number, point in enumerate(alone, start=len(names) + 1)}
    assert {f["name"]: f["T_v alone"] for f in seen.found if f["threads"] == [1, 1]} == times
    assert seen.texts == seen.texts_of_all and len(seen.texts) == 8


def test_a_quick_comparison_without_a_pace_tries_little(capsys):
    seen = compared_without_a_pace(0.0, capsys, quick=True)
    tried = seen.finalists | seen.tried
    assert {name: len(points) for name, points in tried.items()} == {
        "generate": 2, "generate with assistant_model": 6, "AR": 2, "SD": 2}
    assert "fastest: python saguaro.py --backup lookup --budget 24 --fan-out confident" in seen.said


@pytest.mark.parametrize("f, command", (
    ({"assistant": [7, "constant", 0.0], "threads": 2, "name": "generate with assistant_model"},
     "generate with assistant_model [7, 'constant', 0.0], with 2 threads"),
    ({"assistant": None, "threads": 1, "with": {"mode": "sd", "lookahead": 6}},
     "OMP_NUM_THREADS=1 python saguaro.py --lookahead 6 --mode sd"),
    ({"assistant": None, "threads": 2, "with": {"mode": "ar"}}, "python saguaro.py --mode ar"),
    ({"assistant": None, "threads": [1, 1], "with": {}}, "python saguaro.py")))
def test_the_fastest_command_gives_the_threads(f, command):
    bench = bench_with(settings=BenchSettings(pace=(0, 0)), thread_counts=[1, 2])
    assert bench_py.command_of(bench, f) == command


def test_who_decodes_alone_has_all_cores(monkeypatch):
    """One after the other: alone with two threads, then on both ranks, then alone with one."""
    done = []
    state = {}
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: state.update(cores=cores),
                        raising=False)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: state.update(threads=count))

    class Fake:
        stats = None

        def __init__(self, settings, in_turns, texts):
            self.mode = settings.mode

        def __call__(self, batch):
            done.append((self.mode, state["cores"], state["threads"]))

    bench = bench_with(settings=BenchSettings(), all_cores=[0, 1], own_cores=[0], own_threads=1,
                       decoder=Fake)
    ssd = bench_py.Point("", 0, {})
    bench.take_turns([ssd.but(mode="sd")._replace(threads=2), ssd, ssd._replace(in_turns=True),
                      ssd.but(mode="ar")._replace(threads=1)], [[1]])
    assert done == [("sd", [0, 1], 2), ("ssd", [0], 1), ("ssd", [0], 1), ("ar", [0, 1], 1)]


@pytest.mark.parametrize("module, kind", ((bench_py, BenchSettings), (page, PageSettings)))
def test_rank_0_alone_opens_what_is_written(module, kind, monkeypatch, tmp_path):
    """Two ranks would open it at the same moment: one is refused, and the other waits for it."""
    out = tmp_path / "out"
    bench = bench_with(leads=False, models=None)
    monkeypatch.setattr(module, "Bench", lambda _: bench)
    monkeypatch.setattr(module, "decode_as_asked", lambda _: None)
    with open_for_writing("--out", str(out)):
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("RANK", "1")
        module.main(kind(out=str(out)))
        monkeypatch.setenv("RANK", "0")
        with pytest.raises(UserError, match="another run is writing it"):
            module.main(kind(out=str(out)))


@pytest.mark.parametrize("assistant", ([], [3, "constant", 0.0], [5, "heuristic", 0.0]))
def test_generate_is_timed_without_its_first_round(assistant):
    """It writes the target's greedy text to the full length, though the checkpoint knows an
    end-of-sequence and a penalty. A copy of the target that assists is right in all it drafts."""
    target = copy.deepcopy(random_model())
    prompt = [3, 1, 4, 1, 5]
    [text] = greedy_reference(random_model(), [prompt], 20)
    target.generation_config.eos_token_id = text[8]
    target.generation_config.repetition_penalty = 3.0
    models = SimpleNamespace(target=SimpleNamespace(model=target),
                             draft=SimpleNamespace(model=copy.deepcopy(target)))
    decode = Generate(Settings(max_new_tokens=20), models, assistant)
    decode([prompt])
    decode([prompt])
    rounds = [timed.rows[0].new_tokens for timed in decode.stats.log]
    assert sum(rounds, []) == text + text
    starts = [timed.number for timed in decode.stats.log]
    assert starts.count(0) == 2 and starts[0] == 0, "each text begins with a round 0"
    if assistant:
        lengths = [*map(len, rounds)]
        assert max(lengths) > 1 and lengths[0] == assistant[0] + 1
        second = lengths[starts.index(0, 1)]
        assert (second > lengths[0]) == (assistant[1] == "heuristic"), "it has learned"
    summary = decode.stats.summary()
    later = [timed for timed in decode.stats.log if timed.number > 0]
    assert all(timed.start < timed.end for timed in decode.stats.log)
    assert summary["tokens_per_second"] == pytest.approx(
        sum(len(timed.rows[0].new_tokens) for timed in later)
        / sum(timed.end - timed.start for timed in later))


def test_generate_samples_as_the_options_say(monkeypatch):
    """At temperature 1e-5, and of the likeliest token alone, samples are greedy; else not."""
    target = random_model()
    prompt = [3, 1, 4, 1, 5]
    [greedy] = greedy_reference(target, [prompt], 20)
    models = SimpleNamespace(target=SimpleNamespace(model=copy.deepcopy(target)),
                             draft=SimpleNamespace(model=copy.deepcopy(target)))

    def written(**options) -> list[int]:
        decode = Generate(Settings(max_new_tokens=20, **options), models, [])
        decode([prompt])
        return sum([timed.rows[0].new_tokens for timed in decode.stats.log], [])

    assert written(temperature=1e-5) == written(temperature=2.0, top_k=1) == greedy
    assert written(temperature=2.0, top_p=1e-6) == greedy
    assert written(temperature=2.0) == written(temperature=2.0) != greedy
    assert written(temperature=2.0) != written(temperature=2.0, seed=1)
    # of 40 ids, 30 times as many tokens: transformers' own top_k would be 50, so none is cut
    monkeypatch.setattr(models.target.model, "generation_config", None)
    assert written(temperature=2.0) != greedy


def test_the_comparison_is_of_the_temperature_that_was_asked_for(monkeypatch, tmp_path):
    """And the screen says first how long it will take. The record says on what it ran."""
    asked = []
    out = tmp_path / "out"
    settings = BenchSettings(temperature=0.7, pace=(0, 0), out=str(out))
    bench = bench_with(leads=True, settings=settings, prompts=[[1]], all_cores=[0],
                       job=SimpleNamespace(placement=SimpleNamespace(devices=["cpu", "cpu"]),
                                           dtype=torch.float32))
    monkeypatch.setattr(bench_py, "Bench", lambda _: bench)
    monkeypatch.setattr(bench_py, "gather", asked.append)
    monkeypatch.setattr(bench_py, "say_how_long", lambda _, heats: asked.append(heats))
    monkeypatch.setattr(bench_py, "comparison", lambda _, heat: asked.append(heat) or [
        {"name": "SSD", "value": heat}])
    bench_py.main(settings)
    assert asked == [(0.0, 0.7), 0.0, 0.7, None], "nothing more of rank 1"
    record = read(out)
    assert record["results"] == [{"sweep": "unpaced", "name": "SSD", "value": heat}
                                 for heat in (0.0, 0.7)]
    assert record["machine"]["processor"] and record["machine"]["cores"] == 1
    assert record["machine"]["python"] == sys.version.split()[0]


def test_the_screen_says_how_long_the_comparison_without_a_pace_takes(capsys):
    """AR takes 6 s for a text of 160 tokens. There are 1 + 2 + 1 + 7 + 21 + 21 points to try with
    one thread, when greedy, on four texts of 48, and six to measure on 8 texts in 3 turns."""
    bench = bench_with(settings=BenchSettings(pace=(0, 0)), prompts=[[1] * 9] * 16,
                       thread_counts=[1], may_assist=True)
    stats = Stats(log=[TimedRound(0, 0.0, 6.0, [])])
    bench.decode = lambda points, texts: [stats] * len(texts)
    bench_py.say_how_long(bench, [0.0])
    tried = 1 + len(ASSISTANTS) + 1 + 7 + 21 + 21
    texts = 4 * tried * 48 / 160 + 6 * 8 * 3  # of 160 tokens
    minutes = texts * 6 / 60
    assert capsys.readouterr().out == f"  about {minutes:.0f} minutes\n"


@pytest.mark.parametrize("options, tokens, out", (
    ({}, 40, None), ({"pace": (0, 0)}, 160, "unpaced.json"),
    ({"pace": (0, 0), "out": "x", "max_new_tokens": 9}, 9, "x"),
    ({"pace": (0, 0), "quick": True}, 24, None),
    ({"pace": (0, 0), "sweep": ("batch",)}, 40, None)))
def test_texts_are_long_where_nothing_is_paced(options, tokens, out):
    """A short text ends in the middle of a round."""
    settings = BenchSettings(**options)
    assert (settings.max_new_tokens, settings.out) == (tokens, out)


@pytest.mark.parametrize("kept, late", ((0.0, True), (0.94, True), (0.95, False), (None, False)))
def test_a_table_says_where_a_pace_was_not_kept(kept, late, capsys):
    print_table("a table", ("pace_kept",), [{"name": "SSD", "pace_kept": kept}])
    assert ("too slow for the pace" in capsys.readouterr().out) == late


def test_the_benchmark_chooses_k_for_each_batch_size():
    """Alone a longer lookahead pays; of 16 rows one nearly always misses, and waits for the backup.
    With a backup that takes no time K grows until pre-speculation takes as long as a verification:
    then misses wait for that. AR has no K, no backup and no T_p."""
    bench = bench_with(settings=BenchSettings(pace=(100, 12)))
    bench.count = lambda point, _: {
        "tokens_per_round": 0, "hit_rate": 0.8, "E_miss": 1.0, "acceptance_rate": 0,
        "E_hit": cache.expected_tokens(0.9, point.changes["lookahead"])}

    def chosen(**changes) -> int:
        point = bench_py.Point("SSD", 1, changes)
        best = bench_py.at_best_lookahead(bench, point, [])
        assert best == point.but(**best.changes)
        return best.changes["lookahead"]

    # by Corollary 16; without the tenth it would be 7 in all three, and with two tenths 6
    assert (chosen(batch_size=1), chosen(batch_size=16)) == (7, 6)
    assert chosen(batch_size=16, backup="random") == 7
    alone = bench_py.Point("AR", 4, {"mode": "ar", "lookahead": 7})
    assert bench_py.at_best_lookahead(bench, alone, []) == alone
    bench.count = lambda *_: {"hit_rate": None, "E_hit": None, "E_miss": 1.0}
    row = bench.predict(alone.but(batch_size=4), [])
    assert (row["T_p"], row["T_b"], row["tokens/s"]) == (None, 0, 40)


def test_the_benchmark_predicts_the_rounds_of_logs_by_corollary_16():
    """The first row by hand: 0.88 x 15 ms after a hit, else (15 + 12.23) ms. docs/RESULTS.md
    has four of the rows."""
    status, output = obey("bench.py", "--predict")
    rows = [line.split() for line in output.splitlines() if re.match(r" +\d", line)]
    assert "a verification of n tokens: 14.75 + 0.043 n ms" in output
    assert status == 0 and rows[0][7:11] == ["15.00", "19.05", "16.47", "2.58"]
    results = (ROOT / "docs/RESULTS.md").read_text("utf-8")
    shown = [f"| {verification} | {predicted} | {took} |" in results
             for *_, verification, took, predicted, _, _, _ in rows]
    assert sum(shown) == 4
