//! Writing a file in PyTorch's format.

use std::collections::BTreeMap;
use std::io::{self, BufWriter};

use super::{check, save};
use crate::atomic::Target;
use crate::checkpoint::convert::Layout;
use crate::checkpoint::part::Part;
use crate::checkpoint::save::Failure;
use crate::error::{Result, unsaveable};

/// Lays out the parts. Returns an error for a part that cannot be represented in Python or could not be loaded again.
/// From how many tensors on it is these that take the most values.
const MANY_TENSORS: usize = 10_000;

pub(crate) fn plan(parts: &BTreeMap<String, Part>) -> Result<Layout<'_>> {
    let layout = Layout::new(parts)?;
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
