//! Checkpoints of parts, and their way through a file.

use tch_amp::checkpoint::{Checkpoint, Stateful};

use crate::files::Folder;

/// A checkpoint of these parts.
pub fn checkpoint_of<'p, const N: usize>(
    parts: [(&'p str, &'p mut dyn Stateful); N],
) -> Checkpoint {
    let mut checkpoint = Checkpoint::new();
    checkpoint.add_all(parts).unwrap();
    checkpoint
}

/// Saves a checkpoint to a file of this name, in the format that its ending says, and loads the file.
pub fn reloaded(checkpoint: &Checkpoint, name: &str) -> Checkpoint {
    let (_folder, path) = Folder::with(name);
    checkpoint.save(&path).unwrap();
    Checkpoint::load(path).unwrap()
}
