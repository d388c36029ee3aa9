"""Tests of the machine room: the command and its processes, who computes where, CUDA graphs,
tensor parallelism, the benchmark. Of the algorithm speaks test_equivalence.py.

Processes cost seconds, most of them for importing PyTorch. So commands are obeyed in this process
(`obey`), or in ranks forked from one that has done the imports (`in_ranks`); the few fresh
interpreters, started as a user starts them, run in the background (`LAUNCHES`).
"""
import copy
import errno
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
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, redirect_stderr, redirect_stdout, suppress
from dataclasses import fields
from io import StringIO
from multiprocessing import forkserver
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
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations import accelerate

import bench
import saguaro
from cache import PRIMARY
from runtime import command, cuda_graphs, settings
from runtime.command import Display, Ranks, Run, Stats, encode, open_model
from runtime.model import CausalLM
from runtime.settings import ROOT, TINY, Settings, UserError, begin, parse, read_json_lines
from runtime.tensor_parallel import load_sharded
from test_equivalence import RAGGED, decoder, forks, imitation, in_ranks, network
from tiny.enlarge import enlarge

slow = pytest.mark.slow
LAUNCH_DRAFTERS = settings.launch_drafters  # which no test but one is to call
GPUS = torch.cuda.device_count()
PROGRAMS = {"saguaro.py": (Settings, saguaro.generate),
            "bench.py": (bench.BenchSettings, bench.work)}


# ---- helpers ----

@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    """A command that is obeyed in this process leaves its threads and Ctrl-C as they are."""
    for owner, name, value in (
            (torch, "set_num_threads", lambda count: None), (torch.cuda, "device_count", lambda: 0),
            (settings, "heed_ctrl_c", lambda: None), (sys, "argv", sys.argv),
            (settings, "launch_drafters", lambda count: None)):
        monkeypatch.setattr(owner, name, value)


def obey(program: str, *words) -> tuple[int, str]:
    """`python saguaro.py ...` in this process: exit status, and what it said."""
    (kind, work), said, status = PROGRAMS[program], StringIO(), 0
    sys.argv = [program, *map(str, words)]
    try:
        with redirect_stdout(said), redirect_stderr(said):
            command.run(begin(kind), work)
    except SystemExit as stopped:
        status = stopped.code
    return status, said.getvalue()


def obey_in_ranks(count: int, lines: list[list], *machine, job=None) -> list[list[tuple]]:
    """What `obey` returns in each of `count` ranks, command by command, until one fails."""
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in lines]
    ports = [store.port for store in stores]  # where the ranks of each command meet
    return in_ranks(count, job or obey_in_rank, list(zip(ports, lines)), *machine)


def obey_in_rank(lines: list[tuple], gpus: int = 0, free: int = 0) -> list[tuple[int, str]]:
    """A rank's job, on a machine of so many GPUs (of so many `free` bytes)."""
    results = []
    if gpus > GPUS or free:
        stand_in(free)
    torch.cuda.device_count, torch.set_num_threads = lambda: gpus, lambda count: None
    for port, line in lines:
        os.environ["MASTER_PORT"] = str(port)
        results.append(obey(*line))
        if results[-1][0]:
            break
    return results


def decode_in_ranks(count: int, lines: dict[str, list], folder: Path, *machine) -> dict[str, dict]:
    """What `count` ranks write to --json, line by line."""
    commands = [["saguaro.py", *line, "--json", folder / name] for name, line in lines.items()]
    first, *others = obey_in_ranks(count, commands, *machine)
    for (status, said), *silent in zip(first, *others, strict=True):
        assert status == 0 and said.count("tokens with") == 1 and "eagerly" not in said, said
        assert not any(said for _, said in silent), "only rank 0 speaks"
    return {name: read(folder / name) for name in lines}


def read(file: Path) -> dict:
    return json.loads(file.read_text("utf-8"))


def the_error(result: tuple[int, str]) -> str:
    """The sentence to which a failure amounts."""
    status, said = result
    assert status == 2 and said.count("\n") == 1 and said.startswith("saguaro.py: error: "), said
    return said


def uneven(net):
    """A copy whose biases are not 0 and whose norms are not 1."""
    net = copy.deepcopy(net)
    with torch.no_grad():
        for vector in filter(lambda weight: weight.ndim == 1, net.parameters()):
            vector += 0.3 * torch.randn_like(vector)
    return net


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

NUMBERS = ("lookahead 0", "budget -1", "temperature -1", "temperature nan", "top-k -1", "top-p 0",
           "top-p 1.5", "downweight 1.1", "downweight -0.1", "acceptance-rate 2", "miss-exponent 0",
           "max-new-tokens 0", "batch-size 0", "seed -1")
NO_FILE, NO_MODEL = "not a file in an existing folder", "neither a folder with a model"
WRONG = {f"--{wrong}": "--" + wrong.replace(" ", " is ") for wrong in NUMBERS} | {
    "--lookahead two": "--lookahead: invalid int value: 'two'",
    "--lookahead 600": "--lookahead 600: no text has room",
    "--lookahead 512 --max-new-tokens 512": "the target's context is 512",
    "--budget 10236": "10235 outcomes are all there are with K = 4",
    "--fan-out 4,3,2,1": "nor 5 numbers", "--fan-out 4,3,2,1,-2": "nor 5 numbers",
    "--fan-out square": "--fan-out square: neither geometric nor uniform",
    "--mode fast": "invalid choice: 'fast'", "--backup slow": "invalid choice: 'slow'",
    "--device cuda": "--device cuda: PyTorch sees no CUDA device",
    "--frobnicate": "unrecognized arguments: --frobnicate",
    "--prompt": "expected at least one argument", "--prompt ''": "prompt 1 of 1 is empty",
    "--prompt a --prompts FILE": "exclude each other",
    "--prompts ''": "--prompts '': ", "--prompts nowhere.jsonl": ": No such file",
    "--prompts /dev/null": "not a file that every rank can read",
    "--drafters 2 --mode sd": "only ssd has work for more than one",
    "--drafters 2 --fan-out 3,2,1,1,2": "2 drafters cannot share its sum evenly",
    "--prompts FOLDER": "not a file that every rank can read", "--prompts EMPTY": "holds no prompt",
    "--prompts TORN": "line 2: not a JSON object",
    "--prompts FIELDLESS": "line 1: not a JSON object",
    "--prompts NUMBER": "line 1: not a JSON object", "--prompts LATIN1": "codec can't decode",
    "--prompts SURROGATE": "prompt 1 of 1 holds half a character",
    "--prompts BLANK": "prompt 2 of 2 is empty", "--prompts LONG": "context is 512",
    "--json ''": NO_FILE, "--json nowhere/out.json": NO_FILE, "--json FOLDER": NO_FILE,
    "--json /dev/full": NO_FILE, "--json /proc/out.json": "--json /proc/out.json: ",
    "--target ./nowhere": "--target ./nowhere: no such folder",
    "--draft ./nowhere": "--draft ./nowhere: no such folder",
    "--target no-such/model": f"no-such/model: {NO_MODEL}", "--target FOLDER": NO_MODEL,
    "--draft RENAMED": "different vocabularies", "--target BART": "cannot be decoded here",
    "--target T5": "cannot be decoded here", "--target CORRUPT --mode ar": "cannot load",
    "--apply-chat-template": "has no chat template"}


@pytest.fixture(scope="module")
def wrong_inputs(tmp_path_factory) -> dict[str, str]:
    """What the words in capitals in WRONG stand for."""
    folder = tmp_path_factory.mktemp("wrong")
    (folder / "FOLDER").mkdir()
    for name, text in {
            "FILE": '{"text": "a"}', "EMPTY": "\n", "TORN": '{"text": "a"}\n{"text": "b',
            "FIELDLESS": '{"words": "a"}', "NUMBER": "1", "SURROGATE": r'{"text": "a\ud800"}',
            "BLANK": '{"text": "a"}\n{"text": ""}',
            "LONG": json.dumps({"text": "if x :\n" * 2000})}.items():
        (folder / name).write_text(text, "utf-8")
    (folder / "LATIN1").write_bytes('{"text": "é"}'.encode("latin-1"))
    for name in ("RENAMED", "BART", "T5", "CORRUPT"):
        shutil.copytree(TINY / "draft", folder / name)
    (folder / "CORRUPT" / "model.safetensors").write_bytes(b"\x08" + bytes(100))
    for family in ("bart", "t5"):
        AutoConfig.for_model(family, vocab_size=2048).save_pretrained(folder / family.upper())
    for file in (folder / "RENAMED").glob("tokenizer*.json"):
        file.write_text(file.read_text("utf-8").replace("endoftext", "unheard-of"), "utf-8")
    return {path.name: str(path) for path in folder.iterdir()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("arguments", WRONG)
def test_a_wrong_invocation_gets_one_sentence_and_exit_status_2(arguments, wrong_inputs):
    words = [wrong_inputs.get(word, word) for word in shlex.split(arguments)]
    assert WRONG[arguments] in the_error(obey("saguaro.py", *words))


def test_the_largest_budget_and_lookahead_that_make_sense_are_taken():
    for line in ("--budget 10235", "--lookahead 511 --max-new-tokens 511"):
        Run(parse(Settings, line.split()), ["a"])


def test_prompt_files_are_split_at_newlines_only_and_may_begin_with_a_byte_order_mark(tmp_path):
    texts = ["a\u2028b", "c\x85d\x0be", "f\ng"]
    lines = "\r\n".join(json.dumps({name: text}, ensure_ascii=False)
                        for name, text in zip(settings.PROMPT_FIELDS, texts))
    (tmp_path / "prompts").write_text(f"\ufeff{lines}\n\n", "utf-8", newline="")
    assert read_json_lines(str(tmp_path / "prompts")) == texts


def test_help_names_every_option_its_default_and_its_group(capsys):
    with pytest.raises(SystemExit) as stopped:
        parse(Settings, ["--help"])
    said, options = capsys.readouterr().out, [f.metadata for f in vars(Settings)[
        "__dataclass_fields__"].values()]
    assert not stopped.value.code and said.count("(default:") == len(options)
    for name in ["text", "sampling", "machine", *(f"section 4.{part}," for part in (1, 2, 3))]:
        assert re.search(rf"^{name}", said, re.MULTILINE)


def test_the_command_line_needs_no_torch():
    """So --help and a wrong flag are answered at once."""
    light = "import sys, runtime.settings; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", light], cwd=ROOT).returncode == 0


def test_a_chat_template_makes_each_prompt_a_user_turn():
    tokenizer = open_model("--target", str(TINY / "target"))[1]
    tokenizer.chat_template = ("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
                               "{% if add_generation_prompt %}<assistant>{% endif %}")
    prompts = encode(tokenizer, ["Why?", "How?"], chat=True, context=512)
    assert tokenizer.batch_decode(prompts) == ["<user>Why?<assistant>", "<user>How?<assistant>"]


CONFIG = set("""prompt prompts target draft mode max_new_tokens batch_size temperature top_k top_p
             seed ignore_eos apply_chat_template lookahead budget fan_out acceptance_rate
             miss_exponent downweight backup no_early_outcome dtype device eager json
             no_public_noise drafters""".split())
STATS = set("""tokens seconds tokens_per_second rounds tokens_per_round acceptance_rate hit_rate
            E_hit E_miss verifier_utilisation T_p T_b prefill_seconds""".split())
LEARNT = set("""acceptance_rate_primary acceptance_rate_backup miss_exponent bonus_ranks fan_out
             fan_out_after_backup downweight backup critical_batch_size""".split())
OUTPUT = {"prompt", "text", "tokens", "finish_reason"}


@pytest.mark.parametrize("mode", ("ar", "sd"))
def test_the_json_file_holds_what_it_always_held(mode, pair, tmp_path):
    assert obey("saguaro.py", *pair, "--mode", mode, "--json", tmp_path / "out")[0] == 0
    config, outputs, stats = read(tmp_path / "out").values()
    assert config.keys() == CONFIG
    assert stats.keys() == STATS | (LEARNT if mode == "sd" else set())
    assert all(output.keys() == OUTPUT for output in outputs)
    assert [output["prompt"] for output in outputs] == ["def f(x):", "class A:", "x"]
    assert stats["tokens"] == 36 and {output["finish_reason"] for output in outputs} == {"length"}
    assert 0 < stats["verifier_utilisation"] <= 1 and stats["tokens_per_second"] > 0


CONTROLS, SHOWN = "a\x1b[2J\x07\x9b\r\tb\n", "a\\x1b[2J\\x07\\x9b\\r\tb\n"


def test_control_characters_are_shown_and_not_obeyed(pair, capsys, tmp_path):
    line = [*pair, "--mode", "ar", "--prompt", CONTROLS, "--json", tmp_path / "out"]
    status, said = obey("saguaro.py", *line)
    assert status == 0 and said.startswith(SHOWN) and not set(said) & set("\x1b\x07\x9b\r")
    assert read(tmp_path / "out")["outputs"][0]["prompt"] == CONTROLS
    display = Display(Run(parse(Settings, ["--mode", "ar"]), ["x"]))
    display.show(0, display.tokenizer(CONTROLS)["input_ids"], PRIMARY)  # and in what is streamed
    assert capsys.readouterr().out == f"x{SHOWN}"


def test_half_a_character_waits_for_the_other_half_until_the_text_ends(capsys):
    display = Display(Run(parse(Settings, ["--mode", "ar"]), ["x"]))
    owl = display.tokenizer("🦉")["input_ids"]
    for new, shown in ((owl[:-1], "x"), (owl[-1:], "🦉"), (owl[:-1], "")):
        display.show(0, new, PRIMARY)
        assert capsys.readouterr().out == shown
    display.finish(Stats().summary())
    assert capsys.readouterr().out.startswith("\ufffd\n")


def test_a_json_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    def fill_the_disk(path, *_, **__):
        path.write_bytes(b"{")
        raise OSError(errno.ENOSPC, "No space left on device")

    out, same = tmp_path / "out", tmp_path / "same"
    out.write_text("old")
    same.hardlink_to(out)
    with monkeypatch.context() as full:
        full.setattr(Path, "write_text", fill_the_disk)
        with pytest.raises(UserError, match="No space left"):
            settings.write_json("--json", str(out), {})
    assert sorted(tmp_path.iterdir()) == [out, same] and out.read_text() == "old"
    settings.write_json("--json", str(out), {})
    assert same.read_text() == "old", "the file must be another one, not the old one overwritten"


def test_another_seed_gives_another_text(pair, tmp_path):
    line = ["saguaro.py", *pair, "--mode", "sd", "--temperature", 1, "--json", tmp_path / "out"]
    first, same, other = (obey(*line, "--seed", seed) and read(tmp_path / "out")["outputs"]
                          for seed in (3, 3, 4))
    assert first == same != other


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


# ---- processes ----

BEGIN = """\
import signal, sys, time
from runtime.settings import Settings, begin, decoding
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(2))
begin(Settings)
print("has begun", flush=True)
time.sleep(100)"""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
STRIKES = {  # what befalls two ranks that only begin: how started, signal, whom; exit status
    "the draft is killed": ([sys.executable], signal.SIGKILL, 1, 1),
    "the draft is ended": ([sys.executable], signal.SIGTERM, 1, 1),
    "the target is killed": ([sys.executable], signal.SIGKILL, 0, -signal.SIGKILL),
    "Ctrl-C": ([sys.executable], signal.SIGINT, 0, 130),
    "the draft complains": ([sys.executable], signal.SIGUSR1, 1, 2),
    "torchrun is killed": ([*TORCHRUN, "2"], signal.SIGKILL, 0, -signal.SIGKILL)}


@slow
def test_no_rank_outlives_the_other_nor_its_launcher(tmp_path):
    """Without a model, so that it takes no time."""
    (tmp_path / "begin.py").write_text(BEGIN)
    jobs = [psutil.Popen([*start, tmp_path / "begin.py"], stdout=subprocess.PIPE,
                         env=os.environ | {"PYTHONPATH": str(ROOT)})
            for start, *_ in STRIKES.values()]
    everybody = []
    for job, (_, number, whom, _) in zip(jobs, STRIKES.values()):
        assert [job.stdout.readline() for _ in range(2)] == [b"has begun\n"] * 2
        everybody += job.children(recursive=True)
        [job, *job.children()][whom].send_signal(number)
    assert [job.wait(10) for job in jobs] == [status for *_, status in STRIKES.values()]
    assert not psutil.wait_procs(everybody, timeout=10)[1]


def test_a_torchrun_of_one_process_starts_the_drafters(monkeypatch):
    """Whose meeting place the store of that torchrun is not."""
    monkeypatch.setattr(os, "environ", {"TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": "0"})
    started = []
    monkeypatch.setattr(subprocess, "Popen", lambda _: (
        started.append(dict(os.environ)), SimpleNamespace(wait=int, kill=int))[1])
    LAUNCH_DRAFTERS(2)
    ranks = [*started, os.environ]
    assert [rank["RANK"] for rank in ranks] == [rank["LOCAL_RANK"] for rank in ranks] == [*"210"]
    for rank in ranks:
        assert rank["WORLD_SIZE"] == "3" and "TORCHELASTIC_USE_AGENT_STORE" not in rank


@slow
def test_a_second_ctrl_c_ends_what_the_first_could_not(tmp_path):
    (tmp_path / "begin.py").write_text(BEGIN.replace("print", "decoding.set()\nprint"))
    job = psutil.Popen([sys.executable, tmp_path / "begin.py"], stdout=subprocess.PIPE,
                       env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert [job.stdout.readline() for _ in range(2)] == [b"has begun\n"] * 2
    draft, = job.children()
    draft.suspend()
    job.send_signal(signal.SIGINT)
    with pytest.raises(psutil.TimeoutExpired):
        job.wait(2)
    job.send_signal(signal.SIGINT)
    assert job.wait(10) == 130
    draft.resume()
    assert not psutil.wait_procs([draft], timeout=10)[1]


LINES = {"ar": ["--mode", "ar"], "greedy": ["--backup", "fast"],
         "drawn": ["--temperature", 1, "--seed", 3, "--downweight", 0.5],
         "drawn sd": ["--temperature", 1, "--seed", 3, "--mode", "sd"]}


@pytest.fixture(scope="module")
def in_two_ranks(pair, tmp_path_factory) -> dict[str, dict]:
    lines = {name: [*pair, *line] for name, line in LINES.items()}
    return decode_in_ranks(2, lines, tmp_path_factory.mktemp("two"))


@slow
def test_the_text_does_not_depend_on_the_mode_nor_on_the_number_of_ranks(
        pair, in_two_ranks, tmp_path):
    """With a target in one, two or three shards."""
    for count, names in ((1, ("ar", "drawn sd")), (3, LINES)):
        (tmp_path / str(count)).mkdir()
        lines = {name: [*pair, *LINES[name]] for name in names}
        for name, found in decode_in_ranks(count, lines, tmp_path / str(count)).items():
            expected = in_two_ranks[name]
            assert found["outputs"] == expected["outputs"]
            assert found["stats"]["hit_rate"] == expected["stats"]["hit_rate"]
    texts = {name: written["outputs"] for name, written in in_two_ranks.items()}
    assert texts["greedy"] == texts["ar"] != texts["drawn sd"]
    hits = {name: written["stats"]["hit_rate"] for name, written in in_two_ranks.items()}
    assert 0 < min(hits["greedy"], hits["drawn"]) and hits["drawn sd"] == 0


PYTHON = [sys.executable, str(ROOT / "saguaro.py")]
SHORT = ["--prompt", "def f(x):", "class A:", "import", "--batch-size", "2", "--max-new-tokens",
         "24", "--temperature", "1", "--downweight", "0.5", "--seed", "3"]
LONG = ["--prompts", str(TINY / "prompts.jsonl"), "--batch-size", "2", "--max-new-tokens", "400",
        "--ignore-eos"]


def lose_a_rank(lost: int) -> tuple[int, str] | None:
    """A rank's job: decode, and in the rank `lost` die by the way."""
    if os.environ["RANK"] != str(lost):
        return obey("saguaro.py", *LONG)
    if os.fork():  # another process is this rank, so that this one can answer
        os.wait()
        return None
    messages, broadcast = itertools.count(), dist.broadcast
    dist.broadcast = lambda *arguments: (broadcast(*arguments) if next(messages) < 20 else
                                         os.kill(os.getpid(), signal.SIGKILL))
    return obey("saguaro.py", *LONG)


@slow
@pytest.mark.parametrize("lost, survivor", ((0, "rank 1 (draft)"), (1, "rank 0 (target)")))
def test_who_is_left_says_that_another_rank_is_gone(lost, survivor):
    status, said = in_ranks(2, lose_a_rank, lost)[1 - lost]
    assert status == 1 and "Traceback" not in said
    assert f"{survivor} stops: another rank is gone" in said


@slow
def test_two_ranks_complain_once():
    line = ["saguaro.py", "--draft", "./nowhere"]
    (first,), (second,) = obey_in_ranks(2, [line])
    assert "./nowhere" in the_error(first) and second == (2, "")


LAUNCHES = {
    "torchrun": [*TORCHRUN, "2", PYTHON[1], *SHORT],
    "python": [*PYTHON, *SHORT],
    "Ctrl-C": [*PYTHON, *LONG],
    "/dev/full": [*PYTHON, "--mode", "ar"],
    "| head -1": ["bash", "-c", f'set -o pipefail; {shlex.join(PYTHON)} "$@" | head -1', "saguaro"]}


def launch(name: str, folder: Path) -> SimpleNamespace:
    """Its exit status and all that it wrote. Ctrl-C comes when it decodes."""
    err, out = folder / "err", Path(name) if name == "/dev/full" else folder / "out"
    with open(err, "w") as err_file, open(out, "w") as out_file:
        job = psutil.Popen(["nice", *LAUNCHES[name], "--json", folder / "json"], stdout=out_file,
                           stderr=err_file, env=os.environ | {"OMP_NUM_THREADS": "1"},
                           start_new_session=True)
    try:
        if name == "Ctrl-C":
            while job.poll() is None and not re.search(r"\d(token/s|s/token)", err.read_text()):
                time.sleep(0.05)  # until tqdm's bar shows that it decodes
            ranks = [job, *job.children()]
            os.killpg(job.pid, signal.SIGINT)
            assert not psutil.wait_procs(ranks, timeout=15)[1]
        return SimpleNamespace(status=job.wait(200), err=err.read_text(), json=folder / "json",
                               out=out.read_text() if out.is_file() else "")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)


@pytest.fixture(scope="module", autouse=True)
def launched(request, tmp_path_factory):
    """The launches run beside all other tests, two at a time. They are `nice`; who waits for them
    is not, since it shares Python's lock with the tests."""
    forks()
    forkserver.ensure_running()
    wanted = any("launched" in item.name for item in request.session.items)
    with ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(launch, name, tmp_path_factory.mktemp("launch"))
               for name in LAUNCHES if wanted}


@slow
def test_launched_by_torchrun_or_python_it_writes_the_same_text(launched):
    launches = [launched[name].result() for name in ("torchrun", "python")]
    assert all(each.status == 0 for each in launches), [each.err for each in launches]
    first, *others = (read(each.json) for each in launches)
    assert 0 < first["stats"]["hit_rate"] < 1
    for other in others:
        assert other["outputs"] == first["outputs"]
        for name in ("hit_rate", "rounds", "acceptance_rate", "tokens"):
            assert other["stats"][name] == first["stats"][name]
    for output in first["outputs"]:
        assert all(output["prompt"] + output["text"] in each.out for each in launches)


@slow
def test_launched_and_interrupted_it_shows_what_there_is(launched):
    job = launched["Ctrl-C"].result()
    assert job.status == 130 and "Traceback" not in job.err and "gone" not in job.err
    written = read(job.json)["outputs"]
    assert [output["finish_reason"] for output in written] == ["interrupted"] * 2
    assert f"{sum(len(output['tokens']) for output in written)} tokens with ssd" in job.out


@slow
@pytest.mark.parametrize("name, status", (("/dev/full", 1), ("| head -1", 141)))
def test_launched_for_a_reader_who_goes_away_it_ends_quietly(name, status, launched):
    job, prompt = launched[name].result(), read_json_lines(str(TINY / "prompts.jsonl"))[0]
    assert job.status == status and "Traceback" not in job.err and len(job.err) < 150
    assert job.out == ("" if name == "/dev/full" else prompt.split("\n")[0] + "\n")


# ---- who computes where ----

# GPUs, (mode, world, ranks here, rank, local rank); device, wire's, the target's GPUs, threads
PLACES = {
    "no GPU, target": (0, ("ssd", 2, 2, 0, 0), "cpu", "cpu", [], 7),
    "no GPU, draft": (0, ("ssd", 2, 2, 1, 1), "cpu", "cpu", [], 1),
    "no GPU, second of two shards": (0, ("ssd", 3, 3, 1, 1), "cpu", "cpu", [], 3),
    "no GPU, alone": (0, ("sd", 1, 1, 0, 0), "cpu", "cpu", [], 8),
    "no GPU, two shards": (0, ("ar", 2, 2, 1, 1), "cpu", "cpu", [], 4),
    "one GPU, target": (1, ("ssd", 2, 2, 0, 0), "cuda:0", "cpu", [0], 7),
    "one GPU, draft": (1, ("ssd", 2, 2, 1, 1), "cpu", "cpu", [0], 1),
    "two GPUs, draft": (2, ("ssd", 2, 2, 1, 1), "cuda:1", "cuda:1", [0], 1),
    "two GPUs, three ranks": (2, ("ssd", 3, 3, 0, 0), "cuda:0", "cpu", [], 3),
    "five GPUs, two ranks": (5, ("ssd", 2, 2, 0, 0), "cuda:0", "cuda:0", [0, 2, 3, 4], 7),
    "five GPUs, five ranks": (5, ("ssd", 5, 5, 3, 3), "cuda:3", "cuda:3", [], 1),
    "two machines, a rank each": (8, ("ssd", 2, 1, 1, 0), "cuda:0", "cuda:0", list(range(8)), 1)}


@pytest.mark.parametrize("place", PLACES)
def test_every_rank_finds_its_place(place, monkeypatch):
    """On devices that need not be there: it is a decision, not a run on them."""
    gpus, (mode, world, here, rank, local), device, wire, target_gpus, threads = PLACES[place]
    for name, value in (("WORLD_SIZE", world), ("LOCAL_WORLD_SIZE", here), ("RANK", rank),
                        ("LOCAL_RANK", local)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    ranks = Ranks(Settings(mode=mode))
    found = str(ranks.device), str(ranks.wire_device), ranks.target_gpus, ranks.threads
    assert found == (device, wire, target_gpus, threads)
    dtype = Run.dtype.fget(SimpleNamespace(settings=Settings(), ranks=ranks))
    assert dtype == (torch.float32 if device == "cpu" else torch.bfloat16)
    last = rank == world - 1
    assert (ranks.drafts, ranks.holds_target) == ((last, not last) if mode == "ssd" else
                                                  (mode == "sd", True))
    assert str(Ranks(Settings(mode=mode, device="cpu")).device) == "cpu"


# ---- CUDA graphs ----

class Tape(TorchDispatchMode):
    """Stands in for a CUDA graph: remembers the operations of a pass and the very tensors that they
    took and gave, and can do them again on these."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        given = operation(*arguments, **options or {})
        self.operations.append((operation, arguments, options or {}, given))
        return given

    def replay(self):
        for operation, arguments, options, given in self.operations:
            for old, new in zip(tree_leaves(given), tree_leaves(operation(*arguments, **options))):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)  # else: a view, or in place


STREAM = SimpleNamespace(wait_stream=lambda other: None)
GRAPHS = {"CUDAGraph": Tape, "graph": lambda tape, **_: tape, "Stream": lambda: STREAM,
          "current_stream": lambda: STREAM, "stream": lambda _: nullcontext()}


@pytest.fixture
def tapes(monkeypatch):
    """All graphs recorded so far. With these stand-ins the code for GPUs runs on a CPU."""
    recorded = []
    for name, value in GRAPHS.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "graph", lambda tape, **_: recorded.append(tape) or tape)
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


def logits_of_shards(folders: list[Path]) -> list[tuple[list, float]]:
    """For every checkpoint the logits of TOKENS, and the share of its matrices that is here."""
    dist.init_process_group("gloo")
    results = []
    for folder in folders:
        config = AutoConfig.from_pretrained(folder)
        model = CausalLM(load_sharded(str(folder), config, torch.float64, "cpu", dist.group.WORLD))
        model.allocate(2, 8, 8)
        held, whole = (sum(weight.numel() for weight in net.model.layers.parameters()
                           if weight.ndim == 2)
                       for net in (model.network, AutoModelForCausalLM.from_config(config)))
        logits = model.causal(TOKENS, torch.zeros(2, dtype=torch.long))
        results.append((logits.tolist(), held / whole))
    return results


def test_half_a_target_each_gives_the_logits_of_the_whole(tmp_path):
    folders = [tmp_path / name for name in SHARDED]
    networks = [uneven(network(folder.name.split(",")[0], **dict(num_key_value_heads=2) | changes))
                for folder, changes in zip(folders, SHARDED.values())]
    for net, folder in zip(networks, folders):
        net.save_pretrained(folder, max_shard_size="20KB")  # several files
    for net, *both in zip(networks, *in_ranks(2, logits_of_shards, folders)):
        with torch.inference_mode():
            whole = net(TOKENS, use_cache=False).logits
        for logits, held in both:
            torch.testing.assert_close(torch.tensor(logits).double(), whole, rtol=1e-5, atol=1e-5)
            whole_attention = net.config.model_type == "olmo2"
            assert 0.5 < held < 0.8 if whole_attention else held == 0.5


UNSHARABLE = {
    "gpt2": ({}, "no plan for splitting its linear layers"),
    "phi3": (dict(pad_token_id=None), "no plan for splitting its linear layers"),
    "mixtral": ({}, "other layers too (experts"),
    "llama": (dict(num_key_value_heads=1), "must divide 1, its num_key_value_heads"),
    "mistral": (dict(intermediate_size=45, sliding_window=None),
                "divide 45, its intermediate_size"),
    "qwen3": (dict(quantization_config=dict(quant_method="fp8")), "quantized")}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", UNSHARABLE)
def test_a_target_that_two_ranks_cannot_share_is_refused(family, tmp_path, monkeypatch):
    changes, sentence = UNSHARABLE[family]
    shape = dict(vocab_size=2048, num_attention_heads=4, num_key_value_heads=2,
                 max_position_embeddings=512)
    AutoConfig.for_model(family, **shape | changes).save_pretrained(tmp_path)
    for file in TINY.glob("target/tokenizer*"):
        shutil.copy(file, tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert sentence in the_error(obey("saguaro.py", "--target", tmp_path))


def test_a_checkpoint_that_lacks_a_weight_is_not_loaded_in_shares(tmp_path):
    net = network()
    some = {name: weight for name, weight in net.state_dict().items()
            if "layers.0.mlp.up_proj" not in name}
    net.save_pretrained(tmp_path / "torn", state_dict=some)
    net.config.save_pretrained(tmp_path / "empty")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        for name, reason in (("torn", "lack model.layers.0.mlp.up"), ("empty", "No such file")):
            with pytest.raises(UserError, match=f"{name} in shares: .*{reason}"):
                load_sharded(str(tmp_path / name), net.config, torch.float64, "cpu",
                             dist.group.WORLD)
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
COPIES = {Tensor.copy_, Tensor.to, Tensor.cpu, torch.tensor,
          torch._has_compatible_shallow_copy_type}  # Module.to asks
INDEXING = {Tensor.__getitem__, Tensor.__setitem__}
WAITS = {Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.item,
         Tensor.tolist, Tensor.nonzero, torch.nonzero}


class OnGPU(Tensor):
    """Stands in for a tensor on a GPU: its numbers are in host memory, and computed there, but it
    says that its device is another. As on a GPU, tensors of different devices cannot meet in one
    operation, and none can cross over while a graph is captured."""
    crossings: list[str] = []  # when the host waits: until something is "in" the GPU, or "out"

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        with torch._C.DisableTorchFunctionSubclass():
            if function == Tensor.device.__get__:
                return place(*arguments)
            if function == Tensor.is_cuda.__get__:
                return place(*arguments).type == "cuda"
            return cls.compute(function, arguments, options or {})

    @classmethod
    def compute(cls, function, arguments: tuple, options: dict):
        tensors = [leaf for leaf in tree_leaves((arguments, options)) if isinstance(leaf, Tensor)]
        places = {place(part) for part in tensors if part.dim() or isinstance(part, cls)}
        target = destination(function, arguments, options)
        if not target:  # a number may meet tensors that are anywhere
            first = tensors[:1] if function in COPIES | INDEXING else []
            target = next(iter([place(part) for part in first] or places), CPU)
        if all(device.type != "cuda" for device in places | {target}):
            return function(*arguments, **options)
        values = {place(part) for part in arguments[2:] if isinstance(part, Tensor) and part.dim()}
        indexes = function in INDEXING and target != CPU and values <= {target}
        if len(places) > 1 and function not in COPIES and not indexes:
            raise RuntimeError(f"{function}: tensors on {places}")
        crosses = function in COPIES | INDEXING and (places or {CPU}) != {target}
        cls.watch(function, tensors, target, crosses,
                  options.get("non_blocking") or function is Tensor.copy_ and len(arguments) > 2)

        def at_target(tensor: Tensor) -> Tensor:
            if isinstance(tensor, cls) and place(tensor) == target:
                return tensor  # changed in place
            tensor = tensor.clone() if crosses else tensor
            tensor = tensor.as_subclass(Tensor if target == CPU else cls)
            tensor.gpu = target
            return tensor

        if function is Tensor.to:
            arguments = [CPU if type(given) in (str, int, torch.device) else given
                         for given in arguments]
        options = {name: CPU if name == "device" else given for name, given in options.items()}
        return tree_map_only(Tensor, at_target, function(*arguments, **options))

    @classmethod
    def watch(cls, function, tensors: list[Tensor], target, crosses: bool, queued: bool) -> None:
        """Does the host wait?"""
        masked = function in INDEXING and any(
            part.dtype is torch.bool and isinstance(part, cls) for part in tensors[1:])
        if function in WAITS or masked or crosses and target == CPU:
            cls.crossings.append("out")
        elif crosses and not queued:
            cls.crossings.append("in")
        if (crosses or function in WAITS) and isinstance(_get_current_dispatch_mode(), Tape):
            raise RuntimeError("operation not permitted when stream is capturing")


class Machine(TorchFunctionMode):
    """New tensors, too, can be on a GPU."""

    def __torch_function__(self, function, types, arguments=(), options=None):
        return OnGPU.__torch_function__(function, types, arguments, options)


def place(tensor: Tensor) -> torch.device:
    return getattr(tensor, "gpu", None) or tensor.device


def destination(function, arguments: tuple, options: dict) -> torch.device | None:
    """Where the result is asked to be; "cuda" is the first GPU."""
    named = CPU if function is Tensor.cpu else options.get("device")
    if function is Tensor.to and len(arguments) > 1:
        named = arguments[1]
    if isinstance(named, Tensor):
        return place(named)
    if named is None or isinstance(named, torch.dtype):
        return None
    device = torch.device("cuda", named) if isinstance(named, int) else torch.device(named)
    return torch.device("cuda", 0) if device == torch.device("cuda") else device


def stand_in(free: int) -> None:
    """From now on this process, which will never again be what it was, has GPUs of so many free
    bytes each. gloo plays NCCL, and a tape a graph."""
    current, init_gloo = [torch.device("cuda", 0)], dist.init_process_group

    def init_process_group(backend, timeout, device_id):
        assert (backend, device_id) == (("cpu:gloo,cuda:nccl", current[0]) if device_id else
                                        ("gloo", None))
        init_gloo("gloo")

    dist.init_process_group, place_parts = init_process_group, accelerate.infer_auto_device_map
    accelerate.infer_auto_device_map = lambda *arguments, **options: {  # a bare number is a GPU
        part: f"cuda:{gpu}" if isinstance(gpu, int) else gpu
        for part, gpu in place_parts(*arguments, **options).items()}
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # Module.to makes new ones
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # another thread is in no mode
    Machine().__enter__()
    for name, value in (GRAPHS | dict(
            is_available=lambda: True, synchronize=lambda *_: None,
            set_device=lambda device: current.__setitem__(0, device),
            mem_get_info=lambda _: (free, 2 ** 36))).items():
        setattr(torch.cuda, name, value)


MACHINES = {  # GPUs, ranks, free bytes of each GPU
    "one GPU": (1, 2, 2 ** 36), "two GPUs": (2, 2, 2 ** 36), "a shared target": (3, 3, 2 ** 36),
    "a target on two GPUs": (3, 2, 2_050_000), "a target that fits nowhere": (3, 2, 500_000)}


@slow
@pytest.mark.parametrize("machine", MACHINES)
def test_the_text_is_the_same_wherever_the_models_are(machine, pair, in_two_ranks, tmp_path):
    gpus, ranks, free = MACHINES[machine]
    lines = {name: [*pair, *LINES[name]] for name in ("greedy", "drawn")}
    if "nowhere" in machine:
        (refused,), _ = obey_in_ranks(ranks, [["saguaro.py", *pair]], gpus, free)
        assert refused[0] == 2 and "does not fit into the free memory of 2 GPUs" in refused[1]
        return
    for name, found in decode_in_ranks(ranks, lines, tmp_path, gpus, free).items():
        assert found["outputs"] == in_two_ranks[name]["outputs"]
        assert found["stats"]["hit_rate"] == in_two_ranks[name]["stats"]["hit_rate"]


def crossings() -> list[list[str]]:
    """A rank's job: when the host waits for the GPU in 12 rounds, greedy and sampled, of
    pre-speculation, of a reply after a hit, of one after a miss, and of a verification."""
    stand_in(2 ** 36)
    forward, net, found = CausalLM.forward, network(), [set() for _ in range(4)]
    CausalLM.forward = lambda *arguments: OnGPU.crossings.append("pass") or forward(*arguments)
    on_gpu = [copy.deepcopy(each).to("cuda") for each in (net, imitation(net, 0.15))]

    def meanwhile(work, *arguments):
        OnGPU.crossings.clear()
        return work(*arguments), " ".join(OnGPU.crossings)

    for temperature in (0, 1):
        made = decoder(*on_gpu, mode="sd", temperature=temperature)
        made.speculator.start(RAGGED[:1], 60)
        outcome = made.target.prefill(RAGGED[:1], 60, 3)
        for _ in range(12):
            made.target.advance(outcome)
            _, prepared = meanwhile(made.speculator.pre_speculate)
            speculation, reply = meanwhile(made.speculator.speculate, outcome)
            outcome, verified = meanwhile(made.target.verify, speculation)
            for kind, said in ((0, prepared), (1 + int(speculation.source), reply), (3, verified)):
                found[kind].add(said)
    return [sorted(each) for each in found]


@slow
def test_the_host_waits_for_the_gpu_once_a_verification():
    """And never while there is work that it could queue: not between a pass and its verdict, not
    between the passes of a tree or a backup."""
    prepared, after_hit, after_miss, verified = in_ranks(1, crossings)[0]
    for found, expected in (
            (prepared, "(in |out )*pass (in |out )+pass pass pass"), (after_hit, "(out )?in in"),
            (after_miss, "out (in )+pass pass pass( in)?"), (verified, "(in )+pass out")):
        assert found and all(re.fullmatch(expected, said) for said in found), found


# ---- the benchmark ----

def bench_in_rank(lines: list[tuple]) -> list[tuple[int, str]]:
    """A rank's job: few turns, and figures as small as they can be drawn."""
    every, bench.LEAST, bench.WARM_UP = bench.sweeps, 2, 1

    def reduced(name: str, row: bench.Sweep) -> bench.Sweep:
        kept = {"greedy": row.lines, "sampled": ("SSD, plain", "generate")}.get(
            name, list(row.lines)[:2])
        lines = {line: {key: value[0] if isinstance(value, tuple) else value
                        for key, value in row.lines[line].items()} for line in kept}
        count = 2 if row.axis in ("mode", "budget") else 1
        return row._replace(values=row.values[:count], lines=lines)

    bench.sweeps = lambda s: {name: reduced(name, row) for name, row in every(s).items()}
    return obey_in_rank(lines)


@slow
def test_the_benchmark_compares_and_draws(pair, tmp_path):
    prompts, out = tmp_path / "prompts", tmp_path / "out.json"
    prompts.write_text('{"text": "def f(x):"}\n{"text": "class A:"}')
    chosen = ["bench.py", *pair[:6], "--quick", "--prompts", prompts, "--lookahead", 2,
              "--budget", 4]
    compared, drawn = obey_in_ranks(2, [
        [*chosen, "--out", out], [*chosen, "--sweep", "all", "--figures", tmp_path]],
        job=bench_in_rank)[0]
    assert compared[0] == drawn[0] == 0, compared[1] + drawn[1]
    names = {"AR", "SD", "SSD", "generate", "assisted"}
    assert names < {result["name"] for result in read(out)["results"]}
    assert all(re.search(rf"^ *{name} ", compared[1], re.MULTILINE) for name in names)
    figures = {file.stem: file.read_text("utf-8") for file in tmp_path.glob("*.svg")}
    assert figures.keys() == set(bench.SWEEPS)
    assert all("</svg>" in figure for figure in figures.values())


def test_the_benchmark_predicts_by_theorem_7():
    status, said = obey("bench.py", "--predict")
    large = next(row for row in said.splitlines() if "70B / 1B" in row)
    assert status == 0 and "161.8" in large and "255.8" in large  # as measured in the paper
