//! The work that remains after a state has been checked.

use std::fmt;

use tch::Tensor;

use crate::checkpoint::CheckpointError;
use crate::checkpoint::entry::Entry;
use crate::error::{Result, shown};
use crate::ffi;
use crate::optim::Saved as _;

/// The second phase of a restore. [`Stateful::prepare_restore`](crate::checkpoint::Stateful::prepare_restore) has
/// checked and prepared it, and it runs once all parts of the restore are prepared.
#[derive(Default)]
#[must_use = "nothing is restored unless it is returned"]
pub struct Prepared<'a> {
    copies: Vec<Copy<'a>>,
    steps: Vec<Box<dyn FnOnce() -> Result<()> + 'a>>,
    commits: Vec<Box<dyn FnOnce() + 'a>>,
}

impl<'a> Prepared<'a> {
    /// Creates a second phase that runs a closure. The closure stores what was loaded; everything that can fail or that
    /// allocates much belongs before it, in the first phase.
    pub fn new(commit: impl FnOnce() + 'a) -> Self {
        Self::default().then(commit)
    }

    /// Adds a closure like that of [`new`](Self::new). It runs after the tensors of
    /// [`SavedState::copy_to`](crate::checkpoint::SavedState::copy_to) have been copied.
    pub fn then(mut self, commit: impl FnOnce() + 'a) -> Self {
        self.commits.push(Box::new(commit));
        self
    }

    /// Adds the work of another second phase.
    pub fn and(mut self, other: Self) -> Self {
        let Self { copies, steps, commits } = other;
        self.copies.extend(copies);
        self.steps.extend(steps);
        self.commits.extend(commits);
        self
    }

    /// Creates a second phase of a step that fails only if the device does.
    pub(crate) fn step(step: impl FnOnce() -> Result<()> + 'a) -> Self {
        Self { steps: vec![Box::new(step)], ..Self::default() }
    }

    pub(super) fn of_copies(copies: Vec<Copy<'a>>) -> Self {
        Self { copies, ..Self::default() }
    }

    /// Returns an error if a tensor does not match its target in shape or, unless `cast`, in dtype, and if a cast would
    /// make finite numbers infinite.
    pub(crate) fn check(&self, cast: bool) -> Result<()> {
        self.copies.iter().try_for_each(|copy| copy.check(cast))
    }

    /// Does all of the work, with everything that can fail first.
    ///
    /// # Errors
    ///
    /// Those of reading and copying. Some tensors may have been overwritten by then.
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
            .field("copies", &copies.len())
            .field("steps", &steps.len())
            .field("commits", &commits.len())
            .finish()
    }
}

/// A tensor that is to be overwritten, and the saved one to overwrite it with.
pub(super) struct Copy<'a> {
    pub(super) part: String,
    /// Its name in the target.
    pub(super) name: String,
    /// Its name in the checkpoint.
    pub(super) saved: String,
    pub(super) tensor: Tensor,
    pub(super) entry: &'a Entry,
    /// Where the target is, for messages.
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
            format!("in the checkpoint, as `{}`", shown(saved))
        };
        let problem = if entry.size != size {
            format!(
                "has the shape {:?} {there}, and {size:?} {place}; `skip(&[\"{}\"])` leaves it as it is",
                entry.size,
                shown(name)
            )
        } else if entry.kind != kind && !cast {
            let found = entry.kind;
            format!("is {found:?} {there}, and {kind:?} {place}; `cast(true)` converts it")
        } else {
            match entry.beyond(kind)? {
                0 => return Ok(()),
                count => format!(
                    "has {count} finite numbers {there} that {kind:?} does not reach, so that `cast(true)` would make \
                     them infinite; give the variable a dtype with their range, or leave it as it is with \
                     `skip(&[\"{}\"])`",
                    shown(name)
                ),
            }
        };
        let (part, tensor) = (part.clone(), name.clone());
        Err(CheckpointError::Tensor { part, tensor, problem }.into())
    }
}
