//! Writes random operations that resemble a training loop.

use crate::scaler::programs::generate::{config, eighths, scale};
use crate::scaler::programs::program::{Clip, How, Op, OptimizerSpec, ParamSpec, Planted, Term};
use testkit::rng::Rng;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Ready,
    Unscaled,
    Stepped,
}

/// Writes operations, and tracks the stage of each optimizer so that both legal and illegal operations are frequent.
pub struct Writer {
    rng: Rng,
    enabled: bool,
    /// Whether optimizers have parameters in common: then every order of calls is tried.
    shares: bool,
    /// For each optimizer, its parameters.
    owned: Vec<Vec<usize>>,
    lengths: Vec<usize>,
    has_grad: Vec<bool>,
    /// Whether a backward may have changed the gradient since the last step that has used it.
    unused: Vec<bool>,
    /// Whether the optimizer was stepped since the last update. Another step may be refused.
    stepped: Vec<bool>,
    stages: Vec<Stage>,
    /// Whether a loss was scaled since the optimizer was unscaled.
    rescaled: Vec<bool>,
}

impl Writer {
    pub fn new(rng: Rng, optimizers: &[OptimizerSpec], enabled: bool) -> Self {
        let mut lengths = Vec::new();
        for param in optimizers.iter().flat_map(|optimizer| &optimizer.params) {
            if let ParamSpec::New { eighths, .. } = param {
                lengths.push(eighths.len());
            }
        }
        let mut known = 0;
        let owned: Vec<_> =
            optimizers.iter().map(|optimizer| optimizer.owned(&mut known)).collect();
        let shares = owned.iter().map(Vec::len).sum::<usize>() > lengths.len();
        let [has_grad, unused] = [0; 2].map(|_| vec![false; lengths.len()]);
        let stepped = vec![false; owned.len()];
        let stages = vec![Stage::Ready; owned.len()];
        let rescaled = vec![false; owned.len()];
        Self { rng, enabled, shares, owned, lengths, has_grad, unused, stepped, stages, rescaled }
    }

    pub fn op(&mut self) -> Op {
        loop {
            let optimizer = self.rng.below(self.owned.len());
            let op = match self.rng.below(100) {
                0..44 => Some(self.next_of_a_loop(optimizer)),
                44..54 => self.backward(),
                54..60 => self.plant(),
                60..62 => Some(self.drop_one()),
                62..64 => Some(self.zero_grad(optimizer)),
                64 => Some(self.zeros(optimizer)),
                65..70 => Some(self.unscale(optimizer)),
                70..76 => self.clip(optimizer),
                76..82 => Some(self.step(optimizer)),
                82..88 => Some(self.transaction(optimizer)),
                88..90 => Some(Op::Move),
                90..94 => Some(self.update()),
                _ => self.rare(),
            };
            if let Some(op) = op {
                return op;
            }
        }
    }

    /// The next operation of a training loop for this optimizer.
    fn next_of_a_loop(&mut self, optimizer: usize) -> Op {
        match self.stages[optimizer] {
            Stage::Ready if !self.has_grads(optimizer) => {
                self.backward().unwrap_or_else(|| self.update())
            }
            Stage::Ready => match self.rng.below(4) {
                0 => self.unscale(optimizer),
                1 => self.transaction(optimizer),
                _ => self.step(optimizer),
            },
            Stage::Unscaled if self.rng.one_in(3) => {
                self.clip(optimizer).unwrap_or_else(|| self.step(optimizer))
            }
            Stage::Unscaled => self.step(optimizer),
            Stage::Stepped if self.rng.one_in(3) => self.zero_grad(optimizer),
            Stage::Stepped if self.rng.one_in(4) => self.zeros(optimizer),
            Stage::Stepped if self.shares && self.rng.one_in(2) => {
                self.backward().unwrap_or_else(|| self.update())
            }
            Stage::Stepped => self.update(),
        }
    }

    /// Rarely a backward adds to an unscaled gradient: between `unscale_` and `step` it is `GradientError::Changed`
    /// here, while PyTorch continues with a mixture of scaled and unscaled gradients.
    fn may_accumulate(&self, param: usize) -> bool {
        !self.enabled || self.shares || self.stages[self.owner(param)] != Stage::Unscaled
    }

    /// Once another loss was scaled, a change of an unscaled gradient counts as that loss's backward, with the same
    /// error.
    fn may_change(&self, optimizer: usize) -> bool {
        let stage = self.stages[optimizer];
        !self.enabled || self.shares || stage != Stage::Unscaled || !self.rescaled[optimizer]
    }

    fn owner(&self, param: usize) -> usize {
        let owner = self.owned.iter().position(|owned| owned.contains(&param));
        owner.expect("each parameter has an optimizer")
    }

    fn backward(&mut self) -> Option<Op> {
        let mut params =
            (0..self.lengths.len()).filter(|&p| self.may_accumulate(p)).collect::<Vec<_>>();
        // A loss of some of the parameters leaves the gradients of the others undefined.
        if self.rng.one_in(4) && !params.is_empty() {
            params.remove(self.rng.below(params.len()));
        }
        if params.is_empty() {
            return None;
        }
        self.rescaled.fill(true);
        let mut terms = Vec::new();
        for param in params {
            self.has_grad[param] = true;
            self.unused[param] = true;
            terms.push(Term { param, eighths: eighths(&mut self.rng, self.lengths[param]) });
        }
        Some(Op::Backward {
            how: *self.rng.pick(&[How::Backward, How::Scale, How::Scale, How::Each]),
            terms,
        })
    }

    fn plant(&mut self) -> Option<Op> {
        // 3e38 overflows when it is unscaled with a scale below one; 1e-40 is subnormal.
        const VALUES: [f64; 8] =
            [f64::INFINITY, f64::NEG_INFINITY, f64::NAN, 3e38, -3e38, 1e-40, 0.0, 65504.0];
        let param = self.rng.below(self.lengths.len());
        if !self.has_grad[param] || !self.may_change(self.owner(param)) {
            return None;
        }
        let element = self.rng.below(self.lengths[param]);
        Some(Op::Plant { param, element, value: Planted(*self.rng.pick(&VALUES)) })
    }

    fn drop_one(&mut self) -> Op {
        let param = self.rng.below(self.lengths.len());
        self.has_grad[param] = false;
        Op::Drop { param }
    }

    fn zero_grad(&mut self, optimizer: usize) -> Op {
        for &param in &self.owned[optimizer] {
            self.has_grad[param] = false;
        }
        self.renew();
        Op::ZeroGrad { optimizer }
    }

    fn zeros(&mut self, optimizer: usize) -> Op {
        self.renew();
        Op::Zeros { optimizer }
    }

    /// After zeroing, gradients are new work.
    fn renew(&mut self) {
        for stage in self.stages.iter_mut().filter(|stage| **stage == Stage::Stepped) {
            *stage = Stage::Ready;
        }
    }

    fn unscale(&mut self, optimizer: usize) -> Op {
        self.open(optimizer);
        Op::Unscale { optimizer }
    }

    /// Unscales, if that is possible. Without a gradient, nothing happens.
    fn open(&mut self, optimizer: usize) {
        if self.stages[optimizer] == Stage::Ready && self.has_grads(optimizer) {
            self.stages[optimizer] = Stage::Unscaled;
            self.rescaled[optimizer] = false;
        }
    }

    fn has_grads(&self, optimizer: usize) -> bool {
        self.owned[optimizer].iter().any(|&param| self.has_grad[param])
    }

    fn clip(&mut self, optimizer: usize) -> Option<Op> {
        if !self.may_change(optimizer) {
            return None;
        }
        Some(if self.rng.one_in(2) {
            Op::ClipNorm { optimizer, max_norm: *self.rng.pick(&[1.0, 0.3, 10.0]) }
        } else {
            Op::ClipValue { optimizer, max: *self.rng.pick(&[1.0, 0.3, 2.0]) }
        })
    }

    fn step(&mut self, optimizer: usize) -> Op {
        self.open(optimizer);
        if self.stages[optimizer] == Stage::Unscaled {
            self.stages[optimizer] = Stage::Stepped;
            if !std::mem::replace(&mut self.stepped[optimizer], true) {
                for &param in &self.owned[optimizer] {
                    self.unused[param] = false;
                }
            }
        }
        Op::Step { optimizer }
    }

    fn transaction(&mut self, optimizer: usize) -> Op {
        let both = self.owned.len() > 1 && self.stages.iter().all(|&stage| stage == Stage::Ready);
        let optimizers = if both && self.rng.one_in(2) { vec![0, 1] } else { vec![optimizer] };
        for &optimizer in &optimizers {
            // An illegal transaction fails when it is opened, and changes nothing.
            if self.stages[optimizer] == Stage::Ready {
                self.step(optimizer);
            }
        }
        if optimizers.len() > 1 {
            // If the second cannot be opened, the first takes no step.
            self.unused.fill(true);
        }
        let rng = &mut self.rng;
        let parts = optimizers.into_iter().map(|optimizer| {
            let clip = match rng.below(3) {
                0 => Clip::Not,
                1 => Clip::Norm(*rng.pick(&[1.0, 0.3, 10.0])),
                _ => Clip::Value(*rng.pick(&[1.0, 0.3, 2.0])),
            };
            (optimizer, clip)
        });
        Op::Transaction { parts: parts.collect() }
    }

    /// Before the scale may change, gradients that no step has used are dropped: they keep their scale here, and get
    /// the new one in PyTorch. So are those of optimizers with common parameters. Programs in which the scale stands
    /// still are written by `generate::turns`.
    fn drop_unused(&mut self) -> Option<Op> {
        let is_unused = |param: &usize| {
            let stage = self.stages[self.owner(*param)];
            self.has_grad[*param]
                && (self.shares || self.unused[*param] || stage == Stage::Unscaled)
        };
        let param = (0..self.lengths.len()).filter(|_| self.enabled).find(is_unused)?;
        let optimizer = self.owner(param);
        for &param in &self.owned[optimizer] {
            self.has_grad[param] = false;
        }
        Some(Op::ZeroGrad { optimizer })
    }

    fn update(&mut self) -> Op {
        if let Some(op) = self.drop_unused() {
            return op;
        }
        // Without a check to end, it is an error that changes nothing.
        self.stages.fill(Stage::Ready);
        self.stepped.fill(false);
        Op::Update
    }

    fn update_with(&mut self) -> Op {
        if let Some(op) = self.drop_unused() {
            return op;
        }
        self.stages.fill(Stage::Ready);
        self.stepped.fill(false);
        let scale = scale(&mut self.rng);
        if self.rng.one_in(2) { Op::UpdateWith { scale } } else { Op::UpdateWithTensor { scale } }
    }

    fn rare(&mut self) -> Option<Op> {
        // A disabled scaler has nothing to set.
        if !self.enabled {
            return None;
        }
        Some(match self.rng.below(6) {
            0 => self.update_with(),
            1 => Op::SetGrowthFactor { factor: config(&mut self.rng).growth_factor },
            2 => Op::SetBackoffFactor { factor: config(&mut self.rng).backoff_factor },
            3 => Op::SetGrowthInterval { interval: config(&mut self.rng).growth_interval },
            _ => Op::Reload { config: config(&mut self.rng) },
        })
    }
}
