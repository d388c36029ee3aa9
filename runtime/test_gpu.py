"""Tests of what larger models need: placement, CUDA graphs, tensor parallelism, GPUs. There need be
no GPU: `FakeGraph` stands in for a CUDA graph, `FakeCUDA` for tensors in another memory.

    python -m pytest runtime/test_gpu.py
"""
import copy
import gc
import os
import time
import weakref
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import AutoConfig, AutoModelForCausalLM

import saguaro
from cache import PRIMARY, Outcome, Speculation
from runtime import cuda_graphs, launch
from runtime.job import Job, Models
from runtime.model import CausalLM
from runtime.placement import Placement
from runtime.settings import Settings
from runtime.tensor_parallel import load_sharded
from runtime.timing import Stopwatch
from saguaro import Channel, Decoder
from test_equivalence import (RAGGED, decoder, greedy_reference, imitation, in_ranks,
                              random_model, run_rounds)

slow = pytest.mark.slow


@pytest.fixture(autouse=True)
def threads_as_they_are(monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)


# ---- stand-ins for CUDA graphs and GPUs ----

class FakeGraph(TorchDispatchMode):
    """Stands in for a CUDA graph: remembers the operations of a pass with the very tensors that
    they took and gave, and repeats them on these. As on a GPU all-reduces are captured, but wait
    for no other rank before the graph is replayed."""
    captures = 0
    replays = 0

    def __init__(self):
        super().__init__()
        self.operations = []

    def pool(self) -> None:
        return None

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        given = operation(*arguments, **options or {})
        self.operations.append((operation, arguments, options or {}, given))
        return given

    @contextmanager
    def capture(self, *_, **__):
        FakeGraph.captures += 1
        all_reduce = dist.all_reduce

        def remember(tensor, group):
            self.operations.append((all_reduce, (tensor,), {"group": group}, None))

        with mock.patch.object(dist, "all_reduce", remember), self:
            yield

    def replay(self) -> None:
        FakeGraph.replays += 1
        with torch._C.DisableTorchFunction():  # faster
            for operation, arguments, options, given in self.operations:
                again = operation(*arguments, **options)
                for old, new in zip(tree_leaves(given), tree_leaves(again)):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)  # else: a view, or in place


class FakeEvent:
    """Stands in for a CUDA event."""

    def __init__(self, enable_timing: bool):
        assert enable_timing

    def record(self) -> None:
        self.time = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "FakeEvent") -> float:
        return 1000 * (end.time - self.time)


STREAM = SimpleNamespace(wait_stream=lambda other: None)
FAKES = {"CUDAGraph": FakeGraph, "graph": FakeGraph.capture, "Event": FakeEvent,
         "Stream": lambda: STREAM, "current_stream": lambda: STREAM,
         "stream": lambda _: nullcontext()}  # in place of those of torch.cuda


@pytest.fixture
def fake_graphs(monkeypatch):
    """The code for CUDA graphs runs on a CPU."""
    for name, value in FAKES.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(cuda_graphs, "WIDTHS", [16, 32, 64])


CPU = torch.device("cpu")
Tensor = torch.Tensor
COPIES = {Tensor.copy_, Tensor.to, Tensor.cpu, torch.tensor, Tensor.__getitem__,  # by an index
          torch._has_compatible_shallow_copy_type}  # Module.to asks
READS = {Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.item,
         Tensor.tolist, Tensor.nonzero, torch.nonzero}


class FakeCUDATensor(Tensor):
    """Stands in for a tensor on a GPU: its numbers are in host memory, and computed there, but
    under `FakeCUDA` its device is a GPU."""


class FakeCUDA(TorchFunctionMode):
    """As on a GPU, tensors of different devices cannot meet in one operation, and none can be
    copied between devices while a graph is captured."""
    host_waits = 0  # how often the host has waited: for numbers, or to hand some over

    def __torch_function__(self, function, types, arguments=(), options=None):
        with torch._C.DisableTorchFunctionSubclass():
            if function == Tensor.device.__get__:
                return device_of(*arguments)
            return self.compute(function, arguments, options or {})

    def compute(self, function, arguments: tuple, options: dict):
        tensors = [leaf for leaf in tree_leaves((arguments, options)) if isinstance(leaf, Tensor)]
        # a number may meet tensors of any device
        devices = {device_of(tensor) for tensor in tensors
                   if tensor.dim() or isinstance(tensor, FakeCUDATensor)}
        target = requested_device(function, arguments, options)
        if not target:
            first = [device_of(tensor) for tensor in tensors[:1] if function in COPIES]
            target = next(iter(first or devices), CPU)
        if all(device.type != "cuda" for device in devices | {target}):
            return function(*arguments, **options)
        crosses = function in COPIES and (devices or {CPU}) != {target}
        if len(devices) > 1 and not crosses:
            raise RuntimeError(f"{function}: tensors on {devices}")
        if crosses and target == CPU and options.get("non_blocking"):
            raise RuntimeError("the host would read before the copy has ended")
        FakeCUDA.host_waits += function in READS or crosses and not options.get("non_blocking")
        if (crosses or function in READS) and isinstance(_get_current_dispatch_mode(), FakeGraph):
            raise RuntimeError("operation not permitted when stream is capturing")

        def at_target(tensor: Tensor) -> Tensor:
            if isinstance(tensor, FakeCUDATensor) and device_of(tensor) == target:
                return tensor  # changed in place
            tensor = tensor.clone() if crosses else tensor
            tensor = tensor.as_subclass(Tensor if target == CPU else FakeCUDATensor)
            tensor.gpu = target
            return tensor

        if function is Tensor.to:
            arguments = [CPU if type(given) in (str, int, torch.device) else given
                         for given in arguments]
        options = {name: CPU if name == "device" else given for name, given in options.items()}
        return tree_map_only(Tensor, at_target, function(*arguments, **options))


def device_of(tensor: Tensor) -> torch.device:
    return getattr(tensor, "gpu", None) or tensor.device


def requested_device(function, arguments: tuple, options: dict) -> torch.device | None:
    """The device that the call names for its result."""
    named = CPU if function is Tensor.cpu else options.get("device")
    if function is Tensor.to and len(arguments) > 1:
        named = arguments[1]
    if isinstance(named, Tensor):
        return device_of(named)
    if named is None or isinstance(named, torch.dtype):
        return None
    return torch.device(named)


def fake_gpus() -> None:
    """From now on this process, for the rest of its life, has GPUs. gloo stands in for NCCL,
    `FakeGraph` for a CUDA graph."""
    if torch.cuda.CUDAGraph is FakeGraph:
        return
    new_gloo_group = dist.new_group
    dist.new_group = lambda ranks, timeout, backend: new_gloo_group(ranks)
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # Module.to makes new ones
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # a mode holds for one thread
    FakeCUDA().__enter__()
    for name, value in FAKES.items():
        setattr(torch.cuda, name, value)
    torch.cuda.is_available = lambda: True
    torch.cuda.mem_get_info = lambda _: (2 ** 36, 2 ** 36)
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.get_device_name = lambda _: "stand-in"
    torch.cuda.set_device = lambda _: None


# ---- who computes where ----

# GPUs, (mode, world size, ranks here, rank, local rank); device, threads
PLACEMENTS = {
    "no GPU, alone": (0, ("sd", 1, 1, 0, 0), "cpu", 8),
    "no GPU, target": (0, ("ssd", 2, 2, 0, 0), "cpu", 7),
    "no GPU, draft": (0, ("ssd", 2, 2, 1, 1), "cpu", 1),
    "no GPU, second of two ranks that share": (0, ("ssd", 3, 3, 1, 1), "cpu", 3),
    "no GPU, two that share": (0, ("ar", 2, 2, 1, 1), "cpu", 4),
    "one GPU, target": (1, ("ssd", 2, 2, 0, 0), "cuda:0", 1),
    "one GPU, draft": (1, ("ssd", 2, 2, 1, 1), "cpu", 7),
    "one GPU, draft beside a share": (1, ("ssd", 3, 3, 2, 2), "cpu", 1),
    "one GPU, share beside the draft": (1, ("ssd", 3, 3, 1, 1), "cpu", 6),
    "five GPUs, two ranks": (5, ("ssd", 2, 2, 1, 1), "cuda:1", 1),
    "five GPUs, five ranks": (5, ("ssd", 5, 5, 3, 3), "cuda:3", 1),
    "two machines, draft": (0, ("ssd", 2, 1, 1, 0), "cpu", 8),
    "two machines, share far from the draft": (0, ("ssd", 4, 2, 1, 1), "cpu", 4),
    "two machines with GPUs": (8, ("ssd", 2, 1, 1, 0), "cuda:0", 1)}


@pytest.mark.parametrize("name", PLACEMENTS)
def test_every_rank_finds_its_place(name, monkeypatch):
    """On a machine of 8 cores. The devices need not exist: this decides where to compute, and
    computes nothing."""
    num_gpus, (mode, *environment), *expected = PLACEMENTS[name]
    variables = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK")
    for variable, value in zip(variables, environment):
        monkeypatch.setenv(variable, str(value))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 16 if logical else 8)
    torch.backends.cuda.enable_cudnn_sdp(True)
    found = Placement(Settings(mode=mode))
    assert [str(found.device), found.threads] == expected
    assert not torch.backends.cuda.cudnn_sdp_enabled(), "it plans anew for every length of text"
    dtype = Job.dtype.fget(SimpleNamespace(settings=Settings(), placement=found))
    assert dtype == (torch.float32 if "cpu" in expected else torch.bfloat16)
    assert str(Placement(Settings(mode=mode, device="cpu")).device) == "cpu"
    assert Placement(Settings(mode=mode, pace=(60, 8))).threads == 1


def join_with_gpus(num_gpus: int) -> tuple[list[str], list[str]]:
    """A rank's job: the devices of all ranks; and the groups connected by joining, each with the
    device that was current then: NCCL takes that one."""
    zeros = torch.zeros
    new_group = dist.new_group
    current = []
    connected = []
    names = {}

    def named_group(ranks, timeout, backend):
        assert timeout.days, "another rank may download the target meanwhile"
        group = new_group(ranks)
        names[group] = f"{backend} {ranks}"
        return group

    torch.zeros = lambda *shape, device, **options: zeros(*shape, **options)
    torch.cuda.device_count = lambda: num_gpus
    torch.cuda.set_device = current.append
    dist.new_group = named_group
    dist.all_reduce = lambda tensor, group: connected.append(f"{names[group]} {current[0]}")
    found = Placement(Settings())
    found.join()
    return found.devices, connected


def test_joining_connects_the_gpus_and_tells_the_devices():
    assert in_ranks(2, join_with_gpus, 1) == [(["cuda:0", "cpu"], [])] * 2
    devices = ["cuda:0", "cuda:1", "cuda:2"]
    assert in_ranks(3, join_with_gpus, 3) == [
        (devices, ["nccl [0, 1, 2] cuda:0", "nccl [0, 1] cuda:0"]),
        (devices, ["nccl [0, 1, 2] cuda:1", "nccl [0, 1] cuda:1"]),
        (devices, ["nccl [0, 1, 2] cuda:2"])]


# ---- what costs time once ----

def test_batches_of_a_job_share_buffers_and_graphs():
    model = CausalLM(random_model())
    model.min_slots = 2 * model.kv.slots  # twice those of its check
    model.allocate(1, 14, 10)
    assert model.kv.slots == model.min_slots
    model.allocate(2, 14, 10)
    kv = model.kv
    model.allocate(2, 34, 30)
    model.allocate(1, 14, 10)
    assert model.kv is kv and (kv.rows, kv.slots) == (2, model.min_slots)


def test_a_warm_up_captures_and_changes_nothing():
    target = random_model()
    draft = imitation(target, 0.15)
    choices = dict(mode="sd", temperature=1, max_new_tokens=20)
    expected = decoder(target, draft, **choices)(RAGGED)
    made = decoder(target, draft, **choices)
    models = Models(made.target.model, made.speculator.model, made.context, 40)
    verified = []
    causal = models.target.causal
    models.target.causal = lambda *given, **options: verified.append(1) or causal(*given, **options)
    saguaro.warm_up(made.settings, models, None, RAGGED)
    assert len(verified) > 4, "prefill, round 0, and some rounds"
    assert made(RAGGED) == expected


def test_the_stopwatch_does_not_wait_for_the_gpu(fake_graphs, monkeypatch):
    waits = []
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    watch = Stopwatch(torch.device("cuda"))
    for _ in range(2):
        with watch("step"):
            time.sleep(0.01)
    assert not waits
    before = time.perf_counter()
    spans = watch.read()
    assert [work for work, *_ in spans] == ["step", "step"] and watch.read() == []
    for _, start, end in spans:
        assert 0.01 <= end - start < 0.1 and before - 0.2 < start < end <= before + 0.1


def count_host_waits() -> list[list[int]]:
    """A rank's job: how often the host waits for the GPU, greedy and sampled, in a verification;
    and from the outcome of another to the draft's answer, a hit."""
    fake_gpus()
    model = copy.deepcopy(random_model()).to("cuda:0")
    found = []
    for temperature in (0, 1):
        made = decoder(model, model, temperature=temperature, public_noise=True)
        record = run_rounds(made, RAGGED[:1], 2)
        speculation = made.speculator.speculate(*record[-1])
        before = FakeCUDA.host_waits
        outcome = made.target.verify(speculation)
        verified = FakeCUDA.host_waits
        made.target.advance(outcome)
        draft = made.speculator.draft
        cache = draft.pre_speculate(speculation)
        guessed = FakeCUDA.host_waits
        outcome = Outcome(cache.guesses.num_accepted[:, 0], cache.guesses.bonus[:, 0])
        assert draft.speculate(speculation, outcome, cache).source == PRIMARY
        found.append([verified - before, guessed - verified, FakeCUDA.host_waits - guessed])
    return found


def test_how_often_the_host_waits_for_the_gpu():
    """For a verdict; for what the cache is made of; for the tokens of the last speculation."""
    assert in_ranks(1, count_host_waits) == [[[1, 1, 1]] * 2]


def waits_for_a_pace() -> int:
    """A rank's job."""
    fake_gpus()
    model = CausalLM(copy.deepcopy(random_model()).to("cuda:0"))
    before = FakeCUDA.host_waits
    model.set_pace(1e6)
    return FakeCUDA.host_waits - before


def test_a_pace_is_compared_with_passes_that_have_ended():
    """Not with their launches."""
    assert in_ranks(1, waits_for_a_pace) == [3]


def send_to_host() -> list:
    """A rank's job: what is sent of a speculation drafted on a GPU, where another rank has none."""
    fake_gpus()
    sent = []
    dist.broadcast = lambda message, *_: sent.append((str(message.device), message.tolist()))
    gloo = SimpleNamespace(draft_rank=1, world_group=None, channel_device=torch.device("cpu"))
    drafted = Speculation(torch.tensor([[3, 4]]).to("cuda:0"), torch.ones(1, 2, 2).to("cuda:0"),
                          torch.tensor([PRIMARY]))
    Channel(gloo, 2, 2, torch.float32).send_speculation(drafted)
    return sent


def test_a_speculation_has_left_the_gpu_before_it_is_sent_from_host_memory():
    assert in_ranks(1, send_to_host) == [[("cpu", [[PRIMARY, 3, 4, 1, 1, 1, 1]])]]


# ---- CUDA graphs ----

def write(made: Decoder, prompts: list[list[int]], count: int) -> list[list[int]]:
    made.settings.max_new_tokens = count
    return made(prompts)


@slow
def test_captured_passes_write_the_same_text(fake_graphs, monkeypatch):
    """In batches of other rows and in other buffers, which other graphs must serve; and in the same
    buffers for longer texts than those that were captured."""
    monkeypatch.setattr(FakeGraph, "captures", 0)
    monkeypatch.setattr(FakeGraph, "replays", 0)
    model = random_model()
    draft = imitation(model, 0.15)
    eager = decoder(model, draft)
    graphs = decoder(model, draft)
    models = graphs.target.model, graphs.speculator.draft.model
    for model in models:
        model.forward_fn = cuda_graphs.GraphRunner(model)
    longer = [([[7] * 30], 2), (RAGGED[:1], 18), (RAGGED[2:3], 18)]
    for prompts, count in longer + [(prompts, 18) for prompts in (RAGGED, *[RAGGED[:1]] * 4)]:
        before = FakeGraph.captures
        assert write(graphs, prompts, count) == write(eager, prompts, count)
    assert FakeGraph.captures == before, "the last batch was decoded before: nothing is new"
    assert before > 4 and FakeGraph.replays > 3 * before
    assert all(isinstance(model.forward_fn, cuda_graphs.GraphRunner) for model in models)


def refuse(*_, **__):
    raise RuntimeError("operation not permitted")


def replay_wrongly(graph: FakeGraph, replay=FakeGraph.replay) -> None:
    replay(graph)
    *_, output = graph.operations[-1]
    output.add_(1)


@pytest.mark.parametrize("replay, reason", (
    (refuse, "operation not permitted"),
    (lambda graph: None, "the captured pass gives other logits"),  # nothing was captured
    (replay_wrongly, "the captured pass gives other logits")))
def test_what_cannot_be_captured_runs_eagerly(replay, reason, fake_graphs, monkeypatch, capsys):
    monkeypatch.setattr(FakeGraph, "replay", replay)
    made = decoder(random_model(), mode="ar")
    model = made.target.model
    model.forward_fn = cuda_graphs.GraphRunner(model)
    assert write(made, [[1, 2]], 20) == greedy_reference(random_model(), [[1, 2]], 20)
    assert model.forward_fn == model.forward_eager
    assert capsys.readouterr().err.count(f"run eagerly: {reason}") == 1


def test_graphs_end_before_the_communicators_that_they_use(monkeypatch):
    graph = nullcontext()
    graph.enter_result = [graph]  # as a model knows its runner, and a runner its model
    ended = weakref.ref(graph)
    destroyed = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: destroyed.append(ended()))
    del graph
    gc.disable()
    try:
        launch.run(Settings(), lambda settings: None)
    finally:
        gc.enable()
    assert destroyed == [None]


# ---- a target that several ranks share ----

SHARED = {"llama": dict(tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
          "qwen3": dict(head_dim=8), "qwen2": {}, "olmo2": {}, "gpt_neox": {}, "mistral": {},
          "gemma2": {}, "phi": {}}
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]])


def uneven(model):
    """A copy whose biases are not 0 and whose norms are not 1."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight += 0.3 * torch.randn_like(weight)
    return model


def load_share(folder: Path) -> CausalLM:
    config = AutoConfig.from_pretrained(folder)
    share = load_sharded(str(folder), config, torch.float64, "cpu", dist.group.WORLD)
    return CausalLM(share)


def logits_of(model: CausalLM, passes: int = 1) -> list[list]:
    """The logits of TOKENS by every pass."""
    model.allocate(2, 8, 8)
    start = torch.zeros(2, dtype=torch.long)
    return [model.causal(TOKENS, start).tolist() for _ in range(passes)]


def assert_logits_are_those_of(model, logits: list[list]) -> None:
    with torch.inference_mode():
        whole = model(TOKENS, use_cache=False).logits
    found = torch.tensor(logits).double()
    torch.testing.assert_close(found, whole.expand_as(found), rtol=1e-5, atol=1e-5)


def logits_of_shares(folders: list[Path]) -> list[list]:
    """A rank's job: for every checkpoint the logits of this rank."""
    dist.init_process_group("gloo")
    found = []
    for folder in folders:
        share = load_share(folder)
        whole = AutoModelForCausalLM.from_config(share.model.config)
        assert share.model.num_parameters() < 0.8 * whole.num_parameters()
        found.append(logits_of(share))
    return found


def test_two_shares_of_a_target_give_the_logits_of_the_whole(tmp_path):
    models = [uneven(random_model(family, **dict(num_key_value_heads=2) | changes))
              for family, changes in SHARED.items()]
    folders = [tmp_path / family for family in SHARED]
    for model, folder in zip(models, folders):
        model.save_pretrained(folder, max_shard_size="20KB")  # several files
    for found in in_ranks(2, logits_of_shares, folders):
        for model, logits in zip(models, found):
            assert_logits_are_those_of(model, logits)


def captured_shares(folder: Path, trouble: str) -> tuple[list, int, bool]:
    """A rank's job: logits of five passes, how many were replayed, and whether the rank still
    captures. Rank 1 has the trouble."""
    dist.init_process_group("gloo")
    for name, value in FAKES.items():
        setattr(torch.cuda, name, value)
    if dist.get_rank() == 1 and trouble == "capture":
        torch.cuda.graph = refuse
    if dist.get_rank() == 1 and trouble == "replay":
        FakeGraph.replay = replay_wrongly
    model = load_share(folder)
    model.forward_fn = cuda_graphs.GraphRunner(model, dist.group.WORLD)
    return logits_of(model, passes=5), FakeGraph.replays, model.forward_fn != model.forward_eager


@slow
@pytest.mark.parametrize("trouble", ("", "capture", "replay"))
def test_shares_are_captured_on_all_ranks_or_on_none(trouble, tmp_path):
    random_model().save_pretrained(tmp_path)
    for logits, replays, captures in in_ranks(2, captured_shares, tmp_path, trouble):
        assert_logits_are_those_of(random_model(), logits)
        assert captures == (not trouble)
        assert replays == 6 or trouble, "one on trial, and five passes"
