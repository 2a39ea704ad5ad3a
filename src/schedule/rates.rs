//! The learning rates and momenta of an optimizer's groups, which schedules read and change.

use crate::error::{Error, Result, ensure};
use crate::optim::Optimizer;

/// What a schedule sets, one of each for every group.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Rates {
    pub(super) lrs: Vec<f64>,
    /// `None` for an algorithm that has no momentum, or if it is not known.
    pub(super) momenta: Vec<Option<f64>>,
    /// PyTorch's `initial_lr`: the learning rates before the first schedule changed them.
    pub(super) initial: Vec<f64>,
}

impl Rates {
    pub(super) fn of(optimizer: &Optimizer) -> Self {
        let groups = &optimizer.groups;
        let lrs: Vec<_> = groups.iter().map(|group| group.lr).collect();
        let momenta = groups.iter().map(|group| group.algorithm.momentum()).collect();
        Self { initial: lrs.clone(), lrs, momenta }
    }

    pub(super) fn of_lrs(lrs: &[f64]) -> Result<Self> {
        if lrs.is_empty() {
            let problem = "has no learning rate; there must be one for each group".to_owned();
            return Err(Error::InvalidArgument { name: "lrs", problem });
        }
        for &lr in lrs {
            ensure("lrs", lr, lr >= 0.0 && lr.is_finite(), "finite and at least 0")?;
        }
        Ok(Self { lrs: lrs.to_vec(), momenta: vec![None; lrs.len()], initial: lrs.to_vec() })
    }

    /// Sets them in all groups, or in none.
    pub(super) fn apply(&self, optimizer: &mut Optimizer) -> Result<()> {
        optimizer.set_rates(&self.lrs, &self.momenta)
    }

    /// What differs in an optimizer that was given these rates and has the other ones by now.
    pub(super) fn changes(&self, there: &Self) -> Changes {
        Changes {
            lrs: changed(&self.lrs, &there.lrs),
            momenta: changed(&self.momenta, &there.momenta),
        }
    }

    /// Takes over what the program has changed.
    pub(super) fn take(&mut self, changes: &Changes) {
        overwrite(&mut self.lrs, &changes.lrs);
        overwrite(&mut self.momenta, &changes.momenta);
    }

    /// Multiplies every learning rate.
    pub(super) fn scale(&mut self, factor: f64) {
        self.lrs.iter_mut().for_each(|lr| *lr *= factor);
    }
}

/// What a program has set in the groups of an optimizer since a schedule has. The other numbers follow the schedule,
/// also when it takes a step back.
#[derive(Clone, Debug, Default)]
pub(super) struct Changes {
    lrs: Vec<Option<f64>>,
    momenta: Vec<Option<Option<f64>>>,
}

fn changed<T: Copy + PartialEq>(before: &[T], now: &[T]) -> Vec<Option<T>> {
    before.iter().zip(now).map(|(before, now)| (before != now).then_some(*now)).collect()
}

fn overwrite<T: Copy>(numbers: &mut [T], changes: &[Option<T>]) {
    for (number, change) in numbers.iter_mut().zip(changes) {
        *number = change.unwrap_or(*number);
    }
}
