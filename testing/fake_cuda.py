"""GPUs for tests: real ones, where there are some, and stand-ins for them and for CUDA graphs, on
which the code for GPUs runs without one, and fails where it would on a GPU.
"""
import os
import warnings
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes


class FakeGraph(TorchDispatchMode):
    """Stands in for a CUDA graph: remembers the operations of a pass with the very tensors that
    they took and gave, and repeats them on these. As on a GPU all-reduces are captured, but wait
    for no other rank before the graph is replayed."""
    captures = 0
    replays = 0
    capturing = False

    def __init__(self):
        super().__init__()
        self.operations = []

    def pool(self) -> None:
        return None

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        given = operation(*arguments, **options or {})
        self.operations.append(on_host((operation, arguments, options or {}, given)))
        return given

    @contextmanager
    def capture(self, *_, **__):
        FakeGraph.captures += 1
        all_reduce = dist.all_reduce

        def remember(tensor, group):
            self.operations.append(on_host((all_reduce, (tensor,), {"group": group}, None)))

        with mock.patch.object(dist, "all_reduce", remember), self:
            FakeGraph.capturing = True
            yield
            FakeGraph.capturing = False

    def replay(self) -> None:
        FakeGraph.replays += 1
        with _disable_current_modes():  # all of it lies in host memory
            for operation, arguments, options, given in self.operations:
                again = operation(*arguments, **options)
                for old, new in zip(tensors_in(given), tensors_in(again)):
                    if old.data_ptr() != new.data_ptr():
                        old.copy_(new)  # else: a view, or in place


EVENT = SimpleNamespace(record=lambda: None, synchronize=lambda: None, elapsed_time=lambda end: 0.0)


class FakeStream:
    def wait_stream(self, other) -> None:
        """Nothing runs beside anything."""


FAKES = {"CUDAGraph": FakeGraph, "graph": FakeGraph.capture, "Event": lambda enable_timing: EVENT,
         "Stream": FakeStream, "current_stream": FakeStream,
         "stream": lambda _: nullcontext()}  # in place of those of torch.cuda


CPU = torch.device("cpu")
READS = {"item", "_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal"}


class FakeCUDATensor(Tensor):
    """Stands in for a tensor on a GPU: it has the device, and its numbers are in host memory."""

    @staticmethod
    def __new__(cls, numbers: Tensor, device: torch.device):
        with torch.inference_mode(False):
            return Tensor._make_wrapper_subclass(
                cls, numbers.shape, numbers.stride(), numbers.storage_offset(),
                dtype=numbers.dtype, device=device)

    def __init__(self, numbers: Tensor, device: torch.device):
        self.numbers = numbers

    def tolist(self) -> list:
        return self.cpu().tolist()

    def __torch_dispatch__(self, *_, **__):
        raise RuntimeError("a tensor on a GPU, and no FakeCUDA")


@torch.library.impl("aten::bmm.dtype", "CPU")  # PyTorch has it for GPUs alone
def bmm(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.bmm(left.to(dtype), right.to(dtype))


class FakeCUDA(TorchDispatchMode):
    """Every operation of PyTorch passes through here and, as on a GPU, tensors of different devices
    cannot meet in one, none can be copied between devices while a graph is captured, and a copy to
    the host must be waited for: there is a warning whenever the host waits, for numbers or to hand
    some over."""

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        options = options or {}
        name = operation.overloadpacket.__name__
        if name == "to":  # becomes a copy, if it must be one
            with self:
                return operation.decompose(*arguments, **options)
        tensors = tensors_in(arguments, *options.values())
        # a number may meet tensors of any device, and one without numbers is on none
        devices = {tensor.device for tensor in tensors
                   if tensor.device.type == "cuda" or tensor.dim() and tensor.device == CPU}
        copies = name in ("copy_", "_to_copy")
        target = options.get("device")
        if target is None:
            target = tensors[0].device if copies else next(iter(devices), CPU)
        if all(device.type != "cuda" for device in devices | {target}):
            return operation(*arguments, **options)
        crosses = copies and tensors[-1].device != target
        if not copies and devices - {target}:
            raise RuntimeError(f"{operation}: tensors on {devices}")
        blocks = crosses and not (options.get("non_blocking") or True in arguments[2:])
        if crosses and target == CPU and not blocks:
            raise RuntimeError("the host would read before the copy has ended")
        if blocks or name in READS:
            warnings.warn("called a synchronizing CUDA operation", stacklevel=2)
        if FakeGraph.capturing and (crosses or name in READS):
            raise RuntimeError("operation not permitted when stream is capturing")
        known = {id(on_host(tensor)): tensor for tensor in tensors}  # changed in place
        return on_device(operation(*on_host(arguments), **on_host(options)), target, known)


def on_device(computed, device: torch.device, known: dict[int, Tensor]):
    """All tensors as tensors on the device, those whose numbers are `known` as what they were."""
    if isinstance(computed, (list, tuple)):
        return type(computed)(on_device(part, device, known) for part in computed)
    if id(computed) in known or device == CPU or not isinstance(computed, Tensor):
        return known.get(id(computed), computed)
    return FakeCUDATensor(computed, device)


def on_host(value):
    """All tensors as their numbers in host memory, and devices as the CPU."""
    if isinstance(value, FakeCUDATensor):
        return value.numbers
    if type(value) in (list, tuple):
        return type(value)(map(on_host, value))
    if type(value) is dict:
        return {key: on_host(part) for key, part in value.items()}
    return CPU if isinstance(value, torch.device) else value


def tensors_in(*values) -> list[Tensor]:
    found = []
    for value in values:
        if isinstance(value, (list, tuple)):
            found += tensors_in(*value)
        elif isinstance(value, Tensor):
            found.append(value)
    return found


def fake_gpus(count: int = 2) -> None:
    """From now on this process, for the rest of its life, has so many GPUs. gloo stands in for
    NCCL, `FakeGraph` for a CUDA graph. Layers are not compiled: PyTorch's compiler leaves alone
    what runs in a mode such as `FakeCUDA`."""
    if torch.cuda.CUDAGraph is FakeGraph:
        return
    new_gloo_group = dist.new_group
    dist.new_group = lambda ranks=None, timeout=None, backend=None: new_gloo_group(ranks)
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # Module.to makes new ones
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # a mode holds for one thread
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch._C._ensureCUDADeviceGuardSet()  # these three as PyTorch's own FakeTensorMode does
    torch._C._set_only_lift_cpu_tensors(True)
    torch.cuda._lazy_init = lambda: None
    FakeCUDA().__enter__()
    for name, value in FAKES.items():
        setattr(torch.cuda, name, value)
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: count
    torch.cuda.get_device_capability = lambda _: (9, 0)
    torch.cuda.set_sync_debug_mode = lambda mode: None  # they always warn
    warnings.simplefilter("ignore")
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.get_device_name = lambda _: "stand-in"
    torch.cuda.set_device = lambda _: None


def real_gpus(count: int = 1) -> None:
    """From now on this process computes on real GPUs, float32 without TF32. Where there are fewer
    than `count`, all ranks share the first. NCCL refuses that on one machine, so each says that it
    is on a machine of its own."""
    torch.set_float32_matmul_precision("highest")
    if torch.cuda.device_count() < count:
        os.environ |= {"NCCL_HOSTID": os.environ.get("RANK", "0"), "NCCL_SOCKET_IFNAME": "lo",
                       "LOCAL_RANK": "0"}


def on_gpus(*values) -> list:
    """Parameters of a test: `gpus`, and other `values`. `gpus` is `fake_gpus`, which need a PyTorch
    for GPUs, and, where there is a GPU, `real_gpus`. A rank's job calls it first, with the number
    of GPUs that all ranks want, so one job runs on stand-ins and on GPUs."""
    # a text: pytest evaluates it, and no rank, which must not touch CUDA before its job does
    skip = pytest.mark.skipif("not torch.cuda.is_available()", reason="no GPU that PyTorch can use")
    cpu_only = pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="no PyTorch for GPUs")
    return [pytest.param(fake_gpus, *values, marks=cpu_only),
            pytest.param(real_gpus, *values, marks=skip)]
