//! Groups that the environment describes.

use std::env::VarError;
use std::str::FromStr;

use crate::distributed::group::{GroupOptions, MOST_RANKS, ProcessGroup};
use crate::distributed::place::GRACE;
use crate::distributed::store::{Store, is_loopback};
use crate::error::{DistributedError, Error, Result};

impl GroupOptions {
    /// Forms the group that the environment variables `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` describe.
    /// [`spawn`](crate::distributed::spawn) and `torchrun --no-python` set them. Blocks until all ranks have called
    /// this. Corresponds to `init_process_group(init_method="env://")`.
    ///
    /// Rank 0 serves the store, unless `TORCHELASTIC_USE_AGENT_STORE` is `True`: then the process that started the
    /// ranks does. Rank 0 listens on 127.0.0.1 if `MASTER_ADDR` is `localhost` or `127.0.0.1`, and on all interfaces
    /// otherwise. Call this once for each process; form further groups through [`ProcessGroup::store`].
    ///
    /// # Errors
    ///
    /// [`DistributedError::Environment`] if a variable is not set, or is invalid;
    /// [`DistributedError::Store`] if the store cannot be reached, belongs to another job, or cannot be served because its
    /// port is in use; and as for [`join`](Self::join).
    pub fn from_env(&self) -> Result<ProcessGroup> {
        let (host, port) = (variable("MASTER_ADDR")?, parsed("MASTER_PORT")?);
        if host.is_empty() {
            return Err(invalid("MASTER_ADDR", "is empty".to_owned()));
        }
        if port == 0 {
            let problem = "is 0, but must be a port that all ranks know, from 1 to 65535";
            return Err(invalid("MASTER_PORT", problem.to_owned()));
        }
        let agent = optional("TORCHELASTIC_USE_AGENT_STORE")?.is_some_and(|is| is == "True");
        // torchrun's store remembers the keys of the attempts before a restart.
        let attempt = optional("TORCHELASTIC_RESTART_COUNT")?.unwrap_or_default();
        let scoped =
            |store: Store| if agent { store.of_attempt(&attempt) } else { store.of_rank(0) };
        let (rank, size) = match place() {
            Ok(place) => place,
            Err(error) => {
                // Otherwise the other ranks would wait for this one.
                let rank = parsed("RANK").unwrap_or(0);
                if !agent && rank == 0 {
                    return Err(error);
                }
                return Err(match Store::connect_within(&host, port, GRACE).map(scoped) {
                    Ok(store) => self.place_in(&store, rank, MOST_RANKS).refuse(error),
                    Err(_) => error,
                });
            }
        };
        let store = match (rank == 0 && !agent, is_loopback(&host)) {
            (false, _) => Store::connect_within(&host, port, self.timeout)?,
            (true, true) => Store::serve_on_loopback(port)?,
            (true, false) => Store::serve(port)?,
        };
        self.join(&scoped(store), rank, size)
    }
}

/// Returns the rank of this process, and the number of ranks.
fn place() -> Result<(usize, usize)> {
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

fn variable(name: &'static str) -> Result<String> {
    optional(name)?.ok_or_else(|| invalid(name, "is not set".to_owned()))
}

fn parsed<T: FromStr>(name: &'static str) -> Result<T> {
    let value = variable(name)?;
    value.parse().map_err(|_| {
        let most = if name == "MASTER_PORT" { " up to 65535" } else { "" };
        invalid(name, format!("is {value:?}, but must be a number{most}"))
    })
}

fn invalid(variable: &'static str, problem: String) -> Error {
    DistributedError::Environment { variable, problem }.into()
}
