//! The models of the training benchmark. `benches/oracle/training.py` defines the same models with the same parameter
//! names.

use tch::nn::{self, Module as _, ModuleT as _, Path, RNN as _};
use tch::{Device, Kind, Tensor};
use tch_amp::lean::{
    Activation, LinearCrossEntropyConfig, NormConfig, activation_linear, linear_cross_entropy,
    norm_linear,
};
use tch_amp::recompute::Recomputed;

/// A model with its loss.
pub struct Model {
    /// The loss on a batch.
    pub loss: Box<dyn Fn(&Batch) -> Tensor>,
    /// A batch of random inputs and targets, the same in Python for the same seed.
    pub batch: Shape,
}

/// The inputs and targets of one iteration.
pub struct Batch {
    pub xs: Tensor,
    pub ys: Tensor,
}

/// The shape of a batch.
#[derive(Clone, Copy)]
pub enum Shape {
    /// Normal inputs and targets of the same shape.
    Dense { rows: i64, width: i64 },
    /// Normal images, and a class for each.
    Images { count: i64, size: i64, classes: i64 },
    /// Tokens, and the same tokens shifted by one place as targets.
    Tokens { rows: i64, length: i64, vocabulary: i64 },
    /// Tokens, and a class for each row.
    Sentences { rows: i64, length: i64, vocabulary: i64, classes: i64 },
    /// Normal sequences and targets of the same shape.
    Sequences { rows: i64, length: i64, width: i64 },
}

impl Shape {
    /// Generates a batch on the CPU, from its generator's current state, and moves it to the device.
    pub fn batch(self, device: Device) -> Batch {
        let normal = |size: &[i64]| Tensor::randn(size, (Kind::Float, Device::Cpu));
        let below = |n: i64, size: &[i64]| Tensor::randint(n, size, (Kind::Int64, Device::Cpu));
        let (xs, ys) = match self {
            Self::Dense { rows, width } => (normal(&[rows, width]), normal(&[rows, width])),
            Self::Images { count, size, classes } => {
                (normal(&[count, 3, size, size]), below(classes, &[count]))
            }
            Self::Tokens { rows, length, vocabulary } => {
                let tokens = below(vocabulary, &[rows, length + 1]);
                (tokens.narrow(1, 0, length), tokens.narrow(1, 1, length).contiguous())
            }
            Self::Sentences { rows, length, vocabulary, classes } => {
                (below(vocabulary, &[rows, length]), below(classes, &[rows]))
            }
            Self::Sequences { rows, length, width } => {
                (normal(&[rows, length, width]), normal(&[rows, length, width]))
            }
        };
        Batch { xs: xs.to_device(device), ys: ys.to_device(device) }
    }
}

/// The names of the models, in the order of the tables.
#[allow(dead_code, reason = "not every benchmark runs all of them")]
pub const NAMES: [&str; 7] = ["mlp_6x32", "mlp_6x256", "mlp_4x1024", "gpt", "conv", "bert", "lstm"];

/// Creates a model with its variables under `path`.
pub fn model(name: &str, path: &Path<'_>) -> Model {
    match name {
        "mlp_6x32" => mlp(path, 6, 32, 16),
        "mlp_6x256" => mlp(path, 6, 256, 64),
        "mlp_4x1024" => mlp(path, 4, 1024, 256),
        "mlp_4x4096" => mlp(path, 4, 4096, 4096),
        "gpt" => gpt(path, SMALL_GPT, 4),
        "gpt_recomputed" => gpt(path, Sizes { recompute: true, ..SMALL_GPT }, 4),
        "gpt_8k" => gpt(path, GPT_8K, 4),
        "gpt_8k_lean" => gpt(path, Sizes { lean: true, ..GPT_8K }, 4),
        "gpt_124m" => gpt(path, GPT_124M, 8),
        "gpt_124m_lean" => gpt(path, Sizes { lean: true, ..GPT_124M }, 8),
        "conv" => conv(path, 32, 32),
        "conv_large" => conv(path, 256, 64),
        "bert" => bert(path, SMALL_BERT, 8),
        "bert_base" => bert(path, BERT_BASE, 64),
        "lstm" => lstm(path, 256, 32, 32),
        "lstm_large" => lstm(path, 1024, 128, 64),
        other => panic!("there is no model {other}"),
    }
}

fn mlp(path: &Path<'_>, layers: i64, width: i64, rows: i64) -> Model {
    let layer = |i| nn::linear(path / i, width, width, Default::default());
    let layers: Vec<_> = (0..layers).map(layer).collect();
    let loss = move |batch: &Batch| {
        let ys = layers.iter().fold(batch.xs.shallow_clone(), |xs, l| l.forward(&xs).gelu("none"));
        ys.to_kind(Kind::Float).mse_loss(&batch.ys, tch::Reduction::Mean)
    };
    Model { loss: Box::new(loss), batch: Shape::Dense { rows, width } }
}

/// Attention and a feed-forward network, each after a layer norm.
#[derive(Debug)]
struct Block {
    norms: [nn::LayerNorm; 2],
    qkv: nn::Linear,
    out: nn::Linear,
    up: nn::Linear,
    down: nn::Linear,
    sizes: Sizes,
    causal: bool,
}

impl Block {
    fn new(path: &Path<'_>, sizes: Sizes, causal: bool) -> Self {
        let width = sizes.width;
        let linear = |name: &str, from, to| nn::linear(path / name, from, to, Default::default());
        let norm = |name: &str| nn::layer_norm(path / name, vec![width], Default::default());
        Self {
            norms: [norm("norm1"), norm("norm2")],
            qkv: linear("qkv", width, 3 * width),
            out: linear("out", width, width),
            up: linear("up", width, 4 * width),
            down: linear("down", 4 * width, width),
            sizes,
            causal,
        }
    }

    fn norm_linear(&self, xs: &Tensor, norm: &nn::LayerNorm, linear: &nn::Linear) -> Tensor {
        if !self.sizes.lean {
            return linear.forward(&norm.forward(xs));
        }
        let config = NormConfig::layer(&[self.sizes.width]);
        let (ws, bs) = (norm.ws.as_ref(), norm.bs.as_ref());
        norm_linear(xs, &config, ws, bs, &linear.ws, linear.bs.as_ref()).unwrap()
    }

    fn attention(&self, xs: &Tensor) -> Tensor {
        let ((rows, length, width), heads) = (xs.size3().unwrap(), self.sizes.heads);
        let qkv = self.norm_linear(xs, &self.norms[0], &self.qkv);
        let qkv = qkv.view([rows, length, 3, heads, width / heads]);
        let qkv = qkv.permute([2, 0, 3, 1, 4]);
        let [q, k, v] = [0, 1, 2].map(|i| qkv.get(i));
        let none = None::<Tensor>;
        let ys =
            Tensor::scaled_dot_product_attention(&q, &k, &v, none, 0.0, self.causal, None, false);
        self.out.forward(&ys.transpose(1, 2).reshape([rows, length, width]))
    }
}

impl nn::Module for Block {
    fn forward(&self, xs: &Tensor) -> Tensor {
        let xs = xs + self.attention(xs);
        let hidden = self.norm_linear(&xs, &self.norms[1], &self.up);
        if !self.sizes.lean {
            return &xs + self.down.forward(&hidden.gelu("none"));
        }
        let (ws, bs) = (&self.down.ws, self.down.bs.as_ref());
        &xs + activation_linear(&hidden, Activation::Gelu, ws, bs).unwrap()
    }
}

/// The sizes of a transformer.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    width: i64,
    blocks: i64,
    heads: i64,
    length: i64,
    vocabulary: i64,
    /// Whether the functions of `tch_amp::lean` take the place of operators.
    lean: bool,
    /// Whether its blocks are recomputed in the backward pass.
    recompute: bool,
}

const SMALL_GPT: Sizes = Sizes {
    width: 384,
    blocks: 6,
    heads: 6,
    length: 128,
    vocabulary: 256,
    lean: false,
    recompute: false,
};
const GPT_8K: Sizes = Sizes { length: 512, vocabulary: 8192, ..SMALL_GPT };
const GPT_124M: Sizes =
    Sizes { width: 768, blocks: 12, heads: 12, length: 1024, vocabulary: 50304, ..SMALL_GPT };
const SMALL_BERT: Sizes =
    Sizes { width: 256, blocks: 4, heads: 4, length: 128, vocabulary: 8192, ..SMALL_GPT };
const BERT_BASE: Sizes =
    Sizes { width: 768, blocks: 12, heads: 12, length: 128, vocabulary: 30522, ..SMALL_GPT };

impl Sizes {
    fn blocks(self, path: &Path<'_>, causal: bool) -> Vec<Box<dyn nn::Module>> {
        let block = |i| -> Box<dyn nn::Module> {
            let block = Block::new(&(path / "blocks" / i), self, causal);
            if self.recompute { Box::new(Recomputed::new(block)) } else { Box::new(block) }
        };
        (0..self.blocks).map(block).collect()
    }
}

/// A language model; the small one is over bytes and has about ten million parameters.
fn gpt(path: &Path<'_>, sizes: Sizes, rows: i64) -> Model {
    let Sizes { width, length, vocabulary, lean, .. } = sizes;
    let embedding = nn::embedding(path / "embedding", vocabulary, width, Default::default());
    let places = nn::embedding(path / "places", length, width, Default::default());
    let blocks = sizes.blocks(path, true);
    let norm = nn::layer_norm(path / "norm", vec![width], Default::default());
    let head = nn::linear(path / "head", width, vocabulary, Default::default());
    let loss = move |batch: &Batch| {
        let place = Tensor::arange(length, (Kind::Int64, batch.xs.device()));
        let xs = embedding.forward(&batch.xs) + places.forward(&place);
        let xs = blocks.iter().fold(xs, |xs, block| block.forward(&xs));
        let hidden = norm.forward(&xs);
        if lean {
            let mean = LinearCrossEntropyConfig::default();
            return linear_cross_entropy(&hidden, &head.ws, head.bs.as_ref(), &batch.ys, &mean)
                .unwrap();
        }
        let ys = head.forward(&hidden).to_kind(Kind::Float);
        ys.view([-1, vocabulary]).cross_entropy_for_logits(&batch.ys.view([-1]))
    };
    Model { loss: Box::new(loss), batch: Shape::Tokens { rows, length, vocabulary } }
}

/// An encoder with the structure of BERT, and a classifier for the first token.
fn bert(path: &Path<'_>, sizes: Sizes, rows: i64) -> Model {
    let (Sizes { width, length, vocabulary, .. }, classes) = (sizes, 4);
    let embedding = nn::embedding(path / "embedding", vocabulary, width, Default::default());
    let places = nn::embedding(path / "places", length, width, Default::default());
    let norm = nn::layer_norm(path / "norm", vec![width], Default::default());
    let blocks = sizes.blocks(path, false);
    let head = nn::linear(path / "head", width, classes, Default::default());
    let loss = move |batch: &Batch| {
        let place = Tensor::arange(length, (Kind::Int64, batch.xs.device()));
        let xs = norm.forward(&(embedding.forward(&batch.xs) + places.forward(&place)));
        let xs = blocks.iter().fold(xs, |xs, block| block.forward(&xs));
        let ys = head.forward(&xs.select(1, 0)).to_kind(Kind::Float);
        ys.cross_entropy_for_logits(&batch.ys)
    };
    Model { loss: Box::new(loss), batch: Shape::Sentences { rows, length, vocabulary, classes } }
}

/// A residual network with batch norms.
fn conv(path: &Path<'_>, count: i64, size: i64) -> Model {
    let layer = |name: String, from, to, stride| {
        let config = nn::ConvConfig { stride, padding: 1, bias: false, ..Default::default() };
        let path = path / name;
        (
            nn::conv2d(&path / "conv", from, to, 3, config),
            nn::batch_norm2d(&path / "norm", to, Default::default()),
        )
    };
    let mut layers = vec![layer("stem".into(), 3, 64, 1)];
    for (i, (from, to)) in [(64, 64), (64, 128), (128, 256)].into_iter().enumerate() {
        layers.push(layer(format!("down{i}"), from, to, if i == 0 { 1 } else { 2 }));
        layers.push(layer(format!("same{i}"), to, to, 1));
    }
    let head = nn::linear(path / "head", 256, 10, Default::default());
    let loss = move |batch: &Batch| {
        let mut xs = batch.xs.shallow_clone();
        for (conv, norm) in &layers {
            let ys = norm.forward_t(&conv.forward(&xs), true);
            xs = if ys.size() == xs.size() { (ys + xs).relu() } else { ys.relu() };
        }
        let ys = head.forward(&xs.mean_dim([2i64, 3].as_slice(), false, None)).to_kind(Kind::Float);
        ys.cross_entropy_for_logits(&batch.ys)
    };
    Model { loss: Box::new(loss), batch: Shape::Images { count, size, classes: 10 } }
}

fn lstm(path: &Path<'_>, width: i64, length: i64, rows: i64) -> Model {
    let lstm = nn::lstm(path / "lstm", width, width, nn::RNNConfig::default());
    let head = nn::linear(path / "head", width, width, Default::default());
    let loss = move |batch: &Batch| {
        let (ys, _) = lstm.seq(&batch.xs);
        head.forward(&ys).to_kind(Kind::Float).mse_loss(&batch.ys, tch::Reduction::Mean)
    };
    Model { loss: Box::new(loss), batch: Shape::Sequences { rows, length, width } }
}
