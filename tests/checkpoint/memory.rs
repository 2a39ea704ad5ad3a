//! Loading a malicious file takes a small multiple of its size in memory, and no file exhausts the memory.
//!
//! Each file is loaded by a process of its own with a limited address space. A process that exceeds it is aborted.
#![cfg(target_os = "linux")]

use std::fmt::Write as _;
use std::fs::File;
use std::io::Write as _;
use std::path::Path;
use std::process::Command;

use tch_amp::checkpoint::Checkpoint;
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipWriter};

use crate::common::files::Folder;

const FILE: &str = "TCH_AMP_HOSTILE_FILE";

/// The address space of a process, in addition to what it has at its start: this multiple of the file's size, and
/// [`BESIDES`] for the two million values that the smallest file may hold.
const FACTOR: u64 = 3;
const BESIDES: u64 = 256 << 20;

const MB: usize = 1_000_000;

/// Run by the other tests, in a process of its own.
#[test]
#[ignore = "loads one file for the other tests"]
fn load_one_file() {
    if let Some(path) = std::env::var_os(FILE).filter(|path| !path.is_empty()) {
        match Checkpoint::load(path) {
            Ok(checkpoint) => println!("loaded {} parts", checkpoint.names().count()),
            Err(error) => {
                println!("refused: {}", error.to_string().chars().take(200).collect::<String>())
            }
        }
    }
    println!("peak {}", peak());
}

/// The peak of this process's address space in bytes.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmPeak:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

/// Loads a file in a process with this much address space. Returns the output of the process, and its peak.
fn load(path: &Path, space: u64) -> (String, u64) {
    let output = Command::new("sh")
        .args(["-c", "ulimit -v $0 && exec \"$@\"", &(space / 1024).to_string()])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "memory::load_one_file", "--ignored", "--nocapture", "--test-threads=1"])
        .env(FILE, path)
        // Otherwise each thread would reserve address space of its own.
        .env("MALLOC_ARENA_MAX", "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{}: {said}{errors}", path.display());
    let line = |start: &str| said.lines().find_map(|line| line.split_once(start));
    let (_, peak) = line("peak ").unwrap();
    (said.clone(), peak.trim().parse().unwrap())
}

/// Writes a file.
type Write<'a> = &'a dyn Fn(&Path);

/// Loads files one by one within the bound. `is_refused` is the expected outcome.
fn check(is_refused: bool, files: &[(&str, Write<'_>)]) {
    let folder = Folder::new();
    let (_, start) = load(Path::new(""), 1 << 46);
    for (name, write) in files {
        let path = folder.file(name);
        write(&path);
        let len = std::fs::metadata(&path).unwrap().len();
        let (said, peak) = load(&path, start + BESIDES + FACTOR * len);
        println!("{name}: {len} bytes took {}", peak.saturating_sub(start));
        assert_eq!(said.contains("refused: "), is_refused, "{name}: {said}");
        std::fs::remove_file(path).unwrap();
    }
}

/// Writes a safetensors file with this header and no data.
fn header(path: &Path, header: &str) {
    let mut file = File::create(path).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
}

/// `unit` repeated up to about `bytes` bytes, with a running number for each `#`.
fn repeated(unit: &str, bytes: usize) -> String {
    let mut text = String::with_capacity(bytes + 2 * unit.len() + 20);
    for count in 0.. {
        for piece in unit.split_inclusive('#') {
            match piece.strip_suffix('#') {
                Some(piece) => write!(text, "{piece}{count:x}").unwrap(),
                None => text.push_str(piece),
            }
        }
        if text.len() >= bytes {
            break;
        }
    }
    text.truncate(text.trim_end_matches(',').len());
    text
}

fn with_manifest(path: &Path, inner: &str) {
    let parts = format!(r#"{{"format":1,"writer":"","checksum":"{:016}",{inner}}}"#, 0);
    let text = serde_json::to_string(&parts).unwrap();
    header(path, &format!(r#"{{"__metadata__":{{"tch_amp":{text}}}}}"#));
}

fn with_value(path: &Path, value: &str) {
    with_manifest(
        path,
        &format!(r#""checksums":[],"parts":{{"a":{{"kind":"value","value":[{value}]}}}}"#),
    );
}

fn tensors(path: &Path, shape: &str, bytes: usize) {
    let unit = format!(r##""#":{{"dtype":"U8","shape":[{shape}],"data_offsets":[0,0]}},"##);
    header(path, &format!("{{{}}}", repeated(&unit, bytes)));
}

#[test]
fn hostile_safetensors_headers_take_a_small_multiple_of_memory() {
    let ones = repeated("1,", 80 * MB);
    let name = "x".repeat(80 * MB);
    check(
        true,
        &[
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
            ("lists within bounds", &|path| with_value(path, &repeated("[0],", 4 * MB - 1000))),
            ("maps within bounds", &|path| with_value(path, &repeated(r#"{"":0},"#, 4 * MB))),
            ("parts", &|path| {
                let parts = repeated(r##""#":{"kind":"model"},"##, 10 * MB);
                with_manifest(path, &format!(r#""checksums":[],"parts":{{{parts}}}"#));
            }),
            ("groups", &|path| {
                let names = repeated(r#""","#, 5 * MB);
                let part =
                    format!(r#"{{"kind":"optimizer","param_groups":[{{"params":[{names}]}}]}}"#);
                with_manifest(path, &format!(r#""checksums":[],"parts":{{"a":{part}}}"#));
            }),
        ],
    );
}

#[test]
fn large_valid_files_take_a_small_multiple_of_memory() {
    let many: Vec<_> = (0..400_000).map(|n| (f64::from(n), Some(n % 2 == 0))).collect();
    let save = |path: &Path| {
        let mut checkpoint = Checkpoint::new();
        checkpoint.add_value("many", &many).unwrap();
        checkpoint.add_value("text", &"x".repeat(20 * MB)).unwrap();
        checkpoint.save(path).unwrap();
    };
    check(
        false,
        &[
            ("values.safetensors", &save),
            ("values.pt", &save),
            ("names", &|path| tensors(path, &repeated("0,", 120), 40 * MB)),
            ("records.pt", &|path| records(path, b"\x80\x02}.", 200_000)),
        ],
    );
}

/// An archive with this pickle and `count` empty records.
fn records(path: &Path, pickle: &[u8], count: usize) {
    let mut zip = ZipWriter::new(std::io::BufWriter::new(File::create(path).unwrap()));
    let options = SimpleFileOptions::default().compression_method(CompressionMethod::Stored);
    zip.start_file("a/data.pkl", options).unwrap();
    zip.write_all(pickle).unwrap();
    for record in 0..count {
        zip.start_file(format!("a/data/{record}"), options).unwrap();
    }
    drop(zip.finish().unwrap());
}

/// A pickle of a list of about `bytes` bytes, made of repetitions of `unit`.
fn list(path: &Path, unit: &[u8], bytes: usize) {
    let body = unit.repeat(bytes / unit.len());
    records(path, &[b"\x80\x02](", &body[..], b"e."].concat(), 0);
}

#[test]
fn hostile_pickles_take_a_small_multiple_of_memory() {
    let text = |len: usize| {
        let len_bytes = u32::try_from(len).unwrap().to_le_bytes();
        [b"X".as_slice(), &len_bytes, &vec![b'x'; len]].concat()
    };
    let recalled = [text(MB), b"q\x00".to_vec(), b"h\x00".repeat(200)].concat();
    let memo: Vec<u8> = (0..u32::try_from(10 * MB).unwrap())
        .flat_map(|at| [b"r".as_slice(), &at.to_le_bytes()].concat())
        .collect();
    check(
        true,
        &[
            ("nones", &|path| list(path, b"N", 90 * MB)),
            ("nones within bounds", &|path| list(path, b"N", 19 * MB / 10)),
            ("lists", &|path| list(path, b"]", 90 * MB)),
            ("lists of one", &|path| list(path, b"]Na", 90 * MB)),
            ("dicts", &|path| list(path, b"}NNs", 90 * MB)),
            ("dicts within bounds", &|path| list(path, b"}NNs", 4 * MB)),
            ("texts", &|path| list(path, b"X\x03\0\0\0abc", 90 * MB)),
            ("a long text", &|path| list(path, &text(90 * MB), 91 * MB)),
            ("a text again and again", &|path| list(path, &recalled, recalled.len())),
            ("tuples", &|path| list(path, b"N\x85", 90 * MB)),
            ("memo", &|path| list(path, &[b"N".as_slice(), &memo].concat(), 50 * MB + 1)),
            ("names", &|path| list(path, b"ctorch\nfloat16\n", 90 * MB)),
            ("records", &|path| records(path, b"\x80\x02}.", 270_000)),
            ("records within bounds", &|path| records(path, b"\x80\x02N.", 262_000)),
        ],
    );
}
