//! Values that threads make ahead of their use.

use std::panic::resume_unwind;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::{self, JoinHandle};

/// How many values of each thread wait to be used, as with the `DataLoader` of PyTorch.
const WAITING: usize = 2;

/// Returns `make(first)`, `make(first + 1)` and so on until one is `None`. Without threads, each value is made when it
/// is asked for. Otherwise each of n threads makes every n-th value, with a clone of `make`, so that the order is the
/// same.
pub fn ahead<T: Send + 'static>(
    threads: usize,
    first: u64,
    make: impl FnMut(u64) -> Option<T> + Clone + Send + 'static,
) -> Box<dyn Iterator<Item = T>> {
    if threads == 0 {
        return Box::new((first..).map_while(make));
    }
    let numbers = |thread| (first + thread as u64..).step_by(threads);
    let mut makers: Vec<_> =
        (0..threads).map(|thread| Maker::start(numbers(thread), make.clone())).collect();
    let mut turns = (0..threads).cycle();
    Box::new(std::iter::from_fn(move || makers[turns.next()?].next()))
}

/// A thread that makes values until one is `None` or nobody takes them.
struct Maker<T> {
    made: Receiver<T>,
    thread: Option<JoinHandle<()>>,
}

impl<T: Send + 'static> Maker<T> {
    fn start(
        numbers: impl Iterator<Item = u64> + Send + 'static,
        make: impl FnMut(u64) -> Option<T> + Send + 'static,
    ) -> Self {
        let (sender, made) = sync_channel(WAITING);
        let mut values = numbers.map_while(make);
        let thread =
            thread::spawn(
                move || while values.next().is_some_and(|value| sender.send(value).is_ok()) {},
            );
        Self { made, thread: Some(thread) }
    }

    /// The next value. Panics if the thread has panicked.
    fn next(&mut self) -> Option<T> {
        let value = self.made.recv().ok();
        if value.is_none()
            && let Some(Err(panic)) = self.thread.take().map(JoinHandle::join)
        {
            resume_unwind(panic);
        }
        value
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Duration;

    #[test]
    fn the_values_come_in_order_however_long_each_of_them_takes() {
        let make = |number: u64| {
            thread::sleep(Duration::from_millis(number * 7 % 5));
            (number < 20).then_some(number * number)
        };
        for threads in 0..=4 {
            for first in [0, 3, 20] {
                let want: Vec<_> = (first..20).map(|number| number * number).collect();
                assert_eq!(ahead(threads, first, make).collect::<Vec<_>>(), want, "{threads}");
            }
        }
    }

    #[test]
    fn no_more_are_made_than_wait_and_none_after_the_end_of_the_use() {
        let made = Arc::new(AtomicU64::new(0));
        let counter = made.clone();
        let mut values = ahead(2, 0, move |number| {
            counter.fetch_add(1, Ordering::SeqCst);
            Some(number)
        });
        assert_eq!(values.next(), Some(0));
        // Of each thread some wait, and one waits for its place among them.
        thread::sleep(Duration::from_millis(50));
        let most = 1 + 2 * (WAITING as u64 + 1);
        let count = made.load(Ordering::SeqCst);
        assert!((2..=most).contains(&count), "{count}");
        drop(values);
        let end = std::time::Instant::now() + Duration::from_secs(60);
        while Arc::strong_count(&made) > 1 {
            assert!(std::time::Instant::now() < end, "the threads go on");
            thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_panic_of_a_thread_is_one_of_whoever_takes_its_value() {
        let mut values = ahead(2, 0, |number| {
            assert!(number < 3, "the third is broken");
            Some(number)
        });
        assert_eq!(values.by_ref().take(3).collect::<Vec<_>>(), [0, 1, 2]);
        let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| values.next()));
        assert!(panic.is_err());
    }
}
