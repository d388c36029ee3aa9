"""Tests of the machine room: the command and its processes, who computes where, CUDA graphs,
tensor parallelism, the benchmark. Of the algorithm speaks test_equivalence.py.

Processes cost seconds, most of them for importing PyTorch. So most tests stay in this one; ranks
are forked from a process that has done the imports (`in_ranks`); and the few fresh interpreters,
started as a user starts them, run in the background (`LAUNCHES`).
"""
import copy
import errno
import inspect
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, redirect_stderr, redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here is to be downloaded

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations import accelerate

import bench
import saguaro
from runtime import command, cuda_graphs, settings
from runtime.command import Display, Ranks, Run, encode, open_model
from runtime.model import CausalLM
from runtime.settings import ROOT, TINY, Settings, UserError, begin, parse, read_json_lines
from runtime.tensor_parallel import load_sharded
from test_equivalence import RAGGED, decoder, forks, imitation, in_ranks, network
from tiny.enlarge import enlarge

slow = pytest.mark.slow
GPUS = torch.cuda.device_count()


# ---- helpers ----

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
        vocab_size=2048, max_position_embeddings=128, num_hidden_layers=2, hidden_size=48,
        num_attention_heads=6, num_key_value_heads=6)
    for name, net in (("target", target), ("draft", imitation(target, 0.15))):
        net.save_pretrained(folder / name)
        for file in (TINY / name).glob("tokenizer*.json"):
            (folder / name / file.name).write_bytes(file.read_bytes())
    return ["--target", folder / "target", "--draft", folder / "draft", "--dtype", "float64",
            "--prompt", "def f(x):", "class A:", "x", "--batch-size", 2, "--max-new-tokens", 12]


def saguaro_here(monkeypatch, *arguments) -> None:
    """`python saguaro.py ...` in this process, whose threads and Ctrl-C stay as they are."""
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(settings, "launch_drafters", lambda count: None)
    monkeypatch.setattr(sys, "argv", ["saguaro.py", *map(str, arguments)])
    command.run(begin(Settings), saguaro.generate)


def launch_in_ranks(count: int, lines: list[list], folder: Path, gpus: int = 0,
                    free: int = 0) -> list:
    """`saguaro.py` with one line of arguments after the other in `count` ranks, on a machine of so
    many GPUs (of so many `free` bytes). What each rank has of each line: exit status, what was
    written to --json (rank 0), and what it said."""
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in lines]
    ports = [store.port for store in stores]
    return in_ranks(count, be_launched, list(zip(lines, ports)), folder, gpus, free)


def be_launched(lines: list[tuple], folder: Path, gpus: int, free: int) -> list[tuple]:
    results, sys.argv = [], ["saguaro.py"]
    if gpus > GPUS or free:
        stand_in(gpus, free)
    torch.cuda.device_count, torch.set_num_threads = lambda: gpus, lambda count: None
    every, bench.LEAST, bench.WARM_UP = bench.sweeps, 2, 1
    bench.sweeps = lambda s: {name: reduced(row) for name, row in every(s).items()}
    for line, port in lines:
        os.environ["MASTER_PORT"] = str(port)
        file, said, status = folder / f"{port}.json", StringIO(), 0
        try:
            with redirect_stdout(said), redirect_stderr(said):
                if line[0] == "bench.py":
                    command.run(parse(bench.BenchSettings, [*map(str, line[1:])]), bench.work)
                else:
                    s = parse(Settings, [*map(str, line), "--json", str(file)])
                    command.run(s, saguaro.generate)
        except SystemExit as stopped:
            status = stopped.code
        leads = os.environ["RANK"] == "0" and file.exists()
        written = json.loads(file.read_text("utf-8")) if leads else None
        results.append((status, written, said.getvalue()))
        if status:
            break
    return results


def reduced(row: bench.Sweep) -> bench.Sweep:
    """As small as it can be drawn."""
    first = {name: {key: value[0] if isinstance(value, tuple) else value
                    for key, value in changes.items()} for name, changes in row.lines.items()}
    return row._replace(values=row.values[:2 if row.axis == "mode" else 1],
                        lines=first if row.panels == () else dict(list(first.items())[:2]))


def wait_for(condition, seconds: float = 200) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


# ---- the command ----

NUMBERS = ("lookahead 0", "budget -1", "temperature -1", "temperature nan", "top-k -1", "top-p 0",
           "top-p 1.5", "downweight 1.1", "downweight -0.1", "acceptance-rate 2", "miss-exponent 0",
           "max-new-tokens 0", "batch-size 0", "seed -1")
WRONG = {f"--{wrong}": "--" + wrong.replace(" ", " is ") for wrong in NUMBERS} | {
    "--lookahead two": "--lookahead: invalid int value: 'two'",
    "--lookahead 600": "--lookahead 600: no text has room",
    "--budget 10236": "10235 outcomes are all there are with K = 4",
    "--fan-out 4,3,2,1": "nor 5 numbers",
    "--fan-out 4,3,2,1,-2": "nor 5 numbers",
    "--fan-out square": "--fan-out square: neither geometric nor uniform",
    "--mode fast": "invalid choice: 'fast'",
    "--backup slow": "invalid choice: 'slow'",
    "--device cuda": "--device cuda: PyTorch sees no CUDA device",
    "--frobnicate": "unrecognized arguments: --frobnicate",
    "--prompt": "expected at least one argument",
    "--prompt a --prompts FILE": "exclude each other",
    "--prompt ''": "prompt 1 of 1 is empty",
    "--prompts ''": "--prompts '': ",
    "--prompts nowhere.jsonl": ": No such file",
    "--prompts FOLDER": "Is a directory",
    "--prompts EMPTY": "holds no prompt",
    "--prompts TORN": "line 2: not a JSON object",
    "--prompts FIELDLESS": "line 1: not a JSON object",
    "--prompts NUMBER": "line 1: not a JSON object",
    "--prompts LATIN1": "codec can't decode",
    "--prompts SURROGATE": "prompt 1 of 1 holds half a character",
    "--prompts BLANK": "prompt 2 of 2 is empty",
    "--prompts LONG": "context is 512",
    "--json ''": ": not a file in an existing folder",
    "--json nowhere/out.json": "not a file in an existing folder",
    "--json FOLDER": "not a file in an existing folder",
    "--json /dev/full": "not a file in an existing folder",
    "--json READONLY/out.json": "READONLY/out.json: ",
    "--target ./nowhere": "--target ./nowhere: no such folder",
    "--draft ./nowhere": "--draft ./nowhere: no such folder",
    "--target no-such/model": "--target no-such/model: neither a folder",
    "--target FOLDER": "neither a folder with a model",
    "--draft RENAMED": "different vocabularies",
    "--target BART": "cannot be decoded here",
    "--target T5": "cannot be decoded here",
    "--target CORRUPT --mode ar": "cannot load",
    "--apply-chat-template": "has no chat template",
}


@pytest.fixture(scope="module")
def wrong_inputs(tmp_path_factory) -> dict[str, str]:
    """What the words in capitals in WRONG stand for."""
    folder = tmp_path_factory.mktemp("wrong")
    texts = {"FILE": '{"text": "a"}', "EMPTY": "\n", "TORN": '{"text": "a"}\n{"text": "b',
             "FIELDLESS": '{"words": "a"}', "NUMBER": "1", "SURROGATE": r'{"text": "a\ud800"}',
             "BLANK": '{"text": "a"}\n{"text": ""}',
             "LONG": json.dumps({"text": "if x :\n" * 2000})}
    for name, text in texts.items():
        (folder / name).write_text(text, "utf-8")
    (folder / "LATIN1").write_bytes('{"text": "é"}'.encode("latin-1"))
    for name in ("FOLDER", "READONLY", "RENAMED", "BART", "T5", "CORRUPT"):
        (folder / name).mkdir()
        for file in TINY.glob("draft/*.json"):  # all that are models have the pair's tokenizer
            if name not in ("FOLDER", "READONLY"):
                (folder / name / file.name).write_bytes(file.read_bytes())
    vocabulary = json.loads((folder / "RENAMED" / "tokenizer.json").read_text("utf-8"))
    names = vocabulary["model"]["vocab"]
    names["unheard-of"] = names.pop(list(names)[-1])
    vocabulary["model"]["merges"] = [merge for merge in vocabulary["model"]["merges"]
                                     if "".join(merge) in names]
    (folder / "RENAMED" / "tokenizer.json").write_text(json.dumps(vocabulary), "utf-8")
    for family in ("bart", "t5"):
        AutoConfig.for_model(family, vocab_size=2048).save_pretrained(folder / family.upper())
    (folder / "CORRUPT" / "model.safetensors").write_bytes(b"\x08" + bytes(100))
    if os.geteuid():
        (folder / "READONLY").chmod(0o500)
    else:  # root may write to every folder but those of the kernel
        (folder / "READONLY").rmdir()
        (folder / "READONLY").symlink_to("/proc")
    return {path.name: str(path) for path in folder.iterdir()}


def one_error(capsys, stopped) -> str:
    """The sentence to which standard error and exit status 2 amount."""
    lines = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2 and len(lines) == 1
    assert lines[0].startswith("saguaro.py: error: ")
    return lines[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("arguments", WRONG)
def test_a_wrong_invocation_gets_one_sentence_and_exit_status_2(
        arguments, wrong_inputs, monkeypatch, capsys):
    words = [re.sub("^[A-Z15]{2,}", lambda name: wrong_inputs[name[0]], word)
             for word in shlex.split(arguments)]
    with pytest.raises(SystemExit) as stopped:
        saguaro_here(monkeypatch, *words)
    assert WRONG[arguments] in one_error(capsys, stopped)


def test_the_largest_budget_that_makes_sense_is_taken():
    Run(parse(Settings, ["--budget", "10235", "--mode", "sd"]), ["a"])


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
def test_the_json_file_holds_what_it_always_held(mode, pair, monkeypatch, tmp_path):
    saguaro_here(monkeypatch, *pair, "--mode", mode, "--json", tmp_path / "out")
    written = json.loads((tmp_path / "out").read_text("utf-8"))
    outputs, stats = written["outputs"], written["stats"]
    assert set(written) == {"config", "outputs", "stats"} and set(written["config"]) == CONFIG
    assert set(stats) == STATS | (LEARNT if mode == "sd" else set())
    assert [set(output) for output in outputs] == [OUTPUT] * 3
    assert [output["prompt"] for output in outputs] == ["def f(x):", "class A:", "x"]
    assert stats["tokens"] == 36 and {output["finish_reason"] for output in outputs} == {"length"}
    assert 0 < stats["verifier_utilisation"] <= 1 and stats["tokens_per_second"] > 0


def test_control_characters_are_shown_and_not_obeyed(pair, monkeypatch, capsys, tmp_path):
    text = "a\x1b[2J\x07\x9b\r\tb\n"
    saguaro_here(monkeypatch, *pair, "--mode", "ar", "--prompt", text, "--json", tmp_path / "out")
    said = capsys.readouterr().out
    assert said.startswith("a\\x1b[2J\\x07\\x9b\\r\tb\n") and not set(said) & set("\x1b\x07\x9b\r")
    assert json.loads((tmp_path / "out").read_text("utf-8"))["outputs"][0]["prompt"] == text
    display = object.__new__(Display)  # and in what is streamed
    display.tokens, display.shown, display.colours = [], "", True
    display.tokenizer = SimpleNamespace(decode=lambda *_, **__: text)
    display.stream([1], Display.CACHE)
    assert capsys.readouterr().out == f"{Display.CACHE}a\\x1b[2J\\x07\\x9b\\r\tb\n{Display.PLAIN}"


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


def test_another_seed_gives_another_text(pair, monkeypatch, tmp_path):
    texts = []
    for seed in (3, 3, 4):
        saguaro_here(monkeypatch, *pair, "--mode", "sd", "--temperature", 1, "--seed", seed,
                     "--json", tmp_path / "out")
        texts.append(json.loads((tmp_path / "out").read_text("utf-8"))["outputs"])
    assert texts[0] == texts[1] != texts[2]


def test_too_little_memory_is_said_in_one_sentence(monkeypatch, capsys):
    def refuse(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 ...")

    monkeypatch.setattr(CausalLM, "eager", refuse)
    with pytest.raises(SystemExit) as stopped:
        saguaro_here(monkeypatch, "--mode", "ar")
    assert "rank 0 (target) lacks memory" in one_error(capsys, stopped)


# ---- processes ----

LIGHT = {  # what befalls a job of `begin` alone: how, to whose rank; the exit status of rank 0
    "the draft is killed": (signal.SIGKILL, 1, 1),
    "the draft is ended": (signal.SIGTERM, 1, 1),
    "the target is killed": (signal.SIGKILL, 0, -signal.SIGKILL),
    "Ctrl-C": (signal.SIGINT, 0, 130),
    "the draft complains": (signal.SIGUSR1, 1, 2)}


def test_neither_rank_outlives_the_other(tmp_path):
    """Without a model, so that it takes no time."""
    script = tmp_path / "light.py"
    script.write_text("import signal, sys, time\nfrom runtime.settings import Settings, begin\n"
                      "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(2))\n"
                      "begin(Settings)\ntime.sleep(100)")
    jobs = [subprocess.Popen([sys.executable, script], env=os.environ | {"PYTHONPATH": str(ROOT)})
            for _ in LIGHT]
    processes = [psutil.Process(job.pid) for job in jobs]
    wait_for(lambda: all(process.children() for process in processes))
    children = [process.children()[0] for process in processes]
    time.sleep(1)  # they have begun
    for (number, rank, _), *ranks in zip(LIGHT.values(), processes, children):
        ranks[rank].send_signal(number)
    for job, (_, _, status) in zip(jobs, LIGHT.values()):
        assert job.wait(10) == status
    assert not psutil.wait_procs(children, timeout=10)[1]


@slow
def test_the_text_does_not_depend_on_the_mode_nor_on_the_number_of_ranks(pair, tmp_path):
    """With a target in one, two or three shards."""
    warm = ["--temperature", 1, "--seed", 3]
    each = {"ar": ["--mode", "ar"], "drawn sd": [*warm, "--mode", "sd"], "sd": ["--mode", "sd"],
            "ssd": [], "drawn ssd": [*warm, "--downweight", 0.5, "--backup", "fast"],
            "budget 0": ["--budget", 0], "drawn, budget 0": [*warm, "--budget", 0]}
    texts, hits = {}, {}
    for count, names in ((1, list(each)[:2]), (2, list(each)), (3, list(each)[:5])):
        lines = [[*pair, *each[name]] for name in names]
        first, *others = launch_in_ranks(count, lines, tmp_path)
        assert not any(said for other in others for _, _, said in other), "only rank 0 speaks"
        for name, (status, written, said) in zip(names, first):
            assert status == 0 and said.count("tokens with") == 1, said
            texts[name, count], hits[name, count] = written["outputs"], written["stats"]["hit_rate"]
    for (name, count), text in texts.items():
        assert text == texts[name, 2] and hits[name, count] == hits[name, 2]
        assert text == texts["ar", 1] or "drawn" in name
    assert texts["drawn sd", 1] == texts["drawn, budget 0", 2] != texts["ar", 1]
    assert hits["sd", 2] == hits["budget 0", 2] == 0 < min(hits["ssd", 2], hits["drawn ssd", 2])


def decode_and_tell(rank: int, port: int, said: Path) -> None:
    """A rank of two, decoding for long."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost",
                   "MASTER_PORT": str(port)}
    sys.stdout = sys.stderr = open(said, "w", buffering=1, encoding="utf-8")
    command.run(parse(Settings, LONG), saguaro.generate)


@slow
@pytest.mark.parametrize("killed, survivor", ((0, "rank 1 (draft)"), (1, "rank 0 (target)")))
def test_who_is_left_says_that_another_rank_is_gone(killed, survivor, tmp_path):
    port = dist.TCPStore("localhost", 0, is_master=True).port  # free again at once
    said = [tmp_path / "0", tmp_path / "1"]
    ranks = [forks().Process(target=decode_and_tell, args=(rank, port, said[rank]))
             for rank in (0, 1)]
    try:
        for rank in ranks:
            rank.start()
        wait_for(lambda: said[0].exists() and DECODES.search(said[0].read_text()))
        (ranks[killed].kill if killed else ranks[killed].terminate)()
        ranks[1 - killed].join(10)
        last = said[1 - killed].read_text()
        assert ranks[1 - killed].exitcode == 1 and "Traceback" not in last
        assert f"{survivor} stops: another rank is gone" in last
    finally:
        for rank in ranks:
            rank.kill()


def test_two_ranks_complain_once(tmp_path):
    each = launch_in_ranks(2, [["--draft", "./nowhere"]], tmp_path)
    (status, _, said), (other_status, _, nothing) = (results[0] for results in each)
    assert status == other_status == 2 and said.count("error:") == 1 and not nothing


PYTHON = [sys.executable, str(ROOT / "saguaro.py")]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            PYTHON[1]]
SHORT = ["--prompt", "def f(x):", "class A:", "import", "--batch-size", "2", "--max-new-tokens",
         "24", "--temperature", "1", "--downweight", "0.5", "--seed", "3"]
LONG = ["--prompts", str(TINY / "prompts.jsonl"), "--batch-size", "2", "--max-new-tokens", "400",
        "--ignore-eos"]
DECODES = re.compile(r"\d(token/s|s/token)")  # of tqdm's bar


class Launch:
    """A command, started as a user starts it, and what became of it."""

    def __init__(self, folder: Path, line: list[str], strike=None, out: str = "out"):
        """`strike(job)` comes when it decodes."""
        said, self.json = [folder / name for name in ("err", out)], folder / "json"
        with open(said[0], "w") as err, open(said[1], "w") as out:
            job = subprocess.Popen(
                [*line, "--json", self.json], stdout=out, stderr=err, cwd=folder,
                env=os.environ | {"OMP_NUM_THREADS": "1"}, start_new_session=True)
        try:
            if strike:
                wait_for(lambda: DECODES.search(said[0].read_text()))
                ranks = psutil.Process(job.pid).children(recursive=True)
                started = time.monotonic()
                strike(job)
            self.status = job.wait(200)
            if strike:
                psutil.wait_procs(ranks, timeout=60)
                self.seconds = time.monotonic() - started
            self.err, self.out = (file.read_text() if file.is_file() else "" for file in said)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)


LAUNCHES = {
    "torchrun": lambda folder: Launch(folder, [*TORCHRUN, *SHORT]),
    "python": lambda folder: Launch(folder, [*PYTHON, *SHORT]),
    "Ctrl-C": lambda folder: Launch(folder, [*PYTHON, *LONG],
                                    lambda job: os.killpg(job.pid, signal.SIGINT)),
    "torchrun is killed": lambda folder: Launch(folder, [*TORCHRUN, *LONG], lambda job: job.kill()),
    "/dev/full": lambda folder: Launch(folder, [*PYTHON, "--mode", "ar"], out="/dev/full"),
    "| head -1": lambda folder: Launch(folder, [
        "bash", "-c", f'set -o pipefail; {shlex.join(PYTHON)} "$@" | head -1', "saguaro"])}


@pytest.fixture(scope="module", autouse=True)
def launched(request, tmp_path_factory):
    """The launches run beside all other tests, two at a time, politely."""
    wanted = any("launched" in inspect.signature(item.function).parameters
                 for item in request.session.items
                 if getattr(item, "module", None) is request.module)  # a doctest has none
    with ThreadPoolExecutor(2, initializer=os.nice, initargs=(10,)) as pool:  # of threads, on Linux
        yield {name: pool.submit(launch, tmp_path_factory.mktemp("launch"))
               for name, launch in LAUNCHES.items() if wanted}


@slow
def test_torchrun_and_python_write_the_same_text(launched):
    first, second = (launched[name].result() for name in ("torchrun", "python"))
    assert first.status == second.status == 0, first.err + second.err
    texts, others = (json.loads(launch.json.read_text("utf-8")) for launch in (first, second))
    assert texts["outputs"] == others["outputs"] and 0 < texts["stats"]["hit_rate"] < 1
    for name in ("hit_rate", "rounds", "acceptance_rate", "tokens"):
        assert texts["stats"][name] == others["stats"][name]
    assert all(output["prompt"] + output["text"] in first.out for output in texts["outputs"])


@slow
def test_ctrl_c_ends_decoding_and_shows_what_there_is(launched):
    launch = launched["Ctrl-C"].result()
    assert launch.status == 130 and "Traceback" not in launch.err and "gone" not in launch.err
    written = json.loads(launch.json.read_text("utf-8"))["outputs"]
    assert [output["finish_reason"] for output in written] == ["interrupted"] * 2
    assert f"{sum(len(output['tokens']) for output in written)} tokens with ssd" in launch.out
    assert launch.seconds < 15


@slow
def test_the_ranks_do_not_outlive_torchrun(launched):
    launch = launched["torchrun is killed"].result()
    assert launch.status == -signal.SIGKILL and launch.seconds < 15


@slow
@pytest.mark.parametrize("name, status", (("/dev/full", 1), ("| head -1", 141)))
def test_a_reader_who_goes_away_ends_the_job_quietly(name, status, launched):
    launch = launched[name].result()
    assert launch.status == status and "Traceback" not in launch.err and len(launch.err) < 150
    prompt = read_json_lines(str(TINY / "prompts.jsonl"))[0]
    assert launch.out == ("" if name == "/dev/full" else prompt.split("\n")[0] + "\n")


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
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
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
        if OnGPU in types:
            return NotImplemented  # what it does in host memory comes by again
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


@pytest.mark.parametrize("mode", ("ar", "ssd"))
def test_recorded_passes_write_the_same_text(mode, tapes, monkeypatch):
    """In batches of other rows and in other buffers, for which recordings would be wrong; and in
    the same buffers for longer texts than those that were recorded."""
    replays, replay = [], cuda_graphs.Recording.replay
    monkeypatch.setattr(cuda_graphs.Recording, "replay",
                        lambda *arguments: replays.append(1) or replay(*arguments))
    net = network()
    eager, recording = (decoder(net, imitation(net, 0.15), mode) for _ in range(2))
    models = {id(worker.model): worker.model for worker in (recording.target, recording.speculator)
              if hasattr(worker, "model")}.values()
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


def test_neither_long_passes_nor_those_on_a_CPU_are_recorded(tapes):
    model = CausalLM(network(max_position_embeddings=128))
    cuda_graphs.record_passes(model)
    assert model.run == model.eager
    model.run = cuda_graphs.Recorder(model)
    model.allocate(1, 100, 100)
    for count, recorded in ((65, 0), (64, 1)):
        for _ in range(5):
            model.causal(torch.ones(1, count, dtype=torch.long), torch.tensor([0]))
        assert len(tapes) == recorded


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
def test_a_target_that_two_ranks_cannot_share_is_refused(family, tmp_path, monkeypatch, capsys):
    changes, sentence = UNSHARABLE[family]
    shape = dict(vocab_size=2048, num_attention_heads=4, num_key_value_heads=2,
                 max_position_embeddings=512)
    AutoConfig.for_model(family, **shape | changes).save_pretrained(tmp_path)
    for file in TINY.glob("target/tokenizer*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(SystemExit) as stopped:
        saguaro_here(monkeypatch, "--target", tmp_path)
    assert sentence in one_error(capsys, stopped)


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

class OnGPU(torch.Tensor):
    """Stands in for a tensor on a GPU: all of PyTorch takes it for one, but its numbers are in
    host memory, in `host`. As on a GPU, tensors of different devices cannot meet in one operation,
    and none can cross over while a graph is captured."""
    aten = torch.ops.aten
    COPIES = {torch.Tensor.copy_, aten.copy_.default, aten._to_copy.default}
    INDEXING = {torch.Tensor.__getitem__, torch.Tensor.__setitem__, aten.index.Tensor,
                aten.index_put_.default}
    WAITS = {torch.Tensor.__bool__, torch.Tensor.__int__, torch.Tensor.__float__,
             torch.Tensor.__index__, torch.Tensor.nonzero, aten.nonzero.default,
             aten._local_scalar_dense.default}
    EARLY = (COPIES | INDEXING | WAITS | {  # they ask CUDA something before they dispatch
        torch.Tensor.__invert__, torch.Tensor.contiguous, torch.Tensor.unfold, torch.Tensor.detach,
        torch.nn.functional.scaled_dot_product_attention})
    crossings: list[str] = []  # when the host waits: until something is "in" the GPU, or "out"

    @staticmethod
    def __new__(cls, host: torch.Tensor, device: torch.device):
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, host.shape, strides=host.stride(), dtype=host.dtype, device=device,
            storage_offset=host.storage_offset())
        tensor.host = host
        return tensor

    def tolist(self):
        return self.cpu().tolist()

    def data_ptr(self):
        return self.host.data_ptr()

    def __deepcopy__(self, memo):
        return memo.setdefault(id(self), self.clone())

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        if function in cls.EARLY:
            return cls.compute(function, arguments, options or {})
        arguments = tuple(indexed(value) if isinstance(value, torch.device) else value
                          for value in arguments)
        return torch._C._disabled_torch_function_impl(function, types, arguments, options or {})

    @classmethod
    def __torch_dispatch__(cls, operation, types, arguments=(), options=None):
        options, parts = options or {}, NotImplemented
        if torch.is_inference_mode_enabled():
            parts = operation.decompose(*arguments, **options)
        return cls.compute(operation, arguments, options) if parts is NotImplemented else parts

    @classmethod
    def compute(cls, operation, arguments, options):
        leaves = tree_leaves((arguments, options))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        host_arguments, host_options = tree_map(lambda leaf: getattr(leaf, "host", leaf),
                                                (arguments, options))
        # numbers may be anywhere
        devices = {tensor.device for tensor in tensors if tensor.dim() or tensor.is_cuda}
        device = next(iter(devices), None)
        if operation in cls.COPIES | cls.INDEXING or not devices:
            device = tensors[0].device
        if options.get("device") is not None:
            device, host_options["device"] = indexed(options["device"]), "cpu"
        if len(devices) > 1 and operation not in cls.COPIES:
            values = {value.device for value in arguments[2:]
                      if isinstance(value, torch.Tensor) and value.dim()}
            # indices may come from the CPU
            if operation not in cls.INDEXING or device.type == "cpu" or values - {device}:
                raise RuntimeError(f"{operation}: tensors on {devices}")
        cls.watch(operation, arguments, tensors, device, {place.type for place in devices})
        if operation is cls.aten._to_copy.default:
            host_options = {"dtype": options.get("dtype") or tensors[0].dtype, "copy": True}
            operation = torch.Tensor.to
        host_options.pop("pin_memory", None)
        result = operation(*host_arguments, **host_options)
        if device.type == "cpu":
            return result
        in_place = {id(tensor.host): tensor for tensor in tensors if isinstance(tensor, cls)}
        return tree_map_only(torch.Tensor, lambda host: in_place[id(host)] if id(host) in in_place
                             else cls(host, device), result)

    @classmethod
    def watch(cls, operation, arguments, tensors, device, places: set[str]) -> None:
        """Does the host wait?"""
        masked = operation in cls.INDEXING and any(part.dtype is torch.bool and part.is_cuda
                                                   for part in tensors[1:])
        if operation in cls.WAITS or masked or "cuda" in places and device.type == "cpu":
            cls.crossings.append("out")
        not_waiting = operation in cls.COPIES and arguments[2:] == (True,)  # non_blocking
        if "cpu" in places and device.type == "cuda" and not not_waiting:
            cls.crossings.append("in")
        if len(places) > 1 and isinstance(_get_current_dispatch_mode(), Tape):
            raise RuntimeError("operation not permitted when stream is capturing")


def indexed(device: torch.device | str) -> torch.device:
    """"cuda" as the GPU that is current."""
    device, current = torch.device(device), torch.cuda.current_device()
    return torch.device("cuda", current) if device == torch.device("cuda") else device


def stand_in(gpus: int, free: int) -> None:
    """From now on this process, which will never again be what it was, has GPUs of so many free
    bytes each. gloo plays NCCL, and a tape a graph."""
    current = [torch.device("cuda:0")]
    init_gloo, place = dist.init_process_group, accelerate.infer_auto_device_map
    move = torch.nn.Module.to

    def empty(size, stride=None, *, dtype=None, device=None, **_):
        host = (torch.empty(size, dtype=dtype, device="cpu") if stride is None
                else torch.empty_strided(size, stride, dtype=dtype, device="cpu"))
        return OnGPU(host, indexed(device))

    def init_process_group(backend, timeout, device_id):
        assert (backend, device_id) == (("cpu:gloo,cuda:nccl", current[0]) if device_id else
                                        ("gloo", None))
        init_gloo("gloo")

    OnGPU.library = torch.library.Library("aten", "IMPL")
    for name in ("empty.memory_format", "empty_strided"):  # what every new tensor begins as
        OnGPU.library.impl(name, empty, "CUDA")
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda"): made, then moved
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # Module.to makes new ones
    for name, value in (GRAPHS | dict(
            _lazy_init=lambda: None, is_available=lambda: True, synchronize=lambda *_: None,
            set_device=lambda device: current.__setitem__(0, device),
            current_device=lambda: current[0].index, mem_get_info=lambda _: (free, 2 ** 36),
            get_device_capability=lambda _: (8, 0))).items():
        setattr(torch.cuda, name, value)
    dist.init_process_group = init_process_group
    accelerate.infer_auto_device_map = lambda *arguments, **options: {
        part: f"cuda:{gpu}" if isinstance(gpu, int) else gpu
        for part, gpu in place(*arguments, **options).items()}
    torch.nn.Module.to = lambda module, device: move(module, indexed(device))


MACHINES = {  # GPUs, ranks, free bytes of each GPU
    "one GPU": (1, 2, 2 ** 36), "two GPUs": (2, 2, 2 ** 36), "a shared target": (3, 3, 2 ** 36),
    "a target on two GPUs": (3, 2, 2_050_000), "a target that fits nowhere": (3, 2, 500_000)}


@pytest.fixture(scope="module")
def without_gpu(pair, tmp_path_factory) -> tuple[list, list]:
    """Commands, and their results: greedy with the fast backup, sampled with the neural one."""
    lines = [[*pair, "--backup", "fast"], [*pair, "--temperature", 0.5, "--downweight", 0.5]]
    return lines, launch_in_ranks(2, lines, tmp_path_factory.mktemp("here"))[0]


@slow
@pytest.mark.parametrize("machine", MACHINES)
def test_the_text_is_the_same_wherever_the_models_are(machine, without_gpu, tmp_path):
    (gpus, ranks, free), (lines, here) = MACHINES[machine], without_gpu
    there = launch_in_ranks(ranks, lines, tmp_path, gpus, free)[0]
    if "nowhere" in machine:
        (status, _, said), = there
        assert status == 2 and "does not fit into the free memory of 2 GPUs" in said
        return
    for (_, expected, _), (status, written, said) in zip(here, there, strict=True):
        assert status == 0 and "run eagerly" not in said, said
        assert written["outputs"] == expected["outputs"]
        assert 0 < written["stats"]["hit_rate"] == expected["stats"]["hit_rate"] < 1


def crossings() -> list[list[str]]:
    """A rank's job: when the host waits for the GPU in 12 rounds, greedy and sampled, of
    pre-speculation, of a reply after a hit, of one after a miss, and of a verification."""
    stand_in(1, 2 ** 36)
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

@slow
def test_the_benchmark_compares_and_draws(pair, tmp_path):
    prompts, out = tmp_path / "prompts", tmp_path / "out.json"
    prompts.write_text('{"text": "def f(x):"}\n{"text": "class A:"}')
    chosen = ["bench.py", *pair[:6], "--quick", "--prompts", prompts, "--lookahead", 2,
              "--budget", 4]
    compared, drawn = launch_in_ranks(2, [
        [*chosen, "--out", out], [*chosen, "--sweep", "all", "--figures", tmp_path]], tmp_path)[0]
    assert compared[0] == drawn[0] == 0, compared[2] + drawn[2]
    names = {"AR", "SD", "SSD", "generate", "assisted"}
    assert names < {result["name"] for result in json.loads(out.read_text("utf-8"))["results"]}
    assert all(re.search(rf"^ *{name} ", compared[2], re.MULTILINE) for name in names)
    figures = {file.stem: file.read_text("utf-8") for file in tmp_path.glob("*.svg")}
    assert figures.keys() == set(bench.SWEEPS)
    assert all("</svg>" in figure for figure in figures.values())


def test_the_benchmark_predicts_by_theorem_7(capsys):
    bench.work(parse(bench.BenchSettings, ["--predict"]))
    large = next(row for row in capsys.readouterr().out.splitlines() if "70B / 1B" in row)
    assert "161.8" in large and "255.8" in large  # as measured in the paper
