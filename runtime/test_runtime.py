"""Tests of the machine room: the command and its processes, who computes where, CUDA graphs,
tensor parallelism, GPUs, the benchmark. Of the algorithm speaks test_equivalence.py.

Processes cost seconds, most of them for importing PyTorch. So commands are obeyed in this process
(`obey`), or in ranks forked from one that has done the imports (`in_ranks`); started as a user
starts them are very few.
"""
import atexit
import copy
import errno
import gc
import importlib
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext, redirect_stderr, redirect_stdout, suppress
from dataclasses import fields, replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here is to be downloaded

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations import accelerate

import bench
import saguaro
from cache import PRIMARY, Speculation
from runtime import command, cuda_graphs, settings
from runtime.command import Display, Ranks, Run, Stats, encode, open_model
from runtime.model import CausalLM
from runtime.settings import ROOT, TINY, Settings, UserError, begin, parse, read_json_lines
from runtime.tensor_parallel import load_sharded
from test_equivalence import RAGGED, decoder, generated, imitation, in_ranks, network
from tiny.enlarge import enlarge

slow = pytest.mark.slow
LAUNCH_DRAFTERS = settings.launch_drafters  # which no test but one is to call
GPUS = torch.cuda.device_count()
PROGRAMS = {"saguaro.py": (Settings, saguaro.generate),
            "bench.py": (bench.BenchSettings, bench.work)}


# ---- helpers ----

@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    """A command that is obeyed in this process leaves its threads, its garbage and Ctrl-C as they
    are."""
    for owner, name, value in (
            (torch, "set_num_threads", lambda count: None), (torch.cuda, "device_count", lambda: 0),
            (settings, "heed_ctrl_c", lambda: None), (sys, "argv", sys.argv),
            (settings, "launch_drafters", lambda count: None),
            (gc, "set_threshold", lambda count: None)):
        monkeypatch.setattr(owner, name, value)


def obey(program: str, *words, out=None) -> tuple[int, str]:
    """`python saguaro.py ...` in this process: exit status, and what it said (to `out` apart)."""
    (kind, work), said, status = PROGRAMS[program], StringIO(), 0
    sys.argv = [program, *map(str, words)]
    try:
        with redirect_stdout(out or said), redirect_stderr(said):
            command.run(begin(kind), work)
    except SystemExit as stopped:
        status = stopped.code
    return status, said.getvalue()


def obey_in_ranks(count: int, commands: list[tuple], job=None) -> list[list[tuple[int, str]]]:
    """What `obey` returns in each of `count` ranks, command by command. A command is a machine (of
    so many GPUs, and free bytes of each, or 0 for enough), and words."""
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
              for _ in commands]  # where the ranks meet
    ports = [store.port for store in stores]
    return in_ranks(count, job or obey_in_rank, list(zip(ports, commands)))


def obey_in_rank(commands: list[tuple]) -> list[tuple[int, str]]:
    torch.set_num_threads, results = lambda count: None, []
    for port, ((gpus, free), words) in commands:
        os.environ["MASTER_PORT"] = str(port)
        if gpus > GPUS or free:
            stand_in(free or 2 ** 36)
        torch.cuda.device_count = lambda gpus=gpus: gpus
        results.append(obey(*words))
        if dist.is_initialized():  # it has failed
            dist.destroy_process_group()
    return results


def read(file: Path) -> dict:
    return json.loads(file.read_text("utf-8"))


def the_error(result: tuple[int, str]) -> str:
    """The sentence to which a failure amounts."""
    status, said = result
    assert status == 2 and said.count("\n") == 1 and said.startswith("saguaro.py: error: "), said
    return said


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> list:
    """The command's arguments for a small random target and draft, with the embedded pair's
    tokenizer, and three prompts."""
    folder = tmp_path_factory.mktemp("pair")
    target = network(  # two or three ranks may share it
        vocab_size=2048, max_position_embeddings=128, hidden_size=48, num_attention_heads=6,
        num_key_value_heads=6)
    for name, net in (("target", target), ("draft", imitation(target, 0.15))):
        net.save_pretrained(folder / name)
        for file in (TINY / name).glob("tokenizer*.json"):
            shutil.copy(file, folder / name)
    return ["--target", folder / "target", "--draft", folder / "draft", "--dtype", "float64",
            "--prompt", "def f(x):", "class A:", "x", "--batch-size", 2, "--max-new-tokens", 12]


# ---- the command ----

WRONG = {f"--{wrong}": "--" + wrong.replace(" ", " is ") for wrong in (
    "lookahead 0", "temperature nan", "top-p 1.5", "miss-exponent 0")} | {
    "--lookahead two": "--lookahead: invalid int value: 'two'",
    "--lookahead 600": "--lookahead 600: no text has room",
    "--lookahead 512 --max-new-tokens 512": "the target's context is 512",
    "--budget 10236": "10235 outcomes are all there are with K = 4",
    "--fan-out 4,3,2,1": "nor 5 numbers", "--fan-out 4,3,2,1,-2": "nor 5 numbers",
    "--mode fast": "invalid choice: 'fast'", "--frobnicate": "unrecognized arguments: --frobnicate",
    "--device cuda": "--device cuda: PyTorch sees no CUDA device",
    "--drafters 2 --mode sd": "only ssd has work for more than one",
    "--drafters 2 --fan-out 3,2,1,1,2": "2 drafters cannot share its sum evenly",
    "--prompt ''": "prompt 1 of 1 is empty", "--prompt a --prompts FIELDLESS": "exclude each other",
    "--prompts nowhere.jsonl": ": No such file", "--prompts EMPTY": "holds no prompt",
    "--prompts /dev/null": "not a file that every rank can read",
    "--prompts TORN": "line 2: not a JSON object", "--prompts FIELDLESS": "line 1: not a JSON obj",
    "--prompts HALF": "prompt 1 of 1 holds half a character", "--prompts LONG": "context is 512",
    "--json BART": "not a file in an existing folder",
    "--json nowhere/out.json": "not a file in an existing folder",
    "--json /proc/out.json": "--json /proc/out.json: ",
    "--target ./nowhere": "--target ./nowhere: no such folder",
    "--target no-such/model": "no-such/model: neither a folder with a model",
    "--target ADDED --mode ar --prompt a 'b <word>'":
        "prompt 2 of 2 holds the token '<word>', number 2048,",
    "--target BART": "cannot be decoded here", "--target CORRUPT --mode ar": "cannot load",
    "--draft RENAMED": "different vocabularies", "--apply-chat-template": "has no chat template"}


@pytest.fixture(scope="module")
def wrong_inputs(tmp_path_factory) -> dict[str, str]:
    """What the words in capitals in WRONG stand for."""
    folder = tmp_path_factory.mktemp("wrong")
    for name, text in {"EMPTY": "\n", "TORN": '{"text": "a"}\n{"text": "b',
                       "FIELDLESS": '{"words": "a"}', "HALF": r'{"text": "a\ud800"}',
                       "LONG": json.dumps({"text": "if x :\n" * 2000})}.items():
        (folder / name).write_text(text, "utf-8")
    for name in ("RENAMED", "BART", "CORRUPT", "ADDED"):
        shutil.copytree(TINY / "draft", folder / name)
    added = AutoTokenizer.from_pretrained(folder / "ADDED")
    added.add_tokens("<word>")
    added.save_pretrained(folder / "ADDED")
    tokenizer = folder / "RENAMED" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text("utf-8").replace("endoftext", "unheard-of"), "utf-8")
    AutoConfig.for_model("bart", vocab_size=2048).save_pretrained(folder / "BART")
    (folder / "CORRUPT" / "model.safetensors").write_bytes(b"\x08" + bytes(100))
    return {path.name: str(path) for path in folder.iterdir()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("arguments", WRONG)
def test_a_wrong_invocation_gets_one_sentence_and_exit_status_2(arguments, wrong_inputs):
    words = [wrong_inputs.get(word, word) for word in shlex.split(arguments)]
    assert WRONG[arguments] in the_error(obey("saguaro.py", *words))


def test_prompt_files_are_split_at_newlines_only_and_may_begin_with_a_byte_order_mark(tmp_path):
    texts = ["a\u2028b", "c\x85d\x0be", "f\ng"]
    lines = "\r\n".join(json.dumps({name: text}, ensure_ascii=False)
                        for name, text in zip(settings.PROMPT_FIELDS, texts))
    (tmp_path / "prompts").write_text(f"\ufeff{lines}\n\n", "utf-8", newline="")
    assert read_json_lines(str(tmp_path / "prompts")) == texts


def test_help_names_every_option_its_default_and_its_group(capsys):
    with pytest.raises(SystemExit) as stopped:
        parse(Settings, ["--help"])
    said = capsys.readouterr().out
    assert not stopped.value.code and said.count("(default:") == len(fields(Settings))
    assert all(f"\n{group}" in said for group in Settings.GROUPS.values())


def test_the_command_line_needs_no_torch():
    """So --help and a wrong flag are answered at once."""
    light = "import sys, runtime.settings; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", light], cwd=ROOT).returncode == 0


def test_a_chat_template_makes_each_prompt_a_user_turn():
    tokenizer = open_model("--target", str(TINY / "target"))[1]
    tokenizer.chat_template = ("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
                               "{% if add_generation_prompt %}<assistant>{% endif %}")
    prompts = encode(tokenizer, ["Why?", "How?"], chat=True, context=512, vocab_size=2048)
    assert tokenizer.batch_decode(prompts) == ["<user>Why?<assistant>", "<user>How?<assistant>"]


CONFIG = set("""prompt prompts target draft mode max_new_tokens batch_size temperature top_k top_p
             seed ignore_eos apply_chat_template lookahead budget fan_out acceptance_rate
             miss_exponent downweight backup no_early_outcome dtype device eager json
             no_public_noise drafters""".split())
STATS = set("""tokens seconds tokens_per_second rounds tokens_per_round acceptance_rate hit_rate
            E_hit E_miss verifier_utilisation T_p T_b prefill_seconds""".split())
LEARNT = set("""acceptance_rate_primary acceptance_rate_backup miss_exponent bonus_ranks fan_out
             fan_out_after_backup downweight backup critical_batch_size""".split())


def test_the_json_file_holds_what_it_always_held(pair, tmp_path):
    texts = []
    for mode, seed in (("ar", 3), ("sd", 3), ("sd", 4)):
        line = [*pair, "--mode", mode, "--temperature", 1, "--seed", seed]
        assert obey("saguaro.py", *line, "--json", tmp_path / "out")[0] == 0
        config, outputs, stats = read(tmp_path / "out").values()
        assert config.keys() == CONFIG
        assert stats.keys() == STATS | (LEARNT if mode == "sd" else set())
        assert 0 < stats["verifier_utilisation"] <= 1 and stats["tokens"] == 36
        assert [output["prompt"] for output in outputs] == ["def f(x):", "class A:", "x"]
        for output in outputs:
            assert output.keys() == {"prompt", "text", "tokens", "finish_reason"}
            assert output["finish_reason"] == "length" and len(output["tokens"]) == 12
        texts.append(outputs)
    assert texts[1] != texts[2], "another seed, another text"


def test_control_characters_are_shown_and_half_a_character_waits_for_the_other_half(pair, capsys):
    controls, shown = "a\x1b[2J\x07\x9b\r\tb\n", "a\\x1b[2J\\x07\\x9b\\r\tb\n"
    status, said = obey("saguaro.py", *pair, "--mode", "ar", "--prompt", controls)
    assert status == 0 and said.startswith(shown) and not set(said) & set("\x1b\x07\x9b\r")
    display = Display(Run(parse(Settings, ["--mode", "ar"]), ["x"]))
    control, owl = (display.tokenizer(text)["input_ids"] for text in (controls, "🦉"))
    for new, expected in (
            (owl[:-1], "x"), (owl[-1:], "🦉"), (control, shown), (owl[:-1], "")):
        display.show(0, new, PRIMARY)
        assert capsys.readouterr().out == expected
    display.finish(Stats().summary())
    assert capsys.readouterr().out.startswith("\ufffd\n"), "at last it is shown as a half"


def test_a_json_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    out = tmp_path / "out"
    out.write_text("old")
    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(UserError, match="No space left"):
        settings.write_json("--json", str(out), {})
    assert [*tmp_path.iterdir()] == [out] and out.read_text() == "old"


def test_too_little_memory_is_said_in_one_sentence(monkeypatch):
    def refuse(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 ...")

    monkeypatch.setattr(CausalLM, "eager", refuse)
    assert "rank 0 (target) lacks memory" in the_error(obey("saguaro.py", "--mode", "ar"))


def test_the_readme_names_what_exists():
    """Functions as `module.function` or `Class.method`, and options."""
    text = (ROOT / "README.md").read_text("utf-8")
    rooms = {room: importlib.import_module(room) for room in (
        "sampling", "cache", "target_worker", "draft_worker", "saguaro")}
    classes = {name: value for room in rooms.values() for name, value in vars(room).items()}
    names = re.findall(r"`(\w+)\.(?!py\b)(\w+)(?=`|\.)", text)
    assert len(names) > 20
    for owner, name in names:
        assert hasattr((rooms | classes)[owner], name), f"{owner}.{name}"
    known = {f"--{field.name.replace('_', '-')}" for field in fields(bench.BenchSettings)}
    foreign = {"--help", "--nproc-per-node", "--nnodes", "--node-rank", "--master-addr"}
    assert set(re.findall(r"--[a-z][a-z-]+", text)) <= known | foreign


@pytest.mark.parametrize("status, sentence", (
    (1, "saguaro.py: [Errno 28] No space left on device\n"), (141, "")))
def test_where_output_cannot_go_it_ends_quietly(status, sentence, pair, monkeypatch):
    """A full disk; a reader who has gone away."""
    reader, writer = os.pipe()
    os.close(reader)
    silenced = []  # else Python, at its exit, would complain once more
    monkeypatch.setattr(os, "dup2", lambda _, stream: silenced.append(stream))
    with suppress(OSError), open("/dev/full" if sentence else writer, "w") as out:
        found = obey("saguaro.py", *pair, "--mode", "ar", "--prompt", "x", out=out)
    assert found == (status, sentence) and silenced == [1]


# ---- processes ----

BEGIN = """\
import sys, time
from runtime.settings import Settings, begin, decoding, rank
begin(Settings)
{}
print("has begun", flush=True)
time.sleep(100)"""
LAUNCHER = ["bash", "-c",
            'export WORLD_SIZE=2; for RANK in 0 1; do export RANK; "$0" "$@" & done; wait']
STRIKES = {  # what befalls two ranks that only begin: their program; a signal, to whom; exit status
    "both end": ("rank() or time.sleep(3); sys.exit()", None, 0),
    "the draft complains": ("rank() and sys.exit(2)", None, 2),
    "the draft is killed": ("", (signal.SIGKILL, 1), 1),
    "the target is killed": ("", (signal.SIGKILL, 0), -signal.SIGKILL),
    "the launcher is killed": ("", (signal.SIGKILL, 0), -signal.SIGKILL),
    "Ctrl-C": ("", (signal.SIGINT, 0), 130),
    "a second Ctrl-C": ("decoding.set()", (signal.SIGINT, 0), 130)}


def start(folder: Path, name: str, tokens: int, *launcher: str) -> psutil.Popen:
    """The command as a user starts it, in a process group of its own. Without OMP_NUM_THREADS,
    of which torchrun speaks."""
    line = [*launcher, ROOT / "saguaro.py", *LINES["drawn"], "--batch-size", 2, "--prompt",
            "def f(x):", "class A:", "--ignore-eos", "--max-new-tokens", tokens, "--json",
            f"{name}.json"]
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    with open(folder / name, "w") as stdout, open(folder / f"{name}.err", "w") as stderr:
        return psutil.Popen(list(map(str, line)), stdout=stdout, stderr=stderr, cwd=folder,
                            env=environment, start_new_session=True)


BAR = r"\s*(\d+%\|.*)?"  # tqdm's
NOTICE = r"(W\d+ .*distributed/run\.py:\d+\] )?(\**|Setting OMP_NUM_THREADS .*)"  # torchrun's


def complaints(errors: Path) -> list[str]:
    """The lines of standard error that are neither tqdm's bar nor torchrun's own."""
    return [line for line in errors.read_text().splitlines()
            if not re.fullmatch(f"{BAR}|{NOTICE}", line)]


@pytest.fixture(scope="module")
def torchrun(tmp_path_factory):
    """The command, started by torchrun; and the folder of its output."""
    folder = tmp_path_factory.mktemp("torchrun")
    job = start(folder, "torchrun", 24, sys.executable, "-m", "torch.distributed.run",
                "--standalone", "--nproc-per-node", "2")
    yield job, folder
    with suppress(ProcessLookupError):
        os.killpg(job.pid, signal.SIGKILL)


@slow
def test_no_rank_outlives_the_other_nor_its_launcher(torchrun):
    """Without a model, so that it takes no time: torchrun loads its own meanwhile."""
    jobs, everybody = {}, []
    for name, (program, *_) in STRIKES.items():
        line = [*LAUNCHER * ("launcher" in name), sys.executable, "-c", BEGIN.format(program)]
        jobs[name] = psutil.Popen(line, cwd=ROOT, stdout=subprocess.PIPE)
    for job, (_, strike, _) in zip(jobs.values(), STRIKES.values()):
        if strike:
            assert [job.stdout.readline() for _ in range(2)] == [b"has begun\n"] * 2
            everybody += job.children(recursive=True)
            [job, *job.children()][strike[1]].send_signal(strike[0])
    with pytest.raises(psutil.TimeoutExpired):
        jobs["a second Ctrl-C"].wait(2)
    jobs["a second Ctrl-C"].send_signal(signal.SIGINT)
    statuses = {name: job.wait(10) for name, job in jobs.items()}
    assert statuses == {name: status for name, (*_, status) in STRIKES.items()}
    assert not psutil.wait_procs(everybody, timeout=10)[1]


def test_a_torchrun_of_one_process_starts_the_drafters(monkeypatch):
    """Whose meeting place the store of that torchrun is not."""
    monkeypatch.setattr(os, "environ", {"TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": "0"})
    started, at_exit = [], []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    monkeypatch.setattr(subprocess, "Popen", lambda _: (
        started.append(dict(os.environ)), SimpleNamespace(wait=int, kill=int))[1])
    LAUNCH_DRAFTERS(2)
    ranks = [*started, os.environ]
    assert at_exit == [int] * 2, "they are killed at the end"
    assert [rank["RANK"] for rank in ranks] == [rank["LOCAL_RANK"] for rank in ranks] == [*"210"]
    for rank in ranks:
        assert rank["WORLD_SIZE"] == "3" and "TORCHELASTIC_USE_AGENT_STORE" not in rank


CPUS, SPREAD, NOWHERE = (0, 0), (3, 2_050_000), (3, 500_000)  # GPUs, free bytes of each
LINES = {"ar": ["--mode", "ar"], "greedy": ["--backup", "fast"],
         "drawn": ["--temperature", 1, "--seed", 3, "--downweight", 0.5],
         "drawn sd": ["--temperature", 1, "--seed", 3, "--mode", "sd"],
         "float32": ["--mode", "ar", "--dtype", "auto"]}  # wherever there is not a GPU for each
RUNS = {  # what so many ranks decode, on which machine
    1: [(CPUS, "ar"), (CPUS, "drawn sd"), (CPUS, "float32")],
    2: [*((CPUS, name) for name in LINES), ((1, 0), "greedy"), ((1, 0), "float32"),
        ((2, 0), "drawn"), (SPREAD, "drawn")],
    3: [(CPUS, "ar"), (CPUS, "drawn"), (CPUS, "drawn sd"), ((3, 0), "greedy"), ((3, 0), "drawn")]}


@slow
def test_the_text_is_the_same_in_every_mode_wherever_the_models_are(pair, tmp_path):
    """In one, two or three ranks, on CPUs and GPUs; with a target in one or two shards, or spread
    over two GPUs."""
    out, texts, hits = tmp_path / "out", {}, {}
    for ranks, runs in RUNS.items():
        first, *others = obey_in_ranks(ranks, [
            (machine, ["saguaro.py", *pair, *LINES[name], "--json", f"{out}{ranks}{number}"])
            for number, (machine, name) in enumerate(runs)])
        assert not any(said for other in others for _, said in other), "only rank 0 speaks"
        for number, (status, said) in enumerate(first):
            assert status == 0 and said.count("tokens with") == 1 and "eagerly" not in said, said
            shards = ranks - (runs[number][1] in ("greedy", "drawn"))
            assert (f"\n  {shards} ranks share the target\n" in said) == (shards > 1), said
            name, written = runs[number][1], read(Path(f"{out}{ranks}{number}"))
            for known, found in ((texts, written["outputs"]), (hits, written["stats"]["hit_rate"])):
                assert known.setdefault(name, found) == found, (ranks, *runs[number])
    assert texts["greedy"] == texts["ar"] != texts["drawn sd"]
    assert 0 < min(hits["greedy"], hits["drawn"]) and hits["drawn sd"] == 0


def lose_the_draft(commands: list[tuple]) -> list[tuple[int, str]]:
    """A rank's job: the draft goes away after 20 messages."""
    messages, broadcast = itertools.count(), dist.broadcast
    if os.environ["RANK"] == "1":
        dist.broadcast = lambda *given, **options: (
            broadcast(*given, **options) if next(messages) < 20 else sys.exit())
    return obey_in_rank(commands)


@slow
def test_two_ranks_complain_once_and_who_is_left_says_that_the_other_is_gone(pair):
    (wrong, full, left), (silent, alone, _) = obey_in_ranks(2, [
        (CPUS, ["saguaro.py", "--draft", "./nowhere"]), (NOWHERE, ["saguaro.py", *pair]),
        (CPUS, ["saguaro.py", *pair, "--max-new-tokens", 100])], lose_the_draft)
    assert "./nowhere" in the_error(wrong) and silent == (2, "")
    assert full[0] == 2 and "does not fit into the free memory of 2 GPUs" in full[1]
    assert alone == (1, "rank 1 (draft) stops: another rank is gone\n")
    assert left[0] == 1 and "rank 0 (target) stops: another rank is gone\n" in left[1]


@slow
def test_started_by_torchrun_or_python_it_writes_the_same_text_until_ctrl_c(torchrun, tmp_path):
    whole, folder = torchrun
    part, errors = start(tmp_path, "python", 480, sys.executable), tmp_path / "python.err"
    try:
        while part.poll() is None and not re.search(r"\d(token/s|s/token)", errors.read_text()):
            time.sleep(0.05)  # until tqdm's bar shows that it decodes
        ranks = [part, *part.children()]
        os.killpg(part.pid, signal.SIGINT)
        assert not psutil.wait_procs(ranks, timeout=15)[1]
        assert (whole.wait(200), part.wait()) == (0, 130), errors.read_text()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(part.pid, signal.SIGKILL)
    assert complaints(errors) == complaints(folder / "torchrun.err") == []
    files = folder / "torchrun", tmp_path / "python"
    said, written = zip(*((file.read_text(), read(Path(f"{file}.json"))) for file in files))
    assert f"{written[1]['stats']['tokens']} tokens with ssd" in said[1]
    for text, begun in zip(*(each["outputs"] for each in written), strict=True):
        assert text["prompt"] + text["text"] in said[0]
        assert begun["finish_reason"] == "interrupted" and begun["tokens"]
        assert all(ours == its for ours, its in zip(text["tokens"], begun["tokens"]))


# ---- who computes where ----

# GPUs, (mode, world, ranks here, rank, local rank); device, the target's GPUs, threads
PLACES = {
    "no GPU, second of two shards": (0, ("ssd", 3, 3, 1, 1), "cpu", [], 3),
    "no GPU, alone": (0, ("sd", 1, 1, 0, 0), "cpu", [], 8),
    "no GPU, two shards": (0, ("ar", 2, 2, 1, 1), "cpu", [], 4),
    "one GPU, target": (1, ("ssd", 2, 2, 0, 0), "cuda:0", [0], 7),
    "one GPU, draft": (1, ("ssd", 2, 2, 1, 1), "cpu", [0], 1),
    "five GPUs, two ranks": (5, ("ssd", 2, 2, 0, 0), "cuda:0", [0, 2, 3, 4], 7),
    "five GPUs, five ranks": (5, ("ssd", 5, 5, 3, 3), "cuda:3", [], 1),
    "two machines, a rank each": (8, ("ssd", 2, 1, 1, 0), "cuda:0", list(range(8)), 1)}


@pytest.mark.parametrize("place", PLACES)
def test_every_rank_finds_its_place(place, monkeypatch):
    """On devices that need not be there: it is a decision, not a run on them."""
    gpus, (mode, world, here, rank, local), *expected = PLACES[place]
    for name, value in (("WORLD_SIZE", world), ("LOCAL_WORLD_SIZE", here), ("RANK", rank),
                        ("LOCAL_RANK", local)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 16 if logical else 8)
    ranks = Ranks(Settings(mode=mode))
    assert [str(ranks.device), ranks.target_gpus, ranks.threads] == expected
    dtype = Run.dtype.fget(SimpleNamespace(settings=Settings(), ranks=ranks))
    assert dtype == (torch.float32 if "cpu" in expected else torch.bfloat16)
    assert str(Ranks(Settings(mode=mode, device="cpu")).device) == "cpu"


# ---- models that cannot be decoded here ----

def test_a_target_reads_no_token_as_another():
    with pytest.raises(IndexError):
        decoder(network(), mode="ar")([[40]])


WINDOWS = dict(num_hidden_layers=2, attention_types=[[["global", "local"], 1]])


@pytest.mark.parametrize("family, changes, sentence", (
    ("gpt_neo", WINDOWS, "gpt_neo models keep a causal mask of their own"),
    ("bert", {}, "this bert model is not causal")))
def test_a_mask_that_goes_by_slot_or_sees_later_tokens_is_refused(family, changes, sentence):
    with pytest.raises(UserError, match=sentence):
        CausalLM(network.__wrapped__(family, **changes))


@pytest.mark.parametrize("family, changes", (
    ("gpt_bigcode", {}), ("bert", dict(is_decoder=True)), ("mixtral", {})))
def test_a_mask_that_nobody_reads_and_a_causal_encoder_and_experts_are_not_refused(
        family, changes):
    CausalLM(network.__wrapped__(family, **changes).float())


LONGROPE = dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 4,
                long_factor=[1.0, 2.0, 4.0, 8.0], original_max_position_embeddings=16)
DYNAMIC = dict(rope_type="dynamic", rope_theta=1e4, factor=4.0, original_max_position_embeddings=16)
BY_TYPE = {"full_attention": LONGROPE, "sliding_attention": dict(rope_type="default")}


@pytest.mark.parametrize("family, ropes", (("phi3", LONGROPE), ("gemma3_text", BY_TYPE)))
def test_a_text_for_which_rotary_embeddings_would_change_is_refused(family, ropes):
    model = CausalLM(network.__wrapped__(family, rope_parameters=copy.deepcopy(ropes),
                                         original_max_position_embeddings=16))
    model.allocate(1, 16, 16)
    with pytest.raises(UserError, match="more than 16 tokens"):
        model.allocate(1, 17, 17)


def test_dynamic_rotary_embeddings_serve_up_to_the_context_limit():
    net = network.__wrapped__(rope_parameters=dict(DYNAMIC), num_hidden_layers=2)
    made = decoder(net, imitation(net, 0.1), max_new_tokens=63)
    assert made(RAGGED[1:2]) == [generated(net, tuple(RAGGED[1]), 63, ())]


# ---- CUDA graphs ----

class Tape(TorchDispatchMode):
    """Stands in for a CUDA graph: remembers the operations of a pass and the very tensors that they
    took and gave, and can do them again on these."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def pool(self):
        return None

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        given = operation(*arguments, **options or {})
        self.operations.append((operation, arguments, options or {}, given))
        return given

    def replay(self):
        with torch._C.DisableTorchFunction():  # faster
            for operation, arguments, options, given in self.operations:
                again = operation(*arguments, **options)
                for old, new in zip(tree_leaves(given), tree_leaves(again)):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)  # else: a view, or in place


STREAM = SimpleNamespace(wait_stream=lambda other: None)
GRAPHS = {"CUDAGraph": Tape, "graph": lambda tape, *_, **__: tape, "Stream": lambda: STREAM,
          "current_stream": lambda: STREAM, "stream": lambda _: nullcontext()}


@pytest.fixture
def tapes(monkeypatch):
    """All graphs recorded so far. With these stand-ins the code for GPUs runs on a CPU."""
    recorded = []
    for name, value in GRAPHS.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "graph", lambda tape, *_, **__: recorded.append(tape) or tape)
    monkeypatch.setattr(cuda_graphs, "BUCKET", 16)
    return recorded


def write(made: saguaro.Decoder, prompts: list[list[int]], count: int) -> list[list[int]]:
    made.settings.max_new_tokens = count
    return made(prompts)


@slow
def test_recorded_passes_write_the_same_text(tapes, monkeypatch):
    """In batches of other rows and in other buffers, for which recordings would be wrong; and in
    the same buffers for longer texts than those that were recorded."""
    replays, replay = [], cuda_graphs.Recording.replay
    monkeypatch.setattr(cuda_graphs.Recording, "replay",
                        lambda *arguments: replays.append(1) or replay(*arguments))
    net = network()
    eager, recording = (decoder(net, imitation(net, 0.15)) for _ in range(2))
    models = recording.target.model, recording.speculator.model
    for model in models:
        model.run = cuda_graphs.Recorder(model)
    longer = [([[7] * 30], 2), (RAGGED[:1], 18), (RAGGED[2:3], 18)]
    for prompts, count in longer + [(prompts, 18) for prompts in (RAGGED, *[RAGGED[:1]] * 4)]:
        recorded = len(tapes)
        assert write(recording, prompts, count) == write(eager, prompts, count)
    assert len(tapes) == recorded, "the last batch was decoded before: nothing is new"
    assert len(tapes) > 4 and len(replays) > 3 * len(tapes)
    assert all(isinstance(model.run, cuda_graphs.Recorder) for model in models)


def refuse(tape):
    raise RuntimeError("operation not permitted")


@pytest.mark.parametrize("replay, reason", (
    (refuse, "operation not permitted"),
    (lambda tape: None, "the recorded pass gives other logits"),  # nothing was recorded
    (lambda tape: tape.operations[-1][3].add_(1), "the recorded pass gives other logits")))
def test_what_cannot_be_recorded_runs_eagerly(replay, reason, tapes, monkeypatch, capsys):
    monkeypatch.setattr(Tape, "replay", replay)
    made = decoder(network(), mode="ar")
    made.target.model.run = cuda_graphs.Recorder(made.target.model)
    assert write(made, [[1, 2]], 20) == write(decoder(network(), mode="ar"), [[1, 2]], 20)
    assert made.target.model.run == made.target.model.eager
    assert capsys.readouterr().err.count(f"run eagerly: {reason}") == 1


# ---- a target that several ranks share ----

SHARDED = {"llama": {}, "qwen2": {}, "qwen3": dict(head_dim=8), "olmo2": {},
           "llama, tied": dict(tie_word_embeddings=True, attention_bias=True, mlp_bias=True)}
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]])


def logits_of_shards(folders: list[Path]) -> list[list]:
    """A rank's job: for every checkpoint the logits of TOKENS."""
    dist.init_process_group("gloo")
    results = []
    for folder in folders:
        config = AutoConfig.from_pretrained(folder)
        model = CausalLM(load_sharded(str(folder), config, torch.float64, "cpu", dist.group.WORLD))
        model.allocate(2, 8, 8)
        whole = AutoModelForCausalLM.from_config(config).num_parameters()
        assert model.network.num_parameters() < 0.8 * whole, "a share"
        results.append(model.causal(TOKENS, torch.zeros(2, dtype=torch.long)).tolist())
    return results


def uneven(net):
    """A copy whose biases are not 0 and whose norms are not 1."""
    net = copy.deepcopy(net)
    with torch.no_grad():
        for vector in filter(lambda weight: weight.ndim == 1, net.parameters()):
            vector += 0.3 * torch.randn_like(vector)
    return net


@slow
def test_half_a_target_each_gives_the_logits_of_the_whole(tmp_path):
    folders = [tmp_path / name for name in SHARDED]
    networks = [uneven(network(folder.name.split(",")[0], **dict(num_key_value_heads=2) | changes))
                for folder, changes in zip(folders, SHARDED.values())]
    for net, folder in zip(networks, folders):
        net.save_pretrained(folder, max_shard_size="20KB")  # several files
    for net, *both in zip(networks, *in_ranks(2, logits_of_shards, folders)):
        with torch.inference_mode():
            whole = net(TOKENS, use_cache=False).logits
        for logits in both:
            torch.testing.assert_close(torch.tensor(logits).double(), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family, changes, sentence", (
    ("gpt2", {}, "no plan for splitting its linear layers"),
    ("mixtral", {}, "other layers too (experts"),
    ("qwen3", dict(quantization_config=dict(quant_method="fp8")), "quantized"),
    ("llama", dict(num_key_value_heads=1), "must divide 1, its num_key_value_heads")))
def test_a_target_that_two_ranks_cannot_share_is_refused(
        family, changes, sentence, pair, tmp_path, monkeypatch):
    shutil.copytree(pair[1], tmp_path, dirs_exist_ok=True)
    shape = dict(vocab_size=2048, num_attention_heads=4, num_key_value_heads=2)
    AutoConfig.for_model(family, **shape | changes).save_pretrained(tmp_path)
    for world, flags, enough in ((2, "--mode ar", "one rank"), (2, "--mode sd", "one rank"),
                                 (3, "--mode ssd", "two ranks"), (4, "--drafters 2", "3 ranks")):
        monkeypatch.setenv("WORLD_SIZE", str(world))
        error = the_error(obey("saguaro.py", "--target", tmp_path, *flags.split()))
        assert sentence in error and ("divide" in error or error.endswith(f"; start {enough}\n"))


def test_a_checkpoint_that_lacks_a_weight_is_not_loaded_in_shares(tmp_path):
    weights = network().state_dict()
    del weights["model.layers.0.mlp.up_proj.weight"]
    network().save_pretrained(tmp_path, state_dict=weights)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        with pytest.raises(UserError, match="in shares: .* lack model.layers.0.mlp.up"):
            load_sharded(str(tmp_path), network().config, torch.float64, "cpu", dist.group.WORLD)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("changes", ({}, dict(tie_word_embeddings=True)), ids=str)
def test_a_larger_body_computes_the_same_function(changes):
    small = uneven(network(**changes))
    large = enlarge(small, hidden_size=96, num_hidden_layers=3, num_attention_heads=12,
                    num_key_value_heads=4, head_dim=24, intermediate_size=90)
    assert large.num_parameters() > 5 * small.num_parameters()
    tokens = torch.randint(40, (2, 30))
    with torch.inference_mode():  # the rotation is in float32
        torch.testing.assert_close(large(tokens).logits, small(tokens).logits, rtol=0, atol=1e-5)
    with pytest.raises(SystemExit, match="--source"):
        enlarge(large, hidden_size=48)


# ---- GPUs: real ones where there are enough, else a stand-in for them ----

CPU, Tensor = torch.device("cpu"), torch.Tensor
COPIES = {Tensor.copy_, Tensor.to, Tensor.cpu, torch.tensor, Tensor.__getitem__,  # by an index
          torch._has_compatible_shallow_copy_type}  # Module.to asks
READS = {Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.item,
         Tensor.tolist, Tensor.nonzero, torch.nonzero}


class OnGPU(Tensor):
    """Stands in for a tensor on a GPU: its numbers are in host memory, and computed there, but on
    a `Machine` it says that its device is another."""


class Machine(TorchFunctionMode):
    """As on a GPU, tensors of different devices cannot meet in one operation, and none can cross
    over while a graph is captured."""
    reads = 0  # how often the host has waited for numbers

    def __torch_function__(self, function, types, arguments=(), options=None):
        with torch._C.DisableTorchFunctionSubclass():
            if function == Tensor.device.__get__:
                return place(*arguments)
            return self.compute(function, arguments, options or {})

    def compute(self, function, arguments: tuple, options: dict):
        tensors = [leaf for leaf in tree_leaves((arguments, options)) if isinstance(leaf, Tensor)]
        # a number may meet tensors that are anywhere
        places = {place(part) for part in tensors if part.dim() or isinstance(part, OnGPU)}
        target = destination(function, arguments, options)
        if not target:
            first = [place(part) for part in tensors[:1] if function in COPIES]
            target = next(iter(first or places), CPU)
        if all(device.type != "cuda" for device in places | {target}):
            return function(*arguments, **options)
        crosses = function in COPIES and (places or {CPU}) != {target}
        if len(places) > 1 and not crosses:
            raise RuntimeError(f"{function}: tensors on {places}")
        Machine.reads += function in READS or crosses and target == CPU
        if (crosses or function in READS) and isinstance(_get_current_dispatch_mode(), Tape):
            raise RuntimeError("operation not permitted when stream is capturing")

        def at_target(tensor: Tensor) -> Tensor:
            if isinstance(tensor, OnGPU) and place(tensor) == target:
                return tensor  # changed in place
            tensor = tensor.clone() if crosses else tensor
            tensor = tensor.as_subclass(Tensor if target == CPU else OnGPU)
            tensor.gpu = target
            return tensor

        if function is Tensor.to:
            arguments = [CPU if type(given) in (str, int, torch.device) else given
                         for given in arguments]
        options = {name: CPU if name == "device" else given for name, given in options.items()}
        return tree_map_only(Tensor, at_target, function(*arguments, **options))


def place(tensor: Tensor) -> torch.device:
    return getattr(tensor, "gpu", None) or tensor.device


def destination(function, arguments: tuple, options: dict) -> torch.device | None:
    """Where the result is asked to be."""
    named = CPU if function is Tensor.cpu else options.get("device")
    if function is Tensor.to and len(arguments) > 1:
        named = arguments[1]
    if isinstance(named, Tensor):
        return place(named)
    if named is None or isinstance(named, torch.dtype):
        return None
    return torch.device(named)


def stand_in(free: int) -> None:
    """From now on this process, which will never again be what it was, has GPUs of so many free
    bytes each. gloo plays NCCL, and a tape a graph."""
    torch.cuda.mem_get_info = lambda _: (free, 2 ** 36)
    if torch.cuda.CUDAGraph is Tape:
        return
    current, new_gloo_group = [torch.device("cuda", 0)], dist.new_group

    def new_group(ranks, timeout, backend):
        assert timeout.days and (backend == "nccl") == (max(ranks) < torch.cuda.device_count())
        if backend == "nccl" and dist.get_rank() in ranks:  # it takes the current device
            assert current[0] == torch.device("cuda", dist.get_rank())
        return new_gloo_group(ranks)

    dist.new_group, place_parts = new_group, accelerate.infer_auto_device_map
    accelerate.infer_auto_device_map = lambda *arguments, **options: {  # a bare number is a GPU
        part: f"cuda:{gpu}" if isinstance(gpu, int) else gpu
        for part, gpu in place_parts(*arguments, **options).items()}
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # Module.to makes new ones
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # another thread is in no mode
    Machine().__enter__()
    for name, value in (GRAPHS | dict(
            is_available=lambda: True, synchronize=lambda *_: None,
            set_device=lambda device: current.__setitem__(0, device))).items():
        setattr(torch.cuda, name, value)


def reads() -> list[int]:
    """A rank's job: how often the host reads from a GPU in a verification, greedy and sampled."""
    stand_in(2 ** 36)
    found, net = [], copy.deepcopy(network()).to("cuda:0")
    for temperature, width in ((0, 0), (1, 40)):
        target, q = decoder(net, mode="ar", temperature=temperature).target, torch.ones(1, 3, width)
        target.advance(target.prefill(RAGGED[:1], 60, 3))
        before = Machine.reads
        target.verify(Speculation(torch.ones(1, 3, dtype=torch.long), q / 40, torch.zeros(1)))
        found.append(Machine.reads - before)
    return found


def test_the_host_waits_for_the_gpu_once_a_verification():
    assert in_ranks(1, reads) == [[1, 1]]


# ---- the benchmark ----

FIGURES = "timeline fan-out downweight batch budget".split()  # all of draw.py


def bench_in_rank(commands: list[tuple]) -> list[tuple[int, str]]:
    """A rank's job: few turns, and figures as small as they can be drawn."""
    every, bench.LEAST, bench.WARM_UP = bench.sweeps, 2, 1
    os.sched_getaffinity = lambda _: set(range(4))
    psutil.cpu_count = lambda logical=True: 4  # where both ranks have more than one core

    def reduced(name: str, row: bench.Sweep) -> bench.Sweep:
        kept = list(row.lines) if name == "greedy" else list(row.lines)[:2]
        lines = {line: {key: value[0] if isinstance(value, tuple) else value
                        for key, value in row.lines[line].items()} for line in kept}
        count = 2 if row.axis in ("mode", "budget") else 1
        return row._replace(values=row.values[:count], lines=lines)

    bench.sweeps = lambda s: {name: reduced(name, row) for name, row in every(s).items()}
    return obey_in_rank(commands)


@slow
def test_the_benchmark_compares_and_draws(pair, tmp_path):
    prompts, out = tmp_path / "prompts", tmp_path / "out.json"
    prompts.write_text('{"text": "def f(x):"}\n{"text": "class A:"}')
    chosen = ["bench.py", *pair[:6], "--quick", "--prompts", prompts, "--lookahead", 2,
              "--budget", 4]
    compared, drawn = obey_in_ranks(2, [
        (CPUS, [*chosen, "--out", out]),
        (CPUS, [*chosen, "--sweep", *FIGURES, "--figures", tmp_path])], bench_in_rank)[0]
    assert compared[0] == drawn[0] == 0, compared[1] + drawn[1]
    names = {"AR", "SD", "SSD", "generate", "assisted"}
    shown = [(result["sweep"], result["name"]) for result in read(out)["results"]]
    assert len(set(shown)) == len(shown), "of each the fastest alone"
    assert names < {name for _, name in shown}
    assert all(re.search(rf"^ *{name} ", compared[1], re.MULTILINE) for name in names)
    figures = {file.stem: file.read_text("utf-8") for file in tmp_path.glob("*.svg")}
    assert figures.keys() == set(FIGURES) and all("</svg>" in file for file in figures.values())


def test_every_sweep_tries_what_makes_sense():
    s = parse(bench.BenchSettings, [])
    for name in bench.SWEEPS:
        for *_, changes in bench.settings_to_try(bench.sweeps(s)[name]):
            replace(s, **changes).check()


def test_the_benchmark_predicts_by_theorem_7():
    status, said = obey("bench.py", "--predict")
    large = next(row for row in said.splitlines() if "70B / 1B" in row)
    assert status == 0 and "161.8" in large and "255.8" in large  # as measured in the paper
