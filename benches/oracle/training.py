"""The Python side of benches/training.rs: answers a line for each line.

`model NAME FILE` makes a model and saves its weights; `run NAME PRECISION ITERATIONS` trains it and answers with the
nanoseconds of each iteration; `losses NAME PRECISION ITERATIONS` answers with the losses, from the saved weights;
`profile NAME` answers with the shares of an iteration in bf16 that are matrix products and casts, as the profiler has
measured them; `scaling NAME ITERATIONS NORM` answers with what dynamic loss scaling costs as percentages of an
iteration in bf16 without it, without clipping and with it; `anomaly NAME ITERATIONS` answers with the nanoseconds of
iterations in bf16, in turns as they are and within torch.autograd.detect_anomaly.
"""

import sys
from statistics import median
from time import perf_counter_ns

import torch
from torch import nn
from torch.nn import functional as F


class Mlp(nn.Module):
    def __init__(self, layers, width, rows):
        super().__init__()
        for i in range(layers):
            self.add_module(str(i), nn.Linear(width, width))
        self.shape = (rows, width)

    def batch(self):
        return torch.randn(self.shape), torch.randn(self.shape)

    def loss(self, xs, ys):
        for layer in self.children():
            xs = F.gelu(layer(xs))
        return F.mse_loss(xs.float(), ys)


class Block(nn.Module):
    def __init__(self, width, heads, causal):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads, self.causal = heads, causal

    def attention(self, xs):
        rows, length, width = xs.shape
        qkv = self.qkv(xs).view(rows, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        ys = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=self.causal)
        return self.out(ys.transpose(1, 2).reshape(rows, length, width))

    def forward(self, xs):
        xs = xs + self.attention(self.norm1(xs))
        return xs + self.down(F.gelu(self.up(self.norm2(xs))))


class Gpt(nn.Module):
    def __init__(self, width, blocks, heads, length, vocabulary, rows):
        super().__init__()
        self.length, self.vocabulary, self.rows = length, vocabulary, rows
        self.embedding = nn.Embedding(self.vocabulary, width)
        self.places = nn.Embedding(self.length, width)
        self.blocks = nn.ModuleList(Block(width, heads, True) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, self.vocabulary)

    def batch(self):
        tokens = torch.randint(self.vocabulary, (self.rows, self.length + 1))
        return tokens[:, :-1], tokens[:, 1:].contiguous()

    def loss(self, xs, ys):
        xs = self.embedding(xs) + self.places(torch.arange(self.length, device=xs.device))
        for block in self.blocks:
            xs = block(xs)
        ys_ = self.head(self.norm(xs)).float()
        return F.cross_entropy(ys_.view(-1, self.vocabulary), ys.view(-1))


class Bert(nn.Module):
    def __init__(self, width, blocks, heads, length, vocabulary, rows):
        super().__init__()
        self.length, self.vocabulary, self.classes, self.rows = length, vocabulary, 4, rows
        self.embedding = nn.Embedding(self.vocabulary, width)
        self.places = nn.Embedding(self.length, width)
        self.norm = nn.LayerNorm(width)
        self.blocks = nn.ModuleList(Block(width, heads, False) for _ in range(blocks))
        self.head = nn.Linear(width, self.classes)

    def batch(self):
        return torch.randint(self.vocabulary, (self.rows, self.length)), torch.randint(self.classes, (self.rows,))

    def loss(self, xs, ys):
        xs = self.norm(self.embedding(xs) + self.places(torch.arange(self.length, device=xs.device)))
        for block in self.blocks:
            xs = block(xs)
        return F.cross_entropy(self.head(xs[:, 0]).float(), ys)


class Layer(nn.Module):
    def __init__(self, start, to, stride):
        super().__init__()
        self.conv = nn.Conv2d(start, to, 3, stride=stride, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(to)

    def forward(self, xs):
        return self.norm(self.conv(xs))


class Conv(nn.Module):
    def __init__(self, count, size):
        super().__init__()
        self.count, self.size = count, size
        self.stem = Layer(3, 64, 1)
        for i, (start, to) in enumerate([(64, 64), (64, 128), (128, 256)]):
            self.add_module(f"down{i}", Layer(start, to, 1 if i == 0 else 2))
            self.add_module(f"same{i}", Layer(to, to, 1))
        self.head = nn.Linear(256, 10)

    def batch(self):
        return torch.randn(self.count, 3, self.size, self.size), torch.randint(10, (self.count,))

    def loss(self, xs, ys):
        for name, layer in self.named_children():
            if name == "head":
                continue
            out = layer(xs)
            xs = F.relu(out + xs) if out.shape == xs.shape else F.relu(out)
        return F.cross_entropy(self.head(xs.mean((2, 3))).float(), ys)


class Lstm(nn.Module):
    def __init__(self, width, length, rows):
        super().__init__()
        self.shape = (rows, length, width)
        self.lstm, self.head = nn.LSTM(width, width, batch_first=True), nn.Linear(width, width)

    def batch(self):
        return torch.randn(self.shape), torch.randn(self.shape)

    def loss(self, xs, ys):
        return F.mse_loss(self.head(self.lstm(xs)[0]).float(), ys)


MODELS = {
    "mlp_6x32": lambda: Mlp(6, 32, 16),
    "mlp_6x256": lambda: Mlp(6, 256, 64),
    "mlp_4x1024": lambda: Mlp(4, 1024, 256),
    "mlp_4x4096": lambda: Mlp(4, 4096, 4096),
    "gpt": lambda: Gpt(384, 6, 6, 128, 256, 4),
    "gpt_124m": lambda: Gpt(768, 12, 12, 1024, 50304, 8),
    "conv": lambda: Conv(32, 32),
    "conv_large": lambda: Conv(256, 64),
    "bert": lambda: Bert(256, 4, 4, 128, 8192, 8),
    "bert_base": lambda: Bert(768, 12, 12, 128, 30522, 64),
    "lstm": lambda: Lstm(256, 32, 32),
    "lstm_large": lambda: Lstm(1024, 128, 64),
}


PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear", "convolution", "mkldnn", "scaled_dot_product")
CASTS = ("aten::to", "aten::_to_copy", "aten::copy_")


class Training:
    def __init__(self, name, weights, amp, scales=None):
        self.model = MODELS[name]()
        self.model.load_state_dict(weights)
        self.amp = amp
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.scaler = torch.amp.GradScaler("cpu", enabled=amp if scales is None else scales)
        torch.manual_seed(1)
        self.data = self.model.batch()

    def iterate(self):
        self.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.amp):
            loss = self.model.loss(*self.data)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss

    def time(self, iterations):
        times = []
        for _ in range(iterations):
            start = perf_counter_ns()
            self.iterate()
            times.append(str(perf_counter_ns() - start))
        return " ".join(times)

    def timed(self, max_norm):
        """The nanoseconds of an iteration, and of the scaler and the optimizer in it."""
        begin = perf_counter_ns()
        self.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.amp):
            loss = self.model.loss(*self.data)
        forward = perf_counter_ns()
        scaled = self.scaler.scale(loss)
        scale = perf_counter_ns()
        scaled.backward()
        backward = perf_counter_ns()
        if max_norm is not None:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        end = perf_counter_ns()
        return end - begin, scale - forward + end - backward

    def anomaly(self, iterations):
        times = []
        for _ in range(iterations):
            times.append(self.time(1))
            with torch.autograd.detect_anomaly():
                times.append(self.time(1))
        return " ".join(times)

    def profile(self, iterations=5):
        self.iterate()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            start = perf_counter_ns()
            for _ in range(iterations):
                self.iterate()
            total = perf_counter_ns() - start
        events = profile.key_averages()
        products = [e for e in events if e.key.startswith("aten::") and any(word in e.key for word in PRODUCTS)]
        casts = [e for e in events if e.key in CASTS]
        shares = [sum(e.self_cpu_time_total for e in kind) * 1000 / total for kind in (products, casts)]
        return " ".join(map(str, shares))


def scaling(name, weights, iterations, max_norm):
    trainings = [Training(name, weights, True, scales) for scales in (False, True)]
    percentages = []
    for norm in (None, max_norm):
        times = [[training.timed(norm) for training in trainings] for _ in range(iterations + 1)][1:]
        added = median(scaled[1] - plain[1] for plain, scaled in times)
        percentages.append(str(100 * added / median(plain[0] for plain, _ in times)))
    return " ".join(percentages)


def main():
    weights, running = {}, {}
    for line in sys.stdin:
        command, name, *rest = line.split()
        if command == "model":
            torch.manual_seed(0)
            weights[name] = MODELS[name]().state_dict()
            torch.save({"model": weights[name]}, rest[0])
            answer = "saved"
        elif command == "losses":
            training = Training(name, weights[name], rest[0] == "bf16")
            answer = " ".join(str(training.iterate().item()) for _ in range(int(rest[1])))
        elif command == "run":
            key = (name, rest[0])
            if key not in running:
                running = {kept: training for kept, training in running.items() if kept[0] == name}
                running[key] = Training(name, weights[name], rest[0] == "bf16")
            answer = running[key].time(int(rest[1]))
        elif command == "profile":
            answer = Training(name, weights[name], True).profile()
        elif command == "scaling":
            answer = scaling(name, weights[name], int(rest[0]), float(rest[1]))
        elif command == "anomaly":
            torch.set_num_threads(1)
            answer = Training(name, MODELS[name]().state_dict(), True).anomaly(int(rest[0]))
        else:
            torch.set_num_threads(int(name))
            answer = "set"
        print(answer, flush=True)


if __name__ == "__main__":
    main()
