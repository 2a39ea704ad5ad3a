//! Texts of any length that the ranks exchange.

use crate::distributed::group::ProcessGroup;
use crate::error::Result;

impl ProcessGroup {
    /// Returns the texts of all ranks.
    pub(super) fn gather_texts(&self, operation: &'static str, text: &str) -> Result<Vec<String>> {
        let gather =
            |bytes: &[u8]| self.run(operation, |group| group.gather_bytes(bytes, self.size()));
        let lengths = gather(&(text.len() as u64).to_le_bytes())?;
        let lengths: Vec<_> = lengths.chunks_exact(8).map(length).collect();
        let longest = lengths.iter().copied().max().unwrap_or_default().max(1);
        let mut mine = text.as_bytes().to_vec();
        mine.resize(longest, 0);
        let all = gather(&mine)?;
        let texts = all.chunks_exact(longest).zip(lengths);
        Ok(texts.map(|(text, n)| String::from_utf8_lossy(&text[..n]).into_owned()).collect())
    }
}

fn length(bytes: &[u8]) -> usize {
    let length = bytes.try_into().map_or(0, u64::from_le_bytes);
    usize::try_from(length).unwrap_or_default()
}
