//! How a page came about: by which versions, when, and by which command.

use std::env;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use lazy_static::lazy_static;

use crate::ffi;

lazy_static! {
    /// When the first page of this process was made, in words.
    static ref MADE: String = {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        utc(since.map_or(0, |since| since.as_secs()))
    };
}

/// The versions, the time and the command. All pages of a process have the same time.
pub(super) fn provenance() -> String {
    let (own, libtorch) = (env!("CARGO_PKG_VERSION"), ffi::libtorch_version());
    format!("Made with tch-amp {own} and libtorch {libtorch}, {}, by: {}", *MADE, command())
}

/// The command line, with the name of the program instead of its path.
fn command() -> String {
    let mut words: Vec<_> =
        env::args_os().map(|word| word.to_string_lossy().into_owned()).collect();
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
        let text = provenance();
        let program = text.split("by: ").nth(1).and_then(|words| words.split(' ').next());
        assert!(program.is_some_and(|name| !name.is_empty() && !name.contains('/')), "{text}");
    }
}
