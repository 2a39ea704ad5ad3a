//! Headings for the steps of a long run.

use std::time::Instant;

use anyhow::{Context, Result};

/// Prints a heading for each step, with the time that the previous step took.
///
/// Nothing is printed after the last step, so a run ends with the output of that step.
#[derive(Debug, Default)]
pub(crate) struct Steps {
    current: Option<(String, Instant)>,
}

impl Steps {
    /// Runs one step and adds its name to errors.
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
