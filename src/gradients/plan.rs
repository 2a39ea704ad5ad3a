//! Selecting the gradients to unscale. All are checked before any is changed.

use tch::Tensor;

use crate::error::{Error, GradientError, Result};
use crate::ffi::{self, Gradient, Place};
use crate::gradients::{Gradients, IdentityMap};

/// The gradients of one optimizer, sorted by what is done with them.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    /// Indices of the parameters whose gradients are to be unscaled, by device.
    pub(crate) groups: Vec<(Place, Vec<usize>)>,
}

/// Drops the gradients that frozen parameters still have, which no optimizer may apply. `now` describes the gradients.
pub(crate) fn drop_frozen(parameters: &[Tensor], now: &[Gradient]) -> Result<()> {
    let both = now.iter().zip(parameters);
    let frozen = both.filter(|(gradient, _)| gradient.exists() && gradient.is_frozen());
    let frozen: Vec<_> = frozen.map(|(_, parameter)| parameter).collect();
    if frozen.is_empty() { Ok(()) } else { ffi::gradients_drop(frozen) }
}

impl Plan {
    /// Sorts the gradients, or returns an error that names the first that cannot be unscaled.
    pub(crate) fn new(gradients: &Gradients<'_>, allow_fp16: bool) -> Result<Self> {
        let mut plan = Self::default();
        let mut seen = IdentityMap::default();
        for (index, gradient) in gradients.snapshot().iter().enumerate() {
            let refuse = |problem| {
                Error::Gradient(GradientError::Unsupported {
                    parameter: gradients.describe(index),
                    problem,
                })
            };
            if gradient.parameter() == 0 {
                return Err(refuse("cannot exist: the parameter is an undefined tensor"));
            }
            // A parameter in two groups is unscaled once.
            if !gradient.is_used() || seen.insert(gradient.parameter(), ()).is_some() {
                continue;
            }
            if let Some(problem) = problem(gradient, allow_fp16) {
                return Err(refuse(problem));
            }
            plan.add(gradient.place(), index);
        }
        Ok(plan)
    }

    fn add(&mut self, place: Place, index: usize) {
        match self.groups.iter_mut().find(|(known, _)| *known == place) {
            Some((_, indices)) => indices.push(index),
            None => self.groups.push((place, vec![index])),
        }
    }
}

impl Gradients<'_> {
    /// Returns an error that names the first gradient with a problem, of those that `which` selects.
    pub(crate) fn refuse(
        &self,
        which: fn(&Gradient) -> bool,
        problem: fn(&Gradient) -> Option<&'static str>,
    ) -> Result<()> {
        for (index, gradient) in self.snapshot().iter().enumerate() {
            if let Some(problem) = problem(gradient).filter(|_| which(gradient)) {
                let parameter = self.describe(index);
                return Err(Error::Gradient(GradientError::Unsupported { parameter, problem }));
            }
        }
        Ok(())
    }
}

fn problem(gradient: &Gradient, allow_fp16: bool) -> Option<&'static str> {
    if gradient.is_fp16() && !allow_fp16 {
        return Some(
            "is fp16, in which small values are lost: keep parameters in f32 and let autocast do the casts, or set allow_fp16_gradients",
        );
    }
    if !gradient.is_floating_or_complex() {
        return Some("is neither floating nor complex and cannot be unscaled");
    }
    (!gradient.is_strided() && !gradient.is_sparse())
        .then_some("is neither strided nor COO sparse, or holds no data; convert it first")
}
