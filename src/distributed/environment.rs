//! The environment variables that describe a group.

use std::env::VarError;
use std::str::FromStr;

use crate::error::{DistributedError, Error, Result};

/// The largest number of ranks. Each has a connection to every other one.
pub(super) const MOST_RANKS: usize = 1 << 16;

/// Returns the rank of this process, and the number of ranks.
pub(super) fn rank_and_size() -> Result<(usize, usize)> {
    let (rank, size) = (parsed("RANK")?, parsed("WORLD_SIZE")?);
    if !(1..=MOST_RANKS).contains(&size) {
        return Err(invalid(
            "WORLD_SIZE",
            format!("is {size}, but must be from 1 to {MOST_RANKS}"),
        ));
    }
    if rank >= size {
        let problem = format!("is {rank}, but must be less than WORLD_SIZE, which is {size}");
        return Err(invalid("RANK", problem));
    }
    Ok((rank, size))
}

/// Returns the value of a variable, or `None` if it is not set.
pub(super) fn optional(name: &'static str) -> Result<Option<String>> {
    match std::env::var(name) {
        Ok(value) => Ok(Some(value)),
        Err(VarError::NotPresent) => Ok(None),
        Err(VarError::NotUnicode(value)) => {
            Err(invalid(name, format!("is {value:?}, but must be UTF-8")))
        }
    }
}

pub(super) fn variable(name: &'static str) -> Result<String> {
    optional(name)?.ok_or_else(|| invalid(name, "is not set".to_owned()))
}

pub(super) fn parsed<T: FromStr>(name: &'static str) -> Result<T> {
    let value = variable(name)?;
    value.parse().map_err(|_| {
        let most = if name == "MASTER_PORT" { " up to 65535" } else { "" };
        invalid(name, format!("is {value:?}, but must be a number{most}"))
    })
}

pub(super) fn invalid(variable: &'static str, problem: String) -> Error {
    DistributedError::Environment { variable, problem }.into()
}
