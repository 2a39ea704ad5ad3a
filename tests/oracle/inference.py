"""Runs a TorchScript file on an input, and prints the output. The input is given as its shape and its f32 numbers in
hexadecimal."""

import ctypes
import json
import sys

import torch

# The number of threads decides in which order sums are added up.
torch.set_num_threads(int(sys.argv[2]))
# As the manual recommends; outside of all regions it makes no difference.
torch._C._jit_set_autocast_mode(False)
request = json.load(sys.stdin)
inputs = torch.frombuffer(bytearray.fromhex(request["bits"]), dtype=torch.float32).view(request["shape"])
module = torch.jit.load(sys.argv[1])
assert not list(module.parameters()), "the weights are constants"
with torch.no_grad():
    # The first calls profile, and later ones run what was optimized for it.
    outputs = [module(inputs).contiguous() for _ in range(3)]
assert outputs[0].dtype == torch.float32
for output in outputs:
    assert torch.equal(output, outputs[0])
print(ctypes.string_at(output.data_ptr(), output.numel() * output.element_size()).hex())
