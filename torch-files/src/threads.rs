//! Reading on several threads: one core copies from the page cache more slowly than the memory allows.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use crate::error::{Error, Result};

/// More threads than these are not faster, and other processes may load a file at the same time.
const MOST_THREADS: usize = 4;

/// The bytes for which one more thread is worth its start.
const BYTES_PER_THREAD: u64 = 4 << 20;

/// A multiple of the size of a page and of every element.
const GRANULE: usize = 1 << 16;

fn threads(bytes: u64) -> usize {
    let worth = usize::try_from(bytes / BYTES_PER_THREAD).unwrap_or(MOST_THREADS);
    let cores = || thread::available_parallelism().map_or(1, usize::from);
    if worth < 2 { 1 } else { worth.min(cores()).min(MOST_THREADS) }
}

/// Calls `work` for each item, of which all together have so many bytes. Returns the error of the first item that has
/// one; later ones may not have been tried then.
pub(crate) fn for_each<T: Sync>(
    items: &[T],
    bytes: u64,
    work: &(dyn Fn(&T) -> Result<()> + Sync),
) -> Result<()> {
    let threads = threads(bytes).min(items.len());
    if threads < 2 {
        return items.iter().try_for_each(work);
    }
    let next = AtomicUsize::new(0);
    let first: Mutex<Option<(usize, Error)>> = Mutex::new(None);
    let run = || {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(at) else { return };
            if let Err(error) = work(item) {
                let mut first = first.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
                if first.as_ref().is_none_or(|(other, _)| at < *other) {
                    *first = Some((at, error));
                }
                // Items before this one have been taken, and are finished by the threads that took them.
                next.store(items.len(), Ordering::Relaxed);
                return;
            }
        }
    };
    thread::scope(|scope| {
        for _ in 1..threads {
            // Without one more thread it only takes longer.
            drop(thread::Builder::new().spawn_scoped(scope, run));
        }
        run();
    });
    let first = first.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
    first.map_or(Ok(()), |(_, error)| Err(error))
}

/// Fills the bytes in pieces: `fill` is called with the position of each and the piece.
pub(crate) fn fill(
    bytes: &mut [u8],
    fill: &(dyn Fn(u64, &mut [u8]) -> Result<()> + Sync),
) -> Result<()> {
    let threads = threads(bytes.len() as u64);
    if threads < 2 {
        return fill(0, bytes);
    }
    let len = bytes.len();
    let piece = bytes.len().div_ceil(threads).next_multiple_of(GRANULE);
    let pieces = bytes.chunks_mut(piece).enumerate();
    let pieces: Vec<_> = pieces.map(|(at, piece)| Mutex::new((at, piece))).collect();
    for_each(&pieces, len as u64, &|one| {
        let (at, to) = &mut *one.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        fill((*at * piece) as u64, to)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_filled_once_and_the_first_error_is_returned() {
        for len in [0, 1, 3 << 20, (13 << 20) + 5] {
            let mut bytes = vec![0; len];
            let position = |at: u64, to: &mut [u8]| {
                for (place, byte) in to.iter_mut().enumerate() {
                    *byte += ((at as usize + place) % 251) as u8 + 1;
                }
                Ok(())
            };
            fill(&mut bytes, &position).expect("nothing fails");
            assert!(bytes.iter().enumerate().all(|(at, byte)| *byte == (at % 251) as u8 + 1));
        }
        let items: Vec<_> = (0..1000).collect();
        for bad in [0, 1, 500, 999] {
            let fails = |item: &i32| match *item >= bad {
                true => Err(Error::Request(item.to_string())),
                false => Ok(()),
            };
            let error = for_each(&items, u64::MAX, &fails).expect_err("one fails");
            assert_eq!(error.to_string(), bad.to_string());
        }
    }
}
