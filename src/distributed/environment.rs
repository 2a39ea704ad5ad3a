//! Groups that the environment describes.

use std::str::FromStr;

use crate::distributed::group::{GroupOptions, ProcessGroup};
use crate::distributed::store::{Store, is_loopback};
use crate::error::{DistributedError, Result};

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
    /// [`DistributedError::Store`] if the store cannot be reached, or cannot be served because its port is in use;
    /// [`DistributedError::Communication`] if a rank does not join before the timeout.
    pub fn from_env(&self) -> Result<ProcessGroup> {
        let (rank, size): (usize, usize) = (parsed("RANK")?, parsed("WORLD_SIZE")?);
        if rank >= size {
            let problem = format!("is {rank}, but must be less than WORLD_SIZE, which is {size}");
            return Err(DistributedError::Environment { variable: "RANK", problem }.into());
        }
        let (host, port) = (variable("MASTER_ADDR")?, parsed("MASTER_PORT")?);
        let agent = std::env::var("TORCHELASTIC_USE_AGENT_STORE").is_ok_and(|is| is == "True");
        let store = match (rank == 0 && !agent, is_loopback(&host)) {
            (false, _) => Store::connect_within(&host, port, self.timeout)?,
            (true, true) => Store::serve_on_loopback(port)?,
            (true, false) => Store::serve(port)?,
        };
        let store = if agent { store } else { store.of_rank(0) };
        self.attempt(agent).join(&store, rank, size)
    }

    /// Makes the name of the group another one after each restart by torchrun, whose store remembers the keys of the
    /// previous attempts.
    fn attempt(&self, agent: bool) -> Self {
        let attempt = std::env::var("TORCHELASTIC_RESTART_COUNT").unwrap_or_default();
        if !agent {
            return self.clone();
        }
        let name = self.name.as_deref().unwrap_or("default");
        self.clone().name(Some(format!("attempt {attempt}, {name}")))
    }
}

fn variable(name: &'static str) -> Result<String> {
    std::env::var(name).map_err(|_| {
        DistributedError::Environment { variable: name, problem: "is not set".to_owned() }.into()
    })
}

fn parsed<T: FromStr>(name: &'static str) -> Result<T> {
    let value = variable(name)?;
    value.parse().map_err(|_| {
        let most = if name == "MASTER_PORT" { " up to 65535" } else { "" };
        let problem = format!("is {value:?}, but must be a number{most}");
        DistributedError::Environment { variable: name, problem }.into()
    })
}
