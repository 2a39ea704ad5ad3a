//! The gradients of a list of parameters. Before every step they are inspected, checked or unscaled, clipped, and
//! passed to the optimizer.

mod clip;
mod plan;

use std::collections::HashSet;

use tch::{Device, Kind, Tensor};

use crate::error::Result;
use crate::ffi::{self, Gradient, OutsideRegions, Snapshot, Widened};
use crate::variables::Parameters;

pub use crate::error::{GradientChange, GradientError, GradientProblem};
pub use clip::{ClipNorm, clip_grad_norm, clip_grad_value};
pub(crate) use clip::{check_limit, clamp, reduce_norm, unclampable, unclippable};
pub(crate) use plan::{
    Findings, IdentityMap, Plan, Preparation, drop_frozen, overflow, uncountable,
};

/// Returns the name of a parameter by its index and its identity, if it is known.
pub(crate) type Names<'a> = Box<dyn Fn(usize, usize) -> Option<String> + 'a>;

/// The parameters of an optimizer, their names, and their gradients as they were when this was made.
pub(crate) struct Gradients<'a> {
    parameters: Parameters<'a>,
    names: Names<'a>,
    snapshot: Snapshot,
}

impl<'a> Gradients<'a> {
    /// Inspects the gradients.
    pub(crate) fn of(parameters: Parameters<'a>, names: Names<'a>) -> Result<Self> {
        let snapshot = Snapshot::of(parameters.as_slice())?;
        Ok(Self { parameters, names, snapshot })
    }

    /// Gives each gradient that shares memory its own, since it is about to be changed in place: libtorch's backward
    /// pass can leave two parameters gradients in the same memory.
    pub(crate) fn separate(&mut self) -> Result<()> {
        if !self.snapshot.iter().any(Gradient::is_shared) {
            return Ok(());
        }
        ffi::gradients_separate(self.parameters())?;
        self.inspect_again()
    }

    /// Inspects them after a change.
    pub(crate) fn inspect_again(&mut self) -> Result<()> {
        self.snapshot = Snapshot::of(self.parameters())?;
        Ok(())
    }

    pub(crate) fn parameters(&self) -> &[Tensor] {
        self.parameters.as_slice()
    }

    pub(crate) fn snapshot(&self) -> &Snapshot {
        &self.snapshot
    }

    /// How a message refers to a parameter.
    pub(crate) fn describe(&self, index: usize) -> String {
        let name = (self.names)(index, self.snapshot[index].parameter());
        describe(index, &self.parameters()[index], name)
    }

    /// Drops those of frozen parameters.
    pub(crate) fn drop_frozen(&self) -> Result<()> {
        drop_frozen(self.parameters(), &self.snapshot)
    }

    pub(crate) fn into_snapshot(self) -> Snapshot {
        self.snapshot
    }

    /// The parameters as an owned list, and the snapshot.
    pub(crate) fn into_parts(self) -> (Vec<Tensor>, Snapshot) {
        (self.parameters.into_owned(), self.snapshot)
    }
}

/// How a message refers to a parameter.
fn describe(index: usize, tensor: &Tensor, name: Option<String>) -> String {
    let shape = ffi::sizes(tensor).unwrap_or_default();
    match name {
        Some(name) => format!("parameter `{name}` {shape:?}"),
        None => format!("parameter {index} {shape:?}"),
    }
}

/// How a gradient differs from the one that was unscaled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    None,
    /// The same tensor with other values, as after clipping or a backward.
    Numbers,
    /// Another tensor, or one where there was none.
    Replaced(GradientChange),
}

/// Compares a gradient with `before`, its description after unscaling; `None` for a parameter that was added since.
pub(crate) fn change(before: Option<&Gradient>, now: &Gradient) -> Change {
    let before = before.copied().unwrap_or_default();
    if !now.exists() {
        // No step applies a missing gradient.
        Change::None
    } else if !before.exists() {
        Change::Replaced(GradientChange::Appeared)
    } else if before.identity() != now.identity() {
        Change::Replaced(GradientChange::Replaced)
    } else if before.version() != now.version() {
        Change::Numbers
    } else {
        Change::None
    }
}

/// A parameter whose gradient has infinite or NaN elements.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NonFiniteGradient {
    /// The parameter: its name if it is known, or else its index, and its shape.
    pub parameter: String,
    /// The number of infinite elements.
    pub infinite: i64,
    /// The number of NaN elements.
    pub nan: i64,
}

impl std::fmt::Display for NonFiniteGradient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { parameter, infinite, nan } = self;
        write!(f, "{parameter}: {infinite} infinite, {nan} NaN")
    }
}

/// Counts the infinite and the NaN elements of a gradient, on its device.
fn count(gradient: &Tensor) -> Result<Tensor> {
    let _own = OutsideRegions::enter();
    let values = match gradient.is_sparse() {
        // Duplicate indices can add up to infinity.
        true => gradient.f_coalesce()?.f_internal_values()?,
        false => gradient.shallow_clone(),
    };
    let values = values.f_detach()?;
    let counts = [values.f_isinf()?, values.f_isnan()?].map(|which| which.f_sum(Kind::Int64));
    let [infinite, nan] = counts;
    Ok(Tensor::f_stack(&[infinite?, nan?], 0)?)
}

/// Reads the two counts of a gradient. Synchronizes.
fn read(counts: &Tensor) -> Result<[i64; 2]> {
    let _own = OutsideRegions::enter();
    let counts = counts.f_to_device(Device::Cpu)?;
    Ok([counts.f_int64_value(&[0])?, counts.f_int64_value(&[1])?])
}

impl Gradients<'_> {
    /// The gradients with infinite or NaN elements among those that a step would use. Synchronizes.
    pub(crate) fn non_finite(&self) -> Result<Vec<NonFiniteGradient>> {
        let mut seen = HashSet::new();
        // Each parameter once, and no frozen ones.
        let taken = self.snapshot().iter().enumerate();
        let taken = taken.filter(|(_, g)| g.is_used() && seen.insert(g.parameter()));
        // All counts are launched before the first is read.
        let counts =
            taken.map(|(index, _)| Ok((index, count(&self.parameters()[index].f_grad()?)?)));
        let counts: Vec<_> = counts.collect::<Result<_>>()?;
        let mut found = Vec::new();
        for (index, count) in counts {
            let [infinite, nan] = read(&count)?;
            if infinite + nan > 0 {
                let parameter = self.describe(index);
                found.push(NonFiniteGradient { parameter, infinite, nan });
            }
        }
        Ok(found)
    }
}

/// The gradients that parameters had before a backward pass. Unless they are [`added`](Self::add), they are put back
/// when this is dropped, so that neither an error nor a panic loses them.
#[derive(Debug)]
pub(crate) struct StashedGradients {
    parameters: Vec<Tensor>,
    gradients: Vec<Option<Tensor>>,
    /// The change of dtype of the half-precision gradients that are there now.
    widened: Option<Widened>,
    is_settled: bool,
}

impl StashedGradients {
    /// Takes the gradients away.
    pub(crate) fn from(parameters: Vec<Tensor>) -> Result<Self> {
        let gradients = ffi::gradients_take(&parameters)?;
        Ok(Self { parameters, gradients, widened: None, is_settled: false })
    }

    pub(crate) fn parameters(&self) -> &[Tensor] {
        &self.parameters
    }

    /// Makes the present gradients f32, in which optimizers with master weights take them.
    pub(crate) fn widen(&mut self) -> Result<()> {
        self.widened = Some(ffi::gradients_widen(&self.parameters)?);
        Ok(())
    }

    /// Adds them to the present gradients. They are not written to.
    pub(crate) fn add(&self) -> Result<()> {
        ffi::gradients_add(&self.parameters, &self.gradients)
    }

    /// Returns the present gradients, and puts the earlier ones back.
    #[cfg(feature = "insight")]
    pub(crate) fn exchange(self) -> Result<Vec<Option<Tensor>>> {
        ffi::gradients_take(&self.parameters)
    }

    /// Leaves the present gradients where they are.
    pub(crate) fn settle(mut self) {
        self.is_settled = true;
    }
}

impl Drop for StashedGradients {
    fn drop(&mut self) {
        if !self.is_settled {
            // The gradients of the failed backward are incomplete or scaled. Errors cannot be returned from here.
            let _dropped = ffi::gradients_drop(&self.parameters);
            if let Some(widened) = &self.widened {
                let _failed = widened.undo(&self.parameters);
            }
            let _failed = ffi::gradients_add(&self.parameters, &self.gradients);
        }
    }
}
