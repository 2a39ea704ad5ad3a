//! Processes that are ranks: signals for them, and their end with the process that has started them.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};

use super::call;
use crate::error::Result;
use crate::sys::distributed as sys;

/// Asks a process to end.
pub(crate) const SIGTERM: i32 = 15;
/// Ends a process.
pub(crate) const SIGKILL: i32 = 9;

/// While this lives, signals that end a program are remembered instead. There may be one at a time.
#[derive(Debug)]
pub(crate) struct Signals(());

impl Signals {
    pub(crate) fn catch() -> Result<Self> {
        // SAFETY: `err` is valid for a write.
        call(|err| unsafe { sys::tamp_signals_catch(err) }).map(|()| Self(()))
    }

    /// Returns the last signal since the previous call.
    pub(crate) fn caught(&self) -> Option<i32> {
        // SAFETY: the function reads and writes an atomic number.
        let signal = unsafe { sys::tamp_signals_caught() };
        i32::try_from(signal).ok().filter(|signal| *signal != 0)
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        // SAFETY: the signals have been caught, so that the shim knows how they were handled before.
        unsafe { sys::tamp_signals_release() };
    }
}

/// Sends a signal to a child, which has not been waited for, and to the other processes of its process group.
pub(crate) fn signal(child: &Child, signal: i32) -> Result<()> {
    let process = i64::from(child.id());
    // SAFETY: `err` is valid for a write.
    call(|err| unsafe { sys::tamp_process_signal(process, signal.into(), err) })
}

/// Asks Linux to kill the process when the thread that starts it ends.
pub(crate) fn end_with_this_thread(command: &mut Command) {
    let parent = i64::from(std::process::id());
    let before_exec = move || {
        // SAFETY: the function makes two system calls.
        match unsafe { sys::tamp_process_end_with(parent) } {
            0 => Ok(()),
            errno => Err(io::Error::from_raw_os_error(i32::try_from(errno).unwrap_or_default())),
        }
    };
    // SAFETY: `before_exec` allocates nothing, locks nothing and calls async-signal-safe functions only, as a process
    // requires that was forked from one with several threads.
    unsafe { command.pre_exec(before_exec) };
}
