//! Low-bit moments in plain loops: the definition of the guide's page, written a second time, and gradients for them.

use tch_amp::optim::{AdamW, MomentDtype};

use crate::rng::Rng;

/// What a step computes with, besides the moments.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// The algorithm.
    pub adamw: AdamW,
    /// The learning rate.
    pub lr: f64,
    /// The penalty of Adam instead of AdamW's decay.
    pub l2: f64,
}

/// The moments of one tensor.
#[derive(Clone, Debug)]
pub enum Moments {
    /// Codes, and the exponent of each 32 of them.
    EightBit {
        /// The first moments.
        exp_avg: Vec<i8>,
        /// The second moments.
        exp_avg_sq: Vec<u8>,
        /// The exponents of the blocks.
        exponents: Vec<u8>,
    },
    /// The bits of numbers.
    BFloat16 {
        /// The first moments.
        exp_avg: Vec<u16>,
        /// The second moments.
        exp_avg_sq: Vec<u16>,
    },
}

const ONE_SIXTEENTH: u32 = 0x3d80_0000;
const INDEX: u32 = 0x9e37_79b9;

/// The word of the dither of an element: its upper bits are the offset.
fn dither(step: u64, multiplier: u32, index: usize) -> u32 {
    (step as u32).wrapping_mul(multiplier).wrapping_add(((index % 256) as u32).wrapping_mul(INDEX))
}

/// The largest power of two that is at most the root of the number with these bits.
fn below_root(bits: u32) -> f32 {
    f32::from_bits(((bits >> 1) + (127 << 22)) & 0xff80_0000)
}

/// The code of twice the largest `exp_avg / sqrt(exp_avg_sq)` that exact moments can have.
pub fn largest_code((beta1, beta2): (f64, f64)) -> u32 {
    if beta1 * beta1 >= beta2 {
        return 127;
    }
    let largest = (1.0 - beta1) / ((1.0 - beta2) * (1.0 - beta1 * beta1 / beta2)).sqrt();
    let bits = ((2.0 * largest) as f32 + 0.0625).to_bits();
    127.min((bits - ONE_SIXTEENTH) >> 19)
}

/// The numbers that codes stand for, exp_avg and exp_avg_sq.
pub fn decoded(exp_avg: i8, exp_avg_sq: u8, exponent: u8) -> (f32, f32) {
    let bits = if exponent >= 223 {
        f32::NAN.to_bits()
    } else {
        (u32::from(exp_avg_sq) << 20) + ((u32::from(exponent) + 1) << 23)
    };
    let code = u32::from(exp_avg.unsigned_abs());
    let size = (f32::from_bits((code << 19) + ONE_SIXTEENTH) - 0.0625) * below_root(bits);
    (if exp_avg < 0 { -size } else { size }, f32::from_bits(bits))
}

impl Moments {
    /// Those of a tensor with so many elements before the first step.
    pub fn new(states: MomentDtype, count: usize) -> Self {
        match states {
            MomentDtype::EightBit => Self::EightBit {
                exp_avg: vec![0; count],
                exp_avg_sq: vec![0; count],
                exponents: vec![0; count.div_ceil(32)],
            },
            _ => Self::BFloat16 { exp_avg: vec![0; count], exp_avg_sq: vec![0; count] },
        }
    }

    /// The numbers of an element.
    fn at(&self, index: usize) -> (f32, f32) {
        match self {
            Self::EightBit { exp_avg, exp_avg_sq, exponents } => {
                decoded(exp_avg[index], exp_avg_sq[index], exponents[index / 32])
            }
            Self::BFloat16 { exp_avg, exp_avg_sq } => {
                let widened = |bits: u16| f32::from_bits(u32::from(bits) << 16);
                (widened(exp_avg[index]), widened(exp_avg_sq[index]))
            }
        }
    }

    /// Takes step `step`, the first of which is 1.
    pub fn step(
        &mut self,
        options: &Options,
        step: u64,
        parameters: &mut [f32],
        gradients: &[f32],
    ) {
        let Options { adamw: AdamW { betas, eps, weight_decay, maximize, .. }, lr, l2 } = *options;
        let exponent = step as f64;
        let correction1 = 1.0 - betas.0.powf(exponent);
        let root2 = (1.0 - betas.1.powf(exponent)).sqrt();
        let (minus_step, eps) = ((-lr * root2 / correction1) as f32, (eps * root2) as f32);
        let (rest1, beta2, rest2) =
            ((1.0 - betas.0) as f32, betas.1 as f32, (1.0 - betas.1) as f32);
        let keep = (1.0 - lr * weight_decay) as f32;
        let mut updated = Vec::with_capacity(parameters.len());
        for (index, (parameter, gradient)) in parameters.iter_mut().zip(gradients).enumerate() {
            let mut gradient = if maximize { -gradient } else { *gradient };
            if l2 != 0.0 {
                gradient = parameter.mul_add(l2 as f32, gradient);
            }
            let (exp_avg, exp_avg_sq) = self.at(index);
            let exp_avg = rest1.mul_add(gradient - exp_avg, exp_avg);
            let exp_avg_sq = beta2.mul_add(exp_avg_sq, rest2 * gradient * gradient);
            let update = minus_step * exp_avg / (exp_avg_sq.sqrt() + eps);
            *parameter = parameter.mul_add(keep, update);
            updated.push((exp_avg, exp_avg_sq));
        }
        self.store(&updated, betas, step);
    }

    fn store(&mut self, numbers: &[(f32, f32)], betas: (f64, f64), step: u64) {
        let exp_avg_word = |index| dither(step, 0xbb67_ae85, index);
        let exp_avg_sq_word = |index| dither(step, 0x6a09_e667, index);
        match self {
            Self::BFloat16 { exp_avg, exp_avg_sq } => {
                let cut = |x: f32, word: u32| {
                    if x.is_nan() { 0x7fc0 } else { ((x.to_bits() + (word >> 16)) >> 16) as u16 }
                };
                for (index, (first, second)) in numbers.iter().enumerate() {
                    exp_avg[index] = cut(*first, exp_avg_word(index));
                    exp_avg_sq[index] = cut(*second, exp_avg_sq_word(index));
                }
            }
            Self::EightBit { exp_avg, exp_avg_sq, exponents } => {
                for (block, numbers) in numbers.chunks(32).enumerate() {
                    let first = 32 * block;
                    let rounded = |(index, (_, second)): (usize, &(f32, f32))| {
                        let word = exp_avg_sq_word(first + index) >> 12;
                        second.to_bits().wrapping_add(word) >> 20
                    };
                    let rounded: Vec<_> = numbers.iter().enumerate().map(rounded).collect();
                    let top = (rounded.iter().max().unwrap() >> 3).clamp(32, 255);
                    exponents[block] = (top - 32) as u8;
                    let lowest = (top - 31) << 3;
                    for (index, (rounded, (number, _))) in
                        rounded.into_iter().zip(numbers).enumerate()
                    {
                        let kept = rounded.max(lowest);
                        exp_avg_sq[first + index] = (kept - lowest).min(255) as u8;
                        let word = exp_avg_word(first + index) >> 13;
                        let size =
                            relative(number.abs(), kept, word).min(largest_code(betas)) as i8;
                        exp_avg[first + index] =
                            if number.is_sign_negative() { -size } else { size };
                    }
                }
            }
        }
    }
}

/// The momentum of one matrix of Muon, in bf16.
#[derive(Clone, Debug)]
pub struct Momentum(pub Vec<u16>);

impl Momentum {
    /// The numbers that the buffer stands for.
    pub fn numbers(&self) -> Vec<f32> {
        self.0.iter().map(|bits| f32::from_bits(u32::from(*bits) << 16)).collect()
    }

    /// Takes step `step`, the first of which is 1, with a momentum of more than 0.5.
    pub fn step(&mut self, momentum: f64, step: u64, gradients: &[f32]) {
        let rest = (1.0 - momentum) as f32;
        let numbers = self.numbers().into_iter().zip(gradients);
        let updated = numbers.map(|(number, gradient)| rest.mul_add(gradient - number, number));
        let words = updated.enumerate().map(|(index, number)| {
            let offset = dither(step, 0xbb67_ae85, index) >> 16;
            if number.is_nan() { 0x7fc0 } else { ((number.to_bits() + offset) >> 16) as u16 }
        });
        self.0 = words.collect();
    }
}

/// The code of a first moment's size, relative to the stored second one.
fn relative(size: f32, kept: u32, offset: u32) -> u32 {
    if size.is_nan() {
        return 127;
    }
    let unit = below_root(kept << 20);
    let scaled = size.mul_add(unit.recip(), 0.0625);
    (scaled.to_bits() - ONE_SIXTEENTH + offset) >> 19
}

/// A number of the normal distribution (Box and Muller, 1958).
pub fn normal(rng: &mut Rng) -> f64 {
    let mut uniform = || ((rng.next() >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
    (-2.0 * uniform().ln()).sqrt() * (std::f64::consts::TAU * uniform()).cos()
}

/// Sizes of gradients of each element: log-normal, with zeros, subnormal squares and outliers among them.
pub fn sizes(count: usize, rng: &mut Rng) -> Vec<f32> {
    let mut sizes: Vec<f32> = (0..count).map(|_| 1e-4 * (2.0 * normal(rng)).exp() as f32).collect();
    let mut multiply = |range: std::ops::Range<usize>, by: f32| {
        for size in sizes.iter_mut().take(range.end.min(count)).skip(range.start) {
            *size *= by;
        }
    };
    multiply(0..32, 0.0);
    multiply(64..128, 1e-25);
    multiply(200..201, 0.0);
    multiply(320..352, 1e-12);
    multiply(700..701, 1e9);
    multiply(4000..4032, 1e15);
    sizes
}

/// The gradients of a step: random ones of these sizes, at times zeros or spikes.
pub fn gradients(sizes: &[f32], step: u64, rng: &mut Rng) -> Vec<f32> {
    let random = sizes.iter().map(|size| size * normal(rng) as f32);
    let mut gradients: Vec<f32> = random.collect();
    let end = gradients.len();
    if step % 50 == 7 {
        gradients[100..end.min(4000)].fill(0.0);
    }
    if step % 97 == 3 {
        gradients[end / 2..].iter_mut().for_each(|gradient| *gradient *= 1e3);
    }
    gradients
}
