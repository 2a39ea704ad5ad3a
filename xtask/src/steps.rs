//! Headings for the steps of a long run.

use std::time::Instant;

use anyhow::{Context, Result};

/// Prints a heading for each step, with the time that the one before took.
///
/// The last step has no line after it, so that a run ends with that step's own output.
#[derive(Debug, Default)]
pub(crate) struct Steps {
    current: Option<(String, Instant)>,
}

impl Steps {
    /// Runs one step. Its error names it.
    pub(crate) fn run<T>(&mut self, name: &str, step: impl FnOnce() -> Result<T>) -> Result<T> {
        match self.current.replace((name.to_owned(), Instant::now())) {
            Some((before, start)) => {
                println!("\n== {name}  ({before} took {:.1} s)", start.elapsed().as_secs_f64());
            }
            None => println!("== {name}"),
        }
        step().with_context(|| name.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::anyhow;

    #[test]
    fn the_error_of_a_step_names_the_step() {
        let mut steps = Steps::default();
        assert_eq!(steps.run("first", || Ok(1)).unwrap(), 1);
        let error = steps.run("second", || Err::<(), _>(anyhow!("it broke"))).unwrap_err();
        assert_eq!(format!("{error:#}"), "second: it broke");
    }
}
