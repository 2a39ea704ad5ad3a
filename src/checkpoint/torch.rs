//! Checkpoint files in PyTorch's format, which `torch.save` and `VarStore::save` write, and folders of
//! `torch.distributed.checkpoint`, whose pieces are such files.

use std::collections::BTreeMap;
use std::sync::Arc;

use torch_files::distributed::FolderWriter;
use torch_files::{Limits, TorchFile, Writer};

use crate::checkpoint::CheckpointError;
use crate::checkpoint::entry::TensorEntry;
use crate::checkpoint::part::{Archive, OptimizerPart, Part};
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

/// Lays out the parts as a folder of `torch.distributed.checkpoint`, the parameters of optimizers by names if all have
/// names.
pub(crate) fn layout_of_folder(
    parts: &BTreeMap<String, Part>,
) -> Result<FolderWriter<StorageSource<'_>>> {
    let has_numbers = |part: &Part| {
        matches!(part, Part::Optimizer(OptimizerPart { params_are_numbers: true, .. }))
    };
    let layout = Layout::new(parts, !parts.values().any(has_numbers))?;
    let tensors = layout.storages.len();
    let writer = FolderWriter::new(&layout.root, layout.storages, &Limits::DEFAULT);
    Ok(writer.map_err(|error| unwritable(error, tensors))?)
}

fn laid_out(layout: Layout<'_>) -> Result<Writer<StorageSource<'_>>> {
    let tensors = layout.storages.len();
    let writer = Writer::torch(&layout.root, layout.storages, &Limits::DEFAULT);
    Ok(writer.map_err(|error| unwritable(error, tensors))?)
}

/// Makes the error of a checkpoint with so many tensors that cannot be laid out.
fn unwritable(error: torch_files::Error, tensors: usize) -> CheckpointError {
    let advice = match tensors {
        0..=MANY_TENSORS => "save long values as tensors",
        _ => "save it as safetensors, which holds more tensors",
    };
    match error {
        torch_files::Error::Unwritable { entry: Some(entry), problem } => {
            unsaveable(&entry, problem)
        }
        torch_files::Error::Unwritable { problem, .. } => {
            unsaveable(WHOLE, format!("{problem}; {advice}"))
        }
        other => unsaveable(WHOLE, format!("{other}; {advice}")),
    }
}

/// What an error names if it is none of the parts.
const WHOLE: &str = "the checkpoint";

/// Makes parts of the object in a file. The storages are not read.
pub(crate) fn read(mut file: TorchFile, limits: &Limits) -> Result<Archive> {
    let root = file.take_value();
    let file = Arc::new(file);
    let parts = Reader::new(Arc::clone(&file), limits).parts(root);
    let parts = parts.map_err(|problem| CheckpointError::damaged(file.path(), problem))?;
    Ok(Archive::new(parts, file))
}
