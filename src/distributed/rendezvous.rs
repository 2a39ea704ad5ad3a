//! The messages that the ranks of a group exchange through the store before they connect: that they belong together.

use std::time::{Duration, Instant};

use crate::distributed::environment::optional;
use crate::distributed::store::Store;
use crate::distributed::store::{GRACE, within};
use crate::error::{DistributedError, Error, Result};

/// The message that the last rank to arrive has for all: they can connect.
const COMPLETE: &str = "complete";

/// The message of rank 0 if it does not join.
const REFUSED: &str = "refused";

/// The variables that name the job of a process. The first one that is set counts.
const JOBS: [&str; 2] = ["TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"];

/// Returns the name of the job to which this process belongs, or nothing if it has none.
pub(super) fn job() -> Result<String> {
    for variable in JOBS {
        if let Some(job) = optional(variable)? {
            return Ok(format!("{variable}={job}"));
        }
    }
    Ok(String::new())
}

/// Returns whether two processes belong to different jobs. Slurm's name does not reach processes that a job starts by
/// other means, so that it counts only if both have it.
fn are_different(one: &str, other: &str) -> bool {
    let is_of_slurm = |job: &str| job.starts_with(JOBS[1]);
    match (one.is_empty(), other.is_empty()) {
        (false, true) => !is_of_slurm(one),
        (true, false) => !is_of_slurm(other),
        _ => one != other,
    }
}

/// A name for a job that this process starts.
pub(super) fn new_job() -> (&'static str, String) {
    let since = std::time::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_nanos());
    (JOBS[0], format!("tch-amp {} {since}", std::process::id()))
}

impl Membership {
    /// Blocks until all ranks of the group have come. Returns an error if they do not belong together, on every rank
    /// that waits for the others: another job uses the store, a rank comes twice, or expects another number of ranks.
    /// A process that comes after the group is complete gets the error alone.
    pub(super) fn meet(&self, job: &str, timeout: Duration) -> Result<()> {
        let start = Instant::now();
        let left = || timeout.saturating_sub(start.elapsed());
        let key = |name: &str| format!("{}/{name}", self.prefix);
        let store = self.store.handle();
        if self.rank == 0 {
            self.set_once("rank 0", &format!("{} {job}", self.size))?;
        }
        let first = store.get(&key("rank 0"), left())?;
        if first == REFUSED {
            return self.obey(&store.get(&key("verdict"), left())?);
        }
        let (size, its_job) = first.split_once(' ').unwrap_or((&first, ""));
        if are_different(its_job, job) {
            return Err(self.store.of_another_job(its_job, job));
        }
        if store.count(&key(&format!("{} has come", self.rank)))? > 1 {
            return Err(self.refuse(self.comes_again()));
        }
        if size != self.size.to_string() {
            let (rank, here) = (self.rank, self.size);
            let problem = format!(
                "is {here} on rank {rank}, but {size} on rank 0: start all ranks with the same number, and each job \
                 with a port of its own"
            );
            return Err(self.refuse(Error::InvalidArgument { name: "size", problem }));
        }
        if store.count(&key("ranks"))? == self.size as i64 {
            self.set_once("verdict", COMPLETE)?;
        }
        self.obey(&store.get(&key("verdict"), left())?)
    }

    /// Returns the verdict on the group as an error, unless it is complete.
    fn obey(&self, verdict: &str) -> Result<()> {
        if verdict == COMPLETE {
            return Ok(());
        }
        self.leave()?;
        let message = verdict.to_owned();
        let (operation, missing) = ("forming the group", Vec::new());
        let (rank, size) = (self.rank, self.size);
        Err(DistributedError::Communication { operation, rank, size, missing, message }.into())
    }

    fn comes_again(&self) -> Error {
        let rank = self.rank;
        match &self.name {
            Some(given) => {
                let problem = format!(
                    "is {given:?}, but rank {rank} has already used this name with the store: give each group a name \
                     of its own"
                );
                Error::InvalidArgument { name: "name", problem }
            }
            None => {
                let problem = format!(
                    "is {rank}, but rank {rank} has already come to this group: give each process a rank of its own, \
                     each job a port of its own, and form further groups through ProcessGroup::store"
                );
                Error::InvalidArgument { name: "rank", problem }
            }
        }
    }

    /// Notes that this rank has heard of the verdict. If it serves the store, it waits for the others, for a while.
    fn leave(&self) -> Result<()> {
        let store = self.store.handle();
        let left = |rank| format!("{}/left/{rank}", self.prefix);
        store.set(&left(self.rank), "1")?;
        if self.store.served_by() == Some(self.rank) {
            let others: Vec<_> = self.others().map(left).collect();
            // Those that come later find no store.
            drop(store.wait(&others, GRACE));
        }
        Ok(())
    }

    /// Returns the error of a rank that does not join, after telling it to those of its job that wait.
    pub(super) fn refuse(&self, error: Error) -> Error {
        let here = self.clone();
        let verdict = match self.rank {
            UNKNOWN => format!("a rank does not join: {error}"),
            rank => format!("rank {rank} does not join: {error}"),
        };
        // Without the store nobody waits.
        drop(within(2 * GRACE, move || {
            let job_of_rank_0 = || -> Result<bool> {
                let first = here.store.handle().get(&format!("{}/rank 0", here.prefix), GRACE)?;
                Ok(match (first.split_once(' '), job()) {
                    (Some((_, its_job)), Ok(job)) => !are_different(its_job, &job),
                    _ => true,
                })
            };
            let is_of_job = match here.rank {
                0 => true,
                // It may be rank 0 that does not come.
                UNKNOWN => job_of_rank_0().unwrap_or(true),
                _ => job_of_rank_0()?,
            };
            if !is_of_job {
                return Ok(());
            }
            here.set_once("verdict", &verdict)?;
            if matches!(here.rank, 0 | UNKNOWN) {
                here.set_once("rank 0", REFUSED)?;
            }
            here.leave()
        }));
        error
    }

    /// Sets a key of the group, unless a rank has already set it.
    pub(super) fn set_once(&self, name: &str, value: &str) -> Result<()> {
        let (store, prefix) = (self.store.handle(), &self.prefix);
        if store.count(&format!("{prefix}/{name} is set"))? == 1 {
            store.set(&format!("{prefix}/{name}"), &value.replace('\0', " "))?;
        }
        Ok(())
    }
}

/// How long a rank takes at most to report a failure.
const REPORT: Duration = Duration::from_secs(1);

/// How long the store takes at most to say whether one rank has reported.
const ANSWER: Duration = Duration::from_millis(1);

/// How many characters of a message are reported.
const LONGEST: usize = 2000;

/// The rank of a process whose own is not known, because its variable is wrong.
pub(super) const UNKNOWN: usize = usize::MAX;

/// Where a rank belongs.
#[derive(Clone, Debug)]
pub(super) struct Membership {
    pub(super) store: Store,
    /// That of the keys of the group in the store. No other group has it.
    pub(super) prefix: String,
    /// The name that the program has given to the group.
    pub(super) name: Option<String>,
    pub(super) rank: usize,
    pub(super) size: usize,
}

/// The findings of a rank after a failure.
#[derive(Default)]
struct Reports {
    /// The ranks that have reported nothing.
    missing: Vec<usize>,
    /// The failure that another rank has reported before all others.
    cause: Option<String>,
}

impl Membership {
    /// Reports a failure of this rank. To be called before its connections are closed, so that the rank that has failed
    /// first is also the first one to report it.
    pub(super) fn report(&self, message: &str) {
        let (here, message) = (self.clone(), message.chars().take(LONGEST).collect::<String>());
        // Without the store, the others find out what they can.
        drop(within(REPORT, move || {
            here.set_once("failure", &format!("{} {message}", here.rank))?;
            here.store.handle().set(&here.reported(here.rank), "1")
        }));
    }

    /// Reports the failure of an operation, closes the connections, and returns the error, with the message of the rank
    /// that has failed first, and the ranks that have not noticed a failure: they have ended, or hang.
    pub(super) fn failure(
        &self,
        operation: &'static str,
        message: String,
        close: impl FnOnce(),
    ) -> Error {
        self.report(&message);
        close();
        let Reports { missing, cause } = self.reports();
        let message = match cause {
            Some(cause) if missing.is_empty() => cause,
            Some(cause) => format!("{message}; {cause}"),
            None => message,
        };
        let (rank, size) = (self.rank, self.size);
        DistributedError::Communication { operation, rank, size, missing, message }.into()
    }

    /// Waits until the others have read what this rank has reported, for a while: its process may serve the store.
    pub(super) fn await_reports(&self) {
        drop(self.reports());
    }

    /// Without the store nothing can be found out, but then the rank that served it is missing.
    fn reports(&self) -> Reports {
        let here = self.clone();
        let ranks = u32::try_from(self.size).unwrap_or(u32::MAX);
        let limit = (2 * GRACE).saturating_add(ANSWER.saturating_mul(ranks));
        let missing = || self.store.served_by().into_iter().collect();
        let without_store = |_| Reports { missing: missing(), cause: None };
        within(limit, move || here.read_reports()).unwrap_or_else(without_store)
    }

    fn read_reports(&self) -> Result<Reports> {
        let store = self.store.handle();
        let first = store.get(&format!("{}/failure", self.prefix), GRACE)?;
        let (rank, message) = first.split_once(' ').unwrap_or_default();
        let is_other = rank != self.rank.to_string();
        let cause = is_other.then(|| format!("rank {rank} failed first: {message}"));
        let others = self.others();
        let keys: Vec<_> = others.clone().map(|rank| self.reported(rank)).collect();
        if store.wait(&keys, GRACE).is_ok() {
            return Ok(Reports { missing: Vec::new(), cause });
        }
        let mut missing = Vec::new();
        for (rank, key) in others.zip(&keys) {
            match store.has(key) {
                Ok(true) => {}
                Ok(false) => missing.push(rank),
                // The rank that failed first may have served the store.
                Err(_) if cause.is_some() => return Ok(Reports { missing: Vec::new(), cause }),
                Err(error) => return Err(error),
            }
        }
        Ok(Reports { missing, cause })
    }

    /// The other ranks.
    pub(super) fn others(&self) -> impl Iterator<Item = usize> + Clone + use<> {
        let this = self.rank;
        (0..self.size).filter(move |rank| *rank != this)
    }

    /// The key that a rank sets when it has failed.
    pub(super) fn reported(&self, rank: usize) -> String {
        format!("{}/failed/{rank}", self.prefix)
    }
}
