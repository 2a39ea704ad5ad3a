//! What Ctrl-C does: the run saves a checkpoint and ends.

use anyhow::{Context, Result};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The exit status of a program that Ctrl-C has ended.
pub const INTERRUPTED: u8 = 130;

/// Notes Ctrl-C and SIGTERM, for a loop that asks after each step.
#[derive(Clone, Debug, Default)]
pub struct Interrupt {
    noted: Arc<AtomicBool>,
    /// Whether the next signal ends the program.
    ends: Arc<AtomicBool>,
}

impl Interrupt {
    /// Catches Ctrl-C and SIGTERM from now on. The first one is noted; the second one ends the program at once. Call it
    /// after [`Ranks::start`](super::Ranks::start), which passes the signals on to the ranks.
    pub fn catch() -> Result<Self> {
        let caught = Self::default();
        for signal in [SIGINT, SIGTERM] {
            // In this order: the first handlers look at what the last one has noted of an earlier signal.
            let end = |flag| flag::register_conditional_shutdown(signal, INTERRUPTED.into(), flag);
            end(caught.noted.clone())
                .and_then(|_| end(caught.ends.clone()))
                .and_then(|_| flag::register(signal, caught.noted.clone()))
                .context("cannot catch Ctrl-C")?;
        }
        Ok(caught)
    }

    /// Notes nothing: for tests.
    pub fn never() -> Self {
        Self::default()
    }

    /// Is requested already, so that a run ends after its first step: for tests.
    pub fn at_once() -> Self {
        Self { noted: Arc::new(true.into()), ..Self::default() }
    }

    /// Whether the run should save and end.
    pub fn is_requested(&self) -> bool {
        self.noted.load(Ordering::SeqCst)
    }

    /// Has the first signal end the program at once, for as long as the result exists: call it when all is saved, and
    /// ask afterwards whether a signal has come before.
    pub fn nothing_to_save(&self) -> NothingToSave<'_> {
        self.ends.store(true, Ordering::SeqCst);
        NothingToSave(self)
    }
}

/// See [`Interrupt::nothing_to_save`].
#[derive(Debug)]
#[must_use = "signals are noted again when this is dropped"]
pub struct NothingToSave<'a>(&'a Interrupt);

impl Drop for NothingToSave<'_> {
    fn drop(&mut self) {
        self.0.ends.store(false, Ordering::SeqCst);
    }
}

/// How a run has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Ended {
    /// It has done all of its steps, or has only shown its usage.
    Finished,
    /// It was interrupted after this step, and has saved a checkpoint of it if it saves any.
    Interrupted { step: u64 },
}

impl Ended {
    /// The exit status of the program: 130 after an interruption.
    pub fn exit_code(self) -> ExitCode {
        match self {
            Self::Finished => ExitCode::SUCCESS,
            Self::Interrupted { .. } => ExitCode::from(INTERRUPTED),
        }
    }
}
