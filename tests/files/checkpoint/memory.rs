//! Loading a malicious file takes a small multiple of its size in memory, and no file exhausts the memory.
//!
//! Each large file is loaded by a process of its own with a limited address space. A process that exceeds it is aborted.
#![cfg(target_os = "linux")]

use std::fmt::Write as _;
use std::fs::File;
use std::io::Write as _;
use std::path::Path;
use std::sync::OnceLock;

use tch::Device;
use tch_amp::checkpoint::{Checkpoint, Rng};

use testkit::files::Folder;
use testkit::handmade::{
    archive, archive_of, manifest, metadata, numbered, repeated, safetensors, signed, text,
};
use testkit::programs::this_test_by;
use testkit::{is_set, skipped};

const FILES: &str = "TCH_AMP_HOSTILE_FILES";

/// The address space of a process, in addition to what it has at its start: this multiple of the file's size, and
/// [`BESIDES`] for the two million values that the smallest file may hold.
const FACTOR: u64 = 3;
const BESIDES: u64 = 256 << 20;

const MB: usize = 1_000_000;

/// Run by the other tests, in a process of its own.
#[test]
#[ignore = "loads files for the other tests"]
fn load_files() {
    let files = std::env::var_os(FILES).unwrap_or_default();
    for path in std::env::split_paths(&files).filter(|path| !path.as_os_str().is_empty()) {
        match Checkpoint::load(&path) {
            Ok(checkpoint) => {
                println!("loaded {} parts", checkpoint.names().count());
                use_all(&checkpoint);
            }
            Err(error) => {
                let reason: String = error.to_string().chars().take(200).collect();
                println!("refused: {reason} ({})", path.display());
            }
        }
    }
    println!("peak {}", peak());
}

/// Asks for the tensors of a checkpoint, and for the random numbers, which it does not have.
fn use_all(checkpoint: &Checkpoint) {
    for name in checkpoint.names().take(10) {
        if let Err(error @ tch_amp::Error::Torch(_)) = checkpoint.tensor(name) {
            panic!("{name}: {error}");
        }
        assert!(checkpoint.restore().add(name, Rng(Device::Cpu)).apply().is_err(), "{name}");
    }
}

/// The peak of this process's address space in bytes.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmPeak:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

/// Loads files in a process with this much address space. Returns the output of the process, and its peak.
fn load<P: AsRef<Path>>(paths: &[P], space: u64) -> (String, u64) {
    let paths = std::env::join_paths(paths.iter().map(AsRef::as_ref)).unwrap();
    let kib = (space / 1024).to_string();
    let shell = ["sh", "-c", "ulimit -v $0 && exec \"$@\"", &kib];
    let output = this_test_by(&shell, "checkpoint::memory::load_files")
        .arg("--test-threads=1")
        .env(FILES, &paths)
        // Otherwise each thread would reserve address space of its own.
        .env("MALLOC_ARENA_MAX", "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{}: {said}{errors}", paths.display());
    let line = |start: &str| said.lines().find_map(|line| line.split_once(start));
    let (_, peak) = line("peak ").unwrap();
    (said.clone(), peak.trim().parse().unwrap())
}

/// The peak of a process that loads nothing.
fn start() -> u64 {
    static START: OnceLock<u64> = OnceLock::new();
    *START.get_or_init(|| load::<&Path>(&[], 1 << 46).1)
}

/// Writes a file.
type Write<'a> = &'a dyn Fn(&Path);

/// Loads files one by one within the bound. `is_refused` is the expected outcome.
fn check(is_refused: bool, files: &[(&str, Write<'_>)]) {
    if is_set("TCH_AMP_SHORT") {
        return skipped("files are loaded in little memory with the locked version of tch");
    }
    let folder = Folder::new();
    let start = start();
    for (name, write) in files {
        let path = folder.file(name);
        write(&path);
        let len = std::fs::metadata(&path).unwrap().len();
        let (said, peak) = load(&[&path], start + BESIDES + FACTOR * len);
        println!("{name}: {len} bytes took {}", peak.saturating_sub(start));
        assert_eq!(said.contains("refused: "), is_refused, "{name}: {said}");
        std::fs::remove_file(path).unwrap();
    }
}

fn are_refused(files: &[(&str, Write<'_>)]) {
    check(true, files);
}

fn are_loaded(files: &[(&str, Write<'_>)]) {
    check(false, files);
}

/// Writes a safetensors file with this header and no data.
fn header(path: &Path, header: &str) {
    std::fs::write(path, safetensors(header, 0)).unwrap();
}

/// The parts of a manifest with a list of these items.
fn value(items: &str) -> String {
    format!(r#"{{"a":{{"kind":"value","value":[{items}]}}}}"#)
}

/// A file whose header has no right checksum.
fn with_value(path: &Path, items: &str) {
    header(path, &format!("{{{}}}", metadata(&manifest(&value(items), 0))));
}

fn tensors(path: &Path, shape: &str, bytes: usize) {
    let unit = format!(r##""#":{{"dtype":"U8","shape":[{shape}],"data_offsets":[0,0]}},"##);
    header(path, &format!("{{{}}}", repeated(&unit, bytes)));
}

#[test]
fn hostile_safetensors_headers_take_a_small_multiple_of_memory() {
    let ones = repeated("1,", 80 * MB);
    let name = "x".repeat(80 * MB);
    are_refused(&[
        ("ranks", &|path| tensors(path, &ones, 1)),
        ("tensors", &|path| tensors(path, "0", 80 * MB)),
        ("long shapes", &|path| tensors(path, &repeated("0,", 120), 80 * MB)),
        ("long name", &|path| {
            header(path, &format!(r#"{{"{name}":{{"dtype":"U8","shape":[1]}}}}"#));
        }),
        ("metadata", &|path| header(path, &format!(r#"{{"__metadata__":{{"a":"{name}"}}}}]"#))),
        ("keys", &|path| {
            header(
                path,
                &format!(r#"{{"__metadata__":{{{}}}}}]"#, repeated(r##""#":"","##, 80 * MB)),
            );
        }),
        ("nesting", &|path| header(path, &format!(r#"{{"a":{}"#, "[".repeat(80 * MB)))),
        ("values", &|path| with_value(path, &repeated("1,", 30 * MB))),
        ("lists", &|path| with_value(path, &repeated("[0],", 30 * MB))),
        ("maps", &|path| with_value(path, &repeated(r#"{"":0},"#, 20 * MB))),
        ("lists", &|path| signed_value(path, &repeated("[0],", 30 * MB))),
        ("parts", &|path| signed_models(path, 10 * MB)),
    ]);
}

#[test]
fn large_valid_files_take_a_small_multiple_of_memory() {
    let many: Vec<_> = (0..400_000).map(|n| (f64::from(n), Some(n % 2 == 0))).collect();
    let mut checkpoint = Checkpoint::new();
    checkpoint.add_value("many", &many).unwrap();
    checkpoint.add_value("text", &"x".repeat(20 * MB)).unwrap();
    let save = |path: &Path| checkpoint.save(path).unwrap();
    are_loaded(&[
        ("values.safetensors", &save),
        ("values.pt", &save),
        ("names", &|path| tensors(path, &repeated("0,", 120), 40 * MB)),
        ("records.pt", &|path| records(path, b"\x80\x02}.", 200_000)),
    ]);
}

/// An archive with this pickle and `count` empty records.
fn records(path: &Path, pickle: &[u8], count: usize) {
    std::fs::write(path, archive_of(pickle, count)).unwrap();
}

/// A pickle of a list of about `bytes` bytes, made of repetitions of `unit`.
fn list(path: &Path, unit: &[u8], bytes: usize) {
    let body = unit.repeat(bytes / unit.len());
    records(path, &[b"\x80\x02](", &body[..], b"e."].concat(), 0);
}

#[test]
fn hostile_pickles_take_a_small_multiple_of_memory() {
    let long = |len: usize| text(&"x".repeat(len));
    let recalled = [long(MB), b"q\x00".to_vec(), b"h\x00".repeat(200)].concat();
    let memo = numbered(b'r', 10 * MB as u32);
    are_refused(&[
        ("nones", &|path| list(path, b"N", 90 * MB)),
        ("nones within bounds", &|path| list(path, b"N", 19 * MB / 10)),
        ("lists", &|path| list(path, b"]", 90 * MB)),
        ("lists of one", &|path| list(path, b"]Na", 90 * MB)),
        ("dicts", &|path| list(path, b"}NNs", 90 * MB)),
        ("dicts within bounds", &|path| list(path, b"}NNs", 4 * MB)),
        ("texts", &|path| list(path, b"X\x03\0\0\0abc", 90 * MB)),
        ("a long text", &|path| list(path, &long(90 * MB), 91 * MB)),
        ("a text again and again", &|path| list(path, &recalled, recalled.len())),
        ("tuples", &|path| list(path, b"N\x85", 90 * MB)),
        ("memo", &|path| list(path, &[b"N".as_slice(), &memo].concat(), 50 * MB + 1)),
        ("names", &|path| list(path, b"ctorch\nfloat16\n", 90 * MB)),
        ("unknown names", &|path| list(path, b"ca\nb\n", 90 * MB)),
        ("unknown names within bounds", &|path| list(path, b"ca\nb\n", 9 * MB)),
        ("marks", &|path| list(path, b"(", 90 * MB)),
        ("pairs again and again", &|path| {
            let pairs = [b"](".as_slice(), &b"](NNe".repeat(300_000)];
            let again = b"ccollections\nOrderedDict\nh\x00\x85R".repeat(1000);
            list(path, &[&pairs.concat(), b"eq\x00".as_slice(), &again].concat(), 8 * MB);
        }),
        ("records", &|path| records(path, b"\x80\x02}.", 270_000)),
        ("records within bounds", &|path| records(path, b"\x80\x02N.", 262_000)),
    ]);
}

/// An archive with an empty dict and `count` empty records, each with this name after the folder and these extra fields
/// in the directory. Written by hand, because the zip crate writes no such fields.
fn directory(path: &Path, count: usize, name: &dyn Fn(usize) -> Vec<u8>, extra: &[u8]) {
    let mut file = std::io::BufWriter::new(File::create(path).unwrap());
    let (mut at, mut entries) = (0u32, Vec::new());
    for index in 0..=count {
        let (name, data): (_, &[u8]) = match index {
            0 => (b"data.pkl".to_vec(), b"\x80\x02}."),
            index => (name(index), b""),
        };
        let name = [b"a/", &name[..]].concat();
        let (size, crc) = (data.len() as u32, crc32fast::hash(data));
        // The version, the flag for names in UTF-8, the method, the time and the date.
        let common = [10u16, 1 << 11, 0, 0, 0].map(u16::to_le_bytes).concat();
        let sizes = [crc, size, size].map(u32::to_le_bytes).concat();
        let common = [&common[..], &sizes, &(name.len() as u16).to_le_bytes()].concat();
        let local = [b"PK\x03\x04", &common[..], &[0; 2], &name, data].concat();
        file.write_all(&local).unwrap();
        let extra = if index == 0 { b"" } else { extra };
        entries.extend(b"PK\x01\x02\x0a\0");
        entries.extend(&common);
        entries.extend((extra.len() as u16).to_le_bytes());
        // The comment, the disk and the attributes.
        entries.extend([0; 10]);
        entries.extend(at.to_le_bytes());
        entries.extend(&name);
        entries.extend(extra);
        at += local.len() as u32;
    }
    file.write_all(&entries).unwrap();
    let counts = [0u16, 0, (count + 1) as u16, (count + 1) as u16].map(u16::to_le_bytes).concat();
    let place = [entries.len() as u32, at].map(u32::to_le_bytes).concat();
    file.write_all(&[b"PK\x05\x06", &counts[..], &place, &[0; 2]].concat()).unwrap();
    file.flush().unwrap();
}

#[test]
fn hostile_directories_take_a_small_multiple_of_memory() {
    let record = |index: usize| format!("data/{index}").into_bytes();
    let long = |fill: &[u8], index: usize| {
        [format!("data/{index}/").as_bytes(), &fill.repeat(60_000 / fill.len())].concat()
    };
    are_loaded(&[
        ("one-byte extras.pt", &|path| {
            directory(path, 1600, &record, &b"\xfe\xca\x01\0\0".repeat(13_000));
        }),
        ("empty extras.pt", &|path| {
            directory(path, 1600, &record, &b"\xfe\xca\0\0".repeat(16_000));
        }),
        ("small extras.pt", &|path| {
            directory(path, 60_000, &record, &b"\xfe\xca\0\0".repeat(400));
        }),
        ("long names.pt", &|path| {
            directory(path, 1600, &|index| long("ä".as_bytes(), index), b"");
        }),
    ]);
    are_refused(&[("names in another encoding.pt", &|path| {
        directory(path, 1600, &|index| long(b"\xe4", index), b"");
    })]);
}

/// What names the storage in the record `0`, of bytes.
fn storage() -> Vec<u8> {
    [&text("storage")[..], b"ctorch\nByteStorage\n", &text("0"), &text("cpu")].concat()
}

/// What makes an empty tensor, with the function memorized as 1, its arguments as 2 and the tensor as 0.
fn memorized_tensor() -> Vec<u8> {
    [
        b"ctorch._utils\n_rebuild_tensor_v2\nq\x01((",
        &storage()[..],
        b"K\0tQK\0K\0\x85K\x01\x85\x89ccollections\nOrderedDict\n)Rtq\x02Rq\0",
    ]
    .concat()
}

/// An optimizer with `states` parameters of which each has a `value` as its state, in a group of `listed` ones.
fn optimizer(path: &Path, options: &[(&str, &[u8])], value: &[u8], states: u32, listed: u32) {
    let number = |number: u32| [b"J".as_slice(), &number.to_le_bytes()].concat();
    let state: Vec<u8> =
        (0..states).flat_map(|n| [&number(n)[..], b"}h\x03", value, b"s"].concat()).collect();
    let params = numbered(b'J', listed);
    let options: Vec<u8> =
        options.iter().flat_map(|(name, value)| [&text(name)[..], value].concat()).collect();
    let group = [&options[..], &text("params"), b"](", &params, b"e"].concat();
    let pickle = [
        b"\x80\x02}(".as_slice(),
        &text("first"),
        &memorized_tensor(),
        &text("name"),
        &text("step"),
        b"q\x03",
        &text("opt"),
        b"}(",
        &text("state"),
        b"}(",
        &state,
        b"u",
        &text("param_groups"),
        b"](}(",
        &group,
        b"ueuu.",
    ];
    records(path, &pickle.concat(), 1);
}

#[test]
fn hostile_optimizers_and_tensors_take_a_small_multiple_of_memory() {
    let zero = b"G\0\0\0\0\0\0\0\0".as_slice();
    let adam = [
        ("lr", zero),
        ("betas", b"G\0\0\0\0\0\0\0\0G\0\0\0\0\0\0\0\0\x86".as_slice()),
        ("eps", zero),
        ("weight_decay", zero),
        ("amsgrad", b"\x89"),
        ("maximize", b"\x89"),
    ];
    let recalled = |unit: &'static [u8], times: usize| {
        move |path: &Path| {
            let tensor = memorized_tensor();
            let list = [b"](", &unit.repeat(times)[..], b"e"].concat();
            let items = [&text("a")[..], &tensor, &text("b"), &list].concat();
            records(path, &[b"\x80\x02}(", &items[..], b"u."].concat(), 1);
        }
    };
    are_loaded(&[
        ("states within bounds.pt", &|path| optimizer(path, &adam, b"h\0", 100_000, 100_000)),
        ("parameters within bounds.pt", &|path| optimizer(path, &adam, b"h\0", 1000, 260_000)),
        ("numbers within bounds.pt", &|path| optimizer(path, &adam, b"K\x01", 260_000, 260_000)),
        ("numbers.pt", &|path| optimizer(path, &adam, b"K\x01", 330_000, 330_000)),
        ("parameters.pt", &|path| optimizer(path, &adam, b"h\0", 1000, 1_800_000)),
        ("a tensor within bounds.pt", &recalled(b"h\0", 130_000)),
    ]);
    are_refused(&[
        ("states.pt", &|path| optimizer(path, &adam, b"h\0", 280_000, 280_000)),
        ("a tensor again and again.pt", &recalled(b"h\0", 660_000)),
        ("tensors.pt", &recalled(b"h\x01h\x02R", 660_000)),
    ]);
}

/// A safetensors file of this crate with the right checksum of its header, and with tensors of no elements.
fn ours(path: &Path, parts: &str, tensors: usize, name: &dyn Fn(usize) -> String) {
    let mut text = format!("{{{}", metadata(&manifest(parts, tensors)));
    for index in 0..tensors {
        let name = name(index);
        write!(text, r#","{name}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}"#).unwrap();
    }
    text.push('}');
    header(path, &signed(&text));
}

/// The same without tensors.
fn signed_parts(path: &Path, parts: &str) {
    ours(path, parts, 0, &|_| String::new());
}

fn signed_value(path: &Path, items: &str) {
    signed_parts(path, &value(items));
}

fn signed_models(path: &Path, bytes: usize) {
    let parts = repeated(r##""#":{"kind":"model"},"##, bytes);
    signed_parts(path, &format!("{{{parts}}}"));
}

#[test]
fn hostile_values_of_safetensors_take_a_small_multiple_of_memory() {
    are_loaded(&[
        ("lists within bounds", &|path| signed_value(path, &repeated("[0],", 4 * MB - 1000))),
        ("maps within bounds", &|path| signed_value(path, &repeated(r#"{"":0},"#, 4 * MB))),
        ("parts within bounds", &|path| signed_models(path, 2 * MB)),
    ]);
}

#[test]
fn hostile_parts_of_safetensors_take_a_small_multiple_of_memory() {
    let group = |params: &str| {
        format!(
            r#"{{"a":{{"kind":"optimizer","param_groups":[{{"params":[{params}],"algorithm":"Sgd","lr":0.1,"momentum":0.0,"dampening":0.0,"weight_decay":0.0,"nesterov":false,"maximize":false}}]}}}}"#
        )
    };
    let names = repeated(r##""#","##, 8 * MB);
    are_refused(&[
        // The checksums of empty tensors are not zero, which is noticed after the parts were made.
        ("states", &|path| ours(path, &group(""), 262_000, &|index| format!("a/{index}/x"))),
        ("a model", &|path| {
            ours(path, r#"{"a":{"kind":"model"}}"#, 262_000, &|index| format!("a/{index}"));
        }),
    ]);
    are_loaded(&[("parameters", &|path| signed_parts(path, &group(&names)))]);
}

/// Every seed of the fuzzer. Each is so small that all of them have the memory of the largest.
#[test]
fn small_files_take_little_memory() {
    let seeds = testkit::python::root().join("fuzz/seeds");
    // Those of `folder` are several files in one.
    let folders = ["safetensors", "torch"].map(|kind| seeds.join(kind));
    let files = folders.into_iter().flat_map(|folder| std::fs::read_dir(folder).unwrap());
    let files: Vec<_> = files.map(|file| file.unwrap().path()).collect();
    let largest = files.iter().map(|path| std::fs::metadata(path).unwrap().len()).max().unwrap();
    let (said, _) = load(&files, start() + BESIDES + FACTOR * largest);
    assert_eq!(said.matches("loaded").count(), files.len(), "{said}");
}

/// An expanded tensor of a small file has a GiB of elements, and the file has one.
#[test]
fn an_expanded_tensor_takes_no_more_memory_than_its_file() {
    are_loaded(&[("expanded.pt", &|path| {
        let tensor = [
            b"ctorch._utils\n_rebuild_tensor_v2\n((",
            &storage()[..],
            b"K\x01tQK\0J\0\0\0\x40\x85K\0\x85\x89ccollections\nOrderedDict\n)RtR",
        ]
        .concat();
        let pickle = [b"\x80\x02}", &text("rng")[..], &tensor, b"s."].concat();
        let records = archive(&[("a/data.pkl", &pickle), ("a/data/0", b"x")]);
        std::fs::write(path, records).unwrap();
    })]);
}

/// A dict of many entries that are not supported, each of which would be a part of its own.
fn unsupported_entries(count: usize, is_at_the_top: bool) -> Vec<u8> {
    let entries = (0..count).flat_map(|n| [&text(&format!("{n:08}"))[..], b"\x8f"].concat());
    let entries: Vec<u8> = entries.collect();
    match is_at_the_top {
        true => [b"\x80\x04}(".as_slice(), &entries, b"u."].concat(),
        false => [b"\x80\x04}X\x01\0\0\0a}(".as_slice(), &entries, b"us."].concat(),
    }
}

/// A file in the format before PyTorch 1.6, with these pickles of the object and of the keys of its storages.
fn old(path: &Path, object: &[u8], keys: &[u8]) {
    let mark = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.".as_slice();
    let facts = b"\x80\x02}X\x0d\0\0\0little_endian\x88s.".as_slice();
    std::fs::write(path, [mark, b"\x80\x02M\xe9\x03.", facts, object, keys].concat()).unwrap();
}

fn index(path: &Path, bytes: usize) {
    let names = repeated(r##""#":"x","##, bytes);
    std::fs::write(path, format!(r#"{{"weight_map":{{{names}}}}}"#)).unwrap();
}

#[test]
fn other_hostile_files_of_python_take_a_small_multiple_of_memory() {
    let nones =
        [b"\x80\x02}X\x01\0\0\0a](".as_slice(), &b"N".repeat(19 * MB / 10), b"es."].concat();
    let entry = b"\x80\x02}X\x01\0\0\0a](X\x20\0\0\0".as_slice();
    let recalled = [entry, &[b'x'; 32], b"q\x00", &b"h\x00".repeat(19 * MB / 10), b"es."].concat();
    let long = [b"\x80\x02](".as_slice(), &b"X\x01\0\0\x000".repeat(12 * MB / 10), b"e."].concat();
    are_loaded(&[
        ("unsupported entries", &|path| records(path, &unsupported_entries(90_000, false), 0)),
        ("many unsupported entries", &|path| {
            records(path, &unsupported_entries(600_000, false), 0)
        }),
        ("values in the old format", &|path| old(path, &nones, b"\x80\x02].")),
        ("a short text again and again", &|path| records(path, &recalled, 0)),
    ]);
    are_refused(&[
        ("many entries", &|path| records(path, &unsupported_entries(600_000, true), 0)),
        ("keys in the old format", &|path| old(path, &nones, &long)),
        ("an index", &|path| index(path, 40 * MB)),
        ("an index within bounds", &|path| index(path, 2 * MB)),
    ]);
}
