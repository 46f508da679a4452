"""Processes and devices through accelerate's launcher: a laptop, several GPUs, or DeepSpeed."""

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from typing import Any, NamedTuple, TypeVar, cast

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import InitProcessGroupKwargs, broadcast_object_list, gather_object
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d
from transformers.integrations import unset_hf_deepspeed_config

from align.core import heartbeat
from align.core.errors import OtherProcessError, UserError, counted, is_lost_process, reason
from align.core.plugins import install_hint
from align.runtime.deepspeed_settings import make_plugin
from align.runtime.process import return_freed_memory
from align.runtime.progress import console

try:
    import fcntl
except ImportError:  # Windows, where DeepSpeed does not compile operators
    fcntl = None  # type: ignore[assignment]

Item = TypeVar("Item")

COLLECTIVE_TIMEOUT_S = 1800.0
"""Default timeout of collectives, long enough to wait while one process writes a checkpoint (NCCL's default: 10 minutes)."""
MEETING_SECONDS = 20.0
"""Seconds after which processes that have not connected print that they are waiting."""
NOT_SUPPORTED = {
    "FSDP": "ACCELERATE_USE_FSDP",
    "Megatron-LM": "ACCELERATE_USE_MEGATRON_LM",
    "accelerate's parallelism_config": "ACCELERATE_USE_PARALLELISM_CONFIG",
}
"""Launcher features that are not supported, with the environment variable that requests them."""
_timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)


@cache
def bfloat16_is_fast() -> bool:
    """Return whether bfloat16 is computed in hardware. T4 and V100 emulate it, slower than float32."""
    if torch.cuda.is_available():
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return bool(cpu_flags() & {"amx_bf16", "avx512_bf16"})


@cache
def cpu_flags() -> frozenset[str]:
    """Return the CPU features under their Linux names. Empty on other systems."""
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        return frozenset(next((line for line in file if line.startswith(("flags", "Features"))), "").split())
    return frozenset()


def compute_dtype(name: str) -> torch.dtype:
    """Return the torch dtype for a config's `dtype`."""
    if name == "auto":
        return torch.bfloat16 if bfloat16_is_fast() else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def computes_on_cpu() -> bool:
    """Return whether to use the CPU: without a GPU, and on Apple's GPUs, which lack float64 for sums."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return device is None or device.type == "mps" or torch.backends.mps.is_available()


class OperatorLock:
    """Replacement for torch's `FileBaton`: one process at a time compiles DeepSpeed operators.

    torch waits while a lock file exists. A killed process leaves this file behind, so later runs would hang. This class uses
    a kernel lock on a separate file next to torch's `path`. The process that waited compiles the remaining operators.
    """

    def __init__(self, path: str, **options: float | None) -> None:
        self.path, self.descriptor = f"{path}.align", -1

    def try_acquire(self) -> bool:
        """Wait for the lock. Always returns True, which lets the caller compile."""
        self.descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        with suppress(OSError):  # the file system may not support locks
            fcntl.lockf(self.descriptor, fcntl.LOCK_EX)
        return True

    def release(self) -> None:
        """Release the lock."""
        os.close(self.descriptor)


def deepspeed_was_launched() -> bool:
    """Return whether the launcher requested DeepSpeed."""
    return os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"


def prepare_compiling() -> None:
    """Make torch compile under an `OperatorLock`, and find ninja in an environment that is not activated."""
    programs = os.path.dirname(sys.executable)
    if programs not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join([programs, os.environ.get("PATH", "")])
    if fcntl is not None:
        import torch.utils.cpp_extension  # slow import, needed only with DeepSpeed

        torch.utils.cpp_extension.FileBaton = OperatorLock  # type: ignore[misc,assignment]


def make_accelerator(
    dtype: torch.dtype, max_grad_norm: float, collective_timeout: float = COLLECTIVE_TIMEOUT_S, **kwargs: Any
) -> Accelerator:
    """Create the accelerator of a run, with DeepSpeed and `max_grad_norm` if requested by the launcher.

    Args:
        dtype: dtype of the model.
        max_grad_norm: gradient clipping threshold for DeepSpeed.
        collective_timeout: seconds after which a collective between processes ends the run.
        kwargs: further arguments of `Accelerator`.

    Raises:
        UserError: If the launcher requests FSDP, or requests DeepSpeed and it is not installed.
    """
    for name, variable in NOT_SUPPORTED.items():
        if os.environ.get(variable) == "true":  # with FSDP, each process would silently hold the full model
            raise UserError(f"{name} is not supported; use DeepSpeed (configs/accelerate/zero2.yaml)")
    # A second run in the same process gets new settings and keeps the process group.
    AcceleratorState._reset_state()
    timeout = timedelta(seconds=collective_timeout)
    process_group = InitProcessGroupKwargs(timeout=timeout)
    deepspeed = deepspeed_was_launched()
    if deepspeed and not torch.cuda.is_available():
        # Without an explicit backend, DeepSpeed on CPUs makes every process rank 0 of 1.
        process_group = InitProcessGroupKwargs(backend="gloo", timeout=timeout)
    try:
        if deepspeed:
            prepare_compiling()
            kwargs["deepspeed_plugin"], line = make_plugin(dtype, max_grad_norm)
            print_once(line)
        with waiting_for_others():
            accelerator = Accelerator(
                cpu=computes_on_cpu() and not deepspeed,  # required for CPU processes to connect
                mixed_precision="bf16" if deepspeed and dtype == torch.bfloat16 else "no",
                kwargs_handlers=[process_group],
                **kwargs,
            )
    except ImportError as error:
        raise UserError(f"DeepSpeed is not installed; {install_hint('deepspeed')}") from error
    limit_collectives(timeout)
    if zero_stage(accelerator) == 3:
        return_freed_memory()
    if deepspeed:
        # transformers would load the full model on the first process; align.runtime.sharding avoids that.
        unset_hf_deepspeed_config()
    return accelerator


@contextmanager
def waiting_for_others() -> Iterator[None]:
    """Print a message if connecting the processes inside the block takes long.

    Raises:
        UserError: If they cannot connect, for example because a port is in use.
    """
    count = os.environ.get("WORLD_SIZE", "1")
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    hint = f"all {count} processes need the MASTER_ADDR and MASTER_PORT of process 0"
    line = f"process {os.environ.get('RANK')} is waiting for the others at {where}; {hint}"
    timer = threading.Timer(MEETING_SECONDS, print, (line,), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    if count != "1":
        timer.start()
    try:
        yield
    except torch.distributed.DistError as error:
        if is_lost_process(error):
            raise
        raise UserError(f"the processes cannot connect at {where} ({reason(error)}); {hint}") from error
    finally:
        timer.cancel()


def launch_line(accelerator: Accelerator) -> str:
    """Return a line that describes the launched processes, or "" without a launcher."""
    if not any(name.startswith("ACCELERATE_") or name == "WORLD_SIZE" for name in os.environ):
        return ""
    stage = zero_stage(accelerator)
    line = f"{counted(accelerator.num_processes, 'process')} on {accelerator.device.type}"
    if stage:
        line += f", DeepSpeed ZeRO-{stage}"
    if accelerator.num_processes == 1 and os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true":
        line += "; with --cpu, `accelerate launch` ignores --num_processes; use `align launch`"
    return line


def print_once(line: str) -> None:
    """Print a line on the first process. An empty line is not printed."""
    if line and os.environ.get("RANK", "0") == "0":
        console.print(line)


def limit_collectives(timeout: timedelta | None = None) -> None:
    """Set the timeout of every process group. Default: the timeout of the last call.

    Call this after every step that may have created a group, because libraries create groups with torch's default timeout.
    """
    global _timeout
    _timeout = timeout or _timeout
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        for group in list(c10d._world.pg_names):
            c10d._set_pg_timeout(_timeout, group)


def watch_other_processes(accelerator: Accelerator) -> None:
    """Exit with an error message when another process is lost, see `align.core.heartbeat`."""
    if accelerator.num_processes > 1:
        rank, barrier = accelerator.process_index, accelerator.wait_for_everyone
        heartbeat.start_watching(c10d._get_default_store(), rank, accelerator.num_processes, barrier)


def zero_stage(accelerator: Accelerator) -> int:
    """Return the ZeRO stage, 0 without DeepSpeed."""
    plugin = accelerator.state.deepspeed_plugin
    return plugin.zero_stage if plugin is not None else 0


def gather_rows(rows: Sequence[Item], accelerator: Accelerator) -> list[Item]:
    """Gather rows (plain Python objects) from all processes in rank order, on every process."""
    return list(rows) if accelerator.num_processes == 1 else list(gather_object(list(rows)))


def shard_of_process(items: Sequence[Item], accelerator: Accelerator) -> list[Item]:
    """Return every n-th item for this of n processes. This balances the work if items are sorted by cost."""
    return list(items[accelerator.process_index :: accelerator.num_processes])


def map_across_processes(
    items: Sequence[Item], work: Callable[[list[Item]], list[Any]], accelerator: Accelerator
) -> list[Any]:
    """Apply `work` to each process's items (`shard_of_process`). Return all results in order on every process."""
    results: list[Any] = [None] * len(items)
    numbers = shard_of_process(range(len(items)), accelerator)
    own_results = work([items[number] for number in numbers]) if numbers or accelerator.num_processes > 1 else []
    for number, result in gather_rows(list(zip(numbers, own_results, strict=True)), accelerator):
        results[number] = result
    return results


def run_on_main(work: Callable[[], Item], accelerator: Accelerator) -> Item:
    """Call `work` on the first process and broadcast its result, a plain Python object.

    If `work` fails, the other processes raise a UserError or OtherProcessError.
    """
    if accelerator.num_processes == 1:
        return work()
    outcome, error = _outcome(work, 0) if accelerator.is_main_process else (None, None)
    shared: list[Any] = [outcome]
    broadcast_object_list(shared)
    return cast(Item, _result_of(shared[0], error))


def run_on_all(work: Callable[[], Item], accelerator: Accelerator) -> list[Item]:
    """Call `work` on every process. Return all results in rank order. `work` must not communicate.

    If `work` fails on one process, all processes raise an error, as in `run_on_main`, so that none waits for the others.
    """
    if accelerator.num_processes == 1:
        return [work()]
    own, error = _outcome(work, accelerator.process_index)
    outcomes = gather_rows([own], accelerator)
    _result_of(next((outcome for outcome in outcomes if outcome.fault is not None), own), error)
    return [cast(Item, outcome.result) for outcome in outcomes]


class _Outcome(NamedTuple):
    """Result of a process, or its error in one line."""

    result: Any
    fault: str | None = None
    is_users: bool = False


def _outcome(work: Callable[[], Any], rank: int) -> tuple[_Outcome, Exception | None]:
    try:
        return _Outcome(work()), None
    except Exception as error:
        is_users = isinstance(error, UserError)
        return _Outcome(None, str(error) if is_users else f"process {rank} failed: {reason(error)}", is_users), error


def _result_of(outcome: _Outcome, own_error: Exception | None) -> Any:
    if own_error:
        raise own_error
    if outcome.fault is not None:
        raise UserError(outcome.fault) if outcome.is_users else OtherProcessError(outcome.fault)
    return outcome.result


@torch.no_grad()
def broadcast_trainable_weights(module: nn.Module, accelerator: Accelerator) -> None:
    """Broadcast all trainable weights from the first process, except those loaded as shards."""
    if accelerator.num_processes == 1:
        return
    for weight in module.parameters():
        if weight.requires_grad and weight.numel():  # under ZeRO-3, sharded weights are empty tensors
            values = weight.to(accelerator.device).contiguous()  # NCCL supports only GPU tensors
            torch.distributed.broadcast(values, src=0)
            weight.copy_(values)


def max_across_processes(number: int, accelerator: Accelerator) -> int:
    """Return the maximum of a number over all processes."""
    if accelerator.num_processes == 1:
        return number
    value = torch.tensor(number, device=accelerator.device)
    torch.distributed.all_reduce(value, op=torch.distributed.ReduceOp.MAX)
    return int(value)


def sum_across_processes(values: Tensor, accelerator: Accelerator) -> Tensor:
    """Return the sum of a tensor over all processes."""
    return accelerator.reduce(values, reduction="sum") if accelerator.num_processes > 1 else values
