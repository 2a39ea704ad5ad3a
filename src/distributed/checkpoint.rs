//! Checkpoints of several ranks.

use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use serde::Serialize;
use serde::de::DeserializeOwned;
use tch::{Device, Kind, Tensor};
use torch_files::Limits;
use xxhash_rust::xxh3::xxh3_64;

use crate::checkpoint::{
    Checkpoint, CheckpointError, Prepared, Restore, Rng, SaveState, SavedState, Source, Stateful,
    check_rng_state,
};
use crate::distributed::ProcessGroup;
use crate::error::{DistributedError, Error, Result};
use crate::ffi::{self, OutsideRegions};
use crate::panics;

/// How much of a file is sent at a time.
const CHUNK: u64 = 8 << 20;

impl Checkpoint {
    /// Adds the state of each rank's default random number generator for `device`, so that each rank gets its own back
    /// from [`Restore::rngs`]. All ranks call this, and rank 0 can then save the checkpoint. The states become one
    /// uint8 tensor with a row for each rank, as `torch.get_rng_state()` returns it. Blocks until the ranks have
    /// answered.
    ///
    /// # Errors
    ///
    /// [`Error::DeviceUnavailable`]; the errors of [`add`](Self::add) and [`ProcessGroup::all_gather`].
    pub fn add_rngs(&mut self, name: &str, group: &ProcessGroup, device: Device) -> Result<()> {
        self.add(name, Rngs { group, device })
    }

    /// Gives all ranks the checkpoint that rank 0 loads, for instance because the file is only on its disk. `load` runs
    /// on rank 0 while the others wait. If it returns `None`, because there is nothing to resume from, all ranks get
    /// `None`. Corresponds to `torch.load` on rank 0 and `torch.distributed.broadcast_object_list`.
    ///
    /// The bytes of the file are sent to the other ranks, which keep them in memory until the checkpoint is dropped. If
    /// all ranks can read the same file, call [`Checkpoint::load`] on each of them, which sends and keeps nothing.
    ///
    /// # Errors
    ///
    /// The error of `load` on rank 0, and [`DistributedError::Rank`] with
    /// its message on the others; the errors of [`ProcessGroup::broadcast`]. The group can be used after an error of
    /// `load`.
    ///
    /// # Examples
    ///
    /// ```
    /// use tch_amp::checkpoint::{Checkpoint, CheckpointFolder};
    /// use tch_amp::distributed::{ProcessGroup, Store};
    ///
    /// # let path = std::env::temp_dir().join(format!("tch-amp-doc-from-rank-0-{}", std::process::id()));
    /// # let group = ProcessGroup::new(&Store::in_process()?, 0, 1)?;
    /// let checkpoint = Checkpoint::from_rank_0(&group, || {
    ///     let folder = CheckpointFolder::new(&path)?;
    ///     Ok(folder.latest()?.map(|found| found.checkpoint))
    /// })?;
    /// let start = match checkpoint {
    ///     Some(checkpoint) => checkpoint.value("epoch")?,
    ///     None => 0,
    /// };
    /// assert_eq!(start, 0);
    /// # std::fs::remove_dir_all(&path)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn from_rank_0(
        group: &ProcessGroup,
        load: impl FnOnce() -> Result<Option<Self>>,
    ) -> Result<Option<Self>> {
        let loaded = group.on_rank_0(|| {
            let Some(checkpoint) = load()? else { return Ok(None) };
            let source = checkpoint.source()?;
            Ok::<_, Error>(Some((checkpoint, source)))
        })?;
        let (mine, source) = loaded.flatten().unzip();
        match receive(group, source.as_ref())? {
            Some((bytes, limits)) => Self::from_bytes_with(bytes, &limits).map(Some),
            None => Ok(mine),
        }
    }
}

impl<'a> Restore<'a> {
    /// Restores the states of random number generators that [`Checkpoint::add_rngs`] has added: each rank gets its own
    /// back, for the default generator of `device`.
    ///
    /// If the number of ranks has changed since, the run cannot go on with the same random numbers. Each rank then gets
    /// a new seed, which depends only on the saved states and its rank. The state of an [`Rng`] counts as that of a
    /// single rank.
    pub fn rngs(self, name: &str, group: &'a ProcessGroup, device: Device) -> Self {
        self.add(name, Rngs { group, device })
    }
}

/// Sends the bytes of rank 0's source to the other ranks, which return them with the limits within which rank 0 has read
/// them. Returns `None` on rank 0, and if there is no source.
fn receive(group: &ProcessGroup, source: Option<&Source>) -> Result<Option<(Vec<u8>, Limits)>> {
    let Some((len, limits)) = agree_on_length(group, source)? else { return Ok(None) };
    let mut all = Vec::with_capacity(if group.rank() == 0 { 0 } else { len as usize });
    let mut offset = 0;
    while offset < len && group.size() > 1 {
        let size = CHUNK.min(len - offset) as usize;
        let read = group.on_rank_0(|| read(source, offset, size))?;
        let numbers = (Kind::Uint8, Device::Cpu);
        let mut chunk = read.map_or_else(|| Tensor::f_zeros([size as i64], numbers), Ok)?;
        group.broadcast(&mut chunk, 0)?;
        if group.rank() != 0 {
            all.resize(offset as usize + size, 0);
            ffi::elements_read(&chunk, 0, &mut all[offset as usize..])?;
        }
        offset += size as u64;
    }
    Ok((group.rank() != 0).then_some((all, limits)))
}

/// Returns the length and the limits of rank 0's source on all ranks.
fn agree_on_length(group: &ProcessGroup, source: Option<&Source>) -> Result<Option<(u64, Limits)>> {
    let _own = OutsideRegions::enter();
    const NONE: i64 = -1;
    let len = source.map_or(NONE, |source| source.file.size_in_bytes() as i64);
    let limits = source.map_or_else(Limits::default, |source| source.limits.clone());
    let numbers = [&[len][..], &numbers_of(&limits)].concat();
    let mut sent = Tensor::f_from_slice(&numbers)?;
    group.broadcast(&mut sent, 0)?;
    let number = |at: usize| sent.f_int64_value(&[at as i64]);
    let Ok(len) = u64::try_from(number(0)?) else { return Ok(None) };
    let mut received = [0; LIMITS];
    for (at, limit) in received.iter_mut().enumerate() {
        *limit = number(1 + at)?;
    }
    Ok(Some((len, of_numbers(received))))
}

/// How many numbers the limits are.
const LIMITS: usize = 8;

fn numbers_of(limits: &Limits) -> [i64; LIMITS] {
    let Limits {
        max_pickle_bytes,
        max_header_bytes,
        max_text_factor,
        max_values,
        max_tensors,
        max_depth,
        max_records,
        max_expanded_bytes,
    } = *limits;
    let (depth, records) = (max_depth as u64, max_records as u64);
    [
        max_pickle_bytes,
        max_header_bytes,
        max_text_factor,
        max_values,
        max_tensors,
        depth,
        records,
        max_expanded_bytes,
    ]
    .map(u64::cast_signed)
}

/// The counterpart of [`numbers_of`].
fn of_numbers(numbers: [i64; LIMITS]) -> Limits {
    let [pickle, header, text, values, tensors, depth, records, expanded] =
        numbers.map(i64::cast_unsigned);
    Limits {
        max_pickle_bytes: pickle,
        max_header_bytes: header,
        max_text_factor: text,
        max_values: values,
        max_tensors: tensors,
        max_depth: depth as usize,
        max_records: records as usize,
        max_expanded_bytes: expanded,
    }
}

fn read(source: Option<&Source>, offset: u64, size: usize) -> Result<Tensor> {
    let mut bytes = vec![0; size];
    if let Some(Source { file, .. }) = source {
        let read = file.read_bytes(offset, &mut bytes);
        read.map_err(CheckpointError::reading(file.path()))?;
    }
    Ok(Tensor::f_from_slice(&bytes)?)
}

/// The default random number generators of a device of each rank. Saved as a uint8 tensor with a row for each rank.
struct Rngs<'a> {
    group: &'a ProcessGroup,
    device: Device,
}

impl Stateful for Rngs<'_> {
    fn save_state(&mut self, state: &mut SaveState<'_>) -> Result<()> {
        let _own = OutsideRegions::enter();
        let states = self.group.all_gather(&Rng(self.device).get_state()?)?;
        state.whole_tensor(&Tensor::f_stack(&states, 0)?)
    }

    fn prepare_restore<'a>(&'a mut self, saved: &SavedState<'a>) -> Result<Prepared<'a>> {
        let Self { group, device } = *self;
        let states = states(saved.name(), saved.whole_tensor()?)?;
        let saved_ranks = states.size()[0];
        let own = states.f_get((group.rank() as i64).min(saved_ranks - 1))?;
        check_rng_state(device, &own)?;
        if saved_ranks == group.size() as i64 {
            return Ok(Prepared::step(move || Rng(device).set_state(&own)));
        }
        let seed = seed_of(&states)?.wrapping_add(group.rank() as u64);
        Ok(Prepared::step(move || ffi::distributed::seed(device, seed)))
    }
}

/// Returns the saved states, a row for each rank. A program without ranks has saved a single one.
fn states(name: &str, saved: Tensor) -> Result<Tensor> {
    let states = if saved.dim() == 1 { saved.f_unsqueeze(0)? } else { saved };
    // One that is not contiguous is an expanded tensor, which no save of this crate has.
    let is_plain = states.kind() == Kind::Uint8 && states.is_contiguous();
    if is_plain && states.dim() == 2 && ffi::numel(&states) > 0 {
        return Ok(states);
    }
    let problem = format!(
        "is {:?} {:?}, but the random numbers of ranks are rows of Uint8",
        states.kind(),
        states.size()
    );
    let (part, tensor) = (name.to_owned(), name.to_owned());
    Err(CheckpointError::Tensor { part, tensor, problem }.into())
}

/// Returns a seed that depends on the states of all ranks.
fn seed_of(states: &Tensor) -> Result<u64> {
    let mut bytes = vec![0; ffi::numel(states)];
    ffi::elements_read(states, 0, &mut bytes)?;
    Ok(xxh3_64(&bytes))
}

impl ProcessGroup {
    /// Runs `work` on rank 0, for instance to save a checkpoint, while the other ranks wait. Returns its result as
    /// `Some` on rank 0, and `None` on the others. If it fails, every rank gets an error, and the group can still be
    /// used. PyTorch has no counterpart: programs write `if rank == 0` and a barrier, at which the others wait for the
    /// timeout if rank 0 fails.
    ///
    /// The other ranks wait for at most the [`timeout`](Self::timeout) of the group. If `work` panics, they get an
    /// error with its message, and the panic continues on rank 0. `work` must not use the group: a collective in it is
    /// a mismatch on all ranks, after which the group can still be used if `work` stops there.
    ///
    /// # Errors
    ///
    /// The error of `work` on rank 0, and [`DistributedError::Rank`] with its message on the others;
    /// [`DistributedError::Mismatch`] if the ranks call something else, before `work` runs, or if `work` uses the
    /// group; [`Error::InvalidArgument`] on rank 0 if `work` uses the group and succeeds nonetheless;
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
        let end = format!("the end of {call}");
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
                    let message = format!("a panic: {message}");
                    drop(self.tell(call, &end, Err(message)));
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
            Ok(_) => Ok(String::new()),
            // With the causes, if it is an error of anyhow.
            Err(error) => Err(format!("{error:#}")),
        };
        let told = self.tell(call, &end, report);
        let done = done?;
        told?;
        Ok(done)
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

    /// Returns what each rank passes, if all ranks make the same call. If some pass the message of an error, fails on
    /// all ranks with that of the first one.
    pub(super) fn tell(
        &self,
        operation: &'static str,
        call: &str,
        mine: std::result::Result<String, String>,
    ) -> Result<Vec<String>> {
        let wrong = |error: serde_json::Error| Error::Torch(error.to_string());
        let mine = serde_json::to_string(&mine).map_err(wrong)?;
        let _order = self.begin();
        self.compare(operation, call)?;
        let told = self.gather_texts(operation, &mine)?;
        let told = told.iter().enumerate().map(|(rank, text)| {
            let told: std::result::Result<_, _> = serde_json::from_str(text).map_err(wrong)?;
            Ok(told.map_err(|message| DistributedError::Rank { rank, message })?)
        });
        told.collect()
    }
}
