//! What a copy of a checkpoint is made in, and how fast it is written.

use std::cell::RefCell;
use std::collections::HashMap;
use std::io::{self, Write};
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use tch::{Device, Kind, Tensor};

use crate::error::Result;
use crate::ffi::{OutsideRegions, Staged};
use crate::panics::{Exchanged, lock};

/// No write takes longer.
const LONGEST: Duration = Duration::from_secs(1 << 25);

thread_local! {
    /// That of the save that the thread writes.
    static CURRENT: RefCell<Option<Arc<Pace>>> = const { RefCell::new(None) };
}

/// How far a save is, and how fast it may be.
#[derive(Debug)]
pub(crate) struct Pace {
    written: AtomicU64,
    /// The bytes per second beyond which the writer waits.
    rate: Option<NonZeroU64>,
    bound: Mutex<Bound>,
    lifted: Condvar,
}

#[derive(Debug)]
struct Bound {
    /// When the next bytes may be written.
    next: Instant,
    is_lifted: bool,
}

impl Pace {
    pub(crate) fn new(rate: Option<NonZeroU64>) -> Self {
        let bound = Mutex::new(Bound { next: Instant::now(), is_lifted: false });
        Self { written: AtomicU64::new(0), rate, bound, lifted: Condvar::new() }
    }

    /// Runs `f`, in which what the thread writes keeps to this pace.
    pub(crate) fn during<T>(self: &Arc<Self>, f: impl FnOnce() -> T) -> T {
        let _current = Exchanged::new(&CURRENT, Some(Arc::clone(self)));
        f()
    }

    /// Counts bytes that were written, and waits for as long as they should take.
    fn count(&self, bytes: u64) {
        self.written.fetch_add(bytes, Ordering::Relaxed);
        let Some(rate) = self.rate else { return };
        let time = Duration::try_from_secs_f64(bytes as f64 / rate.get() as f64);
        let mut bound = lock(&self.bound);
        let now = Instant::now();
        // Time in which nothing was written is not made up for.
        bound.next = bound.next.max(now) + time.unwrap_or(LONGEST).min(LONGEST);
        let early = bound.next - now;
        drop(self.lifted.wait_timeout_while(bound, early, |bound| !bound.is_lifted));
    }

    /// Lets the rest be written as fast as it can be, because somebody waits for it.
    pub(crate) fn lift(&self) {
        lock(&self.bound).is_lifted = true;
        self.lifted.notify_all();
    }

    /// Returns how many bytes were written.
    pub(crate) fn written(&self) -> u64 {
        self.written.load(Ordering::Relaxed)
    }
}

/// A writer that keeps to the pace of the thread's save, if it writes one.
pub(crate) struct Paced<'a> {
    out: &'a mut dyn Write,
    pace: Option<Arc<Pace>>,
}

impl<'a> Paced<'a> {
    pub(crate) fn new(out: &'a mut dyn Write) -> Self {
        Self { out, pace: CURRENT.with_borrow(Option::clone) }
    }
}

impl Write for Paced<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.out.write(bytes)?;
        if let Some(pace) = &self.pace {
            pace.count(written as u64);
        }
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// The elements of a tensor in memory of the host.
#[derive(Debug)]
pub(crate) enum HostCopy {
    Memory(Tensor),
    /// Those of a CUDA device, which may still be on their way.
    Staged(Arc<Staged>),
}

impl HostCopy {
    /// Copies a tensor into memory of an earlier copy where it fits.
    pub(crate) fn of(
        tensor: &Tensor,
        kind: Kind,
        size: &[i64],
        memory: &mut Memory,
    ) -> Result<Self> {
        let _own = OutsideRegions::enter();
        let device = tensor.device();
        let taken = memory.take(&(kind, size.to_vec(), device));
        if let Device::Cuda(_) = device {
            // Memory that somebody still waits for is freed by them.
            if let Some(Self::Staged(mut staged)) = taken
                && let Some(own) = Arc::get_mut(&mut staged)
            {
                own.copy(tensor)?;
                return Ok(Self::Staged(staged));
            }
            return Ok(Self::Staged(Arc::new(Staged::new(tensor)?)));
        }
        let mut copy = match taken {
            Some(Self::Memory(copy)) => copy,
            _ => Tensor::f_empty(size, (kind, Device::Cpu))?,
        };
        copy.f_copy_(tensor)?;
        Ok(Self::Memory(copy))
    }

    /// Returns the same copy once more.
    pub(crate) fn shallow_clone(&self) -> Self {
        match self {
            Self::Memory(tensor) => Self::Memory(tensor.shallow_clone()),
            Self::Staged(staged) => Self::Staged(Arc::clone(staged)),
        }
    }

    /// The tensor on the CPU. Waits until its elements have arrived.
    pub(crate) fn tensor(&self) -> Result<Tensor> {
        match self {
            Self::Memory(tensor) => Ok(tensor.shallow_clone()),
            Self::Staged(staged) => {
                staged.wait()?;
                staged.tensor()
            }
        }
    }
}

/// The dtype, the shape and the device of what is copied. A stream of that device fills pinned memory.
type Source = (Kind, Vec<i64>, Device);

/// The memory of an earlier copy.
#[derive(Debug, Default)]
pub(crate) struct Memory(HashMap<Source, Vec<HostCopy>>);

impl Memory {
    fn take(&mut self, source: &Source) -> Option<HostCopy> {
        self.0.get_mut(source)?.pop()
    }

    pub(crate) fn add(&mut self, source: Source, copy: HostCopy) {
        self.0.entry(source).or_default().push(copy);
    }
}

#[cfg(test)]
impl Memory {
    pub(super) fn places(&self) -> std::collections::BTreeSet<usize> {
        let copies = self.0.values().flatten();
        copies.map(|copy| copy.tensor().unwrap().data_ptr() as usize).collect()
    }
}
