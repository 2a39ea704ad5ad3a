//! The states of the random number generators of all ranks.

use tch::{Device, Kind, Tensor};
use xxhash_rust::xxh3::xxh3_64;

use crate::checkpoint::part::Part;
use crate::checkpoint::stateful::rng::check_state;
use crate::checkpoint::stateful::save::entry;
use crate::checkpoint::stateful::{
    Prepared, SaveState, SavedState, Stateful, rng_state, set_rng_state,
};
use crate::checkpoint::{Checkpoint, CheckpointError};
use crate::distributed::ProcessGroup;
use crate::error::Result;
use crate::ffi::{self, OutsideRegions};

/// The default random number generators of a device of each rank. Saved as a uint8 tensor with a row for each rank.
#[derive(Debug)]
pub(crate) struct Rngs<'a> {
    pub(crate) group: &'a ProcessGroup,
    pub(crate) device: Device,
}

impl Stateful for Rngs<'_> {
    fn save_state(&mut self, state: &mut SaveState<'_>) -> Result<()> {
        let _own = OutsideRegions::enter();
        let states = self.group.all_gather(&rng_state(self.device)?)?;
        state.whole(Part::Tensor(entry("rngs", &Tensor::f_stack(&states, 0)?)?));
        Ok(())
    }

    fn prepare_restore<'a>(&'a mut self, saved: &SavedState<'a>) -> Result<Prepared<'a>> {
        saved.take_whole();
        let Self { group, device } = *self;
        let states = states(saved.checkpoint, saved.name)?;
        let saved_ranks = states.size()[0];
        let own = states.f_get((group.rank() as i64).min(saved_ranks - 1))?;
        check_state(device, &own)?;
        if saved_ranks == group.size() as i64 {
            return Ok(Prepared::step(move || set_rng_state(device, &own)));
        }
        let seed = seed_of(&states)?.wrapping_add(group.rank() as u64);
        Ok(Prepared::step(move || ffi::random::seed(device, seed)))
    }
}

/// Returns the saved states, a row for each rank. A program without ranks has saved a single one.
fn states(checkpoint: &Checkpoint, name: &str) -> Result<Tensor> {
    let saved = checkpoint.tensor(name)?;
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
