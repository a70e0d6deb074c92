"""This process among the ranks: Accelerate's set-up, and sums and maxima over all of them.

In: RANK, WORLD_SIZE and LOCAL_RANK, as torchrun sets them, and a file by which the ranks meet. Out: a wrapped model
whose gradients are averaged over the ranks, and reduced numbers. No rank enters a collective before all were given the
same work. Knows neither batch nor loss.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import cast

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, DistributedType
from torch import Tensor, nn

from claw_train.errors import TrainerError, boundary


class Ranks:
    """Accelerate behind the few calls the trainer needs."""

    def __init__(self, meeting: Path | None = None, timeout_s: float = 1800.0) -> None:
        """Joins the other ranks.

        Args:
            meeting: a file all ranks can write, new for each start; unused with one rank.
            timeout_s: of each collective.

        Raises:
            TrainerError: the ranks did not find one another.
        """
        size = int(os.environ.get("WORLD_SIZE", "1"))
        with boundary(TrainerError, f"rank {os.environ.get('RANK', '0')} of {size} could not join"):
            if size > 1:
                assert meeting is not None
                # a file instead of a port: nothing listens on the network but gloo on the loopback device
                torch.distributed.init_process_group(
                    "nccl" if torch.cuda.is_available() else "gloo",
                    init_method=f"file://{meeting}",
                    rank=int(os.environ["RANK"]),
                    world_size=size,
                    timeout=timedelta(seconds=timeout_s),
                )
            self._accelerator = Accelerator(
                cpu=not torch.cuda.is_available(),
                kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)],
            )
        if self._accelerator.num_processes != size:
            raise TrainerError(f"{size} ranks were started, Accelerate sees {self._accelerator.num_processes}")
        if self._accelerator.distributed_type == DistributedType.FSDP:
            raise TrainerError("sharded parameters are not supported; unset ACCELERATE_USE_FSDP")

    @property
    def rank(self) -> int:
        """From 0; rank 0 writes the files."""
        return self._accelerator.process_index

    @property
    def count(self) -> int:
        """Number of ranks."""
        return self._accelerator.num_processes

    @property
    def device(self) -> torch.device:
        """Of this rank."""
        return self._accelerator.device

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The model as DDP when there are several ranks, and the optimizer as Accelerate wants it."""
        return self._accelerator.prepare(model, optimizer)

    def backward(self, loss: Tensor) -> None:
        """Accumulates gradients; outside `no_sync` they are averaged over the ranks."""
        self._accelerator.backward(loss)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[object]:
        """Within it, backward keeps gradients to itself."""
        return self._accelerator.no_sync(model)

    def clip(self, parameters: list[nn.Parameter], max_norm: float) -> float:
        """Clips the gradients and returns their norm before."""
        norm = self._accelerator.clip_grad_norm_(parameters, max_norm)
        assert norm is not None
        return float(norm)

    def total(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Adds each entry over the ranks; all must give the same names."""
        return self._gather(sums, lambda x: x.sum(dim=0))

    def peak(self, values: Mapping[str, float]) -> dict[str, float]:
        """Maximum of each entry over the ranks."""
        return self._gather(values, lambda x: x.amax(dim=0))

    def _gather(self, values: Mapping[str, float], join: Callable[[Tensor], Tensor]) -> dict[str, float]:
        if self.count == 1 or not values:
            return dict(values)
        names = sorted(values)
        mine = torch.tensor([[values[n] for n in names]], dtype=torch.float64, device=self.device)
        everyone = cast(Tensor, self._accelerator.gather(mine))
        return dict(zip(names, join(everyone).tolist(), strict=True))
