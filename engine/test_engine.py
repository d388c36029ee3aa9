"""Tests of models: which are refused, and what larger ones need: placement, CUDA graphs, tensor
parallelism, GPUs. There need be no GPU: `FakeGraph` stands in for a CUDA graph, and, if PyTorch was
built with CUDA, `FakeCUDA` for GPUs. Where there are GPUs, the tests that have `on_gpus` run on
these, too.

    python -m pytest engine/test_engine.py -rs      # and says which tests want more GPUs
"""
import copy
import gc
import itertools
import json
import os
import re
import sys
import time
import warnings
from contextlib import nullcontext
from dataclasses import replace
from functools import partial, partialmethod
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import tqdm
import transformers
from huggingface_hub.utils import are_progress_bars_disabled
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import engine.model
import run.decoder
from audit.evidence import ALPHA, audit_groups
from audit.replay import Text, warpers_of
from cache import PRIMARY, Outcome, Speculation
from cli.launch import watch
from cli.settings import TINY, Settings
from engine import cuda_graphs
from engine.attention import ALL_ATTENTION_FUNCTIONS, FIRST_SEEN, matrix_products, sdpa
from engine.check import check_model
from engine.cuda_graphs import CapturedGraph
from engine.errors import UserError
from engine.model import CausalLM, load
from engine.tensor_parallel import split
from run import placement
from run.decoder import Decoder
from run.job import Job
from run.placement import Placement
from saguaro import Sequences
from testing.fake_cuda import CPU, FAKES, FakeGraph, fake_gpus, on_gpus, real_gpus
from testing.own_gpt import OwnGPT
from testing.shared import (
    RAGGED,
    assert_close,
    greedy_reference,
    imitation,
    in_ranks,
    make_decoder,
    random_model,
    run_rounds,
    windowed,
)

slow = pytest.mark.slow
COMPILE = torch.nn.Module.compile  # with "eager" layers are traced as on a GPU, and no code is made


@pytest.fixture(autouse=True)
def threads(monkeypatch) -> list[int]:
    """The numbers of threads that were set, in vain."""
    numbers = []
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    return numbers


@pytest.fixture
def fake_graphs(monkeypatch):
    """The code for CUDA graphs runs on a CPU."""
    for name, value in FAKES.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(cuda_graphs, "WIDTHS", [16, 32, 64])
    monkeypatch.setattr(torch.nn.Module, "compile", partialmethod(COMPILE, backend="eager"))


def run_on_graphs(decoder: Decoder, compiled: bool = True) -> None:
    """Let the models of a decoder run as on a GPU."""
    for model in decoder.models[:2]:
        if model:
            model.forward_fn = cuda_graphs.GraphRunner(model, compiled)


def graphs_alive() -> int:
    return sum(type(value) is CapturedGraph for value in gc.get_objects())


# ---- which folder may import which ----

PAPER = {"sampling", "cache", "target_worker", "draft_worker", "saguaro"}


@pytest.mark.parametrize("files, forbidden", (
    ("engine/*.py", PAPER | {"ideas", "cli", "run", "audit", "bench", "course"}),
    ("sampling.py", PAPER | {"ideas", "cli", "run", "engine", "audit"}),
    ("cache.py", PAPER | {"ideas", "cli", "run", "engine", "audit"}),
    ("*_worker.py", {"ideas", "cli", "run", "saguaro", "audit"}),
    ("saguaro.py", {"ideas", "run", "audit", "bench", "course"}),
    ("ideas/*.py", {"cli", "run", "audit", "bench", "course"}),
    ("run/*.py", {"audit", "bench", "course"}),
    ("cli/*.py", PAPER | {"ideas", "audit", "bench", "course"}),
    ("audit/*.py", PAPER | {"cli", "run", "engine.model", "course"})))
def test_imports_run_one_way(files, forbidden):
    for file in Path(__file__).parents[1].glob(files):
        if not file.name.startswith("test"):
            imported = re.findall(r"^\s*(?:from|import) ([\w.]+)", file.read_text("utf-8"), re.M)
            assert not {name for name in imported if {name, name.split(".")[0]} & forbidden}, file


# ---- who computes where ----

# GPUs and their capability (0: their driver is too old), (mode, world size, ranks here, rank, local
# rank); device, threads, type
PLACEMENTS = {
    "no GPU, alone": (0, 0, ("sd", 1, 1, 0, 0), "cpu", 8, torch.float32),
    "no GPU, draft": (0, 0, ("ssd", 2, 2, 1, 1), "cpu", 4, torch.float32),
    "no GPU, second of two that share": (0, 0, ("ssd", 3, 3, 1, 1), "cpu", 2, torch.float32),
    "a GPU that is listed, and cannot be used": (1, 0, ("sd", 1, 1, 0, 0), "cpu", 8, torch.float32),
    "one GPU, target": (1, 8.0, ("ssd", 2, 2, 0, 0), "cuda:0", 1, torch.bfloat16),
    "one GPU, draft": (1, 8.0, ("ssd", 2, 2, 1, 1), "cpu", 4, torch.float32),
    "an old GPU": (1, 7.5, ("ar", 1, 1, 0, 0), "cuda:0", 1, torch.float16),
    "five GPUs, two ranks": (5, 9.0, ("ssd", 2, 2, 1, 1), "cuda:1", 1, torch.bfloat16),
    "two machines with GPUs": (8, 9.0, ("ssd", 2, 1, 1, 0), "cuda:0", 1, torch.bfloat16)}


@pytest.mark.parametrize("name", PLACEMENTS)
def test_every_rank_finds_its_place(name, monkeypatch, threads):
    """On a machine of 8 cores. The GPUs need not exist: nothing is computed."""
    num_gpus, capability, (mode, *environment), *expected = PLACEMENTS[name]
    variables = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK")
    for variable, value in zip(variables, environment):
        monkeypatch.setenv(variable, str(value))
    monkeypatch.setenv("GOMP_SPINCOUNT", "10000")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: divmod(capability, 1))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    torch.backends.cuda.enable_cudnn_sdp(True)
    here = Placement(Settings(mode=mode))
    dtype = Job.dtype.fget(SimpleNamespace(settings=Settings(), placement=here))
    assert [str(here.device), threads[-1], dtype] == expected
    assert not torch.backends.cuda.cudnn_sdp_enabled(), "it plans anew for every length of text"
    assert str(Placement(Settings(mode=mode, device="cpu")).device) == "cpu"


@pytest.mark.parametrize("mode", ("ar", "sd", "ssd"))
@pytest.mark.parametrize("world_size", ("", "1"))
def test_who_is_alone_hears_no_other_programs_rank(world_size, mode, monkeypatch):
    for name, value in {"RANK": "16", "LOCAL_RANK": "3", "WORLD_SIZE": world_size}.items():
        monkeypatch.setenv(name, value)
    here = Placement(Settings(mode=mode, device="cpu"))
    assert (here.rank, here.world_size, here.tp_size, here.holds_draft) == (0, 1, 1, mode != "ar")


def test_threads_are_the_cores_of_a_rank_unless_somebody_chose(monkeypatch, threads, tmp_path):
    """Of 8 cores. torchrun chooses one thread where nobody did."""
    quota = tmp_path / "cpu.max"
    monkeypatch.setattr(placement, "CPU_QUOTA", quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: int(os.environ["OMP_NUM_THREADS"]))
    monkeypatch.setenv("GOMP_SPINCOUNT", "10000")
    for variables, allowed, expected in (
            ({}, "max 100000", 8), ({}, "300000 100000", 3), ({}, "50000 100000", 1),
            ({"OMP_NUM_THREADS": "5"}, "max 100000", 5), ({"OMP_NUM_THREADS": "1"}, "", 1),
            ({"OMP_NUM_THREADS": "5"}, "300000 100000", 3),
            ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "1"}, "", 8)):
        quota.write_text(allowed)
        with monkeypatch.context() as patch:
            patch.delenv("OMP_NUM_THREADS", raising=False)
            for name, value in variables.items():
                patch.setenv(name, value)
            Placement(Settings(mode="ar", device="cpu"))
            assert threads.pop() == expected
            Placement(Settings(mode="ar", device="cpu", pace=(60, 8)))
            assert threads.pop() == 1
    quota.write_text("300000 100000")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert placement.threads_for(8, 2) == 1, "of the container's three"
    monkeypatch.delenv("GOMP_SPINCOUNT")  # a script, or a notebook: its threads are its own
    Placement(Settings(mode="ar"))
    assert not threads


def join_with_gpus(num_gpus: int) -> tuple[list[str], list[str]]:
    """A rank's job: the devices of all ranks; and what joining does: the device made current (NCCL
    takes that one), or cores of its own, the groups, and the messages that connect them."""
    fake_gpus()
    init_process_group = dist.init_process_group
    new_group = dist.new_group
    all_reduce = dist.all_reduce
    done = []

    def refuse():
        raise PermissionError("as some sandboxes do")

    def record_default(*given, timeout, **named):
        assert timeout.days, "rank 0 may be stopped for long, as by Ctrl-Z"
        init_process_group(*given, timeout=timeout, **named)

    def record_group(ranks, timeout, backend):
        assert timeout.days
        done.append(f"{backend} {len(ranks)}")
        return new_group(ranks, timeout, backend)

    def record_watch(waits, seconds, limit):
        done.extend(re.findall(r"NCCL_P2P_DISABLE=1", waits))
        return nullcontext()

    torch.cuda.device_count = lambda: num_gpus
    torch.cuda.set_device = lambda device: done.append(str(device))
    torch.cuda.synchronize = lambda device: done.append("connected")
    placement.watch = record_watch
    os.sched_getaffinity = lambda _: set(range(8))
    os.sched_setaffinity = lambda _, cores: done.append(f"cores {cores}") or refuse()
    dist.init_process_group = record_default
    dist.new_group = record_group
    dist.all_reduce = lambda tensor, *how, group=None: (
        done.append(f"from {tensor.device}") if group else all_reduce(tensor, *how))
    here = Placement(Settings())
    here.join({})
    dist.barrier()  # nobody leaves while another one still connects
    return here.devices, done


def test_joining_shares_the_cores_connects_the_gpus_and_tells_the_devices():
    cores = ["cores [0, 1, 2, 3]", "cores [4, 5, 6, 7]"]
    assert in_ranks(2, join_with_gpus, 0) == [
        (["cpu", "cpu"], [where]) for where in cores]
    assert in_ranks(2, join_with_gpus, 1) == [
        (["cuda:0", "cpu"], [where]) for where in ("cuda:0", cores[1])]
    devices = ["cuda:0", "cuda:1", "cuda:2"]
    connects = "NCCL_P2P_DISABLE=1"
    steps = [[gpu, "nccl 3", connects, f"from {gpu}", "connected",
              "nccl 2", connects, f"from {gpu}", "connected"] for gpu in devices]
    assert in_ranks(3, join_with_gpus, 3) == [
        (devices, steps[0]), (devices, steps[1]), (devices, steps[2][:-3])]
    [(devices, done), *_] = in_ranks(3, join_with_gpus, 2)  # two GPUs share the target
    assert (devices, done) == (["cuda:0", "cuda:1", "cpu"], ["cuda:0", *steps[0][-4:]])


def test_who_waits_in_vain_says_for_what_and_gives_up(capsys, monkeypatch):
    statuses = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    with watch("it waits for nothing", 0.1, 0.2):
        pass
    with watch("it waits for NCCL", 0.2, 0.4):
        time.sleep(1)
    hint, end = capsys.readouterr().err.splitlines()
    assert hint == "it waits for NCCL" and statuses == [2]
    assert end.endswith(": error: 0.4 seconds are over: it waits for NCCL")


def test_models_are_loaded_one_at_a_time(monkeypatch):
    """Transformers changes what all its models share, and a page may have two sessions."""
    nothing = {"missing_keys": set(), "mismatched_keys": set()}
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained",
                        lambda *_, **__: (engine.model.LOADING.locked(), nothing))
    assert load("a model", None, torch.float32, "cpu") is True


@pytest.mark.parametrize("terminal, seconds, shown", (
    (True, 0.001, False), (True, 1, True), (False, 1, False)))
def test_slow_loading_shows_a_bar_on_a_terminal_while_it_lasts(
        terminal, seconds, shown, monkeypatch):
    """Of so many `seconds` a step. Downloads have bars of their own."""
    transformers.logging.set_tqdm_hook(engine.model.loading_bar)  # tests may have set others
    stderr = StringIO()
    stderr.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(tqdm.std, "time", partial(next, itertools.count(step=seconds)))
    load(str(TINY / "draft"), None, torch.float32, "cpu")
    written = stderr.getvalue()
    assert ("Loading weights: 100%" in written) == shown and "\n" not in written
    assert not written.strip("\r").rpartition("\r")[2].strip(), "the line vanishes"
    assert not are_progress_bars_disabled()


# ---- rounds on GPUs ----

ROUNDS = ({}, dict(temperature=1, top_k=20, top_p=0.9, downweight=0.5), dict(backup="lookup"),
          dict(temperature=1, backup="lookup", fan_out="confident", verification="race"),
          dict(temperature=1, backup="random"))
BATCHES = (RAGGED[:1], RAGGED[:3], RAGGED[:1])  # in new buffers, and in those of more rows


def save_pair(folder: Path, family: str = "llama", **changes) -> dict[str, str]:
    """Checkpoints of two random models, and a prompt that they know, as settings name them."""
    target = random_model(family, **changes)
    for name, model in (("target", target), ("draft", imitation(target, 0.15))):
        model.save_pretrained(folder / name)
        AutoTokenizer.from_pretrained(TINY / "target").save_pretrained(folder / name)
    return dict(target=str(folder / "target"), draft=str(folder / "draft"), prompt="!")


def decoder_of(settings: Settings) -> Decoder:
    job = Job(settings)
    return Decoder(settings, job.load())


def texts_of(decoder: Decoder, rounds: tuple, batches: tuple) -> list[list[list[int]]]:
    texts = []
    for choices in rounds:
        settings = replace(decoder.settings, max_new_tokens=12, **choices)
        texts += map(Decoder(settings, decoder.models), batches)
    return texts


def refuse(*_, **__):
    raise RuntimeError("operation not permitted")


def replay_wrongly(graph: CapturedGraph, inputs, replay=CapturedGraph.replay) -> torch.Tensor:
    return replay(graph, inputs) + 1


def decode_on_gpus(gpus, settings: Settings, devices: list[str], work: tuple) -> list:
    """A rank's job."""
    gpus(len(devices) - devices.count("cpu"))
    cuda_graphs.WIDTHS = [16]
    gc.disable()
    decoder = decoder_of(settings)
    shared = [ONE[0] if device in THREE else device for device in devices]  # where GPUs are few
    assert decoder.placement.devices in (devices, shared if gpus is real_gpus else devices)
    texts = texts_of(decoder, *work)
    for model in decoder.models[:2]:
        eager = settings.passes == "eager" or not model or model.device == CPU
        assert bool(eager) != bool(model and model.kv.graphs)
    model = decoder = None
    assert not graphs_alive(), "else a group whose all-reduces they hold could not be destroyed"
    return texts


ONE = ["cuda:0"]
TWO = ["cuda:0", "cuda:1"]
THREE = [*TWO, "cuda:2"]
LLAMA = ("llama", dict(num_hidden_layers=1))
ALL, DRAWN = (ROUNDS, BATCHES), (ROUNDS[1:2], BATCHES[1:2])
GPU_RUNS = (  # devices of the ranks, model, rounds and batches, settings
    (ONE, LLAMA, ALL, {}), (TWO, LLAMA, ALL, {}),
    *((ONE, model, DRAWN, {}) for model in windowed(8)),
    (["cuda:0", "cpu"], LLAMA, (ROUNDS[:2], BATCHES[1:2]), dict(dtype="float32")),
    (THREE, LLAMA, DRAWN, {}),
    (ONE, LLAMA, DRAWN, dict(dtype="float32", passes="eager")),
    *((ONE, LLAMA, DRAWN, dict(mode=mode)) for mode in ("ar", "sd")),
    *((TWO, LLAMA, DRAWN, dict(mode="sd", passes=passes)) for passes in ("compiled", "eager")))


@slow
@pytest.mark.parametrize("gpus, devices, model, work, choices", [
    case for run in GPU_RUNS for case in on_gpus(*run)])
def test_one_rank_or_two_on_gpus_write_the_texts_of_a_cpu(
        gpus, devices, model, work, choices, tmp_path):
    """Both models on one GPU; the draft on a CPU, through gloo; on another GPU, by messages through
    NCCL; a target that two GPUs share; windows, that move in captured passes. No tensor meets one
    of another device, and none is copied inside a capture."""
    family, changes = model
    pair = save_pair(tmp_path, family, **dict(num_hidden_layers=2) | changes)
    settings = Settings(**dict(dtype="float64") | choices | pair)
    expected = texts_of(decoder_of(replace(settings, device="cpu")), *work)
    assert in_ranks(len(devices), decode_on_gpus, gpus, settings, devices, work)[0] == expected


def decode_batches(gpus, settings: Settings) -> tuple[list, list[int]]:
    """A rank's job: the texts of 15 batches, and the bytes in use after each."""
    gpus()
    decoder = decoder_of(settings)
    texts = []
    used = []
    for _ in range(15):
        texts += decoder(RAGGED)
        used.append(torch.cuda.memory_allocated())
    return texts, used


@slow
@pytest.mark.parametrize("gpus", on_gpus()[1:])  # stand-ins round as a CPU
def test_texts_in_bfloat16_pass_the_audit_and_memory_is_flat(gpus, tmp_path):
    pair = save_pair(tmp_path)
    settings = Settings(dtype="bfloat16", temperature=1.0, max_new_tokens=8, **pair)
    [(texts, used)] = in_ranks(1, decode_batches, gpus, settings)
    assert 0 < max(used[8:]) <= max(used[:8])
    audited = [Text(*text, [""] * 8) for text in zip(15 * RAGGED, texts, strict=True)]
    model = load(settings.target, None, torch.bfloat16, "cpu")
    warpers = warpers_of(1.0, 0, 1.0)
    finding = audit_groups(model, audited, warpers, len(audited))["all"]
    assert finding.tokens == 480
    assert min(finding.p_values.values()) > ALPHA


def waits_of_a_round(gpus, temperature: float, rule: str) -> dict[str, int]:
    """A rank's job: how often the host waits for the GPU in each step of a round that hits."""
    gpus()
    model = copy.deepcopy(random_model()).to("cuda:0")
    decoder = make_decoder(model, model, temperature=temperature, verification=rule)
    record = run_rounds(decoder, RAGGED[:1], 2)
    draft = decoder.draft
    sequences = Sequences(RAGGED[:1], 20, 64, [])
    waits = {}
    torch.cuda.set_sync_debug_mode("warn")

    def count(step: str, function, *given):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = function(*given)
        waits[step] = len(caught)
        return result

    speculation, outcome = record[-1]
    speculation = draft.speculate(speculation, outcome, draft.pre_speculate(speculation))
    outcome = count("verify", decoder.target.verify, speculation)
    count("tell the outcome", sequences.extend, speculation, outcome)
    cache = count("pre-speculate", draft.pre_speculate, speculation)
    hit = Outcome(cache.guesses.num_accepted[:, 0], cache.guesses.bonus[:, 0])
    answer = count("answer", draft.speculate, speculation, hit, cache)
    assert answer.source == PRIMARY
    return waits


@pytest.mark.parametrize("gpus", on_gpus())
@pytest.mark.parametrize("temperature, rule", ((0, "token"), (1, "token"), (1, "race")))
def test_how_often_the_host_waits_for_the_gpu(gpus, temperature, rule):
    """For the outcome; for the tokens that were verified, twice; for guesses."""
    waits = {"verify": 1, "tell the outcome": 1, "pre-speculate": 1, "answer": 1}
    assert in_ranks(1, waits_of_a_round, gpus, temperature, rule) == [waits]


# ---- what every rank did, and when ----

def run_traced(folder: Path) -> None:
    """A rank's job: the command."""
    run.decoder.main(Settings(
        prompt=("def f(x):", "class A:", "x"), batch_size=2, max_new_tokens=20, temperature=1.0,
        device="cpu", trace=str(folder / "trace"), output=str(folder / "output")))


def assert_traced(rounds: list[dict], output: dict) -> None:
    """Assert that these are the rounds in which a line of the output was written."""
    tokens = []
    for number, row in enumerate(rounds):
        assert row["round"] == number
        tokens += [*row["drafted"][:row["k"]], row["t*"]]
    assert tokens[:20] == output["tokens"]
    assert sum(row["kept"] for row in rounds) == 20
    hits = [group == "hit 0" for group in output["group"] if group.endswith(" 0")]
    assert [row["hit"] for row in rounds] == hits
    assert [row["source"] == "cache" for row in rounds] == hits


def test_the_trace_has_all_work_and_the_rounds_of_the_output(tmp_path):
    in_ranks(3, run_traced, tmp_path)
    events = json.loads((tmp_path / "trace").read_text())["traceEvents"]
    assert [event["args"]["name"] for event in events if event["ph"] == "M"] == [
        f"rank {rank}, cpu, by the clock of its machine" for rank in range(3)]
    slices = [event for event in events if event["ph"] == "X"]
    work = {(event["pid"], event["name"]) for event in slices}
    assert work == {(1, "round"), (1, "verify"), (2, "verify"),
                    (3, "trunk"), (3, "tree"), (3, "backup")}
    assert {event["tid"] for event in slices} == {1, 2, 3}, "no process or thread is number 0"
    rounds = [event["args"] for event in slices if event["name"] == "round"]
    lines = (tmp_path / "output").read_text().splitlines()
    for prompt, line in enumerate(lines[1:-1]):
        of_prompt = [row for row in rounds if row["prompt"] == prompt]
        assert_traced(of_prompt, json.loads(line))

    def times(name: str) -> list[tuple[int, int]]:
        found = set()
        for event in slices:
            if (event["pid"], event["name"]) == (1, name):
                found.add((event["ts"], event["ts"] + event["dur"]))
        return sorted(found)

    ended = {end for _, end in times("round")}
    after_prefill = [(start, end) for start, end in times("round") if start in ended]
    for (start, end), (begins, ends) in zip(after_prefill, times("verify"), strict=True):
        assert start < begins < ends < end


# ---- a model that is not transformers': any module that is called as theirs are ----

@torch.no_grad()
def test_any_module_that_is_called_like_a_model_can_be_target_or_draft():
    """Greedy, and checked by a plain pass over each whole text."""
    target = OwnGPT()
    decoder = make_decoder(target, imitation(target, 0.1), max_new_tokens=24)
    whole = SimpleNamespace(update=lambda keys, values, layer: (keys, values))
    for prompt, text in zip(RAGGED, decoder(RAGGED), strict=True):
        tokens = torch.tensor([prompt + text])
        positions = torch.arange(len(prompt) + 24)
        future = positions > positions[:, None]
        mask = torch.where(future, -torch.inf, 0.0).to(target.dtype)
        logits = target(tokens, positions[None], mask[None, None], whole).logits
        greedy = logits[0, len(prompt) - 1:-1].argmax(-1)
        assert greedy.tolist() == text
    assert decoder.stats.summary()["acceptance_rate"] > 0.1

# ---- models that cannot be decoded here ----

def fresh_model(family: str = "llama", **changes):
    """A `random_model` of its own: its configuration may hold dictionaries."""
    return random_model.__wrapped__(family, **copy.deepcopy(changes))


@pytest.mark.parametrize("family, changes, expected", (
    ("gpt_neo", dict(num_hidden_layers=2, attention_types=[[["global", "local"], 1]]),
     pytest.raises(UserError, match="gpt_neo models give other logits")),  # a mask by slot
    ("bert", {}, pytest.raises(UserError, match="this bert model is not causal")),
    ("mpt", {}, pytest.raises(UserError, match="mpt models give other logits")),  # ALiBi
    ("bloom", {}, pytest.raises(UserError, match="bloom models cannot run with KV slots")),  # ALiBi
    ("xlm", {}, pytest.raises(UserError, match="xlm models cannot run in torch.float32")),
    ("mamba", {}, pytest.raises(UserError, match="in all layers, not linear_attention")),
    # it has no window, but transformers' cache believes its configuration
    ("llama", dict(sliding_window=8), pytest.raises(UserError, match="with sliding_window in")),
    ("bert", dict(is_decoder=True), nullcontext()), ("mixtral", {}, nullcontext()),
    ("mixtral", dict(output_router_logits=True), nullcontext()),  # as many were trained
    ("gpt_bigcode", {}, nullcontext())))  # has a mask by slot, and does not use it
def test_an_architecture_that_does_not_fit_into_slots_is_refused(family, changes, expected):
    with expected:
        check_model(CausalLM(fresh_model(family, **changes).float()))


WINDOWED, MIXED, CHUNKED = windowed(50)  # more than the text with which a model is tried
window = FIRST_SEEN["sliding_attention"]
everything = FIRST_SEEN["full_attention"]
WRONGLY_SEEN = {
    "a token more": (WINDOWED, {"sliding_attention": lambda *given: window(*given) - 1}),
    "a token less": (WINDOWED, {"sliding_attention": lambda *given: window(*given) + 1}),
    "no window": (WINDOWED, {"sliding_attention": everything}),
    "no window in a few layers": (MIXED, {"sliding_attention": everything}),
    "windows in the other layers":
        (MIXED, {"sliding_attention": everything, "full_attention": window}),
    "no chunks": (CHUNKED, {"chunked_attention": everything}),
    "chunks that begin a token earlier": (CHUNKED, {"chunked_attention": lambda positions, config: (
        positions - (positions + 1) % config.attention_chunk_size)})}


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("name", WRONGLY_SEEN)
def test_the_check_sees_a_wrong_window_however_long(name, dtype, monkeypatch):
    (family, changes), first_seen = WRONGLY_SEEN[name]
    model = CausalLM(fresh_model(family, num_hidden_layers=2, **changes).to(dtype))
    check_model(model)
    assert 50 in vars(model.model.config).values(), "it is as it was"
    for kind, function in first_seen.items():
        monkeypatch.setitem(FIRST_SEEN, kind, function)
    with pytest.raises(UserError, match="give other logits"):
        check_model(model)


LONGROPE = dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 4,
                long_factor=[1.0, 2.0, 4.0, 8.0], original_max_position_embeddings=16)
BY_TYPE = {"full_attention": LONGROPE, "sliding_attention": dict(rope_type="default")}


@pytest.mark.parametrize("family, changes", (
    ("phi3", dict(rope_parameters=LONGROPE, original_max_position_embeddings=16)),
    ("gemma3_text", dict(rope_parameters=BY_TYPE)), ("doge", dict(keep_window_size=16)),
    ("llama4_text", dict(head_dim=8, num_local_experts=2, intermediate_size_mlp=48,
                         floor_scale=17))))
def test_a_text_ends_before_its_rotary_embeddings_or_attention_change(family, changes):
    """And a prompt that reaches beyond is refused."""
    decoder = make_decoder(fresh_model(family, **changes), mode="ar", max_new_tokens=30)
    [text] = decoder([[1, 2]])
    assert len(text) == 14 and decoder.finish_reasons == ["context"]
    with pytest.raises(UserError, match="context, 16"):
        decoder([[1] * 16])


@pytest.mark.parametrize("dtype", ("float16", "float32"))
@pytest.mark.parametrize("whose, temperature", (
    ("the target's logits", 0), ("the target's logits", 1), ("the draft's q", 1)))
def test_logits_that_overflow_are_reported_in_one_sentence(whose, temperature, dtype):
    target = copy.deepcopy(random_model()).to(getattr(torch, dtype))
    draft = imitation(random_model(), 0.1).to(target.dtype)
    decoder = make_decoder(target, draft, dtype=dtype, max_new_tokens=8, temperature=temperature)
    broken = target if "target" in whose else draft
    broken.lm_head.weight.data *= torch.finfo(target.dtype).max / 2
    with pytest.raises(UserError, match=f"{whose} are infinite or not numbers in torch.{dtype}"):
        decoder(RAGGED)


@pytest.mark.parametrize("temperature", (0, 1))
def test_what_overflows_spoils_no_later_batch(temperature):
    """No mask hides NaN that a batch has left in the KV from rows of unequal length."""
    models = [copy.deepcopy(random_model()), imitation(random_model(), 0.1)]
    decoder = make_decoder(*models, max_new_tokens=8, temperature=temperature)
    sound = [copy.deepcopy(model.state_dict()) for model in models]
    for model in models:
        model.get_input_embeddings().weight.data[39] = torch.inf
    with pytest.raises(UserError):
        decoder(4 * [20 * [39]])
    for model, weights in zip(models, sound):
        model.load_state_dict(weights)
    texts = decoder(RAGGED)
    assert temperature or texts == greedy_reference(random_model(), RAGGED, 8)
    assert decoder.stats.summary()["acceptance_rate"] > 0.5


def test_one_place_that_overflows_is_enough(monkeypatch):
    decoder = make_decoder(random_model(), mode="ar")
    decoder.target.prefill(RAGGED, 30, 3)
    causal = CausalLM.causal
    monkeypatch.setattr(CausalLM, "causal", lambda *given: causal(*given).index_fill(
        1, torch.tensor(1), torch.inf))
    tokens = torch.ones(len(RAGGED), 3).long()
    with pytest.raises(UserError, match="the target's logits are infinite"):
        decoder.target.verify(Speculation(tokens, torch.zeros(*tokens.shape, 0), tokens))


# ---- attention without copies ----

@pytest.mark.parametrize("family, changes", (
    ("llama", {}), ("llama", dict(num_key_value_heads=1)), ("qwen3", dict(head_dim=16)),
    *windowed(8), ("gemma3_text", dict(head_dim=8, sliding_window=8)), ("gpt_neox", {}),
    ("gpt2", {}), ("gemma2", dict(head_dim=8, sliding_window=8))))  # the last: softcap, eager
def test_heads_share_keys_and_logits_are_those_of_transformers(family, changes, monkeypatch):
    """Prompts are read in pieces of many tokens, of a few, and of one; nothing is copied."""
    changes = dict(num_hidden_layers=2, num_key_value_heads=2) | changes
    model = CausalLM(random_model.__wrapped__(family, **changes))
    tokens = torch.arange(80).view(2, 40) * 7 % 40
    with torch.inference_mode():
        expected = model.model(tokens, use_cache=False).logits
    model.allocate(2, 40, 0)
    starts = [0, 20, 25, 26]
    pieces = tokens.split([20, 5, 1, 14], 1)
    with monkeypatch.context() as patch:
        patch.setattr(transformers.integrations.sdpa_attention, "repeat_kv", refuse)
        logits = [model.causal(piece, torch.full((2,), start))
                  for start, piece in zip(starts, pieces)]
    assert_close(torch.cat(logits, 1), expected, 1e-6)
    model.allocate(4, 32, 0)
    assert (model.kv.rows, model.kv.slots) == (4, 40), "more rows, and the slots of a longer text"
    check_model(model)
    if model.model.config._attn_implementation == "sdpa":
        def mistake(module, query, key, value, mask=None, **options):
            ours = mask is not None and mask.is_floating_point()
            return sdpa(module, query.flip(1) if ours else query, key, value, mask, **options)

        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", mistake)  # keys of other heads
        with pytest.raises(UserError, match="give other logits"):
            check_model(model)


@pytest.mark.parametrize("mask, options, ours", (
    (torch.zeros(2, 1, 3, 5), {}, True), (torch.zeros(2, 4, 3, 5), {}, False),
    (torch.ones(2, 1, 3, 5) > 0, {}, False), (torch.zeros(2, 1, 3, 5), {"dropout": 0.1}, False),
    (torch.zeros(2, 1, 3, 5), {"position_bias": torch.zeros(1)}, False), (None, {}, False)))
def test_what_another_program_asks_of_attention_is_transformers_affair(mask, options, ours):
    assert engine.attention.is_ours(mask, options) == ours


def test_a_model_that_somebody_else_trains_keeps_its_dropout():
    model = random_model.__wrapped__("llama", num_key_value_heads=2, attention_dropout=0.5).train()
    one, other = [model(torch.ones(1, 5).long(), attention_mask=torch.zeros(1, 1, 5, 5)).logits
                  for _ in range(2)]
    assert not one.equal(other)


def test_a_model_in_training_mode_decodes_without_dropout():
    model = random_model.__wrapped__(attention_dropout=0.5)
    expected = greedy_reference(model, RAGGED, 8)
    decoder = make_decoder(model.train(), mode="ar", max_new_tokens=8)
    assert decoder(RAGGED) == expected
    model.train()  # as between two evaluations
    assert decoder(RAGGED) == expected


# ---- CUDA graphs ----

@pytest.mark.parametrize("family, changes", (
    ("llama", {}), ("gemma2", dict(head_dim=8, sliding_window=8))))
def test_a_short_text_after_a_long_one_captures_nothing(family, changes, fake_graphs):
    target = random_model(family, **changes)
    pair = copy.deepcopy(target), imitation(target, 0.15)  # as they are changed
    decoder = make_decoder(*pair, mode="sd", max_new_tokens=18)
    decoder.models = decoder.models._replace(max_length=48)  # of the longest text to come
    run_on_graphs(decoder, compiled=False)
    decoder([[3]])
    before = FakeGraph.captures
    decoder([[7] * 30])
    assert decoder([[1, 2]]) == greedy_reference(target, [[1, 2]], 18)
    assert FakeGraph.captures == before > 0
    assert FakeGraph.replays > FakeGraph.captures, "not on trial alone"
    for model in decoder.models[:2]:
        outputs = {(shape[:2], graph.output.data_ptr()) for shape, graph in model.kv.graphs.items()}
        assert len(outputs) == len({shape[:2] for shape in model.kv.graphs}), "one of all widths"
    ours = sum(len(model.kv.graphs) for model in decoder.models[:2])
    gc.disable()
    before = graphs_alive()
    model = decoder = None
    left = graphs_alive()
    gc.enable()
    assert left == before - ours, "NCCL would wait for the end of those with all-reduces"


@pytest.mark.parametrize("wheres", ((True, False), (False, True)))
def test_buffers_are_of_the_models_type_inside_and_outside_of_autocast(wheres):
    target = copy.deepcopy(random_model()).float()
    decoder = make_decoder(target, imitation(target, 0.1), dtype="float32", max_new_tokens=8)
    for inside in wheres:
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            check_model(CausalLM(target))
            texts = decoder(RAGGED)
        assert texts == greedy_reference(target, RAGGED, 8)


def compilations(layers: int, monkeypatch) -> int:
    """How often the compiler is called for a target of so many layers, some with a window."""
    def compile_nothing(graph, inputs):
        compiled.append(graph)
        return graph

    compiled = []
    torch.compiler.reset()
    monkeypatch.setattr(cuda_graphs, "WIDTHS", [])  # one of all passes
    monkeypatch.setattr(torch.nn.Module, "compile", partialmethod(COMPILE, backend=compile_nothing))
    target = random_model.__wrapped__("gemma3_text", head_dim=8, sliding_window=8,
                                      num_hidden_layers=layers)
    decoder = make_decoder(target, mode="ar", max_new_tokens=18)
    run_on_graphs(decoder)
    decoder(RAGGED[:1])
    return len(compiled)


@slow
def test_all_layers_share_what_is_compiled(fake_graphs, monkeypatch):
    """Those of a kind. PyTorch gives up on the ninth layer of those that it compiles one by one."""
    few = compilations(2, monkeypatch)
    assert 0 < few == compilations(9, monkeypatch)


def lack_compiler(graph, inputs):
    raise RuntimeError("Failed to find C compiler. Please specify one by CC")


def test_what_cannot_be_compiled_is_said_once_and_captured(fake_graphs, monkeypatch, capsys):
    torch.compiler.reset()
    monkeypatch.setattr(torch.nn.Module, "compile", partialmethod(COMPILE, backend=lack_compiler))
    target = random_model(num_hidden_layers=2)
    decoder = make_decoder(copy.deepcopy(target), mode="ar", max_new_tokens=18)
    run_on_graphs(decoder)
    check_model(decoder.target.model)
    assert decoder([[1, 2]]) == greedy_reference(target, [[1, 2]], 18)
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("llama layers run as they are, since they cannot be compiled: ")
    assert line.endswith("Failed to find C compiler. Please specify one by CC")
    assert decoder.target.model.kv.graphs


@pytest.mark.parametrize("compiled", (False, pytest.param(True, marks=slow)))
def test_what_is_checked_at_loading_is_what_runs(compiled, fake_graphs, monkeypatch):
    """What runs is compiled wrongly. (Nothing is captured: stand-ins capture no compiled pass.)"""
    def compile_wrongly(graph, inputs):
        return lambda *given: [part + 0.1 if torch.is_tensor(part) and part.is_floating_point()
                               else part for part in graph(*given)]

    torch.compiler.reset()
    monkeypatch.setattr(torch.nn.Module, "compile", partialmethod(COMPILE, backend=compile_wrongly))
    monkeypatch.setattr(cuda_graphs, "CapturedGraph", lambda model, *_: SimpleNamespace(
        replay=lambda inputs: model.forward_eager(*inputs)))
    decoder = make_decoder(copy.deepcopy(random_model()), mode="ar")
    run_on_graphs(decoder, compiled)
    with pytest.raises(UserError, match="give other logits") if compiled else nullcontext():
        check_model(decoder.target.model)


def test_what_the_check_captured_is_gone(fake_graphs, monkeypatch):
    """It has windows of its own."""
    monkeypatch.setattr(cuda_graphs, "WIDTHS", [])
    model = random_model("mistral", sliding_window=8)
    choices = dict(mode="ar", temperature=1.0, max_new_tokens=18)
    decoder = make_decoder(copy.deepcopy(model), **choices)
    run_on_graphs(decoder)
    check_model(decoder.target.model)
    assert decoder([[1, 2]]) == make_decoder(model, **choices)([[1, 2]])


@pytest.mark.parametrize("groups", (1, 2, 4))
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32, torch.float64))
def test_two_products_attend_as_the_kernel_does(groups, dtype):
    rows = 12 // groups
    query = torch.randn(2, groups, rows, 8).to(dtype)
    key, value = torch.randn(2, 2, groups, 9, 8).to(dtype)
    visible = torch.rand(2, 1, rows, 9) < 0.5
    visible[..., 0] = True
    mask = torch.where(visible, 0.0, -torch.inf).to(dtype)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.double(), key.double(), value.double(), mask.double(), scale=0.3)
    output = matrix_products(query, key, value, mask, 0.3)
    assert output.dtype == dtype
    assert_close(output.double(), expected, 4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("owner, replay, reason", (
    (FakeGraph, refuse, "operation not permitted"),
    (FakeGraph, lambda graph: None, "the captured pass gives other logits"),  # none was captured
    (CapturedGraph, replay_wrongly, "the captured pass gives other logits")))
def test_what_cannot_be_captured_ends_with_one_sentence(owner, replay, reason, fake_graphs,
                                                        monkeypatch):
    monkeypatch.setattr(owner, "replay", replay)
    decoder = make_decoder(copy.deepcopy(random_model()), mode="ar", max_new_tokens=20)
    run_on_graphs(decoder)
    with pytest.raises(UserError, match=f"CUDA graphs .{reason}.: start with --passes eager"):
        decoder([[1, 2]])


# ---- a target that several ranks share ----

SHARED = {"llama": dict(tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
          "qwen3": dict(head_dim=8), "qwen2": {}, "olmo2": {}, "gpt_neox": {},
          "mistral": dict(sliding_window=3), "gemma2": dict(sliding_window=3), "phi": {},
          "gemma3": dict(text_config=dict(
              vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
              num_key_value_heads=2, head_dim=8, intermediate_size=48, sliding_window=3,
              layer_types=["sliding_attention", "full_attention"], initializer_range=0.3),
              vision_config=dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
                                 intermediate_size=8, image_size=28))}  # of images and text
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]])


def uneven(model):
    """A copy whose biases are not 0 and whose norms are not 1."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight += 0.3 * torch.randn_like(weight)
    return model


def logits_of_shares(folders: list[Path]) -> list[list]:
    """A rank's job: for every checkpoint the logits of this rank."""
    dist.init_process_group("gloo")
    all_logits = []
    for folder in folders:
        config = AutoConfig.from_pretrained(folder)
        whole = AutoModelForCausalLM.from_config(config)
        model = load(str(folder), config, torch.float64, "cpu")
        split(model, dist.group.WORLD)
        share = CausalLM(model)
        assert share.model.num_parameters() < 0.8 * whole.num_parameters()
        share.allocate(2, 8, 8)
        all_logits.append(share.causal(TOKENS, torch.zeros(2).long()).tolist())
    return all_logits


def test_two_shares_of_a_target_give_the_logits_of_the_whole(tmp_path):
    models = [uneven(random_model.__wrapped__(family, **dict(num_key_value_heads=2) | changes))
              for family, changes in SHARED.items()]
    folders = [tmp_path / family for family in SHARED]
    for model, folder in zip(models, folders):
        model.save_pretrained(folder, max_shard_size="20KB")  # several files
    for all_logits in in_ranks(2, logits_of_shares, folders):
        for model, logits in zip(models, all_logits):
            with torch.inference_mode():
                whole = model(TOKENS, use_cache=False).logits
            assert_close(torch.tensor(logits).to(whole), whole, 1e-5)
