//! Saves that a thread finishes while the training goes on.

use std::num::NonZeroU64;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::{fmt, mem, thread};

use crate::checkpoint::copy::Copied;
use crate::checkpoint::outcome::{is_saved, panicked};
use crate::checkpoint::staging::{Memory, Pace};
use crate::checkpoint::{Checkpoint, CheckpointError, CheckpointFolder};
use crate::error::{Error, Result};
use crate::ffi::Staged;
use crate::panics::lock;

/// What a folder and its clones know of their saves.
#[derive(Default)]
pub(super) struct Background {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The last one.
    save: Option<Arc<Save>>,
    /// The error of a save for which nobody has waited: the first one by which a checkpoint is missing, or else the
    /// last.
    kept: Option<Error>,
    /// That of the last copy.
    memory: Memory,
}

impl fmt::Debug for Background {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_running = lock(&self.state).save.as_ref().is_some_and(|save| !save.is_finished());
        f.debug_struct("Background").field("is_running", &is_running).finish_non_exhaustive()
    }
}

impl Background {
    /// Waits until no save runs, or fails if one does. Then `save` is the one that runs, unless an earlier one has
    /// failed and nobody knows.
    fn begin(&self, refuses: bool, save: Arc<Save>) -> Result<Turn> {
        loop {
            let mut state = lock(&self.state);
            match state.save.clone().filter(|running| !running.is_finished()) {
                Some(_) if refuses => return Err(CheckpointError::Busy.into()),
                Some(running) => {
                    drop(state);
                    running.wait();
                }
                None => {
                    // What is saved nevertheless does not stop the next save, and waits for `finish`.
                    if state.kept.as_ref().is_some_and(|error| !is_saved(error))
                        && let Some(cause) = state.kept.take()
                    {
                        return Err(CheckpointError::EarlierSave { cause: Box::new(cause) }.into());
                    }
                    state.save = Some(Arc::clone(&save));
                    return Ok(Turn(save));
                }
            }
        }
    }

    /// The same for a save of the calling thread.
    pub(super) fn take_turn(&self) -> Result<Turn> {
        self.begin(false, Arc::new(Save::new(Pace::new(None))))
    }

    /// Waits until no save runs, and returns the error that was kept.
    fn finish(&self) -> Result<()> {
        loop {
            let mut state = lock(&self.state);
            match state.save.clone().filter(|running| !running.is_finished()) {
                Some(running) => {
                    drop(state);
                    running.wait();
                }
                None => return state.kept.take().map_or(Ok(()), Err),
            }
        }
    }

    fn keep_error(&self, error: Error) {
        let kept = &mut lock(&self.state).kept;
        if kept.as_ref().is_none_or(is_saved) {
            *kept = Some(error);
        }
    }

    pub(super) fn memory(&self) -> Memory {
        mem::take(&mut lock(&self.state).memory)
    }

    pub(super) fn keep(&self, memory: Memory) {
        let old = mem::replace(&mut lock(&self.state).memory, memory);
        drop(old);
    }
}

/// A save, as its thread and those who wait for it see it.
struct Save {
    pace: Arc<Pace>,
    state: Mutex<Outcome>,
    ended: Condvar,
}

#[derive(Default)]
struct Outcome {
    has_ended: bool,
    /// Until somebody takes it.
    result: Option<Result<PathBuf>>,
    bytes: u64,
    /// The copies that may still be on their way from a device.
    staged: Vec<Arc<Staged>>,
}

impl Save {
    fn new(pace: Pace) -> Self {
        let state = Mutex::new(Outcome::default());
        Self { pace: Arc::new(pace), state, ended: Condvar::new() }
    }

    fn is_finished(&self) -> bool {
        lock(&self.state).has_ended
    }

    /// Waits for the end, and lets the save be as fast as it can be.
    fn wait(&self) {
        self.pace.lift();
        let waited = self.ended.wait_while(lock(&self.state), |state| !state.has_ended);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    /// Waits for the end, and returns the result unless it was taken before.
    fn take(&self) -> Option<Result<PathBuf>> {
        self.wait();
        lock(&self.state).result.take()
    }
}

/// The right to save. Whatever happens to its owner, the save has ended when it is dropped.
pub(super) struct Turn(Arc<Save>);

impl Drop for Turn {
    fn drop(&mut self) {
        lock(&self.0.state).has_ended = true;
        self.0.ended.notify_all();
    }
}

/// A save that a thread finishes while the training goes on; see [`CheckpointFolder::save_async`]. Corresponds to the
/// future that `torch.distributed.checkpoint.async_save` returns.
///
/// Dropping it waits until the save has ended. [`CheckpointFolder::finish`] then returns an error of the save; if the
/// checkpoint is missing, the next save to begin fails with [`CheckpointError::EarlierSave`] instead. An error that
/// neither reports is lost.
#[must_use = "dropping it at once waits until the checkpoint is saved"]
pub struct PendingSave {
    save: Arc<Save>,
    background: Arc<Background>,
}

impl PendingSave {
    /// Waits until the checkpoint is saved, and returns its path. Lifts [`CheckpointFolder::max_write_rate`].
    ///
    /// # Errors
    ///
    /// Those of [`CheckpointFolder::save`], and [`CheckpointError::WriterPanicked`].
    pub fn wait(self) -> Result<PathBuf> {
        self.save.take().unwrap_or_else(|| {
            let message = "it has ended without a result".to_owned();
            Err(CheckpointError::WriterPanicked { message }.into())
        })
    }

    /// Returns whether the save has ended, so that [`wait`](Self::wait) returns at once.
    pub fn is_finished(&self) -> bool {
        self.save.is_finished()
    }

    /// Waits until the tensors of CUDA devices have arrived in the memory of the host. The program may change them
    /// earlier on the stream that was current at [`CheckpointFolder::save_async`], because a device copies them in that
    /// stream's order. Order work on other streams yourself, for instance with this call. Synchronizes.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`] if the device reports an error.
    pub fn wait_copied(&self) -> Result<()> {
        let staged = lock(&self.save.state).staged.clone();
        staged.iter().try_for_each(|staged| staged.wait())
    }

    /// Returns roughly what fraction of the tensors' bytes is written, from 0 to 1. It is 1 when the save has ended;
    /// before, the file may still have to be synced to the disk.
    pub fn progress(&self) -> f64 {
        let Outcome { has_ended, bytes, .. } = &*lock(&self.save.state);
        if *has_ended {
            return 1.0;
        }
        let share = self.save.pace.written() as f64 / (*bytes).max(1) as f64;
        share.min(1.0)
    }
}

impl fmt::Debug for PendingSave {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PendingSave").field("progress", &self.progress()).finish_non_exhaustive()
    }
}

impl Drop for PendingSave {
    fn drop(&mut self) {
        if let Some(Err(error)) = self.save.take() {
            self.background.keep_error(error);
        }
    }
}

impl CheckpointFolder {
    /// Copies a checkpoint, and saves the copy in a thread while the training goes on: when this returns, everything
    /// that was added to the checkpoint may be changed. The thread does what [`save`](Self::save) does, and removes
    /// older checkpoints only after the new one is in place. Corresponds to `torch.distributed.checkpoint.async_save`.
    ///
    /// The copy is in memory of the host, which the next save uses again for tensors of the same dtype, shape and
    /// device, until the folder and its clones are dropped. A CUDA device copies to pinned memory in the order of the
    /// current stream: the host does not wait, and later work on that stream does not reach the copy. The first save
    /// allocates the pinned memory, which takes time, and libtorch rounds each allocation up to a power of two. Tensors
    /// of a file that was loaded are read by the thread.
    ///
    /// One save runs at a time, whichever clone of the folder begins it. A second one waits until the first has ended,
    /// or is refused if [`refuse_while_saving`](Self::refuse_while_saving) says so. A process that exits without
    /// waiting leaves the last checkpoint that was complete.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Busy`]; [`CheckpointError::EarlierSave`] if an earlier save, for which nobody has waited, has
    /// failed: nothing is saved then; and [`Error::Torch`] if there is no memory for the copy. The errors of the
    /// save itself are those of [`PendingSave::wait`].
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::{Device, Kind, Tensor};
    /// use tch_amp::checkpoint::{Checkpoint, CheckpointFolder};
    ///
    /// # let path = std::env::temp_dir().join(format!("tch-amp-doc-async-{}", std::process::id()));
    /// let mut folder = CheckpointFolder::new(&path)?.keep_last(2);
    /// let mut weight = Tensor::zeros([2], (Kind::Float, Device::Cpu));
    /// let mut pending = None;
    /// for step in 1..=3 {
    ///     weight += 1;
    ///     let mut checkpoint = Checkpoint::new();
    ///     checkpoint.add_tensor("weight", &weight)?;
    ///     // Waits for the save of the step before, if it still runs.
    ///     pending = Some(folder.save_async(step, &checkpoint)?);
    /// }
    /// drop(pending);
    /// folder.finish()?;
    /// let found = folder.latest()?.ok_or("nothing was saved")?;
    /// assert_eq!(found.checkpoint.tensor("weight")?, Tensor::from_slice(&[3f32, 3.0]));
    /// # std::fs::remove_dir_all(path)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn save_async(&mut self, step: u64, checkpoint: &Checkpoint) -> Result<PendingSave> {
        self.save_in_thread(step, None, checkpoint)
    }

    /// Saves a checkpoint in a thread, with a score for [`keep_best`](Self::keep_best), as
    /// [`save_scored`](Self::save_scored) does. Otherwise the same as [`save_async`](Self::save_async).
    ///
    /// # Errors
    ///
    /// The same as [`save_async`](Self::save_async).
    pub fn save_scored_async(
        &mut self,
        step: u64,
        score: f64,
        checkpoint: &Checkpoint,
    ) -> Result<PendingSave> {
        self.save_in_thread(step, Some(score), checkpoint)
    }

    /// Waits until no save runs.
    ///
    /// # Errors
    ///
    /// The error of a save whose [`PendingSave`] was dropped.
    pub fn finish(&mut self) -> Result<()> {
        self.background.finish()
    }

    /// Refuses a [`save_async`](Self::save_async) while another one runs, with [`CheckpointError::Busy`], instead of
    /// waiting for it. A program whose disk is too slow then skips checkpoints.
    pub fn refuse_while_saving(mut self) -> Self {
        self.refuses = true;
        self
    }

    /// Limits how many bytes of tensors per second saves in the background write, which leaves memory bandwidth and the
    /// disk to the training. The limit holds until somebody waits for the save: with [`PendingSave::wait`], by dropping
    /// the [`PendingSave`], with [`finish`](Self::finish) or by the next save. 0, the default, means no limit.
    pub fn max_write_rate(mut self, bytes_per_second: u64) -> Self {
        self.rate = NonZeroU64::new(bytes_per_second);
        self
    }

    fn save_in_thread(
        &mut self,
        step: u64,
        score: Option<f64>,
        checkpoint: &Checkpoint,
    ) -> Result<PendingSave> {
        let name = self.name_of(step, score, checkpoint);
        let prepared = self.prepare(checkpoint);
        let prepared = checkpoint.agree(&name, prepared)?;
        let ranks = checkpoint.ranks.as_ref().map(|ranks| ranks.in_background()).transpose()?;
        Ok(self.begin(prepared, move |folder, copied| {
            folder.save_named(step, &name, copied, ranks.as_deref())
        }))
    }

    /// Copies what this process saves of a checkpoint, when no other save runs.
    pub(super) fn prepare(&self, checkpoint: &Checkpoint) -> Result<(Turn, Checkpoint)> {
        checkpoint.check_parts()?;
        let share = checkpoint.share(self.format)?;
        let background = &self.background;
        let save = Arc::new(Save::new(Pace::new(self.rate)));
        let turn = background.begin(self.refuses, Arc::clone(&save))?;
        let own = share.as_ref().unwrap_or(checkpoint);
        let Copied { checkpoint, bytes, staged } = own.copied(&mut background.memory())?;
        {
            let mut state = lock(&save.state);
            (state.bytes, state.staged) = (bytes, staged);
        }
        Ok((turn, checkpoint))
    }

    /// Begins a thread that saves a copy by `write`.
    pub(super) fn begin(
        &self,
        (turn, checkpoint): (Turn, Checkpoint),
        write: impl FnOnce(&Self, &Checkpoint) -> Result<PathBuf> + Send + 'static,
    ) -> PendingSave {
        let (save, background) = (Arc::clone(&turn.0), Arc::clone(&self.background));
        let pending = PendingSave { save, background };
        let folder = self.clone();
        let pace = Arc::clone(&turn.0.pace);
        in_thread(&pace, move || {
            let save = Arc::clone(&turn.0);
            let written = || save.pace.during(|| write(&folder, &checkpoint));
            let result = catch_unwind(AssertUnwindSafe(written))
                .unwrap_or_else(|payload| Err(panicked(payload)));
            {
                let mut state = lock(&save.state);
                state.staged.clear();
                state.result = Some(result);
            }
            // Before anybody may begin the next save.
            folder.background.keep(checkpoint.into_memory());
            drop(turn);
        });
        pending
    }
}

/// Runs `f`, which keeps to a pace, in a thread; or in this one, as fast as it can be, if none can be started.
fn in_thread(pace: &Pace, f: impl FnOnce() + Send + 'static) {
    // Here and in the thread, since a thread that cannot be started drops what it was given.
    let run = Arc::new(Mutex::new(Some(f)));
    let given = Arc::clone(&run);
    let started = thread::Builder::new().name("tch-amp save".to_owned()).spawn(move || {
        let given = lock(&given).take();
        if let Some(run) = given {
            run();
        }
    });
    let left = if started.is_err() { lock(&run).take() } else { None };
    if let Some(run) = left {
        pace.lift();
        run();
    }
}
