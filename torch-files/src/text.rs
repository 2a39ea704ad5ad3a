//! Texts from files in messages: shortened, and with escapes for what a terminal would obey.

/// How many characters of a name, and of a whole sentence, a message shows.
const NAME_CHARS: usize = 80;
const SENTENCE_CHARS: usize = 1000;

/// Returns a name from a file as messages show it: shortened, and with escapes for what a terminal would obey.
pub fn shown(name: &str) -> String {
    escaped(name, NAME_CHARS)
}

/// Returns a sentence with text from a file as [`shown`] does, but leaves it much longer.
pub fn sentence(text: &str) -> String {
    escaped(text, SENTENCE_CHARS)
}

fn escaped(text: &str, most: usize) -> String {
    let mut escaped = String::with_capacity(text.len().min(most));
    let mut chars = text.chars();
    for char in chars.by_ref().take(most) {
        match char {
            '"' | '\'' | '\\' => escaped.push(char),
            char => escaped.extend(char.escape_debug()),
        }
    }
    if chars.next().is_some() {
        escaped.push('…');
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_short_and_commands_no_terminal() {
        for (name, expected) in [
            ("layers.0.weight", "layers.0.weight"),
            ("it's \"a\\b\"", "it's \"a\\b\""),
            ("\u{1b}[2Jgone", "\\u{1b}[2Jgone"),
            ("two\nlines\r", "two\\nlines\\r"),
            ("\u{9b}1m\u{202e}\u{200b}\u{7f}", "\\u{9b}1m\\u{202e}\\u{200b}\\u{7f}"),
            ("größe", "größe"),
        ] {
            assert_eq!(shown(name), expected);
            assert_eq!(shown(&shown(name)), expected, "twice");
        }
        assert_eq!(shown(&"x".repeat(80)), "x".repeat(80));
        let long = "x".repeat(5_000_000);
        assert_eq!(shown(&long), format!("{}…", "x".repeat(80)));
        assert!(sentence(&long).len() < 1100);
    }
}
