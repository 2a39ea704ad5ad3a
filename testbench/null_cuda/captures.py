"""What null CUDA says of captures, with Python's torch: `cargo xtask null-cuda --values python captures.py`.

The rules are those of NVIDIA's documentation; each of them is broken here once.
"""

import ctypes

import torch

RUNTIME = ctypes.CDLL("libcudart.so.13")
RUNTIME.null_cuda_count.restype = ctypes.c_int64
CUDA = "cuda:0"


def count(kind):
    return RUNTIME.null_cuda_count(0, kind.encode())


def captured(work):
    """A graph of what `work` does, and its result."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = work()
    return graph, out


def replays_compute():
    x, factor = torch.ones(3, device=CUDA), torch.tensor(2.0, device=CUDA)
    graph, y = captured(lambda: (x * factor).sum())
    RUNTIME.null_cuda_reset()
    for number in range(1, 4):
        x.fill_(number)
        factor.fill_(number)
        graph.replay()
        assert y.item() == 3 * number * number, y
    assert count("graph/launch") == 3
    assert count("replayed/launch/") == 6, count("replayed/launch/")
    # Two numbers are written for each replay, and one is read.
    assert (count("launch/"), count("wait/")) == (6, 3)


def numbers_of_the_host_stand_still():
    x, factor = torch.ones(3, device=CUDA), 2.0
    graph, y = captured(lambda: x * factor)
    factor = 5.0
    graph.replay()
    assert y.tolist() == [2.0] * 3 and factor == 5.0


def random_numbers_go_on():
    x = torch.ones(100, device=CUDA)
    torch.nn.functional.dropout(x, 0.5)
    graph, y = captured(lambda: torch.nn.functional.dropout(x, 0.5))
    masks = []
    for _ in range(3):
        graph.replay()
        masks.append(y.tolist())
    assert masks[0] != masks[1] != masks[2] != masks[0]


def joined_streams_are_captured():
    x, side = torch.ones(3, device=CUDA), torch.cuda.Stream()

    def work():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x * 2
        torch.cuda.current_stream().wait_stream(side)
        return y + 1

    graph, y = captured(work)
    x.fill_(4)
    graph.replay()
    assert y.tolist() == [9.0] * 3


def breaks(work):
    """Whether a capture of `work` fails, and captures are possible again afterwards."""
    try:
        captured(work)
    except RuntimeError:
        torch.cuda.synchronize()
        captured(lambda: torch.ones(3, device=CUDA))
        return True
    return False


def what_waits_breaks_a_capture():
    x, side = torch.ones(3, device=CUDA), torch.cuda.Stream()
    before = torch.cuda.Event()
    before.record()

    def unjoined():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            return x * 2

    assert not breaks(lambda: x * 2)
    for work in (lambda: x.sum().item(), torch.cuda.synchronize, before.query, before.synchronize, unjoined):
        assert breaks(work), work


for check in (
    replays_compute,
    numbers_of_the_host_stand_still,
    random_numbers_go_on,
    joined_streams_are_captured,
    what_waits_breaks_a_capture,
):
    check()
    print(check.__name__.replace("_", " "))
