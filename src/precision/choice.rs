//! The decision whether half precision is worth its casts on a device: the same in each start, or none.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use lazy_static::lazy_static;
use tch::{Device, Kind, Tensor, no_grad};

use super::{MatmulPrecision, synchronize};
use crate::capture;
use crate::error::{Error, Result};
use crate::ffi::OutsideRegions;

lazy_static! {
    /// The measurements of this process, by device and size.
    static ref MEASURED: Mutex<HashMap<(String, i64), Gains>> = Mutex::default();
}

/// The speedup of products from which a dtype is worth using: matrix products are a part of an iteration, and casts
/// cost time.
const WORTH: f64 = 1.5;

/// The size of the products by which a dtype is chosen on a CPU, and on a GPU.
const SIZE: i64 = 512;
const LARGE_SIZE: i64 = 2048;

/// How many rounds there are at least, so that chance does not put three quarters of them on one side.
const FEWEST_ROUNDS: usize = 12;

/// The time for all rounds.
const LIMIT: Duration = Duration::from_millis(400);

/// How many times as fast as f32 products are in bf16 and in fp16; `None` where that was not measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Gains {
    pub(crate) bf16: Option<Gain>,
    pub(crate) fp16: Option<Gain>,
    /// How long it took to measure them.
    pub(crate) spent: Duration,
}

/// How many times as fast as f32 the products of a dtype are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Gain {
    /// The middle half of what the rounds have measured, and the median.
    pub(crate) low: f64,
    pub(crate) median: f64,
    pub(crate) high: f64,
    /// Whether it is worth using; `None` if that cannot be told.
    pub(crate) is_worth: Option<bool>,
}

impl Gains {
    /// Compares products of one size that is usual in models, once for each device in a process. Synchronizes.
    pub(crate) fn of(device: Device) -> Result<Self> {
        Self::at(device, if device == Device::Cpu { SIZE } else { LARGE_SIZE })
    }

    /// Compares products of square matrices with so many rows.
    pub(crate) fn at(device: Device, size: i64) -> Result<Self> {
        capture::refuse("timing products", "choose a precision before the iteration")?;
        once(&MEASURED, device, size, || no_grad(|| measured(device, size)))
    }
}

/// Returns the known gains of a device, or else those that `measure` returns.
fn once(
    known: &Mutex<HashMap<(String, i64), Gains>>,
    device: Device,
    size: i64,
    measure: impl FnOnce() -> Result<Gains>,
) -> Result<Gains> {
    // A second thread waits: it would disturb the measurement.
    let mut known = known.lock().unwrap_or_else(PoisonError::into_inner);
    let key = (format!("{device:?}"), size);
    if let Some(gains) = known.get(&key) {
        return Ok(*gains);
    }
    let gains = measure()?;
    known.insert(key, gains);
    Ok(gains)
}

fn measured(device: Device, size: i64) -> Result<Gains> {
    // fp16 on a CPU is never chosen, and takes long.
    let kinds = match device {
        Device::Cpu => &[Kind::Float, Kind::BFloat16][..],
        _ => &[Kind::Float, Kind::BFloat16, Kind::Half][..],
    };
    let matrices = kinds.iter().map(|kind| Tensor::f_ones([size, size], (*kind, device)));
    let matrices = matrices.collect::<std::result::Result<Vec<_>, _>>()?;
    let start = Instant::now();
    let gains = compared(kinds.len() - 1, |i| product_time(&matrices[i]))?;
    let (bf16, fp16) = (gains.first().copied(), gains.get(1).copied());
    Ok(Gains { bf16, fp16, spent: start.elapsed() })
}

/// Times one product of a matrix by itself, in f32 without TensorFloat-32.
fn product_time(matrix: &Tensor) -> Result<Duration> {
    // A region around the caller would cast the matrix to its own dtype.
    let _own = OutsideRegions::enter();
    let device = matrix.device();
    let _precision = match device {
        Device::Cuda(_) => Some(MatmulPrecision::Highest.enter()?),
        _ => None,
    };
    synchronize(device);
    let start = Instant::now();
    let product = matrix.f_mm(matrix)?;
    synchronize(device);
    let time = start.elapsed();
    let (kind, computed) = (matrix.f_kind()?, product.f_kind()?);
    if computed == kind {
        return Ok(time);
    }
    Err(Error::Torch(format!("a product of {kind:?} matrices was computed in {computed:?}")))
}

/// The resolution of a clock could be too low for a product.
fn measurable(time: Duration) -> Duration {
    time.max(Duration::from_nanos(1))
}

/// Compares the product 0 with `others` further ones, in rounds in which all take turns, until the middle half of the
/// ratios of each is on one side of [`WORTH`], or the time is over.
///
/// Each of them runs between two products 0, of which the shorter counts, so that a busy moment meets all three or, at
/// its edges, makes the ratio too small: what disturbs single products spreads the ratios downwards, and the decision
/// is f32 or none.
fn compared(others: usize, mut time: impl FnMut(usize) -> Result<Duration>) -> Result<Vec<Gain>> {
    let mut spent = Duration::ZERO;
    let mut time = |i| {
        let time = time(i).map(measurable)?;
        spent += time;
        Ok::<_, Error>((time.as_secs_f64(), spent))
    };
    // The first products also make what later ones use again.
    let first = (0..=others).map(|i| Ok(time(i)?.0)).collect::<Result<Vec<_>>>()?;
    let mut gains: Vec<_> = first[1..].iter().map(|other| Gain::of(&[first[0] / other])).collect();
    let mut ratios = vec![Vec::new(); others];
    let (mut before, mut now) = time(0)?;
    while now < LIMIT && (ratios[0].len() < FEWEST_ROUNDS || !gains.iter().all(Gain::is_decided)) {
        for (other, ratios) in (1..).zip(&mut ratios) {
            let its = time(other)?.0;
            let (after, spent) = time(0)?;
            ratios.push(f64::min(before, after) / its);
            (before, now) = (after, spent);
        }
        gains = ratios.iter().map(|ratios| Gain::of(ratios)).collect();
    }
    if ratios[0].len() < FEWEST_ROUNDS {
        // Where half precision is emulated, few rounds tell.
        gains
            .iter_mut()
            .for_each(|gain| gain.is_worth = gain.is_worth.filter(|is_worth| !is_worth));
    }
    Ok(gains)
}

impl Gain {
    fn of(ratios: &[f64]) -> Self {
        let mut sorted = ratios.to_vec();
        sorted.sort_by(f64::total_cmp);
        // Outwards, so that few ratios decide less.
        let last = sorted.len() - 1;
        let [low, median, high] = [last / 4, last / 2, last - last / 4].map(|at| sorted[at]);
        let is_worth = match (low > WORTH, high < WORTH) {
            (true, _) => Some(true),
            (_, true) => Some(false),
            _ => None,
        };
        Self { low, median, high, is_worth }
    }

    fn is_decided(&self) -> bool {
        self.is_worth.is_some()
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// A machine that needs these milliseconds for each product, and more while something else runs on it.
    struct Machine {
        products: Vec<f64>,
        /// The milliseconds at which something begins and ends, and how many times as long products take meanwhile.
        busy: Vec<(f64, f64, f64)>,
        /// How often a product alone is delayed, and how many times as long it then takes.
        delays: (f64, f64),
        clock: f64,
        runs: usize,
        random: u64,
    }

    impl Machine {
        fn new(products: &[f64]) -> Self {
            let (products, busy) = (products.to_vec(), Vec::new());
            Self { products, busy, delays: (0.0, 1.0), clock: 0.0, runs: 0, random: 1 }
        }

        /// A machine that is busy at random moments, of which some are long, and delays products at random.
        fn disturbed(products: &[f64], seed: u64) -> Self {
            let mut machine = Self { random: seed, ..Self::new(products) };
            let mut at = 0.0;
            while at < 2000.0 {
                let begin = at + 150.0 * machine.draw();
                at = begin + if machine.draw() < 0.8 { 10.0 } else { 150.0 } * machine.draw();
                let factor = 1.0 + 40.0 * machine.draw();
                machine.busy.push((begin, at, factor));
            }
            machine.delays = (0.3 * machine.draw(), 1.0 + 20.0 * machine.draw());
            machine
        }

        /// A number from 0 to 1.
        fn draw(&mut self) -> f64 {
            self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (self.random >> 33) as f64 / f64::from(1u32 << 31)
        }

        fn time(&mut self, product: usize) -> Duration {
            self.runs += 1;
            let begun = self.clock;
            let jitter = 0.97 + 0.06 * self.draw();
            let mut left = self.products[product] * jitter;
            if self.draw() < self.delays.0 {
                left *= self.delays.1;
            }
            while left > 0.0 {
                let busy =
                    self.busy.iter().find(|(begin, end, _)| (*begin..*end).contains(&self.clock));
                let next =
                    self.busy.iter().map(|(begin, ..)| *begin).find(|begin| *begin > self.clock);
                let (until, factor) = match (busy, next) {
                    (Some((_, end, factor)), _) => (*end, *factor),
                    (None, next) => (next.unwrap_or(f64::INFINITY), 1.0),
                };
                let runs = (left * factor).min(until - self.clock);
                self.clock = if runs < left * factor { until } else { self.clock + runs };
                left = if runs < left * factor { left - runs / factor } else { 0.0 };
            }
            Duration::from_secs_f64((self.clock - begun) / 1e3)
        }

        fn compared(&mut self) -> Vec<Gain> {
            let others = self.products.len() - 1;
            compared(others, |i| Ok(self.time(i))).unwrap_or_default()
        }
    }

    fn is_worth(machine: &mut Machine) -> Vec<Option<bool>> {
        machine.compared().iter().map(|gain| gain.is_worth).collect()
    }

    #[test]
    fn an_idle_machine_decides_at_once() {
        for (ratio, want) in
            [(0.02, false), (0.5, false), (1.0, false), (1.3, false), (1.8, true), (16.0, true)]
        {
            let mut machine = Machine::new(&[4.0, 4.0 / ratio]);
            let gains = machine.compared();
            let found = (gains[0].median - ratio).abs() < 0.1 * ratio;
            assert!(found && gains[0].is_worth == Some(want), "{ratio}: {gains:?}");
        }
        // Two products beside f32, as on a GPU: the rounds go on until both are decided.
        assert_eq!(is_worth(&mut Machine::new(&[3.0, 9.0, 1.0])), [Some(false), Some(true)]);
        assert_eq!(is_worth(&mut Machine::new(&[3.0, 1.0, 0.5])), [Some(true); 2]);
    }

    #[test]
    fn a_busy_machine_decides_as_an_idle_one_or_not_at_all() {
        for ratio in [0.05, 0.5, 1.0, 1.2, 2.0, 4.0, 16.0] {
            let mut decided = 0;
            for seed in 1..=500 {
                let mut machine = Machine::disturbed(&[3.0, 3.0 / ratio], seed);
                let gains = machine.compared();
                let expected = [None, Some(ratio > WORTH)];
                assert!(expected.contains(&gains[0].is_worth), "{ratio}, seed {seed}: {gains:?}");
                decided += usize::from(gains[0].is_decided());
            }
            assert!(decided > 250, "{ratio}: {decided} of 500");
        }
    }

    #[test]
    fn at_the_limit_itself_few_starts_differ_from_f32() {
        let decided = |seed| is_worth(&mut Machine::disturbed(&[3.0, 3.0 / WORTH], seed))[0];
        let chosen = (1..=500).filter(|seed| decided(*seed) == Some(true)).count();
        assert!(chosen < 25, "{chosen} of 500");
    }

    #[test]
    fn a_busy_moment_at_any_time_changes_nothing() {
        for begin in (0..200).step_by(5) {
            for (products, want) in [([4.0, 1.0], Some(true)), ([4.0, 6.0], Some(false))] {
                let mut machine = Machine::new(&products);
                machine.busy.push((f64::from(begin), f64::from(begin) + 20.0, 40.0));
                assert_eq!(is_worth(&mut machine), [want], "busy from {begin}");
            }
        }
    }

    #[test]
    fn the_time_is_limited_and_few_rounds_never_decide_for_half_precision() {
        for (products, want) in [
            ([70.0, 10.0], None),
            ([500.0, 100.0], None),
            ([40.0, 2000.0], Some(false)),
            ([500.0, 500.0], Some(false)),
        ] {
            let mut machine = Machine::new(&products);
            assert_eq!(is_worth(&mut machine), [want], "{products:?}");
            let round = 1.1 * (products[0] + products[1]);
            let limit = LIMIT.as_secs_f64() * 1e3;
            assert!(machine.clock < limit + round + products[0] * 1.1, "{products:?}");
        }
        // Every second product is delayed at random.
        let mut machine = Machine { delays: (0.5, 30.0), ..Machine::new(&[3.0, 1.0]) };
        let gains = machine.compared();
        assert!(gains[0].is_worth.is_none() && gains[0].low < gains[0].high, "{gains:?}");
    }

    #[test]
    fn a_device_is_measured_once_in_a_process() -> Result<()> {
        let (known, runs) = (Mutex::default(), Cell::new(0));
        let measure = || {
            runs.set(runs.get() + 1);
            let gain = Gain::of(&[f64::from(runs.get())]);
            Ok(Gains { bf16: Some(gain), fp16: None, spent: Duration::ZERO })
        };
        let first = once(&known, Device::Cpu, 64, measure)?;
        assert_eq!((once(&known, Device::Cpu, 64, measure)?, runs.get()), (first, 1));
        assert_ne!(once(&known, Device::Cuda(1), 64, measure)?, first);
        assert_ne!(once(&known, Device::Cpu, 128, measure)?, first);
        assert_eq!(runs.get(), 3);
        // A failure is not kept.
        let device = Device::Cuda(2);
        assert!(once(&known, device, 64, || Err(Error::Torch("busy".to_owned()))).is_err());
        once(&known, device, 64, measure)?;
        assert_eq!(runs.get(), 4);
        Ok(())
    }
}
