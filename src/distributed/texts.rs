//! Texts of any length that the ranks exchange.

use crate::distributed::group::ProcessGroup;
use crate::error::{DistributedError, Error, Result};

impl ProcessGroup {
    /// Returns the texts of all ranks.
    pub(super) fn gather_texts(&self, operation: &'static str, text: &str) -> Result<Vec<String>> {
        let gather =
            |bytes: &[u8]| self.run(operation, |group| group.gather(bytes, self.size())?.finish());
        let lengths = gather(&(text.len() as u64).to_le_bytes())?;
        let lengths: Vec<_> = lengths.chunks_exact(8).map(length).collect();
        let longest = lengths.iter().copied().max().unwrap_or_default().max(1);
        let mut mine = text.as_bytes().to_vec();
        mine.resize(longest, 0);
        let all = gather(&mine)?;
        let texts = all.chunks_exact(longest).zip(lengths);
        Ok(texts.map(|(text, n)| String::from_utf8_lossy(&text[..n]).into_owned()).collect())
    }

    /// Returns an error unless all ranks make this call with the same lines, which `hash` stands for. It has the first
    /// line in which they differ, or says that a rank has failed before.
    pub(super) fn compare_lines(
        &self,
        call: &'static str,
        hash: Result<u64>,
        lines: impl FnOnce() -> String,
    ) -> Result<()> {
        let start = format!("{call} with the hash ");
        match self.compare_checked(call, hash, |hash| format!("{start}{hash:016x}")) {
            // All ranks see the same calls, and so all of them, or none, go on.
            Err(Error::Distributed(DistributedError::Mismatch { calls }))
                if calls.iter().all(|call| call.starts_with(&start)) =>
            {
                let calls = first_difference(call, &self.gather_texts(call, &lines())?);
                Err(DistributedError::Mismatch { calls }.into())
            }
            compared => compared.map(drop),
        }
    }
}

/// What each rank has in the first line in which they differ.
fn first_difference(call: &str, texts: &[String]) -> Vec<String> {
    let mut ranks: Vec<_> = texts.iter().map(|text| text.lines()).collect();
    loop {
        let lines: Vec<_> = ranks.iter_mut().map(Iterator::next).collect();
        let is_end = lines.iter().all(Option::is_none);
        if is_end || lines.windows(2).any(|pair| pair[0] != pair[1]) {
            let with = |line: Option<&str>| match line {
                Some(line) => format!("{call} with {line}"),
                None => format!("{call} without it"),
            };
            return lines.into_iter().map(with).collect();
        }
    }
}

fn length(bytes: &[u8]) -> usize {
    let length = bytes.try_into().map_or(0, u64::from_le_bytes);
    usize::try_from(length).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_difference_is_found() {
        let texts = ["a\nb\nc\n", "a\nx\n", "a\n"].map(str::to_owned);
        let calls = first_difference("a call", &texts);
        assert_eq!(calls, ["a call with b", "a call with x", "a call without it"]);
    }
}
