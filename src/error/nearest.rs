//! The known name that an unknown one is likely to be a misspelling of. The recipes compile this file as well.

/// Returns the known name with the fewest differing letters; `None` if more than a third of the letters differ in all
/// of them.
pub(crate) fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    // Names are short, and what a damaged file has in place of one may not be.
    let letters: Vec<char> = name.chars().take(MOST_LETTERS).collect();
    let distances = known.into_iter().map(|known| (distance(&letters, known), known));
    let (distance, nearest) = distances.min_by_key(|(distance, _)| *distance)?;
    (3 * distance <= letters.len().max(nearest.len())).then_some(nearest)
}

const MOST_LETTERS: usize = 100;

/// The number of letters that have to be inserted, removed or replaced, or swapped with their neighbour, to make one
/// name of the other.
fn distance(from: &[char], to: &str) -> usize {
    let to: Vec<char> = to.chars().collect();
    let mut rows = vec![(0..=to.len()).collect::<Vec<usize>>()];
    for (i, letter) in from.iter().enumerate() {
        let mut row = vec![i + 1];
        for (j, other) in to.iter().enumerate() {
            let replaced = rows[i][j] + usize::from(letter != other);
            let mut least = replaced.min(rows[i][j + 1] + 1).min(row[j] + 1);
            if i > 0 && j > 0 && *letter == to[j - 1] && from[i - 1] == *other {
                least = least.min(rows[i - 1][j - 1] + 1);
            }
            row.push(least);
        }
        rows.push(row);
    }
    rows.last().and_then(|row| row.last()).copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::nearest;

    #[test]
    fn a_misspelling_has_a_nearest_name_and_another_word_has_none() {
        let known = ["operator", "run_as", "at_least", "below"];
        for (name, wanted) in [
            ("bellow", Some("below")),
            ("belwo", Some("below")),
            ("operater", Some("operator")),
            ("atleast", Some("at_least")),
            ("below", Some("below")),
            ("dtype", None),
            ("", None),
        ] {
            assert_eq!(nearest(name, known), wanted, "{name}");
        }
        assert_eq!(nearest("below", []), None);
        assert_eq!(nearest(&"below".repeat(100_000), known), None);
    }
}
