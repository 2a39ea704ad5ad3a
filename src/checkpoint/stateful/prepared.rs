//! What is left to do when a state has been checked.

use std::fmt;

use tch::Tensor;

use crate::checkpoint::CheckpointError;
use crate::checkpoint::entry::Entry;
use crate::error::Result;
use crate::ffi;
use crate::optim::Saved as _;

/// The second phase of a restore: what [`Stateful::prepare_restore`](crate::checkpoint::Stateful::prepare_restore) has
/// checked and made ready, and what is done when all parts of the restore are.
#[derive(Default)]
#[must_use = "nothing is restored unless it is returned"]
pub struct Prepared<'a> {
    copies: Vec<Copy<'a>>,
    steps: Vec<Box<dyn FnOnce() -> Result<()> + 'a>>,
    commits: Vec<Box<dyn FnOnce() + 'a>>,
}

impl<'a> Prepared<'a> {
    /// Makes a second phase of a closure, which takes over what was loaded and neither fails nor allocates much:
    /// whatever can go wrong belongs before it.
    pub fn new(commit: impl FnOnce() + 'a) -> Self {
        Self::default().then(commit)
    }

    /// Adds a closure as that of [`new`](Self::new), which runs after the tensors have been copied.
    pub fn then(mut self, commit: impl FnOnce() + 'a) -> Self {
        self.commits.push(Box::new(commit));
        self
    }

    /// Adds all of another second phase.
    pub fn and(mut self, other: Self) -> Self {
        let Self { copies, steps, commits } = other;
        self.copies.extend(copies);
        self.steps.extend(steps);
        self.commits.extend(commits);
        self
    }

    /// A step that only the device can refuse.
    pub(super) fn step(step: impl FnOnce() -> Result<()> + 'a) -> Self {
        Self { steps: vec![Box::new(step)], ..Self::default() }
    }

    pub(super) fn of_copies(copies: Vec<Copy<'a>>) -> Self {
        Self { copies, ..Self::default() }
    }

    /// Refuses tensors that are not like those which they are for.
    pub(crate) fn check(&self, cast: bool) -> Result<()> {
        self.copies.iter().try_for_each(|copy| copy.check(cast))
    }

    /// Does all of it: what can fail first.
    ///
    /// # Errors
    ///
    /// Those of reading and copying. Some tensors may have been overwritten then.
    pub(crate) fn commit(self) -> Result<()> {
        let Self { copies, steps, commits } = self;
        copies.iter().try_for_each(Copy::run)?;
        steps.into_iter().try_for_each(|step| step())?;
        commits.into_iter().for_each(|commit| commit());
        Ok(())
    }
}

impl fmt::Debug for Prepared<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { copies, steps, commits } = self;
        f.debug_struct("Prepared")
            .field("copies", copies)
            .field("steps", &steps.len())
            .field("commits", &commits.len())
            .finish()
    }
}

/// A tensor that is going to be overwritten, and by what.
#[derive(Debug)]
pub(super) struct Copy<'a> {
    pub(super) part: String,
    /// Its name here.
    pub(super) name: String,
    /// Its name in the checkpoint.
    pub(super) saved: String,
    pub(super) tensor: Tensor,
    pub(super) entry: &'a Entry,
    /// Where the tensor is, for messages.
    pub(super) place: &'static str,
}

impl Copy<'_> {
    fn run(&self) -> Result<()> {
        self.entry.copy_to(&mut self.tensor.shallow_clone())
    }

    fn check(&self, cast: bool) -> Result<()> {
        let Self { part, name, saved, tensor, entry, place } = self;
        let (size, kind) = (ffi::sizes(tensor)?, tensor.f_kind()?);
        let there = if name == saved {
            "in the checkpoint".to_owned()
        } else {
            format!("in the checkpoint, as `{saved}`")
        };
        let problem = if entry.size != size {
            format!(
                "has the shape {:?} {there}, and {size:?} {place}; `skip(&[\"{name}\"])` leaves it as it is",
                entry.size
            )
        } else if entry.kind != kind && !cast {
            let found = entry.kind;
            format!("is {found:?} {there}, and {kind:?} {place}; `cast(true)` converts it")
        } else {
            return Ok(());
        };
        let (part, tensor) = (part.clone(), name.clone());
        Err(CheckpointError::Tensor { part, tensor, problem }.into())
    }
}
