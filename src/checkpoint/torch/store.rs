//! Writing a file in PyTorch's format.

use std::collections::BTreeMap;
use std::io::{self, BufWriter};

use super::{check, save};
use crate::atomic::Target;
use crate::checkpoint::convert::Layout;
use crate::checkpoint::entry::Entry;
use crate::checkpoint::part::Part;
use crate::checkpoint::save::Failure;
use crate::error::{Result, unsaveable};

/// From how many tensors on it is these that take the most values.
const MANY_TENSORS: usize = 10_000;

/// Lays out the parts. Returns an error for a part that cannot be represented in Python or could not be loaded again.
pub(crate) fn plan(parts: &BTreeMap<String, Part>) -> Result<Layout<'_>> {
    checked(Layout::new(parts)?)
}

/// Lays out the tensors of a model without anything else, as [`plan`] does.
pub(crate) fn plan_of_weights(tensors: &BTreeMap<String, Entry>) -> Result<Layout<'_>> {
    checked(Layout::of_weights(tensors))
}

fn checked(layout: Layout<'_>) -> Result<Layout<'_>> {
    if let Err(problem) = check(&layout.root, &layout.lengths()) {
        let advice = match layout.storages.len() {
            0..=MANY_TENSORS => "save long values as tensors",
            _ => "save it as safetensors, which holds more tensors",
        };
        let problem = format!("{problem}; {advice}");
        return Err(unsaveable("the checkpoint", problem).into());
    }
    Ok(layout)
}

/// Writes the archive. `note` keeps a failure that is not an I/O error.
pub(crate) fn write(
    layout: &Layout<'_>,
    out: &mut dyn Target,
    note: &mut dyn FnMut(Failure) -> io::Error,
) -> io::Result<()> {
    let out = save(BufWriter::new(out), &layout.root, &layout.lengths(), &mut |index, out| {
        let read = layout.storages[index].read(&mut |bytes| Ok(out.write_all(bytes)?));
        read.map_err(&mut *note)
    })?;
    out.into_inner().map_err(io::IntoInnerError::into_error)?.flush()
}
