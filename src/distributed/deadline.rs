//! Calls that libtorch may never return from.

use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use crate::error::{Error, Result};

/// How long a rank waits after a failure for the others: to report it, too, or to be told.
pub(super) const GRACE: Duration = Duration::from_secs(5);

/// Runs a call that talks to a store, and fails if it takes longer than this. If the process that serves the store is
/// stopped or hangs, libtorch waits for its answer without a timeout. The call then goes on in its thread for as long.
pub(super) fn within<T: Send + 'static>(
    limit: Duration,
    call: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let (sender, receiver) = mpsc::channel();
    // Nobody receives the result of a call that took too long.
    let call = move || drop(sender.send(call()));
    let thread = thread::Builder::new().name("tch-amp store".to_owned()).spawn(call);
    thread.map_err(|error| Error::Torch(format!("no thread could be started: {error}")))?;
    receiver.recv_timeout(limit).unwrap_or_else(|_| {
        let message = format!("the store has not answered in {limit:?}");
        Err(Error::Torch(message))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_that_does_not_return_is_an_error() {
        let (_sender, receiver) = mpsc::channel::<()>();
        let late = within(Duration::from_millis(1), move || Ok(receiver.recv()));
        assert!(late.unwrap_err().to_string().contains("has not answered in 1ms"));
        assert_eq!(within(Duration::MAX, || Ok(2)).unwrap(), 2);
    }
}
