//! What the ranks call, compared before anything else is communicated, because gloo aborts the process if the ranks
//! communicate different amounts.

use xxhash_rust::xxh3::xxh3_64;

use crate::distributed::group::ProcessGroup;
use crate::error::{DistributedError, Error, Result};
use crate::ffi::distributed::Gathering;

/// The size of the record of a call, which is the same for all calls.
const RECORD: usize = 256;
const HASH: usize = 8;
/// The place of the flag, behind the text.
const FLAG: usize = RECORD - 1;

/// A comparison of calls that has begun.
#[derive(Debug)]
pub(super) struct Comparison {
    operation: &'static str,
    mine: [u8; RECORD],
    /// The records of all ranks.
    pub(super) records: Gathering,
}

impl ProcessGroup {
    /// Returns an error unless all ranks call the same.
    pub(super) fn compare(&self, operation: &'static str, call: &str) -> Result<()> {
        self.compare_with(operation, call, false).map(drop)
    }

    /// Returns an error unless all ranks call the same, for a call that communicates nothing else.
    pub(crate) fn compare_call(&self, operation: &'static str, call: &str) -> Result<()> {
        let _order = self.begin();
        self.compare(operation, call)
    }

    /// Returns whether any rank raises the flag, or an error unless all ranks call the same.
    pub(super) fn compare_with(
        &self,
        operation: &'static str,
        call: &str,
        flag: bool,
    ) -> Result<bool> {
        self.finish_comparison(&self.begin_comparison(operation, call, flag)?)
    }

    /// Begins to compare what the ranks call, and does not block. As with all collectives, all ranks begin them in the
    /// same order.
    pub(super) fn begin_comparison(
        &self,
        operation: &'static str,
        call: &str,
        flag: bool,
    ) -> Result<Comparison> {
        let mine = record(call, flag);
        let records = self.run(operation, |group| group.gather(&mine, self.size()))?;
        Ok(Comparison { operation, mine, records })
    }

    /// Blocks until all ranks have called something. Then returns whether any of them raises the flag, or an error
    /// unless all call the same.
    pub(super) fn finish_comparison(&self, comparison: &Comparison) -> Result<bool> {
        let Comparison { operation, mine, records } = comparison;
        let all = records.finish().map_err(|error| self.failure(operation, error))?;
        let records: Vec<_> = all.chunks_exact(RECORD).collect();
        if records.iter().all(|record| record[..FLAG] == mine[..FLAG]) {
            return Ok(records.iter().any(|record| record[FLAG] != 0));
        }
        let calls = records.into_iter().map(text).collect();
        Err(DistributedError::Mismatch { calls }.into())
    }

    /// Returns the checked arguments of a call that all ranks make. If this rank has refused its own, the others, which
    /// would wait for it, get an error that says why.
    pub(super) fn compare_checked<T>(
        &self,
        operation: &'static str,
        checked: Result<T>,
        call: impl FnOnce(&T) -> String,
    ) -> Result<T> {
        match checked {
            Ok(arguments) => {
                self.compare(operation, &call(&arguments))?;
                Ok(arguments)
            }
            Err(refused) => Err(self.refuse(operation, refused)),
        }
    }

    /// Tells the other ranks that a call of this one has failed before it communicated, and returns the error.
    pub(super) fn refuse(&self, operation: &'static str, error: Error) -> Error {
        // The caller has to know of this error, whatever the other ranks do.
        let _mismatch =
            self.compare(operation, &format!("{operation}, which fails there: {error}"));
        error
    }
}

/// The hash of a text, which counts where the text is too long for the record, as much of it as fits, and the flag.
fn record(call: &str, flag: bool) -> [u8; RECORD] {
    let mut record = [0; RECORD];
    record[..HASH].copy_from_slice(&xxh3_64(call.as_bytes()).to_le_bytes());
    for (to, from) in record[HASH..FLAG].iter_mut().zip(call.as_bytes()) {
        *to = *from;
    }
    record[FLAG] = flag.into();
    record
}

fn text(record: &[u8]) -> String {
    let text = String::from_utf8_lossy(&record[HASH..FLAG]);
    text.trim_end_matches(['\0', char::REPLACEMENT_CHARACTER]).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_of_long_texts_differ_after_their_end() {
        let (one, other) = (format!("{}1", "é".repeat(300)), format!("{}2", "é".repeat(300)));
        assert_ne!(record(&one, false), record(&other, false));
        assert_eq!(text(&record(&one, true)), "é".repeat((FLAG - HASH) / 2));
        assert_eq!(text(&record("all_reduce", true)), "all_reduce");
    }
}
