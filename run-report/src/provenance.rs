//! How a page was made.

use std::fmt;
use std::path::Path;
use std::sync::LazyLock;
use std::time::{SystemTime, UNIX_EPOCH};

/// How a page was made: the versions of what made it, the time, and the command line of the program. Its text, by
/// `Display`, is such as `Made with my-trainer 1.0, 2026-11-26 02:35 UTC, by: train --epochs 3`.
///
/// Look for secrets among the program's arguments before you share a page.
#[derive(Clone, Debug)]
pub struct Provenance {
    versions: String,
}

impl Provenance {
    /// Creates the provenance of pages that are made with these versions, such as `my-trainer 1.0 and libtorch 2.13`.
    pub fn new(versions: &str) -> Self {
        Self { versions: versions.to_owned() }
    }
}

impl fmt::Display for Provenance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Made with {}, {}, by: {}", self.versions, *MADE, command())
    }
}

/// When the first page of this process was made, in words. All pages of a process have the same time.
static MADE: LazyLock<String> = LazyLock::new(|| {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    utc(since.map_or(0, |since| since.as_secs()))
});

/// The command line, with the name of the program instead of its path.
fn command() -> String {
    let mut words: Vec<_> =
        std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect();
    if let Some(program) = words.first_mut() {
        let name = Path::new(program).file_name().map(|name| name.to_string_lossy().into_owned());
        *program = name.unwrap_or_default();
    }
    words.join(" ")
}

/// A time in seconds since 1970, such as `2026-11-26 02:35 UTC`.
fn utc(seconds: u64) -> String {
    let (mut days, minutes) = (seconds / 86_400, seconds % 86_400 / 60);
    let mut year = 1970;
    while days >= days_of(year) {
        days -= days_of(year);
        year += 1;
    }
    let february = days_of(year) - 337;
    let mut month = 1;
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30] {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    let (day, hour, minute) = (days + 1, minutes / 60, minutes % 60);
    format!("{year}-{month:02}-{day:02} {hour:02}:{minute:02} UTC")
}

/// The number of days of a year.
fn days_of(year: u64) -> u64 {
    let is_leap = year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    if is_leap { 366 } else { 365 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The times are those of `date --utc --date=@SECONDS`.
    #[test]
    fn times_are_those_of_the_calendar() {
        let times = [
            (0, "1970-01-01 00:00 UTC"),
            (951_782_399, "2000-02-28 23:59 UTC"),
            (951_868_800, "2000-03-01 00:00 UTC"),
            (1_735_689_599, "2024-12-31 23:59 UTC"),
            (1_795_660_500, "2026-11-26 02:35 UTC"),
            (4_107_542_400, "2100-03-01 00:00 UTC"),
        ];
        for (seconds, time) in times {
            assert_eq!(utc(seconds), time);
        }
    }

    #[test]
    fn the_command_has_no_path() {
        let text = Provenance::new("it 1.0").to_string();
        assert!(text.starts_with("Made with it 1.0, 2"), "{text}");
        let program = text.split("by: ").nth(1).and_then(|words| words.split(' ').next());
        assert!(program.is_some_and(|name| !name.is_empty() && !name.contains('/')), "{text}");
    }
}
