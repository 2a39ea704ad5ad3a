//! Checkpoint files in PyTorch's format, which `torch.save` and `VarStore::save` write.

use std::collections::BTreeMap;
use std::sync::Arc;

use torch_files::{Limits, TorchFile, Writer};

use crate::checkpoint::CheckpointError;
use crate::checkpoint::entry::TensorEntry;
use crate::checkpoint::part::{Archive, Part};
use crate::checkpoint::torch_layout::{Layout, Reader, StorageSource};
use crate::error::{Result, unsaveable};

/// From how many tensors on it is these that take the most values.
const MANY_TENSORS: usize = 10_000;

/// Lays out the parts, the parameters of optimizers by names or by numbers. Returns an error for a part that cannot be
/// represented in Python or could not be loaded again.
pub(crate) fn layout(
    parts: &BTreeMap<String, Part>,
    by_name: bool,
) -> Result<Writer<StorageSource<'_>>> {
    laid_out(Layout::new(parts, by_name)?)
}

/// Lays out the tensors of a model without anything else, as [`layout`] does.
pub(crate) fn layout_of_weights(
    tensors: &BTreeMap<String, TensorEntry>,
) -> Result<Writer<StorageSource<'_>>> {
    laid_out(Layout::of_weights(tensors))
}

fn laid_out(layout: Layout<'_>) -> Result<Writer<StorageSource<'_>>> {
    let advice = match layout.storages.len() {
        0..=MANY_TENSORS => "save long values as tensors",
        _ => "save it as safetensors, which holds more tensors",
    };
    let writer = Writer::torch(&layout.root, layout.storages, &Limits::DEFAULT);
    let refuse = |error| match error {
        torch_files::Error::Unwritable { problem, .. } => problem,
        other => other.to_string(),
    };
    Ok(writer
        .map_err(|error| unsaveable("the checkpoint", format!("{}; {advice}", refuse(error))))?)
}

/// Makes parts of the object in a file. The storages are not read.
pub(crate) fn read(mut file: TorchFile, limits: &Limits) -> Result<Archive> {
    let root = file.take_value();
    let file = Arc::new(file);
    let parts = Reader::new(Arc::clone(&file), limits).parts(root);
    let parts = parts.map_err(|problem| CheckpointError::damaged(file.path(), problem))?;
    Ok(Archive::new(parts, file))
}
