//! A process that is killed at random times while it replaces a file repeatedly.

use std::fs;
use std::io::{BufRead, BufReader, Seek, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::{Folder, content, fill_with, place, replaced};
use crate::atomic::disk::Real;
use crate::atomic::place::is_temporary;
use crate::atomic::{Replaced, remove_leftovers, replace, replace_on};
use crate::error::{Error, Result};

pub(super) const LENGTH: usize = 1 << 20;
/// A file that is opened right before the system calls under test.
pub(super) const MARKER: &str = "MARKER";
const PIECE: usize = 128 << 10;
/// The role of this process as a child of a test.
const ROLE: &str = "TCH_AMP_ATOMIC_CHILD";
/// The folder for its files.
const FOLDER: &str = "TCH_AMP_ATOMIC_FOLDER";
/// How many system calls of each kind it makes first.
const BEFORE: &str = "TCH_AMP_ATOMIC_BEFORE";

/// Arguments with which this program runs only as a child.
pub(super) fn child(role: &str, folder: &Folder, before: usize, command: &mut Command) {
    let (_, module) = module_path!().split_once("::").unwrap();
    command.arg(format!("{module}::as_a_child"));
    command.args(["--exact", "--nocapture", "--test-threads=1"]);
    command.env(ROLE, role).env(FOLDER, &folder.0).env(BEFORE, before.to_string());
}

/// Does nothing unless another test has started this process.
#[test]
fn as_a_child() {
    let Some(folder) = std::env::var_os(FOLDER).map(PathBuf::from) else { return };
    let path = folder.join("model.bin");
    let saved = match std::env::var(ROLE).unwrap().as_str() {
        "once" => {
            mark(&folder);
            replace(&path, &mut fill_with(&content(2, LENGTH), PIECE))
        }
        "overlapping" => {
            mark(&folder);
            let disk = Real { sync_every: 256 << 10 };
            replace_on(&disk, &place(&path), &mut fill_with(&content(2, LENGTH), PIECE))
        }
        _ => again_and_again(&path),
    };
    std::process::exit(match saved {
        Ok(Replaced::Durable) => 0,
        Ok(Replaced::Uncertain { .. }) => 3,
        Err(Error::Leftover { .. }) => 4,
        Err(_) => 5,
    })
}

/// Marks where the system calls of the replacement begin. Their numbers should be higher than those of other threads.
fn mark(folder: &Path) {
    for _ in 0..std::env::var(BEFORE).unwrap().parse().unwrap() {
        let mut file = fs::OpenOptions::new().write(true).open("/dev/null").unwrap();
        file.write_all(b".").and_then(|()| file.rewind()).and_then(|()| file.metadata()).unwrap();
    }
    drop(fs::File::open(folder.join(MARKER)));
}

/// Replaces the file with ever new versions, and prints each version that was saved.
fn again_and_again(path: &Path) -> Result<Replaced> {
    for version in version(path) + 1.. {
        replaced(replace(path, &mut fill_with(&content(version, LENGTH), PIECE)));
        let mut out = std::io::stdout();
        writeln!(out, "\nsaved {version}").and_then(|()| out.flush()).unwrap();
    }
    Ok(Replaced::Durable)
}

/// The version of a file, which must be complete.
fn version(path: &Path) -> u64 {
    let found = fs::read(path).unwrap();
    let start = u32::from_be_bytes(found[..4].try_into().unwrap());
    let version = u64::from(start) - 1;
    assert!(found == content(version, LENGTH), "version {version} is incomplete");
    version
}

#[test]
fn a_killed_process_leaves_a_complete_file() {
    let kills: u32 = std::env::var("TCH_AMP_KILLS").map_or(40, |kills| kills.parse().unwrap());
    let folder = Folder::new("kills");
    let path = folder.join("model.bin");
    fs::write(&path, content(1, LENGTH)).unwrap();
    let mut random = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64;
    let (mut leftovers, start) = (0, version(&path));
    for _ in 0..kills {
        let mut command = Command::new(std::env::current_exe().unwrap());
        child("loop", &folder, 0, &mut command);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut saved = lines.filter_map(|line| {
            let line = line.unwrap();
            line.strip_prefix("saved ").map(|version| version.parse::<u64>().unwrap())
        });
        let first = saved.next().unwrap();
        random =
            random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        thread::sleep(Duration::from_micros((random >> 33) % 40_000));
        child.kill().unwrap();
        let last = saved.last().unwrap_or(first);
        child.wait().unwrap();
        let found = version(&path);
        assert!(found >= last, "{last} was saved, but {found} is there");
        let names = folder.names();
        let left: Vec<_> = names.iter().filter(|name| *name != "model.bin").collect();
        assert!(left.iter().all(|name| is_temporary(name.as_ref())), "{left:?}");
        leftovers = left.len();
    }
    let versions = version(&path) - start;
    println!("{kills} kills among {versions} versions, {leftovers} temporary files were left");
    assert_eq!(remove_leftovers(&folder.0, Duration::ZERO, |_| true).unwrap(), leftovers);
    assert_eq!(folder.names(), ["model.bin"]);
}
