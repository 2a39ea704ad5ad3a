//! Writing the archive as PyTorch does: records as they are, the data of the storages aligned.

use std::cell::Cell;
use std::io::{self, Seek, SeekFrom, Write};
use std::rc::Rc;

use ::zip::write::SimpleFileOptions;
use ::zip::{CompressionMethod, DateTime, System, ZipWriter};

use super::split;
use crate::checkpoint::malformed::invalid;

/// The folder of the records, as `torch.save` calls it where it does not know the file's name.
const FOLDER: &str = "archive";
/// What PyTorch aligns storages to, so that they can be mapped into memory.
const ALIGNMENT: u16 = 64;
/// From which size on a record may need the sizes of zip64, with room for the headers.
const LARGE: u64 = 0xfff0_0000;

/// Writes the archive of a pickle and its storages, which have these keys and bytes. `storage` is called once for each
/// storage in order and must write exactly its bytes.
///
/// The same values make the same bytes. After an error what has been written is not a checkpoint.
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
        // Before the archive is dropped, which would complete it.
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
    // Everything that the zip crate would take from the system is set.
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

/// Takes as many bytes as were announced.
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

/// Where the archive goes, until something fails: a `ZipWriter` that is dropped would complete the archive, and print
/// where it cannot. What it writes then goes nowhere, and it is always at the end.
struct Output<W> {
    out: W,
    end: u64,
    failed: Rc<Cell<bool>>,
}

impl<W> Output<W> {
    fn note<T>(&self, result: io::Result<T>) -> io::Result<T> {
        // What was interrupted is tried again.
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
