//! Where the bytes of a storage are: in a file, or in several pieces of it.

mod pieces;

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::source::Source;
use crate::threads;
use crate::value::TensorRef;

pub(crate) use pieces::{Gathered, NOT_ALL, Piece, Pieces, joined};

/// The bytes of a storage.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) backing: Backing,
    pub(crate) len: u64,
}

/// What has the bytes of a storage.
#[derive(Clone, Debug)]
pub(crate) enum Backing {
    /// A file, from this byte on.
    File {
        source: Arc<Source>,
        offset: u64,
    },
    Pieces(Arc<Pieces>),
}

impl Backing {
    /// Fills the buffer with the bytes from `at` on.
    fn read_at(&self, at: u64, to: &mut [u8]) -> Result<()> {
        match self {
            Self::File { source, offset } => source.read_at(offset + at, to),
            Self::Pieces(pieces) => pieces.read_at(at, to),
        }
    }
}

impl Place {
    pub(crate) fn in_file(source: &Arc<Source>, offset: u64, len: u64) -> Self {
        Self { backing: Backing::File { source: Arc::clone(source), offset }, len }
    }
}

/// Reads the elements of a tensor within its storage in row-major order.
pub(crate) fn read_view(backing: &Backing, tensor: &TensorRef, to: &mut [u8]) -> Result<()> {
    let width = tensor.dtype.size();
    let start = tensor.offset * width as u64;
    if to.is_empty() || tensor.is_contiguous() {
        return threads::fill(to, &|at, to| backing.read_at(start + at, to));
    }
    let reach = tensor.shape.iter().zip(&tensor.strides).map(|(n, stride)| (n - 1) * stride);
    let extent = 1 + reach.sum::<i64>().unsigned_abs() as usize;
    let mut bytes = zeros(extent as u64 * width as u64)?;
    backing.read_at(start, &mut bytes)?;
    gather(tensor, &bytes, to);
    Ok(())
}

/// Makes so many bytes, or returns an error if there is no memory for them: an expanded tensor can ask for any size.
pub(crate) fn zeros(len: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let len = usize::try_from(len).ok().filter(|&len| bytes.try_reserve_exact(len).is_ok());
    let len =
        len.ok_or_else(|| Error::Request("the tensor is larger than the memory".to_owned()))?;
    bytes.resize(len, 0);
    Ok(bytes)
}

/// Copies the elements of a tensor, of which `bytes` has all from the first to the last, to row-major order.
fn gather(tensor: &TensorRef, bytes: &[u8], to: &mut [u8]) {
    let width = tensor.dtype.size();
    let dims: Vec<_> = tensor.shape.iter().zip(&tensor.strides).collect();
    let mut index = vec![0; dims.len()];
    for element in to.chunks_exact_mut(width) {
        let at: i64 = index.iter().zip(&dims).map(|(at, (_, stride))| at * **stride).sum();
        let at = at.unsigned_abs() as usize * width;
        element.copy_from_slice(&bytes[at..at + width]);
        for (at, (size, _)) in index.iter_mut().zip(&dims).rev() {
            *at += 1;
            if *at < **size {
                break;
            }
            *at = 0;
        }
    }
}
