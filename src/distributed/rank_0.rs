//! What rank 0 does alone while the other ranks wait.

use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::checkpoint::Checkpoint;
use crate::distributed::group::ProcessGroup;
use crate::error::{DistributedError, Error, Result};
use crate::panics;

/// Precedes the message of an error.
const FAILED: &str = "failed: ";

impl ProcessGroup {
    /// Runs `work` on rank 0, for instance to save a checkpoint, while the other ranks wait. Returns its result as
    /// `Some` on rank 0, and `None` on the others. If it fails, every rank gets an error, and the group can still be
    /// used. PyTorch has no counterpart: programs write `if rank == 0` and a barrier, at which the others wait for the
    /// timeout if rank 0 fails.
    ///
    /// The other ranks wait for at most the [`timeout`](Self::timeout) of the group. If `work` panics, they get an
    /// error with its message, and the panic continues on rank 0. `work` must not use the group: a collective in it is a
    /// mismatch on all ranks, after which the group can still be used if `work` stops there.
    ///
    /// # Errors
    ///
    /// The error of `work` on rank 0, and [`DistributedError::Rank0`] with its message on the others;
    /// [`DistributedError::Mismatch`] if the ranks call something else, before `work` runs, or if `work` uses the group;
    /// [`Error::InvalidArgument`] on rank 0 if `work` uses the group and succeeds nonetheless;
    /// [`DistributedError::Communication`] if a rank does not answer, before or after `work`.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::fs;
    /// use tch_amp::distributed::{ProcessGroup, Store};
    ///
    /// fn log(group: &ProcessGroup, line: &str) -> Result<(), Box<dyn std::error::Error>> {
    ///     group.on_rank_0(|| {
    ///         fs::write("/no/such/folder/log.txt", line)?;
    ///         Ok::<_, Box<dyn std::error::Error>>(())
    ///     })?;
    ///     Ok(())
    /// }
    ///
    /// let group = ProcessGroup::new(&Store::in_process()?, 0, 1)?;
    /// assert!(log(&group, "epoch 1").is_err());
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    pub fn on_rank_0<T, E>(
        &self,
        work: impl FnOnce() -> std::result::Result<T, E>,
    ) -> std::result::Result<Option<T>, E>
    where
        E: From<Error> + Display,
    {
        self.work_first("on_rank_0", work)
    }

    /// Runs `work` on rank 0, under the name of the call with which the ranks are compared.
    fn work_first<T, E>(
        &self,
        call: &'static str,
        work: impl FnOnce() -> std::result::Result<T, E>,
    ) -> std::result::Result<Option<T>, E>
    where
        E: From<Error> + Display,
    {
        {
            let _order = self.begin();
            self.compare(call, call)?;
        }
        let begun = self.begun();
        let work = || catch_unwind(AssertUnwindSafe(work));
        let done = (self.rank() == 0).then(work).transpose();
        // A collective in it has met the end of this call on the other ranks, which have an error and do not wait.
        let has_met_the_end = self.rank() == 0 && self.size() > 1 && self.begun() != begun;
        let done = match done {
            Ok(done) => done.transpose(),
            Err(panic) => {
                let message = panics::message(panic.as_ref());
                if !has_met_the_end {
                    drop(self.exchange(call, &format!("{FAILED}a panic: {message}")));
                }
                resume_unwind(panic)
            }
        };
        if has_met_the_end {
            done?;
            let problem = format!(
                "has used the group, whose other ranks are in {call}: use it before or after"
            );
            return Err(Error::InvalidArgument { name: "work", problem }.into());
        }
        let report = match &done {
            Ok(_) => String::new(),
            // With the causes, if it is an error of anyhow.
            Err(error) => format!("{FAILED}{error:#}"),
        };
        let reports = self.exchange(call, &report);
        let done = done?;
        match reports?.first().and_then(|report| report.strip_prefix(FAILED)) {
            Some(message) => {
                Err(Error::from(DistributedError::Rank0 { message: message.to_owned() }).into())
            }
            None => Ok(done),
        }
    }

    /// Returns on all ranks what `make` returns on rank 0: a choice that all ranks must make alike, such as a measured
    /// plan. Otherwise it is like [`on_rank_0`](Self::on_rank_0). Corresponds to
    /// `torch.distributed.broadcast_object_list`.
    ///
    /// # Errors
    ///
    /// The same as [`on_rank_0`](Self::on_rank_0), and those of
    /// [`Checkpoint::add_value`](crate::checkpoint::Checkpoint::add_value) and
    /// [`Checkpoint::value`](crate::checkpoint::Checkpoint::value) for what serde cannot write or read as JSON.
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::Device;
    /// use tch_amp::autocast::Plan;
    /// use tch_amp::distributed::{ProcessGroup, Store};
    ///
    /// let group = ProcessGroup::new(&Store::in_process()?, 0, 1)?;
    /// let plan = group.from_rank_0(|| Plan::new(Device::Cpu))?; // or what a tuner has measured
    /// # assert_eq!(plan.dtype, None);
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    pub fn from_rank_0<T, E>(
        &self,
        make: impl FnOnce() -> std::result::Result<T, E>,
    ) -> std::result::Result<T, E>
    where
        T: Serialize + DeserializeOwned,
        E: From<Error> + Display,
    {
        const VALUE: &str = "value";
        let made = self.work_first("from_rank_0", make)?;
        let checkpoint = Checkpoint::from_rank_0(self, || {
            let mut checkpoint = Checkpoint::new();
            checkpoint.add_value(VALUE, &made)?;
            Ok(Some(checkpoint))
        })?;
        Ok(checkpoint.unwrap_or_default().value(VALUE)?)
    }

    fn exchange(&self, call: &'static str, report: &str) -> Result<Vec<String>> {
        let _order = self.begin();
        self.compare(call, &format!("the end of {call}"))?;
        self.gather_texts(call, report)
    }
}
