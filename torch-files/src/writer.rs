//! Writing files.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::path::Path;

use crate::atomic::{self, Replaced};
use crate::dtype::Dtype;
use crate::error::{Error, Result, invalid};
use crate::limits::Limits;
use crate::pickle;
use crate::safetensors::{self, METADATA, Written};
use crate::source::{Checksum, ChecksumWriter};
use crate::value::{TensorRef, Value};
use crate::zip;

/// The elements of one tensor or storage that is to be written, wherever they are: in memory, on a device, or in
/// another file. Little-endian.
pub trait Storage {
    /// Returns their size in bytes.
    fn size_in_bytes(&self) -> u64;

    /// Writes exactly that many bytes.
    ///
    /// # Errors
    ///
    /// Those of the writer, or one of its own, which ends the writing of the file and is its error.
    fn write_to(&self, out: &mut dyn Write) -> io::Result<()>;
}

impl<S: Storage + ?Sized> Storage for &S {
    fn size_in_bytes(&self) -> u64 {
        (**self).size_in_bytes()
    }

    fn write_to(&self, out: &mut dyn Write) -> io::Result<()> {
        (**self).write_to(out)
    }
}

impl<S: Storage + ?Sized> Storage for Box<S> {
    fn size_in_bytes(&self) -> u64 {
        (**self).size_in_bytes()
    }

    fn write_to(&self, out: &mut dyn Write) -> io::Result<()> {
        (**self).write_to(out)
    }
}

impl Storage for [u8] {
    fn size_in_bytes(&self) -> u64 {
        self.len() as u64
    }

    fn write_to(&self, out: &mut dyn Write) -> io::Result<()> {
        out.write_all(self)
    }
}

impl Storage for Vec<u8> {
    fn size_in_bytes(&self) -> u64 {
        self.as_slice().size_in_bytes()
    }

    fn write_to(&self, out: &mut dyn Write) -> io::Result<()> {
        self.as_slice().write_to(out)
    }
}

/// The elements of a tensor, and their checksum once they were written.
#[derive(Debug)]
pub struct Hashed<S> {
    storage: S,
    checksum: Cell<Checksum>,
}

impl<S> Hashed<S> {
    /// Makes one of which nothing was written yet.
    pub fn new(storage: S) -> Self {
        Self { storage, checksum: Cell::default() }
    }

    /// Returns the checksum of what was written last.
    pub fn checksum(&self) -> Checksum {
        self.checksum.get()
    }
}

impl<S: Storage> Storage for Hashed<S> {
    fn size_in_bytes(&self) -> u64 {
        self.storage.size_in_bytes()
    }

    fn write_to(&self, out: &mut dyn Write) -> io::Result<()> {
        let mut out = ChecksumWriter::new(out);
        self.storage.write_to(&mut out)?;
        self.checksum.set(out.checksum());
        Ok(())
    }
}

/// A file that is laid out and can be written: everything that could fail because of its content was checked. The same
/// content always gives the same bytes.
#[derive(Debug)]
pub struct Writer<S> {
    layout: Layout,
    /// In the order of the file.
    storages: Vec<S>,
}

#[derive(Debug)]
enum Layout {
    Torch {
        pickle: Vec<u8>,
    },
    Safetensors {
        /// The names and descriptions of the tensors, in the order of the storages.
        tensors: Vec<(String, Written)>,
        /// The length before the header, and the header.
        header: Vec<u8>,
    },
}

/// An upper bound of the number of records besides one for each storage.
const OTHER_RECORDS: usize = 8;

impl<S: Storage> Writer<S> {
    /// Lays out a file that Python reads with `torch.load(path, weights_only=True)`. The tensors in the value refer to
    /// the storages by their numbers: the first one has the key `0`.
    ///
    /// # Errors
    ///
    /// [`Error::Unwritable`] if the value holds what could not be read again within the limits: a [`Value::Opaque`], a
    /// dict with two equal keys or a container as key, or a tensor that does not fit its storage.
    pub fn torch(
        value: &Value,
        storages: impl IntoIterator<Item = S>,
        limits: &Limits,
    ) -> Result<Self> {
        let storages: Vec<S> = storages.into_iter().collect();
        let refuse = |problem| Error::Unwritable { entry: None, problem };
        let most = limits.max_records.saturating_sub(OTHER_RECORDS);
        if storages.len() > most {
            return Err(refuse(format!("more than {most} tensors are too many")));
        }
        let pickle = pickle::write(value, &lengths(&storages), limits).map_err(refuse)?;
        Ok(Self { layout: Layout::Torch { pickle }, storages })
    }

    /// Lays out a safetensors file of named tensors, given the dtype and the shape of each. Those with the widest
    /// elements come first, so that all are aligned, and otherwise they are sorted by name. Other readers expect
    /// `format` to be `pt` in the metadata of weights.
    ///
    /// # Errors
    ///
    /// [`Error::Unwritable`] for a dtype that the format lacks, a name that occurs twice or is `__metadata__`, a shape
    /// that is not that of the storage, and what exceeds the limits.
    pub fn safetensors(
        tensors: impl IntoIterator<Item = (String, Dtype, Vec<i64>, S)>,
        metadata: BTreeMap<String, String>,
        limits: &Limits,
    ) -> Result<Self> {
        let mut tensors: Vec<_> = tensors.into_iter().collect();
        tensors.sort_by(|(a, one, ..), (b, other, ..)| {
            other.size().cmp(&one.size()).then_with(|| a.cmp(b))
        });
        let (mut placed, mut storages) = (Vec::with_capacity(tensors.len()), Vec::new());
        let mut start = 0;
        for (name, dtype, shape, storage) in tensors {
            let written = described(&name, dtype, shape, start, storage.size_in_bytes())?;
            start = written.data_offsets.1;
            placed.push((name, written));
            storages.push(storage);
        }
        check_names(&placed)?;
        let header = header(&metadata, &placed)?;
        check_size(placed.len(), header.len(), limits)?;
        Ok(Self { layout: Layout::Safetensors { tensors: placed, header }, storages })
    }

    /// Returns the storages in the order of the file.
    pub fn storages(&self) -> &[S] {
        &self.storages
    }

    /// Returns the first bytes of a safetensors file: the length of the header, and the header. Empty for another file.
    pub fn header(&self) -> &[u8] {
        match &self.layout {
            Layout::Torch { .. } => &[],
            Layout::Safetensors { header, .. } => header,
        }
    }

    /// Replaces the metadata of a safetensors file by one that takes as many bytes, such as one with the checksums of
    /// the tensors once they have been written. [`rewrite_header`](Self::rewrite_header) puts it into a file that was
    /// written before.
    ///
    /// # Errors
    ///
    /// [`Error::Unwritable`] if the header would be longer or shorter, or if this is another file; the metadata stay as
    /// they were.
    pub fn set_metadata(&mut self, metadata: &BTreeMap<String, String>) -> Result<()> {
        let refuse = |problem: &str| Error::Unwritable { entry: None, problem: problem.to_owned() };
        let Layout::Safetensors { tensors, header } = &mut self.layout else {
            return Err(refuse("only a safetensors file has metadata"));
        };
        let new = self::header(metadata, tensors)?;
        if new.len() != header.len() {
            return Err(refuse("its header would have another length"));
        }
        *header = new;
        Ok(())
    }

    /// Writes the header again over that of a file that was written with [`write_to`](Self::write_to).
    ///
    /// # Errors
    ///
    /// Those of `out`.
    pub fn rewrite_header<W: Write + Seek + ?Sized>(&self, out: &mut W) -> io::Result<()> {
        out.seek(SeekFrom::Start(0))?;
        out.write_all(self.header())
    }

    /// Writes the file to its end, from the position 0 of `out` on.
    ///
    /// # Errors
    ///
    /// Those of `out` and of the storages, and one of the kind [`InvalidInput`](io::ErrorKind::InvalidInput) for a
    /// storage that writes more or fewer bytes than it has.
    pub fn write_to<W: Write + Seek + ?Sized>(&self, out: &mut W) -> io::Result<()> {
        match &self.layout {
            Layout::Torch { pickle } => {
                let lengths = lengths(&self.storages);
                let out = zip::write(BufWriter::new(out), pickle, &lengths, &mut |index, out| {
                    self.storages[index].write_to(out)
                })?;
                out.into_inner().map_err(io::IntoInnerError::into_error)?.flush()
            }
            Layout::Safetensors { .. } => {
                out.write_all(self.header())?;
                self.storages.iter().try_for_each(|storage| {
                    let mut out = Exactly { out: &mut *out, left: storage.size_in_bytes() };
                    storage.write_to(&mut out)?;
                    match out.left {
                        0 => Ok(()),
                        left => Err(invalid(format!("{left} bytes are missing in a tensor"))),
                    }
                })
            }
        }
    }

    /// Saves to a file, which is replaced as a whole or not at all, see [`atomic::replace`].
    ///
    /// # Errors
    ///
    /// Those of [`atomic::replace`].
    pub fn save(&self, path: impl AsRef<Path>) -> Result<Replaced> {
        atomic::replace(path.as_ref(), &mut |out| self.write_to(out))
    }
}

/// Returns the key and the size in bytes of each storage.
fn lengths<S: Storage>(storages: &[S]) -> Vec<(String, u64)> {
    let key = |(index, storage): (usize, &S)| (index.to_string(), storage.size_in_bytes());
    storages.iter().enumerate().map(key).collect()
}

fn unwritable(name: &str, problem: impl Into<String>) -> Error {
    Error::Unwritable { entry: Some(name.to_owned()), problem: problem.into() }
}

/// Describes a tensor that begins at `start`, as the header has it.
fn described(name: &str, dtype: Dtype, shape: Vec<i64>, start: u64, len: u64) -> Result<Written> {
    let Some(known) = dtype.safetensors_name() else {
        return Err(unwritable(name, format!("safetensors has no {dtype}")));
    };
    let tensor = TensorRef::contiguous("", dtype, shape);
    tensor.check(len).map_err(|problem| unwritable(name, format!("it {problem}")))?;
    let wanted = tensor.size_in_bytes();
    if wanted != len {
        let problem = format!("its shape takes {wanted} bytes, and its storage has {len}");
        return Err(unwritable(name, problem));
    }
    let end = start.checked_add(len).ok_or_else(|| unwritable(name, "the file is too long"))?;
    Ok(Written { dtype: known, shape: tensor.shape, data_offsets: (start, end) })
}

/// Returns the header of these tensors, with its length before it.
fn header(metadata: &BTreeMap<String, String>, tensors: &[(String, Written)]) -> Result<Vec<u8>> {
    let written = tensors.iter().map(|(name, written)| (name.as_str(), written));
    let refuse =
        |error: serde_json::Error| Error::Unwritable { entry: None, problem: error.to_string() };
    safetensors::header(metadata, written).map_err(refuse)
}

/// Returns an error for more tensors, or a longer header, than readers accept.
fn check_size(tensors: usize, header: usize, limits: &Limits) -> Result<()> {
    let len = header as u64 - safetensors::LENGTH;
    let problem = if tensors as u64 > limits.max_tensors {
        format!("it has {tensors} tensors, more than {}", limits.max_tensors)
    } else if len > limits.max_header_bytes {
        format!("its header would have {len} bytes")
    } else {
        return Ok(());
    };
    Err(Error::Unwritable { entry: None, problem })
}

fn check_names(tensors: &[(String, Written)]) -> Result<()> {
    let mut names: Vec<_> = tensors.iter().map(|(name, _)| name.as_str()).collect();
    names.sort_unstable();
    if names.contains(&METADATA) {
        return Err(unwritable(METADATA, "the format has that name for something else"));
    }
    match names.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(unwritable(pair[0], "another tensor has that name")),
        None => Ok(()),
    }
}

/// Accepts as many bytes as a storage has.
struct Exactly<'a, W: ?Sized> {
    out: &'a mut W,
    left: u64,
}

impl<W: Write + ?Sized> Write for Exactly<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.len() as u64 > self.left {
            return Err(invalid("a tensor has more bytes than its shape"));
        }
        let written = self.out.write(bytes)?;
        self.left -= written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

    use std::io::Cursor;

    use super::*;

    fn metadata(text: &str) -> BTreeMap<String, String> {
        BTreeMap::from([("note".to_owned(), text.to_owned())])
    }

    /// A tensor of bytes with this name.
    fn bytes(name: &str, len: usize) -> (String, Dtype, Vec<i64>, Vec<u8>) {
        (name.to_owned(), Dtype::Uint8, vec![len as i64], vec![7; len])
    }

    #[test]
    fn tensors_that_the_format_cannot_hold_are_named() {
        let of = |dtype, shape: &[i64], len| ("x".to_owned(), dtype, shape.to_vec(), vec![0; len]);
        let wrong = [
            (vec![bytes("a", 1), bytes("a", 2)], "a", "another tensor"),
            (vec![bytes(METADATA, 1)], METADATA, "something else"),
            (vec![of(Dtype::Complex32, &[1], 4)], "x", "safetensors has no complex32"),
            (vec![of(Dtype::Float32, &[2], 9)], "x", "takes 8 bytes"),
            (vec![of(Dtype::Float32, &[2], 7)], "x", "beyond the end"),
            (vec![of(Dtype::Float32, &[-1], 4)], "x", "negative"),
        ];
        for (tensors, name, expected) in wrong {
            let error = Writer::safetensors(tensors, BTreeMap::new(), &Limits::DEFAULT);
            let Err(Error::Unwritable { entry: Some(entry), problem }) = error else {
                panic!("{expected}: {error:?}");
            };
            assert!(entry == name && problem.contains(expected), "{entry}: {problem}");
        }
        let few = Limits { max_tensors: 1, ..Limits::DEFAULT };
        let short = Limits { max_header_bytes: 10, ..Limits::DEFAULT };
        for limits in [few, short] {
            let tensors = [bytes("a", 1), bytes("b", 1)];
            let refused = Writer::safetensors(tensors, BTreeMap::new(), &limits).map(drop);
            assert!(matches!(refused, Err(Error::Unwritable { entry: None, .. })), "{refused:?}");
        }
    }

    #[test]
    fn metadata_of_the_same_length_replace_others_and_no_others_do() {
        let mut writer =
            Writer::safetensors([bytes("a", 3)], metadata("before"), &Limits::DEFAULT).unwrap();
        let mut out = Cursor::new(Vec::new());
        writer.write_to(&mut out).unwrap();
        let refused = writer.set_metadata(&metadata("of another length"));
        assert!(matches!(refused, Err(Error::Unwritable { .. })));
        assert_eq!(writer.header(), &out.get_ref()[..writer.header().len()]);
        writer.set_metadata(&metadata("after!")).unwrap();
        writer.rewrite_header(&mut out).unwrap();
        let file = crate::TorchFile::from_bytes(out.into_inner()).unwrap();
        assert_eq!(file.metadata(), &metadata("after!"));
        let tensor = file.tensors()[0].1.clone();
        assert_eq!(file.to_vec::<u8>(&tensor).unwrap(), [7; 3]);
        let mut torch = Writer::torch(&Value::None, [vec![0u8; 4]], &Limits::DEFAULT).unwrap();
        assert!(torch.header().is_empty() && torch.set_metadata(&metadata("x")).is_err());
    }

    /// Says that it has four bytes, and writes another number.
    struct Liar(usize);

    impl Storage for Liar {
        fn size_in_bytes(&self) -> u64 {
            4
        }

        fn write_to(&self, out: &mut dyn Write) -> io::Result<()> {
            out.write_all(&vec![0; self.0])
        }
    }

    #[test]
    fn a_storage_writes_as_many_bytes_as_it_has() {
        for len in [0, 3, 4, 5] {
            let tensor = ("a".to_owned(), Dtype::Float32, vec![1], Liar(len));
            let safetensors =
                Writer::safetensors([tensor], BTreeMap::new(), &Limits::DEFAULT).unwrap();
            let torch = Writer::torch(&Value::None, [Liar(len)], &Limits::DEFAULT).unwrap();
            for writer in [safetensors, torch] {
                let written = writer.write_to(&mut Cursor::new(Vec::new()));
                match (len, written) {
                    (4, written) => written.unwrap(),
                    (_, Err(error)) => assert_eq!(error.kind(), io::ErrorKind::InvalidInput),
                    (_, Ok(())) => panic!("{len} bytes"),
                }
            }
        }
    }
}
