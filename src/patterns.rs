//! Patterns for the names of variables.

/// Returns whether a name matches one of the patterns.
pub(crate) fn matches_any<P: AsRef<str>>(patterns: &[P], name: &str) -> bool {
    patterns.iter().any(|pattern| matches(pattern.as_ref(), name))
}

/// Returns whether a name matches a pattern, in which each `*` stands for any characters.
fn matches(pattern: &str, name: &str) -> bool {
    let Some((start, rest)) = pattern.split_once('*') else {
        return pattern == name;
    };
    let Some(mut name) = name.strip_prefix(start) else {
        return false;
    };
    let mut parts: Vec<&str> = rest.split('*').collect();
    let end = parts.pop().unwrap_or_default();
    for part in parts {
        match name.find(part) {
            Some(at) => name = &name[at + part.len()..],
            None => return false,
        }
    }
    name.ends_with(end)
}

#[cfg(test)]
mod tests {
    use super::matches;

    #[test]
    fn a_star_stands_for_any_characters() {
        for (pattern, name, fits) in [
            ("*.bias", "a.b.bias", true),
            ("*.bias", "bias", false),
            ("*bias", "bias", true),
            ("*norm*", "layer.norm1.weight", true),
            ("*norm*", "layer.weight", false),
            ("a*b*c", "a1b2c", true),
            ("a*b*c", "acb", false),
            ("a*a", "a", false),
            ("*", "", true),
            ("a**b", "ab", true),
            ("weight", "weight", true),
            ("weight", "weights", false),
        ] {
            assert_eq!(matches(pattern, name), fits, "{pattern} {name}");
        }
    }

    /// Whether a name matches, by trying every length of what a star stands for.
    fn by_definition(pattern: &[u8], name: &[u8]) -> bool {
        match (pattern, name) {
            ([], _) => name.is_empty(),
            ([b'*', rest @ ..], _) => (0..=name.len()).any(|n| by_definition(rest, &name[n..])),
            ([one, rest @ ..], [first, names @ ..]) => one == first && by_definition(rest, names),
            _ => false,
        }
    }

    #[test]
    fn every_short_pattern_matches_what_it_says() {
        let texts = |letters: &[u8], longest: u32| -> Vec<String> {
            let count = letters.len();
            let text = |length: u32, mut code: usize| {
                let letter = |_| {
                    let letter = char::from(letters[code % count]);
                    code /= count;
                    letter
                };
                (0..length).map(letter).collect()
            };
            (0..=longest)
                .flat_map(|length| (0..count.pow(length)).map(move |code| (length, code)))
                .map(|(length, code)| text(length, code))
                .collect()
        };
        let names = texts(b"ab", 5);
        for pattern in texts(b"ab*", 5) {
            for name in &names {
                let expected = by_definition(pattern.as_bytes(), name.as_bytes());
                assert_eq!(matches(&pattern, name), expected, "{pattern} {name}");
            }
        }
    }
}
