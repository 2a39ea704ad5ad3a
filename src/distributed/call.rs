//! What the ranks call, compared before anything else is communicated, because gloo aborts the process if the ranks
//! communicate different amounts.

use xxhash_rust::xxh3::xxh3_64;

use crate::distributed::group::ProcessGroup;
use crate::error::{DistributedError, Result};

/// The size of the record of a call, which is the same for all calls.
const RECORD: usize = 256;
const HASH: usize = 8;

impl ProcessGroup {
    /// Returns an error unless all ranks call the same.
    pub(super) fn compare(&self, operation: &'static str, call: &str) -> Result<()> {
        let mine = record(call);
        let all = self.run(operation, |group| group.gather_bytes(&mine, self.size()))?;
        let records: Vec<_> = all.chunks_exact(RECORD).collect();
        if records.iter().all(|record| **record == mine) {
            return Ok(());
        }
        let calls = records.into_iter().map(text).collect();
        Err(DistributedError::Mismatch { calls }.into())
    }
}

/// The hash of a text, which counts where the text is too long for the record, and as much of it as fits.
fn record(call: &str) -> [u8; RECORD] {
    let mut record = [0; RECORD];
    record[..HASH].copy_from_slice(&xxh3_64(call.as_bytes()).to_le_bytes());
    for (to, from) in record[HASH..].iter_mut().zip(call.as_bytes()) {
        *to = *from;
    }
    record
}

fn text(record: &[u8]) -> String {
    let text = String::from_utf8_lossy(&record[HASH..]);
    text.trim_end_matches(['\0', char::REPLACEMENT_CHARACTER]).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_of_long_texts_differ_after_their_end() {
        let (one, other) = (format!("{}1", "é".repeat(300)), format!("{}2", "é".repeat(300)));
        assert_ne!(record(&one), record(&other));
        assert_eq!(text(&record(&one)), "é".repeat((RECORD - HASH) / 2));
        assert_eq!(text(&record("all_reduce")), "all_reduce");
    }
}
