//! Files that are made from others and are committed, so that no change of what they say is overlooked.

use anyhow::{Context, Result, ensure};

use crate::paths;

/// Writes a file of the repository.
pub(crate) fn write(file: &str, text: &str) -> Result<()> {
    paths::write(&paths::root().join(file), text)?;
    println!("wrote {file}");
    Ok(())
}

/// Fails if a file of the repository has not the lines of this text, and says what to do.
pub(crate) fn check(file: &str, text: &str, remedy: &str) -> Result<()> {
    let known = paths::read(&paths::root().join(file)).with_context(|| remedy.to_owned())?;
    let changes = changes(&known, text);
    ensure!(changes.is_empty(), "{file} has other lines:\n{}\n{remedy}", changes.join("\n"));
    Ok(())
}

/// The lines that are gone and new, without what follows their first hundred characters.
pub(crate) fn changes(known: &str, text: &str) -> Vec<String> {
    let only_in = |one: &str, other: &str, sign| {
        let lines = one.lines().filter(|line| !other.lines().any(|known| known == *line));
        lines.map(|line| format!("{sign} {line:.100}")).collect::<Vec<_>>()
    };
    [only_in(known, text, '-'), only_in(text, known, '+')].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_and_missing_lines_are_named() {
        assert_eq!(changes("a\nb\n", "b\nc\n"), ["- a", "+ c"]);
        assert!(changes("a\n", "a\n").is_empty());
    }
}
