//! A file that differs from what was saved is refused quickly and without a panic.

use std::path::Path;

use tch::Device;
use tch_amp::checkpoint::{Checkpoint, CheckpointError};

use crate::checkpoint::{Run, checkpoint_error};
use testkit::files::Folder;
use testkit::handmade::{manifest, metadata, safetensors};
use testkit::rng::Rng;

fn bytes_of_a_checkpoint() -> Vec<u8> {
    bytes_of(&mut trained(), "x.safetensors")
}

fn trained() -> Run {
    let mut run = Run::new(Device::Cpu);
    run.train(2);
    run
}

fn bytes_of(run: &mut Run, name: &str) -> Vec<u8> {
    let folder = Folder::new();
    run.checkpoint().save(folder.file(name)).unwrap();
    std::fs::read(folder.file(name)).unwrap()
}

fn load(path: &Path, bytes: &[u8]) -> Result<Checkpoint, CheckpointError> {
    std::fs::write(path, bytes).unwrap();
    Checkpoint::load(path).map_err(|error| checkpoint_error::<()>(Err(error)))
}

/// Asserts that a file of these bytes is refused as damaged.
#[track_caller]
fn assert_damaged(path: &Path, bytes: &[u8], what: &str) {
    let refused = load(path, bytes);
    assert!(matches!(refused, Err(CheckpointError::Damaged { .. })), "{what}: {refused:?}");
}

/// Asserts that no part from the start of a file is taken for the whole of it.
fn assert_not_cut(path: &Path, bytes: &[u8]) {
    for len in 0..bytes.len() {
        assert_damaged(path, &bytes[..len], &format!("cut to {len} bytes"));
    }
}

#[test]
fn every_flipped_byte_is_detected() {
    let (_folder, path) = Folder::with("x.safetensors");
    let mut bytes = bytes_of_a_checkpoint();
    load(&path, &bytes).unwrap();
    for place in 0..bytes.len() {
        for flip in [0x01, 0x20, 0x80, 0xff] {
            bytes[place] ^= flip;
            let error = load(&path, &bytes).expect_err("a flipped byte");
            let found =
                matches!(error, CheckpointError::Damaged { .. } | CheckpointError::Newer { .. });
            assert!(found, "byte {place}: {error}");
            bytes[place] ^= flip;
        }
    }
}

/// A zip archive states some facts twice, and a reader uses one of the two.
#[test]
fn a_flipped_or_truncated_file_of_pytorch_is_refused_or_correct() {
    let (_folder, path) = Folder::with("x.pt");
    let mut run = trained();
    let mut bytes = bytes_of(&mut run, "x.pt");
    let (right, mut other) = (run.fingerprint(), Run::new(Device::Cpu));
    let mut accepted = 0;
    for place in 0..bytes.len() {
        for flip in [0x01, 0xff] {
            bytes[place] ^= flip;
            match load(&path, &bytes) {
                // A part may have another name now, and is then missing.
                Ok(checkpoint) => {
                    if other.restore(&checkpoint).is_ok() {
                        assert_eq!(other.fingerprint(), right, "byte {place} by {flip}");
                        accepted += 1;
                    }
                }
                Err(CheckpointError::Damaged { .. }) => {}
                Err(error) => panic!("byte {place} by {flip}: {error}"),
            }
            bytes[place] ^= flip;
        }
    }
    // Flips in padding, timestamps and the like are accepted, but they are fewer than half of all.
    assert!(accepted < bytes.len(), "{accepted} of {}", bytes.len() * 2);
    assert_not_cut(&path, &bytes);
}

/// Including the records that only PyTorch reads, such as `version`.
#[test]
fn every_record_of_a_file_of_pytorch_is_checked() {
    let (_folder, path) = Folder::with("x.pt");
    let mut bytes = bytes_of(&mut trained(), "x.pt");
    let mut archive = zip::ZipArchive::new(std::io::Cursor::new(bytes.clone())).unwrap();
    let mut names = Vec::new();
    for index in 0..archive.len() {
        let record = archive.by_index_raw(index).unwrap();
        let name = record.name();
        let (first, size) = (record.data_start().unwrap() as usize, record.size() as usize);
        for place in [first, first + size / 2, first + size - 1] {
            bytes[place] ^= 1;
            assert_damaged(&path, &bytes, name);
            bytes[place] ^= 1;
        }
        names.extend(name.rsplit('/').next().map(str::to_owned));
    }
    for name in ["data.pkl", "version", "byteorder", "0"] {
        assert!(names.iter().any(|known| known == name), "{name} is not among {names:?}");
    }
}

#[test]
fn every_truncation_is_detected() {
    let (_folder, path) = Folder::with("x.safetensors");
    let bytes = bytes_of_a_checkpoint();
    assert_not_cut(&path, &bytes);
    assert_damaged(&path, &[&bytes[..], &[0]].concat(), "a byte more");
}

#[test]
fn random_damage_is_detected() {
    let (_folder, path) = Folder::with("x.safetensors");
    let bytes = bytes_of_a_checkpoint();
    let mut rng = Rng::new(5);
    for _ in 0..2000 {
        let mut changed = bytes.clone();
        match rng.below(3) {
            0 => {
                (0..=rng.below(8)).for_each(|_| changed[rng.below(bytes.len())] ^= rng.next() as u8)
            }
            1 => {
                let (from, to) = (rng.below(bytes.len()), rng.below(bytes.len()));
                let len = rng.below(bytes.len() - from.max(to)) + 1;
                changed.copy_within(from..from + len, to);
            }
            _ => {
                let (from, len) = (rng.below(bytes.len()), rng.below(64));
                drop(changed.drain(from..bytes.len().min(from + len)));
            }
        }
        if changed != bytes {
            drop(load(&path, &changed).expect_err("a damaged file"));
        }
    }
}

#[test]
fn hostile_headers_are_refused() {
    let (_folder, path) = Folder::with("x.safetensors");
    let tensor = |name: &str, shape: &str, from: u64, to: u64| {
        format!(r#""{name}":{{"dtype":"F32","shape":{shape},"data_offsets":[{from},{to}]}}"#)
    };
    let object = |inner: &[String]| format!("{{{}}}", inner.join(","));
    let good = tensor("a", "[2]", 0, 8);
    let ours = |manifest: &str| object(&[metadata(manifest)]);
    let part = |part: &str| ours(&manifest(&format!(r#"{{"a":{part}}}"#), 0));
    let deep = "[".repeat(100_000);
    // On its own it would be refused for its version.
    let newer = r#""tch_amp":"{\"format\":2}""#;
    let hostile = [
        ("overlapping", object(&[good.clone(), tensor("b", "[2]", 4, 12)]), 12),
        ("a hole", object(&[good.clone(), tensor("b", "[2]", 12, 20)]), 20),
        ("the same name", object(&[good.clone(), good.clone()]), 8),
        ("an empty twin", object(&[tensor("b", "[0]", 0, 0), tensor("b", "[0,2]", 0, 0)]), 0),
        ("a wrong shape", object(&[tensor("a", "[3]", 0, 8)]), 8),
        ("a huge shape", object(&[tensor("a", "[4611686018427387904,4]", 0, 0)]), 0),
        ("a huge shape with a zero", object(&[tensor("a", "[0,4611686018427387904,4]", 0, 0)]), 0),
        ("many dimensions", object(&[tensor("a", &format!("{:?}", vec![1; 65]), 0, 4)]), 4),
        ("a negative shape", object(&[tensor("a", "[-2]", 0, 8)]), 8),
        ("offsets backwards", object(&[tensor("a", "[2]", 8, 0)]), 8),
        ("too little data", object(std::slice::from_ref(&good)), 7),
        ("too much data", object(std::slice::from_ref(&good)), 9),
        (
            "offsets backwards of an unknown dtype",
            object(&[tensor("a", "[2]", 8, 0).replace("F32", "F33")]),
            8,
        ),
        ("a dtype without a name", object(&[good.replace("\"F32\"", "5")]), 8),
        ("no object", "[]      ".to_owned(), 0),
        ("deep nesting", format!("{{\"__metadata__\":{deep}"), 0),
        ("no manifest", ours("5"), 0),
        ("an unknown kind of part", part(r#"{"kind":"x"}"#), 0),
        ("a part without its fields", part(r#"{"kind":"optimizer"}"#), 0),
        ("a long manifest", ours(&" ".repeat(40 << 20)), 0),
        ("an old format without fields", ours(r#"{"format":1}"#), 0),
        ("two manifests", object(&[format!(r#""__metadata__":{{{newer},{newer}}}"#)]), 0),
        ("a checksum that is none", ours(r#"{"format":1,"checksum":"zz"}"#), 0),
    ];
    for (what, header, data) in hostile {
        assert_damaged(&path, &safetensors(&header, data), what);
    }
    let newer = load(&path, &safetensors(&ours(r#"{"format":2,"new":[]}"#), 0));
    assert!(matches!(newer, Err(CheckpointError::Newer { found: 2, supported: 1, .. })));
    for len in [0, 1, 1 << 20, 1 << 40, 1 << 63, u64::MAX] {
        let bytes = [&u64::to_le_bytes(len)[..], b"{}"].concat();
        assert_damaged(&path, &bytes, &format!("a header of {len} bytes"));
    }
    for bytes in [&b""[..], b"PK\x03\x04", b"no checkpoint at all"] {
        assert_damaged(&path, bytes, &format!("{bytes:?}"));
    }
}

#[test]
fn opening_a_missing_file_is_an_error() {
    for path in [Path::new("/nowhere/x.safetensors"), &std::env::temp_dir()] {
        let refused = checkpoint_error(Checkpoint::load(path));
        assert!(matches!(refused, CheckpointError::Io { action: "open", .. }), "{refused:?}");
    }
}
