//! Eight small models. What a fault or a harmless change replaces goes through a [`Context`].

use tch::nn::{Init, Path, VarStore};
use tch::{Device, Kind, Tensor};

use crate::budget::context::Context;
use testkit::rng::Rng;
use testkit::tensors::variables;

pub(crate) const MODELS: [&str; 8] =
    ["mlp", "conv", "lstm", "encoder", "gpt", "vae", "wide", "rows"];

/// A product with a weight and a bias, or a convolution.
pub(crate) struct Layer {
    pub(crate) weight: Tensor,
    pub(crate) bias: Option<Tensor>,
    /// The stride of a convolution.
    pub(crate) stride: Option<i64>,
}

/// The scale and the shift of a normalization.
pub(crate) struct Norm {
    pub(crate) weight: Tensor,
    pub(crate) bias: Tensor,
    /// The running statistics of a batch norm.
    pub(crate) running: Option<(Tensor, Tensor)>,
}

/// The result of a forward pass.
pub(crate) struct Forward {
    pub(crate) outputs: Vec<(&'static str, Tensor)>,
    pub(crate) losses: Vec<Tensor>,
}

/// A model and a batch.
pub(crate) struct Model {
    pub(crate) kind: &'static str,
    pub(crate) vs: VarStore,
    pub(crate) lr: f64,
    pub(crate) max_norm: f64,
    layers: std::collections::BTreeMap<String, Layer>,
    norms: std::collections::BTreeMap<String, Norm>,
    tables: Vec<Tensor>,
    batch: Vec<Tensor>,
}

/// Drawn on the CPU, so that every device has the same numbers.
fn floats(sizes: &[i64]) -> Tensor {
    Tensor::randn(sizes, (Kind::Float, Device::Cpu))
}

fn classes(count: i64, sizes: &[i64]) -> Tensor {
    Tensor::randint(count, sizes, (Kind::Int64, Device::Cpu))
}

fn uniform(bound: f64) -> Init {
    Init::Uniform { lo: -bound, up: bound }
}

impl Model {
    /// Draws a model and a batch, whose numbers are multiplied by `size`.
    pub(crate) fn new(kind: &'static str, seed: i64, size: f64, device: Device) -> Self {
        tch::manual_seed(seed);
        let vs = VarStore::new(Device::Cpu);
        let (lr, max_norm) = match kind {
            "conv" => (1e-3, 1.0),
            "lstm" => (1e-3, 0.1),
            "encoder" => (3e-4, 1.0),
            "gpt" => (3e-4, 1e9),
            _ => (1e-3, 1e9),
        };
        let (layers, norms) = (Default::default(), Default::default());
        let mut model =
            Self { kind, vs, lr, max_norm, layers, norms, tables: vec![], batch: vec![] };
        match kind {
            "mlp" => model.mlp(size),
            "conv" => model.conv(size),
            "lstm" => model.lstm(size),
            "encoder" => model.encoder(size),
            "gpt" => model.gpt(),
            "vae" => model.vae(size),
            "wide" => model.wide(size),
            "rows" => model.rows(size),
            other => panic!("no model {other}"),
        }
        if device != Device::Cpu {
            model.move_to(device);
        }
        model
    }

    fn move_to(&mut self, device: Device) {
        self.vs.set_device(device);
        self.batch = self.batch.iter().map(|t| t.to_device(device)).collect();
    }

    fn path(&self, name: &str) -> Path<'_> {
        name.split('.').fold(self.vs.root(), |path, part| path.sub(part))
    }

    fn linear(&mut self, name: &str, inputs: i64, outputs: i64) {
        let init = uniform(1.0 / (inputs as f64).sqrt());
        let path = self.path(name);
        let weight = path.var("weight", &[outputs, inputs], init);
        let bias = Some(path.var("bias", &[outputs], init));
        self.layers.insert(name.to_owned(), Layer { weight, bias, stride: None });
    }

    fn convolution(&mut self, name: &str, inputs: i64, outputs: i64, stride: i64) {
        let init = uniform(1.0 / (9.0 * inputs as f64).sqrt());
        let weight = self.path(name).var("weight", &[outputs, inputs, 3, 3], init);
        self.layers.insert(name.to_owned(), Layer { weight, bias: None, stride: Some(stride) });
    }

    fn norm(&mut self, name: &str, width: i64, running: bool) {
        let path = self.path(name);
        let weight = path.var("weight", &[width], Init::Randn { mean: 1.0, stdev: 0.05 });
        let bias = path.var("bias", &[width], Init::Randn { mean: 0.0, stdev: 0.05 });
        let running = running.then(|| {
            (
                path.zeros_no_train("running_mean", &[width]),
                path.ones_no_train("running_var", &[width]),
            )
        });
        self.norms.insert(name.to_owned(), Norm { weight, bias, running });
    }

    fn mlp(&mut self, size: f64) {
        for (i, (a, b)) in [(32, 64), (64, 64), (64, 64), (64, 10)].into_iter().enumerate() {
            self.linear(&format!("layers.{i}"), a, b);
        }
        self.batch = vec![floats(&[64, 32]) * size, classes(10, &[64])];
    }

    fn conv(&mut self, size: f64) {
        self.convolution("c1", 3, 8, 1);
        self.convolution("c2", 8, 16, 2);
        self.convolution("c3", 16, 16, 1);
        self.norm("b1", 8, true);
        self.norm("b2", 16, true);
        self.norm("b3", 16, true);
        self.linear("head", 16, 5);
        self.batch = vec![floats(&[16, 3, 12, 12]) * size + size, classes(5, &[16])];
    }

    fn lstm(&mut self, size: f64) {
        self.linear("ih", 8, 128);
        self.linear("hh", 32, 128);
        self.linear("head", 32, 3);
        self.batch = vec![floats(&[16, 12, 8]) * size, floats(&[16, 3])];
    }

    fn block(&mut self, name: &str, width: i64, hidden: i64, projections: &[(&str, i64)]) {
        self.norm(&format!("{name}.n1"), width, false);
        for (projection, outputs) in projections {
            self.linear(&format!("{name}.{projection}"), width, *outputs);
        }
        self.norm(&format!("{name}.n2"), width, false);
        self.linear(&format!("{name}.up"), width, hidden);
        self.linear(&format!("{name}.down"), hidden, width);
    }

    fn encoder(&mut self, size: f64) {
        let (width, length) = (32, 128);
        self.linear("inp", 16, width);
        for block in ["0", "1"] {
            let projections = [("q", width), ("k", width), ("v", width), ("o", width)];
            self.block(block, width, 2 * width, &projections);
        }
        self.norm("norm", width, false);
        self.linear("head", width, 4);
        let mask = Tensor::zeros([2, 1, 1, length], (Kind::Float, Device::Cpu));
        let _filled = mask.get(1).slice(2, length - 20, length, 1).fill_(f64::NEG_INFINITY);
        self.batch = vec![floats(&[2, length, 16]) * size, classes(4, &[2, length]), mask];
    }

    fn gpt(&mut self) {
        let (width, length, vocabulary) = (32, 32, 64);
        let init = Init::Randn { mean: 0.0, stdev: 0.05 };
        self.tables = vec![
            self.path("wte").var("weight", &[vocabulary, width], init),
            self.path("wpe").var("weight", &[length, width], init),
        ];
        for block in ["0", "1"] {
            self.block(block, width, 4 * width, &[("qkv", 3 * width), ("o", width)]);
        }
        self.norm("norm", width, false);
        let tokens = classes(vocabulary, &[4, length + 1]);
        self.batch = vec![tokens.slice(1, 0, length, 1), tokens.slice(1, 1, length + 1, 1)];
    }

    fn vae(&mut self, size: f64) {
        for (name, a, b) in
            [("e1", 48, 64), ("mu", 64, 8), ("logvar", 64, 8), ("d1", 8, 64), ("d2", 64, 48)]
        {
            self.linear(name, a, b);
        }
        let pixels = Tensor::rand([32, 48], (Kind::Float, Device::Cpu));
        self.batch = vec![(pixels * size).clamp(0.0, 1.0), floats(&[32, 8])];
    }

    fn wide(&mut self, size: f64) {
        self.norm("norm", 1024, false);
        self.linear("up", 1024, 64);
        self.linear("down", 64, 1024);
        self.batch = vec![floats(&[16, 1024]) * size + size, classes(1024, &[16])];
    }

    fn rows(&mut self, size: f64) {
        self.tables =
            vec![self.path("query").var("weight", &[8, 16], Init::Randn { mean: 0.0, stdev: 1.0 })];
        for (name, outputs) in [("k", 16), ("v", 16), ("head", 5)] {
            self.linear(name, 16, outputs);
        }
        self.batch = vec![floats(&[4, 1024, 16]) * size, classes(5, &[4, 8])];
    }

    /// Draws weights and batch anew, the same ones with every libtorch, whose generators differ. The classes are ten.
    pub(crate) fn redraw(&mut self, rng: &mut Rng) {
        let mut uniform = |like: &Tensor, bound: f64| {
            let number = |_| (rng.below(1 << 20) as f64 / f64::from(1 << 19) - 1.0) * bound;
            let numbers: Vec<f64> = (0..like.numel()).map(number).collect();
            Tensor::from_slice(&numbers).reshape(like.size()).to_kind(Kind::Float)
        };
        for parameter in &mut self.parameters() {
            let inputs = parameter.size().last().copied().unwrap_or(1);
            let drawn = uniform(parameter, 1.0 / (inputs as f64).sqrt());
            tch::no_grad(|| parameter.copy_(&drawn));
        }
        for tensor in &mut self.batch {
            *tensor = if tensor.is_floating_point() {
                uniform(tensor, 1.7)
            } else {
                let drawn = uniform(tensor, 5.0) + 5.0;
                drawn.floor().to_kind(Kind::Int64)
            };
        }
    }

    pub(crate) fn parameters(&self) -> Vec<Tensor> {
        variables(&self.vs).into_values().filter(Tensor::requires_grad).collect()
    }

    /// A tied weight.
    pub(crate) fn table(&self) -> &Tensor {
        &self.tables[0]
    }

    pub(crate) fn forward(&self, c: &Context<'_>) -> Forward {
        match self.kind {
            "mlp" => self.forward_mlp(c),
            "conv" => self.forward_conv(c),
            "lstm" => self.forward_lstm(c),
            "encoder" => self.forward_encoder(c),
            "gpt" => self.forward_gpt(c),
            "vae" => self.forward_vae(c),
            "wide" => self.forward_wide(c),
            _ => self.forward_rows(c),
        }
    }

    fn apply(&self, c: &Context<'_>, name: &str, x: &Tensor) -> Tensor {
        c.layer(name, &self.layers[name], x)
    }

    fn normed(&self, c: &Context<'_>, name: &str, x: &Tensor) -> Tensor {
        c.layer_norm(&self.norms[name], x)
    }

    fn classified(&self, c: &Context<'_>, logits: Tensor) -> Forward {
        let rows = |t: &Tensor| t.flatten(0, t.dim() as i64 - 2);
        let loss = c.cross_entropy(&rows(&logits), &self.batch[1].flatten(0, -1));
        Forward { outputs: vec![("logits", logits)], losses: vec![loss] }
    }

    fn forward_mlp(&self, c: &Context<'_>) -> Forward {
        let mut x = c.input(&self.batch[0]);
        for i in 0..4 {
            x = self.apply(c, &format!("layers.{i}"), &x);
            if i < 3 {
                x = x.relu();
            }
        }
        self.classified(c, x)
    }

    fn forward_conv(&self, c: &Context<'_>) -> Forward {
        let stage = |i: i64, x: &Tensor| {
            let y = self.apply(c, &format!("c{i}"), x);
            c.batch_norm(&self.norms[&format!("b{i}")], &y).relu()
        };
        let x = stage(2, &stage(1, &c.input(&self.batch[0])));
        let x = c.residual("r", &x, &stage(3, &x));
        let logits = self.apply(c, "head", &c.pool(&x));
        self.classified(c, logits)
    }

    fn forward_lstm(&self, c: &Context<'_>) -> Forward {
        let xs = c.input(&self.batch[0]);
        let zeros = || Tensor::zeros([16, 32], (Kind::Float, xs.device()));
        let (mut h, mut cell) = (zeros(), zeros());
        for t in 0..12 {
            let ih = self.apply(c, "ih", &xs.select(1, t));
            let gates = c.residual("gates", &ih, &self.apply(c, "hh", &h));
            let parts = gates.chunk(4, 1);
            cell = c.residual(
                "cell",
                &(parts[1].sigmoid() * &cell),
                &(parts[0].sigmoid() * parts[2].tanh()),
            );
            h = parts[3].sigmoid() * cell.tanh();
        }
        let y = self.apply(c, "head", &h);
        let loss = c.mse(&y, &self.batch[1]);
        Forward { outputs: vec![("y", y)], losses: vec![loss] }
    }

    fn feed_forward(&self, c: &Context<'_>, block: &str, x: &Tensor) -> Tensor {
        let y = self.normed(c, &format!("{block}.n2"), x);
        let y = self.apply(c, &format!("{block}.up"), &y).gelu("none");
        c.residual(&format!("{block}.r2"), x, &self.apply(c, &format!("{block}.down"), &y))
    }

    fn forward_encoder(&self, c: &Context<'_>) -> Forward {
        let (length, width) = (128, 32);
        let inputs = self.apply(c, "inp", &c.input(&self.batch[0]));
        let mut x = c.residual("pos", &inputs, &c.positions(length, width));
        let split = |t: Tensor| t.view([2, length, 4, -1]).transpose(1, 2);
        for b in ["0", "1"] {
            let y = self.normed(c, &format!("{b}.n1"), &x);
            let [q, k, v] = ["q", "k", "v"].map(|p| split(self.apply(c, &format!("{b}.{p}"), &y)));
            let scores = q.matmul(&k.transpose(-2, -1)) / (k.size()[3] as f64).sqrt();
            let shares = c.dropout(&c.softmax(&(scores + &self.batch[2])));
            let y = shares.matmul(&v).transpose(1, 2).reshape([2, length, width]);
            x = c.residual(&format!("{b}.r1"), &x, &self.apply(c, &format!("{b}.o"), &y));
            x = self.feed_forward(c, b, &x);
        }
        let logits = self.apply(c, "head", &self.normed(c, "norm", &x));
        self.classified(c, logits)
    }

    fn forward_gpt(&self, c: &Context<'_>) -> Forward {
        let (length, width) = (32, 32);
        let places = Tensor::arange(length, (Kind::Int64, self.vs.device()));
        let embed =
            |table: &Tensor, indices: &Tensor| Tensor::embedding(table, indices, -1, false, false);
        let mut x = c.residual(
            "pos",
            &embed(&self.tables[0], &self.batch[0]),
            &embed(&self.tables[1], &places),
        );
        let split = |t: &Tensor| t.reshape([4, length, 4, -1]).transpose(1, 2);
        for b in ["0", "1"] {
            let y = self.normed(c, &format!("{b}.n1"), &x);
            let qkv = self.apply(c, &format!("{b}.qkv"), &y).chunk(3, -1);
            let y = c.attention(&split(&qkv[0]), &split(&qkv[1]), &split(&qkv[2]));
            let y = y.transpose(1, 2).reshape([4, length, width]);
            x = c.residual(&format!("{b}.r1"), &x, &self.apply(c, &format!("{b}.o"), &y));
            x = self.feed_forward(c, b, &x);
        }
        let logits = c.tied_head(&self.normed(c, "norm", &x), self.table());
        self.classified(c, logits)
    }

    fn forward_vae(&self, c: &Context<'_>) -> Forward {
        let (x, noise) = (&self.batch[0], &self.batch[1]);
        let h = self.apply(c, "e1", &c.input(x)).tanh();
        let (mu, logvar) = (self.apply(c, "mu", &h), self.apply(c, "logvar", &h));
        let z = c.sample(&mu, &logvar, noise);
        let logits = self.apply(c, "d2", &self.apply(c, "d1", &z).elu());
        let losses = vec![c.reconstruction(&logits, x), c.divergence(&mu, &logvar)];
        Forward { outputs: vec![("mu", mu), ("logits", logits)], losses }
    }

    fn forward_wide(&self, c: &Context<'_>) -> Forward {
        let x = self.normed(c, "norm", &c.input(&self.batch[0]));
        let logits = self.apply(c, "down", &self.apply(c, "up", &x).gelu("none"));
        self.classified(c, logits)
    }

    fn forward_rows(&self, c: &Context<'_>) -> Forward {
        let x = c.input(&self.batch[0]);
        let k = self.apply(c, "k", &x);
        let shares = c.softmax(&(self.tables[0].matmul(&k.transpose(-2, -1)) / 4.0));
        let logits = self.apply(c, "head", &shares.matmul(&self.apply(c, "v", &x)));
        self.classified(c, logits)
    }
}
