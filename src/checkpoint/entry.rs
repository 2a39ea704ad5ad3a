//! A tensor of a checkpoint: in memory while it is being saved, there or in a copy, and in the file after the checkpoint
//! was loaded.
//!
//! While it is being saved it is a handle of the tensor, and afterwards the location of the elements in the file, from
//! which they are read in chunks into their target.

use std::io::{self, Write};
use std::sync::Arc;

use tch::{Device, Kind, Tensor};
use torch_files::{Storage, TensorRef, TorchFile};

use crate::checkpoint::staging::{HostCopy, Memory, Paced};
use crate::dtype::{dtype_of, kind_of};
use crate::error::{CheckpointError, Error, Result};
use crate::ffi::{self, OutsideRegions, Staged};
use crate::optim::Saved;

#[derive(Debug)]
pub(crate) struct TensorEntry {
    pub(crate) kind: Kind,
    pub(crate) size: Vec<i64>,
    /// In a sharded checkpoint.
    pub(crate) saved_by: SavedBy,
    data: Data,
}

/// Which ranks have a tensor of a sharded checkpoint, and so which one of them saves it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SavedBy {
    /// The ranks may have others: that of rank 0 counts.
    Rank0,
    /// It is the same on all ranks, any of which can save it.
    AnyRank,
    /// No other rank has it.
    ThisRank,
}

#[derive(Debug)]
enum Data {
    Memory(Tensor),
    /// A contiguous copy, and which device the tensor itself is on.
    Copy(HostCopy, Device),
    /// A single number, which takes far less memory than a tensor of it.
    Number(f32),
    File(Location),
    /// Another rank saves it; here it is on this device.
    Elsewhere(Device),
}

/// Where the elements of a tensor are in a file, without what the entry says itself: there may be very many.
#[derive(Clone, Debug)]
struct Location {
    file: Arc<TorchFile>,
    storage: Arc<str>,
    /// In elements.
    offset: u64,
    /// In elements; `None` if the elements are in row-major order without gaps.
    strides: Option<Vec<i64>>,
}

impl TensorEntry {
    fn new(kind: Kind, size: Vec<i64>, data: Data) -> Self {
        Self { kind, size, saved_by: SavedBy::Rank0, data }
    }

    fn with(&self, data: Data) -> Self {
        Self { kind: self.kind, size: self.size.clone(), saved_by: self.saved_by, data }
    }

    pub(crate) fn in_memory(tensor: &Tensor) -> Result<Self> {
        let data = Data::Memory(tensor.f_detach()?);
        Ok(Self::new(tensor.f_kind()?, ffi::sizes(tensor)?, data))
    }

    /// Makes an entry for a number that is to be a tensor without dimensions.
    pub(crate) fn number(number: f32) -> Self {
        Self::new(Kind::Float, Vec::new(), Data::Number(number))
    }

    /// Makes an entry for a tensor in a file; `None` if tch does not have its dtype.
    pub(crate) fn in_file(file: &Arc<TorchFile>, tensor: &TensorRef) -> Option<Self> {
        let kind = kind_of(tensor.dtype)?;
        let strides = (!tensor.is_contiguous()).then(|| tensor.strides.clone());
        let (storage, offset) = (Arc::clone(&tensor.storage), tensor.offset);
        let data = Data::File(Location { file: Arc::clone(file), storage, offset, strides });
        Some(Self::new(kind, tensor.shape.clone(), data))
    }

    /// The device that the tensor is on; the CPU for one in a file.
    pub(crate) fn device(&self) -> Device {
        match &self.data {
            Data::Memory(tensor) => tensor.device(),
            Data::Copy(_, device) | Data::Elsewhere(device) => *device,
            Data::Number(_) | Data::File(_) => Device::Cpu,
        }
    }

    /// Copies the elements, if they are in memory, into memory of an earlier copy where it fits.
    pub(crate) fn copied(&self, memory: &mut Memory) -> Result<Self> {
        let of = |tensor: &Tensor, memory: &mut Memory| {
            Ok::<_, Error>(Data::Copy(
                HostCopy::of(tensor, self.kind, &self.size, memory)?,
                self.device(),
            ))
        };
        let data = match &self.data {
            Data::Memory(tensor) => of(tensor, memory)?,
            Data::Copy(copy, _) => of(&copy.tensor()?, memory)?,
            Data::Number(number) => Data::Number(*number),
            Data::File(location) => Data::File(location.clone()),
            Data::Elsewhere(device) => Data::Elsewhere(*device),
        };
        Ok(self.with(data))
    }

    /// Makes another entry of the same elements.
    pub(crate) fn shallow_clone(&self) -> Self {
        self.with(match &self.data {
            Data::Memory(tensor) => Data::Memory(tensor.shallow_clone()),
            Data::Copy(copy, device) => Data::Copy(copy.shallow_clone(), *device),
            Data::Number(number) => Data::Number(*number),
            Data::File(location) => Data::File(location.clone()),
            Data::Elsewhere(device) => Data::Elsewhere(*device),
        })
    }

    /// Makes an entry without the elements, which another rank saves.
    pub(crate) fn elsewhere(&self) -> Self {
        self.with(Data::Elsewhere(self.device()))
    }

    /// Returns whether this rank has the elements.
    pub(crate) fn is_here(&self) -> bool {
        !matches!(self.data, Data::Elsewhere(_))
    }

    /// The copy of a tensor on a CUDA device, which may still be on its way.
    pub(crate) fn staged(&self) -> Option<&Arc<Staged>> {
        match &self.data {
            Data::Copy(HostCopy::Staged(staged), _) => Some(staged),
            _ => None,
        }
    }

    /// Gives the memory of a copy to later ones.
    pub(crate) fn give_to(self, memory: &mut Memory) {
        if let Data::Copy(copy, device) = self.data {
            memory.add((self.kind, self.size, device), copy);
        }
    }

    pub(crate) fn numel(&self) -> usize {
        ffi::elements(&self.size)
    }
}

/// The elements in row-major order. What fails besides the writer is an [`Error`] within the I/O error.
impl Storage for TensorEntry {
    fn size_in_bytes(&self) -> u64 {
        self.numel().saturating_mul(self.kind.elt_size_in_bytes()) as u64
    }

    fn write_to(&self, out: &mut dyn Write) -> io::Result<()> {
        let out = &mut Paced::new(out);
        match &self.data {
            Data::Memory(tensor) => write_tensor(tensor, out),
            Data::Copy(copy, _) => write_tensor(&copy.tensor().map_err(io::Error::other)?, out),
            Data::Number(number) => out.write_all(&number.to_le_bytes()),
            Data::File(location @ Location { strides: None, .. }) => {
                let tensor = location.elements(self.kind, 0, self.numel());
                let tensor = tensor.map_err(io::Error::other)?;
                location.file.storage(&tensor).write_to(out)
            }
            Data::File(_) => write_tensor(&self.to_tensor().map_err(io::Error::other)?, out),
            Data::Elsewhere(_) => Err(io::Error::other(not_here())),
        }
    }
}

impl Location {
    /// Returns `numel` elements of the storage, from the one after the first `skipped` on.
    fn elements(&self, kind: Kind, skipped: usize, numel: usize) -> Result<TensorRef> {
        let dtype = dtype_of(kind).ok_or_else(|| Error::Torch(format!("no file has {kind:?}")))?;
        let flat = TensorRef::contiguous(Arc::clone(&self.storage), dtype, vec![numel as i64]);
        Ok(TensorRef { offset: self.offset + skipped as u64, ..flat })
    }
}

impl Saved for TensorEntry {
    fn shape(&self) -> Vec<i64> {
        self.size.clone()
    }

    fn kind(&self) -> Option<Kind> {
        Some(self.kind)
    }

    fn is_complex(&self) -> bool {
        matches!(self.kind, Kind::ComplexHalf | Kind::ComplexFloat | Kind::ComplexDouble)
    }

    fn item(&self) -> Result<f64> {
        match &self.data {
            Data::Number(number) => Ok((*number).into()),
            _ => self.to_tensor()?.item(),
        }
    }

    /// Converts the elements if the dtypes differ.
    fn copy_to(&self, to: &mut Tensor) -> Result<()> {
        match &self.data {
            Data::File(location @ Location { strides: None, .. })
                if to.f_kind()? == self.kind && to.is_contiguous() =>
            {
                fill(to, self.numel(), location)
            }
            Data::Memory(tensor) => tensor.copy_to(to),
            Data::Copy(copy, _) => copy.tensor()?.copy_to(to),
            Data::Number(_) | Data::File(_) | Data::Elsewhere(_) => self.to_tensor()?.copy_to(to),
        }
    }

    /// Copies or reads the elements into a new tensor on the CPU. A tensor in a file that is expanded remains so,
    /// because its elements can be far more than those in the file.
    fn to_tensor(&self) -> Result<Tensor> {
        let _own = OutsideRegions::enter();
        match &self.data {
            Data::Memory(tensor) => {
                let (tensor, _) = plain(tensor)?;
                Ok(tensor.f_to_device_(Device::Cpu, self.kind, false, true)?)
            }
            Data::Copy(copy, _) => {
                Ok(copy.tensor()?.f_to_device_(Device::Cpu, self.kind, false, true)?)
            }
            Data::Number(number) => Ok(Tensor::from(*number)),
            Data::File(location @ Location { strides: Some(strides), .. }) => {
                let extent = extent(&self.size, strides);
                let all = read_new(self.kind, &[extent], location)?;
                let view = all.f_as_strided(&self.size[..], &strides[..], 0)?;
                Ok(if self.numel() as i64 > extent { view } else { view.f_contiguous()? })
            }
            Data::File(location) => read_new(self.kind, &self.size, location),
            Data::Elsewhere(_) => Err(not_here()),
        }
    }
}

fn not_here() -> Error {
    Error::Torch("the elements of this tensor are on another rank".to_owned())
}

/// How many bytes are copied at a time: few enough to stay in the cache of a core, and a multiple of the size of every
/// element.
const CHUNK: usize = 1 << 18;

/// Returns how many elements lie between the first and the last one in memory, including both.
fn extent(size: &[i64], stride: &[i64]) -> i64 {
    if size.contains(&0) {
        return 0;
    }
    1 + size.iter().zip(stride).map(|(n, stride)| (n - 1) * stride).sum::<i64>()
}

fn read_new(kind: Kind, size: &[i64], location: &Location) -> Result<Tensor> {
    let mut tensor = Tensor::f_empty(size, (kind, Device::Cpu))?;
    fill(&mut tensor, ffi::elements(size), location)?;
    Ok(tensor)
}

/// Reads elements into a contiguous tensor: into its memory at once on the CPU, and in chunks on a device.
fn fill(to: &mut Tensor, numel: usize, location: &Location) -> Result<()> {
    let kind = to.f_kind()?;
    let read = |done: usize, count: usize, bytes: &mut [u8]| {
        let read = location.file.read(&location.elements(kind, done, count)?, bytes);
        Ok::<_, Error>(read.map_err(CheckpointError::reading(location.file.path()))?)
    };
    if numel == 0 {
        return Ok(());
    }
    let width = kind.elt_size_in_bytes();
    if to.device() == Device::Cpu {
        let mut first = vec![0; width];
        read(0, 1, &mut first)?;
        return ffi::elements_fill(to, &first, |bytes| read(0, numel, bytes))?;
    }
    let mut buffer = vec![0; CHUNK.min(numel.saturating_mul(width))];
    let mut done = 0;
    while done < numel {
        let count = (buffer.len() / width).min(numel - done);
        let bytes = &mut buffer[..count * width];
        read(done, count, bytes)?;
        ffi::elements_write(to, done as i64, bytes)?;
        done += count;
    }
    Ok(())
}

/// Returns a contiguous version of a tensor, and the size of an element in bytes.
fn plain(tensor: &Tensor) -> Result<(Tensor, usize)> {
    let _own = OutsideRegions::enter();
    let tensor = tensor.f_resolve_conj()?.f_resolve_neg()?.f_contiguous()?;
    let width = tensor.f_kind()?.elt_size_in_bytes();
    Ok((tensor, width))
}

fn write_tensor(tensor: &Tensor, out: &mut dyn Write) -> io::Result<()> {
    let (tensor, width) = plain(tensor).map_err(io::Error::other)?;
    let len = ffi::numel(&tensor) * width;
    let mut buffer = vec![0; CHUNK.min(len)];
    let mut done = 0;
    while done < len {
        let size = buffer.len().min(len - done);
        let read = ffi::elements_read(&tensor, (done / width) as i64, &mut buffer[..size]);
        read.map_err(io::Error::other)?;
        out.write_all(&buffer[..size])?;
        done += size;
    }
    Ok(())
}
