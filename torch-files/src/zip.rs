//! The container of PyTorch's files: a zip archive whose records are not compressed.
//!
//! All records are in one folder. This crate writes `data.pkl`, `byteorder`, a `data/KEY` for each storage, and
//! `version`, each with a CRC-32. Uncompressed records can be read straight from their place in the file.
//!
//! Before a record is read, the number of records and their names are checked, and that they neither overlap nor reach
//! beyond the directory, which is read entry by entry. Of each only the name and the place of the data are kept.

// Why not a crate: zip 9.5.1, the last for Rust 1.88, reads the whole directory into memory before its size can be
// limited, and looks for a misplaced directory instead of refusing it. Its writer makes the same bytes (a test compares
// 8.6), but completes the archive when it is dropped after an error. rawzip 0.5.2 reads entry by entry, but always
// writes data descriptors; it would replace only `directory` and `entries`, and refuses some archives with bytes before
// them. The checks of names, overlap and count would stay here with either.

use std::collections::{BTreeMap, HashSet};
use std::io::{self, BufReader, Read, Seek, SeekFrom, Write};
use std::ops::Range;

use crate::error::{Malformed, invalid};
use crate::text::shown;

const END: &[u8] = b"PK\x05\x06";
const END64: &[u8] = b"PK\x06\x06";
const LOCATOR: &[u8] = b"PK\x06\x07";
const ENTRY: &[u8] = b"PK\x01\x02";
const LOCAL: &[u8] = b"PK\x03\x04";

const END_BYTES: usize = 22;
const END64_BYTES: usize = 56;
const LOCATOR_BYTES: usize = 20;
const ENTRY_BYTES: usize = 46;
const LOCAL_BYTES: usize = 30;

/// The end record, a comment or other bytes after it, and the two records of zip64.
const TAIL: u64 = (END_BYTES + (1 << 16) + LOCATOR_BYTES + END64_BYTES) as u64;

/// The identifier of the extra field with 64-bit sizes, and the value of a size that is there.
const ZIP64: u16 = 1;
const ELSEWHERE: u64 = 0xffff_ffff;

/// The only methods of the records that PyTorch writes: TorchScript's code is compressed.
const STORED: u16 = 0;

/// The flag of an encrypted record.
const ENCRYPTED: u16 = 1;

/// The folder of the records, which `torch.save` uses if it has no file name.
const FOLDER: &str = "archive";

/// PyTorch's alignment of storages in bytes, so that they can be mapped into memory, and the identifier of the extra
/// field that fills the bytes before them.
const ALIGNMENT: u64 = 64;
const PADDING: u64 = 0xa11e;

/// The size in bytes from which on a record is written with zip64 sizes, a little below 4 GiB to leave room for the
/// headers.
const LARGE: u64 = 0xfff0_0000;

/// The place of the checksum in a local header.
const LOCAL_CRC32: u64 = 14;

/// The versions of the format that a reader of a stored record must know, and of one with 64-bit sizes.
const STORED_VERSION: u64 = 10;
const ZIP64_VERSION: u64 = 45;

/// The date of all records, the first that the format has.
const DATE: u64 = 0x21;

/// Unix, and the permissions of a file that its owner can write.
const UNIX: u64 = 3 << 8;
const ATTRIBUTES: u64 = 0o100_644 << 16;

/// From more records than this on, their number is in the zip64 end record.
const MANY: u64 = 0xffff;

/// The position and the checksum of a record in the file.
#[derive(Clone, Debug)]
pub(crate) struct ZipRecord {
    pub offset: u64,
    pub len: u64,
    pub crc32: u32,
}

/// Returns whether a file that begins with these bytes is a zip archive.
pub(crate) fn is_zip(first_bytes: &[u8]) -> bool {
    first_bytes.starts_with(b"PK\x03\x04")
}

/// Splits a name into the folder and the rest. Returns `None` for a name that could lead outside of the folder.
fn split(name: &str) -> Option<(&str, &str)> {
    let plain = |part: &str| !matches!(part, "" | "." | "..");
    let fine = !name.contains(['\\', '\0']) && name.split('/').all(plain);
    name.split_once('/').filter(|_| fine)
}

/// The directory, as the end of an archive describes it.
struct Directory {
    count: u64,
    /// Its place in the file.
    place: Range<u64>,
    /// How many bytes precede the archive in the file.
    before: u64,
}

/// A record, as the directory describes it.
struct Listed {
    name: String,
    flags: u16,
    method: u16,
    crc32: u32,
    compressed: u64,
    len: u64,
    /// The position of its local header in the file.
    header: u64,
}

/// Finds the records. Returns them by their names, without the folder that all of them are in.
pub(crate) fn records<R: Read + Seek>(
    file: &mut R,
    max_records: usize,
) -> Result<BTreeMap<String, ZipRecord>, Malformed> {
    let directory = directory(file)?;
    if directory.count > max_records as u64 {
        return Err(Malformed::TooMuch { what: "records", limit: max_records as u64 });
    }
    let mut folder = None;
    let mut records = BTreeMap::new();
    let mut spans = Vec::new();
    for entry in entries(file, &directory)? {
        let refuse = |problem: &str| Malformed::Record {
            name: shown(&entry.name),
            problem: problem.to_owned(),
        };
        let Some((top, rest)) = split(&entry.name) else {
            return Err(refuse("does not have a name of the form folder/name"));
        };
        if *folder.get_or_insert_with(|| top.to_owned()) != top {
            return Err(refuse("is not in the same folder as the others"));
        }
        let Some(offset) = data_start(file, entry.header)? else {
            return Err(refuse("has no data"));
        };
        spans.push(entry.header..offset.saturating_add(entry.compressed));
        if entry.flags & ENCRYPTED != 0 {
            return Err(refuse("is encrypted"));
        }
        if entry.method != STORED {
            // TorchScript compresses its code, which this crate does not read.
            if rest.starts_with("code/") {
                continue;
            }
            return Err(refuse("is compressed; PyTorch stores records as they are"));
        }
        if entry.len != entry.compressed {
            return Err(refuse("is stored, but has two sizes"));
        }
        let record = ZipRecord { offset, len: entry.len, crc32: entry.crc32 };
        if records.insert(rest.to_owned(), record).is_some() {
            return Err(Malformed::Archive("two of its records have the same name".to_owned()));
        }
    }
    spans.sort_unstable_by_key(|span| span.start);
    let ends = spans.iter().map(|span| span.end);
    let next = spans.iter().skip(1).map(|span| span.start).chain([directory.place.start]);
    if ends.zip(next).any(|(end, next)| end > next) {
        let problem = "its records overlap, or reach beyond its end";
        return Err(Malformed::Archive(problem.to_owned()));
    }
    Ok(records)
}

fn refuse(problem: &str) -> Malformed {
    Malformed::Archive(problem.to_owned())
}

/// Finds the directory. Other bytes may precede the archive and follow it.
///
/// A zip64 archive has the numbers in its zip64 end record, right before the locator and the end record, where all
/// writers put them; it is an error if they are elsewhere.
fn directory<R: Read + Seek>(file: &mut R) -> Result<Directory, Malformed> {
    let len = file.seek(SeekFrom::End(0))?;
    let start = len.saturating_sub(TAIL);
    file.seek(SeekFrom::Start(start))?;
    let mut tail = Vec::new();
    file.by_ref().take(TAIL).read_to_end(&mut tail)?;
    let mut places = (0..(tail.len() + 1).saturating_sub(END_BYTES)).rev();
    let end = places.find(|&at| tail[at..].starts_with(END));
    let end = end.ok_or_else(|| refuse("it has no end record"))?;
    let locator = end.checked_sub(LOCATOR_BYTES).filter(|&at| tail[at..].starts_with(LOCATOR));
    let (end, count, size, offset) = match locator {
        Some(locator) => {
            let end64 = locator.checked_sub(END64_BYTES);
            let end64 = end64.filter(|&at| {
                tail[at..].starts_with(END64) && number(&tail, locator + 8, 8) == start + at as u64
            });
            let at = end64.ok_or_else(|| refuse("its zip64 end is not where it should be"))?;
            (at, number(&tail, at + 32, 8), number(&tail, at + 40, 8), number(&tail, at + 48, 8))
        }
        None => (
            end,
            number(&tail, end + 10, 2),
            number(&tail, end + 12, 4),
            number(&tail, end + 16, 4),
        ),
    };
    let end = start + end as u64;
    let place = end.checked_sub(size).map(|start| start..end);
    let place = place.ok_or_else(|| refuse("its directory is longer than the file"))?;
    let before = place.start.checked_sub(offset);
    let before = before.ok_or_else(|| refuse("its directory is not where it should be"))?;
    Ok(Directory { count, place, before })
}

/// Reads the directory.
fn entries<R: Read + Seek>(file: &mut R, directory: &Directory) -> Result<Vec<Listed>, Malformed> {
    let Directory { count, place, before } = directory;
    file.seek(SeekFrom::Start(place.start))?;
    let mut rest = BufReader::new(file.take(place.end - place.start));
    let mut entries = Vec::new();
    let mut extra = Vec::new();
    for _ in 0..*count {
        entries.push(entry(&mut rest, &mut extra, *before)?);
    }
    match rest.read(&mut [0])? {
        0 => Ok(entries),
        _ => Err(refuse("its directory has more records than it says")),
    }
}

/// Reads the next entry of the directory. `extra` is memory for its extra fields.
fn entry(directory: &mut impl Read, extra: &mut Vec<u8>, before: u64) -> Result<Listed, Malformed> {
    let mut fixed = [0; ENTRY_BYTES];
    directory.read_exact(&mut fixed)?;
    if !fixed.starts_with(ENTRY) {
        return Err(refuse("its directory is damaged"));
    }
    let size = |at| number(&fixed, at, 2) as usize;
    let mut name = vec![0; size(28)];
    directory.read_exact(&mut name)?;
    // The comment is not used.
    extra.resize(size(30) + size(32), 0);
    directory.read_exact(extra)?;
    let mut wide = zip64(&extra[..size(30)]).chunks_exact(8).map(|bytes| number(bytes, 0, 8));
    let mut size = |at| match number(&fixed, at, 4) {
        ELSEWHERE => wide.next().unwrap_or(ELSEWHERE),
        size => size,
    };
    // In the order of the wide field.
    let (len, compressed, header) = (size(24), size(20), size(42));
    let name = String::from_utf8(name).map_err(|_| refuse("a name in it is not UTF-8"))?;
    Ok(Listed {
        name,
        flags: number(&fixed, 8, 2) as u16,
        method: number(&fixed, 10, 2) as u16,
        crc32: number(&fixed, 16, 4) as u32,
        compressed,
        len,
        header: header.saturating_add(before),
    })
}

/// Returns the extra field with the sizes that are too large for their places.
fn zip64(mut extra: &[u8]) -> &[u8] {
    while let Some((head, rest)) = extra.split_first_chunk::<4>() {
        let len = (number(head, 2, 2) as usize).min(rest.len());
        if number(head, 0, 2) == u64::from(ZIP64) {
            return &rest[..len];
        }
        extra = &rest[len..];
    }
    &[]
}

/// Returns where the data of a record begins, after its local header, which may have other extra fields than the
/// directory. `None` if there is no such header.
fn data_start<R: Read + Seek>(file: &mut R, header: u64) -> Result<Option<u64>, Malformed> {
    let mut fixed = [0; LOCAL_BYTES];
    file.seek(SeekFrom::Start(header))?;
    file.read_exact(&mut fixed)?;
    let len = LOCAL_BYTES as u64 + number(&fixed, 26, 2) + number(&fixed, 28, 2);
    Ok(header.checked_add(len).filter(|_| fixed.starts_with(LOCAL)))
}

/// Returns the number in the `len` bytes from `at` on, of which there are at most eight. Missing bytes count as zero.
fn number(bytes: &[u8], at: usize, len: usize) -> u64 {
    let mut wide = [0; 8];
    let given = bytes.get(at..).unwrap_or_default();
    wide.iter_mut().zip(given.iter().take(len)).for_each(|(to, from)| *to = *from);
    u64::from_le_bytes(wide)
}

/// Reads a record of at most `limit` bytes, and verifies its checksum.
pub(crate) fn read<R: Read + Seek>(
    file: &mut R,
    name: &str,
    record: &ZipRecord,
    limit: u64,
) -> Result<Vec<u8>, Malformed> {
    let refuse = |problem: String| Malformed::Record { name: shown(name), problem };
    if record.len > limit {
        return Err(refuse(format!("has {} bytes, but at most {limit} are allowed", record.len)));
    }
    file.seek(SeekFrom::Start(record.offset))?;
    let mut bytes = Vec::new();
    file.take(record.len).read_to_end(&mut bytes)?;
    if bytes.len() as u64 != record.len {
        return Err(refuse("ends too early".to_owned()));
    }
    // A fuzzer cannot guess checksums.
    if crc32fast::hash(&bytes) != record.crc32 && !cfg!(fuzzing) {
        return Err(refuse("is damaged: its checksum does not match".to_owned()));
    }
    Ok(bytes)
}

/// Writes an archive of a pickle and its storages, given the key and the size in bytes of each. `storage` is called
/// once for each storage, in order, and must write exactly that many bytes.
///
/// The same content always gives the same bytes, which depend neither on the time nor on the system. After an error the
/// output is not a valid archive, because its end is missing.
pub(crate) fn write<W: Write + Seek>(
    out: W,
    pickle: &[u8],
    storages: &[(String, u64)],
    storage: &mut dyn FnMut(usize, &mut dyn Write) -> io::Result<()>,
) -> io::Result<W> {
    let keys: HashSet<_> = storages.iter().map(|(key, _)| key).collect();
    if keys.len() != storages.len() {
        return Err(invalid("two storages have the same key"));
    }
    let mut archive =
        Writer { out, at: 0, directory: Vec::new(), count: 0, version: STORED_VERSION };
    archive.record("data.pkl", pickle.len() as u64, &mut |out| out.write_all(pickle))?;
    archive.record("byteorder", 6, &mut |out| out.write_all(b"little"))?;
    for (index, (key, len)) in storages.iter().enumerate() {
        archive.record(&format!("data/{key}"), *len, &mut |out| storage(index, out))?;
    }
    archive.record("version", 2, &mut |out| out.write_all(b"3\n"))?;
    archive.finish()
}

/// An archive that is being written.
struct Writer<W> {
    out: W,
    /// The position of the next record.
    at: u64,
    directory: Vec<u8>,
    count: u64,
    /// The highest version of its records.
    version: u64,
}

impl<W: Write + Seek> Writer<W> {
    /// Writes a record, with its checksum last, and lists it in the directory.
    fn record(
        &mut self,
        name: &str,
        len: u64,
        fill: &mut dyn FnMut(&mut dyn Write) -> io::Result<()>,
    ) -> io::Result<()> {
        let name = format!("{FOLDER}/{name}");
        if split(&name).is_none() || !name.is_ascii() || name.len() > usize::from(u16::MAX) {
            return Err(invalid(format!("{name:?} cannot be the name of a record")));
        }
        let header = self.at;
        let is_large = len >= LARGE;
        let (version, size) =
            if is_large { (ZIP64_VERSION, ELSEWHERE) } else { (STORED_VERSION, len) };
        let common = |crc32: u32, extra: &[u8]| {
            let start = [(version, 2), (0, 2), (STORED.into(), 2), (0, 2), (DATE, 2)];
            let end = [(size, 4), (size, 4), (name.len() as u64, 2), (extra.len() as u64, 2)];
            [fields(&start), fields(&[(crc32.into(), 4)]), fields(&end)].concat()
        };
        let mut wide = if is_large { vec![len, len] } else { Vec::new() };
        let mut extra = zip64_field(&wide);
        extra.extend(padding(header + (LOCAL_BYTES + name.len() + extra.len()) as u64));
        let local = [LOCAL, &common(0, &extra), name.as_bytes(), &extra].concat();
        self.out.write_all(&local)?;
        let mut data =
            RecordWriter { out: &mut self.out, left: len, checksum: crc32fast::Hasher::new() };
        fill(&mut data)?;
        let RecordWriter { left, checksum, .. } = data;
        if left > 0 {
            return Err(invalid(format!("{left} bytes are missing in {name}")));
        }
        let crc32 = checksum.finalize();
        self.at = header + local.len() as u64 + len;
        self.out.seek(SeekFrom::Start(header + LOCAL_CRC32))?;
        self.out.write_all(&crc32.to_le_bytes())?;
        self.out.seek(SeekFrom::Start(self.at))?;
        if header >= ELSEWHERE {
            wide.push(header);
        }
        let extra = zip64_field(&wide);
        self.directory.extend(ENTRY);
        self.directory.extend(fields(&[(UNIX | version, 2)]));
        self.directory.extend(common(crc32, &extra));
        // No comment, on the first disk, without internal attributes.
        self.directory.extend(fields(&[(0, 6), (ATTRIBUTES, 4), (header.min(ELSEWHERE), 4)]));
        self.directory.extend(name.as_bytes());
        self.directory.extend(extra);
        self.count += 1;
        self.version = self.version.max(version);
        Ok(())
    }

    /// Writes the directory and the end.
    fn finish(mut self) -> io::Result<W> {
        let Self { at, count, version, .. } = self;
        let len = self.directory.len() as u64;
        let mut end = Vec::new();
        let is_wide = count > MANY || at.max(len) > ELSEWHERE;
        if is_wide {
            end.extend(END64);
            end.extend(fields(&[(END64_BYTES as u64 - 12, 8), (version, 2), (version, 2), (0, 8)]));
            end.extend(fields(&[(count, 8), (count, 8), (len, 8), (at, 8)]));
            end.extend(LOCATOR);
            end.extend(fields(&[(0, 4), (at + len, 8), (1, 4)]));
        }
        let short = count.min(MANY);
        let size = if is_wide { ELSEWHERE } else { len };
        end.extend(END);
        end.extend(fields(&[
            (0, 4),
            (short, 2),
            (short, 2),
            (size, 4),
            (at.min(ELSEWHERE), 4),
            (0, 2),
        ]));
        self.out.write_all(&self.directory)?;
        self.out.write_all(&end)?;
        Ok(self.out)
    }
}

/// The data of a record: accepts as many bytes as were announced.
struct RecordWriter<'a, W> {
    out: &'a mut W,
    left: u64,
    checksum: crc32fast::Hasher,
}

impl<W: Write> Write for RecordWriter<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.len() as u64 > self.left {
            return Err(invalid("a storage has more bytes than were announced"));
        }
        let written = self.out.write(bytes)?;
        self.checksum.update(&bytes[..written]);
        self.left -= written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// Returns numbers as bytes, each with the number of bytes that it takes. The counterpart of [`number`].
fn fields(numbers: &[(u64, usize)]) -> Vec<u8> {
    numbers.iter().flat_map(|(number, len)| number.to_le_bytes().into_iter().take(*len)).collect()
}

/// Returns the extra field with 64-bit numbers; nothing without any.
fn zip64_field(numbers: &[u64]) -> Vec<u8> {
    let len = 8 * numbers.len() as u64;
    let head = if numbers.is_empty() { Vec::new() } else { fields(&[(ZIP64.into(), 2), (len, 2)]) };
    head.into_iter().chain(numbers.iter().flat_map(|number| number.to_le_bytes())).collect()
}

/// Returns the extra field that aligns the data after it, given where the field begins.
fn padding(start: u64) -> Vec<u8> {
    let missing = start.next_multiple_of(ALIGNMENT) - start;
    // The shortest field takes six bytes.
    let len = if (1..6).contains(&missing) { missing + ALIGNMENT } else { missing };
    let mut field = fields(&[(PADDING, 2), (len.saturating_sub(4), 2), (ALIGNMENT, 2)]);
    field.resize(len as usize, 0);
    field
}
