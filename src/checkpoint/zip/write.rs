//! Writing an archive like PyTorch: the records are not compressed, and the data of storages is aligned.
//!
//! The bytes depend on the content alone, not on the time or the system. If a write fails, the archive is left without
//! its end, because a `ZipWriter` that is dropped would complete it.

use std::cell::Cell;
use std::io::{self, Seek, SeekFrom, Write};
use std::rc::Rc;

use ::zip::write::SimpleFileOptions;
use ::zip::{CompressionMethod, DateTime, System, ZipWriter};

use super::split;
use crate::checkpoint::malformed::invalid;

/// The folder of the records, which `torch.save` uses if it has no file name.
const FOLDER: &str = "archive";
/// PyTorch's alignment of storages in bytes, so that they can be mapped into memory.
const ALIGNMENT: u16 = 64;
/// The size in bytes from which on a record is written with zip64 sizes, a little below 4 GiB to leave room for the
/// headers.
const LARGE: u64 = 0xfff0_0000;

/// Writes an archive of a pickle and its storages, given the key and the size in bytes of each. `storage` is called
/// once for each storage, in order, and must write exactly that many bytes.
///
/// The same content always gives the same bytes. After an error the output is not a valid archive.
pub(crate) fn write<W: Write + Seek>(
    out: W,
    pickle: &[u8],
    storages: &[(String, u64)],
    storage: &mut dyn FnMut(usize, &mut dyn Write) -> io::Result<()>,
) -> io::Result<W> {
    let failed = Rc::new(Cell::new(false));
    let output = Output { out, end: 0, failed: Rc::clone(&failed) };
    let mut archive = ZipWriter::new(output);
    let written = records(&mut archive, pickle, storages, storage);
    if written.is_err() {
        // Set before the archive is dropped, which would otherwise complete it.
        failed.set(true);
    }
    written?;
    let output = archive.finish()?;
    if failed.get() {
        return Err(io::Error::other("the archive could not be completed"));
    }
    Ok(output.out)
}

fn records<W: Write + Seek>(
    archive: &mut ZipWriter<W>,
    pickle: &[u8],
    storages: &[(String, u64)],
    storage: &mut dyn FnMut(usize, &mut dyn Write) -> io::Result<()>,
) -> io::Result<()> {
    record(archive, "data.pkl", pickle.len() as u64, &mut |out| out.write_all(pickle))?;
    record(archive, "byteorder", 6, &mut |out| out.write_all(b"little"))?;
    for (index, (key, len)) in storages.iter().enumerate() {
        record(archive, &format!("data/{key}"), *len, &mut |out| storage(index, out))?;
    }
    record(archive, "version", 2, &mut |out| out.write_all(b"3\n"))
}

fn record<W: Write + Seek>(
    archive: &mut ZipWriter<W>,
    name: &str,
    len: u64,
    fill: &mut dyn FnMut(&mut dyn Write) -> io::Result<()>,
) -> io::Result<()> {
    let name = format!("{FOLDER}/{name}");
    if split(&name).is_none() {
        return Err(invalid(format!("{name:?} cannot be the name of a record")));
    }
    // Everything that the zip crate would otherwise take from the system is set.
    let options = SimpleFileOptions::default()
        .compression_method(CompressionMethod::Stored)
        .last_modified_time(DateTime::default())
        .system(System::Unix)
        .unix_permissions(0o644)
        .with_alignment(ALIGNMENT)
        .large_file(len >= LARGE);
    archive.start_file(name.as_str(), options)?;
    let mut counted = Counted { out: archive, left: len };
    fill(&mut counted)?;
    match counted.left {
        0 => Ok(()),
        left => Err(invalid(format!("{left} bytes are missing in {name}"))),
    }
}

/// Accepts only as many bytes as were announced.
struct Counted<'a, W> {
    out: &'a mut W,
    left: u64,
}

impl<W: Write> Write for Counted<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.len() as u64 > self.left {
            return Err(invalid("a storage has more bytes than were announced"));
        }
        let written = self.out.write(bytes)?;
        self.left = self.left.saturating_sub(written as u64);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// The output of a `ZipWriter`, which discards all writes after a failure. A `ZipWriter` that is dropped would
/// otherwise complete the archive, and print an error if it cannot. After a failure the position is always at the end.
struct Output<W> {
    out: W,
    end: u64,
    failed: Rc<Cell<bool>>,
}

impl<W> Output<W> {
    fn note<T>(&self, result: io::Result<T>) -> io::Result<T> {
        // An interrupted write is retried.
        if result.as_ref().is_err_and(|error| error.kind() != io::ErrorKind::Interrupted) {
            self.failed.set(true);
        }
        result
    }
}

impl<W: Write> Write for Output<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.failed.get() {
            return Ok(bytes.len());
        }
        let written = self.out.write(bytes);
        self.note(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        let flushed = if self.failed.get() { Ok(()) } else { self.out.flush() };
        self.note(flushed)
    }
}

impl<W: Seek> Seek for Output<W> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        if self.failed.get() {
            return Ok(self.end);
        }
        let reached = self.out.seek(to);
        let reached = self.note(reached)?;
        self.end = self.end.max(reached);
        Ok(reached)
    }
}
