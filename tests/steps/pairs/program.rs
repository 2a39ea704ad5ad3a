//! A random program: its abilities, and what a seed has drawn for everything else.

use tch::{Device, Kind, Tensor};
use tch_amp::checkpoint::Format;
use tch_amp::lean::NormKind;

use crate::pairs::abilities::Ability::{self, *};
use testkit::rng::Rng;

pub const ITERATIONS: usize = 6;
pub const ROWS: i64 = 8;
pub const LENGTH: i64 = 3;

/// Which keys attention leaves out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mask {
    None,
    Causal,
    Boolean,
    /// Numbers about this far below zero on the keys of all rows, which change no probability but for their small
    /// differences.
    Numbers(i64),
    /// A large negative number on the keys of padding, which is all keys of some rows.
    Padding,
}

#[derive(Clone, Debug)]
pub struct Program {
    pub seed: u64,
    pub device: Device,
    abilities: Vec<Ability>,
    /// The dtype of the region, unless the program is in f32.
    pub dtype: Kind,
    pub in_half: bool,
    pub adamw: bool,
    pub mask: Mask,
    /// What the loss of each iteration is multiplied by.
    pub factors: Vec<f64>,
    /// The iterations whose batch is infinite.
    pub overflows: Vec<usize>,
    /// When everything is saved and loaded.
    pub restored_at: usize,
    /// Whether gradients of half-precision parameters are f32 from the beginning on. A run that is restored has to say so
    /// to go on with the same bits, since it is no part of a saved state.
    pub in_f32: bool,
    /// The most bytes of logits at a time, of a cross entropy that has blocks.
    pub max_bytes: Option<usize>,
    /// Whether the second optimizer ends the iteration before the first has been stepped, if it can.
    pub is_early: bool,
}

impl Program {
    pub fn new(seed: u64, device: Device, abilities: &[Ability]) -> Self {
        let mut rng = Rng::new(seed);
        let dtype = if rng.one_in(4) { Kind::Half } else { Kind::BFloat16 };
        let in_half = !rng.one_in(4);
        let adamw = rng.one_in(2);
        let far = *rng.pick(&[0, 300, 10_000]);
        let masks = [
            Mask::None,
            Mask::Causal,
            Mask::Boolean,
            Mask::Numbers(far),
            Mask::Numbers(far),
            Mask::Padding,
        ];
        let mask = *rng.pick(&masks);
        let factors = (0..ITERATIONS).map(|_| *rng.pick(&[0.25, 1.0, 4.0])).collect();
        let overflows = (1..ITERATIONS).filter(|_| rng.one_in(4)).collect();
        let restored_at = 1 + rng.below(ITERATIONS - 1);
        let is_early = rng.one_in(2);
        let max_bytes = rng.one_in(2).then_some(100);
        let in_f32 = rng.one_in(2) || abilities.contains(&Restored);
        let abilities = abilities.to_vec();
        Self {
            seed,
            device,
            abilities,
            dtype,
            in_half,
            adamw,
            mask,
            factors,
            overflows,
            restored_at,
            in_f32,
            max_bytes,
            is_early,
        }
    }

    pub fn has(&self, ability: Ability) -> bool {
        self.abilities.contains(&ability)
    }

    pub fn has_any(&self, abilities: &[Ability]) -> bool {
        abilities.iter().any(|ability| self.has(*ability))
    }

    /// The same program without one of its abilities.
    pub fn without(&self, ability: Ability) -> Self {
        let mut program = self.clone();
        program.abilities.retain(|known| *known != ability);
        program
    }

    /// Whether it has attention, with two weights of its own.
    pub fn attends(&self) -> bool {
        self.has(Composed)
    }

    /// The parts of a batch whose losses have backward passes of their own.
    pub fn parts(&self) -> i64 {
        let ranks = if self.has_ranks() { 2 } else { 1 };
        ranks * if self.has_any(&[Accumulation, NoSync]) { 2 } else { 1 }
    }

    pub fn has_ranks(&self) -> bool {
        self.has_any(&[Ranks, NoSync, Sharded])
    }

    /// Whether the parameters are bf16.
    pub fn is_in_bf16(&self) -> bool {
        self.has_any(&[Masters, Remainders])
    }

    /// Whether infinite gradients are skipped.
    pub fn skips(&self) -> bool {
        !self.has(Disabled) || self.has(UnlessSpike)
    }

    pub fn scales(&self) -> bool {
        !self.has_any(&[Disabled, SkipOnly])
    }

    pub fn overflows(&self, iteration: usize) -> bool {
        self.skips() && self.overflows.contains(&iteration)
    }

    /// Whether the region around the forward pass is on.
    pub fn is_on(&self) -> bool {
        let planned = self.has_any(&[PlanInF32, Composed]);
        planned
            || (!self.has(OffBefore)
                && (self.in_half || self.has_any(&[Kept, OffInside, OtherDtypeInside])))
    }

    /// The dtype of the products in the forward pass.
    pub fn product(&self) -> Kind {
        let own = if self.is_in_bf16() { Kind::BFloat16 } else { Kind::Float };
        let is_kept = self.is_on() && self.has_any(&[PlanInF32, Kept]);
        if self.has(OffInside) {
            own
        } else if is_kept {
            Kind::Float
        } else if self.has(OtherDtypeInside) {
            self.other_dtype()
        } else if self.is_on() {
            self.dtype
        } else {
            own
        }
    }

    pub fn other_dtype(&self) -> Kind {
        if self.dtype == Kind::Half { Kind::BFloat16 } else { Kind::Half }
    }

    /// The least precise dtype that gradients are computed in.
    pub fn precision(&self) -> Kind {
        // In a backward pass inside of a region autocast casts the products, but for those that a rule keeps in f32.
        let is_kept = self.has_any(&[PlanInF32, Kept]) && !self.has(OffInside);
        let casts = self.is_on() && self.has(BackwardInside) && !is_kept;
        let all = [
            self.product(),
            if casts || self.attends() { self.dtype } else { Kind::Float },
            if self.is_in_bf16() { Kind::BFloat16 } else { Kind::Float },
            // In the region around, whatever is inside of it.
            if self.has(Lean) && self.is_on() { self.dtype } else { Kind::Float },
        ];
        let any = |kind| all.contains(&kind);
        if any(Kind::BFloat16) {
            Kind::BFloat16
        } else if any(Kind::Half) {
            Kind::Half
        } else {
            Kind::Float
        }
    }

    /// The width of the input. Tensors of fewer than 4096 elements have no low-bit moments.
    pub fn width(&self) -> i64 {
        if self.has(LowBit) { 64 } else { 5 }
    }

    pub fn hidden(&self) -> i64 {
        if self.has(LowBit) { 64 } else { 7 }
    }

    /// The names and the sizes of the parameters.
    pub fn parameters(&self) -> Vec<(&'static str, Vec<i64>)> {
        let (width, hidden) = (self.width(), self.hidden());
        let mut all =
            vec![("up", vec![width, hidden]), ("down", vec![hidden, 4]), ("bias", vec![4])];
        if self.attends() {
            all.extend([("queries", vec![width, width]), ("keys", vec![width, width])]);
        }
        if self.has(Lean) {
            all.push(("classes", vec![hidden, 4]));
        }
        all
    }

    /// Random numbers that depend on the seed and a name alone; libtorch's generator belongs to the whole process.
    pub fn random(&self, name: &str, size: &[i64]) -> Tensor {
        let salt =
            name.bytes().fold(0u64, |sum, byte| sum.wrapping_mul(31).wrapping_add(byte.into()));
        let mut rng = Rng::new(self.seed.wrapping_mul(1 << 20) ^ salt);
        let count = size.iter().product::<i64>();
        let numbers: Vec<f32> = (0..count)
            .map(|_| (rng.eighth() / 4.0 + rng.below(1000) as f64 / 1e5) as f32)
            .collect();
        Tensor::from_slice(&numbers).view(size)
    }

    /// A parameter before the training, in f32.
    pub fn start(&self, name: &str, size: &[i64]) -> Tensor {
        let fan_in = if size.len() == 2 { size[0] as f64 } else { 4.0 };
        let start = self.random(name, size) * (1.5 / fan_in.sqrt());
        if self.is_in_bf16() { start.to_kind(Kind::BFloat16).to_kind(Kind::Float) } else { start }
    }

    pub fn input(&self, iteration: usize) -> Tensor {
        let input = self.random(&format!("input {iteration}"), &[ROWS, LENGTH, self.width()]);
        if self.overflows(iteration) { input + f64::INFINITY } else { input }
    }

    pub fn target(&self, iteration: usize) -> Tensor {
        self.random(&format!("target {iteration}"), &[ROWS, LENGTH, 4])
    }

    /// The classes of the rows, as many as the hidden units, for a cross entropy; some are ignored.
    pub fn labels(&self) -> Tensor {
        let labels = Tensor::arange(ROWS * LENGTH, (Kind::Int64, Device::Cpu)).remainder(5);
        labels.masked_fill(&labels.eq(4), -100).view([ROWS, LENGTH])
    }

    /// The mask of attention, in f32 or booleans, for each row of the batch.
    pub fn mask(&self) -> Option<Tensor> {
        match self.mask {
            Mask::None | Mask::Causal => None,
            Mask::Boolean => {
                let keys = self.random("mask", &[ROWS, LENGTH, LENGTH]).gt(-0.3);
                // Each query has a key.
                let _first = keys.select(-1, 0).fill_(1);
                Some(keys)
            }
            Mask::Numbers(far) => Some(self.random("mask", &[ROWS, LENGTH, LENGTH]) - far),
            Mask::Padding => {
                let lengths = Tensor::from_slice(&[0i64, 1, 2, 3, 0, 1, 2, 3]).view([ROWS, 1, 1]);
                let keys = Tensor::arange(LENGTH, (Kind::Int64, Device::Cpu));
                let zero = Tensor::zeros([ROWS, 1, LENGTH], (Kind::Float, Device::Cpu));
                Some(zero.masked_fill(&keys.ge_tensor(&lengths), -10_000.0))
            }
        }
    }

    /// How [`Restored`] saves the training.
    pub fn format(&self) -> Format {
        let formats = [Format::Safetensors, Format::Torch, Format::TorchByName, Format::Dcp];
        formats[(self.seed / 2 % 4) as usize]
    }

    /// Whether it does so by `save_async`.
    pub fn saves_in_background(&self) -> bool {
        self.seed.is_multiple_of(2)
    }

    /// The normalization of [`LeanLayers`]. Behind a layer norm the gradient of a weight has a direction without length,
    /// which Muon would stretch whatever rounding leaves there.
    pub fn norm(&self) -> NormKind {
        if self.has(Muon) { NormKind::Rms } else { NormKind::Layer }
    }

    /// The factor of the squares of the logarithms of sums in the loss of [`Lean`]. Without them the gradient of the last
    /// weight adds up to 0 over the classes: a direction without length again.
    pub fn z_loss(&self) -> f64 {
        if self.has(Muon) { 0.5 } else { 0.0 }
    }

    /// The learning rate of the first step.
    pub fn lr(&self) -> f64 {
        if self.has_any(&[Muon, NAdam, Adafactor]) || self.uses_adamw() { 0.05 } else { 0.1 }
    }

    pub fn uses_adamw(&self) -> bool {
        !self.has_any(&[HostOptimizer, Muon, NAdam, Adafactor]) && (self.adamw || self.has(LowBit))
    }
}

pub const GAMMA: f64 = 0.8;
pub const MAX_NORM: f64 = 0.2;
pub const MAX_VALUE: f64 = 0.05;
pub const MOMENTUM: f64 = 0.9;
pub const INIT_SCALE: f64 = 256.0;
pub const GROWTH_INTERVAL: i64 = 3;
pub const PENALTY: f64 = 0.5;
/// Of the normalization, so large that it enlarges no rounding.
pub const NORM_EPS: f64 = 1.0;
/// The factor of the cross entropy.
pub const CLASSES: f64 = 0.25;
