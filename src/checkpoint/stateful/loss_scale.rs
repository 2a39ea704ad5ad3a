//! Loss scales, each saved as the value that its `state_dict` returns.

use tch::{Device, Tensor};

use crate::checkpoint::part::Part;
use crate::checkpoint::stateful::save::plain;
use crate::checkpoint::stateful::{Prepared, SaveState, SavedState, Stateful};
use crate::error::Result;
use crate::loss_scale::{
    DynamicLossScale, LossScale, LossScaleState, NoOpLossScale, StaticLossScale,
};

impl SaveState<'_> {
    fn loss_scale(&mut self, state: LossScaleState) -> Result<()> {
        let value = plain("loss_scale", &state)?;
        self.whole(Part::Value(value));
        Ok(())
    }
}

impl SavedState<'_> {
    fn loss_scale(&self) -> Result<LossScaleState> {
        self.take_whole();
        self.checkpoint.value(self.name)
    }
}

macro_rules! stateful {
    ($($kind:ty),*) => {$(
        impl Stateful for $kind {
            fn save_state(&mut self, state: &mut SaveState<'_>) -> Result<()> {
                state.loss_scale(self.state_dict()?)
            }

            fn prepare_restore<'a>(&'a mut self, saved: &SavedState<'a>) -> Result<Prepared<'a>> {
                // Loading replaces the tensors of the clone, which it shared, and leaves those of `self` alone.
                let mut loaded = self.clone();
                loaded.load_state_dict(&saved.loss_scale()?)?;
                Ok(Prepared::new(move || *self = loaded))
            }
        }
    )*};
}

stateful!(NoOpLossScale, StaticLossScale, DynamicLossScale);

impl Stateful for Box<dyn LossScale> {
    fn save_state(&mut self, state: &mut SaveState<'_>) -> Result<()> {
        state.loss_scale(self.state_dict()?)
    }

    fn prepare_restore<'a>(&'a mut self, saved: &SavedState<'a>) -> Result<Prepared<'a>> {
        let state = saved.loss_scale()?;
        // The boxed loss scale can be neither cloned nor replaced, so a new one of the same kind checks the state.
        let device = LossScale::loss_scale(self).map_or(Device::Cpu, Tensor::device);
        self.state_dict()?.build(device)?.load_state_dict(&state)?;
        Ok(Prepared::step(move || self.load_state_dict(&state)))
    }
}
