//! The texts of errors and panics, without C++ backtraces.

use std::io::{self, Write};

use serde::de::{Deserialize, Deserializer, Error as _};
use torch_files::text::shown;

/// How many causes of an error its text includes. The limit ends the loop for a user's error that is its own cause.
const MOST_CAUSES: usize = 64;

/// How many names of a list a message shows.
const NAMES: usize = 8;

/// Returns the first names of a list as a message shows them.
pub(crate) fn list<N: AsRef<str>>(names: &[N]) -> String {
    if names.is_empty() {
        return "nothing".to_owned();
    }
    let first: Vec<_> =
        names.iter().take(NAMES).map(|name| format!("`{}`", shown(name.as_ref()))).collect();
    match names.len().saturating_sub(NAMES) {
        0 => first.join(", "),
        more => format!("{} and {more} more", first.join(", ")),
    }
}

/// Prints a warning on stderr, as Python does, in a line of its own. The one place where the crate prints anything.
pub(crate) fn warn(text: &str) {
    // A program without stderr goes on without its warnings.
    let _closed = writeln!(io::stderr().lock(), "warning: tch-amp: {text}");
}

/// A number as errors show it: with an exponent if it would have very many digits.
pub(crate) struct Number(pub(crate) f64);

impl std::fmt::Display for Number {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        const MAX_DIGITS: usize = 20;
        let Self(number) = self;
        let plain = number.to_string();
        if plain.len() > MAX_DIGITS { write!(f, "{number:e}") } else { f.write_str(&plain) }
    }
}

/// Deserializes a type that refuses unknown keys, with the known key or name that is nearest in the error.
pub(crate) fn strict<'de, T, D>(deserializer: D) -> Result<T, D::Error>
where
    T: Deserialize<'de>,
    D: Deserializer<'de>,
{
    T::deserialize(deserializer).map_err(|error| {
        let text = error.to_string();
        let named = with_nearest(&text);
        if named == text { error } else { D::Error::custom(named) }
    })
}

/// Returns the known name that an unknown one is likely to be a misspelling of: that with the fewest differing letters,
/// unless more than a third of them differ.
pub(crate) fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    // Names are short, and what a damaged file has in place of one may not be.
    let name: String = name.chars().take(MOST_LETTERS).collect();
    let distances = known.into_iter().map(|known| (strsim::osa_distance(&name, known), known));
    let (distance, nearest) = distances.min()?;
    (3 * distance <= name.len().max(nearest.len())).then_some(nearest)
}

const MOST_LETTERS: usize = 100;

/// Returns serde's message, and if it is about an unknown key or name, with the known one that is nearest.
pub(crate) fn with_nearest(message: &str) -> String {
    let named = || {
        let what = ["field", "variant"]
            .into_iter()
            .find(|what| message.starts_with(&format!("unknown {what} `")))?;
        let (unknown, rest) = message.split_once('`')?.1.rsplit_once("`, expected ")?;
        let nearest = nearest(unknown, rest.split('`').skip(1).step_by(2))?;
        Some(format!(
            "unknown {what} `{}`, did you mean `{nearest}`? expected {rest}",
            shown(unknown)
        ))
    };
    named().unwrap_or_else(|| message.to_owned())
}

/// Returns the messages of an error and its causes, without those causes that the text contains already.
pub(crate) fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let causes = std::iter::successors(error.source(), |error| error.source());
    causes.take(MOST_CAUSES).map(text).fold(text(error), |all, why| {
        if all.contains(&why) { all } else { format!("{all}: {why}") }
    })
}

/// Returns the message of an error, and for one of tch's only libtorch's own message.
pub(crate) fn text(error: &(dyn std::error::Error + 'static)) -> String {
    match error.downcast_ref::<tch::TchError>() {
        Some(tch::TchError::Torch(message)) => without_backtrace(message).to_owned(),
        _ => without_backtrace(&error.to_string()).to_owned(),
    }
}

/// Returns libtorch's message without the C++ backtrace that the errors and panics of tch include.
pub(crate) fn without_backtrace(text: &str) -> &str {
    let text = unwrapped(text).unwrap_or(text);
    // A panic shows the error in its debug form, in which newlines are escaped.
    let starts = ["\nException raised from", "\\nException raised from"];
    let end = starts.iter().filter_map(|start| text.find(start)).min();
    &text[..end.unwrap_or(text.len())]
}

/// Returns libtorch's message if `text` is that of a panic in tch.
fn unwrapped(text: &str) -> Option<&str> {
    let start = "called `Result::unwrap()` on an `Err` value: Torch(\"";
    text.strip_prefix(start)?.strip_suffix("\")")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libtorchs_words_remain_of_an_error_and_of_a_panic_with_it() {
        let plain = "no kernel";
        let traced = "no kernel\nException raised from f at x.cpp:1\nframe #0: f";
        for message in [plain, traced] {
            let error = tch::TchError::Torch(message.to_owned());
            let panic = format!("called `Result::unwrap()` on an `Err` value: {error:?}");
            assert_eq!(without_backtrace(&panic), plain);
            assert_eq!(without_backtrace(message), plain);
        }
        let other = "called `Result::unwrap()` on an `Err` value: 7";
        assert_eq!(without_backtrace(other), other);
    }

    #[test]
    fn a_list_is_short() {
        assert!(list(&vec!["x".repeat(5_000_000); 20]).len() < 1000);
    }

    #[test]
    fn a_number_is_short_and_reads_as_the_same() {
        for (number, shown) in [
            (0.0, "0"),
            (-0.5, "-0.5"),
            (65536.0, "65536"),
            (0.1 + 0.2, "0.30000000000000004"),
            (1e22, "1e22"),
            (f64::MIN_POSITIVE, "2.2250738585072014e-308"),
            (f64::MAX, "1.7976931348623157e308"),
            (f64::INFINITY, "inf"),
            (f64::NAN, "NaN"),
        ] {
            assert_eq!(Number(number).to_string(), shown);
        }
    }

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

    #[test]
    fn an_unknown_key_is_reported_with_the_nearest_one() {
        #[derive(Debug, serde::Deserialize)]
        #[serde(deny_unknown_fields)]
        #[expect(dead_code, reason = "it cannot be read")]
        struct Keys {
            at_least: u64,
            below: u64,
        }

        let read = |json: &str| {
            let mut json = serde_json::Deserializer::from_str(json);
            strict::<Keys, _>(&mut json).map_err(|error| error.to_string()).err()
        };
        let text = "unknown field `bellow`, did you mean `below`? expected `at_least` or `below` at line 1 column 24";
        assert_eq!(read("{\"at_least\": 1, \"bellow\": 2}").as_deref(), Some(text));
        assert_eq!(with_nearest(text), text);
        let other = "unknown field `x`, expected `at_least` or `below` at line 1 column 4";
        assert_eq!(read("{\"x\": 2}").as_deref(), Some(other));
        let missing = "missing field `below` at line 1 column 15";
        assert_eq!(read("{\"at_least\": 1}").as_deref(), Some(missing));
    }

    #[test]
    fn a_cause_that_is_quoted_is_not_repeated() {
        let cause = anyhow::anyhow!("the cause");
        let quoted: Box<dyn std::error::Error> = cause.context("an effect of the cause").into();
        assert_eq!(chain(&*quoted), "an effect of the cause");
        let silent: Box<dyn std::error::Error> = anyhow::anyhow!("why").context("what").into();
        assert_eq!(chain(&*silent), "what: why");
    }

    #[test]
    fn an_error_that_is_its_own_cause_has_a_message() {
        #[derive(Debug)]
        struct Ouroboros;

        impl std::fmt::Display for Ouroboros {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("no end")
            }
        }

        impl std::error::Error for Ouroboros {
            fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
                Some(self)
            }
        }

        assert_eq!(chain(&Ouroboros), "no end");
    }
}
