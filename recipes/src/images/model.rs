//! The model: a residual network for small images.

use super::batch::channels_last;
use crate::Ranks;
use tch::nn::{self, Module, ModuleT, Path, VarStore};
use tch::{Kind, Tensor, no_grad};

/// The size of a model.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// The channels of the first stage. Each further one has twice as many, and images of half the size.
    pub width: i64,
    pub stages: u32,
    /// Of each stage.
    pub blocks: usize,
    pub classes: i64,
    /// Whether batch normalization has the statistics of all ranks together.
    pub synced: bool,
}

impl Config {
    /// The least number of bytes that training takes with batches of this many images: weights, gradients, the momentum
    /// and the averaged weights, the pixels of a batch, and what the convolutions keep, in half precision.
    pub fn least_bytes(&self, rows: usize, size: [usize; 2]) -> f64 {
        let (rows, blocks) = (rows as f64, self.blocks as f64);
        let area = |stage: u32| size.map(|pixels| (pixels >> (stage + 1)).max(1) as f64);
        let mut bytes = 12.0 * rows * size.map(|pixels| pixels as f64).iter().product::<f64>();
        for stage in 0..self.stages {
            let channels = self.width as f64 * f64::from(stage).exp2();
            let kept = 4.0 * rows * channels * area(stage).iter().product::<f64>();
            bytes += blocks * (16.0 * 13.5 * channels * channels + 2.0 * kept);
        }
        bytes
    }
}

/// A residual network: a convolution that halves the images, stages of blocks, and a linear layer.
#[derive(Debug)]
pub struct Net {
    first: Layer,
    blocks: Vec<Block>,
    last: nn::Linear,
}

/// A convolution without bias, and batch normalization.
#[derive(Debug)]
struct Layer {
    conv: nn::Conv2D,
    norm: Box<dyn ModuleT>,
}

/// Two layers whose output is added to the input, or to a projection of it if they change its shape.
#[derive(Debug)]
struct Block {
    layers: [Layer; 2],
    projection: Option<Layer>,
}

impl Net {
    /// Makes the model with variables under `path`.
    pub fn new(path: &Path<'_>, config: Config, ranks: &Ranks) -> Self {
        let Config { width, stages, blocks, classes, synced } = config;
        let make = Maker { ranks, synced };
        let mut channels = width;
        let mut all = Vec::new();
        for stage in 0..stages {
            for block in 0..blocks {
                let path = path / "stages" / stage / block;
                let stride = if stage > 0 && block == 0 { 2 } else { 1 };
                all.push(make.block(&path, [channels, width << stage], stride));
                channels = width << stage;
            }
        }
        let first = make.layer(&(path / "first"), [1, width], [3, 2]);
        Self {
            first,
            blocks: all,
            last: nn::linear(path / "last", channels, classes, Default::default()),
        }
    }

    /// A number for each class, in f32.
    pub fn logits(&self, images: &Tensor, train: bool) -> Tensor {
        let mut xs = self.first.forward_t(images, train).relu();
        for block in &self.blocks {
            xs = block.forward_t(&xs, train);
        }
        let means = xs.mean_dim([2_i64, 3].as_slice(), false, None::<Kind>);
        self.last.forward(&means).to_kind(Kind::Float)
    }
}

/// What the layers of a model have in common.
struct Maker<'a> {
    ranks: &'a Ranks,
    synced: bool,
}

impl Maker<'_> {
    /// A layer with a kernel of `size`.
    fn layer(&self, path: &Path<'_>, [from, to]: [i64; 2], [size, stride]: [i64; 2]) -> Layer {
        let config = nn::ConvConfig {
            stride,
            padding: size / 2,
            bias: false,
            ws_init: nn::init::DEFAULT_KAIMING_NORMAL,
            ..Default::default()
        };
        // As in PyTorch. That of tch is random.
        let ws_init = nn::Init::Const(1.0);
        let norm = nn::BatchNormConfig { ws_init, momentum: MOMENTUM, ..Default::default() };
        let norm = self.ranks.batch_norm2d(path / "norm", to, norm, self.synced);
        Layer { conv: nn::conv2d(path / "conv", from, to, size, config), norm }
    }

    fn block(&self, path: &Path<'_>, [from, to]: [i64; 2], stride: i64) -> Block {
        let first = self.layer(&(path / "layers" / 0), [from, to], [3, stride]);
        let second = self.layer(&(path / "layers" / 1), [to, to], [3, 1]);
        let project = || self.layer(&(path / "projection"), [from, to], [1, stride]);
        Block { layers: [first, second], projection: (from != to || stride > 1).then(project) }
    }
}

/// The momentum of the running statistics of batch normalization.
pub const MOMENTUM: f64 = 0.1;

impl ModuleT for Layer {
    fn forward_t(&self, xs: &Tensor, train: bool) -> Tensor {
        self.norm.forward_t(&self.conv.forward(xs), train)
    }
}

impl ModuleT for Block {
    fn forward_t(&self, xs: &Tensor, train: bool) -> Tensor {
        let [first, second] = &self.layers;
        let ys = second.forward_t(&first.forward_t(xs, train).relu(), train);
        let xs = self
            .projection
            .as_ref()
            .map(|layer| layer.forward_t(xs, train))
            .unwrap_or_else(|| xs.shallow_clone());
        (ys + xs).relu()
    }
}

/// Lays out the weights of all convolutions channels-last, before anything is made from them. Their outputs then are,
/// too, and no convolution converts its weights.
pub fn make_channels_last(vs: &VarStore) {
    for mut variable in vs.trainable_variables() {
        if variable.dim() == 4 {
            let data = no_grad(|| channels_last(&variable));
            // The same variable, with other memory.
            variable.set_data(&data);
        }
    }
}
