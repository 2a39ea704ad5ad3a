//! A tensor that is in several pieces, each of which is a box of its elements.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use super::{Backing, Place, read_view, zeros};
use crate::error::Result;
use crate::source::{CHUNK, Source};
use crate::value::TensorRef;

/// How many pairs of pieces are compared at most. The pieces of a tensor follow each other along one dimension, or are
/// in a grid, where few pairs are near each other.
const MOST_PAIRS: u64 = 20_000_000;

/// What is wrong with pieces that have fewer elements than the whole.
pub(crate) const NOT_ALL: &str = "has pieces that are not all of it";

const OVERLAP: &str = "has pieces that overlap";

/// The pieces of a tensor, which together are every element once.
#[derive(Debug)]
pub(crate) struct Pieces {
    /// In elements.
    sizes: Vec<u64>,
    width: u64,
    pieces: Vec<Piece>,
}

/// A piece, and where it is.
#[derive(Debug)]
pub(crate) struct Piece {
    pub(crate) offsets: Vec<u64>,
    pub(crate) sizes: Vec<u64>,
    /// Its elements in their file, within the storage that begins at `start`.
    pub(crate) tensor: TensorRef,
    pub(crate) source: Arc<Source>,
    pub(crate) start: u64,
    pub(crate) gathered: Gathered,
}

/// The elements of a piece in row-major order, if they are in another one in their file, and how many of them were
/// taken. They are kept until all were, since a tensor is read in parts, for each of which the whole piece would have
/// to be read again.
#[derive(Default)]
pub(crate) struct Gathered(Mutex<Option<(Arc<Vec<u8>>, u64)>>);

impl fmt::Debug for Gathered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Gathered")
    }
}

impl Piece {
    /// Returns whether it is a whole tensor of this shape.
    pub(crate) fn is_whole(&self, shape: &[i64]) -> bool {
        self.tensor.shape == shape && self.offsets.iter().all(|&at| at == 0)
    }

    fn volume(&self) -> u64 {
        self.sizes.iter().product()
    }

    fn end(&self, dim: usize) -> u64 {
        self.offsets[dim] + self.sizes[dim]
    }

    fn overlaps(&self, other: &Self) -> bool {
        let apart =
            |dim: usize| self.end(dim) <= other.offsets[dim] || other.end(dim) <= self.offsets[dim];
        !(0..self.sizes.len()).any(apart)
    }
}

/// The runs of a piece: elements that are one after the other in the tensor and in the piece, if that is in row-major
/// order.
struct Runs {
    /// The sizes of the piece, and the distance between elements of the tensor, along each dimension before the runs.
    outer: Vec<(u64, u64)>,
    /// The place of the first run in the tensor.
    first: u64,
    len: u64,
    count: u64,
}

impl Runs {
    fn of(piece: &Piece, sizes: &[u64]) -> Self {
        let dims = sizes.len();
        let mut strides = vec![1; dims];
        for dim in (1..dims).rev() {
            strides[dim - 1] = strides[dim] * sizes[dim];
        }
        let first = piece.offsets.iter().zip(&strides).map(|(at, stride)| at * stride).sum();
        // The dimensions that the piece has as a whole belong to the runs, and so does the one before them.
        let whole = (0..dims).rev().take_while(|&dim| piece.sizes[dim] == sizes[dim]).count();
        let inner = (dims - whole).saturating_sub(1);
        let outer: Vec<_> =
            piece.sizes.iter().copied().zip(strides.iter().copied()).take(inner).collect();
        let len = piece.sizes[inner.min(dims)..].iter().product();
        let count = outer.iter().map(|(size, _)| size).product();
        Self { outer, first, len, count }
    }

    /// Returns where a run begins in the tensor. Later ones begin later.
    fn start(&self, run: u64) -> u64 {
        let mut rest = run;
        let mut at = self.first;
        for (size, stride) in self.outer.iter().rev() {
            at += rest % size * stride;
            rest /= size;
        }
        at
    }

    /// Returns the first run for which `is_late` holds, which then holds for all later ones.
    fn first_that(&self, is_late: impl Fn(u64) -> bool) -> u64 {
        let (mut low, mut high) = (0, self.count);
        while low < high {
            let middle = low + (high - low) / 2;
            if is_late(self.start(middle)) {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        low
    }
}

impl Pieces {
    /// Makes a tensor of these sizes, none of which is zero, of its pieces. Returns what is wrong with them if they are
    /// not every element once. The sizes are such that the number of elements does not overflow.
    pub(crate) fn new(
        sizes: Vec<u64>,
        width: u64,
        pieces: Vec<Piece>,
    ) -> Result<Self, &'static str> {
        let dims = sizes.len();
        let fits = |piece: &Piece| {
            piece.offsets.len() == dims
                && piece.sizes.len() == dims
                && (0..dims).all(|dim| {
                    let end = piece.offsets[dim].checked_add(piece.sizes[dim]);
                    end.is_some_and(|end| end <= sizes[dim])
                })
        };
        if !pieces.iter().all(fits) {
            return Err("has a piece that reaches out of it");
        }
        let volumes = pieces.iter().try_fold(0u64, |sum, piece| sum.checked_add(piece.volume()));
        let volume = sizes.iter().product();
        if volumes.is_some_and(|volumes| volumes < volume) {
            return Err(NOT_ALL);
        }
        // All of them are within it.
        if volumes != Some(volume) {
            return Err(OVERLAP);
        }
        check_apart(&pieces, &sizes)?;
        Ok(Self { sizes, width, pieces })
    }

    /// Returns the size of an element in bytes.
    pub(crate) fn width(&self) -> u64 {
        self.width
    }

    /// Reads the elements from the byte `at` on, in row-major order. Both ends are ends of elements.
    pub(crate) fn read_at(&self, at: u64, to: &mut [u8]) -> Result<()> {
        let start = at / self.width;
        let end = start + to.len() as u64 / self.width;
        self.pieces.iter().try_for_each(|piece| self.read_piece(piece, start, end, to))
    }

    /// Reads what a piece has of the elements from `start` to `end`.
    fn read_piece(&self, piece: &Piece, start: u64, end: u64, to: &mut [u8]) -> Result<()> {
        let runs = Runs::of(piece, &self.sizes);
        let last = runs.first_that(|begin| begin >= end);
        let first = runs.first_that(|begin| begin + runs.len > start).min(last);
        if first == last {
            return Ok(());
        }
        let whole = (!piece.tensor.is_contiguous()).then(|| piece.gathered()).transpose()?;
        let mut taken = 0;
        // So many runs at a time as fit into the buffer. A long one is read to its place.
        let bytes = runs.len.saturating_mul(self.width);
        let at_once = (CHUNK as u64 / bytes).max(1);
        let mut buffer = vec![0; if at_once > 1 { (at_once * bytes) as usize } else { 0 }];
        let mut run = first;
        while run < last {
            let count = at_once.min(last - run);
            if count > 1 && whole.is_none() {
                let bytes = &mut buffer[..(count * bytes) as usize];
                piece.read_at(run * runs.len * self.width, bytes)?;
            }
            for (place, run) in (run..run + count).enumerate() {
                let begin = runs.start(run);
                let (from, until) = (begin.max(start), (begin + runs.len).min(end));
                taken += until - from;
                let target = self.bytes(from - start, until - start);
                let target = &mut to[target];
                let skipped = (from - begin) * self.width;
                let within = run * runs.len * self.width + skipped;
                if let Some(whole) = &whole {
                    target.copy_from_slice(&whole[within as usize..][..target.len()]);
                } else if count > 1 {
                    let at = place as u64 * bytes + skipped;
                    target.copy_from_slice(&buffer[at as usize..][..target.len()]);
                } else {
                    piece.read_at(within, target)?;
                }
            }
            run += count;
        }
        if whole.is_some() {
            piece.took(taken);
        }
        Ok(())
    }

    fn bytes(&self, start: u64, end: u64) -> std::ops::Range<usize> {
        (start * self.width) as usize..(end * self.width) as usize
    }
}

impl Piece {
    /// Reads bytes of a piece that is in row-major order.
    fn read_at(&self, at: u64, to: &mut [u8]) -> Result<()> {
        let first = self.start + self.tensor.offset * self.tensor.dtype.size() as u64;
        self.source.read_at(first + at, to)
    }

    /// Returns the whole piece in row-major order, and keeps it until all of it was taken.
    fn gathered(&self) -> Result<Arc<Vec<u8>>> {
        // Locked while it is read, so that other threads wait for it instead of reading it, too.
        let mut kept = self.gathered.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((bytes, _)) = &*kept {
            return Ok(Arc::clone(bytes));
        }
        let bytes = Arc::new(self.read()?);
        *kept = Some((Arc::clone(&bytes), 0));
        Ok(bytes)
    }

    /// Notes that so many elements of what is kept were taken.
    fn took(&self, count: u64) {
        let mut kept = self.gathered.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, taken)) = &mut *kept {
            *taken = taken.saturating_add(count);
            if *taken >= self.volume() {
                *kept = None;
            }
        }
    }

    /// Reads the whole piece in row-major order.
    fn read(&self) -> Result<Vec<u8>> {
        let backing = Backing::File { source: Arc::clone(&self.source), offset: self.start };
        let mut bytes = zeros(self.tensor.size_in_bytes())?;
        read_view(&backing, &self.tensor, &mut bytes)?;
        Ok(bytes)
    }
}

/// Makes a tensor of its pieces, each with the size in bytes of the storage that it is in. Returns what is wrong with
/// them if they are not every element once, or if no tensor has such a shape. Pieces without elements are left out.
pub(crate) fn joined(
    whole: TensorRef,
    mut pieces: Vec<(Piece, u64)>,
) -> Result<(TensorRef, Place), &'static str> {
    let width = whole.dtype.size() as u64;
    let mut sizes = whole.shape.iter().map(|&size| u64::try_from(size).ok());
    let volume = sizes.try_fold(width, |bytes, size| bytes.checked_mul(size?.max(1)));
    if volume.is_none_or(|bytes| i64::try_from(bytes).is_err()) {
        return Err("has more elements than a tensor can have");
    }
    let len = whole.size_in_bytes();
    // The usual case is one that is the whole tensor, with any strides.
    if pieces.len() == 1
        && let Some((Piece { tensor, source, start, .. }, len)) =
            pieces.pop_if(|(piece, _)| piece.is_whole(&whole.shape))
    {
        let tensor = TensorRef { storage: whole.storage, ..tensor };
        return Ok((tensor, Place::in_file(&source, start, len)));
    }
    if len == 0 {
        return Ok((whole, Place::in_file(&Arc::new(Source::in_memory(Vec::new())), 0, 0)));
    }
    let sizes = whole.shape.iter().map(|size| size.unsigned_abs()).collect();
    let pieces = Pieces::new(sizes, width, pieces.into_iter().map(|(piece, _)| piece).collect())?;
    Ok((whole, Place { backing: Backing::Pieces(Arc::new(pieces)), len }))
}

/// Returns an error if two pieces overlap. They are sorted along the dimension in which they begin at the most places,
/// and each is compared with those before it that reach beyond its beginning.
fn check_apart(pieces: &[Piece], sizes: &[u64]) -> Result<(), &'static str> {
    let starts = |dim: usize| {
        let mut starts: Vec<_> = pieces.iter().map(|piece| piece.offsets[dim]).collect();
        starts.sort_unstable();
        starts.dedup();
        starts.len()
    };
    let Some(dim) = (0..sizes.len()).max_by_key(|&dim| starts(dim)) else {
        // Of a number without dimensions there is one piece, as the volumes say.
        return Ok(());
    };
    let mut sorted: Vec<_> = pieces.iter().collect();
    sorted.sort_by_key(|piece| piece.offsets[dim]);
    let mut near: Vec<&Piece> = Vec::new();
    let mut pairs = 0;
    for piece in sorted {
        near.retain(|other| other.end(dim) > piece.offsets[dim]);
        pairs += near.len() as u64;
        if pairs > MOST_PAIRS {
            return Err("has too many pieces beside each other");
        }
        if near.iter().any(|other| other.overlaps(piece)) {
            return Err(OVERLAP);
        }
        near.push(piece);
    }
    Ok(())
}
