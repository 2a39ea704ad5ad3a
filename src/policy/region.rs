//! What kinds and what autocast state a module runs in.

#![forbid(unsafe_code)]

use tch::{Kind, Tensor};

use crate::autocast::{Autocast, is_autocast_enabled};
use crate::error::{Error, Result};
use crate::policy::{Policy, kinds::cast};
use crate::tree::floating_kind;

/// Runs `f` on the input in f32, if it is half, and casts what comes out to the kind that came in.
pub(super) fn in_f32(xs: &Tensor, f: impl FnOnce(&Tensor) -> Tensor) -> Result<Tensor> {
    match floating_kind(xs) {
        Some(kind @ (Kind::Half | Kind::BFloat16)) => {
            let ys = without_autocast(&cast(xs, Kind::Float)?, f)?;
            cast(&ys, kind)
        }
        _ => without_autocast(xs, f),
    }
}

fn without_autocast(xs: &Tensor, f: impl FnOnce(&Tensor) -> Tensor) -> Result<Tensor> {
    let device = xs.device();
    if is_autocast_enabled(device) {
        Autocast::new(device).enabled(false).run(|| f(xs))
    } else {
        Ok(f(xs))
    }
}

/// How a module runs under a policy.
#[derive(Debug)]
pub(super) struct Region(Policy);

impl Region {
    pub(super) fn new(policy: Policy) -> Result<Self> {
        let Policy { param, compute, .. } = policy.checked()?;
        let casts = matches!(compute, Kind::Half | Kind::BFloat16) && param != Kind::Double;
        if param == compute || casts {
            Ok(Self(policy))
        } else {
            Err(Error::PolicyModule { param, compute })
        }
    }

    pub(super) fn run(&self, xs: &Tensor, f: impl FnOnce(&Tensor) -> Tensor) -> Result<Tensor> {
        let Policy { param, compute, .. } = self.0;
        let xs = self.0.cast_to_compute(xs)?;
        let ys = if param == compute {
            without_autocast(&xs, f)?
        } else {
            Autocast::new(xs.device()).dtype(compute).run(|| f(&xs))?
        };
        self.0.cast_to_output(&ys)
    }
}
