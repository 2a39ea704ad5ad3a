//! The same scale on all ranks.

use crate::distributed::group::ProcessGroup;
use crate::error::{Error, Result};
use crate::scaler::GradScaler;

impl ProcessGroup {
    /// Gives the scalers of all ranks the scale and the counts of rank 0's. Call it after a checkpoint was loaded, unless
    /// all ranks load the same one. New scalers with the same options are the same, and stay so, because the averaged
    /// gradients of all ranks are non-finite in the same iterations. Synchronizes, and blocks until the ranks have
    /// answered.
    ///
    /// # Errors
    ///
    /// [`DistributedError::Mismatch`](crate::distributed::DistributedError::Mismatch) if the ranks call something else;
    /// [`DistributedError::Communication`](crate::distributed::DistributedError::Communication) if a rank does not
    /// answer; and the errors of [`GradScaler::state_dict`] and [`GradScaler::load_state_dict`].
    pub fn broadcast_scaler(&self, scaler: &mut GradScaler) -> Result<()> {
        const NAME: &str = "broadcast_scaler";
        let state = scaler.state_dict()?;
        let text =
            serde_json::to_string(&state).map_err(|error| Error::Torch(error.to_string()))?;
        let _order = self.begin();
        self.compare(NAME, &format!("{NAME} of an enabled scaler: {}", scaler.is_enabled()))?;
        let texts = self.gather_texts(NAME, &text)?;
        if !scaler.is_enabled() {
            return Ok(());
        }
        let first = texts.first().map_or("", String::as_str);
        let state = serde_json::from_str(first).map_err(|error| Error::Torch(error.to_string()))?;
        scaler.load_state_dict(&state)
    }
}
