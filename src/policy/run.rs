//! The casts and the autocast state that modules and closures run in under a policy.

use tch::{Device, Kind, Tensor};

use crate::Autocast;
use crate::autocast::is_autocast_enabled;
use crate::error::{Error, PolicyError, Result};
use crate::policy::Policy;
use crate::policy::kinds::cast;
use crate::tree::{Tree, floating_kind, leaves};

/// Runs `f` without autocast on the input, which is cast to f32 if it is in half precision, and the output back.
pub(super) fn in_f32(xs: &Tensor, f: impl FnOnce(&Tensor) -> Tensor) -> Result<Tensor> {
    let device = device_of(xs);
    match floating_kind(xs) {
        Some(kind @ (Kind::Half | Kind::BFloat16)) => {
            let xs = cast(xs, Kind::Float)?;
            let ys = without_autocast(device, || f(&xs))?;
            cast(&ys, kind)
        }
        _ => without_autocast(device, || f(xs)),
    }
}

/// Returns the device of the first tensor, or the CPU if there is none.
fn device_of<T: Tree + ?Sized>(inputs: &T) -> Device {
    leaves(inputs).first().map_or(Device::Cpu, |tensor| tensor.device())
}

fn without_autocast<R>(device: Device, f: impl FnOnce() -> R) -> Result<R> {
    if is_autocast_enabled(device) { Autocast::new(device).enabled(false).run(f) } else { Ok(f()) }
}

/// A checked policy, under which modules and closures run.
#[derive(Debug)]
pub(super) struct Run(Policy);

impl Run {
    pub(super) fn new(policy: Policy) -> Result<Self> {
        let Policy { param, compute, .. } = policy.checked()?;
        let casts = matches!(compute, Kind::Half | Kind::BFloat16) && param != Kind::Double;
        if param == compute || casts {
            Ok(Self(policy))
        } else {
            Err(Error::Policy(PolicyError::Module { param, compute }))
        }
    }

    pub(super) fn run<T: Tree + ?Sized, U: Tree>(
        &self,
        inputs: &T,
        f: impl FnOnce(T::Output) -> U,
    ) -> Result<U::Output> {
        let Policy { param, compute, .. } = self.0;
        let device = device_of(inputs);
        let inputs = self.0.cast_to_compute(inputs)?;
        let outputs = if param == compute {
            without_autocast(device, || f(inputs))?
        } else {
            Autocast::new(device).dtype(compute).run(|| f(inputs))?
        };
        self.0.cast_to_output(&outputs)
    }
}
