//! The writer of a temporary file. It keeps the first error, and syncs in the background to keep the disk busy.
//!
//! A thread syncs the data after every 64 MiB (`Disk::sync_every`) while more is being written, so that the last sync,
//! which also covers the metadata, has little left to do.

use std::io::{self, ErrorKind, Seek, SeekFrom, Write};
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::thread::{self, JoinHandle};

use super::Target;
use super::disk::DiskFile;

/// A file that is being filled.
pub(super) struct Writer<F> {
    background: Background,
    file: F,
    /// The first error. The caller may lose it, as a `BufWriter` does that is dropped.
    failed: Option<io::Error>,
}

impl<F: DiskFile> Writer<F> {
    pub(super) fn new(file: F, sync_every: u64) -> Self {
        let background = Background { every: sync_every, unsynced: 0, thread: Thread::Waiting };
        Self { background, file, failed: None }
    }

    /// Returns the first error of a write.
    pub(super) fn check(&mut self) -> io::Result<()> {
        self.failed.take().map_or(Ok(()), Err)
    }

    /// Syncs the file to the disk.
    pub(super) fn sync(mut self) -> io::Result<()> {
        // Linux reports a failed sync only once, so `sync_all` would not report one that the thread has already seen.
        self.background.finish()?;
        self.file.sync_all()
    }

    fn note<T>(&mut self, result: io::Result<T>) -> io::Result<T> {
        result.inspect_err(|error| {
            if error.kind() != ErrorKind::Interrupted && self.failed.is_none() {
                self.failed = Some(copy(error));
            }
        })
    }

    fn write_some(&mut self, data: &[u8]) -> io::Result<usize> {
        let written = self.file.write(data)?;
        if written == 0 && !data.is_empty() {
            return Err(ErrorKind::WriteZero.into());
        }
        self.background.written(written as u64, &self.file).map_err(final_error)?;
        Ok(written)
    }
}

impl<F: DiskFile> Write for Writer<F> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let result = self.write_some(data);
        self.note(result)
    }

    fn flush(&mut self) -> io::Result<()> {
        let result = self.file.flush();
        self.note(result)
    }
}

impl<F: DiskFile> Seek for Writer<F> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let result = self.file.seek(to);
        self.note(result)
    }
}

impl<F: DiskFile> Target for Writer<F> {}

/// An error after bytes were written. If it were an interruption, the caller would write them again.
fn final_error(error: io::Error) -> io::Error {
    match error.kind() {
        ErrorKind::Interrupted => io::Error::other(error.to_string()),
        _ => error,
    }
}

fn copy(error: &io::Error) -> io::Error {
    let kept = || io::Error::new(error.kind(), error.to_string());
    error.raw_os_error().map_or_else(kept, io::Error::from_raw_os_error)
}

/// Syncs in a thread of its own what has been written, while more is being written.
struct Background {
    every: u64,
    /// The bytes written since the thread was last notified.
    unsynced: u64,
    thread: Thread,
}

enum Thread {
    /// Not enough has been written yet to start the thread.
    Waiting,
    Running {
        orders: SyncSender<()>,
        thread: JoinHandle<io::Result<()>>,
    },
    Ended,
}

impl Background {
    fn written<F: DiskFile>(&mut self, bytes: u64, file: &F) -> io::Result<()> {
        self.unsynced += bytes;
        if self.unsynced < self.every {
            return Ok(());
        }
        self.unsynced = 0;
        if matches!(self.thread, Thread::Waiting) {
            // If the thread cannot be started, a save only takes longer.
            self.thread = start(file).unwrap_or(Thread::Ended);
        }
        let Thread::Running { orders, .. } = &self.thread else {
            return Ok(());
        };
        match orders.try_send(()) {
            // If the channel is full, the order in it has not started, and so covers these bytes as well.
            Ok(()) | Err(TrySendError::Full(())) => Ok(()),
            Err(TrySendError::Disconnected(())) => self.finish(),
        }
    }

    /// Ends the thread and returns its error.
    fn finish(&mut self) -> io::Result<()> {
        let Thread::Running { orders, thread } = std::mem::replace(&mut self.thread, Thread::Ended)
        else {
            return Ok(());
        };
        drop(orders);
        thread.join().unwrap_or_else(|_| Err(io::Error::other("the syncing thread panicked")))
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        // The caller failed or panicked, so the result of the thread no longer matters.
        drop(self.finish());
    }
}

fn start<F: DiskFile>(file: &F) -> io::Result<Thread> {
    let file = file.try_clone()?;
    let (orders, received) = sync_channel(1);
    let work = move || received.iter().try_for_each(|()| file.sync_data());
    let thread = thread::Builder::new().name("tch-amp sync".to_owned()).spawn(work)?;
    Ok(Thread::Running { orders, thread })
}
