"""Prints the examples of each rank, as torch.utils.data.DistributedSampler chooses them: JSON
[[length, ranks, seed, epoch, shuffle, drop_last], ...] on stdin, and on stdout a line of JSON for each, a list of indices
for each rank.

tests/processes/distributed/sampler.rs chooses the same.
"""

import json
import sys

from torch.utils.data import DistributedSampler

sys.dont_write_bytecode = True


def shares(length, ranks, seed, epoch, shuffle, drop_last):
    for rank in range(ranks):
        sampler = DistributedSampler(
            range(length), num_replicas=ranks, rank=rank, shuffle=shuffle, seed=seed, drop_last=drop_last
        )
        sampler.set_epoch(epoch)
        share = list(sampler)
        assert len(share) == len(sampler)
        yield share


for case in json.load(sys.stdin):
    print(json.dumps(list(shares(*case))), flush=True)
