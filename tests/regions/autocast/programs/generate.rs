//! Generates random programs.

use tch::Kind;

use crate::autocast::programs::program::{Function, Op};
use testkit::rng::Rng;

/// The tensors with which every program starts: one of each dtype, then the weights, which are leaves.
const KINDS: [Kind; 4] = [Kind::Float, Kind::Double, Kind::BFloat16, Kind::Half];
const WEIGHTS: [usize; 2] = [4, 5];
const MAX_DEPTH: usize = 4;

/// A program under construction.
struct Writer {
    rng: Rng,
    ops: Vec<Op>,
    tensors: usize,
    /// The dtypes of the open regions, outermost first.
    regions: Vec<Option<Kind>>,
}

/// The program that is determined by `seed`.
pub fn program(seed: u64) -> Vec<Op> {
    let mut writer =
        Writer { rng: Rng::new(seed), ops: vec![Op::Program], tensors: 0, regions: Vec::new() };
    for kind in KINDS {
        writer.tensor(kind, false);
    }
    for _ in WEIGHTS {
        writer.tensor(Kind::Float, true);
    }
    for _ in 0..12 + writer.rng.below(20) {
        writer.step();
    }
    writer.backward();
    writer.ops
}

impl Writer {
    fn tensor(&mut self, kind: Kind, leaf: bool) {
        let values = (0..16).map(|_| self.rng.eighth()).collect();
        self.ops.push(Op::Tensor { kind, leaf, values });
        self.tensors += 1;
    }

    fn step(&mut self) {
        match self.rng.below(20) {
            0..4 if self.regions.len() < MAX_DEPTH => self.enter(),
            4..6 if self.regions.pop().is_some() => self.ops.push(Op::Exit),
            6 => {
                let on = !self.rng.one_in(3);
                self.ops.push(Op::GradMode(on));
            }
            7 => {
                let weight = *self.rng.pick(&WEIGHTS);
                self.ops.push(Op::Nudge(weight));
            }
            8 => self.backward(),
            _ => self.compute(),
        }
    }

    fn enter(&mut self) {
        let enabled = !self.rng.one_in(4);
        let mut dtypes = vec![Some(Kind::BFloat16), Some(Kind::Half)];
        // Only a disabled region can have another dtype, and it can be inherited only inside of a disabled region.
        let inherited = self.regions.iter().rev().find_map(|dtype| *dtype);
        if !enabled || inherited != Some(Kind::Float) {
            dtypes.push(None);
        }
        if !enabled {
            dtypes.push(Some(Kind::Float));
        }
        let dtype = *self.rng.pick(&dtypes);
        let cache = *self.rng.pick(&[None, None, Some(true), Some(false)]);
        self.ops.push(Op::Enter { dtype, enabled, cache });
        self.regions.push(dtype);
    }

    fn compute(&mut self) {
        let function = *self.rng.pick(&Function::ALL);
        let operands = (0..function.operands()).map(|_| self.operand()).collect();
        self.ops.push(Op::Compute(function, operands));
        self.tensors += 1;
    }

    /// Usually a weight or a recent tensor; rarely an f64 tensor, with which most operations fail.
    fn operand(&mut self) -> usize {
        match self.rng.below(10) {
            0..4 => *self.rng.pick(&WEIGHTS),
            4..7 => 0,
            7..9 => self.tensors - 1 - self.rng.below(3),
            _ => self.rng.below(self.tensors),
        }
    }

    fn backward(&mut self) {
        let from = self.tensors - 1 - self.rng.below(4);
        self.ops.push(Op::Backward(from));
        self.ops.extend(WEIGHTS.map(Op::Grad));
    }
}
