//! A small GPT and a CNN reach the losses of f32 moments with low-bit moments.
//!
//! Each seed trains three times from the same weights on the same batches. With `TCH_AMP_LONG=1` five seeds train for
//! minutes, and the mean of their differences is compared with the spread of the f32 losses. Otherwise one seed takes
//! some steps. Each model trains in a process of its own, so that its random numbers are the same in each run.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};
use std::f64::consts::{PI, TAU};
use std::path::Path;

use tch::nn::{self, Init, ModuleT as _};
use tch::{Device, Kind, Tensor};
use tch_amp::optim::{AdamW, AdjustLr, MomentDtype, Muon, Optimizer};

use testkit::is_set;
use testkit::programs::passes;
use testkit::python::root;

const F32: (Kind, Device) = (Kind::Float, Device::Cpu);
const I64: (Kind, Device) = (Kind::Int64, Device::Cpu);

/// A model and the data that it learns.
trait Model {
    /// The loss of a random batch.
    fn training_loss(&self) -> Tensor;

    /// The loss of so many parts of the data that no step sees.
    fn validation_loss(&self, parts: i64) -> f64;
}

/// How a model is trained.
struct Training {
    name: &'static str,
    steps: i64,
    warm_up: f64,
    /// The learning rates between which a cosine falls.
    lr: (f64, f64),
    weight_decay: f64,
    clip: Option<f64>,
    /// Whether Muon steps the matrices, with updates as large as AdamW's.
    by_muon: bool,
}

/// What a training has led to.
struct Run {
    loss: f64,
    largest_update: f64,
}

fn long_or_short<T>(long: T, short: T) -> T {
    if is_set("TCH_AMP_LONG") { long } else { short }
}

fn matrices(vs: &nn::VarStore) -> Vec<Tensor> {
    vs.trainable_variables().into_iter().filter(|variable| variable.dim() > 1).collect()
}

/// The largest number of `update / lr` of a step, of which weight decay is no part.
fn largest_update(before: &[Tensor], after: &[Tensor], lr: f64, weight_decay: f64) -> f64 {
    // The rounding of a weight would be much of a smaller update.
    if lr < 1e-5 {
        return 0.0;
    }
    let double = |tensor: &Tensor| tensor.detach().to_kind(Kind::Double);
    let updates = before.iter().zip(after).map(|(before, after)| {
        let update = double(after) - double(before) * (1.0 - lr * weight_decay);
        update.abs().max().double_value(&[]) / lr
    });
    updates.fold(0.0, f64::max)
}

impl Training {
    fn lr_of(&self, step: i64) -> f64 {
        let (high, low) = self.lr;
        let cosine = 0.5 * (1.0 + (PI * step as f64 / self.steps as f64).cos());
        (low + (high - low) * cosine) * ((step + 1) as f64 / self.warm_up).min(1.0)
    }

    /// An optimizer that decays matrices only.
    fn optimizer(&self, states: MomentDtype, vs: &nn::VarStore) -> Optimizer {
        let weight_decay = self.weight_decay;
        let adamw = AdamW { weight_decay, ..AdamW::default() };
        let adjust_lr_fn = AdjustLr::MatchRmsAdamW;
        let muon = Muon { weight_decay, adjust_lr_fn, adamw, ..Muon::default() };
        let builder = if self.by_muon { muon.moments(states) } else { adamw.moments(states) };
        let mut optimizer = builder.build(vs, self.lr.0).unwrap();
        let others = optimizer.assign_group(1, &["*bias", "*norm*"]).unwrap();
        optimizer.set_weight_decay_group(1, 0.0).unwrap();
        assert_eq!(others + matrices(vs).len(), vs.trainable_variables().len(), "{}", self.name);
        optimizer
    }

    fn run<M: Model>(
        &self,
        new: impl Fn(&nn::VarStore) -> M,
        seed: i64,
        states: MomentDtype,
    ) -> Run {
        tch::manual_seed(seed);
        let vs = nn::VarStore::new(Device::Cpu);
        let model = new(&vs);
        let mut optimizer = self.optimizer(states, &vs);
        let matrices = matrices(&vs);
        let mut run = Run { loss: 0.0, largest_update: 0.0 };
        let mut first = None;
        for step in 0..self.steps {
            let lr = self.lr_of(step);
            optimizer.set_lr(lr).unwrap();
            let before: Vec<_> = matrices.iter().map(|matrix| matrix.detach().copy()).collect();
            let loss = model.training_loss();
            match self.clip {
                Some(norm) => optimizer.backward_step_clip_norm(&loss, norm).unwrap(),
                None => optimizer.backward_step(&loss).unwrap(),
            }
            let loss = loss.double_value(&[]);
            assert!(loss.is_finite(), "{} {states:?} seed {seed} step {step}: {loss}", self.name);
            first.get_or_insert(loss);
            let largest = largest_update(&before, &matrices, lr, self.weight_decay);
            run.largest_update = run.largest_update.max(largest);
        }
        run.loss = tch::no_grad(|| model.validation_loss(long_or_short(12, 1)));
        // The first loss is that of guesses, on any data.
        let fell = first.is_some_and(|first| run.loss < first);
        assert!(fell, "{} {states:?} seed {seed}: {first:?} became {}", self.name, run.loss);
        run
    }

    /// Compares the losses of low-bit moments with those of f32 ones.
    fn compare<M: Model>(&self, new: impl Fn(&nn::VarStore) -> M) {
        let seeds = long_or_short(5, 1);
        let runs =
            |states| -> Vec<Run> { (0..seeds).map(|seed| self.run(&new, seed, states)).collect() };
        let exact = runs(MomentDtype::F32);
        let spread = deviation(&losses(&exact));
        let largest = largest_of(&exact);
        self.print(MomentDtype::F32, &exact);
        let modes = [MomentDtype::BFloat16, MomentDtype::EightBit];
        for states in modes.into_iter().take(if self.by_muon { 1 } else { 2 }) {
            let coded = runs(states);
            self.print(states, &coded);
            let pairs = losses(&coded).into_iter().zip(losses(&exact));
            let differences: Vec<_> = pairs.map(|(coded, exact)| coded - exact).collect();
            let difference = mean(&differences);
            println!(
                "    minus f32: mean {difference:+.4}, {:.2} deviations of f32; {}",
                difference / spread,
                listed(&differences)
            );
            let context = format!("{} {states:?}", self.name);
            assert!(seeds == 1 || difference.abs() <= spread, "{context}: {difference} {spread}");
            let update = largest_of(&coded);
            let within = states != MomentDtype::EightBit || update <= 1.5 * largest;
            assert!(within, "{context}: an update of {update}, not of {largest}");
        }
    }

    fn print(&self, states: MomentDtype, runs: &[Run]) {
        let losses = losses(runs);
        println!(
            "{} {states:?}: mean {:.4}, deviation {:.4}; {}; largest update {:.2}",
            self.name,
            mean(&losses),
            deviation(&losses),
            listed(&losses),
            largest_of(runs)
        );
    }
}

fn losses(runs: &[Run]) -> Vec<f64> {
    runs.iter().map(|run| run.loss).collect()
}

fn largest_of(runs: &[Run]) -> f64 {
    runs.iter().map(|run| run.largest_update).fold(0.0, f64::max)
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// The standard deviation; NaN of a single value.
fn deviation(values: &[f64]) -> f64 {
    let mean = mean(values);
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    (squares / (values.len() as f64 - 1.0)).sqrt()
}

fn listed(values: &[f64]) -> String {
    values.iter().map(|value| format!("{value:.4}")).collect::<Vec<_>>().join(" ")
}

/// A linear layer that begins as PyTorch's does.
fn linear(path: nn::Path<'_>, inputs: i64, outputs: i64, bias: bool) -> nn::Linear {
    let config = nn::LinearConfig { ws_init: uniform(inputs), bias, ..Default::default() };
    nn::linear(path, inputs, outputs, config)
}

fn uniform(inputs: i64) -> Init {
    let up = 1.0 / (inputs as f64).sqrt();
    Init::Uniform { lo: -up, up }
}

/// The tokens of this crate's sources.
struct Corpus {
    training: Tensor,
    validation: Tensor,
    /// The number of different tokens.
    vocabulary: i64,
}

/// Appends the sources in a folder and those in its folders, in an order that every machine has.
fn append_sources(folder: &Path, text: &mut String) {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut paths: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    for path in paths {
        if path.is_dir() {
            append_sources(&path, text);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            text.push_str(&std::fs::read_to_string(path).unwrap());
        }
    }
}

/// Splits a text into words, spaces in a row, and other characters.
fn words(text: &str) -> Vec<&str> {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let is_space = |c: char| c.is_whitespace() && c != '\n';
    let mut words = Vec::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let end = if is_word(first) {
            rest.find(|c| !is_word(c))
        } else if is_space(first) {
            rest.find(|c| !is_space(c))
        } else {
            Some(first.len_utf8())
        };
        let (word, after) = rest.split_at(end.unwrap_or(rest.len()));
        words.push(word);
        rest = after;
    }
    words
}

/// The numbers of the ASCII characters of some words and of the most common of these words.
fn numbers<'a>(words: &[&'a str]) -> HashMap<&'a str, i64> {
    let mut counts = HashMap::new();
    for word in words {
        *counts.entry(*word).or_insert(0) += 1;
    }
    let characters: BTreeSet<_> = counts.keys().flat_map(|word| word.split("")).collect();
    let mut common: Vec<_> = counts.into_iter().collect();
    common.sort_by_key(|(word, count)| (Reverse(*count), *word));
    common.truncate(900);
    let common = common.into_iter().map(|(word, _)| word).filter(|word| word.chars().count() > 1);
    let characters = characters.into_iter().filter(|c| c.len() == 1 && c.is_ascii());
    characters.chain(common).zip(0..).collect()
}

impl Corpus {
    fn new() -> Self {
        let mut text = String::new();
        append_sources(&root().join("src"), &mut text);
        let words = words(&text);
        let numbers = numbers(&words);
        let mut tokens = Vec::new();
        for word in words {
            match numbers.get(word) {
                Some(number) => tokens.push(*number),
                None => tokens.extend(word.split("").filter_map(|c| numbers.get(c))),
            }
        }
        let tokens = Tensor::from_slice(&tokens);
        let (count, cut) = (tokens.size()[0], tokens.size()[0] * 95 / 100);
        Self {
            training: tokens.narrow(0, 0, cut),
            validation: tokens.narrow(0, cut, count - cut),
            vocabulary: numbers.len() as i64,
        }
    }
}

const WIDTH: i64 = 128;
const CONTEXT: i64 = 64;
const HEADS: i64 = 4;

struct Block {
    norms: [nn::LayerNorm; 2],
    qkv: nn::Linear,
    out: nn::Linear,
    up: nn::Linear,
    down: nn::Linear,
}

impl Block {
    fn new(path: &nn::Path<'_>) -> Self {
        let norm = |name: &str| nn::layer_norm(path / name, vec![WIDTH], Default::default());
        Self {
            norms: [norm("norm1"), norm("norm2")],
            qkv: linear(path / "qkv", WIDTH, 3 * WIDTH, true),
            out: linear(path / "out", WIDTH, WIDTH, true),
            up: linear(path / "up", WIDTH, 4 * WIDTH, true),
            down: linear(path / "down", 4 * WIDTH, WIDTH, true),
        }
    }

    fn forward(&self, xs: &Tensor) -> Tensor {
        let [first, second] = &self.norms;
        let heads = xs.apply(first).apply(&self.qkv);
        let heads = heads.view([-1, CONTEXT, 3, HEADS, WIDTH / HEADS]).permute([2, 0, 3, 1, 4]);
        let [q, k, v] = [0, 1, 2].map(|index| heads.select(0, index));
        let none = None::<Tensor>;
        let seen = Tensor::scaled_dot_product_attention(&q, &k, &v, none, 0.0, true, None, false);
        let xs = xs + seen.transpose(1, 2).reshape(xs.size()).apply(&self.out);
        let wide = xs.apply(second).apply(&self.up).gelu("none");
        xs + wide.apply(&self.down)
    }
}

struct Gpt<'a> {
    data: &'a Corpus,
    tokens: nn::Embedding,
    positions: Tensor,
    blocks: Vec<Block>,
    norm: nn::LayerNorm,
    head: nn::Linear,
}

impl<'a> Gpt<'a> {
    fn new(vs: &nn::VarStore, data: &'a Corpus) -> Self {
        let path = vs.root();
        let model = Self {
            data,
            tokens: nn::embedding(&path / "tokens", data.vocabulary, WIDTH, Default::default()),
            positions: path.zeros("positions", &[CONTEXT, WIDTH]),
            blocks: (0..4).map(|index| Block::new(&(&path / "blocks" / index))).collect(),
            norm: nn::layer_norm(&path / "norm", vec![WIDTH], Default::default()),
            head: linear(&path / "head", WIDTH, data.vocabulary, false),
        };
        for mut matrix in matrices(vs) {
            let _small = tch::no_grad(|| matrix.normal_(0.0, 0.02));
        }
        model
    }

    /// The loss of random pieces of the tokens.
    fn loss(&self, tokens: &Tensor, pieces: i64) -> Tensor {
        let starts = Tensor::randint(tokens.size()[0] - CONTEXT - 1, [pieces, 1], I64);
        let pieces = tokens.take(&(starts + Tensor::arange(CONTEXT + 1, I64)));
        let inputs = pieces.narrow(1, 0, CONTEXT).apply(&self.tokens) + &self.positions;
        let outputs = self.blocks.iter().fold(inputs, |xs, block| block.forward(&xs));
        let logits = outputs.apply(&self.norm).apply(&self.head).flatten(0, 1);
        logits.cross_entropy_for_logits(&pieces.narrow(1, 1, CONTEXT).flatten(0, 1))
    }
}

impl Model for Gpt<'_> {
    fn training_loss(&self) -> Tensor {
        self.loss(&self.data.training, 12)
    }

    fn validation_loss(&self, parts: i64) -> f64 {
        tch::manual_seed(99);
        let losses = (0..parts).map(|_| self.loss(&self.data.validation, 64).double_value(&[]));
        losses.sum::<f64>() / parts as f64
    }
}

/// Images of textures and their classes.
struct Textures {
    images: Tensor,
    classes: Tensor,
}

impl Textures {
    /// The class is which two of eight waves an image has, among noise and of any phase and contrast.
    fn new(count: i64) -> Self {
        let waves: [f32; 16] =
            [0.5, 0.1, 0.1, 0.5, 0.45, 0.45, 0.45, -0.45, 1.0, 0.2, 0.2, 1.0, 0.8, 0.7, 0.8, -0.7];
        let waves = Tensor::from_slice(&waves).view([8, 2]);
        let classes = Tensor::randint(28, [count], I64);
        let pairs = Tensor::arange(8, I64).combinations(2, false).index_select(0, &classes);
        let column = |values: &Tensor| values.view([-1, 1, 1, 1]);
        let place = Tensor::arange(16, F32);
        let [down, across] = [place.view([16, 1]), place.view([1, 16])];
        let mut images = Tensor::randn([count, 1, 16, 16], F32) * 0.9;
        for of_pair in 0..2 {
            let wave = waves.index_select(0, &pairs.select(1, of_pair));
            let wave = wave * (Tensor::randn([count, 2], F32) * 0.05 + 1.0);
            let [x, y] = [0, 1].map(|axis| column(&wave.select(1, axis).contiguous()));
            let phase = column(&Tensor::rand([count], F32)) * TAU;
            let height = column(&Tensor::rand([count], F32)) + 0.4;
            images += height * (x * &down + y * &across + phase).sin();
        }
        let contrast = (Tensor::randn([count, 1, 1, 1], F32) * 0.3).exp();
        Self { images: images * contrast, classes }
    }
}

struct Cnn<'a> {
    data: &'a [Textures; 2],
    net: nn::SequentialT,
}

impl<'a> Cnn<'a> {
    fn new(vs: &nn::VarStore, data: &'a [Textures; 2]) -> Self {
        let path = vs.root();
        let mut net = nn::seq_t();
        for (index, (inputs, outputs)) in [(1, 24), (24, 48), (48, 64)].into_iter().enumerate() {
            let [ws_init, bs_init] = [0, 1].map(|_| uniform(9 * inputs));
            let config = nn::ConvConfig { padding: 1, ws_init, bs_init, ..Default::default() };
            let ones = nn::BatchNormConfig { ws_init: Init::Const(1.0), ..Default::default() };
            net = net
                .add(nn::conv2d(&path / "conv" / index, inputs, outputs, 3, config))
                .add(nn::batch_norm2d(&path / "norm" / index, outputs, ones))
                .add_fn(
                    move |xs| if index < 2 { xs.relu().max_pool2d_default(2) } else { xs.relu() },
                );
        }
        net = net.add_fn(|xs| xs.flat_view()).add(linear(&path / "hidden", 1024, 64, true));
        Self { data, net: net.add_fn(Tensor::relu).add(linear(&path / "head", 64, 28, true)) }
    }

    fn loss(&self, images: &Tensor, classes: &Tensor, train: bool) -> Tensor {
        self.net.forward_t(images, train).cross_entropy_for_logits(classes)
    }
}

impl Model for Cnn<'_> {
    fn training_loss(&self) -> Tensor {
        let Textures { images, classes } = &self.data[0];
        let chosen = Tensor::randint(images.size()[0], [48], I64);
        self.loss(&images.index_select(0, &chosen), &classes.index_select(0, &chosen), true)
    }

    fn validation_loss(&self, parts: i64) -> f64 {
        let Textures { images, classes } = &self.data[1];
        let size = images.size()[0] / 12;
        let part = |tensor: &Tensor, part: i64| tensor.narrow(0, part * size, size);
        let losses = (0..parts)
            .map(|index| self.loss(&part(images, index), &part(classes, index), false))
            .map(|loss| loss.double_value(&[]));
        losses.sum::<f64>() / parts as f64
    }
}

fn compare_gpts(name: &'static str, by_muon: bool) {
    tch::set_num_threads(1);
    let data = Corpus::new();
    let training = Training {
        name,
        steps: long_or_short(500, 5),
        warm_up: long_or_short(50.0, 3.0),
        lr: (2e-3, 1e-4),
        weight_decay: 0.1,
        clip: Some(1.0),
        by_muon,
    };
    training.compare(|vs| Gpt::new(vs, &data));
}

#[test]
#[ignore = "a program that other tests start"]
fn gpt_program() {
    compare_gpts("gpt", false);
}

#[test]
#[ignore = "a program that other tests start"]
fn muon_program() {
    compare_gpts("gpt by Muon", true);
}

#[test]
#[ignore = "a program that other tests start"]
fn cnn_program() {
    tch::set_num_threads(1);
    tch::manual_seed(5);
    let data = [12_000, 3_000].map(Textures::new);
    let training = Training {
        name: "cnn",
        steps: long_or_short(400, 20),
        warm_up: long_or_short(30.0, 3.0),
        lr: (3e-3, 0.0),
        weight_decay: 0.05,
        clip: None,
        by_muon: false,
    };
    training.compare(|vs| Cnn::new(vs, &data));
}

/// Prints the losses.
#[test]
fn losses_are_those_of_f32_moments() {
    for program in ["gpt_program", "cnn_program", "muon_program"] {
        let test = format!("optim::low_bit::losses::{program}");
        assert!(passes(&test, &[("TCH_AMP_PLANTED_FAULT", "none")]), "{program}");
    }
}
