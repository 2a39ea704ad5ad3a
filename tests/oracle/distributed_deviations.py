"""PyTorch's side of the differences of several ranks in docs/differences.md: asserts what PyTorch does."""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

sys.dont_write_bytecode = True
import ranks
from deviations import refused


def no_rank_gets_an_example():
    assert list(DistributedSampler([], num_replicas=2, rank=0, shuffle=False)) == []
    assert list(DistributedSampler([7], num_replicas=2, rank=0, drop_last=True)) == []


def shares_have_one_size():
    """Three examples on two ranks: one is repeated, or one is left out."""
    shares = [list(DistributedSampler([7] * 3, num_replicas=2, rank=rank, shuffle=False)) for rank in range(2)]
    assert shares == [[0, 2], [1, 0]], shares
    shares = [
        list(DistributedSampler([7] * 3, num_replicas=2, rank=rank, shuffle=False, drop_last=True)) for rank in range(2)
    ]
    assert shares == [[0], [1]], shares


def batch_norm_needs_a_gpu():
    layer = torch.nn.SyncBatchNorm(3)
    with refused(ValueError, "GPU"):
        layer(torch.ones(2, 3))


def a_nan_can_be_lost(rank):
    lost = 0
    for broken in range(2):
        tensor = torch.tensor([float("nan") if rank == broken else 1.0])
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        lost += not tensor.isnan().item()
    counts = torch.tensor(lost)
    dist.all_reduce(counts, dist.ReduceOp.SUM)
    assert counts > 0, "no NaN was lost"


def other_calls_are_waited_for(rank):
    """Rank 0 waits for a second call, which rank 1 never makes."""
    if rank == 1:
        dist.barrier()
        return
    dist.barrier()
    with refused(RuntimeError):
        dist.all_reduce(torch.ones(2))


def run(rank, folder):
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=3))
    batch_norm_needs_a_gpu()
    a_nan_can_be_lost(rank)
    other_calls_are_waited_for(rank)


def main():
    no_rank_gets_an_example()
    shares_have_one_size()
    with ranks.ended(2, run):
        print("ok")


main()
