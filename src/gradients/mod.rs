//! The gradients of a list of parameters. Before every step they are inspected, checked or unscaled, clipped, and
//! passed to the optimizer.

mod clip;
mod non_finite;
pub(crate) mod parameters;
mod plan;
mod taken;

use tch::Tensor;

use crate::error::Result;
use crate::ffi::{self, Gradient, Snapshot};

pub use crate::error::{GradientChange, GradientError, GradientProblem};
pub use clip::{ClipNorm, clip_grad_norm, clip_grad_value};
pub(crate) use clip::{check_limit, clamp, reduce_norm, unclampable, unclippable};
pub use non_finite::NonFiniteGradient;
pub(crate) use parameters::Parameters;
pub(crate) use plan::{
    Findings, IdentityMap, Plan, Preparation, drop_frozen, overflow, uncountable,
};
pub(crate) use taken::Taken;

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
