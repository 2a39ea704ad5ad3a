//! Checkpoints of several ranks.

use std::sync::Arc;

use tch::{Device, Kind, Tensor};

use crate::checkpoint::Checkpoint;
use crate::checkpoint::restore::Restore;
use crate::checkpoint::source::Source;
use crate::checkpoint::stateful::Rngs;
use crate::distributed::ProcessGroup;
use crate::error::{Error, Result};
use crate::ffi;

/// How much of a file is sent at a time.
const CHUNK: u64 = 8 << 20;

impl Checkpoint {
    /// Adds the states of the default random number generators of all ranks, each of a device of its own, so that each rank
    /// gets its own back from [`Restore::rngs`]. All ranks call this, and rank 0 can save the checkpoint. The states become
    /// one uint8 tensor with a row for each rank, as `torch.get_rng_state()` returns it. Blocks until the ranks have
    /// answered.
    ///
    /// # Errors
    ///
    /// See [`add_model`](Self::add_model) and [`ProcessGroup::all_gather`]; and [`Error::DeviceUnavailable`].
    pub fn add_rngs(&mut self, name: &str, group: &ProcessGroup, device: Device) -> Result<()> {
        self.add(name, &mut Rngs { group, device })
    }

    /// Gives all ranks the checkpoint that rank 0 loads, for instance because the file is on its disk only. `load` runs on
    /// rank 0 while the others wait. It returns `None`, and then all ranks get `None`, if there is nothing to resume from.
    ///
    /// The bytes of the file are sent to the other ranks, which keep them in memory until the checkpoint is dropped. If
    /// all ranks can read the same file, [`Checkpoint::load`] on each of them needs neither time nor memory for this.
    ///
    /// # Errors
    ///
    /// The error of `load` on rank 0, and [`DistributedError::Rank0`](crate::distributed::DistributedError::Rank0) with its
    /// message on the others; those of [`ProcessGroup::broadcast`]. The group can be used after an error of `load`.
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
        match receive(group, source.as_deref())? {
            Some(bytes) => Self::from_bytes(bytes).map(Some),
            None => Ok(mine),
        }
    }

    /// Returns the file that the checkpoint was loaded from, or its content if it has been made or changed since.
    fn source(&self) -> Result<Arc<Source>> {
        match &self.source {
            Some(source) => Ok(source.clone()),
            None => Ok(Arc::new(Source::in_memory(self.to_bytes()?))),
        }
    }
}

impl<'a> Restore<'a> {
    /// Restores the states of random number generators that [`Checkpoint::add_rngs`] has saved: each rank gets its own
    /// back, for the default generator of its device.
    ///
    /// If there were more or fewer ranks when they were saved, the run cannot go on with the same numbers. Each rank then
    /// gets a new seed of its own, which depends on the saved states and the number of the rank alone. A generator that
    /// [`Checkpoint::add_rng`] has saved counts as that of a single rank.
    pub fn rngs(self, name: &str, group: &'a ProcessGroup, device: Device) -> Self {
        self.target(name, Rngs { group, device })
    }
}

/// Sends the bytes of rank 0's source to the other ranks, which return them. Returns `None` on rank 0, and if there is
/// no source.
fn receive(group: &ProcessGroup, source: Option<&Source>) -> Result<Option<Vec<u8>>> {
    let Some(len) = agree_on_length(group, source)? else { return Ok(None) };
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
    Ok((group.rank() != 0).then_some(all))
}

/// Returns the length of rank 0's source on all ranks.
fn agree_on_length(group: &ProcessGroup, source: Option<&Source>) -> Result<Option<u64>> {
    const NONE: i64 = -1;
    let mut len = Tensor::from(source.map_or(NONE, |source| source.len() as i64));
    group.broadcast(&mut len, 0)?;
    Ok(u64::try_from(len.f_int64_value(&[])?).ok())
}

fn read(source: Option<&Source>, offset: u64, size: usize) -> Result<Tensor> {
    let mut bytes = vec![0; size];
    if let Some(source) = source {
        source.read_at(offset, &mut bytes)?;
    }
    Ok(Tensor::f_from_slice(&bytes)?)
}
