"""A published trainer of BERT with DistributedDataParallel, in plain torch: its data, its model with the parameter names
of transformers, its loops, and no transformers.

`write FOLDER` writes a small model with random weights and sentences to learn. `logits FOLDER` reads the numbers of
tokens, the types and the lengths of sentences, JSON [[[token, ...], ...], [[type, ...], ...], [length, ...]], and prints
the bits of their logits in f32 and under bf16 autocast, and the logits by the formulas in float64. `train FOLDER` reads
{"ranks", "amp", "compress", "eval_every", "file"}, trains, and prints the losses, the evaluations, and whether the file
with the best weights, or without evaluations with the last ones, has the same bits."""

import contextlib
import json
import pathlib
import random
import sys
import unicodedata

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import bert
import ranks

CONFIG = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
          "intermediate_size": 64, "max_position_embeddings": 40, "type_vocab_size": 2, "layer_norm_eps": 1e-12,
          "hidden_act": "gelu"}
LABELS = 6
# The settings of the published trainer, but for its sizes.
SEED, RATIO, ROWS_LIMIT, ROWS, DEV_ROWS, LENGTH = 123, 0.92, 38, 6, 1, 24
LEARNING_RATE, WEIGHT_DECAY, EPS = 3e-5, 0.01, 1e-6


class Bert(nn.Module):
    """BertForSequenceClassification, whose attention is that of the current versions of transformers."""

    def __init__(self, config):
        super().__init__()
        width, wide = config["hidden_size"], config["intermediate_size"]
        norm = lambda: nn.LayerNorm(width, eps=config["layer_norm_eps"])
        self.heads = config["num_attention_heads"]
        layer = lambda: nn.ModuleDict({
            "attention": nn.ModuleDict({
                "self": nn.ModuleDict({name: nn.Linear(width, width) for name in ("query", "key", "value")}),
                "output": nn.ModuleDict({"dense": nn.Linear(width, width), "LayerNorm": norm()}),
            }),
            "intermediate": nn.ModuleDict({"dense": nn.Linear(width, wide)}),
            "output": nn.ModuleDict({"dense": nn.Linear(wide, width), "LayerNorm": norm()}),
        })
        self.bert = nn.ModuleDict({
            "embeddings": nn.ModuleDict({
                "word_embeddings": nn.Embedding(config["vocab_size"], width, padding_idx=0),
                "position_embeddings": nn.Embedding(config["max_position_embeddings"], width),
                "token_type_embeddings": nn.Embedding(config["type_vocab_size"], width),
                "LayerNorm": norm(),
            }),
            "encoder": nn.ModuleDict({
                "layer": nn.ModuleList(layer() for _ in range(config["num_hidden_layers"])),
            }),
            "pooler": nn.ModuleDict({"dense": nn.Linear(width, width)}),
        })
        self.classifier = nn.Linear(width, LABELS)

    def forward(self, tokens, types, mask):
        embeddings = self.bert["embeddings"]
        xs = embeddings["word_embeddings"](tokens) + embeddings["token_type_embeddings"](types)
        xs = xs + embeddings["position_embeddings"](torch.arange(tokens.shape[1]))
        xs = embeddings["LayerNorm"](xs)
        for layer in self.bert["encoder"]["layer"]:
            attention = layer["attention"]
            split = lambda ys: ys.view(*ys.shape[:2], self.heads, -1).transpose(1, 2)
            q, k, v = (split(attention["self"][name](xs)) for name in ("query", "key", "value"))
            ys = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
            ys = attention["output"]["dense"](ys.transpose(1, 2).reshape(xs.shape))
            xs = attention["output"]["LayerNorm"](ys + xs)
            ys = layer["output"]["dense"](functional.gelu(layer["intermediate"]["dense"](xs)))
            xs = layer["output"]["LayerNorm"](ys + xs)
        return self.classifier(torch.tanh(self.bert["pooler"]["dense"](xs[:, 0])))


class Tokenizer:
    """BertTokenizer.encode_plus with truncation, and padding to the largest length."""

    def __init__(self, folder):
        words = (folder / "vocab.txt").read_text().split("\n")
        self.numbers = {word: number for number, word in enumerate(words) if word}

    def words(self, text):
        is_chinese = lambda c: 0x4E00 <= ord(c) <= 0x9FFF
        is_punctuation = lambda c: unicodedata.category(c).startswith("P")
        alone = lambda c: f" {c} " if is_chinese(c) or is_punctuation(c) else c
        return "".join(map(alone, text.lower())).split()

    def pieces(self, word):
        found, begin = [], 0
        while begin < len(word):
            prefix = "##" if begin else ""
            ends = (end for end in range(len(word), begin, -1) if prefix + word[begin:end] in self.numbers)
            end = next(ends, None)
            if end is None:
                return ["[UNK]"]
            found.append(prefix + word[begin:end])
            begin = end
        return found

    def encode(self, text):
        pieces = [piece for word in self.words(text) for piece in self.pieces(word)]
        pieces = ["[CLS]", *pieces[:LENGTH - 2], "[SEP]"]
        return [self.numbers[piece] for piece in pieces] + [0] * (LENGTH - len(pieces)), len(pieces)

    def collate(self, batch):
        tokens, lengths = zip(*(self.encode(text) for text, _ in batch))
        tokens = torch.tensor(tokens)
        mask = torch.arange(LENGTH) < torch.tensor(lengths)[:, None]
        return tokens, torch.zeros_like(tokens), mask, torch.tensor([label for _, label in batch])


def write(folder):
    torch.manual_seed(5)
    weights = Bert(CONFIG).state_dict()
    # Larger than those that a training begins with, so that every part of the model matters.
    weights = {name: value + 0.05 * torch.randn(value.shape) for name, value in weights.items()}
    # A buffer that older versions of transformers save.
    weights["bert.embeddings.position_ids"] = torch.arange(CONFIG["max_position_embeddings"]).expand(1, -1)
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    chinese = [chr(0x4E00 + i) for i in range(280)]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "ab", "##c", "##cd", "d", ",", ".", *chinese]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    draws = random.Random(7)
    texts = [*chinese, "abc", "ABcd", "d", ",", "x", " "]
    rows = (("".join(draws.choices(texts, k=draws.randrange(2, 40))), draws.randrange(LABELS)) for _ in range(50))
    (folder / "train.json").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def data(folder):
    rows = [json.loads(line) for line in (folder / "train.json").read_text().splitlines()]
    rows = [("".join(text.split(" ")).strip(), label) for text, label in rows][:ROWS_LIMIT]
    random.seed(SEED)
    random.shuffle(rows)
    count = int(len(rows) * RATIO)
    return rows[:count], rows[count:]


def model(folder):
    bert = Bert(CONFIG)
    restored = bert.load_state_dict(torch.load(folder / "pytorch_model.bin"), strict=False)
    assert not restored.missing_keys and restored.unexpected_keys == ["bert.embeddings.position_ids"], restored
    return bert


def region(amp):
    return torch.autocast("cpu", torch.bfloat16) if amp == "bf16" else contextlib.nullcontext()


def evaluate(net, loader, amp, ranks):
    """The sum of the means of the batches, and the accuracy."""
    losses, right, count = torch.zeros(()), 0, 0
    with torch.no_grad():
        for *inputs, labels in loader:
            with region(amp):
                logits = net(*inputs).float()
                loss = functional.cross_entropy(logits, labels)
            dist.all_reduce(loss)
            losses += loss / ranks
            answers = torch.stack([(logits.argmax(1) == labels).sum(), torch.tensor(len(labels))])
            dist.all_reduce(answers)
            right, count = right + answers[0].item(), count + answers[1].item()
    return losses.item(), right / count


def train(folder, request, rank):
    amp, ranks = request["amp"], request["ranks"]
    tokenizer, bert = Tokenizer(folder), model(folder)
    learned, held_out = data(folder)
    sampler = DistributedSampler(learned)
    loader = DataLoader(learned, batch_size=ROWS, collate_fn=tokenizer.collate, sampler=sampler)
    dev = DataLoader(held_out, batch_size=DEV_ROWS, collate_fn=tokenizer.collate, sampler=DistributedSampler(held_out))
    net = DistributedDataParallel(bert)
    if request["compress"] == "bf16":
        net.register_comm_hook(None, default_hooks.bf16_compress_hook)
    no_decay = lambda name: any(part in name for part in ["bias", "LayerNorm.weight"])
    groups = [{"params": [p for n, p in net.named_parameters() if no_decay(n) == decay],
               "weight_decay": 0.0 if decay else WEIGHT_DECAY} for decay in (False, True)]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, eps=EPS, fused=True)
    losses, evaluations, best = [], {}, -1.0
    sampler.set_epoch(1)
    for step, (*inputs, labels) in enumerate(loader, 1):
        with region(amp):
            loss = functional.cross_entropy(net(*inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append((mean / ranks).item())
        every = request["eval_every"]
        if every and (step % every == 0 or step == len(loader)):
            evaluations[step] = evaluate(bert, dev, amp, ranks)
            if evaluations[step][1] > best:
                best = evaluations[step][1]
                weights = {name: value.clone() for name, value in bert.state_dict().items()}
    if not request["eval_every"]:
        weights = bert.state_dict()
    return {"losses": losses, "evaluations": evaluations, "different": different(weights, request["file"]),
            "parameters": sum(parameter.numel() for parameter in net.parameters())}


def different(weights, file):
    """The names of the weights whose bits differ in a file, which a model must be able to load."""
    found = torch.load(file, weights_only=True)
    Bert(CONFIG).load_state_dict(found)
    return [name for name, value in weights.items() if not torch.equal(value, found[name])]


def logits(folder, tokens, types, lengths):
    net, inputs = model(folder), [torch.tensor(tokens), torch.tensor(types)]
    mask = torch.arange(len(tokens[0])) < torch.tensor(lengths)[:, None]
    bits = {}
    for amp in ("off", "bf16"):
        with torch.no_grad(), region(amp):
            bits[amp] = net(*inputs, mask).float().view(torch.int32).tolist()
    weights = {name: value.double() for name, value in net.state_dict().items()}
    return bits | {"formulas": [bert.classify(weights, CONFIG, row[:length], kinds[:length]).tolist()
                                for row, kinds, length in zip(tokens, types, lengths)]}


def run(folder, request):
    def train_rank(rank, store):
        torch.set_num_threads(1)
        dist.init_process_group("gloo", f"file://{store}/store", rank=rank, world_size=request["ranks"])
        result = train(folder, request, rank)
        if rank == 0:
            print(json.dumps(result), flush=True)
        dist.barrier()
        dist.destroy_process_group()

    with ranks.ended(request["ranks"], train_rank):
        pass


def main():
    command, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    if command == "write":
        write(folder)
    elif command == "logits":
        torch.set_num_threads(1)
        print(json.dumps(logits(folder, *json.load(sys.stdin))))
    else:
        run(folder, json.load(sys.stdin))


main()
